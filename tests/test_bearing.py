"""How much turns bear on a question, with two-dimensional vectors and sums that can be done by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from lychee_local.bearing import MOST_WORDS, SHORTLIST, Asked, Found, by_words, ranked, shortlist, words
from lychee_local.types import Turn

Rows = npt.NDArray[np.float32]
ONE = math.sqrt(3 / 2)  # the standard score of the highest of three values at equal distances


def said(*lines: str, session: str = "S") -> dict[str, Turn]:
    turns: list[Turn] = []
    for i, line in enumerate(lines):
        speaker, _, text = line.partition(": ")
        turns.append(Turn(session, i, text, "user", speaker))
    return {t.id: t for t in turns}


def reading(rows: Mapping[str, tuple[float, float]]) -> Callable[[Sequence[str]], Rows]:
    return lambda ids: np.array([rows[i] for i in ids], dtype=np.float32)


def asked(text: str) -> Asked:
    return Asked(text, np.array([[1.0, 0.0]], dtype=np.float32))


def test_the_words_of_a_question_come_once_and_without_those_that_only_ask() -> None:
    assert words("When did Ana's dogs meet the dog of Ben?") == ("Ana's", "dogs", "meet", "Ben?")
    assert words("when did you") == ()
    assert words("") == ()


def test_of_very_many_words_several_count_as_one() -> None:
    asked_for = words(" ".join(f"word{chr(97 + n // 26)}{chr(97 + n % 26)}x" for n in range(MOST_WORDS * 2 + 1)))
    assert len(asked_for) == 33  # three at a time
    assert asked_for[0] == "wordaax wordabx wordacx"


def test_turns_by_words_have_the_sum_of_what_each_word_gives() -> None:
    gains = {"red": {"turn:S:0": 1.0, "turn:S:1": 2.5}, "fish": {"turn:S:0": 2.0}}
    assert by_words(gains) == [("turn:S:0", 3.0), ("turn:S:1", 2.5)]


def test_vectors_alone_are_shortlisted_by_cosine_in_standard_scores() -> None:
    short = shortlist(Found({"turn:S:0": 0.1, "turn:S:5": 0.3, "turn:S:9": 0.2}, {}, {}))
    assert short.ids == ("turn:S:5", "turn:S:9", "turn:S:0")
    assert short.signals == pytest.approx(np.array([[ONE, 0.0, -ONE]]))
    assert set(short.around) == {f"turn:S:{i}" for i in (0, 1, 4, 5, 6, 8, 9, 10)}


def test_a_turn_that_only_words_found_counts_as_far_as_the_farthest() -> None:
    short = shortlist(Found({"turn:S:0": 0.4, "turn:S:9": 0.2}, {"red": {"turn:T:3": 1.0}}, {}))
    cosine = dict(zip(short.ids, short.signals[0], strict=True))
    assert cosine["turn:T:3"] == pytest.approx(cosine["turn:S:9"])
    assert cosine["turn:S:0"] == pytest.approx(math.sqrt(2))  # 0.4 among 0.4, 0.2, 0.2


def test_a_session_counts_for_its_best_turn_of_each_word_and_the_number_of_its_turns() -> None:
    gains = {"red": {"turn:S:0": 2.0, "turn:S:9": 1.0, "turn:T:0": 2.0, "turn:U:0": 0.5}}
    short = shortlist(Found({}, gains, {}))
    whole = dict(zip(short.ids, short.signals[1], strict=True))
    in_two, in_one, low = 2.0 * 2 / 3.2, 2.0 * 1 / 2.2, 0.5 * 1 / 2.2
    values = np.array([in_two, in_two, in_one, low])
    expected = (values - values.mean()) / values.std()
    assert [whole[i] for i in ("turn:S:0", "turn:S:9", "turn:T:0", "turn:U:0")] == pytest.approx(list(expected))


def test_the_shortlist_is_no_longer_than_its_bound_and_nothing_gives_nothing() -> None:
    many = {f"turn:S:{i}": 1.0 / (i + 1) for i in range(SHORTLIST + 50)}
    assert shortlist(Found(many, {}, {})).ids == tuple(f"turn:S:{i}" for i in range(SHORTLIST))
    none = Found({}, {}, {})
    assert shortlist(none).ids == ()
    assert ranked(shortlist(none), none, {}, reading({}), asked("red")) == []


def test_what_stands_beside_a_turn_lifts_it() -> None:
    turns = said("Ana: one", "Ana: two", "Ana: three", "Ana: four")
    rows = {"turn:S:0": (0.0, 1.0), "turn:S:1": (0.6, 0.8), "turn:S:2": (0.0, 1.0), "turn:S:3": (1.0, 0.0)}
    found = Found({"turn:S:0": 0.0, "turn:S:2": 0.0}, {}, {})
    order = ranked(shortlist(found), found, turns, reading(rows), asked("red"))
    # Both are as near by themselves; of the three around turn 2 one is the question's own direction.
    assert [i for i, _ in order] == ["turn:S:2", "turn:S:0"]
    assert [score for _, score in order] == pytest.approx([1.0, -1.0])  # of two values each stands one deviation off


def test_words_spread_over_neighbours_count_together() -> None:
    turns = said("Ana: red", "Ana: fish") | said("Ana: red", "Ana: stone", session="T")
    gains = {"red": {"turn:S:0": 1.0, "turn:T:0": 1.0}, "fish": {"turn:S:1": 1.0}}
    found = Found({}, gains, {})
    order = dict(ranked(shortlist(found), found, turns, reading({}), asked("red fish")))
    assert order["turn:S:0"] > order["turn:T:0"]


def test_who_is_asked_about_counts_two_standard_deviations() -> None:
    turns = said("Ana: yes", "Ben: yes")
    found = Found({"turn:S:0": 0.5, "turn:S:1": 0.5}, {}, {})
    same = reading({"turn:S:0": (1.0, 0.0), "turn:S:1": (1.0, 0.0)})
    order = ranked(shortlist(found), found, turns, same, asked("What did Ben say?"))
    assert [i for i, _ in order] == ["turn:S:1", "turn:S:0"]
    assert [score for _, score in order] == pytest.approx([2.0, 0.0])


def test_a_record_lifts_the_turn_it_rests_on_and_a_turn_that_is_gone_is_left_out() -> None:
    found = Found({"turn:S:0": 0.5, "turn:S:4": 0.5, "turn:S:8": 0.5}, {}, {"turn:S:4": 0.9, "turn:S:0": 0.1})
    turns = {i: Turn("S", i, "yes", "user", "Ana") for i in (0, 4)}
    by_id = {t.id: t for t in turns.values()}
    same = reading(dict.fromkeys(by_id, (1.0, 0.0)))
    assert [i for i, _ in ranked(shortlist(found), found, by_id, same, asked("red"))] == ["turn:S:4", "turn:S:0"]

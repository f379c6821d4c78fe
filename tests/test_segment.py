"""Segmentation: the check values of the method's description, the online order, replay, and what is too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lychee_local.errors import BadInput
from lychee_local.segment import (
    Segmenter,
    boundary_signals,
    closed_exchanges,
    embedding_text,
    estimate_tokens,
    exchanges,
)
from lychee_local.settings import SegmentSettings
from lychee_local.types import Calibration, Decision, Exchange, Role, Segment, Turn

PAPER = Calibration()
SIX = (0.30, 0.35, 0.40, 0.42, 0.38, 0.36)


def dialogue(*texts: str, roles: Sequence[Role] = (), session: str = "s") -> list[Turn]:
    roles = roles or ["user"] * len(texts)
    return [Turn(session, i, text, role) for i, (text, role) in enumerate(zip(texts, roles, strict=True))]


def made(index: int, tokens: int, session: str = "s") -> Exchange:
    return Exchange(session, index, index, f"exchange {index}", tokens)


def flat(count: int) -> NDArray[np.float32]:
    """The same direction again and again: no surprise, no cohesion drop."""
    return np.tile(np.array([1.0, 0.0], dtype=np.float32), (count, 1))


def ranges(segments: Sequence[Segment]) -> list[tuple[int, int, str]]:
    return [(segment.start, segment.end, segment.reason) for segment in segments]


# --- tokens and exchanges ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 1),
        ("Hello, world!", 2),  # two words, three other characters
        ("one two  three", 3),
        ("a b c d e", 6),  # five words and four blanks
        ("你好 world", 3),
        ("Привет", 1),  # six letters outside ASCII: 6 // 4
        ("x" * 1_000_000, 1),
    ],
)
def test_token_estimate(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


def test_an_exchange_is_a_user_turn_and_the_replies_to_it() -> None:
    turns = dialogue("hi", "hello", "log", "bye", roles=["user", "assistant", "tool", "user"])
    first, second = exchanges(turns)
    assert (first.start, first.end, first.text) == (0, 2, "user: hi\nassistant: hello\ntool: log")
    assert (second.start, second.end, second.text) == (3, 3, "user: bye")


def test_a_stream_that_starts_with_a_reply_opens_an_exchange_of_its_own() -> None:
    turns = dialogue("welcome", "ask away", "hi", roles=["assistant", "assistant", "user"])
    assert [(x.start, x.end) for x in exchanges(turns)] == [(0, 1), (2, 2)]


def test_speakers_are_named_once() -> None:
    turns = [Turn("s", 0, "Ana: I moved.", speaker="Ana"), Turn("s", 1, "Where?", speaker="Bo")]
    assert [x.text for x in exchanges(turns)] == ["Ana: I moved.", "Bo: Where?"]


def test_blank_turns_add_no_line_and_a_blank_exchange_is_dropped() -> None:
    turns = dialogue("hi", "", "  \n", "bye", roles=["user", "assistant", "user", "user"])
    assert [(x.start, x.end, x.text) for x in exchanges(turns)] == [(0, 1, "user: hi"), (3, 3, "user: bye")]
    assert exchanges(dialogue("", " ", "\u3000")) == ()
    assert exchanges([]) == ()


def test_the_last_exchange_stays_open_until_nothing_more_comes() -> None:
    turns = dialogue("hi", "hello", "bye", roles=["user", "assistant", "user"])
    assert [x.start for x in closed_exchanges(turns, final=False)] == [0]
    assert [x.start for x in closed_exchanges(turns, final=True)] == [0, 2]
    assert closed_exchanges(turns[:2], final=False) == ()


def test_a_long_exchange_is_embedded_by_its_two_ends() -> None:
    text = "a" * 2_000 + "b" * 5 + "c" * 2_000
    assert embedding_text(Exchange("s", 0, 0, text, 1)) == "a" * 2_000 + "\n...\n" + "c" * 2_000
    assert embedding_text(Exchange("s", 0, 0, "a" * 4_000, 1)) == "a" * 4_000


# --- the decision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "d", "tokens", "n", "history", "expected"),
    [
        # s, d, tokens, exchanges, history -> A, R, C, L, N, score, P
        (0.45, 0.05, 120, 3, (), (1.7857, 0, 0.8333, -1.30, 0.15, 0.4107, 0.3342)),
        (0.60, 0.10, 60, 1, (), (2.5, 0, 1.6667, -1.30, -0.85, 0.9500, 0.4626)),
        (0.30, 0.00, 360, 9, (), (0.7143, 0, 0, 0.74, 1.0, 1.4303, 0.5818)),
        (0.15, 0.00, 450, 8, (), (-0.3571, 0, 0, 1.175, 0.9, 1.3275, 0.5566)),
        (0.52, 0.03, 180, 5, SIX, (2.2857, 4.0, 0.5, -1.30, 0.45, 0.6757, 0.3955)),
        (0.62, 0.02, 250, 6, SIX, (2.5, 4.0, 0.3333, -0.4444, 0.6, 1.5550, 0.6118)),
        (0.10, 0.00, 590, 9, (), (-0.7143, 0, 0, 1.8517, 1.0, 1.9665, 0.7040)),
    ],
)
def test_check_values_of_the_boundary_score(
    s: float, d: float, tokens: int, n: int, history: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    signals = boundary_signals(
        surprise=s,
        drop=d,
        tokens=tokens,
        exchanges=n,
        history=history,
        settings=SegmentSettings(),
        calibration=PAPER,
    )
    got = (
        signals.absolute,
        signals.robust,
        signals.cohesion,
        signals.length,
        signals.turns,
        signals.score,
        signals.probability,
    )
    assert got == pytest.approx(expected, abs=5e-5)
    assert (signals.probability >= 0.5) == (signals.score >= 1.10)


def test_surprise_and_cohesion_drop_by_hand() -> None:
    # The third vector stands at a right angle to both the tail and the centroid: s = 1. Before it all vectors agree
    # (cohesion 1); after it the centroid is (2, 1)/sqrt 5 and the cohesion (2 * 2 + 1) / (3 sqrt 5) = 0.745356.
    vectors = np.array([[1, 0], [2, 0], [0, 3]], dtype=np.float32)
    decisions, _ = Segmenter(SegmentSettings(), PAPER).feed([made(i, 20) for i in range(3)], vectors)
    assert [d.signals.surprise for d in decisions if d.signals] == [0.0, 1.0]
    assert decisions[2].signals is not None
    assert decisions[2].signals.drop == pytest.approx(1 - 5 / (3 * 5**0.5), abs=1e-6)


def test_the_tail_alone_can_lower_the_surprise() -> None:
    # The centroid of (1,0) and (0,1) lies at 45 degrees, but the newest exchange is the very same as the tail.
    vectors = np.array([[1, 0], [0, 1], [0, 1]], dtype=np.float32)
    decisions, _ = Segmenter(SegmentSettings(), PAPER).feed([made(i, 20) for i in range(3)], vectors)
    assert [d.signals.surprise for d in decisions if d.signals] == [1.0, 0.0]


def test_a_zero_vector_is_the_greatest_surprise_and_breaks_nothing() -> None:
    vectors = np.array([[1, 0], [0, 0], [0, 0]], dtype=np.float32)
    decisions, _ = Segmenter(SegmentSettings(), PAPER).feed([made(i, 20) for i in range(3)], vectors)
    assert [d.signals.surprise for d in decisions if d.signals] == [1.0, 1.0]


# --- the online order -------------------------------------------------------------------------------------------------


def test_a_new_topic_cuts_before_it() -> None:
    vectors = np.array([[1, 0]] * 6 + [[0, 1]], dtype=np.float32)
    decisions, segments = Segmenter(SegmentSettings(), PAPER).feed([made(i, 45) for i in range(7)], vectors)
    assert ranges(segments) == [(0, 5, "semantic_boundary")]
    assert decisions[6].action == "cut"
    assert decisions[6].signals is not None
    assert segments[0].probability == decisions[6].signals.probability > 0.5
    assert (segments[0].tokens, segments[0].exchanges) == (270, 6)


def test_capacity_is_tested_before_the_boundary_and_its_surprise_counts() -> None:
    segmenter = Segmenter(SegmentSettings(), PAPER)
    decisions, segments = segmenter.feed([made(0, 500), made(1, 450)], np.eye(2, dtype=np.float32))
    assert ranges(segments) == [(0, 0, "capacity_limit")]
    assert segments[0].probability == 1.0
    assert decisions[1].signals is not None
    assert decisions[1].signals.surprise == 1.0


def test_target_length_is_checked_after_appending() -> None:
    _, segments = Segmenter(SegmentSettings(), PAPER).feed([made(0, 200), made(1, 450)], flat(2))
    assert ranges(segments) == [(0, 1, "target_length")]
    _, segments = Segmenter(SegmentSettings(), PAPER).feed([made(0, 900)], flat(1))
    assert ranges(segments) == [(0, 0, "capacity_limit")]


def test_one_step_can_finalise_two_segments() -> None:
    decisions, segments = Segmenter(SegmentSettings(), PAPER).feed([made(0, 400), made(1, 700)], flat(2))
    assert ranges(segments) == [(0, 0, "capacity_limit"), (1, 1, "target_length")]
    assert (decisions[1].action, decisions[1].reason) == ("cut", "capacity_limit")


def test_five_hundred_identical_turns_make_segments_of_ten() -> None:
    xs = exchanges(dialogue(*["the same words"] * 500))
    segmenter = Segmenter(SegmentSettings(), PAPER)
    _, segments = segmenter.feed(xs, flat(500))
    assert len(segments) == 50
    assert {(s.end - s.start + 1, s.reason) for s in segments} == {(10, "exchange_limit")}
    assert segmenter.flush("s") == ()


def test_duplicates_are_skipped_without_a_decision() -> None:
    segmenter = Segmenter(SegmentSettings(), PAPER)
    segmenter.feed([made(0, 20), made(1, 20)], flat(2))
    decisions, segments = segmenter.feed([made(0, 20), made(1, 20), made(2, 20)], flat(3))
    assert [d.exchange.start for d in decisions] == [2]
    assert segments == []
    assert segmenter.watermark("s") == 3


def test_sessions_are_kept_apart() -> None:
    mixed = [made(0, 20, "a"), made(0, 20, "b"), made(1, 20, "a")]
    segmenter = Segmenter(SegmentSettings(), PAPER)
    decisions, _ = segmenter.feed(mixed, np.array([[1, 0], [0, 1], [1, 0]], dtype=np.float32))
    assert [(d.action, d.exchanges_before) for d in decisions] == [("start", 0), ("start", 0), ("append", 1)]
    assert ranges(segmenter.flush("a")) == [(0, 1, "session_flush")]
    assert ranges(segmenter.flush("b")) == [(0, 0, "session_flush")]
    assert segmenter.flush("never seen") == ()


def test_eager_makes_a_segment_of_every_exchange() -> None:
    _, segments = Segmenter(SegmentSettings(trigger="eager"), PAPER).feed([made(i, 20) for i in range(3)], flat(3))
    assert ranges(segments) == [(0, 0, "eager"), (1, 1, "eager"), (2, 2, "eager")]


def test_fixed_windows_ignore_meaning() -> None:
    settings = SegmentSettings(trigger="fixed")
    vectors = np.tile(np.eye(2, dtype=np.float32), (6, 1))
    decisions, segments = Segmenter(settings, PAPER).feed([made(i, 20) for i in range(12)], vectors)
    assert ranges(segments) == [(0, 9, "exchange_limit")]
    assert all(d.signals is None for d in decisions)
    _, segments = Segmenter(settings, PAPER).feed([made(i, 250) for i in range(3)], flat(3))
    assert ranges(segments) == [(0, 2, "target_length")]
    _, segments = Segmenter(settings, PAPER).feed([made(0, 500), made(1, 500)], flat(2))
    assert ranges(segments) == [(0, 0, "capacity_limit")]


# --- batches and restarts ---------------------------------------------------------------------------------------------


class Log:
    """What a store keeps, and a caller that takes turns in as they come."""

    def __init__(self, turns: Sequence[Turn], vectors: NDArray[np.float32]) -> None:
        self.turns = turns
        self.vectors = vectors
        self.decisions: list[Decision] = []
        self.segments: list[Segment] = []

    def take(self, segmenter: Segmenter, upto: int, *, final: bool = False) -> None:
        new = closed_exchanges(self.turns[segmenter.watermark("s") : upto], final=final)
        decisions, segments = segmenter.feed(new, self.vectors[[x.start for x in new]])
        self.decisions += decisions
        self.segments += segments
        if final:
            self.segments += segmenter.flush("s")

    def restart(self, rules: SegmentSettings) -> Segmenter:
        segmenter = Segmenter(rules, PAPER)
        vectors = self.vectors[[d.exchange.start for d in self.decisions]]
        segmenter.replay("s", self.decisions, vectors, self.segments)
        return segmenter


def conversation(seed: int, length: int) -> tuple[list[Turn], NDArray[np.float32]]:
    """Random turns in drifting topics: user and assistant turns, blank ones, some far too long."""
    random = np.random.default_rng(seed)
    turns = []
    for index in range(length):
        role: Role = "user" if random.random() < 0.7 else "assistant"
        words = int(random.choice([0, 5, 30, 80, 400, 2_000], p=[0.1, 0.3, 0.3, 0.2, 0.07, 0.03]))
        turns.append(Turn("s", index, " ".join(["word"] * words), role))
    topics = random.normal(size=(4, 8))
    noise = random.normal(scale=0.6, size=(length, 8))
    vectors = topics[np.arange(length) // 9 % 4] + noise
    return turns, (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1_000), stops=st.lists(st.integers(1, 119), max_size=8), restart=st.booleans())
def test_the_result_depends_neither_on_batches_nor_on_restarts(seed: int, stops: list[int], restart: bool) -> None:
    turns, vectors = conversation(seed, 120)
    rules = SegmentSettings()
    at_once = Log(turns, vectors)
    at_once.take(Segmenter(rules, PAPER), 120, final=True)

    in_parts = Log(turns, vectors)
    segmenter = Segmenter(rules, PAPER)
    for stop in sorted(stops):
        in_parts.take(segmenter, stop)
        if restart:
            segmenter = in_parts.restart(rules)
    in_parts.take(segmenter, 120, final=True)

    assert in_parts.decisions == at_once.decisions
    assert in_parts.segments == at_once.segments


def test_a_flush_forgets_the_surprises_also_for_a_replayed_session() -> None:
    turns, vectors = conversation(7, 60)
    rules = SegmentSettings()
    log = Log(turns, vectors)
    segmenter = Segmenter(rules, PAPER)
    log.take(segmenter, 40, final=True)
    replayed = log.restart(rules)
    rest = closed_exchanges(turns[segmenter.watermark("s") :], final=True)
    rows = vectors[[x.start for x in rest]]
    assert replayed.watermark("s") == segmenter.watermark("s") == 40
    live, again = segmenter.feed(rest, rows), replayed.feed(rest, rows)
    assert live == again
    assert [d.signals.robust for d in live[0] if d.signals][:5] == [0.0] * 5


def test_every_exchange_lies_in_exactly_one_segment() -> None:
    turns, vectors = conversation(3, 120)
    log = Log(turns, vectors)
    log.take(Segmenter(SegmentSettings(), PAPER), 120, final=True)
    covered = [(s.start, s.chars or (0, 0)) for s in log.segments]
    assert covered == sorted(covered)
    assert sum(s.exchanges for s in log.segments) == len(log.decisions)
    assert sum(s.tokens for s in log.segments) == sum(d.exchange.tokens for d in log.decisions)


def test_vectors_must_match_what_they_belong_to() -> None:
    segmenter = Segmenter(SegmentSettings(), PAPER)
    with pytest.raises(ValueError, match="1 exchanges but 2 vectors"):
        segmenter.feed([made(0, 20)], flat(2))
    with pytest.raises(ValueError, match="0 decisions but 2 vectors"):
        segmenter.replay("s", [], flat(2), [])


# --- too long ---------------------------------------------------------------------------------------------------------


def test_an_oversized_exchange_is_split_between_turns() -> None:
    turns = dialogue(*["w " * 300] * 4, roles=["user", "assistant", "assistant", "assistant"])
    # Two turns: 602 words, 604 other characters and a newline: 602 + 605 // 4 = 753 tokens. A third does not fit.
    assert [(x.start, x.end, x.tokens) for x in exchanges(turns)] == [(0, 1, 753), (2, 3, 753)]


def test_an_oversized_turn_becomes_fragments_with_their_place() -> None:
    turns = dialogue("short", "A sentence of six short words. " * 400, "after")
    xs = exchanges(turns)
    fragments = [x for x in xs if x.chars]
    assert {(x.start, x.end) for x in fragments} == {(1, 1)}
    assert all(x.tokens <= 900 for x in fragments)
    assert all(x.text.startswith("user: A sentence") and x.text.rstrip().endswith("words.") for x in fragments)
    assert "".join(turns[1].text[slice(*x.chars)] for x in fragments if x.chars) == turns[1].text

    decisions, segments = Segmenter(SegmentSettings(), PAPER).feed(xs, flat(len(xs)))
    reasons = [s.reason for s in segments]
    assert reasons == ["capacity_limit"] + ["oversized_turn_fragment"] * len(fragments)
    assert [s.chars for s in segments[1:]] == [x.chars for x in fragments]
    assert [d.signals for d in decisions] == [None] * len(decisions)
    assert len({s.id for s in segments}) == len(segments)


def test_paragraphs_are_preferred_to_sentences() -> None:
    paragraph = "One sentence here. And another one. " * 40
    (first, *_) = exchanges(dialogue("\n\n".join([paragraph] * 4)))
    assert first.text.endswith("\n\n")


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "word " * 200_000,
        "你好" * 500_000,
        "これは文です。" * 140_000,
        "ب" * 1_000_000,
        "😀" * 1_000_000,
        "a" + " " * 1_000_000 + "b",
        "\n" * 500_000 + "end",
        "aGVsbG8/d29ybGQ+" * 62_500,
    ],
    ids=["one run", "words", "ideographs", "japanese", "arabic", "emoji", "blanks", "newlines", "base64"],
)
def test_a_megabyte_in_one_turn_is_split_quickly_and_loses_nothing(text: str) -> None:
    started = time.process_time()
    xs = exchanges(dialogue(text))
    assert time.process_time() - started < 2.0
    assert all(x.tokens <= 900 and len(x.text) <= 900 * 12 + 6 for x in xs)
    pieces = [text[slice(*x.chars)] for x in xs if x.chars]
    assert "".join(pieces).split() == text.split() or "".join(pieces) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=400), limit=st.integers(1, 30))
def test_splitting_always_ends_and_keeps_every_visible_character(text: str, limit: int) -> None:
    xs = exchanges(dialogue(text), max_tokens=limit)
    if not text.strip():
        assert xs == ()
    elif all(x.chars for x in xs):
        covered = {i for x in xs if x.chars for i in range(*x.chars)}
        assert all(char.isspace() for i, char in enumerate(text) if i not in covered)
    else:
        assert len(xs) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"history": -1}, {"history_min": 0}, {"history": 3, "history_min": 5}, {"bias": -800.0}, {"trigger": "often"}],
)
def test_settings_that_would_fail_later_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        SegmentSettings(**wrong)


def test_a_run_of_marks_takes_time_in_proportion_to_its_length() -> None:
    def seconds(length: int) -> float:
        began = time.process_time()
        exchanges([Turn("s", 0, "!" * length)])
        return time.process_time() - began

    assert seconds(80_000) < 20 * max(seconds(20_000), 0.005)

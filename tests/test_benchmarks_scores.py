"""The scores, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.porter import stem
from benchmarks.questions import Question
from benchmarks.scores import Interval, Reach, compare, declined, evidence, exact_match, f1, interval, words


def asked(answer: str, category: str = "single", *, answerable: bool = True) -> Question:
    return Question("q", "?", answer, category, (), answerable=answerable)


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The U.S. and the café, for $1,000!", ["us", "café", "for", "1000"]),
        ("An ant and a hand at the theatre", ["ant", "hand", "at", "theatre"]),
        ("self-care / don't\n(ever)", ["selfcare", "dont", "ever"]),
        ("the, a and an", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


# The examples of Porter's paper, step by step, each followed to the end of the algorithm.
PAPER = """
caresses caress  ponies poni  caress caress  cats cat
feed feed  agreed agre  plastered plaster  bled bled  motoring motor  sing sing
conflated conflat  troubled troubl  sized size  hopping hop  tanned tan  falling fall  hissing hiss  fizzed fizz
failing fail  filing file
happy happi  sky sky
relational relat  conditional condit  rational ration  valenci valenc  hesitanci hesit  digitizer digit
conformabli conform  radicalli radic  differentli differ  vileli vile  analogousli analog  vietnamization vietnam
predication predic  operator oper  feudalism feudal  decisiveness decis  hopefulness hope  callousness callous
formaliti formal  sensitiviti sensit  sensibiliti sensibl
triplicate triplic  formative form  formalize formal  electriciti electr  electrical electr  hopeful hope  goodness good
revival reviv  allowance allow  inference infer  airliner airlin  gyroscopic gyroscop  adjustable adjust
defensible defens  irritant irrit  replacement replac  adjustment adjust  dependent depend  adoption adopt
homologou homolog  communism commun  activate activ  angulariti angular  homologous homolog  effective effect
bowdlerize bowdler
probate probat  rate rate  cease ceas  controll control  roll roll
"""
# Where NLTK, with which LoCoMo's official score is computed, departs from it.
DEPARTURES = """
is is  us us  as as  ties tie  tied tie  flies fli  tried tri  try tri  play play  staying stay  say say  use use
news news  dying die  skies sky  succeed succeed  innings inning
hopefully hope  thankfully thank  geology geolog  trilogy trilog  emotionally emot  possibly possibl  one one
"""


@pytest.mark.parametrize("listed", [PAPER, DEPARTURES])
def test_stems(listed: str) -> None:
    pairs = listed.split()
    expected = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert {word: stem(word) for word in expected} == expected


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "question", "expected"),
    [
        # She bought OLD BAKERY / OLD BAKERY on Quay Street: 2 shared of 4 and of 5
        ("She bought the old bakery.", asked("an old bakery on Quay Street"), 4 / 9),
        ("Baking breads", asked("bakes bread"), 1.0),
        ("red, red boat", asked("red boat"), 4 / 5),
        ("", asked("red boat"), 0.0),
        ("the", asked("a"), 0.0),
        ("3", asked("3"), 1.0),
        # of "Yusuf bakes" nothing, of "Ida paints sign" one word of three: 2 * 1 / (1 + 3)
        ("the sign", asked("Yusuf bakes, Ida paints the sign", "multi"), (0 + 1 / 2) / 2),
        ("the sign", asked("Yusuf bakes, Ida paints the sign"), 2 / 6),
        # the best part of the prediction for each: "bread" of three words, and "buns"
        ("fresh rye bread, buns", asked("bread, buns", "multi"), (2 / 4 + 1) / 2),
        ("perhaps", asked("Perhaps; nothing is said about it", "open"), 1.0),
        ("perhaps", asked("Perhaps; nothing is said about it"), 2 / 7),
        ("It is Not Mentioned here.", asked("x", "adversarial", answerable=False), 1.0),
        ("I do not know.", asked("x", "adversarial", answerable=False), 0.0),
        ("x", asked("x", "single-session-user", answerable=False), 0.0),
    ],
)
def test_f1(prediction: str, question: Question, expected: float) -> None:
    assert f1(prediction, question) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "question", "expected"),
    [
        ("The bakery, an OLD one!", asked("old one bakery"), True),
        ("red red boat", asked("red boat"), True),
        ("baking bread", asked("bakes bread"), False),
        ("perhaps", asked("Perhaps; who knows", "open"), True),
        ("No information available", asked("x", answerable=False), True),
        ("x", asked("x", answerable=False), False),
    ],
)
def test_exact_match(prediction: str, question: Question, expected: bool) -> None:
    assert exact_match(prediction, question) is expected


def test_declined() -> None:
    assert declined("There is no information available.")
    assert not declined("There is no such information.")


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_evidence_at_each_cut() -> None:
    shown = [("x",), ("a", "b"), ("a",), (), ("c", "y")]
    assert evidence(shown, ["a", "b", "c", "d", "a"], cuts=(1, 2, 4, 5, 20)) == (
        Reach(1, 0.0, False, False),
        Reach(2, 0.5, True, False),
        Reach(4, 0.5, True, False),
        Reach(5, 0.75, True, False),
        Reach(20, 0.75, True, False),
    )
    assert evidence(shown, ["c", "x"])[0] == Reach(5, 1.0, True, True)
    assert [reach.k for reach in evidence([], ["a"])] == [5, 10, 20]
    with pytest.raises(ValueError, match="leave it out"):
        evidence(shown, [])


# --- means ------------------------------------------------------------------------------------------------------------


def test_interval() -> None:
    # Drawn from a 0 and a 1, the mean is 0 and 1 a quarter of the time each.
    assert interval([0, 1]) == Interval(0.5, 0.0, 1.0, 2)
    assert interval([0.25] * 5) == Interval(0.25, 0.25, 0.25, 5)
    # For a hundred of each, near to the normal's 0.5 +- 1.96 * sqrt(0.25 / 200).
    wide = interval([0.0, 1.0] * 100, seed=3)
    assert (wide.mean, wide.n) == (0.5, 200)
    assert wide.low == pytest.approx(0.5 - 0.0693, abs=0.006)
    assert wide.high == pytest.approx(0.5 + 0.0693, abs=0.006)
    assert wide == interval([0.0, 1.0] * 100, seed=3)
    assert interval([0, 1, 1, 0.5], draws=1_500).n == 4
    with pytest.raises(ValueError, match="no scores"):
        interval([])


def runs(*differences: float) -> tuple[dict[str, float], dict[str, float]]:
    names = [f"q{number}" for number in range(len(differences))]
    return dict(zip(names, differences, strict=True)), dict.fromkeys(names, 0.0)


def test_compare() -> None:
    # Three of three for us: by chance this, or its contrary, comes in 2 of 8 ways to swap. A tie changes nothing.
    ours, theirs = runs(1.0, 1.0, 1.0, 0.0)
    found = compare(ours | {"only ours": 1.0}, theirs | {"only theirs": 0.0})
    assert (found.difference.mean, found.difference.n, found.p, found.left_out) == (0.75, 4, 0.25, 2)
    # 3 - 1 + 1 = 3; of the sums of +-3 +-1 +-1, which are 5, 3, 3, 1 and their contraries, 6 of 8 are as far from 0.
    assert compare(*runs(3.0, -1.0, 1.0)).p == 0.75
    assert compare(*reversed(runs(3.0, -1.0, 1.0))).p == 0.75
    assert compare(*runs(0.0, 0.0)).p == 1.0
    with pytest.raises(ValueError, match="share no question"):
        compare({"a": 1.0}, {"b": 1.0})


def test_swaps_are_drawn_where_there_are_too_many() -> None:
    twenty = runs(*[1.0] * 20)
    assert compare(*twenty, draws=5_000).p == 1 / 5_001  # two of a million ways; none of them drawn
    assert compare(*twenty).difference == Interval(1.0, 1.0, 1.0, 20)
    # Sixteen of twenty: a sign test gives 2 * (1 + 20 + 190 + 1140 + 4845) / 2^20 = 0.0118.
    found = compare(*runs(*[1.0] * 16, *[-1.0] * 4))
    assert found.p == pytest.approx(0.0118, abs=0.004)
    assert found == compare(*runs(*[1.0] * 16, *[-1.0] * 4))


def test_chance_is_not_found_to_be_a_difference() -> None:
    random = np.random.default_rng(11)
    found = [compare(*runs(*random.choice((-1.0, 0.0, 1.0), size=60)), draws=1_000) for _ in range(100)]
    # One in twenty is expected to seem so: more than 12 of a hundred do once in seven hundred times.
    assert sum(each.p < 0.05 for each in found) <= 12
    assert sum(not each.difference.low <= 0 <= each.difference.high for each in found) <= 13

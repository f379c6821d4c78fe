"""The scores of an answer and of what was shown for it, and how sure their means are.

Owns LoCoMo's official score (snap-research/locomo, task_eval/evaluation.py), evidence recall, intervals and the
comparison of two runs. Knows no model: judged accuracy is judge.py's.

The official score looks at the category. Words are compared as Porter stems (porter.py) without articles, "and" and
punctuation. A `multi` answer is split at its commas: each part counts as far as the best part of the prediction has it.
Of an `open` answer only what stands before the first semicolon counts. A question without an answer is answered rightly
by either of two phrases. Every other category, of whichever data set, is scored as a whole.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.porter import stem
from benchmarks.questions import Question

DECLINED = ("no information available", "not mentioned")
CUTS = (5, 10, 20)
DRAWS = 10_000

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LEFT_OUT = re.compile(r"\b(?:a|an|the|and)\b")
_BLOCK = 1_000  # draws that are in memory at a time


# --- answers ---------------------------------------------------------------------------------------------------------


def f1(prediction: str, question: Question) -> float:
    """LoCoMo's score in [0, 1]: token F1, by the rule of the question's category."""
    if not question.answerable:
        return float(declined(prediction))
    if question.category == "multi":
        predicted = prediction.split(",")
        best = [max(_overlap(part, wanted) for part in predicted) for wanted in question.answer.split(",")]
        return sum(best) / len(best)
    return _overlap(prediction, _wanted(question))


def exact_match(prediction: str, question: Question) -> bool:
    """Whether the words are the same, unstemmed, in any order and number, as LoCoMo has it."""
    if not question.answerable:
        return declined(prediction)
    return set(words(prediction)) == set(words(_wanted(question)))


def declined(prediction: str) -> bool:
    """Whether a prediction says in LoCoMo's words that there is no answer."""
    return any(phrase in prediction.lower() for phrase in DECLINED)


def words(text: str) -> list[str]:
    """The words that are compared: lower case, without ASCII punctuation, articles and "and"."""
    return _LEFT_OUT.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _wanted(question: Question) -> str:
    return question.answer.split(";")[0] if question.category == "open" else question.answer


def _overlap(prediction: str, answer: str) -> float:
    """F1 of the two bags of stems; 0 where they share none, or are both empty."""
    predicted, wanted = (Counter(stem(word) for word in words(text)) for text in (prediction, answer))
    shared = (predicted & wanted).total()
    return 2 * shared / (predicted.total() + wanted.total()) if shared else 0.0


# --- evidence --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reach:
    """Of one question: the share of its gold turns, or sessions, that the first `k` items rest on, and whether that is
    any and whether it is all."""

    k: int
    recall: float
    any: bool
    all: bool


def evidence(shown: Sequence[Collection[str]], gold: Collection[str], cuts: Sequence[int] = CUTS) -> tuple[Reach, ...]:
    """How much of `gold` is reached at each cut. `shown` are the items, best first, each as the refs of the turns, or
    the sessions, that it rests on.

    Raises:
        ValueError: there is no gold, so that recall means nothing.
    """
    wanted = set(gold)
    if not wanted:
        raise ValueError("a question without gold evidence has no evidence recall; leave it out")
    found = {k: wanted & set[str]().union(*shown[:k]) for k in cuts}
    return tuple(Reach(k, len(hits) / len(wanted), bool(hits), hits == wanted) for k, hits in found.items())


# --- means -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `n` questions and the borders between which 95 % of its bootstrap draws lie."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours less theirs over the questions that both have. `p` is the two-sided p value of the permutation test: how
    often a difference as large comes up if each question's two scores are swapped by chance. `left_out` questions have
    one score only."""

    difference: Interval
    p: float
    left_out: int


def interval(values: Iterable[float], *, seed: int = 7, draws: int = DRAWS) -> Interval:
    """The percentile bootstrap of a mean (B. Efron, 1979): questions are drawn with replacement, each by itself.

    Raises:
        ValueError: there are no values.
    """
    scores = np.fromiter(values, dtype=np.float64)
    if not scores.size:
        raise ValueError("there are no scores to take the mean of")
    random = np.random.default_rng(seed)
    means = np.concatenate(
        [scores[random.integers(scores.size, size=(rows, scores.size))].mean(axis=1) for rows in _blocks(draws)]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return Interval(float(scores.mean()), float(low), float(high), scores.size)


def compare(ours: Mapping[str, float], theirs: Mapping[str, float], *, seed: int = 7, draws: int = DRAWS) -> Comparison:
    """Two runs by the scores of their questions.

    Raises:
        ValueError: they share no question.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError("the two runs share no question; compare runs on the same data")
    differences = np.array([ours[name] - theirs[name] for name in shared], dtype=np.float64)
    left_out = len(ours.keys() ^ theirs.keys())
    return Comparison(
        interval(differences, seed=seed, draws=draws), _permutation(differences, seed=seed, draws=draws), left_out
    )


def _permutation(differences: NDArray[np.float64], *, seed: int, draws: int) -> float:
    """The share of ways to swap whose sum is as far from 0: of all ways where they are no more than `draws`, else of
    that many drawn, with the one that happened counted among them."""
    moved = differences[differences != 0]
    observed = abs(moved.sum()) - 1e-9  # sums of the same terms in another order differ in their last digits
    if 2**moved.size <= draws:
        signs = np.array(list(product((-1.0, 1.0), repeat=moved.size))).reshape(2**moved.size, moved.size)
        return float((abs(signs @ moved) >= observed).mean())
    random = np.random.default_rng(seed)
    as_far = sum(
        int((abs(random.choice((-1.0, 1.0), size=(rows, moved.size)) @ moved) >= observed).sum())
        for rows in _blocks(draws)
    )
    return (as_far + 1) / (draws + 1)


def _blocks(draws: int) -> list[int]:
    return [min(_BLOCK, draws - start) for start in range(0, draws, _BLOCK)]

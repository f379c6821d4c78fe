"""The layouts by name, and which questions of a file are asked.

A file may hold more than the memory does, so questions are chosen in a first reading, by their values, and their
conversations read again:

    chosen = choose(q for c in read(layout, path) for q in c.questions, sample=100, seed=7)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import lines, locomo, longmemeval
from benchmarks.questions import Conversation, Question, Report, refuse

LAYOUTS: dict[str, Callable[..., Iterator[Conversation]]] = {
    "locomo": locomo.read,
    "longmemeval": longmemeval.read,
    "lines": lines.read,
}


def read(
    layout: str,
    path: Path,
    wanted: Collection[str] = (),
    *,
    on_problem: Report = refuse,
    adversarial: bool = False,
    corrections: Path | None = None,
) -> Iterator[Conversation]:
    """The conversations of a file, one at a time; the last two options are LoCoMo's alone.

    Raises:
        ValueError: there is no such layout, it has no such option, or the file cannot be used.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}; there are {', '.join(LAYOUTS)}")
    if layout == "locomo":
        return locomo.read(path, wanted, on_problem=on_problem, adversarial=adversarial, corrections=corrections)
    if adversarial or corrections:
        raise ValueError(f"adversarial questions and corrections are LoCoMo's; the layout {layout} has neither")
    return LAYOUTS[layout](path, wanted, on_problem=on_problem)


def choose(
    questions: Iterable[Question],
    *,
    categories: Collection[str] = (),
    sample: int | None = None,
    seed: int = 0,
    limit: int | None = None,
) -> tuple[Question, ...]:
    """The questions of these categories, of those a sample, of that the first `limit`; in the order of the file.

    Raises:
        ValueError: a category that no question has, or a number below one.
    """
    every = tuple(questions)
    there_are = dict.fromkeys(question.category for question in every)
    if unknown := [name for name in categories if name not in there_are]:
        raise ValueError(f"no question of category {', '.join(unknown)}; there are {', '.join(there_are)}")
    for name, number in (("sample", sample), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; ask for one question at least")
    chosen = tuple(question for question in every if not categories or question.category in categories)
    if sample is not None:
        ids = {question.id for question in balanced(chosen, sample, seed)}
        chosen = tuple(question for question in chosen if question.id in ids)
    return chosen[:limit]


def balanced(questions: Sequence[Question], n: int, seed: int) -> tuple[Question, ...]:
    """`n` questions, as many of each category as there are or the others have; all of them where there are fewer.

    Drawn in rounds, one of each category that has one left, by the hash of seed and id. So the same seed draws the same
    everywhere, and a smaller sample is part of every larger one.
    """
    rank = {question.id: hashlib.sha256(f"{seed}\0{question.id}".encode()).digest() for question in questions}
    drawn: Counter[str] = Counter()
    rounds: dict[str, int] = {}
    for question in sorted(questions, key=lambda q: rank[q.id]):
        rounds[question.id] = drawn[question.category]
        drawn[question.category] += 1
    return tuple(sorted(questions, key=lambda q: (rounds[q.id], rank[q.id]))[:n])

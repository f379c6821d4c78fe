"""What a run is asked to do, and where it keeps things. Owns the values alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import datasets
from benchmarks.peers.server import CONTEXT
from benchmarks.questions import Conversation, Report


@dataclass(frozen=True, slots=True)
class Setup:
    """What is run. `records`: who encodes, where the method has records at all. `budget`: tokens of evidence, and
    `items` of them, None for the method's own number. Without `answers` only the evidence is looked at."""

    layout: str
    data: str
    method: str
    profile: str = "laptop"
    records: Literal["model", "rules"] = "model"
    answers: bool = True
    budget: int | None = 1_800
    items: int | None = None
    conversations: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    sample: int | None = None
    seed: int = 0
    limit: int | None = None
    adversarial: bool = False
    corrections: str | None = None

    def __post_init__(self) -> None:
        for name, number in (("budget", self.budget), ("items", self.items)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; ask for one at least, or leave it out")

    def read(self, on_problem: Report) -> Iterator[Conversation]:
        """
        Raises:
            ValueError: the file cannot be used.
        """
        corrections = None if self.corrections is None else Path(self.corrections)
        return datasets.read(
            self.layout,
            Path(self.data),
            self.conversations,
            on_problem=on_problem,
            adversarial=self.adversarial,
            corrections=corrections,
        )

    def chosen(self, on_problem: Report) -> frozenset[str]:
        """The ids of the questions that are asked.

        Raises:
            ValueError: the file cannot be used, or nothing in it is chosen.
        """
        every = (question for conversation in self.read(on_problem) for question in conversation.questions)
        found = datasets.choose(every, categories=self.categories, sample=self.sample, seed=self.seed, limit=self.limit)
        if not found:
            raise ValueError(f"{self.data} has no question that is chosen; ask for other conversations or categories")
        return frozenset(question.id for question in found)


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run finds its models and keeps what other runs can use: memories, vectors; and for peers, in which
    interpreters they and the server run (None: ours), with how many tokens of context, and how many seconds a reply may
    take. `threads` are those of the language model, on which its last digits depend; None: all."""

    out: Path
    stores: Path
    models: Path | None = None
    peer_python: Path | None = None
    server_python: Path | None = None
    peer_context: int = CONTEXT
    peer_patience: float = 1_800.0
    threads: int | None = None

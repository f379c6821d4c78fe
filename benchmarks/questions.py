"""What every layout of a data set is read into: conversations, their questions, and what was odd in the file.

Owns the values alone; how a file becomes them is the business of the layouts (locomo.py, longmemeval.py, lines.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from lychee_local import Message

# The answer to a question that the conversation does not answer, where the file has no words of its own for it.
NOT_MENTIONED = "Not mentioned in the conversation"


@dataclass(frozen=True, slots=True)
class Question:
    """`gold` are the refs of the turns that answer it, `sessions` the sessions that do; empty means that the file names
    none that exists. `asked` is when the question is put, None where that is unknown. A question that is not
    `answerable` is answered rightly by saying so, and `answer` then says what is missing."""

    id: str
    text: str
    answer: str
    category: str
    gold: tuple[str, ...]
    sessions: tuple[str, ...] = ()
    asked: datetime | None = None
    answerable: bool = True


@dataclass(frozen=True, slots=True)
class Fact:
    """One annotated observation: a sentence about a speaker and the refs of the turns it was drawn from."""

    text: str
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the order in which they were said; every one has a session and a ref."""

    id: str
    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a data file that reading can go on without: `what` is wrong, and what was done about it."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Report = Callable[[Problem], None]


def refuse(problem: Problem) -> None:
    """What a reader does about a problem that nobody takes.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{problem} (pass `on_problem` to go on)")


def warn(problem: Problem) -> None:
    """For commands that go on: the problem on a line of stderr."""
    print(problem, file=sys.stderr)

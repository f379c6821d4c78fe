"""Stand-ins for the three kinds of model, with numbers that can be computed by hand. No weights, no engine, no clock.

Public, so that programs built on lychee_local can test themselves as fast as it tests itself. Refuses to be clever: a
fake LLM says what it was told to say and counts words; a fake embedder counts words; a fake reranker counts words.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from lychee_local.backends import Request, Vectors
from lychee_local.errors import BadInput, ConstraintNotApplied, GenerationFailed, ModelError, PromptTooLong
from lychee_local.types import Calibration, ChatMessage, Completion, Purpose, Usage

Finish = Literal["stop", "length", "loop"]
Reply = str | tuple[str, Finish]


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One call that a `FakeLLM` received."""

    messages: tuple[ChatMessage, ...]
    purpose: Purpose
    max_tokens: int
    schema: type[BaseModel] | None

    @property
    def prompt(self) -> str:
        """All contents, one after the other, each on its own lines."""
        return "\n".join(message.content for message in self.messages)


class FakeLLM:
    """An LLM whose tokens are words (runs of characters without white space) and whose replies you write.

    `replies` is a list, used one a call in order, or a function of the `FakeCall`. A reply is a text, or a text with
    the finish reason to report, to play a cut or looping output. A reply of more than `max_tokens` words is cut there
    and finishes with "length". `calls` holds every call that was answered, in order.

    Raises (from `complete`):
        PromptTooLong: words of the prompt plus `max_tokens` exceed `context`.
        ConstraintNotApplied: a complete reply does not validate against the schema of the call: a test's mistake,
            because a real model under the constraint cannot say it.
        GenerationFailed: the list of replies is used up.
        ModelError: the object is closed.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[FakeCall], Reply],
        *,
        name: str = "fake",
        context: int = 8192,
        prompt_style: Literal["full", "compact"] = "full",
    ) -> None:
        self.name = name
        self.context = context
        self.prompt_style: Literal["full", "compact"] = prompt_style
        self.calls: list[FakeCall] = []
        self._replies = replies
        self._closed = False

    def count(self, messages: Sequence[ChatMessage]) -> int:
        return sum(len(message.content.split()) for message in messages)

    def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        purpose: Purpose,
        max_tokens: int,
        schema: type[BaseModel] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        if self._closed:
            raise ModelError(f"the model {self.name} is closed", hint="open a new one")
        if max_tokens < 1:
            raise BadInput(f"max_tokens must be at least 1, not {max_tokens}")
        if not messages:
            raise BadInput("a prompt needs at least one message")
        prompt_tokens = self.count(messages)
        if prompt_tokens + max_tokens > self.context:
            raise PromptTooLong(
                f"a prompt of {prompt_tokens} tokens and {max_tokens} for the output exceed "
                f"the context of {self.name}, {self.context} tokens"
            )
        call = FakeCall(tuple(messages), purpose, max_tokens, schema)
        text, finish = self._reply(call)
        pieces = re.findall(r"\s*\S+\s*", text)
        if len(pieces) > max_tokens:
            pieces, finish = pieces[:max_tokens], "length"
            text = "".join(pieces)
        if schema is not None and finish == "stop":
            _validate(schema, text)
        self.calls.append(call)
        if on_text is not None:
            for piece in pieces:
                on_text(piece)
        outcome = "ok" if finish == "stop" else finish
        return Completion(text, finish, Usage(purpose, self.name, prompt_tokens, len(pieces), outcome=outcome))

    @contextmanager
    def batch(self, width: int) -> Iterator[FakeBatch]:
        yield FakeBatch(self)

    def close(self) -> None:
        self._closed = True

    def _reply(self, call: FakeCall) -> tuple[str, Finish]:
        if callable(self._replies):
            reply = self._replies(call)
        elif len(self.calls) < len(self._replies):
            reply = self._replies[len(self.calls)]
        else:
            raise GenerationFailed(f"the fake model was given {len(self._replies)} replies and was called once more")
        return reply if isinstance(reply, tuple) else (reply, "stop")


class FakeBatch:
    """Answers one request a step, the oldest first."""

    def __init__(self, llm: FakeLLM) -> None:
        self._llm = llm
        self._waiting: deque[tuple[int, Request]] = deque()
        self._tickets = count()

    def submit(self, request: Request) -> int:
        ticket = next(self._tickets)
        self._waiting.append((ticket, request))
        return ticket

    def advance(self) -> Sequence[tuple[int, Completion | Exception]]:
        if not self._waiting:
            return []
        ticket, request = self._waiting.popleft()
        try:
            answer: Completion | Exception = self._llm.complete(
                request.messages, purpose=request.purpose, max_tokens=request.max_tokens, schema=request.schema
            )
        except (PromptTooLong, GenerationFailed) as error:
            answer = error
        return [(ticket, answer)]


def _validate(schema: type[BaseModel], text: str) -> None:
    try:
        schema.model_validate_json(text)
    except ValidationError as error:
        raise ConstraintNotApplied(f"a fake reply does not fit {schema.__name__}: {error}") from error


class HashEmbedder:
    """Bag of words: each casefolded word adds 1 to one axis, and the row is scaled to length 1.

    The axis of a word is the first eight bytes of its SHA-256, big-endian, modulo `dimension`. So two texts of n and m
    distinct words that share s of them have the cosine s / sqrt(n m), unless words collide on an axis: `axis` tells.
    A text without letters or digits counts what stands between its blanks instead, so that an emoji has a vector too.

    Raises (from `embed`):
        BadInput: a text is empty or blank.
    """

    def __init__(self, dimension: int = 64, *, calibration: Calibration | None = None) -> None:
        if dimension < 1:
            raise BadInput(f"dimension must be at least 1, not {dimension}")
        self.name = f"hash-{dimension}"
        self.digest = hashlib.sha256(self.name.encode()).hexdigest()
        self.dimension = dimension
        self.calibration = Calibration() if calibration is None else calibration

    def axis(self, word: str) -> int:
        digest = hashlib.sha256(word.casefold().encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") % self.dimension

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        rows = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            tokens = _words(text) or text.split()
            if not tokens:
                raise BadInput("an empty text has no embedding")
            for token in tokens:
                row[self.axis(token)] += 1.0
            row /= np.linalg.norm(row)
        return rows


class OverlapReranker:
    """Relevance is the share of the question's distinct words that occur in the passage; 0 for a wordless question."""

    name = "overlap"

    def score(self, question: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        wanted = set(_words(question))
        shares = [len(wanted & set(_words(passage))) / len(wanted) if wanted else 0.0 for passage in passages]
        return np.asarray(shares, dtype=np.float32)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())

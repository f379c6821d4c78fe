"""The only package that loads models. Three small protocols; everything else in lychee_local sees only these.

Real adapters: `llama.LlamaLLM`, `sentences.SentenceEmbedder`, `bge.CrossEncoder`. Fakes with numbers that can be
computed by hand: `fake.FakeLLM`, `fake.HashEmbedder`, `fake.OverlapReranker`. Adapters import their engine inside the
constructor, so that importing lychee_local stays cheap and works where an engine is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from lychee_local.types import Calibration, ChatMessage, Completion, Purpose

T = TypeVar("T")
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as `LLM.complete` takes it."""

    messages: Sequence[ChatMessage]
    purpose: Purpose
    max_tokens: int
    schema: type[BaseModel] | None = None


# Work that needs generations: it yields each request, is given the completion or the error that came instead, and
# returns what it made of them. `jobs` runs one, or many side by side.
Job = Generator[Request, Completion, T]


class Batch(Protocol):
    """Generations of one model, side by side."""

    def submit(self, request: Request) -> int:
        """Take in a request, and give the number under which `advance` will answer it. It waits for room."""
        ...

    def advance(self) -> Sequence[tuple[int, Completion | Exception]]:
        """Decode until at least one request has ended: each with its completion, or with the `PromptTooLong` or
        `GenerationFailed` that `LLM.complete` would have raised. Nothing only where no request is left.

        Raises:
            ConstraintNotApplied: the constraint failed; nothing of this batch can be trusted.
        """
        ...


class LLM(Protocol):
    """A local instruct model. Temperature 0, fixed seed; calls on one object are serialised by a lock."""

    name: str
    context: int
    prompt_style: Literal["full", "compact"]

    def count(self, messages: Sequence[ChatMessage]) -> int:
        """Tokens of the whole prompt after the chat template, by the model's own tokenizer."""
        ...

    def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        purpose: Purpose,
        max_tokens: int,
        schema: type[BaseModel] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Generate greedily. With a schema every complete output is a JSON text that it validates.

        Check `finish` before parsing: at the token limit ("length") or in a repetition ("loop") the JSON is cut.
        `on_text` receives each new piece of text as it is decoded.

        Raises:
            PromptTooLong: the prompt plus `max_tokens` exceeds `context`.
            ConstraintNotApplied: the constraint failed while it was generating.
        """
        ...

    def batch(self, width: int) -> AbstractContextManager[Batch]:
        """Up to `width` generations side by side, which on a CPU cost less than one after the other. No other call on
        this object until it is left. The texts are those of `complete`, up to the last digits of sums of floats, which
        depend on how many sequences are decoded together; the same requests in the same order give the same texts.
        """
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """Text to unit vectors. `digest` is the SHA-256 of the weights: two embedders of one name are still told apart."""

    name: str
    digest: str
    dimension: int
    calibration: Calibration

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        """Float32 of shape (len(texts), dimension), rows of length 1. A text past the model's window is split by the
        model's own tokenizer and its pieces averaged, so its last sentence still counts."""
        ...


class Reranker(Protocol):
    """A cross-encoder."""

    name: str

    def score(self, question: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        """Relevance of each passage in [0, 1], shape (len(passages),). A passage is cut to fit, the question never."""
        ...

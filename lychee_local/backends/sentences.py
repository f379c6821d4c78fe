"""Embedding texts as people write them, over an encoder that takes what fits its window.

Owns what encoders leave open: texts longer than the window, characters a tokenizer cannot take, rows that are no unit
vectors, texts that come again, questions that come again. Knows no model: `bert.Bert` and `bge.TorchEncoder` are the
encoders, and with the same weights they give the same vectors up to the last digits of sums of floats.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from lychee_local.backends import Vectors
from lychee_local.errors import BadInput, GenerationFailed, ModelDamaged
from lychee_local.types import Calibration

_QUERY_CACHE = 256


class Encoder(Protocol):
    """Texts to vectors of any length but nought. `limit` is how many tokens one may have, its marks among them."""

    limit: int

    def count(self, text: str) -> int:
        """Tokens of one text with the model's own marks around it."""
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Float32 of shape (len(texts), dimension), for at least one text, none longer than `limit`."""
        ...


class SentenceEmbedder:
    """Text to unit vectors (see `backends.Embedder`).

    `query_prefix` goes before every window of a query and before no passage. A text longer than the encoder's limit is
    split near white space into windows of similar length, and their vectors are averaged.

    `name` and `digest` are those of the weights, whatever computes with them: vectors of two encoders have a cosine of
    0.999999 or more (tests/test_bert.py), so a memory written through one is read through the other as it is.

    For embedding only, a lone surrogate is read as "?" and NUL as a space; what is stored and shown is not touched.

    Raises:
        ModelDamaged: the vectors have another dimension than the card says.
        GenerationFailed: the model makes vectors of zeros, or of no numbers.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        name: str,
        digest: str,
        calibration: Calibration,
        query_prefix: str = "",
        dimension: int | None = None,
    ) -> None:
        self.name = name
        self.digest = digest
        self.calibration = calibration
        self._encoder = encoder
        self._prefix = query_prefix
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):  # a child of a fork would wait for a thread that it does not have
            os.register_at_fork(after_in_child=_Renewed(self))
        self._queries: OrderedDict[str, npt.NDArray[np.float32]] = OrderedDict()
        self.dimension = _unit_rows(encoder.encode(["dimension"])).shape[1]
        if dimension is not None and self.dimension != dimension:
            raise ModelDamaged(
                f"{name} makes vectors of {self.dimension} dimensions, its card says {dimension}",
                hint="is its folder another model's?",
            )

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        """See `backends.Embedder.embed`. Equal texts are computed once; the last queries are remembered.

        Raises:
            BadInput: a text is empty or blank.
            GenerationFailed: the model made a vector of zeros, or of no numbers.
        """
        clean = [legible(text) for text in texts]
        if "" in clean:
            raise BadInput(f"text {clean.index('') + 1} of {len(clean)} is empty: an empty text has no embedding")
        rows = np.empty((len(clean), self.dimension), dtype=np.float32)
        with self._lock:
            known = self._queries if kind == "query" else {}
            missing = [text for text in dict.fromkeys(clean) if text not in known]
            fresh = dict(zip(missing, self._embed_long(missing, self._prefix if kind == "query" else ""), strict=True))
            for row, text in zip(rows, clean, strict=True):
                row[:] = fresh[text] if text in fresh else known[text]
            if kind == "query":
                self._remember(clean, fresh)
        return rows

    def _remember(self, queries: Sequence[str], fresh: dict[str, npt.NDArray[np.float32]]) -> None:
        for query in queries:
            if query in fresh:
                self._queries[query] = fresh[query]
            self._queries.move_to_end(query)
        while len(self._queries) > _QUERY_CACHE:
            self._queries.popitem(last=False)

    def _embed_long(self, texts: Sequence[str], prefix: str) -> list[npt.NDArray[np.float32]]:
        if not texts:
            return []
        windows = [[prefix + window for window in self._windows(text, prefix)] for text in texts]
        flat = _unit_rows(self._encoder.encode([window for each in windows for window in each]))
        ends = np.cumsum([len(each) for each in windows])
        return [
            rows[0] if len(rows) == 1 else _unit_rows(rows.mean(axis=0, keepdims=True))[0]
            for rows in (flat[end - len(each) : end] for each, end in zip(windows, ends, strict=True))
        ]

    def _windows(self, text: str, prefix: str) -> list[str]:
        tokens = self._encoder.count(prefix + text)
        if tokens <= self._encoder.limit or len(text) < 2:
            return [text]
        # Pieces are even in characters, not in tokens, so each gets a tenth of its room to spare; one that is too long
        # all the same is split again, and each time it shrinks.
        room = max(1, (self._encoder.limit - self._encoder.count(prefix)) * 9 // 10)
        pieces = min(max(2, -(-tokens // room)), len(text))
        return [window for piece in _split(text, pieces) for window in self._windows(piece, prefix)]


class _Renewed:
    """Gives an embedder a new lock; holds it weakly, since what is registered at a fork stays for good."""

    def __init__(self, embedder: SentenceEmbedder) -> None:
        self._embedder = weakref.ref(embedder)

    def __call__(self) -> None:
        if (embedder := self._embedder()) is not None:
            embedder._lock = threading.Lock()


def legible(text: str) -> str:
    """What of a text a tokenizer can take, without the white space around it."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", " ").strip()


def _split(text: str, pieces: int) -> list[str]:
    """Parts of similar length, cut at white space where there is some in the second half of a part."""
    parts: list[str] = []
    start = 0
    for left in range(pieces, 0, -1):
        end = start + -(-(len(text) - start) // left)
        space = text.rfind(" ", (start + end) // 2, end) if left > 1 else -1
        end = space if space > start else end
        parts.append(text[start:end].strip())
        start = end
    return [part for part in parts if part]


def _unit_rows(rows: Vectors) -> Vectors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths == 0.0).any():
        raise GenerationFailed(
            "the embedder made a vector of zeros or of no numbers", hint="its file is damaged: lychee models verify"
        )
    unit: Vectors = (rows / lengths).astype(np.float32, copy=False)
    return unit

"""An embedder that embeds each text once, for all runs that share a file: seven ways to cut a conversation, or six ways
to encode it, embed nearly the same texts, and on a CPU embedding is most of the time of a run without a model.
Questions are embedded each time, since what they take is measured."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from lychee_local.backends import Embedder, Vectors


class StoredVectors:
    """`embedder` with its vectors kept in the SQLite file at `path`; the same in every other respect."""

    def __init__(self, embedder: Embedder, path: Path) -> None:
        self.name, self.digest = embedder.name, embedder.digest
        self.dimension, self.calibration = embedder.dimension, embedder.calibration
        self._embedder = embedder
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(path, timeout=60)
        self._file.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, row BLOB) WITHOUT ROWID")

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        if kind == "query":  # what a question takes is measured
            return self._embedder.embed(texts, kind=kind)
        keys = [hashlib.sha256(f"{self.digest}\0{kind}\0{text}".encode()).digest() for text in texts]
        rows = {key: row for key in dict.fromkeys(keys) if (row := self._row(key)) is not None}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in rows}
        if new:
            made = self._embedder.embed(list(new.values()), kind=kind)
            rows |= dict(zip(new, made, strict=True))
            with self._file:
                pairs = ((key, np.asarray(rows[key], dtype=np.float32).tobytes()) for key in new)
                self._file.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", pairs)
        return np.stack([rows[key] for key in keys]) if keys else np.zeros((0, self.dimension), dtype=np.float32)

    def close(self) -> None:
        self._file.close()

    def _row(self, key: bytes) -> Vectors | None:
        found = self._file.execute("SELECT row FROM vectors WHERE key = ?", (key,)).fetchone()
        return None if found is None else np.frombuffer(found[0], dtype=np.float32)

"""Another embedder for a whole memory: every line again, each with a new vector.

Owns which text stands behind each vector, and the file of vectors made so far, so that an interrupted run goes on where
it stopped. That file says nothing of the texts but a hash each. It bears the name of the epoch that it is made from,
lies beside it and goes with it: with the switch, or with any other rewriting.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from lychee_local.errors import BadInput
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.codec import DecisionLine, EncodingLine, NodeLine, TurnLine
from lychee_local.store.disk import Disk
from lychee_local.store.epoch import Batch, row_bytes
from lychee_local.store.forget import Report
from lychee_local.store.living import living
from lychee_local.store.manifest import EmbedderIdentity, Manifest, Precision
from lychee_local.store.nodes import label_text
from lychee_local.store.vectors import Vectors, unit_rows
from lychee_local.types import Exchange, Node, Turn

Embed = Callable[[Sequence[str]], Vectors]
ExchangeText = Callable[[Exchange, Sequence[Turn]], str]

MADE = ".vectors"  # behind the name of the epoch that they are made from
_HASH = 16


class Embedded:
    """Vectors of texts under a new embedder, kept on disk until the switch."""

    def __init__(self, epoch: Path, embedder: EmbedderIdentity, embed: Embed, disk: Disk) -> None:
        """`epoch` is the folder of what is embedded anew."""
        self._path = epoch.with_name(epoch.name + MADE)
        self._embedder = embedder
        self._embed = embed
        self._disk = disk
        self._made: dict[bytes, int] = {}
        self._size = _HASH + 4 * embedder.dimension + 4

    def __enter__(self) -> Self:
        """Takes up what an interrupted run with the same embedder has made.

        Raises:
            OSError: the disk does not take it.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_up()
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def _take_up(self) -> None:
        head = hashlib.sha256(f"{self._embedder.name}\0{self._embedder.digest}".encode()).digest()
        if os.pread(self._fd, len(head), 0) != head:
            self._disk.truncate(self._fd, 0)
            self._disk.write(self._fd, head, 0)
        self._end = len(head)
        while len(entry := os.pread(self._fd, self._size, self._end)) == self._size:
            if zlib.crc32(entry[:-4]) != int.from_bytes(entry[-4:], "little"):
                break  # the process was killed while it wrote this one
            self._made[entry[:_HASH]] = self._end
            self._end += self._size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Raises BadInput where `embed` gives anything but unit vectors, one a text."""
        keys = [hashlib.sha256(text.encode()).digest()[:_HASH] for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._made}
        if new:
            rows = unit_rows(self._embed(list(new.values())), self._embedder.dimension, "the new embedder")
            if len(rows) != len(new):
                raise BadInput(f"the new embedder gave {len(rows)} vectors for {len(new)} texts")
            entries = [key + row.astype("<f4").tobytes() for key, row in zip(new, rows, strict=True)]
            data = b"".join(entry + zlib.crc32(entry).to_bytes(4, "little") for entry in entries)
            self._disk.write(self._fd, data, self._end)
            self._made.update((key, self._end + self._size * n) for n, key in enumerate(new))
            self._end += len(data)
        found = b"".join(os.pread(self._fd, self._size - _HASH - 4, self._made[key] + _HASH) for key in keys)
        vectors: Vectors = np.frombuffer(found, dtype="<f4").reshape(len(texts), self._embedder.dimension)
        return vectors

    def anew(
        self,
        catalogue: Catalogue,
        manifest: Manifest,
        folder: Path,
        precision: Precision,
        exchange_text: ExchangeText,
        on_progress: Report | None,
    ) -> Iterator[Batch]:
        """Everything living, as `living` gives it, with vectors of the new embedder in `precision`."""
        total = sum(manifest.files[name].count for name in files.ROW_FILES)
        done = 0
        for batch in living(folder, manifest, catalogue):
            made = _Again(catalogue, exchange_text, batch, self.vectors, precision).batch
            done += sum(map(len, made.rows.values()))
            if on_progress is not None:
                on_progress(done, total)
            yield made


class _Again:
    """One batch with other vectors."""

    def __init__(
        self,
        catalogue: Catalogue,
        exchange_text: ExchangeText,
        batch: Batch,
        vectors: Callable[[Sequence[str]], Vectors],
        precision: Precision,
    ) -> None:
        self._catalogue = catalogue
        self._vectors = vectors
        self._precision = precision
        self.batch = Batch(lines=dict(batch.lines))
        turns = [codec.decode(TurnLine, line).turn for line in batch.lines.get(files.TURNS, ())]
        if turns:
            checks = self._rows(files.TURN_ROWS, [t.line for t in turns])
            self._lines(files.TURNS, [TurnLine(t, c) for t, c in zip(turns, checks, strict=True)])
        decided = [codec.decode(DecisionLine, line).decision for line in batch.lines.get(files.DECISIONS, ())]
        if decided:
            texts = [exchange_text(d.exchange, self._turns_of(d.exchange)) for d in decided]
            checks = self._rows(files.DECISION_ROWS, texts)
            self._lines(files.DECISIONS, [DecisionLine(d, c) for d, c in zip(decided, checks, strict=True)])
        encoded = [codec.decode(EncodingLine, line) for line in batch.lines.get(files.ENCODINGS, ())]
        if encoded:
            checks = self._rows(files.RECORD_ROWS, [r.embedded_text for e in encoded for r in e.records])
            each = iter(checks)
            self._lines(files.ENCODINGS, [replace(e, rows=tuple(next(each) for _ in e.records)) for e in encoded])
        nodes = [codec.decode(NodeLine, line) for line in batch.lines.get(files.NODES, ())]
        if nodes:
            checks = self._rows(files.NODE_ROWS, [self._label(n) for n in nodes])
            self._lines(files.NODES, [replace(n, row=c) for n, c in zip(nodes, checks, strict=True)])

    def _rows(self, name: str, texts: Sequence[str]) -> list[int]:
        rows = self._vectors(texts)
        self.batch.rows[name] = rows
        return [zlib.crc32(row) for row in row_bytes(rows, self._precision)]

    def _lines(self, name: str, values: Sequence[object]) -> None:
        self.batch.lines[name] = [codec.encode(value) for value in values]

    def _turns_of(self, exchange: Exchange) -> list[Turn]:
        numbers = self._catalogue.turn_numbers(exchange.session, exchange.start, exchange.end + 1)
        return [self._catalogue.turn(number) for number in numbers]

    def _label(self, line: NodeLine) -> str:
        node = Node(line.kind, line.key, line.label, ())
        encoding = self._catalogue.encoding_of(f"segment:{line.key}") if line.kind == "event_frame" else None
        return label_text(node, () if encoding is None else self._catalogue.encoding(encoding).records)

"""What of an epoch is living, as batches for another one.

Owns the one way through a whole memory: compaction, reindexing and export all take it. Every line and every row that it
gives is checked against its checksum on the way. Writes nothing, and gives nothing that was forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.draft import LINES_AT_ONCE
from lychee_local.store.epoch import Batch, Line, Rows, damaged, read_lines, read_rows
from lychee_local.store.manifest import LINE_FILES, Extent, Manifest

RowLine = TypeVar("RowLine", TurnLine, DecisionLine, NodeLine)
Living = Callable[[Sequence[int]], Collection[int]]  # those of the given line numbers that are living


def living(
    folder: Path, manifest: Manifest, catalogue: Catalogue, *, names: Collection[str] = LINE_FILES
) -> Iterator[Batch]:
    """Everything living in the epoch at `folder`, or what of it is in the line files `names`, in the order of the
    files; a batch holds lines of one file and their rows. `catalogue` covers `manifest`.

    An encoding comes without its forgotten records and without a forgotten note. A node comes with its latest label, if
    a record points to it. The last batch keeps the next index of each session whose last turns were forgotten.

    Raises:
        StoreDamaged: a file is missing or too short, or a line or row does not match its checksum; forgotten ones are
            not looked at.
    """
    gone = catalogue.gone()
    epoch = _Epoch(folder, manifest)

    def all_but(name: str) -> Living:
        return lambda numbers: set(numbers) - gone.get(name, set())

    for name in (n for n in LINE_FILES if n in names):
        if name == files.TURNS:
            yield from epoch.with_rows(name, files.TURN_ROWS, TurnLine, all_but(name))
        elif name == files.DECISIONS:
            yield from epoch.with_rows(name, files.DECISION_ROWS, DecisionLine, all_but(name))
        elif name == files.SEGMENTS:
            yield from epoch.segments(all_but(name))
        elif name == files.ENCODINGS:
            yield from epoch.encodings(gone)
        elif name == files.NODES:
            yield from epoch.with_rows(name, files.NODE_ROWS, NodeLine, catalogue.node_ids)
        elif following := catalogue.dangling_following():
            yield Batch({name: [codec.encode(ForgottenLine(following=tuple(following)))]})


@dataclass(frozen=True, slots=True)
class _Epoch:
    folder: Path
    manifest: Manifest

    def with_rows(self, name: str, row_name: str, kind: type[RowLine], living: Living) -> Iterator[Batch]:
        """Lines of which each has one row, the one of its own number."""
        for lines in self._chunks(name):
            kept = living([line.number for line in lines])
            chosen = [line for line in lines if line.number in kept]
            if not chosen:
                continue
            first = lines[0].number
            rows = self._rows(row_name, first, len(lines))[[line.number - first for line in chosen]]
            payloads = [self._payload(name, line) for line in chosen]
            for line, payload, row in zip(chosen, payloads, rows, strict=True):
                if not codec.matches(row, codec.understood(kind, name, line.number, payload).row):
                    raise damaged(self.folder / row_name, line.number + 1)
            yield Batch({name: payloads}, {row_name: rows.astype(np.float32)})

    def segments(self, living: Living) -> Iterator[Batch]:
        name = files.SEGMENTS
        for lines in self._chunks(name):
            kept = living([line.number for line in lines])
            payloads = [self._payload(name, line) for line in lines if line.number in kept]
            if payloads:
                yield Batch({name: payloads})

    def encodings(self, gone: dict[str, set[int]]) -> Iterator[Batch]:
        """Lines of which each has as many rows as records. How many a forgotten one had must be read from it too."""
        nothing: set[int] = set()
        gone_lines, gone_notes = gone.get(files.ENCODINGS, nothing), gone.get("notes", nothing)
        gone_rows, row_path = gone.get(files.RECORD_ROWS, nothing), self.folder / files.RECORD_ROWS
        end = 0
        for lines in self._chunks(files.ENCODINGS):
            first, payloads, chosen = end, [], []
            for line in lines:
                payload = self._payload(files.ENCODINGS, line)
                encoding = codec.understood(EncodingLine, files.ENCODINGS, line.number, payload)
                start, end = end, end + len(encoding.records)
                if line.number in gone_lines:
                    continue
                kept = [n for n in range(len(encoding.records)) if start + n not in gone_rows]
                chosen += [(start + n, encoding.rows[n]) for n in kept]
                if len(kept) < len(encoding.records) or (encoding.note and line.number in gone_notes):
                    payload = codec.encode(_what_is_left(encoding, kept, noted=line.number not in gone_notes))
                payloads.append(payload)
            rows = self._rows(files.RECORD_ROWS, first, end - first)[[number - first for number, _ in chosen]]
            for (number, check), row in zip(chosen, rows, strict=True):
                if not codec.matches(row, check):
                    raise damaged(row_path, number + 1)
            if payloads:
                yield Batch({files.ENCODINGS: payloads}, {files.RECORD_ROWS: rows.astype(np.float32)})

    def _chunks(self, name: str) -> Iterator[list[Line]]:
        lines = read_lines(self.folder / name, Extent(), self.manifest.files[name])
        while some := list(islice(lines, LINES_AT_ONCE)):
            yield some

    def _payload(self, name: str, line: Line) -> bytes:
        if line.payload is None:
            raise damaged(self.folder / name, line.number + 1)
        return line.payload

    def _rows(self, name: str, first: int, count: int) -> Rows:
        manifest = self.manifest
        rows: Rows = read_rows(self.folder / name, first, count, manifest.embedder.dimension, manifest.precision)
        return rows


def _what_is_left(encoding: EncodingLine, kept: Sequence[int], *, noted: bool) -> EncodingLine:
    return replace(
        encoding,
        note=encoding.note if noted else "",
        records=tuple(encoding.records[n] for n in kept),
        rows=tuple(encoding.rows[n] for n in kept),
    )

"""Does a memory hold what it says it holds?

Owns the search for damage: reads every committed byte again and follows every reference. Changes nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from lychee_local.errors import StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, NodeLine, TurnLine
from lychee_local.store.log import damaged, read_lines, read_manifest, read_rows, read_usage
from lychee_local.store.manifest import Extent, Manifest
from lychee_local.store.nodes import VECTOR_KINDS, nodes_of_encoding
from lychee_local.store.vectors import UNIT_TOLERANCE, snapshot_is_sound
from lychee_local.types import Segment, Usage, node_id

L = TypeVar("L")


def check(folder: Path) -> tuple[str, ...]:
    """Every problem found in one user's folder, each as a sentence; empty when all is well.

    Bytes beyond the committed ones are no problem: a killed writer leaves them and the next one cuts them off.
    """
    try:
        seen = read_manifest(folder)
    except StoreError as error:
        return (error.message,)
    if seen is None:
        return (f"{folder / files.MANIFEST} is missing",)
    return tuple(_Check(folder, seen[1]).problems())


class _Check:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._found: list[str] = []
        self._lossy: set[str] = set()

    def problems(self) -> Iterator[str]:
        turns = self._lines(files.TURNS, TurnLine)
        decisions = self._lines(files.DECISIONS, DecisionLine)
        segments = {s.id: s for s in self._lines(files.SEGMENTS, Segment)}
        encodings = self._lines(files.ENCODINGS, EncodingLine)
        nodes = self._lines(files.NODES, NodeLine)
        self._rows(files.TURN_ROWS, files.TURNS, [line.row for line in turns])
        self._rows(files.DECISION_ROWS, files.DECISIONS, [line.row for line in decisions])
        self._rows(files.RECORD_ROWS, files.ENCODINGS, [row for line in encodings for row in line.rows])
        self._rows(files.NODE_ROWS, files.NODES, [line.row for line in nodes])
        yield from self._found
        if self._found:
            return  # what refers to a damaged line would be reported a second time
        counts: dict[str, int] = {}
        for line in turns:
            expected = counts.get(line.turn.session, 0)
            if line.turn.index != expected:
                yield f"{line.turn.id} stands where turn {expected} of its session should"
            counts[line.turn.session] = expected + 1
        for exchange in (line.decision.exchange for line in decisions):
            if exchange.end >= counts.get(exchange.session, 0):
                yield f"a decision is about turn {exchange.end} of session {exchange.session!r}, which is not stored"
        for segment in segments.values():
            if segment.end >= counts.get(segment.session, 0):
                yield f"{segment.id} ends after the last turn of its session"
        yield from _reference_problems(segments, encodings, nodes, counts)
        yield from self._derived()

    def _lines(self, name: str, kind: type[L]) -> list[L]:
        values, problems = [], []
        try:
            for number, payload in read_lines(self._folder / name, Extent(), self._manifest.files[name]):
                if payload is None:
                    problems.append(damaged(self._folder / name, number).message)
                    continue
                try:
                    values.append(codec.decode(kind, payload))
                except ValueError as error:
                    problems.append(f"{self._folder / name}, line {number} cannot be understood: {error}")
        except StoreError as error:
            problems.append(error.message)
        if problems:
            self._lossy.add(name)
        self._found += problems
        return values

    def _rows(self, name: str, lines: str, checks: Sequence[int]) -> None:
        """Check each row against its line; where lines are lost, only the file as a whole."""
        path, extent = self._folder / name, self._manifest.files[name]
        try:
            rows, sound = read_rows(path, Extent(), extent, self._manifest.embedder.dimension)
        except StoreError as error:
            self._found.append(error.message)
            return
        if lines in self._lossy:
            if not sound:
                self._found.append(
                    f"{path} does not match its checksum, nor do the lines that say which row is damaged"
                )
            return
        if len(rows) != len(checks):
            self._found.append(f"{path} has {len(rows)} rows for the {len(checks)} of {lines}")
        before = 0
        for number, (row, expected) in enumerate(zip(rows, checks, strict=False), 1):
            whole = zlib.crc32(row.tobytes(), before) == expected
            if not whole or not abs(float(np.linalg.norm(row)) - 1.0) <= 2 * UNIT_TOLERANCE:
                self._found.append(damaged(path, number).message)
            before = expected

    def _derived(self) -> Iterator[str]:
        try:
            for line in read_usage(self._folder):
                codec.decode(Usage, line)
        except (StoreError, ValueError) as error:
            yield str(error)
        for side in sorted(self._folder.glob("*.hnsw.rows")):
            graph = side.with_suffix("")
            if not snapshot_is_sound(graph, self._manifest.embedder.dimension):
                yield f"{graph} is missing or does not match its checksum: it will be built again, nothing is lost"


def _reference_problems(
    segments: Mapping[str, Segment],
    encodings: Sequence[EncodingLine],
    nodes: Sequence[NodeLine],
    turns: Mapping[str, int],
) -> Iterator[str]:
    encoded: set[str] = set()
    linked: set[str] = set()
    held = {node_id(line.kind, line.key) for line in nodes}
    if len(held) != len(nodes):
        yield f"{len(nodes) - len(held)} nodes are stored twice"
    for line in encodings:
        segment = segments.get(line.segment)
        if segment is None:
            yield f"an encoding is about {line.segment}, which is not stored"
            continue
        if segment.id in encoded:
            yield f"{segment.id} is encoded twice"
        encoded.add(segment.id)
        for record in line.records:
            if record.session != segment.session or any(not 0 <= t < turns[segment.session] for t in record.turns):
                yield f"{record.id} points to turns that are not stored"
        for node in nodes_of_encoding(segment, line.records):
            if node.id not in held and node.kind in VECTOR_KINDS:
                yield f"node {node.kind} {node.label!r} has no vector of its label"
            linked.add(node.id)
    for orphan in sorted(held - linked):
        yield f"{orphan} points to no record"

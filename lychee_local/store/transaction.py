"""One commit in the making.

Owns the checks that keep a memory whole: every index is the next of its session, every reference points to something
that is stored, every vector is a unit vector. Writes nothing itself; on a clean exit it hands over one batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from lychee_local.errors import BadInput, StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, NodeLine, TurnLine
from lychee_local.store.log import Batch
from lychee_local.store.manifest import Manifest
from lychee_local.store.nodes import VECTOR_KINDS, nodes_of_encoding
from lychee_local.store.state import State
from lychee_local.store.vectors import Vectors, unit_rows
from lychee_local.types import Decision, Record, Segment, Turn


class Transaction:
    """Gathers one commit; usable only inside its `with` block. Each `add_` checks all it is given before it takes any,
    and sees what this transaction has added so far."""

    def __init__(self, begin: Callable[[], tuple[State, Manifest]], end: Callable[[Batch | None], None]) -> None:
        self._begin = begin
        self._end = end
        self._batch: Batch | None = None

    def __enter__(self) -> Self:
        self._state, manifest = self._begin()
        self._batch = Batch()
        self._dimension = manifest.embedder.dimension
        self._row_checks = {name: extent.check for name, extent in manifest.files.items()}
        self._turns: dict[str, int] = {}  # session -> turns after this transaction
        self._refs: set[tuple[str, str]] = set()
        self._segments: dict[str, Segment] = {}
        self._encoded: set[str] = set()
        self._nodes: set[str] = set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        batch, self._batch = self._open(), None
        self._end(batch if kind is None else None)

    def add_turns(self, turns: Sequence[Turn], vectors: Vectors) -> None:
        """Append turns; each index is the next of its session.

        Raises:
            BadInput: a gap or a repeat in the indexes, a repeated ref, an unstorable text, or unusable vectors.
        """
        batch = self._open()
        rows = self._rows_for(turns, vectors, "turns")
        following, refs = dict(self._turns), set(self._refs)
        for turn in turns:
            held = self._state.session(turn.session)
            expected = following.get(turn.session, len(held.turns))
            if turn.index != expected:
                raise BadInput(f"turn {turn.index} of session {turn.session!r} given, {expected} comes next")
            following[turn.session] = expected + 1
            if turn.ref is None:
                continue
            if turn.ref in held.refs or (turn.session, turn.ref) in refs:
                raise BadInput(f"session {turn.session!r} has a turn with ref {turn.ref!r} already")
            refs.add((turn.session, turn.ref))
        checks = self._checks(files.TURN_ROWS, rows)
        lines = [codec.encode(TurnLine(turn, check)) for turn, check in zip(turns, checks, strict=True)]
        self._stage(batch, files.TURNS, lines, files.TURN_ROWS, rows, checks)
        self._turns, self._refs = following, refs

    def add_decisions(self, decisions: Sequence[Decision], vectors: Vectors) -> None:
        """Append to the segmenter's log; `vectors` are those of the exchanges.

        Raises:
            BadInput: an exchange of turns that are not stored, or unusable vectors.
        """
        batch = self._open()
        rows = self._rows_for(decisions, vectors, "decisions")
        for d in decisions:
            self._require_turns(d.exchange.session, d.exchange.start, d.exchange.end)
        checks = self._checks(files.DECISION_ROWS, rows)
        lines = [codec.encode(DecisionLine(d, check)) for d, check in zip(decisions, checks, strict=True)]
        self._stage(batch, files.DECISIONS, lines, files.DECISION_ROWS, rows, checks)

    def add_segments(self, segments: Sequence[Segment]) -> None:
        """Raises BadInput for a segment that is stored already or whose turns are not."""
        batch = self._open()
        new: dict[str, Segment] = {}
        for segment in segments:
            self._require_turns(segment.session, segment.start, segment.end)
            if segment.id in self._state.segments or segment.id in self._segments or segment.id in new:
                raise BadInput(f"{segment.id} is stored already")
            new[segment.id] = segment
        lines = [codec.encode(segment) for segment in segments]
        batch.lines.setdefault(files.SEGMENTS, []).extend(lines)
        self._segments |= new

    def add_encoding(
        self,
        segment: Segment,
        records: Sequence[Record],
        vectors: Vectors,
        node_vectors: Mapping[str, npt.NDArray[np.float32]],
        note: str,
    ) -> None:
        """What encoding `segment` gave: its records (maybe none), their vectors, the vectors of the nodes that
        `missing_nodes` named (others are ignored), and the note for the next segment.

        Raises:
            BadInput: an unknown or already encoded segment, a record of another session or of turns that are not
                stored, a missing node vector, an unstorable text, or unusable vectors.
        """
        batch = self._open()
        if segment.id not in self._state.segments and segment.id not in self._segments:
            raise BadInput(f"{segment.id} is not stored", hint="add_segments comes before add_encoding")
        if segment.id in self._state.encoded or segment.id in self._encoded:
            raise BadInput(f"{segment.id} is encoded already")
        for record in records:
            if record.session != segment.session:
                raise BadInput(f"a record of session {record.session!r} in {segment.id}: {record.text[:80]!r}")
            if record.turns:
                self._require_turns(record.session, min(record.turns), max(record.turns))
        rows = self._rows_for(records, vectors, "records")
        checks = self._checks(files.RECORD_ROWS, rows)
        encoding = codec.encode(EncodingLine(segment.id, note, tuple(records), tuple(checks)))
        made = [n for n in nodes_of_encoding(segment, records) if n.kind in VECTOR_KINDS]
        new = [n for n in made if not self._state.nodes.holds(n) and n.id not in self._nodes]
        lacking = [n for n in new if n.id not in node_vectors]
        if lacking:
            raise BadInput(
                f"{len(lacking)} new nodes have no vector, the first is {lacking[0].kind} {lacking[0].label!r}",
                hint="embed what missing_nodes returns for the same segment and records",
            )
        labels = [np.asarray(node_vectors[n.id], dtype=np.float32).reshape(-1) for n in new]
        label_rows = self._rows_for(new, labels, "nodes")
        label_checks = self._checks(files.NODE_ROWS, label_rows)
        node_lines = [codec.encode(NodeLine(n.kind, n.key, n.label, c)) for n, c in zip(new, label_checks, strict=True)]
        self._stage(batch, files.ENCODINGS, [encoding], files.RECORD_ROWS, rows, checks)
        self._stage(batch, files.NODES, node_lines, files.NODE_ROWS, label_rows, label_checks)
        self._encoded.add(segment.id)
        self._nodes.update(n.id for n in new)

    def _open(self) -> Batch:
        if self._batch is None:
            raise StoreError("this transaction is not open", hint="use it inside its with block")
        return self._batch

    def _rows_for(self, items: Sequence[object], vectors: npt.ArrayLike, what: str) -> Vectors:
        if not items and not len(np.asarray(vectors)):
            return np.zeros((0, self._dimension), dtype=np.float32)
        rows = unit_rows(vectors, self._dimension, what)
        if len(rows) != len(items):
            raise BadInput(f"{what}: {len(rows)} vectors given for {len(items)}")
        return rows

    def _require_turns(self, session: str, start: int, end: int) -> None:
        count = self._turns.get(session, len(self._state.session(session).turns))
        if not 0 <= start <= end < count:
            raise BadInput(f"turns {start} to {end} of session {session!r} are not stored; it has {count}")

    def _checks(self, name: str, rows: Vectors) -> list[int]:
        checks, check = [], self._row_checks[name]
        for row in rows:
            check = zlib.crc32(row.tobytes(), check)
            checks.append(check)
        return checks

    def _stage(
        self, batch: Batch, name: str, lines: list[bytes], row_name: str, rows: Vectors, checks: list[int]
    ) -> None:
        batch.lines.setdefault(name, []).extend(lines)
        held = batch.rows.get(row_name)
        batch.rows[row_name] = rows if held is None else np.concatenate([held, rows])
        if checks:
            self._row_checks[row_name] = checks[-1]

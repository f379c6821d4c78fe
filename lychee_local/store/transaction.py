"""One commit in the making.

Owns the checks that keep a memory whole: every index is the next of its session, every reference points to something
that is stored, every vector is a unit vector. Writes nothing itself; on a clean exit it hands over one batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from lychee_local.errors import BadInput, StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.epoch import Batch, row_bytes
from lychee_local.store.manifest import Manifest
from lychee_local.store.nodes import VECTOR_KINDS, nodes_of_encoding
from lychee_local.store.vectors import Vectors, unit_rows
from lychee_local.types import Decision, Node, Record, Segment, Turn


class Known(Protocol):
    """What a transaction asks about the memory it adds to."""

    def following(self, session: str) -> int: ...
    def turn_by_ref(self, session: str, ref: str) -> Turn | None: ...
    def encoding_of(self, segment_id: str) -> int | None: ...
    def holds_segment(self, segment_id: str) -> bool: ...
    def lacking(self, nodes: Iterable[Node]) -> list[Node]: ...


class Transaction:
    """Gathers one commit; usable only inside its `with` block. Each `add_` checks all it is given before it takes any,
    and sees what this transaction has added so far."""

    def __init__(self, known: Known, begin: Callable[[], Manifest], end: Callable[[Batch | None], None]) -> None:
        self._known = known
        self._begin = begin
        self._end = end
        self._batch: Batch | None = None

    def __enter__(self) -> Self:
        manifest = self._begin()
        self._batch = Batch()
        self._dimension = manifest.embedder.dimension
        self._precision = manifest.precision
        self._turns: dict[str, int] = {}  # session -> index of its next turn after this transaction
        self._refs: set[tuple[str, str]] = set()
        self._segments: set[str] = set()
        self._encoded: set[str] = set()
        self._withdrawn: set[str] = set()
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
            expected = following.get(turn.session)
            if expected is None:
                expected = self._known.following(turn.session)
            if turn.index != expected:
                raise BadInput(f"turn {turn.index} of session {turn.session!r} given, {expected} comes next")
            following[turn.session] = expected + 1
            if turn.ref is None:
                continue
            if (turn.session, turn.ref) in refs or self._known.turn_by_ref(turn.session, turn.ref) is not None:
                raise BadInput(f"session {turn.session!r} has a turn with ref {turn.ref!r} already")
            refs.add((turn.session, turn.ref))
        lines = [codec.encode(TurnLine(t, c)) for t, c in zip(turns, self._checks(rows), strict=True)]
        self._stage(batch, files.TURNS, lines, files.TURN_ROWS, rows)
        self._turns, self._refs = following, refs

    def add_decisions(self, decisions: Sequence[Decision], vectors: Vectors) -> None:
        """Append to the segmenter's log; `vectors` are those of the exchanges, whose text is not stored a second time.

        Raises:
            BadInput: an exchange of turns that are not stored, or unusable vectors.
        """
        batch = self._open()
        rows = self._rows_for(decisions, vectors, "decisions")
        for d in decisions:
            self._require_turns(d.exchange.session, d.exchange.start, d.exchange.end)
        blank = [replace(d, exchange=replace(d.exchange, text="")) for d in decisions]
        lines = [codec.encode(DecisionLine(d, c)) for d, c in zip(blank, self._checks(rows), strict=True)]
        self._stage(batch, files.DECISIONS, lines, files.DECISION_ROWS, rows)

    def add_segments(self, segments: Sequence[Segment]) -> None:
        """Raises BadInput for a segment that is stored already or whose turns are not."""
        batch = self._open()
        new: set[str] = set()
        for segment in segments:
            self._require_turns(segment.session, segment.start, segment.end)
            if segment.id in new or self._holds_segment(segment.id):
                raise BadInput(f"{segment.id} is stored already")
            new.add(segment.id)
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
        *,
        encoder: str = "",
    ) -> None:
        """What encoding `segment` gave: its records (maybe none), their vectors, the vectors of the nodes that
        `missing_nodes` named (others are ignored), the note for the next segment, and the name of what encoded it.

        Raises:
            BadInput: an unknown or already encoded segment, a record of another session or of turns that are not
                stored, a missing node vector, an unstorable text, or unusable vectors.
        """
        batch = self._open()
        if not self._holds_segment(segment.id):
            raise BadInput(f"{segment.id} is not stored", hint="add_segments comes before add_encoding")
        withdrawn = segment.id in self._withdrawn
        if segment.id in self._encoded or (not withdrawn and self._known.encoding_of(segment.id) is not None):
            raise BadInput(f"{segment.id} is encoded already", hint="withdraw_encoding takes the earlier one back")
        for record in records:
            if record.session != segment.session:
                raise BadInput(f"a record of session {record.session!r} in {segment.id}: {record.text[:80]!r}")
            if record.turns:
                self._require_turns(record.session, min(record.turns), max(record.turns))
        rows = self._rows_for(records, vectors, "records")
        encoding = codec.encode(EncodingLine(segment.id, note, tuple(records), tuple(self._checks(rows)), encoder))
        made = [n for n in nodes_of_encoding(segment, records) if n.kind in VECTOR_KINDS and n.id not in self._nodes]
        new = self._known.lacking(made)
        if withdrawn:  # the frame of the earlier encoding is described by that one's sentences
            new += [n for n in made if n.kind == "event_frame" and n not in new]
        lacking = [n for n in new if n.id not in node_vectors]
        if lacking:
            raise BadInput(
                f"{len(lacking)} new nodes have no vector, the first is {lacking[0].kind} {lacking[0].label!r}",
                hint="embed what missing_nodes returns for the same segment and records",
            )
        labels = [np.asarray(node_vectors[n.id], dtype=np.float32).reshape(-1) for n in new]
        label_rows = self._rows_for(new, labels, "nodes")
        node_lines = [
            codec.encode(NodeLine(n.kind, n.key, n.label, c))
            for n, c in zip(new, self._checks(label_rows), strict=True)
        ]
        self._stage(batch, files.ENCODINGS, [encoding], files.RECORD_ROWS, rows)
        self._stage(batch, files.NODES, node_lines, files.NODE_ROWS, label_rows)
        self._encoded.add(segment.id)
        self._nodes.update(n.id for n in new)

    def withdraw_encoding(self, segment: Segment) -> None:
        """Take back what encoding `segment` gave, so that this transaction can add another encoding of it.

        Raises:
            BadInput: it has no encoding.
        """
        batch = self._open()
        number = self._known.encoding_of(segment.id)
        if number is None or segment.id in self._withdrawn:
            raise BadInput(f"{segment.id} has no encoding that could be taken back")
        batch.lines.setdefault(files.FORGOTTEN, []).append(codec.encode(ForgottenLine(encodings=(number,))))
        self._withdrawn.add(segment.id)

    def _holds_segment(self, segment_id: str) -> bool:
        return segment_id in self._segments or self._known.holds_segment(segment_id)

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
        count = self._turns.get(session)
        if count is None:
            count = self._known.following(session)
        if not 0 <= start <= end < count:
            raise BadInput(f"turns {start} to {end} of session {session!r} are not stored; it has {count}")

    def _checks(self, rows: Vectors) -> list[int]:
        return [zlib.crc32(row) for row in row_bytes(rows, self._precision)]

    def _stage(self, batch: Batch, name: str, lines: list[bytes], row_name: str, rows: Vectors) -> None:
        batch.lines.setdefault(name, []).extend(lines)
        held = batch.rows.get(row_name)
        batch.rows[row_name] = rows if held is None else np.concatenate([held, rows])

"""What the log says: every value of one memory in RAM, as of one commit.

Owns the in-memory tables and indexes and the one way into them, `apply`, which a commit and a reader that catches up
both take; so a memory that was reopened equals the one that wrote. Touches no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from lychee_local.errors import StoreDamaged
from lychee_local.store import codec, manifest
from lychee_local.store.codec import DecisionLine, EncodingLine, NodeLine, TurnLine
from lychee_local.store.log import Batch
from lychee_local.store.nodes import VECTOR_KINDS, Entry, Nodes, nodes_of_encoding
from lychee_local.store.vectors import VectorIndex, Vectors
from lychee_local.types import Decision, Node, NodeKind, Record, Segment, Turn

NODE_RECORDS = 8  # latest records that a node's vector reflects (docs/method.md 3.4)
SETTLED_AT_ONCE = 4_096  # nodes whose vectors are computed in one step, which bounds its memory

L = TypeVar("L")


@dataclass(slots=True)
class Session:
    """What belongs to one session. `decision_rows` are row numbers in the file of exchange vectors."""

    turns: list[Turn] = field(default_factory=list)
    refs: dict[str, int] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    decision_rows: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    note: str = ""


class State:
    def __init__(self, dimension: int, *, exact_below: int) -> None:
        self.sessions: dict[str, Session] = {}
        self.segments: dict[str, Segment] = {}
        self.encoded: dict[str, tuple[str, ...]] = {}  # segment id -> record ids
        self.records: dict[str, Record] = {}
        self.nodes = Nodes()
        self.decision_checks: list[int] = []
        self.turn_index = VectorIndex(dimension, exact_below=exact_below)
        self.record_index = VectorIndex(dimension, exact_below=exact_below)
        self._node_index = VectorIndex(dimension, exact_below=exact_below)
        self._node_kinds: list[NodeKind] = []  # by the node index's numbering
        self._label_rows: dict[str, Vectors] = {}
        self._unsettled: dict[str, Entry] = {}  # nodes whose vector is out of date

    def session(self, name: str) -> Session:
        """For reading: an unknown session is an empty one."""
        return self.sessions.get(name) or Session()

    # --- the one way in ----------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, counts: Mapping[str, int]) -> None:
        """Add what one or more commits appended; `counts` are the lines of each file before it, for messages."""
        self._apply_turns(self._decoded(TurnLine, manifest.TURNS, batch, counts), batch.rows.get(manifest.TURN_ROWS))
        for line in self._decoded(DecisionLine, manifest.DECISIONS, batch, counts):
            held = self._opened(line.decision.exchange.session)
            held.decisions.append(line.decision)
            held.decision_rows.append(len(self.decision_checks))
            self.decision_checks.append(line.row)
        for segment in self._decoded(Segment, manifest.SEGMENTS, batch, counts):
            self.segments[segment.id] = segment
            self._opened(segment.session).segments.append(segment)
        labels = batch.rows.get(manifest.NODE_ROWS)
        for number, made in enumerate(self._decoded(NodeLine, manifest.NODES, batch, counts)):
            node = Node(made.kind, made.key, made.label, ())
            entry = self.nodes.create(node)
            if labels is not None:
                self._label_rows[entry.id] = labels[number]
            self._unsettled[entry.id] = entry
        rows, used = batch.rows.get(manifest.RECORD_ROWS), 0
        for encoding in self._decoded(EncodingLine, manifest.ENCODINGS, batch, counts):
            if rows is not None:
                self._apply_encoding(encoding, rows[used : used + len(encoding.records)])
            used += len(encoding.records)

    def _decoded(self, kind: type[L], name: str, batch: Batch, counts: Mapping[str, int]) -> list[L]:
        values = []
        for number, payload in enumerate(batch.lines.get(name, ()), counts[name] + 1):
            try:
                values.append(codec.decode(kind, payload))
            except ValueError as error:
                raise StoreDamaged(
                    f"{name}, line {number} cannot be understood: {error}",
                    hint="was it written by another version of lychee?",
                ) from error
        return values

    def _opened(self, name: str) -> Session:
        if name not in self.sessions:
            self.sessions[name] = Session()
        return self.sessions[name]

    def _apply_turns(self, lines: Sequence[TurnLine], rows: Vectors | None) -> None:
        for line in lines:
            turn = line.turn
            held = self._opened(turn.session)
            held.turns.append(turn)
            if turn.ref is not None:
                held.refs[turn.ref] = turn.index
        if rows is not None:
            self.turn_index.put([line.turn.id for line in lines], rows)

    def _apply_encoding(self, line: EncodingLine, rows: Vectors) -> None:
        """A sentence that is said again in its session stays one record: the turns of both, the rest of the later."""
        segment = self.segments[line.segment]
        held = self._opened(segment.session)
        ids = [record.id for record in line.records]
        for id, record in zip(ids, line.records, strict=True):
            known = self.records.get(id)
            if known is None:
                held.records.append(id)
                self.records[id] = record
                continue
            self.records[id] = replace(record, turns=tuple(sorted({*known.turns, *record.turns})))
            self._unsettle(self.nodes.of_record(id))
        self.record_index.put(ids, rows)
        self.encoded[segment.id] = tuple(dict.fromkeys(ids))
        held.note = line.note
        self._unsettle(self.nodes.link(node) for node in nodes_of_encoding(segment, line.records))

    def _unsettle(self, entries: Iterable[Entry]) -> None:
        self._unsettled.update((entry.id, entry) for entry in entries if entry.head.kind in VECTOR_KINDS)

    def feed(self) -> None:
        """Let the graphs catch up with what was applied."""
        self.turn_index.feed()
        self.record_index.feed()

    # --- vectors of nodes --------------------------------------------------------------------------------------------

    def node_index(self) -> VectorIndex:
        """The index of nodes with every vector up to date. Dates have no vector: they are found by calendar.

        Vectors are brought up to date here and not in `apply`: opening and writing need none of them.
        """
        dirty = list(self._unsettled.values())
        for start in range(0, len(dirty), SETTLED_AT_ONCE):
            part = dirty[start : start + SETTLED_AT_ONCE]
            self._node_index.put([entry.id for entry in part], self._node_vectors(part))
        self._unsettled = {}
        return self._node_index

    def node_mask(self, kinds: frozenset[NodeKind]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which numbers of the node index are of one of `kinds`."""
        ids = self._node_index.ids
        self._node_kinds += [self.nodes.entry(i).head.kind for i in ids[len(self._node_kinds) :]]
        return np.fromiter((kind in kinds for kind in self._node_kinds), dtype=np.bool_, count=len(ids))

    def _node_vectors(self, entries: Sequence[Entry]) -> Vectors:
        """Of each node: the label's vector plus the mean of its latest records', brought to length 1.

        The sums are made in float64, so that a vector does not depend on how many are computed together.
        """
        sums = np.zeros((len(entries), self.record_index.dimension), dtype=np.float64)
        linked: list[str] = []
        owner: list[int] = []
        for place, entry in enumerate(entries):
            label = self._label_rows.get(entry.id)
            if label is not None:
                sums[place] = label
            if label is None or entry.head.kind != "event_frame":  # a frame's text is its records' sentences already
                latest = entry.latest(NODE_RECORDS)
                linked += latest
                owner += [place] * len(latest)
        if linked:
            places, starts, counts = np.unique(owner, return_index=True, return_counts=True)
            means = np.add.reduceat(self.record_index.vectors(linked).astype(np.float64), starts, axis=0)
            sums[places] += means / counts[:, None]
        lengths = np.linalg.norm(sums, axis=1)
        for place in map(int, np.flatnonzero(lengths < 1e-6)):  # a label opposite to the mean of its records decides
            sums[place] = self._label_rows[entries[place].id]
            lengths[place] = np.linalg.norm(sums[place])
        vectors: Vectors = (sums / lengths[:, None]).astype(np.float32)
        return vectors

"""The only package that touches a user's memory on disk.

`Store` is one user's memory: append-only files with checksums under one manifest (log), the values they hold (state,
codec), index entries derived from records (nodes), nearest neighbours (vectors). Reading is from RAM; writing goes
through a `Transaction`, which is durable as a whole or not at all. One process writes at a time, any number read.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.check import check
from lychee_local.store.codec import EncodingLine, NodeLine, TurnLine
from lychee_local.store.log import Batch, Disk, Log, damaged, read_lines, read_rows, read_usage
from lychee_local.store.manifest import EmbedderIdentity, Extent, Manifest, require_folder, user_folder
from lychee_local.store.nodes import VECTOR_KINDS, label_text, nodes_of_encoding
from lychee_local.store.state import State
from lychee_local.store.transaction import Transaction
from lychee_local.store.vectors import EXACT_BELOW, VectorHit, VectorIndex, Vectors, unit_rows
from lychee_local.types import Decision, Node, NodeKind, Record, Segment, TimeRange, Turn, Usage

__all__ = [
    "EmbedderIdentity",
    "Store",
    "StoreStats",
    "Transaction",
    "VectorHit",
    "check",
    "require_folder",
    "user_folder",
]

Field = Literal["turns", "records", "nodes"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """How much a memory holds; `bytes` by file name."""

    sessions: int
    turns: int
    segments: int
    records: int
    nodes: int
    bytes: Mapping[str, int]


class Store:
    """One user's memory. Open it with `Store.open`; it can be shared by threads."""

    def __init__(self, log: Log, *, exact_below: int) -> None:
        self._log = log
        self._exact_below = exact_below
        self._lock = threading.RLock()  # the state below
        self._writing = threading.RLock()  # held for the length of a transaction
        self._in_transaction = False
        self._closed = False
        self._nodes_of: State | None = None  # the state whose nodes have been searched
        self._state: State | None = None
        self._state = self._load()

    @classmethod
    def open(
        cls,
        home: Path,
        user: str,
        *,
        embedder: EmbedderIdentity,
        read_only: bool = False,
        wait_seconds: float = 0.0,
        exact_below: int = EXACT_BELOW,
        disk: Disk | None = None,
    ) -> Self:
        """Open, or unless `read_only` create, the memory of `user` below `home`.

        Vector search is exact up to `exact_below` rows and approximate above. `disk` takes the place of the operating
        system's writes (for tests).

        Raises:
            BadInput: an unusable user name.
            StoreLocked: another process writes this memory and did not finish within `wait_seconds`.
            StoreMismatch: written with another embedder, for another user, or in a newer format.
            StoreDamaged: a committed line or row does not match its checksum; says which and what is lost.
            StoreError: the folder cannot be used, or `read_only` and there is no memory yet.
        """
        log = Log(home, user, embedder, read_only=read_only, wait_seconds=wait_seconds, disk=disk)
        try:
            return cls(log, exact_below=exact_below)
        except StoreError:
            log.close()
            raise

    @property
    def user(self) -> str:
        return self._log.manifest.user

    @property
    def path(self) -> Path:
        return self._log.path

    @property
    def embedder(self) -> EmbedderIdentity:
        """The embedder this memory is bound to, with the calibration it was made with."""
        return self._log.manifest.embedder

    # --- reading -----------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Pick up what another process has committed; True if anything changed. Only the new part is read."""
        with self._lock:
            state = self._now()
            if not self._log.read_only:
                return False
            manifest = self._log.poll()
            if manifest is None:
                return False
            before = self._log.manifest
            batch = self._continuation(before, manifest)
            self._state = None  # read again from the start, unless the next lines succeed
            if batch is not None:
                state.apply(batch, _counts(before))
                self._log.adopt(manifest)
                self._state = state
                state.feed()
            self._now()
            return True

    def sessions(self) -> tuple[str, ...]:
        """In the order of their first turns."""
        with self._lock:
            return tuple(self._now().sessions)

    def turns(self, session: str) -> Sequence[Turn]:
        """By index; empty for an unknown session."""
        with self._lock:
            return tuple(self._now().session(session).turns)

    def turn(self, turn_id: str) -> Turn:
        """Raises KeyError for an unknown id."""
        kind, _, place = turn_id.partition(":")
        session, _, index = place.rpartition(":")
        with self._lock:
            turns = self._now().session(session).turns
        if kind != "turn" or not index.isdecimal() or int(index) >= len(turns):
            raise KeyError(turn_id)
        return turns[int(index)]

    def turn_by_ref(self, session: str, ref: str) -> Turn | None:
        with self._lock:
            held = self._now().session(session)
            return held.turns[held.refs[ref]] if ref in held.refs else None

    def decisions(self, session: str) -> Sequence[Decision]:
        """The segmenter's log, one entry per exchange, in order."""
        with self._lock:
            return tuple(self._now().session(session).decisions)

    def exchange_vectors(self, session: str, start: int) -> Vectors:
        """The vectors of `decisions(session)[start:]`, float32 of shape (n, dimension), read from disk.

        Raises:
            StoreDamaged: a row does not match its checksum.
        """
        with self._lock:
            state = self._now()
            wanted = state.session(session).decision_rows[start:]
            vectors = np.zeros((len(wanted), self.embedder.dimension), dtype=np.float32)
            width = 4 * self.embedder.dimension
            for place, row in enumerate(wanted):
                before = state.decision_checks[row - 1] if row else 0
                since = Extent(row * width, row, before)
                until = Extent((row + 1) * width, row + 1, state.decision_checks[row])
                rows, sound = read_rows(self.path / files.DECISION_ROWS, since, until, self.embedder.dimension)
                if not sound:
                    raise damaged(self.path / files.DECISION_ROWS, row + 1)
                vectors[place] = rows[0]
            return vectors

    def segments(self, session: str | None = None) -> Sequence[Segment]:
        with self._lock:
            state = self._now()
            return tuple(state.segments.values() if session is None else state.session(session).segments)

    def pending(self) -> tuple[Segment, ...]:
        """Segments that no encoding covers yet, oldest first."""
        with self._lock:
            state = self._now()
            return tuple(s for s in state.segments.values() if s.id not in state.encoded)

    def records(self, session: str | None = None) -> Sequence[Record]:
        """In the order of their first encoding."""
        with self._lock:
            state = self._now()
            if session is None:
                return tuple(state.records.values())
            return tuple(state.records[i] for i in state.session(session).records)

    def record(self, record_id: str) -> Record:
        """Raises KeyError for an unknown id."""
        with self._lock:
            return self._now().records[record_id]

    def segment_records(self, segment_id: str) -> tuple[Record, ...]:
        """What this segment's encoding gave, as it stands now; empty where it gave nothing or is pending.

        Raises:
            KeyError: there is no such segment.
        """
        with self._lock:
            state = self._now()
            segment = state.segments[segment_id]
            return tuple(state.records[i] for i in state.encoded.get(segment.id, ()))

    def note(self, session: str) -> str:
        """The disambiguation note of the session's latest encoded segment."""
        with self._lock:
            return self._now().session(session).note

    def node(self, node_id: str) -> Node:
        """Raises KeyError for an unknown id."""
        with self._lock:
            return self._now().nodes.entry(node_id).node()

    def nodes(self, kind: NodeKind | None = None) -> Sequence[Node]:
        with self._lock:
            return self._now().nodes.all(kind)

    def temporal_nodes(self, when: TimeRange) -> Sequence[Node]:
        """Nodes of kind temporal whose span overlaps `when`, earliest first."""
        with self._lock:
            return self._now().nodes.overlapping(when)

    def search(
        self, field: Field, queries: Vectors, k: int, *, node_kinds: Collection[NodeKind] | None = None
    ) -> list[list[VectorHit]]:
        """The `k` nearest to each row of `queries`, best first, ties by id; fewer only where fewer exist.

        `node_kinds` limits a search among nodes. Temporal nodes have no vectors: ask `temporal_nodes` for them.

        Raises:
            BadInput: `k` below 1, an unknown field, or queries that are not unit vectors of this memory's dimension.
        """
        if k < 1:
            raise BadInput(f"k is the number of hits wanted, at least 1, not {k}")
        if node_kinds is not None and field != "nodes":
            raise BadInput(f"node_kinds limits a search among nodes, not among {field}")
        queries = unit_rows(queries, self.embedder.dimension, "the queries")
        with self._lock:
            state = self._now()
            if field == "turns":
                return state.turn_index.search(queries, k)
            if field == "records":
                return state.record_index.search(queries, k)
            if field != "nodes":
                raise BadInput(f"there is no field {field!r} to search: turns, records or nodes")
            index = self._node_index(state)
            mask = None if node_kinds is None else state.node_mask(frozenset(node_kinds))
            return index.search(queries, k, among=mask)

    def usage(self) -> Sequence[Usage]:
        """Every model call that was logged, by any process, in the order of logging."""
        with self._lock:
            self._now()
            return tuple(codec.decode(Usage, line) for line in read_usage(self.path))

    def stats(self) -> StoreStats:
        with self._lock:
            state = self._now()
            return StoreStats(
                sessions=len(state.sessions),
                turns=sum(len(s.turns) for s in state.sessions.values()),
                segments=len(state.segments),
                records=len(state.records),
                nodes=len(state.nodes),
                bytes=_sizes(self.path),
            )

    # --- writing -----------------------------------------------------------------------------------------------------

    def missing_nodes(self, segment: Segment, records: Sequence[Record]) -> tuple[tuple[Node, str], ...]:
        """The nodes that encoding `segment` into `records` would create, each with the text to embed for it.

        Raises:
            BadInput: a record's text cannot be stored.
        """
        with self._lock:
            known = self._now().nodes
            for record in records:
                codec.encode(record)
            made = nodes_of_encoding(segment, records)
            return tuple((n, label_text(n, records)) for n in made if n.kind in VECTOR_KINDS and not known.holds(n))

    def transaction(self) -> Transaction:
        """A context that commits on a clean exit and leaves nothing behind on an error.

        Raises (on entering):
            StoreError: this store was opened read-only, or this thread is in a transaction already.
        """
        return Transaction(self._begin, self._end)

    def add_usage(self, usage: Usage) -> None:
        """Log the cost of a model call at once; allowed for read-only stores too.

        Raises:
            StoreError: it could not be written.
        """
        line = codec.encode(usage)
        with self._lock:
            self._now()
            self._log.append_usage(line)

    def close(self) -> None:
        """Save the search graphs where there are any, give back the lock. Can be called twice.

        Raises:
            StoreError: a graph could not be saved; the memory is closed all the same and nothing is lost.
        """
        with self._writing, self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._state is not None and not self._log.read_only:
                    self._save_graphs(self._state)
            finally:
                self._state = None
                self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _now(self) -> State:
        """The state; read again from disk where an interruption left it half applied."""
        if self._closed:
            raise StoreError(f"the memory in {self.path} is closed")
        if self._state is None:
            manifest = self._log.poll()
            if manifest is not None:
                self._log.adopt(manifest)
            self._state = self._load()
        return self._state

    def _load(self) -> State:
        manifest = self._log.manifest
        state = State(manifest.embedder.dimension, exact_below=self._exact_below)
        nothing = dict.fromkeys(manifest.files, Extent())
        state.apply(self._read(nothing, manifest), dict.fromkeys(manifest.files, 0))
        rows = self.path / files.DECISION_ROWS
        if manifest.files[files.DECISION_ROWS].bytes > (rows.stat().st_size if rows.is_file() else 0):
            raise damaged(rows, 1 + (rows.stat().st_size if rows.is_file() else 0) // (4 * manifest.embedder.dimension))
        state.turn_index.restore(self.path / "turns.hnsw")
        state.record_index.restore(self.path / "records.hnsw")
        return state

    def _node_index(self, state: State) -> VectorIndex:
        """The index of nodes, up to date. Its vectors are made and its graph is read when nodes are first searched."""
        index = state.node_index()
        if self._nodes_of is state:
            index.feed()
        else:
            index.restore(self.path / "nodes.hnsw")
            self._nodes_of = state
        return index

    def _save_graphs(self, state: State) -> None:
        state.turn_index.save(self.path / "turns.hnsw")
        state.record_index.save(self.path / "records.hnsw")
        if self._nodes_of is state:
            self._node_index(state).save(self.path / "nodes.hnsw")

    def _continuation(self, before: Manifest, after: Manifest) -> Batch | None:
        """What was appended from `before` to `after`; None where the files were written anew, as a backup's are."""
        if any(extent.bytes < before.files[name].bytes for name, extent in after.files.items()):
            return None
        try:
            return self._read(before.files, after)
        except StoreDamaged:
            return None  # the new lines do not follow from those that were read; real damage shows when all is read

    def _read(self, since: Mapping[str, Extent], manifest: Manifest) -> Batch:
        """Everything committed after `since`, checked. Exchange vectors stay on disk until they are asked for."""
        batch = Batch()
        for name in files.LINE_FILES:
            batch.lines[name] = []
            for number, payload in read_lines(self.path / name, since[name], manifest.files[name]):
                if payload is None:
                    raise damaged(self.path / name, number)
                batch.lines[name].append(payload)
        for name in (files.TURN_ROWS, files.RECORD_ROWS, files.NODE_ROWS):
            rows, sound = read_rows(self.path / name, since[name], manifest.files[name], manifest.embedder.dimension)
            if not sound:
                raise damaged(self.path / name, since[name].count + _first_bad_row(name, rows, since, batch))
            batch.rows[name] = rows
        return batch

    def _begin(self) -> tuple[State, Manifest]:
        self._writing.acquire()
        try:
            if self._in_transaction:
                raise StoreError("this thread is in a transaction already", hint="leave the first one before the next")
            if self._log.read_only:
                raise StoreError(f"{self.path} was opened read-only", hint="open it without read_only to write")
            with self._lock:
                begun = self._now(), self._log.manifest
        except BaseException:
            self._writing.release()
            raise
        self._in_transaction = True
        return begun

    def _end(self, batch: Batch | None) -> None:
        """Commit `batch`, where there is one, and let the next transaction in."""
        try:
            if batch is not None and any(batch.lines.values()):
                with self._lock:
                    state, before = self._now(), self._log.manifest
                    self._state = None  # should `apply` be interrupted, the log is read again
                    try:
                        self._log.commit(batch)
                        state.apply(batch, _counts(before))
                        self._state = state
                    except BaseException:
                        self._state = state if self._log.manifest is before else None
                        raise
                    state.feed()
        finally:
            self._in_transaction = False
            self._writing.release()


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes by file name, without the drafts that a writer makes and moves away while this looks."""
    found: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size
    return found


def _counts(manifest: Manifest) -> dict[str, int]:
    return {name: extent.count for name, extent in manifest.files.items()}


def _first_bad_row(name: str, rows: Vectors, since: Mapping[str, Extent], batch: Batch) -> int:
    """Which of `rows`, counted from 1, is the first that does not match the checksum in its line."""
    checks: list[int] = []
    if name == files.TURN_ROWS:
        checks = [codec.decode(TurnLine, line).row for line in batch.lines[files.TURNS]]
    elif name == files.RECORD_ROWS:
        checks = [c for line in batch.lines[files.ENCODINGS] for c in codec.decode(EncodingLine, line).rows]
    elif name == files.NODE_ROWS:
        checks = [codec.decode(NodeLine, line).row for line in batch.lines[files.NODES]]
    before = since[name].check
    for number, (row, expected) in enumerate(zip(rows, checks, strict=False), 1):
        if zlib.crc32(row.tobytes(), before) != expected:
            return number
        before = expected
    return len(rows)

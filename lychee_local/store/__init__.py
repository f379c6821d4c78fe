"""The only package that touches a user's memory on disk.

`Store` is one user's memory: append-only files with checksums under one manifest (log, epoch), a catalogue derived from
them that says where everything lies (catalogue, catchup), and nearest neighbours among the vectors (vectors). Values
are decoded when they are asked for. Writing goes through a `Transaction`, which is durable as a whole or not at all;
what takes something away writes another epoch (draft, living). One process writes at a time, any number read.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.archive import ArchiveAbout, inspect
from lychee_local.store.arrival import Embedding, load
from lychee_local.store.catalogue import catalogue_error
from lychee_local.store.check import Finding, check
from lychee_local.store.departure import ArchiveReport, export
from lychee_local.store.disk import Disk, remove_folder
from lychee_local.store.draft import Draft
from lychee_local.store.epoch import Batch, damaged
from lychee_local.store.forget import Report, Selection, victims
from lychee_local.store.living import living
from lychee_local.store.log import Log, memories, no_memory, read_usage, require_memory
from lychee_local.store.manifest import EmbedderIdentity, Manifest, Precision, require_folder, user_folder
from lychee_local.store.nodes import VECTOR_KINDS, label_text, nodes_of_encoding
from lychee_local.store.opening import catch_up_if_free, readers_catalogue, writers_catalogue
from lychee_local.store.reembed import Embed, Embedded, ExchangeText
from lychee_local.store.repair import RepairReport, repair
from lychee_local.store.residue import Traces
from lychee_local.store.transaction import Transaction
from lychee_local.store.vectors import EXACT_BELOW, Vectors, unit_rows
from lychee_local.store.view import ROWS, Field, VectorHit, View
from lychee_local.store.words import Field as WordField
from lychee_local.types import (
    Decision,
    Node,
    NodeKind,
    Receipt,
    Record,
    Scope,
    Segment,
    TimeRange,
    Turn,
    Usage,
    turn_place,
)

__all__ = [
    "ArchiveAbout",
    "ArchiveReport",
    "EmbedderIdentity",
    "Embedding",
    "Finding",
    "Precision",
    "RepairReport",
    "Selection",
    "Store",
    "StoreStats",
    "Transaction",
    "VectorHit",
    "check",
    "inspect",
    "memories",
    "no_memory",
    "repair",
    "require_folder",
    "require_memory",
    "user_folder",
]


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
        self._lock = threading.RLock()  # the view below
        self._writing = threading.RLock()  # held for the length of a transaction
        self._in_transaction = False
        self._in_snapshot = False
        self._closed = False
        self._view: View | None = None
        with self._sound():
            self._view = self._opened()

    @classmethod
    def open(
        cls,
        home: Path,
        user: str,
        *,
        embedder: EmbedderIdentity | None,
        read_only: bool = False,
        precision: Precision = "float32",
        wait_seconds: float = 0.0,
        exact_below: int = EXACT_BELOW,
        disk: Disk | None = None,
    ) -> Self:
        """Open, or unless `read_only` create, the memory of `user` below `home`.

        With `embedder` None an existing memory is opened whatever its embedder: enough for all that embeds nothing.
        Vector search is exact up to `exact_below` rows and approximate above. `precision` is that of the vectors of a
        memory that is created here. `disk` takes the place of the operating system's writes (for tests).

        Raises:
            BadInput: an unusable user name.
            StoreLocked: another process writes this memory and did not finish within `wait_seconds`.
            StoreMismatch: written with another embedder, for another user, or in a newer format.
            StoreDamaged: a file is missing, cut off or not what was committed; says which and what is lost.
            StoreError: the folder cannot be used, or `read_only` and there is no memory yet.
        """
        log = Log(home, user, embedder, read_only=read_only, precision=precision, wait_seconds=wait_seconds, disk=disk)
        try:
            return cls(log, exact_below=exact_below)
        except BaseException:
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
        """Show what another process has committed; True if anything changed."""
        with self._lock:
            before = self._view
            generation = -1 if before is None else before.generation
            with self._held() as view:
                if self._log.read_only and not self._in_snapshot:
                    view = self._follow(view)
            return view is not before or view.generation != generation

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Inside, everything is as of one commit, the latest one. Other threads wait, so keep it short."""
        with self._held():
            self.refresh()
            if self._in_snapshot or not self._log.read_only:
                yield  # the lock keeps this process's own commits out, and there are no others
                return
            view = self._pinned()
            self._in_snapshot = True
            try:
                yield
            finally:
                self._in_snapshot = False
                view.catalogue.end()

    def sessions(self) -> tuple[str, ...]:
        """In the order of their first turns."""
        with self._reading() as view:
            return view.catalogue.sessions()

    def speakers(self) -> tuple[str, ...]:
        """Every name under which somebody speaks, sorted."""
        with self._reading() as view:
            return view.catalogue.speakers()

    def following(self, session: str) -> int:
        """The index of the session's next turn; indexes are never used again, so it can be more than its turns."""
        with self._reading() as view:
            return view.catalogue.following(session)

    def turns(self, session: str, start: int = 0, stop: int | None = None) -> tuple[Turn, ...]:
        """Those with start <= index < stop, by index; forgotten ones are missing. Empty for an unknown session."""
        with self._reading() as view:
            return tuple(map(view.catalogue.turn, view.catalogue.turn_numbers(session, start, stop)))

    def turn(self, turn_id: str) -> Turn:
        """Raises KeyError for an unknown or forgotten id."""
        with self._reading() as view:
            number = view.catalogue.turn_number(turn_id)
            if number is None:
                raise KeyError(turn_id)
            return view.catalogue.turn(number)

    def turns_by_id(self, ids: Collection[str]) -> dict[str, Turn]:
        """Many at once, for a fraction of the time; unknown and forgotten ones are missing, the order is free."""
        with self._reading() as view:
            return view.catalogue.turns_by_id(ids)

    def turn_by_ref(self, session: str, ref: str) -> Turn | None:
        with self._reading() as view:
            number = view.catalogue.turn_by_ref(session, ref)
            return None if number is None else view.catalogue.turn(number)

    def decisions(self, session: str) -> tuple[Decision, ...]:
        """The segmenter's log, one entry per exchange, in order. The exchanges have no text: read their turns."""
        with self._reading() as view:
            return tuple(view.catalogue.decision(n).decision for n in view.catalogue.decision_numbers(session))

    def exchange_vectors(self, session: str) -> Vectors:
        """The vectors of `decisions(session)`, float32 of shape (n, dimension), read from disk.

        Raises:
            StoreDamaged: a row does not match its checksum.
        """
        with self._reading() as view:
            numbers = view.catalogue.decision_numbers(session)
            rows = view.decision_rows(numbers)
            for number, row in zip(numbers, rows, strict=True):
                if not codec.matches(row, view.catalogue.decision(number).row):
                    raise damaged(view.folder / files.DECISION_ROWS, number + 1)
            return rows.astype(np.float32)

    def segments(self, session: str | None = None) -> tuple[Segment, ...]:
        with self._reading() as view:
            return tuple(map(view.catalogue.segment, view.catalogue.segment_numbers(session)))

    def holds_segment(self, segment_id: str) -> bool:
        with self._reading() as view:
            return view.catalogue.segment_number(segment_id) is not None

    def pending(self) -> tuple[Segment, ...]:
        """Segments that no encoding covers yet, oldest first."""
        with self._reading() as view:
            return tuple(map(view.catalogue.segment, view.catalogue.pending()))

    def encoding_of(self, segment_id: str) -> int | None:
        """The number of the segment's encoding; None where it waits or does not exist."""
        with self._reading() as view:
            return view.catalogue.encoding_of(segment_id)

    def encoder_of(self, segment_id: str) -> str | None:
        """The name of what encoded the segment; None where it waits, or does not exist, or that was not kept.

        Encodings from before it was kept are known to be by rules where all of their records are.
        """
        with self._reading() as view:
            number = view.catalogue.encoding_of(segment_id)
            if number is None:
                return None
            line = view.catalogue.encoding(number)
            by_rules = bool(line.records) and all(record.origin == "rules" for record in line.records)
            return line.encoder or ("rules" if by_rules else None)

    def preceding(self, segment: Segment, *, records: int) -> tuple[str, tuple[Record, ...]]:
        """What the earlier segments of its session gave: the note of the last of them that is encoded, and the last
        `records` of their records, in order. It is the same whenever `segment` is encoded, soon or years later."""
        note = None
        found: dict[int, None] = {}
        with self._reading() as view:
            for number, noted in view.catalogue.encodings_before(segment.id):
                if note is None:
                    note = view.catalogue.encoding(number).note if noted else ""
                found |= dict.fromkeys(reversed(view.catalogue.records_of_encoding(number)))
                if len(found) >= records:
                    break
            return note or "", tuple(map(view.catalogue.record, list(found)[:records][::-1]))

    def records(self, session: str | None = None, *, latest: int | None = None) -> tuple[Record, ...]:
        """In the order of their first encoding; with `latest` only that many, the last ones."""
        with self._reading() as view:
            return tuple(map(view.catalogue.record, view.catalogue.record_numbers(session, latest)))

    def record(self, record_id: str) -> Record:
        """Raises KeyError for an unknown or forgotten id."""
        with self._reading() as view:
            return view.records((record_id,))[record_id]

    def records_by_id(self, ids: Collection[str]) -> dict[str, Record]:
        """Many at once, for a fraction of the time, in the order of `ids`; unknown and forgotten ones are missing."""
        with self._reading() as view:
            return view.records(ids)

    def segment_records(self, segment_id: str) -> tuple[Record, ...]:
        """What this segment's encoding gave, as it stands now; empty where it gave nothing or is pending.

        Raises:
            KeyError: there is no such segment.
        """
        with self._reading() as view:
            if view.catalogue.segment_number(segment_id) is None:
                raise KeyError(segment_id)
            encoding = view.catalogue.encoding_of(segment_id)
            numbers = [] if encoding is None else view.catalogue.records_of_encoding(encoding)
            return tuple(map(view.catalogue.record, numbers))

    def note(self, session: str) -> str:
        """The disambiguation note of the session's latest encoded segment."""
        with self._reading() as view:
            return view.catalogue.note(session)

    def node(self, node_id: str, *, latest: int | None = None) -> Node:
        """With `latest` only that many of its records, the newest. Raises KeyError for an unknown id."""
        with self._reading() as view:
            return view.nodes((node_id,), latest)[node_id]

    def nodes_by_id(self, ids: Collection[str], *, latest: int | None = None) -> dict[str, Node]:
        """Many at once, for a fraction of the time, in the order of `ids`; unknown ones are missing; `latest` as for
        `node`."""
        with self._reading() as view:
            return view.nodes(ids, latest)

    def nodes(self, kind: NodeKind | None = None) -> tuple[Node, ...]:
        """By their first records; dates last."""
        with self._reading() as view:
            return tuple(map(view.catalogue.node, view.catalogue.node_numbers(kind)))

    def temporal_nodes(self, when: TimeRange, *, latest: int | None = None) -> tuple[Node, ...]:
        """Nodes of kind temporal whose span overlaps `when`, earliest first; `latest` as for `node`."""
        with self._reading() as view:
            return tuple(view.catalogue.node(number, latest=latest) for number in view.catalogue.temporal(when))

    def search(
        self,
        field: Field,
        queries: Vectors,
        k: int,
        *,
        node_kinds: Collection[NodeKind] | None = None,
        scope: Scope | None = None,
    ) -> list[list[VectorHit]]:
        """The `k` nearest to each row of `queries`, best first, equal ones in the order of storing; fewer only where
        fewer exist.

        `node_kinds` limits a search among nodes, `scope` one among turns or records. Temporal nodes have no vectors:
        ask `temporal_nodes` for them.

        Raises:
            BadInput: `k` below 1, an unknown field, or queries that are not unit vectors of this memory's dimension.
        """
        if k < 1:
            raise BadInput(f"k is the number of hits wanted, at least 1, not {k}")
        if field not in ("turns", "records", "nodes"):
            raise BadInput(f"there is no field {field!r} to search: turns, records or nodes")
        if node_kinds is not None and field != "nodes":
            raise BadInput(f"node_kinds limits a search among nodes, not among {field}")
        if scope is not None and field == "nodes":
            raise BadInput("scope limits a search among turns or records, not among nodes")
        queries = unit_rows(queries, self.embedder.dimension, "the queries")
        with self._reading() as view:
            return view.search(field, queries, k, kinds=node_kinds, scope=scope)

    def vectors(self, field: Field, ids: Sequence[str]) -> Vectors:
        """The stored vectors of turns, records or nodes, float32 of shape (len(ids), dimension).

        Raises:
            KeyError: an id that is unknown or forgotten, or a node of a date, which has no vector.
        """
        with self._reading() as view:
            return view.vectors(field, ids)

    def words(self, field: WordField, query: str, k: int, *, scope: Scope | None = None) -> list[tuple[str, float]]:
        """The `k` turns or records that share the most telling words with `query`: ids and BM25, best first."""
        if k < 1:
            raise BadInput(f"k is the number of hits wanted, at least 1, not {k}")
        with self._reading() as view:
            return view.catalogue.words(field, query, k, scope)

    def usage(self) -> tuple[Usage, ...]:
        """Every model call that was logged, by any process, in the order of logging."""
        with self._reading():
            return tuple(codec.decode(Usage, line) for line in read_usage(self.path))

    def stats(self) -> StoreStats:
        with self._reading() as view:
            held = view.catalogue.counts()
            return StoreStats(
                sessions=held["session"],
                turns=held["turn"],
                segments=held["segment"],
                records=held["record"],
                nodes=held["node"],
                bytes=_sizes(self.path),
            )

    # --- writing -----------------------------------------------------------------------------------------------------

    def lacking(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of `nodes` of which this memory has no vector: new ones, and those whose label was forgotten."""
        with self._reading() as view:
            return [node for node in nodes if view.catalogue.label_row(node.id) is None]

    def missing_nodes(
        self, segment: Segment, records: Sequence[Record], *, withdrawn: bool = False
    ) -> tuple[tuple[Node, str], ...]:
        """The nodes that encoding `segment` into `records` would create, each with the text to embed for it.

        `withdrawn` says that the same transaction takes an earlier encoding of the segment back.

        Raises:
            BadInput: a record's text cannot be stored.
        """
        for record in records:
            codec.encode(record)
        made = [n for n in nodes_of_encoding(segment, records) if n.kind in VECTOR_KINDS]
        wanted = {n.id for n in self.lacking(made)} | {n.id for n in made if withdrawn and n.kind == "event_frame"}
        return tuple((n, label_text(n, records)) for n in made if n.id in wanted)

    def transaction(self) -> Transaction:
        """A context that commits on a clean exit and leaves nothing behind on an error.

        Raises (on entering):
            StoreError: this store was opened read-only, or this thread is in a transaction already.
        """
        return Transaction(self, self._begin, self._end)

    def forget(self, selection: Selection, *, dry_run: bool = False, on_progress: Report | None = None) -> Receipt:
        """Take `selection` out of every search, and all that was made from it, in one commit; `dry_run` only says what
        would go. Its bytes stay in the folder until `compact`: `erase` does both.

        Raises:
            BadInput: something is chosen that does not exist.
        """
        return self._forgetting(selection, dry_run=dry_run, on_progress=on_progress)[0]

    def erase(self, selection: Selection, *, on_progress: Report | None = None) -> Receipt:
        """`forget`, then `compact`, then search the bytes of the folder for what was forgotten."""
        before = sum(_sizes(self.path).values())
        held = {name: extent.count for name, extent in self._log.manifest.files.items()}
        receipt, traces = self._forgetting(selection, dry_run=False, on_progress=on_progress)
        for kept in self.path.glob("damaged-*"):  # what a repair has put aside may hold it too
            try:
                remove_folder(self._log.disk, kept)
            except OSError as error:
                raise files.os_error(error, "remove", kept) from error
        if not receipt.turns and not receipt.records:
            self.finish_erasure(on_progress=on_progress)  # an earlier call may have been stopped half-way
            return receipt
        self.compact(on_progress=on_progress)
        self._blank_usage({turn_place(i)[0] for i in receipt.turns} - set(self.sessions()))
        left = self._log.manifest.files
        residues, elsewhere = self._searched_for(traces)
        return replace(
            receipt,
            compacted=True,
            removed={name: held[name] - left[name].count for name in held if held[name] > left[name].count},
            bytes_before=before,
            bytes_after=sum(_sizes(self.path).values()),
            residues=residues,
            elsewhere=elsewhere,
        )

    def _blank_usage(self, sessions: Collection[str]) -> None:
        """Take the names of `sessions`, which are no more, out of the usage log; what their calls cost stays."""

        def blank(payload: bytes) -> bytes:
            usage = codec.decode(Usage, payload)
            return codec.encode(replace(usage, session=None)) if usage.session in sessions else payload

        if sessions:
            self._log.rewrite_usage(blank)

    def _searched_for(self, traces: Traces) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The bytes of the folder, with the catalogue closed. A process that opens and closes a file of SQLite's by
        itself loses SQLite's locks on it (sqlite.org/howtocorrupt.html, 2.2), and the next one to come believes to be
        the first and cuts off what this one has mapped."""
        with self._writing, self._lock:
            view, self._view = self._view, None
            if view is not None:
                view.close()
            return traces.in_folder(self.path, self._log.epoch)

    def _forgetting(self, selection: Selection, *, dry_run: bool, on_progress: Report | None) -> tuple[Receipt, Traces]:
        with self._writing, self._reading() as view:
            gone = victims(view.catalogue, selection, on_progress=on_progress)
            receipt = Receipt(
                turns=tuple(t.id for t in gone.turns),
                records=tuple(dict.fromkeys(r.id for r in gone.records)),
                nodes=tuple(n.label for n in gone.nodes),
                waiting=tuple(gone.waiting),
                dry_run=dry_run,
            )
            traces = Traces.of(gone, view.folder, view.dimension, view.precision)
            if not dry_run and (gone.turns or gone.records):
                self._begin()
                self._end(Batch(lines={files.FORGOTTEN: [codec.encode(gone.line)]}))
            return receipt, traces

    def finish_erasure(self, *, on_progress: Report | None = None) -> bool:
        """Compact if an `erase` was stopped after its commit and before its compaction; True if so."""
        with self._reading() as view:
            owed = not self._log.read_only and view.catalogue.holds_forgotten()
        if owed:
            self.compact(on_progress=on_progress)
        return owed

    def compact(self, *, on_progress: Report | None = None) -> None:
        """Write everything that is left into new files and remove the old ones. Nothing of what was forgotten remains.

        Raises:
            StoreDamaged: something that should be kept does not match its checksum; nothing is changed then.
            StoreError: the disk does not take it; nothing is changed then.
        """

        def write(folder: Path) -> Manifest:
            view, old = self._now(), self._log.manifest
            draft = Draft(folder, old.user, old.embedder, precision=old.precision, disk=self._log.disk)
            with draft:
                for batch in living(view.folder, old, view.catalogue):
                    draft.add(batch)
                written = draft.finish(on_progress=on_progress)
            for field, index in view.indexes.items():
                kept = np.zeros(index.count, dtype=np.bool_)
                kept[view.catalogue.living_rows(field)] = True
                index.carry(folder / ROWS[field], kept, self._log.disk)
            return written

        with self._another_epoch():
            self._log.rewrite(write)

    def reindex(
        self,
        embedder: EmbedderIdentity,
        embed: Embed,
        *,
        exchange_text: ExchangeText,
        precision: Precision | None = None,
        on_progress: Report | None = None,
    ) -> None:
        """Embed everything anew and switch to it at once; until then, and if this fails, all is as before.

        What was embedded before an interruption is kept and not embedded again. `embed` gives one unit vector of
        `embedder.dimension` for each text; `exchange_text` is what is embedded for an exchange of these turns.

        Raises:
            BadInput: `embed` gives something else.
            StoreDamaged, StoreError: as `compact`.
        """

        def write(folder: Path) -> Manifest:
            view, old = self._now(), self._log.manifest
            kept = precision or old.precision
            with (
                Embedded(self._log.epoch, embedder, embed, self._log.disk) as embedded,
                Draft(folder, old.user, embedder, precision=kept, disk=self._log.disk) as draft,
            ):
                for batch in embedded.anew(view.catalogue, old, view.folder, kept, exchange_text, on_progress):
                    draft.add(batch)
                return draft.finish()

        with self._another_epoch():
            self._log.rewrite(write)

    def export(
        self, target: Path, *, vectors: bool = True, overwrite: bool = False, on_progress: Report | None = None
    ) -> ArchiveReport:
        """Write this memory into one archive (docs/archive.md), as of now; nothing that was forgotten goes in.

        Raises:
            BadInput: `target` exists and `overwrite` is not set.
            StoreDamaged, StoreError: as `compact`; there is no `target` then, or the one there was.
        """
        while True:
            with self.snapshot(), self._reading() as view:
                generation, covered = view.catalogue.covers()
                manifest = replace(self._log.manifest, generation=generation, files=covered)
                try:
                    return export(
                        self.path,
                        manifest,
                        view.catalogue,
                        target,
                        vectors=vectors,
                        overwrite=overwrite,
                        disk=self._log.disk,
                        on_progress=on_progress,
                    )
                except StoreDamaged:
                    now = self._log.poll()
                    if now is None or now.epoch == manifest.epoch:
                        raise
            # Another process has put a new epoch in the place of this one: the next snapshot is of that.

    def load(self, source: Path, *, embedding: Embedding | None = None, on_progress: Report | None = None) -> None:
        """Take an archive into this memory, which must have no turns yet. `embedding` makes vectors anew where those of
        the archive are of another embedder, or missing.

        Raises:
            BadInput, StoreDamaged, StoreError: the archive or this memory cannot be used for that; nothing is changed.
        """
        with self._another_epoch():
            load(source, self._log, embedding=embedding, on_progress=on_progress)

    @contextlib.contextmanager
    def _another_epoch(self) -> Iterator[None]:
        """Around whatever puts another epoch in the place of this one, which is opened then."""
        with self._writing:
            if self._in_transaction:
                raise StoreError("this thread is in a transaction", hint="leave it first")
            with self._held() as view:
                before = self._log.manifest.epoch
                try:
                    yield
                finally:
                    if self._log.manifest.epoch != before:
                        self._view = None
                        view.close()
                self._now()

    def add_usage(self, usage: Usage) -> None:
        """Log the cost of a model call at once; allowed for read-only stores too.

        Raises:
            StoreError: it could not be written.
        """
        line = codec.encode(usage)
        with self._held():
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
            view, self._view = self._view, None
            try:
                if view is not None and not self._log.read_only:
                    for index in view.indexes.values():
                        index.save(self._log.disk)
            finally:
                if view is not None:
                    view.close()
                self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _now(self) -> View:
        if self._closed:
            raise StoreError(f"the memory {self.path} is closed", hint="open it again")
        if self._view is None:
            self._view = self._opened()
        elif self._log.read_only and not self._in_snapshot and not self._view.folder.exists():
            # Another process has written the memory anew. What was open can be read to its end, but not added to.
            return self._reopened()
        return self._view

    def _reopened(self) -> View:
        view, self._view = self._view, None
        if view is not None:
            view.close()
        self._log.adopt(self._log.poll() or self._log.manifest)
        self._view = self._opened()
        return self._view

    def _follow(self, view: View) -> View:
        """A reader's step to the latest commit."""
        manifest = self._log.poll()
        if manifest is not None and (manifest.epoch != self._log.manifest.epoch or view.catalogue.replaced()):
            return self._reopened()
        self._log.adopt(manifest or self._log.manifest)
        try:
            if view.catalogue.covers()[0] < self._log.manifest.generation:
                catch_up_if_free(self._log, view.catalogue)
            view.sync()
        except StoreError:
            if not self._was_written_anew():
                raise
            return self._reopened()
        return view

    def _pinned(self) -> View:
        """The view, showing the latest commit until its catalogue is told that this was the end."""
        while True:
            view = self._now()
            view.catalogue.begin()
            try:
                view.sync()
                return view
            except BaseException as error:
                view.catalogue.end()
                if not isinstance(error, StoreError) or not self._was_written_anew():
                    raise
                self._reopened()

    def _was_written_anew(self) -> bool:
        """Whether another process has put another epoch in the place of this one, whose files are gone then."""
        manifest = self._log.poll() if self._log.read_only else None
        return manifest is not None and manifest.epoch != self._log.manifest.epoch

    @contextlib.contextmanager
    def _held(self) -> Iterator[View]:
        with self._lock, self._sound():
            yield self._now()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[View]:
        """The view, whose answers are as of one commit until this ends: another process may commit in between."""
        with self._held() as view:
            if not self._log.read_only or view.catalogue.db.in_transaction:
                yield view
                return
            view.catalogue.begin()
            try:
                yield view
            finally:
                view.catalogue.end()

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """What SQLite says about the catalogue, in our words."""
        try:
            yield
        except sqlite3.Error as error:
            raise catalogue_error(error, self._log.epoch) from error

    def _opened(self) -> View:
        while True:
            try:
                return self._opened_once()
            except StoreError:
                if not self._was_written_anew():
                    raise
                self._log.adopt(self._log.poll() or self._log.manifest)

    def _opened_once(self) -> View:
        log = self._log
        catalogue = readers_catalogue(log) if log.read_only else writers_catalogue(log)
        try:
            return View(log.epoch, log.manifest, catalogue, exact_below=self._exact_below)
        except BaseException:
            catalogue.close()
            raise

    def _begin(self) -> Manifest:
        self._writing.acquire()
        try:
            if self._in_transaction:
                raise StoreError("this thread is in a transaction already", hint="leave the first one before the next")
            if self._log.read_only:
                raise StoreError(f"{self.path} was opened read-only", hint="open it without read_only to write")
            with self._held():
                begun = self._log.manifest
        except BaseException:
            self._writing.release()
            raise
        self._in_transaction = True
        return begun

    def _end(self, batch: Batch | None) -> None:
        """Commit `batch`, where there is one, and let the next transaction in."""
        try:
            if batch is not None and any(batch.lines.values()):
                with self._held() as view:
                    self._commit(view, batch)
        finally:
            self._in_transaction = False
            self._writing.release()

    def _commit(self, view: View, batch: Batch) -> None:
        before = view.counts()
        self._log.commit(batch, view.catalogue.catch_up)
        view.sync()
        view.grow(self._log.disk, before)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes by file name, without the drafts that a writer makes and moves away while this looks."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found

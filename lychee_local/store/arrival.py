"""An archive's arrival in a memory that has no turns yet.

Owns the checks between the two. An archive may have been written by anybody, so each of its values is held to what a
transaction asks of a caller, and all of them are written before the memory switches to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np

from lychee_local.errors import BadInput, StoreDamaged
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.archive import Archive, Encoded, Following, Label, opened
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.draft import Draft
from lychee_local.store.epoch import Batch, row_bytes
from lychee_local.store.forget import Report
from lychee_local.store.graph import Vectors
from lychee_local.store.log import Log, read_usage
from lychee_local.store.manifest import LINE_FILES, ROW_FILES, USAGE, EmbedderIdentity, Manifest, Precision
from lychee_local.store.nodes import VECTOR_KINDS, event_frame, label_text
from lychee_local.store.reembed import Embed, ExchangeText
from lychee_local.store.vectors import unit_rows
from lychee_local.types import Decision, Segment, Turn, Usage

INDEX_LIMIT = 1 << 31  # of a turn in its session: far from what a database counts with


@dataclass(frozen=True, slots=True)
class Embedding:
    """How an import makes vectors of its own: `embed` makes them of texts, `exchange_text` says which text stands for
    an exchange of the given turns."""

    embed: Embed
    exchange_text: ExchangeText


def load(source: Path, log: Log, *, embedding: Embedding | None = None, on_progress: Report | None = None) -> Manifest:
    """Take the archive at `source` into the memory of `log`, which is open for writing and has no turns yet.

    The archive's vectors are taken over if they are of the memory's embedder; the memory gets their precision and the
    archive's calibration then. Otherwise `embedding` makes new ones, for which all turns are held in RAM. `on_progress`
    is told the lines taken in, of twice as many: they are read, then catalogued.

    Raises:
        BadInput: the memory has turns, or the archive's embedder is another one and `embedding` is not given, or the
            archive is not what `export` writes. Nothing is changed.
        StoreDamaged: the archive is damaged. Nothing is changed.
        StoreError: it cannot be read, or the memory cannot be written. Nothing is changed.
    """
    if log.manifest.files[files.TURNS].count:
        raise BadInput(
            f"{log.manifest.user!r} has a memory already, and an archive is not mixed into another memory",
            hint="import it under another user name",
        )
    with opened(source) as archive:
        taken = _vectors_fit(archive, log.manifest.embedder)
        if not taken and embedding is None:
            raise archive.bad(
                _why_not(archive, log.manifest.embedder),
                hint="import it with re-embedding, which makes all vectors anew",
            )
        archive.verify()
        calls = [call for some in archive.values(USAGE, Usage) for call in some]

        def write(folder: Path) -> Manifest:
            manifest = _filled(archive, folder, log, None if taken else embedding, on_progress)
            for call in _still_to_log([codec.decode(Usage, line) for line in read_usage(log.path)], calls):
                log.append_usage(codec.encode(call))
            return manifest

        return log.rewrite(write)


def _vectors_fit(archive: Archive, embedder: EmbedderIdentity) -> bool:
    theirs = archive.about.embedder
    same = all(getattr(theirs, part) == getattr(embedder, part) for part in ("name", "digest", "dimension"))
    return same and archive.about.vectors is not None


def _why_not(archive: Archive, embedder: EmbedderIdentity) -> str:
    if archive.about.vectors is None:
        return "it holds the text without vectors"
    theirs = archive.about.embedder
    return (
        f"its vectors are of embedder {theirs.name!r} ({theirs.digest[:12]}, {theirs.dimension} dimensions), those of "
        f"this memory of {embedder.name!r} ({embedder.digest[:12]}, {embedder.dimension} dimensions)"
    )


def _still_to_log(held: Sequence[Usage], wanted: Sequence[Usage]) -> Sequence[Usage]:
    """The log of calls is outside the commit: an import that was killed just before it has written some of it."""
    shared = min(len(held), len(wanted))
    return wanted[shared:] if held[:shared] == wanted[:shared] else wanted


def _filled(
    archive: Archive, folder: Path, log: Log, embedding: Embedding | None, on_progress: Report | None
) -> Manifest:
    about, held = archive.about, log.manifest
    report = on_progress or (lambda done, total: None)
    lines = sum(about.members[name].count for name in LINE_FILES)
    identity = held.embedder if embedding else about.embedder
    precision = held.precision if embedding or about.vectors is None else about.vectors
    with Draft(folder, held.user, identity, precision=precision, disk=log.disk) as draft:
        done = 0
        for batch in _Arrival(archive, identity, precision, embedding).batches():
            draft.add(batch)
            done += sum(map(len, batch.lines.values()))
            report(min(done, lines), 2 * lines)
        try:
            manifest = draft.finish(on_progress=lambda taken, _: report(lines + min(taken, lines), 2 * lines))
        except StoreDamaged as error:
            raise archive.bad(f"it contradicts itself: {error.message}") from error
    report(2 * lines, 2 * lines)
    return manifest


@dataclass(slots=True)
class _Session:
    """`following` is the index that its next turn gets; the turns are kept only where they are embedded again."""

    following: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)


class _Arrival:
    """The members of an archive as batches of an epoch, each value checked."""

    def __init__(
        self, archive: Archive, identity: EmbedderIdentity, precision: Precision, embedding: Embedding | None
    ) -> None:
        self._archive = archive
        self._dimension = identity.dimension
        self._precision = precision
        self._embedding = embedding
        self._sessions: dict[str, _Session] = {}
        self._unencoded: dict[str, str] = {}  # segment id -> session
        self._records = 0
        self._stored: Mapping[str, Iterator[Vectors]] = {}
        if embedding is None:
            self._stored = {name: archive.rows(name) for name in ROW_FILES}

    def batches(self) -> Iterator[Batch]:
        """Raises BadInput for a value that no memory holds and for a vector that is not of unit length."""
        for turns in self._archive.values(files.TURNS, Turn):
            yield self._turns(turns)
        yield from self._following()
        for decisions in self._archive.values(files.DECISIONS, Decision):
            yield self._decisions(decisions)
        for segments in self._archive.values(files.SEGMENTS, Segment):
            yield self._segments(segments)
        for encoded in self._archive.values(files.ENCODINGS, Encoded):
            yield self._encodings(encoded)
        if self._records != self._archive.about.records:
            raise self._archive.bad(f"it holds {self._records} records, and says {self._archive.about.records}")
        for labels in self._archive.values(files.NODES, Label):
            yield self._labels(labels)

    # --- the members -------------------------------------------------------------------------------------------------

    def _turns(self, turns: Sequence[Turn]) -> Batch:
        for turn in turns:
            held = self._sessions.setdefault(turn.session, _Session())
            if not held.following <= turn.index < INDEX_LIMIT:
                raise self._archive.bad(
                    f"turn {turn.index} of session {turn.session!r:.80} cannot follow turn {held.following - 1}"
                )
            held.following = turn.index + 1
            self._require_instant(turn.at, turn.id)
            if self._embedding:
                held.turns[turn.index] = turn
        rows, checks = self._rows(files.TURN_ROWS, len(turns), lambda _: [t.line for t in turns])
        return _batch(files.TURNS, [TurnLine(t, c) for t, c in zip(turns, checks, strict=True)], files.TURN_ROWS, rows)

    def _following(self) -> Iterator[Batch]:
        """Sessions whose last turns were forgotten."""
        for some in self._archive.values(files.FORGOTTEN, Following):
            for told in some:
                held = self._sessions.get(told.session)
                if held is None or not held.following <= told.following < INDEX_LIMIT:
                    raise self._archive.bad(f"session {told.session!r:.80} cannot go on with turn {told.following}")
                held.following = told.following
            line = ForgottenLine(following=tuple((told.session, told.following) for told in some))
            yield Batch({files.FORGOTTEN: [codec.encode(line)]})

    def _decisions(self, decisions: Sequence[Decision]) -> Batch:
        for d in decisions:
            self._require_turns(d.exchange.session, d.exchange.start, d.exchange.end)
        rows, checks = self._rows(
            files.DECISION_ROWS,
            len(decisions),
            lambda embedding: [self._exchange_text(d, embedding) for d in decisions],
        )
        lines = [
            DecisionLine(replace(d, exchange=replace(d.exchange, text="")), c)
            for d, c in zip(decisions, checks, strict=True)
        ]
        return _batch(files.DECISIONS, lines, files.DECISION_ROWS, rows)

    def _exchange_text(self, decision: Decision, embedding: Embedding) -> str:
        exchange = decision.exchange
        turns = self._sessions[exchange.session].turns
        said = [turns[i] for i in range(exchange.start, exchange.end + 1) if i in turns]
        return embedding.exchange_text(exchange, said)

    def _segments(self, segments: Sequence[Segment]) -> Batch:
        for segment in segments:
            self._require_turns(segment.session, segment.start, segment.end)
            if segment.id in self._unencoded:
                raise self._archive.bad(f"{segment.id:.80} is in it twice")
            self._unencoded[segment.id] = segment.session
        return Batch({files.SEGMENTS: [codec.encode(segment) for segment in segments]})

    def _encodings(self, encoded: Sequence[Encoded]) -> Batch:
        for each in encoded:
            session = self._unencoded.pop(each.segment, None)
            if session is None:
                raise self._archive.bad(f"{each.segment:.80} is encoded twice, or is not in it")
            for record in each.records:
                if record.session != session:
                    raise self._archive.bad(f"a record of session {record.session!r:.80} is in {each.segment:.80}")
                if record.turns:
                    self._require_turns(session, min(record.turns), max(record.turns))
                self._require_instant(record.said, record.id)
        records = [record for each in encoded for record in each.records]
        self._records += len(records)
        rows, checks = self._rows(files.RECORD_ROWS, len(records), lambda _: [r.embedded_text for r in records])
        check = iter(checks)
        lines = [
            EncodingLine(e.segment, e.note, e.records, tuple(islice(check, len(e.records))), e.encoder) for e in encoded
        ]
        batch = _batch(files.ENCODINGS, lines, files.RECORD_ROWS, rows)
        if not self._embedding:
            return batch
        # What is embedded for a segment's node are its records' sentences, which are at hand only here. So it gets a
        # vector again where the old one went with a forgotten record.
        frames = {event_frame(e.segment, e.records): e.records for e in encoded if e.records}
        label_rows, checks = self._rows(
            files.NODE_ROWS, len(frames), lambda _: [label_text(node, said) for node, said in frames.items()]
        )
        labels = [NodeLine(n.kind, n.key, n.label, c) for n, c in zip(frames, checks, strict=True)]
        frame_batch = _batch(files.NODES, labels, files.NODE_ROWS, label_rows)
        return Batch({**batch.lines, **frame_batch.lines}, {**batch.rows, **frame_batch.rows})

    def _labels(self, labels: Sequence[Label]) -> Batch:
        for label in labels:
            if label.kind not in VECTOR_KINDS:
                raise self._archive.bad(f"a node of kind {label.kind} has a label of its own")
        if self._embedding:
            labels = [label for label in labels if label.kind != "event_frame"]
        rows, checks = self._rows(files.NODE_ROWS, len(labels), lambda _: [label.label for label in labels])
        lines = [NodeLine(n.kind, n.key, n.label, c) for n, c in zip(labels, checks, strict=True)]
        return _batch(files.NODES, lines, files.NODE_ROWS, rows)

    # --- what all of them need ---------------------------------------------------------------------------------------

    def _rows(self, name: str, count: int, texts: Callable[[Embedding], list[str]]) -> tuple[Vectors, list[int]]:
        """The next `count` rows of `name`, and the checksum of each: the archive's, or new ones of `texts`."""
        if self._embedding and count:
            rows = unit_rows(self._embedding.embed(texts(self._embedding)), self._dimension, "the embedder")
        else:
            taken = list(islice(self._stored.get(name, iter(())), count))
            rows = np.array(taken, dtype=np.float32).reshape(len(taken), self._dimension)
        if len(rows) != count:
            raise self._archive.bad(f"there are {len(rows)} vectors for {count} texts of {name}")
        return rows, [zlib.crc32(row) for row in row_bytes(rows, self._precision)]

    def _require_turns(self, session: str, start: int, end: int) -> None:
        held = self._sessions.get(session)
        if held is None or not 0 <= start <= end < held.following:
            raise self._archive.bad(f"something in it is about turns {start} to {end} of session {session!r:.80}")

    def _require_instant(self, at: datetime | None, what: str) -> None:
        """The first and the last day of the calendar do not exist in every time zone."""
        try:
            if at is not None and at.tzinfo is not None:
                at.astimezone(UTC)
        except OverflowError as error:
            raise self._archive.bad(f"the time of {what:.80} is outside of the calendar: {at}") from error


def _batch(name: str, lines: Sequence[object], row_name: str, rows: Vectors) -> Batch:
    return Batch({name: [codec.encode(line) for line in lines]}, {row_name: rows})

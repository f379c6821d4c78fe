"""What is left of a damaged epoch, as the batches of a new one.

Owns what follows from each loss. A lost vector is embedded again. A lost turn takes only itself, what was logged about
it, and what was made from it alone. A segment whose records are lost waits again, and turns that nothing would encode
any more get a segment. Reads; writes nothing.
"""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from lychee_local.errors import BadInput, StoreError
from lychee_local.settings import SegmentSettings
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.check import Report, label_fits, loss
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.draft import LINES_AT_ONCE
from lychee_local.store.epoch import Batch, read_rows, row_bytes
from lychee_local.store.manifest import EmbedderIdentity, Extent, Precision
from lychee_local.store.nodes import VECTOR_KINDS, label_text, nodes_of_encoding
from lychee_local.store.salvage import RowSums, whole_lines
from lychee_local.store.vectors import Vectors, unit_rows
from lychee_local.types import Decision, Node, Record, Segment, node_id

L = TypeVar("L")

LETTERS_A_TOKEN = 4  # a rough measure, for a segment whose exchanges are not logged
_SEGMENT_ID = re.compile(r"segment:(.*):(\d+)-(\d+)(?:@(\d+))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Origin:
    """A damaged epoch. `files` is None where the manifest that knew them is lost: then every whole line counts."""

    folder: Path
    embedder: EmbedderIdentity
    precision: Precision
    generation: int
    epoch: int
    files: Mapping[str, Extent] | None


@dataclass(slots=True)
class _Session:
    """What is kept of one session."""

    turns: array[int] = field(default_factory=lambda: array("q"))  # indexes
    numbers: array[int] = field(default_factory=lambda: array("q"))  # of their lines
    letters: array[int] = field(default_factory=lambda: array("q"))  # of the texts of these turns
    decisions: list[Decision] = field(default_factory=list)
    has_vector: list[bool] = field(default_factory=list)  # of these decisions; without one they are not kept
    following: int = 0

    def living(self, start: int, end: int) -> Sequence[int]:
        return self.turns[bisect_left(self.turns, start) : bisect_left(self.turns, end + 1)]

    def tokens(self, start: int, end: int) -> int:
        """Roughly."""
        first, last = bisect_left(self.turns, start), bisect_left(self.turns, end + 1)
        return sum(self.letters[first:last]) // LETTERS_A_TOKEN + 1

    def logged(self, start: int, end: int) -> list[Decision]:
        """Those on exchanges that begin and end there."""
        first = bisect_left(self.decisions, start, key=lambda d: d.exchange.start)
        last = bisect_left(self.decisions, end + 1, key=lambda d: d.exchange.start)
        return [d for d in self.decisions[first:last] if d.exchange.end <= end]

    def segment(self, name: str, start: int, end: int) -> Segment:
        """One of these turns; exact where all of its exchanges are logged."""
        logged = self.logged(start, end)
        if logged and sum(d.exchange.end - d.exchange.start + 1 for d in logged) == end - start + 1:
            return _segment(logged)
        return Segment(name, start, end, "session_flush", self.tokens(start, end), max(1, len(logged)), 1.0)


class Remains:
    """The whole lines and rows of `origin`. `done` and `lost` speak of what `batches` has given so far."""

    def __init__(
        self, origin: Origin, embed: Callable[[Sequence[str]], Vectors] | None, on_progress: Report | None
    ) -> None:
        self._origin = origin
        self._embed = embed
        self._report = on_progress or (lambda done, total: None)
        self._total = sum(origin.files[name].count for name in files.LINE_FILES) if origin.files else 0
        self._read = 0
        self._missing: Counter[str] = Counter()  # lines that are lost, by file
        self._embedded = 0
        self._made = 0  # segments
        self._notes: list[str] = []
        self._gone: dict[str, set[int]] = {}
        self._sessions: dict[str, _Session] = {}
        self._segments: dict[str, Segment] = {}

    def batches(self) -> Iterator[Batch]:
        """Everything that is kept.

        Raises:
            StoreError: vectors must be made and there is no `embed`.
            BadInput: `embed` gives anything but unit vectors.
        """
        for _, line in self._values(files.FORGOTTEN, ForgottenLine):
            self._note_gone(line)
        yield from self._turns()
        yield from self._decisions()
        encodings = self._read_segments()
        yield from self._nodes(encodings)
        yield from self._encodings(encodings)
        segments = [codec.encode(segment) for segment in self._segments.values()]
        yield Batch({files.SEGMENTS: segments})
        following = [
            (name, held.following)
            for name, held in self._sessions.items()
            if held.turns and held.following > held.turns[-1] + 1
        ]
        if following:
            yield Batch({files.FORGOTTEN: [codec.encode(ForgottenLine(following=tuple(following)))]})

    @property
    def done(self) -> list[str]:
        said = [f"everything whole in {self._origin.folder.name} was written anew"]
        if self._embedded:
            what = "one vector was" if self._embedded == 1 else f"{self._embedded} vectors were"
            said.append(f"{what} made again")
        if self._made:
            what = "one segment was" if self._made == 1 else f"{self._made} segments were"
            said.append(f"{what} made of turns that no segment covered any more, to be encoded")
        return said

    @property
    def lost(self) -> list[str]:
        counts = {name: count for name, count in self._missing.items() if count}
        by_file = [f"{loss(name, count)} ({name})" for name, count in counts.items() if loss(name, count)]
        return [*by_file, *self._notes]

    # --- reading -----------------------------------------------------------------------------------------------------

    def _values(
        self, name: str, kind: type[L], rows: RowSums | None = None, *, count: bool = True
    ) -> Iterator[tuple[int, L]]:
        """The lines that are whole, each once; with `count` those that are not are lost. Where no manifest says how
        many there were, their `rows` do."""
        extent = None if self._origin.files is None else self._origin.files[name]
        whole, broken = 0, set[int]()
        for line in whole_lines(self._origin.folder / name, extent):
            if line.payload is None:
                broken.add(line.number)
                continue
            broken.discard(line.number)
            try:
                value = codec.decode(kind, line.payload)
            except ValueError:  # of another version, perhaps; to us it says nothing
                broken.add(line.number)
                continue
            whole += 1
            self._read += 1
            yield line.number, value
        if count:
            expected = len(rows or ()) if extent is None else extent.count
            self._missing[name] += max(expected - whole, len(broken) if extent is None else 0)
            self._report(self._read, max(self._read, self._total))

    def _sums(self, name: str) -> RowSums:
        origin = self._origin
        extent = None if origin.files is None else origin.files[name]
        return RowSums(origin.folder / name, extent, origin.embedder.dimension, origin.precision)

    def _note_gone(self, line: ForgottenLine) -> None:
        for name, numbers in line.by_file.items():
            self._gone.setdefault(name, set()).update(numbers)
        for session, index in line.following:
            self._session(session).following = index

    def _is_gone(self, name: str, number: int) -> bool:
        return number in self._gone.get(name, ())

    def _session(self, name: str) -> _Session:
        return self._sessions.setdefault(name, _Session())

    # --- vectors -----------------------------------------------------------------------------------------------------

    def _rows(self, name: str, found: Sequence[int | None], texts: Sequence[str]) -> tuple[Vectors, list[int]]:
        """The rows of the file `name` with these numbers; where there is none the text is embedded. And their
        checksums."""
        origin = self._origin
        vectors = np.zeros((len(found), origin.embedder.dimension), dtype=np.float32)
        first = next((number for number in found if number is not None), 0)
        together = list(found) == list(range(first, first + len(found)))
        for place, number in enumerate(found[:1] if together else found):
            if number is not None:
                count = len(found) if together else 1
                rows = read_rows(origin.folder / name, number, count, origin.embedder.dimension, origin.precision)
                vectors[place : place + count] = rows
        lacking = [place for place, number in enumerate(found) if number is None]
        if lacking:
            vectors[lacking] = self._embedded_anew([texts[place] for place in lacking])
        return vectors, [zlib.crc32(row) for row in row_bytes(vectors, origin.precision)]

    def _embedded_anew(self, texts: Sequence[str]) -> Vectors:
        if self._embed is None:
            raise StoreError(
                f"vectors in {self._origin.folder} are damaged, they must be made again from their texts",
                hint=f"repair it with the embedder {self._origin.embedder.name}; nothing was changed",
            )
        rows = unit_rows(self._embed(texts), self._origin.embedder.dimension, "the embedder")
        if len(rows) != len(texts):
            raise BadInput(f"the embedder gave {len(rows)} vectors for {len(texts)} texts")
        self._embedded += len(texts)
        return rows

    # --- turns and what was logged about them ------------------------------------------------------------------------

    def _turns(self) -> Iterator[Batch]:
        sums = self._sums(files.TURN_ROWS)
        values = self._values(files.TURNS, TurnLine, sums)
        while some := list(islice(values, LINES_AT_ONCE)):
            kept = [(number, line) for number, line in some if self._takes_turn(number, line)]
            found = [sums.find(line.row, number) for number, line in kept]
            rows, checks = self._rows(files.TURN_ROWS, found, [line.turn.line for _, line in kept])
            lines = [codec.encode(TurnLine(line.turn, c)) for (_, line), c in zip(kept, checks, strict=True)]
            yield Batch({files.TURNS: lines}, {files.TURN_ROWS: rows})

    def _takes_turn(self, number: int, line: TurnLine) -> bool:
        if self._is_gone(files.TURNS, number):
            return False
        turn, held = line.turn, self._session(line.turn.session)
        if held.turns and turn.index <= held.turns[-1]:
            self._notes.append(f"{turn.id}, which stood behind a later turn of its session: {turn.text[:80]!r}")
            return False
        held.turns.append(turn.index)
        held.numbers.append(number)
        held.letters.append(len(turn.text))
        held.following = max(held.following, turn.index + 1)
        return True

    def _decisions(self) -> Iterator[Batch]:
        """A decision whose vector is damaged is lost: the text that it was made of is not the store's to know."""
        sums = self._sums(files.DECISION_ROWS)
        values = self._values(files.DECISIONS, DecisionLine, sums)
        while some := list(islice(values, LINES_AT_ONCE)):
            found = [sums.find(line.row, number) for number, line in some]
            kept = [
                (line, row)
                for (number, line), row in zip(some, found, strict=True)
                if not self._is_gone(files.DECISIONS, number) and self._takes_decision(line.decision, row)
            ]
            rows, _ = self._rows(files.DECISION_ROWS, [row for _, row in kept], [])
            yield Batch({files.DECISIONS: [codec.encode(line) for line, _ in kept]}, {files.DECISION_ROWS: rows})

    def _takes_decision(self, decision: Decision, row: int | None) -> bool:
        exchange = decision.exchange
        held = self._sessions.get(exchange.session)
        whole = held is not None and len(held.living(exchange.start, exchange.end)) == exchange.end - exchange.start + 1
        if held is None or not whole or row is None:
            self._missing[files.DECISIONS] += 1
        if held is None:
            return False
        held.following = max(held.following, exchange.end + 1)
        if whole:
            held.decisions.append(decision)  # also without its vector it says where a segment began
            held.has_vector.append(row is not None)
        return whole and row is not None

    # --- segments ----------------------------------------------------------------------------------------------------

    def _read_segments(self) -> dict[str, int]:
        """Take in the segments, and make those that are missing; the encoding that counts of each."""
        for number, segment in self._values(files.SEGMENTS, Segment):
            if not self._is_gone(files.SEGMENTS, number):
                self._segments[segment.id] = segment
        counted: dict[str, int] = {}
        for number, line in self._values(files.ENCODINGS, EncodingLine, count=False):
            if not self._is_gone(files.ENCODINGS, number):
                counted[line.segment] = number  # the later of two: the earlier was withdrawn by a line that is lost
        made: list[Segment] = []
        for identifier in [name for name in counted if name not in self._segments]:
            if named := self._named(identifier):
                made.append(named)
            else:
                self._notes.append(f"{identifier} and its records: what they were made from is lost")
        stored: dict[str, list[Segment]] = {name: [] for name in self._sessions}
        for segment in (*self._segments.values(), *made):
            held = self._sessions.get(segment.session)
            if held is None or not held.living(segment.start, segment.end):
                self._segments.pop(segment.id, None)
                said = " and its records" if segment.id in counted else ""
                self._notes.append(f"{segment.id}{said}: all of its turns are lost")
            else:
                held.following = max(held.following, segment.end + 1)
                stored[segment.session].append(segment)
        unknown = self._missing[files.SEGMENTS] > len(made)  # a segment that waited is lost, and nothing names it
        made = [segment for segment in made if segment in stored[segment.session]]
        for name, held in self._sessions.items():
            more = [s for s in cover(name, held, stored[name], close=unknown) if s.id not in self._segments]
            self._made += len(more)
            made += more
        made.sort(key=self._last_line)
        ordered = merge(self._segments.values(), made, key=self._last_line)
        self._segments = {segment.id: segment for segment in ordered}
        return counted

    def _last_line(self, segment: Segment) -> tuple[int, tuple[int, int]]:
        """Segments stand in the order in which they ended."""
        held = self._sessions[segment.session]
        return held.numbers[bisect_left(held.turns, segment.end + 1) - 1], segment.chars or (0, 0)

    def _named(self, identifier: str) -> Segment | None:
        """The segment that an encoding names, as far as its name and the segmenter's log say it."""
        match = _SEGMENT_ID.fullmatch(identifier)
        if match is None or match[1] not in self._sessions:
            return None
        held, start, end = self._sessions[match[1]], int(match[2]), int(match[3])
        if match[4] is None:
            return held.segment(match[1], start, end)
        return next((s for d in held.logged(start, end) if (s := _segment([d])).id == identifier), None)

    # --- records and nodes -------------------------------------------------------------------------------------------

    def _encodings(self, counted: Mapping[str, int]) -> Iterator[Batch]:
        values = self._kept_encodings(counted, self._sums(files.RECORD_ROWS), count=True)
        while some := list(islice(values, LINES_AT_ONCE)):
            texts = [record.embedded_text for line, _ in some for record in line.records]
            vectors, checks = self._rows(files.RECORD_ROWS, [row for _, rows in some for row in rows], texts)
            each = iter(checks)
            lines = [codec.encode(replace(line, rows=tuple(islice(each, len(rows))))) for line, rows in some]
            yield Batch({files.ENCODINGS: lines}, {files.RECORD_ROWS: vectors})

    def _kept_encodings(
        self, counted: Mapping[str, int], sums: RowSums, *, count: bool
    ) -> Iterator[tuple[EncodingLine, list[int | None]]]:
        """Each encoding that counts, without what was forgotten of it, and the rows of its records that are whole."""
        place = used = 0
        for number, line in self._values(files.ENCODINGS, EncodingLine, count=count):
            rows: list[tuple[Record, int | None, int]] = []
            for record, check in zip(line.records, line.rows, strict=True):
                row = sums.find(check, place)
                place = place if row is None else row  # behind a damaged line the count is wrong
                rows.append((record, row, place))
                place, used = place + 1, used + 1
            if counted.get(line.segment) != number or line.segment not in self._segments:
                continue
            kept = [(self._standing(r), row) for r, row, at in rows if not self._is_gone(files.RECORD_ROWS, at)]
            note = "" if self._is_gone("notes", number) else line.note
            whole = replace(line, note=note, records=tuple(r for r, _ in kept), rows=())
            yield whole, [row for _, row in kept]
        if count and self._origin.files is None and used < len(sums):
            self._missing[files.ENCODINGS] = max(1, self._missing[files.ENCODINGS])

    def _standing(self, record: Record) -> Record:
        """Without the turns that are lost."""
        turns = tuple(t for t in record.turns if self._sessions[record.session].living(t, t))
        return record if turns == record.turns else replace(record, turns=turns, chars=None)

    def _nodes(self, counted: Mapping[str, int]) -> Iterator[Batch]:
        """The labels of nodes that records point to. Where some are damaged, those that are missing are made again;
        where none is, what has no label now had none before."""
        sums = self._sums(files.NODE_ROWS)
        labels: dict[str, tuple[int, int | None]] = {}  # node -> its line and row; the later line counts
        for number, line in self._values(files.NODES, NodeLine, sums):
            if not self._is_gone(files.NODES, number):
                row = sums.find(line.row, number) if label_fits(line) else None
                labels[node_id(line.kind, line.key)] = number, row
        damaged = self._missing[files.NODES] > 0 or any(row is None for _, row in labels.values())
        wanted: set[str] = set()
        bare: dict[str, tuple[Node, str]] = {}  # without a label, with the text to embed for it
        for encoding, _ in self._kept_encodings(counted, self._sums(files.RECORD_ROWS), count=False):
            for node in nodes_of_encoding(self._segments[encoding.segment], encoding.records):
                if node.kind not in VECTOR_KINDS:
                    continue
                wanted.add(node.id)
                if labels.get(node.id, (0, None))[1] is None and node.id not in bare:
                    bare[node.id] = replace(node, records=()), label_text(node, encoding.records)
        yield from self._labels({i: held for i, held in labels.items() if i in wanted})
        missing = list(bare.values()) if damaged else []
        for first in range(0, len(missing), LINES_AT_ONCE):
            some = missing[first : first + LINES_AT_ONCE]
            rows, checks = self._rows(files.NODE_ROWS, [None] * len(some), [text for _, text in some])
            nodes = [NodeLine(n.kind, n.key, n.label, c) for (n, _), c in zip(some, checks, strict=True)]
            yield Batch({files.NODES: [codec.encode(node) for node in nodes]}, {files.NODE_ROWS: rows})

    def _labels(self, labels: Mapping[str, tuple[int, int | None]]) -> Iterator[Batch]:
        whole = (
            (codec.encode(line), row)
            for number, line in self._values(files.NODES, NodeLine, count=False)
            for held, row in (labels.get(node_id(line.kind, line.key), (-1, None)),)
            if held == number and row is not None
        )
        while some := list(islice(whole, LINES_AT_ONCE)):
            rows, _ = self._rows(files.NODE_ROWS, [row for _, row in some], [])
            yield Batch({files.NODES: [line for line, _ in some]}, {files.NODE_ROWS: rows})


# --- segments for turns that have none -------------------------------------------------------------------------------


def cover(name: str, held: _Session, segments: Sequence[Segment], *, close: bool) -> list[Segment]:
    """Segments of the turns that nothing would encode any more: the segmenter has passed them, they are in no segment,
    and it does not keep them for the next one. With `close` also of those that it keeps: their segment may have ended,
    and nobody would end it again in a session that does not go on."""
    finalised = max((s.end for s in segments), default=-1)
    stored = [d.exchange for d, has_vector in zip(held.decisions, held.has_vector, strict=True) if has_vector]
    passed = max([finalised, *(x.end for x in stored)])
    covered = {index for s in segments for index in held.living(s.start, s.end)}
    kept = {index for x in stored if x.start > finalised and not close for index in held.living(x.start, x.end)}
    bare = [index for index in held.living(0, passed) if index not in covered and index not in kept]
    if bare and bare[-1] > finalised:  # a segment of this one ends what the segmenter keeps before it
        bare = [index for index in held.living(0, bare[-1]) if index not in covered]
    whole = {(s.start, s.chars) for s in segments}
    fragments = [d for d in held.decisions if d.exchange.chars is not None and d.exchange.start <= finalised]
    alone = [_segment([d]) for d in fragments if (d.exchange.start, d.exchange.chars) not in whole]
    again = {segment.start for segment in alone}
    return [*_groups(name, held, [index for index in bare if index not in again]), *alone]


def _groups(name: str, held: _Session, bare: Sequence[int]) -> Iterator[Segment]:
    """Segments of these turns, cut where the segmenter cut, where others come between, and where one would get too
    long."""
    begins = {d.exchange.start for d in held.decisions if d.action != "append"}
    group: list[int] = []
    tokens = 0
    for index in bare:
        size = held.tokens(index, index)
        apart = bool(group) and len(held.living(group[-1], index)) != 2
        if group and (index in begins or apart or tokens + size > SegmentSettings().max_tokens):
            yield held.segment(name, group[0], group[-1])
            group, tokens = [], 0
        group.append(index)
        tokens += size
    if group:
        yield held.segment(name, group[0], group[-1])


def _segment(logged: Sequence[Decision]) -> Segment:
    """The segment of these steps of the segmenter."""
    first, last = logged[0].exchange, logged[-1].exchange
    tokens = sum(decision.exchange.tokens for decision in logged)
    return Segment(first.session, first.start, last.end, "session_flush", tokens, len(logged), 1.0, first.chars)

"""Does a memory hold what it says it holds?

Owns the search for damage: reads every committed line and row again, follows every reference, and has what is derived
compared with the lines. Changes nothing and takes no lock, so it works beside a writer.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from lychee_local.errors import StoreDamaged, StoreMismatch
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.derived import catalogue_problem, graph_problem
from lychee_local.store.log import read_manifest
from lychee_local.store.manifest import Extent, Manifest, user_folder
from lychee_local.store.nodes import event_frame, nodes_of_record, normalise_key
from lychee_local.store.salvage import RowSums, fits, pieces, whole_lines
from lychee_local.store.snapshot import graph_path
from lychee_local.types import Record, Segment, Turn, Usage, node_id

L = TypeVar("L")
Report = Callable[[int, int], None]
Part = Literal["manifest", "lines", "catalogue", "graph", "usage"]

REPORT_EVERY = 2_000  # lines between two reports of progress
GRAPHS = (files.TURN_ROWS, files.RECORD_ROWS, files.NODE_ROWS)

# What is lost for good with one line or row of a file; what is not named here can be derived again.
_ONE = {
    files.TURNS: "the text of one turn",
    files.DECISIONS: "one step of the segmenter's log",
    files.SEGMENTS: "where and why one segment ended",
    files.ENCODINGS: "the records of one segment, until it is encoded again",
    files.FORGOTTEN: "what was to be forgotten by it, which may come back",
    files.DECISION_ROWS: "one step of the segmenter's log",
    files.USAGE: "the token count of one model call",
}
_MANY = {
    files.TURNS: "the texts of {} turns",
    files.DECISIONS: "{} steps of the segmenter's log",
    files.SEGMENTS: "where and why {} segments ended",
    files.ENCODINGS: "the records of {} segments, until they are encoded again",
    files.FORGOTTEN: "what was to be forgotten by {} lines, which may come back",
    files.DECISION_ROWS: "{} steps of the segmenter's log",
    files.USAGE: "the token counts of {} model calls",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem. `loses` says what is lost for good, and is empty where everything can be derived again; `part` says
    what has to be mended."""

    what: str
    loses: str = ""
    part: Part = "lines"


def loss(name: str, count: int) -> str:
    """What is lost for good with `count` lines or rows of the file `name`."""
    return _ONE.get(name, "") if count == 1 else _MANY.get(name, "").format(count)


def check(folder: Path, *, on_progress: Report | None = None) -> tuple[Finding, ...]:
    """Every problem found in one user's folder; empty when all is well. `on_progress` is told the lines that were read
    and how many there are to read.

    Bytes beyond the committed ones, epochs that the manifest does not name, and a catalogue that lags behind are no
    problem: a killed writer leaves them, and the next one removes them or catches up.

    Raises:
        StoreError: a file cannot be read at all.
    """
    while True:
        found: tuple[Finding, ...] = ()
        failure: OSError | None = None
        try:
            seen = read_manifest(folder)
            if seen is None:
                return _without_manifest(folder, f"{folder / files.MANIFEST} is missing")
            try:
                found = tuple(_findings(folder, seen[1], on_progress or (lambda done, total: None)))
            except OSError as error:
                failure = error
            now = read_manifest(folder)
        except (StoreDamaged, StoreMismatch) as error:
            return _without_manifest(folder, error.message)
        except OSError as error:
            raise files.os_error(error, "check", folder) from error
        if (found or failure) and now is not None and now[1].epoch != seen[1].epoch:
            continue  # the files were rewritten meanwhile and the old ones removed: what was missed there says nothing
        if failure is not None:
            raise files.os_error(failure, "check", folder) from failure
        return found


def _without_manifest(folder: Path, problem: str) -> tuple[Finding, ...]:
    """What can be told where nothing says what is committed: the usage log stands beside the epochs, in no manifest."""
    return Finding(problem, part="manifest"), *_usage_findings(folder)


def _findings(folder: Path, manifest: Manifest, report: Report) -> Iterator[Finding]:
    if folder.absolute().name != user_folder(folder, manifest.user).name:
        yield Finding(f"{folder} holds the memory of {manifest.user!r}, which has another place", part="manifest")
    epoch = folder / manifest.folder
    found = _Lines(epoch, manifest, report).findings()
    yield from found
    if not found:  # else the same damage would be reported a second time
        try:
            problem = catalogue_problem(folder, manifest, on_progress=report)
        except StoreDamaged as error:
            yield Finding(f"the lines in {epoch} contradict each other: {error.message}")
            problem = ""
        if problem:
            what = f"{epoch / files.CATALOGUE} {problem}: it can be built again from the lines"
            yield Finding(what, part="catalogue")
    for rows in GRAPHS:
        if problem := graph_problem(folder, manifest, rows):
            yield Finding(f"{graph_path(epoch / rows)} {problem}: it can be built again from the rows", part="graph")
    yield from _usage_findings(folder)


# --- what the lines say ----------------------------------------------------------------------------------------------


def label_fits(line: NodeLine) -> bool:
    """Whether the label can be that of a node with this key, as far as the two alone tell."""
    if line.kind in ("entity", "topic"):
        return normalise_key(line.label) == line.key
    return line.kind != "event_frame" or line.label == line.key


class _Lines:
    """One pass over all lines and rows of an epoch."""

    def __init__(self, folder: Path, manifest: Manifest, report: Report) -> None:
        self._folder = folder
        self._manifest = manifest
        self._report = report
        self._total = 2 * sum(manifest.files[name].count for name in files.LINE_FILES)
        self._done = 0
        self._found: list[Finding] = []
        self._damaged: set[str] = set()  # line files whose later line numbers are uncertain
        self._sums: dict[str, RowSums] = {}
        self._gone: dict[str, set[int]] = {}
        self._living: dict[str, array[int]] = {}  # session -> indexes of its turns
        self._segments: dict[str, str] = {}  # id -> session
        self._encoded: set[str] = set()
        self._nodes: dict[str, int] = {}  # id -> line, of those that no encoding has named yet

    def findings(self) -> list[Finding]:
        for _, line in self._values(files.FORGOTTEN, ForgottenLine):
            self._note_gone(line)
        for number, said in self._values(files.TURNS, TurnLine, files.TURN_ROWS):
            self._row(files.TURN_ROWS, files.TURNS, number, said.row)
            if not self._is_gone(files.TURNS, number):
                self._turn(number, said.turn)
        for number, decided in self._values(files.DECISIONS, DecisionLine, files.DECISION_ROWS):
            self._row(files.DECISION_ROWS, files.DECISIONS, number, decided.row)
            x = decided.decision.exchange
            if not self._is_gone(files.DECISIONS, number) and self._living_in(x.session, x.start, x.end) != (
                x.end - x.start + 1
            ):
                self._say(files.DECISIONS, number, f"is about turns {x.start} to {x.end} of {x.session!r}")
        for number, segment in self._values(files.SEGMENTS, Segment):
            if not self._is_gone(files.SEGMENTS, number):
                self._segment(number, segment)
        for number, node in self._values(files.NODES, NodeLine, files.NODE_ROWS):
            self._row(files.NODE_ROWS, files.NODES, number, node.row)
            self._node(number, node)
        self._encodings()
        for identifier, number in self._nodes.items():
            self._found.append(
                Finding(f"{self._folder / files.NODES}, line {number + 1}: {identifier} points to no record")
            )
        self._require_whole_rows()
        return self._found

    def _values(self, name: str, kind: type[L], rows: str = "") -> Iterator[tuple[int, L]]:
        """The lines of one file that can be read, with their numbers; what is wrong with the others is found."""
        path, extent = self._folder / name, self._manifest.files[name]
        if rows:
            self._load(rows)
        faults: dict[int, str] = {}  # line -> what is lost with it
        whole, chained = 0, 0
        for line in whole_lines(path, extent):
            if line.payload is None:
                self._damaged.add(name)
                faults.setdefault(line.number, loss(name, 1))
                continue
            if line.sound:
                faults.pop(line.number, None)  # what seemed to be this line was a part of the one before
            else:
                self._damaged.add(name)
                faults[line.number] = ""
            whole, chained = whole + 1, zlib.crc32(line.payload, chained)
            try:
                yield line.number, codec.decode(kind, line.payload)
            except ValueError as error:
                self._found.append(
                    Finding(f"{path}, line {line.number + 1} cannot be understood: {error}", loss(name, 1))
                )
            self._step()
        for number, lost in faults.items():
            self._found.append(Finding(f"{path}, line {number + 1} does not match its checksum", lost))
        self._require_whole(path, extent, whole + sum(bool(lost) for lost in faults.values()), whole, chained)

    def _require_whole(self, path: Path, extent: Extent, told: int, whole: int, chained: int) -> None:
        name = path.name
        lost = loss(name, extent.count - told) if extent.count > told else ""
        size = path.stat().st_size if path.exists() else None
        if size is None and extent.bytes:
            self._damaged.add(name)
            self._found.append(Finding(f"{path} is missing", lost))
        elif size is not None and size < extent.bytes:
            self._damaged.add(name)
            self._found.append(Finding(f"{path} ends at byte {size}, {extent.bytes} are committed", lost))
        elif name not in self._damaged and (whole, chained) != (extent.count, extent.check):
            self._damaged.add(name)
            self._found.append(Finding(f"{path} does not end with line {extent.count} as it was committed", lost))

    def _step(self) -> None:
        self._done += 1
        if self._done % REPORT_EVERY == 0:
            self._report(self._done, self._total)

    def _say(self, name: str, number: int, what: str) -> None:
        self._found.append(Finding(f"{self._folder / name}, line {number + 1} {what}, which are not all stored"))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _load(self, name: str) -> None:
        path, extent, manifest = self._folder / name, self._manifest.files[name], self._manifest
        sums = RowSums(path, extent, manifest.embedder.dimension, manifest.precision)
        self._sums[name] = sums
        if len(sums) < extent.count:
            state = f"ends with row {len(sums)} of {extent.count}" if path.exists() else "is missing"
            self._found.append(Finding(f"{path} {state}", loss(name, extent.count - len(sums))))

    def _row(self, name: str, lines: str, number: int, expected: int) -> None:
        """Whether row `number` is that of its line. Behind a damaged line the numbers are uncertain, and any place will
        do."""
        sums = self._sums[name]
        found = sums.find(expected, number)
        if found == number or (found is not None and lines in self._damaged) or number >= len(sums):
            return  # beyond its end the file is cut, which was said
        where = f"{self._folder / name}, row {number + 1}"
        if found is not None:
            self._found.append(Finding(f"{where} does not match its checksum, its vector stands in row {found + 1}"))
        else:
            what = "does not match its checksum" if sums.sums[number] != expected else "is no unit vector"
            self._found.append(Finding(f"{where} {what}", loss(name, 1)))

    def _require_whole_rows(self) -> None:
        """Where no single row could be named, the checksum of the file still has to match."""
        for name, sums in self._sums.items():
            path = self._folder / name
            extent = self._manifest.files[name]
            named = any(str(path) in finding.what for finding in self._found)
            if not named and sums.check != extent.check:
                self._found.append(Finding(f"{path} does not match its checksum", loss(name, 1)))

    # --- references --------------------------------------------------------------------------------------------------

    def _note_gone(self, line: ForgottenLine) -> None:
        for name, numbers in line.by_file.items():
            self._gone.setdefault(name, set()).update(numbers)

    def _is_gone(self, name: str, number: int) -> bool:
        return number in self._gone.get(name, ())

    def _turn(self, number: int, turn: Turn) -> None:
        indexes = self._living.setdefault(turn.session, array("q"))
        if indexes and turn.index <= indexes[-1]:
            where = f"{self._folder / files.TURNS}, line {number + 1}"
            self._found.append(Finding(f"{where}: {turn.id} stands behind turn {indexes[-1]} of its session"))
            return
        indexes.append(turn.index)

    def _living_in(self, session: str, start: int, end: int) -> int:
        if files.TURNS in self._damaged:  # a reference to a turn that is lost is no second finding
            return end - start + 1
        indexes = self._living.get(session, array("q"))
        return bisect_left(indexes, end + 1) - bisect_left(indexes, start)

    def _segment(self, number: int, segment: Segment) -> None:
        if not self._living_in(segment.session, segment.start, segment.end):
            self._say(files.SEGMENTS, number, f"is about turns {segment.start} to {segment.end} of {segment.session!r}")
        if segment.id in self._segments:
            self._found.append(
                Finding(f"{self._folder / files.SEGMENTS}, line {number + 1}: {segment.id} is stored twice")
            )
        self._segments[segment.id] = segment.session

    def _node(self, number: int, line: NodeLine) -> None:
        self._nodes.setdefault(node_id(line.kind, line.key), number)
        if not label_fits(line):
            where = f"{self._folder / files.NODES}, line {number + 1}"
            self._found.append(Finding(f"{where}: the label {line.label!r} is not that of {line.key!r}"))

    def _encodings(self) -> None:
        """A withdrawn encoding still names its nodes: their lines stay until the memory is compacted."""
        row = 0
        for number, line in self._values(files.ENCODINGS, EncodingLine, files.RECORD_ROWS):
            where = f"{self._folder / files.ENCODINGS}, line {number + 1}"
            if len(line.rows) != len(line.records):
                self._found.append(Finding(f"{where} has {len(line.records)} records and {len(line.rows)} rows"))
            for place, expected in enumerate(line.rows):
                self._row(files.RECORD_ROWS, files.ENCODINGS, row + place, expected)
            for record in line.records:
                for node in (*nodes_of_record(record), event_frame(line.segment, [record])):
                    self._nodes.pop(node.id, None)
            if not self._is_gone(files.ENCODINGS, number):
                self._encoding(where, line, row)
            row += len(line.rows)
        if files.ENCODINGS in self._damaged:
            self._nodes.clear()  # a damaged encoding may have named what is left

    def _encoding(self, where: str, line: EncodingLine, row: int) -> None:
        session = self._segments.get(line.segment)
        if session is None:
            if files.SEGMENTS not in self._damaged:
                self._found.append(Finding(f"{where} is about {line.segment}, which is not stored"))
            return
        if line.segment in self._encoded:
            self._found.append(Finding(f"{where}: {line.segment} is encoded twice"))
        self._encoded.add(line.segment)
        for place, record in enumerate(line.records):
            if not self._is_gone(files.RECORD_ROWS, row + place) and not self._stands(record, session):
                self._found.append(Finding(f"{where}: {record.id} points to turns that are not stored"))

    def _stands(self, record: Record, session: str) -> bool:
        return record.session == session and all(self._living_in(session, turn, turn) for turn in record.turns)


def _usage_findings(folder: Path) -> Iterator[Finding]:
    """A last line that its writer did not finish is no problem."""
    path = folder / files.USAGE
    if path.exists() and not path.is_file():
        yield Finding(f"{path} is no file", loss(files.USAGE, 1), part="usage")
        return
    for number, line in enumerate(pieces(folder / files.USAGE, None), 1):
        if not usage_line_is_whole(line):
            what = f"{folder / files.USAGE}, line {number} does not match its checksum"
            yield Finding(what, loss(files.USAGE, 1), part="usage")


def usage_line_is_whole(line: bytes) -> bool:
    try:
        codec.decode(Usage, line[9:])
    except ValueError:
        return False
    return fits(line, 0)

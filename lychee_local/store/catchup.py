"""How lines get into the catalogue: what each of them adds, and what a forgotten one takes away.

Owns the order in which new lines are taken in. It is made so that the outcome depends only on the lines, not on how
many are taken in at once: lines that are named in forgotten.jsonl are known first and passed over, or taken back where
an earlier catch-up has taken them in; a node counts while a record points to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from lychee_local.errors import StoreDamaged
from lychee_local.store import codec, words
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.epoch import damaged, read_lines
from lychee_local.store.manifest import Extent
from lychee_local.store.nodes import event_frame, nodes_of_record
from lychee_local.types import Node, Record, Segment, Turn, node_id

L = TypeVar("L")
REPORT_EVERY = 2_000  # lines between two reports of progress
WORDS_AT_ONCE = 2_000  # texts; the index of words takes many in a seventh of the time that it takes them one by one


class Values(Protocol):
    """What has been taken in, decoded."""

    def turn(self, num: int) -> Turn: ...
    def encoding(self, num: int) -> EncodingLine: ...
    def segment(self, num: int) -> Segment: ...


class CatchUp:
    """One catch-up, inside one SQLite transaction of the caller."""

    def __init__(
        self,
        db: sqlite3.Connection,
        values: Values,
        since: Mapping[str, Extent],
        until: Mapping[str, Extent],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._db = db
        self._values = values
        self._since, self._until = since, until
        self._report = on_progress or (lambda done, total: None)
        self._done = 0
        self._total = sum(until[name].count - since[name].count for name in files.LINE_FILES)
        self._sessions: dict[str, int] = {}
        self._following: dict[str, int] = {}
        self._node_numbers: dict[str, int] = {}
        self._unsure: set[int] = set()  # nodes that perhaps no record points to
        self._new_words: dict[words.Field, list[tuple[int, str]]] = {"turns": [], "records": []}

    def run(self, folder: Path) -> None:
        """Take in everything new below `folder`.

        Raises:
            StoreDamaged: a line does not match its checksum or does not say what it should.
        """
        self._any_gone = False
        forgotten = [line for _, line in self._new(folder, files.FORGOTTEN, ForgottenLine)]
        for line in forgotten:
            self._note_forgotten(line)
        self._any_gone = self._run("SELECT 1 FROM gone LIMIT 1").fetchone() is not None
        for line in forgotten:
            self._take_back(line)
        for num, said in self._new(folder, files.TURNS, TurnLine, files.TURN_ROWS):
            self._add_turn(num, said.turn)
        for num, decided in self._new(folder, files.DECISIONS, DecisionLine):
            x = decided.decision.exchange
            self._run("INSERT INTO decision VALUES (?, ?, ?, ?)", num, self._session(x.session), x.start, x.end)
        for num, segment in self._new(folder, files.SEGMENTS, Segment):
            values = (num, segment.id, self._session(segment.session), segment.start, segment.end)
            self._run("INSERT INTO segment VALUES (?, ?, ?, ?, ?, NULL)", *values)
        for num, payload in self._lines(folder, files.NODES):
            self._add_label(num, codec.understood(NodeLine, files.NODES, num, payload))
        self._add_encodings(folder)
        self._write_words()
        self._prune()

    def _run(self, sql: str, *values: object) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def _new(self, folder: Path, name: str, kind: type[L], rows: str = "") -> Iterator[tuple[int, L]]:
        """The new lines of one file that are not forgotten, each with its number; the row in `rows` of one that is
        forgotten is buried."""
        for num, payload in self._lines(folder, name):
            if not self._is_gone(name, num):
                yield num, codec.understood(kind, name, num, payload)
            elif rows:
                self._bury(rows, num)

    def _lines(self, folder: Path, name: str) -> Iterator[tuple[int, bytes]]:
        """All new lines of one file; their places are written down."""
        for line in read_lines(folder / name, self._since[name], self._until[name]):
            if line.payload is None:
                raise damaged(folder / name, line.number + 1)
            self._run("INSERT INTO line VALUES (?, ?, ?, ?, ?)", name, line.number, line.start, line.size, line.seed)
            self._done += 1
            if self._done % REPORT_EVERY == 0:
                self._report(self._done, self._total)
            yield line.number, line.payload

    def _index_words(self, field: words.Field, num: int, text: str) -> None:
        self._new_words[field].append((num, text))
        if len(self._new_words[field]) >= WORDS_AT_ONCE:
            self._write_words()

    def _write_words(self) -> None:
        for field, texts in self._new_words.items():
            words.add(self._db, field, texts)
            texts.clear()

    def _is_gone(self, name: str, num: int) -> bool:
        return self._any_gone and (
            self._run("SELECT 1 FROM gone WHERE file = ? AND num = ?", name, num).fetchone() is not None
        )

    # --- what is taken back ------------------------------------------------------------------------------------------

    def _note_forgotten(self, line: ForgottenLine) -> None:
        for name, numbers in line.by_file.items():
            self._db.executemany("INSERT OR IGNORE INTO gone VALUES (?, ?)", ((name, n) for n in numbers))
        for session, index in line.following:
            self._following[session] = index

    def _take_back(self, line: ForgottenLine) -> None:
        """Undo what earlier catch-ups took in of the lines that `line` names."""
        since = self._since
        said: list[tuple[int, str]] = []
        for num in _below(line.turns, since[files.TURNS]):
            said.append((num, self._values.turn(num).line))
            self._run("DELETE FROM ref WHERE turn = ?", num)
            self._run("DELETE FROM turn WHERE num = ?", num)
            self._bury(files.TURN_ROWS, num)
        words.remove(self._db, "turns", said)
        for num in _below(line.decisions, since[files.DECISIONS]):
            self._run("DELETE FROM decision WHERE num = ?", num)
        rows = set(_below(line.records, since[files.RECORD_ROWS]))
        for num in _below(line.encodings, since[files.ENCODINGS]):
            rows.update(r[0] for r in self._run("SELECT num FROM occurrence WHERE encoding = ?", num))
            self._run("UPDATE segment SET encoding = NULL WHERE encoding = ?", num)
            self._run("DELETE FROM encoding WHERE num = ?", num)
        self._drop_occurrences(rows)
        for num in _below(line.segments, since[files.SEGMENTS]):
            self._run("DELETE FROM segment WHERE num = ?", num)
        for num in _below(line.notes, since[files.ENCODINGS]):
            self._run("UPDATE encoding SET noted = 0 WHERE num = ?", num)
        for num in _below(line.labels, since[files.NODES]):
            self._drop_label(num)
        for session, index in line.following:
            self._settle_session(session, index)

    def _bury(self, name: str, row: int) -> None:
        self._run("INSERT INTO dead(file, num) VALUES (?, ?)", name, row)

    def _drop_occurrences(self, rows: Iterable[int]) -> None:
        """Take records back row by row; what else was said of the same sentence stays, under its next row."""
        touched: dict[str, None] = {}
        for row in sorted(rows):
            found = self._run("SELECT record FROM occurrence WHERE num = ?", row).fetchone()
            if found is None:
                continue
            if found[0] not in touched:
                self._drop_record(found[0])
            touched[found[0]] = None
            self._run("DELETE FROM occurrence WHERE num = ?", row)
            self._bury(files.RECORD_ROWS, row)
        for record in touched:
            rest = self._run(
                "SELECT num, encoding, place FROM occurrence WHERE record = ? ORDER BY num", record
            ).fetchall()
            for row, encoding, place in rest:
                line = self._values.encoding(encoding)
                self._link_occurrence(row, line.records[place], line.segment)

    def _drop_record(self, record: str) -> None:
        [num, text] = self._run(
            "SELECT r.num, o.encoding || ' ' || o.place FROM record r JOIN occurrence o ON o.num = r.num "
            "WHERE r.id = ?",
            record,
        ).fetchone()
        encoding, place = map(int, text.split())
        self._write_words()  # it may be among them
        words.remove(self._db, "records", [(num, self._values.encoding(encoding).records[place].text)])
        self._unsure.update(row[0] for row in self._run("SELECT node FROM link WHERE record = ?", num))
        self._run("DELETE FROM link WHERE record = ?", num)
        self._run("DELETE FROM record WHERE num = ?", num)

    def _drop_label(self, num: int) -> None:
        found = self._run("SELECT num FROM node WHERE vector = ?", num).fetchone()
        if found is not None:
            self._bury(files.NODE_ROWS, num)
            self._run("UPDATE node SET vector = NULL WHERE num = ?", found[0])
            self._unsure.add(found[0])

    def _settle_session(self, name: str, following: int) -> None:
        """`following` can be more than what was taken in: the last turns may be new, and forgotten already."""
        [num] = self._run("SELECT num FROM session WHERE name = ?", name).fetchone() or (None,)
        if num is None:
            return
        [first] = self._run("SELECT num FROM turn WHERE session = ? ORDER BY place LIMIT 1", num).fetchone() or (None,)
        if first is None:
            self._run("DELETE FROM session WHERE num = ?", num)
            self._sessions.pop(name, None)  # it may begin again in this catch-up, under another number
        else:
            values = (first, following, num)
            self._run("UPDATE session SET first = ?, following = max(following, ?) WHERE num = ?", *values)

    # --- what is added -----------------------------------------------------------------------------------------------

    def _session(self, name: str) -> int:
        if name not in self._sessions:
            found = self._run("SELECT num FROM session WHERE name = ?", name).fetchone()
            if found is None:
                raise StoreDamaged(f"a line speaks of session {name!r}, of which no turn is stored")
            self._sessions[name] = found[0]
        return self._sessions[name]

    def _add_turn(self, num: int, turn: Turn) -> None:
        self._run(
            "INSERT INTO session(name, first, following) VALUES (?, ?, ?) ON CONFLICT(name) DO UPDATE SET "
            "following = max(following, excluded.following)",
            turn.session,
            num,
            max(self._following.get(turn.session, 0), turn.index + 1),
        )
        session = self._session(turn.session)
        day = None if turn.at is None else turn.at.date().toordinal()
        values = (num, session, turn.index, day, turn.speaker, turn.role)
        try:
            self._run("INSERT INTO turn VALUES (?, ?, ?, ?, ?, ?)", *values)
            if turn.ref is not None:
                self._run("INSERT INTO ref VALUES (?, ?, ?)", session, turn.ref, num)
        except sqlite3.IntegrityError as error:
            raise StoreDamaged(f"{turn.id} is stored twice, the second time in line {num + 1}") from error
        self._index_words("turns", num, turn.line)

    def _add_label(self, num: int, line: NodeLine) -> None:
        """A node that is met again after it was forgotten takes the new label and its vector; where that was forgotten
        too, it has none."""
        gone = self._is_gone(files.NODES, num)
        if gone:
            self._bury(files.NODE_ROWS, num)
        found = self._run("SELECT num, vector FROM node WHERE id = ?", node_id(line.kind, line.key)).fetchone()
        if found is None:
            if not gone:
                self._unsure.add(self._insert_node(Node(line.kind, line.key, line.label, ()), num))
            return
        node, before = found
        if before is not None:
            self._bury(files.NODE_ROWS, before)
        self._run("UPDATE node SET vector = ?, label = ? WHERE num = ?", None if gone else num, line.label, node)
        self._unsure.add(node)

    def _insert_node(self, node: Node, vector: int | None) -> int:
        since, until = (node.when.start.toordinal(), node.when.end.toordinal()) if node.when else (None, None)
        return (
            self._run(
                "INSERT INTO node(id, kind, key, label, vector, since, until) VALUES (?, ?, ?, ?, ?, ?, ?)",
                node.id,
                node.kind,
                node.key,
                node.label,
                vector,
                since,
                until,
            ).lastrowid
            or 0
        )  # never 0: SQLite counts rows from 1

    def _add_encodings(self, folder: Path) -> None:
        row = self._since[files.RECORD_ROWS].count
        for num, payload in self._lines(folder, files.ENCODINGS):
            encoding = codec.understood(EncodingLine, files.ENCODINGS, num, payload)
            if self._is_gone(files.ENCODINGS, num):
                for dead in range(row, row + len(encoding.records)):
                    self._bury(files.RECORD_ROWS, dead)
            else:
                self._add_encoding(num, encoding, row)
            row += len(encoding.records)

    def _add_encoding(self, num: int, line: EncodingLine, row: int) -> None:
        found = self._run("SELECT num, session FROM segment WHERE id = ?", line.segment).fetchone()
        if found is None:
            raise StoreDamaged(f"{files.ENCODINGS}, line {num + 1} is about {line.segment}, which is not stored")
        segment, session = found
        noted = not self._is_gone("notes", num)
        self._run("INSERT INTO encoding VALUES (?, ?, ?, ?)", num, segment, session, noted)
        self._run("UPDATE segment SET encoding = ? WHERE num = ?", num, segment)
        for place, record in enumerate(line.records):
            if self._is_gone(files.RECORD_ROWS, row + place):
                self._bury(files.RECORD_ROWS, row + place)
                continue
            self._run("INSERT INTO occurrence VALUES (?, ?, ?, ?)", row + place, record.id, num, place)
            self._link_occurrence(row + place, record, line.segment)

    def _link_occurrence(self, row: int, record: Record, segment: str) -> None:
        identifier = record.id
        found = self._run("SELECT num FROM record WHERE id = ?", identifier).fetchone()
        day = None if record.said is None else record.said.date().toordinal()
        if found is None:
            num = row
            values = (num, identifier, self._session(record.session), record.kind, record.speaker, day)
            self._run("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)", *values)
            self._index_words("records", num, record.text)
        else:
            num = found[0]
            self._run(
                "UPDATE record SET kind = ?, speaker = ?, day = ? WHERE num = ?", record.kind, record.speaker, day, num
            )
        for node in (*nodes_of_record(record), event_frame(segment, [record])):
            self._run("INSERT OR IGNORE INTO link VALUES (?, ?)", self._node(node), num)

    def _node(self, node: Node) -> int:
        identifier = node.id
        if identifier not in self._node_numbers:
            found = self._run("SELECT num FROM node WHERE id = ?", identifier).fetchone()
            self._node_numbers[identifier] = self._insert_node(node, None) if found is None else found[0]
        return self._node_numbers[identifier]

    def _prune(self) -> None:
        """Nodes that no record points to any more are no nodes; one without its label's vector is named as its first
        living record spells it."""
        for num in sorted(self._unsure):
            identifier, vector, when, linked = self._run(
                "SELECT id, vector, since, EXISTS (SELECT 1 FROM link WHERE node = num) FROM node WHERE num = ?", num
            ).fetchone()
            if not linked:
                if vector is not None:
                    self._bury(files.NODE_ROWS, vector)
                self._run("DELETE FROM node WHERE num = ?", num)
            elif vector is None and when is None:
                self._respell(num, identifier)

    def _respell(self, num: int, identifier: str) -> None:
        said = self._run(
            "SELECT o.encoding, o.place FROM link l JOIN record r ON r.num = l.record "
            "JOIN occurrence o ON o.record = r.id WHERE l.node = ? ORDER BY o.num",
            num,
        )
        for encoding, place in said:
            for node in nodes_of_record(self._values.encoding(encoding).records[place]):
                if node.id == identifier:
                    self._run("UPDATE node SET label = ? WHERE num = ?", node.label, num)
                    return


def _below(numbers: Iterable[int], extent: Extent) -> list[int]:
    return [n for n in numbers if n < extent.count]

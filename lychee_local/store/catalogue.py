"""Where everything lies: identifiers, places and dates to line and row numbers, records to nodes, words to texts.

Owns one SQLite file beside the lines of an epoch. It is derived: a catalogue that lags behind the manifest is caught up
from the lines, one that is missing or contradicts them is built again, and what it says is the same either way. The one
way in is `catch_up`, which a commit, a reader and a rebuild all take. Values are decoded from the lines when they are
asked for, so opening a memory costs the same whatever its size.

Numbers count from 0 and are those of lines: turn n is line n of turns.jsonl and row n of turns.rows. A record keeps the
row of its first occurrence; a sentence that is said again in its session stays one record with the turns of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar, get_args

from lychee_local.errors import StoreDamaged, StoreError
from lychee_local.store import codec, words
from lychee_local.store import manifest as files
from lychee_local.store.catchup import CatchUp
from lychee_local.store.codec import DecisionLine, EncodingLine, TurnLine
from lychee_local.store.epoch import NO_LINES, payload_at
from lychee_local.store.manifest import Extent, Manifest
from lychee_local.store.nodes import event_frame
from lychee_local.store.words import Field as WordField
from lychee_local.types import DateSpan, Node, NodeKind, Precision, Record, Scope, Segment, TimeRange, Turn, turn_id

L = TypeVar("L")

SCHEMA = 1
_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE line(file TEXT, num INTEGER, start INTEGER, size INTEGER, seed INTEGER, PRIMARY KEY(file, num))
    WITHOUT ROWID;
CREATE TABLE gone(file TEXT, num INTEGER, PRIMARY KEY(file, num)) WITHOUT ROWID;
CREATE TABLE dead(seq INTEGER PRIMARY KEY, file TEXT, num INTEGER);
CREATE TABLE session(num INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, first INTEGER, following INTEGER NOT NULL);
CREATE TABLE turn(num INTEGER PRIMARY KEY, session INTEGER NOT NULL, place INTEGER NOT NULL, day INTEGER, speaker TEXT,
    role TEXT NOT NULL);
CREATE UNIQUE INDEX turn_place ON turn(session, place);
CREATE INDEX turn_day ON turn(day);
CREATE INDEX turn_speaker ON turn(speaker);
CREATE TABLE ref(session INTEGER, ref TEXT, turn INTEGER NOT NULL, PRIMARY KEY(session, ref)) WITHOUT ROWID;
CREATE INDEX ref_turn ON ref(turn);
CREATE TABLE decision(num INTEGER PRIMARY KEY, session INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL);
CREATE INDEX decision_session ON decision(session, num);
CREATE TABLE segment(num INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session INTEGER NOT NULL, start INTEGER NOT NULL,
    stop INTEGER NOT NULL, encoding INTEGER);
CREATE INDEX segment_session ON segment(session, num);
CREATE INDEX segment_pending ON segment(num) WHERE encoding IS NULL;
CREATE TABLE encoding(num INTEGER PRIMARY KEY, segment INTEGER NOT NULL, session INTEGER NOT NULL,
    noted INTEGER NOT NULL);
CREATE INDEX encoding_session ON encoding(session, num);
CREATE TABLE record(num INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, session INTEGER NOT NULL, kind TEXT, speaker TEXT,
    day INTEGER);
CREATE INDEX record_session ON record(session, num);
CREATE TABLE occurrence(num INTEGER PRIMARY KEY, record TEXT NOT NULL, encoding INTEGER NOT NULL,
    place INTEGER NOT NULL);
CREATE INDEX occurrence_record ON occurrence(record);
CREATE INDEX occurrence_encoding ON occurrence(encoding, place);
CREATE TABLE node(num INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
    label TEXT NOT NULL, vector INTEGER, since INTEGER, until INTEGER);
CREATE UNIQUE INDEX node_vector ON node(vector) WHERE vector IS NOT NULL;
CREATE INDEX node_dates ON node(since, until) WHERE since IS NOT NULL;
CREATE INDEX node_kind ON node(kind);
CREATE TABLE link(node INTEGER, record INTEGER, PRIMARY KEY(node, record)) WITHOUT ROWID;
CREATE INDEX link_record ON link(record);
"""
KEPT_VALUES = 4_096  # decoded lines of each kind held in memory: a question looks at a few hundred


class Catalogue:
    """The catalogue of one epoch, open. Not thread-safe: the store lends it to one thread at a time."""

    def __init__(self, folder: Path, *, private: bool = False) -> None:
        """`private` keeps it in memory, for a folder that may not be written; it is then empty until `catch_up`.

        Raises:
            sqlite3.Error: the file is no catalogue of this version, or cannot be opened.
        """
        self.private = private
        self._folder = folder
        self._fds: dict[str, int] = {}
        self._turn = lru_cache(KEPT_VALUES)(self._decoded_turn)
        self._encoding = lru_cache(KEPT_VALUES)(self._decoded_encoding)
        target = ":memory:" if private else str(folder / files.CATALOGUE)
        self.db = sqlite3.connect(target, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            self._prepare(private)
            self._inode = 0 if private else (folder / files.CATALOGUE).stat().st_ino
        except FileNotFoundError as error:  # the memory was written anew in this moment
            self.db.close()
            raise sqlite3.OperationalError(f"{target} is gone") from error
        except BaseException:
            self.db.close()
            raise

    def _prepare(self, private: bool) -> None:
        if not private:
            self.db.execute("PRAGMA journal_mode = WAL")
        # A commit is made durable by the manifest; of the catalogue, the end may be lost and is caught up.
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute("PRAGMA cache_size = -16384")
        self.db.execute("PRAGMA temp_store = MEMORY")  # nothing of a memory leaves its folder, not even for a sort
        [version] = self._one("PRAGMA user_version")
        if version == SCHEMA:
            return
        if version:
            raise sqlite3.DatabaseError(f"the catalogue has version {version}, not {SCHEMA}")
        self.db.execute("BEGIN IMMEDIATE")
        try:
            if self._one("PRAGMA user_version") == (0,):  # or another process has just made them
                for statement in _TABLES.split(";"):
                    self.db.execute(statement)
                words.create(self.db)
                self.db.execute(f"PRAGMA user_version = {SCHEMA}")
            self.db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self.db.in_transaction:  # on a full disk SQLite has done it already
            self.db.execute("ROLLBACK")

    def replaced(self) -> bool:
        """Whether another file lies in its place now: a backup was put back, or it was built anew."""
        if self.private:
            return False
        try:
            return (self._folder / files.CATALOGUE).stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self) -> None:
        self.db.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def begin(self) -> None:
        """From here to `end` every answer is as of one commit."""
        self.db.execute("BEGIN")

    def end(self) -> None:
        self.db.execute("COMMIT")

    # --- the one way in ----------------------------------------------------------------------------------------------

    def covers(self) -> tuple[int, Mapping[str, Extent]]:
        """The generation that this catalogue speaks of, and how much of each file; generation -1 when it is empty."""
        found = self.db.execute("SELECT value FROM meta WHERE key = 'covers'").fetchone()
        if found is None:
            return -1, NO_LINES
        content = json.loads(found[0])
        return content["generation"], {name: Extent(*parts) for name, parts in content["files"].items()}

    def follows(self, manifest: Manifest) -> bool:
        """Whether what it covers is the beginning of what `manifest` has committed, as far as the sizes tell."""
        generation, covered = self.covers()
        held = manifest.files
        return generation <= manifest.generation and all(
            e.bytes < held[n].bytes or e == held[n] for n, e in covered.items()
        )

    def catch_up(self, manifest: Manifest, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Take in every line that was committed after what is covered; all of it or, when this raises, nothing.

        Raises:
            StoreDamaged: a line does not match its checksum, or does not follow what is covered.
            sqlite3.Error: the file cannot be written or is damaged.
        """
        self.db.execute("BEGIN IMMEDIATE")
        try:
            _, covered = self.covers()
            CatchUp(self.db, self, covered, manifest.files, on_progress).run(self._folder)
            content = {
                "generation": manifest.generation,
                "files": {n: (e.bytes, e.count, e.check) for n, e in manifest.files.items()},
            }
            self.db.execute("INSERT OR REPLACE INTO meta VALUES ('covers', ?)", (json.dumps(content),))
            self.db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            self._turn.cache_clear()
            self._encoding.cache_clear()
            raise

    def hold(self) -> None:
        """Keep every file open whose lines are asked for: what this catalogue covers can then be read to the end, also
        when another process has written the memory anew and removed this folder."""
        for name in (files.TURNS, files.DECISIONS, files.SEGMENTS, files.ENCODINGS):
            with contextlib.suppress(FileNotFoundError):  # nothing was ever written into it
                self._opened(name)

    # --- for a rewriting ---------------------------------------------------------------------------------------------

    def gone(self) -> dict[str, set[int]]:
        """The numbers of what was taken back: of lines by file, of single records as rows of records.rows, and of the
        encodings whose note alone went as "notes"."""
        found: dict[str, set[int]] = {}
        for name, num in self.db.execute("SELECT file, num FROM gone"):
            found.setdefault(name, set()).add(num)
        return found

    def holds_forgotten(self) -> bool:
        """Whether turns or records were forgotten whose bytes are still in the files."""
        names = (files.TURNS, files.RECORD_ROWS)
        return self.db.execute("SELECT 1 FROM gone WHERE file IN (?, ?) LIMIT 1", names).fetchone() is not None

    def dangling_following(self) -> list[tuple[str, int]]:
        """Each session whose next index does not follow from its last living turn, with that index, by name."""
        found = self.db.execute(
            "SELECT name, following FROM session "
            "WHERE following > (SELECT max(place) + 1 FROM turn WHERE session = session.num) ORDER BY name"
        )
        return [(name, following) for name, following in found]

    # --- lines -------------------------------------------------------------------------------------------------------

    def _payload(self, name: str, num: int) -> bytes:
        start, size, seed = self._one("SELECT start, size, seed FROM line WHERE file = ? AND num = ?", name, num)
        path = self._folder / name
        try:
            fd = self._opened(name)
        except OSError as error:
            raise files.os_error(error, "read", path) from error
        return payload_at(fd, path, start, size, seed, num)

    def _opened(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[name]

    def _value(self, kind: type[L], name: str, num: int) -> L:
        return codec.understood(kind, name, num, self._payload(name, num))

    def _decoded_turn(self, num: int) -> Turn:
        return self._value(TurnLine, files.TURNS, num).turn

    def _decoded_encoding(self, num: int) -> EncodingLine:
        return self._value(EncodingLine, files.ENCODINGS, num)

    def _one(self, sql: str, *values: object) -> tuple[int, ...]:
        found: tuple[int, ...] = self.db.execute(sql, values).fetchone()
        return found

    def _all(self, sql: str, *values: object) -> list[int]:
        return [row[0] for row in self.db.execute(sql, values)]

    # --- sessions and turns ------------------------------------------------------------------------------------------

    def _session(self, name: str) -> int:
        """Its number; -1, which matches nothing, for an unknown session."""
        found = self.db.execute("SELECT num FROM session WHERE name = ?", (name,)).fetchone()
        return -1 if found is None else int(found[0])

    def sessions(self) -> tuple[str, ...]:
        return tuple(row[0] for row in self.db.execute("SELECT name FROM session ORDER BY first"))

    def following(self, session: str) -> int:
        found = self.db.execute("SELECT following FROM session WHERE name = ?", (session,)).fetchone()
        return 0 if found is None else int(found[0])

    def speakers(self) -> tuple[str, ...]:
        # One step through the index for each speaker, not one for each turn.
        found = self.db.execute(
            "WITH RECURSIVE s(x) AS (SELECT min(speaker) FROM turn UNION ALL "
            "SELECT (SELECT min(speaker) FROM turn WHERE speaker > x) FROM s WHERE x IS NOT NULL) "
            "SELECT x FROM s WHERE x IS NOT NULL"
        )
        return tuple(row[0] for row in found)

    def turn_numbers(self, session: str, start: int, stop: int | None) -> list[int]:
        """Of the turns with start <= index < stop."""
        last = -1 if stop is None else stop
        return self._all(
            "SELECT num FROM turn WHERE session = ? AND place >= ? AND (? < 0 OR place < ?) ORDER BY place",
            self._session(session),
            start,
            last,
            last,
        )

    def turn(self, num: int) -> Turn:
        return self._turn(num)

    def turns_by_id(self, ids: Collection[str]) -> dict[str, Turn]:
        """Those that there are."""
        return {identifier: self._turn(num) for identifier, num in self.turn_rows(ids).items()}

    def turn_rows(self, ids: Collection[str]) -> dict[str, int]:
        """The numbers of those turns that there are, by id; their vectors stand in the rows of these numbers."""
        places: dict[str, list[int]] = {}
        for session, index in filter(None, map(_turn_place, ids)):
            places.setdefault(session, []).append(index)
        asked = (
            "SELECT t.place, t.num FROM session s JOIN turn t ON t.session = s.num "
            "WHERE s.name = ? AND t.place IN (SELECT value FROM json_each(?))"
        )
        return {
            turn_id(name, place): num
            for name, indexes in places.items()
            for place, num in self.db.execute(asked, (name, json.dumps(indexes))).fetchall()
        }

    def turn_by_ref(self, session: str, ref: str) -> int | None:
        found = self._all("SELECT turn FROM ref WHERE session = ? AND ref = ?", self._session(session), ref)
        return found[0] if found else None

    # --- segments ----------------------------------------------------------------------------------------------------

    def decision_numbers(self, session: str, start: int = 0) -> list[int]:
        """Of the decisions on exchanges that begin at or after turn `start`."""
        return self._all(
            "SELECT num FROM decision WHERE session = ? AND start >= ? ORDER BY num", self._session(session), start
        )

    def decision(self, num: int) -> DecisionLine:
        return self._value(DecisionLine, files.DECISIONS, num)

    def segment_numbers(self, session: str | None) -> list[int]:
        if session is None:
            return self._all("SELECT num FROM segment ORDER BY num")
        return self._all("SELECT num FROM segment WHERE session = ? ORDER BY num", self._session(session))

    def segment(self, num: int) -> Segment:
        return self._value(Segment, files.SEGMENTS, num)

    def segment_number(self, segment_id: str) -> int | None:
        found = self._all("SELECT num FROM segment WHERE id = ?", segment_id)
        return found[0] if found else None

    def pending(self) -> list[int]:
        return self._all("SELECT num FROM segment WHERE encoding IS NULL ORDER BY num")

    def encoding_of(self, segment_id: str) -> int | None:
        """The number of the segment's encoding; None where it waits or does not exist."""
        found = self._all("SELECT encoding FROM segment WHERE id = ? AND encoding IS NOT NULL", segment_id)
        return found[0] if found else None

    def encoding(self, num: int) -> EncodingLine:
        return self._encoding(num)

    def note(self, session: str) -> str:
        found = self.db.execute(
            "SELECT num, noted FROM encoding WHERE session = ? ORDER BY num DESC LIMIT 1", (self._session(session),)
        ).fetchone()
        return self._encoding(found[0]).note if found is not None and found[1] else ""

    def encodings_before(self, segment_id: str) -> Iterator[tuple[int, bool]]:
        """Of the earlier segments of the same session, the nearest first, and whether its note stands."""
        return iter(
            self.db.execute(
                "SELECT e.num, e.noted FROM segment s JOIN segment p ON p.session = s.session AND p.num < s.num "
                "JOIN encoding e ON e.num = p.encoding WHERE s.id = ? ORDER BY p.num DESC",
                (segment_id,),
            )
        )

    # --- records -----------------------------------------------------------------------------------------------------

    def record_numbers(self, session: str | None, latest: int | None = None) -> list[int]:
        """In order; with `latest` only that many, the last ones."""
        where, values = ("", ()) if session is None else ("WHERE session = ?", (self._session(session),))
        found = self._all(f"SELECT num FROM record {where} ORDER BY num DESC LIMIT ?", *values, latest or -1)
        return found[::-1]

    def record_number(self, record_id: str) -> int | None:
        found = self._all("SELECT num FROM record WHERE id = ?", record_id)
        return found[0] if found else None

    def record(self, num: int) -> Record:
        """The latest occurrence, with the turns of all."""
        found = self.db.execute(
            "SELECT o.encoding, o.place FROM occurrence o JOIN record r ON o.record = r.id WHERE r.num = ? "
            "ORDER BY o.num",
            (num,),
        ).fetchall()
        return _one_record([self._encoding(encoding).records[place] for encoding, place in found])

    def records_by_id(self, ids: Collection[str]) -> dict[str, Record]:
        """Those that there are, as `record` gives them."""
        found = self.db.execute(
            "SELECT r.id, o.encoding, o.place FROM record r JOIN occurrence o ON o.record = r.id "
            "WHERE r.id IN (SELECT value FROM json_each(?)) ORDER BY o.num",
            (json.dumps(list(ids)),),
        )
        said: dict[str, list[Record]] = {}
        for identifier, encoding, place in found.fetchall():
            said.setdefault(identifier, []).append(self._encoding(encoding).records[place])
        return {identifier: _one_record(records) for identifier, records in said.items()}

    def records_of_encoding(self, num: int) -> list[int]:
        return self._all(
            "SELECT r.num FROM occurrence o JOIN record r ON o.record = r.id WHERE o.encoding = ? "
            "GROUP BY r.num ORDER BY min(o.place)",
            num,
        )

    # --- what a selection needs to know ------------------------------------------------------------------------------

    def turn_number(self, turn_id: str) -> int | None:
        """None for an unknown or forgotten turn."""
        place = _turn_place(turn_id)
        found = [] if place is None else self.turn_numbers(place[0], place[1], place[1] + 1)
        return found[0] if found else None

    def decisions_about(self, session: str, indexes: Sequence[int]) -> list[int]:
        """Of the decisions on exchanges that hold one of these turns."""
        return self._about("decision", session, indexes)

    def segments_about(self, session: str, indexes: Sequence[int]) -> list[int]:
        return self._about("segment", session, indexes)

    def _about(self, table: str, session: str, indexes: Sequence[int]) -> list[int]:
        return self._all(
            f"SELECT DISTINCT t.num FROM {table} t JOIN json_each(?) i ON i.value BETWEEN t.start AND t.stop "
            "WHERE t.session = ? ORDER BY t.num",
            json.dumps(list(indexes)),
            self._session(session),
        )

    def noted(self, session: str) -> list[int]:
        """Encodings of the session whose note stands."""
        return self._all("SELECT num FROM encoding WHERE session = ? AND noted", self._session(session))

    def rows_of_record(self, num: int) -> list[int]:
        return self._all(
            "SELECT o.num FROM occurrence o JOIN record r ON o.record = r.id WHERE r.num = ? ORDER BY o.num", num
        )

    def rows_of_encoding(self, num: int) -> list[int]:
        return self._all("SELECT num FROM occurrence WHERE encoding = ? ORDER BY place", num)

    def records_of_rows(self, rows: Sequence[int]) -> list[Record]:
        """What was said row by row, a sentence said twice being there twice."""
        found = self.db.execute(
            "SELECT encoding, place FROM occurrence WHERE num IN (SELECT value FROM json_each(?)) ORDER BY num",
            (json.dumps(list(rows)),),
        ).fetchall()
        return [self._encoding(encoding).records[place] for encoding, place in found]

    def encoded(self, session: str) -> dict[int, list[Record]]:
        """What each encoding of the session still says, by the number of its segment; a sentence said twice is there
        twice."""
        found = self.db.execute(
            "SELECT e.segment, o.encoding, o.place FROM encoding e JOIN occurrence o ON o.encoding = e.num "
            "WHERE e.session = ? ORDER BY o.num",
            (self._session(session),),
        )
        said: dict[int, list[Record]] = {}
        for segment, encoding, place in found.fetchall():
            said.setdefault(segment, []).append(self._encoding(encoding).records[place])
        return said

    def frame_labels(self, rows: Sequence[int]) -> list[int]:
        """Label vectors of the event frames of the segments in whose encodings these rows are."""
        found = self.db.execute(
            "SELECT DISTINCT s.id FROM occurrence o JOIN encoding e ON e.num = o.encoding "
            "JOIN segment s ON s.num = e.segment WHERE o.num IN (SELECT value FROM json_each(?))",
            (json.dumps(list(rows)),),
        ).fetchall()
        frames = [self.node_number(event_frame(row[0], ()).id) for row in found]
        vectors = [self.node_vector(num) for num in frames if num is not None]
        return [vector for vector in vectors if vector is not None]

    def node_label(self, num: int) -> str:
        found: tuple[str] = self.db.execute("SELECT label FROM node WHERE num = ?", (num,)).fetchone()
        return found[0]

    def node_vector(self, num: int) -> int | None:
        """The row of the node's label; None for a date, and where the label was forgotten."""
        return self._one("SELECT vector FROM node WHERE num = ?", num)[0]

    def label_row(self, identifier: str) -> int | None:
        """The row of a node's label; None where there is no such node, or as for `node_vector`."""
        found = self._all("SELECT vector FROM node WHERE id = ?", identifier)
        return found[0] if found else None

    def linked(self, num: int, *, without: Collection[int]) -> Iterator[Record]:
        """What a node's records say, row by row, leaving out the rows `without`."""
        found = self.db.execute(
            "SELECT o.num, o.encoding, o.place FROM link l JOIN record r ON r.num = l.record "
            "JOIN occurrence o ON o.record = r.id WHERE l.node = ? ORDER BY o.num",
            (num,),
        )
        for row, encoding, place in found.fetchall():
            if row not in without:
                yield self._encoding(encoding).records[place]

    # --- nodes -------------------------------------------------------------------------------------------------------

    def node_number(self, identifier: str) -> int | None:
        found = self._all("SELECT num FROM node WHERE id = ?", identifier)
        return found[0] if found else None

    def node(self, num: int, *, latest: int | None = None) -> Node:
        """With `latest` only that many of its records, the newest."""
        found = self.db.execute(f"SELECT {_NODE} FROM node WHERE num = ?", (num,))
        return self._linked_node(*found.fetchone(), latest=latest)

    def nodes_by_id(self, ids: Collection[str], *, latest: int | None = None) -> dict[str, Node]:
        """Those that there are, as `node` gives them."""
        found = self.db.execute(
            f"SELECT id, {_NODE} FROM node WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(list(ids)),)
        )
        return {identifier: self._linked_node(*node, latest=latest) for identifier, *node in found.fetchall()}

    def _linked_node(
        self, num: int, kind: NodeKind, key: str, label: str, since: int | None, until: int, *, latest: int | None
    ) -> Node:
        found = self.db.execute(
            "SELECT r.id FROM link l JOIN record r ON l.record = r.num WHERE l.node = ? ORDER BY l.record DESC LIMIT ?",
            (num, latest or -1),
        )
        records = tuple(row[0] for row in found)[::-1]
        return Node(kind, key, label, records, None if since is None else _span(key, since, until))

    def node_numbers(self, kind: NodeKind | None) -> list[int]:
        """By first record; dates last when every kind is asked for."""
        where, values = ("", ()) if kind is None else ("WHERE kind = ?", (kind,))
        return self._all(
            f"SELECT num FROM node {where} ORDER BY kind = 'temporal', "
            "(SELECT min(record) FROM link WHERE node = node.num), kind, key",
            *values,
        )

    def temporal(self, when: TimeRange) -> list[int]:
        """Nodes of dates whose span overlaps `when`, by first day, then by last, then by id."""
        since = -1 if when.since is None else when.since.toordinal()
        until = 1 << 32 if when.until is None else when.until.toordinal()
        return self._all(
            "SELECT num FROM node WHERE since IS NOT NULL AND since <= ? AND until >= ? ORDER BY since, until, id",
            until,
            since,
        )

    # --- search ------------------------------------------------------------------------------------------------------

    def dead(self, since: int) -> tuple[int, list[tuple[str, int]]]:
        """Vector rows that were taken back after mark `since` (0: ever), by file and number, and the next mark."""
        found = self.db.execute("SELECT seq, file, num FROM dead WHERE seq > ? ORDER BY seq", (since,)).fetchall()
        return (found[-1][0] if found else since), [(name, num) for _, name, num in found]

    def turn_ids(self, numbers: Sequence[int]) -> dict[int, str]:
        """Row number to id, for those that are living."""
        found = self.db.execute(
            "SELECT t.num, s.name, t.place FROM turn t JOIN session s ON t.session = s.num "
            "WHERE t.num IN (SELECT value FROM json_each(?))",
            (json.dumps(list(numbers)),),
        )
        return {num: turn_id(name, place) for num, name, place in found}

    def record_ids(self, numbers: Sequence[int]) -> dict[int, str]:
        found = self.db.execute(
            "SELECT num, record FROM occurrence WHERE num IN (SELECT value FROM json_each(?))",
            (json.dumps(list(numbers)),),
        )
        return dict(found.fetchall())

    def node_ids(self, numbers: Sequence[int]) -> dict[int, str]:
        found = self.db.execute(
            "SELECT vector, id FROM node WHERE vector IN (SELECT value FROM json_each(?))", (json.dumps(list(numbers)),)
        )
        return dict(found.fetchall())

    def words(self, field: WordField, query: str, k: int, scope: Scope | None) -> list[tuple[str, float]]:
        """The best texts that share a term with `query`, by id, with their BM25."""
        within = None if scope is None else _within(field, scope)
        found = words.search(self.db, field, query, k, within=within)
        if field == "turns":
            ids = self.turn_ids([num for num, _ in found])
        else:
            ids = dict(
                self.db.execute(
                    "SELECT num, id FROM record WHERE num IN (SELECT value FROM json_each(?))",
                    (json.dumps([num for num, _ in found]),),
                ).fetchall()
            )
        return [(ids[num], score) for num, score in found if num in ids]

    def rows_within(self, field: WordField, scope: Scope) -> list[int]:
        """The vector rows of the turns or records that `scope` leaves."""
        sql, values = _within(field, scope)
        if field == "records":
            sql = f"SELECT o.num FROM occurrence o JOIN record r ON o.record = r.id WHERE r.num IN ({sql})"
        return self._all(sql, *values)

    def rows_of_kinds(self, kinds: Collection[NodeKind]) -> list[int]:
        return self._all(
            "SELECT vector FROM node WHERE vector IS NOT NULL AND kind IN (SELECT value FROM json_each(?))",
            json.dumps(sorted(kinds)),
        )

    def living_rows(self, field: Literal["turns", "records", "nodes"]) -> list[int]:
        """The vector rows that a search may find, in order."""
        column, table = {"turns": ("num", "turn"), "records": ("num", "occurrence"), "nodes": ("vector", "node")}[field]
        return self._all(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL ORDER BY {column}")

    def counts(self) -> dict[str, int]:
        return {name: self._one(f"SELECT count(*) FROM {name}")[0] for name in _COUNTED}


def _turn_place(turn_id: str) -> tuple[str, int] | None:
    """The session and the index in a turn's id; None for what is no turn's id."""
    kind, _, place = turn_id.partition(":")
    session, _, index = place.rpartition(":")
    if kind != "turn" or not (index.isascii() and index.isdecimal()) or len(index) > 18 or str(int(index)) != index:
        return None
    return session, int(index)


def _one_record(said: Sequence[Record]) -> Record:
    """Of one sentence, said once or more: as it was said last, with the turns of all."""
    if len(said) == 1:
        return said[0]
    turns = tuple(sorted({index for record in said for index in record.turns}))
    return said[-1] if said[-1].turns == turns else replace(said[-1], turns=turns)


def _span(key: str, since: int, until: int) -> DateSpan:
    precision: Precision = next(p for p in get_args(Precision) if key.startswith(p))
    return DateSpan(date.fromordinal(since), date.fromordinal(until), precision)


_NODE = "num, kind, key, label, since, until"
_COUNTED = ("session", "turn", "segment", "record", "node")


def _within(field: WordField, scope: Scope) -> tuple[str, list[object]]:
    """An SQL select of the numbers that `scope` leaves, and its arguments."""
    parts: list[str] = []
    values: list[object] = []

    def one_of(column: str, allowed: Collection[str]) -> None:
        parts.append(f"{column} IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(sorted(allowed)))

    if scope.sessions:
        parts.append("session IN (SELECT num FROM session WHERE name IN (SELECT value FROM json_each(?)))")
        values.append(json.dumps(sorted(scope.sessions)))
    if scope.speakers:
        one_of("speaker", scope.speakers)
    if scope.kinds and field == "records":
        one_of("kind", scope.kinds)
    if scope.roles and field == "turns":
        one_of("role", scope.roles)
    if scope.said is not None and scope.said.since is not None:
        parts.append("day >= ?")
        values.append(scope.said.since.toordinal())
    if scope.said is not None and scope.said.until is not None:
        parts.append("day <= ?")
        values.append(scope.said.until.toordinal())
    name = "turn" if field == "turns" else "record"
    return f"SELECT num FROM {name} WHERE {' AND '.join(parts) or '1'}", values


def catalogue_error(error: sqlite3.Error, folder: Path) -> StoreError:
    """What SQLite says of the catalogue in `folder`, in our words."""
    path = folder / files.CATALOGUE
    if isinstance(error, sqlite3.OperationalError):
        hint = "check that the folder may be written; what was stored before is intact"
        if "full" in str(error) or "disk I/O" in str(error):
            hint = "the disk is full: free some space and try again; what was stored before is intact"
        return StoreError(f"cannot use {path}: {error}", hint=hint)
    return StoreDamaged(
        f"{path} is damaged: {error}", hint="nothing is lost, it is built again when the memory is opened for writing"
    )

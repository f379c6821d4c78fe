"""Whether what is derived from the lines of a memory is what they give: the catalogue and the search graphs.

Owns the comparison with a catalogue that is built anew in memory. Changes nothing, and takes no lock: where something
does not match while a writer is at work, it looks again.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lychee_local.errors import StoreDamaged
from lychee_local.store import manifest as files
from lychee_local.store import words
from lychee_local.store.catalogue import SCHEMA, Catalogue
from lychee_local.store.epoch import DTYPES
from lychee_local.store.log import read_manifest
from lychee_local.store.manifest import Extent, Manifest
from lychee_local.store.snapshot import graph_path, read_snapshot, sample_check, side_path

PATIENCE = (0.0, 0.05, 0.2)  # seconds before each look at a file that a writer may be replacing
AT_ONCE = 4_096  # rows of a table compared at a time


# Each table with the numbers that SQLite gave replaced by names, in an order of its own.
_CONTENT = {
    "line": "SELECT file, num, start, size, seed FROM line ORDER BY file, num",
    "gone": "SELECT file, num FROM gone ORDER BY file, num",
    "dead": "SELECT DISTINCT file, num FROM dead ORDER BY file, num",
    "session": "SELECT name, first, following FROM session ORDER BY name",
    "turn": "SELECT t.num, s.name, t.place, t.day, t.speaker, t.role FROM turn t "
    "LEFT JOIN session s ON s.num = t.session ORDER BY t.num",
    "ref": "SELECT r.turn, s.name, r.ref FROM ref r LEFT JOIN session s ON s.num = r.session ORDER BY r.turn, r.ref",
    "decision": "SELECT d.num, s.name, d.start, d.stop FROM decision d "
    "LEFT JOIN session s ON s.num = d.session ORDER BY d.num",
    "segment": "SELECT g.num, g.id, s.name, g.start, g.stop, g.encoding FROM segment g "
    "LEFT JOIN session s ON s.num = g.session ORDER BY g.num",
    "encoding": "SELECT e.num, e.segment, s.name, e.noted FROM encoding e "
    "LEFT JOIN session s ON s.num = e.session ORDER BY e.num",
    "record": "SELECT r.num, r.id, s.name, r.kind, r.speaker, r.day FROM record r "
    "LEFT JOIN session s ON s.num = r.session ORDER BY r.num",
    "occurrence": "SELECT num, record, encoding, place FROM occurrence ORDER BY num",
    "node": "SELECT id, kind, key, label, vector, since, until FROM node ORDER BY id",
    "link": "SELECT n.id, l.record FROM link l LEFT JOIN node n ON n.num = l.node ORDER BY n.id, l.record",
    "words_totals": "SELECT field, texts, length FROM words_totals ORDER BY field",
    "words_turns_postings": "SELECT total(length(block)) FROM words_turns_postings",
    "words_records_postings": "SELECT total(length(block)) FROM words_records_postings",
}


def catalogue_problem(
    folder: Path, manifest: Manifest, *, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> str:
    """What is wrong with the catalogue of the manifest's epoch; blank where it says what the lines say, or lags behind.

    Raises:
        StoreDamaged: the lines themselves contradict each other.
    """
    epoch = folder / manifest.folder
    total = sum(manifest.files[name].count for name in files.LINE_FILES)
    fresh = Catalogue(epoch, private=True)
    try:
        try:
            fresh.catch_up(manifest, on_progress=lambda done, _: on_progress(total + done, 2 * total))
        except sqlite3.IntegrityError as error:
            raise StoreDamaged(str(error)) from error
        problem = ""
        for patience in PATIENCE:
            time.sleep(patience)
            before = _stamps(epoch / files.CATALOGUE)
            problem = _problem(folder, manifest, fresh)
            if not problem or _stamps(epoch / files.CATALOGUE) == before:
                break
        return problem
    finally:
        fresh.close()


def _stamps(path: Path) -> list[tuple[int, int, int]]:
    """Tells whether anybody has written the catalogue."""
    present = [p for ending in ("", "-wal") if (p := path.with_name(path.name + ending)).exists()]
    return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in (p.stat() for p in present)]


def _problem(folder: Path, manifest: Manifest, fresh: Catalogue) -> str:
    path = folder / manifest.folder / files.CATALOGUE
    holds_lines = any(extent.count for extent in manifest.files.values())
    if not path.exists() or not path.stat().st_size:
        return "is missing" if holds_lines else ""
    try:
        held = _opened(path)
        try:
            [version] = held.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA:
                return f"has version {version}, not {SCHEMA}"
            held.execute("BEGIN")
            faults = [row[0] for row in held.execute("PRAGMA integrity_check(1)")]
            if faults != ["ok"]:
                return f"is damaged: {faults[0]}"
            found = held.execute("SELECT value FROM meta WHERE key = 'covers'").fetchone()
            if found is None:
                return "is empty" if holds_lines else ""
            return _difference(folder, manifest, found[0], held, fresh)
        finally:
            held.close()
    except (sqlite3.Error, ValueError) as error:  # blocks of a wrong length among them
        return f"is damaged: {error}"


def _opened(path: Path) -> sqlite3.Connection:
    """For reading only. With nothing in the write-ahead log the file says all there is; to open it as unchanging then
    leaves no files beside it."""
    log = path.with_name(path.name + "-wal")
    mode = "mode=ro" if log.exists() and log.stat().st_size else "immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, timeout=10.0)


def _difference(folder: Path, manifest: Manifest, covers: str, held: sqlite3.Connection, fresh: Catalogue) -> str:
    """Where the catalogue says anything but what the lines say that it covers."""
    try:
        content = json.loads(covers)
        covered = {name: Extent(*content["files"][name]) for name in manifest.files}
        shown = replace(manifest, generation=int(content["generation"]), files=covered)
        ahead = any(e.bytes > _latest(folder, manifest).files[name].bytes for name, e in covered.items())
    except (ValueError, KeyError, TypeError):
        return "does not say what it covers"
    if ahead:
        return "covers lines that are not committed"
    if covered == manifest.files:
        return _first_difference(held, fresh)
    again = Catalogue(folder / manifest.folder, private=True)  # it lags behind, or a writer has gone on
    try:
        again.catch_up(shown)
        return _first_difference(held, again)
    except StoreDamaged:
        return "is about other lines"
    finally:
        again.close()


def _first_difference(held: sqlite3.Connection, expected: Catalogue) -> str:
    for table, sql in _CONTENT.items():
        ours, theirs = held.execute(sql), expected.db.execute(sql)
        while some := theirs.fetchmany(AT_ONCE):
            if ours.fetchmany(AT_ONCE) != some:
                return f"differs from the lines in table {table}"
        if ours.fetchone() is not None:
            return f"differs from the lines in table {table}"
    for field in words.FIELDS:
        for one, other in zip_longest(_terms(held, field), _terms(expected.db, field)):
            if not _same(one, other):
                return f"differs from the lines in the words of {field}"
    return ""


_Term = tuple[str, int, npt.NDArray[np.void]]


def _terms(db: sqlite3.Connection, field: words.Field) -> Iterator[_Term]:
    """Every term with the number of texts that hold it and its postings, however they lie in blocks."""
    for term, number, texts in db.execute(f"SELECT term, number, texts FROM words_{field} ORDER BY term"):
        yield term, texts, words.read_postings(db, field, number)


def _same(one: _Term | None, other: _Term | None) -> bool:
    """Forgetting can change the order of postings, which means nothing."""
    if one is None or other is None or one[:2] != other[:2]:
        return False
    return np.array_equal(one[2], other[2]) or np.array_equal(np.sort(one[2]), np.sort(other[2]))


def graph_problem(folder: Path, manifest: Manifest, rows: str) -> str:
    """What is wrong with the snapshot of the graph of the row file `rows`; blank where it can be used, or is not
    there."""
    flat = folder / manifest.folder / rows
    problem = ""
    for patience in PATIENCE:
        time.sleep(patience)
        if not side_path(graph_path(flat)).exists():
            return ""  # without it the graph is what a killed writer left
        problem = _graph_problem(folder, flat, manifest)
        if not problem:
            break
    return problem


def _graph_problem(folder: Path, flat: Path, manifest: Manifest) -> str:
    snapshot = read_snapshot(graph_path(flat), manifest.embedder.dimension)
    if snapshot is None:
        return "is missing or does not match its checksum"
    covered = len(snapshot.table)
    if snapshot.precision != manifest.precision or covered > _latest(folder, manifest).files[flat.name].count:
        return "is out of step with the rows"
    width = manifest.embedder.dimension * np.dtype(DTYPES[manifest.precision]).itemsize
    if not covered or not flat.exists() or flat.stat().st_size < covered * width:
        return ""  # the rows are cut, which was found where they were read
    shape = (covered, manifest.embedder.dimension)
    held = np.memmap(flat, dtype=DTYPES[manifest.precision], mode="r", shape=shape)
    return "" if sample_check(held) == snapshot.sample else "is out of step with the rows"


def _latest(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest as it is now: a writer may have gone on."""
    seen = read_manifest(folder)
    return manifest if seen is None or seen[1].epoch != manifest.epoch else seen[1]

"""The index of words: BM25 over the texts of turns and of records, kept in the catalogue's database.

Owns, for each field, the terms with the number of texts that hold them, and their postings in blocks. A commit of the
catalogue is a commit of the index; no text is kept. What counts as a term is decided by `lexicon.search_terms` alone.
Refuses to know what a row means or whether it still exists: whoever forgets a text removes it here.

Not FTS5: its bm25() takes about two microseconds a posting, 40 ms a question at 100,000 texts, and leaving out terms of
more than a tenth of the texts changes a fifth of the best twenty (benchmarks/LOG.md, "The index of words"). Here the
postings of a term are a few numpy arrays, and a search passes over every row that cannot come among the best.
"""

from __future__ import annotations

import sqlite3
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt

from lychee_local.lexicon import search_terms

Field = Literal["turns", "records"]
FIELDS: tuple[Field, ...] = ("turns", "records")

K1, B = 1.2, 0.75  # Robertson and Zaragoza 2009, as everywhere

# A posting: the row, how often the text holds the term, how many terms the text has; both stop at 65,535.
_POSTING = np.dtype([("row", "<u4"), ("times", "<u2"), ("length", "<u2")])
_pack = struct.Struct("<IHH").pack
_MOST = 0xFFFF
# Postings of a block that still grows, rewritten with every text that holds its term: it fits one page of 4,096 bytes.
# Full, it is folded into the block before it, until that holds as much as one read of 64 KiB brings.
_GROWING, _LARGE = 500 * _POSTING.itemsize, 8_000 * _POSTING.itemsize
_BLOCKS = 24  # bits of a block's key below those of its term's number
_ASKED = 500  # terms or rows looked up by one statement: SQLite bounds its arguments
_FEW = 10_000  # rows of a filter that are read into memory, in milliseconds; of more, only those found are asked for

Postings = npt.NDArray[np.void]
Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]
Gains = tuple[Rows, Floats]


def create(db: sqlite3.Connection) -> None:
    """The tables, where they are not there yet; the caller commits."""
    db.execute(
        "CREATE TABLE IF NOT EXISTS words_totals (field TEXT PRIMARY KEY, texts INTEGER NOT NULL,"
        " length INTEGER NOT NULL, rows INTEGER NOT NULL, next INTEGER NOT NULL) WITHOUT ROWID"
    )
    for field in FIELDS:
        if db.execute("SELECT 1 FROM words_totals WHERE field = ?", (field,)).fetchone() is None:
            db.execute("INSERT INTO words_totals VALUES (?, 0, 0, 0, 1)", (field,))
        db.execute(
            f"CREATE TABLE IF NOT EXISTS words_{field} (term TEXT PRIMARY KEY, number INTEGER NOT NULL,"
            " texts INTEGER NOT NULL) WITHOUT ROWID"
        )
        db.execute(f"CREATE TABLE IF NOT EXISTS words_{field}_postings (key INTEGER PRIMARY KEY, block BLOB NOT NULL)")


def add(db: sqlite3.Connection, field: Field, rows: Iterable[tuple[int, str]]) -> None:
    """Index the texts of new row numbers; the caller commits. Cheapest by the thousand: each term is written once."""
    postings, lengths = _postings(rows)
    known = {term: (number, held) for term, number, held in _looked_up(db, field, list(postings))}
    (fresh,) = db.execute("SELECT next FROM words_totals WHERE field = ?", (field,)).fetchone()
    for term in sorted(postings):  # in the order of the table's tree
        if (entry := known.get(term)) is None:
            entry, fresh = (fresh, 0), fresh + 1
        number, held = entry
        held += len(postings[term]) // _POSTING.itemsize
        db.execute(f"INSERT OR REPLACE INTO words_{field} VALUES (?, ?, ?)", (term, number, held))
        _append(db, field, number, bytes(postings[term]))
    db.execute(
        "UPDATE words_totals SET texts = texts + ?, length = length + ?, rows = max(rows, ?), next = ? WHERE field = ?",
        (len(lengths), sum(lengths.values()), max(lengths, default=-1) + 1, fresh, field),
    )


def remove(db: sqlite3.Connection, field: Field, rows: Iterable[tuple[int, str]]) -> None:
    """Take out rows with the very texts they were added with; the caller commits. A row that is not there is no error.

    A term that no text holds any more leaves the table. For its bytes to leave the file, the connection must have
    `PRAGMA secure_delete = ON`, or a VACUUM must follow, and a write-ahead log must be truncated by a checkpoint.
    """
    postings, _ = _postings(rows)
    lengths: dict[int, int] = {}
    for term, number, held in list(_looked_up(db, field, list(postings))):
        gone = _withdraw(db, field, number, np.frombuffer(bytes(postings[term]), dtype=_POSTING)["row"])
        lengths.update(zip(gone["row"].tolist(), gone["length"].tolist(), strict=True))
        if held > len(gone):
            db.execute(f"UPDATE words_{field} SET texts = ? WHERE term = ?", (held - len(gone), term))
        else:
            db.execute(f"DELETE FROM words_{field} WHERE term = ?", (term,))
    db.execute(
        "UPDATE words_totals SET texts = texts - ?, length = length - ? WHERE field = ?",
        (len(lengths), sum(lengths.values()), field),
    )


def search(
    db: sqlite3.Connection,
    field: Field,
    query: str,
    k: int,
    *,
    within: tuple[str, Sequence[object]] | None = None,
) -> list[tuple[int, float]]:
    """The best k rows that share a term with the query and their BM25 (above 0), best first, ties by row.

    Each distinct term of the query counts once. `within` is an SQL select of the row numbers that may be found, with
    its arguments; rarity and mean length are those of all texts, whatever it leaves.
    """
    wanted = list(dict.fromkeys(search_terms(query)))
    if not wanted or k < 1:
        return []
    with _snapshot(db):
        texts, length, end = _totals(db, field)
        held = sorted((held, number) for _, number, held in _looked_up(db, field, wanted))
        gains = [_gains(read_postings(db, field, number), texts, n, length) for n, number in held]
        if within is None:
            return _best(gains, k, end)
        return _best_within(db, gains, k, end, *within)


def _best_within(
    db: sqlite3.Connection, gains: list[Gains], k: int, end: int, select: str, arguments: Sequence[object]
) -> list[tuple[int, float]]:
    """The best k of the rows that the select yields: picked out first where they are few, else last, from ever more."""
    few = db.execute(f"SELECT * FROM ({select}) LIMIT ?", (*arguments, _FEW)).fetchall()
    if len(few) < _FEW:
        allowed = np.fromiter((row for (row,) in few), dtype=np.intp)
        permitted = np.zeros(end, dtype=np.bool_)
        permitted[allowed[(allowed >= 0) & (allowed < end)]] = True
        return _best([(rows[permitted[rows]], gain[permitted[rows]]) for rows, gain in gains], k, end)
    depth = 4 * k
    while True:
        best = _best(gains, depth, end)
        inside: set[int] = set()
        for start in range(0, len(best), _ASKED):
            some = [row for row, _ in best[start : start + _ASKED]]
            asked = f"WITH allowed (row) AS ({select}) SELECT row FROM allowed WHERE row IN ({_marks(some)})"
            inside.update(row for (row,) in db.execute(asked, (*arguments, *some)))
        found = [(row, score) for row, score in best if row in inside]
        if len(found) >= k or len(best) < depth:
            return found[:k]
        depth *= 8


def _gains(postings: Postings, texts: int, holding: int, length: int) -> Gains:
    """The rows that hold a term and what it adds to the score of each (Robertson and Zaragoza 2009, with 1 + in the log
    of the rarity, so that a term of most texts adds little, but never less than nothing)."""
    rarity = np.log1p((texts - holding + 0.5) / (holding + 0.5))
    times = postings["times"].astype(np.float32)
    norm = postings["length"].astype(np.float32) * np.float32(K1 * B * texts / length) + np.float32(K1 * (1 - B))
    gain: Floats = np.divide(times * np.float32(rarity * (K1 + 1)), times + norm)
    return postings["row"].astype(np.intp), gain


def _best(gains: Sequence[Gains], k: int, end: int) -> list[tuple[int, float]]:
    """The k rows below `end` with the best sums, best first.

    Exact, though most rows of frequent terms are passed over (the bound of MaxScore, Turtle and Flood 1995, for each
    row): one that its gain here and the highest gains of all terms to come cannot lift to `least`, the k-th best sum so
    far. Where a later term meets it again its sum comes out too low, but even the true one would not do.
    """
    scores = np.zeros(end, dtype=np.float32)
    met = np.zeros(0, dtype=np.intp)
    highest = [float(gain.max(initial=0)) for _, gain in gains]
    for place, (rows, gain) in enumerate(gains):
        before = scores.take(rows)
        if (least := _kth(scores[met], k)) > 0:
            # The hundred-thousandth is for the rounding of sums of 32-bit floats.
            needed = least * (1 - 1e-5) - sum(highest[place + 1 :])
            useful = np.flatnonzero((before > 0) | (gain >= needed))
            rows, gain, before = rows.take(useful), gain.take(useful), before.take(useful)
        met = np.concatenate([met, rows[before == 0]])
        scores[rows] = before + gain
    found = scores[met]
    if len(met) > k:
        least = _kth(found, k)
        equal = np.sort(met[found == least])
        met = np.concatenate([met[found > least], equal[: k - np.count_nonzero(found > least)]])
        found = scores[met]
    order = np.lexsort((met, -found))
    return list(zip(met[order].tolist(), found[order].tolist(), strict=True))


def _kth(scores: Floats, k: int) -> float:
    """The k-th best score, 0 where there are fewer."""
    return float(np.partition(scores, -k)[-k]) if len(scores) >= k else 0.0


# --- postings --------------------------------------------------------------------------------------------------------


def _postings(rows: Iterable[tuple[int, str]]) -> tuple[dict[str, bytearray], dict[int, int]]:
    """The postings of each term of these texts, and the length in terms of each text that has any, by row."""
    postings: dict[str, bytearray] = defaultdict(bytearray)
    lengths: dict[int, int] = {}
    for row, text in rows:
        counts = Counter(search_terms(text))
        if counts:
            lengths[row] = min(counts.total(), _MOST)
        for term, times in counts.items():
            postings[term] += _pack(row, min(times, _MOST), lengths[row])
    return postings, lengths


def _looked_up(db: sqlite3.Connection, field: Field, wanted: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(term, number, texts that hold it) of those of the terms that the index knows."""
    for start in range(0, len(wanted), _ASKED):
        some = wanted[start : start + _ASKED]
        yield from db.execute(f"SELECT term, number, texts FROM words_{field} WHERE term IN ({_marks(some)})", some)


def _keys(number: int) -> tuple[int, int]:
    return number << _BLOCKS, ((number + 1) << _BLOCKS) - 1


def read_postings(db: sqlite3.Connection, field: Field, number: int) -> Postings:
    blocks = f"SELECT block FROM words_{field}_postings WHERE key BETWEEN ? AND ? ORDER BY key"
    return np.frombuffer(b"".join(block for (block,) in db.execute(blocks, _keys(number))), dtype=_POSTING)


def _append(db: sqlite3.Connection, field: Field, number: int, postings: bytes) -> None:
    table = f"words_{field}_postings"
    first, last = _keys(number)
    ends = f"SELECT key, length(block) FROM {table} WHERE key BETWEEN ? AND ? ORDER BY key DESC LIMIT 2"
    newest = db.execute(ends, (first, last)).fetchall()
    key = newest[0][0] + 1 if newest else first
    # The newest block takes the postings while it grows; grown, it goes into the one before, while that has room.
    for end, size in newest:
        if size + len(postings) > _LARGE or (size > _GROWING and len(postings) <= _GROWING):
            break
        (block,) = db.execute(f"SELECT block FROM {table} WHERE key = ?", (end,)).fetchone()
        db.execute(f"DELETE FROM {table} WHERE key > ? AND key <= ?", (end, last))
        key, postings = end, block + postings
    for start in range(0, len(postings), _LARGE):
        db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (key, postings[start : start + _LARGE]))
        key += 1


def _withdraw(db: sqlite3.Connection, field: Field, number: int, rows: npt.NDArray[np.uint32]) -> Postings:
    """Take rows out of a term's blocks; the postings that went."""
    table, withdrawn = f"words_{field}_postings", [np.zeros(0, dtype=_POSTING)]
    for key, block in db.execute(f"SELECT key, block FROM {table} WHERE key BETWEEN ? AND ?", _keys(number)).fetchall():
        postings = np.frombuffer(block, dtype=_POSTING)
        gone = np.isin(postings["row"], rows)
        withdrawn.append(postings[gone])
        if gone.all():
            db.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
        elif gone.any():
            db.execute(f"UPDATE {table} SET block = ? WHERE key = ?", (postings[~gone].tobytes(), key))
    return np.concatenate(withdrawn)


def _totals(db: sqlite3.Connection, field: Field) -> tuple[int, int, int]:
    """How many texts there are, how many terms they have together, and a number above all their rows."""
    totals = db.execute("SELECT texts, length, rows FROM words_totals WHERE field = ?", (field,)).fetchone()
    return int(totals[0]), int(totals[1]), int(totals[2])


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


@contextmanager
def _snapshot(db: sqlite3.Connection) -> Iterator[None]:
    """All statements inside see the same commit, also where another process writes."""
    db.execute("SAVEPOINT words")
    try:
        yield
    finally:
        db.execute("RELEASE words")

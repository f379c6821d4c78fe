"""Nearest neighbours among unit vectors, exact for small sets and through an hnswlib graph for large ones.

Owns float rows in memory, the graph over them, and the graph's snapshot on disk. Everything here is derived: a snapshot
that is missing, damaged or out of date costs time, never a result. This is the only place that touches hnswlib.

Rows [0, G) are in the graph, rows [G, n) are the tail and are searched exactly. A vector that is replaced while it lies
in the tail is overwritten; one that lies in the graph is marked dead there and comes back at the end of the tail. For
each insertion beyond the threshold `feed` moves two rows from the tail into the graph, so that the tail gets short and
no single commit, and no opening, pays for a whole build.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lychee_local.errors import BadInput, StoreError

Vectors = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.intp]

EXACT_BELOW = 20_000  # rows; the paper's own switch between exact and approximate search (docs/method.md 3.7)
UNIT_TOLERANCE = 1e-3
# Two BLAS paths may differ by this much on the same vector. BLAS proposes with this margin, float64 decides, so that
# equal vectors have equal cosines and a result does not depend on what else is in the batch.
MARGIN = 4e-6
BLOCK = 65_536  # rows scored at a time, which bounds the memory of one search
LINKS, BUILD_WIDTH, SEARCH_WIDTH, SEED = 16, 200, 256, 100  # hnswlib's M, ef_construction, least ef, random_seed


@dataclass(frozen=True, slots=True)
class VectorHit:
    """`cosine` is the inner product of unit vectors, in [-1, 1]."""

    id: str
    cosine: float


def unit_rows(vectors: npt.ArrayLike, dimension: int, what: str) -> Vectors:
    """`vectors` as float32 of shape (n, dimension).

    Raises:
        BadInput: another shape, a value that is not finite, or a row whose length is not 1.
    """
    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise BadInput(f"{what}: vectors of shape {rows.shape} given, (n, {dimension}) needed")
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    wrong = np.flatnonzero(~(np.abs(lengths - 1.0) <= UNIT_TOLERANCE))  # also true for NaN
    if wrong.size:
        raise BadInput(f"{what}: vector {wrong[0]} has length {lengths[wrong[0]]:.4g}, unit vectors are needed")
    return rows


class VectorIndex:
    """Vectors by id. An id keeps its number (the order of first insertion) when its vector is replaced."""

    def __init__(self, dimension: int, *, exact_below: int = EXACT_BELOW) -> None:
        self._dimension = dimension
        self._exact_below = exact_below
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._rows: Vectors = np.zeros((0, dimension), dtype=np.float32)
        self._number: Labels = np.zeros(0, dtype=np.intp)  # row -> number of its id
        self._live: Mask = np.zeros(0, dtype=np.bool_)
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._graph: Any = None
        self._in_graph = 0
        self._saved = 0
        self._owed = 0  # rows that `feed` has to move for what was put since

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def dimension(self) -> int:
        return self._dimension

    @property
    def ids(self) -> Sequence[str]:
        """Every id in the order of first insertion, dropped ones included."""
        return self._ids

    @property
    def in_graph(self) -> int:
        """Rows that the graph covers, dead ones included."""
        return self._in_graph

    def vectors(self, ids: Sequence[str]) -> Vectors:
        """Raises KeyError for an id that is not held."""
        rows: Vectors = self._rows[[self._row_of[id] for id in ids]]
        return rows

    # --- changing ----------------------------------------------------------------------------------------------------

    def put(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Insert or replace; `vectors` has been through `unit_rows`."""
        self._reserve(self._count + len(ids))
        self._owed += 2 * len(ids)
        if self._row_of.keys().isdisjoint(ids) and len(set(ids)) == len(ids):
            start = self._count
            for id in ids:
                self._append(id)
            self._rows[start : self._count] = vectors
            return
        for id, vector in zip(ids, vectors, strict=True):
            row = self._row_of.get(id)
            if row is None or row < self._in_graph:
                if row is not None:
                    self._kill(row)
                row = self._append(id)
            self._rows[row] = vector

    def drop(self, ids: Collection[str]) -> None:
        """Take ids out of every search. Their vectors are overwritten in memory."""
        for id in ids:
            self._kill(self._row_of.pop(id))

    def _append(self, id: str) -> int:
        row = self._count
        if id not in self._numbers:
            self._numbers[id] = len(self._ids)
            self._ids.append(id)
        self._number[row] = self._numbers[id]
        self._live[row] = True
        self._row_of[id] = row
        self._count += 1
        return row

    def _kill(self, row: int) -> None:
        self._live[row] = False
        self._rows[row] = 0.0
        if row < self._in_graph:
            self._graph.mark_deleted(row)

    def _reserve(self, count: int) -> None:
        room = len(self._rows)
        if count <= room:
            return
        # An exact fit for the first fill (a store that is opened), doubling after it.
        size = count if room == 0 else max(count, 2 * room)
        self._rows = _resized(self._rows, size)
        self._number = _resized(self._number, size)
        self._live = _resized(self._live, size)

    # --- searching ---------------------------------------------------------------------------------------------------

    def search(self, queries: Vectors, k: int, *, among: Collection[str] | Mask | None = None) -> list[list[VectorHit]]:
        """The `k` best per query, best first, ties by id; `among` limits it, by id or by a mask over `ids`."""
        allowed = self._allowed(among)
        k = min(k, int(np.count_nonzero(allowed)))
        if k < 1 or not len(queries):
            return [[] for _ in queries]
        start = 0
        found: list[list[Labels]] = [[] for _ in queries]
        if self._in_graph and np.count_nonzero(allowed[: self._in_graph]) > self._exact_below // 2:
            start = self._in_graph
            self._search_graph(queries, k, allowed, found, filtered=among is not None)
        for block in range(start, self._count, BLOCK):
            self._search_rows(queries, k, allowed, block, min(block + BLOCK, self._count), found)
        return [self._ranked(query, np.concatenate(rows), k) for query, rows in zip(queries, found, strict=True)]

    def _allowed(self, among: Collection[str] | Mask | None) -> Mask:
        live = self._live[: self._count]
        if among is None:
            return live
        if isinstance(among, np.ndarray):
            return live & among[self._number[: self._count]]
        mask = np.zeros(self._count, dtype=np.bool_)
        mask[[self._row_of[id] for id in among if id in self._row_of]] = True
        return mask

    def _search_rows(
        self, queries: Vectors, k: int, allowed: Mask, start: int, stop: int, found: list[list[Labels]]
    ) -> None:
        """Add to `found` every row of [start, stop) that can be among the best k."""
        chosen = np.flatnonzero(allowed[start:stop])
        if not chosen.size:
            return
        block = self._rows[start:stop]
        if chosen.size < len(block) // 2:
            block = block[chosen]
            scores = queries @ block.T
        else:
            scores = (queries @ block.T)[:, chosen] if chosen.size < len(block) else queries @ block.T
        for row_scores, rows in zip(scores, found, strict=True):
            if k < row_scores.size:
                least = np.partition(row_scores, -k)[-k] - MARGIN
                rows.append(chosen[row_scores >= least] + start)
            else:
                rows.append(chosen + start)

    def _search_graph(
        self, queries: Vectors, k: int, allowed: Mask, found: list[list[Labels]], *, filtered: bool
    ) -> None:
        """Add the graph's best k to `found`; where the graph cannot give that many, search its rows exactly."""
        wanted = min(k, int(np.count_nonzero(allowed[: self._in_graph])))
        self._graph.set_ef(max(SEARCH_WIDTH, 2 * wanted))
        accept = (lambda row: bool(allowed[row])) if filtered else None
        for number, query in enumerate(queries):
            try:
                labels, _ = self._graph.knn_query(query, k=wanted, num_threads=1, filter=accept)
            except RuntimeError:  # hnswlib's only sign that it met fewer than k rows on its way
                for block in range(0, self._in_graph, BLOCK):
                    stop = min(block + BLOCK, self._in_graph)
                    self._search_rows(queries[number : number + 1], k, allowed, block, stop, found[number : number + 1])
                continue
            found[number].append(labels[0].astype(np.intp))

    def _ranked(self, query: Vectors, rows: Labels, k: int) -> list[VectorHit]:
        vectors = self._rows[rows].astype(np.float64)
        cosines = np.clip(np.einsum("ij,j->i", vectors, query.astype(np.float64)), -1.0, 1.0)
        hits = [VectorHit(self._ids[n], float(c)) for n, c in zip(self._number[rows], cosines, strict=True)]
        return sorted(hits, key=lambda hit: (-hit.cosine, hit.id))[:k]

    # --- the graph ---------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        """Let the graph catch up, twice as fast as rows come in. Called after `put`, except when a store is opened."""
        self._move(self._owed)
        self._owed = 0

    def build(self) -> None:
        """Bring the tail into the graph at once, as far as the set is large enough to have one."""
        self._move(self._count)

    def _move(self, rows: int) -> None:
        """Move up to `rows` rows from the tail into the graph, oldest first, as long as the tail is long."""
        keep = self._exact_below // 2 if self._in_graph else self._exact_below
        if self._count - self._in_graph <= keep or not rows:
            return
        if self._graph is None:
            self._graph = _new_graph(self._dimension)
            if self._graph is None:
                return
            self._graph.init_index(max_elements=2 * self._count, M=LINKS, ef_construction=BUILD_WIDTH, random_seed=SEED)
        stop = min(self._in_graph + rows, self._count)
        if stop > self._graph.get_max_elements():
            self._graph.resize_index(2 * stop)
        labels = np.arange(self._in_graph, stop)
        # Dead rows are left out, and their labels never used again: a graph of zero vectors would mislead its search.
        labels = labels[self._live[self._in_graph : stop]]
        if labels.size:
            self._graph.add_items(self._rows[labels], labels, num_threads=1)
        self._in_graph = stop

    def save(self, path: Path) -> None:
        """Write a snapshot of the graph, if it has changed, to `path` and `path`.rows.

        Raises:
            StoreError: it could not be written; nothing but time is lost.
        """
        if self._graph is None or self._in_graph == self._saved:
            return
        draft = path.with_name(path.name + ".tmp")
        rows = np.flatnonzero(self._live[: self._in_graph])
        try:
            self._graph.save_index(str(draft))
            # The C++ stream does not report a full disk.
            if draft.stat().st_size != self._graph.index_file_size():
                raise OSError(f"{draft} is shorter than the graph")
            table = np.stack([rows, self._number[rows], self._checks(rows)]).astype("<i8").tobytes()
            about = {"graph": _file_check(draft), "rows": self._in_graph, "dimension": self._dimension}
            head = json.dumps({**about, "table": zlib.crc32(table)}, sort_keys=True).encode() + b"\n"
            side_draft = draft.with_name(draft.name + ".rows")
            side_draft.write_bytes(head + table)
            # A graph without its side file counts as none, so a crash between these lines leaves nothing contradictory.
            _side(path).unlink(missing_ok=True)
            draft.replace(path)
            side_draft.replace(_side(path))
        except (OSError, RuntimeError) as error:
            draft.unlink(missing_ok=True)
            raise StoreError(
                f"the search graph {path} could not be saved: {error}",
                hint="no memory is lost; search is slower until it is built again",
            ) from error
        self._saved = self._in_graph

    def restore(self, path: Path) -> bool:
        """Take over the graph saved at `path` as far as it still describes the rows held now. False: it is not usable.

        Its rows come first from then on, in the graph's order; those whose vector changed since are dead in it.
        """
        self._owed = 0
        if self._graph is not None or self._count <= self._exact_below:
            return False
        saved = _read_snapshot(path, self._dimension)
        if saved is None:
            return False
        covered, labels, numbers, checks = saved
        known = numbers < len(self._ids)
        current = np.array(
            [self._row_of.get(self._ids[n], -1) if ok else -1 for n, ok in zip(numbers, known, strict=True)]
        )
        held = current >= 0
        held[held] = self._checks(current[held]) == checks[held]
        graph = _new_graph(self._dimension)
        if graph is None:
            return False
        graph.load_index(str(path), max_elements=2 * max(covered, self._count))
        if graph.get_current_count() < labels.size:
            return False
        self._reorder(covered, labels[held], current[held])
        self._graph, self._in_graph, self._saved = graph, covered, covered
        for label in labels[~held]:
            graph.mark_deleted(label)
        return True

    def _reorder(self, covered: int, labels: Labels, current: Labels) -> None:
        """Put the rows `current` at `labels` below `covered`, and the other live rows behind."""
        rest = self._live[: self._count].copy()
        rest[current] = False
        others = np.flatnonzero(rest)
        count = covered + len(others)
        target = np.concatenate([labels, np.arange(covered, count)])
        source = np.concatenate([current, others])
        rows = np.zeros((count, self._dimension), dtype=np.float32)
        number, live = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.bool_)
        rows[target], number[target], live[target] = self._rows[source], self._number[source], True
        self._rows, self._number, self._live, self._count = rows, number, live, count
        self._row_of = {self._ids[n]: int(r) for n, r in zip(number[target], target, strict=True)}

    def _checks(self, rows: Labels) -> npt.NDArray[np.int64]:
        return np.fromiter((zlib.crc32(self._rows[r].tobytes()) for r in rows), dtype=np.int64, count=len(rows))


def _new_graph(dimension: int) -> Any:
    """None where hnswlib cannot be imported: every result stays right and gets slower with size, which is better than a
    large memory that cannot be opened."""
    try:
        import hnswlib
    except ImportError:
        return None
    return hnswlib.Index(space="ip", dim=dimension)


def _read_snapshot(path: Path, dimension: int) -> tuple[int, Labels, Labels, npt.NDArray[np.int64]] | None:
    """Rows covered, and label, number and checksum of each live one; None where anything does not match. hnswlib
    crashes on a malformed file and loads one of another dimension without a word, so both files are checked first."""
    try:
        head, table = _side(path).read_bytes().split(b"\n", 1)
        about = json.loads(head)
        sound = (
            about["dimension"] == dimension
            and about["table"] == zlib.crc32(table)
            and about["graph"] == _file_check(path)
        )
        covered = int(about["rows"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if not sound:
        return None
    labels, numbers, checks = np.frombuffer(table, dtype="<i8").reshape(3, -1)
    return covered, labels.astype(np.intp), numbers.astype(np.intp), checks


def snapshot_is_sound(path: Path, dimension: int) -> bool:
    """Whether the snapshot at `path` matches its own checksums."""
    return _read_snapshot(path, dimension) is not None


def _side(path: Path) -> Path:
    return path.with_name(path.name + ".rows")


def _file_check(path: Path) -> int:
    check = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            check = zlib.crc32(block, check)
    return check


def _resized(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros((size, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown

"""Nearest neighbours among the unit vectors of one flat file: exact for few rows, through an hnswlib graph for many.

The flat file is the store's; it is mapped and only read here, so opening costs the same at every size. What this module
owns is derived from it: the graph, and the graph's snapshot beside the file. A snapshot that is missing, damaged or out
of date costs time, never a result.

Rows [0, G) are in the graph, rows [G, n) are the tail and are searched exactly. For each row that comes in `feed` moves
two from the tail into the graph, oldest first, so that the tail gets short and no single commit pays for a whole build.
Equal vectors share one point of the graph, whose number there is its label. hnswlib never learns which rows are buried:
they are kept out by a filter, because with its own marks it can insert a point that has no living neighbour, which it
does not survive.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store.disk import Disk, sync_folder
from lychee_local.store.graph import BUILD_WIDTH, LINKS, SEED, Column, Graph, Labels, Numbers, new_native
from lychee_local.store.graph import Mask as Mask
from lychee_local.store.graph import Vectors as Vectors
from lychee_local.store.snapshot import (
    draft_of,
    file_check,
    graph_path,
    overwrite_points,
    read_snapshot,
    sample_check,
    side_path,
    snapshot_rows,
    stamp,
)

Cosines = npt.NDArray[np.float64]
Precision = Literal["float32", "float16"]

EXACT_BELOW = 20_000  # rows; the paper's own switch between exact and approximate search (docs/method.md 3.7)
UNIT_TOLERANCE = 1e-3
# Two ways of summing may differ by this much on the same vector. BLAS and the graph propose with this margin, float64
# decides, so that equal vectors have equal cosines and a result does not depend on what else is in the batch.
MARGIN = 4e-6
BLOCK = 4_096  # rows scored at a time: few enough to be converted within the processor's cache
SPARE = 8  # points asked of the graph beyond k, among which float64 decides
CHUNK = 64  # rows inserted between two moments at which a search can come in
# Restoring reads every byte of the graph, which takes as long as some 13 exact searches. A process that asks one
# question, or adds one row, is done sooner without. So the graph is loaded once this many searches have scored a long
# tail, or once the rows that came in behind it are this part of those covered.
LOOKS_BEFORE_LOAD = 8
ROWS_PER_LOAD = 128

_KINDS: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}


class RowHit(NamedTuple):
    """`cosine` is the inner product of unit vectors, in [-1, 1]. A tuple, since one question makes thousands."""

    row: int
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
    """The rows of one flat file by number. Every method may be called from any thread."""

    def __init__(
        self, path: Path, dimension: int, *, precision: Precision = "float32", exact_below: int = EXACT_BELOW
    ) -> None:
        """`path` need not exist while it has no rows. Nothing is read before `extend`."""
        self._path = path
        self._dimension = dimension
        self._precision = precision
        self._exact_below = exact_below
        self._lock = threading.RLock()
        self._saving = threading.Lock()  # one draft at a time, outside the lock that searches wait for
        self._rows: npt.NDArray[Any] = np.zeros((0, dimension), dtype=_KINDS[precision])
        self._live = Column(np.bool_)
        self._buried = 0
        self._graph: Graph | None = None
        self._saved = 0  # rows covered by the snapshot on disk
        self._seen: tuple[int, ...] | None = None  # the snapshot looked at last
        self._fed = 0  # rows that came in behind a snapshot not restored yet, whose tail is long
        self._scored = 0  # rows scored exactly for want of a graph

    def __len__(self) -> int:
        """Rows that are not buried."""
        return self.count - self._buried

    @property
    def count(self) -> int:
        """Rows of the file, buried ones included."""
        return len(self._rows)

    @property
    def in_graph(self) -> int:
        """Rows that the graph in memory covers, buried ones included; 0 until a snapshot is restored."""
        return 0 if self._graph is None else self._graph.covered

    # --- changing ----------------------------------------------------------------------------------------------------

    def extend(self, count: int) -> None:
        """Rows [0, count) of the file are committed now.

        Raises:
            StoreDamaged: the file is missing or shorter, or `count` is less than it was.
        """
        with self._lock:
            if count == self.count:
                return
            if count < self.count:
                raise StoreDamaged(
                    f"{self._path} has {count} committed rows, it had {self.count}", hint="restore it from a backup"
                )
            self._rows = _mapped(self._path, count, self._dimension, self._precision)
            self._live.append(np.ones(count - self._live.size, dtype=np.bool_))

    def bury(self, rows: Collection[int]) -> None:
        """Take rows out of every search from now on. Raises BadInput for a row that the file does not have."""
        numbers = np.fromiter(rows, dtype=np.intp, count=len(rows))
        with self._lock:
            strange = numbers[(numbers < 0) | (numbers >= self.count)]
            if strange.size:
                raise BadInput(f"row {strange[0]} of {self._path} is to be buried, it has {self.count} rows")
            self._live.values[numbers] = False
            self._buried = self.count - int(np.count_nonzero(self._live.values))
            if self._graph is not None:
                self._graph.bury(numbers, self._live.values)

    def close(self) -> None:
        """Let go of the file and the graph. Can be called twice."""
        with self._lock:
            self._rows = self._rows[:0].copy()
            self._live = Column(np.bool_)
            self._buried = 0
            self._graph = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def rows(self, numbers: Sequence[int] | npt.NDArray[Any]) -> Vectors:
        """Copies, of shape (n, dimension). Raises IndexError for a row that the file does not have."""
        picked = np.asarray(numbers, dtype=np.intp)
        if picked.size and picked.min() < 0:
            raise IndexError(f"row {picked.min()} of {self._path}")
        return np.asarray(self._rows[picked], dtype=np.float32)

    def search(self, queries: Vectors, k: int, *, among: Mask | None = None) -> list[list[RowHit]]:
        """The `k` best per query, best first, ties by row number; `among` as for `nearest`."""
        return [
            list(map(RowHit, rows.tolist(), cosines.tolist()))
            for rows, cosines in self.nearest(queries, k, among=among)
        ]

    def nearest(self, queries: Vectors, k: int, *, among: Mask | None = None) -> list[tuple[Numbers, Cosines]]:
        """The same as two arrays a query. `among` says per row whether it may be a result, and rows beyond its end may
        not."""
        queries = unit_rows(queries, self._dimension, "queries")
        with self._lock:
            allowed = self._allowed(among)
            total = int(np.count_nonzero(allowed))
            k = min(k, total)
            if k < 1:
                return [(np.zeros(0, dtype=np.intp), np.zeros(0)) for _ in queries]
            if total > self._exact_below:
                self._load_if_worth_it()
            found: list[_Proposals] = [_Proposals() for _ in queries]
            start = 0
            if self._graph is not None and np.count_nonzero(allowed[: self.in_graph]) > self._exact_below // 2:
                start = self.in_graph
                self._propose_graph(self._graph, queries, k, allowed, found)
            self._propose_rows(queries, k, np.flatnonzero(allowed[start:]) + start, found)
            return [self._ranked(query, each.best(k), k) for query, each in zip(queries, found, strict=True)]

    def _allowed(self, among: Mask | None) -> Mask:
        live = self._live.values
        if among is None:
            return live
        allowed = np.zeros(len(live), dtype=np.bool_)
        shared = min(len(live), len(among))
        np.logical_and(live[:shared], among[:shared], out=allowed[:shared])
        return allowed

    def _propose_rows(self, queries: Vectors, k: int, rows: Numbers, found: list[_Proposals]) -> None:
        """Add to `found` every one of `rows` (ascending) that can be among the best k."""
        starts = np.arange(0, self.count, BLOCK)
        edges = np.append(np.searchsorted(rows, starts), len(rows))
        for start, first, last in zip(starts, edges[:-1], edges[1:], strict=True):
            chosen = rows[first:last]
            if not chosen.size:
                continue
            block = self._rows[start : start + BLOCK]
            if 2 * chosen.size < len(block):  # else scoring all is cheaper than copying most
                scores = queries @ _as_float32(block[chosen - start]).T
            else:
                scores = queries @ _as_float32(block).T
                scores = scores if chosen.size == len(block) else scores[:, chosen - start]
            for row_scores, proposals in zip(scores, found, strict=True):
                proposals.add(chosen, row_scores, k)

    def _propose_graph(self, graph: Graph, queries: Vectors, k: int, allowed: Mask, found: list[_Proposals]) -> None:
        """Add the graph's best to `found`; where it cannot give enough of them, search its rows exactly."""
        points = graph.alive.values if allowed is self._live.values else graph.points(allowed)
        wanted = min(k + SPARE, int(np.count_nonzero(points)))
        accept = None if points.all() else points.tobytes().__getitem__
        for number, query in enumerate(queries):
            nearest = graph.nearest(query, wanted, accept)
            if nearest is None:
                rows = np.flatnonzero(allowed[: graph.covered])
                self._propose_rows(queries[number : number + 1], k, rows, found[number : number + 1])
                continue
            for rows, scores in graph.spread(*nearest, allowed, k):
                found[number].add(rows, scores, k)

    def _ranked(self, query: Vectors, rows: Numbers, k: int) -> tuple[Numbers, Cosines]:
        exact = query.astype(np.float64)
        parts = [
            np.einsum("ij,j->i", self._rows[rows[start : start + BLOCK]].astype(np.float64), exact)
            for start in range(0, len(rows), BLOCK)
        ]
        cosines = np.clip(np.concatenate(parts), -1.0, 1.0)
        best = np.lexsort((rows, -cosines))[:k]
        return rows[best], cosines[best]

    # --- the graph ---------------------------------------------------------------------------------------------------

    def feed(self, rows: int) -> None:
        """`rows` more rows came in: let the graph catch up by twice as many. Readers do not call this."""
        with self._lock:
            covered = self.in_graph or self._restorable()
            if self._tail_is_short(covered):
                return
            if self._graph is None:
                self._fed += rows
                if self._fed * ROWS_PER_LOAD < covered:
                    return
                self.restore()
        self._move(2 * rows)

    def build(self) -> None:
        """Bring the whole tail into the graph at once, if the file is large enough to have one."""
        self.restore()
        with self._lock:
            if self.count <= self._exact_below:
                return
        self._move(self.count)

    def _tail_is_short(self, covered: int) -> bool:
        return self.count - covered <= (self._exact_below // 2 if covered else self._exact_below)

    def _move(self, rows: int) -> None:
        """Move up to `rows` rows from the tail into the graph."""
        stop = min(self.in_graph + rows, self.count)
        while self._move_chunk(stop):
            time.sleep(0)  # else the same thread takes the lock again before a waiting search wakes up

    def _move_chunk(self, stop: int) -> bool:
        """Whether there is more to move up to row `stop`."""
        with self._lock:
            if self._graph is None:
                native = new_native(self._dimension)
                if native is None:
                    return False
                native.init_index(max_elements=CHUNK, M=LINKS, ef_construction=BUILD_WIDTH, random_seed=SEED)
                self._graph = Graph(native)
            start = self._graph.covered
            end = min(start + CHUNK, stop, self.count)
            if end > start:
                self._graph.insert(self.rows(np.arange(start, end)), self._live.values[start:end])
            return start < end < stop

    # --- the snapshot ------------------------------------------------------------------------------------------------

    @property
    def snapshot_due(self) -> bool:
        """Whether the graph has grown enough since its last snapshot for another to pay.

        Rows beyond the snapshot are searched exactly by readers, and by everyone after a crash. It is due after half
        the rows that are searched exactly anyway: with as many that `feed` leaves in the tail, a reader then never
        scores more rows than in a file too small for a graph. In a large file it is due after a sixteenth of its rows,
        so that all snapshots ever written are at most some 17 times the last one.
        """
        with self._lock:
            return self.in_graph - self._saved >= max(1, self._exact_below // 2, self._saved // 16)

    def save(self, disk: Disk) -> None:
        """Write a snapshot of the graph, if it covers more than the last one.

        Raises:
            StoreError: it could not be written; nothing but time is lost.
        """
        with self._saving, draft_of(graph_path(self._path)) as draft:
            with self._lock:
                graph = self._graph
                if graph is None or graph.covered == self._saved:
                    return
                graph.write(draft)
                table, points = graph.labels.values.copy(), graph.size
            seen = self._publish(draft, self._path, table, points, disk)
            with self._lock:
                self._saved, self._seen = len(table), seen

    def carry(self, target: Path, kept: Mask, disk: Disk) -> None:
        """Write a snapshot for `target`, which holds the rows where `kept` is true, in order and in this precision.

        The graph is not built anew: its points keep their labels. A point all of whose rows are gone stays as a
        crossing, at the mean of its living neighbours, so that no byte of a forgotten vector is in the snapshot.
        (hnswlib's own way, to add the label again, takes as long as 13 insertions.) Nothing is written where more than
        half of the points are gone, or where there is no graph.

        Raises:
            StoreError: it could not be written; nothing but time is lost.
        """
        with self._saving, draft_of(graph_path(target)) as draft:
            with self._lock:
                self.restore()
                if self._graph is None:
                    return
                labels, points = self._graph.labels.values, self._graph.size
                held = np.zeros(len(labels), dtype=np.bool_)
                held[: len(kept)] = kept[: len(labels)]
                table = labels[held]
                alive = np.zeros(points, dtype=np.bool_)
                alive[table[table >= 0]] = True
                if 2 * np.count_nonzero(alive) < points:
                    return
                self._graph.write(draft)
            overwrite_points(draft, self._dimension, alive)
            self._publish(draft, target, table, points, disk)

    def _publish(self, draft: Path, flat: Path, table: Labels, points: int, disk: Disk) -> tuple[int, ...] | None:
        """Put `draft` in place as the snapshot of `flat`, with its side file; the stamp of that."""
        graph = graph_path(flat)
        about = {
            "dimension": self._dimension,
            "graph": file_check(draft),
            "points": points,
            "precision": self._precision,
            "rows": len(table),
            "sample": sample_check(_mapped(flat, len(table), self._dimension, self._precision)),
        }
        body = json.dumps(about, sort_keys=True).encode() + b"\n" + table.astype("<i4").tobytes()
        with draft_of(side_path(graph)) as side:
            fd = os.open(side, os.O_RDWR | os.O_CLOEXEC)
            try:
                disk.write(fd, b"%08x %b" % (zlib.crc32(body), body), 0)
                disk.sync(fd)
            finally:
                os.close(fd)
            fd = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
            try:
                disk.sync(fd)
            finally:
                os.close(fd)
            # A graph without a side file counts as no snapshot, so a crash between these lines leaves no contradiction.
            disk.remove(side_path(graph))
            disk.replace(draft, graph)
            disk.replace(side, side_path(graph))
            sync_folder(disk, graph.parent)
            return stamp(graph)

    def restore(self) -> bool:
        """Take over the snapshot beside the file. False: there is none that is sound, new and of a prefix of the rows.

        A search calls this by itself when it pays.
        """
        with self._lock:
            path = graph_path(self._path)
            current = stamp(path)
            # One that covers rows not extended to yet is looked at again later.
            if not self.in_graph < self._restorable() <= self.count:
                return False
            self._seen = current
            snapshot = read_snapshot(path, self._dimension)
            native = new_native(self._dimension)
            if snapshot is None or native is None or snapshot.precision != self._precision:
                return False
            covered = len(snapshot.table)
            if covered > self.count or snapshot.sample != sample_check(self._rows[:covered]):
                return False
            try:
                native.load_index(str(path), max_elements=snapshot.points)
            except (RuntimeError, MemoryError):  # another process has just replaced it, or it does not fit
                return False
            if native.get_current_count() != snapshot.points:
                return False
            self._graph = Graph(native)
            self._graph.adopt(snapshot.table, self._live.values)
            self._saved = covered
            return True

    def _restorable(self) -> int:
        """Rows covered by a snapshot that has not been looked at yet."""
        path = graph_path(self._path)
        return 0 if stamp(path) in (None, self._seen) else snapshot_rows(path)

    def _load_if_worth_it(self) -> None:
        """Restore the snapshot, also one that another process has written since, once that costs less than to go on
        scoring rows."""
        tail = self.count - self.in_graph
        if tail <= self._exact_below:
            return
        if self._scored >= LOOKS_BEFORE_LOAD * tail:
            self._scored = 0
            self.restore()
        self._scored += tail


class _Proposals:
    """Rows that may be among the best k of one query, with what float32 says of them."""

    def __init__(self) -> None:
        self._rows: list[Numbers] = []
        self._scores: list[npt.NDArray[np.floating[Any]]] = []

    def add(self, rows: Numbers, scores: npt.NDArray[np.floating[Any]], k: int) -> None:
        near = _near_best(scores, k)
        self._rows.append(rows[near])
        self._scores.append(scores[near])

    def best(self, k: int) -> Numbers:
        rows = np.concatenate(self._rows)
        best: Numbers = rows[_near_best(np.concatenate(self._scores), k)]
        return best


def _near_best(scores: npt.NDArray[np.floating[Any]], k: int) -> Mask:
    if k >= scores.size:
        return np.ones(scores.size, dtype=np.bool_)
    near: Mask = scores >= np.partition(scores, -k)[-k] - MARGIN
    return near


def _as_float32(rows: npt.NDArray[Any]) -> Vectors:
    """What `astype` gives for finite values, four times as fast: numpy converts halves one by one."""
    if rows.dtype != np.float16:
        return rows
    bits = rows.view(np.int16).astype(np.int32)
    bits <<= 13  # the fraction to its place, and the exponent, 112 too small
    bits &= ~0x70000000  # of the sign's copies only the topmost stays
    floats = bits.view(np.float32)
    floats *= np.float32(2.0**112)
    return floats


def _mapped(path: Path, count: int, dimension: int, precision: str) -> npt.NDArray[Any]:
    """Rows [0, count) of a flat file, mapped for reading. Raises StoreDamaged where it does not have them."""
    kind = _KINDS[precision]
    wanted = count * dimension * kind.itemsize
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data: Any = mmap.mmap(file.fileno(), wanted, access=mmap.ACCESS_READ) if size >= wanted > 0 else b""
    except FileNotFoundError:
        size, data = 0, b""
    except OSError as error:
        raise StoreError(f"{path} could not be read: {error}", hint="check the disk and its permissions") from error
    if size < wanted:
        raise StoreDamaged(
            f"{path} has {size} bytes, {wanted} are committed: its end is lost", hint="restore the file from a backup"
        )
    rows: npt.NDArray[Any] = np.frombuffer(data, dtype=kind).reshape(-1, dimension)
    return rows

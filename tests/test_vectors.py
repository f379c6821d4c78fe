"""Search is checked against arithmetic done here, the graph against exact search, snapshots against every damage."""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store.disk import OsDisk
from lychee_local.store.snapshot import snapshot_is_sound
from lychee_local.store.vectors import (
    LOOKS_BEFORE_LOAD,
    Mask,
    Precision,
    RowHit,
    VectorIndex,
    Vectors,
    unit_rows,
)

DISK = OsDisk()
PRECISIONS: list[Precision] = ["float32", "float16"]
EAST, NORTH, WEST = [1, 0], [0, 1], [-1, 0]


def random_rows(count: int, dimension: int = 16, seed: int = 1) -> Vectors:
    rows = np.random.default_rng(seed).normal(size=(count, dimension))
    unit_length: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit_length


class FlatFile:
    """What the store keeps: rows appended to a file, some of them buried; and search by brute force."""

    def __init__(self, path: Path, dimension: int = 16, precision: Precision = "float32", exact_below: int = 500):
        self.path = path
        self.precision = precision
        self.exact_below = exact_below
        self.held = np.zeros((0, dimension), dtype=np.float32)
        self.live = np.zeros(0, dtype=np.bool_)

    def append(self, rows: Vectors) -> None:
        stored = rows.astype(self.precision)
        with self.path.open("ab") as file:
            file.write(stored.tobytes())
        self.held = np.concatenate([self.held, stored.astype(np.float32)])
        self.live = np.concatenate([self.live, np.ones(len(rows), dtype=np.bool_)])

    def opened(self) -> VectorIndex:
        index = VectorIndex(self.path, self.held.shape[1], precision=self.precision, exact_below=self.exact_below)
        index.extend(len(self.held))
        index.bury(np.flatnonzero(~self.live).tolist())
        return index

    def grown(self, rows: Vectors, step: int = 100) -> VectorIndex:
        """An index that was there while `rows` came in."""
        index = self.opened()
        for start in range(0, len(rows), step):
            self.append(rows[start : start + step])
            index.extend(len(self.held))
            index.feed(len(rows[start : start + step]))
        return index

    def bury(self, index: VectorIndex, rows: Collection[int]) -> None:
        self.live[list(rows)] = False
        index.bury(rows)

    def compacted(self, path: Path) -> FlatFile:
        other = FlatFile(path, self.held.shape[1], self.precision, self.exact_below)
        other.append(self.held[self.live])
        return other

    def nearest(self, query: Vectors, k: int, among: Mask | None = None) -> list[int]:
        allowed = self.live if among is None else self.live & among
        rows = np.flatnonzero(allowed)
        cosines = self.held[rows].astype(np.float64) @ query.astype(np.float64)
        # Equal vectors must tie here as well, whatever order a sum is made in.
        cosines = np.round(cosines, 12)
        return [int(row) for row in rows[np.lexsort((rows, -cosines))[:k]]]

    def recall(self, index: VectorIndex, k: int = 20, among: Mask | None = None) -> float:
        queries = random_rows(50, self.held.shape[1], seed=9)
        found = index.search(queries, k, among=among)
        shares = [len({*rows(f)} & {*self.nearest(q, k, among)}) / k for f, q in zip(found, queries, strict=True)]
        return float(np.mean(shares))


def rows(hits: Sequence[RowHit]) -> list[int]:
    return [hit.row for hit in hits]


@pytest.fixture
def flat(tmp_path: Path) -> FlatFile:
    return FlatFile(tmp_path / "turns.rows")


def test_the_nearest_as_arrays_are_the_hits(flat: FlatFile) -> None:
    flat.append(random_rows(50, 16, seed=3))
    queries = random_rows(2, 16, seed=4)
    among = np.arange(50) % 2 == 0
    hits = flat.opened().search(queries, 7, among=among)
    found = flat.opened().nearest(queries, 7, among=among)
    assert [list(map(RowHit, r.tolist(), c.tolist())) for r, c in found] == hits
    assert [len(r) for r, _ in flat.opened().nearest(queries, 7, among=np.zeros(50, dtype=np.bool_))] == [0, 0]


def compass(path: Path, *vectors: list[int]) -> VectorIndex:
    file = FlatFile(path, dimension=2)
    file.append(np.array(vectors, dtype=np.float32))
    return file.opened()


# --- exact search ----------------------------------------------------------------------------------------------------


def test_search_by_hand(tmp_path: Path) -> None:
    index = compass(tmp_path / "x.rows", EAST, NORTH, WEST)
    [hits] = index.search(np.array([[0.6, 0.8]], dtype=np.float32), 2)
    assert rows(hits) == [1, 0]
    assert [hit.cosine for hit in hits] == pytest.approx([0.8, 0.6])


def test_each_query_gets_its_own_list_and_k_is_clamped(tmp_path: Path) -> None:
    empty = VectorIndex(tmp_path / "none.rows", 2)
    empty.extend(0)
    assert empty.search(np.array([EAST, NORTH], dtype=np.float32), 5) == [[], []]
    index = compass(tmp_path / "x.rows", EAST, NORTH)
    found = index.search(np.array([EAST, NORTH], dtype=np.float32), 5)
    assert [rows(hits) for hits in found] == [[0, 1], [1, 0]]
    assert index.search(np.zeros((0, 2), dtype=np.float32), 5) == []


def test_rows_are_copies_by_number(tmp_path: Path) -> None:
    index = compass(tmp_path / "x.rows", EAST, NORTH, WEST)
    assert index.rows([2, 0, 2]).tolist() == [WEST, EAST, WEST]
    assert index.rows([]).shape == (0, 2)
    for wrong in (3, -1):
        with pytest.raises(IndexError):
            index.rows([wrong])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ties_break_by_row_even_at_the_cut(tmp_path: Path, precision: Precision) -> None:
    file = FlatFile(tmp_path / "x.rows", precision=precision)
    file.append(random_rows(50, seed=2))
    file.append(np.repeat(random_rows(1), 50, axis=0))
    [hits] = file.opened().search(random_rows(1), 7)
    assert rows(hits) == list(range(50, 57))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_result_does_not_depend_on_the_rest_of_the_batch(tmp_path: Path, precision: Precision) -> None:
    file = FlatFile(tmp_path / "x.rows", precision=precision, exact_below=20_000)
    file.append(random_rows(1000))
    index, queries = file.opened(), random_rows(9, seed=3)
    assert index.search(queries, 20) == [index.search(q[None], 20)[0] for q in queries]


def test_half_precision_scores_what_the_file_holds(tmp_path: Path) -> None:
    file = FlatFile(tmp_path / "x.rows", dimension=2, precision="float16")
    file.append(np.array([[0.6, 0.8]], dtype=np.float32))
    assert file.path.stat().st_size == 4
    [[hit]] = file.opened().search(np.array([EAST], dtype=np.float32), 1)
    assert hit.cosine == float(np.float16(0.6))
    assert file.opened().rows([0]).dtype == np.float32


def test_half_precision_of_every_size(tmp_path: Path) -> None:
    """Large, small, subnormal, zero and negative values: one query for each place, so that each decides once."""
    values = np.array([1, -1, 0.5, 2**-14, 2**-24, -(2**-24), 3 * 2**-24, 0.0, -0.0, 0.1, -0.3, 2**-10])
    held = np.zeros((len(values), 12), dtype=np.float32)
    held[:, 0] = values
    held[:, 1] = np.sqrt(1 - values**2)
    file = FlatFile(tmp_path / "x.rows", dimension=12, precision="float16")
    file.append(held)
    query = np.eye(1, 12, dtype=np.float32)
    [hits] = file.opened().search(query, 5)
    assert [hit.cosine for hit in hits] == [1, 0.5, float(np.float16(0.1)), 2**-10, 2**-14]
    assert rows(file.opened().search(query, 12)[0]) == [0, 2, 9, 11, 3, 6, 4, 7, 8, 5, 10, 1]


def test_buried_rows_are_in_no_result(tmp_path: Path) -> None:
    index = compass(tmp_path / "x.rows", EAST, NORTH, WEST)
    index.bury([0])
    index.bury([0, 1])
    assert index.search(np.array([EAST], dtype=np.float32), 5) == [[RowHit(2, -1.0)]]
    assert (len(index), index.count) == (1, 3)
    for wrong in (3, -1):
        with pytest.raises(BadInput, match=f"row {wrong} "):
            index.bury([wrong])


def test_among_limits_by_row_and_may_be_shorter(tmp_path: Path) -> None:
    index = compass(tmp_path / "x.rows", EAST, NORTH, WEST)
    query = np.array([EAST], dtype=np.float32)
    assert rows(index.search(query, 5, among=np.array([False, True, True]))[0]) == [1, 2]
    assert rows(index.search(query, 5, among=np.array([False, True]))[0]) == [1]
    assert rows(index.search(query, 5, among=np.array([False, False, True, True, True]))[0]) == [2]
    assert index.search(query, 5, among=np.zeros(3, dtype=np.bool_)) == [[]]
    index.bury([1])
    assert rows(index.search(query, 5, among=np.array([False, True, True]))[0]) == [2]


def test_committed_rows_must_be_there(tmp_path: Path) -> None:
    index = compass(tmp_path / "x.rows", EAST, NORTH)
    with pytest.raises(StoreDamaged, match="16 bytes, 24 are committed"):
        index.extend(3)
    assert rows(index.search(np.array([EAST], dtype=np.float32), 5)[0]) == [0, 1]
    with pytest.raises(StoreDamaged, match="has 1 committed rows, it had 2"):
        index.extend(1)
    with pytest.raises(StoreDamaged):
        VectorIndex(tmp_path / "none.rows", 2).extend(1)


def test_bytes_behind_the_committed_rows_are_not_read(tmp_path: Path) -> None:
    file = FlatFile(tmp_path / "x.rows", dimension=2)
    file.append(np.array([EAST, NORTH], dtype=np.float32))
    index = VectorIndex(file.path, 2)
    index.extend(1)
    assert rows(index.search(np.array([NORTH], dtype=np.float32), 5)[0]) == [0]
    index.extend(2)
    assert rows(index.search(np.array([NORTH], dtype=np.float32), 5)[0]) == [1, 0]


def test_closed_index_holds_nothing_and_can_be_closed_again(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1200))
    index.close()
    index.close()
    assert (len(index), index.in_graph, index.search(random_rows(1), 5)) == (0, 0, [[]])


@pytest.mark.parametrize(
    "vectors",
    [
        np.ones((2, 3)),
        np.ones(4),
        np.array([[np.nan, 0, 0, 0]]),
        np.array([[np.inf, 0, 0, 0]]),
        np.zeros((1, 4)),
        np.array([[2.0, 0, 0, 0]]),
    ],
)
def test_unit_rows_refuses(vectors: npt.NDArray[np.float64]) -> None:
    with pytest.raises(BadInput, match="these"):
        unit_rows(vectors, 4, "these")


def test_search_refuses_what_hnswlib_would_crash_on(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1200))
    with pytest.raises(BadInput, match="queries"):
        index.search(random_rows(1, 8), 5)


# --- the graph -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graph_recall_against_exact_search(tmp_path: Path, precision: Precision) -> None:
    file = FlatFile(tmp_path / "x.rows", precision=precision)
    index = file.grown(random_rows(3000))
    assert index.in_graph > 2000
    assert file.recall(index) >= 0.98


def test_graph_grows_with_rows_and_the_tail_stays_short(flat: FlatFile) -> None:
    index = flat.opened()
    for start in range(0, 2500, 50):
        flat.append(random_rows(50, seed=start))
        index.extend(start + 50)
        before = index.in_graph
        index.feed(50)
        assert index.in_graph - before <= 100
        assert index.count - index.in_graph <= 500
    assert rows(index.search(flat.held[2450:2451], 1)[0]) == [2450]


def test_no_graph_below_the_threshold(tmp_path: Path) -> None:
    file = FlatFile(tmp_path / "x.rows", exact_below=20_000)
    index = file.grown(random_rows(200))
    index.build()
    index.save(DISK)
    assert index.in_graph == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.rows"]


def test_graph_honours_buried_rows_and_filters(flat: FlatFile) -> None:
    index = flat.grown(random_rows(3000))
    flat.bury(index, range(400, 600))
    flat.append(random_rows(300, seed=5))
    index.extend(3300)
    index.feed(300)
    assert flat.recall(index) >= 0.98
    half = np.random.default_rng(3).random(3300) < 0.5
    assert flat.recall(index, among=half) >= 0.98
    few = np.zeros(3300, dtype=np.bool_)
    few[[401, 1200, 1201, 1202, 3299]] = True
    [hits] = index.search(random_rows(1), 30, among=few)
    assert rows(hits) == flat.nearest(random_rows(1)[0], 30, few)
    assert len(hits) == 4


def test_a_filter_far_from_the_query_still_gives_all_it_has(flat: FlatFile) -> None:
    """The allowed rows lie on the other side of the sphere, where the graph's search does not come by itself."""
    index = flat.grown(random_rows(3000))
    query = random_rows(1, seed=12)
    far = np.zeros(3000, dtype=np.bool_)
    far[np.argsort(flat.held @ query[0])[:600]] = True
    [hits] = index.search(query, 400, among=far)
    assert len(hits) == 400
    assert len({*rows(hits)} & {*flat.nearest(query[0], 400, far)}) >= 392


def test_where_most_of_a_neighbourhood_is_buried_the_rest_is_found(flat: FlatFile) -> None:
    topic = random_rows(1, seed=20) + 0.05 * random_rows(400, seed=21)
    index = flat.grown(np.concatenate([(topic / np.linalg.norm(topic, axis=1)[:, None]), random_rows(2000)]))
    flat.bury(index, range(398))
    [hits] = index.search(random_rows(1, seed=20), 20)
    assert rows(hits)[:2] == flat.nearest(random_rows(1, seed=20)[0], 2)
    assert len({*rows(hits)} & {*flat.nearest(random_rows(1, seed=20)[0], 20)}) >= 19


def test_asking_for_everything_gives_everything(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1200))
    assert rows(index.search(random_rows(1), 5000)[0]) == flat.nearest(random_rows(1)[0], 5000)


def test_same_rows_same_results(tmp_path: Path) -> None:
    first, second = (FlatFile(tmp_path / name).grown(random_rows(2000)) for name in ("a.rows", "b.rows"))
    queries = random_rows(20, seed=4)
    assert first.search(queries, 20) == second.search(queries, 20)


def test_masses_of_equal_vectors_are_all_listed_and_hide_nothing(flat: FlatFile) -> None:
    same = random_rows(1, seed=30)
    mixed = random_rows(3000)
    mixed[500:1000] = same
    mixed[np.arange(1000, 3000, 20)] = same
    index = flat.grown(mixed)
    assert index.in_graph > 2000
    everyone = [row for row in range(3000) if (mixed[row] == same[0]).all()]
    assert len(everyone) == 600
    assert rows(index.search(same, 600)[0]) == everyone
    assert rows(index.search(same, 7)[0]) == everyone[:7]
    assert flat.recall(index) >= 0.98
    index.save(DISK)
    assert flat.path.with_suffix(".hnsw").read_bytes().count(same.tobytes()) == 1
    flat.bury(index, everyone[:550])
    assert rows(index.search(same, 30)[0]) == everyone[550:580]
    odd = np.arange(3000) % 2 == 1
    assert rows(index.search(same, 80, among=odd)[0]) == flat.nearest(same[0], 80, odd)
    again = flat.opened()
    assert again.restore()
    assert rows(again.search(same, 30)[0]) == everyone[550:580]


def test_a_vector_that_comes_back_after_it_was_buried_is_found(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1500))
    flat.bury(index, [3])
    flat.append(np.concatenate([random_rows(1500)[3:4], random_rows(600, seed=2)]))
    index.extend(2101)
    index.build()
    assert index.in_graph == 2101
    assert rows(index.search(random_rows(1500)[3:4], 1)[0]) == [1500]


def test_without_hnswlib_every_result_is_right(flat: FlatFile, monkeypatch: pytest.MonkeyPatch) -> None:
    flat.grown(random_rows(2000)).save(DISK)
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    index = flat.opened()
    index.build()
    assert not index.restore()
    assert (index.in_graph, index.snapshot_due) == (0, False)
    assert rows(index.search(random_rows(1), 20)[0]) == flat.nearest(random_rows(1)[0], 20)


def test_all_buried_leaves_nothing(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1500))
    flat.bury(index, range(1500))
    assert index.search(random_rows(1), 5) == [[]]
    flat.append(random_rows(1200, seed=6))
    index.extend(2700)
    index.build()
    assert flat.recall(index) >= 0.98


def test_threads_search_while_rows_come_in(flat: FlatFile, tmp_path: Path) -> None:
    index = flat.grown(random_rows(1000))
    flat.append(random_rows(2000, seed=2))
    stop, failures, searches = threading.Event(), [], [0, 0, 0]
    buried = set(range(0, 1000, 7))
    index.bury(buried)

    def ask(place: int) -> None:
        query = random_rows(1, seed=40 + place)
        while not stop.is_set():
            count = index.count
            [hits] = index.search(query, 20)
            cosines = [hit.cosine for hit in hits]
            if len(hits) != 20 or cosines != sorted(cosines, reverse=True) or buried & {*rows(hits)}:
                failures.append(hits)
            if index.rows([count - 1]).shape != (1, 16):
                failures.append([])
            searches[place] += 1

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for count in range(1000, 3001, 50):
        index.extend(count)
        index.feed(50)
        index.save(DISK)
    index.build()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert min(searches) > 0
    flat.live[list(buried)] = False
    assert flat.recall(index) >= 0.98


# --- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_snapshot_is_taken_over(tmp_path: Path, precision: Precision) -> None:
    file = FlatFile(tmp_path / "x.rows", precision=precision)
    index = file.grown(random_rows(2000))
    index.save(DISK)
    assert snapshot_is_sound(file.path, 16)
    file.append(random_rows(100, seed=6))
    file.live[[7, 2005]] = False
    again = file.opened()
    assert again.in_graph == 0
    assert again.restore()
    assert again.in_graph == index.in_graph
    assert file.recall(again) >= 0.98
    assert rows(again.search(random_rows(1), 5000)[0]) == file.nearest(random_rows(1)[0], 5000)
    assert not again.restore()  # nothing new
    file.append(random_rows(300, seed=8))
    again.extend(2400)
    again.feed(300)
    assert again.in_graph > index.in_graph
    assert file.recall(again) >= 0.98


def test_a_process_that_searches_on_loads_the_graph_by_itself(flat: FlatFile) -> None:
    flat.grown(random_rows(2000)).save(DISK)
    again = flat.opened()
    for _ in range(LOOKS_BEFORE_LOAD):
        again.search(random_rows(1), 5, among=np.arange(2000) < 400)  # few rows need no graph
        assert rows(again.search(random_rows(1), 5)[0]) == flat.nearest(random_rows(1)[0], 5)
        assert again.in_graph == 0
    again.search(random_rows(1), 5)
    assert again.in_graph > 1000


def test_a_writer_loads_the_graph_only_for_a_long_tail(tmp_path: Path) -> None:
    file = FlatFile(tmp_path / "x.rows", exact_below=100)
    index = file.grown(random_rows(2000))
    index.build()
    index.save(DISK)
    covered = index.in_graph
    again = file.grown(random_rows(40, seed=2), step=1)
    assert again.in_graph == 0
    file.append(random_rows(60, seed=3))
    again.extend(2100)
    again.feed(60)
    assert again.in_graph > covered


def test_a_reader_takes_over_what_a_writer_saved_since(flat: FlatFile) -> None:
    writer = flat.grown(random_rows(1200))
    writer.save(DISK)
    reader = flat.opened()
    assert reader.restore()
    first = reader.in_graph
    flat.append(random_rows(1500, seed=2))
    writer.extend(2700)
    writer.build()
    writer.save(DISK)
    assert not reader.restore()  # it covers rows that this reader has not seen yet
    reader.extend(2700)
    for _ in range(LOOKS_BEFORE_LOAD + 1):
        assert first == reader.in_graph
        reader.search(random_rows(1), 5)
    assert reader.in_graph == 2700
    assert flat.recall(reader) >= 0.98


def test_snapshot_is_due_after_half_the_threshold(flat: FlatFile) -> None:
    index = flat.opened()
    assert not index.snapshot_due
    saves: list[int] = []
    for start in range(0, 3000, 50):
        flat.append(random_rows(50, seed=start))
        index.extend(start + 50)
        index.feed(50)
        if index.snapshot_due:
            index.save(DISK)
            assert not index.snapshot_due
            saves.append(index.in_graph)
    assert all(250 <= after - before <= 350 for before, after in zip([0, *saves], saves, strict=False))
    assert index.count - saves[-1] <= 500 + 350


class FailingDisk(OsDisk):
    """The real disk, full after `after` operations."""

    def __init__(self, after: int) -> None:
        self.left = after

    def _spend(self) -> None:
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._spend()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._spend()
        super().sync(fd)

    def replace(self, source: Path, target: Path) -> None:
        self._spend()
        super().replace(source, target)


@pytest.mark.parametrize("after", range(6))
def test_a_snapshot_that_cannot_be_written_costs_nothing(flat: FlatFile, after: int) -> None:
    index = flat.grown(random_rows(1500))
    index.save(DISK)
    flat.append(random_rows(500, seed=2))
    index.extend(2000)
    index.build()
    with pytest.raises(StoreError, match="No space left on device"):
        index.save(FailingDisk(after))
    assert not [*flat.path.parent.glob("*.tmp")]
    # Once the old side file is gone, and until the new one is there, there is no snapshot at all.
    assert snapshot_is_sound(flat.path, 16) == (after not in (3, 4))
    assert flat.recall(index) >= 0.98
    index.save(DISK)
    again = flat.opened()
    assert again.restore()
    assert again.in_graph == 2000


def test_nothing_new_nothing_written(flat: FlatFile) -> None:
    index = flat.grown(random_rows(1500))
    index.save(DISK)
    index.save(FailingDisk(0))
    again = flat.opened()
    again.restore()
    again.save(FailingDisk(0))


def test_a_snapshot_is_for_its_owner_only(flat: FlatFile) -> None:
    flat.grown(random_rows(1500)).save(DISK)
    for name in ("turns.hnsw", "turns.hnsw.side"):
        assert flat.path.with_name(name).stat().st_mode & 0o777 == 0o600


def flipped(position: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position(len(data))] ^= 1
        return bytes(changed)

    return flip


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte": flipped(lambda size: 0),
    "middle": flipped(lambda size: size // 2),
    "last byte": flipped(lambda size: size - 1),
    "cut": lambda data: data[:-100],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff" * len(data),
    "text": lambda data: b"{}\n" * 100,
}


@pytest.mark.parametrize("name", ["turns.hnsw", "turns.hnsw.side"])
@pytest.mark.parametrize("change", CHANGES)
def test_damaged_snapshot_is_not_used(flat: FlatFile, name: str, change: str) -> None:
    flat.grown(random_rows(2000)).save(DISK)
    path = flat.path.with_name(name)
    path.write_bytes(CHANGES[change](path.read_bytes()))
    not_used(flat)


@pytest.mark.parametrize("name", ["turns.hnsw", "turns.hnsw.side"])
def test_half_a_snapshot_is_not_used(flat: FlatFile, name: str) -> None:
    flat.grown(random_rows(2000)).save(DISK)
    flat.path.with_name(name).unlink()
    not_used(flat)


def not_used(flat: FlatFile) -> None:
    assert not snapshot_is_sound(flat.path, 16)
    again = flat.opened()
    assert not again.restore()
    assert rows(again.search(random_rows(1), 20)[0]) == flat.nearest(random_rows(1)[0], 20)
    again.build()
    again.save(DISK)
    assert snapshot_is_sound(flat.path, 16)
    assert flat.opened().restore()


def moved(source: Path, target: Path) -> None:
    for suffix in (".hnsw", ".hnsw.side"):
        source.with_suffix(suffix).replace(target.with_suffix(suffix))


def test_sound_snapshot_of_something_else_is_not_used(flat: FlatFile, tmp_path: Path) -> None:
    flat.append(random_rows(2000))
    others = {
        "other rows": FlatFile(tmp_path / "rows.rows"),
        "other precision": FlatFile(tmp_path / "half.rows", precision="float16"),
        "other dimension": FlatFile(tmp_path / "wide.rows", dimension=8),
        "more rows": FlatFile(tmp_path / "more.rows"),
    }
    for name, other in others.items():
        index = other.grown(random_rows(2600 if name == "more rows" else 1500, other.held.shape[1], seed=50))
        index.build()
        index.save(DISK)
        moved(other.path, flat.path)
        assert snapshot_is_sound(flat.path, 16) == (name != "other dimension")
        again = flat.opened()
        assert not again.restore(), name
        assert rows(again.search(random_rows(1), 20)[0]) == flat.nearest(random_rows(1)[0], 20)


# --- compaction ------------------------------------------------------------------------------------------------------


def pieces(vectors: npt.NDArray[Any], size: int = 16) -> set[bytes]:
    """Every run of `size` bytes in each row."""
    found: set[bytes] = set()
    for row in vectors:
        data = row.tobytes()
        found |= {data[start : start + size] for start in range(len(data) - size + 1)}
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_carried_snapshot_holds_no_forgotten_byte_and_needs_no_building(tmp_path: Path, precision: Precision) -> None:
    file = FlatFile(tmp_path / "old.rows", precision=precision)
    index = file.grown(random_rows(2500))
    index.build()
    gone = [*range(100, 400), *range(1000, 2000, 3), 2499]
    file.bury(index, gone)
    new = file.compacted(tmp_path / "new.rows")
    index.carry(new.path, file.live, DISK)

    forgotten = file.held[~file.live]
    searched: list[npt.NDArray[Any]] = (
        [forgotten] if precision == "float32" else [forgotten, forgotten.astype(np.float16)]
    )
    for path in (new.path.with_suffix(".hnsw"), new.path.with_suffix(".hnsw.side")):
        data = path.read_bytes()
        present = {data[start : start + 16] for start in range(len(data) - 15)}
        for vectors in searched:
            assert not pieces(vectors) & present
    assert new.held[5].tobytes() in new.path.with_suffix(".hnsw").read_bytes()  # the scan would find what is there
    assert [*tmp_path.glob("*.tmp")] == []

    carried = new.opened()
    assert carried.restore()
    assert carried.in_graph == len(new.held)
    assert new.recall(carried) >= 0.98
    assert new.recall(carried, among=np.arange(len(new.held)) % 2 == 0) >= 0.98
    assert file.recall(index) >= 0.98  # the old one still serves
    new.append(random_rows(900, seed=2))
    carried.extend(len(new.held))
    carried.build()
    carried.save(DISK)
    assert new.recall(carried) >= 0.98
    assert new.opened().restore()


def test_carry_after_carry(tmp_path: Path) -> None:
    file = FlatFile(tmp_path / "0.rows")
    index = file.grown(random_rows(3000))
    index.build()
    for step in range(1, 4):
        file.bury(index, range(0, len(file.held), 7))
        new = file.compacted(tmp_path / f"{step}.rows")
        index.carry(new.path, file.live, DISK)
        file, index = new, new.opened()
        assert index.restore()
        assert file.recall(index) >= 0.98


def test_carry_restores_what_it_carries(flat: FlatFile, tmp_path: Path) -> None:
    flat.grown(random_rows(2000)).save(DISK)
    flat.live[::10] = False
    new = flat.compacted(tmp_path / "new.rows")
    flat.opened().carry(new.path, flat.live, DISK)
    carried = new.opened()
    assert carried.restore()
    assert new.recall(carried) >= 0.98


def test_a_forgotten_topic_without_living_neighbours_is_overwritten(flat: FlatFile, tmp_path: Path) -> None:
    """Its points link to each other alone, so there is no living neighbour to put most of them at."""
    topic = random_rows(1, seed=20) + 0.001 * random_rows(400, seed=21)
    topic /= np.linalg.norm(topic, axis=1)[:, None]
    index = flat.grown(np.concatenate([topic, random_rows(1600)]))
    index.build()
    flat.bury(index, range(400))
    new = flat.compacted(tmp_path / "new.rows")
    index.carry(new.path, flat.live, DISK)
    data = new.path.with_suffix(".hnsw").read_bytes()
    present = {data[start : start + 16] for start in range(len(data) - 15)}
    assert not pieces(topic) & present
    carried = new.opened()
    assert carried.restore()
    assert new.recall(carried) >= 0.98
    # The overwritten points now lie where living ones do, and rows equal to these may come to them.
    new.append(np.repeat(new.held[[0, 7, 900]], 40, axis=0))
    carried.extend(len(new.held))
    carried.build()
    for row in (0, 7, 900):
        assert rows(carried.search(new.held[row : row + 1], 41)[0]) == new.nearest(new.held[row], 41)
    new.bury(carried, range(1200, 1720))
    for row in (0, 7, 900):
        assert rows(carried.search(new.held[row : row + 1], 1)[0]) == [row]


def test_a_forgotten_row_with_a_living_equal_leaves_that(flat: FlatFile, tmp_path: Path) -> None:
    mixed = random_rows(2000)
    mixed[1500] = mixed[10]
    mixed[1501] = mixed[11]
    index = flat.grown(mixed)
    index.build()
    flat.bury(index, [10, 11, 1501])
    new = flat.compacted(tmp_path / "new.rows")
    index.carry(new.path, flat.live, DISK)
    carried = new.opened()
    assert carried.restore()
    assert rows(carried.search(mixed[10:11], 1)[0]) == [1498]
    data = new.path.with_suffix(".hnsw").read_bytes()
    assert mixed[10].tobytes() in data
    assert mixed[11].tobytes() not in data


def test_where_most_is_forgotten_nothing_is_carried(flat: FlatFile, tmp_path: Path) -> None:
    index = flat.grown(random_rows(2000))
    index.build()
    flat.bury(index, range(1001))
    new = flat.compacted(tmp_path / "new.rows")
    index.carry(new.path, flat.live, DISK)
    VectorIndex(tmp_path / "none.rows", 16).carry(new.path, flat.live, DISK)  # nor where there is no graph
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.rows", "turns.rows"]


@pytest.mark.parametrize("after", range(6))
def test_a_snapshot_that_cannot_be_carried_leaves_no_draft(flat: FlatFile, tmp_path: Path, after: int) -> None:
    index = flat.grown(random_rows(1500))
    flat.bury(index, range(100))
    new = flat.compacted(tmp_path / "new.rows")
    with pytest.raises(StoreError, match="No space left on device"):
        index.carry(new.path, flat.live, FailingDisk(after))
    assert [*tmp_path.glob("*.tmp")] == []
    assert snapshot_is_sound(new.path, 16) == (after == 5)


# --- everything together ---------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "repeat", "bury", "feed", "build", "save", "reopen", "carry"]),
        st.integers(0, 24),
        st.integers(0, 10_000),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, precision=st.sampled_from(PRECISIONS))
def test_any_sequence_equals_brute_force(
    steps: list[tuple[str, int, int]], precision: Precision, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a threshold of 6 the graph, the tail, buried rows, equal rows and snapshots are all in play; at this size
    the graph's search is wide enough to be exact."""
    folder = tmp_path_factory.mktemp("graph")
    file = FlatFile(folder / "0.rows", 4, precision, exact_below=6)
    index = file.opened()
    for number, (step, size, seed) in enumerate(steps, 1):
        if step == "extend":
            file.append(random_rows(size % 5, 4, seed))
            index.extend(len(file.held))
        elif step == "repeat" and len(file.held):
            file.append(file.held[[seed % len(file.held)] * (1 + size % 3)])
            index.extend(len(file.held))
        elif step == "bury" and len(file.held):
            file.bury(index, [seed % len(file.held), (seed + size) % len(file.held)])
        elif step == "feed":
            index.feed(size)
        elif step == "build":
            index.build()
        elif step == "save":
            index.save(DISK)
        elif step == "reopen":
            index = file.opened()
            if size % 2:
                index.restore()
        elif step == "carry":
            new = file.compacted(folder / f"{number}.rows")
            index.carry(new.path, file.live, DISK)
            file, index = new, new.opened()
        query = random_rows(1, 4, seed + 1)
        among = np.random.default_rng(seed).random(len(file.held)) < 0.7 if size % 3 == 0 else None
        [hits] = index.search(query, size + 1, among=among)
        assert rows(hits) == file.nearest(query[0], size + 1, among)
    assert len(index) == np.count_nonzero(file.live)

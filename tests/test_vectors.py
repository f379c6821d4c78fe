"""Search is checked against arithmetic done here, the graph against exact search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import unit

from lychee_local.errors import BadInput
from lychee_local.store.vectors import VectorHit, VectorIndex, Vectors, unit_rows


def random_rows(count: int, dimension: int = 16, seed: int = 1) -> Vectors:
    rows = np.random.default_rng(seed).normal(size=(count, dimension))
    unit_length: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit_length


def names(count: int, start: int = 0) -> list[str]:
    return [f"id{i:05d}" for i in range(start, start + count)]


def ids(hits: list[VectorHit]) -> list[str]:
    return [hit.id for hit in hits]


def brute_force(held: dict[str, Vectors], query: Vectors, k: int) -> list[str]:
    scored = {id: float(np.dot(row.astype(np.float64), query.astype(np.float64))) for id, row in held.items()}
    return sorted(scored, key=lambda id: (-scored[id], id))[:k]


def test_search_by_hand() -> None:
    index = VectorIndex(2)
    index.put(["east", "north", "west"], np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32))
    [hits] = index.search(np.array([[0.6, 0.8]], dtype=np.float32), 2)
    assert ids(hits) == ["north", "east"]
    assert [hit.cosine for hit in hits] == pytest.approx([0.8, 0.6])


def test_each_query_gets_its_own_list_and_k_is_clamped() -> None:
    index = VectorIndex(2)
    assert index.search(np.array([[1, 0]], dtype=np.float32), 5) == [[]]
    index.put(["east", "north"], np.array([[1, 0], [0, 1]], dtype=np.float32))
    found = index.search(np.array([[1, 0], [0, 1]], dtype=np.float32), 5)
    assert [ids(hits) for hits in found] == [["east", "north"], ["north", "east"]]


def test_ties_break_by_id_even_at_the_cut() -> None:
    index = VectorIndex(16)
    same = np.repeat(random_rows(1), 50, axis=0)
    index.put(list(reversed(names(50))), same)
    index.put(names(50, start=100), random_rows(50, seed=2))
    [hits] = index.search(same[:1], 7)
    assert ids(hits) == names(7)


def test_a_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    index = VectorIndex(16)
    index.put(names(1000), random_rows(1000))
    queries = random_rows(9, seed=3)
    together = index.search(queries, 20)
    assert together == [index.search(q[None], 20)[0] for q in queries]


def test_replaced_and_dropped() -> None:
    index = VectorIndex(2)
    index.put(["a", "b"], np.array([[1, 0], [0, 1]], dtype=np.float32))
    index.put(["a"], np.array([[-1, 0]], dtype=np.float32))
    [hits] = index.search(np.array([[1, 0]], dtype=np.float32), 5)
    assert hits == [VectorHit("b", 0.0), VectorHit("a", -1.0)]
    index.drop(["b"])
    assert ids(index.search(np.array([[1, 0]], dtype=np.float32), 5)[0]) == ["a"]
    assert len(index) == 1


@pytest.mark.parametrize(
    "rows",
    [
        np.ones((2, 3)),
        np.ones(4),
        np.array([[np.nan, 0, 0, 0]]),
        np.array([[np.inf, 0, 0, 0]]),
        np.zeros((1, 4)),
        np.array([[2.0, 0, 0, 0]]),
    ],
)
def test_unit_rows_refuses(rows: npt.NDArray[np.float64]) -> None:
    with pytest.raises(BadInput, match="these"):
        unit_rows(rows, 4, "these")


# --- the graph -------------------------------------------------------------------------------------------------------


def graph_index(count: int, exact_below: int = 500) -> tuple[VectorIndex, dict[str, Vectors]]:
    index = VectorIndex(16, exact_below=exact_below)
    rows = random_rows(count)
    for start in range(0, count, 100):
        index.put(names(100, start), rows[start : start + 100])
        index.feed()
    return index, dict(zip(names(count), rows, strict=True))


def recall(index: VectorIndex, held: dict[str, Vectors], k: int = 20) -> float:
    queries = random_rows(50, seed=9)
    found = index.search(queries, k)
    return float(
        np.mean([len({*ids(f)} & {*brute_force(held, q, k)}) / k for f, q in zip(found, queries, strict=True)])
    )


def test_graph_recall_against_exact_search() -> None:
    index, held = graph_index(3000)
    assert index.in_graph > 2000
    assert recall(index, held) >= 0.98


def test_graph_grows_with_insertions_and_the_tail_stays_short() -> None:
    index = VectorIndex(16, exact_below=500)
    rows = random_rows(2500)
    for start in range(0, 2500, 50):
        index.put(names(50, start), rows[start : start + 50])
        index.feed()
        assert start + 50 - index.in_graph <= 500
    index.put(["id00003"], rows[2:3])
    assert ids(index.search(rows[2:3], 2)[0]) == ["id00002", "id00003"]


def test_graph_honours_replaced_dropped_and_filtered() -> None:
    index, held = graph_index(3000)
    moved = random_rows(300, seed=5)
    for id, row in zip(names(300), moved, strict=True):
        index.put([id], row[None])
        index.feed()
        held[id] = row
    index.drop(names(200, start=400))
    for id in names(200, start=400):
        del held[id]
    assert recall(index, held) >= 0.98
    allowed = names(1500, start=1000)
    hits = index.search(random_rows(1, seed=8), 30, among=allowed)[0]
    expected = brute_force({id: held[id] for id in allowed}, random_rows(1, seed=8)[0], 30)
    assert len({*ids(hits)} & {*expected}) >= 29
    few = names(3, start=1200)
    assert {*ids(index.search(random_rows(1), 30, among=few)[0])} == {*few}
    mask = np.array([id in allowed for id in index.ids])
    assert index.search(random_rows(1, seed=8), 30, among=mask)[0] == hits


def test_asking_for_everything_gives_everything() -> None:
    index, held = graph_index(1200)
    assert ids(index.search(random_rows(1), 5000)[0]) == brute_force(held, random_rows(1)[0], 5000)


def test_same_insertions_same_results() -> None:
    first, second = graph_index(2000)[0], graph_index(2000)[0]
    queries = random_rows(20, seed=4)
    assert first.search(queries, 20) == second.search(queries, 20)


def reopened(held: dict[str, Vectors]) -> VectorIndex:
    index = VectorIndex(16, exact_below=500)
    index.put(list(held), np.stack(list(held.values())))
    return index


def test_snapshot_is_taken_over(tmp_path: Path) -> None:
    index, held = graph_index(2000)
    index.save(tmp_path / "x.hnsw")
    late = random_rows(100, seed=6)
    held |= dict(zip(names(100, start=5000), late, strict=True))
    held["id00007"] = random_rows(1, seed=7)[0]  # changed since the snapshot
    again = reopened(held)
    assert again.restore(tmp_path / "x.hnsw")
    assert again.in_graph == index.in_graph
    assert recall(again, held) >= 0.98
    assert ids(again.search(held["id00007"][None], 1)[0]) == ["id00007"]
    assert ids(again.search(late[3:4], 1)[0]) == ["id05003"]
    assert ids(again.search(random_rows(1), 5000)[0]) == brute_force(held, random_rows(1)[0], 5000)
    again.put(names(300, start=7000), random_rows(300, seed=8))
    again.feed()
    again.drop(["id00008"])
    assert "id00008" not in ids(again.search(held["id00008"][None], 5)[0])


def test_snapshot_of_other_vectors_finds_only_what_is_held(tmp_path: Path) -> None:
    index, _ = graph_index(2000)
    index.save(tmp_path / "x.hnsw")
    held = dict(zip(names(800), random_rows(800, seed=77), strict=True))
    again = reopened(held)
    again.restore(tmp_path / "x.hnsw")
    assert ids(again.search(random_rows(1), 2000)[0]) == brute_force(held, random_rows(1)[0], 2000)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no side file", "side flip", "other dimension", "garbage"])
def test_damaged_snapshot_is_not_used(tmp_path: Path, damage: str) -> None:
    index, held = graph_index(2000)
    graph, side = tmp_path / "x.hnsw", tmp_path / "x.hnsw.rows"
    index.save(graph)
    data = bytearray(graph.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[-100:]
    elif damage == "empty":
        data.clear()
    elif damage == "garbage":
        data[:] = b"\xff" * len(data)
    elif damage == "no side file":
        side.unlink()
    elif damage == "side flip":
        text = bytearray(side.read_bytes())
        text[-1] ^= 1
        side.write_bytes(text)
    else:
        wide = VectorIndex(8, exact_below=10)
        wide.put(names(40), unit(*names(40)))
        wide.build()
        wide.save(graph)
        data = bytearray(graph.read_bytes())
    graph.write_bytes(data)
    again = reopened(held)
    assert not again.restore(graph)
    assert ids(again.search(random_rows(1), 20)[0]) == brute_force(held, random_rows(1)[0], 20)


def test_no_graph_below_the_threshold(tmp_path: Path) -> None:
    index = VectorIndex(16)
    index.put(names(200), random_rows(200))
    index.build()
    index.save(tmp_path / "x.hnsw")
    assert index.in_graph == 0
    assert list(tmp_path.iterdir()) == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "search", "snapshot"]), st.integers(0, 24), st.integers(0, 10_000)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_sequence_equals_brute_force(
    steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With a threshold of 6 the graph, the tail, dead rows and snapshots are all in play; at this size the graph's
    search is wide enough to be exact."""
    index, held = VectorIndex(4, exact_below=6), {}
    path = tmp_path_factory.mktemp("graph") / "x.hnsw"
    for step, number, seed in steps:
        id = f"id{number:02d}"
        if step == "put":
            row = random_rows(1, 4, seed)
            index.put([id], row)
            index.feed()
            held[id] = row[0]
        elif step == "drop" and id in held:
            index.drop([id])
            del held[id]
        elif step == "snapshot" and held:
            index.save(path)
            index = VectorIndex(4, exact_below=6)
            index.put(list(held), np.stack(list(held.values())))
            index.restore(path)
        query = random_rows(1, 4, seed + 1)
        assert ids(index.search(query, number + 1)[0]) == brute_force(held, query[0], number + 1)
    assert len(index) == len(held)

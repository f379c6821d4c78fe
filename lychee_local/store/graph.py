"""hnswlib's graph over distinct vectors, and which rows each of its points stands for.

The only place that touches hnswlib while it runs. Knows no files of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]
Labels = npt.NDArray[np.int32]

# hnswlib's M, ef_construction, least ef, random_seed
LINKS, BUILD_WIDTH, SEARCH_WIDTH, SEED = 16, 100, 128, 100
EQUAL_WIDTH = 16  # ef of the search for an equal vector: one that it misses becomes a point of its own


class Column:
    """A one-dimensional array that grows at its end."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._room: npt.NDArray[Any] = np.zeros(0, dtype=kind)
        self.size = 0
        self.values = self._room  # one view until the next change, so that it can be told from a filter

    def append(self, values: npt.NDArray[Any]) -> None:
        size = self.size + len(values)
        if size > len(self._room):
            grown = np.zeros(size + size // 4, dtype=self._room.dtype)
            grown[: self.size] = self.values
            self._room = grown
        self._room[self.size : size] = values
        self.size = size
        self.values = self._room[:size]


class Graph:
    """hnswlib's graph over distinct vectors, and which rows each of its points stands for.

    Masses of equal vectors would link to each other and to nothing else, so a vector that the graph already holds
    becomes another row of the same point.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self.labels = Column(np.int32)  # row -> point; -1 for a row that was buried when its turn came
        self._first = Column(np.intp)  # point -> its first row; -1 where none is left
        self._more: dict[int, list[int]] = {}  # point -> its other rows, ascending
        self.alive = Column(np.bool_)  # point -> whether any of its rows is

    @property
    def covered(self) -> int:
        return self.labels.size

    @property
    def size(self) -> int:
        """Points, dead ones included."""
        return self._first.size

    def adopt(self, table: Labels, live: Mask) -> None:
        """Take `table`, row -> point, as that of the points just loaded."""
        self.labels.append(table)
        rows = np.flatnonzero(table >= 0)
        first = np.full(self._native.get_current_count(), -1, dtype=np.intp)
        first[table[rows[::-1]]] = rows[::-1]  # of several rows the last assignment, that of the first row, stays
        self._first.append(first)
        for row in rows[first[table[rows]] != rows]:
            self._more.setdefault(int(table[row]), []).append(int(row))
        self.alive.append(self.points(live))

    def insert(self, vectors: Vectors, live: Mask) -> None:
        """Add the next rows."""
        start = self.covered
        labels = np.full(len(vectors), -1, dtype=np.int32)
        chosen = np.flatnonzero(live)
        labels[chosen] = self._equal(vectors[chosen])
        fresh: dict[bytes, int] = {}
        new: list[int] = []
        for place in chosen[labels[chosen] < 0]:
            key = vectors[place].tobytes()
            if key not in fresh:
                fresh[key] = self.size + len(new)
                new.append(int(place))
            labels[place] = fresh[key]
        if new:
            points = self.size + len(new)
            if points > self._native.get_max_elements():
                self._native.resize_index(points + max(1024, points // 8))
            self._native.add_items(vectors[new], labels[new], num_threads=1)  # more threads: another graph each time
            self._first.append(np.array(new) + start)
            self.alive.append(np.ones(len(new), dtype=np.bool_))
        for place in chosen[self._first.values[labels[chosen]] != chosen + start].tolist():
            label = int(labels[place])
            self.alive.values[label] = True
            if self._first.values[label] < 0:  # a point carried without rows, which lies where a living one does
                self._first.values[label] = place + start
            else:
                self._more.setdefault(label, []).append(place + start)
        self.labels.append(labels)

    def _equal(self, vectors: Vectors) -> Labels:
        """The points that hold the same bytes; -1 for none."""
        if not self.size or not len(vectors):
            return np.full(len(vectors), -1, dtype=np.int32)
        self._native.set_ef(EQUAL_WIDTH)
        nearest = self._native.knn_query(vectors, k=1, num_threads=1)[0][:, 0].astype(np.int32)
        held = np.asarray(self._native.get_items(nearest), dtype=np.float32)
        same = (held.view(np.uint32) == vectors.view(np.uint32)).all(axis=1)
        equal: Labels = np.where(same, nearest, np.int32(-1))
        return equal

    def bury(self, rows: Numbers, live: Mask) -> None:
        labels = self.labels.values[rows[rows < self.covered]]
        for label in np.unique(labels[labels >= 0]):
            more = self._more.get(int(label), [])
            self.alive.values[label] = live[self._first.values[label]] or bool(live[more].any())

    def points(self, allowed: Mask) -> Mask:
        """The points with an allowed row."""
        points = np.zeros(self.size + 1, dtype=np.bool_)  # the last place takes the label -1
        points[self.labels.values[allowed[: self.covered]]] = True
        return points[:-1]

    def nearest(self, query: Vectors, wanted: int, accept: Any) -> tuple[Labels, Vectors] | None:
        """The labels and cosines of `wanted` points; None where hnswlib met fewer on its way."""
        self._native.set_ef(max(SEARCH_WIDTH, 2 * wanted))
        try:
            labels, distances = self._native.knn_query(query, k=wanted, num_threads=1, filter=accept)
        except RuntimeError:  # hnswlib's only sign of it
            return None
        return labels[0].astype(np.int32), 1.0 - distances[0]

    def spread(self, labels: Labels, scores: Vectors, allowed: Mask, k: int) -> Iterator[tuple[Numbers, Vectors]]:
        """The allowed rows of each point with its score, at most `k` of one."""
        first = self._first.values[labels]
        good = allowed[first]
        yield first[good], scores[good]
        for label, score in zip(labels.tolist(), scores, strict=True):
            if label in self._more:
                rows = np.array(self._more[label], dtype=np.intp)
                rows = rows[allowed[rows]][:k]
                yield rows, np.full(len(rows), score, dtype=np.float32)

    def write(self, path: Path) -> None:
        """Raises OSError where the file is not whole: the C++ stream reports nothing."""
        self._native.save_index(str(path))
        if path.stat().st_size != self._native.index_file_size():
            raise OSError(f"{path} is shorter than the graph")


def new_native(dimension: int) -> Any:
    """None where hnswlib cannot be imported: every result stays right and gets slower with size, which is better than a
    large memory that cannot be opened."""
    try:
        import hnswlib
    except ImportError:
        return None
    return hnswlib.Index(space="ip", dim=dimension)

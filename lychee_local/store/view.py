"""One epoch, open for reading: the catalogue and the three vector indexes, as of one commit.

Owns how identifiers, row numbers and filters meet in a search. Not thread-safe: the store lends it to one thread at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lychee_local.store import manifest as files
from lychee_local.store.catalogue import KEPT_VALUES, Catalogue
from lychee_local.store.disk import Disk
from lychee_local.store.epoch import DTYPES
from lychee_local.store.graph import Numbers
from lychee_local.store.manifest import Manifest
from lychee_local.store.nodes import VECTOR_KINDS
from lychee_local.store.vectors import Cosines, Mask, VectorIndex, Vectors
from lychee_local.types import Node, NodeKind, Record, Scope

Field = Literal["turns", "records", "nodes"]
ROWS: Mapping[Field, str] = {"turns": files.TURN_ROWS, "records": files.RECORD_ROWS, "nodes": files.NODE_ROWS}


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class VectorHit(NamedTuple):
    """`cosine` is the inner product of unit vectors, in [-1, 1]. A tuple, since one question makes thousands."""

    id: str
    cosine: float


class View:
    """What one epoch holds. `generation` is the commit that it shows."""

    def __init__(self, folder: Path, manifest: Manifest, catalogue: Catalogue, *, exact_below: int) -> None:
        self.folder = folder
        self.catalogue = catalogue
        self.dimension = manifest.embedder.dimension
        self.precision = manifest.precision
        self.generation = -1
        self._dead = 0
        # One question asks for the same nodes and records many times over.
        self._records: dict[str, Record] = {}
        self._nodes: dict[int | None, dict[str, Node]] = {}  # by how many of their records are wanted
        self.indexes: dict[Field, VectorIndex] = {
            field: VectorIndex(folder / name, self.dimension, precision=self.precision, exact_below=exact_below)
            for field, name in ROWS.items()
        }
        self._decided = VectorIndex(folder / files.DECISION_ROWS, self.dimension, precision=self.precision)
        self.sync()

    def sync(self) -> bool:
        """Let the indexes show what the catalogue covers; True if that has changed."""
        generation, covered = self.catalogue.covers()
        if generation == self.generation:
            return False
        self._records.clear()
        self._nodes.clear()
        for field, name in ROWS.items():
            self.indexes[field].extend(covered[name].count)
        self._decided.extend(covered[files.DECISION_ROWS].count)
        self.catalogue.hold()
        self._dead, rows = self.catalogue.dead(self._dead)
        for field, name in ROWS.items():
            self.indexes[field].bury([row for file, row in rows if file == name])
        self.generation = generation
        return True

    def grow(self, disk: Disk, before: Mapping[Field, int]) -> None:
        """Let the graphs take in rows for those that came since `before`, twice as fast as they came, and write the
        snapshots that are due."""
        for field, index in self.indexes.items():
            added = index.count - before[field]
            if added:
                index.feed(added)
            if index.snapshot_due:
                index.save(disk)

    def records(self, ids: Collection[str]) -> dict[str, Record]:
        """By id, in the order of `ids`; unknown and forgotten ones are missing."""
        return _kept(self._records, ids, self.catalogue.records_by_id)

    def nodes(self, ids: Collection[str], latest: int | None) -> dict[str, Node]:
        """As `records`; with `latest` only that many of a node's records, the newest."""
        return _kept(self._nodes.setdefault(latest, {}), ids, partial(self.catalogue.nodes_by_id, latest=latest))

    def counts(self) -> dict[Field, int]:
        return {field: index.count for field, index in self.indexes.items()}

    def decision_rows(self, numbers: Sequence[int]) -> npt.NDArray[np.floating]:
        """In order, as they stand in their file, in its precision, unchecked."""
        if numbers and numbers[-1] >= self._decided.count:  # another process has committed since the last `sync`
            self._decided.extend(self.catalogue.covers()[1][files.DECISION_ROWS].count)
        return self._decided.rows(numbers).astype(DTYPES[self.precision])

    def close(self) -> None:
        self._decided.close()
        self.catalogue.close()
        for index in self.indexes.values():
            index.close()

    # --- search ------------------------------------------------------------------------------------------------------

    def search(
        self, field: Field, queries: Vectors, k: int, *, kinds: Collection[NodeKind] | None, scope: Scope | None
    ) -> list[list[VectorHit]]:
        index = self.indexes[field]
        among = self._among(field, kinds, scope)
        names: Callable[[Sequence[int]], dict[int, str]] = {
            "turns": self.catalogue.turn_ids,
            "records": self.catalogue.record_ids,
            "nodes": self.catalogue.node_ids,
        }[field]
        wanted = k
        while True:
            found = index.nearest(queries, wanted, among=among)
            ids = names(sorted({row for rows, _ in found for row in rows.tolist()}))
            named = [_named(rows, cosines, ids, k) for rows, cosines in found]
            # Several rows may be one record: ask for more until there are k of them, or no more rows.
            if all(len(n) >= k or len(rows) < wanted for n, (rows, _) in zip(named, found, strict=True)):
                return named
            wanted *= 2

    def _among(self, field: Field, kinds: Collection[NodeKind] | None, scope: Scope | None) -> Mask | None:
        if field == "nodes":
            if kinds is None or set(kinds) >= set(VECTOR_KINDS):
                return None
            allowed = self.catalogue.rows_of_kinds(kinds)
        elif scope is None:
            return None
        else:
            allowed = self.catalogue.rows_within(field, scope)
        mask = np.zeros(self.indexes[field].count, dtype=np.bool_)
        mask[[row for row in allowed if row < mask.size]] = True
        return mask

    # --- vectors by id -----------------------------------------------------------------------------------------------

    def vectors(self, field: Field, ids: Sequence[str]) -> Vectors:
        """The rows of `ids`, as float32. Raises KeyError for an id that is unknown, forgotten, or has no row."""
        row_of: Callable[[str], int | None]
        if field == "turns":
            row_of = self.catalogue.turn_rows(ids).get
        else:
            row_of = self._record_row if field == "records" else self._node_row
        rows = []
        for identifier in ids:
            row = row_of(identifier)
            if row is None:
                raise KeyError(identifier)
            rows.append(row)
        return self.indexes[field].rows(rows)

    def _record_row(self, identifier: str) -> int | None:
        """Of a sentence that was encoded several times, the first row: all are vectors of the same text."""
        number = self.catalogue.record_number(identifier)
        return None if number is None else self.catalogue.rows_of_record(number)[0]

    def _node_row(self, identifier: str) -> int | None:
        number = self.catalogue.node_number(identifier)
        return None if number is None else self.catalogue.node_vector(number)


def _kept(kept: dict[K, V], wanted: Collection[K], read: Callable[[Collection[K]], Mapping[K, V]]) -> dict[K, V]:
    """What `kept` has of `wanted`, after all that it lacks was read at once and kept; the oldest give way."""
    missing = [key for key in wanted if key not in kept]
    if missing:
        kept.update(read(missing))
    found = {key: kept[key] for key in wanted if key in kept}
    for key in list(kept)[: max(0, len(kept) - KEPT_VALUES)]:
        del kept[key]
    return found


def _named(rows: Numbers, cosines: Cosines, ids: Mapping[int, str], k: int) -> list[VectorHit]:
    """The first k different ids, best first."""
    best: dict[str, float] = {}
    for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True):
        if row in ids:
            best.setdefault(ids[row], cosine)
    return list(islice(map(VectorHit, best, best.values()), k))

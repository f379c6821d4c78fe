"""One epoch, open for reading: the catalogue and the three vector indexes, as of one commit.

Owns how identifiers, row numbers and filters meet in a search. Not thread-safe: the store lends it to one thread at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lychee_local.store import manifest as files
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.disk import Disk
from lychee_local.store.epoch import DTYPES
from lychee_local.store.manifest import Manifest
from lychee_local.store.nodes import VECTOR_KINDS
from lychee_local.store.vectors import Mask, RowHit, VectorIndex, Vectors
from lychee_local.types import NodeKind, Scope

Field = Literal["turns", "records", "nodes"]
ROWS: Mapping[Field, str] = {"turns": files.TURN_ROWS, "records": files.RECORD_ROWS, "nodes": files.NODE_ROWS}


@dataclass(frozen=True, slots=True)
class VectorHit:
    """`cosine` is the inner product of unit vectors, in [-1, 1]."""

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
                index.feed(2 * added)
            if index.snapshot_due:
                index.save(disk)

    def counts(self) -> dict[Field, int]:
        return {field: index.count for field, index in self.indexes.items()}

    def decision_rows(self, numbers: Sequence[int]) -> npt.NDArray[np.floating]:
        """As they stand in their file, in its precision, unchecked."""
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
            found = index.search(queries, wanted, among=among)
            ids = names(sorted({hit.row for hits in found for hit in hits}))
            named = [_named(hits, ids, k) for hits in found]
            # Several rows may be one record: ask for more until there are k of them, or no more rows.
            if all(len(n) >= k or len(f) < wanted for n, f in zip(named, found, strict=True)):
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


def _named(hits: Sequence[RowHit], ids: Mapping[int, str], k: int) -> list[VectorHit]:
    """The first k different ids, best first."""
    best: dict[str, float] = {}
    for hit in hits:
        if hit.row in ids:
            best.setdefault(ids[hit.row], hit.cosine)
    return [VectorHit(identifier, cosine) for identifier, cosine in best.items()][:k]

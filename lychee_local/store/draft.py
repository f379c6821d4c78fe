"""A new epoch in the making: whatever takes something away from a memory writes what stays into one of these.

Owns the order of its writing: all lines and rows, then the catalogue over them, everything durable before the manifest
may name it. What goes into it is for the caller to say.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from lychee_local.store.catalogue import Catalogue, catalogue_error
from lychee_local.store.disk import Disk
from lychee_local.store.epoch import NO_LINES, Batch, EpochFiles
from lychee_local.store.manifest import CATALOGUE, EmbedderIdentity, Manifest, Precision

LINES_AT_ONCE = 512  # in one batch of a rewriting: bounds its memory, and the steps between two reports of progress


class Draft:
    """Add batches, each with its lines and their rows together, then `finish`."""

    def __init__(
        self, folder: Path, user: str, embedder: EmbedderIdentity, *, precision: Precision = "float32", disk: Disk
    ) -> None:
        """`folder` exists and is empty."""
        self._folder = folder
        self._disk = disk
        self._manifest = Manifest(user, embedder, precision)
        self._extents = NO_LINES
        self._files = EpochFiles(folder, precision, disk)

    def add(self, batch: Batch) -> None:
        """Raises OSError where the disk does not take it."""
        self._extents = self._files.append(self._extents, batch)

    def finish(self, *, on_progress: Callable[[int, int], None] | None = None) -> Manifest:
        """The manifest of what was added; generation and epoch are the log's to set. `on_progress` is told the lines
        that the catalogue has taken in, and how many there are.

        Raises:
            StoreDamaged: the lines contradict each other.
            StoreError: the catalogue could not be written.
            OSError: the disk does not take it.
        """
        manifest = Manifest(
            self._manifest.user, self._manifest.embedder, self._manifest.precision, files=dict(self._extents)
        )
        self._files.sync_all()
        self._files.close()
        try:
            with contextlib.closing(Catalogue(self._folder)) as catalogue:
                catalogue.catch_up(manifest, on_progress=on_progress)
        except sqlite3.Error as error:
            raise catalogue_error(error, self._folder) from error
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def remove_catalogue(disk: Disk, folder: Path) -> None:
    """So that it is built again."""
    for ending in ("", "-wal", "-shm"):
        disk.remove(folder / (CATALOGUE + ending))

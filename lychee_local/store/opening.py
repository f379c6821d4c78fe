"""How a memory's catalogue is opened: by its writer, who keeps it up to date, and by readers, who may find it behind.

Owns who builds a catalogue when. A writer catches up after each commit; when it was killed in between, whoever comes
next does it, as long as nobody else holds the writer's lock.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time

from lychee_local.errors import StoreDamaged, StoreLocked
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.draft import remove_catalogue
from lychee_local.store.lock import WriterLock
from lychee_local.store.log import Log
from lychee_local.store.manifest import CATALOGUE

PATIENCE = 60.0  # seconds that a reader waits for a catalogue that another process is building


def writers_catalogue(log: Log) -> Catalogue:
    """The catalogue of the log's epoch, up to date; built anew where it is missing, damaged or of other lines. For the
    holder of the writer's lock.

    Raises:
        StoreDamaged: a line does not match its checksum.
        sqlite3.OperationalError: the disk does not take it.
    """
    with contextlib.suppress(StoreDamaged):
        try:
            if (catalogue := _followed(log)) is not None:
                return catalogue
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            pass  # damaged, or of another version: it is derived
    # Whatever was wrong with it, the lines decide: what is wrong with them shows when all are read.
    remove_catalogue(log.disk, log.epoch)
    catalogue = Catalogue(log.epoch)
    try:
        catalogue.catch_up(log.manifest)
    except BaseException:
        catalogue.close()
        raise
    return catalogue


def _followed(log: Log) -> Catalogue | None:
    """The catalogue that is there, caught up; None where it is of other lines."""
    catalogue = Catalogue(log.epoch)
    try:
        if not catalogue.follows(log.manifest):
            catalogue.close()
            return None
        if catalogue.covers()[0] != log.manifest.generation:
            catalogue.catch_up(log.manifest)
    except BaseException:
        catalogue.close()
        raise
    return catalogue


def readers_catalogue(log: Log) -> Catalogue:
    """The catalogue as it is, brought up to date if no writer is there to do it; a private one where the folder may not
    be written.

    Raises:
        StoreLocked: another process has been building it for a minute.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        if (found := _as_it_is(log, whole=True)) is not None:
            return found
        try:
            with WriterLock(log.path, wait_seconds=0.0):
                log.adopt(log.poll() or log.manifest)
                return writers_catalogue(log)
        except (OSError, sqlite3.OperationalError):  # nothing can be written here: no permission, or no room
            catalogue = Catalogue(log.epoch, private=True)
            catalogue.catch_up(log.manifest)
            return catalogue
        except StoreLocked:
            if (found := _as_it_is(log, whole=False)) is not None:
                return found  # as of an earlier commit; the writer is about to bring it up to date
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)
        log.adopt(log.poll() or log.manifest)


def _as_it_is(log: Log, *, whole: bool) -> Catalogue | None:
    """The catalogue if it is there and shows a commit; with `whole` only if it shows the latest one."""
    if not (log.epoch / CATALOGUE).exists():
        return None
    try:
        catalogue = Catalogue(log.epoch)
    except sqlite3.Error:
        return None  # damaged, being replaced, or in a folder that may not be written: the caller tells them apart
    generation = catalogue.covers()[0]
    if generation >= (log.manifest.generation if whole else 0):
        return catalogue
    catalogue.close()
    return None


def catch_up_if_free(log: Log, catalogue: Catalogue) -> None:
    """Bring a reader's catalogue up to date, unless a writer is there to do it."""
    if catalogue.private:
        catalogue.catch_up(log.manifest)
        return
    with contextlib.suppress(StoreLocked), WriterLock(log.path, wait_seconds=0.0):
        manifest = log.poll() or log.manifest
        if manifest.epoch == log.manifest.epoch:
            log.adopt(manifest)
            catalogue.catch_up(manifest)

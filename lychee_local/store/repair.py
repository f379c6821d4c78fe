"""Mending a damaged memory: what is derived is built again, and everything else that is whole is kept.

Owns the switch from a damaged epoch to one of what is left of it. Works below the log, which opens no damaged memory,
and under the same writer's lock. Until the manifest is replaced, which is one step, nothing of the memory has changed.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lychee_local.errors import StoreDamaged, StoreError, StoreMismatch
from lychee_local.store import manifest as files
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.check import GRAPHS, Finding, Report, check, usage_line_is_whole
from lychee_local.store.codec import TurnLine, decode
from lychee_local.store.disk import Disk, OsDisk, read_file, remove_folder, sync_folder, write_file
from lychee_local.store.draft import Draft, remove_catalogue
from lychee_local.store.lock import WriterLock
from lychee_local.store.log import read_manifest
from lychee_local.store.manifest import EmbedderIdentity, Manifest, Precision, epoch_folder, user_folder, user_name
from lychee_local.store.migrate import upgrade
from lychee_local.store.remains import Origin, Remains
from lychee_local.store.salvage import RowSums, pieces, whole_lines
from lychee_local.store.snapshot import graph_path, side_path
from lychee_local.store.vectors import VectorIndex, Vectors

PROBED = 64  # turns whose rows tell the precision of a memory that has lost its manifest


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was found, what was done about it, and what is lost, each in plain sentences."""

    findings: tuple[Finding, ...]
    done: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def repair(
    home: Path,
    user: str,
    *,
    embedder: EmbedderIdentity | None,
    embed: Callable[[Sequence[str]], Vectors] | None = None,
    on_progress: Report | None = None,
    disk: Disk | None = None,
) -> RepairReport:
    """Mend what `check` finds in the memory of `user`; a memory without findings is not touched.

    Everything whole is kept. A damaged vector is made again by `embed`, which must be that of `embedder`, as unit
    vectors; a segment whose records are lost waits to be encoded again. Where something is lost for good, the damaged
    files stay beside the mended ones, in a folder that the report names.

    Raises:
        BadInput: an unusable user name, or `embed` gives anything but unit vectors.
        StoreLocked: another process writes this memory.
        StoreMismatch: it is of a newer format, of another user, or of another embedder than `embedder`.
        StoreError: there is no memory, vectors must be made and `embed` is missing, nothing names the embedder, or the
            disk fails. The memory is as before, or mended.
    """
    folder, name = user_folder(home, user), user_name(user)
    if not any(folder.glob("epoch-*")) and not (folder / files.MANIFEST).exists():
        raise StoreError(f"there is no memory of {name!r} in {folder}", hint="restore the folder from a backup")
    try:
        with WriterLock(folder, wait_seconds=0.0):
            return _Repair(folder, name, embedder, embed, on_progress, disk or OsDisk()).run()
    except OSError as error:
        raise files.os_error(error, "repair", folder) from error
    except sqlite3.Error as error:
        raise StoreError(f"cannot build the catalogue in {folder}: {error}", hint="is the disk full?") from error


class _Repair:
    """One repair, under the writer's lock."""

    def __init__(
        self,
        folder: Path,
        user: str,
        embedder: EmbedderIdentity | None,
        embed: Callable[[Sequence[str]], Vectors] | None,
        on_progress: Report | None,
        disk: Disk,
    ) -> None:
        self._folder = folder
        self._user = user
        self._embedder = embedder
        self._embed = embed
        self._on_progress = on_progress
        self._disk = disk
        self._done: list[str] = []
        self._lost: list[str] = []

    def run(self) -> RepairReport:
        if _is_older(self._folder):
            upgrade(self._folder, self._disk)
            self._done.append(f"the memory was brought to format {files.FORMAT}")
        manifest = self._read()
        findings = check(self._folder)
        parts = {finding.part for finding in findings}
        if parts & {"manifest", "lines"}:
            self._rewrite(_origin(self._folder, self._user, self._embedder, manifest))
        elif manifest is not None:
            if "catalogue" in parts:
                self._build_catalogue(manifest)
            if "graph" in parts:
                self._build_graphs(manifest, findings)
        if "usage" in parts:
            self._mend_usage(findings)
        return RepairReport(findings, tuple(self._done), tuple(self._lost))

    def _read(self) -> Manifest | None:
        """The manifest; None where it is missing or damaged."""
        try:
            seen = read_manifest(self._folder)
        except StoreDamaged:
            return None
        if seen is None:
            return None
        held = seen[1]
        if held.user != self._user:
            raise StoreMismatch(
                f"{self._folder} is the memory of {held.user!r}, not of {self._user!r}",
                hint="was the folder copied or renamed? give it back its own name",
            )
        given = self._embedder or held.embedder
        if (given.name, given.digest, given.dimension) != (
            held.embedder.name,
            held.embedder.digest,
            held.embedder.dimension,
        ):
            raise StoreMismatch(
                f"{self._folder} was written with embedder {held.embedder.name!r}, it cannot be repaired with "
                f"{given.name!r}",
                hint="repair it with the embedder it was written with",
            )
        if not (self._folder / held.folder).is_dir() and any(self._folder.glob(f"epoch-*/{files.TURNS}")):
            return None  # it speaks of another epoch than the one that is there
        return held

    # --- lines and rows ----------------------------------------------------------------------------------------------

    def _rewrite(self, origin: Origin) -> None:
        """Write what is whole as a new epoch, and let the manifest switch to it."""
        number = 1 + max((n for n in map(_number, self._folder.glob("epoch-*")) if n is not None), default=origin.epoch)
        target = self._folder / epoch_folder(max(number, origin.epoch + 1))
        # Under another name until it is whole: a memory without a manifest is looked for in its newest epoch.
        draft = target.with_name(target.name + ".tmp")
        remove_folder(self._disk, draft)
        draft.mkdir()
        try:
            rest = Remains(origin, self._embed, self._on_progress)
            written = self._written(rest, draft, origin)
            sync_folder(self._disk, draft)
            self._disk.replace(draft, target)
            sync_folder(self._disk, self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_folder(self._disk, draft)
            raise
        manifest = replace(written, generation=origin.generation + 1, epoch=_number(target) or 0)
        write_file(self._disk, self._folder / files.MANIFEST, manifest.dump())
        self._done += rest.done
        self._lost += rest.lost
        self._clear(origin, target)
        if any(origin.folder.glob("*.hnsw")):
            self._build_graphs(manifest, ())

    def _written(self, rest: Remains, draft: Path, origin: Origin) -> Manifest:
        with Draft(draft, self._user, origin.embedder, precision=origin.precision, disk=self._disk) as new:
            for batch in rest.batches():
                new.add(batch)
            return new.finish()

    def _clear(self, origin: Origin, kept: Path) -> None:
        """Remove the other epochs. The damaged one stays under another name where something is lost: somebody may get
        more out of it than this program does."""
        for path in sorted(self._folder.glob("epoch-*")) if self._lost else ():
            if path != kept and any(path.glob("*.jsonl")):
                taken = [_number(held) or 0 for held in self._folder.glob("damaged-*")]
                aside = self._folder / f"damaged-{max(taken, default=0) + 1:06d}"
                self._disk.replace(path, aside)
                self._done.append(f"the damaged files are kept in {aside}, which you may delete")
        for path in self._folder.glob("epoch-*"):
            if path != kept:
                remove_folder(self._disk, path)
        sync_folder(self._disk, self._folder)

    # --- what is derived ---------------------------------------------------------------------------------------------

    def _build_catalogue(self, manifest: Manifest) -> None:
        epoch = self._folder / manifest.folder
        remove_catalogue(self._disk, epoch)
        catalogue = Catalogue(epoch)
        try:
            catalogue.catch_up(manifest, on_progress=self._on_progress)
        finally:
            catalogue.close()
        self._done.append("the catalogue was built again")

    def _build_graphs(self, manifest: Manifest, findings: Sequence[Finding]) -> None:
        """Those that the findings name; all where they name none."""
        epoch = self._folder / manifest.folder
        catalogue = Catalogue(epoch)
        try:
            _, dead = catalogue.dead(0)
        finally:
            catalogue.close()
        for rows in GRAPHS:
            graph = graph_path(epoch / rows)
            if findings and not any(finding.what.startswith(f"{graph} ") for finding in findings):
                continue
            for path in (graph, side_path(graph)):
                self._disk.remove(path)
            index = VectorIndex(epoch / rows, manifest.embedder.dimension, precision=manifest.precision)
            try:
                index.extend(manifest.files[rows].count)
                index.bury([number for name, number in dead if name == rows])
                index.build()
                index.save(self._disk)
            finally:
                index.close()
            self._done.append(f"{graph.name} was removed, it is built again where there are enough rows")

    def _mend_usage(self, findings: Sequence[Finding]) -> None:
        path = self._folder / files.USAGE
        kept = [line for line in pieces(path, None) if usage_line_is_whole(line)]
        write_file(self._disk, path, b"".join(line + b"\n" for line in kept))
        self._done.append("damaged lines of the usage log were left out")
        self._lost += [f"{finding.loses} ({files.USAGE})" for finding in findings if finding.part == "usage"]


# --- where to begin --------------------------------------------------------------------------------------------------


def _is_older(folder: Path) -> bool:
    try:
        return bool(files.parse_manifest(read_file(folder / files.MANIFEST), folder)["format"] < files.FORMAT)
    except (OSError, StoreDamaged):
        return False


def _number(path: Path) -> int | None:
    digits = path.name.partition("-")[2]
    return int(digits) if digits.isdecimal() else None


def _origin(folder: Path, user: str, embedder: EmbedderIdentity | None, manifest: Manifest | None) -> Origin:
    """The damaged epoch, and what is known of it.

    Raises:
        StoreError: nothing says which embedder it was written with.
    """
    if manifest is not None:
        epoch = folder / manifest.folder
        return Origin(
            epoch, manifest.embedder, manifest.precision, manifest.generation, manifest.epoch, dict(manifest.files)
        )
    hints = _hints(folder / files.MANIFEST)
    if embedder is None:
        with contextlib.suppress(KeyError, TypeError):
            embedder = files.identity_of(hints)
    if embedder is None:
        raise StoreError(
            f"nothing says which embedder {folder} was written with", hint="name it: lychee check --repair --embedder"
        )
    epochs = {n: path for path in folder.glob("epoch-*") if path.is_dir() and (n := _number(path)) is not None}
    # A rewriting that was killed has left an epoch without a catalogue, which is written last.
    whole = [n for n, path in epochs.items() if (path / files.CATALOGUE).exists() and (path / files.TURNS).exists()]
    held = [n for n, path in epochs.items() if any((path / name).exists() for name in files.LINE_FILES)]
    number = hints.get("epoch")
    if not isinstance(number, int) or number not in held:
        number = max(whole or held or epochs, default=0)
    epoch = epochs.get(number, folder / epoch_folder(number))
    generation = hints.get("generation")
    return Origin(
        epoch,
        embedder,
        _precision(epoch, embedder.dimension),
        generation if isinstance(generation, int) else 0,
        number,
        None,
    )


def _hints(path: Path) -> Mapping[str, Any]:
    """What a damaged manifest still says."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _precision(epoch: Path, dimension: int) -> Precision:
    """The one in which the first rows have the checksums that the lines name.

    Raises:
        StoreMismatch: they have them in none.
    """
    checks: list[tuple[int, int]] = []
    for line in whole_lines(epoch / files.TURNS, None):
        if line.payload is not None:
            with contextlib.suppress(ValueError):
                checks.append((line.number, decode(TurnLine, line.payload).row))
        if len(checks) == PROBED:
            break
    precisions: tuple[Precision, ...] = ("float32", "float16")
    for precision in precisions:
        sums = RowSums(epoch / files.TURN_ROWS, None, dimension, precision)
        if not checks or not len(sums):
            return "float32"
        if any(sums.find(check, number) is not None for number, check in checks):
            return precision
    raise StoreMismatch(
        f"the vectors in {epoch} are not of the dimension {dimension}, or all of them are damaged",
        hint="name the embedder that the memory was written with",
    )

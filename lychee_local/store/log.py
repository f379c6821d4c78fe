"""Append-only lines and vector rows on disk: how they are read, and the order of writes that makes a commit.

A commit appends to the data files, syncs each, then replaces the manifest and syncs the folder; the manifest is the
only commit point, so after a crash the memory is as before or as after. What lies beyond the committed bytes is ignored
by readers and cut off by the next writer. Knows nothing of turns and records: it moves bytes and floats.

A line is eight hex digits, a blank, a JSON text. The digits are the CRC-32 of that text seeded with the digits of the
line before, which finds a changed, lost, repeated or moved line and still says which one it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lychee_local.errors import StoreDamaged, StoreError, StoreMismatch
from lychee_local.store.lock import WriterLock
from lychee_local.store.manifest import (
    LINE_FILES,
    LOCK,
    LOSS,
    MANIFEST,
    ROW_FILES,
    USAGE,
    EmbedderIdentity,
    Extent,
    Manifest,
    os_error,
    user_folder,
    user_name,
)

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one commit appends, or what a reader catches up on: payloads by line file, float rows by row file."""

    lines: dict[str, list[bytes]] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> tuple[bytes, Manifest] | None:
    """The manifest and its bytes; None where there is none."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    return raw, Manifest.parse(raw, folder / MANIFEST)


def read_lines(path: Path, since: Extent, until: Extent) -> Iterator[tuple[int, bytes | None]]:
    """Line numbers (from 1) and payloads committed after `since`; None where a line does not match its checksum.

    Raises:
        StoreDamaged: the file is missing or shorter than what is committed, or ends in other lines.
    """
    check = since.check
    lines = _read(path, since, until).split(b"\n")[:-1]
    for number, line in enumerate(lines, since.count + 1):
        payload = line[9:]
        check = zlib.crc32(payload, check)
        if line[:9] == b"%08x " % check:
            yield number, payload
            continue
        check = int(line[:8], 16) if re.fullmatch(rb"[0-9a-f]{8}", line[:8]) else 0  # the next line hangs on this one
        yield number, None
    if len(lines) != until.count - since.count or check != until.check:
        raise StoreDamaged(
            f"{path} does not end with line {until.count} as it was committed", hint="restore the file from a backup"
        )


def read_rows(path: Path, since: Extent, until: Extent, dimension: int) -> tuple[Rows, bool]:
    """The rows committed after `since`, and whether they match their running checksum."""
    data = _read(path, since, until)
    return np.frombuffer(data, dtype="<f4").reshape(-1, dimension), zlib.crc32(data, since.check) == until.check


def read_usage(folder: Path) -> list[bytes]:
    """The payloads of the usage log; a last line that its writer did not finish is left out."""
    try:
        data = (folder / USAGE).read_bytes()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        if line[:9] != b"%08x " % zlib.crc32(line[9:]):
            raise damaged(folder / USAGE, number)
    return [line[9:] for line in lines]


def damaged(path: Path, number: int) -> StoreDamaged:
    unit = "row" if path.name in ROW_FILES else "line"
    return StoreDamaged(
        f"{path}, {unit} {number} does not match its checksum: {LOSS[path.name]} is lost",
        hint="restore the file from a backup",
    )


def _read(path: Path, since: Extent, until: Extent) -> bytes:
    wanted = until.bytes - since.bytes
    if not wanted:
        return b""
    try:
        with path.open("rb") as file:
            file.seek(since.bytes)
            data = file.read(wanted)
    except FileNotFoundError as error:
        raise StoreDamaged(
            f"{path} is missing: {until.count} entries are lost", hint="restore the file from a backup"
        ) from error
    except OSError as error:
        raise os_error(error, "read", path) from error
    if len(data) < wanted:
        raise StoreDamaged(
            f"{path} ends at byte {since.bytes + len(data)}, {until.bytes} are committed: its end is lost",
            hint="restore the file from a backup",
        )
    return data


# --- the disk --------------------------------------------------------------------------------------------------------


class Disk(Protocol):
    """Every operation by which a commit changes the disk. The tests put one in front that fails, or that keeps a copy
    of the folder as a crash at that moment would leave it."""

    def write(self, fd: int, data: bytes, offset: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def replace(self, source: Path, target: Path) -> None: ...


class OsDisk:
    """The real disk."""

    def write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the data in the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)


class Log:
    """One user's folder. `manifest` is the last commit that this object has seen."""

    def __init__(
        self,
        home: Path,
        user: str,
        embedder: EmbedderIdentity,
        *,
        read_only: bool,
        wait_seconds: float = 0.0,
        disk: Disk | None = None,
    ) -> None:
        """Raises StoreLocked, StoreMismatch, StoreDamaged, or StoreError where the folder is not usable."""
        self.path = user_folder(home, user)
        self.read_only = read_only
        self._disk: Disk = disk or OsDisk()
        self._fds: dict[str, int] = {}
        self._lock: WriterLock | None = None
        self._broken = ""
        name = user_name(user)
        try:
            if not read_only:
                if not (self.path / LOCK).exists() and not (self.path / MANIFEST).exists():
                    self._require_empty()  # before the lock file is put there
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = WriterLock(self.path, wait_seconds=wait_seconds)
            seen = read_manifest(self.path)
            if seen is None:
                seen = self._create(name, embedder)
            self._raw, self.manifest = seen
            self._check_identity(name, embedder)
            if not read_only:
                self._cut_leftovers()
        except OSError as error:
            self.close()
            raise os_error(error, "open", self.path) from error
        except StoreError:
            self.close()
            raise

    def _require_empty(self) -> None:
        """A folder without a manifest is ours to fill only if it holds nothing but what a killed first start left."""
        present = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        strange = present - {LOCK, MANIFEST + ".tmp"}
        if strange & {*LINE_FILES, *ROW_FILES}:
            raise StoreDamaged(
                f"{self.path / MANIFEST} is missing: the lines are still there, but not which of them are committed",
                hint="restore the folder from a backup",
            )
        if strange:
            raise StoreError(
                f"{self.path} holds files of another program: {', '.join(sorted(strange)[:3])}",
                hint="choose another home",
            )

    def _create(self, name: str, embedder: EmbedderIdentity) -> tuple[bytes, Manifest]:
        self._require_empty()
        if self.read_only:
            raise StoreError(f"there is no memory of {name!r} in {self.path}", hint="remember something first")
        manifest = Manifest(name, embedder)
        raw = manifest.dump()
        self._replace_manifest(raw)
        self._sync_folder(self.path.parent)
        return raw, manifest

    def _check_identity(self, name: str, embedder: EmbedderIdentity) -> None:
        if self.manifest.user != name:
            raise StoreMismatch(
                f"{self.path} is the memory of {self.manifest.user!r}, not of {name!r}",
                hint="was the folder copied or renamed? give it back its own name",
            )
        kept = self.manifest.embedder
        for part in ("name", "digest", "dimension"):
            theirs, ours = getattr(kept, part), getattr(embedder, part)
            if theirs != ours:
                raise StoreMismatch(
                    f"{self.path} was written with embedder {kept.name!r} ({part} {theirs}), "
                    f"now opened with {embedder.name!r} ({part} {ours})",
                    hint="open it with the embedder it was written with, or start a new memory",
                )

    # --- reading -----------------------------------------------------------------------------------------------------

    def poll(self) -> Manifest | None:
        """The manifest on disk where it differs from `manifest`, else None."""
        # It is read, not only looked at: size, time and inode can all come back the same after two quick commits.
        seen = read_manifest(self.path)
        if seen is None:
            raise StoreDamaged(f"{self.path / MANIFEST} has disappeared", hint="restore the folder from a backup")
        return None if seen[0] == self._raw else seen[1]

    def adopt(self, manifest: Manifest) -> None:
        """Take `manifest`, from `poll`, as the commit that has been seen."""
        self._raw, self.manifest = manifest.dump(), manifest

    # --- writing -----------------------------------------------------------------------------------------------------

    def commit(self, batch: Batch) -> Manifest:
        """Make `batch` durable: all of it, or, when this raises, nothing.

        Raises:
            StoreError: the disk is full or failing, or this log was opened read-only.
        """
        if self._lock is None:
            raise StoreError(f"{self.path} was opened read-only", hint="open it without read_only to write")
        if not self._lock.ours:
            raise StoreError(
                f"{self.path} was opened before this process was forked", hint="open it anew in the child process"
            )
        if self._broken:
            raise StoreError(self._broken, hint="close this memory and open it again")
        files, appended = self._appends(batch)
        manifest = replace(self.manifest, generation=self.manifest.generation + 1, files=files)
        raw = manifest.dump()
        try:
            for name, data in appended.items():
                self._disk.write(self._fd(name), data, self.manifest.files[name].bytes)
            for name in appended:
                self._disk.sync(self._fd(name))
            self._replace_manifest(raw)
            self._raw, self.manifest = raw, manifest
        except OSError as error:
            self._undo(appended)
            raise os_error(error, "write", self.path) from error
        except BaseException:
            self._undo(appended)
            raise
        return manifest

    def _appends(self, batch: Batch) -> tuple[dict[str, Extent], dict[str, bytes]]:
        """The extents after `batch` and the bytes that get there."""
        files, appended = dict(self.manifest.files), {}
        for name, payloads in batch.lines.items():
            check, parts = files[name].check, []
            for payload in payloads:
                check = zlib.crc32(payload, check)
                parts.append(b"%08x %b\n" % (check, payload))
            appended[name] = b"".join(parts)
            files[name] = _grown(files[name], appended[name], len(payloads), check)
        for name, rows in batch.rows.items():
            appended[name] = np.ascontiguousarray(rows, dtype="<f4").tobytes()
            check = zlib.crc32(appended[name], files[name].check)
            files[name] = _grown(files[name], appended[name], len(rows), check)
        return files, {name: data for name, data in appended.items() if data}

    def _replace_manifest(self, raw: bytes) -> None:
        draft = self.path / (MANIFEST + ".tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            self._disk.write(fd, raw, 0)
            self._disk.sync(fd)
        finally:
            os.close(fd)
        self._disk.replace(draft, self.path / MANIFEST)
        self._sync_folder(self.path)

    def _sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def _undo(self, names: Iterable[str]) -> None:
        """Back to the last commit: first the manifest, should the new one be in place already, then the data."""
        try:
            if (self.path / MANIFEST).read_bytes() != self._raw:
                self._replace_manifest(self._raw)
            for name in names:
                self._disk.truncate(self._fd(name), self.manifest.files[name].bytes)
        except OSError as error:
            # Every commit writes at the committed end, so bytes left there are harmless; a manifest that could not be
            # put back is not, and what it says can only be learnt by opening the folder again.
            self._broken = f"{self.path} could not be brought back to its last commit: {error}"

    def _cut_leftovers(self) -> None:
        """Cut what a killed writer left beyond the committed bytes."""
        for name, extent in self.manifest.files.items():
            path = self.path / name
            if path.exists() and path.stat().st_size > extent.bytes:
                self._disk.truncate(self._fd(name), extent.bytes)
        (self.path / (MANIFEST + ".tmp")).unlink(missing_ok=True)

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fds[name]

    # --- usage: small, shared by readers and writers, outside the commit ---------------------------------------------

    def append_usage(self, payload: bytes) -> None:
        """Add one line under the usage file's own lock, held only for this call."""
        try:
            fd = os.open(self.path / USAGE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                end = os.fstat(fd).st_size
                whole = _whole_lines(fd, end)
                if whole < end:  # the last writer was killed in the middle of its line
                    os.ftruncate(fd, whole)
                view = memoryview(b"%08x %b\n" % (zlib.crc32(payload), payload))
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
        except OSError as error:
            raise os_error(error, "write", self.path / USAGE) from error

    def close(self) -> None:
        """Give back the files and the lock. Can be called twice."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _grown(extent: Extent, data: bytes, count: int, check: int) -> Extent:
    return Extent(extent.bytes + len(data), extent.count + count, check)


def _whole_lines(fd: int, end: int) -> int:
    """Where the last complete line of the file ends."""
    while end:
        start = max(0, end - 4096)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

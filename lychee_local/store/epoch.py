"""Append-only lines and vector rows: the files of one epoch folder.

Owns their form on disk and how they are read and appended; what of them counts is for the manifest to say. Knows
nothing of turns and records: it moves bytes and floats.

A line is eight hex digits, a blank, a JSON text. The digits are the CRC-32 of that text seeded with the digits of the
line before, which finds a changed, lost, repeated or moved line and still says which one it is.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lychee_local.errors import StoreDamaged
from lychee_local.store.disk import Disk, sync_folder
from lychee_local.store.manifest import LINE_FILES, LOSS, ROW_FILES, Extent, Precision, os_error

Rows = npt.NDArray[np.float32]
Numbers = Sequence[int] | npt.NDArray[np.intp]

DTYPES: Mapping[Precision, str] = {"float32": "<f4", "float16": "<f2"}
_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """What one commit appends: payloads by line file, float rows by row file."""

    lines: dict[str, list[bytes]] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One committed line. `seed` is the checksum of the line before, `payload` None where this one does not match."""

    number: int
    start: int
    size: int
    seed: int
    payload: bytes | None


class EpochFiles:
    """The files of one epoch folder, open for appending."""

    def __init__(self, folder: Path, precision: Precision, disk: Disk) -> None:
        self.folder = folder
        self._dtype = DTYPES[precision]
        self._disk = disk
        self._fds: dict[str, int] = {}

    def append(self, extents: Mapping[str, Extent], batch: Batch) -> dict[str, Extent]:
        """Write `batch` behind `extents`, not yet durable; the extents with it.

        Raises:
            OSError: it could not be written, in part or at all.
        """
        after, appended = dict(extents), {}
        for name, payloads in batch.lines.items():
            check, parts = extents[name].check, []
            for payload in payloads:
                check = zlib.crc32(payload, check)
                parts.append(b"%08x %b\n" % (check, payload))
            appended[name] = b"".join(parts)
            after[name] = _grown(extents[name], appended[name], len(payloads), check)
        for name, rows in batch.rows.items():
            appended[name] = np.ascontiguousarray(rows, dtype=self._dtype).tobytes()
            check = zlib.crc32(appended[name], extents[name].check)
            after[name] = _grown(extents[name], appended[name], len(rows), check)
        for name, data in appended.items():
            if data:
                self._disk.write(self._fd(name), data, extents[name].bytes)
        return after

    def sync(self, names: Iterable[str]) -> None:
        for name in names:
            self._disk.sync(self._fd(name))

    def sync_all(self) -> None:
        """Every file that was written, and their names."""
        self.sync(self._fds)
        sync_folder(self._disk, self.folder)

    def cut(self, extents: Mapping[str, Extent]) -> None:
        """Cut what lies beyond `extents`, as a killed writer leaves it."""
        for name, extent in extents.items():
            path = self.folder / name
            if path.exists() and path.stat().st_size > extent.bytes:
                self._disk.truncate(self._fd(name), extent.bytes)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            self._fds[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fds[name]


def _grown(extent: Extent, data: bytes, count: int, check: int) -> Extent:
    return Extent(extent.bytes + len(data), extent.count + count, check)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_lines(path: Path, since: Extent, until: Extent) -> Iterator[Line]:
    """The lines committed after `since` (numbers count from 0), read block by block.

    Raises:
        StoreDamaged: the file is missing or shorter than what is committed, or ends in other lines.
    """
    number, start, check = since.count, since.bytes, since.check
    for raw in _raw_lines(path, since, until):
        payload: bytes | None = raw[9:]
        seed, check = check, zlib.crc32(raw[9:], check)
        if raw[:9] != b"%08x " % check:
            payload = None
            check = int(raw[:8], 16) if re.fullmatch(rb"[0-9a-f]{8}", raw[:8]) else 0  # the next line hangs on this one
        yield Line(number, start, len(raw), seed, payload)
        number, start = number + 1, start + len(raw) + 1
    if number != until.count or start != until.bytes or check != until.check:
        raise StoreDamaged(
            f"{path} does not end with line {until.count} as it was committed", hint="restore the file from a backup"
        )


def _raw_lines(path: Path, since: Extent, until: Extent) -> Iterator[bytes]:
    left = until.bytes - since.bytes
    if not left:
        return
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise no_file(path)
        with path.open("rb") as file:
            file.seek(since.bytes)
            rest = b""
            while left:
                block = file.read(min(left, _BLOCK))
                if not block:
                    raise too_short(path, file.tell(), until)
                left -= len(block)
                *whole, rest = (rest + block).split(b"\n")
                yield from whole
    except FileNotFoundError as error:
        raise missing(path, until) from error
    except OSError as error:
        raise os_error(error, "read", path) from error


def payload_at(fd: int, path: Path, start: int, size: int, seed: int, number: int) -> bytes:
    """The payload of one line whose place is known.

    Raises:
        StoreDamaged: it does not match its checksum.
    """
    try:
        raw = os.pread(fd, size, start)
    except OSError as error:
        raise os_error(error, "read", path) from error
    if raw[:9] != b"%08x " % zlib.crc32(raw[9:], seed):
        raise damaged(path, number + 1)
    return raw[9:]


def row_bytes(vectors: Rows, precision: Precision) -> list[bytes]:
    """Each row as it stands in the file."""
    return [row.tobytes() for row in np.ascontiguousarray(vectors, dtype=DTYPES[precision])]


def read_rows(path: Path, first: int, count: int, dimension: int, precision: Precision) -> npt.NDArray[np.floating]:
    """Rows [first, first + count) as they stand in the file, in its precision, unchecked.

    Raises:
        StoreDamaged: the file is missing or too short.
    """
    dtype = np.dtype(DTYPES[precision])
    until = Extent((first + count) * dimension * dtype.itemsize, first + count)
    if not count:
        return np.zeros((0, dimension), dtype=dtype)
    try:
        rows = np.fromfile(path, dtype=dtype, count=count * dimension, offset=first * dimension * dtype.itemsize)
    except FileNotFoundError as error:
        raise missing(path, until) from error
    except OSError as error:
        raise os_error(error, "read", path) from error
    if rows.size < count * dimension:
        raise too_short(path, path.stat().st_size, until)
    return rows.reshape(count, dimension)


def require_sizes(folder: Path, extents: Mapping[str, Extent]) -> None:
    """Raise StoreDamaged where a file is missing or shorter than what is committed of it."""
    for name, extent in extents.items():
        if not extent.bytes:
            continue
        path = folder / name
        try:
            about = path.lstat()
        except FileNotFoundError as error:
            raise missing(path, extent) from error
        except OSError as error:
            raise os_error(error, "read", path) from error
        if not stat.S_ISREG(about.st_mode):
            raise no_file(path)
        size = about.st_size
        if size < extent.bytes:
            raise too_short(path, size, extent)


def no_file(path: Path) -> StoreDamaged:
    return StoreDamaged(f"{path} is a link or no file at all", hint="put the file itself there")


def missing(path: Path, extent: Extent) -> StoreDamaged:
    return StoreDamaged(f"{path} is missing: {extent.count} entries are lost", hint=_REPAIR)


def too_short(path: Path, size: int, extent: Extent) -> StoreDamaged:
    return StoreDamaged(f"{path} ends at byte {size}, {extent.bytes} are committed: its end is lost", hint=_REPAIR)


def damaged(path: Path, number: int) -> StoreDamaged:
    """`number` counts from 1, as people and editors do."""
    unit = "row" if path.name in ROW_FILES else "line"
    return StoreDamaged(f"{path}, {unit} {number} does not match its checksum: {LOSS[path.name]} is lost", hint=_REPAIR)


_REPAIR = "restore the file from a backup, or keep what is whole: lychee check --repair"
NO_LINES = {name: Extent() for name in (*LINE_FILES, *ROW_FILES)}

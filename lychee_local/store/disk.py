"""Every operation by which a memory changes the disk, in one place, so that tests can fail or stop at each of them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """The tests put one in front that fails, or that keeps a copy of the folder as a crash at that moment would leave
    it. `remove` takes a file or an empty folder; what is not there is no error."""

    def write(self, fd: int, data: bytes, offset: int) -> None: ...
    def sync(self, fd: int) -> None: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def replace(self, source: Path, target: Path) -> None: ...
    def remove(self, path: Path) -> None: ...


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

    def remove(self, path: Path) -> None:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def read_file(path: Path) -> bytes:
    """All of a file, which must be one: whoever opens a pipe for reading waits for ever.

    Raises:
        OSError: it is not there, cannot be read, or is something else.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path.read_bytes()


def sync_folder(disk: Disk, folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.sync(fd)
    finally:
        os.close(fd)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """A whole file, atomically: a reader finds the old content or the new one."""
    draft = path.with_name(path.name + ".tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        disk.write(fd, data, 0)
        disk.sync(fd)
    finally:
        os.close(fd)
    disk.replace(draft, path)
    sync_folder(disk, path.parent)


def remove_folder(disk: Disk, folder: Path) -> None:
    """A folder and the files in it; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
        return
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            remove_folder(disk, path)
        else:
            disk.remove(path)
    disk.remove(folder)

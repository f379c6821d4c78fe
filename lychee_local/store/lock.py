"""The right to write one user's folder: one process at a time.

Owns the lock file and the name of its holder. The operating system gives the lock back when its holder dies, so there
is no stale lock to clean up; what the file says is only for the message.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from lychee_local.errors import StoreLocked
from lychee_local.store.manifest import LOCK, canonical


class WriterLock:
    """The exclusive right to write one folder. Held until `release` or the death of the process."""

    def __init__(self, folder: Path, *, wait_seconds: float) -> None:
        """Raises StoreLocked, naming the holder, when it is not free within `wait_seconds`."""
        self._fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                holder = self._holder()
                os.close(self._fd)
                raise StoreLocked(
                    f"{folder} is being written by {holder}",
                    hint="close that program, or wait for it with wait_seconds; reading needs no lock",
                ) from error
        self._pid = os.getpid()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = canonical({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, owner + b"\n", 0)
        except OSError:
            os.close(self._fd)  # or this process would keep out itself
            raise

    @property
    def ours(self) -> bool:
        """Whether this process took the lock. A fork inherits the open file, and with it the lock, but must not write:
        parent and child would overwrite each other's commits."""
        return self._pid == os.getpid()

    def _holder(self) -> str:
        try:
            owner = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError):
            return "another process"  # it holds the lock and has not written its name yet

    def release(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

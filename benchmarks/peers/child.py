"""A process that we start, that reaches nothing but this machine, and that ends with us: a peer, or the server.

Owns its start, its end, its log, and the exchange of JSON lines with it. Whatever goes wrong on the other side (it
dies, hangs, or answers what is no reply) ends the process and is a `PeerFailed` that shows the end of its log.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.environment import THREADS
from lychee_local.errors import LycheeError

Line = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
# Of our environment a child gets these alone: keys and addresses of services, and proxies, are none of its business.
KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", *THREADS)
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
SHOWN = 600  # characters of a log, or of a line that is no reply
GRACE = 5.0  # seconds to end by itself


class PeerFailed(LycheeError):
    """A peer, or the server that it asks, did not do its part."""


class Child:
    """`python` running `target` (a module, or a file) under confine.py, with `home` for its home directory; its
    standard error, and unless it `talks` its standard output, are appended to the file `log`."""

    def __init__(
        self, python: Path, target: str, *, home: Path, log: Path, talks: bool, arguments: Sequence[str] = ()
    ) -> None:
        self.name = target.rpartition("/")[2].rpartition(".")[2] if not target.endswith(".py") else Path(target).stem
        self._log = log
        for folder in (log.parent, home):
            folder.mkdir(parents=True, exist_ok=True)
        held, self._tether = os.pipe()
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    [python.absolute(), "-m", "benchmarks.peers.confine", str(held), target, *arguments],
                    stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if talks else file,
                    stderr=file,
                    env=_environment(os.environ, home),
                    cwd=home,
                    pass_fds=(held,),
                )
        except OSError as error:
            os.close(self._tether)
            raise PeerFailed(
                f"{python} cannot be run: {error.strerror}", hint="give the interpreter of an environment"
            ) from error
        finally:
            os.close(held)
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Line, *, within: float) -> Line:
        """Its reply, for which it has so many seconds.

        Raises:
            PeerFailed: it died, hung, or answered something else; it has been ended.
        """
        assert self._process.stdin is not None, "this child does not talk"
        try:
            self._process.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed(f"died before it could be asked to {request['do']}") from error
        line = self._line(request, time.monotonic() + within, within)
        try:
            reply = json.loads(line)
        except ValueError as error:
            raise self._failed(f"answered no JSON when asked to {request['do']}: {_cut(line)!r}") from error
        if not isinstance(reply, dict) or "done" not in reply:
            raise self._failed(f"answered no reply when asked to {request['do']}: {_cut(line)!r}")
        return reply

    def _line(self, request: Line, deadline: float, within: float) -> bytes:
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failed(f"had no reply within {within:g} seconds when asked to {request['do']}")
                read = os.read(out, 1 << 16)
                if not read:
                    raise self._failed(f"died when asked to {request['do']}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failed(self, how: str) -> PeerFailed:
        self.close()
        return PeerFailed(f"{self.name} {how}; the end of its log: {self.log_end()}", hint=f"the log is {self._log}")

    def log_end(self) -> str:
        """The last lines of its log, as one."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return " / ".join(text[-SHOWN:].split("\n")).strip(" /") or "(empty)"

    def close(self) -> None:
        """End it: asked to, and if it does not, killed. A second call does nothing."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was still to be sent goes nowhere
                    continue
        if self._tether >= 0:
            os.close(self._tether)
            self._tether = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment(ours: Mapping[str, str], home: Path) -> dict[str, str]:
    kept = {name: ours[name] for name in KEPT if name in ours}
    return kept | QUIET | {"HOME": str(home.absolute()), "PYTHONPATH": str(ROOT)}


def _cut(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."

"""Runs a module, or a file, so that it reaches nothing but this machine and ends when we end.

    python -m benchmarks.peers.confine TETHER MODULE|FILE.py [ARGUMENT ...]

Owns both promises. Connections, look-ups of names and messages to anything but the loopback are refused by an audit
hook, which Python calls below every library and which cannot be taken off again; so is the start of any program, which
would have no such hook. Native code that calls the system itself is out of its reach: benchmarks/README.md says how to
run the whole benchmark without a network at all. TETHER is the read end of a pipe: when its other end is closed, by our
end or our death, this process ends.

Standard library alone: it is run by the interpreters of peers.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import runpy
import sys
import threading
from typing import Any

# What was tried and refused, once each.
refused: dict[str, None] = {}

_ADDRESSED = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getnameinfo": 0}
_NAMED = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"}
_STARTED = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"}


def keep_to_this_machine() -> None:
    """From now on, until the process ends."""
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _ADDRESSED:
        address = arguments[_ADDRESSED[event]]
        if isinstance(address, tuple) and not _loopback(address[0]):  # a Unix socket's address is no tuple
            _refuse(f"a connection to {address[0]} port {address[1]}")
    elif event in _NAMED:
        if not _loopback(arguments[0]):
            _refuse(f"a look-up of {_text(arguments[0])}")
    elif event in _STARTED:
        _refuse(f"the start of {_text(arguments[0])}")


def _refuse(what: str) -> None:
    refused.setdefault(what)
    raise PermissionError(errno.EACCES, f"{what} is refused: a benchmark stays on this machine")


def _loopback(host: object) -> bool:
    name = _text(host)
    if name in ("", "localhost"):  # none at all is this machine too
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _text(value: object) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def tether(end: int) -> None:
    """End this process when the pipe is closed at its other end."""

    def wait() -> None:
        os.read(end, 1)  # nothing is ever written
        os._exit(70)

    threading.Thread(target=wait, name="tether", daemon=True).start()


def main() -> None:
    _, end, target, *rest = sys.argv
    tether(int(end))
    keep_to_this_machine()
    sys.argv = [target, *rest]
    if target.endswith(".py"):
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # As a module of its name, so that `refused` is the one that adapters import.
    from benchmarks.peers import confine

    confine.main()

"""What is settled in this process before a native engine is first imported, when later would be too late; how many
processors it may use, and which build of llama.cpp is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path


def settle() -> None:
    """Make the engines' threads sleep while they wait, and the hub's library stay offline. A caller's choice stands.

    llama.cpp and torch meet at an OpenMP barrier after every operation, hundreds of times a token, and by default the
    first to arrive spins until the last is there. With one other busy process on the machine the last one is not even
    scheduled, and two threads decode a hundred times slower than one (benchmarks/LOG.md, "Waiting threads").

    Models are loaded by folder and need no network; offline stops look-ups for optional files and telemetry. The
    tokenizers' thread pool is switched off because a fork after its first use can hang.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def processors() -> int:
    """How many processors this process may use; in a container, no more than it is given time on."""
    # llama-cpp-python's own default is half of them, which on a laptop of two is one.
    here = len(_here())
    return min(here, quota() or here)


def _here() -> Collection[int]:
    """Which processors this process may run on, as the system numbers them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@cache
def quota(root: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int | None:
    """How many processors' time the control groups of this process grant it, rounded up; None for no limit. Threads
    beyond that would be stopped again and again, each time with the others waiting for it."""
    try:
        lines = mine.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = root / next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    limits = []
    for folder in (own, *own.parents):
        with suppress(OSError, ValueError):  # no such file, or "max"
            granted, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            limits.append(-(-granted // period))
    return min(limits, default=None)


def cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many cores those processors are, where two may share one; their number where the system does not tell."""
    mine = _here()
    try:
        siblings = {(topology / f"cpu{n}" / "topology" / "thread_siblings_list").read_text().strip() for n in mine}
    except OSError:
        return len(mine)
    return len(siblings)


def installed_llama() -> str:
    """Tells one build of llama.cpp from another without loading it."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return "none"
    return f"{spec.origin} {Path(spec.origin).stat().st_mtime_ns} {version_of('llama-cpp-python')}"


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    from importlib import metadata  # felt at every start, and needed at few

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""What is settled in this process before a native engine is first imported, when later would be too late; and how many
processors it may use."""

from __future__ import annotations

import os


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
    """How many processors this process may use."""
    # llama-cpp-python's own default is half of them, which on a laptop of two is one.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1

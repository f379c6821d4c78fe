"""Whether this machine can spare the work of encoding: how busy it is with other things, and whether it is plugged in.

Owns the two probes and what their numbers mean. Does no work and waits for nothing. What a machine does not tell is
None, never a guess.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

# A machine is idle while its load average of the last minute, without our own part in it, is below this much a core:
# a person who reads or writes stays well below it, a build or a game on half of the cores does not.
IDLE_LOAD = 0.5
POWER_SUPPLIES = Path("/sys/class/power_supply")

_MINUTE = 60.0
_FROM_OUTSIDE = ("Mains", "USB", "Wireless")


class OwnLoad:
    """This process's part in the load average of the last minute, which would otherwise stop us for our own work.

    The average is that of the kernel: a minute ago counts 1/e as much as now.
    """

    def __init__(self) -> None:
        self._load = 0.0
        self._before: tuple[float, float] | None = None

    def update(self, now: float, cpu_seconds: float) -> float:
        """The load at `now`, in seconds of any clock, by when this process has used `cpu_seconds` in all."""
        if self._before is not None and now > self._before[0]:
            passed = now - self._before[0]
            kept = math.exp(-passed / _MINUTE)
            self._load = kept * self._load + (1.0 - kept) * (cpu_seconds - self._before[1]) / passed
        if self._before is None or now > self._before[0]:
            self._before = (now, cpu_seconds)
        return self._load


def load_average() -> float | None:
    """How many threads ran or wanted to, on average over the last minute; None where the machine does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def others_load_per_core(load: float, own: float, cores: int) -> float:
    """What is left of the load average without our own, for each core; at least 0."""
    return max(0.0, load - own) / max(1, cores)


def cpu_seconds() -> float:
    """What this process has used so far, all its threads together."""
    used = os.times()
    return used.user + used.system


def on_mains(folder: Path = POWER_SUPPLIES) -> bool | None:
    """Whether the machine runs on mains; None where that cannot be told.

    `folder` is Linux's list of power supplies. A machine with a battery of its own runs on mains while a supply from
    outside is online or, where none is listed, while no battery discharges. One without a battery always does.
    """
    try:
        supplies = [_supply(path) for path in sorted(folder.iterdir())]
    except OSError:
        return None
    outside = [s["online"] == "1" for s in supplies if s["type"] in _FROM_OUTSIDE and s["online"]]
    batteries = [s["status"] for s in supplies if s["type"] == "Battery" and s["scope"] != "Device"]
    if not batteries:
        return True
    return any(outside) if outside else "Discharging" not in batteries


def _supply(path: Path) -> dict[str, str]:
    """What one supply says of itself; "" for what it does not say. A mouse's battery has the scope "Device"."""
    said = {}
    for name in ("type", "online", "status", "scope"):
        try:
            said[name] = (path / name).read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            said[name] = ""
    return said


class Spare:
    """The conditions under which work goes on, and whether they are met. Where the machine does not tell, they are."""

    def __init__(
        self,
        *,
        when_idle: bool,
        on_mains_only: bool,
        load: Callable[[], float | None] = load_average,
        mains: Callable[[], bool | None] = on_mains,
        cores: int | None = None,
        now: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = cpu_seconds,
    ) -> None:
        self._when_idle = when_idle
        self._on_mains_only = on_mains_only
        self._load, self._mains = load, mains
        self._cores = cores or os.cpu_count() or 1
        self._now, self._used = now, used
        self._own = OwnLoad()

    def untold(self) -> tuple[str, ...]:
        """What this machine does not tell of what the conditions need."""
        said = []
        if self._when_idle and self._load() is None:
            said.append("this machine does not say how busy it is")
        if self._on_mains_only and self._mains() is None:
            said.append("this machine does not say whether it runs on mains")
        return tuple(said)

    def held_back(self) -> str:
        """Why nothing should be done now; "" where it may."""
        own = self._own.update(self._now(), self._used())
        load = self._load() if self._when_idle else None
        if load is not None and others_load_per_core(load, own, self._cores) >= IDLE_LOAD:
            return f"other programs keep this machine busy: waiting for a load below {IDLE_LOAD} a core"
        if self._on_mains_only and self._mains() is False:
            return "on battery: waiting for mains"
        return ""

"""What this machine can spare: loads computed by hand, power supplies as Linux lists them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lychee_local import machine


def supplies(folder: Path, **each: dict[str, str]) -> Path:
    for name, said in each.items():
        (folder / name).mkdir()
        for key, value in said.items():
            (folder / name / key).write_text(value + "\n", encoding="ascii")
    return folder


BATTERY = {"type": "Battery", "scope": "System", "status": "Discharging"}
MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        ({}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": BATTERY}, True),
        ({"AC": {"type": "Mains", "online": "0"}, "BAT0": BATTERY}, False),
        ({"usb": {"type": "USB", "online": "1"}, "AC": {"type": "Mains", "online": "0"}, "BAT0": BATTERY}, True),
        ({"BAT0": BATTERY}, False),
        ({"BAT0": BATTERY | {"status": "Charging"}}, True),
        ({"BAT0": BATTERY | {"status": "Full"}, "BAT1": BATTERY}, False),
        ({"AC": {"type": "Mains"}, "BAT0": {"type": "Battery", "status": "Full"}}, True),
        ({"mouse": MOUSE}, True),
        ({"mouse": MOUSE, "usb": {"type": "USB", "online": "0"}}, True),
    ],
)
def test_mains_or_battery(tmp_path: Path, each: dict[str, dict[str, str]], expected: bool) -> None:
    assert machine.on_mains(supplies(tmp_path, **each)) is expected


def test_where_no_supplies_are_listed_it_cannot_be_told(tmp_path: Path) -> None:
    assert machine.on_mains(tmp_path / "nowhere") is None


def test_our_own_load_rises_and_decays_like_the_kernels() -> None:
    own = machine.OwnLoad()
    assert own.update(100.0, 7.0) == 0.0  # what was used before counts from now on
    # Two threads for a minute: 2 (1 - 1/e).
    after = own.update(160.0, 127.0)
    assert after == pytest.approx(2.0 * (1.0 - math.exp(-1.0)))
    # A minute of rest leaves 1/e of it.
    assert own.update(220.0, 127.0) == pytest.approx(after / math.e)
    # Asked again at once it is the same.
    assert own.update(220.0, 128.0) == pytest.approx(after / math.e)


def test_in_steps_or_at_once_it_is_the_same() -> None:
    once, steps = machine.OwnLoad(), machine.OwnLoad()
    once.update(0.0, 0.0)
    for second in range(31):
        found = steps.update(float(second), 1.5 * second)
    assert found == pytest.approx(once.update(30.0, 45.0))


@pytest.mark.parametrize(
    ("load", "own", "cores", "expected"), [(3.0, 1.0, 4, 0.5), (1.0, 1.7, 4, 0.0), (2.0, 0.0, 0, 2.0)]
)
def test_the_load_of_the_others(load: float, own: float, cores: int, expected: float) -> None:
    assert machine.others_load_per_core(load, own, cores) == expected


def test_this_machine_answers() -> None:
    load = machine.load_average()
    assert load is None or load >= 0.0
    assert machine.cpu_seconds() > 0.0
    assert machine.on_mains() in (True, False, None)


def test_work_is_held_back_by_others_and_not_by_itself() -> None:
    readings = {"load": 1.9, "now": 0.0, "used": 0.0}
    spare = machine.Spare(
        when_idle=True,
        on_mains_only=False,
        load=lambda: readings["load"],
        mains=lambda: False,
        cores=4,
        now=lambda: readings["now"],
        used=lambda: readings["used"],
    )
    assert spare.untold() == ()
    assert spare.held_back() == ""  # 1.9 / 4 is below 0.5
    readings["load"] = 2.0
    assert "busy" in spare.held_back()
    # Ten minutes of work of our own on all four cores, and nothing else: the load is ours.
    readings |= {"load": 4.0, "now": 600.0, "used": 2400.0}
    assert spare.held_back() == ""
    readings["load"] = 6.1
    assert "busy" in spare.held_back()


def test_work_is_held_back_on_battery() -> None:
    mains: list[bool | None] = [False, True, None]
    spare = machine.Spare(when_idle=False, on_mains_only=True, load=lambda: 99.0, mains=lambda: mains[0], cores=1)
    assert "battery" in spare.held_back()
    mains.pop(0)
    assert (spare.held_back(), spare.untold()) == ("", ())
    mains.pop(0)
    assert spare.held_back() == ""
    assert "mains" in spare.untold()[0]


def test_a_machine_that_tells_nothing_holds_nothing_back() -> None:
    spare = machine.Spare(when_idle=True, on_mains_only=True, load=lambda: None, mains=lambda: None)
    assert spare.held_back() == ""
    assert len(spare.untold()) == 2

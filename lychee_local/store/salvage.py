"""Reading what is left of damaged files: every line and row that is whole, wherever it stands.

Owns how a chain of lines is taken up again behind a damaged one, which then costs itself and not what follows, and how
a row is found by the checksum that its line names. Knows nothing of what lines mean, and changes nothing.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lychee_local.store.epoch import DTYPES, read_rows
from lychee_local.store.manifest import Extent, Precision
from lychee_local.store.vectors import UNIT_TOLERANCE

ROWS_AT_ONCE = 4_096


# --- lines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundLine:
    """Line `number` (from 0; after damage the best guess). `payload` is None where the text is lost. A line that is not
    `sound` does not stand in the file as it was written, though its text may be whole."""

    number: int
    payload: bytes | None
    sound: bool = True


@dataclass(frozen=True, slots=True)
class _End:
    """Where the chain may go on: the seed of the line `number`, and the text before it that this would prove whole."""

    seed: int
    number: int
    proves: bytes | None = None


_HEAD = re.compile(rb"[0-9a-f]{8} ")
_INNER_HEAD = re.compile(rb"[0-9a-f]{8} \{")
_ENDS = 8  # places where the chain may go on after damage


def whole_lines(path: Path, extent: Extent | None) -> Iterator[FoundLine]:
    """Every line of a file within `extent`, or, where that is not known, within the file.

    A text whose checksum agrees with the line before is whole. So is one whose own digits are damaged, if the next line
    agrees with what they should be, or one that has run into the next because the line end between them is damaged.

    Raises:
        OSError: it cannot be read. A missing file has no lines.
    """
    ends = [_End(0, 0)]
    last = -1  # the last line that was told of
    waiting = list[bytes]()
    for piece in pieces(path, None if extent is None else extent.bytes):
        waiting.append(piece)
        while waiting:
            raw = waiting.pop()
            place = next((e for e in ends if fits(raw, e.seed)), None)
            merged = None if place else _split(raw, ends)
            if merged is not None:
                place, raw, rest = merged
                waiting += [rest] if rest else []
            if place is None:
                number = ends[0].number
                if number != last:
                    last = number
                    yield FoundLine(number, None, False)
                ends = _after_damage(raw, ends)
                continue
            if place.proves is not None:
                yield FoundLine(place.number - 1, place.proves, False)
            yield FoundLine(place.number, raw[9:], merged is None)
            last = place.number
            end = _End(int(raw[:8], 16), place.number + 1)
            ends = [end] if place is ends[0] else [end, *ends][:_ENDS]
    if extent is not None and (proven := next((e for e in ends if e.seed == extent.check and e.proves), None)):
        yield FoundLine(proven.number - 1, proven.proves, False)


def fits(raw: bytes, seed: int) -> bool:
    return raw[:9] == b"%08x " % zlib.crc32(raw[9:], seed)


def _split(raw: bytes, ends: list[_End]) -> tuple[_End, bytes, bytes] | None:
    """A whole line and what has run into it, which is nothing behind the last line."""
    for start in (*(head.start() for head in _INNER_HEAD.finditer(raw, 9)), len(raw)):
        line = raw[: start - 1]
        for end in ends:
            if fits(line, end.seed):
                return end, line, raw[start:]
    return None


def _after_damage(raw: bytes, ends: list[_End]) -> list[_End]:
    """The next line hangs on the digits of this one, or on what they should be, or, if this is not a line but a part of
    one, still on the line before."""
    here = ends[0]
    should_be = _End(zlib.crc32(raw[9:], here.seed), here.number + 1, raw[9:])
    if _HEAD.match(raw):
        return [_End(int(raw[:8], 16), here.number + 1), should_be, *ends][:_ENDS]
    return [*ends[:1], should_be, *ends[1:]][:_ENDS]


def pieces(path: Path, size: int | None) -> Iterator[bytes]:
    """What stands before each line end, within `size` bytes; with them also what stands behind the last line end."""
    if not path.is_file():  # what is not there has none; whoever opens a pipe waits for ever
        return
    with path.open("rb") as file:
        left = path.stat().st_size if size is None else size
        rest = b""
        while left and (block := file.read(min(left, 4 << 20))):
            left -= len(block)
            *whole, rest = (rest + block).split(b"\n")
            yield from whole
        if rest and size is not None:
            yield rest


# --- rows ------------------------------------------------------------------------------------------------------------


class RowSums:
    """What is known of the rows of one file after reading them once: five bytes a row."""

    def __init__(self, path: Path, extent: Extent | None, dimension: int, precision: Precision) -> None:
        """The rows within `extent`, or within the file where that is not known; fewer where the file is shorter.

        Raises:
            OSError: it cannot be read. A missing file has no rows.
        """
        width = dimension * np.dtype(DTYPES[precision]).itemsize
        present = path.stat().st_size // width if path.exists() else 0
        count = present if extent is None else min(present, extent.count)
        self.sums = np.zeros(count, dtype=np.uint32)
        self.unit = np.zeros(count, dtype=np.bool_)
        self.check = 0  # the running checksum of all
        for first in range(0, count, ROWS_AT_ONCE):
            rows = read_rows(path, first, min(ROWS_AT_ONCE, count - first), dimension, precision)
            self.check = zlib.crc32(rows.tobytes(), self.check)
            self.sums[first : first + len(rows)] = [zlib.crc32(row) for row in rows]
            self.unit[first : first + len(rows)] = _unit(rows)
        self._order: npt.NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self.sums)

    def find(self, check: int, place: int) -> int | None:
        """The number of the row with this checksum, which is expected at `place`; None where there is none that is a
        unit vector."""
        if place < len(self) and self.sums[place] == check:
            return place if self.unit[place] else None
        if self._order is None:
            self._order = np.argsort(self.sums, kind="stable")
        at = int(np.searchsorted(self.sums, check, sorter=self._order))
        if at == len(self) or self.sums[self._order[at]] != check:
            return None
        number = int(self._order[at])
        return number if self.unit[number] else None


def _unit(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    with np.errstate(invalid="ignore", over="ignore"):  # damaged rows hold anything
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        near: npt.NDArray[np.bool_] = np.abs(lengths - 1.0) <= 2 * UNIT_TOLERANCE
    return near

"""The proof of forgetting: a search of a folder's raw bytes for what must not be there any more.

Owns what is searched for: the beginning, the middle and the end of each text, as it stands in UTF-8 and as JSON writes
it, and the beginning of each vector in both precisions. Reads whatever files there are, knows none of their forms.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lychee_local.store.epoch import read_rows
from lychee_local.store.forget import Victims
from lychee_local.store.manifest import DECISION_ROWS, LINE_FILES, RECORD_ROWS, ROW_FILES, TURN_ROWS, Precision

PIECE = 32  # bytes of a text that identify it
ROW_PIECE = 16  # of a vector: four floats, or eight of half precision
_KEY = 8  # bytes that are compared at once
_BLOCK = 8 << 20

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Trace:
    """One thing to search for: `number` is its place in the list of what was forgotten, `piece` the bytes; `whole` if
    they are all that identifies it."""

    number: int
    piece: bytes
    whole: bool


@dataclass(frozen=True, slots=True)
class Traces:
    """What to search for after something was forgotten: `ids` names it, `texts` and `rows` are its traces."""

    ids: tuple[str, ...]
    texts: tuple[Trace, ...]
    rows: tuple[Trace, ...]

    @classmethod
    def of(cls, gone: Victims, folder: Path, dimension: int, precision: Precision) -> Traces:
        """Taken before the bytes go. `folder` is the epoch's."""
        said = [(t.id, t.text) for t in gone.turns] + [(r.id, r.text) for r in gone.records]
        texts = text_traces([text for _, text in said])
        ids = [identifier for identifier, _ in said] + [f"exchange {n}" for n in gone.line.decisions]
        taken = [(TURN_ROWS, n) for n in gone.line.turns] + [(RECORD_ROWS, n) for n in gone.record_rows]
        taken += [(DECISION_ROWS, n) for n in gone.line.decisions]
        rows: list[Trace] = []
        for place, (name, number) in enumerate(taken):
            rows += row_traces(read_rows(folder / name, number, 1, dimension, precision), place)
        return cls(tuple(ids), tuple(texts), tuple(rows))

    def in_folder(self, folder: Path, epoch: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Files that hold something of it with no right to, and the ids that something which was kept repeats.

        Every line of the epoch belongs to what was kept, and so does every vector row: a trace that stands there is of
        a sentence, or a vector, that was said again, or that shares this piece. What was said again may stand anywhere:
        in half precision, the graph has another form of a kept vector than its row.
        """
        residues: dict[str, None] = {}
        elsewhere: set[int] = set()
        for traces, kept in ((self.texts, LINE_FILES), (self.rows, ROW_FILES)):
            rightful = {str((epoch / name).relative_to(folder)) for name in kept}
            found = find(folder, traces)
            again = {trace.number for trace, names in found if trace.whole and not rightful.isdisjoint(names)}
            for trace, names in found:
                if trace.number not in again and rightful.isdisjoint(names):
                    residues.update(dict.fromkeys(names))
            elsewhere |= again
        return tuple(residues), tuple(dict.fromkeys(self.ids[number] for number in sorted(elsewhere)))


def text_traces(texts: Sequence[str]) -> list[Trace]:
    """Traces of texts. One of less than eight bytes is searched for as it stands between quotes in a line."""
    found: list[Trace] = []
    for number, text in enumerate(texts):
        for raw in {
            text.encode(),
            json.dumps(text, ensure_ascii=False)[1:-1].encode(),
            json.dumps(text)[1:-1].encode(),
        }:
            if len(raw) < _KEY:
                raw = b'"' + raw + b'"'
                if len(raw) < _KEY:
                    raw = b'"text":' + raw
            found.append(Trace(number, raw, whole=True))
            if len(raw) > PIECE:
                starts = {0, (len(raw) - PIECE) // 2, len(raw) - PIECE}
                found += [Trace(number, raw[start : start + PIECE], whole=False) for start in starts]
    return found


def row_traces(rows: npt.NDArray[np.floating], number: int) -> list[Trace]:
    """Traces of one vector, of shape (1, dimension), in each precision: its first numbers that are not zero."""
    found = []
    for dtype in ("<f4", "<f2"):
        row = np.ascontiguousarray(rows[0], dtype=dtype)
        told = np.flatnonzero(row)[: ROW_PIECE // row.itemsize]
        raw, size = row.tobytes(), row.itemsize
        if not told.size:
            continue  # half precision has nothing left of it
        start, end = int(told[0]) * size, (int(told[-1]) + 1) * size
        if len(told) < ROW_PIECE // size:  # so few say little without the zeros behind them
            start, end = min(start, len(raw) - _KEY), len(raw)
        found.append(Trace(number, raw[start:end], whole=True))
    return found


def find(folder: Path, traces: Sequence[Trace]) -> list[tuple[Trace, tuple[str, ...]]]:
    """Which traces are in a file below `folder`, and in which files."""
    usable = [t for t in traces if len(t.piece) >= _KEY]
    if not usable:
        return []
    by_key: dict[int, list[Trace]] = {}
    for trace in usable:
        by_key.setdefault(int(np.frombuffer(trace.piece[:_KEY], dtype="<u8")[0]), []).append(trace)
    keys = np.array(sorted(by_key), dtype=np.uint64)
    longest = max(len(t.piece) for t in usable)
    found: dict[Trace, dict[str, None]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        # A reader that closes the catalogue may remove SQLite's files beside it.
        with contextlib.suppress(FileNotFoundError):
            for trace in _in_file(path, keys, by_key, longest):
                found.setdefault(trace, {}).setdefault(str(path.relative_to(folder)))
    order = {trace: place for place, trace in enumerate(traces)}
    return [(trace, tuple(found[trace])) for trace in sorted(found, key=order.__getitem__)]


def _in_file(path: Path, keys: Keys, by_key: dict[int, list[Trace]], longest: int) -> set[Trace]:
    found: set[Trace] = set()
    for block in _blocks(path, longest):
        for place in _candidates(block, keys):
            for trace in by_key[int(np.frombuffer(block, dtype="<u8", count=1, offset=place)[0])]:
                if trace not in found and block[place : place + len(trace.piece)] == trace.piece:
                    found.add(trace)
    return found


def _blocks(path: Path, longest: int) -> Iterator[bytes]:
    """The file's bytes, in blocks that overlap by the longest trace."""
    with path.open("rb") as file:
        rest = b""
        while new := file.read(_BLOCK):
            block = rest + new
            yield block
            rest = block[-(longest - 1) :]


def _candidates(block: bytes, keys: Keys) -> Iterable[int]:
    """Where one of `keys` stands in `block`, at whatever offset."""
    for offset in range(_KEY):
        count = (len(block) - offset) // _KEY
        if count < 1:
            continue
        view = np.frombuffer(block, dtype="<u8", count=count, offset=offset)
        near = np.searchsorted(keys, view)
        near[near == len(keys)] = 0
        yield from (offset + _KEY * int(i) for i in np.flatnonzero(keys[near] == view))

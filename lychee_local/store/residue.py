"""The proof of forgetting: a search of a folder's raw bytes for what must not be there any more.

Owns what is searched for: the beginning, the middle and the end of each text, as it stands in UTF-8 and as JSON writes
it, and the beginning of each vector in both precisions. Reads whatever files there are, knows none of their forms.
"""

from __future__ import annotations

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
    """One thing to search for: `number` is its place in the list of what was forgotten, `piece` the bytes."""

    number: int
    piece: bytes


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

        Every line of the epoch belongs to what was kept, and so does every vector row: a trace that stands there is the
        same sentence, or the same vector, said again.
        """
        residues: dict[str, None] = {}
        elsewhere: dict[str, None] = {}
        for traces, kept in ((self.texts, LINE_FILES), (self.rows, ROW_FILES)):
            rightful = {str((epoch / name).relative_to(folder)) for name in kept}
            for number, names in find(folder, traces).items():
                if rightful & set(names):
                    elsewhere.setdefault(self.ids[number])
                else:
                    residues.update(dict.fromkeys(names))
        return tuple(residues), tuple(elsewhere)


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
            starts = {0, max(0, (len(raw) - PIECE) // 2), max(0, len(raw) - PIECE)}
            found += [Trace(number, raw[start : start + PIECE]) for start in starts]
    return found


def row_traces(rows: npt.NDArray[np.floating], number: int) -> list[Trace]:
    """Traces of one vector, of shape (1, dimension), in each precision."""
    return [Trace(number, np.ascontiguousarray(rows, dtype=dtype).tobytes()[:ROW_PIECE]) for dtype in ("<f4", "<f2")]


def find(folder: Path, traces: Sequence[Trace]) -> dict[int, tuple[str, ...]]:
    """Which numbers have a trace in a file below `folder`, and in which files."""
    usable = [t for t in traces if len(t.piece) >= _KEY]
    if not usable:
        return {}
    by_key: dict[int, list[Trace]] = {}
    for trace in usable:
        by_key.setdefault(int(np.frombuffer(trace.piece[:_KEY], dtype="<u8")[0]), []).append(trace)
    keys = np.array(sorted(by_key), dtype=np.uint64)
    longest = max(len(t.piece) for t in usable)
    found: dict[int, dict[str, None]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        for number in _in_file(path, keys, by_key, longest):
            found.setdefault(number, {}).setdefault(str(path.relative_to(folder)))
    return {number: tuple(names) for number, names in sorted(found.items())}


def _in_file(path: Path, keys: Keys, by_key: dict[int, list[Trace]], longest: int) -> set[int]:
    found: set[int] = set()
    for block in _blocks(path, longest):
        for place in _candidates(block, keys):
            for trace in by_key[int(np.frombuffer(block, dtype="<u8", count=1, offset=place)[0])]:
                if trace.number not in found and block[place : place + len(trace.piece)] == trace.piece:
                    found.add(trace.number)
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

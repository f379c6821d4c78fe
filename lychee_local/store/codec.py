"""Values to lines of JSON and back.

Owns what one committed line says. Knows nothing of files. The JSON is canonical (sorted keys, no blanks, real
characters instead of escapes), so the same values give the same bytes.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from lychee_local.errors import BadInput, StoreDamaged
from lychee_local.store import manifest
from lychee_local.types import Decision, NodeKind, Record, Turn


@dataclass(frozen=True, slots=True)
class TurnLine:
    """`row` here and below is the CRC-32 of this line's row in the vector file: it ties text and vector together and
    says which row is damaged when the file as a whole does not match."""

    turn: Turn
    row: int


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """The text of the exchange is left blank: it stands in the turns already."""

    decision: Decision
    row: int


@dataclass(frozen=True, slots=True)
class EncodingLine:
    """All that one encoded segment gave, in one line, so that it is either there or not. `records` may be empty.
    `encoder` is the name of what made it, "" in lines that were written before it was kept."""

    segment: str
    note: str
    records: tuple[Record, ...]
    rows: tuple[int, ...]
    encoder: str = ""


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node when it is first met. Which records it points to is derived from the encodings."""

    kind: NodeKind
    key: str
    label: str
    row: int


@dataclass(frozen=True, slots=True)
class ForgottenLine:
    """What is taken back, by number and never by text: lines of the files of the same name, `records` rows of record
    vectors, `notes` encodings whose note alone goes, `labels` nodes whose label vector alone goes. `following` keeps,
    for each session that was touched, the index its next turn gets."""

    turns: tuple[int, ...] = ()
    decisions: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    encodings: tuple[int, ...] = ()
    records: tuple[int, ...] = ()
    notes: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    following: tuple[tuple[str, int], ...] = ()

    @property
    def by_file(self) -> dict[str, tuple[int, ...]]:
        """The numbers by the file they count in; those of notes, which are no file, as "notes"."""
        return {
            manifest.TURNS: self.turns,
            manifest.DECISIONS: self.decisions,
            manifest.SEGMENTS: self.segments,
            manifest.ENCODINGS: self.encodings,
            manifest.RECORD_ROWS: self.records,
            "notes": self.notes,
            manifest.NODES: self.labels,
        }


L = TypeVar("L")
_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def encode(value: object) -> bytes:
    """One line without its line end.

    Raises:
        BadInput: a lone surrogate in a text, or a number that is not finite.
    """
    plain = _adapter(type(value)).dump_python(value, mode="json", warnings="error")
    try:
        text = json.dumps(plain, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except UnicodeEncodeError as error:
        broken = error.object[max(0, error.start - 20) : error.end + 20]
        raise BadInput(f"a text holds half of a surrogate pair and cannot be stored: {broken!r}") from error
    except ValueError as error:
        raise BadInput(f"a number that is not finite cannot be stored: {value!r:.200}") from error


def decode(kind: type[L], line: bytes) -> L:
    """Raises ValueError where the line is not what `encode` wrote."""
    try:
        value: L = _adapter(kind).validate_json(line)
    except ValidationError as error:
        raise ValueError(str(error.errors(include_url=False, include_input=False)[0])) from error
    return value


def matches(row: npt.NDArray[np.floating], check: int) -> bool:
    """Whether a vector row, as it stands in its file, is the one whose checksum is in its line."""
    return zlib.crc32(row.tobytes()) == check


def understood(kind: type[L], name: str, number: int, line: bytes) -> L:
    """`decode` of line `number` (from 0) of the file `name`, whose checksum matches.

    Raises:
        StoreDamaged: it is not what `encode` writes.
    """
    try:
        return decode(kind, line)
    except ValueError as error:
        raise StoreDamaged(
            f"{name}, line {number + 1} cannot be understood: {error}",
            hint="was it written by another version of lychee?",
        ) from error

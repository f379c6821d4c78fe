"""Values to lines of JSON and back.

Owns what one committed line says. Knows nothing of files. The JSON is canonical (sorted keys, no blanks, real
characters instead of escapes), so the same values give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from lychee_local.errors import BadInput
from lychee_local.types import Decision, NodeKind, Record, Turn


@dataclass(frozen=True, slots=True)
class TurnLine:
    """`row` here and below is the running checksum of the vector file up to and including this line's row: it ties
    text and vector together and says which row is damaged when the file as a whole does not match."""

    turn: Turn
    row: int


@dataclass(frozen=True, slots=True)
class DecisionLine:
    decision: Decision
    row: int


@dataclass(frozen=True, slots=True)
class EncodingLine:
    """All that one encoded segment gave, in one line, so that it is either there or not. `records` may be empty."""

    segment: str
    note: str
    records: tuple[Record, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodeLine:
    """A node when it is first met. Which records it points to is derived from the encodings."""

    kind: NodeKind
    key: str
    label: str
    row: int


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

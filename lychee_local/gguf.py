"""The header of a GGUF file, as far as we need it before llama.cpp is loaded: is it one, how long a context it takes.

Reads the first kilobytes of a file and nothing else. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO

from lychee_local.errors import ModelDamaged

MAGIC = b"GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# A header's texts are names and a chat template; a length beyond this is not a length.
_LONGEST_TEXT = 1 << 24


def context_length(path: Path) -> int | None:
    """The longest context the model was made for, in tokens; None where the header does not say.

    Raises:
        ModelDamaged: the file is empty, of another format, or cut off inside its header.
    """
    with path.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise ModelDamaged(f"{path} is not a GGUF file", hint="llama.cpp runs GGUF files only")
        try:
            _version, _tensors, entries = struct.unpack("<IQQ", _exactly(stream, 20))
            for _ in range(entries):
                key = _text(stream)
                value = _value(stream, _scalar(stream, "I"))
                if key.endswith(".context_length") and isinstance(value, int):
                    return value
        except (EOFError, UnicodeDecodeError, KeyError) as error:
            raise ModelDamaged(f"the GGUF header of {path} is cut off or damaged") from error
    return None


def _exactly(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _scalar(stream: IO[bytes], code: str) -> int | float:
    (value,) = struct.unpack("<" + code, _exactly(stream, struct.calcsize("<" + code)))
    number: int | float = value
    return number


def _text(stream: IO[bytes]) -> str:
    length = int(_scalar(stream, "Q"))
    if length > _LONGEST_TEXT:
        raise EOFError
    return _exactly(stream, length).decode()


def _value(stream: IO[bytes], kind: int | float) -> int | float | str | None:
    """One value; an array is skipped and gives None."""
    if kind == _STRING:
        return _text(stream)
    if kind == _ARRAY:
        inner, count = _scalar(stream, "I"), int(_scalar(stream, "Q"))
        for _ in range(count):
            _value(stream, inner)
        return None
    return _scalar(stream, _SCALARS[int(kind)])

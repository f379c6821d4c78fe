"""One JSON object of a data file, read key by key.

Whatever does not fit is a ValueError that names the place and says what to do; a number stands for its text, since the
published files mix the two. Knows of the layouts only how to tell them apart, for a file that was given as another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lychee_local import dates
from lychee_local.errors import BadInput

# The keys by which an object shows which layout it belongs to; JSON lines are told by their first line already.
_TELLING = {"longmemeval": {"haystack_sessions"}, "locomo": {"conversation", "qa"}}


@dataclass(frozen=True, slots=True)
class Fields:
    where: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, value: object, where: str, layout: str, *required: str) -> Fields:
        """The object `value`, which has all the `required` keys.

        Raises:
            ValueError: it has not, or is no object.
        """
        if not isinstance(value, dict):
            raise ValueError(f"{where}: not an object but {kind(value)}; {_wanted(layout, required)}")
        if missing := [key for key in required if key not in value]:
            told = next((name for name, keys in _TELLING.items() if keys <= value.keys()), layout)
            advice = f"this looks like the layout {told}" if told != layout else _wanted(layout, required)
            raise ValueError(f"{where}: no {', '.join(missing)}; {advice}")
        return cls(where, value)

    def text(self, key: str) -> str:
        """A string that is not blank, or a number as one.

        Raises:
            ValueError: it is neither.
        """
        text = as_text(self.values.get(key))
        if text is None:
            raise ValueError(f"{self.where}: {key} is {kind(self.values.get(key))}; write a text that is not blank")
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of such strings or numbers, or one alone.

        Raises:
            ValueError: one of them is neither.
        """
        value = self.values.get(key)
        given = [as_text(each) for each in (value if isinstance(value, list) else [value])]
        texts = tuple(text for text in given if text is not None)
        if len(texts) < len(given):
            raise ValueError(f"{self.where}: {key} is not a list of texts; write [] for none")
        return texts

    def items(self, key: str) -> list[Any]:
        """A list of anything.

        Raises:
            ValueError: it is none.
        """
        value = self.values.get(key)
        if not isinstance(value, list):
            raise ValueError(f"{self.where}: {key} is not a list but {kind(value)}; write [] for none")
        return value

    def when(self, key: str) -> datetime | None:
        """A date with or without a time, in any form that Lychee Local reads; None where there is none.

        Raises:
            ValueError: it cannot be read.
        """
        return when(self.values.get(key), f"{self.where}: {key}")


def parsed(data: bytes, where: str, advice: str) -> Any:
    """What JSON in UTF-8 says, with or without a byte order mark; `advice` is for one that is not JSON.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: byte {error.start} is not UTF-8 text; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        before = error.doc[max(0, error.pos - 30) : error.pos]
        raise ValueError(f"{where}: not JSON: {error.msg} behind {before!r}; {advice}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, lists in lists without end
        raise ValueError(f"{where}: not JSON: {error}; {advice}") from error


def when(value: object, where: str) -> datetime | None:
    """A date as `Fields.when` reads it.

    Raises:
        ValueError: it cannot be read.
    """
    if value is None or value == "":
        return None
    try:
        return dates.parse_when(str(value))
    except BadInput as problem:
        raise ValueError(f"{where}: {problem}") from problem


def as_text(value: object) -> str | None:
    """A text, or a number as one; None if it is neither, or blank."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip() or None


def kind(value: object) -> str:
    kinds = {list: "a list", dict: "an object", str: "a text", bool: "a truth value", type(None): "missing"}
    if isinstance(value, str) and not value.strip():
        return "blank"
    return kinds.get(type(value), "a number")


def _wanted(layout: str, required: tuple[str, ...]) -> str:
    return f"the layout {layout} has {', '.join(required)} there"

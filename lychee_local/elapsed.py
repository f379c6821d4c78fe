"""Lengths of time: which one a question asks for, and what the calendar says between two dates.

A small model finds two dates and miscounts the days between them. So it is asked for the dates alone, chosen from those
that the evidence has (answer.py), and the counting is done here. Owns the wording of such questions, the choice of
dates, and the arithmetic. Refuses to ask a model, and to be more exact than the dates are.

Not every length is a difference: "How long did Ana live in Rome?" is answered by what she said, so it is none of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, create_model

from lychee_local import dates
from lychee_local.types import DateSpan, Evidence

Unit = Literal["day", "week", "month", "year"]
Today = Literal["start", "end"] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """`unit` is the one that the question names, None where it names none. `today` says which end of the time today is:
    the last for what is over, the first for what is to come, None for the time between two events."""

    unit: Unit | None
    today: Today


@dataclass(frozen=True, slots=True)
class Dated:
    """A date, and the id of the evidence that gives it; None for today."""

    span: DateSpan
    source: str | None


# --- the question ----------------------------------------------------------------------------------------------------

_HOW_LONG = r"\bhow\s(?:long|much\stime|many\s(?:(?:full|whole)\s)?(?P<unit>day|week|month|year)s)(?:\sexactly)?"
_PASSED = (
    r"(?:(?:has|have|had|did)\s)?(?:pass(?:ed)?|elapsed?|lapsed?|go\sby|gone\sby|went\sby|lies?|lay"
    r"|(?:is|was|are|were)\s(?:it|there)|(?:it|there)\s(?:is|was|are|were|been))"
)
_A_START = r"did\sit\stake(?=\sfrom\s(?:the\s)?(?:start|beginning|first|day|moment|time)\b)"
_ANOTHER_END = r"\b(?:when|before|until|by|as\sof|on\sthe\sday|at\sthe\stime)\b"
# Words that ask for dates alone, and where today stands then; the first that fits decides. "How long is the road
# between A and B?" has none of them.
_RESTS: tuple[tuple[str, Today], ...] = (
    (r"\sago\b", "end"),
    (rf"\s(?!had\b){_PASSED}\ssince\b(?!.*?{_ANOTHER_END})", "end"),
    (rf"\s{_PASSED}\ssince\b", None),
    (r"\s(?:(?:is\sit|are\sthere|is\sleft|are\sleft|remain)\s)?(?:until|till)\b", "start"),
    (rf"(?:\s{_PASSED})?\sbetween\b(?=[^?]+\band\b)", None),
    (rf"\s(?:{_PASSED}|{_A_START})\sfrom\b(?=[^?]+\b(?:to|until|till)\b)", None),
    (r"\s(?:before|after)\b(?=[^?]+\b(?:did|was|were|had)\b)", None),
    (rf"\s{_PASSED}\b(?=[^?]*\b(?:before|until|when)\b)", None),
)
_WORDINGS = tuple((re.compile(_HOW_LONG + rest, re.I | re.S), today) for rest, today in _RESTS)
_UNTIL_TODAY = re.compile(r"\b(?:and|to|until|till)\s(?:today|now)\b", re.I)
_HABIT = re.compile(
    r"\b(?:does|do|usually|normally|typically|always|per|each|every|a\s(?:day|week|month|year))\b", re.I
)


def asked(question: str) -> Asked | None:
    """Which length of time an English question asks for that lies between two dates; None where it asks for none, or
    for what is so again and again."""
    if _HABIT.search(question):
        return None
    for wording, today in _WORDINGS:
        if match := wording.search(question):
            unit = cast("Unit | None", match["unit"] and match["unit"].lower())
            return Asked(unit, "end" if _UNTIL_TODAY.search(question, match.end()) else today)
    return None


# --- the dates -------------------------------------------------------------------------------------------------------

_MOST_CHOICES = 64
_UNKNOWN = "unknown"
_CLOSED = ConfigDict(extra="forbid")
_Name = Annotated[str, Field(max_length=80)]

ASK_FOR_DATES = """\
Do not answer the question: it asks for a length of time, which is counted later. Say what happened at {ends}, in a \
few words, each with its date as the memories give it, or unknown."""


def instruction(wanted: Asked) -> str:
    """What the model is asked for in place of an answer."""
    return ASK_FOR_DATES.format(ends="both ends of it" if wanted.today is None else "its one end, not today")


def choices(evidence: Sequence[Evidence]) -> dict[str, Dated]:
    """The dates that the evidence has, by the words in which it is shown; of the same date the best item is the source.

    At most 64, of the best items.
    """
    found: dict[str, Dated] = {}
    for e in evidence:
        day = None if e.said is None else e.said.date()
        spans = [*e.dates, *(mention.span for mention in dates.find(e.text, day))]
        if day is not None:
            spans.append(DateSpan(day, day, "day"))
        for span in spans:
            found.setdefault(dates.describe(span), Dated(span, e.id))
    return dict(list(found.items())[:_MOST_CHOICES])


def schema(wanted: Asked, known: Mapping[str, Dated]) -> type[BaseModel]:
    """What the model may say: an event with one of the known dates, for each end that is not today."""
    date_of: Any = Literal[(*known, _UNKNOWN)]
    event: Any = create_model("Event", __config__=_CLOSED, event=(_Name, ...), date=(date_of, ...))
    ends: dict[str, Any] = dict.fromkeys(("first", "second") if wanted.today is None else ("first",), (event, ...))
    return create_model("Ends", __config__=_CLOSED, **ends)


def ends(
    wanted: Asked, said: BaseModel, known: Mapping[str, Dated], now: datetime | None
) -> tuple[Dated, Dated] | None:
    """The two dates of a reply in `schema`; None where one is unknown, or lies on the wrong side of today."""
    first, *others = (known.get(getattr(said, name).date) for name in type(said).model_fields)
    if wanted.today is None:
        (second,) = others
        return None if first is None or second is None else (first, second)
    if first is None or now is None:
        return None
    today = now.date()
    if first.span.start > today if wanted.today == "end" else first.span.end < today:
        return None
    return first, Dated(DateSpan(today, today, "day"), None)


# --- the calendar ----------------------------------------------------------------------------------------------------

_DAYS: dict[Unit, float] = {"day": 1.0, "week": 7.0, "month": 30.44, "year": 365.25}  # finest first


def between(one: DateSpan, other: DateSpan, unit: Unit | None) -> str | None:
    """The time between two dates in words, in `unit`, or without it in what people would say; None where they overlap.

    Exact between two days, with what is left over in the next smaller unit. Between vaguer dates it is "about" so much,
    and never in a unit that is finer than they are: from May to August 2023 are no days.
    """
    earlier, later = sorted((one, other), key=lambda span: span.start)
    if later.start <= earlier.end:
        return None
    if earlier.precision == later.precision == "day":
        return _exactly(earlier.start, later.start, unit)
    return _roughly((_middle(later) - _middle(earlier)).days, unit, finest=(_finest(earlier), _finest(later)))


def _finest(span: DateSpan) -> Unit:
    """The unit in which time to this date can be counted."""
    if span.precision == "interval":
        return "day" if (span.end - span.start).days <= 7 else "month"
    return span.precision


def _middle(span: DateSpan) -> date:
    return span.start + (span.end - span.start) / 2


def _roughly(days: int, unit: Unit | None, finest: Sequence[Unit]) -> str | None:
    natural: Unit = "day" if days < 14 else "week" if days < 60 else "month" if days < 700 else "year"
    order = list(_DAYS)
    shown = max((unit or natural, *finest), key=order.index)
    number = round(days / _DAYS[shown])
    return f"about {_number(number, shown)}" if number else None


def _exactly(start: date, end: date, unit: Unit | None) -> str:
    days = (end - start).days
    months, days_over = _months(start, end)
    if unit is None:
        unit = "day" if days <= 31 else "month" if months < 12 else "year"
    if unit == "day":
        return _number(days, "day")
    if unit == "week":
        return _joined((days // 7, "week"), (days % 7, "day"))
    if unit == "month" or months < 12:
        return _joined((months, "month"), (days_over, "day"))
    return _joined((months // 12, "year"), (months % 12, "month"))


def _months(start: date, end: date) -> tuple[int, int]:
    """Whole calendar months from start to end, and the days left. A month from the 31st on ends on its last day."""
    months = (end.year - start.year) * 12 + end.month - start.month
    months -= _later(start, months) > end
    return months, (end - _later(start, months)).days


def _later(day: date, months: int) -> date:
    month = dates.shift_months(day, months)
    return min(month.start + timedelta(days=day.day - 1), month.end)


def _joined(large: tuple[int, Unit], small: tuple[int, Unit]) -> str:
    return " and ".join(_number(*part) for part in (large, small) if part[0])


def _number(number: int, unit: Unit) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"

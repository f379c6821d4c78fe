"""The only date code: recognises dates in text, resolves relative ones against the day something was said, words them.

Everything works on calendar days. A date keeps the precision it was said in ("June 2023" is a month, not 1 June), and a
date that no calendar has (30 February, the year 0) is never recognised. Own rules instead of a general date library: a
library must guess from "may", "sat" or "second" alone, and gives one day where a week or a month was said
(benchmarks/LOG.md, "Relative dates").

Conventions where speech is ambiguous: weeks run from Monday to Sunday; "last Friday" is the newest Friday before the
day, "next Friday" the first one after it; "last week" is the calendar week before; seasons are those of the northern
hemisphere; a month or feast without a year is the nearest one, or the next one in a sentence about the future.
"""

from __future__ import annotations

import re
from calendar import monthrange
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cache, partial
from typing import TypeVar

from lychee_local.errors import BadInput
from lychee_local.types import DateSpan

__all__ = ["Mention", "annotate", "describe", "find", "parse_span", "parse_when", "shift_months"]


@dataclass(frozen=True, slots=True)
class Mention:
    """A date said in `text[start:end]`. `relative`: only the day of speech fixes it; `label`: its absolute name."""

    start: int
    end: int
    text: str
    span: DateSpan
    relative: bool
    label: str


# --- vocabulary ------------------------------------------------------------------------------------------------------

_MONTH_NAMES = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
                "November", "December")  # fmt: skip
_WEEKDAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_GERMAN_MONTHS = {"januar": 1, "februar": 2, "märz": 3, "mai": 5, "juni": 6, "juli": 7, "oktober": 10, "dezember": 12}
_MONTHS = (
    {name.lower(): number for number, name in enumerate(_MONTH_NAMES, 1)}
    | {name[:3].lower(): number for number, name in enumerate(_MONTH_NAMES, 1)}
    | {"sept": 9}
    | _GERMAN_MONTHS
)
_WEEKDAYS = (
    {name.lower(): number for number, name in enumerate(_WEEKDAY_NAMES)}
    | {name[:3].lower(): number for number, name in enumerate(_WEEKDAY_NAMES)}
    | {"tues": 1, "thur": 3, "thurs": 3}
)
_COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
           "eleven": 11, "twelve": 12, "an": 1, "a": 1}  # fmt: skip
_COUNTS_HAN = {"一": 1, "二": 2, "两": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8, "九": 9, "十": 10}
_COUNTS_DE = {"einem": 1, "einer": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "sieben": 7, "acht": 8,
              "neun": 9, "zehn": 10}  # fmt: skip
_SEASONS = {"spring": 3, "summer": 6, "fall": 9, "autumn": 9, "winter": 12}
_HAN = "\u3000"  # from here on text is Chinese or Japanese, and English words in it would be foreign

_SHORTENED = [*(name[:3].lower() for name in _MONTH_NAMES if len(name) > 3), "sept"]
_IN_FULL = [name for name in _MONTHS if name not in _SHORTENED]
# A dot belongs to a month only where it shortens one: "in Sept. 2023", but not "It was in September."
_M = rf"(?:(?:{'|'.join(_IN_FULL)})\b|(?:{'|'.join(_SHORTENED)})\b\.?)"
_W = "(?:" + "|".join(sorted(_WEEKDAYS, key=len, reverse=True)) + r")\b"
_D = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th|\.)?"
_Y = r"(?:1[5-9]|20|21)\d\d"
_N = rf"(?P<n>\d{{1,4}}|{'|'.join(_COUNTS)}|(?:a\s)?couple(?:\sof)?|(?:a\s)?few|several)"
# Verbs in the past; the words in "-ed" that describe a mood or a plan are none.
_PAST = re.compile(
    r"\b(?:was|were|had|did|didn|went|got|took|made|saw|said|came|met|told|gave|found|bought|brought|felt|left|ran|ate"
    r"|won|lost|began|sat|drove|spent|wrote|read|heard|caught|taught|fell|flew|rode|sang|swam|built|sold|paid|lent|broke"
    r"|(?<!\bbe\s)(?<!\bget\s)(?<!\bgetting\s)(?!excited|scheduled|supposed|interested|tired|worried|thrilled|invited|need|indeed|feed|speed|bed)[a-z]{2,}ed)\b",
    re.I,
)
_FUTURE = re.compile(
    r"\b(?:will|going to|gonna|plan|plans|planning|hope|hoping|upcoming|want to|looking forward|can't wait|scheduled)\b"
    r"|['’]ll\b|\bwon['’]t\b",
    re.I,
)


# --- spans -----------------------------------------------------------------------------------------------------------


def _day(day: date) -> DateSpan:
    return DateSpan(day, day, "day")


def _month(year: int, month: int) -> DateSpan:
    return DateSpan(date(year, month, 1), date(year, month, monthrange(year, month)[1]), "month")


def _year(year: int) -> DateSpan:
    return DateSpan(date(year, 1, 1), date(year, 12, 31), "year")


def _days(start: date, end: date) -> DateSpan:
    return DateSpan(start, end, "interval")


def _week(day: date, weeks: int = 0) -> DateSpan:
    monday = day - timedelta(days=day.weekday()) + timedelta(weeks=weeks)
    return _days(monday, monday + timedelta(days=6))


def _weekend(day: date, weeks: int = 0) -> DateSpan:
    saturday = _week(day, weeks).start + timedelta(days=5)
    return _days(saturday, saturday + timedelta(days=1))


def shift_months(day: date, months: int) -> DateSpan:
    """The month that lies so many after the one `day` is in."""
    year, month = divmod(day.year * 12 + day.month - 1 + months, 12)
    return _month(year, month + 1)


def _season(year: int, first_month: int) -> DateSpan:
    last = first_month + 2 > 12 and year == date.max.year  # the calendar ends before that winter does
    end = date.max if last else shift_months(date(year, first_month, 1), 2).end
    return _days(date(year, first_month, 1), end)


def _period(unit: str, day: date, steps: int) -> DateSpan:
    """The day, week, weekend, month or year that lies `steps` of its kind after the one `day` is in."""
    if unit == "day":
        return _day(day + timedelta(days=steps))
    if unit == "week":
        return _week(day, steps)
    if unit == "weekend":
        return _weekend(day, steps)
    return shift_months(day, steps) if unit == "month" else _year(day.year + steps)


def describe(span: DateSpan) -> str:
    """The span in words: 2 July 2023, June 2023, 2023, the week of 5 June 2023. `parse_span` reads them all."""
    start, end = span.start, span.end
    if span.precision == "year":
        return f"{start.year:04d}"
    if span.precision == "month":
        return f"{_MONTH_NAMES[start.month - 1]} {start.year:04d}"
    if span.precision == "day":
        return _words(start)
    length = (end - start).days
    for name, month in _SEASONS.items():
        if start.month == month and span == _season(start.year, month):
            return f"{name} {start.year:04d}"
    if length == 6 and start.weekday() == 0:
        return f"the week of {_words(start)}"
    if length == 1 and start.weekday() == 5:
        return f"the weekend of {_words(start)}"
    return f"{_words(start)} to {_words(end)}"


def _words(day: date) -> str:
    return f"{day.day} {_MONTH_NAMES[day.month - 1]} {day.year:04d}"


# --- absolute dates --------------------------------------------------------------------------------------------------

_Read = TypeVar("_Read")


def _ymd(match: re.Match[str]) -> DateSpan:
    return _day(date(int(match["y"]), _month_number(match["m"]), _day_number(match["d"])))


def _ym(match: re.Match[str]) -> DateSpan:
    return _month(int(match["y"]), _month_number(match["m"]))


def _y(match: re.Match[str]) -> DateSpan:
    return _year(int(match["y"]))


def _day_number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


def _month_number(text: str) -> int:
    return int(text) if text.isdigit() else _MONTHS[text.lower().rstrip(".")]


def _anchored(match: re.Match[str]) -> DateSpan:
    """The week of a day, or the days, weeks, weekends, months, years or weekday before or after it."""
    inner = parse_span(match["anchor"])
    if inner is None:
        raise ValueError(match["anchor"])
    unit, side = match["unit"].lower(), match["side"].lower()
    if side == "of":
        return _period(unit, inner.start, 0)
    sign = -1 if side == "before" else 1
    if unit in _WEEKDAYS:
        return _day(_weekday(inner.start, _WEEKDAYS[unit], sign))
    return _counted((match["n"] or "one").lower(), unit, sign, inner.start)[0]


def _weekday(day: date, weekday: int, direction: int) -> date:
    """The nearest given weekday strictly before (-1) or after (1) a day."""
    gap = (day.weekday() - weekday) % 7 if direction < 0 else (weekday - day.weekday()) % 7
    return day + timedelta(days=direction * (gap or 7))


_LONG_DAY = rf"(?:{_D}\s{{1,2}}(?:of\s)?{_M}|{_M}\s{{1,2}}{_D}),?\s{{1,2}}\d{{4}}"
_ABSOLUTE: tuple[tuple[str, Callable[[re.Match[str]], DateSpan]], ...] = (
    (
        rf"\b(?:the\s)?(?:{_N}\s)?(?P<unit>(?:day|weekend|week|month|year)(?=s?\b)|{_W})s?\s"
        rf"(?P<side>before|of|after)\s(?P<anchor>{_LONG_DAY}|\d{{4}}-\d\d-\d\d)(?!\d)",
        _anchored,
    ),
    (rf"\b(?:{_W},?\s)?(?:the\s)?(?P<d>{_D})\s{{1,2}}(?:of\s)?(?P<m>{_M}),?\s{{1,2}}(?P<y>\d{{4}})(?!\d)", _ymd),
    (rf"\b(?:{_W},?\s)?(?P<m>{_M})\s{{1,2}}(?:the\s)?(?P<d>{_D}),?\s{{1,2}}(?P<y>\d{{4}})(?!\d)", _ymd),
    (r"(?<![\d.\-/])(?P<y>\d{4})(?P<p>[-/.])(?P<m>1[0-2]|0?[1-9])(?P=p)(?P<d>3[01]|[12]\d|0?[1-9])(?!\d)", _ymd),
    (r"(?<!\d)(?P<y>\d{4})\s?年\s?(?P<m>1[0-2]|0?[1-9])\s?月\s?(?P<d>3[01]|[12]\d|0?[1-9])\s?[日号]", _ymd),
    (r"(?<![\d.])(?P<d>3[01]|[12]\d|0?[1-9])\.\s?(?P<m>1[0-2]|0?[1-9])\.\s?(?P<y>\d{4})(?!\d)", _ymd),
    (rf"\b(?P<m>{_M}),?\s{{1,2}}(?:of\s)?(?P<y>{_Y})(?!\d)", _ym),
    (r"(?<!\d)(?P<y>\d{4})\s?年\s?(?P<m>1[0-2]|0?[1-9])\s?月", _ym),
    (r"(?<![\d.\-/])(?P<y>\d{4})-(?P<m>1[0-2]|0[1-9])(?![\d\-/])", _ym),
    (r"(?<!\d)(?P<y>\d{4})\s?年", _y),
    (
        rf"\b(?P<s>spring|summer|fall|autumn|winter),?\s(?:of\s)?(?P<y>{_Y})(?!\d)",
        lambda match: _season(int(match["y"]), _SEASONS[match["s"].lower()]),
    ),
    (
        rf"(?:(?<=\bin\s)|(?<=\bsince\s)|(?<=\bof\s)|(?<=\bduring\s)|(?<=\buntil\s)|(?<=\bby\s)|(?<=\byear\s)"
        rf"|(?<=\bearly\s)|(?<=\blate\s)|(?<=\bfrom\s)|(?<=\bbefore\s)|(?<=\bafter\s))(?P<y>{_Y})(?![\d\-/.:,]\d|\d|\s?%)",
        _y,
    ),
    (rf"(?<=\()(?P<y>{_Y})(?=\))", _y),
)  # fmt: skip
_BARE_YEAR = (r"(?P<y>\d{4})", _y)
_INTERVAL = re.compile(r"(?:from\s|between\s)?(.{4,60}?)(?:/|\s(?:to|until|and|-|–)\s)(.{4,60})", re.I)


def parse_span(text: str) -> DateSpan | None:
    """Read a text that is nothing but an absolute date: ISO, written out, a year, or an interval of two of these."""
    text = text.strip().rstrip(".")
    if len(text) > 140:
        return None
    for pattern, read in (_BARE_YEAR, *_ABSOLUTE):
        if (match := _compiled(pattern).fullmatch(text)) and (span := _on_calendar(read, match)):
            return span
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return None
    first, last = parse_span(match[1]), parse_span(match[2])
    if first is None or last is None or last.end < first.start:
        return None
    return _days(first.start, last.end)


def _on_calendar(read: Callable[[re.Match[str]], _Read], match: re.Match[str]) -> _Read | None:
    """A date that the calendar does not have is no date, nor is a word that only `re` takes for one: "yeſterday"."""
    try:
        return read(match)
    except (ValueError, OverflowError, KeyError):
        return None


# --- relative dates --------------------------------------------------------------------------------------------------

_Relative = Callable[..., tuple[DateSpan, str]]  # (match, said)


def _worded(span: DateSpan) -> tuple[DateSpan, str]:
    return span, describe(span)


def _offset_days(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    return _worded(_day(said + timedelta(days=_DAY_WORDS[" ".join(match[0].lower().split())])))


def _ago(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    return _counted(match["n"].lower(), match["u"].lower(), -1, said)


def _since(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    span, _ = _counted(match["n"].lower(), match["u"].lower(), -1, said)
    return span, f"since {describe(span)}"


def _ahead(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    if match[0].lower().startswith("in") and not match[0].endswith("time") and not _future(match):
        raise ValueError("a duration: done in two days")
    return _counted(match["n"].lower(), match["u"].lower(), 1, said)


def _counted(count: str, unit: str, sign: int, said: date) -> tuple[DateSpan, str]:
    side = "before" if sign < 0 else "after"
    if "few" in count or count == "several":
        spans = sorted((_period(unit, said, sign * 2), _period(unit, said, sign * 5)), key=lambda span: span.start)
        return _days(spans[0].start, spans[1].end), f"a few {unit}s {side} {_words(said)}"
    steps = 2 if "couple" in count else int(count) if count.isdigit() else _COUNTS[count]
    span = _period(unit, said, sign * steps)
    if unit in ("week", "weekend"):
        return span, f"{f'{steps} {unit}s' if steps > 1 else f'the {unit}'} {side} {_words(said)}"
    return _worded(span)


def _neighbour(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    """Last, this or next week, weekend, month, year, weekday, month name or season."""
    which, unit = match["which"].lower().split()[-1], match["u"].lower().rstrip(".")
    step = {"last": -1, "past": -1, "previous": -1, "this": 0, "next": 1, "coming": 1}[which]
    if unit in _WEEKDAYS:
        weekday = _WEEKDAYS[unit]
        day = _weekday(said, weekday, step) if step else _week(said).start + timedelta(days=weekday)
        return _weekday_words(day)
    if unit in _MONTHS or unit in _SEASONS:
        return _worded(_recurring(unit, said, step))
    span = _period(unit, said, step)
    if unit in ("week", "weekend") and step:
        return span, f"the {unit} {'before' if step < 0 else 'after'} {_words(said)}"
    return _worded(span)


def _weekday_words(day: date) -> tuple[DateSpan, str]:
    return _day(day), f"{_WEEKDAY_NAMES[day.weekday()]} {_words(day)}"


def _recurring(unit: str, said: date, step: int) -> DateSpan:
    """A month name or season: the newest that is over (-1), this year's (0), or the first to come (1)."""
    spans = [
        _month(year, _MONTHS[unit]) if unit in _MONTHS else _season(year, _SEASONS[unit])
        for year in range(said.year - 2, said.year + 2)
    ]
    if step < 0:
        return [span for span in spans if span.end < said][-1]
    return next(span for span in spans if span.start > said) if step else spans[2]


def _before_last(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    return _worded(_period(match["u"].lower(), said, -2 if match["w"].lower().startswith("before") else 2))


def _bare_month(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    return _closest(match, said, lambda year: _month(year, _month_number(match["m"])))


def _bare_day(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    month, day = _month_number(match["m"]), _day_number(match["d"])
    if (month, day) == (2, 29):
        raise ValueError("29 February without a year")
    if match["d"].endswith(".") or match["m"].lower() in _GERMAN_MONTHS:
        raise ValueError("German tells the future in the present tense: the year is not known")
    return _closest(match, said, lambda year: _day(date(year, month, day)))


def _bare_weekday(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    """The one before where the sentence tells what happened, else the one to come: plans are told in the present."""
    step = -1 if _past(match) and not _future(match) else 1
    return _weekday_words(_weekday(said, _WEEKDAYS[match["u"].lower()], step))


def _feast(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    name = re.sub(r"['’]s?|\sday$", "", match["f"].lower())
    which = match["which"].lower()
    days = [_feast_day(name, said.year + step) for step in (-1, 0, 1)]
    if which == "last":
        return _worded(_day([day for day in days if day < said][-1]))
    if which == "next":
        return _worded(_day(next(day for day in days if day > said)))
    if which == "this":
        return _worded(_day(days[1]))
    return _closest(match, said, lambda year: _day(_feast_day(name, year)))


def _feast_day(name: str, year: int) -> date:
    if name == "thanksgiving":
        return _weekday(date(year, 10, 31), 3, 1) + timedelta(weeks=3)
    return _easter(year) if name == "easter" else date(year, *_FEASTS[name])


def _easter(year: int) -> date:
    """Western Easter by the anonymous Gregorian computus."""
    a, (b, c) = year % 19, divmod(year, 100)
    h = (19 * a + b - b // 4 - (b - (b + 8) // 25 + 1) // 3 + 15) % 30
    k = (32 + 2 * (b % 4) + 2 * (c // 4) - h - c % 4) % 7
    month, day = divmod(h + k - 7 * ((a + 11 * h + 22 * k) // 451) + 114, 31)
    return date(year, month, day + 1)


def _closest(match: re.Match[str], said: date, of_year: Callable[[int], DateSpan]) -> tuple[DateSpan, str]:
    """What returns every year: the nearest to the day, or the first to come where the sentence speaks of the future."""
    spans = [of_year(said.year + step) for step in (-1, 0, 1)]
    if _future(match):
        return _worded(next(span for span in spans if span.end >= said))
    return _worded(min(spans, key=lambda span: abs((span.start - said).days)))


# Where the part of a sentence ends whose verb tells the time of a date in it; a report begins with a quotation mark.
_PART = re.compile(r"[.!?;\"“”]|,?\s(?:and|but|so|then)\s(?=(?:i|we|he|she|it|they|you|there)\b|start|begin|go)", re.I)


def _future(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 80) : match.start()]
    return _FUTURE.search(_PART.split(before)[-1]) is not None


def _past(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 80) : match.start()]
    after = match.string[match.end() : match.end() + 80]
    return _PAST.search(f"{_PART.split(before)[-1]} {_PART.split(after)[0]}") is not None


def _chinese(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    groups = match.groupdict()
    unit = {"天": "day", "周": "week", "期": "week", "月": "month", "年": "year"}[match["u"][-1]]
    if count := groups.get("n"):
        steps = -(int(count) if count.isdigit() else _COUNTS_HAN[count])
    else:
        steps = {"上": -1, "去": -1, "这": 0, "今": 0, "下": 1, "明": 1}[match["w"]]
    span = _period(unit, said, steps)
    if weekday := groups.get("d"):
        span = _day(span.start + timedelta(days=min("一二三四五六日天".index(weekday), 6)))
    return _worded(span)


def _german(match: re.Match[str], said: date) -> tuple[DateSpan, str]:
    units = {"tag": "day", "wochenende": "weekend", "woche": "week", "monat": "month", "jahr": "year"}
    unit = next(unit for stem, unit in units.items() if match["u"].lower().startswith(stem))
    if count := match.groupdict().get("n"):
        return _worded(_period(unit, said, -(int(count) if count.isdigit() else _COUNTS_DE[count.lower()])))
    return _worded(_period(unit, said, {"l": -1, "d": 0, "n": 1}[match[0][0].lower()]))


_DAY_WORDS = {
    "today": 0, "tonight": 0, "this morning": 0, "this afternoon": 0, "this evening": 0, "yesterday": -1,
    "last night": -1, "tomorrow": 1, "the day before yesterday": -2, "the day after tomorrow": 2,
    "heute": 0, "gestern": -1, "vorgestern": -2, "übermorgen": 2,
    "大前天": -3, "前天": -2, "昨天": -1, "昨晚": -1, "昨日": -1, "今天": 0, "今晚": 0, "今日": 0, "明天": 1, "明日": 1,
    "后天": 2,
}  # fmt: skip
_FEASTS = {
    "christmas eve": (12, 24), "christmas": (12, 25), "xmas": (12, 25), "new year eve": (12, 31), "new year": (1, 1),
    "halloween": (10, 31), "valentine": (2, 14),
}  # fmt: skip
_LATIN_DAYS = "|".join(sorted((w.replace(" ", r"\s") for w in _DAY_WORDS if w[0] < _HAN), key=len, reverse=True))
# Written without spaces, a day may be made of the ends of two other words: 以前天天 (before, every day), 说明天气.
_NO_HAN_DAY = {
    "前天": "(?<![以之从先目])",
    "后天": "(?<![以之然最今午雨日])",
    "明天": "(?<![说发光])",
    "今天": "(?<![如当])",
}
_HAN_DAYS = "|".join(
    _NO_HAN_DAY.get(w, "") + w + ("(?!天|气(?!温))" if w.endswith("天") else "")
    for w in sorted((w for w in _DAY_WORDS if w[0] >= _HAN), key=len, reverse=True)
)
_NO_HAN_WEEK = "(?<![上下早晚网路街身马以乡地天爱当底])"  # 上上周 is the week before last, 早上周围 is no week
_UNIT_WORDS = {"day", "days", "week", "weeks", "month", "months", "year", "years"}
_NEIGHBOUR_WORDS = {"weekend", "week", "month", "year", *_WEEKDAYS, *_SEASONS, *_MONTHS}
_FEAST_WORDS = {"christmas", "xmas", "new", "halloween", "valentine", "valentines", "thanksgiving", "easter"}
_NEAR_DE = {stem + ending for stem in ("letzte", "diese", "nächste") for ending in ("", "n", "r", "s", "m")}
# Each rule with its cues: what it matches holds one of them as a whole word, or for `_HAN` a Chinese character. Two
# thirds of all turns hold none, and looking words up costs a fiftieth of trying every rule.
_RELATIVE: tuple[tuple[frozenset[str], str, _Relative], ...] = tuple(
    (frozenset(cues), pattern, resolve)
    for cues, pattern, resolve in (
        (
            {*(day.split()[-1] for day in _DAY_WORDS), _HAN},
            rf"\b(?:{_LATIN_DAYS})\b(?!\svor\b)|{_HAN_DAYS}",
            _offset_days,
        ),
        ({"ago", "back"}, rf"\b{_N}\s(?P<u>day|weekend|week|month|year)s?\s(?:ago|back)\b", _ago),
        ({"now"}, rf"\b{_N}\s(?P<u>week|month|year)s?\snow\b", _since),
        ({"now"}, rf"\b{_N}\s(?P<u>day|week|month|year)s?\sfrom\snow\b", _ahead),
        (_UNIT_WORDS, rf"\bin\s{_N}\s(?P<u>day|week|month|year)s?(?:['’]?\stime)?\b", _ahead),
        (
            _NEIGHBOUR_WORDS,
            r"\b(?P<which>(?:this\s|the\s)?(?:last|past|previous|next|coming)|this)\s"
            rf"(?P<u>weekend|week|month|year|{_W}|spring|summer|fall|autumn|winter|{_M})(?!\w)",
            _neighbour,
        ),
        ({"last", "next"}, r"\bthe\s(?P<u>weekend|week|month|year)\s(?P<w>before\slast|after\snext)\b", _before_last),
        (
            {*_MONTHS},
            rf"(?:(?<=\bin\s)|(?<=\bsince\s)|(?<=\buntil\s)|(?<=\bearly\s)|(?<=\blate\s))(?P<m>{_M})(?!\w|\s\d)",
            _bare_month,
        ),
        ({*_MONTHS}, rf"\b(?P<m>{_M})\s(?:the\s)?(?P<d>{_D})(?![\w:%]|,?\s\d{{4}})", _bare_day),
        ({*_MONTHS}, rf"\b(?<![\d.:])(?P<d>{_D})\s(?:of\s)?(?P<m>{_M})(?!\w|,?\s\d)", _bare_day),
        ({*_WEEKDAYS}, rf"(?<=\bon\s)(?P<u>{_W})(?!\s\d)", _bare_weekday),
        (
            _FEAST_WORDS,
            r"\b(?P<which>last|this|next|at|on|for|over|since|before|after|until)\s(?P<f>christmas(?:\seve)?|xmas"
            r"|new\syear['’]?s?(?:\seve|\sday)|halloween|valentine['’]?s(?:\sday)?|thanksgiving|easter)\b",
            _feast,
        ),
        (
            {_HAN},
            r"(?<![\d一二两三四五六七八九十百千万几数第])(?P<n>\d{1,3}|[一二两三四五六七八九十])\s?(?P<u>天|个?星期|周|个月|年)前",
            _chinese,
        ),
        ({_HAN}, rf"{_NO_HAN_WEEK}(?P<w>[上下这])个?(?P<u>周|星期)(?P<d>[一二三四五六日天])", _chinese),
        ({_HAN}, rf"{_NO_HAN_WEEK}(?P<w>[上下这])个?(?P<u>周|星期)(?![围边到遍身岁年密知])", _chinese),
        ({_HAN}, rf"{_NO_HAN_WEEK}(?P<w>[上下这])个?(?P<u>月)(?![亮光球饼季子票台色牙圆经薪])", _chinese),
        ({_HAN}, r"(?<![过离失])(?P<w>[去今明])(?P<u>年)(?![代轻龄纪华味迈糕货夜])", _chinese),
        (
            {"vor"},
            rf"\bvor\s(?P<n>\d{{1,3}}|{'|'.join(_COUNTS_DE)})\s(?P<u>tag(?:en)?|wochen?|monat(?:en)?|jahr(?:en)?)\b",
            _german,
        ),
        (_NEAR_DE, r"\b(?:letzte|diese|nächste)[nrsm]?\s(?P<u>wochenende|woche|monat|jahr)\b", _german),
    )
)


# --- reading text ----------------------------------------------------------------------------------------------------


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """A rule's pattern, compiled when first tried: all at once they would be felt at every start of `lychee`."""
    return re.compile(pattern, re.I)


_YEAR_DIGITS = re.compile(r"\d{4}")  # every absolute date has them
_WORD = re.compile(r"\w+")
_HAN_SIGN = re.compile("[\u4e00-\u9fff]")


def find(text: str, said: date | None) -> tuple[Mention, ...]:
    """Every date in the text, in order, without overlaps; relative ones only where the day of speech is known."""
    day = said.date() if isinstance(said, datetime) else said
    kept: list[Mention] = []
    end = 0
    for start, stop, mention in sorted(_matches(text, day), key=lambda found: (found[0], -found[1])):
        if start >= end:
            end = stop
            kept += [mention] if mention else []
    return tuple(kept)


def _matches(text: str, said: date | None) -> Iterator[tuple[int, int, Mention | None]]:
    """All matches of all rules. None takes the place of an impossible date, so that 31 June 2023 is not June 2023."""
    for pattern, read in _ABSOLUTE if _YEAR_DIGITS.search(text) else ():
        for match in _compiled(pattern).finditer(text):
            span = _on_calendar(read, match)
            mention = Mention(*match.span(), match[0], span, False, describe(span)) if span else None
            yield *match.span(), mention
    if said is None:
        return
    cues = _cues(text)
    for pattern, resolve in ((p, r) for needed, p, r in _RELATIVE if not needed.isdisjoint(cues)):
        for match in _compiled(pattern).finditer(text):
            if resolved := _on_calendar(partial(resolve, said=said), match):
                span, label = resolved
                label = str(span) if match[0][0] >= _HAN else label
                yield *match.span(), Mention(*match.span(), match[0], span, True, label)


def _cues(text: str) -> set[str]:
    """What may set off a relative rule: the words, in lower case, and `_HAN` for any Chinese character."""
    words = set(_WORD.findall(text.lower()))
    return words if text.isascii() or not _HAN_SIGN.search(text) else words | {_HAN}


def annotate(text: str, said: date | None) -> str:
    """Write behind each relative date what it means: "yesterday (2 July 2023)". Twice is the same as once."""
    parts: list[str] = []
    done = 0
    for mention in find(text, said):
        label = f" ({mention.label})"
        if mention.relative and not text.startswith(label, mention.end):
            parts += [text[done : mention.end], label]
            done = mention.end
    return "".join(parts) + text[done:]


_CLOCK = re.compile(
    r"(?<!\d)(\d{1,2})(?::(\d\d))(?::(\d\d))?\s?([ap]\.?m\.?)?(?!\w)|(?<!\d)(\d{1,2})\s?([ap]\.?m\.?)(?!\w)", re.I
)


def parse_when(text: str) -> datetime:
    """Read a caller's date with or without a time: ISO 8601, "1:56 pm on 8 May, 2023", "2023/05/20 (Sat) 02:21".

    A date alone means its midnight. Without an offset the result is naive, the speaker's own clock.

    Raises:
        BadInput: there is no single calendar day in the text, or something besides a day and a time.
    """
    hint = "write 2023-05-08, 2023-05-08T13:56 or 8 May 2023 1:56 pm"
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        days = [mention for mention in find(text[:200], None) if mention.span.precision == "day"]
    if len(days) != 1 or len(text) > 200:
        raise BadInput(f"not a date: {text[:60]!r}", hint=hint)
    rest = text[: days[0].start] + " " + text[days[0].end :]
    clock = _CLOCK.search(rest)
    hour = minute = second = 0
    if clock:
        rest = rest[: clock.start()] + " " + rest[clock.end() :]
        half = (clock[4] or clock[6] or "").lower()[:1]
        hour, minute, second = int(clock[1] or clock[5]), int(clock[2] or 0), int(clock[3] or 0)
        if half and not 1 <= hour <= 12:
            raise BadInput(f"not a time: {clock[0]!r}", hint=hint)
        hour = hour % 12 + (12 if half == "p" else 0) if half else hour
    if re.sub(rf"\b(?:at|on|{_W})\b|[\s,()]", "", rest, flags=re.I):
        raise BadInput(f"not a date: {text[:60]!r}", hint=hint)
    start = days[0].span.start
    try:
        return datetime(start.year, start.month, start.day, hour, minute, second)
    except ValueError as error:
        raise BadInput(f"not a time: {text[:60]!r}", hint=hint) from error

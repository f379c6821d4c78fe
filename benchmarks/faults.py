"""What can be wrong with a record, found without the code that made it: whose words it takes for whose, relative dates
that nobody can resolve later, names and numbers that nobody said.

Every check is a rule on words, so each has its own faults: `construct` writes what they found to a file, to be read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from datetime import date

from lychee_local import dates
from lychee_local.lexicon import STOP_WORDS
from lychee_local.types import Record, Turn

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
           "November", "December")  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTH = "|".join(_MONTHS)
_COUNT = r"(?:\d+|an?|one|two|three|four|five|six|seven|eight|nine|ten|(?:a )?few|(?:a )?couple(?: of)?|several)"

# --- relative dates ---------------------------------------------------------------------------------------------------

_RELATIVE = re.compile(
    r"\b(?:yesterday|today|tonight|tomorrow"
    r"|(?:last|next|this|this past|this coming) (?:night|week|weekend|month|year|spring|summer|fall|autumn|winter"
    rf"|christmas|easter|{'|'.join(_WEEKDAYS)}|{_MONTH})"
    rf"|{_COUNT} (?:day|week|weekend|month|year)s? (?:ago|from now))\b",
    re.I,
)
_ABSOLUTE = re.compile(
    rf"\b(?:(?:\d{{1,2}}(?:st|nd|rd|th)? (?:{_MONTH})|(?:{_MONTH}) \d{{1,2}}\b(?!\d))(?:,? \d{{4}}\b)?"
    r"|(?:1[5-9]|20|21)\d\d\b(?:-\d\d){0,2})"
)
_BESIDE = 40  # characters


def unresolved_date(text: str) -> bool:
    """Whether "yesterday", "last week" or their like stand in a text without a date beside them: soon after, or soon
    before and not in brackets, which explain the words before them."""
    known = [match.span() for match in _ABSOLUTE.finditer(text)]
    after = [start for start, _ in known]
    before = [end for _, end in known if not text.startswith(")", end)]
    return any(
        not any(0 <= start - match.end() <= _BESIDE for start in after)
        and not any(0 <= match.start() - end <= _BESIDE for end in before)
        for match in _RELATIVE.finditer(text)
    )


# --- speakers ---------------------------------------------------------------------------------------------------------

_FIRST_PERSON = re.compile(r"\b(?:I|[Mm]y|[Mm]e|[Mm]ine|[Mm]yself|[Ww]e|[Uu]s|[Oo]ur)\b")
_SECOND_PERSON = re.compile(r"\b[Yy](?:ou|our|ours|ourself)\b")


def wrong_speaker(record: Record, turns: Sequence[Turn], speakers: Collection[str]) -> bool:
    """Whether a record of these turns credits a person with what another said of themselves.

    Its speaker said none of the turns; or its sentence begins with a person of the conversation who said none of them
    and is neither named nor addressed in them; or it says of the speaker what the speaker says of "you".
    """
    said_by = {turn.speaker.casefold() for turn in turns if turn.speaker}
    if record.speaker and said_by and record.speaker.casefold() not in said_by:
        return True
    subject = next((name for name in speakers if re.match(rf"{re.escape(name)}(?!\w)", record.text)), None)
    if subject is None or not said_by:
        return False
    spoken = "\n".join(turn.text for turn in turns)
    if subject.casefold() not in said_by:
        return not (_SECOND_PERSON.search(spoken) or _named(subject, spoken))
    source = _closest_sentence(record.text, spoken)
    quoted = re.search(rf"[\"“]|^{re.escape(subject)}:", record.text) is not None
    return not quoted and _SECOND_PERSON.search(source) is not None and _FIRST_PERSON.search(source) is None


def _named(name: str, text: str) -> bool:
    """Whether a text names somebody, by the whole name or by a short form of it."""
    words = set(re.findall(r"\w+", text))
    return set(name.split()) <= words or any(name.startswith(word) for word in words if len(word) > 2)


def _closest_sentence(text: str, spoken: str) -> str:
    words = set(_words(text))
    sentences = re.split(r"(?<=[.!?…])\s+|\n+", spoken)
    return max(sentences, key=lambda sentence: len(words & set(_words(sentence))))


# --- names and numbers ------------------------------------------------------------------------------------------------

_Date = tuple[int | None, int, int | None]  # day, month, year
_DATE = re.compile(
    rf"(?:(?P<before>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? )?\b(?P<month>{_MONTH})\b"
    r"(?: (?P<after>\d{1,2})(?:st|nd|rd|th)?\b(?!:))?(?:,? (?P<year>\d{4}))?|\b(?P<iso>\d{4}-\d\d(?:-\d\d)?)\b"
)
_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]\w*")
_SENTENCE_START = re.compile(r"(?:^|[.!?:;…(\"“‘*])[\s\"“‘(]*$")
_NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
             "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip
# Endings of words that a sentence begins with, and hardly of names.
_ORDINARY = ("ing", "ly", "ed")
_ROOT = 4  # letters that two forms of a name share at least: Hamburg and Hamburger do, Ann and annual do not


class Heard:
    """The names, numbers and dates of what was said: in some turns of one session, with the dates that they mean.

    Give it all turns up to the end of a segment. The reference context of that segment was made from those before it,
    so a name of the context counts if somebody said it, and not because an earlier record has it. `ordinary` are words
    that are no names where a sentence begins with them: see `lower_case`.
    """

    def __init__(self, turns: Sequence[Turn], ordinary: Collection[str] = ()) -> None:
        self._ordinary = ordinary
        days = {turn.at.date() for turn in turns if turn.at}
        text = " ".join(f"{t.name} {dates.annotate(t.text, t.at.date() if t.at else None)}" for t in turns)
        self._dates = {found for found, _ in _dates(text)} | {(day.day, day.month, day.year) for day in days}
        self._words = {word.casefold() for word in _words(text)}
        self._words |= {str(number) for number, word in enumerate(_NUMERALS) if word in self._words}
        self._words |= {str(day.year) for day in days}
        whole = (date(y, m, d) for d, m, y in self._dates if d and y and _exists(d, m, y))
        self._words |= {_WEEKDAYS[day.weekday()].casefold() for day in whole}

    def invented(self, text: str) -> tuple[str, ...]:
        """The dates, numbers and capitalised names of a text that were not said, as they stand in it."""
        wrong = []
        for found, (start, end) in list(_dates(text)):
            if not self._dated(found):
                wrong.append(text[start:end])
            text = text[:start] + " " * (end - start) + text[end:]
        for match in _TOKEN.finditer(text):
            word = match[0].replace(",", "")
            first = _SENTENCE_START.search(text[: match.start()]) is not None
            common = first and (word.endswith(_ORDINARY) or word.casefold() in self._ordinary)
            if _names(word) and not common and not self._known(word.casefold()):
                wrong.append(match[0])
        return tuple(wrong)

    def _dated(self, found: _Date) -> bool:
        """Whether some date that was said has every part of this one."""
        return any(all(part in (None, other) for part, other in zip(found, said, strict=True)) for said in self._dates)

    def _known(self, word: str) -> bool:
        if word in self._words or word.removesuffix("s") in self._words:
            return True
        longer = (said for said in self._words if min(len(said), len(word)) >= _ROOT and not said.isdigit())
        return not word[0].isdigit() and any(said.startswith(word) or word.startswith(said) for said in longer)


def lower_case(turns: Sequence[Turn]) -> frozenset[str]:
    """The words that stand in these turns without a capital."""
    return frozenset(word for turn in turns for word in _words(turn.text) if word[0].islower())


def _names(word: str) -> bool:
    """Whether a word is a number, or capitalised for another reason than grammar."""
    return word[0].isdigit() or (word[0].isupper() and len(word) > 1 and word.casefold() not in STOP_WORDS)


def _words(text: str) -> list[str]:
    return [word.replace(",", "") for word in _TOKEN.findall(text)]


def _dates(text: str) -> Iterator[tuple[_Date, tuple[int, int]]]:
    for match in _DATE.finditer(text):
        if match["iso"]:
            year, month, *day = map(int, match["iso"].split("-"))
            yield (day[0] if day else None, month, year), match.span()
        else:
            day_text, year_text = match["before"] or match["after"], match["year"]
            month = _MONTHS.index(match["month"]) + 1
            found = int(day_text) if day_text else None, month, int(year_text) if year_text else None
            yield found, match.span()


def _exists(day: int, month: int, year: int) -> bool:
    try:
        date(year, month, day)
    except ValueError:
        return False
    return True

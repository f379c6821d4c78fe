"""A judge without a model: the floor that a model has to beat, and what the harness is tested with.

Owns rules on dates, counts and words, the same for every data set. Refuses to be clever: it knows no paraphrase and no
negation ("sage green was considered, but it is yellow" holds "sage green"), and takes a rubric for a list of words. Its
agreement with the hand labels says what that costs.
"""

from __future__ import annotations

import re
import unicodedata

from benchmarks.judge import Case, Verdict
from lychee_local import dates
from lychee_local.lexicon import terms
from lychee_local.types import DateSpan

# The share of the reference's terms that an answer must hold. LoCoMo's grader is generous, and a rubric says far more
# than any answer repeats. Chosen before anything was measured.
_GENEROUS = 0.5
_RUBRIC = 0.25

_NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
             "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")  # fmt: skip
_NUMERAL = re.compile(rf"\b(?:{'|'.join(_NUMERALS)})\b")
_WORD = re.compile(r"\w+")
_COUNT = re.compile(r"\b(\d{1,4}) (day|week|month|year)s?\b")

_REFUSAL = re.compile(
    r"\b(?:do|does|did|was|were|is|are|has|have|had|can|could)(?:n't| not)(?: be)?"
    r" (?:know|say|said|tell|told|find|found|mention|specif|state|recall|remember|answer|determine|provide|discuss"
    r"|record|clear|sure|enough)"
    r"|\bcannot\b"
    r"|\bno (?:information|record|mention|memory|evidence|idea|answer)\b"
    r"|\bnever (?:say|said|mention|told|tell|state)"
    r"|\b(?:not|nothing|isn't|wasn't)(?: \w+)? (?:mentioned|specified|stated|known|recorded|available|provided|said)\b"
    r"|\b(?:unanswerable|unknown|insufficient|incomplete)\b"
)


class RuleJudge:
    """See the module. Its verdicts cost nothing and it always has one."""

    name = "rule"
    model = None
    digest = None
    version = "rule-1"

    def judge(self, case: Case) -> Verdict:
        return Verdict(_is_right(case))

    def close(self) -> None:
        """There is nothing to free."""


def _is_right(case: Case) -> bool:
    answer = _plain(case.answer)
    if not answer:
        return False
    if case.kind == "abstention":
        return _REFUSAL.search(answer) is not None
    gold = _plain(case.gold)
    if case.kind == "temporal":
        answer = _off_by_one(answer, gold)
    days, gold_rest = _dated(gold)
    answer_days, _ = _dated(answer)
    if not all(any(_inside(said, day) for said in answer_days) for day in days):
        return False
    wanted = _wanted(gold_rest)
    needed = {"locomo": _GENEROUS, "preference": _RUBRIC}.get(case.kind, 1.0)
    return not wanted or len(wanted & _said(answer)) >= needed * len(wanted)


def _plain(text: str) -> str:
    """In lower case, of one width, with straight apostrophes, single blanks, and numbers up to twenty as digits."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().replace("’", "'").split())
    return _NUMERAL.sub(lambda match: str(_NUMERALS.index(match[0])), folded)


def _dated(text: str) -> tuple[list[DateSpan], str]:
    """The dates of a text, and the text without them."""
    found = dates.find(text, None)
    for mention in reversed(found):
        text = text[: mention.start] + " " + text[mention.end :]
    return [mention.span for mention in found], text


def _inside(said: DateSpan, day: DateSpan) -> bool:
    """Whether a date that was said is the wanted one, or a closer one within it."""
    return day.start <= said.start and said.end <= day.end


def _said(text: str) -> set[str]:
    """What an answer is found to hold: its terms, and its words as they stand."""
    return {*terms(text), *_WORD.findall(text)}


def _wanted(text: str) -> set[str]:
    """The terms of a reference, or its words where it has none: "yes" and "no" are stop words."""
    return set(terms(text)) or set(_WORD.findall(text))


def _off_by_one(answer: str, gold: str) -> str:
    """The answer with a count of days, weeks, months or years set to the gold's where they differ by one."""
    wanted = {(int(number), unit) for number, unit in _COUNT.findall(gold)}

    def closest(match: re.Match[str]) -> str:
        near = [n for n, unit in sorted(wanted) if unit == match[2] and abs(n - int(match[1])) == 1]
        return f"{near[0]} {match[2]}s" if near else match[0]

    return _COUNT.sub(closest, answer)

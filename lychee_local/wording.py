"""A question as it is worded: what type it is, whom and which time it names, what has to be found separately, and where
its wording is not enough.

Owns the rules that plan without a model (docs/method.md 4.5). Refuses to know what is stored, but for the names of
those who speak there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import date, datetime

from lychee_local import dates, lexicon
from lychee_local.prose import language
from lychee_local.types import Constraint, DateSpan, Plan, QuestionType, Route, TimeRange

# Characters in which a question says what it asks; of a longer text the rest is searched for, but not read for cues.
_READ = 2_000


def plan_without(question: str, *, note: str = "") -> Plan:
    """Search for the question itself: type single, one route (4.5)."""
    route = Route("r1", question, (question,))
    return Plan(question, "single", (route,), target=question, queries=(question,), source="none", note=note)


def plan_by_rules(question: str, *, speakers: Collection[str], now: datetime | None) -> Plan:
    """Plan by wording alone: type, named speakers, written dates. Deterministic and well under 5 ms.

    Two routes where two speakers are asked for side by side, or two events are compared; else one. The plan's `doubts`
    say where the wording asks for more than rules can read.
    """
    read = question[:_READ]
    kind: QuestionType = next((kind for kind, cue in _TYPE_CUES if cue.search(read)), "single")
    concludes = _CONCLUSION.search(read) is not None
    named = lexicon.named(question, speakers)
    notes: list[str] = []
    when = _written_range(question, now.date() if now is not None else None, notes)
    statement = _statement(question)
    constraints = tuple(Constraint("entity", name) for name in named)
    parts = _parts(question, statement, named, kind)
    routes = tuple(
        Route(f"r{i}", part, unique((part, statement)) if len(parts) == 1 else (part,), constraints, when)
        for i, part in enumerate(parts, 1)
    )
    return Plan(
        question=question,
        question_type=kind,
        routes=routes,
        target=statement,
        queries=unique((question, statement)),
        constraints=named,
        when=when,
        source="rules",
        doubts=_doubts(question, kind, len(parts), concludes=concludes),
        concludes=concludes,
        note="; ".join(notes),
    )


# --- what the words say ---------------------------------------------------------------------------------------------

# Read top to bottom; the first line that matches decides. The Chinese forms cover the same cues.
_CUES: tuple[tuple[QuestionType, str], ...] = (
    (
        "prior_assistant_response",
        r"\b(did|have|had) you (say|said|tell|told|suggest|recommend|mention|advise|explain|give|given|write|written)"
        r"|\byou (said|told|suggested|recommended|mentioned|advised|explained|gave|wrote)\b"
        r"|\byour (answer|suggestion|recommendation|advice|reply|explanation)"
        r"|你.{0,6}(说过|建议过|推荐过|告诉过|提到过)",
    ),
    (
        "personalized_advice",
        r"\b(should i|what can i|(could|can) you (recommend|suggest)|(recommend|suggest) (me|some|a)\b"
        r"|any (advice|tips|ideas|suggestions|recommendations)|give me (some )?(advice|tips|ideas)"
        r"|help me (choose|decide|pick|plan))"
        r"|推荐一|给我.{0,4}建议|我应该|我该",
    ),
    (
        "temporal",
        r"\bwhen\b|\b(what|which) (date|day|month|year|time|week)\b|\bhow long\b|\bhow (many|much) "
        r"(more )?(days|weeks|months|years|hours|time)\b|\bhow often\b|\b(before|after|earlier|later) or\b"
        r"|\b(first|earlier|later|most recent(ly)?|last time)\b.*\bor\b|\bhow (old|recently)\b|\bsince when\b"
        r"|什么时候|何时|哪天|哪一天|几月|哪年|多久|多长时间",
    ),
    (
        "comparison",
        r"\bcompar|\bdifferen(ce|t)\b.*\b(between|from)\b|\bin common\b|\b(more|less|better|worse|\w+er) than\b"
        r"|\bsimilar(ity|ities)?\b|\bwhich of\b|\b(prefer|rather)\b.*\bor\b|区别|相比|比较|共同",
    ),
    (
        "aggregate",
        r"\bhow (many|much)\b|\blist\b|\ball (the|of)\b|\bin total\b|\bwhat (are|were)\b"
        r"|\b(kinds|types|sorts|names) of\b"
        r"|\b(what|which) (?!does|is|was|has)(\w+ ){0,2}\w{2,}[^s\W]s (has|have|had|do|does|did|are|were|can|would)\b"
        r"|\bwhat (has|have|does|do) .* (done|do|been to|visited|read|made|collected) (to|for|with|in)\b"
        r"|哪些|多少|几个|几次|所有|列出",
    ),
)
_TYPE_CUES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _CUES)

_OPENING = re.compile(
    r"^(?:(?:so|and|please|hey|ok|okay)[\s,]+)*(?:(?:can|could|do) you (?:tell me|remember|remind me)\s+)?"
    r"(?:(?:what|when|where|who|whom|whose|which|why|how(?:\s+(?:long|often))?|is|are|was|were|do|does|did|has|have|had"
    r"|can|could|would|will|should|might|may)(?:['’](?:s|re|d|ve|ll))?\s+)+",
    re.IGNORECASE,
)
_TWO_EVENTS = re.compile(
    r"\b(?:between|first|earlier|later|before|longer)\b[,:]?\s+(.{4,}?)\s+(?:and|or)\s+(.{4,}?)[?.!]*$", re.IGNORECASE
)


def _statement(question: str) -> str:
    """The question without the words that only ask: closer to how its answer was said."""
    rest = _OPENING.sub("", question.strip()).rstrip("?？!. ")
    return rest if len(rest.split()) >= 2 or not rest.isascii() else question.strip()


def _parts(question: str, statement: str, named: tuple[str, ...], kind: QuestionType) -> tuple[str, ...]:
    """What has to be found separately: one phrase a route."""
    if len(named) == 2:
        joined = re.compile(
            rf"{re.escape(named[0])}(?:['’]s)?\s*(?:,|and|or|&|和|与|跟)\s*{re.escape(named[1])}(['’]s)?", re.IGNORECASE
        )
        hit = joined.search(statement)
        if hit is not None:
            own = hit.group(1) or ""
            return tuple(statement[: hit.start()] + name + own + statement[hit.end() :] for name in named)
    if kind in ("temporal", "comparison") and (events := _TWO_EVENTS.search(question[:_READ])):
        return events.group(1).strip(), events.group(2).strip()
    return (statement,)


_BEFORE = re.compile(r"\b(before|until|till|prior to|by|up to)\s+(?:the\s+)?$", re.IGNORECASE)
_AFTER = re.compile(r"\b(after|since|from|starting)\s+(?:the\s+)?$", re.IGNORECASE)


def _written_range(question: str, today: date | None, notes: list[str]) -> TimeRange | None:
    """The filter from dates that are written out; vague and relative ones leave it open (4.3, rule 7)."""
    mentions = [m for m in dates.find(question, today) if not m.relative]
    if len(mentions) == 1:
        lead = question[: mentions[0].start]
        span = mentions[0].span
        return time_range(None if _BEFORE.search(lead) else span, None if _AFTER.search(lead) else span, notes)
    if len(mentions) == 2 and re.search(r"\b(between|from)\b", question, re.IGNORECASE):
        return time_range(mentions[0].span, mentions[1].span, notes)
    return None


# --- where they do not say enough ------------------------------------------------------------------------------------

_CHINESE = re.compile(r"[\u4e00-\u9fff]")
# What was never said in these words has to be concluded from things that were: "Would Ana like a cruise?"
_CONCLUSION = re.compile(
    r"^(?:would|might|could|is it likely|do you think)\b|\b(?:likely|probably|might|personality|considered|would)\b"
    r"|会不会|可能|也许",
    re.IGNORECASE,
)
# Somebody or something that only the talk before the question names.
_UNNAMED = re.compile(r"\b(?:he|she|they|him|her|them|his|hers|theirs?)\b|\b(?:that|this|it)\s*\?", re.IGNORECASE)
_NAME = re.compile(r"(?<!^)\b[A-Z][a-z]")
_TWO_ENDS = re.compile(r"\bbetween\b|\bhow (?:many|much) \w+ (?:passed|later|earlier)\b", re.IGNORECASE)
LONG_QUESTION = 30  # words


def _doubts(question: str, kind: QuestionType, parts: int, *, concludes: bool) -> tuple[str, ...]:
    """What a model that understands the question might plan better, in words for people; empty for most questions."""
    readable = question.isascii() or _CHINESE.search(question) is not None or language(question) == "english"
    found = {
        "its language is not one that the rules read": not readable,
        "it asks for a conclusion, not for something that was said": concludes,
        "two things are compared, and the rules found one": parts == 1
        and (kind == "comparison" or (kind == "temporal" and _TWO_ENDS.search(question) is not None)),
        "it speaks of somebody without a name": _UNNAMED.search(question) is not None and not _NAME.search(question),
        "it is long": len(question.split()) > LONG_QUESTION,
    }
    return tuple(doubt for doubt, holds in found.items() if holds)


# --- ranges and texts -------------------------------------------------------------------------------------------------


def time_range(first: DateSpan | None, last: DateSpan | None, notes: list[str]) -> TimeRange | None:
    """From the beginning of `first` to the end of `last`; a range that ends before it starts is left out and noted."""
    since, until = first.start if first else None, last.end if last else None
    if since is None and until is None:
        return None
    if since is not None and until is not None and until < since:
        notes.append(f"the plan's time range ends before it starts ({since} to {until}) and was left out")
        return None
    return TimeRange(since, until)


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Without blanks, and without what differs from an earlier one in case alone."""
    seen: dict[str, str] = {}
    for text in texts:
        if text:
            seen.setdefault(text.casefold(), text)
    return tuple(seen.values())

"""A segment becomes records: one call to a local model, and code for everything that code can do.

Owns what happens around the call: what is asked anew in halves after a bad output, what is salvaged of a cut one, what
rules make of the statements that are still missing, repeats, the note for the next segment. What is asked stands in
`asking`, what code makes of a draft in `finish`. Every turn of a segment is read by a model or, failing that, by rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lychee_local import asking, dates, rules
from lychee_local.asking import ASKS_BY_TURN, Draft, Line, Style, states
from lychee_local.backends import LLM, Job, Request
from lychee_local.errors import GenerationFailed, PromptTooLong
from lychee_local.finish import Finisher
from lychee_local.lexicon import terms
from lychee_local.settings import EncodeSettings
from lychee_local.types import Record, Segment, Turn, Usage

__all__ = ["Encoded", "encode", "reference_context"]

# A statement is told if so much of its words stands in records of its turn (benchmarks/LOG.md, "Qwen 1.5B on a whole
# conversation").
_TOLD = 0.6

Outcome = Literal["model", "salvaged", "halved", "rules"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a segment yielded. `outcome`: as the model wrote it, its output cut, the segment halved on the way, or no
    record is the model's; `detail` says why, in words."""

    records: tuple[Record, ...]
    note: str
    usage: tuple[Usage, ...]
    outcome: Outcome
    detail: str


def reference_context(note: str, recent: Sequence[Record], settings: EncodeSettings) -> str:
    """What the next call of the same session may refer to: the note, and the newest distinct sentences.

    Cut to `reference_chars`; the oldest sentences go first, and the note is cut to `note_chars` before.
    """
    head = f"Known so far: {note[: settings.note_chars]}" if note else ""
    newest = list(dict.fromkeys(record.text for record in reversed(recent)))[: settings.reference_records]
    kept: list[str] = []
    left = settings.reference_chars - len(head)
    for text in newest:
        left -= len(text) + 3
        if left < 0:
            break
        kept.append(f"- {text}")
    return "\n".join([head] * bool(head) + ["Said shortly before:"] * bool(kept) + kept[::-1])[
        : settings.reference_chars
    ]


# --- the call ---------------------------------------------------------------------------------------------------------


def style_of(llm: LLM, settings: EncodeSettings) -> Style:
    if settings.representation == "summary":
        return "summary"
    return "list" if llm.prompt_style == "compact" and not settings.turns else llm.prompt_style


class _Run:
    """The calls of one segment and what they cost."""

    def __init__(
        self,
        segment: Segment,
        lines: Sequence[Line],
        llm: LLM,
        context: str,
        settings: EncodeSettings,
        told: Sequence[str],
    ) -> None:
        self._told = told
        self._segment, self._llm, self._settings = segment, llm, settings
        self._style = style_of(llm, settings)
        self.finisher = Finisher(segment, lines, context, dated=settings.dates, told=told)
        self.usage: list[Usage] = []
        self.notes: list[str] = []
        self.details: list[str] = []
        self.outcomes: set[Outcome] = set()

    def encode(self, lines: Sequence[Line], context: str, *, retry: bool) -> Job[list[Record]]:
        """Records of these lines, in order. Each level of recursion has half as much text, so it ends."""
        keys = asking.turn_keys(lines) if self._style in ASKS_BY_TURN else {}
        if self._style in ASKS_BY_TURN and not keys:
            return []
        messages = asking.messages(self._style, lines, keys, context, self._settings)
        room = self._settings.max_output_tokens
        if self._llm.count(messages) + room > self._llm.context:
            if context:
                return (yield from self.encode(lines, "", retry=retry))
            return (yield from self._in_halves(lines, "too long for the model", retry=retry))
        try:
            schema = asking.schema(self._style, lines, keys, choices=self._settings.choices)
            completion = yield Request(messages, "encode", room, schema)
        except PromptTooLong:
            return (yield from self._in_halves(lines, "too long for the model", retry=retry))
        except GenerationFailed as error:
            return (yield from self._again(lines, error.message, retry=retry))
        complete = completion.finish == "stop"
        drafts: list[Draft] = []
        note = ""
        if complete or self._settings.salvage:
            drafts, note = asking.read(self._style, completion.text, lines, keys, complete=complete)
        found = [record for draft in drafts if (record := self.finisher.record(draft, lines))]
        self.usage.append(completion.usage if complete or found else replace(completion.usage, outcome="failed"))
        if not complete and not found:
            return (yield from self._again(lines, f"output ended by {completion.finish}", retry=retry))
        self.notes += [note] * bool(note)
        if drafts and not found and self._style not in ASKS_BY_TURN:
            return self._by_rules(lines)  # nothing of it was true; a model that finds nothing to say is believed
        if not complete:
            self.outcomes.add("salvaged")
            self.details.append(f"output ended by {completion.finish}: {len(found)} records kept")
        if self._style in ASKS_BY_TURN:
            return found + self._passed_over([lines[number] for number in keys], found)
        last = max((index for record in found for index in record.turns), default=-1)
        return found + ([] if complete else self._by_rules([line for line in lines if line.turn.index > last]))

    def _passed_over(self, asked: Sequence[Line], found: Sequence[Record]) -> list[Record]:
        """What was stated in the turns that were asked about and is in no record of them: a small model writes down one
        statement of a turn, and not always the one that matters."""
        told: dict[int, set[str]] = {}
        for record in found:
            for index in record.turns:
                told.setdefault(index, set()).update(terms(record.text))
        missing: list[Record] = []
        for record in self._by_rules(asked):
            words = set(terms(_undated(record))) - set(terms(record.speaker or ""))
            if len(words & told.get(record.turns[0], set())) < _TOLD * len(words):
                missing.append(record)
        return missing

    def _again(self, lines: Sequence[Line], why: str, *, retry: bool) -> Job[list[Record]]:
        if retry:
            return (yield from self._in_halves(lines, why, retry=False))
        self.details.append(why)
        return self._by_rules(lines)

    def _in_halves(self, lines: Sequence[Line], why: str, *, retry: bool) -> Job[list[Record]]:
        halves = _halves(lines)
        self.details.append(why)
        if halves is None:
            return self._by_rules(lines)
        self.outcomes.add("halved")
        found: list[Record] = []
        for half in halves:
            found += yield from self.encode(half, "", retry=retry)
        return found

    def _by_rules(self, lines: Sequence[Line]) -> list[Record]:
        return [
            record
            for line in lines
            for record in rules.encode_by_rules(self._segment, [line.turn], text=line.text, recalled=self._told)
        ]


def _undated(record: Record) -> str:
    """The text without its dates, which a model may write in other words, or leave to code."""
    text = record.text
    for mention in dates.find(text, record.said.date() if record.said is not None else None):
        text = text.replace(mention.text, " ").replace(f"({mention.label})", " ")
    return text


def _halves(lines: Sequence[Line]) -> tuple[Sequence[Line], Sequence[Line]] | None:
    """Two halves by turns, or of the only turn's text; None if that is too short for a prompt ever to hold it."""
    if len(lines) > 1:
        middle = len(lines) // 2
        return lines[:middle], lines[middle:]
    (line,) = lines
    if len(line.text) < 200:
        return None
    middle = line.text.find(" ", len(line.text) // 2, len(line.text) * 3 // 4) + 1 or len(line.text) // 2
    return [replace(line, text=line.text[:middle])], [replace(line, text=line.text[middle:])]


_DETOURS: tuple[Outcome, ...] = ("halved", "salvaged")


def encode(
    segment: Segment,
    turns: Sequence[Turn],
    *,
    llm: LLM,
    context: str,
    settings: EncodeSettings,
    recalled: Sequence[str] = (),
) -> Job[Encoded]:
    """Encode one segment, whose `turns` are given, with the reference `context` of its session ("" for none); where the
    assistant says again what is `recalled`, texts of the memory, that makes no record.

    A job (see `backends.jobs`) for `llm`, which is asked here only what fits into it. Never fails for what a model
    wrote: a bad output is salvaged, retried in halves, then replaced by rules.
    """
    lines = [Line(turn, text) for turn in turns if (text := rules.slice_of(turn, segment)).strip()]
    if not lines:
        return Encoded((), "", (), "model", "nothing was said")
    told = [turn.text for turn in turns if turn.role == "user"]
    lines, again = _without_repeats(lines)
    run = _Run(segment, lines, llm, context, settings, [*recalled, *told])
    made = sorted((yield from run.encode(lines, context, retry=True)), key=lambda record: record.turns[0])
    records = _each_once(made, again)
    if run.finisher.rejected:
        run.details.append(f"rejected as not said: {run.finisher.rejected}")
    outcome: Outcome = next((outcome for outcome in _DETOURS if outcome in run.outcomes), "model")
    if records and all(record.origin == "rules" for record in records):
        outcome = "rules"
    note = "\n".join(run.notes) or _who_is_who(lines)
    return Encoded(records, note[: settings.note_chars], tuple(run.usage), outcome, "; ".join(run.details))


def _without_repeats(lines: Sequence[Line]) -> tuple[list[Line], dict[int, list[int]]]:
    """The lines without statements that the same person made before, and where each of these was made again."""
    first: dict[tuple[str, str], Line] = {}
    again: dict[int, list[int]] = {}
    kept: list[Line] = []
    for line in lines:
        earlier = first.setdefault((line.turn.name, " ".join(line.text.split())), line)
        if earlier is line or not states(line, ()):
            kept.append(line)
        else:
            again.setdefault(earlier.turn.index, []).append(line.turn.index)
    return kept, again


def _each_once(made: Sequence[Record], again: Mapping[int, Sequence[int]]) -> tuple[Record, ...]:
    """Equal records as one, with all turns that say it."""
    records: dict[str, Record] = {}
    for record in made:
        turns = tuple(sorted({*record.turns, *(later for index in record.turns for later in again.get(index, ()))}))
        whole = record if turns == record.turns else replace(record, turns=turns, chars=None)
        records[record.id] = rules.with_source(records[record.id], whole) if record.id in records else whole
    return tuple(records.values())


def _who_is_who(lines: Sequence[Line]) -> str:
    """The note that code can write: who speaks, and which short names stand for them."""
    speakers = rules.unique([line.turn.speaker for line in lines if line.turn.speaker])
    words = {word for line in lines for word in re.findall(r"\b[A-Z][a-z]{2,}\b", line.text)}
    short = [
        f"{word} is {name}" for name in speakers for word in sorted(words) if name.startswith(word) and word != name
    ]
    return ". ".join([f"Speakers: {', '.join(speakers)}", *short]) + "." if speakers else ""

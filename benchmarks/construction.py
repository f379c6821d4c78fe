"""What construction makes of a conversation: segments and records, the facts they cover, their faults, and their cost.

Coverage: an annotated fact counts as covered at c if a record whose evidence contains one of the fact's turns has a
cosine of at least c to it, under the memory's own embedder. A turn's own words, unencoded, are the baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from benchmarks.faults import Heard, lower_case, unresolved_date, wrong_speaker
from benchmarks.questions import Fact
from lychee_local import rules
from lychee_local.backends import Vectors
from lychee_local.prose import statements
from lychee_local.types import Record, Segment, Turn, Usage

COSINES = (0.6, 0.7)


@dataclass(frozen=True, slots=True)
class Built:
    """One conversation after construction, `seconds` being what it took. Without segments the turns themselves are all
    there is."""

    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...] = ()
    records: tuple[Record, ...] = ()
    usage: tuple[Usage, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    record: Record
    found: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Counts of one conversation, or of several: counts add up, shares do not. `covered` has one count per cosine,
    `covered_by_model` the same for the records that a model made, without those that rules put in for it.

    `asked` are the segments that state something, where a model was asked at all; `unanswered` those of them without a
    record that a model made.
    """

    turns: int = 0
    segments: int = 0
    records: int = 0
    by_model: int = 0
    facts: int = 0
    covered: Counter[float] = field(default_factory=Counter)
    covered_by_model: Counter[float] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    unanswered: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __add__(self, other: Measured) -> Measured:
        return Measured(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def row(self) -> dict[str, object]:
        """Shares are in percent: of the facts, of the records, and `unanswered` of the segments asked about."""
        return {
            "turns": self.turns,
            "segments": self.segments,
            "facts": self.facts,
            **{f"covered_{c}": _percent(self.covered[c], self.facts) for c in COSINES},
            **{f"covered_by_model_{c}": _percent(self.covered_by_model[c], self.facts) for c in COSINES},
            "records": self.records,
            "by_model": _percent(self.by_model, self.records),
            "records_per_turn": round(self.records / max(1, self.turns), 2),
            "wrong_speaker": _percent(self.faults["wrong_speaker"], self.records),
            "unresolved_date": _percent(self.faults["unresolved_date"], self.records),
            "invented": _percent(self.faults["invented"], self.records),
            "unanswered": _percent(self.unanswered, self.asked),
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "construction_tokens": self.prompt_tokens + self.output_tokens,
            "seconds": round(self.seconds, 1),
            "outcomes": dict(self.outcomes),
        }


def measure(
    built: Built, facts: Sequence[Fact], embed: Callable[[Sequence[str]], Vectors]
) -> tuple[Measured, tuple[Fault, ...]]:
    """Everything that is counted of a conversation, and each fault that was counted. Facts whose turns are not among
    the turns built from are left out."""
    ref = {(turn.session, turn.index): turn.ref for turn in built.turns}
    stored = set(ref.values())
    facts = [fact for fact in facts if stored.intersection(fact.gold)]
    if built.segments:
        items = [({ref[r.session, i] for i in r.turns}, r.text) for r in built.records]
    else:
        items = [({turn.ref}, turn.line) for turn in built.turns]
    similar = _cosines(facts, items, embed)
    made = similar[:, [i for i, record in enumerate(built.records) if record.origin == "model"]]
    faults = tuple(_faults(built))
    by_model = {record.segment for record in built.records if record.origin == "model"}
    calls = [u for u in built.usage if u.purpose == "encode"]
    asked = [segment.id for segment, turns in _with_turns(built) if calls and _states_something(turns)]
    measured = Measured(
        turns=len(built.turns),
        segments=len(built.segments),
        records=len(built.records),
        by_model=sum(record.origin == "model" for record in built.records),
        facts=len(facts),
        covered=_covered(similar),
        covered_by_model=_covered(made),
        faults=Counter(fault.kind for fault in faults),
        asked=len(asked),
        unanswered=sum(segment not in by_model for segment in asked),
        calls=len(calls),
        prompt_tokens=sum(u.prompt_tokens for u in calls),
        cached_tokens=sum(u.cached_tokens for u in calls),
        output_tokens=sum(u.output_tokens for u in calls),
        outcomes=Counter(u.outcome for u in calls),
        seconds=built.seconds,
    )
    return measured, faults


def show(rows: Mapping[str, Measured]) -> None:
    """One line a conversation, and the lines added up."""
    columns = {
        "facts": "facts",
        "covered_0.6": "0.6 %",
        "covered_0.7": "0.7 %",
        "covered_by_model_0.7": "model 0.7 %",
        "records": "records",
        "by_model": "by model %",
        "records_per_turn": "a turn",
        "wrong_speaker": "speaker %",
        "unresolved_date": "undated %",
        "invented": "invented %",
        "unanswered": "unanswered %",
        "calls": "calls",
        "construction_tokens": "tokens",
        "seconds": "s",
    }
    print("  ".join([f"{'':<8}", *columns.values()]))
    for name, measured in rows.items():
        cells = measured.row()
        print("  ".join([f"{name:<8}", *(f"{cells[key]!s:>{len(head)}}" for key, head in columns.items())]))


def _percent(part: int, whole: int) -> float:
    return round(100 * part / max(1, whole), 1)


def _cosines(
    facts: Sequence[Fact],
    items: Sequence[tuple[set[str | None], str]],
    embed: Callable[[Sequence[str]], Vectors],
) -> Vectors:
    """Of each fact to each item, shape (facts, items); -1 where the item rests on none of the fact's turns."""
    similar = embed([fact.text for fact in facts]) @ embed([text for _, text in items]).T
    allowed = [[not sources.isdisjoint(fact.gold) for sources, _ in items] for fact in facts]
    return np.where(np.array(allowed, dtype=bool).reshape(similar.shape), similar, np.float32(-1.0))


def _covered(similar: Vectors) -> Counter[float]:
    best = similar.max(axis=1, initial=-1.0)
    return Counter({c: int((best >= c).sum()) for c in COSINES})


def _with_turns(built: Built) -> Iterator[tuple[Segment, list[Turn]]]:
    by_place = {(turn.session, turn.index): turn for turn in built.turns}
    for segment in built.segments:
        places = ((segment.session, index) for index in range(segment.start, segment.end + 1))
        yield segment, [by_place[place] for place in places if place in by_place]


def _states_something(turns: Sequence[Turn]) -> bool:
    return any(True for turn in turns for _ in statements(turn.text))


def _faults(built: Built) -> Iterator[Fault]:
    by_place = {(turn.session, turn.index): turn for turn in built.turns}
    speakers = rules.unique([turn.speaker for turn in built.turns if turn.speaker])
    ordinary = lower_case(built.turns)
    by_segment: dict[str, list[Record]] = {}
    for record in built.records:
        by_segment.setdefault(record.segment, []).append(record)
    for segment in built.segments:
        said = [turn for turn in built.turns if turn.session == segment.session and turn.index <= segment.end]
        heard = Heard(said, ordinary)
        for record in by_segment.get(segment.id, ()):
            if wrong_speaker(record, [by_place[record.session, index] for index in record.turns], speakers):
                yield Fault("wrong_speaker", record)
            if unresolved_date(record.text):
                yield Fault("unresolved_date", record)
            if names := heard.invented(record.text):
                yield Fault("invented", record, ", ".join(names))

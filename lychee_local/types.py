"""Frozen values passed between the stages, and nothing else.

Owns the vocabulary: message, turn, exchange, segment, record, node, route, plan, candidate, evidence. Holds no state,
touches no disk, loads no model. Sequences are tuples, scores name their scale (see each field), and every identifier
contains its source, so the same sentence from two sessions is two records.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Literal

from lychee_local.errors import BadInput
from lychee_local.trace import Trace

Role = Literal["user", "assistant", "system", "tool"]
ROLES: tuple[Role, ...] = ("user", "assistant", "system", "tool")

MemoryType = Literal["fact", "preference", "event", "constraint", "procedure", "failure_pattern", "tool_affordance"]
MEMORY_TYPES: tuple[MemoryType, ...] = (
    "fact",
    "preference",
    "event",
    "constraint",
    "procedure",
    "failure_pattern",
    "tool_affordance",
)

QuestionType = Literal[
    "single", "aggregate", "temporal", "comparison", "personalized_advice", "prior_assistant_response", "other"
]
QUESTION_TYPES: tuple[QuestionType, ...] = (
    "single",
    "aggregate",
    "temporal",
    "comparison",
    "personalized_advice",
    "prior_assistant_response",
    "other",
)

NodeKind = Literal["entity", "topic", "entity_topic", "temporal", "event_frame"]
Precision = Literal["day", "month", "year", "interval"]
Purpose = Literal["encode", "plan", "answer", "judge", "probe"]
PURPOSES: tuple[Purpose, ...] = ("encode", "plan", "answer", "judge", "probe")
CutReason = Literal[
    "semantic_boundary",
    "capacity_limit",
    "target_length",
    "exchange_limit",
    "session_flush",
    "oversized_turn_fragment",
    "eager",
]


# --- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DateSpan:
    """Calendar days from `start` to `end`, both included, with the precision they were said in."""

    start: date
    end: date
    precision: Precision

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"a date span ends before it starts: {self.start} to {self.end}")

    def __str__(self) -> str:
        """ISO 8601: 2023-05-08, 2023-05, 2023, or 2023-05-01/2023-05-07."""
        if self.precision == "day":
            return self.start.isoformat()
        if self.precision == "month":
            return f"{self.start.year:04d}-{self.start.month:02d}"
        if self.precision == "year":
            return f"{self.start.year:04d}"
        return f"{self.start.isoformat()}/{self.end.isoformat()}"


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A temporal filter: days from `since` to `until`, both included; None leaves that end open."""

    since: date | None = None
    until: date | None = None

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            day = getattr(self, name)
            if isinstance(day, datetime):
                object.__setattr__(self, name, day.date())
            elif day is not None and not isinstance(day, date):
                raise BadInput(f"{name}={day!r} is no day", hint="give a datetime.date, such as date(2024, 5, 31)")

    def overlaps(self, start: date, end: date) -> bool:
        return (self.until is None or start <= self.until) and (self.since is None or end >= self.since)


@dataclass(frozen=True, slots=True)
class Scope:
    """Which turns and records a search may find; an empty field allows all. `kinds` limits records, `roles` turns.

    `said` is the time of saying, in calendar days; what has no time is outside of every time. A memory "as of" a day is
    `said=TimeRange(until=day)`.
    """

    sessions: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    kinds: tuple[MemoryType, ...] = ()
    roles: tuple[Role, ...] = ()
    said: TimeRange | None = None

    def __post_init__(self) -> None:
        for name in ("sessions", "speakers", "kinds", "roles"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise BadInput(f"{name}={given!r} is one text", hint=f"give several in a tuple, one as ({given!r},)")
            object.__setattr__(self, name, tuple(given))

    def holds(self, item: Turn | Record) -> bool:
        """Whether `item` is inside."""
        at = item.said if isinstance(item, Record) else item.at
        allowed: tuple[str, ...] = self.kinds if isinstance(item, Record) else self.roles
        return (
            (not self.sessions or item.session in self.sessions)
            and (not self.speakers or item.speaker in self.speakers)
            and (not allowed or (item.kind if isinstance(item, Record) else item.role) in allowed)
            and (
                self.said is None
                or self.said == TimeRange()
                or (at is not None and self.said.overlaps(at.date(), at.date()))
            )
        )


@dataclass(frozen=True, slots=True)
class Temporal:
    """The dates of a record: when it happened, and from when to when it holds."""

    t_ref: DateSpan | None = None
    t_valid_from: DateSpan | None = None
    t_valid_to: DateSpan | None = None

    @property
    def spans(self) -> tuple[DateSpan, ...]:
        return tuple(s for s in (self.t_ref, self.t_valid_from, self.t_valid_to) if s is not None)


# --- what is said ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """What a caller hands to `remember`: one utterance that has no place in a session yet.

    `at` is when it was said; without an offset it is the speaker's own wall clock, and None means unknown (never 1970).
    `ref` is the caller's own identifier; a second message with the same session and ref is the same message.
    """

    text: str
    role: Role = "user"
    speaker: str | None = None
    at: datetime | None = None
    session: str | None = None
    ref: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A message with its place: `index` counts from 0 inside the session and is never reused or renumbered."""

    session: str
    index: int
    text: str
    role: Role = "user"
    speaker: str | None = None
    at: datetime | None = None
    ref: str | None = None

    @property
    def id(self) -> str:
        return turn_id(self.session, self.index)

    @property
    def name(self) -> str:
        """Who speaks: the speaker's name where it is known, else the role."""
        return self.speaker or self.role

    @property
    def line(self) -> str:
        """The text that is embedded and shown: the name, a colon, the words."""
        prefix = f"{self.name}: "
        return self.text if self.text.startswith(prefix) else prefix + self.text


def turn_id(session: str, index: int) -> str:
    return f"turn:{session}:{index}"


def turn_place(turn_id: str) -> tuple[str, int]:
    """The session and the index in a turn's id."""
    session, _, index = turn_id.removeprefix("turn:").rpartition(":")
    return session, int(index)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The unit of segmentation: a user turn and the replies to it (turns `start` to `end` of one session, included).

    `chars` is set when the exchange is a fragment of one oversized turn: the slice [from, to) of that turn's text.
    """

    session: str
    start: int
    end: int
    text: str
    tokens: int
    chars: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """What the boundary decision saw (docs/method.md 1.4). `surprise` and `drop` are 1 - cosine scales."""

    surprise: float
    drop: float
    absolute: float
    robust: float
    cohesion: float
    length: float
    turns: float
    score: float
    probability: float


@dataclass(frozen=True, slots=True)
class Decision:
    """One logged step of the segmenter for one exchange: whether it was cut off from what came before, and why."""

    exchange: Exchange
    action: Literal["start", "append", "cut"]
    reason: CutReason | None
    signals: Signals | None
    tokens_before: int
    exchanges_before: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive exchanges of one session that are encoded in one LLM call (turns `start` to `end`, included)."""

    session: str
    start: int
    end: int
    reason: CutReason
    tokens: int
    exchanges: int
    probability: float
    chars: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        part = "" if self.chars is None else f"@{self.chars[0]}"
        return f"segment:{self.session}:{self.start}-{self.end}{part}"


# --- what is kept ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """One typed, self-contained memory. `turns` are sorted absolute turn indexes of `session` that support it; `chars`
    is the slice [from, to) of the text of a single such turn, where it is known."""

    session: str
    text: str
    kind: MemoryType
    turns: tuple[int, ...]
    segment: str
    entities: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    temporal: Temporal = field(default_factory=Temporal)
    role: Literal["user", "assistant", "both", ""] = ""
    speaker: str | None = None
    said: datetime | None = None
    origin: Literal["model", "rules"] = "model"
    chars: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return "record:" + hashlib.sha256(f"{self.session}\0{self.text}".encode()).hexdigest()[:24]

    @property
    def embedded_text(self) -> str:
        """The normalised text of the paper's Table 12: type, colon, sentence."""
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Node:
    """An index entry that points to records: an entity, a topic, a pair of both, a date, or a whole segment."""

    kind: NodeKind
    key: str
    label: str
    records: tuple[str, ...]
    when: DateSpan | None = None

    @property
    def id(self) -> str:
        return node_id(self.kind, self.key)


def node_id(kind: NodeKind, key: str) -> str:
    return f"node:{kind}:" + hashlib.sha256(f"{kind}:{key}".encode()).hexdigest()[:24]


# --- a question ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constraint:
    kind: Literal["time", "entity", "status", "relation", "attribute", "other"]
    value: str


@dataclass(frozen=True, slots=True)
class Route:
    """One line of evidence that the question needs."""

    id: str
    goal: str
    queries: tuple[str, ...]
    constraints: tuple[Constraint, ...] = ()
    when: TimeRange | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a question is searched (docs/method.md 4.2). `source` says who made it, `doubts` where rules are unsure of
    its wording, `concludes` that it asks for a conclusion, not for something that was said, `note` why a fallback was
    taken."""

    question: str
    question_type: QuestionType
    routes: tuple[Route, ...]
    target: str
    queries: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    when: TimeRange | None = None
    reason: str = ""
    source: Literal["llm", "rules", "none"] = "none"
    doubts: tuple[str, ...] = ()
    concludes: bool = False
    note: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text that is searched for any route, once each: they are embedded in one batch."""
        return tuple(dict.fromkeys(text for route in self.routes for text in self.variants(route)))

    def variants(self, route: Route) -> tuple[str, ...]:
        """The texts that are searched for a route (docs/method.md 5.3): question, goal, queries; at most eight.

        Constraints are left out on purpose: as queries they flood the pool with everything about one name.
        """
        seen: dict[str, str] = {}
        for text in (self.question, route.goal, *route.queries):
            if text.strip():
                seen.setdefault(text.strip().casefold(), text.strip())
        return tuple(seen.values())[:8]


CandidateKind = Literal["record", "turn", "window"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something recalled for one route, with everything later stages need to rank and show it.

    Scales: `field_score` is the channel score f of docs/method.md 5.4 in [0, 1]; `similarity` is the calibrated r in
    [0, 1]; `relevance` is the reranker's in [0, 1] or None; `score` is the route-level s (5.8), `fused` s_final (5.9).
    """

    id: str
    kind: CandidateKind
    text: str
    session: str
    turns: tuple[int, ...]
    field_score: float
    similarity: float = 0.0
    relevance: float | None = None
    score: float = 0.0
    fused: float = 0.0
    speaker: str | None = None
    role: str = ""
    memory_type: MemoryType | None = None
    entities: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    temporal: Temporal = field(default_factory=Temporal)
    said: datetime | None = None
    channels: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    chain: int = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """One item that is shown to the caller and to the answer model, with its provenance.

    `turns` are turn ids ("turn:SESSION:INDEX"), `refs` the caller's own ids of the same turns where there are any,
    `dates` what the item is about, `said` when it was said. `score` is s_final in [0, 1] and orders the list, except
    that items of a chain, numbered by `chain` from 1, stand first, chain by chain as they joined (docs/method.md 8).
    """

    id: str
    kind: CandidateKind
    text: str
    score: float
    session: str
    turns: tuple[str, ...]
    refs: tuple[str, ...] = ()
    speaker: str | None = None
    memory_type: MemoryType | None = None
    dates: tuple[DateSpan, ...] = ()
    said: datetime | None = None
    similarity: float = 0.0
    relevance: float | None = None
    channels: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    chain: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """One item of a chain as it joined. `relevance` is its calibrated similarity r to the question and `consistency`
    that to the chain so far, both in [0, 1]; `gate` is what the two make; an anchor's gate is its relevance."""

    id: str
    relevance: float
    consistency: float
    gate: float


@dataclass(frozen=True, slots=True)
class Chain:
    """A line of evidence. It `ended` because the best gate left, `refused`, fell too far ("gate"), because it was as
    long as allowed ("length"), or because the pool was used up ("pool")."""

    links: tuple[Link, ...]
    ended: Literal["gate", "length", "pool"]
    refused: float = 0.0


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What one LLM call cost. Tokens as the model counts them; `cached_tokens` is the part of the prompt reused.

    `session` is the one that was encoded, None for a question; `at` is when the call was logged, with its offset, and
    None in lines that were written before it was kept.
    """

    purpose: Purpose
    model: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    seconds: float = 0.0
    outcome: str = "ok"
    session: str | None = None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """`finish`: the model ended by itself ("stop"), was cut at the limit ("length"), or went in circles ("loop")."""

    text: str
    finish: Literal["stop", "length", "loop"]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Calibration:
    """Where an embedder's cosines lie (docs/method.md 1.4): the segmenter's and the similarity's constants for it.

    surprise z = (s - surprise_centre) / surprise_scale; cohesion signal = drop / cohesion_scale;
    similarity r = clip((cos - floor) / (1 - floor), 0, 1), which with floor 0.5 is the paper's clip(2 cos - 1, 0, 1).
    """

    surprise_centre: float = 0.20
    surprise_scale: float = 0.14
    cohesion_scale: float = 0.06
    similarity_floor: float = 0.5


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remembered:
    """What one `remember` or `flush` did. `skipped` counts turns that were stored already."""

    turns: tuple[Turn, ...]
    skipped: int
    segments: tuple[Segment, ...]
    records: tuple[Record, ...]
    usage: tuple[Usage, ...]

    @property
    def tokens(self) -> int:
        """What the calls took, prompt and output together."""
        return sum(u.prompt_tokens + u.output_tokens for u in self.usage)

    def plus(self, other: Remembered) -> Remembered:
        """What this and, after it, `other` did."""
        return Remembered(
            self.turns + other.turns,
            self.skipped + other.skipped,
            self.segments + other.segments,
            self.records + other.records,
            self.usage + other.usage,
        )


@dataclass(frozen=True, slots=True)
class Reencoded:
    """What one `reencode` did. `segments` got new `records`; `kept` are those for which the encoder had nothing, and
    which therefore keep what they had; `skipped` counts those that it had encoded already."""

    segments: tuple[Segment, ...]
    kept: tuple[Segment, ...]
    skipped: int
    records: tuple[Record, ...]
    usage: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a long `remember`, `flush`, `consolidate` or `reencode` stands. `done` and `total` count turns ("store") or
    segments ("encode"); `records`, `output_tokens` and `seconds` sum over this call so far; `segment` was just
    finished."""

    stage: Literal["store", "encode"]
    done: int
    total: int
    segments: int
    records: int
    output_tokens: int
    seconds: float
    segment: Segment | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Some LLM calls, summed."""

    calls: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stats:
    """What one user's memory holds and what it cost. `pending` counts finished segments without records yet;
    `construction_tokens` and `query_tokens` follow docs/method.md 7.3: input plus output of every generative call."""

    user: str
    folder: str
    sessions: int
    turns: int
    segments: int
    pending: int
    records: int
    nodes: int
    bytes: int
    embedder: str
    usage: dict[Purpose, Spent]
    construction_tokens: int
    query_tokens: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one `forget` took away. `turns` and `records` are ids, `nodes` the labels of index entries that nothing
    points to any more, `waiting` the segments that lost a turn and are to be encoded anew from what is left.

    `removed` counts lines and rows by file; `bytes_before` and `bytes_after` are the whole folder's, 0 where it was not
    compacted (yet). `residues` names every file in which the search of the raw bytes still found something forgotten;
    empty is the proof that it is gone. `elsewhere` are those ids whose very words, or whose vector, something that was
    kept has too: the same sentence said twice.
    """

    turns: tuple[str, ...]
    records: tuple[str, ...]
    nodes: tuple[str, ...]
    waiting: tuple[Segment, ...]
    dry_run: bool
    compacted: bool = False
    removed: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    residues: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recall:
    """The evidence for a question, best first. `notes` name everything that did not run as planned; `chains` are those
    that the evidence was grown into, with all their links; `trace` is there where an explanation was asked for."""

    question: str
    evidence: tuple[Evidence, ...]
    plan: Plan
    usage: tuple[Usage, ...] = ()
    notes: tuple[str, ...] = ()
    chains: tuple[Chain, ...] = ()
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`cited` are ids of items in `evidence`, in the order of the citation marks in the model's text; `plan`, `chains`
    and `trace` are those of the recall."""

    question: str
    text: str
    evidence: tuple[Evidence, ...]
    cited: tuple[str, ...]
    plan: Plan
    usage: tuple[Usage, ...]
    notes: tuple[str, ...] = ()
    chains: tuple[Chain, ...] = ()
    trace: Trace | None = None

"""Where an embedder's cosines lie, measured on conversations: its `Calibration`.

Owns the statistics (docs/method.md 1.4). Cuts with the real segmenter and embeds with the embedder it is given; knows
no store, no card and no file. The same conversations and vectors give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from lychee_local.backends import Embedder, Vectors
from lychee_local.errors import BadInput
from lychee_local.segment import Segmenter, embedding_text, exchanges
from lychee_local.settings import TURNS_PER_SEGMENT, SegmentSettings
from lychee_local.types import Calibration, Decision, Exchange, Message, Turn

# With fewer exchanges a quartile is the matter of two or three of them.
_LEAST_EXCHANGES = 100
# Two thousand exchanges make two million pairs; more of them do not move their median.
_COMPARED = 2_000
_EMBEDDED_AT_ONCE = 64
# Centre and scale depend on each other through the cuts. Rounded to hundredths they settle in two or three rounds.
_ROUNDS = 8
_HIGHEST_CENTRE = 200  # hundredths: a cosine of -1


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a corpus says about an embedder. `turns_per_segment` and `segments` are those under `calibration`; `before`
    is the calibration the embedder has, and `turns_per_segment_before` what it gives. `unrelated` names the pairs of
    exchanges that the similarity floor was taken from: of different conversations, or of different sessions."""

    embedder: str
    calibration: Calibration
    turns_per_segment: float
    segments: int
    before: Calibration
    turns_per_segment_before: float
    conversations: int
    turns: int
    exchanges: int
    unrelated: Literal["conversations", "sessions"]


@dataclass(frozen=True, slots=True)
class _Session:
    conversation: int
    turns: int
    exchanges: tuple[Exchange, ...]
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class _Cut:
    """The whole corpus, cut under one calibration."""

    segments: int
    turns_per_segment: float
    decisions: tuple[Decision, ...]

    @property
    def surprises(self) -> list[float]:
        return [d.signals.surprise for d in self.decisions if d.signals]

    @property
    def drops(self) -> list[float]:
        return [d.signals.drop for d in self.decisions if d.signals]


def calibrate(
    conversations: Sequence[Sequence[Message]],
    embedder: Embedder,
    *,
    settings: SegmentSettings | None = None,
    turns_per_segment: float = TURNS_PER_SEGMENT,
    on_progress: Callable[[int, int], None] | None = None,
) -> Calibrated:
    """The calibration of `embedder` on these conversations. `on_progress` gets how many exchanges are embedded, of how
    many.

    Raises:
        BadInput: too little was said, all of it in one session, or segments of `turns_per_segment` turns cannot be had.
    """
    settings = settings or SegmentSettings()
    corpus = _embedded(conversations, embedder, settings, on_progress or (lambda done, total: None))
    count = sum(len(session.exchanges) for session in corpus)
    if count - len(corpus) < _LEAST_EXCHANGES:
        raise BadInput(
            f"{count} exchanges in {len(corpus)} sessions are too few: {_LEAST_EXCHANGES} must follow another one",
            hint="give more conversations",
        )
    floor, unrelated = _floor(corpus)
    found = replace(Calibration(), similarity_floor=floor)
    for _ in range(_ROUNDS):
        centred = replace(found, surprise_centre=_centre(corpus, found, settings, turns_per_segment))
        cut = _cut(corpus, centred, settings)
        if not cut.surprises:
            raise BadInput("every exchange is a segment by itself, whatever its subject", hint="ask for larger ones")
        scale, cohesion = float(np.std(cut.surprises)), float(np.quantile(cut.drops, 0.75))
        before, found = (
            found,
            replace(centred, surprise_scale=max(0.01, round(scale, 2)), cohesion_scale=max(0.001, round(cohesion, 3))),
        )
        if found == before:
            break
    cut = _cut(corpus, found, settings)
    return Calibrated(
        embedder=embedder.name,
        calibration=found,
        turns_per_segment=round(cut.turns_per_segment, 2),
        segments=cut.segments,
        before=embedder.calibration,
        turns_per_segment_before=round(_cut(corpus, embedder.calibration, settings).turns_per_segment, 2),
        conversations=len(conversations),
        turns=sum(session.turns for session in corpus),
        exchanges=count,
        unrelated=unrelated,
    )


def _embedded(
    conversations: Sequence[Sequence[Message]],
    embedder: Embedder,
    settings: SegmentSettings,
    report: Callable[[int, int], None],
) -> list[_Session]:
    sessions: list[tuple[int, int, tuple[Exchange, ...]]] = []
    for number, messages in enumerate(conversations):
        by_session: dict[str, list[Turn]] = {}
        for m in messages:
            turns = by_session.setdefault(m.session or "", [])
            turns.append(Turn(m.session or "", len(turns), m.text, m.role, m.speaker))
        sessions += [
            (number, len(turns), exchanges(turns, max_tokens=settings.max_tokens)) for turns in by_session.values()
        ]
    texts = [embedding_text(exchange) for _, _, said in sessions for exchange in said]
    rows: list[Vectors] = []
    for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
        rows.append(embedder.embed(texts[start : start + _EMBEDDED_AT_ONCE]))
        report(min(start + _EMBEDDED_AT_ONCE, len(texts)), len(texts))
    vectors = np.concatenate(rows) if rows else np.zeros((0, embedder.dimension), dtype=np.float32)
    found, start = [], 0
    for number, turn_count, said in sessions:
        found.append(_Session(number, turn_count, said, vectors[start : start + len(said)]))
        start += len(said)
    return found


def _cut(corpus: Sequence[_Session], calibration: Calibration, settings: SegmentSettings) -> _Cut:
    """As if each session had been remembered and then flushed."""
    segments = 0
    decisions: list[Decision] = []
    for session in corpus:
        if not session.exchanges:
            continue
        segmenter = Segmenter(settings, calibration)
        made, cut = segmenter.feed(session.exchanges, session.vectors)
        segments += len(cut) + len(segmenter.flush(session.exchanges[0].session))
        decisions += made
    return _Cut(segments, sum(session.turns for session in corpus) / segments, tuple(decisions))


def _centre(corpus: Sequence[_Session], calibration: Calibration, settings: SegmentSettings, wanted: float) -> float:
    """The surprise centre, in hundredths, whose segments have the number of turns nearest to `wanted`, the lower of two
    that are as near: a higher centre means fewer cuts, so that it is found by halving."""

    @cache
    def turns_at(hundredths: int) -> float:
        return _cut(corpus, replace(calibration, surprise_centre=hundredths / 100), settings).turns_per_segment

    low, high = 0, _HIGHEST_CENTRE
    fewest, most = turns_at(low), turns_at(high)
    if not fewest <= wanted <= most:
        raise BadInput(
            f"whatever the calibration, a segment of these conversations has {fewest:.1f} to {most:.1f} turns, not "
            f"{wanted:g}",
            hint="ask for a number in between",
        )
    while high - low > 1:
        middle = (low + high) // 2
        if turns_at(middle) < wanted:
            low = middle
        else:
            high = middle
    return min((low, high), key=lambda hundredths: (abs(turns_at(hundredths) - wanted), hundredths)) / 100


def _floor(corpus: Sequence[_Session]) -> tuple[float, Literal["conversations", "sessions"]]:
    """The median cosine of two exchanges that have nothing to do with each other, at least 0, in hundredths."""
    several = len({session.conversation for session in corpus if session.exchanges}) > 1
    owners = [
        session.conversation if several else number for number, session in enumerate(corpus) for _ in session.exchanges
    ]
    step = max(1, -(-len(owners) // _COMPARED))
    owner = np.asarray(owners)[::step]
    vectors = np.concatenate([session.vectors for session in corpus])[::step]
    cosines = (vectors @ vectors.T)[owner[:, None] < owner[None, :]]
    if not len(cosines):
        raise BadInput("all was said in one session", hint="give conversations of at least two sessions")
    return max(0.0, round(float(np.median(cosines)), 2)), "conversations" if several else "sessions"

"""What a recall did, step by step: the values of an explanation, and the recorder that collects them.

A stage is told where to write by a `Recorder` argument and hands it what it has anyway; `OFF` throws it away. Knows
ids, ranks and scores, and nothing of what they mean: each score is named by its scale (docs/method.md 9).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

TEXT_SHOWN = 120  # characters of an item in a trace; its id leads to the rest


@dataclass(frozen=True, slots=True)
class Hit:
    """One find of one channel; `rank` counts from 1."""

    id: str
    rank: int
    score: float


@dataclass(frozen=True, slots=True)
class ChannelHits:
    """What one channel found for one text of a route, best first; `scale` names what the scores are."""

    route: str
    channel: str
    query: str
    scale: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates as one stage left them, best first; `route` is empty where it joined all routes."""

    stage: str
    route: str
    scale: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one candidate: its rank after each stage that held it (the best of all routes), whether it is
    shown, and which stage decided that for what reason. `text` is its beginning."""

    id: str
    kind: str
    text: str
    ranks: dict[str, int]
    kept: bool
    stage: str
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole recall: channels and rankings in the order of running, the candidates with those shown first, and the
    wall time of each stage in seconds, in the order of running."""

    channels: tuple[ChannelHits, ...]
    rankings: tuple[Ranking, ...]
    candidates: tuple[Fate, ...]
    seconds: dict[str, float]


class Ranked(Protocol):
    """What a ranking holds: a candidate, as far as an explanation goes. Scores are read by name."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...


@dataclass(slots=True)
class Recorder:
    """Collects one recall. Where `on` is False every call returns at once, and nothing is computed for it."""

    on: bool = True
    _channels: list[ChannelHits] = field(default_factory=list)
    _rankings: list[Ranking] = field(default_factory=list)
    _seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    _ranks: dict[str, dict[str, int]] = field(default_factory=dict)
    _fates: dict[str, tuple[bool, str, str]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _mark: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """The time since the last lap was spent in `stage`."""
        if self.on:
            now = time.perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._mark
            self._mark = now

    def hits(self, route: str, channel: str, scale: str, found: Iterable[tuple[str, float]], query: str = "") -> None:
        """`found` holds ids and scores, best first."""
        if self.on:
            hits = tuple(Hit(i, rank, float(score)) for rank, (i, score) in enumerate(found, 1))
            self._channels.append(ChannelHits(route, channel, query, scale, hits))

    def ranking(self, stage: str, candidates: Sequence[Ranked], scale: str, route: str = "") -> None:
        """`scale` is the name of the attribute that holds the candidates' score."""
        if not self.on:
            return
        hits = tuple(Hit(c.id, rank, float(getattr(c, scale) or 0.0)) for rank, c in enumerate(candidates, 1))
        self._rankings.append(Ranking(stage, route, scale, hits))
        for rank, c in enumerate(candidates, 1):
            self._seen.setdefault(c.id, (c.kind, " ".join(c.text[: 2 * TEXT_SHOWN].split())[:TEXT_SHOWN]))
            ranks = self._ranks.setdefault(c.id, {})
            ranks[stage] = min(rank, ranks.get(stage, rank))

    def keep(self, stage: str, identifier: str, reason: str) -> None:
        """The last word on a candidate counts: a later stage may drop it, or take back what an earlier one dropped."""
        if self.on:
            self._fates[identifier] = (True, stage, reason)

    def drop(self, stage: str, identifier: str, reason: str) -> None:
        if self.on:
            self._fates[identifier] = (False, stage, reason)

    def trace(self, shown: Collection[str]) -> Trace | None:
        """Everything so far, `shown` being the ids of the evidence in order; None where nothing is recorded."""
        if not self.on:
            return None
        kept = [self._fate(i, shown=True) for i in shown]
        dropped = [self._fate(i, shown=False) for i in self._seen.keys() - set(shown)]
        # The further a candidate came, the nearer to the top; then by its last rank.
        order = {ranking.stage: place for place, ranking in enumerate(self._rankings)}
        dropped.sort(key=lambda f: (-max(order[s] for s in f.ranks), list(f.ranks.values())[-1], f.id))
        return Trace(tuple(self._channels), tuple(self._rankings), (*kept, *dropped), dict(self._seconds))

    def _fate(self, identifier: str, *, shown: bool) -> Fate:
        kind, text = self._seen[identifier]
        _, stage, reason = self._fates.get(identifier, (shown, "", ""))
        return Fate(identifier, kind, text, dict(self._ranks[identifier]), shown, stage, reason)


OFF = Recorder(on=False)

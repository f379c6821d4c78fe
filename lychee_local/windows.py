"""Local evidence expansion: the turns around what was recalled (docs/method.md 5.6).

Owns how far a window reaches, how windows are merged, and what is cut from them. Searches nothing.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import zip_longest
from operator import attrgetter

from lychee_local.lexicon import prompt_tokens, terms
from lychee_local.store import Store
from lychee_local.strategy import STRATEGIES, Strategy
from lychee_local.trace import OFF, Recorder
from lychee_local.types import Candidate, Plan, Scope, Turn, turn_id

# Anchors of an excerpt for each item wanted: most items hold several turns of a session.
ANCHORS_EACH = 4
# Tokens that a turn costs less in an excerpt that has its heading already: a mark of a gap instead.
SAVED = 9


def windows(
    plan: Plan,
    by_route: Mapping[str, tuple[Candidate, ...]],
    store: Store,
    *,
    k: int,
    tokens: int | None = None,
    scope: Scope | None = None,
    record: Recorder = OFF,
) -> dict[str, tuple[Candidate, ...]]:
    """Put the turns around the best candidates of every route beside them.

    Anchors are the best k of each route, at most the strategy's number, and with `tokens` only as many as fit, the
    routes taking turns. Windows are merged over all routes, so no turn stands in two of them, and a raw turn inside a
    window is replaced by it: the window takes over the turn's scores, channels and queries. Records stay. The window's
    `turns` are those whose lines it really shows; none of them is outside of `scope`.

    Where the strategy wants excerpts, the turns found are shown without those around them, and those of a session stand
    in one window with its gaps marked: evidence lies in single turns all over a memory more often than side by side.
    """
    around = _Around(store, scope)
    strategy = STRATEGIES[plan.question_type]
    pools = dict(by_route)
    if plan.question_type == "prior_assistant_response":
        pools = {route: (*pool, *_answer_windows(pool, around, strategy)) for route, pool in pools.items()}
    spans = _spans(pools, around, strategy, k, tokens)
    shown = _merge(spans, strategy.merge_gap)
    places = shown if strategy.excerpt is None else _merge(spans, strategy.excerpt)
    wanted = set(terms(" ".join(text for route in plan.routes for text in plan.variants(route))))
    return {r: _placed(r, pool, places, shown, around, strategy, wanted, record) for r, pool in pools.items()}


class _Around:
    """The turns near a place, as far as they are not forgotten and in the scope; each is read once."""

    def __init__(self, store: Store, scope: Scope | None) -> None:
        self._store, self._scope = store, scope
        self._known: dict[str, Turn | None] = {}

    def read(self, places: Iterable[tuple[str, int, int]]) -> None:
        """Read at once what `turns` will be asked for."""
        wanted = dict.fromkeys(i for place in places for i in _turn_ids(*place) if i not in self._known)
        if wanted:
            self._known |= wanted | self._store.turns_by_id(wanted)

    def turns(self, session: str, start: int, end: int) -> list[Turn]:
        """Those with start <= index <= end."""
        self.read([(session, start, end)])
        found = (self._known[i] for i in _turn_ids(session, start, end))
        return [t for t in found if t is not None and (self._scope is None or self._scope.holds(t))]


def _turn_ids(session: str, start: int, end: int) -> list[str]:
    return [turn_id(session, index) for index in range(max(start, 0), end + 1)]


def _spans(
    pools: Mapping[str, Sequence[Candidate]], around: _Around, strategy: Strategy, k: int, tokens: int | None
) -> list[tuple[str, int, int]]:
    """The turn ranges around the anchors of all routes: first every route's best, then every route's second, ..."""
    ranked = [_ranked(pool, strategy, max(k, 1)) for pool in pools.values()]
    anchors = [c for row in zip_longest(*ranked) for c in row if c is not None]
    places = [(a.session, min(a.turns) - strategy.window, max(a.turns) + strategy.window) for a in anchors]
    around.read(places)
    spans: list[tuple[str, int, int]] = []
    shown: set[tuple[str, int]] = set()
    sessions: set[str] = set()
    spent = 0
    for place in places:
        turns = around.turns(*place)
        fresh = [t for t in turns if (t.session, t.index) not in shown]
        spent += sum(prompt_tokens(t.line[: strategy.window_chars]) for t in fresh)  # no window shows more of one
        if strategy.excerpt is not None and place[0] in sessions:
            spent -= SAVED * len(fresh)
        sessions.add(place[0])
        if tokens is not None and spent > tokens and spans:
            break
        shown |= {(t.session, t.index) for t in fresh}
        if turns:
            spans.append((turns[0].session, turns[0].index, turns[-1].index))
    return spans


def _ranked(pool: Sequence[Candidate], strategy: Strategy, k: int) -> Sequence[Candidate]:
    """The anchors of one route, best first. For excerpts those are turns, in the order in which they were ranked."""
    if strategy.excerpt is None:
        return nsmallest(min(k, strategy.anchors), (c for c in pool if c.turns), key=_anchor_order)
    turns = [c for c in pool if c.kind == "turn"] or [c for c in pool if c.turns]
    return turns[: min(ANCHORS_EACH * k, strategy.anchors)]


def _anchor_order(candidate: Candidate) -> tuple[float, str]:
    return -max(candidate.relevance or 0.0, candidate.field_score, candidate.similarity), candidate.id


def _answer_windows(candidates: Sequence[Candidate], around: _Around, strategy: Strategy) -> tuple[Candidate, ...]:
    """The assistant's answers near the best raw turns, each with the user turn before it (5.6 a)."""
    found: dict[str, Candidate] = {}
    raw = sorted((c for c in candidates if c.kind == "turn"), key=_anchor_order)[:20]
    for anchor in raw:
        here = anchor.turns[0]
        targets = [t for t in around.turns(anchor.session, here, here + strategy.window) if t.role == "assistant"]
        for target in targets[: 1 if targets and targets[0].index == here else 2]:
            before = around.turns(anchor.session, target.index - strategy.window, target.index - 1)
            asked = [t for t in before if t.role == "user"][-1:]
            score = min(1.0, anchor.field_score + 0.04 + 0.18)
            window = _window(anchor, [*asked, target], score)
            if window.id not in found or found[window.id].field_score < score:
                found[window.id] = window
    return tuple(found.values())


def _merge(spans: Iterable[tuple[str, int, int]], gap: int) -> dict[str, list[tuple[int, int]]]:
    """Turn ranges by session, joined where they overlap or lie within gap + 1 turns."""
    merged: dict[str, list[tuple[int, int]]] = {}
    for session, start, end in sorted(spans):
        ranges = merged.setdefault(session, [])
        if ranges and start <= ranges[-1][1] + gap + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], end))
        else:
            ranges.append((start, end))
    return merged


def _placed(
    route: str,
    candidates: Sequence[Candidate],
    places: Mapping[str, list[tuple[int, int]]],
    shown: Mapping[str, list[tuple[int, int]]],
    around: _Around,
    strategy: Strategy,
    wanted: set[str],
    record: Recorder,
) -> tuple[Candidate, ...]:
    kept: list[Candidate] = []
    inside: dict[tuple[str, int, int], list[Candidate]] = {}
    for candidate in candidates:
        holder = _holder(candidate, places.get(candidate.session, ()))
        seen = holder is not None and _holder(candidate, shown[candidate.session]) is not None
        if holder is not None and seen:
            inside.setdefault(holder, []).append(candidate)
        if candidate.kind == "record" or holder is None:
            kept.append(candidate)
        else:
            why = "stands in" if seen else "lies in a gap of"
            record.drop("windows", candidate.id, f"{why} {_window_id(*holder)}")
    for (session, start, end), anchors in inside.items():
        turns = [t for first, last in _within(shown[session], start, end) for t in around.turns(session, first, last)]
        needed = {i for a in anchors if a.kind != "record" for i in a.turns} or {i for a in anchors for i in a.turns}
        lines = _cut(turns, needed, wanted, strategy.window_chars)
        best = max(anchors, key=lambda a: (a.field_score, a.id))
        score = min(1.0, best.field_score + (0.03 if len(anchors) > 1 else 0.0))
        kept.append(replace(_window(best, lines, score, anchors, (start, end)), routes=(route,)))
    kept.sort(key=attrgetter("id"))
    kept.sort(key=attrgetter("field_score"), reverse=True)
    best_first = tuple(kept)
    record.ranking("windows", best_first, "field_score", route)
    return best_first


def _holder(candidate: Candidate, ranges: Sequence[tuple[int, int]]) -> tuple[str, int, int] | None:
    """The range that all turns of a candidate lie in; ranges are ascending and apart."""
    if not ranges or not candidate.turns:
        return None
    first, last = min(candidate.turns), max(candidate.turns)
    start, end = ranges[max(0, bisect_right(ranges, (first, sys.maxsize)) - 1)]
    return (candidate.session, start, end) if start <= first and last <= end else None


def _within(ranges: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    return [(first, last) for first, last in ranges if start <= first and last <= end]


def _window_id(session: str, start: int, end: int) -> str:
    return f"window:{session}:{start}-{end}"


def _window(
    best: Candidate,
    turns: Sequence[Turn],
    score: float,
    anchors: Sequence[Candidate] = (),
    span: tuple[int, int] | None = None,
) -> Candidate:
    start, end = span or (turns[0].index, turns[-1].index)
    anchors = anchors or (best,)
    return replace(
        best,
        id=_window_id(best.session, start, end),
        kind="window",
        text=_lines(turns),
        turns=tuple(t.index for t in turns),
        field_score=score,
        score=score,
        similarity=max(a.similarity for a in anchors),
        speaker=turns[0].speaker if len({t.speaker for t in turns}) == 1 else None,
        role="",
        memory_type=None,
        said=next((t.at for t in turns if t.at is not None), best.said),
        channels=_union(a.channels for a in anchors),
        queries=_union(a.queries for a in anchors),
        nodes=_union(a.nodes for a in anchors),
        entities=_union(a.entities for a in anchors),
        tags=_union(a.tags for a in anchors),
    )


def _lines(turns: Sequence[Turn]) -> str:
    """One line a turn; a gap between turns is marked."""
    lines: list[str] = []
    for previous, turn in zip((None, *turns), turns, strict=False):
        if previous is not None and turn.index != previous.index + 1:
            lines.append("[...]")
        lines.append(turn.line)
    return "\n".join(lines)


def _cut(turns: Sequence[Turn], needed: set[int], wanted: set[str], limit: int) -> list[Turn]:
    """The turns of a window that fit `limit` characters: those it was built for first, then by shared terms.

    Whole turns only, in their order. The first one stays whatever its length: a window never hides what was found.
    """

    def worth(turn: Turn) -> tuple[bool, float, int]:
        words = terms(turn.text)
        return turn.index not in needed, -(len(wanted & set(words)) + min(2.0, len(words) / 80)), turn.index

    if sum(len(t.line) + 1 for t in turns) <= limit:
        return list(turns)
    chosen: list[Turn] = []
    room = limit
    for turn in sorted(turns, key=worth):
        if not chosen or len(turn.line) + 1 <= room:
            chosen.append(turn)
            room -= len(turn.line) + 1
    return sorted(chosen, key=lambda t: t.index)


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))

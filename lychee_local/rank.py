"""Selection: candidates of every route in, the few that are shown out (docs/method.md 5.7 to 5.11).

Owns reranking, the route score, fusion over routes, coverage, diversity and the budget of raw items. Every step is a
function of values; `select` is the list of them. Refuses to search and to touch text. Without a reranker, or with one
that returns no numbers, the field scores decide and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from lychee_local import dates
from lychee_local.backends import Reranker
from lychee_local.errors import GenerationFailed, PromptTooLong
from lychee_local.lexicon import prompt_tokens, terms
from lychee_local.settings import RecallSettings
from lychee_local.store import Store
from lychee_local.strategy import STRATEGIES
from lychee_local.trace import OFF, Recorder
from lychee_local.types import Candidate, DateSpan, Evidence, Plan, Turn

Routes = Mapping[str, tuple[Candidate, ...]]

# Signature similarity (docs/method.md 5.10). The weights sum to 1.
SAME_SESSION, SAME_ENTITIES, SAME_QUERIES, SAME_NODES, SAME_TURNS, SAME_WORDS = 0.15, 0.20, 0.15, 0.15, 0.10, 0.25
# Route score (5.8): what agreement between signals adds to a relevance in [0, 1].
SIMILARITY_BONUS, QUERY_BONUS, QUERY_BONUS_MAX, RERANKED_BONUS = 0.03, 0.01, 0.03, 0.01
# The share of the rerank pool that goes to the best field scores before every channel gets its turn (5.7).
POOL_HEAD, POOL_HEAD_MIN = 0.5, 40
RAW_SCORE_MIN = 0.35


def select(
    plan: Plan,
    by_route: Routes,
    reranker: Reranker | None,
    *,
    k: int,
    settings: RecallSettings,
    record: Recorder = OFF,
) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """At most k candidates with `score` = s_final, best first; and notes on every step that did not run as planned."""
    if settings.selection == "none":
        return by_field_score(by_route, k, record), ()
    strategy = STRATEGIES[plan.question_type]
    limit = max(settings.rerank_limit, 4 * k)
    reranked, notes = rerank(plan, by_route, reranker, limit=limit, record=record)
    record.lap("rerank")
    lists = {route: route_scores(candidates) for route, candidates in reranked.items()}
    fused = fuse(
        lists,
        depth=4 * k,
        constant=settings.rrf_constant,
        weight_best=settings.weight_best,
        weight_route=settings.weight_route,
        record=record,
    )
    chosen = diversify(
        cover(fused, lists, k, record),
        fused,
        k,
        weight_relevance=settings.weight_relevance,
        weight_signature=settings.weight_signature,
        record=record,
    )
    return budget(chosen, fused, k, ratio=strategy.raw_ratio, floor=strategy.raw_floor, record=record), notes


def within(
    chosen: Sequence[Candidate], tokens: int | None, *, items: int | None = None, record: Recorder = OFF
) -> tuple[Candidate, ...]:
    """The first of `chosen` that are at most `items` and together cost at most `tokens` in a prompt; the very first
    stays whatever it costs."""
    kept: list[Candidate] = []
    spent = 0
    for candidate in chosen:
        cost = prompt_tokens(candidate.text)
        if items is not None and len(kept) == items:
            record.drop("budget", candidate.id, f"over the budget: {items} items are wanted")
        elif tokens is None or not kept or spent + cost <= tokens:
            kept.append(candidate)
            spent += cost
        else:
            record.drop("budget", candidate.id, f"over the budget: costs {cost} tokens, {tokens - spent} were left")
    record.ranking("budget", kept, "score")
    return tuple(kept)


def by_field_score(by_route: Routes, k: int, record: Recorder = OFF) -> tuple[Candidate, ...]:
    """The ablation without selection: the union of all routes by field score, cut at k."""
    union: dict[str, Candidate] = {}
    for candidate in (c for candidates in by_route.values() for c in candidates):
        known = union.get(candidate.id)
        if known is None or candidate.field_score > known.field_score:
            union[candidate.id] = replace(candidate, score=candidate.field_score)
    ordered = tuple(sorted(union.values(), key=_by_score))
    record.ranking("fused", ordered, "field_score")
    for candidate in ordered[:k]:
        record.keep("fused", candidate.id, "one of the best field scores")
    for candidate in ordered[k:]:
        record.drop("fused", candidate.id, f"beyond the {k} items wanted")
    return ordered[:k]


# --- reranking (5.7) -------------------------------------------------------------------------------------------------


def rerank(
    plan: Plan, by_route: Routes, reranker: Reranker | None, *, limit: int, record: Recorder = OFF
) -> tuple[dict[str, tuple[Candidate, ...]], tuple[str, ...]]:
    """Give the best `limit` candidates of all routes their relevance, in one call for the whole question.

    The paper reranks route by route. The question is the same in every route and pools overlap, so one call over the
    union costs a fraction and says the same. Candidates outside the pool leave their routes.
    """
    pool = rerank_pool(by_route, limit)
    if reranker is None or not pool:
        return dict(by_route), () if reranker is not None else ("no reranker: ordered by retrieval scores",)
    try:
        scores = [float(s) for s in reranker.score(question_side(plan), [document_side(c) for c in pool])]
    except (GenerationFailed, PromptTooLong) as error:
        return dict(by_route), (f"{reranker.name} could not rank: {error.message}; ordered by retrieval scores",)
    if len(scores) != len(pool) or not all(math.isfinite(s) for s in scores):
        return dict(by_route), (f"{reranker.name} returned unusable scores: ordered by retrieval scores",)
    relevance = {c.id: s if 0.0 <= s <= 1.0 else _logistic(s) for c, s in zip(pool, scores, strict=True)}
    for candidate in (c for candidates in by_route.values() for c in candidates if c.id not in relevance):
        record.drop("reranked", candidate.id, f"not among the {limit} candidates that the reranker reads")
    read = sorted(pool, key=lambda c: (-relevance[c.id], c.id))
    record.ranking("reranked", [replace(c, relevance=relevance[c.id]) for c in read], "relevance")
    return {
        route: tuple(replace(c, relevance=relevance[c.id]) for c in candidates if c.id in relevance)
        for route, candidates in by_route.items()
    }, ()


def rerank_pool(by_route: Routes, limit: int) -> tuple[Candidate, ...]:
    """The union of all routes cut to `limit`: the head by field score, then each kind and channel in turn."""
    union = by_field_score(by_route, sum(len(candidates) for candidates in by_route.values()))
    if len(union) <= limit:
        return union
    head = max(int(limit * POOL_HEAD), min(POOL_HEAD_MIN, limit))
    buckets: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in union[head:]:
        buckets.setdefault((candidate.kind, (*candidate.channels, "")[0]), []).append(candidate)
    mixed = [c for row in zip_longest(*buckets.values()) for c in row if c is not None]
    return (*union[:head], *mixed)[:limit]


def question_side(plan: Plan) -> str:
    """What the cross-encoder reads as the question: labelled lines, the question itself first."""
    conditions = [*plan.constraints, *(f"{c.kind}: {c.value}" for route in plan.routes for c in route.constraints)]
    asked = plan.question.casefold()
    goals = [r.goal for r in plan.routes[:3] if r.goal.casefold() != asked]
    searches = [text for text in plan.queries[:12] if text.casefold() != asked]
    when = f"{plan.when.since or ''} to {plan.when.until or ''}".strip() if plan.when is not None else ""
    lines = [
        ("Question", plan.question),
        ("Looking for", plan.target if plan.target.casefold() != asked else ""),
        ("Goals", "; ".join(goals)),
        ("Searches", "; ".join(searches)),
        ("Constraints", "; ".join(dict.fromkeys(conditions[:8]))),
        ("Time", when),
        ("Type", plan.question_type if plan.question_type not in ("single", "other") else ""),
    ]
    return "\n".join(f"{label}: {text}" for label, text in lines if text)


def document_side(candidate: Candidate) -> str:
    """What the cross-encoder reads as the passage: the text first, so that a cut at its window hits metadata."""
    spans = candidate.temporal.spans
    lines = [
        ("Speaker", candidate.speaker if candidate.kind == "record" else ""),
        ("Date", "; ".join(dates.describe(span) for span in spans)),
        ("Said on", candidate.said.date().isoformat() if candidate.said is not None else ""),
        ("Type", candidate.memory_type),
        ("About", "; ".join((*candidate.entities, *candidate.tags)) if candidate.kind == "record" else ""),
    ]
    return "\n".join([candidate.text, *(f"{label}: {text}" for label, text in lines if text)])


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


# --- route score and fusion (5.8, 5.9) -------------------------------------------------------------------------------


def route_scores(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The ranked list of one route: the reranker's relevance with a small signal bonus, else the field score as it is.

    The bonus tells a reranker what the search saw. Added to a field score, which is made of the same similarity, it
    would only undo the fusion with words: on two LoCoMo conversations that cost 1.6 points of evidence recall.
    """

    def scored(c: Candidate) -> Candidate:
        if c.relevance is None:
            return replace(c, score=c.field_score)
        bonus = SIMILARITY_BONUS * c.similarity + min(QUERY_BONUS_MAX, QUERY_BONUS * len(c.queries))
        return replace(c, score=min(1.0, max(0.0, c.relevance + RERANKED_BONUS + bonus)))

    return tuple(sorted((scored(c) for c in candidates), key=_by_score))


def fuse(
    lists: Routes,
    *,
    depth: int,
    constant: float = 60.0,
    weight_best: float = 0.82,
    weight_route: float = 0.18,
    record: Recorder = OFF,
) -> tuple[Candidate, ...]:
    """One list from the first `depth` of every route: s_final = weight_best s_best + weight_route RRF / max RRF.

    A candidate of several routes keeps the metadata of its best one and the union of routes, queries, channels, nodes.
    """
    ranks: dict[str, float] = {}
    best: dict[str, Candidate] = {}
    for candidates in lists.values():
        for rank, candidate in enumerate(candidates[:depth], 1):
            ranks[candidate.id] = ranks.get(candidate.id, 0.0) + 1.0 / (constant + rank)
            best[candidate.id] = _joined(best[candidate.id], candidate) if candidate.id in best else candidate
    for candidate in (c for candidates in lists.values() for c in candidates[depth:] if c.id not in ranks):
        record.drop("fused", candidate.id, f"beyond the best {depth} of its route")
    if not ranks:
        return ()
    top = max(ranks.values())
    final = (
        replace(
            c,
            fused=ranks[c.id],
            score=min(1.0, max(0.0, weight_best * c.score + weight_route * ranks[c.id] / top)),
        )
        for c in best.values()
    )
    fused = tuple(sorted(final, key=_by_score))
    record.ranking("fused", fused, "score")
    return fused


def _joined(one: Candidate, other: Candidate) -> Candidate:
    first = one if one.score >= other.score else other
    return replace(
        first,
        channels=_union(one.channels, other.channels),
        queries=_union(one.queries, other.queries),
        nodes=_union(one.nodes, other.nodes),
        routes=_union(one.routes, other.routes),
    )


# --- coverage, diversity, budget (5.9 to 5.11) -----------------------------------------------------------------------


def cover(fused: Sequence[Candidate], lists: Routes, k: int, record: Recorder = OFF) -> tuple[Candidate, ...]:
    """The first places: from every route, in plan order, its best candidates that are not taken yet."""
    known = {c.id: c for c in fused}
    quota = max(1, min(4, k // max(1, len(lists))))
    taken: dict[str, Candidate] = {}
    for route, candidates in lists.items():
        fresh = [c.id for c in candidates if c.id in known and c.id not in taken][:quota]
        taken.update((identifier, known[identifier]) for identifier in fresh)
        for identifier in fresh:
            record.keep("selected", identifier, f"one of the first {quota} of route {route}")
    picks = tuple(taken.values())[:k]
    record.ranking("selected", picks, "score")
    return picks


def diversify(
    picks: Sequence[Candidate],
    fused: Sequence[Candidate],
    k: int,
    *,
    weight_relevance: float = 0.75,
    weight_signature: float = 0.25,
    record: Recorder = OFF,
) -> tuple[Candidate, ...]:
    """Fill `picks` up to k by maximal marginal relevance over the best 4k of `fused`; the result is by score.

    Marginal relevance only selects when the pool is larger than the places, and when everything already chosen counts;
    reordering a list that is full has no effect. Scores are stretched over the pool to [0, 1] first: without a reranker
    they lie within a tenth of each other, and the signature would decide alone.
    """
    chosen = list(picks[:k])
    features = {c.id: _Signature(c) for c in (*fused[: max(k, 4 * k)], *chosen)}
    pool = [c for c in fused[: max(k, 4 * k)] if c.id not in {p.id for p in chosen}]
    nearest = {c.id: max((features[c.id].similarity(features[p.id]) for p in chosen), default=0.0) for c in pool}
    scores = [c.score for c in pool]
    low, span = min(scores, default=0.0), max(max(scores, default=0.0) - min(scores, default=0.0), 1e-9)

    def gain(c: Candidate) -> float:
        return weight_relevance * (c.score - low) / span - weight_signature * nearest[c.id]

    while pool and len(chosen) < k:
        best = max(pool, key=gain)
        record.keep("diversity", best.id, f"gain {gain(best):.2f}, {nearest[best.id]:.2f} similar to what was chosen")
        pool.remove(best)
        chosen.append(best)
        for c in pool:
            nearest[c.id] = max(nearest[c.id], features[c.id].similarity(features[best.id]))
    if record.on:
        _tell_of_the_rest(fused, chosen, {c.id: nearest[c.id] for c in pool}, record)
    best_first = tuple(sorted(chosen, key=_by_score))
    record.ranking("diversity", best_first, "score")
    return best_first


def _tell_of_the_rest(
    fused: Sequence[Candidate], chosen: Sequence[Candidate], nearest: Mapping[str, float], record: Recorder
) -> None:
    """Why the others got no place: the score, the likeness to something chosen, or not even a comparison."""
    taken = {c.id for c in chosen}
    last = min((c.score for c in chosen), default=0.0)
    for c in (c for c in fused if c.id not in taken):
        if c.id not in nearest:
            why = f"not among the best {4 * len(chosen)}"
        elif c.score > last:
            why = f"diversity: {nearest[c.id]:.2f} similar to what was chosen"
        else:
            why = f"its score {c.score:.2f} is not above the last place's {last:.2f}"
        record.drop("diversity", c.id, why)


class _Signature:
    """What two candidates are compared by, as sets computed once."""

    def __init__(self, candidate: Candidate) -> None:
        self.session = candidate.session
        self.parts = (
            (SAME_ENTITIES, frozenset(e.casefold() for e in candidate.entities)),
            (SAME_QUERIES, frozenset(candidate.queries)),
            (SAME_NODES, frozenset(candidate.nodes)),
            (SAME_TURNS, frozenset((candidate.session, turn) for turn in candidate.turns)),
            (SAME_WORDS, frozenset(terms(candidate.text))),
        )

    def similarity(self, other: _Signature) -> float:
        """In [0, 1]; an empty set on either side adds nothing."""
        total = SAME_SESSION if self.session and self.session == other.session else 0.0
        for (weight, mine), (_, theirs) in zip(self.parts, other.parts, strict=True):
            if mine and theirs:
                total += weight * len(mine & theirs) / len(mine | theirs)
        return min(1.0, total)


def budget(
    chosen: Sequence[Candidate],
    fused: Sequence[Candidate],
    k: int,
    *,
    ratio: float,
    floor: float,
    record: Recorder = OFF,
) -> tuple[Candidate, ...]:
    """Bound the raw items beside records; what they give up goes to the next best records, as far as there are any.

    Nothing happens where no record was found: then raw items are all there is.
    """
    best_record = max((c.score for c in fused if c.kind == "record"), default=0.0)
    raw = [c for c in chosen if c.kind != "record"]
    if not raw or best_record <= 0.0:
        return tuple(chosen[:k])
    served = {route for c in chosen if c.kind == "record" for route in c.routes}
    places = min(k, max(2, round(k * ratio), len({route for c in raw for route in c.routes})))
    minimum = max(RAW_SCORE_MIN, best_record * floor)
    kept: list[Candidate] = []
    for candidate in sorted(raw, key=_by_score):
        alone = bool(set(candidate.routes) - served)
        if alone or (len(kept) < places and candidate.score >= minimum):
            kept.append(candidate)
        elif candidate.score < minimum:
            why = f"below the minimum score of raw items beside records, {minimum:.2f}"
            record.drop("raw items", candidate.id, why)
        else:
            record.drop("raw items", candidate.id, f"over the budget: {places} raw items beside records")
    records = [c for c in chosen if c.kind == "record"]
    others = [c for c in fused if c.kind == "record" and c.id not in {r.id for r in records}]
    # While segments wait to be encoded there are fewer records than places: those go back to the raw items.
    spare = [c for c in sorted(raw, key=_by_score) if c.score >= minimum and c not in kept]
    refill = (*others, *spare)[: max(0, k - len(kept) - len(records))]
    for candidate in refill:
        record.keep("raw items", candidate.id, "took a place that raw items gave up")
    best_first = tuple(sorted((*records, *kept, *refill), key=_by_score)[:k])
    record.ranking("raw items", best_first, "score")
    return best_first


def _by_score(candidate: Candidate) -> tuple[float, float, str]:
    return -candidate.score, -candidate.similarity, candidate.id


def _union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other)))


# --- provenance ------------------------------------------------------------------------------------------------------


def evidence(chosen: Iterable[Candidate], store: Store, record: Recorder = OFF) -> tuple[Evidence, ...]:
    """The candidates as they are shown, in the same order, each with the turns it rests on. One of whose turns some has
    been forgotten since it was found is left out."""
    shown: list[Evidence] = []
    for candidate in chosen:
        turns = _turns_of(candidate, store)
        if len(turns) == len(candidate.turns):
            shown.append(_evidence(candidate, turns))
        else:
            record.drop("shown", candidate.id, "what it rests on was forgotten meanwhile")
    return tuple(shown)


def _turns_of(candidate: Candidate, store: Store) -> list[Turn]:
    if not candidate.turns:
        return []
    around = store.turns(candidate.session, min(candidate.turns), max(candidate.turns) + 1)
    return [turn for turn in around if turn.index in candidate.turns]


def _evidence(candidate: Candidate, turns: Sequence[Turn]) -> Evidence:
    spans: Iterable[DateSpan] = candidate.temporal.spans
    if candidate.kind != "record":
        spans = (m.span for t in turns for m in dates.find(t.text, t.at.date() if t.at is not None else None))
    return Evidence(
        id=candidate.id,
        kind=candidate.kind,
        text=candidate.text,
        score=candidate.score,
        session=candidate.session,
        turns=tuple(t.id for t in turns),
        refs=tuple(t.ref for t in turns if t.ref is not None),
        speaker=candidate.speaker,
        memory_type=candidate.memory_type,
        dates=tuple(dict.fromkeys(spans)),
        said=candidate.said,
        similarity=candidate.similarity,
        relevance=candidate.relevance,
        channels=candidate.channels,
        queries=candidate.queries,
        nodes=candidate.nodes,
        routes=candidate.routes,
        chain=candidate.chain,
    )

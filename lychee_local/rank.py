"""Selection: candidates of every route in, the few that are shown out (docs/method.md 5.7 to 5.11).

Owns reranking, the route score, fusion over routes, coverage, diversity and the budget of raw items. Every step is a
function of values; `select` is the list of them. Refuses to search and to touch text. Without a reranker, or with one
that returns no numbers, the field scores decide and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import lru_cache
from itertools import chain, islice, zip_longest
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from lychee_local import dates
from lychee_local.backends import Reranker
from lychee_local.errors import GenerationFailed, PromptTooLong
from lychee_local.lexicon import prompt_tokens, terms
from lychee_local.settings import RecallSettings
from lychee_local.store import Store
from lychee_local.strategy import STRATEGIES
from lychee_local.trace import OFF, Recorder
from lychee_local.types import Candidate, DateSpan, Evidence, Plan, Turn, turn_id

Routes = Mapping[str, tuple[Candidate, ...]]
Floats = npt.NDArray[np.float64]

# Signature similarity (docs/method.md 5.10). The weights sum to 1.
SAME_SESSION, SAME_ENTITIES, SAME_QUERIES, SAME_NODES, SAME_TURNS, SAME_WORDS = 0.15, 0.20, 0.15, 0.15, 0.10, 0.25
# Route score (5.8): what agreement between signals adds to a relevance in [0, 1].
SIMILARITY_BONUS, QUERY_BONUS, QUERY_BONUS_MAX, RERANKED_BONUS = 0.03, 0.01, 0.03, 0.01
# The share of the rerank pool that goes to the best field scores before every channel gets its turn (5.7).
POOL_HEAD, POOL_HEAD_MIN = 0.5, 40
RAW_SCORE_MIN = 0.35
# So many single records at most for a conclusion: in 1,800 tokens there is room for about 80.
FACTS = 80


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
        cover(fused, lists, k, record) if settings.coverage else (),
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


def beside(shown: Sequence[Candidate], more: Iterable[Candidate], record: Recorder = OFF) -> tuple[Candidate, ...]:
    """`shown`, then those of `more` that rest on a turn which none before them rests on."""
    known = {(c.session, turn) for c in shown for turn in c.turns}
    found = list(shown)
    for candidate in more:
        turns = {(candidate.session, turn) for turn in candidate.turns}
        if turns <= known:
            record.drop("facts", candidate.id, "what it rests on is shown")
        else:
            known |= turns
            found.append(candidate)
            record.keep("facts", candidate.id, "a fact that a conclusion may need")
    record.ranking("facts", found, "score")
    return tuple(found)


def by_field_score(by_route: Routes, k: int, record: Recorder = OFF) -> tuple[Candidate, ...]:
    """The ablation without selection: the union of all routes by field score, cut at k."""
    ordered = _union_of(by_route)
    record.ranking("fused", ordered, "field_score")
    for candidate in ordered[:k]:
        record.keep("fused", candidate.id, "one of the best field scores")
    for candidate in ordered[k:]:
        record.drop("fused", candidate.id, f"beyond the {k} items wanted")
    return tuple(_scored(c, c.field_score) for c in ordered[:k])


def _union_of(by_route: Routes) -> tuple[Candidate, ...]:
    """Each candidate once, from the route where its field score is highest, best first."""
    union: dict[str, Candidate] = {}
    for candidate in chain.from_iterable(by_route.values()):
        known = union.get(candidate.id)
        if known is None or candidate.field_score > known.field_score:
            union[candidate.id] = candidate
    return _sorted(union.values(), "field_score")


# --- reranking (5.7) -------------------------------------------------------------------------------------------------


def rerank(
    plan: Plan, by_route: Routes, reranker: Reranker | None, *, limit: int, record: Recorder = OFF
) -> tuple[dict[str, tuple[Candidate, ...]], tuple[str, ...]]:
    """Give the best `limit` candidates of all routes their relevance, in one call for the whole question.

    The paper reranks route by route. The question is the same in every route and pools overlap, so one call over the
    union costs a fraction and says the same. Candidates outside the pool leave their routes.
    """
    if reranker is None:
        return dict(by_route), ("no reranker: ordered by retrieval scores",)
    pool = rerank_pool(by_route, limit)
    if not pool:
        return dict(by_route), ()
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
    union = _union_of(by_route)
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
            return c if c.score == c.field_score else _scored(c, c.field_score)
        bonus = SIMILARITY_BONUS * c.similarity + min(QUERY_BONUS_MAX, QUERY_BONUS * len(c.queries))
        return _scored(c, min(1.0, max(0.0, c.relevance + RERANKED_BONUS + bonus)))

    return _sorted(map(scored, candidates), "score")


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
        _scored(c, min(1.0, max(0.0, weight_best * c.score + weight_route * ranks[c.id] / top)), ranks[c.id])
        for c in best.values()
    )
    fused = _sorted(final, "score")
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
        fresh = list(islice((c.id for c in candidates if c.id in known and c.id not in taken), quota))
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
    taken = {c.id for c in chosen}
    pool = [c for c in fused[: 4 * k] if c.id not in taken]
    signatures = _Signatures([*pool, *chosen])
    nearest = np.zeros(len(pool))
    for place in range(len(pool), len(pool) + len(chosen)):
        np.maximum(nearest, signatures.similarity(place)[: len(pool)], out=nearest)
    scores = np.array([c.score for c in pool])
    low, span = scores.min(initial=1.0), max(float(np.ptp(scores)) if pool else 0.0, 1e-9)
    relevance = weight_relevance * (scores - low) / span
    free = np.ones(len(pool), dtype=np.bool_)
    while free.any() and len(chosen) < k:
        gains = np.where(free, relevance - weight_signature * nearest, -np.inf)
        place = int(np.argmax(gains))  # of equal ones the first, which has the better score
        best = pool[place]
        record.keep("diversity", best.id, f"gain {gains[place]:.2f}, {nearest[place]:.2f} similar to what was chosen")
        free[place] = False
        chosen.append(best)
        np.maximum(nearest, signatures.similarity(place)[: len(pool)], out=nearest, where=free)
    if record.on:
        _tell_of_the_rest(fused, chosen, {c.id: near for c, near in zip(pool, nearest.tolist(), strict=True)}, record)
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
            why = f"{nearest[c.id]:.2f} similar to what was chosen"
        else:
            why = f"its score {c.score:.2f} is not above the last place's {last:.2f}"
        record.drop("diversity", c.id, why)


class _Signatures:
    """What candidates are compared by: six sets each. One count over all that hold what a candidate holds compares it
    with every other at once."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        parts: tuple[tuple[float, Sequence[Set[Hashable]]], ...] = (
            (SAME_SESSION, [{c.session} - {""} for c in candidates]),
            (SAME_ENTITIES, [{e.casefold() for e in c.entities} for c in candidates]),
            (SAME_QUERIES, [set(c.queries) for c in candidates]),
            (SAME_NODES, [set(c.nodes) for c in candidates]),
            (SAME_TURNS, [{(c.session, turn) for turn in c.turns} for c in candidates]),
            (SAME_WORDS, [_words(c.text) for c in candidates]),
        )
        self._weights = np.array([[weight] for weight, _ in parts])
        self._sizes = np.array([[len(items) for items in sets] for _, sets in parts], dtype=np.intp)
        items, first = [np.zeros(0, dtype=np.intp)], 0  # what each set holds, by number, set after set
        for _, sets in parts:
            held = list(chain.from_iterable(sets))
            numbers = {item: first + number for number, item in enumerate(dict.fromkeys(held))}
            items.append(np.fromiter(map(numbers.__getitem__, held), dtype=np.intp, count=len(held)))
            first += len(numbers)
        item = np.concatenate(items)
        holder = np.repeat(np.arange(self._sizes.size), self._sizes.ravel())
        place = holder % len(candidates)
        self._items = np.split(item[np.argsort(place, kind="stable")], np.cumsum(self._sizes.sum(axis=0))[:-1])
        self._holders = holder[np.argsort(item, kind="stable")]
        self._ends = [0, *np.cumsum(np.bincount(item, minlength=first)).tolist()]

    def similarity(self, place: int) -> Floats:
        """Of the candidate at `place` with each, in [0, 1]: weighted Jaccard indexes, of empty sets 0."""
        mine = [self._holders[self._ends[item] : self._ends[item + 1]] for item in self._items[place].tolist()]
        holders = np.concatenate([self._holders[:0], *mine])
        shared = np.bincount(holders, minlength=self._sizes.size).reshape(self._sizes.shape)
        united = self._sizes + self._sizes[:, place, np.newaxis] - shared
        total: Floats = np.zeros(self._sizes.shape[1])
        for part in self._weights * shared / np.maximum(united, 1):
            total += part
        return np.minimum(total, 1.0)


@lru_cache(maxsize=4_096)
def _words(text: str) -> frozenset[str]:
    return frozenset(terms(text))


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


_VALUES = attrgetter(*(f.name for f in fields(Candidate)))
_SCORE, _FUSED = (next(i for i, f in enumerate(fields(Candidate)) if f.name == name) for name in ("score", "fused"))


def _scored(candidate: Candidate, score: float, fused: float | None = None) -> Candidate:
    """`candidate` with another score: `dataclasses.replace` for hundreds a question takes three times as long."""
    values = list(_VALUES(candidate))
    values[_SCORE] = score
    values[_FUSED] = values[_FUSED] if fused is None else fused
    return Candidate(*values)


def _sorted(candidates: Iterable[Candidate], score: str = "score") -> tuple[Candidate, ...]:
    """By `score` and similarity, best first, ties by id. Three sorts by one attribute each cost less than one with a
    key that is made for each candidate."""
    ordered = sorted(candidates, key=attrgetter("id"))
    ordered.sort(key=attrgetter("similarity"), reverse=True)
    ordered.sort(key=attrgetter(score), reverse=True)
    return tuple(ordered)


def _by_score(candidate: Candidate) -> tuple[float, float, str]:
    return -candidate.score, -candidate.similarity, candidate.id


def _union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*one, *other)))


# --- provenance ------------------------------------------------------------------------------------------------------


def evidence(chosen: Iterable[Candidate], store: Store, record: Recorder = OFF) -> tuple[Evidence, ...]:
    """The candidates as they are shown, in the same order, each with the turns it rests on. One of whose turns some has
    been forgotten since it was found is left out."""
    chosen = tuple(chosen)
    known = store.turns_by_id({turn for candidate in chosen for turn in _turn_ids(candidate)})
    shown: list[Evidence] = []
    for candidate in chosen:
        turns = [known[turn] for turn in _turn_ids(candidate) if turn in known]
        if len(turns) == len(candidate.turns):
            shown.append(_evidence(candidate, turns))
        else:
            record.drop("shown", candidate.id, "what it rests on was forgotten meanwhile")
    return tuple(shown)


def _turn_ids(candidate: Candidate) -> list[str]:
    return [turn_id(candidate.session, index) for index in sorted(candidate.turns)]


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

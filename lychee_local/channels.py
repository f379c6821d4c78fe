"""Recall: a plan and the vectors of its queries in, candidates per route out.

Owns the channels (records, evidence nodes, temporal nodes, raw turns, words) and their field scores. Refuses to rank
routes against each other, to call a model, or to add scores of different scales: where two rankings of the same things
meet, ranks are fused and the scores of one scale are handed out in that order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from heapq import nlargest
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lychee_local import bearing, dates
from lychee_local.settings import RecallSettings
from lychee_local.store import Store, VectorHit
from lychee_local.strategy import STRATEGIES, similarity
from lychee_local.trace import OFF, Recorder
from lychee_local.types import (
    Calibration,
    Candidate,
    DateSpan,
    MemoryType,
    NodeKind,
    Plan,
    QuestionType,
    Record,
    Route,
    Scope,
    TimeRange,
    Turn,
    turn_id,
)

Vector = npt.NDArray[np.float32]
Field = Literal["turns", "records", "nodes"]

# docs/method.md 5.4. Node weights by kind; the temporal kind is reached through its own channel only.
NODE_WEIGHTS: dict[NodeKind, float] = {"entity": 0.34, "topic": 0.32, "entity_topic": 0.38, "event_frame": 0.42}
DATE_SCORES: dict[str, float] = {"day": 0.42, "month": 0.28}
DATE_SCORE_OTHER = 0.34
RECORD_BASE, RECORD_SLOPE = 0.30, 0.30
TURN_BASE, TURN_SLOPE = 0.34, 0.42

# The paper searches as deep as for 15 items even where fewer are wanted (its k_plan).
PLAN_DEPTH = 15

# Turns per query whose cosines are read, so that a turn can be judged together with the turns around it.
CONTEXT_DEPTH = 1_000
# Turns per word of the question; a word of more turns tells little.
WORD_DEPTH = 300
# So many turns of a route at least are candidates where they are found by all signals: 3,000 tokens hold about 70.
BEARING_TURNS = 80
# Up to so many records of a route are all read, which a small memory has at hand; of more the best, in multiples of the
# items wanted: reading them from a large memory costs more than all the rest of a question.
FEW_RECORDS, READ = 1_000, 16
# Of a node's records, the newest that it leads to: the node of a person who is always spoken of points to everything.
NODE_RECORDS = 512


# --- recall ----------------------------------------------------------------------------------------------------------


def recall(
    plan: Plan,
    vectors: Mapping[str, Vector],
    store: Store,
    *,
    k: int,
    settings: RecallSettings,
    calibration: Calibration,
    scope: Scope | None = None,
    record: Recorder = OFF,
) -> dict[str, tuple[Candidate, ...]]:
    """Candidates of every route of `plan`, by route id, best field score first, ties by id (docs/method.md 5.2 to 5.5).
    The `score` of each is its field score, until a reranker says more.

    `vectors` holds the unit vector of every text of `plan.variants(route)`. `settings.channels` names the channels that
    run; `scope` limits what they may find. Budgets follow from max(k, 15).
    """
    search = _Search(plan, vectors, store, max(k, PLAN_DEPTH), settings, calibration, scope, record)
    return {route.id: search.route(route) for route in plan.routes}


class _Find(NamedTuple):
    """One hit of one channel, shared by all that it leads to; what a channel does not know of it stays empty."""

    channel: str = ""
    score: float = 0.0
    query: str = ""
    node: str = ""
    similarity: float = 0.0


Finds = defaultdict[str, list[_Find]]  # by the id of the record or turn, in the order of the channels


class _Draft(NamedTuple):
    """A candidate under construction: the best score of all its hits, and what it was hit by."""

    score: float
    similarity: float
    channels: tuple[str, ...]
    queries: tuple[str, ...]
    nodes: tuple[str, ...]


def _drafted(finds: Iterable[_Find]) -> _Draft:
    best = nearest = 0.0
    channels: dict[str, None] = {}
    queries: dict[str, None] = {}
    nodes: dict[str, None] = {}
    for channel, score, query, node, near in finds:
        best = score if score > best else best
        nearest = near if near > nearest else nearest
        channels[channel] = queries[query] = nodes[node] = None
    for named in (channels, queries, nodes):
        named.pop("", None)
    return _Draft(best, nearest, tuple(channels), tuple(queries), tuple(nodes))


class _Search:
    """One question's search: the vector hits of all routes from one store call per field, then route by route."""

    def __init__(
        self,
        plan: Plan,
        vectors: Mapping[str, Vector],
        store: Store,
        depth: int,
        settings: RecallSettings,
        calibration: Calibration,
        scope: Scope | None,
        record: Recorder,
    ) -> None:
        self.plan, self.store, self.settings, self.calibration, self.scope = plan, store, settings, calibration, scope
        self.vectors = vectors
        self.record = record
        self.strategy = STRATEGIES[plan.question_type]
        self.depth = depth
        self.node_budget = max(1, int(max(3 * depth, 30) * self.strategy.node))
        self.record_budget = max(1, int(max(3 * depth, 30) * self.strategy.record))
        self.turn_budget = max(1, int(max(depth, 20) * self.strategy.turn))
        texts = plan.texts
        self.hits: dict[Field, dict[str, list[VectorHit]]] = {
            "records": self._vector_hits("records", texts, vectors, self.record_budget),
            "nodes": self._vector_hits("nodes", texts, vectors, 4 * self.node_budget),
            "turns": self._vector_hits("turns", texts, vectors, max(self.turn_budget, CONTEXT_DEPTH)),
        }

    def _vector_hits(
        self, name: Field, texts: Sequence[str], vectors: Mapping[str, Vector], k: int
    ) -> dict[str, list[VectorHit]]:
        if name not in self.settings.channels or not texts:
            return {}
        matrix = np.stack([vectors[text] for text in texts]).astype(np.float32, copy=False)
        kinds, scope = (tuple(NODE_WEIGHTS), None) if name == "nodes" else (None, self.scope)
        return dict(zip(texts, self.store.search(name, matrix, k, node_kinds=kinds, scope=scope), strict=True))

    def route(self, route: Route) -> tuple[Candidate, ...]:
        records: Finds = defaultdict(list)
        turns: Finds = defaultdict(list)
        queries = self.plan.variants(route)
        when = route.when or self.plan.when
        if "temporal" in self.settings.channels and when is not None:
            self._temporal(route.id, when, records)
        for query in queries:
            self._nodes(route.id, query, records)
        self._records(route.id, queries, records)
        self._turns(route, queries, turns)
        routes = (route.id,)
        drafts = self._worth_reading(records)
        known = self.store.records_by_id(drafts)
        # A node leads to its records whatever the scope.
        inside = {i: r for i, r in known.items() if self.scope is None or self.scope.holds(r)}
        found = [self._from_record(i, r, drafts[i], when, routes) for i, r in inside.items()]
        said = self.store.turns_by_id(turns)
        found += [self._from_turn(i, t, _drafted(turns[i]), when, routes) for i, t in said.items()]
        found.sort(key=attrgetter("id"))
        found.sort(key=attrgetter("field_score"), reverse=True)
        best = tuple(found)
        self.record.ranking("channels", best, "field_score", route.id)
        return best

    def _worth_reading(self, finds: Finds) -> dict[str, _Draft]:
        """The drafts of the records that are read, in the order of finding. A person who is always spoken of leads to
        thousands; fusion looks at the first 4k (5.9), the others only lend windows their queries and nodes."""
        drafts = {identifier: _drafted(hits) for identifier, hits in finds.items()}
        if self.scope is not None or len(drafts) <= FEW_RECORDS:
            return drafts
        best = nlargest(READ * self.depth, drafts, key=lambda identifier: drafts[identifier].score)
        return {identifier: drafts[identifier] for identifier in best}

    # --- the channels ---

    def _temporal(self, route: str, when: TimeRange, finds: Finds) -> None:
        scored = [
            (DATE_SCORES.get(n.key.partition(":")[0], DATE_SCORE_OTHER), n)
            for n in self.store.temporal_nodes(when, latest=NODE_RECORDS)
        ]
        scored.sort(key=lambda pair: (-pair[0], pair[1].id))
        scored = scored[: max(10 * self.depth, 100)]
        label = f"{when.since or ''} to {when.until or ''}".strip()
        self.record.hits(route, "temporal", "date_score", ((n.id, score) for score, n in scored), query=label)
        for score, node in scored:
            find = _Find("temporal", score, label, node.id)
            for record in node.records:
                finds[record].append(find)

    def _nodes(self, route: str, query: str, finds: Finds) -> None:
        hits = self.hits["nodes"].get(query, [])
        self.record.hits(route, "nodes", "cosine", hits, query=query)
        near = {hit.id: similarity(hit.cosine, self.calibration) for hit in hits}
        near = {i: r for i, r in near.items() if r > 0.0}
        taken: Counter[NodeKind] = Counter()
        for node_id, node in self.store.nodes_by_id(near, latest=NODE_RECORDS).items():
            taken[node.kind] += 1
            if taken[node.kind] <= self.node_budget:
                find = _Find("nodes", near[node_id] * NODE_WEIGHTS[node.kind], query, node_id)
                for record in node.records:
                    finds[record].append(find)

    def _records(self, route: str, queries: Sequence[str], finds: Finds) -> None:
        dense = self._best("records", queries, self.record_budget)
        self.record.hits(route, "records", "cosine", dense.items())
        rankings = [list(dense)]
        if "lexical" in self.settings.channels:
            said = self.store.words("records", " ".join(queries), self.record_budget, scope=self.scope)
            rankings.append([i for i, _ in said])
            self.record.hits(route, "lexical records", "bm25", said)
        scores = self._fuse(dense, rankings, RECORD_BASE, RECORD_SLOPE)
        self._enter("records", scores, dense, rankings[1:], queries, finds)

    def _turns(self, route: Route, queries: Sequence[str], finds: Finds) -> None:
        everything = self._best("turns", queries, CONTEXT_DEPTH)
        lexical = "lexical" in self.settings.channels
        depth = max(self.turn_budget, BEARING_TURNS) if lexical else self.turn_budget
        dense = dict(list(everything.items())[:depth])
        self.record.hits(route.id, "turns", "cosine", dense.items())
        order, said = list(dense), list[str]()
        if lexical:
            words = {
                word: dict(self.store.words("turns", word, WORD_DEPTH, scope=self.scope))
                for word in bearing.words(" ".join(queries))
            }
            if self.record.on:
                self.record.hits(route.id, "lexical turns", "bm25", bearing.by_words(words)[:depth])
            best = self._bearing(route, queries, everything, words)[:depth]
            self.record.hits(route.id, "bearing", "standard score", best)
            order = [i for i, _ in best]
            said = [i for i in order if any(i in gains for gains in words.values())]
        scores = self._fuse(dense, [order], TURN_BASE, TURN_SLOPE)
        seen = {i: everything[i] for i in scores if i in everything}
        self._enter("turns", scores, seen, [said], queries, finds)

    def _bearing(
        self, route: Route, queries: Sequence[str], cosines: Mapping[str, float], words: bearing.Words
    ) -> list[tuple[str, float]]:
        """The turns that bear most on a route, by all that the vectors of turns and records and the words say."""
        near = self._best("records", queries, CONTEXT_DEPTH)
        records: dict[str, float] = {}
        for identifier, record in self.store.records_by_id(near).items():
            for turn in record.turns:
                rests_on = turn_id(record.session, turn)
                records[rests_on] = max(records.get(rests_on, -1.0), near[identifier])
        found = bearing.Found(cosines, words, records)
        short = bearing.shortlist(found)
        around = self.store.turns_by_id(short.around)
        turns = {i: t for i, t in around.items() if self.scope is None or self.scope.holds(t)}
        asked = bearing.Asked(route.goal, np.stack([self.vectors[query] for query in queries]))
        return bearing.ranked(short, found, turns, lambda ids: self.store.vectors("turns", ids), asked)

    def _best(self, name: Field, queries: Sequence[str], k: int) -> dict[str, float]:
        """The highest cosine of each row over all query variants, the best k rows, best first."""
        best: dict[str, float] = {}
        for query in queries:
            for hit in self.hits[name].get(query, ())[:k]:
                best[hit.id] = max(best.get(hit.id, -1.0), hit.cosine)
        return dict(sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[:k])

    def _fuse(
        self, dense: Mapping[str, float], rankings: Sequence[Sequence[str]], base: float, slope: float
    ) -> dict[str, float]:
        """Field scores: the order from reciprocal rank fusion of `rankings`, the values from the vector channel.

        The i-th of the fused order receives the i-th highest vector score, so that the field score keeps its scale, and
        with the vector ranking alone every row keeps its own score. Rows beyond those that the vectors found continue
        from the last one's r as 60 / (60 + i), and from r = 1 where no vectors were searched.
        """
        constant = self.settings.rrf_constant
        fused: dict[str, float] = {}
        for ranking in rankings:
            for rank, identifier in enumerate(ranking, 1):
                fused[identifier] = fused.get(identifier, 0.0) + 1.0 / (constant + rank)
        order = sorted(fused, key=lambda i: (-fused[i], -dense.get(i, -1.0), i))
        values = sorted((similarity(cosine, self.calibration) for cosine in dense.values()), reverse=True)
        last = values[-1] if values else 1.0
        values += [last * constant / (constant + i) for i in range(1, len(order) - len(values) + 1)]
        return {i: base + slope * r for i, r in zip(order, values[: len(order)], strict=True)}

    def _enter(
        self,
        channel: str,
        scores: Mapping[str, float],
        dense: Mapping[str, float],
        other: Sequence[Sequence[str]],
        queries: Sequence[str],
        finds: Finds,
    ) -> None:
        by_words = {i for ranking in other for i in ranking}
        name: Field = "records" if channel == "records" else "turns"
        for identifier, score in scores.items():
            if identifier in dense:
                near = similarity(dense[identifier], self.calibration)
                finds[identifier].append(_Find(channel, score, similarity=near))
            if identifier in by_words:
                finds[identifier].append(_Find("lexical", score))
        for query in queries:
            find = _Find(query=query)
            for hit in self.hits[name].get(query, ())[: self.turn_budget if name == "turns" else None]:
                if hit.id in scores:
                    finds[hit.id].append(find)

    # --- what a draft becomes, with the adjustments of docs/method.md 5.5 ---

    def _from_record(
        self, identifier: str, record: Record, draft: _Draft, when: TimeRange | None, routes: tuple[str, ...]
    ) -> Candidate:
        bonus = _record_bonus(self.plan.question_type, record)
        if when is not None and _any_overlap(when, _event_spans(record)):
            bonus += 0.08
        score = min(1.0, draft.score + bonus)
        return Candidate(
            id=identifier,
            kind="record",
            text=record.text,
            session=record.session,
            turns=record.turns,
            field_score=score,
            similarity=draft.similarity,
            score=score,
            speaker=record.speaker,
            role=record.role,
            memory_type=record.kind,
            entities=record.entities,
            tags=record.tags,
            temporal=record.temporal,
            said=record.said,
            channels=draft.channels,
            queries=draft.queries,
            nodes=draft.nodes,
            routes=routes,
        )

    def _from_turn(
        self, identifier: str, turn: Turn, draft: _Draft, when: TimeRange | None, routes: tuple[str, ...]
    ) -> Candidate:
        bonus = {"assistant": self.strategy.assistant_bonus, "user": self.strategy.user_bonus}.get(turn.role, 0.0)
        score = min(1.0, min(1.0, draft.score * self.strategy.turn_factor + bonus) + _turn_date_bonus(turn, when))
        return Candidate(
            id=identifier,
            kind="turn",
            text=turn.line,
            session=turn.session,
            turns=(turn.index,),
            field_score=score,
            similarity=draft.similarity,
            score=score,
            speaker=turn.speaker,
            role=turn.role,
            said=turn.at,
            channels=draft.channels,
            queries=draft.queries,
            routes=routes,
        )


_ADVICE_KINDS: frozenset[MemoryType] = frozenset({"preference", "constraint", "event", "failure_pattern"})


def _record_bonus(question_type: QuestionType, record: Record) -> float:
    if question_type == "prior_assistant_response" and record.role in ("assistant", "both"):
        return 0.08
    if question_type == "personalized_advice" and record.kind in _ADVICE_KINDS:
        return 0.05
    if question_type == "temporal" and record.temporal.spans:
        return 0.04
    if question_type in ("aggregate", "comparison") and record.kind == "event":
        return 0.03
    return 0.0


def _event_spans(record: Record) -> tuple[DateSpan, ...]:
    """What a filter is held against: validity completed by the reference date, else the dates, else the text's."""
    t = record.temporal
    first, last = t.t_valid_from or t.t_ref, t.t_valid_to or t.t_ref
    if (t.t_valid_from or t.t_valid_to) and first and last and first.start <= last.end:
        return (DateSpan(first.start, last.end, "interval"),)
    return t.spans or _text_spans(record.text, None)


def _text_spans(text: str, said: date | None) -> tuple[DateSpan, ...]:
    return tuple(mention.span for mention in dates.find(text, said))


def _turn_date_bonus(turn: Turn, when: TimeRange | None) -> float:
    """The filter is soft: it lifts what fits and drops nothing."""
    if when is None:
        return 0.0
    said = turn.at.date() if turn.at is not None else None
    spans = _text_spans(turn.text, said)
    if spans:
        return 0.08 if _any_overlap(when, spans) else 0.0
    return 0.04 if said is not None and when.overlaps(said, said) else 0.0


def _any_overlap(when: TimeRange, spans: Iterable[DateSpan]) -> bool:
    return any(when.overlaps(span.start, span.end) for span in spans)

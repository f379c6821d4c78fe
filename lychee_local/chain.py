"""Chains: candidates in, short lines of evidence out, each of which coheres (docs/method.md 8).

Owns the pool of raw turns of the mode "chain", the gate that decides what joins a chain, and where a chain ends.
Refuses to rank by anything but vectors, and to call a language model. What it needs of the embedder, the vector of a
chain's text, is handed in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lychee_local.backends import Vectors
from lychee_local.lexicon import named
from lychee_local.settings import ChainSettings
from lychee_local.store import Store, VectorHit
from lychee_local.strategy import similarity
from lychee_local.trace import OFF, Recorder
from lychee_local.types import Calibration, Candidate, Chain, Link, Scope, Turn, turn_id, turn_place

Scores = npt.NDArray[np.float64]
Embed = Callable[[Sequence[str]], Vectors]

# Turns read before the filters by speaker and session, in multiples of the pool.
POOL_DEPTH = 50
# Sessions whose own vector is compared with the question, in multiples of those that stay.
SESSION_DEPTH = 5


# --- the pool of the mode "chain" ------------------------------------------------------------------------------------


def pool(
    question: str,
    vector: Vectors,
    store: Store,
    *,
    settings: ChainSettings,
    calibration: Calibration,
    scope: Scope | None = None,
    record: Recorder = OFF,
) -> tuple[Candidate, ...]:
    """The raw turns nearest to the question, `settings.pool` of them or that many per speaker, best first, ties by id.

    Filtered are the best `POOL_DEPTH` pools: first the sessions, then the speakers. A question that names one of
    several speakers is answered from what that one said or was mentioned in; one that names several, or none of two,
    from as many turns of each.
    """
    hits = store.search("turns", vector[np.newaxis], POOL_DEPTH * settings.pool, scope=scope)[0]
    record.hits("", "turns", "cosine", ((hit.id, hit.cosine) for hit in hits[: settings.pool]), query=question)
    if settings.sessions is not None:
        kept = _best_sessions(hits, vector, store, settings.sessions)
        hits = [hit for hit in hits if turn_place(hit.id)[0] in kept]
    turns = store.turns_by_id([hit.id for hit in hits])
    found = [(turns[hit.id], hit) for hit in hits]
    taken: dict[str, Candidate] = {}
    for wanted in _groups(question, store, settings):
        mine = [pair for pair in found if wanted(pair[0])][: settings.pool]
        taken.update((hit.id, _candidate(turn, similarity(hit.cosine, calibration))) for turn, hit in mine)
    best = tuple(sorted(taken.values(), key=lambda c: (-c.score, c.id)))
    record.ranking("pool", best, "score")
    return best


def _best_sessions(hits: Sequence[VectorHit], vector: Vectors, store: Store, number: int) -> set[str]:
    """The sessions whose mean vector is nearest to the question, of those that hold the best turns. (The authors embed
    the text of a whole session, which is far longer than a small embedder reads.)"""
    sessions = list(dict.fromkeys(turn_place(hit.id)[0] for hit in hits))[: SESSION_DEPTH * number]
    means = {s: _mean(store.vectors("turns", [t.id for t in store.turns(s)])) for s in sessions}
    return set(sorted(means, key=lambda s: (-float(means[s] @ vector), s))[:number])


def _groups(question: str, store: Store, settings: ChainSettings) -> list[Callable[[Turn], bool]]:
    """The kinds of turn that each get a pool of their own."""
    speakers = store.speakers() if settings.speakers else ()
    asked = named(question, speakers)
    if len(speakers) > 1 and len(asked) == 1:
        return [lambda turn: turn.speaker == asked[0] or bool(named(turn.text, asked))]
    apart = asked or (speakers if len(speakers) == 2 else ())
    return [_said_by(name) for name in apart] if len(apart) > 1 else [lambda _: True]


def _said_by(name: str) -> Callable[[Turn], bool]:
    return lambda turn: turn.speaker == name


def _candidate(turn: Turn, r: float) -> Candidate:
    return Candidate(
        id=turn.id,
        kind="turn",
        text=turn.line,
        session=turn.session,
        turns=(turn.index,),
        field_score=r,
        similarity=r,
        score=r,
        speaker=turn.speaker,
        role=turn.role,
        said=turn.at,
        channels=("turns",),
    )


# --- chains over candidates ------------------------------------------------------------------------------------------


def link(
    candidates: Sequence[Candidate],
    question: Vectors,
    store: Store,
    *,
    embed: Embed,
    settings: ChainSettings,
    calibration: Calibration,
    keep_rest: bool,
    record: Recorder = OFF,
) -> tuple[tuple[Candidate, ...], tuple[Chain, ...]]:
    """`candidates` in the order of the chains that were grown from them, each with the number of its first chain.

    With `keep_rest` chains are grown from the first `settings.pool` alone, and what none took follows as it was.

    A record and a turn have their stored vectors, a window the mean of its turns'. One that rests on something that was
    forgotten since it was found joins no chain.
    """
    growable = candidates[: settings.pool] if keep_rest else candidates
    known = [(c, v) for c in growable if (v := _vector(c, store)) is not None]
    if not known:
        return (tuple(candidates) if keep_rest else ()), ()
    texts = {c.id: c.text for c, _ in known}
    chains = grow(texts, np.stack([v for _, v in known]), question, embed, settings=settings, calibration=calibration)
    places: dict[str, int] = {}
    for number, grown in enumerate(chains, 1):
        for joined in (one for one in grown.links if one.id not in places):
            places[joined.id] = number
            how = "starts it" if joined is grown.links[0] else f"gate {joined.gate:.2f}"
            record.keep("chains", joined.id, f"chain {number}: {how}")
    tell = record.keep if keep_rest else record.drop
    ends = ", ".join(f"{chain.refused:.2f}" for chain in chains)
    for left in (c for c in growable if c.id not in places):
        tell("chains", left.id, f"no chain took it: they ended where the best gate was {ends}")
    by_id = {c.id: c for c in candidates}
    linked = [replace(by_id[i], chain=number) for i, number in places.items()]
    rest = [c for c in candidates if c.id not in places] if keep_rest else []
    record.ranking("chains", (*linked, *rest), "similarity")
    return (*linked, *rest), chains


def grow(
    texts: dict[str, str],
    vectors: Vectors,
    question: Vectors,
    embed: Embed,
    *,
    settings: ChainSettings,
    calibration: Calibration,
) -> tuple[Chain, ...]:
    """Chains over items with the ids and texts of `texts` and the unit rows of `vectors`, in that order, by relevance
    of their anchors.

    The `chains` most relevant items start one each. What is not in a chain yet joins it by the highest gate, ties by
    id, until that falls below `beta` times the last one's, or to 0. An item may join several chains.
    """
    order = sorted(range(len(texts)), key=list(texts).__getitem__)  # argmax then breaks ties by id
    ids = [list(texts)[i] for i in order]
    rows = np.asarray(vectors, dtype=np.float64)[order]
    relevance = _similarities(rows @ question, calibration)
    anchors = np.argsort(-relevance, kind="stable")[: settings.chains]
    growing = [_Growing([int(a)], [Link(ids[a], float(relevance[a]), 1.0, float(relevance[a]))]) for a in anchors]
    while unfinished := [chain for chain in growing if chain.ended is None and len(chain.members) < len(ids)]:
        contexts = _contexts(unfinished, [texts[i] for i in ids], rows, embed, settings)
        for chain, context in zip(unfinished, contexts, strict=True):
            consistency = _similarities(rows @ context, calibration)
            chain.step(ids, relevance, consistency, _gate(relevance, consistency, settings), settings)
    return tuple(Chain(tuple(c.links), c.ended or "pool", c.refused) for c in growing)


@dataclass(slots=True)
class _Growing:
    """A chain under construction: the places of its members, and what they were when they joined."""

    members: list[int]
    links: list[Link]
    ended: Literal["gate", "length"] | None = None
    refused: float = 0.0

    def step(
        self, ids: Sequence[str], relevance: Scores, consistency: Scores, gate: Scores, settings: ChainSettings
    ) -> None:
        """Let the best item that is left join, or end the chain."""
        free = gate.copy()
        free[self.members] = -1.0
        best = int(np.argmax(free))
        score = float(gate[best])
        if score <= 0.0 or score < settings.beta * self.links[-1].gate:
            self.ended, self.refused = "gate", score
        elif len(self.members) == settings.length:
            self.ended, self.refused = "length", score
        else:
            self.members.append(best)
            self.links.append(Link(ids[best], float(relevance[best]), float(consistency[best]), score))


def _gate(relevance: Scores, consistency: Scores, settings: ChainSettings) -> Scores:
    if settings.gate == "multiply":
        return relevance * consistency
    if settings.gate == "weighted":
        return settings.alpha * relevance + (1.0 - settings.alpha) * consistency
    return relevance if settings.gate == "relevance" else consistency


def _contexts(
    chains: Sequence[_Growing], texts: Sequence[str], rows: Scores, embed: Embed, settings: ChainSettings
) -> Scores:
    """What each chain is compared by, one unit row a chain; all that is to be embedded is embedded in one call."""
    if settings.context == "concatenated":
        several = [chain for chain in chains if len(chain.members) > 1]
        made = iter(embed(["\n\n".join(texts[m] for m in chain.members) for chain in several]) if several else ())
        return np.stack([rows[c.members[0]] if len(c.members) == 1 else next(made) for c in chains])
    if settings.context == "last":
        return np.stack([rows[chain.members[-1]] for chain in chains])
    return np.stack([_mean(rows[chain.members]) for chain in chains])


def _vector(candidate: Candidate, store: Store) -> Scores | None:
    try:
        if candidate.kind == "record":
            return _mean(store.vectors("records", [candidate.id]))
        return _mean(store.vectors("turns", [turn_id(candidate.session, turn) for turn in candidate.turns]))
    except KeyError:
        return None


def _mean(rows: Vectors | Scores) -> Scores:
    """The mean direction of unit rows; no direction where they cancel each other out."""
    total: Scores = np.asarray(rows, dtype=np.float64).sum(axis=0)
    length = float(np.linalg.norm(total))
    return total / length if length > 0.0 else total


def _similarities(cosines: Scores, calibration: Calibration) -> Scores:
    """r of `strategy.similarity`, item by item."""
    return np.asarray([similarity(float(cosine), calibration) for cosine in cosines], dtype=np.float64)

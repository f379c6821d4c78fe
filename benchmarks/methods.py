"""The methods that `run` compares: named configurations of the product, baselines, and other memory systems.

Owns the names. A baseline stores the same turns and is answered by the same prompt; only what it shows is its own
(baselines.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.peers.kinds import LLAMAINDEX, MEM0, Kind
from lychee_local import ChainSettings, RecallSettings, Settings
from lychee_local.settings import EncodeSettings, Gate, SegmentSettings

Shows = Literal["recalled", "dense", "bm25", "fused", "neighbours", "sessions", "reranked", "all", "gold", "nothing"]

# A single channel gives turns or records one by one: so many that a budget of tokens, not their number, decides.
MANY = 80


@dataclass(frozen=True, slots=True)
class Method:
    """What is stored and how it is recalled (`settings`), and what of it is shown. `records` says whether segments have
    to be encoded at all; `items` is the most that are shown, None for the product's own number. A `peer` stores and
    recalls by itself."""

    about: str
    settings: Settings = field(default_factory=Settings)
    shows: Shows = "recalled"
    records: bool = True
    items: int | None = None
    peer: Kind | None = None


def method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def within(settings: Settings, tokens: int | None, k: int | None = None) -> Settings:
    """The same with another budget for the evidence, and another number of items."""
    recall = replace(settings.recall, evidence_tokens=tokens)
    return replace(settings, recall=recall if k is None else replace(recall, k=k))


def _recall(about: str, recall: RecallSettings, *, records: bool = True, items: int | None = None) -> Method:
    return Method(about, Settings(recall=recall), records=records, items=items)


_FULL = RecallSettings()
_CHANNELS = _FULL.channels
_CHAIN = replace(_FULL, mode="chain")
_LAST = ChainSettings(context="last")
_GATES: tuple[Gate, ...] = ("relevance", "consistency", "weighted")


def _only(channel: str) -> Method:
    alone = replace(_FULL, planner="none", channels=(channel,), windows=False, selection="none")
    return _recall(f"the channel {channel} alone, items by its score", alone, items=MANY)


def _minus(channel: str) -> Method:
    rest = tuple(c for c in _CHANNELS if c != channel)
    return _recall(f"without the channel {channel}", replace(_FULL, channels=rest))


def _chain(about: str, chain: ChainSettings) -> Method:
    return _recall(about, replace(_CHAIN, chain=chain), records=False)


_PRODUCT = {
    "lychee": Method("the product as it is shipped"),
    "chain": _recall("Chain-of-Memory: raw turns alone, in chains of evidence", _CHAIN, records=False),
    "lychee+chain": _recall("the product, what it found in chains", replace(_FULL, mode="lychee+chain")),
}
_BASELINES = {
    "dense": Method("RAG by turn: turns by their cosine to the question", shows="dense", records=False),
    "bm25": Method("turns by BM25", shows="bm25", records=False),
    "fused": Method("turns by the fused ranks of dense and bm25", shows="fused", records=False),
    "neighbours": Method("fused, each with the turn before and after it", shows="neighbours", records=False),
    "sessions": Method(
        "RAG by session: whole sessions by their cosine to the question", shows="sessions", records=False
    ),
    "reranked": Method("RAG by turn, the best 100 reordered by the reranker", shows="reranked", records=False),
    "full": Method("full context: all turns, the newest that fit", shows="all", records=False),
    "gold": Method("evidence only: the annotated turns", shows="gold", records=False),
    "none": Method("no memory at all", shows="nothing", records=False),
}
_PEERS = {
    "mem0": Method("mem0, with our models (benchmarks/README.md)", peer=MEM0),
    "llamaindex": Method("LlamaIndex's memory blocks, with our models", peer=LLAMAINDEX),
}
_ABLATIONS = {
    "eager": Method("every exchange is a segment", Settings(segment=SegmentSettings(trigger="eager"))),
    "fixed": Method("segments of fixed size", Settings(segment=SegmentSettings(trigger="fixed"))),
    "summary": Method(
        "a summary for each segment instead of typed records",
        Settings(encode=EncodeSettings(representation="summary")),
    ),
    "no-reference": Method(
        "segments encoded without what came before", Settings(encode=EncodeSettings(reference_context=False))
    ),
    "records-only": _recall("only what the records channel finds", replace(_FULL, channels=("records",))),
    "no-planner": _recall("the question itself is the only query", replace(_FULL, planner="none")),
    "rules-planner": _recall("planned by wording alone", replace(_FULL, planner="rules")),
    "llm-planner": _recall("planned by the model, every question", replace(_FULL, planner="llm")),
    "no-selection": _recall("no fusion, reranking, diversity: items by field score", replace(_FULL, selection="none")),
    "no-facts": _recall("conclusions from passages, like everything else", replace(_FULL, facts=False)),
    "no-windows": _recall("turns without the turns around them", replace(_FULL, windows=False)),
    "no-fusion": _recall("routes joined by their best score", replace(_FULL, weight_best=1.0, weight_route=0.0)),
    "no-coverage": _recall("no places for each route", replace(_FULL, coverage=False)),
    "no-diversity": _recall(
        "the best scores, however alike", replace(_FULL, weight_relevance=1.0, weight_signature=0.0)
    ),
    "by-relevance": _recall("evidence in the order of relevance", replace(_FULL, evidence_order="relevance")),
    "unresolved": _recall("no dates behind yesterday and the like", replace(_FULL, evidence_dates=False)),
    "uncounted": _recall("lengths of time left to the model", replace(_FULL, counted=False)),
    "unsaid": _recall("not shown when things were said", replace(_FULL, evidence_said=False)),
}
_CHANNELWISE = {f"only-{channel}": _only(channel) for channel in _CHANNELS if channel != "temporal"} | {
    f"no-{channel}": _minus(channel) for channel in _CHANNELS
}
_CHAINS = (
    {f"chain-{gate}": _chain(f"chain with the gate {gate}", ChainSettings(gate=gate)) for gate in _GATES}
    | {f"chain-beta-{b:g}": _chain(f"chain, beta {b:g}", ChainSettings(beta=b)) for b in (0.3, 0.7)}
    | {f"chain-k-{k}": _chain(f"chain from a pool of {k}", ChainSettings(pool=k)) for k in (1, 5, 10, 50)}
    | {
        "chain-endless": _chain("chain without truncation", ChainSettings(beta=0.0)),
        "chain-last": _chain("chain by its last item's vector", _LAST),
        "chain-texts": _chain("chain by its texts embedded as one", ChainSettings(context="concatenated")),
    }
)
_THRESHOLDS = {
    f"cut-{t:g}": Method(f"segments cut at {t:g}", Settings(segment=SegmentSettings(cut_threshold=t)))
    for t in (0.3, 0.4, 0.5, 0.6, 0.7)
}

METHODS: dict[str, Method] = {
    **_PRODUCT,
    **_BASELINES,
    **_PEERS,
    **_ABLATIONS,
    **_CHANNELWISE,
    **_CHAINS,
    **_THRESHOLDS,
}

"""How much of the gold evidence a method shows, within a budget of tokens, without any answer model.

A gold turn counts as found if it, or a window or record whose evidence contains it, is among the items shown: the best
first, until the next one would pass the budget. An item costs 1.35 tokens a word and 12 for its heading, the same
estimate for every method.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from benchmarks.questions import Conversation, Question
from lychee_local import ChainSettings, Memory, RecallSettings, Settings
from lychee_local.types import Evidence

# The budget is applied here, by the same estimate for every method; the product knows of it where it makes windows.
_FULL = RecallSettings(evidence_tokens=None)
_PLAIN = replace(_FULL, planner="none", windows=False, selection="none")


def _without(channel: str) -> RecallSettings:
    return replace(_FULL, channels=tuple(c for c in _FULL.channels if c != channel))


def _chains(settings: RecallSettings) -> dict[str, RecallSettings]:
    """A mode with chains as the paper has it, and under every gate, without an end, and with the last vector: these all
    without the embedder (the mean, or the last vector, stands for a chain), which takes a hundredth of the time."""
    mean = ChainSettings(context="mean")
    variants: dict[str, ChainSettings] = {
        "": ChainSettings(),
        "-mean": mean,
        "-last": replace(mean, context="last"),
        "-relevance": replace(mean, gate="relevance"),
        "-consistency": replace(mean, gate="consistency"),
        "-weighted": replace(mean, gate="weighted"),
        "-endless": replace(mean, beta=0.0),
    }
    return {settings.mode + name: replace(settings, chain=chain) for name, chain in variants.items()}


METHODS: dict[str, RecallSettings] = {
    "lychee": _FULL,
    "dense": replace(_PLAIN, channels=("turns",)),
    "records": replace(_PLAIN, channels=("records",)),
    "paper-channels": _without("lexical"),
    "no-planner": replace(_FULL, planner="none"),
    "no-windows": replace(_FULL, windows=False),
    "no-selection": replace(_FULL, selection="none"),
    "no-records": _without("records"),
    "no-nodes": _without("nodes"),
    "no-turns": _without("turns"),
    **_chains(replace(_FULL, mode="chain")),
    **_chains(replace(_FULL, mode="lychee+chain")),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Of one question: the share of gold turns shown, the tokens spent on showing them, the seconds `recall` took."""

    question: Question
    recall: float
    tokens: float
    seconds: float
    error: str = ""


def settings(method: str, budget: int = 1_800) -> Settings:
    """The configuration behind a method's name, with windows that are made for `budget` tokens.

    Raises:
        ValueError: there is no such method; the message lists those there are.
    """
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; there are {', '.join(METHODS)}")
    recall = METHODS[method]
    return Settings(recall=replace(recall, evidence_tokens=budget) if recall.windows else recall)


def measure(memory: Memory, conversation: Conversation, *, budget: int, k: int) -> list[Found]:
    """Ask every question that has gold evidence. A question that fails is reported as an error, not as a miss."""
    results = []
    for question in conversation.questions:
        if not question.gold:
            continue
        began = time.perf_counter()
        evidence = memory.recall(question.text, k=k).evidence
        seconds = time.perf_counter() - began
        shown, tokens = _within(evidence, budget)
        refs = {ref for item in shown for ref in item.refs}
        hits = sum(1 for turn in question.gold if turn in refs)
        results.append(Found(question, hits / len(question.gold), tokens, seconds))
    return results


def _within(evidence: tuple[Evidence, ...], budget: int) -> tuple[list[Evidence], float]:
    shown, tokens = [], 0.0
    for item in evidence:
        cost = 1.35 * len(item.text.split()) + 12
        if tokens + cost > budget:
            break
        shown.append(item)
        tokens += cost
    return shown, tokens

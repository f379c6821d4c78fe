"""Where conversations are cut, and what that does to the evidence found: the paper's study of the threshold (its
Figure 5) on our embedder, with records by rules, beside the two triggers that look at no meaning."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean

from benchmarks import evidence
from benchmarks.questions import Conversation
from lychee_local import Memory, Message
from lychee_local.backends import Embedder
from lychee_local.settings import SegmentSettings


@dataclass(frozen=True, slots=True)
class Cut:
    """One conversation, cut in one way. `recall` is the share of evidence turns shown, question by question."""

    conversation: str
    turns: int
    segments: int
    tokens: int
    records: int
    reasons: dict[str, int]
    recall: dict[str, float] = field(default_factory=dict)
    categories: dict[str, str] = field(default_factory=dict)


def ways(thresholds: Sequence[float]) -> dict[str, SegmentSettings]:
    """The ways to cut, by name: a threshold each, then the triggers without one."""
    by_threshold = {f"{t:g}": SegmentSettings(cut_threshold=t) for t in thresholds}
    return by_threshold | {"eager": SegmentSettings(trigger="eager"), "fixed": SegmentSettings(trigger="fixed")}


def cut(
    conversation: Conversation,
    messages: Sequence[Message],
    way: str,
    settings: SegmentSettings,
    folder: Path,
    *,
    embedder: Embedder,
    budget: int,
    k: int,
) -> Cut:
    """Cut and encode a conversation below `folder`, and ask its questions. A result that lies there is not made again;
    a memory that a killed run left half built is built on."""
    kept = folder / f"{conversation.id}.{way}.json"
    if kept.exists():
        return Cut(**json.loads(kept.read_text(encoding="utf-8")))
    configured = replace(evidence.settings("lychee", budget), segment=settings)
    home = folder / f"home-{way}"
    with Memory.open(
        conversation.id, home=home, llm=None, embedder=embedder, reranker=None, settings=configured
    ) as memory:
        memory.remember(messages)
        memory.flush()
        found = evidence.measure(memory, conversation, budget=budget, k=k)
        segments = memory.segments()
        result = Cut(
            conversation.id,
            turns=len(memory.turns()),
            segments=len(segments),
            tokens=sum(segment.tokens for segment in segments),
            records=len(memory.records()),
            reasons=dict(Counter(segment.reason for segment in segments)),
            recall={f.question.id: f.recall for f in found},
            categories={f.question.id: f.question.category for f in found},
        )
    kept.write_text(json.dumps(asdict(result)) + "\n", encoding="utf-8")
    print(f"{conversation.id} at {way}: {len(segments)} segments", file=sys.stderr, flush=True)
    return result


def row(cuts: Sequence[Cut]) -> dict[str, object]:
    """All conversations of one way to cut them, together; recall in percent, a mean over questions."""
    recall = {question: share for c in cuts for question, share in c.recall.items()}
    category = {question: name for c in cuts for question, name in c.categories.items()}
    segments = sum(c.segments for c in cuts)
    shares = {"all": list(recall.values())}
    for question, share in recall.items():
        shares.setdefault(category[question], []).append(share)
    reasons = sum((Counter(c.reasons) for c in cuts), Counter[str]())
    return {
        "segments": segments,
        "segments_per_conversation": round(segments / len(cuts), 1),
        "turns_per_segment": round(sum(c.turns for c in cuts) / segments, 2),
        "tokens_per_segment": round(sum(c.tokens for c in cuts) / segments),
        "records": sum(c.records for c in cuts),
        "reasons": dict(reasons.most_common()),
        "questions": len(recall),
        "evidence_recall": {name: round(100 * mean(each), 1) for name, each in shares.items() if each},
    }


def show(rows: Mapping[str, Mapping[str, object]]) -> None:
    print(f"{'cut at':<7} {'segments':>8} {'turns each':>10} {'tokens each':>11}  recall and reasons")
    for name, cells in rows.items():
        print(
            f"{name:<7} {cells['segments']!s:>8} {cells['turns_per_segment']!s:>10} {cells['tokens_per_segment']!s:>11}"
            f"  {cells['evidence_recall']} {cells['reasons']}"
        )

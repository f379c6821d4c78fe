"""What construction makes of a conversation: segments, records, what they cost, and the facts they cover.

Coverage: an annotated fact counts as covered at c if a record whose evidence contains one of the fact's turns has a
cosine of at least c to it, under the memory's own embedder. A turn's own words, unencoded, are the baseline.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from benchmarks.locomo import Conversation
from lychee_local import Memory
from lychee_local.backends import Vectors
from lychee_local.types import Progress, Record


def show(progress: Progress) -> None:
    if progress.stage == "encode":
        print(
            f"segment {progress.done}/{progress.total}: {progress.records} records, {progress.output_tokens} tokens, "
            f"{progress.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def summary(memory: Memory, conversation: Conversation) -> dict[str, object]:
    turns, segments, records = memory.turns(), memory.segments(), memory.records()
    ref = {(t.session, t.index): t.ref for t in turns}
    stats = memory.stats()
    stored = {t.ref for t in turns}
    facts = [f for f in conversation.facts if set(f.gold) & stored]
    said = [({t.ref}, t.line) for t in turns]
    written = [({ref[r.session, i] for i in r.turns}, r.text) for r in records]
    table: dict[str, object] = {
        "turns": len(turns),
        "segments": len(segments),
        "turns_per_segment": round(len(turns) / max(1, len(segments)), 2),
        "reasons": dict(Counter(s.reason for s in segments)),
        "records": len(records),
        "records_per_segment": round(len(records) / max(1, len(segments)), 2),
        "origins": dict(Counter(r.origin for r in records)),
        "wrong_speaker": _wrong_speaker(records, {(t.session, t.index): t.speaker for t in turns}),
        "construction_tokens": stats.construction_tokens,
        "facts": len(facts),
    }
    vectors = memory.embed([f.text for f in facts])
    for name, items in (("verbatim", said), ("records", written)):
        best = _best_cosine(vectors, [set(f.gold) for f in facts], items, memory)
        table[f"covered_{name}"] = {str(c): round(100 * float(np.mean(best >= c)), 1) for c in (0.6, 0.7)}
    for key, value in table.items():
        print(f"{key:<20} {value}")
    return table


def _best_cosine(
    facts: Vectors, gold: list[set[str]], items: list[tuple[set[str | None], str]], memory: Memory
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    similar = facts @ memory.embed([text for _, text in items]).T
    allowed = np.array([[bool(g & sources) for sources, _ in items] for g in gold])
    best: np.ndarray[tuple[int], np.dtype[np.float32]] = np.where(allowed, similar, -1.0).max(axis=1, initial=-1.0)
    return best


def _wrong_speaker(records: tuple[Record, ...], speaker: dict[tuple[str, int], str | None]) -> int:
    """Records that name as their speaker somebody who said none of their turns."""
    return sum(1 for r in records if r.speaker and all(speaker[r.session, i] not in (None, r.speaker) for i in r.turns))

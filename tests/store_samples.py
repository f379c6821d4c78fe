"""Small memories for the store's tests: vectors that depend on the text alone, and one way to fill a store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lychee_local.store import EmbedderIdentity, Store
from lychee_local.store.vectors import Vectors
from lychee_local.types import DateSpan, Decision, Exchange, Record, Segment, Signals, Temporal, Turn, Usage

EMBEDDER = EmbedderIdentity("sample", "5a" * 32, 8)
SIGNALS = Signals(0.5, 0.1, 0.25, -0.125, 1.5, -1.3, 0.15, 0.625, 0.3775406687981454)


def unit(*texts: str, dimension: int = EMBEDDER.dimension) -> Vectors:
    """One unit vector a text: the same text gives the same vector, other texts give unrelated ones."""
    rows = np.zeros((len(texts), dimension), dtype=np.float64)
    for row, text in zip(rows, texts, strict=True):
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        row[:] = np.random.default_rng(seed).normal(size=dimension)
    unit_length: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit_length


def opened(home: Path, user: str = "ana", **options: Any) -> Store:
    return Store.open(home, user, embedder=EMBEDDER, **options)


def some_turns(session: str, start: int, count: int) -> list[Turn]:
    at = datetime(2023, 5, 8, 13, 56, tzinfo=UTC)
    return [
        Turn(session, i, f"what was said {i} in {session}", speaker="Ana", at=at, ref=f"D{i}")
        for i in range(start, start + count)
    ]


def some_decisions(turns: Sequence[Turn]) -> list[Decision]:
    return [
        Decision(
            Exchange(t.session, t.index, t.index, t.line, 9), "append" if t.index else "start", None, SIGNALS, 9, 1
        )
        for t in turns
    ]


def say(store: Store, session: str, count: int) -> list[Turn]:
    """One commit: `count` new turns of `session`, their decisions, and one segment of them."""
    turns = some_turns(session, store.following(session), count)
    decisions = some_decisions(turns)
    with store.transaction() as tx:
        tx.add_turns(turns, unit(*[t.line for t in turns]))
        tx.add_decisions(decisions, unit(*[d.exchange.text for d in decisions]))
        tx.add_segments([segment_of(turns)])
    return turns


def segment_of(turns: Sequence[Turn]) -> Segment:
    return Segment(turns[0].session, turns[0].index, turns[-1].index, "session_flush", 9 * len(turns), len(turns), 1.0)


def some_record(segment: Segment, text: str, **fields: Any) -> Record:
    day = DateSpan(date(2023, 5, 8), date(2023, 5, 8), "day")
    values: dict[str, Any] = {
        "kind": "fact",
        "turns": (segment.start,),
        "entities": ("Ana",),
        "tags": ("Tea",),
        "temporal": Temporal(day),
        "speaker": "Ana",
        "said": datetime(2023, 5, 8, 13, 56, tzinfo=UTC),
    }
    return Record(segment.session, text, segment=segment.id, **{**values, **fields})


def encode(store: Store, segment: Segment, records: Sequence[Record], note: str = "") -> None:
    """One commit: what encoding `segment` gave."""
    missing = store.missing_nodes(segment, records)
    with store.transaction() as tx:
        rows = unit(*[r.embedded_text for r in records])
        labels = dict(zip([n.id for n, _ in missing], unit(*[text for _, text in missing]), strict=True))
        tx.add_encoding(segment, records, rows, labels, note)


def filled(home: Path, user: str = "ana", **options: Any) -> Store:
    """An open memory of two sessions, three segments, three records, one segment pending."""
    store = opened(home, user, **options)
    say(store, "S1", 3)
    first = store.segments("S1")[0]
    encode(store, first, [some_record(first, "Ana drinks tea"), some_record(first, "Ana moved", kind="event")], "Ana")
    say(store, "S2", 2)
    second = store.segments("S2")[0]
    encode(store, second, [some_record(second, "Ana drinks tea", entities=("Ana", "Ben"))])
    say(store, "S1", 2)
    return store


def content(store: Store) -> dict[str, Any]:
    """Everything that a store says it holds, for comparison with another one."""
    return {
        "turns": [store.turns(s) for s in store.sessions()],
        "decisions": [store.decisions(s) for s in store.sessions()],
        "vectors": [store.exchange_vectors(s).tolist() for s in store.sessions()],
        "segments": store.segments(),
        "pending": store.pending(),
        "records": store.records(),
        "nodes": store.nodes(),
        "notes": [store.note(s) for s in store.sessions()],
        "near turns": store.search("turns", unit("a"), 100),
        "near records": store.search("records", unit("a"), 100),
        "near nodes": store.search("nodes", unit("a"), 100),
    }


def ingest(home: str, acknowledge: Any) -> None:
    """In a child process: commit until killed, sending the number of turns after each commit."""
    with opened(Path(home), wait_seconds=30) as store:
        while True:
            turns = say(store, "S", 2)
            acknowledge.send(len(store.turns("S")))
            segment = segment_of(turns)
            encode(store, segment, [some_record(segment, f"Ana said {t.text}", turns=(t.index,)) for t in turns])
            store.add_usage(Usage("encode", "sample", 10, 5))


def hold(home: str, ready: Any) -> None:
    """In a child process: hold the writer's lock until told to go."""
    with opened(Path(home)):
        ready.send("held")
        ready.recv()


def open_fresh(home: str, result: Any) -> None:
    """In a child process: open a memory that may not exist yet and add two turns to it."""
    with opened(Path(home), wait_seconds=30) as store:
        say(store, "S", 2)
        result.send(len(store.turns("S")))

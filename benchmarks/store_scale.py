"""How the store grows: open, commit and search times for one user with N turns.

    python benchmarks/store_scale.py --turns 10000 --dimension 384

Text and vectors are synthetic (a fixed vocabulary, seeded): a session of 40 turns, a segment of 5 turns, a record for
each turn with two entities and two tags. Vectors are random around 200 topics, so neighbours exist. Every commit is
one exchange or one encoding, fsync included. Reported: median, p90 and p99 in milliseconds, and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from lychee_local.store import EmbedderIdentity, Store
from lychee_local.store.vectors import Vectors
from lychee_local.types import Decision, Exchange, Record, Segment, Turn

WORDS = ("tea", "garden", "pottery", "train", "violin", "river", "winter", "bakery", "letter", "mountain", "harbour")
TURNS_A_SESSION, TURNS_A_SEGMENT, TOPICS = 40, 5, 200


class Source:
    """Seeded text and vectors."""

    def __init__(self, dimension: int) -> None:
        self._random = np.random.default_rng(7)
        self._centres = self._random.normal(size=(TOPICS, dimension))

    def vectors(self, count: int) -> Vectors:
        rows = self._centres[self._random.integers(TOPICS, size=count)]
        rows = rows + self._random.normal(size=rows.shape)
        unit: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        return unit

    def sentence(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS, size=words))

    def name(self, kind: str, size: int) -> str:
        return f"{kind} {int(size * self._random.power(0.3))}"  # a few names are frequent, most are rare


def fill(store: Store, source: Source, turns: int) -> dict[str, list[float]]:
    """Commit `turns` turns with their decisions, segments, records and nodes; the milliseconds of each commit."""
    spent: dict[str, list[float]] = {"commit of a turn": [], "commit of an encoding": []}
    for number in range(turns):
        session, index = f"session-{number // TURNS_A_SESSION}", number % TURNS_A_SESSION
        turn = Turn(session, index, source.sentence(25), speaker="Ana" if index % 2 else "Ben")
        decision = Decision(Exchange(session, index, index, turn.line, 38), "append", None, None, 0, 0)
        rows = source.vectors(2)
        start = time.perf_counter()
        with store.transaction() as tx:
            tx.add_turns([turn], rows[:1])
            tx.add_decisions([decision], rows[1:])
        spent["commit of a turn"].append(1e3 * (time.perf_counter() - start))
        if index % TURNS_A_SEGMENT == TURNS_A_SEGMENT - 1:
            spent["commit of an encoding"].append(encode(store, source, session, index))
    return spent


def encode(store: Store, source: Source, session: str, end: int) -> float:
    first = end - TURNS_A_SEGMENT + 1
    segment = Segment(session, first, end, "target_length", 190, TURNS_A_SEGMENT, 1.0)
    records = [
        Record(
            session,
            source.sentence(15),
            "fact",
            (t,),
            segment.id,
            (source.name("person", 300), source.name("place", 3000)),
            (source.name("tag", 100), source.name("detail", 3000)),
        )
        for t in range(first, end + 1)
    ]
    missing = store.missing_nodes(segment, records)
    rows = source.vectors(len(records) + len(missing))
    start = time.perf_counter()
    with store.transaction() as tx:
        tx.add_segments([segment])
        labels = {node.id: row for (node, _), row in zip(missing, rows[len(records) :], strict=True)}
        tx.add_encoding(segment, records, rows[: len(records)], labels, "")
    return 1e3 * (time.perf_counter() - start)


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        spent.append(1e3 * (time.perf_counter() - start))
    return spent


def open_and_close(home: Path, embedder: EmbedderIdentity) -> None:
    Store.open(home, "scale", embedder=embedder, read_only=True).close()


def measure(turns: int, dimension: int, home: Path) -> dict[str, object]:
    embedder = EmbedderIdentity("synthetic", "0" * 64, dimension)
    source = Source(dimension)
    with Store.open(home, "scale", embedder=embedder) as store:
        spent = fill(store, source, turns)
    spent["open"] = timed(lambda: open_and_close(home, embedder), 3)
    with Store.open(home, "scale", embedder=embedder, read_only=True) as store:
        spent["first search of nodes"] = timed(lambda: store.search("nodes", source.vectors(1), 45), 1)
        spent["search turns, 1 query"] = timed(lambda: store.search("turns", source.vectors(1), 20), 50)
        spent["search turns, 8 queries"] = timed(lambda: store.search("turns", source.vectors(8), 20), 50)
        spent["search records, 1 query"] = timed(lambda: store.search("records", source.vectors(1), 45), 50)
        spent["search nodes, 1 query"] = timed(lambda: store.search("nodes", source.vectors(1), 45), 50)
        stats = store.stats()
    return {
        "turns": turns,
        "dimension": dimension,
        "records": stats.records,
        "nodes": stats.nodes,
        "bytes_per_turn": round(sum(stats.bytes.values()) / turns),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "milliseconds": {
            name: {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}
            for name, values in spent.items()
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "commit": commit_id(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
    }


def commit_id() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    run = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def show(result: dict[str, object]) -> None:
    spent = result["milliseconds"]
    assert isinstance(spent, dict)
    table = Table("milliseconds", "p50", "p90", "p99", title=f"{result['turns']} turns, {result['nodes']} nodes")
    for name, values in spent.items():
        table.add_row(name, *(f"{values[p]:.2f}" for p in ("p50", "p90", "p99")))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--folder", type=Path, help="where the memory is made; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        result = measure(options.turns, options.dimension, Path(home))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

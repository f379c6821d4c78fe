"""How the store grows: one user with N turns, opened, written to and searched.

    python -m benchmarks.store_scale measure --text LOCOMO.json --turns 100000 --with-graph --append FILE
    python -m benchmarks.store_scale measure --text LOCOMO.json --turns 1000000 --fields turns --with-graph
    python -m benchmarks.store_scale plot FILE --out docs/plots/store-scale.png      # needs the group `bench`
    python -m benchmarks.store_scale ingest --text LOCOMO.json

`measure`: the texts are LoCoMo's turns, resampled with a growing vocabulary (benchmarks/words_scale.py), in sessions of
40 turns, every turn its own exchange; a segment of 5 turns gives 5 records with two entities, two tags and, each third,
a day. Vectors are synthetic: seeded, around 200 topics, so that neighbours exist. They are stored by 520 turns a
commit. The graphs are built over all but the last `EXACT_BELOW // 2` rows: the tail that ingestion leaves.

"Cold" is the first search of a fresh process that dropped the memory's files from the page cache, opening not counted;
"warm" is one process after it has searched 60 times. Commits are those of one exchange (a turn, a decision, their two
vectors) and of one encoding (five records), fsync included, by a writer that was just started, and by one whose graphs
are loaded and take in two rows for each that comes. Peak memory includes the mapped pages of the flat files.

`ingest`: seconds in the embedder against seconds of `Memory.remember(encode=False)` around it, in one run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.words_scale import questions, texts
from lychee_local import Memory, Settings, cards, pull
from lychee_local.backends import Embedder, Vectors
from lychee_local.intake import read_locomo
from lychee_local.store import EmbedderIdentity, Precision, Store
from lychee_local.store.disk import OsDisk
from lychee_local.store.log import read_manifest
from lychee_local.store.vectors import EXACT_BELOW, ROWS_PER_LOAD, VectorIndex
from lychee_local.store.view import ROWS
from lychee_local.types import DateSpan, Decision, Exchange, Record, Scope, Segment, Temporal, TimeRange, Turn

USER = "scale"
SESSION, SEGMENT, SESSIONS_A_COMMIT, TOPICS = 40, 5, 13, 200
BETWEEN_SESSIONS = timedelta(hours=3.5)  # a million turns then last ten years
BEGINNING = datetime(2015, 1, 1, 8, tzinfo=UTC)
NEVER = sys.maxsize  # as exact_below: no graph
K, WARMING, ASKED = 20, 60, 300

Searches = dict[str, Callable[[Store], object]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What memory is made."""

    turns: int
    dimension: int
    precision: Precision
    fields: Literal["all", "turns"]
    text: Path
    home: Path

    @property
    def embedder(self) -> EmbedderIdentity:
        return EmbedderIdentity("synthetic", "0" * 64, self.dimension)

    def open(self, *, read_only: bool = False, exact_below: int = EXACT_BELOW) -> Store:
        return Store.open(
            self.home,
            USER,
            embedder=self.embedder,
            precision=self.precision,
            read_only=read_only,
            exact_below=exact_below,
        )


# --- what is stored --------------------------------------------------------------------------------------------------


class Names:
    """The more often a name came, the more often it comes again; new ones come ever more rarely."""

    def __init__(self, kind: str, pick: random.Random) -> None:
        self._kind, self._pick, self._drawn = kind, pick, [f"{kind} 0"]

    def draw(self) -> str:
        new = self._pick.random() < len(self._drawn) ** -0.3
        number = int(self._pick.random() * len(self._drawn))
        self._drawn.append(f"{self._kind} {len(self._drawn)}" if new else self._drawn[number])
        return self._drawn[-1]


class Source:
    """Seeded sessions and vectors. `first` is the number of its first session."""

    def __init__(self, shape: Shape, first: int = 0) -> None:
        self._vectors = np.random.default_rng(7 + first)
        self._centres = np.random.default_rng(7).standard_normal((TOPICS, shape.dimension), dtype=np.float32)
        self._lines = texts(json.loads(shape.text.read_text(encoding="utf-8")), 10 * shape.turns + 1_000_000)
        pick = random.Random(7 + first)
        self._entities, self._tags = Names("Place", pick), Names("tag", pick)
        self._number = first

    def vectors(self, count: int) -> Vectors:
        rows = self._centres[self._vectors.integers(TOPICS, size=count)]
        rows += self._vectors.standard_normal(rows.shape, dtype=np.float32)
        unit: Vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit

    def session(self) -> list[Turn]:
        at, name = BEGINNING + self._number * BETWEEN_SESSIONS, f"session-{self._number}"
        self._number += 1
        spoken = [line.partition(": ") for line in islice(self._lines, SESSION)]
        return [
            Turn(name, i, text, speaker=speaker, at=at + timedelta(minutes=i), ref=f"D{i}")
            for i, (speaker, _, text) in enumerate(spoken)
        ]

    def records(self, turns: Sequence[Turn], segment: Segment) -> list[Record]:
        return [
            Record(
                t.session,
                f"{t.speaker} said: {t.text}",
                "fact",
                (t.index,),
                segment.id,
                (str(t.speaker), self._entities.draw()),
                (self._tags.draw(), self._tags.draw()),
                Temporal(DateSpan(t.at.date(), t.at.date(), "day")) if t.at and not t.index % 3 else Temporal(),
                speaker=t.speaker,
                said=t.at,
            )
            for t in turns
        ]


def decision(turn: Turn) -> Decision:
    return Decision(Exchange(turn.session, turn.index, turn.index, turn.line, 38), "append", None, None, 0, 0)


def segments(turns: Sequence[Turn]) -> Iterator[tuple[Segment, Sequence[Turn]]]:
    for start in range(0, len(turns), SEGMENT):
        part = turns[start : start + SEGMENT]
        yield Segment(part[0].session, part[0].index, part[-1].index, "target_length", 190, len(part), 1.0), part


def store_sessions(store: Store, source: Source, count: int, *, encoded: bool) -> list[Turn]:
    """Commit `count` sessions at once; their turns."""
    said = [source.session() for _ in range(count)]
    turns = [turn for session in said for turn in session]
    cut = [found for session in said for found in segments(session)]
    made = [(segment, source.records(part, segment)) for segment, part in cut] if encoded else []
    lacking = [store.missing_nodes(segment, records) for segment, records in made]
    with store.transaction() as tx:
        tx.add_turns(turns, source.vectors(len(turns)))
        tx.add_decisions([decision(t) for t in turns], source.vectors(len(turns)))
        tx.add_segments([segment for segment, _ in cut])
        for (segment, records), nodes in zip(made, lacking, strict=True):
            labels = dict(zip([node.id for node, _ in nodes], source.vectors(len(nodes)), strict=True))
            tx.add_encoding(segment, records, source.vectors(len(records)), labels, "")
    return turns


# --- what is measured, each in a process of its own ------------------------------------------------------------------


def build(shape: Shape) -> dict[str, object]:
    source, began = Source(shape), time.perf_counter()
    sessions = -(-shape.turns // SESSION)
    with shape.open(exact_below=NEVER) as store:
        for done in range(0, sessions, SESSIONS_A_COMMIT):
            some = min(SESSIONS_A_COMMIT, sessions - done)
            store_sessions(store, source, some, encoded=shape.fields == "all")
            print(f"\r{(done + some) * SESSION} turns", end="", file=sys.stderr)
        stats = store.stats()
    seconds = time.perf_counter() - began
    print(file=sys.stderr)
    return {
        "records": stats.records,
        "nodes": stats.nodes,
        "seconds": round(seconds, 1),
        "turns_per_second": round(stats.turns / seconds),
        "megabytes": peak_megabytes(),
    }


def build_graphs(shape: Shape) -> dict[str, object]:
    with shape.open(read_only=True, exact_below=NEVER) as store:
        folder = store.path
    seen = read_manifest(folder)
    assert seen is not None
    manifest, began, points = seen[1], time.perf_counter(), {}
    for field, name in ROWS.items():
        index = VectorIndex(folder / manifest.folder / name, shape.dimension, precision=shape.precision)
        index.extend(max(0, manifest.files[name].count - EXACT_BELOW // 2))
        index.build()
        index.save(OsDisk())
        points[field] = index.in_graph
        index.close()
    return {"points": points, "seconds": round(time.perf_counter() - began, 1), "megabytes": peak_megabytes()}


def read_cold(shape: Shape, name: str) -> dict[str, object]:
    clock, ask = Clock(), searches(shape)[name]
    evict(shape.home)
    with clock("open, cold"):
        store = shape.open(read_only=True)
    with store, clock(f"{name}, cold"):
        ask(store)
    return {"spent": clock.spent}


def read_warm(shape: Shape) -> dict[str, object]:
    clock = Clock()
    for _ in range(20):
        with clock("open"):
            store = shape.open(read_only=True)
        store.close()
    with shape.open(read_only=True) as store:
        for name, ask in searches(shape).items():
            warming = Clock()
            for asked in range(WARMING + ASKED):
                with (warming if asked < WARMING else clock)(name):
                    ask(store)
            slowest = max(warming.spent[name])
            if slowest > 20 * float(np.median(warming.spent[name])):
                clock.spent[f"{name}, slowest while warming"] = [slowest]
        memory = {line.split(":")[0]: line.split()[1] for line in status_lines()}
    return {
        "spent": clock.spent,
        "megabytes": peak_megabytes(),
        "megabytes_own": int(memory.get("RssAnon", 0)) >> 10,
    }


def write_single(shape: Shape, commits: int) -> dict[str, object]:
    """Single commits: of a writer just started, then of one whose graphs take in rows."""
    source, clock = Source(shape, first=10**6), Clock()
    append = appending(shape.home)
    for _ in range(commits):
        with clock("append and fsync of 4 kB"):
            append()
    with shape.open() as store:
        exchanges_one_by_one(store, source, clock, commits, "exchange")
        if shape.fields == "all":
            encodings_one_by_one(store, source, clock, commits, "encoding")
    if with_graphs(shape):
        with shape.open(exact_below=NEVER) as store:
            for _ in range(-(-EXACT_BELOW // 2 // SESSION // SESSIONS_A_COMMIT)):
                store_sessions(store, source, SESSIONS_A_COMMIT, encoded=shape.fields == "all")
        with shape.open() as store:
            due = -(-shape.turns // ROWS_PER_LOAD // SESSION) + 1
            with clock(f"one commit of {due * SESSION} turns, loading the graphs"):
                store_sessions(store, source, due, encoded=shape.fields == "all")
            exchanges_one_by_one(store, source, clock, commits, "exchange, graphs growing")
            if shape.fields == "all":
                encodings_one_by_one(store, source, clock, commits, "encoding, graphs growing")
    return {"spent": clock.spent, "megabytes": peak_megabytes()}


def exchanges_one_by_one(store: Store, source: Source, clock: Clock, commits: int, name: str) -> None:
    for turn in islice((turn for _ in count() for turn in source.session()), commits):
        rows = source.vectors(2)
        with clock(name), store.transaction() as tx:
            tx.add_turns([turn], rows[:1])
            tx.add_decisions([decision(turn)], rows[1:])


def encodings_one_by_one(store: Store, source: Source, clock: Clock, commits: int, name: str) -> None:
    waiting = store_sessions(store, source, -(-commits * SEGMENT // SESSION), encoded=False)
    for segment, part in islice(segments(waiting), commits):
        records = source.records(part, segment)
        rows = source.vectors(20 * SEGMENT)
        with clock(name):
            nodes = [node.id for node, _ in store.missing_nodes(segment, records)]
            labels = dict(zip(nodes, rows[SEGMENT:], strict=False))
            with store.transaction() as tx:
                tx.add_encoding(segment, records, rows[: len(records)], labels, "")


def searches(shape: Shape) -> Searches:
    """One search of each kind; each call takes another query."""
    source = Source(shape, first=99)
    asked = questions(json.loads(shape.text.read_text(encoding="utf-8")))
    pick = random.Random(3)
    days = int((shape.turns // SESSION) * BETWEEN_SESSIONS / timedelta(days=1))

    def query() -> Vectors:
        return source.vectors(1)

    def span(length: int) -> TimeRange:
        start = (BEGINNING + timedelta(days=pick.randrange(max(1, days)))).date()
        return TimeRange(start, start + timedelta(days=length))

    found: Searches = {
        "turns by vector": lambda store: store.search("turns", query(), K),
        "turns by words": lambda store: store.words("turns", pick.choice(asked), K),
        "turns by vector and words": lambda store: (
            store.search("turns", query(), K),
            store.words("turns", pick.choice(asked), K),
        ),
        "turns by vector, of 30 days": lambda store: store.search("turns", query(), K, scope=Scope(said=span(30))),
        "turns by words, of 30 days": lambda store: store.words(
            "turns", pick.choice(asked), K, scope=Scope(said=span(30))
        ),
    }
    if shape.fields == "all":
        found |= {
            "records by vector": lambda store: store.search("records", query(), K),
            "nodes by vector": lambda store: store.search("nodes", query(), K),
            "records by words": lambda store: store.words("records", pick.choice(asked), K),
            "nodes of 7 days": lambda store: store.temporal_nodes(span(7), latest=512),
        }
    return found


# --- clocks and memory -----------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds by name: those on the wall, and under `NAME, CPU` those that this process worked. On a machine that
    others use as well the first include waiting for them."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, worked = time.perf_counter(), time.process_time()
        yield
        passed, work = time.perf_counter() - began, time.process_time() - worked
        self.spent.setdefault(name, []).append(1e3 * passed)
        self.spent.setdefault(f"{name}, CPU", []).append(1e3 * work)


def appending(folder: Path) -> Callable[[], object]:
    """What this disk takes for a file to grow by 4 kB: a commit of an exchange does this six times."""

    def append() -> None:
        with (folder / "append.tmp").open("ab") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())

    return append


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def status_lines() -> list[str]:
    path = Path("/proc/self/status")
    return [line for line in path.read_text().splitlines() if line.startswith("Rss")] if path.exists() else []


def peak_megabytes() -> int:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20


def with_graphs(shape: Shape) -> bool:
    return any(shape.home.rglob("*.hnsw"))


def alone(work: Callable[..., dict[str, object]], *arguments: object) -> dict[str, object]:
    """Run `work` in a process of its own, so that peak memory and caches are its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def summary(values: Sequence[float]) -> dict[str, float]:
    parts = {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} if len(values) > 1 else {}
    return {name: round(value, 2) for name, value in (parts | {"most": max(values)}).items()}


def measure(shape: Shape, *, with_graph: bool, cold: int, commits: int) -> dict[str, object]:
    built = alone(build, shape)
    graphs = alone(build_graphs, shape) if with_graph else {}
    sizes = {path.name: path.stat().st_size for path in shape.home.rglob("*") if path.is_file()}
    spent: dict[str, list[float]] = {}
    for name in searches(shape):
        for _ in range(cold):
            found = alone(read_cold, shape, name)["spent"]
            assert isinstance(found, dict)
            for key, values in found.items():
                spent.setdefault(key, []).extend(values)
    read, wrote = alone(read_warm, shape), alone(write_single, shape, commits)
    assert isinstance(read["spent"], dict)
    assert isinstance(wrote["spent"], dict)
    return {
        "turns": shape.turns,
        "fields": shape.fields,
        "dimension": shape.dimension,
        "precision": shape.precision,
        "records": built["records"],
        "nodes": built["nodes"],
        "graph_points": graphs.get("points"),
        "seconds": {"build": built["seconds"], "graphs": graphs.get("seconds")},
        "turns_per_second": built["turns_per_second"],
        "bytes_per_turn": {name: round(size / shape.turns, 1) for name, size in sorted(sizes.items())}
        | {"all": round(sum(sizes.values()) / shape.turns, 1)},
        "megabytes": {
            "building": built["megabytes"],
            "graphs": graphs.get("megabytes"),
            "reading": read["megabytes"],
            "reading, without mapped files": read["megabytes_own"],
            "writing": wrote["megabytes"],
        },
        "milliseconds": {
            name: summary(values) for name, values in sorted((spent | read["spent"] | wrote["spent"]).items())
        },
    }


# --- ingestion with a real embedder ----------------------------------------------------------------------------------


class Stopwatch:
    """An embedder that adds up the time spent in another one."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self.name, self.digest = inner.name, inner.digest
        self.dimension, self.calibration = inner.dimension, inner.calibration
        self.seconds, self.texts = 0.0, 0

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        began = time.perf_counter()
        try:
            return self._inner.embed(texts, kind=kind)
        finally:
            self.seconds += time.perf_counter() - began
            self.texts += len(texts)


def ingest(text: Path, home: Path, models: Path, name: str) -> dict[str, object]:
    """`Memory.remember` of every conversation of `text`, with the share of the embedder taken apart."""
    from lychee_local.backends.load import load_embedder  # an engine, which only this needs

    card = cards.card(name, models)
    place = pull.locate(card, models)
    if place is None:
        raise SystemExit(f"{name} is not in {models}: run `lychee models pull`")
    embedder = Stopwatch(load_embedder(card, place))
    embedder.embed(["warm"] * 64)
    embedder.seconds, embedder.texts = 0.0, 0
    conversations = [c["sample_id"] for c in json.loads(text.read_text(encoding="utf-8"))]
    turns, began = 0, time.perf_counter()
    for conversation in conversations:
        messages = read_locomo(text, conversation)
        with Memory.open(
            conversation, home=home, models_home=models, llm=None, embedder=embedder, reranker=None, settings=Settings()
        ) as memory:
            turns += len(memory.remember(messages, encode=False).turns)
    seconds = time.perf_counter() - began
    return {
        "turns": turns,
        "texts_embedded": embedder.texts,
        "embedder": name,
        "seconds": round(seconds, 2),
        "seconds_embedding": round(embedder.seconds, 2),
        "overhead_percent": round(100 * (seconds - embedder.seconds) / embedder.seconds, 1),
    }


# --- results ---------------------------------------------------------------------------------------------------------


def about() -> dict[str, object]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "commit": commit_id(),
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
        "load": round(os.getloadavg()[0], 1),
    }


def commit_id() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    run = subprocess.run([git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip()


def show(result: dict[str, object]) -> None:
    spent, title = (
        result["milliseconds"],
        f"{result['turns']} turns, {result['records']} records, {result['nodes']} nodes",
    )
    assert isinstance(spent, dict)
    table = Table("milliseconds", "p50", "p90", "p99", "most", "p50, CPU", title=title)
    for name, values in spent.items():
        if not name.endswith(", CPU"):
            own = spent.get(f"{name}, CPU", {})
            found = [values.get(p) for p in ("p50", "p90", "p99", "most")] + [own.get("p50", own.get("most"))]
            table.add_row(name, *("" if value is None else f"{value:.2f}" for value in found))
    console = Console(width=120)
    console.print(table)
    for name in ("bytes_per_turn", "megabytes", "seconds"):
        console.print(f"{name}: {result[name]}")


PLOTTED = {
    "open": ("open", "open, cold"),
    "search": ("turns by vector", "turns by words", "turns by vector and words", "nodes of 7 days"),
    "commit": ("exchange", "encoding", "exchange, graphs growing", "encoding, graphs growing"),
}


def plot(results: Path, out: Path) -> None:
    """How each measure grows with the turns, on logarithmic axes. Of several lines for one size the last counts; a
    memory without records is drawn with crosses. Times are the processor's: they do not depend on what else ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    latest = {(r["turns"], r["fields"]): r for r in lines}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    panels = dict(zip((*PLOTTED, "size"), axes.flat, strict=True))
    for fields, style in (("all", "o-"), ("turns", "x--")):
        runs = sorted((r for r in latest.values() if r["fields"] == fields), key=lambda r: int(r["turns"]))
        series = [("size", name, [(r["turns"], size) for r in runs if (size := sizes(r).get(name))]) for name in SIZES]
        for panel, names in PLOTTED.items():
            for name in names:
                found = [(r["turns"], r["milliseconds"].get(f"{name}, CPU")) for r in runs]
                series.append((panel, name, [(turns, values["p50"]) for turns, values in found if values]))
        for panel, name, points in series:
            if points:
                colour = f"C{(*PLOTTED.get(panel, SIZES),).index(name)}"
                label = name if fields == "all" or len(latest) == len(runs) else None
                panels[panel].plot(*zip(*points, strict=True), style, color=colour, label=label)
    for name, panel in panels.items():
        unit = "MiB" if name == "size" else "milliseconds of the processor, median"
        logarithmic(panel, name, unit)
        panel.legend(fontsize=7)
    save(figure, out)


def save(figure: Any, out: Path) -> None:
    figure.suptitle("o: with records, x: turns only")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)


def logarithmic(panel: Any, title: str, unit: str) -> None:
    panel.set(title=title, xscale="log", yscale="log", xlabel="turns of one user", ylabel=unit)
    panel.grid(alpha=0.3)


SIZES = ("memory of a reader", "memory of a reader, without mapped files", "memory of a writer", "folder on disk")


def sizes(result: dict[str, Any]) -> dict[str, float]:
    """In MiB."""
    memory = result["megabytes"]
    values = (memory["reading"], memory["reading, without mapped files"], memory["writing"])
    return dict(zip(SIZES, (*values, result["bytes_per_turn"]["all"] * result["turns"] / 2**20), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.command == "plot":
        plot(options.results, options.out)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        home = Path(folder)
        if options.command == "ingest":
            result = ingest(options.text, home, options.models, options.model)
            print(f"{result['turns']} turns: {result['overhead_percent']} % over embedding alone")
        else:
            shape = Shape(options.turns, options.dimension, options.precision, options.fields, options.text, home)
            result = measure(shape, with_graph=options.with_graph, cold=options.cold, commits=options.commits)
            show(result)
    tell(result, options.append)


def tell(result: dict[str, Any], gathered: Path | None) -> None:
    """The JSON line of a measurement, printed, and kept for `plot` where a file is named."""
    line = json.dumps(result | about())
    if gathered is not None:
        with gathered.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    grow = commands.add_parser("measure", help="one memory of N turns")
    grow.add_argument("--turns", type=int, default=10_000)
    grow.add_argument("--dimension", type=int, default=384)
    grow.add_argument("--precision", choices=["float32", "float16"], default="float32")
    grow.add_argument("--fields", choices=["all", "turns"], default="all", help="turns: no records, no nodes")
    grow.add_argument("--with-graph", action="store_true", help="build the search graphs")
    grow.add_argument("--cold", type=int, default=5, help="fresh processes for each kind of search")
    grow.add_argument("--commits", type=int, default=300, help="single commits of each kind")
    real = commands.add_parser("ingest", help="what remembering costs over embedding alone")
    real.add_argument("--models", type=Path, default=cards.default_home(), help="where the models are")
    real.add_argument("--model", default="all-minilm-l6-v2")
    for command in (grow, real):
        command.add_argument("--text", type=Path, required=True, help="LoCoMo's file")
        command.add_argument("--append", type=Path, help="a file that gets the JSON line as well")
        command.add_argument("--folder", type=Path, help="where the memory is made; default: a temporary folder")
    draw = commands.add_parser("plot", help="draw what --append has gathered")
    draw.add_argument("results", type=Path)
    draw.add_argument("--out", type=Path, required=True)
    return top


if __name__ == "__main__":
    main()

"""How long a question takes without a language model and without a reranker, stage by stage.

    python -m benchmarks.recall_time --text LOCOMO.json --home DIR --user conv-26
    python -m benchmarks.recall_time --text LOCOMO.json --turns 1000
    python -m benchmarks.recall_time --text LOCOMO.json --turns 100000 --with-graph --append scale.jsonl
    python -m benchmarks.recall_time --plot scale.jsonl --out docs/plots/recall-scale.png     # needs the group `bench`

Asked are LoCoMo's questions, of the conversation that the memory is named after, else of all, shuffled; each once,
after `WARMING` others, so that no vector of a question is known before. Reported in milliseconds: p50 and p95 of the
time on the wall, and of the processor, which others on the machine hardly disturb. "plan" includes looking for what
other processes have committed.

Without a memory one is made of so many turns (benchmarks/store_scale.py: records by a rule, two entities and two tags
each, synthetic vectors), below `--folder`. There the embedder reads each question as always, and its vector is then put
beside that of a topic, so that it has neighbours: some 500 in 100,000 turns with a cosine around 0.63.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.store_scale import TOPICS, USER, Shape, alone, build, build_graphs, logarithmic, save, tell
from benchmarks.words_scale import questions
from lychee_local import Memory, cards, pull
from lychee_local.backends import Embedder, Vectors
from lychee_local.store import EmbedderIdentity, Store
from lychee_local.trace import Recorder

WARMING = 20
DIMENSION = 384


class Laps(Recorder):
    """Records how long each stage took and nothing else, since an explanation takes time itself."""

    def __init__(self) -> None:
        super().__init__(on=False)
        self.spent: dict[str, tuple[float, float]] = {}
        self._clocks = clocks()

    def lap(self, stage: str) -> None:
        now, before = clocks(), self._clocks
        wall, worked = self.spent.get(stage, (0.0, 0.0))
        self.spent[stage] = (wall + now[0] - before[0], worked + now[1] - before[1])
        self._clocks = clocks()


class NearTopics:
    """Vectors beside those of `store_scale.Source`, in the time that another embedder takes."""

    def __init__(self, inner: Embedder, identity: EmbedderIdentity) -> None:
        self._inner = inner
        self.name, self.digest = identity.name, identity.digest
        self.dimension, self.calibration = identity.dimension, identity.calibration
        self._centres = np.random.default_rng(7).standard_normal((TOPICS, self.dimension), dtype=np.float32)

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        self._inner.embed(texts, kind=kind)
        seeds = [zlib.crc32(text.encode()) for text in texts]
        noise = np.stack([np.random.default_rng(s).standard_normal(self.dimension, dtype=np.float32) for s in seeds])
        rows = self._centres[seeds[0] % TOPICS] + noise / 2
        unit: Vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit


def clocks() -> tuple[float, float]:
    """Milliseconds on the wall, and of this process's work."""
    return 1e3 * time.perf_counter(), 1e3 * time.process_time()


def measure(memory: Memory, asked: Sequence[str], k: int) -> dict[str, dict[str, float]]:
    """p50 and p95 of each stage and of `all` together."""
    spent: dict[str, list[tuple[float, float]]] = {}
    for number, question in enumerate(asked):
        laps, began = Laps(), clocks()
        memory._recall(question, k=k, now=None, scope=None, planner="rules", record=laps)
        ended = clocks()
        if number >= WARMING:
            for stage, times in (laps.spent | {"all": (ended[0] - began[0], ended[1] - began[1])}).items():
                spent.setdefault(stage, []).append(times)
    found = {}
    for stage, each in spent.items():
        wall, worked = zip(*each, strict=True)
        columns = {"p50": (wall, 50), "p95": (wall, 95), "p50 CPU": (worked, 50), "p95 CPU": (worked, 95)}
        found[stage] = {name: round(float(np.percentile(values, p)), 2) for name, (values, p) in columns.items()}
    return found


@contextmanager
def synthetic(options: argparse.Namespace) -> Iterator[Path]:
    """A folder with a memory of so many turns; it goes at the end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        shape = Shape(options.turns, DIMENSION, "float32", options.fields, options.text, Path(folder))
        alone(build, shape)
        if options.with_graph:
            alone(build_graphs, shape)
        yield Path(folder)


def run(options: argparse.Namespace, home: Path, user: str) -> dict[str, object]:
    from lychee_local.backends.load import load_embedder  # an engine

    card = cards.card(options.model, options.models)
    place = pull.locate(card, options.models)
    if place is None:
        raise SystemExit(f"{options.model} is not in {options.models}: run `lychee models pull`")
    embedder: Embedder = load_embedder(card, place)
    with Store.open(home, user, embedder=None, read_only=True) as store:
        identity = store.embedder
    if identity.name == "synthetic":
        embedder = NearTopics(embedder, identity)
    data = json.loads(options.text.read_text(encoding="utf-8"))
    asked = questions([item for item in data if item.get("sample_id") == user] or data)[: WARMING + options.questions]
    with Memory.open(
        user, home=home, models_home=options.models, llm=None, embedder=embedder, reranker=None, read_only=True
    ) as memory:
        held = memory.stats()
        times = measure(memory, asked, options.k)
    sizes = {"turns": held.turns, "records": held.records, "nodes": held.nodes}
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {**sizes, "k": options.k, "questions": len(asked) - WARMING, "milliseconds": times, "peak_mb": peak_mb}


def show(result: dict[str, object]) -> None:
    title = f"{result['turns']} turns, {result['records']} records, {result['nodes']} nodes, k = {result['k']}"
    table = Table("milliseconds", "p50", "p95", "p50 CPU", "p95 CPU", title=title)
    times = result["milliseconds"]
    assert isinstance(times, dict)
    for stage, values in times.items():
        table.add_row(stage, *(f"{value:.1f}" for value in values.values()))
    Console(width=120).print(table)


def plot(results: Path, out: Path) -> None:
    """Each stage's median of the processor's time, and the memory, against the turns of the memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for with_records, style in ((True, "o-"), (False, "x--")):
        rows = sorted((r for r in lines if bool(r["records"]) == with_records), key=lambda r: int(r["turns"]))
        turns = [r["turns"] for r in rows]
        for number, stage in enumerate(rows[0]["milliseconds"] if rows else ()):
            label = stage if with_records else None
            medians = [r["milliseconds"][stage]["p50 CPU"] for r in rows]
            times.plot(turns, medians, style, color=f"C{number}", label=label)
        memory.plot(turns, [r["peak_mb"] for r in rows], style, color="C0")
    logarithmic(times, "a question without a language model", "milliseconds of the processor, median")
    times.legend(fontsize=7)
    logarithmic(memory, "peak memory of the process that asks", "MiB, with the embedder")
    save(figure, out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="LoCoMo's file")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--home", type=Path, help="where the memory is that is asked; with --user")
    which.add_argument("--turns", type=int, help="make a memory of so many turns")
    which.add_argument("--plot", type=Path, metavar="FILE", help="draw what --append has gathered, into --out")
    parser.add_argument("--user", default=USER)
    parser.add_argument("--fields", choices=["all", "turns"], default="all", help="turns: no records, no nodes")
    parser.add_argument("--append", type=Path, help="a file that gets the JSON line as well")
    parser.add_argument("--out", type=Path, help="the picture of --plot")
    parser.add_argument("--with-graph", action="store_true", help="build the search graphs")
    parser.add_argument("--folder", type=Path, help="where the memory is made; default: a temporary folder")
    parser.add_argument("--k", type=int, default=15, help="items wanted")
    parser.add_argument("--questions", type=int, default=100, help="questions that are measured")
    parser.add_argument("--models", type=Path, default=cards.default_home(), help="where the models are")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="the embedder")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        if options.out is None:
            parser.error("--plot needs --out")
        plot(options.plot, options.out)
        return
    if options.text is None:
        parser.error("--text names the questions")
    if options.home is not None:
        result = run(options, options.home, options.user)
    else:
        with synthetic(options) as home:
            result = run(options, home, USER)
    show(result)
    tell(result, options.append)


if __name__ == "__main__":
    main()

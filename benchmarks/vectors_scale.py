"""How search grows with the rows of one flat file: building, snapshots, opening, search, recall and memory.

    python benchmarks/vectors_scale.py --rows 100000 --dimension 384 [--precision float16]
    python benchmarks/vectors_scale.py --texts FILE [--model all-minilm-l6-v2] [--keep FILE.npy]

Without --texts the vectors are synthetic: seeded, normally distributed around 200 topics, so that neighbours exist.
With it they are the model's, of the distinct lines of FILE; --keep writes them, or reads them where they are there. 500
rows are held out as queries, 20 results are asked of each, and recall is measured against float64 over all rows.

One process builds, saves and compacts (every tenth row forgotten). A second one opens, and searches before and after
it restores the snapshot; a file too small for a graph has none, and every search of it is exact. "Cold" is its first
search after the page cache was told to drop the files; "once" marks what was measured once. Peak memory includes the
mapped pages of the flat file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from lychee_local import cards, pull
from lychee_local.store.disk import OsDisk
from lychee_local.store.graph import BUILD_WIDTH, LINKS, SEARCH_WIDTH, Mask, Vectors
from lychee_local.store.vectors import Precision, VectorIndex

TOPICS, QUERIES, K = 200, 500, 20
AT_A_TIME = 10_000


def synthetic(count: int, dimension: int) -> Vectors:
    random = np.random.default_rng(7)
    centres = random.normal(size=(TOPICS, dimension))
    rows = np.empty((count, dimension), dtype=np.float32)
    for start in range(0, count, AT_A_TIME):
        part = rows[start : start + AT_A_TIME]
        part[:] = centres[random.integers(TOPICS, size=len(part))] + random.normal(size=part.shape)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def embedded(texts: Path, model: str, home: Path, keep: Path | None) -> Vectors:
    if keep is not None and keep.exists():
        rows: Vectors = np.load(keep)
    else:
        from lychee_local.backends.load import load_embedder  # an engine, not needed for synthetic vectors

        card = cards.card(model, home)
        place = pull.locate(card, home)
        if place is None:
            raise SystemExit(f"{model} is not in {home}: run `lychee models pull`")
        lines = dict.fromkeys(line.strip() for line in texts.read_text(encoding="utf-8").splitlines() if line.strip())
        rows = load_embedder(card, place).embed(list(lines))
        if keep is not None:
            np.save(keep, rows)
    distinct: Vectors = np.unique(rows, axis=0)
    return distinct[np.random.default_rng(7).permutation(len(distinct))]


def exact(path: Path, shape: tuple[int, int], kind: str, queries: Vectors) -> npt.NDArray[np.intp]:
    """The best K rows of each query by float64, for the rows as the file holds them."""
    rows = np.memmap(path, dtype=kind, mode="r", shape=shape)
    scores = np.concatenate(
        [
            queries.astype(np.float64) @ rows[start : start + AT_A_TIME].astype(np.float64).T
            for start in range(0, len(rows), AT_A_TIME)
        ],
        axis=1,
    )
    return np.argpartition(-scores, K, axis=1)[:, :K]


def timed(action: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def each_timed(index: VectorIndex, queries: Vectors, among: Mask | None = None) -> list[float]:
    return [timed(partial(index.search, query[None], K, among=among)) for query in queries]


def forget_pages(folder: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_megabytes() -> int:
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20


def write(path: Path, rows: Vectors, precision: Precision) -> None:
    with path.open("wb") as file:
        for start in range(0, len(rows), AT_A_TIME):
            file.write(rows[start : start + AT_A_TIME].astype(precision).tobytes())


def writer(path: Path, count: int, dimension: int, precision: Precision) -> dict[str, object]:
    index = VectorIndex(path, dimension, precision=precision)
    index.extend(count)
    disk = OsDisk()
    spent = {"build": [timed(index.build)], "save": [timed(lambda: index.save(disk))]}
    kept = np.arange(count) % 10 != 0
    target = path.with_name("compacted.rows")
    write(target, index.rows(np.flatnonzero(kept)), precision)
    spent["carry, a tenth forgotten"] = [timed(lambda: index.carry(target, kept, disk))]
    return {"spent": spent, "in_graph": index.in_graph, "megabytes": peak_megabytes()}


def reader(path: Path, count: int, dimension: int, precision: Precision, queries: Vectors) -> dict[str, object]:
    def fresh() -> VectorIndex:
        forget_pages(path.parent)
        return VectorIndex(path, dimension, precision=precision)

    spent: dict[str, list[float]] = {}
    index = fresh()
    spent["open"] = [timed(lambda: index.extend(count))]
    spent["exact search, cold"] = [timed(lambda: index.search(queries[:1], K))]
    # Three are fewer than make a process load the graph by itself.
    spent["exact search, warm"] = each_timed(index, queries[:3])
    before = peak_megabytes()
    index = fresh()
    index.extend(count)
    spent["restore and search, cold"] = [timed(lambda: (index.restore(), index.search(queries[:1], K)))]
    index = VectorIndex(path, dimension, precision=precision)
    index.extend(count)
    spent["restore, warm"] = [timed(index.restore)]
    spent["search"] = each_timed(index, queries)
    found = [[hit.row for hit in hits] for hits in index.search(queries, K)]
    half = np.random.default_rng(3).random(count) < 0.5
    spent["search, half filtered"] = each_timed(index, queries, among=half)
    index.bury(np.flatnonzero(np.random.default_rng(4).random(count) < 0.01).tolist())
    spent["search, 1 % buried"] = each_timed(index, queries)
    after = peak_megabytes()
    best = exact(path, (count, dimension), precision, queries)
    recalls = [len({*hits} & {*row.tolist()}) / K for hits, row in zip(found, best, strict=True)]
    return {
        "spent": spent,
        "in_graph": index.in_graph,
        "recall": {"mean": float(np.mean(recalls)), "p1": float(np.percentile(recalls, 1)), "least": min(recalls)},
        "megabytes_exact": before,
        "megabytes": after,
    }


def in_own_process(work: Callable[..., dict[str, object]], *arguments: object) -> dict[str, object]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def measure(rows: Vectors, precision: Precision, folder: Path) -> dict[str, object]:
    queries, rows = rows[:QUERIES], rows[QUERIES:]
    path, (count, dimension) = folder / "turns.rows", rows.shape
    write(path, rows, precision)
    del rows
    wrote = in_own_process(writer, path, count, dimension, precision)
    read = in_own_process(reader, path, count, dimension, precision, queries)
    assert isinstance(wrote["spent"], dict)
    assert isinstance(read["spent"], dict)
    return {
        "rows": count,
        "dimension": dimension,
        "precision": precision,
        "parameters": {"M": LINKS, "ef_construction": BUILD_WIDTH, "ef": SEARCH_WIDTH},
        "in_graph": read["in_graph"],
        "recall_at_20": read["recall"],
        "megabytes": {
            "flat file": path.stat().st_size >> 20,
            "snapshot": sum(file.stat().st_size for file in folder.glob("turns.hnsw*")) >> 20,
            "peak, writer": wrote["megabytes"],
            "peak, reader before the graph": read["megabytes_exact"],
            "peak, reader": read["megabytes"],
        },
        "milliseconds": {
            name: {"once": round(values[0], 2)}
            if len(values) == 1
            else {f"p{p}": round(float(np.percentile(values, p)), 2) for p in (50, 90, 99)}
            for name, values in (wrote["spent"] | read["spent"]).items()
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
    }


def show(result: dict[str, object]) -> None:
    spent, recall, sizes = result["milliseconds"], result["recall_at_20"], result["megabytes"]
    assert isinstance(spent, dict)
    table = Table("milliseconds", "once", "p50", "p90", "p99", title=f"{result['rows']} rows, {result['precision']}")
    for name, values in spent.items():
        table.add_row(name, *(f"{values[key]:.2f}" if key in values else "" for key in ("once", "p50", "p90", "p99")))
    console = Console()
    console.print(table)
    console.print(f"recall@20: {recall}\nmegabytes: {sizes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--precision", choices=["float32", "float16"], default="float32")
    parser.add_argument("--texts", type=Path, help="a file of one text a line, to measure real embeddings")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="the embedder for --texts")
    parser.add_argument("--home", type=Path, default=cards.default_home(), help="where the models are")
    parser.add_argument("--keep", type=Path, help="a .npy file that keeps the vectors of --texts")
    parser.add_argument("--folder", type=Path, help="where the files are made; default: a temporary folder")
    options = parser.parse_args()
    if options.texts is None:
        rows = synthetic(options.rows + QUERIES, options.dimension)
    else:
        rows = embedded(options.texts, options.model, options.home, options.keep)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(rows, options.precision, Path(folder))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

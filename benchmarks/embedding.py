"""How quick an embedder is through each of its engines, and how alike their vectors are.

    python -m benchmarks.embedding --text LOCOMO.json [--strings FILE.json ...] [--model all-minilm-l6-v2]

Each engine works in a process of its own, in turns, `--rounds` times: "numpy" and "torch" are ours, "bare" is
sentence-transformers' own `encode` with nothing around it. Reported are medians over the rounds:

- load: seconds to the first vector, in a process that has imported numpy;
- query: milliseconds for one question of 6 to 10 words, the median of `QUERIES` of them;
- texts/s: of `--texts` turns of the file, shuffled, each as "speaker: text", in one call;
- CPU: both again by the time of the processor (a second of two busy cores counts twice), which others on the machine
  disturb less;
- peak: resident megabytes.

Then the vectors are compared with those of the last engine named: of `--compared` texts out of the turns, the
questions, and every string of the files of `--strings`, which are the place for other languages. "alone" is how much
the vectors of `ALONE` texts in one call differ at most from those of a call each.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.store_scale import about, alone
from benchmarks.vectors_scale import peak_megabytes
from benchmarks.words_scale import questions
from lychee_local import cards, pull
from lychee_local.backends import Vectors
from lychee_local.cards import Engine

ENGINES = ("numpy", "bare", "torch")
QUERIES, ALONE = 50, 100
FIGURES = {
    "load": "load s",
    "query": "query ms",
    "query CPU": "CPU",
    "texts": "texts/s",
    "texts CPU": "CPU",
    "peak": "peak MB",
}


class Bare:
    """sentence-transformers as its own documentation uses it."""

    def __init__(self, place: Path) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(place), device="cpu", local_files_only=True)

    def embed(self, texts: Sequence[str], *, kind: str = "passage") -> Vectors:
        rows: Vectors = self._model.encode(list(texts), show_progress_bar=False)
        return rows


def strings(value: object) -> Iterator[str]:
    """All texts in what JSON has given."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def turns(data: Sequence[dict[str, object]]) -> list[str]:
    """Each turn as it is embedded, shuffled."""
    found = []
    for item in data:
        assert isinstance(item["conversation"], dict)
        for session in item["conversation"].values():
            found += [f"{t['speaker']}: {t['text']}" for t in session if t["text"]] if isinstance(session, list) else []
    random.Random(7).shuffle(found)
    return found


def place_of(model: str, home: Path) -> Path:
    place = pull.locate(cards.card(model, home), home)
    if place is None:
        raise SystemExit(f"{model} is not in {home}: run `lychee models pull`")
    return place


def measure(engine: str, options: argparse.Namespace, keep: Path | None) -> dict[str, object]:
    """One engine, in this process. With `keep` it also writes the vectors of all texts there."""
    began = time.perf_counter()
    from lychee_local.backends.load import load_embedder
    from lychee_local.backends.native import settle

    settle()
    place = place_of(options.model, options.models)
    card = cards.card(options.model, options.models)
    embedder = Bare(place) if engine == "bare" else load_embedder(card, place, engine=cast(Engine, engine))
    embedder.embed(["the first vector"])
    load = time.perf_counter() - began

    data = json.loads(options.text.read_text(encoding="utf-8"))
    spent = []
    for question in [q for q in questions(data) if 6 <= len(q.split()) <= 10][: QUERIES + 5]:
        began, worked = time.perf_counter(), time.process_time()
        embedder.embed([question], kind="query")
        spent.append((1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - worked)))
    said = turns(data)[: options.texts]
    began, worked = time.perf_counter(), time.process_time()
    rows = embedder.embed(said)
    wall, cpu = time.perf_counter() - began, time.process_time() - worked
    query, query_cpu = (median(times) for times in zip(*spent[5:], strict=True))
    figures = {"load": load, "query": query, "query CPU": query_cpu}
    figures |= {"texts": len(said) / wall, "texts CPU": len(said) / cpu}
    if keep is None:
        return figures | {"peak": peak_megabytes()}
    by_themselves = np.concatenate([embedder.embed([text]) for text in said[:ALONE]])
    figures |= {"peak": peak_megabytes(), "alone": float(np.abs(by_themselves - rows[:ALONE]).max())}
    np.save(keep, embedder.embed(compared(options, data)))
    return figures


def compared(options: argparse.Namespace, data: Sequence[dict[str, object]]) -> list[str]:
    others = (text for path in options.strings for text in strings(json.loads(path.read_text(encoding="utf-8"))))
    texts = list(dict.fromkeys(text.strip() for text in (*turns(data), *questions(data), *others) if text.strip()))
    random.Random(7).shuffle(texts)
    return texts[: options.compared]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--strings", type=Path, nargs="*", default=[], help="JSON files with texts to be compared too")
    parser.add_argument("--texts", type=int, default=500, help="turns whose embedding is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compared", type=int, default=3_000, help="texts whose vectors are compared")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--models", type=Path, default=cards.default_home(), help="where the models are")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="the embedder")
    options = parser.parse_args(arguments)
    measured: dict[str, list[dict[str, object]]] = {engine: [] for engine in options.engines}
    with tempfile.TemporaryDirectory() as folder:
        kept = {engine: Path(folder) / f"{engine}.npy" for engine in options.engines}
        for number in range(options.rounds):
            for engine in options.engines:
                measured[engine].append(alone(measure, engine, options, None if number else kept[engine]))
        reference = np.load(kept[options.engines[-1]])
        cosines = {engine: (np.load(kept[engine]).astype(np.float64) * reference).sum(axis=1) for engine in kept}
    result = {
        engine: {name: round(median(cast(float, one[name]) for one in rounds), 2) for name in FIGURES}
        | {"least cosine": float(cosines[engine].min()), "mean cosine": float(cosines[engine].mean())}
        | {"alone": rounds[0]["alone"]}
        for engine, rounds in measured.items()
    }
    table = Table("", *FIGURES.values(), "least cosine", "alone", title=f"{options.model}, {len(reference)} compared")
    for engine, row in result.items():
        columns = [f"{row[name]:.2f}" for name in FIGURES]
        table.add_row(engine, *columns, f"{row['least cosine']:.8f}", f"{row['alone']:.1e}")
    Console(width=120).print(table)
    print(json.dumps({"model": options.model, "texts": options.texts, "rounds": options.rounds, **result} | about()))


if __name__ == "__main__":
    main()

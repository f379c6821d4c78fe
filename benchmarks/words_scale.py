"""How the index of words grows: building, adding and searching N texts, beside FTS5 and two indexes held in memory.

    python -m benchmarks.words_scale LOCOMO.json --texts 100000
    python -m benchmarks.words_scale LOCOMO.json --texts 100000 --engine fts5
    python -m benchmarks.words_scale LOCOMO.json --texts 100000 --engine memory
    python -m benchmarks.words_scale LOCOMO.json --texts 100000 --engine bm25s     # needs `pip install bm25s`

Texts are LoCoMo's turns with their speakers, resampled (seeded): every seventh word that is no stop word gives way to
one of a growing vocabulary, in which frequent words grow more frequent and a new one comes ever more rarely (new words
per drawn word: 0.6 * n ** -0.3), as in real text. Queries are LoCoMo's questions, shuffled. Reported: median and p99 in
milliseconds; "cold" opens the file afresh after its pages were dropped from the cache; memory is the peak of the
process, the texts themselves not counted (they are made as they are needed).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import sqlite3
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from lychee_local.lexicon import STOP_WORDS, search_terms
from lychee_local.store import words

BATCH, ADDED, ASKED, COLD, PATIENCE = 5_000, 500, 200, 15, 30.0
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]


class Lexicon:
    """An inverted index with BM25 (Robertson and Zaragoza 2009; k1 and b as there), grown by `add`, never shrunk."""

    def __init__(self, *, k1: float = 1.2, b: float = 0.75) -> None:
        self.ids: list[str] = []
        self._k1, self._b = k1, b
        self._lengths = array("f")
        self._postings: dict[str, tuple[array[int], array[int]]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        for identifier, text in zip(ids, texts, strict=True):
            number, counts = len(self.ids), Counter(search_terms(text))
            self.ids.append(identifier)
            self._lengths.append(counts.total())
            for term, count in counts.items():
                documents, frequencies = self._postings.setdefault(term, (array("i"), array("i")))
                documents.append(number)
                frequencies.append(count)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """BM25 of every text, in the order of adding; each distinct term of the query counts once."""
        total = np.zeros(len(self.ids), dtype=np.float32)
        if not self.ids:
            return total
        lengths = np.array(self._lengths, dtype=np.float32)
        norm = self._k1 * (1 - self._b + self._b * lengths / max(float(lengths.mean()), 1.0))
        for term in dict.fromkeys(search_terms(query)):
            if term not in self._postings:
                continue
            documents, frequencies = (np.array(part) for part in self._postings[term])
            rarity = np.log1p((len(self.ids) - len(documents) + 0.5) / (len(documents) + 0.5))
            total[documents] += rarity * frequencies * (self._k1 + 1) / (frequencies + norm[documents])
        return total

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """The best k texts that share a term with the query, best first, ties in the order of adding."""
        scores = self.scores(query)
        order = np.argsort(-scores, kind="stable")[:k]
        return [(self.ids[i], float(scores[i])) for i in order if scores[i] > 0.0]


def texts(data: Sequence[dict[str, object]], count: int) -> Iterator[str]:
    """`count` turns like those of the conversations, as "speaker: text"."""
    pick = random.Random(7)
    turns: list[list[str]] = []
    for item in data:
        conversation = item["conversation"]
        assert isinstance(conversation, dict)
        spoken = (turn for session in conversation.values() if isinstance(session, list) for turn in session)
        turns.extend([f"{turn['speaker']}:", *turn["text"].split()] for turn in spoken)
    drawn: list[str] = ["".join(pick.choices(SYLLABLES, k=3))]
    for _ in range(count):
        line = list(turns[int(pick.random() * len(turns))])
        for place in range(1, len(line)):
            if pick.random() < 1 / 7 and line[place].lower().strip(".,!?'") not in STOP_WORDS:
                if pick.random() < 0.6 * len(drawn) ** -0.3:
                    drawn.append("".join(pick.choices(SYLLABLES, k=pick.choice((2, 3, 4)))))
                else:
                    drawn.append(drawn[int(pick.random() * len(drawn))])
                line[place] = drawn[-1]
        yield " ".join(line)


def questions(data: Sequence[dict[str, object]]) -> list[str]:
    asked: list[str] = []
    for item in data:
        assert isinstance(item["qa"], list)
        asked.extend(qa["question"] for qa in item["qa"])
    random.Random(7).shuffle(asked)
    return asked


class Index(Protocol):
    def build(self, lines: Iterator[str]) -> None: ...

    def add(self, line: str) -> None: ...

    def search(self, query: str, k: int) -> Sequence[tuple[int, float]]: ...

    def reopened(self) -> Index: ...

    def size(self) -> int: ...


class Stored:
    """Our index in its file, committed every `BATCH` texts while it is built and after every text that is added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA secure_delete = ON")
        self._create()
        self._db.commit()
        self._rows = 0

    def _create(self) -> None:
        words.create(self._db)

    def _add(self, rows: Iterable[tuple[int, str]]) -> None:
        words.add(self._db, "turns", rows)

    def build(self, lines: Iterator[str]) -> None:
        while batch := list(islice(lines, BATCH)):
            self._add(enumerate(batch, self._rows))
            self._db.commit()
            self._rows += len(batch)

    def add(self, line: str) -> None:
        self._add([(self._rows, line)])
        self._db.commit()
        self._rows += 1

    def search(self, query: str, k: int) -> Sequence[tuple[int, float]]:
        return words.search(self._db, "turns", query, k)

    def reopened(self) -> Stored:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
        descriptor = os.open(self._path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        return type(self)(self._path)

    def size(self) -> int:
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return self._path.stat().st_size


class Fts5(Stored):
    """A contentless FTS5 table fed with our terms, ranked by its bm25()."""

    def _create(self) -> None:
        tokenizer = r"ascii tokenchars '._/\:@+#&=?%~-'"
        self._db.execute(
            f"CREATE VIRTUAL TABLE IF NOT EXISTS full_text USING fts5(terms, content = '', tokenize = \"{tokenizer}\")"
        )

    def _add(self, rows: Iterable[tuple[int, str]]) -> None:
        joined = ((row, " ".join(search_terms(line))) for row, line in rows)
        self._db.executemany("INSERT INTO full_text (rowid, terms) VALUES (?, ?)", joined)

    def search(self, query: str, k: int) -> Sequence[tuple[int, float]]:
        match = " OR ".join(f'"{term}"' for term in dict.fromkeys(search_terms(query)))
        ranked = "SELECT rowid, -rank FROM full_text WHERE full_text MATCH ? ORDER BY rank LIMIT ?"
        return self._db.execute(ranked, (match, k)).fetchall() if match else []


class Memory:
    """`Lexicon`: numpy arrays, rebuilt at every start."""

    def __init__(self, path: Path) -> None:
        self._lexicon = Lexicon()

    def build(self, lines: Iterator[str]) -> None:
        while batch := list(islice(lines, BATCH)):
            first = len(self._lexicon)
            self._lexicon.add([str(row) for row in range(first, first + len(batch))], batch)

    def add(self, line: str) -> None:
        self._lexicon.add([str(len(self._lexicon))], [line])

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        return [(int(row), score) for row, score in self._lexicon.search(query, k)]

    def reopened(self) -> Memory:
        return self

    def size(self) -> int:
        return 0


class Bm25s:
    """bm25s with our terms: scores are computed when it is built, so that it cannot grow."""

    def __init__(self, path: Path) -> None:
        import bm25s  # type: ignore[import-not-found, unused-ignore]  # measured beside, not a dependency

        self._path = path
        self._model = bm25s.BM25(k1=1.2, b=0.75)

    def build(self, lines: Iterator[str]) -> None:
        self._model.index([search_terms(line) for line in lines], show_progress=False)

    def add(self, line: str) -> None:
        return

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        known = [term for term in dict.fromkeys(search_terms(query)) if term in self._model.vocab_dict]
        if not known:
            return []
        rows, scores = self._model.retrieve([known], k=k, show_progress=False, n_threads=0)
        return [(int(row), float(score)) for row, score in zip(rows[0], scores[0], strict=True) if score > 0]

    def reopened(self) -> Bm25s:
        return self

    def size(self) -> int:
        self._model.save(self._path.parent / "bm25s")
        return sum(part.stat().st_size for part in (self._path.parent / "bm25s").iterdir())


ENGINES: dict[str, Callable[[Path], Index]] = {"stored": Stored, "fts5": Fts5, "memory": Memory, "bm25s": Bm25s}


class Clock:
    """An iterator that knows the seconds spent in it, here for making texts while an index is built of them."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self.spent = 0.0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        start = time.perf_counter()
        try:
            return next(self._lines)
        finally:
            self.spent += time.perf_counter() - start


def quantiles(spent: list[float]) -> dict[str, float]:
    return {"median": round(float(np.median(spent)), 3), "p99": round(float(np.quantile(spent, 0.99)), 3)}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--engine", choices=ENGINES, default="stored")
    parser.add_argument("--folder", type=Path, help="where the index is written and left (default: a temporary folder)")
    options = parser.parse_args()
    data = json.loads(options.data.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        result = measured(ENGINES[options.engine](folder / "words.sqlite"), data, options.texts)
    result = {"engine": options.engine, "texts": options.texts, **result, "machine": platform.machine()}
    table = Table("measure", "value")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)
    print(json.dumps(result))


def search_times(index: Index, asked: Sequence[str], k: int) -> list[float]:
    """Milliseconds of each search; a slow engine is asked fewer questions."""
    spent: list[float] = []
    for query in asked:
        spent.append(timed(partial(index.search, query, k)))
        if sum(spent) > 1e3 * PATIENCE:
            break
    return spent


def measured(index: Index, data: Sequence[dict[str, object]], count: int) -> dict[str, object]:
    lines, asked = texts(data, count + ADDED), questions(data)
    some = list(texts(data, min(count, 20_000)))
    extracting = timed(lambda: [search_terms(line) for line in some])
    clock = Clock(islice(lines, count))
    building = timed(partial(index.build, clock)) / 1e3 - clock.spent
    result: dict[str, object] = {
        "terms, microseconds a text": round(extracting * 1e3 / len(some), 1),
        "build, s": round(building, 1),
    }
    result["add, ms"] = quantiles([timed(partial(index.add, line)) for line in lines])
    result["file, MB"] = round(index.size() / 1e6, 1)
    for k in (50, 1000):
        cold: list[float] = []
        for query in asked[:COLD]:
            index = index.reopened()
            cold.extend(search_times(index, [query], k))
        result[f"search cold, k={k}, ms"] = quantiles(cold)
        result[f"search warm, k={k}, ms"] = quantiles(search_times(index, asked[:ASKED], k))
    result["peak memory, MB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return result


if __name__ == "__main__":
    main()

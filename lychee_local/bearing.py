"""How much each turn bears on a question: standard scores of several signals, added up. No model, no store.

Each signal alone misses what another sees: the meaning of the turn, of the three turns around it, and of the record
made from it; the words of the turn, of the three turns, and of its whole session; who is asked about. A standard
score says how far a turn stands out among all that were found, so signals of different scales can be added. All weigh
the same (benchmarks/LOG.md, "Which turns are shown").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lychee_local.lexicon import named, search_terms
from lychee_local.types import Turn, turn_id, turn_place

Floats = npt.NDArray[np.float64]
Vectors = npt.NDArray[np.float32]
Trios = npt.NDArray[np.intp]

# Turns that are looked at together with the turns around them. 100 find 0.2 points less of the evidence, 300 find 0.3
# more for twice the time.
SHORTLIST = 150
# What a turn before or after counts for, against the turn itself.
NEIGHBOUR = 0.7
# What it is worth to be said by somebody whom the question names, in standard deviations.
SPEAKER = 2.0
# Words of a question that are looked up one by one; a question has about five.
MOST_WORDS = 48
K1, B = 1.2, 0.75  # BM25, as in the index of words

Words = Mapping[str, Mapping[str, float]]  # by word of the question: BM25 of that word alone, by the turn's id


class Found(NamedTuple):
    """What the channels found. `cosines` and `records` (of the nearest record that rests on the turn) by the turn's id,
    empty where they were not searched."""

    cosines: Mapping[str, float]
    words: Words
    records: Mapping[str, float]


class Asked(NamedTuple):
    """A route: what it says, and the unit vectors of its variants as rows."""

    text: str
    vectors: Vectors


class Shortlist(NamedTuple):
    """The best turns by what the channels say alone, best first, and that in standard scores: one row a signal."""

    ids: tuple[str, ...]
    around: tuple[str, ...]
    signals: Floats
    texts: int


def shortlist(found: Found) -> Shortlist:
    """Of all turns found, the `SHORTLIST` best; `around` also holds the ids of the turns before and after each."""
    ids = list(dict.fromkeys((*found.cosines, *(i for gains in found.words.values() for i in gains))))
    if not ids:
        return Shortlist((), (), np.zeros((0, 0)), 0)
    places = [turn_place(i) for i in ids]
    number = {place: n for n, place in enumerate(places)}
    before, after = (np.array([number.get((s, i + d), -1) for s, i in places]) for d in (-1, 1))
    sessions = {session: n for n, session in enumerate(dict.fromkeys(session for session, _ in places))}
    session = np.array([sessions[s] for s, _ in places])
    turn, near, whole = np.zeros(len(ids)), np.zeros(len(ids)), np.zeros(len(ids))
    for gains in found.words.values():
        gain = np.array([*map(gains.get, ids, [0.0] * len(ids)), 0.0], dtype=np.float64)  # the last stands for no turn
        turn += gain[:-1]
        near += np.maximum(gain[:-1], NEIGHBOUR * np.maximum(gain[before], gain[after]))
        highest, times = np.zeros(len(sessions)), np.bincount(session[gain[:-1] > 0], minlength=len(sessions))
        np.maximum.at(highest, session, gain[:-1])
        whole += (highest * times / (times + K1))[session]
    rows = [_standard(_known(signal, ids)) for signal in (found.cosines, found.records) if signal]
    rows += [_standard(row) for row in ((turn, whole, near) if found.words else ())]
    signals = np.stack(rows)
    best = np.argsort(-signals.sum(axis=0), kind="stable")[:SHORTLIST]
    chosen = tuple(ids[n] for n in best)
    around = dict.fromkeys(turn_id(s, i + d) for s, i in (places[n] for n in best) for d in (-1, 0, 1) if i + d >= 0)
    # What words say of three turns is said better by their texts, which are read now.
    return Shortlist(chosen, tuple(around), signals[: -1 if found.words else None, best], len(ids))


def ranked(
    short: Shortlist, found: Found, turns: Mapping[str, Turn], vectors: Callable[[Sequence[str]], Vectors], asked: Asked
) -> list[tuple[str, float]]:
    """The shortlist with the sums, best first. `turns` are those of `short.around` that exist, `vectors` reads their
    unit rows."""
    ids = [i for i in short.ids if i in turns]
    if not ids:
        return []
    kept = np.array([i in turns for i in short.ids])
    trios = _trios(ids, turns)
    signals = [*(_standard(row) for row in short.signals[:, kept])]
    if found.words:
        signals.append(_standard(_words_of(trios, turns, found, short.texts)))
    if found.cosines:
        signals.append(_standard(_meaning_of(trios, vectors(list(turns)), asked.vectors)))
    speakers = named(asked.text, {t.speaker for t in turns.values() if t.speaker})
    total = np.sum(signals, axis=0) + SPEAKER * np.array([turns[i].speaker in speakers for i in ids])
    return [(ids[n], float(total[n])) for n in np.argsort(-total, kind="stable")]


def words(text: str) -> tuple[str, ...]:
    """The words of a question that can be looked up, each once, in order; in scripts without blanks whole runs. Of very
    many, several count as one."""
    distinct: dict[tuple[str, ...], str] = {}
    for word in text.split():
        if terms := tuple(search_terms(word)):
            distinct.setdefault(terms, word)
    each = -(-len(distinct) // MOST_WORDS) or 1
    known = tuple(distinct.values())
    return tuple(" ".join(known[n : n + each]) for n in range(0, len(known), each))


def by_words(found: Words) -> list[tuple[str, float]]:
    """BM25 of each turn that has any of the words, best first."""
    total: dict[str, float] = {}
    for gains in found.values():
        for turn, gain in gains.items():
            total[turn] = total.get(turn, 0.0) + gain
    return sorted(total.items(), key=lambda pair: (-pair[1], pair[0]))


def _trios(ids: Sequence[str], turns: Collection[str]) -> Trios:
    """Of each turn the places among `turns` of itself, the one before and the one after; -1 for none."""
    place = {i: n for n, i in enumerate(turns)}
    found = [(place[i], *(place.get(turn_id(s, n + d), -1) for d in (-1, 1))) for i in ids for s, n in [turn_place(i)]]
    return np.array(found, dtype=np.intp)


def _words_of(trios: Trios, turns: Mapping[str, Turn], found: Found, texts: int) -> Floats:
    """BM25 of each three turns as one text. A word is as rare as it is among the turns found."""
    rarity = {
        term: np.log1p(max(0.0, texts - len(gains) + 0.5) / (len(gains) + 0.5))
        for word, gains in found.words.items()
        for term in search_terms(word)
    }
    counted = [_counted(turn.line) for turn in turns.values()]
    length = np.array([*(terms for _, terms in counted), 0], dtype=np.float64)[trios].sum(axis=1)
    norm = K1 * (1 - B + B * length / max(float(length.mean()), 1.0))
    total: Floats = np.zeros(len(trios))
    for term, weight in rarity.items():
        times = np.array([*(counts.get(term, 0) for counts, _ in counted), 0])[trios].sum(axis=1)
        total += weight * times * (K1 + 1) / (times + norm)
    return total


def _meaning_of(trios: Trios, rows: Vectors, asked: Vectors) -> Floats:
    """The cosine between the question, of its variants the nearest, and the mean direction of each three turns."""
    known = np.vstack([rows, np.zeros((1, rows.shape[1]), dtype=rows.dtype)])  # the last stands for no turn
    sums = known[trios[:, 0]] + np.float32(NEIGHBOUR) * (known[trios[:, 1]] + known[trios[:, 2]])
    length = np.maximum(np.linalg.norm(sums, axis=1), 1e-9)
    nearest: Floats = ((sums @ asked.T).max(axis=1) / length).astype(np.float64)
    return nearest


@lru_cache(maxsize=4_096)
def _counted(text: str) -> tuple[dict[str, int], int]:
    """How often a text holds each of its terms, and how many it has."""
    terms = search_terms(text)
    return dict(Counter(terms)), len(terms)


def _known(scores: Mapping[str, float], ids: Collection[str]) -> Floats:
    """Of each id; what was not found counts as much as the last that was."""
    lowest = min(scores.values())
    return np.array([scores.get(i, lowest) for i in ids], dtype=np.float64)


def _standard(row: Floats) -> Floats:
    """Standard scores; of values that are all the same, zeros."""
    spread = float(row.std())
    return (row - row.mean()) / spread if spread > 1e-9 else np.zeros(len(row))

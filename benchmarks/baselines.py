"""What the baselines show: turns, or whole sessions, of the same memory, picked by a rule of a few lines.

Owns the rules that the methods of the product are compared with. Everything else is the product's: the turns, the
embedder, the words of a text, the prompt that answers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from benchmarks.methods import Shows
from benchmarks.questions import Question
from lychee_local import Memory
from lychee_local.backends import Reranker, Vectors
from lychee_local.lexicon import prompt_tokens, search_terms, terms
from lychee_local.types import Evidence, Turn

Scores = npt.NDArray[np.floating]

K1, B = 1.2, 0.75  # BM25, as Lucene sets them
RRF = 60.0  # Cormack, Clarke and Buettcher, SIGIR 2009
RERANKED = 100


class Transcript:
    """The turns of one memory, and what is computed of them once for all questions."""

    def __init__(self, memory: Memory, reranker: Reranker | None = None) -> None:
        self._memory = memory
        self._reranker = reranker
        self.turns = memory.turns()

    def shown(self, shows: Shows, question: Question, budget: int | None) -> tuple[Evidence, ...]:
        """The items of a baseline, best first, that together cost at most `budget` tokens in a prompt; the first stays
        whatever it costs.

        Raises:
            ValueError: a reranker is asked for and the profile has none.
        """
        if shows == "nothing":
            return ()
        if shows == "gold":
            gold = set(question.gold)
            return tuple(_item([turn], 1.0) for turn in self.turns if turn.ref in gold)
        if shows == "all":
            newest = zip(reversed(self.turns), range(len(self.turns), 0, -1), strict=True)
            return _within((_item([turn], place / len(self.turns)) for turn, place in newest), budget)
        if shows == "sessions":
            scores = self._session_vectors @ self._asked(question)
            sessions = list(self._by_session.values())
            return _within((_item(sessions[i], float(scores[i])) for i in _best(scores)), budget)
        ranked = self._ranked(shows, question)
        if shows == "neighbours":
            return _within(self._with_neighbours(ranked), budget)
        return _within((_item([self.turns[i]], score) for i, score in ranked), budget)

    def _ranked(self, shows: Shows, question: Question) -> list[tuple[int, float]]:
        """Places of turns with their scores, best first; without turns that a ranking of words says nothing of."""
        dense: Scores = self._vectors @ self._asked(question)
        if shows == "dense":
            return [(i, float(dense[i])) for i in _best(dense)]
        if shows == "reranked":
            return self._reranked(question, _best(dense)[:RERANKED])
        words = self._bm25(search_terms(question.text))
        if shows == "bm25":
            return [(i, float(words[i])) for i in _best(words) if words[i] > 0]
        fused = np.zeros(len(self.turns))
        for places in (_best(dense), [i for i in _best(words) if words[i] > 0]):
            for rank, i in enumerate(places, 1):
                fused[i] += 1.0 / (RRF + rank)
        return [(i, float(fused[i])) for i in _best(fused)]

    def _reranked(self, question: Question, places: Sequence[int]) -> list[tuple[int, float]]:
        if self._reranker is None:
            raise ValueError("the method reranked needs a profile with a reranker; see `lychee models list`")
        scores = self._reranker.score(question.text, [self.turns[i].line for i in places])
        return [(places[n], float(scores[n])) for n in _best(np.asarray(scores, dtype=np.float64))]

    def _with_neighbours(self, ranked: Iterable[tuple[int, float]]) -> Iterable[Evidence]:
        """Each turn with the one before and the one after it in its session, as far as they are not shown already."""
        taken: set[int] = set()
        for i, score in ranked:
            around = range(max(0, i - 1), min(len(self.turns), i + 2))
            mine = [n for n in around if n not in taken and self.turns[n].session == self.turns[i].session]
            if mine:
                taken.update(mine)
                yield _item([self.turns[n] for n in mine], score)

    def _asked(self, question: Question) -> Vectors:
        vector: Vectors = self._memory.embed([question.text], kind="query")[0]
        return vector

    @cached_property
    def _vectors(self) -> Vectors:
        return self._memory.embed([turn.line for turn in self.turns])

    @cached_property
    def _by_session(self) -> dict[str, list[Turn]]:
        found: defaultdict[str, list[Turn]] = defaultdict(list)
        for turn in self.turns:
            found[turn.session].append(turn)
        return dict(found)

    @cached_property
    def _session_vectors(self) -> Vectors:
        """Of each session's text as a whole, of which an embedder may read no more than the beginning."""
        return self._memory.embed(["\n".join(turn.line for turn in turns) for turns in self._by_session.values()])

    def _bm25(self, asked: Sequence[str]) -> Scores:
        """Robertson and Zaragoza, 2009, equation 3.15, with the idf that is never negative."""
        total = len(self.turns)
        scores = np.zeros(total)
        for term in dict.fromkeys(asked):
            holders = self._postings.get(term, {})
            idf = math.log(1.0 + (total - len(holders) + 0.5) / (len(holders) + 0.5))
            for i, count in holders.items():
                length = 1.0 - B + B * self._lengths[i] / self._lengths.mean()
                scores[i] += idf * count * (K1 + 1.0) / (count + K1 * length)
        return scores

    @cached_property
    def _words(self) -> list[list[str]]:
        return [terms(turn.line) for turn in self.turns]

    @cached_property
    def _lengths(self) -> Scores:
        return np.array([max(1, len(words)) for words in self._words], dtype=np.float64)

    @cached_property
    def _postings(self) -> dict[str, dict[int, int]]:
        found: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for i, words in enumerate(self._words):
            for word, count in Counter(words).items():
                found[word][i] = count
        return dict(found)


def _best(scores: npt.NDArray[np.floating]) -> list[int]:
    """Places by score, best first, ties by place."""
    places: list[int] = np.argsort(-scores, kind="stable").tolist()
    return places


def _within(items: Iterable[Evidence], budget: int | None) -> tuple[Evidence, ...]:
    shown: list[Evidence] = []
    spent = 0
    for item in items:
        cost = prompt_tokens(item.text)
        if shown and budget is not None and spent + cost > budget:
            break
        shown.append(item)
        spent += cost
    return tuple(shown)


def _item(turns: Sequence[Turn], score: float) -> Evidence:
    first = turns[0]
    return Evidence(
        id=f"window:{first.id}+{len(turns)}" if len(turns) > 1 else first.id,
        kind="window" if len(turns) > 1 else "turn",
        text="\n".join(turn.line for turn in turns),
        score=score,
        session=first.session,
        turns=tuple(turn.id for turn in turns),
        refs=tuple(turn.ref for turn in turns if turn.ref is not None),
        speaker=first.speaker,
        said=first.at,
    )

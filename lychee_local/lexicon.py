"""Words: what counts as a term in any script, and BM25 over texts that only ever grow.

Owns term extraction (also used to cut windows by relevance) and the inverted index. Knows nothing of turns, records or
scores of other channels; lives in memory and is rebuilt from the store in milliseconds per thousand texts.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# Words are runs of letters and digits; the ranges add the combining signs of Indic and South-East Asian scripts, which
# are no letters for `re` and would cut every word in two.
_WORD = re.compile(r"(?:[^\W_]|[\u0300-\u036f\u0900-\u0963\u0981-\u0dff\u0e31-\u0e4e\u0eb1-\u0ecd])+")
# Scripts written without spaces: indexed as single characters and pairs, so that any word of two can be found.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]+")

# English words that say how something is asked or joined, not what is sought.
_STOP = """
a about after all also am an and any are aren as at be because been before being both but by can could couldn d did didn
do does doesn doing don done during each ever for from get got had has hasn have haven having he her here hers him his
how i if in into is isn it its just kind ll m many may me might mine more most much my no nor not of on or other our
ours out over own please re recently s same shall she should so some such t tell than that the their theirs them then
there these they this those through to too up us ve very was wasn we were weren what when where which while who whom
whose why will with won would wouldn yes you your yours
"""
STOP_WORDS = frozenset(_STOP.split())


def terms(text: str) -> list[str]:
    """The searchable terms of a text, in order, repeats kept: case and width folded, stop words gone, English stems."""
    found: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if _UNSPACED.search(word):
            for part in _UNSPACED.findall(word):
                found.extend(part)
                found.extend(part[i : i + 2] for i in range(len(part) - 1))
            found.extend(rest for rest in _UNSPACED.split(word) if rest)
        elif word not in STOP_WORDS:
            found.append(stem(word))
    return found


def prompt_tokens(text: str) -> int:
    """About how many tokens a quoted text costs in a prompt: 1.35 a word, one an unspaced character, 12 a line."""
    unspaced = sum(map(len, _UNSPACED.findall(text)))
    return int(1.35 * len(text.split()) + unspaced + 12 * (text.count("\n") + 1))


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """A light English stemmer: plural, -ed, -ing, -ly and a final e or doubled letter. Other scripts pass unchanged."""
    if len(word) < 4 or not word.isascii() or not word.isalpha():
        return word
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("s", "")):
        if word.endswith(ending) and not word.endswith(("ss", "us", "is")[: 3 if ending == "s" else 0]):
            word = word[: -len(ending)] + instead
            break
    for ending in ("ing", "edly", "ed", "ly"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    if len(word) > 3 and word.endswith("y"):
        word = word[:-1] + "i"
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


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
            number, counts = len(self.ids), Counter(terms(text))
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
        for term in dict.fromkeys(terms(query)):
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

"""Porter's stemmer (M. F. Porter, "An algorithm for suffix stripping", Program 14(3), 1980), with the departures that
NLTK's has by default and LoCoMo's official score therefore too.

Of our own because NLTK takes seconds to import and five packages, and the Snowball project's `porter` keeps to the
paper: it stems 3 % of the words in LoCoMo differently ("play" and "stay" to "plai" and "stai", "use" to "us"). The
departures: words of two letters stay, "ties" and "tied" keep their e, a final y becomes i behind any consonant that is
not the first letter, "bli", "fulli", "logi" and "alli" end words too, and a few words are simply listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_LISTED = {
    "skies": "sky",
    "sky": "sky",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    "news": "news",
    "innings": "inning",
    "inning": "inning",
    "outings": "outing",
    "outing": "outing",
    "cannings": "canning",
    "canning": "canning",
    "howe": "howe",
    "proceed": "proceed",
    "exceed": "exceed",
    "succeed": "succeed",
}
# Steps 2, 3 and 4 of the paper: what an ending becomes. The first that a word ends with is the only one tried.
_SECOND = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("bli", "ble"),
    ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"), ("ization", "ize"), ("ation", "ate"),
    ("ator", "ate"), ("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"),
    ("iviti", "ive"), ("biliti", "ble"), ("fulli", "ful"),
)  # fmt: skip
_THIRD = (("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", ""))
_FOURTH_ENDINGS = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize"
_FOURTH = tuple((ending, "") for ending in _FOURTH_ENDINGS.split())


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """The stem of a word in lower case."""
    if word in _LISTED:
        return _LISTED[word]
    if len(word) <= 2:
        return word
    word = _past(_plural(word))
    if len(word) > 2 and word.endswith("y") and _shape(word)[-2] == "c":
        word = word[:-1] + "i"
    word = _second(word)
    word = _replaced(word, _THIRD, 0)
    word = _replaced(word, _FOURTH, 1)
    return _final(word)


def _plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    cut = next((word.removesuffix(e) for e in ("ed", "ing") if word.endswith(e) and "v" in _shape(word[: -len(e)])), "")
    if not cut:
        return word
    if cut.endswith(("at", "bl", "iz")):
        return cut + "e"
    if _shape(cut)[-1] == "c" and cut[-1] == cut[-2:-1]:
        return cut if cut[-1] in "lsz" else cut[:-1]
    return cut + "e" if _measure(cut) == 1 and _closed(cut) else cut


def _second(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _second(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _SECOND, 0)


def _final(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _closed(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _replaced(word: str, endings: Iterable[tuple[str, str]], above: int) -> str:
    """The word with its ending replaced, if the measure of what is left lies above `above`."""
    for ending, instead in endings:
        if word.endswith(ending):
            rest = word[: -len(ending)]
            fits = _measure(rest) > above and (ending != "ion" or rest.endswith(("s", "t")))
            return rest + instead if fits else word
    return word


def _shape(word: str) -> str:
    """Each letter as c or v: a y is a vowel behind a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """How often a vowel is followed by a consonant: m in [C](VC)^m[V]."""
    return _shape(word).count("vc")


def _closed(word: str) -> bool:
    """Whether a word ends in a short syllable: consonant, vowel, consonant that is not w, x or y."""
    shape = _shape(word)
    return shape == "vc" or (shape.endswith("cvc") and not re.search("[wxy]$", word))

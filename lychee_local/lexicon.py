"""Words: what counts as a term, in any script.

Owns term extraction, for the index of words and for cutting windows by relevance, and which names a text mentions.
Knows nothing of turns and records.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from functools import lru_cache
from itertools import chain

# Scripts written without spaces. Chinese, Japanese and Korean are indexed as single characters and pairs, so that any
# word of two can be found; in Thai, Lao, Burmese and Khmer a single character is a mere letter: pairs only.
_CJK = (
    "\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U000323af"
)
_RUN_ON = "\u0e01-\u0e4e\u0e81-\u0ecd\u1000-\u109f\u1780-\u17d3"
# Signs that belong to the letter before them, which are no letters for `re` and would cut every word in two: accents
# without a composed letter, Cyrillic, Hebrew and Arabic points, vowels of Indic scripts and of Tibetan.
_SIGNS = (
    "\u0300-\u036f\u0483-\u0487\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u0900-\u0963\u0981-\u0dff\u0f71-\u0f84\u0f90-\u0fbc"
)
_WORD = rf"(?:[^\W_{_CJK}{_RUN_ON}]|[{_SIGNS}])+"
# What joins words to an identifier, a path, an address, a version, a number: up to three in a row, as in "://".
_JOINT = r"[._/\\:@+#&=?%~-]{1,3}"
_JOINED = rf"(?:(?<![\w.])\.(?=[^\W\d_]))?{{0}}(?:{_JOINT}{{0}})*(?:(?:\+\+|\#)(?!\w))?"
_TOKEN = re.compile(rf"[{_CJK}]+|[{_RUN_ON}]+|" + _JOINED.replace("{0}", _WORD))
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")
_ASCII_TOKEN = re.compile(_JOINED.replace("{0}", "[A-Za-z0-9]+"))  # the same, four times as fast
_UNSPACED = re.compile(f"[{_CJK}]+")
_ONE_CJK, _ONE_RUN_ON = re.compile(f"[{_CJK}]"), re.compile(f"[{_RUN_ON}]")
_WORDS = re.compile(_WORD)
# Inside a joined token: what stands between its larger parts, words joined by prose alone, languages named with a
# sign, digits in groups of three.
_BORDER = re.compile(r"[/\\:@?&=]+")
_BARE = re.compile(r"[^\W_]+(?:[/.:]+[^\W_]+)*")
_SIGNED = re.compile(r"(?<![^\W_])(?:[a-z]{1,5}\+\+|[a-z]#)")
_DOTTED = re.compile(r"\d{1,3}(?:\.\d{3})+")
_GROUPED = re.compile(r"\d(?<![\w.,]\d)\d{0,2}(?:[,'’\u00a0\u202f]\d{3})+(?!\w|[,'’]\d)")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_NUMBERED = re.compile(r"([A-Za-z]{3,})\d+")

# Invisible: soft hyphens, joiners, marks of direction, variation selectors. They change no word.
_INVISIBLE = re.compile("[\u00ad\u200c-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]")
# Accents go from Latin and Greek; Cyrillic loses only its stress (й and ї are other letters than и and і), Arabic and
# Hebrew their points, and the letters of Arabic their hamza and madda.
_ACCENT = re.compile(
    "(?<![\u0400-\u052f])[\u0300-\u036f]|[\u0300\u0301\u0483-\u0487\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed]"
)
_LETTERS = str.maketrans(
    {"ı": "i", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ħ": "h", "æ": "ae", "œ": "oe", "ё": "е"}
)
_LONGEST = 256  # characters of a term: a longer joined token is found by its parts, a longer word by its beginning
_REMEMBERED = 64  # characters of a word or token whose terms are kept

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
    """The words of a text in order, repeats kept: case, width and accents folded, English stemmed, stop words gone.

    What two texts are compared by. In scripts without spaces the words are single characters and pairs.
    """
    if text.isascii():
        words = _ASCII_WORD.findall(_whole_numbers(text))
        short = max(map(len, words), default=0) <= _REMEMBERED
        return list(chain.from_iterable(map(_remembered_terms if short else _token_terms, words)))
    found: list[str] = []
    for token in _tokens(text):
        found.extend(_remembered_terms(token) if _comes_again(token) else _token_terms(token))
    return found


def search_terms(text: str) -> list[str]:
    """What a text is found by: its words, and what is written without a blank between words also whole.

    `snake_case`, `a/path.py`, `v1.2`, `ann@example.org` or `C++` gives itself, its larger parts (`path.py`), then its
    words; `camelCase` also its humps, `python3` its letters. No term holds a blank, a quote or a control character.
    """
    found: list[str] = []
    for token in _tokens(text):
        found.extend(_remembered(token) if _comes_again(token) else _expanded(token))
    return found


def named(text: str, names: Collection[str]) -> tuple[str, ...]:
    """Those of `names` that `text` contains as words, in any case, in the order of their first mention."""
    places: dict[str, int] = {}
    for name in names:
        # A word boundary means nothing in scripts without spaces; there the name itself has to do.
        edge = r"\b" if name.isascii() else ""
        if name.strip() and (hit := re.search(f"{edge}{re.escape(name)}{edge}", text, re.IGNORECASE)):
            places[name] = hit.start()
    return tuple(sorted(places, key=lambda name: (places[name], name)))


def prompt_tokens(text: str) -> int:
    """About how many tokens a quoted text costs in a prompt: 1.35 a word, one an unspaced character, one a line, and 11
    for its heading."""
    unspaced = 0 if text.isascii() else sum(map(len, _UNSPACED.findall(text)))
    return int(1.35 * len(text.split()) + unspaced + text.count("\n") + 12)


def _whole_numbers(text: str) -> str:
    """The text with 12,000 as 12000."""
    return _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)


def _tokens(text: str) -> list[str]:
    text = _whole_numbers(text)
    if text.isascii():
        return _ASCII_TOKEN.findall(text)
    return _TOKEN.findall(_INVISIBLE.sub("", unicodedata.normalize("NFKC", text)))


def _comes_again(token: str) -> bool:
    """Runs without spaces seldom do, and have many terms."""
    return token < "\u0e00" and len(token) <= _REMEMBERED


def _token_terms(token: str) -> tuple[str, ...]:
    return tuple(_spaceless(token) or (term for word in _WORDS.findall(token) for term in _stemmed(word)))


_remembered_terms = lru_cache(maxsize=65_536)(_token_terms)


@lru_cache(maxsize=65_536)
def _remembered(token: str) -> tuple[str, ...]:
    return tuple(_expanded(token))


def _expanded(token: str) -> Iterator[str]:
    if spaceless := _spaceless(token):
        yield from spaceless
        return
    parts = [term for word in _WORDS.findall(token) for term in _word_terms(word)]
    # "and/or" is no more than its stop words, but "to-do", "AT&T" and "get_all" are names.
    if not _WORDS.fullmatch(token) and (parts or not _BARE.fullmatch(token)):
        yield from _joined(_folded(token.casefold()))
    yield from parts


def _spaceless(token: str) -> list[str]:
    """The terms of a run in a script without spaces; none of any other token."""
    if token < "\u0e00":  # every script that is written so lies above
        return []
    pairs = [token[i : i + 2] for i in range(max(1, len(token) - 1))]
    if _ONE_CJK.match(token):
        return [*token, *pairs] if len(token) > 1 else [token]
    return pairs if _ONE_RUN_ON.match(token) else []


def _joined(token: str) -> dict[str, None]:
    """A joined token as it stands, and those of its larger parts that are joined themselves, each once."""
    whole = [token] if len(token) <= _LONGEST else []
    pieces = (piece.removeprefix("www.") for piece in _BORDER.split(token))
    joined = [piece for piece in pieces if len(piece) <= _LONGEST and not _WORDS.fullmatch(piece)]
    grouped = [token.replace(".", "")] if _DOTTED.fullmatch(token) else []
    return dict.fromkeys(term for term in (*whole, *joined, *_SIGNED.findall(token), *grouped) if term)


def _stemmed(word: str) -> tuple[str, ...]:
    """The term of one word; none of a stop word, which is looked up with its accents: "thé" is no article."""
    plain = word.casefold()
    folded = _folded(plain)[:_LONGEST]
    return (stem(folded),) if folded and plain not in STOP_WORDS else ()


def _word_terms(word: str) -> Iterator[str]:
    """The term of one word, then those of its humps (`camelCase`) and of its letters before a number (`python3`)."""
    yield from _stemmed(word)
    humps = _HUMP.split(word)
    if len(humps) > 1:
        yield from (term for hump in humps if len(hump) > 1 for term in _stemmed(hump))
    if numbered := _NUMBERED.fullmatch(word):
        yield from _stemmed(numbered[1])


def _folded(word: str) -> str:
    """A case-folded word without accents, points and foreign digits."""
    if word.isascii():
        return word
    bare = unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFD", word))).translate(_LETTERS)
    return "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in bare)


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

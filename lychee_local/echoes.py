"""Recalled text is never ingested again: what an assistant says from this memory is no news to it.

Owns how recalled text is told: the evidence block of our own prompts, wherever somebody pasted it; a sentence that
cites an item of such a block; a sentence of an assistant that holds nothing but the words of one earlier turn or
record. What a user says is always theirs, also where it repeats something. The turns themselves are kept and found as
they were said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from lychee_local.lexicon import terms
from lychee_local.types import MEMORY_TYPES

__all__ = ["cites", "is_echo", "repeats", "without_evidence", "words_of"]

# The layout of `answer.serialise`: a tag of its own line, then numbered items. A person who writes the bare tag loses
# nothing. A block that was cut has no end, and goes as far as the text.
_BLOCK = re.compile(r"<(memories|conversation|chain)>\n\[\d{1,9}\] .*?(?:</\1>|\Z)", re.S)
_ITEM = re.compile(
    rf"^[ \t]*\[\d{{1,9}}\] (?:\((?:{'|'.join(MEMORY_TYPES)})\) |Mentioned: |Noted: ).*"
    r"(?:\n[ \t]+(?:Date|Mentioned): .*)*",
    re.M,
)
_MARK = re.compile(r"\[[1-9]\d{0,2}(?:,\s?\d{1,3})*\]")
# An answer says in its own way what it was told: of its words so many must come from one place.
_SHARE = 0.8
_FILLER = frozenset(terms("said told mentioned noted remember recall according previously earlier user assistant know"))


def without_evidence(text: str) -> str:
    """`text` with blanks in the place of every evidence block and item of our prompts; no other character moves."""
    if "[" not in text:
        return text
    return _ITEM.sub(_blank, _BLOCK.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def cites(sentence: str) -> bool:
    """Whether a sentence points at a numbered item, as an answer from recalled evidence does."""
    return _MARK.search(sentence) is not None


def words_of(text: str) -> frozenset[str]:
    """What texts are compared by: their terms without those of reporting."""
    return frozenset(terms(text)) - _FILLER


def repeats(sentence: str, sources: Iterable[AbstractSet[str]], names: Sequence[str] = ()) -> bool:
    """Whether a sentence says no more than one of the sources, given by their `words_of`: four fifths of its words and
    all of its numbers stand there. `names` do not count: an answer says "you" for a name, and a name for "I"."""
    own = words_of(sentence) - {term for name in names for term in terms(name)}
    numbers = {word for word in own if any(map(str.isdigit, word))}
    return bool(own) and any(len(own & said) >= _SHARE * len(own) and numbers <= said for said in sources)


def is_echo(sentence: str, sources: Iterable[AbstractSet[str]], names: Sequence[str] = ()) -> bool:
    """Whether a sentence of an assistant is no news: it `cites` an item, or `repeats` a source."""
    return cites(sentence) or repeats(sentence, sources, names)

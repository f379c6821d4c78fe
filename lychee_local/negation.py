"""Whether a sentence denies what another states: "Ana eats fish" of "I don't eat fish".

Owns the words that deny, in English. Refuses to guess: where a clause cannot be told from its neighbours, or the denial
may be in another word ("avoids", "allergic"), nothing is contradicted.
"""

from __future__ import annotations

import re
from collections.abc import Set

from lychee_local.lexicon import terms

# Denials that deny nothing, or whose sentence says what it says all the same.
_IDIOM = re.compile(
    r"\bcan(?:'t|’t|not|\snot)\s(?:wait|believe|help|stop|get\senough)\b|\bcouldn(?:'|’)t\s(?:be|have|agree|ask)\b|\bno\s(?:problem"
    r"|doubt|wonder|matter|worries|way|idea)\b|\bnot\s(?:only|just|to\smention|bad)\b|\bwhy\snot\b|\bif\snot\b"
    r"|\bdon(?:'|’)t\s(?:worry|forget|you|we|they|mind)\b|\bwouldn(?:'|’)t\smiss\b|^\s*no\b[,.!]"
    r"|\b(?:is|are|was|were|do|does|did|have|has|would|could|can)n(?:'|’)t\s(?:it|he|she|they|you|we|i)\b",
    re.IGNORECASE,
)
_DENIAL = re.compile(
    r"n(?:'|’)t\b|\b(?:not|never|cannot|no|none|nobody|nothing|nowhere|neither|nor|without|hardly|barely)\b", re.I
)
# Words that deny in their meaning, by their beginnings; and words that may, of a statement.
_DENYING = re.compile(
    r"\b(?:avoid|stop|quit|refus|reject|lack|unable|allerg|intoleran|hate|dislike|fail|forg[eo]t|declin|bann|forbid|rather"
    r"|instead|prevent|cancel|unlike|g[ia]v\w*\sup|im?possib)\w*",
    re.IGNORECASE,
)
_LIMITING = re.compile(
    r"\b(?:only|less|except|miss|free|lose|lost|end|skip|too|still|yet|un[a-z]{3})\w*", re.IGNORECASE
)
_CLAUSE = re.compile(
    r"[,;:.!?()–—]+|\s-\s|\b(?:but|and|or|so|because|since|while|although|though|which|who|that|if|when|until|than|as)\b",
    re.IGNORECASE,
)
_SAME = 0.5  # the share of the statement's words that its clause has


def contradicts(text: str, source: str, around: str, names: Set[str]) -> bool:
    """Whether `text` states what a clause of the sentence `source` denies, or denies what it states. `around` is all
    that was said with it, where a denial may stand; `names` are terms that say nothing of what is told."""
    denied = _denies(text)
    if denied and (_denies(around) or _meanings(around) - _meanings(text)):
        return False
    if not denied and (_DENYING.search(text) or _LIMITING.search(text)):
        return False
    words = set(terms(text)) - names
    clauses = [clause for clause in _CLAUSE.split(_IDIOM.sub(" ", source)) if clause.strip()]
    shares = [len(words & set(terms(clause))) / max(1, len(words)) for clause in clauses]
    best = max(shares, default=0.0)
    if best < _SAME:
        return False
    return all(_denies(clause) is not denied for clause, share in zip(clauses, shares, strict=True) if share == best)


def _meanings(text: str) -> set[str]:
    return {word.lower() for word in _DENYING.findall(text)}


def _denies(text: str) -> bool:
    return _DENIAL.search(_IDIOM.sub(" ", text)) is not None

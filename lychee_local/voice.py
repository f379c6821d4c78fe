"""Who speaks: a sentence in the first person becomes one about its speaker, or is quoted.

Rewrites English alone, and there only the first person singular, where the grammar stays right. Every other sentence is
quoted with its speaker, so that no record says what nobody said. Words inside quotation marks are somebody else's and
stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lychee_local.prose import language, opened, statement, words

__all__ = ["by_name", "quote"]

_ADVERB = (
    r"(?:(?!(?:rely|apply|supply|reply|imply|comply|multiply|fly|bully|rally)\b)\w+ly|no longer|kind of|sort of"
    r"|kinda|sorta|just|almost|never|always|often|also|still|even|ever|already|once|sometimes|recently|now|then|soon"
    r"|not|seldom|both|all|too|sure|first|last|later|quite|rather|at least|at first|in fact|hereby|myself|\d{1,3}\s?%)"
)
_PAST = words(
    """
    was were had did could would should might must can will may shall cannot ought went got took made saw said came
    knew thought felt found gave told became left began kept held wrote ran sat met brought bought taught won lost
    spoke drove ate fell grew chose broke built caught drew dreamt slept spent stood swam threw woke wore sang sold
    sent paid led heard understood used forgot forgave hung rode rose shot showed stuck tore flew fought bit blew
    dug drank froze hid learnt lit meant put read hit set let cut hurt quit cost beat spread shut split fit bent
    bled bred clung crept dealt fed fled flung ground laid leapt overcame proved rang sank shone shook shrank slid
    spat spun sprang stank stole struck strove swept swore swung wept withdrew wound wrung overslept rebuilt redid
    undertook mistook outgrew gotten
    """
)
_IRREGULAR = {
    "am": "is",
    "have": "has",
    "do": "does",
    "go": "goes",
    "don't": "doesn't",
    "haven't": "hasn't",
    "was": "was",
}
_NO_VERBS = words(
    """
    and or but if in on at to for with as of by from the a an is are who that too both all been being no my me the
    than
    """
)
# After "I'd": what makes it "I had".
_PARTICIPLES = words(
    """
    been had gone seen done taken given known made met got gotten heard told thought found left lost written driven
    eaten fallen forgotten chosen broken spoken stolen worn sung swum begun kept felt said paid sent spent bought
    brought caught taught built grown thrown drawn flown shown better
    """
)
_NO_PARTICIPLE = re.compile(r"(?:n|f|bl|br|sp|proc|exc|succ|emb|sh|w)e{1,2}d$")
_CONTRACTED = {"'m": "is", "'ve": "has", "'ll": "will", "'d": "would"}
_THEY = {"am": "are", "was": "were", "'m": "are", "'ve": "have", "'ll": "will", "'d": "would"}
_I = re.compile(rf"\b(I)('(?:m|ve|ll|d))?\b((?:\s+{_ADVERB}(?!\w))*)(\s+[A-Za-z]+(?:'t)?)?")
_OTHERS = re.compile(r"\b(?:we|us|our|ours|let's|lets|you|u|your|yours|y'all)\b|'s\s+(?:go|do)\b", re.I)
_OWN = {"my": "their", "mine": "theirs", "me": "them", "myself": "themselves"}
_OWN_WORD = re.compile(r"\b(?:my|mine|me|myself)\b", re.I)
_FIRST = re.compile(r"\b(?:I|[Mm]e|[Mm]y|[Mm]ine)\b")
_SMALL_I = re.compile(r"(?<![\w.'@/&-])i(?=(?:'(?:m|ve|ll|d))?\s)")
_SPOKEN = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\bI(?:'ve)? gotta\b", "I have to"),
        (r"\bI wanna\b", "I want to"),
        (r"\bI(?:'m)? gonna\b", "I am going to"),
        (r"\bI dunno\b", "I don't know"),
        (r"\bI'd better\b", "I had better"),
    )
)
# "My wife and I", "me and my two kids": one subject, of which the speaker is a part; the verb is plural already.
_WITH_OWN = re.compile(
    r"\b[Mm]y\s((?:[\w'-]+\s){1,3}?)and\s(?:I|me)\b('(?:m|ve|ll|d))?|\b[Mm]e\sand\smy\s((?:[\w'-]+\s){0,2}?[\w'-]+)\b"
)
_CLAUSE = re.compile(r"[,;:.!?–—]\s*|\b(?:that|because|when|while|where|if|so|but|since|then)\s", re.I)
_BESIDE = re.compile(
    r"(?:[Bb]oth\s)?(?:(?:[Tt]he|[Oo]ur|[Hh]is|[Hh]er)\s[\w'-]+|[Hh]e|[Ss]he|[Tt]hey|[A-Z][\w'-]*(?:\s[A-Z][\w'-]*)?)\sand\s"
)
_LISTED = re.compile(r"^(?:[-*•]|\d{1,2}[.)](?!\s[A-ZÄÖÜ][a-zäöü]+\b))\s+")
_QUOTATION = re.compile(r'"[^"]*"|“[^”]*”')
_MASK = "\ue000"
_STAND_IN = "Qzname"  # a name, as far as the rules look at one


def by_name(sentence: str, speaker: str, others: Sequence[str] = ()) -> str:
    """The sentence with its speaker named: "I signed up" becomes "Melanie signed up" where the grammar stays right.

    `others` are the names by which the speaker may address somebody: "John, I agree" is not about John.
    """
    sentence = _LISTED.sub("", sentence).replace("**", "")
    plain = opened(statement(sentence)).replace("’", "'")
    if language(plain) != "english":
        return quote(sentence, speaker)
    said = _QUOTATION.findall(plain)
    plain = _SMALL_I.sub("I", _QUOTATION.sub(_MASK, plain))
    for name in others:
        if name != speaker:
            plain = _without_address(plain, name)
    for pattern, written in _SPOKEN:
        plain = pattern.sub(written, plain)
    if _OTHERS.search(plain) or not _FIRST.search(plain):
        return quote(sentence, speaker)
    inside = re.sub(r"^The\b", "the", speaker)  # "the user", where no name is known
    named = re.sub(_MASK, lambda _: said.pop(0), _third_person(plain, inside))
    return named[0].upper() + named[1:]


def quote(sentence: str, speaker: str) -> str:
    """The words themselves; quotation marks in them are made inner ones."""
    return f'{speaker} said: "{_inner(sentence)}"'


def _inner(sentence: str) -> str:
    return re.sub(r'"([^"]*)"', r"“\1”", sentence).replace('"', "”")


def _without_address(sentence: str, name: str) -> str:
    called = "|".join(map(re.escape, {name, name.split()[0]}))
    return re.sub(rf"^(?:{called})[,!]\s+(?=\w)|,\s+(?:{called})(?=[.!]*$)", "", sentence)


def _third_person(sentence: str, speaker: str) -> str:
    """First person singular to third: the name where it first stands, "they" and its forms after it."""
    # A name may be a word of the first person itself: somebody is called Me in many an export.
    return _told_of(sentence, _STAND_IN).replace(_STAND_IN, speaker)


def _told_of(sentence: str, speaker: str) -> str:
    named = False

    def together(match: re.Match[str]) -> str:
        nonlocal named
        verb = f" {_THEY[match[2]]}" if match[2] else ""
        who = "they" if named or _FIRST.search(match.string[: match.start()]) else speaker
        named = named or who == speaker
        return f"{who} and their {(match[1] or match[3]).strip()}{verb}"

    sentence = _WITH_OWN.sub(together, sentence)
    first = min((m.start() for m in re.finditer(r"\bI\b", sentence)), default=len(sentence))

    def subject(match: re.Match[str]) -> str:
        nonlocal named
        contraction = (match[2] or "").lower()
        adverbs, verb = match[3] or "", (match[4] or "").strip()
        if contraction == "'d" and _participle(verb):
            word = "had"
        elif named or _beside(sentence[: first + match.start()]):
            word = _THEY.get(contraction) or _THEY.get(verb, verb)
        else:
            word = _CONTRACTED.get(contraction) or (_singular(verb) if verb else "")
        who = "they" if named else speaker
        named = True
        if contraction:
            return f"{who} {word}{adverbs}{match[4] or ''}"
        return f"{who}{adverbs}{' ' + word if word else ''}"

    def own(match: re.Match[str]) -> str:
        nonlocal named
        word = match[0].lower()
        if word == "myself":
            return _OWN[word]  # it points at a subject, and is none
        if word == "me" and re.search(r"\b(?:and|like|than|as)\s$", sentence[: match.start()], re.I):
            return speaker
        if named or match.start() > first:
            return _OWN[word]
        named = True
        return f"{speaker}'s" if word in ("my", "mine") else speaker

    head = _OWN_WORD.sub(own, sentence[:first])
    sentence, first = head + sentence[first:], len(head)
    sentence = head + _I.sub(subject, sentence[first:])
    return head + _OWN_WORD.sub(own, sentence)[len(head) :]


def _beside(before: str) -> bool:
    """Whether "I" stands behind somebody it is one subject with: "Ana and I", not "I moved and I"."""
    clause = _CLAUSE.split(before)[-1]
    return _BESIDE.fullmatch(clause) is not None


def _participle(verb: str) -> bool:
    return verb in _PARTICIPLES or (verb.endswith("ed") and not _NO_PARTICIPLE.search(verb))


def _singular(verb: str) -> str:
    """The form of a verb that goes with a name: love, loves; try, tries. Past forms stay."""
    low = verb.lower()
    if low in _IRREGULAR:
        return _IRREGULAR[low]
    regular_past = low.endswith("ed") and low not in (
        "need",
        "feed",
        "speed",
        "bleed",
        "breed",
        "proceed",
        "exceed",
        "succeed",
    )
    if low in _PAST or regular_past or low.endswith("n't") or not low.isalpha() or low in _NO_VERBS:
        return verb
    if low.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if low.endswith("y") and low[-2:-1] not in "aeiou" else verb + "s"

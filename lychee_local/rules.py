"""Code-made records: one per substantive sentence, with no language model.

Owns what rules can know of a sentence: which date is meant, which names and topics stand in it, who said it where. What
a sentence is and whether it says something is decided in `prose`, how its speaker is named in `voice`, what is no news
in `echoes`. The encoder uses the same rules on what a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date

from lychee_local import dates
from lychee_local.echoes import is_echo, without_evidence, words_of
from lychee_local.lexicon import terms
from lychee_local.prose import FUNCTION_WORDS, SCRIPT_BORDER, UNSPACED, URL, language, sentences, substantive
from lychee_local.prose import words as word_set
from lychee_local.types import MemoryType, Record, Segment, Temporal, Turn
from lychee_local.voice import by_name

__all__ = [
    "by_name",
    "classify",
    "encode_by_rules",
    "entities_in",
    "sentences",
    "slice_of",
    "substantive",
    "tags_of",
    "temporal_of",
    "unique",
    "who",
    "with_source",
]

MAX_ENTITIES = 3
# Every pair of entity and tag becomes an indexed node, so one more tag costs three more vectors a record.
MAX_TAGS = 2
# An assistant says much that is worth nothing later; its shorter sentences are offers and courtesies.
_ASSISTANT_TERMS = 5
_UNSPACED_TERMS = 4  # terms that one word makes in a script without spaces


_IMAGE = re.compile(r"\[image: ([^\]]{1,300})\]")
_UPPER = "".join(chr(code) for code in range(0x41, 0x530) if chr(code).isupper())
_CAPITAL = rf"[{_UPPER}][\w'’&-]*"
_NAME = re.compile(
    rf"(?<!\w)(?<!\w['’-])(?:(?:Mr|Mrs|Ms|Dr|Prof|St|Mt)\.\s)?{_CAPITAL}"
    rf"(?:\s+(?:(?:of(?:\sthe)?|de(?:l|\sla|\slos)?|van(?:\sder)?)\s)?{_CAPITAL}|\s+\d+)*"
)
_TITLE = re.compile(r"[\"“«「『《]([^\"“”«»「」『』《》]{2,60})[\"”»」』》]")
_SAYING = re.compile(
    r"(?:\b(?:sa(?:id|ys?)|ask(?:ed|s)|told \w+|repl(?:ied|ies)|was like|goes|sagte|dijo)|[,:：说問])\s*$"
)
_REPORTED = re.compile(r'[^"]{1,200}? said: "(.*)"', re.S)
_START = re.compile(r"(?:[.!?:…]\s+|^)[\"“«¡¿(]*|[\"“«¡¿]")
# How people introduce themselves, or somebody with an honorific, in scripts that have no capitals.
_INTRODUCED = re.compile(
    r"(?:我叫|名叫|我的名字(?:是|叫)|名前は)\s?([^\W\d]{2,6}?)(?=です|と|[，。！？,.!?、\s\"]|$)"
    r"|((?:[\u4e00-\u9fff]々[\u4e00-\u9fff]|[\u4e00-\u9fff]{2}|[\u30a1-\u30fa\u30fc]{2,10})(?:さん|くん|ちゃん|さま))"
    r"|(?:اسمي|اسمه|اسمها)\s+(\w{2,20})"
)
_KATAKANA = re.compile(r"[\u30a1-\u30fa\u30fc]{3,20}")
_CALENDAR = word_set(
    """
    january february march april may june july august september october november december monday tuesday wednesday
    thursday friday saturday sunday i i'm i've i'll i'd ok okay oh wow yes no hey hi thanks yeah
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun last next this
    januar jänner februar märz mai juni juli oktober dezember montag dienstag mittwoch donnerstag freitag samstag
    sonnabend sonntag enero febrero marzo mayo junio julio lunes martes viernes
    """
)
# German gives every noun a capital. A name is told from a noun by what stands before it.
_DETERMINER = re.compile(
    r"(?:d(?:er|ie|as|en|em|es)|(?:k|m|d|s)?ein(?:e[nmrs]?)?|unser(?:e[nmrs]?)?|eu(?:er|re[nmrs]?)|ihr(?:e[nmrs]?)?"
    r"|diese[nmrs]?|jede[nmrs]?|alle[nmrs]?)",
    re.I,
)
_FUSED = re.compile(r"(?:vom|zum|zur|im|am|beim|ins|ans)", re.I)
_BEFORE_NAME = word_set("in nach aus heiße heißt heißen namens genannt")
_NO_NAME = re.compile(
    r"(?:hause|hilfe|eile|ordnung|ruhe|angst|holz|zukunft|rente|urlaub|form|wirklichkeit|deutsch|englisch|wahrheit|not|gefahr)$"
    r"|\w+(?:ung|heit|keit|schaft|tion|nis)(?:en)?$",
    re.I,
)
_LIKING = re.compile(
    r"\b(?:likes?|loves?|enjoys?|prefers?|favou?rites?|hates?|dislikes?|adores?|fan of|passionate about|can't stand)\b"
)
_RULE = re.compile(
    r"\b(?:must|allergic|allergy|never eats?|can't eat|not allowed|has to|have to|only if|budget|deadline)\b"
)
_COMMON = word_set(
    """
    thing things lot lots time times day days way really great good nice new people bit feel felt feeling make makes
    made making get gets getting going went take took takes taking think thinks thought know knows knew want wants
    wanted need needs look looks looking see seen saw say says said tell told keep kept give gave come came find found
    try tried love loves loved like likes liked enjoy enjoys help helps helped start started last week month year
    years yesterday today tomorrow ago next weekend super pretty totally definitely something anything everything
    someone shared image photo picture sure able best better always never still even though around away back down over
    much well long will would could should they them their theirs themselves that this those these with from what when
    where been
    """
)


def who(turn: Turn) -> str:
    """The speaker of a turn as a sentence names them."""
    return turn.speaker or f"The {turn.role}"


# --- what a sentence is about -----------------------------------------------------------------------------------------


def entities_in(sentence: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Names in a sentence: the known ones, titles in quotation marks, hosts of links, and words that have a capital for
    no other reason."""
    text = SCRIPT_BORDER.sub(" ", sentence)
    found = [name for name in known if re.search(rf"(?<!\w){_bounded(name)}(?!\w)", text)]
    found += [address[0].split("/")[2 * ("://" in address[0])].removeprefix("www.") for address in URL.finditer(text)]
    text = URL.sub(" ", text)
    text = _body(text)
    found += [next(filter(None, match.groups())) for match in _INTRODUCED.finditer(sentence)]
    found += [match[1].rstrip(" .,!?。，！？") for match in _TITLE.finditer(_body(sentence)) if _titled(match)]
    text = _TITLE.sub(" . ", text)
    german = language(text) == "german"
    starts = {match.end() for match in _START.finditer(text)}
    for match in _NAME.finditer(text):
        words = match[0].split()
        if german:
            words = _proper(words, text[: match.start()], starts=match.start() in starts)
        elif match.start() in starts and _common_start(words, known):
            words = words[1:]
        name = _trimmed(words)
        if len(name) > 1 and name.lower() not in FUNCTION_WORDS:
            found.append(name)
    return unique(found)


def _body(sentence: str) -> str:
    """What a quoting record quotes; all of any other."""
    reported = _REPORTED.fullmatch(sentence)
    return sentence if reported is None else reported[1]


def _titled(match: re.Match[str]) -> bool:
    """Whether a quotation is a title or a name, not something that somebody said."""
    speech = re.search(r"[.!?。！？]\s*\S", match[1]) or match.string[match.end() : match.end() + 1] in ("と", "って")
    return not speech and not _SAYING.search(match.string[max(0, match.start() - 30) : match.start()])


def _bounded(name: str) -> str:
    """A pattern for a name; in a script without spaces it may stand inside of a run."""
    return rf"\w*{re.escape(name)}\w*" if UNSPACED.search(name) else re.escape(name)


def _common_start(words: Sequence[str], known: Sequence[str]) -> bool:
    """Whether the first word has its capital because a sentence begins there."""
    rest = _trimmed(list(words[1:]))
    return words[0].lower() in FUNCTION_WORDS or not rest or rest.startswith(tuple(known))


def _trimmed(words: list[str]) -> str:
    """A name without the days, months and numbers at its ends."""
    while words and (words[0].isdigit() or words[0].lower().replace("’", "'") in _CALENDAR):
        words = words[1:]
    while words and words[-1].lower() in _CALENDAR:
        words = words[:-1]
    return " ".join(words).rstrip("'’-").removesuffix("'s").removesuffix("’s")


def _proper(words: list[str], before: str, *, starts: bool) -> list[str]:
    """What of a run of capitals in German is a name: behind an article the first word is a noun; a single word is a
    name after a preposition of place or a verb of naming, or where it is written as no noun is (BMW, C3)."""
    previous = before.split()[-1] if before.split() else ""
    if starts:
        previous, words = words[0], words[1:] if words[0].lower() in FUNCTION_WORDS else words
    unlike_a_noun = [word for word in words if re.search(r"\w[A-Z\d]", word)]
    if words and _DETERMINER.fullmatch(previous):
        words = words[1:] or unlike_a_noun
    elif _FUSED.fullmatch(previous):
        words = []
    elif len(words) == 1 and not unlike_a_noun:
        named = not starts and previous.lower() in _BEFORE_NAME and not _NO_NAME.match(words[0])
        words = words if named else []
    return words


def tags_of(sentence: str, entities: Sequence[str]) -> tuple[str, ...]:
    """Up to two topic words: the longest content words that are no names, in the order of the sentence."""
    names = {word.casefold() for entity in entities for word in entity.split()}
    bare = SCRIPT_BORDER.sub(" ", URL.sub(" ", re.sub(r"\([^)]*\d{4}\)", " ", _body(sentence))))
    words = [
        word
        for word in unique([*re.findall(r"[^\W\d_]{4,24}", bare.casefold()), *_KATAKANA.findall(bare)])
        if word not in FUNCTION_WORDS and word not in _COMMON and word not in names
        if not UNSPACED.search(word) or _KATAKANA.fullmatch(word)
    ]
    longest = sorted(words, key=len, reverse=True)[:MAX_TAGS]
    return tuple(word for word in words if word in longest)


def unique(words: Sequence[str]) -> tuple[str, ...]:
    """Without blanks and repeats; two words that differ in case alone are one."""
    kept: dict[str, str] = {}
    for word in words:
        clean = " ".join(word.split())
        if clean:
            kept.setdefault(clean.casefold(), clean)
    return tuple(kept.values())


def classify(sentence: str) -> MemoryType:
    """The type as far as words tell: a bound, a taste, something dated, or else a fact."""
    if _LIKING.search(sentence):
        return "preference"
    if _RULE.search(sentence):
        return "constraint"
    return "event" if dates.find(sentence, None) else "fact"


def temporal_of(sentence: str) -> Temporal:
    """The dates in a sentence whose relative dates are annotated: since and until give the ends of validity."""
    reference = since = until = None
    for mention in dates.find(sentence, None):
        before = sentence[: mention.start].rstrip("( ").lower()
        if before.endswith(("since", "from")):
            since = since or mention.span
        elif before.endswith(("until", "till")):
            until = until or mention.span
        else:
            reference = reference or mention.span
    return Temporal(reference, since, until)


# --- one segment ------------------------------------------------------------------------------------------------------


def slice_of(turn: Turn, segment: Segment) -> str:
    """What the segment holds of a turn: its text, or the fragment of an oversized one, with blanks where recalled
    evidence was pasted."""
    text = without_evidence(turn.text)
    return text if segment.chars is None else text[slice(*segment.chars)]


def encode_by_rules(
    segment: Segment, turns: Sequence[Turn], *, text: str | None = None, recalled: Sequence[str] = ()
) -> tuple[Record, ...]:
    """One record for every substantive sentence of the segment's turns, in order; what is said again is a further
    source of the record.

    `text` narrows a single turn to a part of it; `recalled` are texts of the memory that the assistant may have been
    shown: where it says them again, that makes no record.
    """
    known = unique([turn.speaker for turn in turns if turn.speaker])
    records: dict[str, Record] = {}
    said = [words_of(each) for each in recalled]
    for turn in turns:
        spoken = slice_of(turn, segment) if text is None else text
        for source, sentence in _worth_keeping(turn, spoken, said, known):
            record = _record(segment, turn, source, sentence, known)
            earlier = records.get(record.id)
            records[record.id] = record if earlier is None else with_source(earlier, record)
        if turn.role != "assistant":
            said.append(words_of(spoken))
    return tuple(records.values())


def _record(segment: Segment, turn: Turn, source: str, sentence: str, known: Sequence[str]) -> Record:
    dated = dates.annotate(sentence, _day(turn))
    names = entities_in(dated, known)
    return Record(
        session=turn.session,
        text=dated,
        kind=classify(dated),
        turns=(turn.index,),
        segment=segment.id,
        entities=names[:MAX_ENTITIES],
        tags=tags_of(dated, names),
        temporal=temporal_of(dated),
        role="assistant" if turn.role == "assistant" else "user" if turn.role == "user" else "",
        speaker=turn.speaker,
        said=turn.at,
        origin="rules",
        chars=place_of(source, turn.text),
    )


def with_source(record: Record, again: Record) -> Record:
    """The record with the turns of another that says the same; its slice only as long as one turn says it."""
    turns = tuple(sorted({*record.turns, *again.turns}))
    return record if turns == record.turns else replace(record, turns=turns, chars=None)


def place_of(sentence: str, text: str) -> tuple[int, int] | None:
    """The slice [from, to) of `text` in which a sentence of it stands, whatever its white space; None where it does not
    stand in one piece."""
    start = text.find(sentence) if sentence.strip() else -1
    if start >= 0:  # nearly always, and a search for the pattern through a long turn takes a hundred times as long
        return start, start + len(sentence)
    found = re.search(r"\s+".join(map(re.escape, sentence.split())), text) if sentence.strip() else None
    return None if found is None else found.span()


def _worth_keeping(
    turn: Turn, text: str, said: Sequence[frozenset[str]], known: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Sentences as they stand in the turn, and as a record says them."""
    if turn.role in ("system", "tool"):
        return  # what a program wrote is searchable as a turn, but nobody said it
    name = who(turn)
    for sentence in sentences(text.removeprefix(f"{turn.name}: ")):
        if image := _IMAGE.fullmatch(sentence):
            yield sentence, f"{name} shared an image: {image[1]}"
        elif URL.fullmatch(sentence):
            yield sentence, f"{name} shared a link: {sentence}"
        elif substantive(sentence) and (turn.role == "user" or _own(sentence, said, known)):
            yield sentence, by_name(sentence, name, known)


def _own(sentence: str, said: Sequence[frozenset[str]], known: Sequence[str]) -> bool:
    """Whether a sentence of an assistant is worth keeping: long enough, and no echo."""
    length = len(set(terms(sentence))) // (_UNSPACED_TERMS if UNSPACED.search(sentence) else 1)
    return length >= _ASSISTANT_TERMS and not is_echo(sentence, said, known)


def _day(turn: Turn) -> date | None:
    return turn.at.date() if turn.at else None

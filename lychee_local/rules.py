"""Code-made records: one per substantive sentence, with no language model.

Owns what rules can know of a sentence: whether it is worth keeping, who speaks, which date is meant, which names and
topics stand in it. The encoder uses the same rules on what a model wrote. Rewrites the first person only where the
grammar stays right; every other sentence is quoted with its speaker, so that no record says what nobody said.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from datetime import date

from lychee_local import dates
from lychee_local.lexicon import STOP_WORDS, terms
from lychee_local.types import MemoryType, Record, Segment, Temporal, Turn

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
]

MAX_ENTITIES = 3
# Every pair of entity and tag becomes an indexed node, so one more tag costs three more vectors a record.
MAX_TAGS = 2
_MAX_SENTENCE = 400
# An assistant says much that is worth nothing later; its shorter sentences are offers and courtesies.
_ASSISTANT_TERMS = 5


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|\n+")
_CODE = re.compile(r"```(?:[^`]|`(?!``))*(?:```|\Z)|^[ \t]*\|[^\n]*\|[ \t]*$", re.M)
_IMAGE = re.compile(r"\[image: ([^\]]{1,300})\]")
_IMAGE_SEARCH = re.compile(r"\[image(?: search: [^\]]{0,300})?\]")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_BLOB = re.compile(r"[!-~]{120,}")

_OPENING = re.compile(
    r"^(?:(?:oh|ah|wow|whoa|yeah|yep|yup|yes|no|hey|hi|hello|well|so|and|but|also|btw|by the way|actually|honestly|haha"
    r"|lol|ok|okay|thanks|thank you|absolutely|definitely|exactly|sure|totally|cool|nice|great|awesome|oh no|of course"
    r"|anyway|plus|true|right)\b[,!.…]*\s+)+",
    re.I,
)
_COURTESY = re.compile(
    r"^(?:hi|hey|hello|bye|goodbye|good (?:morning|night|evening|luck)|thank|thanks|thx|no problem|no worries"
    r"|you're welcome|take care|see you|talk (?:to you )?(?:soon|later)|have (?:a )?(?:fun|good|great|nice)|congrats"
    r"|congratulations|wow|awesome|amazing|cool|nice|great|glad|so (?:glad|happy|proud|cool|kind|sweet)"
    r"|good (?:to|for)|sounds"
    r"|that's|that is|that sounds|what (?:a|an)\b|how (?:cool|nice|awesome)|looks|long time|keep (?:it|up)|let me know"
    r"|i agree|of course|absolutely|definitely|exactly|danke|hallo|gracias|hola"
    r"|谢谢|你好|再见|ありがとう|こんにちは)(?!\w)",
    re.I,
)
_ADVERB = re.compile(
    r"\w+ly|just|almost|never|always|often|also|still|even|ever|already|once|sometimes|usually|finally|recently|now|then|soon|not"
)
_PAST = _words(
    """
    was were had did could would should might must can will may shall went got took made saw said came knew thought
    felt found gave told became left began kept held wrote ran sat met brought bought taught won lost spoke drove ate
    fell grew chose broke built caught drew dreamt slept spent stood swam threw woke wore sang sold sent paid led
    heard understood used forgot forgave hung rode rose shot showed stuck tore flew fought bit blew dug drank froze
    hid learnt lit meant put read hit set let cut hurt quit cost beat spread shut split
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
_NO_VERBS = _words("and or but if in on at to for with as of by from the a an is are who that too both all")
_CONTRACTED = {"'m": "is", "'ve": "has", "'ll": "will", "'d": "would"}
_I = re.compile(r"\b(I)(['’](?:m|ve|ll|d))?\b((?:\s+(?:" + _ADVERB.pattern + r"))*)(\s+[A-Za-z]+(?:['’]t)?)?")
_THEY = {"am": "are", "was": "were", "'m": "are", "'ve": "have", "'ll": "will", "'d": "would"}
_OTHERS = re.compile(r"\b(?:we|us|our|ours|let's|lets|you|your|yours|y'all)\b|['’]s\s+(?:go|do)\b", re.I)
_OWN = {"my": "their", "mine": "theirs", "me": "them", "myself": "themselves"}
_FIRST = re.compile(r"\b(?:I|[Mm]e|[Mm]y|[Mm]ine|[Mm]yself)\b")
_NAME = re.compile(r"\b[A-Z][\w'’&-]*(?:\s+(?:[A-Z][\w'’&-]*|\d+))*")
_TITLE = re.compile(r"[\"“«「『]([^\"“”«»「」『』]{2,60})[\"”»」』]")
_CALENDAR = _words(
    """
    january february march april may june july august september october november december monday tuesday wednesday
    thursday friday saturday sunday i i'm i've i'll i'd ok okay oh wow yes no hey hi thanks yeah
    """
)
_LIKING = re.compile(
    r"\b(?:likes?|loves?|enjoys?|prefers?|favou?rites?|hates?|dislikes?|adores?|fan of|passionate about|can't stand)\b"
)
_RULE = re.compile(
    r"\b(?:must|allergic|allergy|never eats?|can't eat|not allowed|has to|have to|only if|budget|deadline)\b"
)
_COMMON = _words(
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


# --- one sentence -----------------------------------------------------------------------------------------------------


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text in any script, without code blocks, tables and unbroken runs of characters."""
    text = _BLOB.sub(" ", _IMAGE_SEARCH.sub("", _CODE.sub("\n", text)))
    for part in _SENTENCE_END.split(text):
        yield from textwrap.wrap(" ".join(part.split()), _MAX_SENTENCE, break_on_hyphens=False)


def substantive(sentence: str) -> bool:
    """Whether a sentence says something: no question, no courtesy, three words with a meaning, two if about oneself."""
    if sentence.rstrip("\"'”’) ").endswith(("?", "？", "؟")):
        return False
    words = len(set(terms(sentence)))
    if _UNSPACED.search(sentence):
        return words >= 6 and not _COURTESY.match(sentence)
    personal = re.search(r"\b(?:I|[Mm]y|[Ww]e|[Oo]ur)\b", sentence) is not None
    return words >= 2 if personal else words >= 3 and not _COURTESY.match(sentence)


def by_name(sentence: str, speaker: str) -> str:
    """The sentence with its speaker named: "I signed up" becomes "Melanie signed up" where the grammar stays right."""
    plain = _OPENING.sub("", sentence)
    if _OTHERS.search(plain) or not _FIRST.search(plain) or _UNSPACED.search(plain):
        return f'{speaker} said: "{sentence}"'
    named = _third_person(plain, speaker)
    return named[0].upper() + named[1:]


def _third_person(sentence: str, speaker: str) -> str:
    """First person singular to third: the name where it first stands, "they" and its forms after it."""
    named = False

    def subject(match: re.Match[str]) -> str:
        nonlocal named
        contraction = (match[2] or "").lower().replace("’", "'")
        adverbs, verb = match[3] or "", (match[4] or "").strip()
        if named or sentence[: first + match.start()].endswith("and "):
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
        if named or match.start() > first:
            return _OWN[word]
        named = True
        return f"{speaker}'s" if word in ("my", "mine") else speaker

    first = min((m.start() for m in re.finditer(r"\bI\b", sentence)), default=len(sentence))
    head = re.sub(r"\b(?:my|mine|me|myself)\b", own, sentence[:first], flags=re.I)
    tail = _I.sub(subject, sentence[first:])
    return head + re.sub(r"\b(?:my|mine|me|myself)\b", lambda match: _OWN[match[0].lower()], tail, flags=re.I)


def _singular(verb: str) -> str:
    """The form of a verb that goes with a name: love, loves; try, tries. Past forms stay."""
    low = verb.lower().replace("’", "'")
    if low in _IRREGULAR:
        return _IRREGULAR[low]
    if low in _PAST or low.endswith(("ed", "n't")) or not low.isalpha() or low in _NO_VERBS:
        return verb
    if low.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if low.endswith("y") and low[-2:-1] not in "aeiou" else verb + "s"


def who(turn: Turn) -> str:
    """The speaker of a turn as a sentence names them."""
    return turn.speaker or f"The {turn.role}"


# --- what a sentence is about -----------------------------------------------------------------------------------------


def entities_in(sentence: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Names in a sentence: the known ones, titles in quotation marks, and words capitalised for no other reason."""
    found = [name for name in known if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence)]
    if not re.match(r'[^"]{1,80} said: "', sentence):
        found += _TITLE.findall(sentence)
        sentence = _TITLE.sub(" . ", sentence)
    starts = {0} | {match.end() for match in re.finditer(r"[.!?:]\s+[\"“]?|[\"“]", sentence)}
    for match in _NAME.finditer(sentence):
        words = match[0].split()
        rest = " ".join(words[1:])
        if match.start() in starts and (words[0].lower() in STOP_WORDS or not rest or rest.startswith(tuple(known))):
            words = words[1:]
        while words and (words[0].isdigit() or words[0].lower().replace("’", "'") in _CALENDAR):
            words = words[1:]
        name = " ".join(words).removesuffix("'s").removesuffix("’s")
        if len(name) > 1 and name.split()[-1].lower() not in _CALENDAR:
            found.append(name)
    return unique(found)


def tags_of(sentence: str, entities: Sequence[str]) -> tuple[str, ...]:
    """Up to two topic words: the longest content words that are no names, in the order of the sentence."""
    names = {word.casefold() for entity in entities for word in entity.split()}
    bare = re.sub(r"\([^)]*\d{4}\)", " ", sentence)
    words = [
        word
        for word in unique(re.findall(r"[^\W\d_]{4,24}", bare.casefold()))
        if word not in STOP_WORDS and word not in _COMMON and word not in names and not _UNSPACED.search(word)
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
    """What the segment holds of a turn: all of its text, or the fragment of an oversized one."""
    return turn.text if segment.chars is None else turn.text[slice(*segment.chars)]


def encode_by_rules(segment: Segment, turns: Sequence[Turn], *, text: str | None = None) -> tuple[Record, ...]:
    """One record for every substantive sentence of the segment's turns, in order, without repeats.

    `text` narrows a single turn to a part of it.
    """
    known = unique([turn.speaker for turn in turns if turn.speaker])
    records: dict[str, Record] = {}
    for turn in turns:
        for source, sentence in _worth_keeping(turn, slice_of(turn, segment) if text is None else text):
            dated = dates.annotate(sentence, _day(turn))
            entities = entities_in(dated, known)[:MAX_ENTITIES]
            record = Record(
                session=turn.session,
                text=dated,
                kind=classify(dated),
                turns=(turn.index,),
                segment=segment.id,
                entities=entities,
                tags=tags_of(dated, entities),
                temporal=temporal_of(dated),
                role="assistant" if turn.role == "assistant" else "user" if turn.role == "user" else "",
                speaker=turn.speaker,
                said=turn.at,
                origin="rules",
                chars=place_of(source, turn.text),
            )
            records.setdefault(record.id, record)
    return tuple(records.values())


def place_of(sentence: str, text: str) -> tuple[int, int] | None:
    """The slice [from, to) of `text` in which a sentence of it stands, whatever its white space; None where it does not
    stand in one piece."""
    found = re.search(r"\s+".join(map(re.escape, sentence.split())), text) if sentence.strip() else None
    return None if found is None else found.span()


def _worth_keeping(turn: Turn, text: str) -> Iterator[tuple[str, str]]:
    """Sentences as they stand in the turn, and as a record says them."""
    if turn.role in ("system", "tool"):
        return  # what a program wrote is searchable as a turn, but nobody said it
    name = who(turn)
    for sentence in sentences(text.removeprefix(f"{turn.name}: ")):
        if image := _IMAGE.fullmatch(sentence):
            yield sentence, f"{name} shared an image: {image[1]}"
        elif substantive(sentence) and (turn.role == "user" or len(set(terms(sentence))) >= _ASSISTANT_TERMS):
            yield sentence, by_name(sentence, name)


def _day(turn: Turn) -> date | None:
    return turn.at.date() if turn.at else None

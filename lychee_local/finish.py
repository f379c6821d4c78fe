"""A draft that a model wrote becomes a record, or nothing.

Owns what code checks and adds: that somebody said it, who, in which turn, when; names for "I", dates for "yesterday",
entities, tags and the kind where the model was not asked; repeats dropped. What nobody said is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lychee_local import dates, rules
from lychee_local.asking import Draft, Line, readable
from lychee_local.echoes import cites, repeats, words_of
from lychee_local.lexicon import STOP_WORDS, terms
from lychee_local.negation import contradicts
from lychee_local.prose import SCRIPT_BORDER, commands, statements, without_code
from lychee_local.types import DateSpan, Record, Segment, Temporal, Turn

_NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
                 "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
_TENS = ("ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred")
_NUMERALS = {str(number): word for number, word in enumerate(_NUMBER_WORDS, 1)} | {
    str(10 * number): word for number, word in enumerate(_TENS, 1)
}
# What people do in a conversation without saying anything that lasts.
_CHATTER = re.compile(
    r"\w+ (?:thank(?:s|ed)|agree[sd]?|greet(?:s|ed)|ask(?:s|ed)|compliment(?:s|ed)|congratulate[sd]?|wishes|wished"
    r"|(?:is|was) (?:impressed|proud of|grateful for \w+(?:'s)? (?:kind )?(?:words|support)))\b"
)
# Two of something, said without the number.
_PAIRS = frozenset(("couple", "pair", "both", "twice", "twins"))
_COUNTS = frozenset(_NUMERALS.values()) - {"one"}  # "one" also stands for a noun
# Where a sentence begins every word has a capital: a name is followed by a verb or owns something.
_AFTER_NAME = re.compile(
    r"['’]s\b|\s(?:and\s[A-Z]|is|was|has|had|will|would|can|could|does|did|went|got|took|made|saw|said|met|told|gave|bought"
    r"|wants|already|also|never|always|often|just|still|now|\w{2,}(?:ed|es|s))\b"
)
_COMMON_ENDING = re.compile(r"(?:ing|ly|tion|ness|ment|ity|s)$")
# What a program's output may be evidence of.
_OF_PROGRAMS = ("procedure", "failure_pattern", "tool_affordance")
_FIRST_PERSON = re.compile(r"\b(?:I|[Mm]y|[Mm]e|[Ww]e|[Oo]ur|[Uu]s|[Mm]yself)\b")
_THIRD_PERSON = re.compile(r"\b(?:he|she|they|his|hers?|him|theirs?|them)\b", re.I)
_REFERS = re.compile(r"\b(?:it|its|that|this|these|those|there|them|they|their|he|him|his|she|her|one|ones|so)\b", re.I)
_SECOND_PERSON = re.compile(r"\b[Yy](?:ou|our|ours)\b")
_EXAMPLE_NAMES = frozenset(("ines", "tomas", "vera"))
# So much of a record must be words of the segment; a paraphrase reaches it, an invention does not. One that has fewer
# of its speaker's may have no more than the second share from what others stated.
_SUPPORT, _FOREIGN = 0.5, 0.3
# A record is moved to another turn of its segment only if that turn shares this much more of its words.
_MOVE_MARGIN = 0.3
_SAME_WORDS = 0.85
_COPIED = 0.75  # the share of a turn's words from which on its record is a copy
_IMAGE = re.compile(r"\[image(?: search)?(?:: [^\]]*)?\]?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ASKED_BEHIND = re.compile(r"(?<=\w)(?:[.!]|\s+[-–—]|,)\s[^.!?–—-]*\?[\"”]?$")
_STEM = 5  # letters that two forms of a name share at least: Hamburg, Hamburger


class Finisher:
    """Turns the drafts of one segment into records: checked against what was said, dated, without repeats."""

    def __init__(
        self, segment: Segment, lines: Sequence[Line], context: str, *, dated: bool, told: Sequence[str]
    ) -> None:
        """`dated`: whether to write dates into what a model wrote. They are compared with what was said in any case.
        `told`: what an assistant may say again without it being news."""
        self._segment, self._writes_dates = segment, dated
        self._speakers = rules.unique([line.turn.speaker for line in lines if line.turn.speaker])
        self._names = {term for name in self._speakers for term in terms(name)}
        spoken = " ".join(f"{line.turn.name} {readable(line)}" for line in lines)
        said = f"{spoken} {context}"
        # The context may name who is meant; what a record says of them must stand in the segment, or a model that
        # writes an earlier record down again would give it this segment's turns.
        self._said_terms = set(terms(spoken))
        self._own = {name: _terms_of(name, lines) for name in {line.turn.name for line in lines}}
        self._known = set(_tokens(said.casefold()))
        self._known |= {digit for digit, word in _NUMERALS.items() if word in self._known}
        self._known |= {word for digit, word in _NUMERALS.items() if digit in self._known}
        self._known |= {"two"} if self._known & _PAIRS else set()
        self._stems = {word[:_STEM] for word in self._known if len(word) > _STEM}
        self._spans = [mention.span for mention in dates.find(said, None)]
        self._told = [words_of(text) for text in told]
        self._kept: list[set[str]] = []
        self.rejected = 0

    def record(self, draft: Draft, lines: Sequence[Line]) -> Record | None:
        """The record of a draft, or None if it is blank, a repeat, or says what nobody said."""
        text = _stated(draft.text)
        words = set(terms(text))
        if not words or text.endswith("?") or _CHATTER.match(text) or without_code(text).strip() == "[code]":
            return None
        evidence = self._evidence(words - self._names, draft.lines or tuple(range(len(lines))), lines)
        line = lines[evidence[0]]
        if _copies(text, words, line):
            return None
        source = _closest_sentence(words, line)
        if not self._supported(words - self._names, source, line, lines[: evidence[0]]):
            self.rejected += 1
            return None
        moved = evidence[0] not in draft.lines
        if self._no_news(draft, text, source, [lines[i].turn for i in evidence]):
            return None
        if commands(source) or self._misattributed(
            text, source, line, [lines[i].turn.speaker for i in draft.lines] if moved else []
        ):
            self.rejected += 1
            return None
        text = self._third_person(text, line)
        if self._writes_dates:
            text = self._dated(dates.annotate(text, line.said), words, source, line)
        if self._invented(text, source, line) or contradicts(text, source, line.text, self._names):
            self.rejected += 1
            return None
        if any(len(words & kept) >= _SAME_WORDS * len(words | kept) for kept in self._kept):
            return None
        self._kept.append(words)
        return self._build(draft, text, [lines[i].turn for i in sorted(evidence)], line, source)

    def _supported(self, words: set[str], source: str, line: Line, before: Sequence[Line]) -> bool:
        """Whether enough of the words were said, and not in good part by somebody else; where the speaker says "it" or
        "there", earlier turns are as good as their own."""
        own = self._own[line.turn.name]
        if _REFERS.search(source):
            own = own | set(terms(" ".join(map(readable, before))))
        others = words & (self._said_terms - own)
        mixed = len(words & own) < _SUPPORT * len(words) and len(others) >= _FOREIGN * len(words)
        return len(words & self._said_terms) >= _SUPPORT * len(words) and not mixed

    def _no_news(self, draft: Draft, text: str, source: str, turns: Sequence[Turn]) -> bool:
        """Whether only a program says it, or an assistant repeats what it was told or had recalled."""
        roles = {turn.role for turn in turns}
        if roles <= {"system", "tool"}:
            return draft.kind not in _OF_PROGRAMS
        return "user" not in roles and (cites(source) or repeats(text, self._told, self._speakers))

    def _build(self, draft: Draft, text: str, turns: Sequence[Turn], line: Line, source: str) -> Record:
        entities = draft.entities or rules.entities_in(text, self._speakers)[: rules.MAX_ENTITIES]
        given = draft.temporal
        asked = Temporal(
            *(span if self._said(span, line) else None for span in (given.t_ref, given.t_valid_from, given.t_valid_to))
        )
        roles = {turn.role for turn in turns}
        return Record(
            session=self._segment.session,
            text=text,
            kind=draft.kind or rules.classify(text),
            turns=tuple(sorted({turn.index for turn in turns})),
            segment=self._segment.id,
            entities=entities,
            tags=draft.tags or rules.tags_of(text, entities),
            temporal=asked if asked.spans else rules.temporal_of(text),
            role="both" if {"user", "assistant"} <= roles else "assistant" if "assistant" in roles else "user",
            speaker=line.turn.speaker,
            said=line.turn.at,
            chars=rules.place_of(source, line.turn.text) if len(turns) == 1 else None,
        )

    def _evidence(self, words: set[str], named: tuple[int, ...], lines: Sequence[Line]) -> tuple[int, ...]:
        """The turns that say it, the closest one first: those the model named, unless the words clearly disagree."""
        shares = [len(words & set(terms(line.text))) / max(1, len(words)) for line in lines]
        best = max(range(len(lines)), key=lambda i: (shares[i], i in named, -i))
        chosen = max(named, key=lambda i: (shares[i], -i))
        if shares[best] < shares[chosen] + _MOVE_MARGIN:
            return (chosen, *(i for i in named if i != chosen))
        return (best, *(i for i in named if shares[i] >= shares[best] / 2))

    def _misattributed(self, text: str, source: str, line: Line, named: Sequence[str | None]) -> bool:
        """Whether one speaker's words were filed under another's turn and name, or "you" was taken for the speaker."""
        subject = next((name for name in self._speakers if re.match(rf"{re.escape(name)}\b", text)), None)
        if subject is None:
            return False
        first, second = _FIRST_PERSON.search(source), _SECOND_PERSON.search(source)
        if subject == line.turn.speaker:
            others = any(word in text for name in self._speakers if name != subject for word in name.split())
            return second is not None and first is None and not others
        if subject in named:
            return True
        if second is not None or any(_speaks_of(source, word) for word in subject.split()):
            return False
        return first is not None or _THIRD_PERSON.search(source) is None

    def _third_person(self, text: str, line: Line) -> str:
        plain = re.sub(r"[\"“][^\"”]*[\"”]", "", text)
        return rules.by_name(text, rules.who(line.turn)) if _FIRST_PERSON.search(plain) else text

    def _dated(self, text: str, words: set[str], source: str, line: Line) -> str:
        """With the date of the sentence it was made from, where the model left that out."""
        if line.said is None or dates.find(text, line.said):
            return text
        mentions = dates.find(source, line.said)
        if len(mentions) != 1 or 2 * len(words & set(terms(source))) < len(words):
            return text
        return f"{text.rstrip('.。')} ({mentions[0].label})."

    def _invented(self, text: str, source: str, line: Line) -> bool:
        """Whether a date, name or number occurs nowhere in the segment or its context."""
        dated = bool(dates.find(source, line.said))
        for mention in dates.find(text, None):
            if not self._said(mention.span, None if dated else line):
                return True
            text = text.replace(mention.text, " " * len(mention.text))
        spaced = SCRIPT_BORDER.sub(" ", text)
        for match in re.finditer(r"\w+", spaced):
            word = match[0].casefold()
            if word in self._known or word[:_STEM] in self._stems or word in STOP_WORDS:
                continue
            number = word.isdigit() or word in _COUNTS
            if number or word in _EXAMPLE_NAMES or _names_somebody(spaced, match):
                return True
        return False

    def _said(self, span: DateSpan | None, line: Line | None) -> bool:
        """Whether a date was said, or is the day on which `line` was said. Who said June said no day of June."""
        if span is None:
            return False
        days = [DateSpan(line.said, line.said, "day")] if line and line.said else []
        return any(
            (span.start <= known.start and known.end <= span.end)
            or (known.precision == "interval" and span.start <= known.end and known.start <= span.end)
            for known in [*self._spans, *days]
        )


def _terms_of(name: str, lines: Sequence[Line]) -> set[str]:
    """What `name` says in a segment, and what the others ask, since an answer need not say the question again."""
    own = [readable(line) for line in lines if line.turn.name == name]
    asked = (
        sentence
        for line in lines
        if line.turn.name != name
        for sentence in rules.sentences(readable(line))
        if sentence.rstrip().endswith(("?", "？"))
    )
    return set(terms(" ".join((name, *own, *asked))))


def _stated(text: str) -> str:
    """On one line, without marks of images, control characters, and a question behind the statement."""
    plain = " ".join(_IMAGE.sub(" ", _CONTROL.sub(" ", text)).split())
    return _ASKED_BEHIND.sub("", plain)


def _copies(text: str, words: set[str], line: Line) -> bool:
    """Whether a turn of several statements was written down again as it is, which rules cut better."""
    as_it_is = '"' in text or len(list(rules.sentences(text))) > 1
    said = set(terms(line.text))
    return as_it_is and len(list(statements(line.text))) > 1 and len(words & said) >= _COPIED * len(said)


def _speaks_of(source: str, name: str) -> bool:
    """Whether a sentence is about somebody, and does not only call them: "Thanks, Ana, I will"."""
    return (
        re.search(rf"\b{re.escape(name)}\b(?!\s*[,!.?])", re.sub(rf",\s*{re.escape(name)}\b", "", source)) is not None
    )


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+", SCRIPT_BORDER.sub(" ", text))


def _names_somebody(text: str, word: re.Match[str]) -> bool:
    """Whether a word that nobody said is a name: a capital inside of a sentence, or where one begins, before a verb."""
    if not word[0][0].isupper() or len(word[0]) < 2:
        return False
    before = text[max(0, word.start() - 2) : word.start()]
    if before and not (before.endswith(('"', "“")) or re.fullmatch(r"[.!?] ", before)):
        return True
    return not _COMMON_ENDING.search(word[0]) and _AFTER_NAME.match(text, word.end()) is not None


def _closest_sentence(words: set[str], line: Line) -> str:
    return max(rules.sentences(line.text), key=lambda sentence: len(words & set(terms(sentence))), default="")

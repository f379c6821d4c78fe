"""LoCoMo: a list of conversations, each with its sessions, its questions (`qa`) and annotated facts (`observation`).

The messages are read as `lychee_local.intake` reads them for everybody. The file's quirks are handled here, named and
never guessed at: answers that are numbers, evidence strings that hold several ids, ids that point at no turn, sessions
without turns or date, and the adversarial questions, whose only answer is a trap. The id of a question is its place in
the file, `conv-26:17`, counted from 0 over all categories.

An audit's corrected key can be given by its path: a list of objects with `question_id` (`locomo_0_qa17`: the 17th of
the first conversation of the published file), `question` and `golden_answer` as they stand in the data,
`correct_answer` and `correct_evidence`. A correction counts only for the question whose place, text and answer it
quotes; which conversation is its first is found out by that, so that a file with some of the ten will do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fields import Fields, as_text, parsed
from benchmarks.questions import NOT_MENTIONED, Conversation, Fact, Problem, Question, Report, refuse
from lychee_local import Message
from lychee_local.errors import BadInput
from lychee_local.intake import locomo_messages

CATEGORIES = {"1": "multi", "2": "temporal", "3": "open", "4": "single", "5": "adversarial"}

_TURN_ID = re.compile(r"D0*(\d+):0*(\d+)")
_SESSION = re.compile(r"session_\d+")
# The audit writes its remarks behind some answers: "Cakes (answer is correct, ...)".
_REMARK = re.compile(r"\s*\((?:answer is correct|but)\b[^()]*\)\.?\s*$")


@dataclass(frozen=True, slots=True)
class Correction:
    """What an audit says of the question at `place` in its conversation, whose text and answer it quotes."""

    id: str
    place: int
    question: str
    quoted: str
    answer: str
    evidence: tuple[str, ...]

    def fits(self, asked: list[Any]) -> bool:
        """Whether it quotes the question at its place, among those `asked` of a conversation."""
        if self.place >= len(asked) or not isinstance(asked[self.place], dict):
            return False
        at_place = asked[self.place]
        return (as_text(at_place.get("question")), as_text(at_place.get("answer"))) == (self.question, self.quoted)


def read(
    path: Path,
    wanted: Collection[str] = (),
    *,
    on_problem: Report = refuse,
    adversarial: bool = False,
    corrections: Path | None = None,
) -> Iterator[Conversation]:
    """The conversations named in `wanted`, or all, in the order of the file; the adversarial questions only if asked.

    Raises:
        ValueError: the file is not of this layout, lacks a wanted conversation or names one twice, or a problem that
            `on_problem` does not take.
    """
    items = {item.text("sample_id"): item for item in _items(path)}
    if missing := [name for name in wanted if name not in items]:
        raise ValueError(f"no conversation {', '.join(missing)} in {path}; there are {', '.join(items)}")
    chosen = {name: item for name, item in items.items() if not wanted or name in wanted}
    key = _settled(_corrections(corrections), items, chosen, corrections, on_problem) if corrections else {}
    return (_conversation(name, item, key.get(name, {}), adversarial, on_problem) for name, item in chosen.items())


def _items(path: Path) -> list[Fields]:
    required = ("sample_id", "conversation", "qa")
    items = [
        Fields.of(item, f"{path}, conversation {number}", "locomo", *required)
        for number, item in enumerate(_list(path), 1)
    ]
    if twice := [name for name, count in Counter(item.text("sample_id") for item in items).items() if count > 1]:
        raise ValueError(f"{path}: the conversation {twice[0]} is there twice; give each a sample_id of its own")
    return items


def _list(path: Path) -> list[Any]:
    value = parsed(path.read_bytes(), str(path), "is the file complete? one object on each line is the layout lines")
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}: not a list of conversations; LoCoMo's file begins with [")
    return value


def _conversation(
    name: str, item: Fields, key: Mapping[int, Correction], adversarial: bool, on_problem: Report
) -> Conversation:
    messages = _messages(name, item, on_problem)
    # Reversed, for where two turns have one id: its session is the first one's.
    sessions = {message.ref: message.session for message in reversed(messages) if message.ref and message.session}
    questions = []
    for place, value in enumerate(item.items("qa")):
        qa = Fields.of(value, f"{name}, question {place}", "locomo", "question", "category")
        category = CATEGORIES.get(qa.text("category"))
        if category is None:
            raise ValueError(f"{qa.where}: no category {qa.text('category')}; there are {', '.join(CATEGORIES)}")
        trap = category == "adversarial"
        if trap and not adversarial:
            continue
        fixed = key.get(place)
        gold = _gold(fixed.evidence if fixed else qa.values.get("evidence", ()), sessions, qa.where, on_problem)
        questions.append(
            Question(
                id=f"{name}:{place}",
                text=qa.text("question"),
                answer=NOT_MENTIONED if trap else fixed.answer if fixed else qa.text("answer"),
                category=category,
                gold=gold,
                sessions=tuple(dict.fromkeys(sessions[ref] for ref in gold)),
                answerable=not trap,
            )
        )
    return Conversation(name, messages, tuple(questions), tuple(_facts(name, item, sessions, on_problem)))


def _messages(name: str, item: Fields, on_problem: Report) -> tuple[Message, ...]:
    talk = item.values["conversation"]
    if not isinstance(talk, dict):
        raise ValueError(f"{item.where}: conversation is not an object with session_1, session_2, ...")
    try:
        messages = locomo_messages(
            talk, on_problem=lambda problem: on_problem(Problem(name, f"{problem}; the turn is left out"))
        )
    except BadInput as problem:
        raise ValueError(f"{name}, {problem}") from problem
    for session in filter(_SESSION.fullmatch, talk):
        if not talk[session]:
            on_problem(Problem(f"{name}, {session}", "a session without turns"))
        elif not talk.get(f"{session}_date_time"):
            on_problem(Problem(f"{name}, {session}", "a session without a date; its turns have none"))
    for ref, count in Counter(message.ref for message in messages).items():
        if count > 1:
            on_problem(Problem(f"{name}, turn {ref}", f"{count} turns have this id; as evidence any of them counts"))
    return messages


def _facts(name: str, item: Fields, known: Collection[str], on_problem: Report) -> Iterator[Fact]:
    observation = item.values.get("observation", {})
    try:
        listed = [
            (session, text, source)
            for session, by_speaker in observation.items()
            for facts in by_speaker.values()
            for text, source in facts
        ]
    except (AttributeError, TypeError, ValueError) as error:
        shape = '{"session_1_observation": {"Ana": [["Ana sold a boat.", "D1:1"]]}}'
        raise ValueError(f"{item.where}: observation is not of the form {shape}; leave it out") from error
    for session, text, source in listed:
        yield Fact(text, _gold(source, known, f"{name}, {session}", on_problem))


def _gold(evidence: object, known: Collection[str], where: str, on_problem: Report) -> tuple[str, ...]:
    """The turns that are named in `evidence`, a string or a list of strings, in whichever way; each once."""
    found: list[str] = []
    for named in evidence if isinstance(evidence, list | tuple) else [evidence]:
        hits = list(_TURN_ID.finditer(str(named)))
        refs = [hit[0] if hit[0] in known else f"D{hit[1]}:{hit[2]}" for hit in hits]  # D2:03 is D2:3
        if not refs:
            on_problem(Problem(where, f"the evidence {named!r} names no turn; it is left out"))
        for ref in refs:
            if ref in known:
                found.append(ref)
            else:
                on_problem(Problem(where, f"the evidence {ref} points at no turn; it is left out"))
    return tuple(dict.fromkeys(found))


# --- the corrected key -----------------------------------------------------------------------------------------------


def _corrections(path: Path) -> dict[str, list[Correction]]:
    """By the number of their conversation."""
    found: dict[str, list[Correction]] = {}
    required = ("question_id", "question", "golden_answer", "correct_answer", "correct_evidence")
    for number, value in enumerate(_list(path), 1):
        item = Fields.of(value, f"{path}, correction {number}", "of corrections", *required)
        name = item.text("question_id")
        place = re.fullmatch(r"locomo_(\d+)_qa(\d+)", name)
        if place is None:
            raise ValueError(f"{item.where}: no question_id {name!r}; it looks like locomo_0_qa17")
        answer = _REMARK.sub("", item.text("correct_answer"))
        correction = Correction(
            name,
            int(place[2]),
            item.text("question"),
            item.text("golden_answer"),
            answer,
            item.texts("correct_evidence"),
        )
        found.setdefault(place[1], []).append(correction)
    return found


def _settled(
    corrections: Mapping[str, list[Correction]],
    items: Mapping[str, Fields],
    chosen: Collection[str],
    path: Path,
    on_problem: Report,
) -> dict[str, dict[int, Correction]]:
    """The corrections by the conversation and the place of the question they fit."""
    asked = {name: item.items("qa") for name, item in items.items()}
    settled: dict[str, dict[int, Correction]] = {}
    for number, listed in corrections.items():
        fitting = {name: sum(each.fits(asked[name]) for each in listed) for name in asked}
        home = max(asked, key=lambda name: fitting[name])
        if not fitting[home]:
            problem = f"none of the questions corrected there ({len(listed)}) is in the data"
            on_problem(Problem(f"{path}, conversation {number}", problem))
        elif home in chosen:
            for each in listed:
                if not each.fits(asked[home]):
                    problem = f"there is no such question at {home}:{each.place}; not applied"
                    on_problem(Problem(f"{path}, {each.id}", problem))
            settled[home] = {each.place: each for each in listed if each.fits(asked[home])}
    return settled

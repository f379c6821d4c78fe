"""LoCoMo's questions with their gold evidence. Conversations themselves are read by `lychee_local.intake`.

The file's quirks are handled here and counted, never guessed at: answers that are numbers, evidence strings that hold
several ids, ids that point at no turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CATEGORIES = {1: "multi", 2: "temporal", 3: "open", 4: "single", 5: "adversarial"}

_TURN_ID = re.compile(r"D\d+:\d+")


@dataclass(frozen=True, slots=True)
class Question:
    """`gold` are the ids of the turns that answer it; an empty tuple means the file names none that exists."""

    id: str
    text: str
    answer: str
    category: str
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One annotated observation: a sentence about a speaker and the turns it was drawn from."""

    text: str
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str
    questions: tuple[Question, ...]
    facts: tuple[Fact, ...]


def load(path: Path, wanted: Collection[str] = ()) -> tuple[Conversation, ...]:
    """The conversations named in `wanted`, or all, without category 5.

    Raises:
        ValueError: a wanted conversation is not in the file.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    by_id = {item["sample_id"]: item for item in data}
    if missing := [name for name in wanted if name not in by_id]:
        raise ValueError(f"no conversation {', '.join(missing)} in {path}; there are {', '.join(by_id)}")
    return tuple(_conversation(name, by_id[name]) for name in wanted or by_id)


def _conversation(name: str, item: dict[str, object]) -> Conversation:
    conversation = item["conversation"]
    assert isinstance(conversation, dict)
    turns = {t["dia_id"] for key, s in conversation.items() if re.fullmatch(r"session_\d+", key) for t in s}
    qa = item["qa"]
    assert isinstance(qa, list)
    questions = tuple(
        Question(
            id=f"{name}:{number}",
            text=q["question"],
            answer=str(q.get("answer", "")),
            category=CATEGORIES[q["category"]],
            gold=_gold(q.get("evidence", ()), turns),
        )
        for number, q in enumerate(qa)
        if q["category"] != 5
    )
    observation = item.get("observation", {})
    assert isinstance(observation, dict)
    facts = tuple(
        Fact(text, _gold(source, turns))
        for session in observation.values()
        for listed in session.values()
        for text, source in listed
    )
    return Conversation(name, questions, facts)


def _gold(evidence: object, turns: Collection[str]) -> tuple[str, ...]:
    found = _TURN_ID.findall(json.dumps(evidence))
    return tuple(dict.fromkeys(i for i in found if i in turns))

"""Recalled text is never ingested again; what the user says in the same breath is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from lychee_local import Memory
from lychee_local.answer import serialise
from lychee_local.backends import Embedder, jobs
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder
from lychee_local.backends.load import load_embedder
from lychee_local.cards import card
from lychee_local.echoes import cites, repeats, without_evidence, words_of
from lychee_local.encode import encode
from lychee_local.rules import encode_by_rules
from lychee_local.settings import EncodeSettings
from lychee_local.types import Evidence, Message, Role, Segment, Turn

AT = datetime(2024, 5, 13, 10)
EVIDENCE = (
    Evidence(
        "record:1", "record", "Noor moved to Lisbon in spring 2021.", 0.9, "one", ("turn:one:0",), memory_type="event"
    ),
    Evidence(
        "turn:one:4",
        "window",
        "Noor: I keep bees on the roof.\nassistant: How nice.",
        0.8,
        "one",
        ("turn:one:4",),
        said=AT,
    ),
)
BLOCK = serialise(EVIDENCE)


def turns_of(*said: tuple[Role, str]) -> list[Turn]:
    return [Turn("s", i, text, role, "Noor" if role == "user" else None, AT) for i, (role, text) in enumerate(said)]


def segment(turns: list[Turn]) -> Segment:
    return Segment("s", 0, len(turns) - 1, "session_flush", 1, len(turns), 1.0)


def by_rules(turns: list[Turn], recalled: tuple[str, ...] = ()) -> list[str]:
    return [record.text for record in encode_by_rules(segment(turns), turns, recalled=recalled)]


# --- how it is told ---------------------------------------------------------------------------------------------------


def test_the_block_of_our_prompts_is_blanked_in_place() -> None:
    assert "<memories>\n[1] (event) Noor moved" in BLOCK
    text = f"Here is what I know:\n{BLOCK}\nNoor sold a boat."
    clean = without_evidence(text)
    assert len(clean) == len(text)
    assert " ".join(clean.split()) == "Here is what I know: Noor sold a boat."
    assert clean.index("Noor sold") == text.index("Noor sold")


def test_a_block_that_was_cut_or_lost_its_tag_is_told_by_its_items() -> None:
    assert without_evidence(BLOCK[: BLOCK.index("spring")]).strip() == ""
    assert without_evidence("[1] (event) Noor moved to Lisbon.\n  Date: 2021\nI sold my boat.").split() == [
        "I", "sold", "my", "boat."
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "<memories> are dear to me.",
        "[1] (see above) I sold a boat.",
        "I wrote <conversation> into my page.",
        "no [1] here",
    ],
)
def test_other_brackets_and_tags_stay(text: str) -> None:
    assert without_evidence(text) == text


def test_marks() -> None:
    assert cites("You moved to Lisbon in 2021 [1].")
    assert cites("You moved to Lisbon [1, 12] in 2021.")
    assert not cites("The list [a] has items[0] of rank one.")


@pytest.mark.parametrize(
    ("sentence", "echo"),
    [
        ("You moved to Lisbon in 2021.", True),
        ("As you mentioned earlier, Noor moved to Lisbon in 2021.", True),
        ("You moved to Lisbon in 2022.", False),
        ("Lisbon has mild winters and steep streets.", False),
        ("You moved to Porto with your two sisters.", False),
        ("You did.", False),
    ],
)
def test_a_sentence_that_says_no_more_than_what_was_said(sentence: str, echo: bool) -> None:
    assert repeats(sentence, [words_of("Noor: I moved to Lisbon in 2021.")], ("Noor",)) is echo


# --- in one exchange --------------------------------------------------------------------------------------------------

ANSWER = "You moved to Lisbon in spring 2021 and you keep bees on the roof [1][2]."
NEWS = "The ferry from Lisbon to Barreiro leaves every ten minutes in the morning."


def test_by_rules() -> None:
    turns = turns_of(
        ("user", f"{BLOCK}\nI sold my red boat last week. Where do I live?"),
        ("assistant", f"{BLOCK}\n{ANSWER} {NEWS}"),
        ("assistant", "So you sold your red boat last week!"),
        ("user", "I moved to Lisbon in spring 2021, as you know."),
    )
    assert by_rules(turns) == [
        "Noor sold their red boat last week (the week before 13 May 2024).",
        f'The assistant said: "{NEWS}"',
        'Noor said: "I moved to Lisbon in spring 2021, as you know."',
    ]


def test_an_answer_without_marks_is_told_by_what_was_recalled() -> None:
    turns = turns_of(("user", "Where do I live?"), ("assistant", f"Noor moved to Lisbon in the spring of 2021. {NEWS}"))
    assert len(by_rules(turns)) == 2
    assert by_rules(turns, ("Noor moved to Lisbon in spring 2021.",)) == [f'The assistant said: "{NEWS}"']


@pytest.mark.parametrize("style", ["compact", "full"])
def test_by_a_model(style: str) -> None:
    turns = turns_of(
        ("user", f"{BLOCK}\nI sold my red boat last week."),
        ("assistant", f"{ANSWER} The boat must be missed."),
        ("assistant", NEWS),
    )
    said = (
        (0, "Noor sold a red boat the week before 13 May 2024."),
        (1, "Noor moved to Lisbon in spring 2021."),
        (2, "The ferry from Lisbon to Barreiro leaves every ten minutes."),
    )

    def reply(call: FakeCall) -> str:
        assert "<memories>" not in call.prompt
        assert call.schema is not None
        if style == "compact":
            keys = {int((f.alias or "").split()[0]): f.alias for f in call.schema.model_fields.values()}
            return json.dumps({alias: [text for i, text in said if i == number] for number, alias in keys.items()})
        dated = {"t_ref": "", "t_valid_from": "", "t_valid_to": ""}
        records = [
            {"memory_type": "fact", "semantic_text": text, "entities": [], "temporal": dated, "tags": [],
             "evidence_turns": [number], "source_role": "both"}
            for number, text in said
        ]  # fmt: skip
        return json.dumps({"records": records, "disambiguation_context": ""})

    llm = FakeLLM(reply, prompt_style="full" if style == "full" else "compact")
    encoded = jobs.run(encode(segment(turns), turns, llm=llm, context="", settings=EncodeSettings()), llm)
    written = [record.text for record in encoded.records if record.origin == "model"]
    assert written == [said[0][1], said[2][1]]
    assert not any("Lisbon in spring" in record.text for record in encoded.records)


# --- end to end -------------------------------------------------------------------------------------------------------

TALK = (
    Message("I moved to Lisbon in spring 2021.", speaker="Noor", session="one", at=AT),
    Message("How do you like it?", "assistant", session="one", at=AT),
    Message("I keep two hives of bees on the roof of my house.", speaker="Noor", session="one", at=AT),
)


@pytest.fixture
def embedder(request: pytest.FixtureRequest) -> Iterator[Embedder]:
    if request.param == "fake":
        yield HashEmbedder(256)
    else:
        yield load_embedder(card("all-minilm-l6-v2"), request.getfixturevalue("minilm_path"))


@pytest.mark.parametrize("embedder", ["fake", pytest.param("minilm", marks=pytest.mark.model)], indirect=True)
def test_a_memory_does_not_learn_from_its_own_answers(tmp_path: Path, embedder: Embedder) -> None:
    with Memory.open("noor", home=tmp_path, llm=None, embedder=embedder, reranker=None) as memory:
        memory.remember(TALK)
        memory.flush()
        before = memory.records()
        assert len(before) == 2
        found = memory.recall("Where does Noor keep bees?", k=5).evidence
        block = serialise(found)
        assert "hives of bees" in block
        memory.remember(
            [
                Message(f"{block}\n\nWhere are my bees? I bought a third hive.", speaker="Noor", session="two", at=AT),
                Message(
                    f"{block}\nYour two hives of bees stand on the roof of your house [1].", "assistant", session="two"
                ),
            ]
        )
        memory.flush()
        new = [record for record in memory.records() if record.session == "two"]
        assert [record.text for record in new] == ["Noor bought a third hive."]
        assert set(before) <= set(memory.records())


@pytest.mark.parametrize("encoder", ["rules", "model"])
@pytest.mark.parametrize("embedder", ["fake", pytest.param("minilm", marks=pytest.mark.model)], indirect=True)
def test_an_answer_from_an_earlier_session_is_known_by_its_words(
    tmp_path: Path, embedder: Embedder, encoder: str
) -> None:
    answer = "You keep two hives of bees on the roof of your house."

    def reply(call: FakeCall) -> str:
        """The sentences of each turn that is asked about, in its words."""
        assert call.schema is not None
        lines = dict(line.split(": ", 1) for line in call.messages[1].content.splitlines() if ": " in line)
        keys = [field.alias or "" for field in call.schema.model_fields.values()]
        return json.dumps({key: re.split(r"(?<=[.?]) ", lines[key]) for key in keys})

    llm = None if encoder == "rules" else FakeLLM(reply, prompt_style="compact")
    with Memory.open("noor", home=tmp_path, llm=llm, embedder=embedder, reranker=None) as memory:
        memory.remember(TALK)
        memory.flush()
        memory.remember(
            [
                Message("Where are my bees? I bought a third hive.", speaker="Noor", session="two", at=AT),
                Message(f"{answer} {NEWS}", "assistant", session="two", at=AT),
            ]
        )
        memory.flush()
        new = " ".join(record.text for record in memory.records("two"))
    assert "third hive" in new
    assert "ferry" in new
    assert "roof" not in new


@pytest.mark.parametrize("embedder", ["fake"], indirect=True)
def test_one_import_of_many_sessions_knows_what_it_holds_itself(tmp_path: Path, embedder: Embedder) -> None:
    again = Message("Noor keeps two hives of bees on the roof of her house.", "assistant", session="two", at=AT)
    with Memory.open("noor", home=tmp_path, llm=None, embedder=embedder, reranker=None) as memory:
        memory.remember([*TALK, Message("Tell me of my bees.", speaker="Noor", session="two"), again], encode=False)
        memory.flush()
        assert not [record for record in memory.records("two") if record.role == "assistant"]

"""What code does for a model, part by part: what a prompt, a schema or a result is like without it."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from lychee_local.backends import jobs
from lychee_local.backends.fake import FakeLLM, Reply
from lychee_local.encode import Encoded, encode
from lychee_local.errors import ConstraintNotApplied
from lychee_local.settings import EncodeSettings
from lychee_local.types import Segment, Turn

AT = datetime(2023, 7, 3, 13, 36)
TURNS = tuple(
    Turn("s", number, text, speaker=speaker, at=AT)
    for number, (speaker, text) in enumerate(
        (
            ("Melanie", "I signed up for a pottery class yesterday."),
            ("Caroline", "My sister Ruth goes there."),
            ("Melanie", "It costs 40 dollars a month."),
        )
    )
)
SIGNED = "Melanie signed up for a pottery class."
RUTH = "Caroline's sister Ruth goes there."
COST = "The class costs 40 dollars a month."
KEYED = {"0 Melanie": [SIGNED], "1 Caroline": [RUTH], "2 Melanie": [COST]}


def run(*replies: Reply | dict[str, Any], full: bool = False, **parts: bool) -> tuple[Encoded, FakeLLM]:
    llm = FakeLLM(
        [json.dumps(reply) if isinstance(reply, dict) else reply for reply in replies],
        prompt_style="full" if full else "compact",
    )
    segment = Segment("s", 0, 2, "session_flush", 30, 3, 1.0)
    job = encode(segment, TURNS, llm=llm, context="", settings=EncodeSettings(**parts))  # type: ignore[arg-type]  # flags
    return jobs.run(job, llm), llm


def told(encoded: Encoded) -> list[tuple[str, tuple[int, ...], str]]:
    return [(record.text, record.turns, record.origin) for record in encoded.records]


def record(text: str, turns: list[int], role: str = "user") -> dict[str, Any]:
    return {
        "memory_type": "fact",
        "semantic_text": text,
        "entities": [],
        "temporal": {"t_ref": "", "t_valid_from": "", "t_valid_to": ""},
        "tags": [],
        "evidence_turns": turns,
        "source_role": role,
    }


# --- dates ------------------------------------------------------------------------------------------------------------


def test_dates_are_written_out_before_and_after() -> None:
    encoded, llm = run(KEYED)
    assert "a pottery class yesterday (2 July 2023)." in llm.calls[0].messages[1].content
    assert encoded.records[0].text == "Melanie signed up for a pottery class (2 July 2023)."


@pytest.mark.parametrize("full", [False, True])
def test_without_dates_the_model_is_told_the_day_and_left_alone(full: bool) -> None:
    said = "Melanie signed up for a pottery class yesterday."
    reply = {"records": [record(said, [0])], "disambiguation_context": ""} if full else KEYED | {"0 Melanie": [said]}
    encoded, llm = run(reply, full=full, dates=False)
    system, user = (message.content for message in llm.calls[0].messages)
    assert "a pottery class yesterday." in user
    assert "3 July 2023" in user
    assert "SESSION_DATE" in system
    assert "(Monday 3 April 2023)" not in system
    assert encoded.records[0].text == said


def test_without_dates_a_date_is_still_compared_with_what_was_said() -> None:
    right, wrong = SIGNED[:-1] + " on 2 July 2023.", SIGNED[:-1] + " on 9 July 2023."
    encoded, _ = run(KEYED | {"0 Melanie": [wrong, right]}, dates=False)
    assert [text for text, turns, _ in told(encoded) if turns == (0,)] == [right]


# --- turns ------------------------------------------------------------------------------------------------------------


def test_without_turns_one_list_is_asked_for_and_overlap_finds_the_turn() -> None:
    encoded, llm = run({"statements": [COST, RUTH, SIGNED]}, turns=False, dates=False)
    assert told(encoded) == [(SIGNED, (0,), "model"), (RUTH, (1,), "model"), (COST, (2,), "model")]
    system, user = (message.content for message in llm.calls[0].messages)
    assert user.endswith("</CURRENT_TURNS>\nNotes:")
    assert '{"statements":["Ines joined a choir' in system
    assert "turn you are asked about" not in system


def test_without_turns_what_the_list_passes_over_is_done_by_rules() -> None:
    encoded, _ = run({"statements": [SIGNED, COST]}, turns=False, dates=False)
    assert [(turns, origin) for _, turns, origin in told(encoded)] == [
        ((0,), "model"),
        ((1,), "rules"),
        ((2,), "model"),
    ]


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["7 Melanie", "Melanie", "2"])
def test_a_key_that_is_no_choice_cannot_be_written(key: str) -> None:
    with pytest.raises(ConstraintNotApplied):
        run({"0 Melanie": [SIGNED], "1 Caroline": [RUTH], key: [COST]})


@pytest.mark.parametrize("key", ["2 Melanie", "2", "2: Mel", "7 Melanie", "Melanie", "someone"])
def test_without_choices_a_key_is_resolved_by_number_then_speaker_then_overlap(key: str) -> None:
    encoded, llm = run({"0 Melanie": [SIGNED], "1 Caroline": [RUTH], key: [COST]}, choices=False, dates=False)
    assert told(encoded) == [(SIGNED, (0,), "model"), (RUTH, (1,), "model"), (COST, (2,), "model")]
    assert llm.calls[0].schema is not None
    assert "properties" not in llm.calls[0].schema.model_json_schema()


def test_without_choices_a_turn_number_that_is_none_gives_way_to_overlap() -> None:
    reply = {"records": [record(COST, [9, -1]), record(RUTH, [1, 9], "nobody")], "disambiguation_context": ""}
    encoded, _ = run(reply, full=True, choices=False)
    assert told(encoded) == [(RUTH, (1,), "model"), (COST, (2,), "model")]
    with pytest.raises(ConstraintNotApplied):
        run(reply, full=True)


# --- example ----------------------------------------------------------------------------------------------------------


def test_without_example_the_prompt_ends_with_its_rules() -> None:
    _, with_it = run(KEYED)
    _, without = run(KEYED, example=False)
    long, short = with_it.calls[0].messages[0].content, without.calls[0].messages[0].content
    assert long.startswith(short + "\n\nExample\n0 Ines: ")
    assert long.endswith('"3 Tomas":["Tomas bought a cello."]}')
    assert with_it.calls[0].messages[1] == without.calls[0].messages[1]


# --- salvage ----------------------------------------------------------------------------------------------------------

CUT: Reply = ('{"0 Melanie":["Melanie signed up for a pottery class."],"1 Caroline":["Caroline\'s sis', "length")


def test_salvage_keeps_the_records_of_a_cut_output() -> None:
    encoded, llm = run(CUT)
    assert [(turns, origin) for _, turns, origin in told(encoded)] == [
        ((0,), "model"),
        ((1,), "rules"),
        ((2,), "rules"),
    ]
    assert (encoded.outcome, len(llm.calls)) == ("salvaged", 1)


def test_without_salvage_a_cut_output_is_asked_for_again_in_halves() -> None:
    second = {"0 Caroline": [RUTH], "1 Melanie": [COST]}
    encoded, llm = run(CUT, {"0 Melanie": [SIGNED]}, second, salvage=False)
    assert [(turns, origin) for _, turns, origin in told(encoded)] == [
        ((0,), "model"),
        ((1,), "model"),
        ((2,), "model"),
    ]
    assert (encoded.outcome, len(llm.calls)) == ("halved", 3)
    assert [usage.outcome for usage in encoded.usage] == ["failed", "ok", "ok"]


# --- what a small model writes ----------------------------------------------------------------------------------------

PETS = (
    ("Iris", "My hamster Pogo eats parsley. He is wonderful."),
    ("Noah", "Our cat once hid my keys in a boot! She also brought a mouse home."),
    ("Iris", "I finished a pottery bowl. Do you want to see it? [image: a blue bowl on a table]"),
    ("Noah", "Yes. When is your show?"),
    ("Iris", "It is in September. I sell bowls there."),
)


def of_pets(line: int, *sentences: str, context: str = "") -> list[tuple[str, str]]:
    """What becomes of sentences that a model writes about one line, and about the others nothing that can stay."""
    turns = tuple(Turn("s", n, text, speaker=name, at=AT) for n, (name, text) in enumerate(PETS))
    keys = [f"{n} {name}" for n, (name, _) in enumerate(PETS)]
    reply = {key: list(sentences) if n == line else ["Nothing?"] for n, key in enumerate(keys) if n != 3}
    llm = FakeLLM([json.dumps(reply)], prompt_style="compact")
    segment = Segment("s", 0, len(PETS) - 1, "session_flush", 30, len(PETS), 1.0)
    encoded = jobs.run(encode(segment, turns, llm=llm, context=context, settings=EncodeSettings()), llm)
    return [(r.text, r.origin) for r in encoded.records if line in r.turns]


def test_a_question_behind_a_statement_is_cut_and_one_alone_is_none() -> None:
    assert of_pets(2, "Iris finished a pottery bowl - do you want to see it?")[0] == (
        "Iris finished a pottery bowl",
        "model",
    )
    assert ("Who has a bowl?", "model") not in of_pets(2, "Who has a bowl?")


def test_a_turn_written_down_again_is_left_to_rules() -> None:
    found = of_pets(1, 'Noah said: "Our cat once hid my keys in a boot! She also brought a mouse home."')
    assert {origin for _, origin in found} == {"rules"}
    assert len(found) == 2


def test_marks_of_images_are_no_part_of_a_record() -> None:
    assert of_pets(2, "Iris finished a pottery bowl. [image: a blue bowl on a table]") == [
        ("Iris finished a pottery bowl.", "model"),
        ("Iris shared an image: a blue bowl on a table", "rules"),
    ]


def test_a_statement_that_is_in_no_record_of_its_turn_is_made_one_by_rules() -> None:
    assert of_pets(1, "Noah's cat once hid keys in a boot!") == [
        ("Noah's cat once hid keys in a boot!", "model"),
        ('Noah said: "She also brought a mouse home."', "rules"),
    ]


def test_one_speakers_words_do_not_tell_of_the_other() -> None:
    """The animal of one and the doing of the other's: each word was said, the sentence was not."""
    mixed = "Iris's hamster Pogo hid keys in a boot."
    assert (mixed, "model") not in of_pets(0, mixed, "Iris's hamster Pogo eats parsley.")


def test_an_answer_may_be_told_in_the_words_of_its_question_or_of_what_it_refers_to() -> None:
    assert of_pets(4, "Iris's show is in September.")[0] == ("Iris's show is in September (September 2023).", "model")
    assert of_pets(4, "Iris sells pottery bowls at the show.")[0][1] == "model"


def test_an_earlier_record_written_down_again_is_no_record() -> None:
    context = "Noah's children loved the beach! Walking there can be really relaxing."
    echo = "Iris loves the beach! Walking there can be really relaxing."
    assert (echo, "model") not in of_pets(2, echo, context=context)


def test_code_and_control_characters_are_no_part_of_a_record() -> None:
    code = "```python def pots(x): return x + 1 ```"
    reply = {"records": [record(code, [0]), record("Melanie signed up\u0007 for a\u001b pottery class.", [0])]}
    encoded, _ = run(reply | {"disambiguation_context": ""}, full=True, dates=False)
    assert [r.text for r in encoded.records] == ["Melanie signed up for a pottery class."]

"""What comes from outside: accepted as it was meant, or refused with its place."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import date, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lychee_local import intake
from lychee_local.errors import BadInput
from lychee_local.types import Message


def lines(*objects: object) -> bytes:
    return "".join(json.dumps(o) + "\n" for o in objects).encode()


def read(data: bytes, **options: Any) -> tuple[Message, ...]:
    return intake.read(io.BytesIO(data), **options)


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_text_a_message_a_mapping_and_a_list_of_them_are_all_messages() -> None:
    said = Message("hi", session="s", ref="7")
    assert intake.messages("hi") == (Message("hi", session="main"),)
    assert intake.messages(said) == (said,)
    assert intake.messages({"text": "hi", "session": "s", "ref": 7}) == (said,)
    assert intake.messages(iter(["hi", said])) == (Message("hi", session="main"), said)
    assert intake.messages([]) == ()


def test_defaults_fill_in_only_what_a_message_leaves_open() -> None:
    found = intake.messages(
        [{"text": "a"}, {"text": "b", "session": "own", "at": "2024-05-01"}], session="given", at="2024-01-02"
    )
    assert [(m.session, m.at) for m in found] == [
        ("given", datetime(2024, 1, 2)),
        ("own", datetime(2024, 5, 1)),
    ]


def test_the_speaker_given_for_users_is_not_put_on_an_assistants_reply() -> None:
    found = intake.messages([{"text": "Hello"}, {"text": "Hello!", "role": "assistant"}], speaker="Ana")
    assert [(m.role, m.speaker) for m in found] == [("user", "Ana"), ("assistant", None)]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (datetime(2023, 5, 8, 13, 56), datetime(2023, 5, 8, 13, 56)),
        (date(2023, 5, 8), datetime(2023, 5, 8)),
        ("2023-05-08", datetime(2023, 5, 8)),
        ("2023-05-08T13:56:00", datetime(2023, 5, 8, 13, 56)),
        ("1:56 pm on 8 May, 2023", datetime(2023, 5, 8, 13, 56)),
    ],
)
def test_a_time_may_be_a_datetime_a_date_or_text(at: datetime | date | str, expected: datetime) -> None:
    assert intake.messages("hi", at=at)[0].at == expected


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧 and 🏳️‍🌈", "a\tb\nc", "שלום", "x" * 1_000_000]
)
def test_text_of_any_language_and_size_is_kept_as_it_is(text: str) -> None:
    assert intake.messages(text)[0].text == text


def test_unicode_is_composed_and_line_ends_are_one() -> None:
    found = intake.messages({"text": "cafe\u0301\r\nand\rtea", "speaker": "Zoe\u0308"})[0]
    assert (found.text, found.speaker) == ("caf\u00e9\nand\ntea", "Zo\u00eb")


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(lambda t: t.strip()))
def test_what_passed_the_border_once_passes_it_unchanged(text: str) -> None:
    once = intake.messages(text)
    assert intake.messages(once) == once


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("", "turn 2: the text is empty"),
        (" \n\t", "turn 2: the text is blank"),
        ("a\0b", "turn 2: the text has a NUL at character 2"),
        ("ab\ud800", r"turn 2: the text has half of a surrogate pair \(U\+D800\) at character 3"),
        ("\x1b[31mred", r"turn 2: the text has a control character \(U\+001B\) at character 1"),
        (7, "turn 2: a turn of type int"),
        (None, "turn 2: a turn of type NoneType"),
        ({}, "turn 2: a turn without text"),
        ({"text": 7}, "turn 2: the text is not text but int"),
        ({"text": "a", "speaker": " "}, "turn 2: the speaker is blank"),
        ({"text": "a", "speaker": "A\nB"}, "turn 2: the speaker 'A.nB' has more than one line"),
        ({"text": "a", "speaker": "A" * 201}, "turn 2: the speaker has 201 characters, at most 200"),
        ({"text": "a", "session": ""}, "turn 2: the session is empty"),
        ({"text": "a", "session": "s\x07"}, "turn 2: the session has a control character"),
        ({"text": "a", "role": "bot"}, "turn 2: unknown role 'bot' .a role is user, assistant, system, tool"),
        ({"text": "a", "role": ["user"]}, "turn 2: unknown role"),
        ({"content": "a"}, "turn 2: unknown key 'content' .call it 'text'"),
        ({"text": "a", "mood": "b"}, "turn 2: unknown key 'mood' .a turn has text, role"),
        ({"text": "a", "at": "yesterday-ish"}, "turn 2: .*yesterday-ish"),
        ({"text": "a", "at": 1683554160}, "turn 2: a time is text, a date or a datetime, not int"),
        ({"text": "a", "ref": True}, "turn 2: the ref is not text but bool"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_turn(value: object, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        intake.messages(["fine", value])


def test_bytes_and_numbers_are_no_conversation() -> None:
    with pytest.raises(BadInput, match="type bytes"):
        intake.messages(b"hello")
    with pytest.raises(BadInput, match="type int"):
        intake.messages(3)


def test_an_error_never_repeats_a_megabyte() -> None:
    with pytest.raises(BadInput) as caught:
        intake.messages({"text": "a", "k" * 1_000_000: 1})
    assert len(str(caught.value)) < 300


def test_a_question_is_stripped_and_may_be_long() -> None:
    assert intake.question("  why?\n") == "why?"
    assert len(intake.question("word " * 10_000).split()) == 10_000
    with pytest.raises(BadInput, match="the question is blank"):
        intake.question("   ")
    with pytest.raises(BadInput, match="surrogate"):
        intake.question("caf\udce9")


# --- JSON lines ------------------------------------------------------------------------------------------------------


def test_json_lines_with_a_byte_order_mark_crlf_and_blank_lines() -> None:
    data = b'\xef\xbb\xbf{"text": "one", "ref": "1"}\r\n\r\n{"text": "two", "ref": "2"}'
    assert [m.text for m in read(data)] == ["one", "two"]


def test_escaped_emoji_are_joined() -> None:
    assert read(b'{"text": "\\ud83c\\udf52"}')[0].text == "\U0001f352"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"not json", "line 2: not JSON: Expecting value at column 1"),
        (b'{"text": "cut', "line 2: not JSON: Unterminated string"),
        (b'["text"]', "line 2: not an object but a list"),
        (b"null", "line 2: not an object but null"),
        (b"12", "line 2: not an object but a number"),
        (b'{"text": "caf\xe9"}', "line 2: not UTF-8 text: byte 0xe9 at column 14"),
        (b'{"text": "a", "text": "b"}', "line 2: the key 'text' stands there twice"),
        (b'{"text": "a\\u0000b"}', "line 2: the text has a NUL at character 2"),
        (b'{"text": "\\ud83d"}', "line 2: the text has half of a surrogate pair"),
        (b"[" * 100_000, "line 2: (not a turn: nested too deeply|not JSON)"),
        (b'{"text": ' + b"9" * 5_000 + b"}", "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_can_be_left_out(line: bytes, says: str) -> None:
    data = b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n'
    with pytest.raises(BadInput, match=says):
        read(data)
    problems: list[BadInput] = []
    assert [m.text for m in read(data, on_problem=problems.append)] == ["one", "three"]
    assert len(problems) == 1
    assert problems[0].message.startswith("line 2: ")


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_input_without_turns_is_an_error(data: bytes) -> None:
    with pytest.raises(BadInput, match="holds no turns"):
        read(data)


def test_utf_16_is_recognised() -> None:
    with pytest.raises(BadInput, match="UTF-16"):
        read('{"text": "hi"}'.encode("utf-16"))


def test_a_turn_without_ref_gets_one_from_what_was_said_and_how_often() -> None:
    once = read(lines({"text": "yes"}, {"text": "no"}, {"text": "yes"}))
    again = read(lines({"text": "yes"}, {"text": "no"}, {"text": "yes"}, {"text": "yes"}))
    assert len({m.ref for m in again}) == 4
    assert again[:3] == once
    elsewhere = read(lines({"text": "yes"}), given=intake.defaults(session="other"))
    assert elsewhere[0].ref not in {m.ref for m in again}


def test_one_ref_on_two_different_turns_is_an_error_and_on_the_same_turn_is_not() -> None:
    same = lines({"text": "a", "ref": "1"}, {"text": "a", "ref": "1"}, {"text": "b", "ref": "1", "session": "other"})
    assert len(read(same)) == 3
    with pytest.raises(BadInput, match=r"line 2: ref '1' is already the ref of another turn \(line 1\)"):
        read(lines({"text": "a", "ref": "1"}, {"text": "b", "ref": "1"}))


# --- LoCoMo ----------------------------------------------------------------------------------------------------------


def locomo(**talk: object) -> dict[str, object]:
    return {"sample_id": "conv-1", "conversation": {"speaker_a": "Ann", "speaker_b": "Ben", **talk}}


def test_sessions_come_in_order_of_their_number_with_their_dates() -> None:
    data = locomo(
        session_10=[{"speaker": "Ben", "dia_id": "D10:1", "text": "late"}],
        session_10_date_time="9:05 am on 3 June, 2023",
        session_2=[{"speaker": "Ann", "dia_id": "D2:1", "text": "early\n\n"}],
        session_2_date_time="1:56 pm on 8 May, 2023",
        session_3=[],
        session_4_date_time="a date without its session",
    )
    assert read(json.dumps([data], indent=1).encode()) == (
        Message("early", "user", "Ann", datetime(2023, 5, 8, 13, 56), "session_2", "D2:1"),
        Message("late", "user", "Ben", datetime(2023, 6, 3, 9, 5), "session_10", "D10:1"),
    )


def test_images_become_lines_behind_the_text_or_the_whole_text() -> None:
    data = locomo(
        session_1=[
            {"speaker": "Ann", "dia_id": "D1:1", "text": "Look!", "blip_caption": "a red kite", "query": "kite"},
            {"speaker": "Ben", "dia_id": "D1:2", "text": "", "img_url": ["u"], "blip_caption": "a lake"},
            {"speaker": "Ben", "dia_id": "D1:3", "img_url": ["u"]},
        ]
    )
    found = read(json.dumps(data).encode())
    assert [m.text for m in found] == ["Look!\n[image: a red kite]\n[image search: kite]", "[image: a lake]", "[image]"]
    assert [m.at for m in found] == [None, None, None]


def test_a_turn_with_nothing_in_it_is_named_and_can_be_left_out() -> None:
    data = json.dumps(
        locomo(session_1=[{"speaker": "Ann", "dia_id": "D1:1"}, {"speaker": "Ben", "text": "hi"}])
    ).encode()
    with pytest.raises(BadInput, match="session_1, turn 1: the text is empty"):
        read(data)
    problems: list[BadInput] = []
    found = read(data, on_problem=problems.append)
    assert [m.text for m in found] == ["hi"]
    assert (found[0].ref or "").startswith(intake.DERIVED_REF)
    assert len(problems) == 1


def test_an_unknown_conversation_lists_those_there_are() -> None:
    two = [locomo(), {**locomo(), "sample_id": "conv-2"}]
    with pytest.raises(BadInput, match=r"no conversation 'conv-9' \(choose one with --conversation: conv-1, conv-2\)"):
        read(json.dumps(two).encode(), conversation="conv-9")
    with pytest.raises(BadInput, match="several conversations"):
        read(json.dumps(two).encode())
    with pytest.raises(BadInput, match="JSON lines and holds no conversations"):
        read(lines({"text": "hi"}), conversation="conv-1")


def test_other_json_is_told_apart_by_its_content(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="JSON list, but not of LoCoMo"):
        read(b'[{"text": "hi"}]')
    with pytest.raises(BadInput, match="begins like a JSON list but cannot be read"):
        read(b'[{"conversation": {}},')
    turns = tmp_path / "named-like.locomo.json"
    turns.write_bytes(lines({"text": "hi"}))
    with pytest.raises(BadInput, match="is not LoCoMo JSON"):
        intake.read_locomo(turns)
    turns.write_text(json.dumps(locomo(session_1=[{"speaker": "Ann", "text": "hi"}])))
    assert [m.text for m in intake.read_locomo(turns, "conv-1")] == ["hi"]


# --- the sample ------------------------------------------------------------------------------------------------------


def test_the_sample_is_a_valid_conversation_and_its_questions_point_into_it() -> None:
    folder = resources.files("lychee_local") / "samples"
    found = read((folder / "everyday.jsonl").read_bytes())
    by_session = {name: [m for m in found if m.session == name] for name in dict.fromkeys(m.session for m in found)}
    assert len(found) >= 60
    assert len(by_session) >= 3
    assert {m.speaker for m in found if m.role == "user"} == {"Felix", "Noor"}
    assert [name for name, said in by_session.items() if any(m.role == "assistant" for m in said)] == [
        "plans-in-september"
    ]
    refs = {m.ref for m in found}
    questions = json.loads((folder / "everyday-questions.json").read_text(encoding="utf-8"))
    assert all(set(q["evidence"]) <= refs for q in questions["questions"])
    assert datetime.fromisoformat(questions["now"]) > max(m.at for m in found if m.at is not None)


@pytest.mark.parametrize("keys", [("session_01",), ("session_1", "session_01")])
def test_sessions_that_are_numbered_in_an_unusual_way_are_refused_not_mixed_up(
    tmp_path: Path, keys: Sequence[str]
) -> None:
    file = tmp_path / "odd.json"
    talk = {key: [{"speaker": "Ana", "text": key, "dia_id": f"D{n}:1"}] for n, key in enumerate(keys)}
    file.write_text(json.dumps([{"sample_id": "x", "conversation": talk}]))
    with pytest.raises(BadInput, match="session_1"):
        intake.read_locomo(file, "x")

"""Code-made records: what is kept, how the speaker is named, what is derived from a sentence."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from lychee_local.rules import by_name, classify, encode_by_rules, entities_in, sentences, substantive, tags_of
from lychee_local.types import Record, Role, Segment, Turn

AT = datetime(2023, 7, 3, 13, 36)


def records(
    *texts: str, speaker: str | None = "Melanie", role: Role = "user", at: datetime | None = AT
) -> tuple[Record, ...]:
    turns = [Turn("s", i, text, role, speaker, at) for i, text in enumerate(texts)]
    return encode_by_rules(Segment("s", 0, len(turns) - 1, "session_flush", 1, len(turns), 1.0), turns)


def test_a_sentence_becomes_a_dated_record_with_its_source() -> None:
    (record,) = records("Hey! I signed up for a pottery class yesterday. How are you?")
    assert record.text == "Melanie signed up for a pottery class yesterday (2 July 2023)."
    assert (record.kind, record.origin, record.role) == ("event", "rules", "user")
    assert (record.turns, record.segment, record.speaker, record.said) == ((0,), "segment:s:0-0", "Melanie", AT)
    assert str(record.temporal.t_ref) == "2023-07-02"
    assert record.entities == ("Melanie",)
    assert record.tags == ("signed", "pottery")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("I signed up.", "Mel signed up."),
        ("I love jazz.", "Mel loves jazz."),
        ("I really try to paint.", "Mel really tries to paint."),
        ("I'm a nurse and I was late.", "Mel is a nurse and they were late."),
        ("I own a bike and I get lost.", "Mel owns a bike and they get lost."),
        ("Ana and I love jazz.", "Ana and Mel love jazz."),
        ("Ana and I are friends.", "Ana and Mel are friends."),
        ("I've two cats.", "Mel has two cats."),
        ("I'll call my mother.", "Mel will call their mother."),
        ("I don't eat meat.", "Mel doesn't eat meat."),
        ("I haven't slept.", "Mel hasn't slept."),
        ("My dog is old.", "Mel's dog is old."),
        ("It made me smile.", "It made Mel smile."),
        ("My son gave me my watch.", "Mel's son gave them their watch."),
        ("Oh, well, I went home.", "Mel went home."),
        ("We went home.", 'Mel said: "We went home."'),
        ("You should see my dog.", 'Mel said: "You should see my dog."'),
        ("The room was cold.", 'Mel said: "The room was cold."'),
        ("Ich mag Jazz.", 'Mel said: "Ich mag Jazz."'),
        ("我喜欢爵士乐。", 'Mel said: "我喜欢爵士乐。"'),
    ],
)
def test_the_first_person_becomes_the_speaker_where_grammar_allows(said: str, named: str) -> None:
    assert by_name(said, "Mel") == named


@pytest.mark.parametrize(
    ("sentence", "kept"),
    [
        ("I joined a choir in Leeds.", True),
        ("My sister bakes bread every Sunday.", True),
        ("Thanks so much for the kind words, Caroline!", False),
        ("Wow, that painting looks amazing!", False),
        ("What made you choose that agency?", False),
        ("Sounds like a wonderful plan for everyone!", False),
        ("Yes.", False),
        ("!!!", False),
        ("我昨天在北京参加了一个会议。", True),
        ("你去过北京吗？", False),
        ("谢谢。", False),
        ("Meine Schwester wohnt seit 2019 in Hamburg.", True),
    ],
)
def test_what_is_worth_keeping(sentence: str, kept: bool) -> None:
    assert substantive(sentence) is kept


def test_sentences_in_several_scripts_without_code_tables_and_blobs() -> None:
    text = "One here. Two there!\nThree\n```py\nprint('x.')\n```\n| a | b |\n|---|---|\n四个。五个！ " + "QUJD" * 100
    assert list(sentences(text)) == ["One here.", "Two there!", "Three", "四个。", "五个！"]


def test_a_long_unspaced_text_is_kept() -> None:
    text = "我们讨论了很多关于未来的计划" * 40
    assert "".join(sentences(text)) == text


def test_names_titles_and_topics() -> None:
    text = 'Melanie read "Nothing is Impossible" in New York with Ana Lopez on Monday.'
    assert entities_in(text, ("Melanie",)) == ("Melanie", "Nothing is Impossible", "New York", "Ana Lopez")
    assert entities_in("Sometimes Nate paints.", ("Nate",)) == ("Nate",)
    assert entities_in("Painting calms me.", ()) == ()
    assert entities_in("We met Mrs. Lee at the University of Leeds.") == ("Mrs. Lee", "University of Leeds")
    assert entities_in('Mel said: "I read “Dune” last Fri, It was good."', ("Mel",)) == ("Mel", "Dune")
    assert entities_in('Mel said: "He shouted “Run to the river!”."', ("Mel",)) == ("Mel", "Run to the river")
    assert entities_in('Mel\'s boss said "You are late".', ("Mel",)) == ("Mel",)
    assert entities_in("Zoë met Ángel and Łukasz in Århus.") == ("Ángel", "Łukasz", "Århus")
    assert tags_of("Melanie signed up for a pottery class (2 July 2023).", ("Melanie",)) == ("signed", "pottery")


def test_types_as_far_as_words_tell() -> None:
    assert classify("Ana loves jazz.") == "preference"
    assert classify("Ana is allergic to nuts.") == "constraint"
    assert classify("Ana moved on 2 July 2023.") == "event"
    assert classify("Ana is a nurse.") == "fact"


def test_validity_dates() -> None:
    (record,) = records("I have worked in Leeds since 2016.")
    assert record.temporal.t_ref is None
    assert str(record.temporal.t_valid_from) == "2016"
    (record,) = records("I painted a sunrise last year.")
    assert (record.text, str(record.temporal.t_ref)) == ("Melanie painted a sunrise last year (2022).", "2022")


def test_without_a_time_relative_dates_stay_as_they_were_said() -> None:
    (record,) = records("I joined a choir yesterday.", at=None)
    assert record.text == "Melanie joined a choir yesterday."
    assert record.temporal.spans == ()


def test_an_image_caption_is_a_record_and_its_search_words_are_not() -> None:
    made = records("Look at this!\n[image: a photo of a red bowl]\n[image search: pottery bowl]")
    assert [record.text for record in made] == ["Melanie shared an image: a photo of a red bowl"]


def test_one_word_is_enough_for_what_one_is_or_has() -> None:
    assert [r.text for r in records("I own a bike.", "I'm a nurse.", "I have a question.", "I am here.")] == [
        "Melanie owns a bike.",
        "Melanie is a nurse.",
    ]


def test_unnamed_speakers_assistants_and_tools() -> None:
    assert [r.text for r in records("I moved to Lisbon in spring 2021.", speaker=None)] == [
        "The user moved to Lisbon in spring 2021."
    ]
    (record,) = records(
        "Sure, happy to help you. The train from Lisbon to Porto leaves daily at nine from Oriente station.",
        speaker=None,
        role="assistant",
    )
    assert record.role == "assistant"
    assert record.text.startswith('The assistant said: "The train')
    assert records("exit code 0, all tests passed in nine seconds", role="tool") == ()


def test_repeats_and_empty_turns_make_no_records() -> None:
    (record,) = records(*["I joined a choir in Leeds."] * 500)
    assert (record.turns, record.chars) == (tuple(range(500)), None)
    assert records("", "   ", "?!") == ()


def test_a_megabyte_is_read_in_seconds() -> None:
    started = time.process_time()
    records("I joined a choir in Leeds. " * 4_000 + "```" * 30_000 + "|" * 100_000 + "\n" * 100_000 + "I " * 50_000)
    assert time.process_time() - started < 20.0


def test_a_record_knows_the_characters_it_rests_on() -> None:
    text = "Well.  I moved to   Lisbon last week! The new flat has a sunny balcony."
    turn = Turn("S", 0, text, speaker="Ana", at=datetime(2024, 5, 13))
    records = encode_by_rules(Segment("S", 0, 0, "session_flush", 20, 1, 1.0), [turn])
    said = [text[slice(*r.chars)] for r in records if r.chars]
    assert said == ["I moved to   Lisbon last week!", "The new flat has a sunny balcony."]

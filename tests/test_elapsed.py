"""Lengths of time: what is asked for, what the calendar says, and what the model has to do with it."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lychee_local import answer, dates, elapsed
from lychee_local.backends.fake import FakeCall, FakeLLM, Reply
from lychee_local.backends.llama import LlamaLLM
from lychee_local.elapsed import Asked
from lychee_local.settings import RecallSettings
from lychee_local.types import DateSpan, Evidence

NOW = datetime(2023, 9, 1, 12)
SETTINGS = RecallSettings()
RACE = Evidence(
    "turn:S1:0",
    "turn",
    "Ana: I ran the race yesterday!",
    0.9,
    "S1",
    ("turn:S1:0",),
    said=datetime(2023, 7, 11, 9),
)
EXAM = Evidence(
    "turn:S2:0",
    "turn",
    "Ana: My exam was on 24 August 2023.",
    0.8,
    "S2",
    ("turn:S2:0",),
    said=datetime(2023, 8, 30),
)


def span(text: str) -> DateSpan:
    found = dates.parse_span(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        ("How many days ago did Ana run the race?", Asked("day", "end")),
        ("How long ago was my birthday?", Asked(None, "end")),
        ("How long ago was it when Ana moved?", Asked(None, "end")),
        ("How many months have passed since I last saw Ben?", Asked("month", "end")),
        ("How long has it been since Ana moved?", Asked(None, "end")),
        ("How many weeks have passed since Ana moved until today?", Asked("week", "end")),
        ("How many days are there between my birthday and today?", Asked("day", "end")),
        ("How many weeks had passed since the race on the day of the exam?", Asked("week", None)),
        ("How many weeks had passed since the race when Ana sat her exam?", Asked("week", None)),
        ("How many weeks passed since the race by the day of the exam?", Asked("week", None)),
        ("How many days passed between the race and the exam?", Asked("day", None)),
        ("How many days between the race and the exam?", Asked("day", None)),
        ("How much time is there between the race and the exam?", Asked(None, None)),
        ("How many weeks lie between the race and the exam?", Asked("week", None)),
        ("How many days before the exam did Ana run?", Asked("day", None)),
        ("How long after the race was the exam?", Asked(None, None)),
        ("how many full years passed from the wedding to the move", Asked("year", None)),
        ("How many days did it take from the start of the course to its end?", Asked("day", None)),
        ("How many days had passed before Ana moved again?", Asked("day", None)),
        ("How many days are left until my exam?", Asked("day", "start")),
        ("How long until the exam?", Asked(None, "start")),
        # Answered by what was said, not by two dates.
        ("How long did Ana live in Rome?", None),
        ("How many days a week does Ana train?", None),
        ("How many days did I spend camping this year?", None),
        ("How long has Melanie been painting?", None),
        ("How long is Ana's commute from home to work?", None),
        ("How long does it take to drive between Rome and Naples?", None),
        ("How long did the meeting between Ana and Ben last?", None),
        ("How long did it take Ana to get from Lisbon to Porto?", None),
        ("How long did it take from Lisbon to Porto?", None),
        ("How many days did I spend camping between June and August?", None),
        ("How many days a week does Ana work from home to save money?", None),
        ("How many weeks of holiday did Ana get from her boss to travel?", None),
        ("How long before bed does Ana stop drinking coffee?", None),
        ("How many weeks before an exam does Ana start studying?", None),
        ("How many days after planting do the seeds sprout?", None),
        ("How long is the river between the lakes?", None),
        ("When did Ana run the race?", None),
        ("", None),
    ],
)
def test_which_questions_ask_for_the_time_between_two_dates(question: str, wanted: Asked | None) -> None:
    assert elapsed.asked(question) == wanted


@pytest.mark.parametrize(
    ("one", "other", "unit", "length"),
    [
        ("10 July 2023", "24 August 2023", "day", "45 days"),
        ("24 August 2023", "10 July 2023", "day", "45 days"),
        ("10 July 2023", "24 August 2023", "week", "6 weeks and 3 days"),
        ("10 July 2023", "7 August 2023", "week", "4 weeks"),
        ("10 July 2023", "24 August 2023", "month", "1 month and 14 days"),
        ("10 July 2023", "24 August 2023", None, "1 month and 14 days"),
        ("10 July 2023", "11 July 2023", None, "1 day"),
        ("10 July 2023", "12 July 2023", "week", "2 days"),
        ("10 July 2023", "12 July 2023", "year", "2 days"),
        ("31 January 2023", "28 February 2023", "month", "1 month"),
        ("31 January 2024", "28 February 2024", "month", "28 days"),
        ("29 February 2024", "28 February 2025", "year", "1 year"),
        ("15 May 2019", "20 August 2023", "year", "4 years and 3 months"),
        ("15 May 2019", "20 August 2023", None, "4 years and 3 months"),
        ("May 2023", "August 2023", "day", "about 3 months"),
        ("May 2023", "August 2023", None, "about 3 months"),
        ("2013", "18 September 2023", "month", "about 10 years"),
        ("May 2019", "August 2023", "year", "about 4 years"),
        ("the weekend of 8 July 2023", "24 August 2023", "day", "about 47 days"),
        ("the week of 5 June 2023", "24 August 2023", None, "about 3 months"),
        # The same, or one inside the other: nothing can be said.
        ("10 July 2023", "10 July 2023", "day", None),
        ("July 2023", "10 July 2023", "day", None),
        ("2023", "May 2023", "month", None),
        ("31 December 2098", "31 December 2099", "month", "12 months"),
    ],
)
def test_the_calendar(one: str, other: str, unit: elapsed.Unit | None, length: str | None) -> None:
    assert elapsed.between(span(one), span(other), unit) == length


@given(st.dates(date(1600, 1, 1), date(2400, 1, 1)), st.integers(1, 20_000))
def test_months_and_the_days_left_lead_back_to_the_later_day(start: date, days: int) -> None:
    end = start + timedelta(days=days)
    text = elapsed.between(DateSpan(start, start, "day"), DateSpan(end, end, "day"), "month")
    assert text is not None
    amounts = {unit.rstrip("s"): int(n) for n, unit in (part.split() for part in text.split(" and "))}
    year, month = divmod(start.year * 12 + start.month - 1 + amounts.get("month", 0), 12)
    first = date(year, month + 1, 1)
    last = (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)
    assert min(first + timedelta(days=start.day - 1), last) + timedelta(days=amounts.get("day", 0)) == end


def test_the_dates_to_choose_from_are_those_that_are_shown() -> None:
    assert {label: found.source for label, found in elapsed.choices([RACE, EXAM]).items()} == {
        "10 July 2023": "turn:S1:0",
        "11 July 2023": "turn:S1:0",
        "24 August 2023": "turn:S2:0",
        "30 August 2023": "turn:S2:0",
    }
    assert all(label in answer.serialise([RACE, EXAM]) for label in elapsed.choices([RACE, EXAM]))


def reply(*days: str) -> str:
    names = ("first", "second")
    return json.dumps({name: {"event": "it", "date": day} for name, day in zip(names, days, strict=False)})


def test_the_model_names_the_dates_and_code_counts() -> None:
    llm = FakeLLM([reply("24 August 2023", "10 July 2023")])
    heard: list[str] = []
    done = answer.answer(
        "How many days passed between the race and the exam?",
        [RACE, EXAM],
        llm=llm,
        now=None,
        settings=SETTINGS,
        on_text=heard.append,
    )
    assert done.text == "45 days, from 10 July 2023 [1] to 24 August 2023 [2]."
    assert "".join(heard) == done.text
    assert done.cited == ("turn:S1:0", "turn:S2:0")
    assert done.notes == ("counted by the calendar: 2023-07-10 to 2023-08-24",)
    assert len(done.usage) == len(llm.calls) == 1


def test_until_today_one_date_is_asked_for() -> None:
    llm = FakeLLM([reply("10 July 2023")])
    question = "How many days ago did Ana run the race?"
    done = answer.answer(question, [RACE], llm=llm, now=NOW, settings=SETTINGS, style="short")
    assert (done.text, done.cited) == ("53 days", ("turn:S1:0",))
    schema = llm.calls[0].schema
    assert schema is not None
    assert list(schema.model_fields) == ["first"]


@pytest.mark.parametrize(
    "dated", [reply("unknown", "10 July 2023"), reply("10 July 2023", "10 July 2023"), ("{", "length")]
)
def test_without_two_dates_the_model_answers_from_the_same_prompt(dated: Reply) -> None:
    llm = FakeLLM([dated, "six weeks"])
    done = answer.answer(
        "How long after the race was the exam?", [RACE, EXAM], llm=llm, now=NOW, settings=SETTINGS, style="short"
    )
    assert done.text == "six weeks"
    assert done.notes == ("the two dates are not in the evidence, so the length of time is the model's own",)
    assert len(done.usage) == 2
    first, second = (call.prompt for call in llm.calls)
    shared = first[: first.index("Do not answer")]
    assert second.startswith(shared), "the evidence is evaluated once"


@pytest.mark.parametrize(
    ("question", "now", "settings"),
    [
        ("How many days ago did Ana run the race?", None, SETTINGS),
        ("How long after the race was the exam?", NOW, RecallSettings(counted=False)),
        ("How long did Ana run?", NOW, SETTINGS),
    ],
)
def test_the_model_is_not_asked_for_dates_that_do_not_help(
    question: str, now: datetime | None, settings: RecallSettings
) -> None:
    llm = FakeLLM(["an hour"])
    assert answer.answer(question, [RACE], llm=llm, now=now, settings=settings, style="short").text == "an hour"


def test_evidence_without_a_date_leaves_nothing_but_unknown() -> None:
    undated = Evidence("turn:S1:0", "turn", "Ana: I ran.", 0.9, "S1", ("turn:S1:0",))

    def unknown(call: FakeCall) -> Reply:
        return "no idea" if call.schema is None else reply("unknown", "unknown")

    done = answer.answer(
        "How long after the race was the exam?", [undated], llm=FakeLLM(unknown), now=NOW, settings=SETTINGS
    )
    assert done.text == "no idea"


def test_a_real_model_can_name_nothing_but_the_dates_there_are(smollm2_path: Path) -> None:
    llm = LlamaLLM(smollm2_path, name="smollm2", context=2048, prompt_style="compact")
    try:
        done = answer.answer(
            "How many days passed between the race and the exam?",
            [RACE, EXAM],
            llm=llm,
            now=None,
            settings=SETTINGS,
            style="short",
        )
    finally:
        llm.close()
    known = [found.span for found in elapsed.choices([RACE, EXAM]).values()]
    lengths = {elapsed.between(one, other, "day") for one in known for other in known} - {None}
    # The smallest model may choose wrongly or not at all; what is counted lies between two of the four dates.
    assert done.text in lengths or len(done.usage) == 2

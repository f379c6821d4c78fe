"""Dates: what is recognised, what relative words mean on a given day, what is refused. Checked against a calendar."""

from __future__ import annotations

import time
from datetime import date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lychee_local.dates import annotate, describe, find, parse_span, parse_when
from lychee_local.errors import BadInput
from lychee_local.types import DateSpan

MONDAY = date(2023, 7, 17)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("2023-05-08", "2023-05-08"),
        ("2023/5/8", "2023-05-08"),
        ("2023.05.08", "2023-05-08"),
        ("2023年5月8日", "2023-05-08"),
        ("8 May 2023", "2023-05-08"),
        ("8 May, 2023", "2023-05-08"),
        ("8th of May, 2023", "2023-05-08"),
        ("May 8th, 2023", "2023-05-08"),
        ("Sept. 3 2023", "2023-09-03"),
        ("Monday 8 May 2023", "2023-05-08"),
        ("8. Mai 2023", "2023-05-08"),
        ("08.05.2023", "2023-05-08"),
        ("29 February 2024", "2024-02-29"),
        ("2023-05", "2023-05"),
        ("May 2023", "2023-05"),
        ("May, 2023", "2023-05"),
        ("2023年5月", "2023-05"),
        ("2023", "2023"),
        ("2023年", "2023"),
        ("summer 2022", "2022-06-01/2022-08-31"),
        ("winter of 2022", "2022-12-01/2023-02-28"),
        ("the week of 5 June 2023", "2023-06-05/2023-06-11"),
        ("the week before 9 June 2023", "2023-05-29/2023-06-04"),
        ("two weekends before 17 July 2023", "2023-07-08/2023-07-09"),
        ("The Friday before 15 July 2023", "2023-07-14"),
        ("2023-05-01/2023-05-07", "2023-05-01/2023-05-07"),
        ("May 2023 to July 2023", "2023-05-01/2023-07-31"),
        ("from 5 June 2023 to 9 June 2023", "2023-06-05/2023-06-09"),
    ],
)
def test_absolute_forms(text: str, span: str) -> None:
    assert str(parse_span(text)) == span


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "May",
        "2023-02-29",
        "2023-02-30",
        "2023-13-01",
        "31 June 2023",
        "0000-01-01",
        "0000",
        "2023-05-08 and more",
        "2023-05-07/2023-05-01",
        "12345",
        "2 may 20231",
    ],
)
def test_what_is_not_a_date_on_its_own(text: str) -> None:
    assert parse_span(text) is None


def test_impossible_dates_are_not_found_in_text_either() -> None:
    assert find("on 31 June 2023, on 2023-02-30, on 0000-01-01, on 29 February 2023", MONDAY) == ()


@pytest.mark.parametrize(
    ("text", "span", "label"),
    [
        ("today", "2023-07-17", "17 July 2023"),
        ("tonight", "2023-07-17", "17 July 2023"),
        ("yesterday", "2023-07-16", "16 July 2023"),
        ("last night", "2023-07-16", "16 July 2023"),
        ("tomorrow", "2023-07-18", "18 July 2023"),
        ("the day before yesterday", "2023-07-15", "15 July 2023"),
        ("three days ago", "2023-07-14", "14 July 2023"),
        ("a few days ago", "2023-07-12/2023-07-15", "a few days before 17 July 2023"),
        ("last week", "2023-07-10/2023-07-16", "the week before 17 July 2023"),
        ("two weeks ago", "2023-07-03/2023-07-09", "2 weeks before 17 July 2023"),
        ("a couple of weeks ago", "2023-07-03/2023-07-09", "2 weeks before 17 July 2023"),
        ("this week", "2023-07-17/2023-07-23", "the week of 17 July 2023"),
        ("next week", "2023-07-24/2023-07-30", "the week after 17 July 2023"),
        ("the week before last", "2023-07-03/2023-07-09", "the week of 3 July 2023"),
        ("last weekend", "2023-07-15/2023-07-16", "the weekend before 17 July 2023"),
        ("this past weekend", "2023-07-15/2023-07-16", "the weekend before 17 July 2023"),
        ("two weekends ago", "2023-07-08/2023-07-09", "2 weekends before 17 July 2023"),
        ("last month", "2023-06", "June 2023"),
        ("next month", "2023-08", "August 2023"),
        ("six months ago", "2023-01", "January 2023"),
        ("eight months ago", "2022-11", "November 2022"),
        ("last year", "2022", "2022"),
        ("10 years ago", "2013", "2013"),
        ("three years now", "2020", "since 2020"),
        ("last Friday", "2023-07-14", "Friday 14 July 2023"),
        ("last Monday", "2023-07-10", "Monday 10 July 2023"),
        ("next Monday", "2023-07-24", "Monday 24 July 2023"),
        ("this Friday", "2023-07-21", "Friday 21 July 2023"),
        ("last summer", "2022-06-01/2022-08-31", "summer 2022"),
        ("last August", "2022-08", "August 2022"),
        ("next May", "2024-05", "May 2024"),
        ("last Christmas", "2022-12-25", "25 December 2022"),
        ("at Easter", "2023-04-09", "9 April 2023"),
        ("over Thanksgiving", "2023-11-23", "23 November 2023"),
        ("July 4th", "2023-07-04", "4 July 2023"),
        ("4 July", "2023-07-04", "4 July 2023"),
        ("昨天", "2023-07-16", "2023-07-16"),
        ("三天前", "2023-07-14", "2023-07-14"),
        ("上周五", "2023-07-14", "2023-07-14"),
        ("去年", "2022", "2022"),
        ("gestern", "2023-07-16", "16 July 2023"),
        ("vor zwei Wochen", "2023-07-03/2023-07-09", "the week of 3 July 2023"),
        ("letztes Jahr", "2022", "2022"),
    ],
)
def test_relative_forms_said_on_a_monday(text: str, span: str, label: str) -> None:
    (mention,) = find(f"So {text}, she said.", MONDAY)
    assert (mention.text, str(mention.span), mention.label, mention.relative) == (text, span, label, True)


def test_the_sentence_decides_between_past_and_future() -> None:
    def only(text: str) -> str:
        (mention,) = find(text, MONDAY)
        return str(mention.span)

    assert only("On Sunday we swam. I will rest.") == "2023-07-16"
    assert only("We will swim on Sunday.") == "2023-07-23"
    assert only("We met in March.") == "2023-03"
    assert only("We're going to meet in March.") == "2024-03"
    assert only("They plan to leave in two days.") == "2023-07-19"
    assert find("It was finished in two days.", MONDAY) == ()


@pytest.mark.parametrize(
    "text", ["May I ask?", "He sat down for a second.", "You may go.", "We march on.", "2022 people"]
)
def test_words_that_only_look_like_dates(text: str) -> None:
    assert find(text, MONDAY) == ()


def test_without_the_day_of_speech_only_absolute_dates_are_found() -> None:
    assert [m.text for m in find("yesterday, and on 8 May 2023, and last week", None)] == ["8 May 2023"]


def test_a_date_too_far_away_is_left_alone() -> None:
    assert find("5000 years ago", MONDAY) == ()
    assert find("next year", date.max) == ()
    assert find("yesterday", date.min) == ()


def test_every_rule_is_set_off_by_its_words_in_any_case() -> None:
    """Rules whose cues a text does not hold are not tried: each of these holds one, in capitals, and no other."""
    said = date(2023, 7, 5)
    for text in (
        "YESTERDAY", "TWO WEEKS AGO", "THREE YEARS NOW", "A WEEK FROM NOW", "WE WILL GO IN TWO WEEKS", "LAST SPRING",
        "THE WEEKEND BEFORE LAST", "IN MAY", "MAY 12", "12 JUNE", "ON FRIDAY", "AT XMAS", "NEXT NEW YEAR'S EVE", "昨天",
        "三天前", "上周五", "上个月", "去年", "VOR DREI TAGEN", "NÄCHSTES JAHR", "ÜBERMORGEN", "5 MAY 2023", "(2021)",
    ):  # fmt: skip
        assert find(f"- {text} -", said), text
    assert [m.text for m in find("today or yeſterday", said)] == ["today"]  # ſ is an s only where case is ignored


def test_annotation_names_relative_dates_once() -> None:
    text = "I signed up yesterday, in May 2023 I could not. Last week was hard."
    once = annotate(text, date(2023, 7, 3))
    assert once == (
        "I signed up yesterday (2 July 2023), in May 2023 I could not. "
        "Last week (the week before 3 July 2023) was hard."
    )
    assert annotate(once, date(2023, 7, 3)) == once
    assert annotate(text, None) == text


days = st.dates(min_value=date(1600, 1, 1), max_value=date(2190, 12, 31))


@given(days, days, st.sampled_from(["day", "month", "year", "interval"]))
def test_a_described_span_is_read_back(first: date, second: date, kind: str) -> None:
    start, end = sorted((first, second))
    span = {
        "day": DateSpan(start, start, "day"),
        "month": parse_span(f"{start.year}-{start.month:02d}"),
        "year": parse_span(str(start.year)),
        "interval": DateSpan(start, end, "interval"),
    }[kind]
    assert span is not None
    assert parse_span(describe(span)) == span
    assert parse_span(str(span)) == span


@given(st.text(max_size=200), days)
def test_any_text_is_read_without_errors_and_mentions_lie_in_it(text: str, said: date) -> None:
    end = 0
    for mention in find(text, said):
        assert mention.start >= end
        assert text[mention.start : mention.end] == mention.text
        end = mention.end
    annotate(text, said)


@given(
    st.sampled_from(["yesterday", "last week", "two weekends ago", "last Friday", "a few months ago", "last summer"]),
    days,
)
def test_a_label_means_the_same_as_the_words_it_explains(text: str, said: date) -> None:
    (mention,) = find(text, said)
    assert parse_span(mention.label) == mention.span
    assert mention.span.end < said + timedelta(days=1)


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ("1:56 pm on 8 May, 2023", datetime(2023, 5, 8, 13, 56)),
        ("12:09 am on 13 September, 2023", datetime(2023, 9, 13, 0, 9)),
        ("2023-05-08", datetime(2023, 5, 8)),
        ("2023-05-08T13:56:01", datetime(2023, 5, 8, 13, 56, 1)),
        ("2023-05-08T13:56:00+02:00", datetime(2023, 5, 8, 13, 56, tzinfo=timezone(timedelta(hours=2)))),
        ("2023/05/20 (Sat) 02:21", datetime(2023, 5, 20, 2, 21)),
        ("May 8, 2023 at 12 pm", datetime(2023, 5, 8, 12)),
        ("8 May 2023", datetime(2023, 5, 8)),
        ("2023年5月8日 13:56", datetime(2023, 5, 8, 13, 56)),
    ],
)
def test_a_callers_date(text: str, when: datetime) -> None:
    assert parse_when(text) == when


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "yesterday",
        "May 2023",
        "2023-02-30",
        "0000-01-01",
        "8 May 2023 25:00",
        "14 pm on 8 May 2023",
        "8 May 2023 and 9 May 2023",
        "8 May 2023 in Rome",
        "x" * 10_000,
    ],
)
def test_what_is_not_a_callers_date_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_when(text)
    assert "2023-05-08" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["last " * 40_000, "in " * 60_000, "8 " * 100_000, "the week before " * 12_000, "a" * 200_000]
)
def test_long_input_takes_time_in_proportion(text: str) -> None:
    started = time.process_time()
    find(text, MONDAY)
    assert time.process_time() - started < 10.0


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("My sister Marta visits on Friday.", date(2024, 5, 17)),
        ("The lesson is on Tuesday.", date(2024, 5, 14)),
        ("I am so excited about the recital on Saturday!", date(2024, 5, 18)),
        ("We went to the lake on Friday.", date(2024, 5, 10)),
        ("On Friday I finished the fence.", date(2024, 5, 10)),
        ("She called on Tuesday. The lesson is on Wednesday.", date(2024, 5, 7)),
    ],
)
def test_a_bare_weekday_lies_behind_only_where_the_sentence_tells_the_past(text: str, day: date) -> None:
    assert find(text, date(2024, 5, 13))[0].span == DateSpan(day, day, "day")


@pytest.mark.parametrize(
    "text",
    [
        "二十年前",
        "十三年前",
        "两三天前",
        "几十年前",
        "上上周",
        "下下个月",
        "早上周围没人",
        "晚上月亮很圆",
        "我爱上月亮了",
        "以前天天去",
        "然后天黑了",
        "请你说明天气",
        "如今天气很冷",
        "去年轻人多的地方",
        "过去年",
        "am 3. Mai",
        "am 3. April",
        "el próximo mes",
        "ayer",
        "先週",
        "أمس",
    ],
)
def test_what_is_not_understood_stays_unresolved(text: str) -> None:
    assert find(text, MONDAY) == ()


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("上周天", "2023-07-16"),
        ("下周日", "2023-07-30"),
        ("大前天", "2023-07-14"),
        ("明天气温很高", "2023-07-18"),
        ("上个月月底", "2023-06"),
        ("去年底", "2022"),
        ("heute vor einem Jahr", "2022"),
    ],
)
def test_chinese_and_german_days(text: str, span: str) -> None:
    (mention,) = find(text, MONDAY)
    assert str(mention.span) == span


def test_the_dot_behind_a_month_ends_the_sentence_unless_it_shortens_the_month() -> None:
    said = date(2023, 7, 3)
    assert annotate("It is in May. Or in September.", said) == (
        "It is in May (May 2023). Or in September (September 2023)."
    )
    assert annotate("It is in Sept. or so.", said) == "It is in Sept. (September 2023) or so."


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("We're getting married on Saturday.", [18]),
        ('Jonas said: "We leave on Friday."', [17]),
        ('Jonas said: "We left on Friday."', [10]),
        ("I worked on Friday, and I won't be there on Monday.", [10, 20]),
        ("I worked on Friday and start anew on Monday.", [10, 20]),
        ("I went to Rome on Friday and saw the Pope on Sunday.", [10, 12]),
    ],
)
def test_a_weekday_has_the_time_of_its_own_verb(text: str, days: list[int]) -> None:
    found = find(text, date(2024, 5, 13))
    assert [mention.span.start for mention in found] == [date(2024, 5, day) for day in days]

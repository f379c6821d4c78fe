"""Keys, nodes of a record and of a segment, merging, dates."""

from __future__ import annotations

from datetime import date

import pytest

from lychee_local.store.nodes import event_frame, label_text, nodes_of_encoding, nodes_of_record, normalise_key
from lychee_local.store.nodes import unique_terms as unique
from lychee_local.types import DateSpan, Node, Record, Segment, Temporal, node_id

SEGMENT = Segment("S1", 4, 9, "target_length", 600, 6, 0.5)


def record(text: str = "Ana likes tea", **fields: object) -> Record:
    return Record("S1", text, "preference", (4,), SEGMENT.id, **fields)  # type: ignore[arg-type]  # fields vary by test


@pytest.mark.parametrize(
    ("term", "key"),
    [
        ("  New   York ", "new york"),
        ("new-york", "new york"),
        ("New_York/Brooklyn", "new york brooklyn"),
        ("a:b\\c|d,e;f", "a b c d e f"),
        ("全角：／＼｜，；－＿完", "全角 完"),
        ("Straße", "strasse"),
        ("O'Brien!", "obrien"),
        ("don't -- stop", "dont stop"),
        ("ΣΊΣΥΦΟΣ", "σίσυφοσ"),
        ("Cafe\u0301", "caf\u00e9"),
        ("हिन्दी", "हिन्दी"),
        ("茶道", "茶道"),
        ("  ", ""),
        ("!?", ""),
        ("🎉", ""),
    ],
)
def test_normalise_key(term: str, key: str) -> None:
    assert normalise_key(term) == key


def test_normalise_key_leaves_a_key_alone() -> None:
    for term in ("New-York", "Straße", "हिन्दी", "a  b"):
        assert normalise_key(normalise_key(term)) == normalise_key(term)


def test_unique_terms_keeps_first_spelling_and_order() -> None:
    assert unique([" Tea  time", "ben", "TEA TIME", "", "  ", "Ben"]) == ("Tea time", "ben")


def test_nodes_of_record() -> None:
    made = nodes_of_record(record(entities=("Ana", "ana", "!"), tags=("Green Tea",)))
    assert [(n.kind, n.key, n.label) for n in made] == [
        ("entity", "ana", "Ana"),
        ("topic", "green tea", "Green Tea"),
        ("topic", "preference", "preference"),
        ("entity_topic", "ana::green tea", "Ana: Green Tea"),
        ("entity_topic", "ana::preference", "Ana: preference"),
    ]
    assert {n.records for n in made} == {(record().id,)}


def test_node_id_depends_on_kind_and_key() -> None:
    node = Node("entity", "ana", "Ana", ())
    assert node.id == node_id("entity", "ana") != node_id("topic", "ana")


@pytest.mark.parametrize(
    ("temporal", "keys"),
    [
        (Temporal(DateSpan(date(2023, 5, 8), date(2023, 5, 8), "day")), ["day:2023-05-08", "month:2023-05"]),
        (Temporal(DateSpan(date(2024, 2, 1), date(2024, 2, 29), "month")), ["month:2024-02"]),
        (Temporal(DateSpan(date(2022, 1, 1), date(2022, 12, 31), "year")), ["year:2022"]),
        (
            Temporal(DateSpan(date(2023, 5, 1), date(2023, 5, 7), "interval")),
            ["interval:2023-05-01/2023-05-07"],
        ),
        (
            Temporal(
                t_valid_from=DateSpan(date(2020, 1, 1), date(2020, 12, 31), "year"),
                t_valid_to=DateSpan(date(2023, 6, 1), date(2023, 6, 30), "month"),
            ),
            ["year:2020", "month:2023-06", "interval:2020-01-01/2023-06-30"],
        ),
        (
            # "valid to" before "valid from" is the model's mistake: both dates stay findable, no interval is made up.
            Temporal(
                t_valid_from=DateSpan(date(2023, 1, 1), date(2023, 12, 31), "year"),
                t_valid_to=DateSpan(date(2020, 1, 1), date(2020, 12, 31), "year"),
            ),
            ["year:2023", "year:2020"],
        ),
        (Temporal(DateSpan(date(9999, 12, 31), date(9999, 12, 31), "day")), ["day:9999-12-31", "month:9999-12"]),
        (Temporal(), []),
    ],
)
def test_temporal_nodes_of_record(temporal: Temporal, keys: list[str]) -> None:
    made = [n for n in nodes_of_record(record(temporal=temporal)) if n.kind == "temporal"]
    assert [n.key for n in made] == keys
    assert all(n.when is not None and n.key == f"{n.when.precision}:{n.when}" for n in made)


def test_month_node_covers_the_whole_month() -> None:
    day = DateSpan(date(2024, 2, 10), date(2024, 2, 10), "day")
    month = nodes_of_record(record(temporal=Temporal(day)))[-1]
    assert month.when == DateSpan(date(2024, 2, 1), date(2024, 2, 29), "month")


def test_event_frame_is_the_segment() -> None:
    records = [record(f"sentence {i}") for i in range(14)]
    frame = event_frame(SEGMENT.id, records)
    assert (frame.kind, frame.key, len(frame.records)) == ("event_frame", "S1:4-9", 14)
    assert label_text(frame, records) == "\n".join(f"sentence {i}" for i in range(12))
    fragment = Segment("S1", 4, 4, "oversized_turn_fragment", 900, 1, 1.0, (3000, 6000))
    assert event_frame(fragment.id, records).key == "S1:4-4@3000"


def test_nodes_of_encoding_merges() -> None:
    first, second = record("one", entities=("Ana",)), record("two", entities=("ANA", "Ben"))
    made = {(n.kind, n.key): n for n in nodes_of_encoding(SEGMENT, [first, second])}
    assert made["entity", "ana"].records == (first.id, second.id)
    assert made["entity", "ana"].label == "Ana"
    assert made["entity", "ben"].records == (second.id,)
    assert made["event_frame", "S1:4-9"].records == (first.id, second.id)


def test_nothing_comes_of_an_encoding_without_records() -> None:
    assert nodes_of_encoding(SEGMENT, []) == ()

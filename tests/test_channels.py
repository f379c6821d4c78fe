"""Recall and windows over a real store, with vectors whose cosines can be counted by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import pytest

from lychee_local import channels, rank
from lychee_local.backends.fake import HashEmbedder
from lychee_local.lexicon import prompt_tokens
from lychee_local.settings import RecallSettings
from lychee_local.store import EmbedderIdentity, Store
from lychee_local.strategy import STRATEGIES, similarity
from lychee_local.types import (
    Calibration,
    Candidate,
    DateSpan,
    Plan,
    QuestionType,
    Record,
    Role,
    Scope,
    Segment,
    Temporal,
    TimeRange,
    Turn,
)
from lychee_local.windows import windows
from lychee_local.wording import plan_by_rules, plan_without

EMBEDDER = HashEmbedder(4096)  # wide, so that no two words of a test share an axis
FLAT = Calibration(similarity_floor=0.0)  # r is the cosine itself
DENSE = RecallSettings(channels=("records", "nodes", "temporal", "turns"))
SAID = datetime(2023, 7, 3, 13, 36)
DAY = DateSpan(date(2023, 7, 2), date(2023, 7, 2), "day")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    identity = EmbedderIdentity(EMBEDDER.name, EMBEDDER.digest, EMBEDDER.dimension, FLAT)
    opened = Store.open(tmp_path, "ana", embedder=identity)
    yield opened
    opened.close()


def say(store: Store, session: str, *lines: str, roles: Sequence[Role] = (), at: datetime | None = SAID) -> None:
    """Each line is "Name: words"; the ref of turn i is "session/i"."""
    turns = []
    for i, line in enumerate(lines):
        speaker, _, text = line.partition(": ")
        role: Role = roles[i] if roles else "user"
        turns.append(Turn(session, i, text, role, speaker, at, f"{session}/{i}"))
    with store.transaction() as tx:
        tx.add_turns(turns, EMBEDDER.embed([t.line for t in turns]))


def note(store: Store, *records: Record) -> None:
    """One segment, finalised and encoded into `records`."""
    turns = [i for r in records for i in r.turns]
    segment = Segment(records[0].session, min(turns), max(turns), "session_flush", 10, 1, 1.0)
    with store.transaction() as tx:
        tx.add_segments([segment])
        missing = store.missing_nodes(segment, records)
        rows = EMBEDDER.embed([text for _, text in missing])
        nodes = {node.id: row for (node, _), row in zip(missing, rows, strict=True)}
        tx.add_encoding(segment, records, EMBEDDER.embed([r.embedded_text for r in records]), nodes, "")


def found(
    store: Store, made: Plan, settings: RecallSettings = DENSE, *, k: int = 15, scope: Scope | None = None
) -> dict[str, tuple[Candidate, ...]]:
    texts = made.texts
    vectors = dict(zip(texts, EMBEDDER.embed(texts, kind="query"), strict=True))
    return channels.recall(made, vectors, store, k=k, settings=settings, calibration=FLAT, scope=scope)


def cosine(a: str, b: str) -> float:
    one, other = EMBEDDER.embed([a, b])
    return float(one @ other)


def test_similarity_is_the_papers_at_a_floor_of_one_half() -> None:
    paper = Calibration(similarity_floor=0.5)
    assert [similarity(c, paper) for c in (0.5, 0.7, 0.9, 1.0, -1.0)] == pytest.approx([0.0, 0.4, 0.8, 1.0, 0.0])
    assert similarity(float("nan"), paper) == 0.0
    assert similarity(0.3, FLAT) == pytest.approx(0.3)


def test_a_raw_turn_scores_by_its_cosine_and_keeps_its_provenance(store: Store) -> None:
    say(store, "S1", "Ana: red fish swim", "Ben: rain")
    (hit, other) = found(store, plan_without("red fish"))["r1"]
    assert (hit.id, hit.kind, hit.text, hit.turns, hit.speaker) == (
        "turn:S1:0",
        "turn",
        "Ana: red fish swim",
        (0,),
        "Ana",
    )
    r = 2 / math.sqrt(2 * 4)  # "ana red fish swim" and "red fish" share two words
    assert hit.similarity == pytest.approx(r)
    assert hit.field_score == pytest.approx(0.34 + 0.42 * r)
    assert (hit.channels, hit.queries, hit.routes, hit.said) == (("turns",), ("red fish",), ("r1",), SAID)
    assert other.field_score == pytest.approx(0.34)


def test_of_more_records_than_a_thousand_the_best_are_read(store: Store) -> None:
    """Three names that are always spoken of lead to 1,101 records, of which 16 for each item are read."""
    say(store, "S1", "Ana: a", "Ana: b", "Ana: c")
    for turn, place in enumerate(("Northend", "Southend", "Eastend")):
        things = [f"{place} thing {number}" for number in range(367)]
        note(store, *(Record("S1", thing, "fact", (turn,), "segment", (place,), speaker="Ana") for thing in things))
    settings = RecallSettings(channels=("records", "nodes"))
    asked = plan_without("Northend Southend Eastend")
    best = found(store, asked, settings, k=15)["r1"]
    every = found(store, asked, settings, k=15, scope=Scope(sessions=("S1",)))["r1"]  # what is outside shows when read
    assert (len(best), len(every)) == (16 * 15, 3 * 367)
    assert [c.field_score for c in best] == [c.field_score for c in every[: 16 * 15]]
    one_name = found(store, plan_without("Northend"), settings, k=1)["r1"]
    assert 16 * 15 < len(one_name) < 1_000  # so few are all read


def test_records_are_reached_by_vector_and_through_their_nodes(store: Store) -> None:
    say(store, "S1", "Ana: hello")
    record = Record("S1", "Ana keeps fish", "fact", (0,), "", ("Ana",), ("pets",), speaker="Ana", said=SAID)
    record = replace(record, segment="segment:S1:0-0")
    note(store, record)
    made = plan_without("fact: Ana keeps fish")
    by_vector = found(store, made, RecallSettings(channels=("records",)))["r1"]
    assert [(c.id, c.channels) for c in by_vector] == [(record.id, ("records",))]
    assert by_vector[0].field_score == pytest.approx(0.30 + 0.30 * 1.0)
    through = found(store, made, RecallSettings(channels=("nodes",)))["r1"][0]
    best = max(
        similarity(hit.cosine, FLAT) * channels.NODE_WEIGHTS[store.node(hit.id).kind]
        for hit in store.search("nodes", EMBEDDER.embed([made.question]), 50, node_kinds=tuple(channels.NODE_WEIGHTS))[
            0
        ]
    )
    assert through.field_score == pytest.approx(best)
    assert (through.similarity, through.channels) == (0.0, ("nodes",))
    assert through.nodes
    both = found(store, made)["r1"]
    assert [c.id for c in both if c.kind == "record"] == [record.id]  # merged, with the maximum of both scores
    assert both[0].field_score == pytest.approx(0.60)
    assert set(both[0].channels) == {"records", "nodes"}


def test_a_written_date_reaches_records_and_lifts_what_fits(store: Store) -> None:
    say(store, "S1", "Ana: I moved yesterday", "Ana: nothing")
    dated = Record("S1", "Ana moved", "event", (0,), "segment:S1:0-1", ("Ana",), (), Temporal(DAY))
    undated = Record("S1", "Ana rests", "fact", (1,), "segment:S1:0-1", ("Ana",))
    note(store, dated, undated)
    when = TimeRange(date(2023, 7, 2), date(2023, 7, 2))
    made = replace(plan_without("zebra"), when=when)
    only = found(store, made, RecallSettings(channels=("temporal",)))["r1"]
    assert {c.id: c.field_score for c in only} == pytest.approx({dated.id: 0.42 + 0.08})
    turns = found(store, made, RecallSettings(channels=("turns",)))["r1"]
    assert {c.id: c.field_score for c in turns} == pytest.approx({"turn:S1:0": 0.34 + 0.08, "turn:S1:1": 0.34})
    said = replace(made, when=TimeRange(SAID.date(), SAID.date()))
    turns = found(store, said, RecallSettings(channels=("turns",)))["r1"]
    assert {c.id: c.field_score for c in turns} == pytest.approx({"turn:S1:0": 0.34, "turn:S1:1": 0.34 + 0.04})


@pytest.mark.parametrize(
    ("kind", "record", "bonus"),
    [
        ("temporal", {"temporal": Temporal(DAY)}, 0.04),
        ("temporal", {}, 0.0),
        ("personalized_advice", {"kind": "preference"}, 0.05),
        ("aggregate", {"kind": "event"}, 0.03),
        ("prior_assistant_response", {"role": "assistant"}, 0.08),
        ("single", {"kind": "event"}, 0.0),
    ],
)
def test_question_types_lift_their_records(
    store: Store, kind: QuestionType, record: dict[str, object], bonus: float
) -> None:
    say(store, "S1", "Ana: hello")
    plain = Record("S1", "zebra", "fact", (0,), "segment:S1:0-0")
    note(store, replace(plain, **record))  # type: ignore[arg-type]  # fields of the table above
    made = replace(plan_without("unrelated"), question_type=kind)
    (hit,) = found(store, made, RecallSettings(channels=("records",)))["r1"]
    assert hit.field_score == pytest.approx(0.30 + bonus)


def test_the_assistants_turns_count_more_when_its_answer_is_asked_for(store: Store) -> None:
    say(store, "S1", "Ana: pasta", "Bot: pasta", roles=("user", "assistant"))
    made = replace(plan_without("unrelated"), question_type="prior_assistant_response")
    scores = {c.id: c.field_score for c in found(store, made)["r1"]}
    assert scores == pytest.approx({"turn:S1:0": 0.34 * 1.22 + 0.04, "turn:S1:1": 0.34 * 1.22 + 0.18})


def test_each_channel_can_be_switched_off(store: Store) -> None:
    say(store, "S1", "Ana: red fish")
    note(store, Record("S1", "Ana has a red fish", "fact", (0,), "segment:S1:0-0", ("Ana",)))
    made = plan_without("red fish")
    for names, kinds in ((("turns",), {"turn"}), (("records",), {"record"}), ((), set())):
        assert {c.kind for c in found(store, made, RecallSettings(channels=names))["r1"]} == kinds


def test_words_find_what_vectors_miss_and_only_reorder_scores(store: Store) -> None:
    say(
        store,
        "S1",
        *(f"Ana: lot of talk number{i}" for i in range(30)),
        "Ana: the zanzibar trip went well enough we think",
    )
    made = plan_without("talk of zanzibar")
    dense = found(store, made)["r1"]
    mixed = found(store, made, RecallSettings())["r1"]
    assert "turn:S1:30" not in {c.id for c in dense}
    hit = next(c for c in mixed if c.id == "turn:S1:30")
    assert "lexical" in hit.channels
    top = max(c.field_score for c in dense)
    assert max(c.field_score for c in mixed) == pytest.approx(top)  # the scale is the vectors' own
    alone = found(store, made, RecallSettings(channels=("lexical",)))["r1"]
    assert alone[0].id == "turn:S1:30"
    assert alone[0].field_score == pytest.approx(0.34 + 0.42 * 60 / 61)


def test_a_scope_limits_every_channel_and_the_windows(store: Store) -> None:
    say(store, "S1", "Ana: red fish", "Ben: red fish too")
    some_record = Record("S1", "Ana likes red fish", "fact", (0,), "segment:S1:0-0", ("Ana",), speaker="Ana", said=SAID)
    note(store, some_record)
    say(store, "S2", "Ana: red fish again")
    made = plan_without("Ana red fish")
    everything = found(store, made, RecallSettings())["r1"]
    assert {c.session for c in everything} == {"S1", "S2"}
    assert some_record.id in {c.id for c in everything}
    only = Scope(sessions=("S2",))
    assert [c.id for c in found(store, made, RecallSettings(), scope=only)["r1"]] == ["turn:S2:0"]
    ben = Scope(speakers=("Ben",))
    by_ben = found(store, made, RecallSettings(), scope=ben)
    assert [c.id for c in by_ben["r1"]] == ["turn:S1:1"]
    [window] = windows(made, by_ben, store, k=15, scope=ben)["r1"]
    assert window.turns == (1,)
    assert found(store, made, RecallSettings(), scope=Scope(said=TimeRange(until=date(2020, 1, 1))))["r1"] == ()


def test_an_empty_store_yields_an_empty_route(store: Store) -> None:
    made = plan_without("anything")
    by_route = found(store, made, RecallSettings())
    assert by_route == {"r1": ()}
    assert windows(made, by_route, store, k=15) == {"r1": ()}


def test_recall_is_the_same_twice(store: Store) -> None:
    say(store, "S1", *(f"Ana: word{i % 3}" for i in range(20)))
    made = plan_without("word1")
    assert found(store, made) == found(store, made)


# --- windows -----------------------------------------------------------------------------------------------------


def test_an_excerpt_shows_the_turns_found_and_marks_the_gap_between(store: Store) -> None:
    say(store, "S1", "Ana: red fish", "Ben: two", "Ana: three", "Ben: red fish", "Ana: five")
    made = plan_without("red fish")
    by_route = found(store, made)
    # The first costs 1.35 * 3 + 12 = 16 tokens, the second 9 less, since the heading is there; a third is too much.
    (window, *rest) = windows(made, by_route, store, k=15, tokens=16 + 7)["r1"]
    assert (window.kind, window.id, window.turns) == ("window", "window:S1:0-3", (0, 3))
    assert window.text == "Ana: red fish\n[...]\nBen: red fish"
    assert window.field_score == pytest.approx(by_route["r1"][0].field_score + 0.03)
    assert (window.speaker, window.said, window.queries) == (None, SAID, ("red fish",))
    assert [c.id for c in rest] == ["turn:S1:4"]


def test_an_excerpt_ends_where_too_many_turns_lie_between(store: Store) -> None:
    say(store, "S1", *["Ana: red fish" if i in (2, 6, 32) else f"Ben: filler{i}" for i in range(40)])
    made = plan_without("red fish")
    excerpts = windows(made, found(store, made), store, k=15, tokens=16 + 7 + 7)["r1"]
    assert [c.turns for c in excerpts if c.kind == "window"] == [(2, 6), (32,)]


def test_where_context_matters_near_windows_are_merged_and_no_turn_is_shown_twice(store: Store) -> None:
    say(store, "S1", *["Ana: red fish" if i in (4, 9, 20) else f"Ben: filler{i}" for i in range(30)])
    made = replace(plan_without("red fish"), question_type="personalized_advice")
    expanded = windows(made, found(store, made), store, k=3)["r1"]
    assert [c.id for c in expanded if c.kind == "window"] == ["window:S1:1-12", "window:S1:17-23"]
    shown = [turn for c in expanded for turn in c.turns]
    assert len(shown) == len(set(shown))


def test_a_record_stays_beside_the_window_of_its_source(store: Store) -> None:
    say(store, "S1", "Ana: zero", "Ana: one", "Ana: two", "Ana: three")
    record = Record("S1", "Ana has a red fish", "fact", (1,), "segment:S1:0-3", ("Ana",))
    note(store, record)
    made = plan_without("red fish")
    expanded = windows(made, found(store, made, RecallSettings(channels=("records",))), store, k=5)["r1"]
    assert {c.id for c in expanded} == {record.id, "window:S1:1-1"}


def test_routes_share_their_windows(store: Store) -> None:
    say(store, "S1", "Ana: red fish", "Ben: blue bird", "Ana: end")
    made = plan_by_rules("Which came first, red fish or blue bird?", speakers=(), now=None)
    expanded = windows(made, found(store, made), store, k=1)
    assert {route: [c.id for c in found_] for route, found_ in expanded.items()} == {
        "r1": ["window:S1:0-2"],
        "r2": ["window:S1:0-2"],
    }


def test_a_window_over_its_limit_shows_whole_turns_and_says_which(store: Store) -> None:
    say(store, "S1", "Ana: " + "x" * 2_790, "Ben: red fish", "Ana: red coral")
    made = plan_without("red fish")
    (window,) = (c for c in windows(made, found(store, made), store, k=1)["r1"] if c.kind == "window")
    assert "red fish" in window.text
    assert len(window.text) <= STRATEGIES["single"].window_chars
    assert [f"Ana: {'x' * 2_790}" in window.text, 0 in window.turns] in ([False, False], [True, True])
    assert rank.evidence((window,), store)[0].turns == tuple(f"turn:S1:{i}" for i in window.turns)


def test_a_single_turn_of_a_megabyte_is_still_shown(store: Store) -> None:
    say(store, "S1", "Ana: red fish " + "y" * 1_000_000, "Ben: ok")
    made = plan_without("red fish")
    (window,) = windows(made, found(store, made), store, k=5)["r1"]
    assert 0 in window.turns


def test_windows_stop_at_the_token_budget(store: Store) -> None:
    for i in range(6):
        say(store, f"S{i}", "Ben: before this", "Ana: red fish", "Ben: after this")
    made = plan_without("red fish")
    one = prompt_tokens("Ana: red fish")
    expanded = windows(made, found(store, made), store, k=15, tokens=2 * one)["r1"]
    assert sum(c.kind == "window" for c in expanded) == 2


def test_the_assistants_answer_is_found_from_the_question_it_answered(store: Store) -> None:
    roles: tuple[Role, ...] = ("user", "assistant", "user", "assistant")
    say(store, "S1", "Ana: dinner with red fish please", "Bot: take the carp", "Ana: thanks", "Bot: bye", roles=roles)
    made = replace(plan_without("red fish dinner"), question_type="prior_assistant_response")
    by_route = found(store, made)
    (window,) = windows(made, by_route, store, k=5)["r1"]
    assert window.turns == (0, 1, 2, 3)
    assert "take the carp" in window.text
    anchor = next(c for c in by_route["r1"] if c.id == "turn:S1:0")
    assert window.field_score == pytest.approx(min(1.0, anchor.field_score + 0.22 + 0.03))


def test_evidence_names_turns_refs_speakers_and_dates(store: Store) -> None:
    say(store, "S1", "Ana: I moved yesterday", "Ben: nice")
    made = plan_without("moved")
    chosen, _ = rank.select(made, windows(made, found(store, made), store, k=5), None, k=5, settings=RecallSettings())
    (item,) = rank.evidence(chosen, store)
    assert (item.turns, item.refs) == (("turn:S1:0", "turn:S1:1"), ("S1/0", "S1/1"))
    assert (item.dates, item.said, item.session) == ((DAY,), SAID, "S1")

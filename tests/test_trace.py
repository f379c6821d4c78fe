"""Explanations: what a recall says about itself, and that saying it changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lychee_local import Memory, Message, RecallSettings, Settings, explain, rank, screen
from lychee_local.backends.fake import HashEmbedder, OverlapReranker
from lychee_local.settings import MODES, Mode
from lychee_local.store import EmbedderIdentity, Selection, Store
from lychee_local.trace import OFF, Fate, Recorder, Trace
from lychee_local.types import Calibration, Candidate, Recall, Turn
from lychee_local.wording import plan_without

FLAT = Calibration(similarity_floor=0.0)
TALK = [
    ("Ana", "I moved to Lisbon in May and I already love the light there."),
    ("Ben", "That is a big change. Did you find a flat near the river?"),
    ("Ana", "Yes, a small one in Alfama. I signed up for a pottery class on 3 July 2023."),
    ("Ben", "My sister Clara teaches pottery in Porto, you should meet her."),
    ("Ana", "I work as a nurse at the children's hospital now."),
    ("Ben", "I sold my car and bought a red bicycle last week."),
]
QUESTION = "What did Ana do about a pottery class after 1 July 2023?"


def opened(home: Path, mode: Mode = "lychee", reranker: OverlapReranker | None = None, **changed: object) -> Memory:
    settings = Settings(recall=RecallSettings(mode=mode, **changed))  # type: ignore[arg-type] # test shorthand
    embedder = HashEmbedder(1024, calibration=FLAT)
    return Memory.open("ana", home=home, llm=None, embedder=embedder, reranker=reranker, settings=settings)


def remembered(memory: Memory) -> None:
    for session in ("one", "two"):
        memory.remember(
            [Message(text, speaker=name, session=session, ref=f"{session}-{i}") for i, (name, text) in enumerate(TALK)]
        )
    memory.flush()


def explained(found: Recall) -> Trace:
    assert found.trace is not None
    return found.trace


def fates(trace: Trace) -> dict[str, Fate]:
    return {fate.id: fate for fate in trace.candidates}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("selection", ["full", "none"])
def test_an_explanation_changes_nothing_and_leaves_no_candidate_without_a_reason(
    tmp_path: Path, mode: Mode, selection: str
) -> None:
    with opened(tmp_path, mode, selection=selection) as memory:
        remembered(memory)
        plain, found = memory.recall(QUESTION, k=4), memory.recall(QUESTION, k=4, explain=True)
    assert plain.trace is None
    trace = explained(found)
    assert replace(found, trace=None) == plain
    assert [fate.id for fate in trace.candidates if fate.kept] == [e.id for e in found.evidence]
    assert len(trace.candidates) > len(found.evidence)
    assert all(fate.stage and fate.reason for fate in trace.candidates)
    assert len({fate.id for fate in trace.candidates}) == len(trace.candidates)


def test_every_channel_names_its_scale_and_every_stage_its_order(tmp_path: Path) -> None:
    with opened(tmp_path, reranker=OverlapReranker()) as memory:
        remembered(memory)
        trace = explained(memory.recall(QUESTION, k=4, explain=True))
    assert {(c.channel, c.scale) for c in trace.channels} == {
        ("temporal", "date_score"),
        ("nodes", "cosine"),
        ("records", "cosine"),
        ("lexical records", "bm25"),
        ("turns", "cosine"),
        ("lexical turns", "bm25"),
        ("bearing", "standard score"),
    }
    for c in trace.channels:
        assert [hit.rank for hit in c.hits] == list(range(1, len(c.hits) + 1))
        assert [hit.score for hit in c.hits] == sorted((hit.score for hit in c.hits), reverse=True)
    stages = ["channels", "windows", "reranked", "fused", "selected", "diversity", "raw items", "budget"]
    assert [r.stage for r in trace.rankings] == stages
    for fate in trace.candidates:
        places = {r.stage: h.rank for r in trace.rankings for h in r.hits if h.id == fate.id}
        assert fate.ranks == places
    assert list(trace.seconds) == ["plan", "embed", "channels", "windows", "rerank", "select", "evidence"]
    assert all(spent >= 0.0 for spent in trace.seconds.values())


def test_a_turn_inside_a_window_says_which(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        remembered(memory)
        found = fates(explained(memory.recall(QUESTION, explain=True)))
    assert (found["turn:one:2"].stage, found["turn:one:2"].reason) == ("windows", "stands in window:one:0-5")
    assert not found["turn:one:2"].kept


# --- each reason, by hand --------------------------------------------------------------------------------------------

PLAN = plan_without("red fish?")


def record_of(name: str, score: float, text: str = "") -> Candidate:
    return Candidate(name, "record", text or name, f"s-{name}", (0,), score, score=score, routes=("r1",))


def why(record: Recorder, shown: tuple[Candidate, ...], identifier: str) -> tuple[str, str]:
    trace = record.trace([c.id for c in shown])
    assert trace is not None
    fate = fates(trace)[identifier]
    return fate.stage, fate.reason


def test_the_budgets_say_what_they_lacked() -> None:
    record = Recorder()
    items = tuple(record_of(name, 0.5) for name in "abc")
    record.ranking("fused", items, "score")
    kept = rank.within(items, 20, record=record)  # 13 tokens each
    assert why(record, kept, "b") == ("budget", "over the budget: costs 13 tokens, 7 were left")
    kept = rank.within(items, None, items=2, record=record)
    assert why(record, kept, "c") == ("budget", "over the budget: 2 items are wanted")


def test_raw_items_say_why_records_came_first() -> None:
    record = Recorder()
    best = record_of("best", 0.9)
    raws = tuple(replace(record_of(name, s), kind="turn") for name, s in (("x", 0.8), ("y", 0.7), ("low", 0.4)))
    chosen = (best, *raws)
    record.ranking("fused", chosen, "score")
    # Of 4 places 2 are for raw items; less than 0.5 * 0.9 is below their minimum.
    kept = rank.budget(chosen, chosen, 3, ratio=0.1, floor=0.5, record=record)
    assert [c.id for c in kept] == ["best", "x", "y"]
    minimum = "below the minimum score of raw items beside records, 0.45"
    assert why(record, kept, "low") == ("raw items", minimum)


def test_diversity_says_what_was_too_similar_and_a_low_score_that_it_is_one() -> None:
    record = Recorder()
    first = record_of("first", 0.9, "the cat sat on the mat")
    copy = replace(record_of("copy", 0.89, "the cat sat on the mat"), session=first.session)
    other, last = record_of("other", 0.85, "ships sail"), record_of("last", 0.1, "rain falls")
    fused = (first, copy, other, last)
    record.ranking("fused", fused, "score")
    kept = rank.diversify((first,), fused, 2, record=record)
    assert [c.id for c in kept] == ["first", "other"]
    # The same session 0.15, the same words 0.25, and no turn in common since sessions and places are the same: 0.10.
    assert why(record, kept, "copy") == ("diversity", "0.50 similar to what was chosen")
    assert why(record, kept, "last") == ("diversity", "its score 0.10 is not above the last place's 0.85")


def test_what_the_reranker_never_read_is_named() -> None:
    record = Recorder()
    items = tuple(record_of(name, score) for name, score in (("a", 0.9), ("b", 0.8)))
    record.ranking("channels", items, "field_score")
    rank.rerank(PLAN, {"r1": items}, OverlapReranker(), limit=1, record=record)
    assert why(record, (), "b") == ("reranked", "not among the 1 candidates that the reranker reads")


def test_what_was_forgotten_meanwhile_is_named(tmp_path: Path) -> None:
    embedder = HashEmbedder(64)
    identity = EmbedderIdentity(embedder.name, embedder.digest, embedder.dimension, FLAT)
    with Store.open(tmp_path, "ana", embedder=identity) as store:
        turns = [Turn("S", i, f"word {i}") for i in range(2)]
        with store.transaction() as tx:
            tx.add_turns(turns, embedder.embed([t.line for t in turns]))
        chosen = tuple(Candidate(t.id, "turn", t.line, "S", (t.index,), 0.5) for t in turns)
        store.forget(Selection(turns=("turn:S:0",)))
        record = Recorder()
        record.ranking("budget", chosen, "score")
        assert [e.id for e in rank.evidence(chosen, store, record)] == ["turn:S:1"]
    assert why(record, chosen[1:], "turn:S:0") == ("shown", "what it rests on was forgotten meanwhile")


# --- the recorder ----------------------------------------------------------------------------------------------------


def test_a_later_stage_has_the_last_word_and_the_best_rank_of_all_routes_counts() -> None:
    record = Recorder()
    a, b = record_of("a", 0.5), record_of("b", 0.4)
    record.ranking("channels", (a, b), "score", "r1")
    record.ranking("channels", (b,), "score", "r2")
    record.drop("windows", "b", "stands in a window")
    record.keep("raw items", "b", "took a place")
    trace = record.trace(["b"])
    assert trace is not None
    assert [(f.id, f.kept, f.stage, f.ranks) for f in trace.candidates] == [
        ("b", True, "raw items", {"channels": 1}),
        ("a", False, "", {"channels": 1}),
    ]


def test_switched_off_it_keeps_nothing() -> None:
    before = repr(OFF)
    OFF.ranking("fused", (record_of("a", 0.5),), "score")
    OFF.hits("r1", "turns", "cosine", iter([("a", 0.5)]))
    OFF.keep("fused", "a", "why")
    OFF.drop("fused", "a", "why")
    OFF.lap("plan")
    assert repr(OFF) == before
    assert OFF.trace([]) is None


# --- for people ------------------------------------------------------------------------------------------------------


def test_a_person_reads_the_whole_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path, "lychee+chain") as memory:
        remembered(memory)
        found = memory.recall(QUESTION, k=2, explain=True)
    explain.explain(found)
    shown = capsys.readouterr().out
    for part in ("plan", "by rules", "entity: Ana", "from 2023-07-01 to the end", "channels", "bm25", "cosine"):
        assert part in shown
    assert "stands in window:one:0-5" in shown
    assert "kept" in shown
    assert "chain 1" in shown
    assert "milliseconds" in shown
    assert max(map(len, shown.splitlines())) <= 200
    explain.explain(replace(found, trace=None))
    assert capsys.readouterr().out == ""


def test_a_program_reads_it_as_json(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        remembered(memory)
        found = memory.recall(QUESTION, explain=True)
    data = screen.plain(found)
    assert isinstance(data, dict)
    assert isinstance(data["trace"], dict)
    assert set(data["trace"]) == {"channels", "rankings", "candidates", "seconds"}
    assert data["trace"]["candidates"][0]["id"] == found.evidence[0].id


def test_a_stored_text_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = Candidate("turn:S\x1b[2J:0", "turn", "Ana: [red]\x1b]0;title\x07", "S", (0,), 0.5)
    record = Recorder()
    record.ranking("fused", (evil,), "score")
    record.drop("fused", evil.id, "said \x1b[31m")
    trace = record.trace([])
    explain.explain(Recall("red \x1b[2J?", (), plan_without("red \x1b[2J?"), trace=trace))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown

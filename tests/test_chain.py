"""Chains: the gate, its ends and its pool, on vectors whose cosines are worked out in the comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pytest

from lychee_local import ChainSettings, Memory, Message, RecallSettings, Settings, chain
from lychee_local.backends import Vectors
from lychee_local.backends.fake import HashEmbedder
from lychee_local.errors import BadInput
from lychee_local.settings import ChainContext, Gate, Mode
from lychee_local.store import EmbedderIdentity, Selection, Store
from lychee_local.trace import Recorder
from lychee_local.types import (
    Calibration,
    Candidate,
    Chain,
    DateSpan,
    Record,
    Scope,
    Segment,
    Temporal,
    TimeRange,
    Turn,
)

FLAT = Calibration(similarity_floor=0.0)  # r is the cosine itself
QUESTION = np.array([1.0, 0.0, 0.0])
# To the question: a 0.8, b 0.6, c 0.6. Among each other: a b 0.48 + 0.48 = 0.96, a c 0.48, b c 0.36.
TEXTS = {"a": "A", "b": "B", "c": "C"}
ROWS = np.array([[0.8, 0.6, 0.0], [0.6, 0.8, 0.0], [0.6, 0.0, 0.8]], dtype=np.float32)


def never(texts: Sequence[str]) -> Vectors:
    raise AssertionError("only the concatenated context needs the embedder")


def grown(settings: ChainSettings, calibration: Calibration = FLAT) -> tuple[Chain, ...]:
    return chain.grow(TEXTS, ROWS, QUESTION, never, settings=settings, calibration=calibration)


def one(**changed: object) -> ChainSettings:
    return replace(ChainSettings(chains=1, context="last"), **changed)  # type: ignore[arg-type] # test shorthand


def steps(found: Chain) -> list[tuple[str, float]]:
    return [(link.id, round(link.gate, 6)) for link in found.links]


# --- the gate --------------------------------------------------------------------------------------------------------


def test_the_most_relevant_item_starts_a_chain_and_the_gate_multiplies() -> None:
    (found,) = grown(one())
    # b 0.6 * 0.96 = 0.576 beats c 0.6 * 0.48 = 0.288 and 0.5 * 0.8; then c 0.6 * 0.36 = 0.216 < 0.5 * 0.576.
    assert steps(found) == [("a", 0.8), ("b", 0.576)]
    assert (found.ended, round(found.refused, 6)) == ("gate", 0.216)
    assert [(round(link.relevance, 6), round(link.consistency, 6)) for link in found.links] == [(0.8, 1), (0.6, 0.96)]


@pytest.mark.parametrize(
    ("gate", "expected", "ended"),
    [
        # Equal relevance: b comes before c.
        ("relevance", [("a", 0.8), ("b", 0.6), ("c", 0.6)], "pool"),
        # c to b is 0.36, less than half of 0.96.
        ("consistency", [("a", 0.8), ("b", 0.96)], "gate"),
        # (0.6 + 0.96) / 2 and (0.6 + 0.36) / 2.
        ("weighted", [("a", 0.8), ("b", 0.78), ("c", 0.48)], "pool"),
    ],
)
def test_each_gate_decides_by_its_own_formula(gate: Gate, expected: list[tuple[str, float]], ended: str) -> None:
    (found,) = grown(one(gate=gate))
    assert (steps(found), found.ended) == (expected, ended)


def test_alpha_is_the_share_of_relevance() -> None:
    (found,) = grown(one(gate="weighted", alpha=0.25))
    # 0.25 * 0.6 + 0.75 * 0.96 = 0.87; then 0.25 * 0.6 + 0.75 * 0.36 = 0.42 < 0.435.
    assert (steps(found), round(found.refused, 6)) == ([("a", 0.8), ("b", 0.87)], 0.42)


def test_similarities_are_calibrated_before_they_are_multiplied() -> None:
    (found,) = grown(one(), Calibration(similarity_floor=0.5))
    # r is (cos - 0.5) / 0.5: a 0.6, b 0.2, a b 0.92; 0.2 * 0.92 = 0.184 < 0.5 * 0.6.
    assert (steps(found), round(found.refused, 6)) == ([("a", 0.6)], 0.184)


# --- what stands for a chain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "last_gate"),
    [
        ("last", None),  # 0.216 < 0.4 * 0.576 = 0.2304
        ("mean", 0.254558),  # the mean of a and b points to (1, 1, 0) / sqrt 2: c to it is 0.424264
    ],
)
def test_the_context_is_the_last_vector_or_the_mean(context: ChainContext, last_gate: float | None) -> None:
    (found,) = grown(one(context=context, beta=0.4))
    assert steps(found)[2:] == ([] if last_gate is None else [("c", last_gate)])


def test_the_concatenated_context_embeds_the_texts_in_the_order_of_joining_all_chains_at_once() -> None:
    asked: list[list[str]] = []

    def embed(texts: Sequence[str]) -> Vectors:
        asked.append(list(texts))
        return np.stack([ROWS[2] for _ in texts])

    settings = ChainSettings(chains=2, context="concatenated")
    first, second = chain.grow(TEXTS, ROWS, QUESTION, embed, settings=settings, calibration=FLAT)
    # What is embedded here points to c, so that c joins with the gate 0.6 * 1.
    assert steps(first) == [("a", 0.8), ("b", 0.576), ("c", 0.6)]
    assert steps(second) == [("b", 0.6), ("a", 0.768), ("c", 0.6)]
    assert asked == [["A\n\nB", "B\n\nA"]]


# --- ends ------------------------------------------------------------------------------------------------------------


def test_several_chains_start_by_relevance_and_may_share_items() -> None:
    first, second = grown(one(chains=2))
    assert steps(first) == [("a", 0.8), ("b", 0.576)]
    # b starts before c, which is as relevant; a joins with 0.8 * 0.96; c would be 0.6 * 0.48 < 0.5 * 0.768.
    assert steps(second) == [("b", 0.6), ("a", 0.768)]


def test_a_chain_is_at_most_as_long_as_allowed() -> None:
    (found,) = grown(one(length=1))
    assert (steps(found), found.ended, round(found.refused, 6)) == ([("a", 0.8)], "length", 0.576)


def test_without_truncation_a_chain_takes_what_coheres_at_all() -> None:
    (found,) = grown(one(beta=0.0))
    assert [link.id for link in found.links] == ["a", "b", "c"]
    opposite = np.array([[0.8, 0.6], [0.6, -0.8]], dtype=np.float32)  # 0.48 - 0.48 = 0
    (alone,) = chain.grow(
        {"a": "A", "b": "B"}, opposite, np.array([1.0, 0.0]), never, settings=one(beta=0.0), calibration=FLAT
    )
    assert ([link.id for link in alone.links], alone.ended) == (["a"], "gate")


def test_an_irrelevant_question_grows_chains_of_one() -> None:
    found = chain.grow(
        TEXTS, ROWS, np.array([-1.0, 0.0, 0.0]), never, settings=one(chains=3, beta=0.0), calibration=FLAT
    )
    assert [steps(c) for c in found] == [[("a", 0.0)], [("b", 0.0)], [("c", 0.0)]]


@pytest.mark.parametrize(
    "changed",
    [
        {"gate": "sum"},
        {"context": "first"},
        {"beta": 1.5},
        {"alpha": -0.1},
        {"chains": 0},
        {"pool": 0},
        {"length": 0},
        {"sessions": 0},
    ],
)
def test_a_setting_that_makes_no_sense_is_named(changed: dict[str, object]) -> None:
    (name,) = changed
    with pytest.raises(BadInput, match=name):
        replace(ChainSettings(), **changed)  # type: ignore[arg-type] # the mistake is the point


# --- the pool --------------------------------------------------------------------------------------------------------

EMBEDDER = HashEmbedder(4096)  # wide, so that no two words of a test share an axis


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    identity = EmbedderIdentity(EMBEDDER.name, EMBEDDER.digest, EMBEDDER.dimension, FLAT)
    with Store.open(tmp_path, "ana", embedder=identity) as opened:
        yield opened


def say(store: Store, session: str, *lines: str, at: datetime | None = None) -> None:
    """Each line is "Name: words"."""
    said = [line.partition(": ") for line in lines]
    turns = [Turn(session, i, text, "user", name, at) for i, (name, _, text) in enumerate(said)]
    with store.transaction() as tx:
        tx.add_turns(turns, EMBEDDER.embed([t.line for t in turns]))


def pooled(store: Store, question: str, scope: Scope | None = None, **changed: object) -> list[str]:
    (vector,) = EMBEDDER.embed([question])
    settings = replace(ChainSettings(), **changed)  # type: ignore[arg-type] # test shorthand
    found = chain.pool(question, vector, store, settings=settings, calibration=FLAT, scope=scope)
    return [c.id.removeprefix("turn:") for c in found]


def test_the_pool_is_the_nearest_turns(store: Store) -> None:
    say(store, "S", "Ana: red fish", "Ana: red fish swim", "Ana: rain")
    assert pooled(store, "red fish", pool=2) == ["S:0", "S:1"]
    assert pooled(store, "red fish", pool=20) == ["S:0", "S:1", "S:2"]


def test_who_is_asked_for_decides_whose_turns_are_read(store: Store) -> None:
    say(store, "S", "Ana: red fish", "Ben: Ana has red fish", "Ben: red fish", "Ana: rain", "Ben: snow")
    # By Ana, or about her.
    assert sorted(pooled(store, "Does Ana like red fish?")) == ["S:0", "S:1", "S:3"]
    # Both, or neither of two: as many of each.
    assert sorted(pooled(store, "Do Ana and Ben like red fish?", pool=1)) == ["S:0", "S:1"]
    assert sorted(pooled(store, "Who likes red fish?", pool=1)) == ["S:0", "S:2"]
    assert pooled(store, "red fish", pool=1, speakers=False) == ["S:0"]


def test_the_best_sessions_are_chosen_first_by_their_mean(store: Store) -> None:
    say(store, "mixed", "Ana: red fish", "Ana: rain", "Ana: snow", "Ana: hail")
    say(store, "about it", "Ana: red fish swim", "Ana: red fish sleep")
    assert pooled(store, "red fish", pool=1) == ["mixed:0"]
    assert pooled(store, "red fish", sessions=1) == ["about it:0", "about it:1"]


def test_the_pool_stays_in_its_scope(store: Store) -> None:
    say(store, "old", "Ana: red fish", at=datetime(2023, 1, 1))
    say(store, "new", "Ana: red fish swim", at=datetime(2024, 1, 1))
    assert pooled(store, "red fish", Scope(said=TimeRange(until=date(2023, 6, 1)))) == ["old:0"]
    assert pooled(store, "red fish", Scope(speakers=("Ben",))) == []


# --- over candidates -------------------------------------------------------------------------------------------------


def linked(
    store: Store, candidates: Sequence[Candidate], question: str, record: Recorder, *, keep_rest: bool
) -> tuple[list[tuple[str, int]], tuple[Chain, ...]]:
    (vector,) = EMBEDDER.embed([question])
    settings = ChainSettings(chains=1, context="mean", beta=0.4)
    found, chains = chain.link(
        candidates,
        vector,
        store,
        embed=EMBEDDER.embed,
        settings=settings,
        calibration=FLAT,
        keep_rest=keep_rest,
        record=record,
    )
    return [(c.id, c.chain) for c in found], chains


def note(store: Store, record: Record) -> None:
    segment = Segment(record.session, min(record.turns), max(record.turns), "session_flush", 10, 1, 1.0)
    with store.transaction() as tx:
        tx.add_segments([segment])
        missing = store.missing_nodes(segment, [record])
        rows = EMBEDDER.embed([text for _, text in missing])
        nodes = {node.id: row for (node, _), row in zip(missing, rows, strict=True)}
        tx.add_encoding(segment, [record], EMBEDDER.embed([record.embedded_text]), nodes, "")


def item(identifier: str, kind: str, *turns: int) -> Candidate:
    return Candidate(identifier, kind, identifier, "S", turns, 0.5)  # type: ignore[arg-type] # test shorthand


def test_records_turns_and_windows_are_linked_by_their_stored_vectors(store: Store) -> None:
    say(store, "S", "Ana: red fish", "Ana: red boat", "Ben: rain")
    record = Record("S", "red fish", "fact", (0,), "segment:S:0-0")
    note(store, record)
    candidates = [
        item("turn:S:2", "turn", 2),
        item(record.id, "record", 0),
        item("window:S:0-1", "window", 0, 1),
    ]
    order, (found,) = linked(store, candidates, "red fish", Recorder(), keep_rest=True)
    assert order == [(record.id, 1), ("window:S:0-1", 1), ("turn:S:2", 0)]
    # "fact red fish" to "red fish" is 2 / sqrt 6; the window is the mean of "ana red fish" and "ana red boat", whose
    # sum (2, 2, 1, 1) / sqrt 3 has the length sqrt(10 / 3): to the question 3 / sqrt 20, to the record 3 / sqrt 30.
    assert [link.relevance for link in found.links] == pytest.approx([2 / 6**0.5, 3 / 20**0.5])
    assert found.links[1].consistency == pytest.approx(3 / 30**0.5)
    assert linked(store, candidates, "red fish", Recorder(), keep_rest=False)[0] == order[:2]


def test_what_was_forgotten_meanwhile_joins_no_chain(store: Store) -> None:
    say(store, "S", "Ana: red fish", "Ana: red boat")
    candidates = [item("turn:S:0", "turn", 0), item("turn:S:1", "turn", 1)]
    store.forget(Selection(turns=("turn:S:0",)))
    assert linked(store, candidates, "red fish", Recorder(), keep_rest=False)[0] == [("turn:S:1", 1)]
    with pytest.raises(KeyError):
        store.vectors("turns", ["turn:S:0"])


def test_the_store_gives_vectors_by_id_in_the_order_asked_for(store: Store) -> None:
    say(store, "S", "Ana: red fish", "Ana: red boat")
    rows = store.vectors("turns", ["turn:S:1", "turn:S:0"])
    assert np.array_equal(rows, EMBEDDER.embed(["Ana: red boat", "Ana: red fish"]))
    assert store.vectors("turns", []).shape == (0, EMBEDDER.dimension)
    day = DateSpan(date(2023, 7, 2), date(2023, 7, 2), "day")
    record = Record("S", "red fish", "fact", (0,), "segment:S:0-0", ("Ana",), temporal=Temporal(t_ref=day))
    note(store, record)
    assert np.array_equal(store.vectors("records", [record.id]), EMBEDDER.embed(["fact: red fish"]))
    entity, dated = store.nodes("entity")[0], store.nodes("temporal")[0]
    assert np.array_equal(store.vectors("nodes", [entity.id]), EMBEDDER.embed([entity.label]))
    with pytest.raises(KeyError):  # dates have no vector
        store.vectors("nodes", [dated.id])
    for field, unknown in (("turns", "turn:S:2"), ("turns", "nonsense"), ("records", "record:x"), ("nodes", "node:x")):
        with pytest.raises(KeyError):
            store.vectors(field, [unknown])  # type: ignore[arg-type] # a tuple of literals


# --- the modes -------------------------------------------------------------------------------------------------------

TALK = (
    ("Ana", "I signed up for a pottery class in Porto"),
    ("Ben", "My sister Clara teaches the pottery class in Porto"),
    ("Ana", "Clara also plays the piano"),
    ("Ben", "It rains today"),
)


def opened(home: Path, mode: Mode, **changed: object) -> Memory:
    recall = RecallSettings(mode=mode, **changed)  # type: ignore[arg-type] # test shorthand
    embedder = HashEmbedder(4096, calibration=FLAT)
    return Memory.open("ana", home=home, llm=None, embedder=embedder, reranker=None, settings=Settings(recall=recall))


def talk() -> list[Message]:
    return [Message(text, speaker=name, session="one", ref=str(i)) for i, (name, text) in enumerate(TALK)]


def test_the_chain_mode_needs_turns_alone(tmp_path: Path) -> None:
    with opened(tmp_path, "chain") as memory:
        memory.remember(talk(), encode=False)
        found = memory.recall("Who signed up for a pottery class?")
    assert found.plan.source == "none"
    assert [e.kind for e in found.evidence] == ["turn"] * len(found.evidence)
    assert found.evidence[0].refs == ("0",)
    joined = dict.fromkeys(link.id for c in found.chains for link in c.links)
    assert [e.id for e in found.evidence] == list(joined)
    assert [e.chain for e in found.evidence] == sorted(e.chain for e in found.evidence)
    assert found.evidence[0].chain == 1


@pytest.mark.parametrize("mode", ["chain", "lychee+chain"])
def test_the_same_question_grows_the_same_chains(tmp_path: Path, mode: Mode) -> None:
    with opened(tmp_path, mode) as memory:
        memory.remember(talk())
        memory.flush()
        assert memory.recall("pottery class in Porto") == memory.recall("pottery class in Porto")


def test_chains_over_the_selection_lose_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path, "lychee") as memory:
        memory.remember(talk())
        memory.flush()
        plain = memory.recall("pottery class in Porto", k=20)
    with opened(tmp_path, "lychee+chain") as memory:
        found = memory.recall("pottery class in Porto", k=20)
    assert {e.id for e in found.evidence} == {e.id for e in plain.evidence}
    numbers = [e.chain for e in found.evidence]
    assert numbers[0] == 1
    assert 0 not in numbers[: sum(n > 0 for n in numbers)]


@pytest.mark.parametrize("mode", ["chain", "lychee+chain"])
def test_k_and_the_budget_cut_chains_from_their_end(tmp_path: Path, mode: Mode) -> None:
    with opened(tmp_path, mode) as memory:
        memory.remember(talk())
        memory.flush()
        whole = memory.recall("pottery class in Porto").evidence
        assert memory.recall("pottery class in Porto", k=1).evidence == whole[:1]
    with opened(tmp_path, mode, evidence_tokens=1) as memory:
        assert len(memory.recall("pottery class in Porto").evidence) == 1


@pytest.mark.parametrize("mode", ["chain", "lychee+chain"])
@pytest.mark.parametrize("turns", [0, 1])
def test_chains_of_nothing_and_of_one_turn(tmp_path: Path, mode: Mode, turns: int) -> None:
    with opened(tmp_path, mode) as memory:
        memory.remember(talk()[:turns])
        found = memory.recall("pottery class", explain=True)
    assert len(found.evidence) == len(found.chains) == turns


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(BadInput, match="mode 'chains' is unknown"):
        RecallSettings(mode="chains")  # type: ignore[arg-type] # the mistake is the point

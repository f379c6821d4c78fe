"""Selection: every step on values small enough to work out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest

from lychee_local import rank
from lychee_local.backends.fake import OverlapReranker
from lychee_local.settings import RecallSettings
from lychee_local.types import Candidate
from lychee_local.wording import plan_without

PLAN = plan_without("red fish?")


def record(name: str, field_score: float = 0.5, *, text: str = "", score: float = 0.0, routes: str = "r1") -> Candidate:
    return Candidate(
        name, "record", text or name, f"s-{name}", (0,), field_score, score=score, routes=tuple(routes.split())
    )


def raw(name: str, field_score: float = 0.5, *, score: float = 0.0, routes: str = "r1") -> Candidate:
    return replace(record(name, field_score, score=score, routes=routes), kind="turn")


def ids(candidates: tuple[Candidate, ...]) -> list[str]:
    return [c.id for c in candidates]


def test_route_score_without_a_reranker_is_the_field_score() -> None:
    matched = replace(record("b", 0.48), similarity=0.5, queries=("1", "2", "3", "4"))
    scored = rank.route_scores((matched, record("a", 0.5)))
    assert [(c.id, c.score) for c in scored] == [("a", 0.5), ("b", 0.48)]


def test_route_score_with_relevance_adds_the_signals_and_stays_in_range() -> None:
    matched = replace(record("a", 0.9), relevance=0.2, similarity=0.5, queries=("1", "2", "3", "4"))
    scored = rank.route_scores((matched, replace(record("b", 0.1), relevance=0.999)))
    assert [(c.id, c.score) for c in scored] == [("b", 1.0), ("a", pytest.approx(0.2 + 0.01 + 0.03 * 0.5 + 0.03))]


def test_fusion_weighs_the_best_score_and_the_ranks() -> None:
    lists = {
        "r1": (record("a", score=0.8), record("b", score=0.6)),
        "r2": (record("b", score=0.7, routes="r2"), record("c", score=0.5, routes="r2")),
    }
    fused = rank.fuse(lists, depth=10)
    top = 1 / 62 + 1 / 61  # b: second in r1, first in r2
    expected = {
        "a": 0.82 * 0.8 + 0.18 * (1 / 61) / top,
        "b": 0.82 * 0.7 + 0.18,
        "c": 0.82 * 0.5 + 0.18 * (1 / 62) / top,
    }
    assert {c.id: c.score for c in fused} == pytest.approx(expected)
    assert ids(fused) == ["b", "a", "c"]
    assert set(fused[0].routes) == {"r1", "r2"}


def test_fusion_reads_each_route_to_its_depth_and_nothing_from_none() -> None:
    assert ids(rank.fuse({"r1": (record("a"), record("b"))}, depth=1)) == ["a"]
    assert rank.fuse({}, depth=5) == ()


def test_coverage_takes_each_routes_share_in_plan_order() -> None:
    lists = {
        "r1": tuple(record(f"a{i}", score=0.9 - i / 100) for i in range(6)),
        "r2": tuple(record(f"b{i}", score=0.2 - i / 100, routes="r2") for i in range(6)),
    }
    fused = rank.fuse(lists, depth=10)
    assert ids(rank.cover(fused, lists, 6)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert ids(rank.cover(fused, lists, 15)) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert ids(rank.cover(fused, lists, 1)) == ["a0"]


def test_diversity_prefers_something_new_over_a_near_copy() -> None:
    first = record("first", text="the cat sat on the mat", score=0.9)
    copy = replace(record("copy", text="the cat sat on the mat", score=0.8), session="s-first")
    other = record("other", text="rain in Rome", score=0.75)
    low = record("low", text="nothing", score=0.1)
    pool = (first, copy, other, low)
    assert ids(rank.diversify((first,), pool, 2)) == ["first", "other"]
    assert ids(rank.diversify((first,), pool, 2, weight_signature=0.0)) == ["first", "copy"]
    assert ids(rank.diversify((), pool, 9)) == ["first", "copy", "other", "low"]


def test_diversity_chooses_what_the_formula_of_the_method_chooses() -> None:
    """Against 5.10 spelled out pair by pair, on candidates that share sessions, turns, words and provenance."""
    pick = np.random.default_rng(5)
    names = [f"n{i}" for i in range(6)]

    def some(most: int) -> tuple[str, ...]:
        return tuple(pick.choice(names, size=pick.integers(0, most), replace=False).tolist())

    pool = [
        Candidate(
            f"c{i:02}", "record", " ".join(some(6)), str(pick.choice(["", "s1", "s2"])), (int(pick.integers(3)),), 0.5,
            score=float(pick.integers(1, 20)) / 20, entities=some(4), queries=some(3), nodes=some(4),
        )
        for i in range(40)
    ]  # fmt: skip
    fused = sorted(pool, key=lambda c: (-c.score, c.id))

    def likeness(a: Candidate, b: Candidate) -> float:
        total = 0.15 if a.session and a.session == b.session else 0.0
        for weight, one, other in (
            (0.20, a.entities, b.entities),
            (0.15, a.queries, b.queries),
            (0.15, a.nodes, b.nodes),
            (0.10, [(a.session, t) for t in a.turns], [(b.session, t) for t in b.turns]),
            (0.25, a.text.split(), b.text.split()),
        ):
            if one and other:
                total += weight * len({*one} & {*other}) / len({*one} | {*other})
        return min(1.0, total)

    for k, picks in ((12, fused[:3]), (10, [fused[20], fused[0]]), (40, []), (1, [])):
        left = [c for c in fused[: 4 * k] if c not in picks]
        low, high = left[-1].score, left[0].score
        chosen = list(picks)
        while left and len(chosen) < k:
            gains = [
                0.75 * (c.score - low) / max(high - low, 1e-9)
                - 0.25 * max((likeness(c, p) for p in chosen), default=0.0)
                for c in left
            ]
            chosen.append(left.pop(gains.index(max(gains))))
        expected = [c.id for c in sorted(chosen, key=lambda c: (-c.score, c.id))]
        assert ids(rank.diversify(picks, fused, k)) == expected


def test_raw_items_are_bounded_where_records_exist() -> None:
    records = tuple(record(f"m{i}", score=0.80 - i / 100) for i in range(10))
    raws = tuple(raw(f"t{i}", score=0.79 - i / 100) for i in range(5))
    fused = (*records, *raws)
    kept = rank.budget((*records[:2], *raws), fused, 7, ratio=0.4, floor=0.5)
    assert [i for i in ids(kept) if i.startswith("t")] == ["t0", "t1", "t2"]  # round(7 * 0.4) = 3
    assert [i for i in ids(kept) if i.startswith("m")] == ["m0", "m1", "m2", "m3"]
    assert ids(rank.budget(raws, raws, 5, ratio=0.4, floor=0.9)) == ids(raws)


def test_places_without_records_go_back_to_raw_items() -> None:
    records = (record("m", score=0.8),)
    raws = tuple(raw(f"t{i}", score=0.79 - i / 100) for i in range(5))
    kept = rank.budget((*records, *raws), (*records, *raws), 5, ratio=0.4, floor=0.5)
    assert ids(kept) == ["m", "t0", "t1", "t2", "t3"]


def test_a_weak_raw_item_stays_only_where_it_alone_serves_a_route() -> None:
    records = (record("m", score=0.9),)
    weak, alone = raw("weak", score=0.1), raw("alone", score=0.1, routes="r2")
    kept = rank.budget((*records, weak, alone), (*records, weak, alone), 5, ratio=0.4, floor=0.72)
    assert ids(kept) == ["m", "alone"]


def test_the_reranker_orders_all_routes_in_one_call() -> None:
    routes = {"r1": (record("a", text="blue bird"),), "r2": (record("b", 0.1, text="red fish"),)}
    chosen, notes = rank.select(PLAN, routes, OverlapReranker(), k=2, settings=RecallSettings())
    assert ids(chosen) == ["b", "a"]
    assert notes == ()
    assert chosen[0].relevance == pytest.approx(2 / 3)  # of "question", "red", "fish"


@dataclass(frozen=True)
class Broken:
    """A cross-encoder whose numbers have gone bad."""

    value: float
    name: str = "broken"

    def score(self, question: str, passages: list[str]) -> npt.NDArray[np.float32]:
        return np.full(len(passages), self.value, dtype=np.float32)


def test_a_reranker_without_numbers_loses_nothing_and_is_named() -> None:
    routes = {"r1": (record("a", 0.5), record("b", 0.4))}
    plain, no_reranker = rank.select(PLAN, routes, None, k=2, settings=RecallSettings())
    broken, notes = rank.select(PLAN, routes, Broken(float("nan")), k=2, settings=RecallSettings())  # type: ignore[arg-type]  # list is a Sequence
    assert broken == plain
    assert "unusable scores" in notes[0]
    assert "no reranker" in no_reranker[0]


def test_logits_of_a_reranker_become_probabilities() -> None:
    routes, _ = rank.rerank(PLAN, {"r1": (record("a"),)}, Broken(-2.0), limit=5)  # type: ignore[arg-type]  # as above
    assert routes["r1"][0].relevance == pytest.approx(1 / (1 + np.exp(2.0)))


def test_the_rerank_pool_holds_the_head_and_every_channel() -> None:
    strong = tuple(replace(record(f"m{i:03}", 0.9 - i / 1000), channels=("records",)) for i in range(200))
    weak = replace(raw("t", 0.1), channels=("turns",))
    pool = rank.rerank_pool({"r1": (*strong, weak)}, 100)
    assert len(pool) == 100
    assert "t" in ids(pool)
    assert ids(pool)[:50] == ids(strong[:50])


def test_without_selection_the_field_score_alone_decides() -> None:
    routes = {"r1": (record("a", 0.5), record("b", 0.7)), "r2": (record("a", 0.6, routes="r2"),)}
    chosen, notes = rank.select(PLAN, routes, OverlapReranker(), k=2, settings=RecallSettings(selection="none"))
    assert [(c.id, c.score) for c in chosen] == [("b", 0.7), ("a", 0.6)]
    assert notes == ()


def test_the_token_budget_keeps_the_best_and_skips_what_does_not_fit() -> None:
    long, short = record("a", text="word " * 100), record("b", text="word")
    assert ids(rank.within((long, short), 20)) == ["a"]  # the first always stays
    assert ids(rank.within((short, long, replace(short, id="c")), 30)) == ["b", "c"]  # 13 tokens each
    assert ids(rank.within((long, short), None)) == ["a", "b"]


def test_nothing_recalled_is_nothing_selected() -> None:
    for reranker in (None, OverlapReranker()):
        assert rank.select(PLAN, {"r1": ()}, reranker, k=5, settings=RecallSettings())[0] == ()


def test_equal_scores_are_ordered_by_id() -> None:
    routes = {"r1": tuple(record(name, 0.5) for name in "cab")}
    assert ids(rank.select(PLAN, routes, None, k=3, settings=RecallSettings())[0]) == ["a", "b", "c"]


def test_the_question_side_labels_what_the_plan_knows_and_repeats_nothing() -> None:
    assert rank.question_side(PLAN) == "Question: red fish?"


def test_facts_stand_behind_and_only_those_of_turns_that_are_not_shown() -> None:
    def of(identifier: str, *turns: int) -> Candidate:
        return Candidate(identifier, "record", "text", "s", turns, 0.5)

    shown = (of("a", 1, 2),)
    assert [c.id for c in rank.beside(shown, (of("b", 2), of("c", 2, 3), of("d", 3), of("e", 4)))] == ["a", "c", "e"]
    assert rank.beside(shown, ()) == shown

"""What a store promises to the rest of the program: round trips, refusals, locks, refresh, damage found."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import store_samples as samples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_samples import EMBEDDER, content, encode, filled, opened, say, segment_of, some_record, some_turns, unit

from lychee_local.errors import BadInput, StoreDamaged, StoreError, StoreLocked, StoreMismatch
from lychee_local.store import EmbedderIdentity, Selection, Store, check, repair, user_folder
from lychee_local.store.disk import OsDisk
from lychee_local.store.draft import remove_catalogue
from lychee_local.store.vectors import Vectors
from lychee_local.types import DateSpan, Record, Scope, Temporal, TimeRange, Turn, Usage

USAGE = Usage("encode", "sample", 100, 20, 50, 1.25)


# --- what goes in comes out ------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        before = content(store)
        assert content(opened(tmp_path, read_only=True)) == before
    with opened(tmp_path) as again:
        assert content(again) == before
    assert check(user_folder(tmp_path, "ana")) == ()


def test_many_are_read_at_once_as_one_by_one(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        turns = [t.id for t in (*store.turns("S2"), *store.turns("S1"))]
        assert store.turns_by_id([*turns, "turn:S1:99", "turn:S9:0", "turn:S1:01", "no id"]) == (
            {i: store.turn(i) for i in turns}
        )
        records = [r.id for r in store.records()][::-1]
        for _ in range(2):  # read, then kept
            found = store.records_by_id([*records, "record:0"])
            assert found == {i: store.record(i) for i in records}
            assert list(found) == records
        nodes = [n.id for n in store.nodes()][::-1]
        assert store.nodes_by_id(["node:entity:0", *nodes]) == {i: store.node(i) for i in nodes}
        short = store.nodes_by_id(nodes, latest=1)
        assert short == {i: store.node(i, latest=1) for i in nodes}
        assert max(len(n.records) for n in short.values()) == 1
        assert not store.turns_by_id([])
        assert not store.records_by_id([])
        assert not store.nodes_by_id([])
        store.forget(Selection(records=(records[0],)))
        store.forget(Selection(turns=(turns[0],)))
        assert list(store.records_by_id(records[:1])) == list(store.turns_by_id(turns[:1])) == []


def test_lookups(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        assert store.sessions() == ("S1", "S2")
        assert store.turns("S1") == tuple(some_turns("S1", 0, 5))
        assert store.turns("unknown") == ()
        assert store.turn("turn:S1:3") == some_turns("S1", 3, 1)[0]
        assert store.turn_by_ref("S2", "D1") == some_turns("S2", 1, 1)[0]
        assert store.turn_by_ref("S2", "D4") is None
        for unknown in ("turn:S1:5", "turn:S3:0", "turn:S1:-1", "turn:S1", "record:S1:0", ""):
            with pytest.raises(KeyError):
                store.turn(unknown)
        assert [s.id for s in store.pending()] == ["segment:S1:3-4"]
        assert [r.text for r in store.segment_records("segment:S1:0-2")] == ["Ana drinks tea", "Ana moved"]
        assert store.segment_records("segment:S1:3-4") == ()
        assert (store.note("S1"), store.note("S2"), store.note("unknown")) == ("Ana", "", "")
        assert store.record(store.records("S2")[0].id).session == "S2"
        with pytest.raises(KeyError):
            store.record("record:unknown")
        assert store.exchange_vectors("S1")[3:].tolist() == unit(*[t.line for t in some_turns("S1", 3, 2)]).tolist()
        assert store.exchange_vectors("unknown").shape == (0, 8)


def test_a_session_may_be_named_anything(tmp_path: Path) -> None:
    names = ["", "a:b:3", "..", "茶 \U0001f375", "x\ny\0z", "\u2028"]
    with opened(tmp_path) as store:
        for name in names:
            say(store, name, 2)
        for name in names:
            assert store.turn(f"turn:{name}:1") == some_turns(name, 1, 1)[0]
    assert list(opened(tmp_path, read_only=True).sessions()) == names


def test_the_same_sentence_twice_is_one_record_with_both_sources(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first, second = (segment_of(say(store, "S", 2)) for _ in range(2))
        encode(store, first, [some_record(first, "Ana drinks tea", turns=(0, 1))])
        later = some_record(second, "Ana drinks tea", turns=(3,), kind="preference", entities=("Ben",))
        encode(store, second, [later, later])
        [held] = store.records()
        assert held == replace(later, turns=(0, 1, 3))
        assert store.segment_records(first.id) == store.segment_records(second.id) == (held,)
        hits = store.search("records", unit("preference: Ana drinks tea"), 5)[0]
        assert [(h.id, round(h.cosine, 6)) for h in hits] == [(held.id, 1.0)]
        by_key = {(n.kind, n.key): n.records for n in store.nodes()}
        assert by_key["entity", "ana"] == by_key["entity", "ben"] == (held.id,)
        assert content(opened(tmp_path, read_only=True)) == content(store)


def test_the_same_sentence_in_two_sessions_is_two_records(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        assert [r.session for r in store.records() if r.text == "Ana drinks tea"] == ["S1", "S2"]


def test_a_segment_can_be_encoded_into_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        segment = segment_of(say(store, "S", 2))
        assert store.missing_nodes(segment, []) == ()
        encode(store, segment, [], note="she is Ana")
        assert (store.pending(), store.records(), store.nodes()) == ((), (), ())
        assert store.note("S") == "she is Ana"
    assert opened(tmp_path, read_only=True).pending() == ()


def test_one_transaction_may_hold_all_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        turns = some_turns("S", 0, 4)
        segments = [segment_of(turns[:2]), segment_of(turns[2:])]
        records = [some_record(s, f"sentence {s.start}") for s in segments]
        with store.transaction() as tx:
            tx.add_turns(turns[:1], unit("0"))
            tx.add_turns(turns[1:], unit("1", "2", "3"))
            tx.add_segments(segments)
            for segment, record in zip(segments, records, strict=True):
                missing = store.missing_nodes(segment, [record])
                labels = {n.id: unit(text)[0] for n, text in missing}
                tx.add_encoding(segment, [record], unit(record.text), labels, "")
        assert store.records() == tuple(records)
        assert len(store.nodes("entity")) == 1
        assert check(store.path) == ()


def test_stats_count(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        stats = store.stats()
        assert (stats.sessions, stats.turns, stats.segments, stats.records) == (2, 7, 3, 3)
        assert stats.nodes == len(store.nodes())
        assert stats.bytes["epoch-000001/turns.rows"] == 7 * 8 * 4
        assert stats.bytes["epoch-000001/turns.jsonl"] == (epoch(store) / "turns.jsonl").stat().st_size


def test_same_input_same_bytes(tmp_path: Path) -> None:
    for home in ("one", "two"):
        filled(tmp_path / home).close()
    folders = [user_folder(tmp_path / home, "ana") for home in ("one", "two")]
    files = [{str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*") if p.is_file()} for f in folders]
    # SQLite numbers its own changes; that the two catalogues say the same is checked where they are compared.
    for name in files[0].keys() - {"lock", "epoch-000001/catalogue.sqlite"}:
        assert files[0][name] == files[1][name], name
    assert {"manifest.json", "epoch-000001/turns.jsonl", "epoch-000001/records.rows"} <= files[0].keys()


# --- search ----------------------------------------------------------------------------------------------------------


def test_a_node_is_found_by_its_label_and_a_frame_by_its_sentences(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(10):
            segment = segment_of(say(store, "S", 1))
            encode(store, segment, [some_record(segment, f"sentence {number}", entities=("Ana",), tags=())])
        [hits] = store.search("nodes", unit("Ana"), 1)
        assert hits[0].id == store.nodes("entity")[0].id
        assert hits[0].cosine == pytest.approx(1.0, abs=1e-6)
        assert len(store.node(hits[0].id).records) == 10
        assert store.node(hits[0].id, latest=2).records == tuple(r.id for r in store.records()[-2:])
        [frame] = store.search("nodes", unit("sentence 3"), 1, node_kinds=["event_frame"])
        assert store.node(frame[0].id).key == "S:3-3"
        assert frame[0].cosine == pytest.approx(1.0, abs=1e-6)


def test_search_among_kinds(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        hits = store.search("nodes", unit("Ana", "x"), 50, node_kinds=["entity", "event_frame"])
        for found in hits:
            kinds = sorted(store.node(h.id).kind for h in found)
            assert kinds == ["entity", "entity", "event_frame", "event_frame"]
        everything = store.search("nodes", unit("Ana"), 500)[0]
        assert len(everything) == len([n for n in store.nodes() if n.kind != "temporal"])
        assert store.search("nodes", unit("Ana"), 5, node_kinds=["temporal"]) == [[]]
        assert store.search("nodes", unit("Ana"), 5, node_kinds=[]) == [[]]
        assert [n.key for n in store.temporal_nodes(TimeRange())] == ["month:2023-05", "day:2023-05-08"]


@pytest.mark.parametrize(
    ("when", "found"),
    [
        (TimeRange(date(2023, 5, 3), date(2023, 5, 3)), ["year", "month", "interval"]),
        (TimeRange(date(2023, 5, 8), date(2023, 5, 8)), ["year", "month", "day"]),
        (TimeRange(None, date(2022, 12, 31)), []),
        (TimeRange(date(2023, 12, 31), None), ["year"]),
        (TimeRange(), ["year", "month", "interval", "day"]),
    ],
)
def test_dates_that_overlap(tmp_path: Path, when: TimeRange, found: list[str]) -> None:
    with opened(tmp_path) as store:
        segment = segment_of(say(store, "S", 1))
        spans = (
            DateSpan(date(2023, 5, 8), date(2023, 5, 8), "day"),
            DateSpan(date(2023, 5, 2), date(2023, 5, 7), "interval"),
            DateSpan(date(2023, 1, 1), date(2023, 12, 31), "year"),
        )
        encode(store, segment, [some_record(segment, str(span), temporal=Temporal(span)) for span in spans])
        assert [n.when.precision for n in store.temporal_nodes(when) if n.when is not None] == found


def test_a_scope_limits_vectors_and_words(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        every = Scope()
        assert store.search("turns", unit("a"), 50, scope=every) == store.search("turns", unit("a"), 50)
        in_s2 = Scope(sessions=("S2",))
        [hits] = store.search("turns", unit("a"), 50, scope=in_s2)
        assert sorted(h.id for h in hits) == ["turn:S2:0", "turn:S2:1"]
        assert sorted(i for i, _ in store.words("turns", "said", 50, scope=in_s2)) == ["turn:S2:0", "turn:S2:1"]
        events = Scope(kinds=("event",))
        [hits] = store.search("records", unit("a"), 50, scope=events)
        assert [store.record(h.id).text for h in hits] == ["Ana moved"]
        assert store.words("records", "tea", 50, scope=events) == []
        day = date(2023, 5, 8)
        for said, count in (
            (TimeRange(until=day), 7),
            (TimeRange(since=day), 7),
            (TimeRange(until=date(2023, 5, 7)), 0),
        ):
            assert len(store.search("turns", unit("a"), 50, scope=Scope(said=said))[0]) == count
        assert store.search("turns", unit("a"), 5, scope=Scope(speakers=("Ben",))) == [[]]
        assert store.search("turns", unit("a"), 5, scope=Scope(roles=("assistant",))) == [[]]
        with pytest.raises(BadInput, match="not among nodes"):
            store.search("nodes", unit("a"), 5, scope=every)


def test_an_encoding_is_replaced_in_one_commit(tmp_path: Path) -> None:
    with filled(tmp_path, exact_below=4) as store:
        [segment, _] = store.segments("S1")
        before = {n.id for n in store.nodes()}
        records = [some_record(segment, "Ana drinks tea"), some_record(segment, "Ana went to Rome", entities=("Rome",))]
        missing = store.missing_nodes(segment, records, withdrawn=True)
        assert [n.label for n, _ in missing] == ["Rome", "Rome: Tea", "Rome: fact", "S1:0-2"]
        with store.transaction() as tx:
            tx.withdraw_encoding(segment)
            rows, labels = unit(*[r.embedded_text for r in records]), unit(*[text for _, text in missing])
            tx.add_encoding(segment, records, rows, dict(zip([n.id for n, _ in missing], labels, strict=True)), "")
        assert [r.text for r in store.records("S1")] == ["Ana drinks tea", "Ana went to Rome"]
        assert store.words("records", "moved", 5) == []
        assert "Ana moved" not in {store.record(h.id).text for h in store.search("records", unit("x"), 9)[0]}
        assert {n.label for n in store.nodes()} >= {"Rome"}
        assert {n.key for n in store.nodes("topic")} == {"tea", "fact"}
        [frame] = store.search("nodes", unit("Ana drinks tea\nAna went to Rome"), 1)
        assert frame[0].cosine == pytest.approx(1.0, abs=1e-6)
        assert before - {n.id for n in store.nodes()}  # "event" points to nothing any more
        after = content(store)
        with pytest.raises(BadInput, match="no encoding"), store.transaction() as tx:
            tx.withdraw_encoding(store.pending()[0])
    remove_catalogue(OsDisk(), tmp_path / "users" / store.path.name / "epoch-000001")
    assert content(opened(tmp_path, exact_below=4, read_only=True)) == after


@pytest.mark.parametrize(
    ("field", "queries", "k"),
    [
        ("turns", unit("a", dimension=9), 3),
        ("turns", np.full((1, 8), np.nan, dtype=np.float32), 3),
        ("turns", np.zeros((1, 8), dtype=np.float32), 3),
        ("turns", unit("a")[0], 3),
        ("turns", unit("a"), 0),
        ("words", unit("a"), 3),
    ],
)
def test_unusable_searches(tmp_path: Path, field: str, queries: Vectors, k: int) -> None:
    with filled(tmp_path) as store, pytest.raises(BadInput):
        store.search(field, queries, k)  # type: ignore[arg-type]  # a wrong field is one of the cases


def test_an_empty_store_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for field in ("turns", "records", "nodes"):
            assert store.search(field, unit("a", "b"), 3) == [[], []]


# --- refusals --------------------------------------------------------------------------------------------------------


def epoch(store: Store) -> Path:
    [folder] = store.path.glob("epoch-*")
    return folder


def snapshot(store: Store) -> dict[str, bytes]:
    """Every byte that counts: the catalogue is derived, and its write-ahead log may or may not be merged."""
    found = {str(p.relative_to(store.path)): p for p in store.path.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in found.items() if "catalogue" not in name}


def unchanged(store: Store, files: dict[str, bytes]) -> bool:
    return snapshot(store) == files


TURN = Turn("S1", 5, "one more")


@pytest.mark.parametrize(
    ("turns", "vectors"),
    [
        ([replace(TURN, index=6)], unit("a")),
        ([replace(TURN, index=4)], unit("a")),
        ([TURN, TURN], unit("a", "b")),
        ([replace(TURN, ref="D0")], unit("a")),
        ([replace(TURN, ref="x"), replace(TURN, index=6, ref="x")], unit("a", "b")),
        ([replace(TURN, text="half \ud83d of a pair")], unit("a")),
        ([replace(TURN, speaker="\udc80")], unit("a")),
        ([TURN], unit("a", "b")),
        ([TURN], unit("a", dimension=9)),
        ([TURN], np.zeros((1, 8), dtype=np.float32)),
        ([TURN], np.full((1, 8), np.nan, dtype=np.float32)),
        ([], unit("a")),
    ],
)
def test_unusable_turns_change_nothing(tmp_path: Path, turns: list[Turn], vectors: Vectors) -> None:
    with filled(tmp_path) as store:
        files, before = snapshot(store), content(store)
        with pytest.raises(BadInput):
            add_after_a_good_turn(store, turns, vectors)
        assert content(store) == before
        assert unchanged(store, files)
        say(store, "S1", 1)


def add_after_a_good_turn(store: Store, turns: list[Turn], vectors: Vectors) -> None:
    with store.transaction() as tx:
        tx.add_turns([Turn("S3", 0, "fine")], unit("fine"))
        tx.add_turns(turns, vectors)


def test_unusable_encodings_change_nothing(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        files = snapshot(store)
        [segment] = store.pending()
        done = store.segments()[0]
        good = some_record(segment, "Ana sings", turns=(3,))
        labels = {n.id: unit(text)[0] for n, text in store.missing_nodes(segment, [good])}
        rows = unit("a")
        for bad_segment, records, vectors, node_vectors in [
            (done, [some_record(done, "again")], rows, labels),
            (replace(segment, end=9), [], unit(), {}),
            (segment, [replace(good, session="S2")], rows, labels),
            (segment, [replace(good, turns=(5,))], rows, labels),
            (segment, [replace(good, turns=(-1,))], rows, labels),
            (segment, [good], unit("a", "b"), labels),
            (segment, [good], rows, {}),
            (segment, [good], rows, {i: np.zeros(8, dtype=np.float32) for i in labels}),
            (segment, [replace(good, text="\ud800")], rows, labels),
        ]:
            with pytest.raises(BadInput), store.transaction() as tx:
                tx.add_encoding(bad_segment, records, vectors, node_vectors, "")
        with pytest.raises(BadInput, match="stored already"), store.transaction() as tx:
            tx.add_segments([segment])
        with pytest.raises(BadInput, match="not stored"), store.transaction() as tx:
            tx.add_segments([replace(segment, start=5, end=7)])
        decision = replace(store.decisions("S1")[0], signals=replace(samples.SIGNALS, score=float("nan")))
        with pytest.raises(BadInput, match="finite"), store.transaction() as tx:
            tx.add_decisions([decision], unit("a"))
        assert unchanged(store, files)
        encode(store, segment, [good])


def add_and_fail(store: Store, turn: Turn) -> None:
    with store.transaction() as tx:
        tx.add_turns([turn], unit("a"))
        raise ZeroDivisionError


def test_an_error_inside_a_transaction_leaves_nothing(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        files, before = snapshot(store), content(store)
        with pytest.raises(ZeroDivisionError):
            add_and_fail(store, TURN)
        assert content(store) == before
        assert unchanged(store, files)


def test_an_empty_transaction_is_no_commit(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        files = snapshot(store)
        with store.transaction() as tx:
            tx.add_turns([], unit())
            tx.add_decisions([], unit())
            tx.add_segments([])
        assert unchanged(store, files)


def test_transactions_do_not_nest_or_outlive_their_block(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with store.transaction() as outer:
            with pytest.raises(StoreError, match="already"), store.transaction():
                pass
            outer.add_turns(some_turns("S", 0, 1), unit("a"))
        with pytest.raises(StoreError, match="not open"):
            outer.add_turns(some_turns("S", 1, 1), unit("a"))
        assert len(store.turns("S")) == 1


def test_a_read_only_store_is_not_written(tmp_path: Path) -> None:
    filled(tmp_path).close()
    store = opened(tmp_path, read_only=True)
    with pytest.raises(StoreError, match="read-only"), store.transaction():
        pass


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.sessions()
    with pytest.raises(StoreError, match="closed"), store.transaction():
        pass


# --- users and folders -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "user", ["ana", "Ana", "آنا", "アナ", "O'Brien", "ana@example.org", "a" * 200, "con", "-", "..."]
)
def test_any_word_is_a_user(tmp_path: Path, user: str) -> None:
    with opened(tmp_path, user) as store:
        say(store, user, 1)
        assert store.user == user
        assert store.path.parent == tmp_path / "users"
    assert opened(tmp_path, user, read_only=True).sessions() == (user,)


@pytest.mark.parametrize(
    "user", ["", "  ", "\u2003", ".", "..", "../ana", "a/b", "a\\b", "a\0", "a\nb", "\x7f", "a\ud800", "a" * 201]
)
def test_what_is_no_user_name(tmp_path: Path, user: str) -> None:
    with pytest.raises(BadInput, match="user name"):
        opened(tmp_path, user)
    assert list(tmp_path.iterdir()) == []


def test_names_that_look_alike_are_kept_apart(tmp_path: Path) -> None:
    names = ["ana", "Ana", "ANA", "ana-", "ana!", "an a", "an-a", "أنا", "آنا"]
    folders = {user_folder(tmp_path, name) for name in names}
    assert len({f.name.casefold() for f in folders}) == len(names)


def test_two_ways_to_write_an_accent_are_one_user(tmp_path: Path) -> None:
    with opened(tmp_path, "Jose\u0301") as store:
        say(store, "S", 1)
    assert opened(tmp_path, "Jos\u00e9", read_only=True).sessions() == ("S",)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no memory of 'ana'"):
        opened(tmp_path, read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_program(tmp_path: Path) -> None:
    folder = user_folder(tmp_path, "ana")
    folder.mkdir(parents=True)
    (folder / "photo.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"another program: photo\.jpg"):
        opened(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["photo.jpg"]


def test_an_interrupted_first_start_is_taken_up(tmp_path: Path) -> None:
    folder = user_folder(tmp_path, "ana")
    folder.mkdir(parents=True)
    (folder / "lock").write_bytes(b"")
    (folder / "manifest.json.tmp").write_bytes(b"{")
    filled(tmp_path).close()
    assert check(folder) == ()


def test_a_home_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot open"):
        opened(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot open"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(EMBEDDER, name="another"), "name another"),
        (replace(EMBEDDER, digest="00"), "digest 00"),
        (replace(EMBEDDER, dimension=9), "dimension 9"),
    ],
)
def test_another_embedder(tmp_path: Path, other: EmbedderIdentity, said: str) -> None:
    filled(tmp_path).close()
    with pytest.raises(StoreMismatch, match=f"'sample'.*{said}"):
        Store.open(tmp_path, "ana", embedder=other)
    filled(tmp_path, user="ben").close()  # the refused open left no lock behind


def test_the_calibration_it_was_made_with_stays(tmp_path: Path) -> None:
    filled(tmp_path).close()
    newer = replace(EMBEDDER, calibration=replace(EMBEDDER.calibration, surprise_centre=0.35))
    with Store.open(tmp_path, "ana", embedder=newer) as store:
        assert store.embedder == EMBEDDER


def test_a_newer_format(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        manifest = store.path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3}))
    with pytest.raises(StoreMismatch, match="has format 3"):
        opened(tmp_path)
    assert check(manifest.parent)


def test_the_folder_of_another_user(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        path = store.path
    path.rename(user_folder(tmp_path, "ben"))
    with pytest.raises(StoreMismatch, match="the memory of 'ana', not of 'ben'"):
        opened(tmp_path, "ben")


# --- several users of one memory -------------------------------------------------------------------------------------


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        with pytest.raises(StoreLocked, match=f"process {os.getpid()} on "):
            opened(tmp_path)
        say(store, "S1", 1)
    opened(tmp_path).close()


def test_a_second_writer_can_wait(tmp_path: Path) -> None:
    store = filled(tmp_path)
    threading.Timer(0.2, store.close).start()
    with opened(tmp_path, wait_seconds=20) as second:
        assert len(second.sessions()) == 2


def test_the_lock_of_another_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=samples.hold, args=(str(tmp_path), theirs))
    child.start()
    try:
        assert ours.poll(60)
        with pytest.raises(StoreLocked, match=f"process {child.pid} on "):
            opened(tmp_path)
        assert opened(tmp_path, read_only=True).sessions() == ()
        child.kill()
        child.join(20)
        opened(tmp_path).close()
    finally:
        child.kill()


def test_a_fork_does_not_inherit_the_right_to_write(tmp_path: Path) -> None:
    """Parent and child hold the same open lock file; were both to write, one would overwrite the other's commit."""
    with opened(tmp_path) as store:
        say(store, "S1", 1)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                say(store, "S1", 1)
            except StoreError as error:
                os.write(tell, str(error).encode())
            os._exit(0)
        os.close(tell)
        os.waitpid(child, 0)
        assert b"forked" in os.read(told, 1000)
        os.close(told)
        say(store, "S1", 1)
    with opened(tmp_path) as store:
        assert len(store.turns("S1")) == 2


def test_stats_may_be_asked_while_another_thread_commits(tmp_path: Path) -> None:
    with opened(tmp_path) as store, opened(tmp_path, read_only=True) as reader:
        writer = threading.Thread(target=lambda: [say(store, "S1", 1) for _ in range(60)])
        writer.start()
        while writer.is_alive():
            assert reader.stats().bytes["manifest.json"] > 0
        writer.join()


def test_lost_exchange_rows_are_noticed_on_open(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (user_folder(tmp_path, "ana") / "epoch-000001" / "decisions.rows").unlink()
    with pytest.raises(StoreDamaged, match=r"decisions\.rows"):
        opened(tmp_path)


def test_a_reader_follows_a_writer(tmp_path: Path) -> None:
    with filled(tmp_path) as writer:
        reader = opened(tmp_path, read_only=True)
        assert not reader.refresh()
        before = content(reader)
        for step in range(6):
            segment = segment_of(say(writer, f"S{step}", 2))
            encode(writer, segment, [some_record(segment, f"sentence {step}"), some_record(segment, "Ana moved")])
            with reader.snapshot():
                seen = content(reader)
                assert seen == content(writer) != before
                say(writer, "meanwhile", 1)
                assert content(reader) == seen
            before = content(reader)
        assert reader.refresh()
        assert not reader.refresh()
        assert not writer.refresh()


def test_a_reader_follows_files_that_were_written_anew(tmp_path: Path) -> None:
    """As a restored backup does: other lines, not a continuation of those that were read."""
    with filled(tmp_path) as store:
        folder = store.path
    reader = opened(tmp_path, read_only=True)
    with opened(tmp_path / "other") as other:
        for _ in range(9):
            say(other, "S9", 3)
        expected = content(other)
    shutil.rmtree(folder)
    shutil.copytree(user_folder(tmp_path / "other", "ana"), folder)
    assert reader.refresh()
    assert content(reader) == expected


def test_threads_share_a_store(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                segment = segment_of(say(store, f"S{number}", 2))
                encode(store, segment, [some_record(segment, f"sentence {number}")])
                store.search("nodes", unit("Ana"), 5)
                store.add_usage(USAGE)
        except (StoreError, BadInput, KeyError, ValueError) as error:
            errors.append(error)

    with opened(tmp_path) as store:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert sorted(len(store.turns(s)) for s in store.sessions()) == [20] * 4
        assert store.usage() == (USAGE,) * 40
        assert content(opened(tmp_path, read_only=True)) == content(store)


# --- usage -----------------------------------------------------------------------------------------------------------


def test_usage_is_logged_by_readers_and_writers(tmp_path: Path) -> None:
    with filled(tmp_path) as writer:
        reader = opened(tmp_path, read_only=True)
        plan = replace(USAGE, purpose="plan")
        reader.add_usage(plan)
        writer.add_usage(USAGE)
        assert reader.usage() == writer.usage() == (plan, USAGE)
    assert check(user_folder(tmp_path, "ana")) == ()


def test_a_half_written_usage_line_is_dropped(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.add_usage(USAGE)
        with (store.path / "usage.jsonl").open("ab") as file:
            file.write(b'0badcafe {"half')
        assert store.usage() == (USAGE,)
        store.add_usage(USAGE)
        assert store.usage() == (USAGE, USAGE)


# --- what is derived -------------------------------------------------------------------------------------------------


def test_graphs_are_saved_on_close_and_may_be_lost(tmp_path: Path) -> None:
    with opened(tmp_path, exact_below=20) as store:
        for _ in range(20):
            segment = segment_of(say(store, "S", 4))
            encode(store, segment, [some_record(segment, f"{segment.id} {i}", entities=(f"E{i}",)) for i in range(4)])
            store.search("nodes", unit("Ana"), 5)
        before = content(store)
    folder = user_folder(tmp_path, "ana") / "epoch-000001"
    graphs = sorted(p.name for p in folder.glob("*.hnsw*"))
    assert graphs == [f"{n}.hnsw{end}" for n in ("nodes", "records", "turns") for end in ("", ".side")]
    assert check(folder.parent) == ()
    assert content(opened(tmp_path, exact_below=20, read_only=True)) == before
    (folder / "turns.hnsw").write_bytes(b"\xff" * 4096)
    (folder / "records.hnsw").unlink()
    (folder / "nodes.hnsw.side").unlink()
    with opened(tmp_path, exact_below=20) as store:
        assert content(store) == before
        for _ in range(10):
            say(store, "S", 4)
        before = content(store)
    assert content(opened(tmp_path, exact_below=20, read_only=True)) == before


# --- a full disk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: the system's own error, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_a_usable_store(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        before, files = content(store), snapshot(store)
        for size in (0, 100, 700, 1500):
            with largest_file(size), pytest.raises(StoreError, match="may not get larger here"):
                say(store, "S1", 30)
            assert content(store) == before
            assert {**snapshot(store), "manifest.json.tmp": b""} == {**files, "manifest.json.tmp": b""}
        with largest_file(0), pytest.raises(StoreError, match="may not get larger here"):
            store.add_usage(USAGE)
        assert store.usage() == ()
        say(store, "S1", 30)
        after = content(store)
    assert content(opened(tmp_path, read_only=True)) == after
    assert check(user_folder(tmp_path, "ana")) == ()


# --- against a model -------------------------------------------------------------------------------------------------


class AgainstModel(RuleBasedStateMachine):
    """Any order of writing, failing, reopening and catching up equals a model made of plain lists and arithmetic.

    The graph threshold is low, so graphs, tails, moved nodes and snapshots take part."""

    home: Path

    def __init__(self) -> None:
        super().__init__()
        self.home = self.new_home()
        self.store = opened(self.home, exact_below=6)
        self.reader = opened(self.home, exact_below=6, read_only=True)
        self.turns: list[tuple[str, Vectors]] = []
        self.records: dict[str, Record] = {}
        self.rows: list[tuple[str, Vectors]] = []  # of records; one that is said again has two
        self.pending: list[str] = []

    new_home = staticmethod(lambda: Path())

    def teardown(self) -> None:
        self.store.close()
        self.reader.close()

    @rule(session=st.sampled_from(["a", "b"]), count=st.integers(1, 4))
    def say(self, session: str, count: int) -> None:
        turns = say(self.store, session, count)
        self.turns += [(t.id, unit(t.line)[0]) for t in turns]
        self.pending.append(segment_of(turns).id)

    @precondition(lambda self: self.pending)
    @rule(
        texts=st.lists(st.sampled_from(["tea", "rain", "train", "sea"]), max_size=3),
        kind=st.sampled_from(["fact", "event"]),
    )
    def encode(self, texts: list[str], kind: str) -> None:
        [segment] = [s for s in self.store.segments() if s.id == self.pending[0]]
        del self.pending[0]
        records = [some_record(segment, text, kind=kind, entities=(text, "Ana")) for text in texts]
        encode(self.store, segment, records)
        for record in records:
            held = self.records.get(record.id)
            turns = {*record.turns, *(held.turns if held else ())}
            self.records[record.id] = replace(record, turns=tuple(sorted(turns)))
            self.rows.append((record.id, unit(record.embedded_text)[0]))

    @rule()
    def fail(self) -> None:
        with contextlib.suppress(ZeroDivisionError):
            add_and_fail(self.store, some_turns("c", 0, 1)[0])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = opened(self.home, exact_below=6)

    @rule()
    def catch_up(self) -> None:
        self.reader.refresh()
        assert content(self.reader) == content(self.store)

    @invariant()
    def equals_the_model(self) -> None:
        assert {r.id: r for r in self.store.records()} == self.records
        assert [s.id for s in self.store.pending()] == self.pending
        query = unit("query")
        for field, rows in (("turns", self.turns), ("records", self.rows)):
            scored = [(float(row.astype(np.float64) @ query[0].astype(np.float64)), i) for i, row in rows]
            ranked = sorted(scored, key=lambda pair: -pair[0])  # of equal ones, the first stored
            expected = list(dict.fromkeys(i for _, i in ranked))[:5]
            assert [h.id for h in self.store.search(field, query, 5)[0]] == expected  # type: ignore[arg-type]  # str
        for node in self.store.nodes():
            assert set(node.records) <= self.records.keys()


def test_any_sequence_equals_a_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    class Here(AgainstModel):
        new_home = staticmethod(lambda: tmp_path_factory.mktemp("model"))

    case = Here.TestCase
    case.settings = settings(
        max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    case("runTest").runTest()


# --- what does not belong there --------------------------------------------------------------------------------------


def test_nothing_behind_a_link_is_touched(tmp_path: Path) -> None:
    filled(tmp_path).close()
    folder = user_folder(tmp_path, "ana")
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "letter").write_text("kept")
    (folder / "epoch-000007").symlink_to(outside)
    with opened(tmp_path) as store:
        say(store, "S1", 1)
    assert not (folder / "epoch-000007").exists()
    assert (outside / "letter").read_text() == "kept"
    lines = folder / "epoch-000001" / "turns.jsonl"
    lines.rename(outside / "turns.jsonl")
    lines.symlink_to(outside / "turns.jsonl")
    with pytest.raises(StoreDamaged, match="is a link or no file at all"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "usage.jsonl", "epoch-000001/turns.jsonl"])
def test_a_pipe_in_the_place_of_a_file_makes_nobody_wait(tmp_path: Path, name: str) -> None:
    filled(tmp_path).close()
    path = user_folder(tmp_path, "ana") / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(StoreDamaged, match=path.name), opened(tmp_path) as store:
        store.usage()
    assert any(path.name in finding.what for finding in check(user_folder(tmp_path, "ana")))


def test_an_epoch_under_another_name_is_not_cleared_away(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        before, folder = content(store), store.path
    (folder / "epoch-000001").rename(folder / "epoch-000003")
    with pytest.raises(StoreDamaged, match="is missing"):
        opened(tmp_path)
    assert (folder / "epoch-000003" / "turns.jsonl").exists()
    repair(tmp_path, "ana", embedder=EMBEDDER, embed=lambda texts: unit(*texts))
    with opened(tmp_path) as store:
        assert content(store) == before


def test_a_lock_that_could_not_be_taken_is_given_back(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(StoreError):
        opened(tmp_path, "ben")
    filled(tmp_path, "ben").close()


def test_writing_goes_on_once_there_is_room_again(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        for size in (0, 500, 5_000, 20_000):
            with largest_file(size), contextlib.suppress(StoreError):
                say(store, "S1", 40)
        count = len(store.turns("S1"))
        say(store, "S1", 2)
        assert len(store.turns("S1")) == count + 2


def test_an_erasure_that_was_stopped_is_finished(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        store.forget(Selection(turns=("turn:S1:1",)))
        folder = store.path
    needle = b"what was said 1 in S1"
    assert any(needle in p.read_bytes() for p in folder.rglob("*.jsonl"))
    with opened(tmp_path) as store:
        store.erase(Selection(matching=needle.decode()))  # nothing matches any more
        assert not store.finish_erasure()
    assert not any(needle in p.read_bytes() for p in folder.rglob("*") if p.is_file())


def test_the_usage_log_forgets_the_name_of_a_session(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        for session in ("S1", "S2", None):
            store.add_usage(replace(USAGE, session=session))
        store.erase(Selection(session="S2"))
        assert [u.session for u in store.usage()] == ["S1", None, None]
        store.add_usage(USAGE)
        assert len(store.usage()) == 4
    assert check(user_folder(tmp_path, "ana")) == ()

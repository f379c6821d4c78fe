"""Forgetting: what each choice takes, what goes with it, what stays, and the proof that nothing is left."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import store_samples as samples
from store_samples import content, encode, filled, opened, say, segment_of, some_record, unit

from lychee_local import Memory, Message
from lychee_local.backends.fake import HashEmbedder
from lychee_local.errors import BadInput, StoreError
from lychee_local.rank import evidence
from lychee_local.store import Selection, Store, check, user_folder
from lychee_local.types import Candidate, Segment, Temporal, TimeRange, Turn

# --- a small talk ----------------------------------------------------------------------------------------------------

TALK = [
    ("Ana", 1, "I keep bees in Lisbon"),
    ("Ben", 1, "ＭＹ ＢＥＥＳ live in Porto"),
    ("Ana", 2, "The caf\u00e9 sells honey"),
    ("Ben", None, "I drink mead"),
]


def told(home: Path, **options: Any) -> Store:
    """Two sessions with the same talk in them, each turn a segment of its own with one record and a note."""
    store = opened(home, **options)
    for session in ("S1", "S2"):
        for index, (speaker, day, text) in enumerate(TALK):
            at = None if day is None else datetime(2023, 5, day, 12, tzinfo=UTC)
            put(store, [Turn(session, index, f"{text} ({session})", speaker=speaker, at=at, ref=f"D{index}")])
    return store


def put(store: Store, turns: list[Turn]) -> Segment:
    """One commit of turns with their decisions and their segment; another of one record a turn."""
    segment = segment_of(turns)
    with store.transaction() as tx:
        tx.add_turns(turns, unit(*[t.line for t in turns]))
        tx.add_decisions(samples.some_decisions(turns), unit(*[t.line for t in turns]))
        tx.add_segments([segment])
    records = [
        some_record(segment, t.text, turns=(t.index,), entities=(t.name,), tags=(), speaker=t.speaker, said=t.at)
        for t in turns
    ]
    encode(store, segment, records)
    return segment


def left(store: Store) -> list[str]:
    return [t.id.removeprefix("turn:") for s in store.sessions() for t in store.turns(s)]


def all_but(*gone: str) -> list[str]:
    return [f"{s}:{i}" for s in ("S1", "S2") for i in range(4) if f"{s}:{i}" not in gone]


def bytes_of(folder: Path) -> bytes:
    return b"\n".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def rebuilt(store: Store, home: Path) -> dict[str, Any]:
    """What a copy of the memory says whose catalogue was built from its lines alone."""
    shutil.copytree(store.path.parent.parent, home)
    for path in home.rglob("catalogue.sqlite*"):
        path.unlink()
    with opened(home, store.user) as copy:
        return content(copy)


def require_gone(store: Store, turns: Iterable[Turn], records: Iterable[str] = ()) -> None:
    """Neither is any of it found in any way, nor is a byte of it left."""
    turns, records = list(turns), list(records)
    ids = {t.id for t in turns} | set(records)
    for turn in turns:
        with pytest.raises(KeyError):
            store.turn(turn.id)
        assert turn.ref is None or store.turn_by_ref(turn.session, turn.ref) is None
        assert ids.isdisjoint(h.id for h in store.search("turns", unit(turn.line), 1000)[0])
        assert ids.isdisjoint(h.id for h in store.search("records", unit(f"fact: {turn.text}"), 1000)[0])
        assert ids.isdisjoint(i for i, _ in store.words("turns", turn.text, 1000))
        assert ids.isdisjoint(i for i, _ in store.words("records", turn.text, 1000))
    for record in records:
        with pytest.raises(KeyError):
            store.record(record)
    assert all(ids.isdisjoint(node.records) for node in (*store.nodes(), *store.temporal_nodes(TimeRange())))
    held = bytes_of(store.path)
    for turn in turns:
        assert turn.text.encode() not in held
        row = unit(turn.line)[0]
        for kind in ("<f4", "<f2"):
            assert row.astype(kind).tobytes()[:16] not in held
    assert check(store.path) == ()


@pytest.mark.parametrize(
    ("choice", "gone"),
    [
        (Selection(session="S1"), ["S1:0", "S1:1", "S1:2", "S1:3"]),
        (Selection(turns=("turn:S1:1",)), ["S1:1"]),
        (Selection(turns=("turn:S1:3", "turn:S2:0", "turn:S1:3")), ["S1:3", "S2:0"]),
        (Selection(speaker="Ben"), ["S1:1", "S1:3", "S2:1", "S2:3"]),
        (Selection(before=date(2023, 5, 2)), ["S1:0", "S1:1", "S2:0", "S2:1"]),
        (Selection(before=date(2023, 5, 1)), []),
        (Selection(matching="bees"), ["S1:0", "S1:1", "S2:0", "S2:1"]),
        (Selection(matching="BEES"), ["S1:0", "S1:1", "S2:0", "S2:1"]),
        (Selection(matching="ｂｅｅｓ"), ["S1:0", "S1:1", "S2:0", "S2:1"]),
        (Selection(matching="CAFE\u0301"), ["S1:2", "S2:2"]),
        (Selection(matching="(s2)"), ["S2:0", "S2:1", "S2:2", "S2:3"]),
        (Selection(matching="wasps"), []),
        (Selection(session="S1", speaker="Ana"), ["S1:0", "S1:2"]),
        (Selection(session="S2", matching="bees"), ["S2:0", "S2:1"]),
        (Selection(speaker="Ben", matching="bees"), ["S1:1", "S2:1"]),
        (Selection(speaker="Ben", before=date(2024, 1, 1)), ["S1:1", "S2:1"]),
        (Selection(session="S1", speaker="Ana", before=date(2023, 5, 2), matching="lisbon"), ["S1:0"]),
        (Selection(session="S1", speaker="Ana", before=date(2023, 5, 2), matching="porto"), []),
    ],
    ids=str,
)
def test_what_each_choice_takes(tmp_path: Path, choice: Selection, gone: list[str]) -> None:
    with told(tmp_path / "home") as store:
        before = content(store)
        turns = [t for s in ("S1", "S2") for t in store.turns(s) if f"{s}:{t.index}" in gone]
        records = {r.id for r in store.records() if f"{r.session}:{r.turns[0]}" in gone}
        dry = store.forget(choice, dry_run=True)
        assert content(store) == before
        assert dry.dry_run
        receipt = store.erase(choice)
        assert [i.removeprefix("turn:") for i in receipt.turns] == gone == [i.removeprefix("turn:") for i in dry.turns]
        assert set(receipt.records) == records == set(dry.records)
        assert receipt.waiting == dry.waiting == ()
        assert receipt.residues == receipt.elsewhere == ()
        assert receipt.compacted == bool(gone)
        assert left(store) == all_but(*gone)
        require_gone(store, turns, records)
        after = content(store)
        if not gone:
            assert after == before
        assert rebuilt(store, tmp_path / "rebuilt") == after
        assert store.erase(Selection(matching="wasps")).turns == ()
    assert content(opened(tmp_path / "home", read_only=True)) == after


def test_records_alone(tmp_path: Path) -> None:
    with told(tmp_path / "home") as store:
        first, second = store.records("S1")[:2]
        receipt = store.erase(Selection(records=(first.id, second.id)))
        assert (receipt.turns, receipt.records, receipt.waiting) == ((), (first.id, second.id), ())
        assert left(store) == all_but()
        assert [r.turns for r in store.records("S1")] == [(2,), (3,)]
        # The turns still say it: that is no residue, it was not asked for.
        assert receipt.residues == ()
        assert set(receipt.elsewhere) == {first.id, second.id}
        assert store.pending() == ()
        assert store.segment_records(first.segment) == ()
        assert not [n for n in store.nodes("event_frame") if n.key == "S1:0-0"]
        assert store.words("turns", "Lisbon", 5) != []
        assert [store.record(i).session for i, _ in store.words("records", "Lisbon", 5)] == ["S2"]
        row = unit(first.embedded_text)[0].astype("<f4").tobytes()
        assert row not in bytes_of(store.path)
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)
        assert check(store.path) == ()


def test_a_record_that_matches_goes_though_its_turn_says_it_otherwise(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as store:
        segment = segment_of(say(store, "S", 2))
        records = [
            some_record(segment, "Ana is a beekeeper", turns=(0,)),
            some_record(segment, "She likes it", turns=(1,), entities=("The Beekeeper",)),
            some_record(segment, "Ana drinks tea", turns=(1,)),
        ]
        encode(store, segment, records, note="Ana is a beekeeper, it seems")
        receipt = store.erase(Selection(matching="BEEKEEPER"))
        assert (receipt.turns, receipt.waiting) == ((), ())
        assert [r.text for r in store.records()] == ["Ana drinks tea"]
        assert store.note("S") == ""
        assert b"eekeeper" not in bytes_of(store.path)
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)
        assert check(store.path) == ()


def test_before_is_the_calendar_day_of_the_speaker(tmp_path: Path) -> None:
    """23:30 on the first of May in Lima is the second of May in UTC."""
    with opened(tmp_path) as store:
        late = datetime(2023, 5, 1, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
        put(store, [Turn("S", 0, "late", at=late), Turn("S", 1, "later", at=late + timedelta(hours=1))])
        assert store.forget(Selection(before=date(2023, 5, 2))).turns == ("turn:S:0",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing is chosen"),
        ({"turns": ("turn:S1:0",), "session": "S1"}, "exclude each other"),
        ({"turns": ("turn:S1:0",), "records": ("record:x",)}, "exclude each other"),
        ({"matching": ""}, "blank"),
        ({"matching": " \u3000\n"}, "blank"),
        ({"session": "S9"}, "no session 'S9'"),
        ({"speaker": "ana"}, "nobody called 'ana'"),
        ({"turns": ("turn:S1:0", "turn:S1:4")}, "no turn 'turn:S1:4'"),
        ({"turns": ("turn:S1:\u0661",)}, "no turn"),
        ({"turns": ("S1:0",)}, "no turn"),
        ({"turns": ("turn:S1:" + "9" * 30,)}, "no turn"),
        ({"records": ("record:unknown",)}, "no record"),
    ],
)
def test_what_cannot_be_chosen(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with told(tmp_path) as store:
        before = content(store)
        for forget in (store.forget, store.erase):
            with pytest.raises(BadInput, match=message):
                forget(Selection(**fields))
        assert content(store) == before
        assert [p.name for p in store.path.glob("epoch-*")] == ["epoch-000001"]


def test_a_reader_may_ask_what_would_go_and_take_nothing(tmp_path: Path) -> None:
    told(tmp_path).close()
    with opened(tmp_path, read_only=True) as reader:
        assert len(reader.forget(Selection(session="S1"), dry_run=True).turns) == 4
        for refused in (
            lambda: reader.forget(Selection(session="S1")),
            lambda: reader.erase(Selection(session="S1")),
            reader.compact,
            lambda: reader.reindex(samples.EMBEDDER, lambda texts: unit(*texts), exchange_text=lambda x, t: ""),
        ):
            with pytest.raises(StoreError, match="read-only"):
                refused()
        assert left(reader) == all_but()
        assert sorted(p.name for p in reader.path.iterdir()) == ["epoch-000001", "lock", "manifest.json"]
    opened(tmp_path).close()


def test_not_inside_a_transaction(tmp_path: Path) -> None:
    with told(tmp_path) as store:
        with store.transaction() as tx:
            for refused in (lambda: store.forget(Selection(session="S1")), store.compact):
                with pytest.raises(StoreError, match="in a transaction"):
                    refused()
            tx.add_turns([Turn("S1", 4, "still open")], unit("still open"))
        assert len(store.turns("S1")) == 5
        assert store.erase(Selection(session="S1")).residues == ()


# --- what goes with it -----------------------------------------------------------------------------------------------


def test_a_segment_that_lost_a_turn_waits_and_one_that_lost_all_goes(tmp_path: Path) -> None:
    with filled(tmp_path / "home") as store:
        first, last = store.segments("S1")
        receipt = store.forget(Selection(turns=("turn:S1:1", "turn:S1:3", "turn:S1:4")))
        assert receipt.waiting == (first,)
        assert store.segments("S1") == store.pending() == (first,)
        assert not store.holds_segment(last.id)
        assert store.records("S1") == ()
        assert store.segment_records(first.id) == ()
        assert [d.exchange.start for d in store.decisions("S1")] == [0, 2]
        assert store.exchange_vectors("S1").tolist() == unit(*[t.line for t in store.turns("S1")]).tolist()
        assert store.note("S1") == ""
        assert {n.key for n in store.nodes("event_frame")} == {"S2:0-1"}
        assert {r for n in store.nodes() for r in n.records} == {r.id for r in store.records("S2")}
        assert set(receipt.nodes) == {"event", "Ana: event"}  # all others, S2 has as well
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)
        encode(store, first, [some_record(first, "Ana drinks mint", turns=(0, 2))], "mint")
        assert store.pending() == ()
        assert [r.turns for r in store.records("S1")] == [(0, 2)]
        assert store.note("S1") == "mint"
        store.compact()
        assert store.note("S1") == "mint"
        assert check(store.path) == ()


def test_words_that_only_a_forgotten_turn_said_go_from_the_whole_session(tmp_path: Path) -> None:
    """The encoder of a later segment saw them in its reference context."""
    with opened(tmp_path / "home") as store:
        turns = [
            Turn("S", 0, "My passwort is Xyzzy"),
            Turn("S", 1, "I moved to Rome"),
            Turn("S", 2, "I like Rome"),
            Turn("T", 0, "Xyzzy is a magic word"),
        ]
        segments = []
        for turn in turns:
            with store.transaction() as tx:
                tx.add_turns([turn], unit(turn.line))
                tx.add_segments([segment_of([turn])])
            segments.append(segment_of([turn]))
        plain: dict[str, Any] = {"entities": (), "tags": ()}
        encode(store, segments[0], [some_record(segments[0], "A secret", **plain)], "a note on XYZZY")
        encode(store, segments[1], [some_record(segments[1], "She of xyzzy moved to Rome", **plain)], "of Rome")
        by_tag = some_record(segments[2], "She likes Rome", entities=(), tags=("xyzzy",))
        encode(store, segments[2], [by_tag], "Rome")
        encode(store, segments[3], [some_record(segments[3], "Xyzzy is magic", **plain)], "of xyzzy")
        receipt = store.erase(Selection(turns=("turn:S:0",)))
        assert set(receipt.waiting) == {segments[1], segments[2]}
        assert receipt.residues == ()
        assert [r.text for r in store.records()] == ["Xyzzy is magic"]
        assert (store.note("S"), store.note("T")) == ("", "of xyzzy")
        assert bytes_of(store.path).lower().count(b"xyzzy is") >= 2  # another session said it itself
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)


def test_a_word_of_reporting_is_no_trace_of_a_forgotten_turn(tmp_path: Path) -> None:
    """Rules write "Ana said:" before what they quote, and "said" is in many a turn that is forgotten."""
    with opened(tmp_path / "home") as store:
        turns = [Turn("S", 0, "The doctor said it was the shifts"), Turn("S", 1, "We have two kids")]
        segments = []
        for turn in turns:
            with store.transaction() as tx:
                tx.add_turns([turn], unit(turn.line))
                tx.add_segments([segment_of([turn])])
            segments.append(segment_of([turn]))
        plain: dict[str, Any] = {"entities": (), "tags": ()}
        encode(store, segments[1], [some_record(segments[1], 'Ana said: "We have two kids"', **plain)], "Ana said so")
        assert store.erase(Selection(turns=("turn:S:0",))).waiting == ()
        assert len(store.records()) == 1
        assert store.note("S") == "Ana said so"


def test_a_note_stays_that_says_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = segment_of(say(store, "S", 1))
        encode(store, first, [some_record(first, "one")], note="about Rome")
        second = segment_of([Turn("S", 1, "Xyzzy")])
        with store.transaction() as tx:
            tx.add_turns([Turn("S", 1, "Xyzzy")], unit("Xyzzy"))
            tx.add_segments([second])
        encode(store, second, [], note="about Xyzzy")
        assert store.note("S") == "about Xyzzy"
        store.erase(Selection(turns=("turn:S:1",)))
        assert store.note("S") == "about Rome"


def test_an_earlier_wording_of_a_record_counts_as_well(tmp_path: Path) -> None:
    """Both segments gave the sentence; only the first one's names the entity."""
    with opened(tmp_path / "home") as store:
        texts = ["I met Xyzzy", "We had tea", "We had tea again"]
        turns = [Turn("S", i, text) for i, text in enumerate(texts)]
        segments = [segment_of([t]) for t in turns]
        with store.transaction() as tx:
            tx.add_turns(turns, unit(*texts))
            tx.add_segments(segments)
        encode(store, segments[1], [some_record(segments[1], "They had tea", entities=("Xyzzy",), tags=())])
        encode(store, segments[2], [some_record(segments[2], "They had tea", entities=("Ana",), tags=())])
        receipt = store.erase(Selection(turns=("turn:S:0",)))
        assert segments[1] in receipt.waiting
        assert b"Xyzzy" not in bytes_of(store.path)
        assert "Xyzzy" in receipt.nodes
        assert [n.label for n in store.nodes("entity")] == ["Ana"]
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)


def test_a_record_that_rests_on_a_turn_of_another_segment(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as store:
        first, second = (segment_of(say(store, "S", 1)) for _ in range(2))
        encode(store, first, [some_record(first, "said", turns=(0,))])
        encode(store, second, [some_record(second, "said of both", turns=(0, 1))])
        receipt = store.erase(Selection(turns=("turn:S:0",)))
        assert receipt.waiting == (second,)
        assert store.records() == ()
        assert check(store.path) == ()


def test_a_sentence_that_two_segments_gave_keeps_the_other_source(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as store:
        first, second = (segment_of(say(store, "S", 2)) for _ in range(2))
        encode(store, first, [some_record(first, "Ana drinks tea", turns=(0, 1), entities=("ANA", "Leo"))])
        encode(store, second, [some_record(second, "Ana drinks tea", turns=(3,), kind="preference")])
        [both] = store.records()
        assert both.turns == (0, 1, 3)
        receipt = store.erase(Selection(turns=("turn:S:0", "turn:S:1")))
        assert receipt.records == (both.id,)
        assert receipt.elsewhere == (both.id,)
        assert receipt.residues == ()
        [held] = store.records()
        assert (held.id, held.turns, held.kind, held.segment) == (both.id, (3,), "preference", second.id)
        assert [h.id for h in store.search("records", unit(held.embedded_text), 5)[0]] == [both.id]
        assert store.search("records", unit("fact: Ana drinks tea"), 5)[0][0].cosine < 0.99
        assert store.words("records", "tea", 5)[0][0] == both.id
        # Leo was named by the forgotten one alone; so was the spelling ANA.
        assert {n.label for n in store.nodes("entity")} == {"Ana"}
        assert "Leo" in receipt.nodes
        held_bytes = bytes_of(store.path)
        assert b"Leo" not in held_bytes
        assert b"ANA" not in held_bytes
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)


def test_a_label_is_spelled_as_what_is_left_spells_it(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as store:
        segments = [segment_of(say(store, f"S{n}", 1)) for n in range(3)]
        for segment, spelling in zip(segments, ("ROME", "Rome", "rome"), strict=True):
            encode(store, segment, [some_record(segment, f"in {segment.session}", entities=(spelling,), tags=())])
        assert [n.label for n in store.nodes("entity")] == ["ROME"]
        for session, spelling in (("S0", "Rome"), ("S1", "rome")):
            store.forget(Selection(session=session))
            assert [n.label for n in store.nodes("entity")] == [spelling]
            assert [n.label for n in store.nodes("entity_topic")] == [f"{spelling}: fact"]
            assert rebuilt(store, tmp_path / session) == content(store)
        assert store.search("nodes", unit("ROME"), 5, node_kinds=["entity"]) == [[]]
        store.compact()
        assert [n.label for n in store.nodes("entity")] == ["rome"]
        # Whoever names it next gives it a vector again.
        again = segment_of(say(store, "S3", 1))
        encode(store, again, [some_record(again, "once more", entities=("Roma", "Rome"), tags=())])
        assert {n.label for n in store.nodes("entity")} == {"Roma", "Rome"}
        assert store.search("nodes", unit("Rome"), 1, node_kinds=["entity"])[0][0].cosine > 0.999
        assert rebuilt(store, tmp_path / "again") == content(store)
        assert b"ROME" not in bytes_of(store.path)
        assert unit("ROME")[0].tobytes() not in bytes_of(store.path)


def test_a_label_that_only_a_later_wording_spells(tmp_path: Path) -> None:
    """The sentence was said twice, and only the second time with the term whose first spelling is forgotten."""
    with opened(tmp_path / "home") as store:
        first, second, third = (segment_of(say(store, session, 1)) for session in ("S1", "S2", "S2"))
        encode(store, first, [some_record(first, "in the city", entities=("ROME",), tags=())])
        encode(store, second, [some_record(second, "she went there", entities=("Ana",), tags=())])
        encode(store, third, [some_record(third, "she went there", entities=("rome",), tags=(), turns=(1,))])
        store.forget(Selection(session="S1"))
        assert {n.label for n in store.nodes("entity")} == {"Ana", "rome"}
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)


def test_the_frame_of_a_segment_forgets_the_sentence_of_a_forgotten_record(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        tea, moved = store.segment_records("segment:S1:0-2")
        frame = unit(f"{tea.text}\n{moved.text}")
        assert store.search("nodes", frame, 1)[0][0].cosine == pytest.approx(1.0, abs=1e-6)
        store.erase(Selection(records=(moved.id,)))
        assert store.search("nodes", frame, 1)[0][0].cosine < 0.999
        assert frame[0].tobytes()[:16] not in bytes_of(store.path)
        assert [n.records for n in store.nodes("event_frame") if n.key == "S1:0-2"] == [(tea.id,)]


# --- indexes and references ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["at once", "reopened", "compacted", "both", "rebuilt"])
def test_an_index_is_never_used_again(tmp_path: Path, again: str) -> None:
    def between(store: Store) -> Store:
        if again in ("compacted", "both"):
            store.compact()
        if again in ("reopened", "both", "rebuilt"):
            store.close()
            if again == "rebuilt":
                next(store.path.glob("epoch-*/catalogue.sqlite")).unlink()
            store = opened(tmp_path)
        return store

    store = opened(tmp_path)
    say(store, "S", 5)
    say(store, "other", 1)
    store.forget(Selection(turns=("turn:S:3", "turn:S:4")))
    store = between(store)
    assert store.following("S") == 5
    with pytest.raises(BadInput, match="5 comes next"), store.transaction() as tx:
        tx.add_turns([Turn("S", 3, "again")], unit("again"))
    say(store, "S", 1)
    assert left(store) == ["S:0", "S:1", "S:2", "S:5", "other:0"]
    store.forget(Selection(turns=("turn:S:5",)))
    store = between(store)
    store = between(store)
    assert store.following("S") == 6
    store.forget(Selection(session="S"))
    store = between(store)
    assert store.sessions() == ("other",)
    assert store.following("S") == 0
    # An emptied session begins again.
    [turn, _] = say(store, "S", 2)
    store = between(store)
    assert left(store) == ["other:0", "S:0", "S:1"]
    assert (turn.index, store.following("S")) == (0, 2)
    assert check(store.path) == ()
    store.close()


def test_a_catalogue_that_lags_behind_takes_in_the_end_and_the_new_beginning_of_a_session(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first, second = (segment_of(say(store, "S", 1)) for _ in range(2))
        say(store, "other", 1)
        encode(store, first, [some_record(first, "Ana drinks tea")])
        encode(store, second, [some_record(second, "Ana drinks tea", turns=(1,))])
    [path] = tmp_path.rglob("catalogue.sqlite")
    older = path.read_bytes()
    with opened(tmp_path) as store:
        store.forget(Selection(turns=("turn:S:0",)))
        store.forget(Selection(session="S"))
        say(store, "S", 2)
        expected = content(store)
    path.write_bytes(older)
    with opened(tmp_path) as store:
        assert content(store) == expected
        assert left(store) == ["other:0", "S:0", "S:1"]


def test_a_catalogue_that_lags_behind_never_met_the_last_turn(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        say(store, "S", 1)
    [path] = tmp_path.rglob("catalogue.sqlite")
    older = path.read_bytes()
    with opened(tmp_path) as store:
        say(store, "S", 1)
        store.forget(Selection(turns=("turn:S:1",)))
        assert store.following("S") == 2
    path.write_bytes(older)
    with opened(tmp_path) as store:
        assert store.following("S") == 2


def test_references_of_forgotten_turns_can_be_used_again(tmp_path: Path) -> None:
    with told(tmp_path) as store:
        store.forget(Selection(turns=("turn:S1:3",)))
        assert store.turn_by_ref("S1", "D3") is None
        turn = Turn("S1", 4, "another", ref="D3")
        with store.transaction() as tx:
            tx.add_turns([turn], unit("another"))
        assert store.turn_by_ref("S1", "D3") == turn
        store.compact()
        assert store.turn_by_ref("S1", "D3") == turn


# --- the receipt -----------------------------------------------------------------------------------------------------


def test_the_receipt_counts(tmp_path: Path) -> None:
    with told(tmp_path) as store:
        receipt = store.erase(Selection(turns=("turn:S1:0", "turn:S1:1")))
        assert receipt.removed == {
            "turns.jsonl": 2,
            "turns.rows": 2,
            "decisions.jsonl": 2,
            "decisions.rows": 2,
            "segments.jsonl": 2,
            "encodings.jsonl": 2,
            "records.rows": 2,
            "nodes.jsonl": 2,  # the frames of the two segments
            "nodes.rows": 2,
        }
        assert receipt.bytes_before > receipt.bytes_after > 0
        assert receipt.bytes_after <= sum(store.stats().bytes.values())  # SQLite's own files come and go
        assert receipt.nodes == ()  # everybody else's are left


def test_the_same_sentence_said_twice_is_elsewhere(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, [Turn("S", 0, "I like the sea in May", speaker="Ana")])
        put(store, [Turn("T", 0, "I like the sea in May", speaker="Ana"), Turn("T", 1, "yes", speaker="Ben")])
        put(store, [Turn("T", 2, "no", speaker="Ben")])
        receipt = store.erase(Selection(turns=("turn:T:0", "turn:T:2")))
        assert receipt.residues == ()
        said = store.records("S")[0]
        assert "turn:T:0" in receipt.elsewhere
        assert "turn:T:2" not in receipt.elsewhere
        assert said.id not in receipt.elsewhere  # of another session, it is another record
        assert left(store) == ["S:0", "T:1"]


def test_a_vector_of_half_precision_that_is_said_again_is_elsewhere(tmp_path: Path) -> None:
    """Its row is of another form than the point of the graph; the point belongs to what was kept as well."""
    with opened(tmp_path, exact_below=4, precision="float16") as store:
        for session in "STU":
            put(store, [Turn(session, i, f"I like the sea {i}", speaker="Ana") for i in range(4)])
        assert list(store.path.rglob("records.hnsw")) != []
        [record, *_] = store.records("S")
        receipt = store.erase(Selection(records=(record.id,)))
        assert (receipt.residues, receipt.elsewhere) == ((), (record.id,))
        receipt = store.erase(Selection(turns=("turn:S:0",)))
        assert receipt.residues == ()
        assert "turn:S:0" in receipt.elsewhere


@pytest.mark.parametrize("name", ["notes.txt", "epoch-000002/turns.hnsw.tmp", "usage.jsonl"])
def test_a_residue_is_named(tmp_path: Path, name: str) -> None:
    """Somebody has put a copy of it into the folder."""
    with told(tmp_path) as store:
        text = store.turn("turn:S1:2").text
        stray = store.path / name
        if stray.parent == store.path:
            stray.write_text(f"so: {text}")
            assert store.erase(Selection(turns=("turn:S1:2",))).residues == (name,)
        else:  # what a killed compaction left is swept
            stray.parent.mkdir()
            stray.write_text(text)
            assert store.erase(Selection(turns=("turn:S1:2",))).residues == ()


# --- many of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_thousand_turns_in_graphs(tmp_path: Path, precision: str) -> None:
    """No byte of a forgotten vector is in a snapshot that was carried over, and nothing of the other user changes."""
    with told(tmp_path, user="ben") as other:
        theirs = {p: p.read_bytes() for p in other.path.rglob("*") if p.is_file()}
        with opened(tmp_path, exact_below=50, precision=precision) as store:
            for start in range(0, 1000, 100):
                turns = [
                    Turn("S", i, f"q{i:04d}z and more", speaker="Ben" if i % 3 else "Ana")
                    for i in range(start, start + 100)
                ]
                put(store, turns)
            said = store.turns("S")
            gone = [t for t in said if t.speaker == "Ana"]
            assert len(gone) == 334
            receipt = store.erase(Selection(speaker="Ana"))
            assert receipt.turns == tuple(t.id for t in gone)
            assert len(receipt.records) == 1000  # each segment lost a turn
            assert len(receipt.waiting) == 10
            assert receipt.residues == ()
            # Records of turns that stay were made from them together with others: their words are still said.
            assert set(receipt.elsewhere) == {r for r, t in zip(receipt.records, said, strict=True) if t not in gone}
            assert list(store.path.glob("epoch-000002/turns.hnsw")) != []
            held = bytes_of(store.path)
            for turn in said:
                row = unit(turn.line)[0]
                found = [turn.text.encode() in held]
                found += [row.astype(kind).tobytes()[:16] in held for kind in ("<f4", "<f2")]
                assert any(found) == (turn not in gone)
            for turn in said[::50]:
                hits = store.search("turns", unit(turn.line), 10)[0]
                assert (hits[0].id == turn.id) == (turn not in gone)
                assert not {h.id for h in hits} & {t.id for t in gone}
                assert [i for i, _ in store.words("turns", turn.text.split()[0], 5)] == [turn.id] * (turn not in gone)
            everything = store.search("turns", unit("x"), 2000)[0]
            assert {h.id for h in everything} == {t.id for t in said if t not in gone}
            assert check(store.path) == ()
        assert {p: p.read_bytes() for p in other.path.rglob("*") if p.is_file()} == theirs


def test_all_that_there_is(tmp_path: Path) -> None:
    with told(tmp_path, exact_below=4) as store:
        for session in ("S1", "S2"):
            store.erase(Selection(session=session))
        assert content(store) == content(opened(tmp_path / "empty"))
        held = bytes_of(store.path)
        for _, _, text in TALK:
            assert text.encode() not in held
        assert check(store.path) == ()
        put(store, [Turn("S1", 0, "a new beginning")])
    with opened(tmp_path) as store:
        assert left(store) == ["S1:0"]


# --- another encoding ------------------------------------------------------------------------------------------------


def test_a_withdrawn_encoding_waits_again_and_its_bytes_go_with_compaction(tmp_path: Path) -> None:
    with filled(tmp_path / "home") as store:
        segment = store.segments("S1")[0]
        with store.transaction() as tx:
            tx.withdraw_encoding(segment)
        assert store.pending()[0] == segment
        assert store.records("S1") == ()
        assert store.note("S1") == ""
        assert [r.text for r in store.records("S2")] == ["Ana drinks tea"]
        assert rebuilt(store, tmp_path / "rebuilt") == content(store)
        assert b"Ana moved" in bytes_of(store.path)
        before = content(store)
        store.compact()
        assert content(store) == before
        assert b"Ana moved" not in bytes_of(store.path)
        encode(store, segment, [some_record(segment, "Ana moved", kind="event")])
        assert [r.text for r in store.records("S1")] == ["Ana moved"]
        assert rebuilt(store, tmp_path / "again") == content(store)


# --- several processes -----------------------------------------------------------------------------------------------


def test_a_reader_that_was_open_sees_what_was_or_what_is(tmp_path: Path) -> None:
    with filled(tmp_path, exact_below=4) as store:
        readers = [opened(tmp_path, read_only=True, exact_below=4) for _ in range(3)]
        before = content(store)
        with readers[0].snapshot():
            store.erase(Selection(session="S2"))
            store.compact()
            assert content(readers[0]) == before  # though its files are gone
        after = content(store)
        assert content(readers[0]) == after
        assert content(readers[1]) == after
        assert readers[2].refresh()
        assert content(readers[2]) == after
        assert [p.name for p in store.path.glob("epoch-*")] == ["epoch-000003"]


def test_evidence_that_was_found_before_is_not_shown_after(tmp_path: Path) -> None:
    with told(tmp_path) as store:
        reader = opened(tmp_path, read_only=True)
        found = [
            Candidate(t.id, "turn", t.text, t.session, (t.index,), 0.5, temporal=Temporal()) for t in reader.turns("S1")
        ]
        found.append(Candidate("window", "window", "all", "S1", (0, 1, 2, 3), 0.5))
        assert len(evidence(found, reader)) == 5
        store.erase(Selection(turns=("turn:S1:1",)))
        reader.refresh()
        assert [e.id for e in evidence(found, reader)] == ["turn:S1:0", "turn:S1:2", "turn:S1:3"]


def test_readers_in_other_processes_while_one_forgets_and_compacts(tmp_path: Path) -> None:
    say_and_forget(tmp_path, 1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    writer = context.Process(target=forget_for_ever, args=(str(tmp_path), theirs))
    writer.start()
    theirs.close()
    rounds = 0
    try:
        assert ours.poll(60)
        lasting = opened(tmp_path, read_only=True, exact_below=6)
        epochs: set[str] = set()
        while rounds < 200 and len(epochs) < 12:
            rounds += 1
            for reader in (lasting, opened(tmp_path, read_only=True, exact_below=6)):
                if rounds % 2:
                    reader.refresh()
                with reader.snapshot():
                    turns = {t.id for s in reader.sessions() for t in reader.turns(s)}
                    assert {h.id for h in reader.search("turns", unit("x"), 1000)[0]} == turns
                    assert len(reader.decisions("S")) == len(reader.exchange_vectors("S")) == len(turns)
                    assert len(reader.segments()) == len(turns)
                for record in reader.records():
                    assert record.text.startswith("number")
                epochs.update(p.name for p in reader.path.glob("epoch-*"))
                if reader is not lasting:
                    reader.close()
        lasting.close()
        assert writer.is_alive()
        assert len(epochs) > 5
    finally:
        writer.kill()
        writer.join(20)
    assert check(user_folder(tmp_path, "ana")) == ()


def say_and_forget(home: Path, times: int, acknowledge: Callable[[], None] = lambda: None) -> None:
    with opened(home, exact_below=6) as store:
        for _ in range(times):
            start = store.following("S")
            for index in range(start, start + 3):
                put(store, [Turn("S", index, f"number {index}")])
            if start >= 6:
                store.erase(Selection(turns=(store.turns("S")[0].id, store.turns("S")[2].id)))
            acknowledge()


def forget_for_ever(home: str, told: Any) -> None:
    """In a child process, until it is killed."""
    say_and_forget(Path(home), 1_000_000, lambda: told.send("done"))


# --- through the facade ----------------------------------------------------------------------------------------------


def remembered(home: Path) -> Memory:
    return Memory.open("ana", home=home, llm=None, embedder=HashEmbedder(64), reranker=None)


def messages(*texts: str, session: str = "one") -> list[Message]:
    at = datetime(2023, 7, 3, 9, tzinfo=UTC)
    return [
        Message(text, role="assistant" if i % 2 else "user", speaker="Bot" if i % 2 else "Ana", at=at, session=session)
        for i, text in enumerate(texts)
    ]


BEES = messages(
    "I keep eleven beehives behind the old chapel in Alfama.",
    "Beehives behind a chapel must be a quiet place for you and for them.",
    "My sister Clara teaches pottery in Porto on Thursdays.",
    "Pottery on Thursdays in Porto sounds like a lovely tradition for Clara.",
)


def test_consolidating_encodes_what_is_left(tmp_path: Path) -> None:
    with remembered(tmp_path) as memory:
        memory.remember(BEES)
        memory.flush()
        assert any("beehives" in r.text for r in memory.records())
        [segment, *_] = memory.segments()
        receipt = memory.forget(turns=["turn:one:0"])
        assert (receipt.turns, receipt.residues) == (("turn:one:0",), ())
        assert receipt.waiting[0] == segment
        assert memory.pending() == receipt.waiting
        assert not any("beehives" in r.text for r in memory.records())
        memory.consolidate()
        assert memory.pending() == ()
        assert [r for r in memory.records() if "Clara" in r.text]
        assert not [e for e in memory.recall("Where are the beehives?").evidence if "eleven" in e.text]
        assert memory.recall("Who teaches pottery?").evidence
        assert b"eleven" not in bytes_of(tmp_path)
        assert {t for r in memory.records() for t in r.turns} == {1, 2, 3}


@pytest.mark.parametrize("restart", [False, True])
def test_the_segmenter_goes_on(tmp_path: Path, restart: bool) -> None:
    memory = remembered(tmp_path)
    memory.remember(BEES)
    memory.forget(turns=["turn:one:1"])
    if restart:
        memory.close()
        memory = remembered(tmp_path)
    memory.remember(messages("We planted forty tomato seedlings in the garden.", "Forty seedlings, what a garden!"))
    memory.flush()
    assert [t.index for t in memory.turns("one")] == [0, 2, 3, 4, 5]
    covered = sorted(i for s in memory.segments() for i in range(s.start, s.end + 1) if i != 1)
    assert covered == sorted(set(covered))  # none is in two segments
    assert {2, 3, 4, 5} <= set(covered)
    assert memory.pending() == ()
    assert check(user_folder(tmp_path, "ana")) == ()
    memory.close()


@pytest.mark.parametrize("restart", [False, True])
def test_the_last_exchange_is_forgotten_while_it_is_open(tmp_path: Path, restart: bool) -> None:
    memory = remembered(tmp_path)
    memory.remember(BEES)
    memory.forget(turns=["turn:one:2", "turn:one:3"])
    if restart:
        memory.close()
        memory = remembered(tmp_path)
    memory.remember(messages("We planted forty tomato seedlings in the garden.", "Forty seedlings, what a garden!"))
    memory.flush()
    assert [t.index for t in memory.turns("one")] == [0, 1, 4, 5]
    assert {i for s in memory.segments() for i in range(s.start, s.end + 1)} >= {0, 1, 4, 5}
    assert {i for r in memory.records() for i in r.turns} <= {0, 1, 4, 5}
    assert [r for r in memory.records() if "tomato" in r.text]
    memory.close()


def test_a_reply_whose_question_was_forgotten(tmp_path: Path) -> None:
    with remembered(tmp_path) as memory:
        memory.remember(BEES)
        memory.forget(turns=["turn:one:2"])
        memory.flush()
        assert [t.index for t in memory.turns("one")] == [0, 1, 3]
        assert 3 in {i for s in memory.segments() for i in range(s.start, s.end + 1)}
        assert memory.pending() == ()
        assert "Clara" in memory.recall("What does Clara do on Thursdays?").evidence[0].text


def test_a_session_that_was_forgotten_begins_again(tmp_path: Path) -> None:
    with remembered(tmp_path) as memory:
        memory.remember(BEES)
        memory.flush()
        assert memory.forget(session="one").residues == ()
        for held in (memory.sessions(), memory.turns(), memory.records(), memory.segments(), memory.nodes()):
            assert held == ()
        assert [t.index for t in memory.remember(BEES[2:]).turns] == [0, 1]
        memory.flush()
        assert [(s.start, s.end) for s in memory.segments()] == [(0, 1)]
        assert b"beehives" not in bytes_of(tmp_path)
    with remembered(tmp_path) as memory:
        memory.remember(messages("And what of the harbour in winter, with all its boats?"))
        memory.flush()
        assert [t.index for t in memory.turns()] == [0, 1, 2]

"""Damage: `check` finds it and says what it costs, opening says so or is unharmed, `repair` keeps all that is whole."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import EMBEDDER, content, encode, filled, opened, say, segment_of, some_decisions, some_record, unit

from lychee_local.errors import BadInput, StoreDamaged, StoreError, StoreLocked, StoreMismatch
from lychee_local.store import EmbedderIdentity, Precision, check, user_folder
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, ForgottenLine, NodeLine, TurnLine
from lychee_local.store.codec import encode as line_of
from lychee_local.store.disk import OsDisk
from lychee_local.store.epoch import Batch, row_bytes
from lychee_local.store.log import Log
from lychee_local.store.repair import RepairReport, repair
from lychee_local.store.vectors import Vectors
from lychee_local.types import Exchange, Record, Segment, Turn, Usage

LINES = ("turns.jsonl", "decisions.jsonl", "segments.jsonl", "encodings.jsonl", "nodes.jsonl")
ROWS = ("turns.rows", "decisions.rows", "records.rows", "nodes.rows")
USAGE = Usage("encode", "sample", 100, 20, 50, 1.25)
WIDTH = 4 * EMBEDDER.dimension


def embed(texts: Sequence[str]) -> Vectors:
    return unit(*texts)


def mended(home: Path, **options: Any) -> RepairReport:
    return repair(home, "ana", embedder=EMBEDDER, embed=embed, **options)


def epoch(home: Path) -> Path:
    [folder] = user_folder(home, "ana").glob("epoch-*")
    return folder


def said(home: Path) -> list[str]:
    return [finding.what for finding in check(user_folder(home, "ana"))]


def held(home: Path, **options: Any) -> dict[str, Any]:
    with opened(home, **options) as store:
        return content(store)


def flip(path: Path, place: int, bits: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def swap_lines(path: Path, first: int, second: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[first], lines[second] = lines[second], lines[first]
    path.write_bytes(b"".join(lines))


def swap_rows(path: Path, first: int, second: int) -> None:
    data = path.read_bytes()
    rows = [data[i : i + WIDTH] for i in range(0, len(data), WIDTH)]
    rows[first], rows[second] = rows[second], rows[first]
    path.write_bytes(b"".join(rows))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A closed memory of two sessions, three segments and three records; one segment waits."""
    filled(tmp_path / "home").close()
    return tmp_path / "home"


def says_so_or_is_unharmed(home: Path, before: dict[str, Any]) -> None:
    """What a memory reads when it is opened is checked; what it does not read then changes nothing."""
    try:
        after = held(home)
    except StoreDamaged:
        return
    assert after == before


def without_turns(before: dict[str, Any], lost: set[str]) -> list[list[Turn]]:
    return [[turn for turn in turns if turn.id not in lost] for turns in before["turns"]]


# --- a sound memory --------------------------------------------------------------------------------------------------


def test_a_sound_memory_has_no_findings_and_is_not_touched(home: Path) -> None:
    def state() -> dict[Path, tuple[int, bytes]]:
        files = (path for path in home.rglob("*") if path.is_file() and path.name != "lock")
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    before = state()
    assert check(user_folder(home, "ana")) == ()
    assert mended(home) == RepairReport(())
    assert state() == before


def test_a_check_beside_a_writer(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        assert check(store.path) == ()
        say(store, "S1", 3)
        assert check(store.path) == ()
        with pytest.raises(StoreLocked):
            mended(tmp_path)


def test_checks_beside_a_busy_writer(tmp_path: Path) -> None:
    """One that also moves the files to a new epoch under the eyes of the check."""
    stop = threading.Event()

    def write() -> None:
        with opened(tmp_path) as store:
            for number in itertools.count():
                segment = segment_of(say(store, "S", 2))
                encode(store, segment, [some_record(segment, f"sentence {number}", entities=(f"E{number}",))])
                if number % 5 == 4:
                    store.compact()
                if stop.is_set():
                    return

    filled(tmp_path).close()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [finding for _ in range(12) for finding in check(user_folder(tmp_path, "ana"))]
    finally:
        stop.set()
        writer.join()
    assert found == []
    assert said(tmp_path) == []


@pytest.mark.parametrize("moved", [True, False])
def test_a_file_that_vanishes_under_the_check(tmp_path: Path, moved: bool) -> None:
    """Between a look at a file and its reading it may go to a new epoch; where none has come, it cannot be read."""
    told: list[int] = []
    with opened(tmp_path) as store:
        say(store, "S", 1_000)

        def vanish(done: int, total: int) -> None:
            told.append(done)
            if len(told) == 1:
                if moved:
                    store.compact()
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "encodings.jsonl")

        if moved:
            assert check(user_folder(tmp_path, "ana"), on_progress=vanish) == ()
            assert len(told) > 1  # it began again
        else:
            with pytest.raises(StoreError, match="cannot check"):
                check(user_folder(tmp_path, "ana"), on_progress=vanish)


def test_an_empty_memory_is_sound(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert said(tmp_path) == []
    assert mended(tmp_path) == RepairReport(())


def test_what_a_killed_writer_leaves_is_no_finding(home: Path) -> None:
    before = held(home)
    for name in (*LINES, *ROWS):
        with (epoch(home) / name).open("ab") as file:
            file.write(b"beyond what is committed")
    (user_folder(home, "ana") / "usage.jsonl").write_bytes(b'0badcafe {"half')
    (user_folder(home, "ana") / "manifest.json.tmp").write_bytes(b"{")
    (user_folder(home, "ana") / "epoch-000002").mkdir()
    assert check(user_folder(home, "ana")) == ()
    assert held(home) == before


def test_a_catalogue_that_lags_behind_is_no_finding(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        pass
    catalogue = epoch(tmp_path) / "catalogue.sqlite"
    old = catalogue.read_bytes()
    with opened(tmp_path) as store:
        say(store, "S1", 2)
        before = content(store)
    catalogue.write_bytes(old)
    assert said(tmp_path) == []
    assert held(tmp_path) == before


def test_progress_is_told(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        say(store, "S", 1_000)
    told: list[tuple[int, int]] = []
    assert check(user_folder(tmp_path, "ana"), on_progress=lambda done, total: told.append((done, total))) == ()
    assert told
    assert all(0 < done <= total == 4_002 for done, total in told)  # 2,001 lines, read twice


def test_a_memory_with_withdrawn_and_forgotten_parts_is_sound(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        first = store.segments("S1")[0]
        record = some_record(first, "Ana rows", entities=("Boat",))
        with store.transaction() as tx:
            tx.withdraw_encoding(first)
            missing = store.missing_nodes(first, [record], withdrawn=True)
            labels = {node.id: unit(text)[0] for node, text in missing}
            tx.add_encoding(first, [record], unit(record.embedded_text), labels, "")
        before = content(store)
    assert said(tmp_path) == []
    path = epoch(tmp_path) / "turns.rows"
    flip(path, 3)
    assert mended(tmp_path).lost == ()
    assert held(tmp_path) == before
    assert said(tmp_path) == []


def test_what_was_forgotten_does_not_come_back(tmp_path: Path) -> None:
    """Forgotten, and not yet compacted: the lines are still there, the numbers of what is to go as well."""
    filled(tmp_path).close()
    with opened(tmp_path) as store:
        before = content(store)
    log = Log(tmp_path, "ana", EMBEDDER, read_only=False)
    gone = ForgottenLine(turns=(6,), decisions=(6,), following=(("S1", 5),))
    log.commit(Batch({files.FORGOTTEN: [line_of(gone)]}))
    log.close()
    assert said(tmp_path) == []
    after = held(tmp_path)
    assert [[t.id for t in turns] for turns in after["turns"]] == [
        [t.id for t in turns] for turns in without_turns(before, {"turn:S1:4"})
    ]
    flip(epoch(tmp_path) / "nodes.rows", 3)
    assert mended(tmp_path).lost == ()
    assert held(tmp_path) == after
    assert said(tmp_path) == []
    with opened(tmp_path) as store:
        assert store.following("S1") == 5  # no index is used a second time
    assert b"what was said 4 in S1" not in (epoch(tmp_path) / "turns.jsonl").read_bytes()


# --- lines -----------------------------------------------------------------------------------------------------------

ONE_LINE = {
    "turns.jsonl": "the text of one turn",
    "decisions.jsonl": "one step of the segmenter's log",
    "segments.jsonl": "where and why one segment ended",
    "encodings.jsonl": "the records of one segment, until it is encoded again",
    "nodes.jsonl": "",
}


@pytest.mark.parametrize("name", LINES)
def test_a_changed_text_is_found_named_and_costs_its_line(home: Path, name: str) -> None:
    path, before = epoch(home) / name, held(home)
    second = path.read_bytes().index(b"\n") + 1
    flip(path, second + 40, 1)
    [finding] = check(user_folder(home, "ana"))
    assert finding.what == f"{path}, line 2 does not match its checksum"
    assert finding.loses == ONE_LINE[name]
    report = mended(home)
    assert report.findings == (finding,)
    assert all(ONE_LINE[name] in lost or "segmenter's log" in lost for lost in report.lost)
    assert bool(report.lost) == bool(ONE_LINE[name])
    assert said(home) == []
    after = held(home)
    if name in ("nodes.jsonl", "segments.jsonl"):
        assert after == before
    else:
        assert after != before


@pytest.mark.parametrize("name", LINES)
def test_damage_beside_the_text_costs_nothing(home: Path, name: str) -> None:
    """Checksums and line ends can be told from the lines around them."""
    path, before = epoch(home) / name, held(home)
    sound = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(sound) if byte == 10)]
    for start, end in itertools.pairwise(starts):
        for place in (start, start + 7, start + 8, end - 1):
            path.write_bytes(sound)
            flip(path, place)
            findings = check(user_folder(home, "ana"))
            assert [f.loses for f in findings] == [""], (place, findings)
            assert f"line {starts.index(start) + 1} " in findings[0].what
    report = mended(home)
    assert report.lost == ()
    assert not list(user_folder(home, "ana").glob("damaged-*"))
    assert held(home) == before
    assert said(home) == []


def test_a_damaged_turn_loses_that_turn_only(home: Path) -> None:
    path, before = epoch(home) / "turns.jsonl", held(home)
    path.write_bytes(path.read_bytes().replace(b"what was said 2 in S1", b"what was sajd 2 in S1"))
    with pytest.raises(StoreDamaged, match=r"turns\.jsonl, line 3 .* the text of one turn is lost"):
        held(home)
    report = mended(home)
    assert report.lost == ("the text of one turn (turns.jsonl)", "one step of the segmenter's log (decisions.jsonl)")
    kept = user_folder(home, "ana") / "damaged-000001"
    assert any(str(kept) in done for done in report.done)
    assert b"sajd" in (kept / "turns.jsonl").read_bytes()
    after = held(home)
    assert [list(turns) for turns in after["turns"]] == without_turns(before, {"turn:S1:2"})
    for same in ("segments", "pending", "records", "nodes", "notes", "near records", "near nodes"):
        assert after[same] == before[same]
    with opened(home) as store:
        assert say(store, "S1", 1)[0].index == 5
    assert said(home) == []


def test_a_record_keeps_the_turns_that_are_left(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        segment = segment_of(say(store, "S", 3))
        encode(
            store, segment, [some_record(segment, "Ana drinks tea", turns=(0, 2)), some_record(segment, "Ana sings")]
        )
    path = epoch(tmp_path) / "turns.jsonl"
    path.write_bytes(path.read_bytes().replace(b"said 0", b"sajd 0"))
    mended(tmp_path)
    assert [record.turns for record in held(tmp_path)["records"]] == [(2,), ()]
    assert said(tmp_path) == []


def test_a_session_of_which_nothing_is_left(home: Path) -> None:
    path, before = epoch(home) / "turns.jsonl", held(home)
    path.write_bytes(path.read_bytes().replace(b"in S2", b"in S3"))
    report = mended(home)
    assert "the texts of 2 turns (turns.jsonl)" in report.lost
    assert "segment:S2:0-1 and its records: all of its turns are lost" in report.lost
    assert said(home) == []
    after = held(home)
    assert after["turns"] == before["turns"][:1]
    assert after["records"] == tuple(r for r in before["records"] if r.session == "S1")


def test_a_lost_segment_is_known_from_its_records(home: Path) -> None:
    before = held(home)
    (epoch(home) / "segments.jsonl").unlink()
    assert [f.loses for f in check(user_folder(home, "ana"))] == ["where and why 3 segments ended"]
    report = mended(home)
    assert report.lost == ("where and why 3 segments ended (segments.jsonl)",)
    assert held(home) == before  # the samples end where the log says, for the reason that is assumed
    assert said(home) == []


def test_turns_that_nothing_would_encode_get_a_segment(home: Path) -> None:
    """The segments and the segmenter's log are lost: nobody else knows that turns 3 and 4 wait."""
    for name in ("segments.jsonl", "encodings.jsonl"):
        (epoch(home) / name).unlink()
    report = mended(home)
    assert any("2 segments were made" in done for done in report.done)
    assert said(home) == []
    with opened(home) as store:
        waiting = [index for s in store.pending() if s.session == "S1" for index in range(s.start, s.end + 1)]
        assert waiting == [0, 1, 2, 3, 4]
        assert store.pending() == store.segments()


def test_a_segment_is_cut_where_the_segmenter_cut(tmp_path: Path) -> None:
    """And one that would get too long for one call is cut as well."""
    turns = [Turn("S", i, f"{i} " + "word " * 300) for i in range(9)]
    with opened(tmp_path) as store, store.transaction() as tx:
        decisions = some_decisions(turns)
        decisions[2] = replace(decisions[2], action="cut")
        tx.add_turns(turns, unit(*[t.line for t in turns]))
        tx.add_decisions(decisions, unit(*[t.line for t in turns]))
        tx.add_segments([segment_of(turns[:2]), segment_of(turns[2:])])
    (epoch(tmp_path) / "segments.jsonl").unlink()
    mended(tmp_path)
    with opened(tmp_path) as store:
        assert [(s.start, s.end) for s in store.pending()] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 8)]


def test_a_damaged_encoding_waits_to_be_made_again(home: Path) -> None:
    before = held(home)
    path = epoch(home) / "encodings.jsonl"
    path.write_bytes(path.read_bytes().replace(b"Ana moved", b"Ana maved"))
    [finding] = check(user_folder(home, "ana"))
    assert finding.loses == "the records of one segment, until it is encoded again"
    mended(home)
    after = held(home)
    assert [s.id for s in after["pending"]] == ["segment:S1:0-2", "segment:S1:3-4"]
    assert after["records"] == tuple(r for r in before["records"] if r.session == "S2")
    assert after["segments"] == before["segments"]
    assert said(home) == []


def test_two_lines_swapped(home: Path) -> None:
    for name in LINES:
        copy = home.parent / name
        shutil.copytree(home, copy)
        before = held(copy)
        swap_lines(epoch(copy) / name, 0, 1)
        findings = check(user_folder(copy, "ana"))
        assert findings
        assert all(name in f.what for f in findings)
        says_so_or_is_unharmed(copy, before)
        report = mended(copy)
        assert said(copy) == []
        after = held(copy)
        if not report.lost:
            assert after == before
        gone = sum(map(len, before["turns"])) - sum(map(len, after["turns"]))
        assert gone == (1 if name == "turns.jsonl" else 0)


@pytest.mark.parametrize("name", [*LINES, *ROWS])
@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_lost_ends_and_lost_files(home: Path, name: str, how: str) -> None:
    path, before = epoch(home) / name, held(home)
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "cut" else b"")
    findings = check(user_folder(home, "ana"))
    assert findings
    assert all(str(path) in finding.what for finding in findings)
    with pytest.raises(StoreDamaged, match=name):
        held(home)
    report = mended(home)
    assert report.findings == findings
    assert said(home) == []
    after = held(home)
    if not report.lost:
        assert after == before
    if name not in ("turns.jsonl", "decisions.jsonl", "decisions.rows"):
        assert after["turns"] == before["turns"]
        assert after["decisions"] == before["decisions"]
    if name in ("turns.rows", "records.rows", "nodes.rows", "nodes.jsonl"):
        assert report.lost == ()


def test_a_lost_epoch(home: Path) -> None:
    shutil.rmtree(epoch(home))
    findings = check(user_folder(home, "ana"))
    assert "the texts of 7 turns" in [finding.loses for finding in findings]
    report = mended(home)
    assert "the texts of 7 turns (turns.jsonl)" in report.lost
    assert said(home) == []
    assert held(home)["turns"] == []


def test_numbers_of_what_was_to_be_forgotten_are_lost(tmp_path: Path) -> None:
    with filled(tmp_path) as store, store.transaction() as tx:
        tx.withdraw_encoding(store.segments("S2")[0])
    path = epoch(tmp_path) / "forgotten.jsonl"
    flip(path, 30)
    [finding] = check(user_folder(tmp_path, "ana"))[:1]
    assert finding.loses == "what was to be forgotten by it, which may come back"
    report = mended(tmp_path)
    assert report.lost == ("what was to be forgotten by it, which may come back (forgotten.jsonl)",)
    assert said(tmp_path) == []


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    ("name", "row"), [("turns.rows", 4), ("records.rows", 2), ("nodes.rows", 3), ("decisions.rows", 7)]
)
def test_a_damaged_row_is_named_and_made_again(tmp_path: Path, name: str, row: int, precision: Precision) -> None:
    filled(tmp_path, precision=precision).close()
    path, before = epoch(tmp_path) / name, held(tmp_path)
    flip(path, (WIDTH if precision == "float32" else WIDTH // 2) * (row - 1) + 5, 1)
    [finding] = check(user_folder(tmp_path, "ana"))
    assert finding.what == f"{path}, row {row} does not match its checksum"
    if name != "decisions.rows":  # a decision is dropped, for which no embedder is needed
        with pytest.raises(StoreError, match="made again"):
            repair(tmp_path, "ana", embedder=EMBEDDER)
        assert said(tmp_path) == [finding.what]
    report = mended(tmp_path)
    assert said(tmp_path) == []
    if name == "decisions.rows":
        with opened(tmp_path) as store:
            assert len(store.decisions("S1")) == 4
    else:
        assert report.lost == ()
        assert "one vector was made again" in report.done
        assert held(tmp_path) == before


@pytest.mark.parametrize("name", ROWS)
def test_swapped_rows_need_no_embedder(home: Path, name: str) -> None:
    path, before = epoch(home) / name, held(home)
    swap_rows(path, 0, 1)
    found = said(home)
    assert found == [
        f"{path}, row 1 does not match its checksum, its vector stands in row 2",
        f"{path}, row 2 does not match its checksum, its vector stands in row 1",
    ]
    assert repair(home, "ana", embedder=None).lost == ()
    assert held(home) == before
    assert said(home) == []


def test_a_row_that_is_no_vector(home: Path) -> None:
    """Written by a defect, not by damage: its checksum is right."""
    row = np.full((1, EMBEDDER.dimension), np.nan, dtype=np.float32)
    [data] = row_bytes(row, "float32")
    log = Log(home, "ana", EMBEDDER, read_only=False)
    turn = Turn("S1", 5, "no number")
    log.commit(Batch({files.TURNS: [line_of(TurnLine(turn, zlib.crc32(data)))]}, {files.TURN_ROWS: row}))
    log.close()
    path = epoch(home) / "turns.rows"
    assert said(home) == [f"{path}, row 8 is no unit vector"]
    assert mended(home).lost == ()
    with opened(home) as store:
        assert store.turn("turn:S1:5") == turn
        assert store.search("turns", unit(turn.line), 1)[0][0].id == turn.id
    assert said(home) == []


def test_an_embedder_that_gives_no_unit_vectors_changes_nothing(home: Path) -> None:
    flip(epoch(home) / "turns.rows", 5)
    before = said(home)
    for wrong in (lambda texts: np.zeros((len(texts), 8), dtype=np.float32), lambda texts: unit(*texts, "more")):
        with pytest.raises(BadInput, match="embedder"):
            repair(home, "ana", embedder=EMBEDDER, embed=wrong)
        assert said(home) == before
        assert [p.name for p in user_folder(home, "ana").glob("epoch*")] == ["epoch-000001"]


# --- references ------------------------------------------------------------------------------------------------------


def append(home: Path, name: str, *values: object, rows: str = "") -> None:
    """What a defect would commit: lines that are whole and wrong."""
    vectors = unit(*[str(n) for n in range(len(values))])
    batch = Batch({name: [line_of(value) for value in values]}, {rows: vectors} if rows else {})
    log = Log(home, "ana", EMBEDDER, read_only=False)
    log.commit(batch)
    log.close()


def row_check(number: int) -> int:
    return zlib.crc32(row_bytes(unit(str(number)), "float32")[0])


def test_references_to_what_is_not_there(home: Path) -> None:
    before = held(home)
    with opened(home) as store:
        decision = store.decisions("S1")[0]
    strange = replace(decision, exchange=Exchange("S1", 4, 5, "", 9))
    segment = Segment("S1", 5, 9, "session_flush", 9, 1, 1.0)
    for name, value, rows, what in [
        ("turns.jsonl", TurnLine(Turn("S1", 2, "again"), row_check(0)), "turns.rows", "stands behind turn 4"),
        ("decisions.jsonl", DecisionLine(strange, row_check(0)), "decisions.rows", "is about turns 4 to 5 of 'S1'"),
        ("segments.jsonl", segment, "", "is about turns 5 to 9 of 'S1'"),
        ("nodes.jsonl", NodeLine("entity", "zoe", "Zoe", row_check(0)), "nodes.rows", "points to no record"),
        ("nodes.jsonl", NodeLine("entity", "ana", "Anna", row_check(0)), "nodes.rows", "'Anna' is not that of 'ana'"),
    ]:
        copy = home.parent / f"{name} {what[:9]}"
        shutil.copytree(home, copy)
        append(copy, name, value, rows=rows)
        findings = check(user_folder(copy, "ana"))
        assert len(findings) == 1, findings
        assert name in findings[0].what
        assert what in findings[0].what
        mended(copy)
        assert said(copy) == []
        after = held(copy)
        assert after["turns"] == before["turns"]
        assert after["records"] == before["records"]


def test_encodings_of_what_is_not_there(home: Path) -> None:
    nowhere = Record("S1", "Ana flies", "fact", (77,), "segment:S1:3-4", entities=("Ana",), tags=("Tea",))
    for value, rows, what in [
        (EncodingLine("segment:S9:0-1", "", (), ()), "", "is about segment:S9:0-1, which is not stored"),
        (EncodingLine("segment:S1:0-2", "", (), ()), "", "segment:S1:0-2 is encoded twice"),
        (EncodingLine("segment:S1:3-4", "", (nowhere,), (row_check(0),)), "records.rows", "points to turns that"),
    ]:
        copy = home.parent / what[:24].replace(" ", "_")
        shutil.copytree(home, copy)
        append(copy, "encodings.jsonl", value, rows=rows)
        findings = check(user_folder(copy, "ana"))
        assert len(findings) == 1, findings
        assert what in findings[0].what
        mended(copy)
        assert said(copy) == []


# --- what is derived -------------------------------------------------------------------------------------------------


def change_catalogue(home: Path, sql: str) -> None:
    with sqlite3.connect(epoch(home) / "catalogue.sqlite") as db:
        assert db.execute(sql).rowcount > 0
    db.close()


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("DELETE FROM turn WHERE num = 3", "table turn"),
        ("UPDATE turn SET day = day + 1 WHERE num = 2", "table turn"),
        ("UPDATE turn SET speaker = 'Ben' WHERE num = 2", "table turn"),
        ("UPDATE line SET start = start + 1 WHERE num = 1", "table line"),
        ("DELETE FROM ref WHERE turn = 1", "table ref"),
        ("UPDATE session SET following = 9", "table session"),
        ("UPDATE decision SET stop = 9 WHERE num = 1", "table decision"),
        ("UPDATE segment SET encoding = NULL WHERE num = 1", "table segment"),
        ("DELETE FROM encoding WHERE num = 1", "table encoding"),
        ("UPDATE record SET kind = 'event' WHERE num = 0", "table record"),
        ("DELETE FROM occurrence WHERE num = 1", "table occurrence"),
        ("UPDATE node SET label = 'Anna' WHERE key = 'ana'", "table node"),
        ("DELETE FROM link WHERE record = 1", "table link"),
        ("INSERT INTO dead(file, num) VALUES ('turns.rows', 1)", "table dead"),
        ("INSERT INTO gone VALUES ('turns.jsonl', 1)", "table gone"),
        ("DELETE FROM words_turns WHERE term IN (SELECT term FROM words_turns LIMIT 1)", "words of turns"),
        ("DELETE FROM words_records_postings", "table words_records_postings"),
        ("UPDATE meta SET value = '{}'", "does not say what it covers"),
        ("DELETE FROM meta", "is empty"),
    ],
)
def test_a_catalogue_that_says_something_else(home: Path, sql: str, table: str) -> None:
    before = held(home)
    change_catalogue(home, sql)
    [finding] = check(user_folder(home, "ana"))
    assert table in finding.what
    assert str(epoch(home) / "catalogue.sqlite") in finding.what
    assert (finding.loses, finding.part) == ("", "catalogue")
    report = repair(home, "ana", embedder=None)
    assert report == RepairReport((finding,), ("the catalogue was built again",), ())
    assert held(home) == before
    assert said(home) == []


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 8192)


def older_schema(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 77")
    db.close()


@pytest.mark.parametrize("damage", [garbage, older_schema, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_catalogue_that_is_none(home: Path, damage: Callable[[Path], None]) -> None:
    before = held(home)
    damage(epoch(home) / "catalogue.sqlite")
    [finding] = check(user_folder(home, "ana"))
    assert finding.part == "catalogue"
    copy = home.parent / "copy"
    shutil.copytree(home, copy)
    assert held(copy) == before  # a writer builds it again by itself
    assert repair(home, "ana", embedder=None).done == ("the catalogue was built again",)
    assert held(home) == before
    assert said(home) == []


def test_a_catalogue_of_other_lines(home: Path) -> None:
    before = held(home)
    with opened(home.parent / "other") as store:
        say(store, "S9", 2)
    shutil.copy(epoch(home.parent / "other") / "catalogue.sqlite", epoch(home) / "catalogue.sqlite")
    [finding] = check(user_folder(home, "ana"))
    assert "is about other lines" in finding.what
    mended(home)
    assert held(home) == before


def with_graphs(home: Path) -> dict[str, Any]:
    with opened(home, exact_below=20) as store:
        for _ in range(20):
            segment = segment_of(say(store, "S", 4))
            encode(store, segment, [some_record(segment, f"{segment.id} {i}", entities=(f"E{i}",)) for i in range(4)])
            store.search("nodes", unit("Ana"), 5)
        for index in store._now().indexes.values():
            index.build()
        return content(store)


def test_graphs_that_are_damaged_or_out_of_step(tmp_path: Path) -> None:
    before = with_graphs(tmp_path)
    folder = epoch(tmp_path)
    assert len(list(folder.glob("*.hnsw"))) == 3
    assert said(tmp_path) == []
    (folder / "turns.hnsw").write_bytes(b"\xff" * 4096)
    (folder / "records.hnsw").unlink()
    for ending in (".hnsw", ".hnsw.side"):  # sound, and of other rows
        shutil.copy(folder / f"turns{ending}", folder / f"nodes{ending}")
    shutil.copy(folder / "turns.hnsw", folder / "nodes.hnsw")
    found = said(tmp_path)
    assert [Path(what.split(" ")[0]).name for what in found] == ["turns.hnsw", "records.hnsw", "nodes.hnsw"]
    assert held(tmp_path, exact_below=20) == before
    shutil.copy(folder / "turns.hnsw.side", folder / "records.hnsw.side")
    report = repair(tmp_path, "ana", embedder=None)
    assert report.lost == ()
    assert said(tmp_path) == []
    assert held(tmp_path, exact_below=20) == before


def test_a_graph_of_other_rows(tmp_path: Path) -> None:
    with_graphs(tmp_path / "one")
    with opened(tmp_path / "two", exact_below=20) as store:
        for number in range(30):
            say(store, f"other {number}", 4)
    for ending in (".hnsw", ".hnsw.side"):
        shutil.copy(epoch(tmp_path / "one") / f"turns{ending}", epoch(tmp_path / "two") / f"turns{ending}")
    assert said(tmp_path / "two") == [
        f"{epoch(tmp_path / 'two') / 'turns.hnsw'} is out of step with the rows: it can be built again from the rows"
    ]
    repair(tmp_path / "two", "ana", embedder=None)
    assert said(tmp_path / "two") == []


def test_a_damaged_usage_line(tmp_path: Path) -> None:
    with filled(tmp_path) as store:
        for purpose in ("encode", "plan", "answer"):
            store.add_usage(replace(USAGE, purpose=purpose))
        path = store.path / "usage.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"plan"', b'"plam"'))
    [finding] = check(path.parent)
    assert finding.what == f"{path}, line 2 does not match its checksum"
    assert finding.loses == "the token count of one model call"
    with opened(tmp_path) as store, pytest.raises(StoreDamaged, match="line 2"):
        store.usage()
    assert mended(tmp_path).lost == ("the token count of one model call (usage.jsonl)",)
    with opened(tmp_path) as store:
        assert [usage.purpose for usage in store.usage()] == ["encode", "answer"]
    assert said(tmp_path) == []


# --- the manifest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_manifest(home: Path, known: bool) -> None:
    before = held(home)
    path = user_folder(home, "ana") / "manifest.json"
    place = path.read_bytes().index(b'"generation"') + 3
    flip(path, place, 4)
    [finding] = check(user_folder(home, "ana"))
    assert str(path) in finding.what
    assert (finding.loses, finding.part) == ("", "manifest")
    with pytest.raises(StoreDamaged):
        held(home)
    report = repair(home, "ana", embedder=EMBEDDER if known else None)
    assert report.lost == ()
    assert held(home) == before
    assert said(home) == []


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_missing_manifest(tmp_path: Path, precision: Precision) -> None:
    filled(tmp_path, precision=precision).close()
    before = held(tmp_path)
    (user_folder(tmp_path, "ana") / "manifest.json").unlink()
    assert said(tmp_path) == [f"{user_folder(tmp_path, 'ana') / 'manifest.json'} is missing"]
    with pytest.raises(StoreError, match="which embedder"):
        repair(tmp_path, "ana", embedder=None)
    with pytest.raises(StoreMismatch, match="dimension 9"):
        repair(tmp_path, "ana", embedder=replace(EMBEDDER, dimension=9))
    assert repair(tmp_path, "ana", embedder=EMBEDDER).lost == ()
    assert held(tmp_path) == before
    assert said(tmp_path) == []


def test_a_missing_manifest_and_an_unfinished_end(home: Path) -> None:
    before = held(home)
    (user_folder(home, "ana") / "manifest.json").unlink()
    for name in LINES:
        with (epoch(home) / name).open("ab") as file:
            file.write(b'0badcafe {"half')
    for name in ROWS:
        with (epoch(home) / name).open("ab") as file:
            file.write(b"\0" * 11)
    assert mended(home).lost == ()
    assert held(home) == before
    assert said(home) == []


def test_a_missing_manifest_and_an_unfinished_rewriting(home: Path) -> None:
    before = held(home)
    (user_folder(home, "ana") / "manifest.json").unlink()
    unfinished = user_folder(home, "ana") / "epoch-000002"
    unfinished.mkdir()
    (unfinished / "turns.jsonl").write_bytes(b"")
    assert mended(home).lost == ()
    assert held(home) == before


def test_a_missing_manifest_and_a_damaged_line(home: Path) -> None:
    before = held(home)
    (user_folder(home, "ana") / "manifest.json").unlink()
    path = epoch(home) / "turns.jsonl"
    path.write_bytes(path.read_bytes().replace(b"what was said 0 in S2", b"what was sajd 0 in S2"))
    report = mended(home)
    assert "the text of one turn (turns.jsonl)" in report.lost
    assert [list(turns) for turns in held(home)["turns"]] == without_turns(before, {"turn:S2:0"})
    assert said(home) == []


def test_a_manifest_of_another_user_or_format(home: Path, tmp_path: Path) -> None:
    user_folder(home, "ana").rename(user_folder(home, "ben"))
    [finding] = check(user_folder(home, "ben"))
    assert "the memory of 'ana'" in finding.what
    with pytest.raises(StoreMismatch, match="'ana', not of 'ben'"):
        repair(home, "ben", embedder=EMBEDDER)
    user_folder(home, "ben").rename(user_folder(home, "ana"))
    with pytest.raises(StoreMismatch, match="'sample'"):
        repair(home, "ana", embedder=EmbedderIdentity("another", "00", 8))
    path = user_folder(home, "ana") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format":2', b'"format":3'))
    assert "has format 3" in said(home)[0]
    with pytest.raises(StoreMismatch, match="format 3"):
        mended(home)


def test_records_whose_turns_and_segments_are_lost_are_named(home: Path) -> None:
    for name in ("segments.jsonl", "turns.jsonl"):
        os.truncate(epoch(home) / name, 0)
    report = mended(home)
    assert "the texts of 7 turns (turns.jsonl)" in report.lost
    assert sum("and its records: what they were made from is lost" in lost for lost in report.lost) == 2
    assert held(home)["records"] == ()
    assert said(home) == []


@pytest.mark.parametrize("manifest", ["damaged", "missing"])
def test_a_usage_log_is_mended_where_the_manifest_is_too(home: Path, manifest: str) -> None:
    with opened(home) as store:
        store.add_usage(USAGE)
    path = user_folder(home, "ana") / "manifest.json"
    if manifest == "missing":
        path.unlink()
    else:
        path.write_bytes(b"k" + path.read_bytes()[1:])
    usage = user_folder(home, "ana") / "usage.jsonl"
    usage.write_bytes(b"k" + usage.read_bytes()[1:])
    report = mended(home)
    assert [finding.part for finding in report.findings] == ["manifest", "usage"]
    assert any("usage.jsonl" in lost for lost in report.lost)
    assert said(home) == []


def test_nothing_to_repair(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no memory of 'ana'"):
        mended(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInput, match="user name"):
        repair(tmp_path, "../ana", embedder=EMBEDDER)


# --- any damage ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("sound")
    with filled(home) as store:
        store.add_usage(USAGE)
        return home, content(store)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_is_found_and_mended(
    sound: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    home, before = sound
    copy = tmp_path_factory.mktemp("any") / "home"
    shutil.copytree(home, copy)
    paths = sorted(p for p in copy.rglob("*") if p.is_file() and p.name != "lock")
    for _ in range(data.draw(st.integers(1, 3), "damages")):
        path = data.draw(st.sampled_from(paths), "file")
        size = path.stat().st_size
        how = data.draw(st.sampled_from(["flip", "cut", "zeros", "newline"]), "how")
        place = data.draw(st.integers(0, max(0, size - 1)), "place")
        if how == "cut":
            os.truncate(path, place)
        elif size:
            whole = bytearray(path.read_bytes())
            damaged = {"flip": bytes([whole[place] ^ 0x10]), "zeros": bytes(min(20, size - place)), "newline": b"\n"}
            whole[place : place + len(damaged[how])] = damaged[how]
            path.write_bytes(whole)
    findings = check(user_folder(copy, "ana"))
    if findings == ():
        assert held(copy) == before  # it hit nothing that is committed
        return
    try:
        report = mended(copy)
    except StoreMismatch:
        assert findings[0].part == "manifest"  # the number of the format was hit
        return
    assert report.findings == findings
    assert said(copy) == []
    after = held(copy)
    manifest_known = not any(finding.part == "manifest" for finding in findings)
    if manifest_known and not [lost for lost in report.lost if "usage" not in lost]:
        assert after == before
    everything = {turn.id: turn for turns in before["turns"] for turn in turns}
    kept = {turn.id: turn for turns in after["turns"] for turn in turns}
    assert kept.items() <= everything.items()
    if kept != everything:
        assert any("(turns.jsonl)" in lost for lost in report.lost)
    texts = {record.id: record.text for record in before["records"]}
    assert {record.id: record.text for record in after["records"]}.items() <= texts.items()
    if len(after["records"]) < len(texts):
        assert any("encoded again" in lost or "its records" in lost for lost in report.lost)


# --- interrupted -----------------------------------------------------------------------------------------------------


class Interrupted:
    """The real disk, and what happens instead of its operation number `at`; half of a write has happened then."""

    def __init__(self, at: int, happens: Callable[[], None]) -> None:
        self._disk = OsDisk()
        self._at = at
        self._happens = happens
        self.count = 0

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._happens()

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._disk.write(fd, data[: len(data) // 2], offset)
        self._step()
        self._disk.write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()
        self._disk.sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        self._disk.truncate(fd, size)

    def replace(self, source: Path, target: Path) -> None:
        self._step()
        self._disk.replace(source, target)

    def remove(self, path: Path) -> None:
        self._step()
        self._disk.remove(path)


def nothing() -> None:
    pass


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def damage_a_turn(home: Path) -> None:
    path = epoch(home) / "turns.jsonl"
    path.write_bytes(path.read_bytes().replace(b"what was said 2 in S1", b"what was sajd 2 in S1"))


def lose_the_manifest(home: Path) -> None:
    (user_folder(home, "ana") / "manifest.json").unlink()


def damage_the_catalogue(home: Path) -> None:
    garbage(epoch(home) / "catalogue.sqlite")


def damage_the_usage(home: Path) -> None:
    with opened(home) as store:
        store.add_usage(USAGE)
    flip(user_folder(home, "ana") / "usage.jsonl", 20)


def written(home: Path) -> dict[str, bytes]:
    """All that is not derived."""
    folder = user_folder(home, "ana")
    newest = max(folder.glob("epoch-??????"))  # the one before it goes when the memory is opened for writing
    present = (folder / "usage.jsonl", *(newest / name for name in (*LINES, *ROWS)))
    return {path.name: path.read_bytes() for path in present if path.exists()}


@pytest.mark.parametrize(
    ("damage", "happens"),
    [
        (damage_a_turn, kill),
        (damage_a_turn, full),
        (lose_the_manifest, kill),
        (damage_the_catalogue, kill),
        (damage_the_catalogue, full),
        (damage_the_usage, kill),
        (damage_the_usage, full),
    ],
)
def test_interrupted_at_every_operation(
    home: Path, damage: Callable[[Path], None], happens: Callable[[], None]
) -> None:
    damage(home)
    findings = said(home)
    counted = Interrupted(0, nothing)
    done = home.parent / "done"
    shutil.copytree(home, done)
    mended(done, disk=counted)
    expected = written(done)
    assert counted.count > 2
    seen = set()
    for at in range(1, counted.count + 1):
        copy = home.parent / f"at {at}"
        shutil.copytree(home, copy)
        if happens is kill:
            child = os.fork()
            if not child:
                mended(copy, disk=Interrupted(at, kill))
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        else:
            with pytest.raises(StoreError, match="disk is full"):
                mended(copy, disk=Interrupted(at, full))
        left = [what.replace(str(copy), str(home)) for what in said(copy)]
        if damage is not damage_the_catalogue:  # what is derived may be half gone in between
            assert left in (findings, [])
        seen.add(bool(left))
        mended(copy)
        assert written(copy) == expected
        shutil.rmtree(copy)
    assert True in seen


def test_killed_beside_the_lock(home: Path) -> None:
    """The lock goes with the process that held it."""
    damage_a_turn(home)
    child = os.fork()
    if not child:
        mended(home, disk=Interrupted(3, kill))
        os._exit(0)
    os.waitpid(child, 0)
    mended(home)
    with opened(home) as store:
        say(store, "S1", 1)

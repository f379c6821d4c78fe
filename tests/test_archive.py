"""An archive holds what is living, comes back as the same memory, and whatever is wrong with one changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import EMBEDDER, content, encode, filled, opened, say, some_record, unit
from test_migrate import FailingDisk, WatchedDisk, copies

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store import Store, archive, check, user_folder
from lychee_local.store.archive import inspect
from lychee_local.store.arrival import Embedding, load
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.departure import ArchiveReport, export
from lychee_local.store.disk import Disk
from lychee_local.store.forget import Selection
from lychee_local.store.graph import Vectors
from lychee_local.store.log import Log
from lychee_local.types import Exchange, Turn, Usage

EMBEDDING = Embedding(lambda texts: unit(*texts), lambda exchange, turns: "\n".join(t.line for t in turns))
Members = dict[str, bytes]


def exported(home: Path, target: Path, user: str = "ana", **options: Any) -> ArchiveReport:
    log = Log(home, user, None, read_only=True)
    catalogue = Catalogue(log.epoch)
    try:
        return export(log.path, log.manifest, catalogue, target, **options)
    finally:
        catalogue.close()
        log.close()


@contextmanager
def fresh(home: Path, user: str = "ben", *, disk: Disk | None = None, **options: Any) -> Iterator[Log]:
    log = Log(home, user, options.pop("embedder", EMBEDDER), read_only=False, disk=disk, **options)
    try:
        yield log
    finally:
        log.close()


def imported(source: Path, home: Path, user: str = "ben", **options: Any) -> None:
    with fresh(home, user) as log:
        load(source, log, **options)


def varied(home: Path, **options: Any) -> Store:
    """A memory in which something of every kind was forgotten, and that goes on afterwards."""
    store = filled(home, **options)
    say(store, "Küche / 台所", 3)
    segment = store.pending()[-1]
    encode(
        store,
        segment,
        [some_record(segment, "アナはお茶が好き 👩‍👩‍👧", turns=(0,)), some_record(segment, "Ana rows")],
        "ノート",
    )
    store.add_usage(Usage("encode", "sample", 812, 90, 700, 1.25))
    store.add_usage(Usage("plan", "modèle", 20, 3))
    store.forget(Selection(turns=("turn:S1:4", "turn:S1:3")))
    store.forget(Selection(records=(store.segment_records(segment.id)[1].id,)))
    store.forget(Selection(turns=("turn:S2:0",)))
    say(store, "S2", 1)
    return store


@pytest.fixture
def home(tmp_path: Path) -> Path:
    varied(tmp_path / "home").close()
    return tmp_path / "home"


@pytest.fixture
def source(home: Path, tmp_path: Path) -> Path:
    return exported(home, tmp_path / "ana.lychee").path


def held(home: Path, user: str) -> dict[str, Any]:
    with opened(home, user) as store:
        return {
            **content(store),
            "usage": store.usage(),
            "following": {s: store.following(s) for s in store.sessions()},
            "stats": replace(store.stats(), bytes={}),
            "check": check(store.path),
        }


# --- there and back --------------------------------------------------------------------------------------------------


def test_the_memory_that_comes_back_is_the_same(home: Path, source: Path) -> None:
    imported(source, home)
    before = held(home, "ana")
    assert held(home, "ben") == before
    assert before["check"] == ()
    assert before["following"] == {"S1": 5, "S2": 3, "Küche / 台所": 3}
    assert len(before["turns"][0]) == 3  # two of S1 are gone, and their numbers stay so
    with opened(home, "ben") as store:
        say(store, "S1", 1)
        assert [t.index for t in store.turns("S1")] == [0, 1, 2, 5]
    assert check(user_folder(home, "ben")) == ()


def test_equal_memories_give_equal_bytes(home: Path, source: Path, tmp_path: Path) -> None:
    first = source.read_bytes()
    assert exported(home, tmp_path / "again").path.read_bytes() == first
    with opened(home) as store:
        store.compact()
    assert exported(home, tmp_path / "compacted").path.read_bytes() == first
    imported(source, tmp_path / "elsewhere", "ana")
    assert exported(tmp_path / "elsewhere", tmp_path / "moved").path.read_bytes() == first


def test_a_stranger_reads_it_with_the_standard_library(home: Path, source: Path) -> None:
    with zipfile.ZipFile(source) as file:
        about = json.loads(file.read("archive.json"))
        turns = [json.loads(line) for line in file.read("turns.jsonl").splitlines()]
        rows = np.frombuffer(file.read("turns.rows"), dtype="<f4").reshape(-1, about["embedder"]["dimension"])
        for name, member in about["members"].items():
            data = file.read(name)
            assert hashlib.sha256(data).hexdigest() == member["sha256"]
            assert len(data) == member["bytes"]
            assert name.endswith(".rows") or data.count(b"\n") == member["count"]
        records = [r for line in file.read("encodings.jsonl").splitlines() for r in json.loads(line)["records"]]
        following = [json.loads(line) for line in file.read("forgotten.jsonl").splitlines()]
    assert (about["kind"], about["format"], about["user"]) == ("lychee-local memory", 1, "ana")
    with opened(home) as store:
        assert [t["text"] for t in turns if t["session"] == "S1"] == [t.text for t in store.turns("S1")]
        assert sorted({r["text"] for r in records}) == sorted({r.text for r in store.records()})
        assert len(records) == about["records"]
        np.testing.assert_array_equal(rows[0], unit(store.turns("S1")[0].line)[0])
    assert following == [{"following": 5, "session": "S1"}]


def test_the_documented_program_reads_it(home: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "archive.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0] + "print(len(turns), *rows.shape)"
    exported(home, tmp_path / "ana.lychee")
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("8 8 8\n", "")


def test_damage_to_what_was_forgotten_costs_nothing(home: Path, source: Path, tmp_path: Path) -> None:
    [path] = user_folder(home, "ana").glob("epoch-*/turns.jsonl")
    data = path.read_bytes()
    at = data.index(b"what was said 4 in S1")
    path.write_bytes(data[:at] + b"W" + data[at + 1 :])
    assert exported(home, tmp_path / "again").path.read_bytes() == source.read_bytes()


def test_nothing_forgotten_is_in_it(home: Path, tmp_path: Path) -> None:
    with opened(home) as store:
        turns = say(store, "S9", 2)
        segment = store.pending()[-1]
        encode(store, segment, [some_record(segment, "Ana hid it under the oak")], "the oak")
        gone = [t.text for t in turns] + ["under the oak", "S9"]
        rows = unit(*[t.line for t in turns])
        store.forget(Selection(session="S9"))
    members = members_of(exported(home, tmp_path / "out").path)
    for data in members.values():
        assert not [text for text in gone if text.encode() in data]
        assert not [row for row in rows if row.tobytes() in data]


def test_it_says_what_it_holds(source: Path) -> None:
    about = inspect(source)
    assert (about.user, about.embedder, about.vectors) == ("ana", EMBEDDER, "float32")
    assert about.turns == 8
    assert about.members["usage.jsonl"].count == 2


def test_progress_goes_from_nothing_to_all(home: Path, tmp_path: Path) -> None:
    for run in (
        lambda report: exported(home, tmp_path / "out", on_progress=report),
        lambda report: imported(tmp_path / "out", home, on_progress=report),
    ):
        seen: list[tuple[int, int]] = []
        run(lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == sorted(seen)
        assert len({total for _, total in seen}) == 1
        assert seen[-1][0] == seen[-1][1]


def test_half_precision_stays_half(tmp_path: Path) -> None:
    varied(tmp_path / "home", precision="float16").close()
    report = exported(tmp_path / "home", tmp_path / "out")
    assert report.about.vectors == "float16"
    imported(report.path, tmp_path / "home")
    assert held(tmp_path / "home", "ben") == held(tmp_path / "home", "ana")


def test_an_empty_memory(tmp_path: Path) -> None:
    opened(tmp_path / "home").close()
    report = exported(tmp_path / "home", tmp_path / "out")
    imported(report.path, tmp_path / "home")
    assert held(tmp_path / "home", "ben") == held(tmp_path / "home", "ana")


def test_text_alone_is_embedded_anew(home: Path, tmp_path: Path) -> None:
    report = exported(home, tmp_path / "text", vectors=False)
    assert report.about.vectors is None
    assert "turns.rows" not in members_of(report.path)
    with pytest.raises(BadInput, match="without vectors") as caught:
        imported(report.path, home)
    assert "re-embedding" in caught.value.hint
    imported(report.path, home, embedding=EMBEDDING)
    before, after = held(home, "ana"), held(home, "ben")
    nodes = [{h.id: h.cosine for h in each.pop("near nodes")[0]} for each in (before, after)]
    assert after == before
    # The node of a segment lost its vector with one of its records; now it has one of those that are left.
    [extra] = nodes[1].keys() - nodes[0].keys()
    assert extra.startswith("node:event_frame:")
    assert {i: c for i, c in nodes[1].items() if i != extra} == nodes[0]


def test_another_embedder(home: Path, source: Path) -> None:
    other = replace(EMBEDDER, name="other", dimension=4, digest="0b" * 32)
    with fresh(home, embedder=other) as log:
        with pytest.raises(BadInput, match=r"'sample'.*'other'") as caught:
            load(source, log)
        assert "re-embedding" in caught.value.hint
        asked: list[Exchange] = []

        def text(exchange: Exchange, turns: Sequence[Turn]) -> str:
            asked.append(exchange)
            assert [t.index for t in turns] == [exchange.start]
            line: str = turns[0].line
            return line

        load(source, log, embedding=Embedding(lambda texts: unit(*texts, dimension=4), text))
    with Store.open(home, "ben", embedder=other) as store:
        assert store.embedder == other
        line = store.turns("S2")[0].line
        assert [h.id for h in store.search("turns", unit(line, dimension=4), 1)[0]] == [store.turns("S2")[0].id]
        assert len(asked) == sum(len(store.decisions(s)) for s in store.sessions()) > 0
    assert check(user_folder(home, "ben")) == ()


def test_the_calibration_comes_along_with_the_vectors(home: Path, source: Path) -> None:
    ours = replace(EMBEDDER, calibration=replace(EMBEDDER.calibration, surprise_centre=0.9))
    with fresh(home, embedder=ours) as log:
        assert load(source, log).embedder == EMBEDDER


@pytest.mark.parametrize(
    "embed",
    [
        lambda texts: unit(*texts)[:-1],
        lambda texts: 2 * unit(*texts),
        lambda texts: unit(*texts, dimension=3),
    ],
)
def test_an_embedder_that_gives_something_else(home: Path, tmp_path: Path, embed: Callable[..., Vectors]) -> None:
    path = exported(home, tmp_path / "text", vectors=False).path
    with fresh(home) as log:
        before = log.manifest
        with pytest.raises(BadInput, match="vector"):
            load(path, log, embedding=replace(EMBEDDING, embed=embed))
        assert log.manifest == before
    assert held(home, "ben")["turns"] == []


def test_it_is_not_mixed_into_a_memory(home: Path, source: Path) -> None:
    before = held(home, "ana")
    with pytest.raises(BadInput, match="'ana' has a memory already") as caught:
        imported(source, home, "ana")
    assert "another user name" in caught.value.hint
    assert held(home, "ana") == before


def test_where_it_can_be_written(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("something dear")
    with pytest.raises(BadInput, match="exists already"):
        exported(home, target)
    assert target.read_text() == "something dear"
    exported(home, target, overwrite=True)
    assert inspect(target).user == "ana"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with pytest.raises(BadInput, match="is a folder"):
        exported(home, tmp_path, overwrite=True)
    with pytest.raises(StoreError, match="cannot write"):
        exported(home, tmp_path / "no" / "such" / "folder")


def test_a_damaged_memory_gives_no_archive(home: Path, tmp_path: Path) -> None:
    folder = user_folder(home, "ana")
    for name, at, message in (
        ("turns.jsonl", 30, r"turns\.jsonl, line 1 does not match"),
        ("records.rows", 5, r"records\.rows, row 1 does not match"),
        ("decisions.rows", 40, r"decisions\.rows, row 2 does not match"),
    ):
        [path] = folder.glob(f"epoch-*/{name}")
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StoreDamaged, match=message):
            exported(home, tmp_path / "out")
        path.write_bytes(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home"]


# --- any memory ------------------------------------------------------------------------------------------------------

VERBS = ["say", "encode", "forget-turn", "forget-record", "session", "usage"]
STEP = st.tuples(st.sampled_from(VERBS), st.integers(0, 10**6))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEP, max_size=14), text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
)
def test_any_memory_comes_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], text: str
) -> None:
    home = tmp_path_factory.mktemp("any")
    with opened(home, disk=FailingDisk(0)) as store:
        for verb, n in steps:
            act(store, verb, n, text)
    exported(home, home / "out")
    with fresh(home, disk=FailingDisk(0)) as log:
        load(home / "out", log)
    assert held(home, "ben") == held(home, "ana")
    shutil.rmtree(home)


def act(store: Store, verb: str, n: int, text: str) -> None:
    sessions, pending, records = store.sessions(), store.pending(), store.records()
    if verb == "say" or not sessions:
        say(store, f"S{n % 3}", 1 + n % 3)
    elif verb == "encode" and pending:
        segment = pending[n % len(pending)]
        turns = [t.index for t in store.turns(segment.session, segment.start, segment.end + 1)]
        encode(
            store,
            segment,
            [some_record(segment, f"{text} {k}", turns=tuple(turns), entities=(text, "Ana")) for k in range(n % 4)],
            text,
        )
    elif verb == "forget-turn":
        turn = random.Random(n).choice(store.turns(sessions[n % len(sessions)]))
        store.forget(Selection(turns=(turn.id,)))
    elif verb == "forget-record" and records:
        store.forget(Selection(records=(records[n % len(records)].id,)))
    elif verb == "session":
        store.forget(Selection(session=sessions[n % len(sessions)]))
    elif verb == "usage":
        store.add_usage(Usage("encode", text, n, n))


# --- bad archives ----------------------------------------------------------------------------------------------------


def members_of(source: Path) -> Members:
    with zipfile.ZipFile(source) as file:
        return {name: file.read(name) for name in file.namelist()}


def packed(target: Path, members: Members) -> Path:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return target


def told(members: Members) -> Members:
    """The same with a table of contents that fits, as somebody makes it who changes an archive with care."""
    about = json.loads(members["archive.json"])
    for name, member in about["members"].items():
        data = members[name]
        member["bytes"], member["sha256"] = len(data), hashlib.sha256(data).hexdigest()
        if name.endswith(".jsonl"):
            member["count"] = data.count(b"\n")
    return {**members, "archive.json": json.dumps(about).encode()}


def changed(members: Members, name: str, old: bytes, new: bytes) -> Members:
    assert old in members[name]
    return {**members, name: members[name].replace(old, new, 1)}


def about_with(original: Members, **fields: Any) -> Members:
    return {**original, "archive.json": json.dumps({**json.loads(original["archive.json"]), **fields}).encode()}


def embedder_with(members: Members, **fields: Any) -> Members:
    return about_with(members, embedder={**json.loads(members["archive.json"])["embedder"], **fields})


def with_row(members: Members, row: Any) -> Members:
    width = 4 * EMBEDDER.dimension
    data = members["records.rows"]
    return told({**members, "records.rows": data[:width] + np.asarray(row, "<f4").tobytes() + data[2 * width :]})


def refused(source: Path, home: Path, *, kind: type[Exception], message: str) -> None:
    """With a clear error, and nothing written."""
    with fresh(home) as log:
        before = log.manifest
        with pytest.raises(kind, match=message):
            load(source, log)
        assert log.manifest == before
        assert sorted(p.name for p in log.path.iterdir()) == ["epoch-000001", "lock", "manifest.json"]


LATE, EARLY = b'"9999-12-31T23:00:00-12:00"', b'"0001-01-01T00:30:00+10:00"'
AT = b'"2023-05-08T13:56:00Z"'

CHANGES: list[tuple[str, type[Exception], Callable[[Members], Members]]] = [
    # the members
    (r"holds '\.\./turns\.jsonl'", BadInput, lambda m: {**m, "../turns.jsonl": b""}),
    (r"holds '/etc/passwd'", BadInput, lambda m: {**m, "/etc/passwd": b""}),
    (r"holds 'a\\\\b'", BadInput, lambda m: {**m, "a\\b": b""}),
    (r"holds 'sub/'", BadInput, lambda m: {**m, "sub/": b""}),
    (r"holds 'notes\.txt'", BadInput, lambda m: {**m, "notes.txt": b""}),
    ("has no segments.jsonl", BadInput, lambda m: {n: d for n, d in m.items() if n != "segments.jsonl"}),
    ("has no archive.json", BadInput, lambda m: {n: d for n, d in m.items() if n != "archive.json"}),
    ("do not agree about 'nodes.rows'", BadInput, lambda m: {n: d for n, d in m.items() if n != "nodes.rows"}),
    # the table of contents
    ("archive.json cannot be understood", BadInput, lambda m: {**m, "archive.json": b"{"}),
    ("archive.json cannot be understood", BadInput, lambda m: {**m, "archive.json": b"[" * 100_000}),
    ("archive.json cannot be understood", BadInput, lambda m: {**m, "archive.json": b'"kind"'}),
    ("archive.json is larger than 1 MB", BadInput, lambda m: {**m, "archive.json": b" " * (1 << 20) + b"{}"}),
    ("of kind 'cookbook'", BadInput, lambda m: about_with(m, kind="cookbook")),
    ("has version 2, this version of lychee reads up to 1", BadInput, lambda m: about_with(m, format=2)),
    ("archive.json cannot be understood", BadInput, lambda m: about_with(m, members={"turns.jsonl": 3})),
    ("do not agree about", BadInput, lambda m: about_with(m, members={})),
    ("do not agree about", BadInput, lambda m: about_with(m, vectors=None)),
    ("cannot be a user name", BadInput, lambda m: about_with(m, user="../../etc")),
    ("8 vectors of 12 dimensions in float32 have 384", BadInput, lambda m: embedder_with(m, dimension=12)),
    ("have 0 dimensions", BadInput, lambda m: embedder_with(m, dimension=0)),
    ("records.rows has", BadInput, lambda m: about_with(m, records=1)),
    ("of embedder 'other'", BadInput, lambda m: embedder_with(m, name="other")),
    ("turns.jsonl has", BadInput, lambda m: {**m, "turns.jsonl": m["turns.jsonl"] + b"{}\n"}),
    # the lines
    (
        "turns.jsonl does not match its SHA-256",
        StoreDamaged,
        lambda m: changed(m, "turns.jsonl", b"what was said 1", b"what was said 7"),
    ),
    (r"turns\.jsonl, line 2 cannot", BadInput, lambda m: told(changed(m, "turns.jsonl", b"\n{", b"\nx"))),
    (r"turns\.jsonl, line 1 cannot", BadInput, lambda m: told(changed(m, "turns.jsonl", b'"text"', b'"words"'))),
    (r"turns\.jsonl, line 1 cannot", BadInput, lambda m: told(changed(m, "turns.jsonl", b'"user"', b'"queen"'))),
    (r"turns\.jsonl, line 1 cannot", BadInput, lambda m: told(changed(m, "turns.jsonl", b"what", b"\xff\xfe"))),
    (r"turns\.jsonl, line 1 cannot", BadInput, lambda m: told(changed(m, "turns.jsonl", b"what", rb"\ud800"))),
    (
        r"turns\.jsonl, line 1 cannot",
        BadInput,
        lambda m: told(changed(m, "turns.jsonl", AT, b'"0000-01-01T00:00:00Z"')),
    ),
    ("outside of the calendar", BadInput, lambda m: told(changed(m, "turns.jsonl", AT, LATE))),
    ("outside of the calendar", BadInput, lambda m: told(changed(m, "turns.jsonl", AT, EARLY))),
    ("outside of the calendar", BadInput, lambda m: told(changed(m, "encodings.jsonl", AT, LATE))),
    (
        "turn 0 of session 'S1' cannot follow",
        BadInput,
        lambda m: told(changed(m, "turns.jsonl", b'"index":1', b'"index":0')),
    ),
    ("cannot follow", BadInput, lambda m: told(changed(m, "turns.jsonl", b'"index":0', b'"index":-1'))),
    (
        "cannot follow",
        BadInput,
        lambda m: told(changed(m, "turns.jsonl", b'"index":2', b'"index":9999999999999999999')),
    ),
    ("contradicts itself: .* stored twice", BadInput, lambda m: told(changed(m, "turns.jsonl", b'"D1"', b'"D0"'))),
    ("about turns 0 to 77", BadInput, lambda m: told(changed(m, "decisions.jsonl", b'"end":0', b'"end":77'))),
    ("session 'Z'", BadInput, lambda m: told(changed(m, "segments.jsonl", b'"session":"S1"', b'"session":"Z"'))),
    (
        "is in it twice",
        BadInput,
        lambda m: told({**m, "segments.jsonl": m["segments.jsonl"] + m["segments.jsonl"].split(b"\n")[0] + b"\n"}),
    ),
    (
        "segment:S1:7-8 is encoded twice, or is not in it",
        BadInput,
        lambda m: told(
            changed(m, "encodings.jsonl", b'"segment":"segment:S1:0-2"}\n', b'"segment":"segment:S1:7-8"}\n')
        ),
    ),
    (
        "cannot go on with turn 3",
        BadInput,
        lambda m: told({**m, "forgotten.jsonl": b'{"session":"S8","following":3}\n'}),
    ),
    ("cannot go on with turn 1", BadInput, lambda m: told(changed(m, "forgotten.jsonl", b":5", b":1"))),
    ("label of its own", BadInput, lambda m: told(changed(m, "nodes.jsonl", b'"kind":"topic"', b'"kind":"temporal"'))),
    (r"usage\.jsonl, line 1 cannot", BadInput, lambda m: told(changed(m, "usage.jsonl", b"812", b'"many"'))),
    # the rows
    ("vector 1 has length nan", BadInput, lambda m: with_row(m, [np.nan] * 8)),
    ("vector 1 has length inf", BadInput, lambda m: with_row(m, [np.inf] * 8)),
    ("vector 1 has length 2.828", BadInput, lambda m: with_row(m, [1.0] * 8)),
    ("vector 1 has length 0", BadInput, lambda m: with_row(m, [0.0] * 8)),
]


@pytest.mark.parametrize(
    ("message", "kind", "change"), CHANGES, ids=[f"{n}: {c[0][:40]}" for n, c in enumerate(CHANGES)]
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_archive_that_says_something_else(
    source: Path, tmp_path: Path, message: str, kind: type[Exception], change: Callable[[Members], Members]
) -> None:
    bad = packed(tmp_path / "bad", change(members_of(source)))
    refused(bad, tmp_path / "target", kind=kind, message=message)


def test_a_careful_repacking_is_accepted(home: Path, source: Path, tmp_path: Path) -> None:
    """The changes above are refused for what they change, not for having been packed by another hand."""
    imported(packed(tmp_path / "same", told(members_of(source))), home)
    assert held(home, "ben") == held(home, "ana")


@pytest.mark.parametrize(
    "data", [b"", b"no zip at all", b"PK\x03\x04" + b"\0" * 200, os.urandom(4096), b"PK\x05\x06" + b"\0" * 18]
)
def test_another_file_is_no_archive(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad").write_bytes(data)
    refused(tmp_path / "bad", tmp_path / "home", kind=BadInput, message=r"no zip file|has no archive\.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", tmp_path / "home", kind=StoreError, message="cannot read .*none")
    refused(tmp_path, tmp_path / "home2", kind=BadInput, message="is no file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", tmp_path / "home3", kind=BadInput, message="is no file")


def test_a_member_twice(source: Path, tmp_path: Path) -> None:
    shutil.copy(source, tmp_path / "bad")
    with zipfile.ZipFile(tmp_path / "bad", "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("turns.jsonl", b"")
    refused(tmp_path / "bad", tmp_path / "target", kind=BadInput, message=r"holds turns\.jsonl more than once")


def test_a_link(source: Path, tmp_path: Path) -> None:
    members = members_of(source)
    info = zipfile.ZipInfo("usage.jsonl")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "bad", "w") as file:
        for name, data in members.items():
            file.writestr(info if name == "usage.jsonl" else name, b"/etc/passwd" if name == "usage.jsonl" else data)
    refused(tmp_path / "bad", tmp_path / "target", kind=BadInput, message=r"usage\.jsonl is a link")


@pytest.mark.parametrize(
    ("compression", "message"), [(zipfile.ZIP_BZIP2, "other than deflate"), (zipfile.ZIP_LZMA, "other than")]
)
def test_another_compression(source: Path, tmp_path: Path, compression: int, message: str) -> None:
    with zipfile.ZipFile(tmp_path / "bad", "w", compression) as file:
        for name, data in members_of(source).items():
            file.writestr(name, data)
    refused(tmp_path / "bad", tmp_path / "target", kind=BadInput, message=message)


def test_an_encrypted_one(source: Path, tmp_path: Path) -> None:
    """Whatever encrypts it, the flag in the list of members says so."""
    with zipfile.ZipFile(tmp_path / "bad", "w") as file:
        for name, data in members_of(source).items():
            file.writestr(name, data)
            file.getinfo(name).flag_bits |= 1
    refused(tmp_path / "bad", tmp_path / "target", kind=BadInput, message="is encrypted")


def test_a_flipped_bit_is_found_or_means_nothing(source: Path, tmp_path: Path) -> None:
    whole, members = source.read_bytes(), members_of(source)
    found = 0
    for at in {*range(0, len(whole), 11), *range(len(whole) - 1000, len(whole))}:
        bad = tmp_path / "bad"
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        try:
            with archive.opened(bad) as file:
                file.verify()
                for name, data in members.items():
                    assert b"".join(file.blocks(name)) == data  # a date or a right of a member
        except (BadInput, StoreDamaged):
            found += 1
    assert found > 1000


def test_a_cut_one(source: Path, tmp_path: Path) -> None:
    whole = source.read_bytes()
    for size in {*range(0, len(whole), 97), *range(len(whole) - 60, len(whole))}:
        (tmp_path / "bad").write_bytes(whole[:size])
        with pytest.raises(BadInput, match="its end is missing"):
            inspect(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(whole[: len(whole) // 2] + whole[len(whole) // 2 + 100 :])
    with pytest.raises((BadInput, StoreDamaged)):
        imported(tmp_path / "bad", tmp_path / "target")


# --- bombs -----------------------------------------------------------------------------------------------------------

GIGA = 1 << 30


def bomb(target: Path, members: Members, *, size: int, compressed: int | None = None) -> Path:
    """An archive whose turns.jsonl is ten gigabytes of zeros in ten megabytes, and says it has `size` bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    about = json.loads(members["archive.json"])
    about["members"]["turns.jsonl"]["bytes"] = size
    with zipfile.ZipFile(target, "w") as file:
        for name, data in {**members, "archive.json": json.dumps(about).encode()}.items():
            if name != "turns.jsonl":
                file.writestr(name, data)
        with file.open("turns.jsonl", "w", force_zip64=True) as member:
            for _ in range(10 * 1024):
                member.write(block)
        info = file.getinfo("turns.jsonl")
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, size
        info.compress_size = compressed or info.compress_size
    return target


@pytest.mark.parametrize(
    ("size", "compressed", "message"),
    [
        (10 * GIGA, None, "would grow .*-fold"),  # an honest one
        (10 * GIGA, 60 << 20, "larger than the file|damaged"),  # it says that it does not grow so much
        (1000, None, "damaged"),  # it says that it is small
        (64 << 20, None, "damaged|SHA-256"),  # as much as is allowed
    ],
)
def test_a_bomb(source: Path, tmp_path: Path, size: int, compressed: int | None, message: str) -> None:
    path = bomb(tmp_path / "bomb", members_of(source), size=size, compressed=compressed)
    assert path.stat().st_size < 12 << 20
    start = time.monotonic()
    tracemalloc.start()
    try:
        refused(path, tmp_path / "target", kind=(BadInput, StoreDamaged), message=message)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 20


def test_a_line_without_end(source: Path, tmp_path: Path) -> None:
    members = members_of(source)
    bad = packed(tmp_path / "bad", told({**members, "turns.jsonl": b"[" * (40 << 20) + b"\n" * 8}))
    refused(bad, tmp_path / "target", kind=BadInput, message="line of more than 32 MB")


def test_a_list_of_a_million_members(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad", "w") as file:
        for number in range(3000):
            file.writestr(f"{number:060}", b"")
    refused(tmp_path / "bad", tmp_path / "target", kind=BadInput, message="far more members")


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_an_export_killed_at_every_operation(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    exported(home, out / "ana")
    before = (out / "ana").read_bytes()
    with opened(home) as store:
        say(store, "S5", 1)
    take, taken = copies(out, tmp_path / "copies")
    exported(home, out / "ana", overwrite=True, disk=WatchedDisk(take))
    after = (out / "ana").read_bytes()
    assert len(taken) > 30
    seen = [(copy / "ana").read_bytes() for copy in taken]
    assert {*seen} == {before}
    assert [p.name for p in out.iterdir()] == ["ana"]
    for copy in (taken[0], taken[-1]):  # what the killed one left is no hindrance
        exported(home, copy / "ana", overwrite=True)
        assert (copy / "ana").read_bytes() == after
        assert [p.name for p in copy.iterdir()] == ["ana"]


@pytest.mark.parametrize("lasting", [False, True])
def test_an_export_with_an_error_at_every_operation(home: Path, tmp_path: Path, lasting: bool) -> None:
    counting = FailingDisk(0)
    whole = exported(home, tmp_path / "whole", disk=counting).path.read_bytes()
    assert counting.count > 15
    before = held(home, "ana")
    for at in range(1, counting.count + 1):
        target = tmp_path / str(at) / "out"
        target.parent.mkdir()
        with pytest.raises(StoreError, match="disk is full"):
            exported(home, target, disk=FailingDisk(at, lasting=lasting))
        # The last operation only makes the name durable: the file is there then, and whole.
        assert not target.exists() or (at == counting.count and target.read_bytes() == whole)
        assert lasting or not target.with_name("out.tmp").exists()
        exported(home, target, overwrite=True)
        assert target.read_bytes() == whole
    assert held(home, "ana") == before


def test_an_import_killed_at_every_operation(home: Path, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    opened(target, "ben").close()
    expected = held(home, "ana")
    take, taken = copies(target, tmp_path / "copies")
    with fresh(target, disk=WatchedDisk(take)) as log:
        load(source, log)
    assert len(taken) > 20
    seen = []
    for copy in taken:
        with opened(copy, "ben", disk=FailingDisk(0)) as store:
            seen.append(len(store.sessions()))
            assert list(store.path.glob("epoch-*")) == [store.path / f"epoch-00000{2 if seen[-1] else 1}"]
        if not seen[-1]:
            with fresh(copy, disk=FailingDisk(0)) as log:
                load(source, log)
    for copy in (taken[0], taken[len(taken) // 2], taken[-1]):
        assert held(copy, "ben") == expected
    assert seen == sorted(seen)
    assert {*seen} == {0, 3}


@pytest.mark.parametrize("lasting", [False, True])
def test_an_import_with_an_error_at_every_operation(home: Path, source: Path, tmp_path: Path, lasting: bool) -> None:
    expected = held(home, "ana")
    with opened(tmp_path / "empty", "ben") as store:
        store.add_usage(Usage("probe", "sample", 1, 1))
    counting = FailingDisk(0)
    counted = shutil.copytree(tmp_path / "empty", tmp_path / "count")
    with fresh(counted, disk=counting) as log:
        load(source, log)
    assert counting.count > 20
    for at in range(1, counting.count + 1):
        target = shutil.copytree(tmp_path / "empty", tmp_path / "target")
        with fresh(target, disk=FailingDisk(at, lasting=lasting)) as log, pytest.raises(StoreError):
            load(source, log)
        with opened(target, "ben", disk=FailingDisk(0)) as store:
            arrived = bool(store.sessions())
        if not arrived:
            with fresh(target, disk=FailingDisk(0)) as log:
                load(source, log)
        with opened(target, "ben", disk=FailingDisk(0)) as store:
            assert store.turns("S1") == tuple(expected["turns"][0])
            assert len(store.records()) == len(expected["records"])
        shutil.rmtree(target)


def test_calls_are_counted_once_when_an_import_is_repeated(home: Path, source: Path, tmp_path: Path) -> None:
    """They are logged just before the switch, so an import that is killed there has logged them."""
    opened(tmp_path, "ben").close()
    with fresh(tmp_path) as log:
        payloads = [json.loads(line) for line in members_of(source)["usage.jsonl"].splitlines()]
        log.append_usage(json.dumps(payloads[0]).encode())
        load(source, log)
    assert held(tmp_path, "ben")["usage"] == held(home, "ana")["usage"]


def test_a_full_disk(home: Path, tmp_path: Path) -> None:
    """A limit on the size of files, as the operating system sets it: the first write beyond it fails."""
    program = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "import test_archive as t; from lychee_local.errors import StoreError\n"
        "def limit(done, total): resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: t.exported(Path(sys.argv[2]), Path(sys.argv[3]), on_progress=limit)\n"
        "except StoreError as error: print(error.message)\n"
    )
    arguments = [str(Path(__file__).parent), str(home), str(tmp_path / "out")]
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "cannot write" in ran.stdout
    assert not list(tmp_path.glob("out*"))

"""A memory of format 1 says the same after it was brought to the present format, and is never in between.

`data/format-1/home` was written by the last version of lychee that had format 1, and `expected.json` holds what that
version answered about it: two scripts of names, a turn of three alphabets, an oversized turn in two fragments, a turn
without a time, a sentence said twice in its session, a segment without records and one that still waits.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from store_samples import EMBEDDER, encode, opened, say, some_record, unit

from lychee_local.errors import StoreDamaged, StoreError, StoreMismatch
from lychee_local.store import Store, check, user_folder
from lychee_local.store.disk import OsDisk
from lychee_local.types import Decision, Node, Record, Segment, Turn, Usage

DATA = Path(__file__).parent / "data" / "format-1"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "home", tmp_path / "home")


ADAPTERS: dict[type, TypeAdapter[Any]] = {k: TypeAdapter(k) for k in (Decision, Node, Record, Segment, Turn, Usage)}


def plain(kind: type, value: object) -> Any:
    return ADAPTERS[kind].dump_python(value, mode="json")


def said_by(store: Store) -> dict[str, Any]:
    """In the form of `expected.json`."""
    sessions = store.sessions()
    return {
        "sessions": list(sessions),
        "turns": {s: [plain(Turn, t) for t in store.turns(s)] for s in sessions},
        "decisions": {s: [plain(Decision, d) for d in store.decisions(s)] for s in sessions},
        "exchange_vectors": {s: store.exchange_vectors(s).tolist() for s in sessions},
        "segments": [plain(Segment, s) for s in store.segments()],
        "pending": [s.id for s in store.pending()],
        "records": {r.id: plain(Record, r) for r in store.records()},
        "record_order": [r.id for r in store.records()],
        "segment_records": {s.id: [r.id for r in store.segment_records(s.id)] for s in store.segments()},
        "nodes": {n.id: {**plain(Node, n), "records": sorted(n.records)} for n in store.nodes()},
        "notes": {s: store.note(s) for s in sessions},
        "usage": [plain(Usage, u) for u in store.usage()],
        "near": {
            "turns": {h.id: h.cosine for h in store.search("turns", unit("a"), 1000)[0]},
            "records": {h.id: h.cosine for h in store.search("records", unit("a"), 1000)[0]},
        },
    }


def assert_as_expected(store: Store) -> None:
    said = said_by(store)
    # The newer format knows where in a turn a record was said.
    said["records"] = {i: {k: v for k, v in r.items() if k != "chars"} for i, r in said["records"].items()}
    # And of a call its session and its time.
    said["usage"] = [{k: v for k, v in u.items() if k not in ("session", "at")} for u in said["usage"]]
    near, expected_near = said.pop("near"), EXPECTED["near"]
    assert said == {name: value for name, value in EXPECTED.items() if name != "near"}
    for field, hits in expected_near.items():
        assert near[field] == pytest.approx(hits, abs=1e-6)


def old_bytes(home: Path) -> dict[str, bytes]:
    folder = user_folder(home, "ana")
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name not in ("lock", "usage.jsonl")}


def test_everything_comes_out_as_it_went_in(home: Path) -> None:
    folder = user_folder(home, "ana")
    with opened(home) as store:
        assert_as_expected(store)
    assert sorted(p.name for p in folder.iterdir()) == ["epoch-000001", "lock", "manifest.json", "usage.jsonl"]
    assert check(folder) == ()
    with opened(home, read_only=True) as store:
        assert_as_expected(store)
        assert [h.id for h in store.search("turns", unit(store.turns("S1")[1].line), 1)[0]] == ["turn:S1:1"]
        assert store.turn_by_ref("Küche / 台所", "ref:ä/1") == store.turns("Küche / 台所")[0]


def test_it_goes_on_growing(home: Path) -> None:
    with opened(home) as store:
        say(store, "S1", 2)
        segment = store.pending()[0]
        encode(store, segment, [some_record(segment, "Ana drinks tea", turns=(3,))])
        assert [t.index for t in store.turns("S1")] == list(range(7))
    assert check(user_folder(home, "ana")) == ()


def test_a_reader_says_that_the_memory_must_be_opened_for_writing_once(home: Path) -> None:
    before = old_bytes(home)
    with pytest.raises(StoreMismatch, match="format 1") as caught:
        opened(home, read_only=True)
    assert "writing" in caught.value.hint
    assert old_bytes(home) == before


def test_another_embedder_is_refused_after_the_migration_as_before(home: Path) -> None:
    with pytest.raises(StoreMismatch, match="embedder"):
        Store.open(home, "ana", embedder=replace(EMBEDDER, name="other"))
    with opened(home) as store:
        assert_as_expected(store)


def test_what_a_killed_writer_of_the_old_version_left_is_no_part_of_it(home: Path) -> None:
    folder = user_folder(home, "ana")
    for name in ("turns.jsonl", "turns.f32", "records.f32", "nodes.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(b"half a line")
    (folder / "turns.hnsw.tmp").write_bytes(b"half a graph")
    with opened(home) as store:
        assert_as_expected(store)
    assert not list(folder.glob("*.tmp"))


def test_an_empty_memory_of_the_old_format(home: Path) -> None:
    """Opened once, never used: there is a manifest and nothing else."""
    folder = user_folder(home, "ana")
    content = json.loads((folder / "manifest.json").read_bytes())
    for path in folder.iterdir():
        path.unlink()
    content["files"] = {name: {"bytes": 0, "check": 0, "count": 0} for name in content["files"]}
    write_manifest(folder, content)
    with opened(home) as store:
        assert store.sessions() == ()
        say(store, "S", 2)
    assert check(folder) == ()


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    import zlib

    body = {name: value for name, value in content.items() if name != "check"}
    text = json.dumps(body, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    (folder / "manifest.json").write_text(json.dumps({**body, "check": zlib.crc32(text)}), encoding="utf-8")


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path, at: int) -> None:
    os.truncate(path, at)


def gone(path: Path, at: int) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "harm", "at", "message"),
    [
        ("turns.jsonl", flipped, 40, r"turns\.jsonl, line 1 does not match .* the text of one turn is lost"),
        ("decisions.jsonl", flipped, 4000, r"decisions\.jsonl, line \d+ does not match"),
        ("segments.jsonl", flipped, 300, r"segments\.jsonl, line 3 does not match"),
        ("encodings.jsonl", flipped, 3, r"encodings\.jsonl, line 1 does not match"),
        ("nodes.jsonl", flipped, 2700, r"nodes\.jsonl, line 32 does not match"),
        (
            "turns.f32",
            flipped,
            33,
            r"turns\.f32, row 2 does not match .* the vector of one turn \(its text is intact\)",
        ),
        ("decisions.f32", flipped, 351, r"decisions\.f32, row 11 does not match"),
        ("records.f32", flipped, 0, r"records\.f32, row 1 does not match"),
        ("nodes.f32", flipped, 1023, r"nodes\.f32, row 32 does not match"),
        ("turns.jsonl", cut, 2000, r"turns\.jsonl ends at byte 2000"),
        ("turns.f32", cut, 100, r"turns\.f32 ends at byte 100"),
        ("nodes.f32", gone, 0, r"nodes\.f32 is missing"),
        ("encodings.jsonl", gone, 0, r"encodings\.jsonl is missing"),
        ("manifest.json", flipped, 300, r"manifest\.json is damaged"),
    ],
)
def test_a_damaged_memory_is_named_and_left_as_it_is(
    home: Path, name: str, harm: Callable[[Path, int], None], at: int, message: str
) -> None:
    harm(user_folder(home, "ana") / name, at)
    before = old_bytes(home)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=message):
            opened(home)
        assert old_bytes(home) == before
        assert not list(user_folder(home, "ana").glob("epoch-*"))


def test_rows_that_no_line_speaks_of_are_damage(home: Path) -> None:
    folder = user_folder(home, "ana")
    content = json.loads((folder / "manifest.json").read_bytes())
    content["files"]["turns.f32"]["count"] += 1
    write_manifest(folder, content)
    with pytest.raises(StoreDamaged, match=r"turns\.f32 does not end with row 12"):
        opened(home)


# --- crashes ---------------------------------------------------------------------------------------------------------


class WatchedDisk(OsDisk):
    """The real disk, with a look at it before each operation that changes it, and in the middle of each write. It does
    not sync: what a killed process has written is there."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def write(self, fd: int, data: bytes, offset: int) -> None:
        half = len(data) // 2
        self._look()
        super().write(fd, data[:half], offset)
        self._look()
        super().write(fd, data[half:], offset + half)

    def sync(self, fd: int) -> None:
        pass

    def truncate(self, fd: int, size: int) -> None:
        self._look()
        super().truncate(fd, size)

    def replace(self, source: Path, target: Path) -> None:
        self._look()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self._look()
        super().remove(path)


class FailingDisk(OsDisk):
    """The real disk, without its slow syncs, until operation number `at`, counted from 1, fails; if `lasting`, so do
    all that follow."""

    def __init__(self, at: int, *, code: int = errno.ENOSPC, lasting: bool = False) -> None:
        self.count = 0
        self._at = at
        self._code = code
        self._lasting = lasting

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at or (self._lasting and self.count > self._at > 0):
            raise OSError(self._code, os.strerror(self._code))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        try:
            self._step()
        except OSError:
            super().write(fd, data[: len(data) // 2], offset)
            raise
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        super().truncate(fd, size)

    def replace(self, source: Path, target: Path) -> None:
        self._step()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


def copies(folder: Path, into: Path) -> tuple[Callable[[], None], list[Path]]:
    """A function that copies `folder` as it stands, and the list of its copies."""
    taken: list[Path] = []

    def take() -> None:
        taken.append(into / str(len(taken)))
        shutil.copytree(folder, taken[-1])

    return take, taken


def test_killed_at_every_operation(home: Path, tmp_path: Path) -> None:
    take, taken = copies(home, tmp_path / "copies")
    opened(home, disk=WatchedDisk(take)).close()
    assert len(taken) > 30
    formats = []
    for copy in taken:
        folder = user_folder(copy, "ana")
        formats.append(json.loads((folder / "manifest.json").read_bytes())["format"])
        if formats[-1] == 1:
            assert old_bytes(copy).items() >= old_bytes(DATA / "home").items()
        with opened(copy) as store:
            assert_as_expected(store)
        assert sorted(p.name for p in folder.iterdir()) == ["epoch-000001", "lock", "manifest.json", "usage.jsonl"]
        assert check(folder) == ()
    assert formats == sorted(formats)  # there is one moment at which it happens
    assert {*formats} == {1, 2}


@pytest.mark.parametrize("lasting", [False, True])
def test_an_error_at_every_operation(home: Path, tmp_path: Path, lasting: bool) -> None:
    counting = FailingDisk(0)
    counted = shutil.copytree(home, tmp_path / "count")
    opened(counted, disk=counting).close()
    assert counting.count > 30
    for at in range(1, counting.count + 1):
        copy = shutil.copytree(home, tmp_path / str(at))
        with pytest.raises(StoreError, match="disk is full"):
            opened(copy, disk=FailingDisk(at, lasting=lasting))
        with opened(copy, disk=FailingDisk(0)) as store:
            assert_as_expected(store)
        shutil.rmtree(copy)


def test_a_full_disk_leaves_no_new_folder_behind(home: Path) -> None:
    before = old_bytes(home)
    with pytest.raises(StoreError, match="disk is full"):
        opened(home, disk=FailingDisk(5))
    assert old_bytes(home) == before
    assert not list(user_folder(home, "ana").glob("epoch-*"))


def test_the_rows_are_the_old_ones_to_the_bit(home: Path) -> None:
    folder = user_folder(home, "ana")
    before = {name: (folder / f"{name}.f32").read_bytes() for name in ("turns", "decisions", "records", "nodes")}
    opened(home).close()
    for name, data in before.items():
        rows = (folder / "epoch-000001" / f"{name}.rows").read_bytes()
        assert rows == data
        assert np.frombuffer(rows, "<f4").size % EMBEDDER.dimension == 0

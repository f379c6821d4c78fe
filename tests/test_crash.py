"""After any crash a memory is as before or as after, and what was acknowledged is there.

Three ways to crash: the folder as it stands before, within and after every single operation on the disk; the folder as
a power cut would leave it, without what was not synced; and a real process killed by SIGKILL. And one way to fail: an
error from the operating system at every operation.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import store_samples as samples
from store_samples import content, encode, filled, opened, say, segment_of, some_record, some_turns, unit

from lychee_local.errors import StoreError
from lychee_local.store import Store, check, user_folder
from lychee_local.store.disk import OsDisk


def step(store: Store) -> None:
    """The commit that is interrupted: it touches every file."""
    turns = some_turns("S3", len(store.turns("S3")), 2)
    segment = segment_of(turns)
    record = some_record(segment, f"Ana flew {len(store.records())}", entities=("Ana", f"Zoe {len(store.records())}"))
    with store.transaction() as tx:
        tx.add_turns(turns, unit(*[t.line for t in turns]))
        tx.add_decisions(samples.some_decisions(turns), unit(*[t.line for t in turns]))
        tx.add_segments([segment])
        labels = {n.id: unit(text)[0] for n, text in store.missing_nodes(segment, [record])}
        tx.add_encoding(segment, [record], unit(record.embedded_text), labels, "a note")


class WatchedDisk:
    """The real disk, with a look at the folder before each operation, in the middle of each write, and after it."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._disk = OsDisk()
        self._look = look

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._look()
        half = len(data) // 2
        self._disk.write(fd, data[:half], offset)
        self._look()
        self._disk.write(fd, data[half:], offset + half)
        self._look()

    def sync(self, fd: int) -> None:
        self._look()
        self._disk.sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._look()
        self._disk.truncate(fd, size)
        self._look()

    def replace(self, source: Path, target: Path) -> None:
        self._look()
        self._disk.replace(source, target)
        self._look()

    def remove(self, path: Path) -> None:
        self._look()
        self._disk.remove(path)
        self._look()


def copies(home: Path, into: Path) -> tuple[Callable[[], None], list[Path]]:
    """A function that copies `home` as it stands, and the list of its copies."""
    taken: list[Path] = []

    def take() -> None:
        taken.append(into / str(len(taken)))
        shutil.copytree(home, taken[-1])

    return take, taken


def test_killed_at_every_operation_of_a_commit(tmp_path: Path) -> None:
    home = tmp_path / "home"
    filled(home).close()
    take, taken = copies(home, tmp_path / "copies")
    with opened(home, disk=WatchedDisk(take)) as store:
        before = content(store)
        step(store)
        after = content(store)
    assert len(taken) > 40
    seen = []
    for copy in taken:
        assert check(user_folder(copy, "ana")) == ()
        held = content(opened(copy, read_only=True))
        assert held in (before, after)
        seen.append(held == after)
        with opened(copy) as store:
            assert content(store) == held
            if held == before:
                step(store)
            assert content(store) == after
        assert content(opened(copy, read_only=True)) == after
        assert check(user_folder(copy, "ana")) == ()
    assert seen == sorted(seen)  # before, before, ..., after: there is one moment at which it happens
    assert {*seen} == {False, True}


def test_killed_at_every_operation_of_a_first_start(tmp_path: Path) -> None:
    home = tmp_path / "home"
    take, taken = copies(home, tmp_path / "copies")
    opened(home, disk=WatchedDisk(take)).close()
    assert len(taken) >= 5
    for copy in taken:
        with filled(copy) as store:
            assert check(store.path) == ()


def test_killed_while_leftovers_are_cut(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with filled(home) as store:
        before, folder = content(store), store.path
    for name in ("turns.jsonl", "turns.rows", "nodes.jsonl"):
        with (folder / "epoch-000001" / name).open("ab") as file:
            file.write(b"left over from a killed writer")
    (folder / "manifest.json.tmp").write_bytes(b"half")
    assert check(folder) == ()
    take, taken = copies(home, tmp_path / "copies")
    opened(home, disk=WatchedDisk(take)).close()
    assert not (folder / "manifest.json.tmp").exists()
    assert len(taken) == 6
    for copy in [*taken, home]:
        with opened(copy) as store:
            assert content(store) == before


class PowerCut:
    """The real disk, and beside it what would survive a power cut: the bytes of a file as of its last sync, the names
    in a folder as of the folder's last sync. Written bytes that were not synced come back as zeros."""

    def __init__(self, home: Path, into: Path) -> None:
        self._disk = OsDisk()
        self._home = home
        self._into = into
        self._synced: dict[int, bytes] = {}  # inode -> content
        self._names: dict[Path, int] = {}  # name -> inode
        self.taken: list[Path] = []
        for path in self._files():
            self._synced[path.stat().st_ino] = path.read_bytes()
            self._names[path] = path.stat().st_ino

    def _files(self) -> Iterator[Path]:
        return (p for p in self._home.rglob("*") if p.is_file())

    def cut(self) -> None:
        copy = self._into / str(len(self.taken))
        for path, inode in self._names.items():
            target = copy / path.relative_to(self._home)
            target.parent.mkdir(parents=True, exist_ok=True)
            durable = self._synced.get(inode, b"")
            now = path.stat().st_size if path.exists() and path.stat().st_ino == inode else len(durable)
            target.write_bytes(durable + b"\0" * max(0, now - len(durable)))
        self.taken.append(copy)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._disk.write(fd, data, offset)
        self.cut()

    def sync(self, fd: int) -> None:
        self._disk.sync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self._names = {p: p.stat().st_ino for p in self._files()}
        else:
            self._synced[os.fstat(fd).st_ino] = path.read_bytes()
        self.cut()

    def truncate(self, fd: int, size: int) -> None:
        self._disk.truncate(fd, size)
        self.cut()

    def replace(self, source: Path, target: Path) -> None:
        self._disk.replace(source, target)
        self.cut()
        kept = self._names
        self._names = {**kept, target: target.stat().st_ino}  # the new name may be durable before the folder's sync
        self.cut()
        self._names = kept

    def remove(self, path: Path) -> None:
        self._disk.remove(path)
        kept = self._names  # whether the name is gone for good shows with the folder's next sync
        self._names = {p: inode for p, inode in kept.items() if p != path}
        self.cut()
        self._names = {p: inode for p, inode in kept.items() if p.exists() or p != path}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the name behind a descriptor is read from /proc")
def test_power_cut_at_every_operation_of_a_commit(tmp_path: Path) -> None:
    home = (tmp_path / "home").resolve()
    filled(home).close()
    cut = PowerCut(home, tmp_path / "copies")
    with opened(home, disk=cut) as store:
        before = content(store)
        step(store)
        cut.cut()  # after the acknowledgement
        after = content(store)
    held = []
    for copy in cut.taken:
        assert check(user_folder(copy, "ana")) == ()
        held.append(content(opened(copy, read_only=True)))
        assert held[-1] in (before, after)
    assert held[0] == before
    assert held[-1] == after  # what was acknowledged is durable


# --- errors ----------------------------------------------------------------------------------------------------------


class FailingDisk:
    """The real disk until operation number `at`; then one operation fails, or, if `lasting`, every one from there."""

    def __init__(self, at: int, code: int, *, lasting: bool) -> None:
        self._disk = OsDisk()
        self._at = at
        self._code = code
        self._lasting = lasting
        self.count = 0

    def _count(self) -> None:
        self.count += 1
        if self.count == self._at or (self._lasting and self.count > self._at):
            raise OSError(self._code, os.strerror(self._code))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._disk.write(fd, data[: len(data) // 2], offset)
        self._count()
        self._disk.write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count()
        self._disk.sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        self._disk.truncate(fd, size)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        self._disk.replace(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        self._disk.remove(path)


def operations_of_a_commit(home: Path) -> int:
    disk = FailingDisk(0, errno.EIO, lasting=False)
    with filled(home) as store:
        store.close()
    with opened(home, disk=disk) as store:
        step(store)
    return disk.count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_at_every_operation_of_a_commit(tmp_path: Path, code: int) -> None:
    filled(tmp_path / "home").close()
    total = operations_of_a_commit(tmp_path / "count")
    assert total == 22  # nine files written and synced, the manifest written, synced, replaced, the folder synced
    for at in range(1, total + 1):
        home = tmp_path / str(at)
        shutil.copytree(tmp_path / "home", home)
        with opened(home, disk=FailingDisk(at, code, lasting=False)) as store:
            before = content(store)
            with pytest.raises(StoreError, match="cannot write"):
                step(store)
            assert content(store) == before
            assert content(opened(home, read_only=True)) == before
            assert check(store.path) == ()
            step(store)  # it stays usable
            after = content(store)
        assert content(opened(home, read_only=True)) == after
        assert check(user_folder(home, "ana")) == ()


def test_a_disk_that_fails_for_good(tmp_path: Path) -> None:
    filled(tmp_path / "home").close()
    total = operations_of_a_commit(tmp_path / "count")
    for at in range(1, total + 1):
        home = tmp_path / str(at)
        shutil.copytree(tmp_path / "home", home)
        with opened(home, disk=FailingDisk(at, errno.EIO, lasting=True)) as store:
            before = content(store)
            for _ in range(2):
                with pytest.raises(StoreError):
                    step(store)
            assert content(store) == before
        # The last operation that failed may have been the one that only makes the commit durable: then it is there.
        with opened(home) as store:
            assert len(store.turns("S3")) in (0, 2)
            step(store)
            assert check(store.path) == ()


def test_an_interrupt_at_every_operation_of_a_commit(tmp_path: Path) -> None:
    """Ctrl-C is an exception that can come from anywhere."""

    class Interrupted(OsDisk):
        def __init__(self, at: int) -> None:
            self.left = at

        def sync(self, fd: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            super().sync(fd)

    filled(tmp_path / "home").close()
    for at in range(1, 12):
        home = tmp_path / str(at)
        shutil.copytree(tmp_path / "home", home)
        with opened(home, disk=Interrupted(at)) as store:
            before = content(store)
            with pytest.raises(KeyboardInterrupt):
                step(store)
            assert content(store) == before
            step(store)
            after = content(store)
        assert content(opened(home, read_only=True)) == after


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children that start quickly: one server imports the package once and forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lychee_local.store"])
    return context


def test_killed_by_sigkill_at_random_moments(tmp_path: Path, processes: Any) -> None:
    chance = random.Random(5)
    acknowledged = 0
    for kills in range(30):
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=samples.ingest, args=(str(tmp_path), theirs))
        child.start()
        theirs.close()
        try:
            assert ours.poll(60), "the child did not commit anything"
            acknowledged = ours.recv()
            time.sleep(chance.random() * 0.05)
        finally:
            child.kill()
            child.join(20)
        while True:
            try:
                acknowledged = ours.recv()
            except EOFError:
                break
        assert check(user_folder(tmp_path, "ana")) == ()
        with opened(tmp_path, read_only=True) as store:
            held = store.turns("S")
            assert len(held) in (acknowledged, acknowledged + 2)
            assert list(held) == some_turns("S", 0, len(held))
            assert len(store.decisions("S")) == len(held)
            assert len(store.pending()) <= kills + 1  # each child may have been killed before its encoding
    with opened(tmp_path) as store:
        for segment in store.pending():
            encode(store, segment, [])
        say(store, "S", 2)
        assert store.pending() == store.segments()[-1:]
    assert check(user_folder(tmp_path, "ana")) == ()


def test_readers_see_whole_commits_while_a_writer_commits(tmp_path: Path, processes: Any) -> None:
    ours, theirs = processes.Pipe(duplex=False)
    child = processes.Process(target=samples.ingest, args=(str(tmp_path), theirs))
    child.start()
    try:
        assert ours.poll(60)
        readers = [opened(tmp_path, read_only=True) for _ in range(3)]
        until = time.monotonic() + 2.0
        seen = 0
        while time.monotonic() < until:
            for reader in readers:
                with reader.snapshot():
                    held = reader.turns("S")
                    assert len(held) >= 2
                    assert len(held) % 2 == 0
                    assert len(reader.decisions("S")) == len(held) == 2 * len(reader.segments())
                    assert len(reader.records()) == 2 * (len(reader.segments()) - len(reader.pending()))
                    assert len(reader.search("turns", unit("x"), 10_000)[0]) == len(held)
                    seen = max(seen, len(held))
        assert child.is_alive()
        acknowledged = 0
        while ours.poll():
            acknowledged = ours.recv()
        assert seen > 2
        assert acknowledged >= seen - 2
    finally:
        child.kill()
        child.join(20)


def test_several_processes_open_a_fresh_memory_at_once(tmp_path: Path, processes: Any) -> None:
    pipes, children = [], []
    for _ in range(6):
        ours, theirs = processes.Pipe(duplex=False)
        children.append(processes.Process(target=samples.open_fresh, args=(str(tmp_path), theirs)))
        pipes.append(ours)
    for child in children:
        child.start()
    counts = []
    for ours, child in zip(pipes, children, strict=True):
        assert ours.poll(60)
        counts.append(ours.recv())
        child.join(20)
        assert child.exitcode == 0
    assert sorted(counts) == [2, 4, 6, 8, 10, 12]
    assert check(user_folder(tmp_path, "ana")) == ()

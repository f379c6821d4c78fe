"""One user's folder and its commits.

Owns the order of writes that makes a commit: the data files of the epoch are appended to and synced, then the manifest
is replaced and the folder synced. The manifest is the only commit point, so after a crash the memory is as before or as
after. What lies beyond the committed bytes is ignored by readers and cut off by the next writer; an epoch folder that
the manifest does not name is what a killed rewriting left, and removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from lychee_local.errors import StoreDamaged, StoreError, StoreMismatch, there_are
from lychee_local.store.disk import Disk, OsDisk, read_file, remove_folder, sync_folder, write_file
from lychee_local.store.epoch import Batch, EpochFiles, damaged, require_sizes
from lychee_local.store.lock import WriterLock
from lychee_local.store.manifest import (
    LINE_FILES,
    LOCK,
    MANIFEST,
    USAGE,
    EmbedderIdentity,
    Extent,
    Manifest,
    Precision,
    epoch_folder,
    os_error,
    parse_manifest,
    user_folder,
    user_name,
)
from lychee_local.store.migrate import upgrade

REMOVALS = 5  # of a folder in which others may still create files


class Log:
    """One user's folder. `manifest` is the last commit that this object has seen."""

    def __init__(
        self,
        home: Path,
        user: str,
        embedder: EmbedderIdentity | None,
        *,
        read_only: bool,
        precision: Precision = "float32",
        wait_seconds: float = 0.0,
        disk: Disk | None = None,
    ) -> None:
        """With `embedder` None the memory must exist, and may be of any embedder.

        Raises:
            StoreLocked, StoreMismatch, StoreDamaged, or StoreError where the folder is not usable.
        """
        self.path = user_folder(home, user)
        self.read_only = read_only
        self.disk: Disk = disk or OsDisk()
        self._files: EpochFiles | None = None
        self._lock: WriterLock | None = None
        self._broken = ""
        self._owed: Mapping[str, Extent] = {}  # what could not be undone when it failed
        name = user_name(user)
        try:
            if not read_only:
                if not (self.path / LOCK).exists() and not (self.path / MANIFEST).exists():
                    self._require_empty()  # before the lock file is put there
                    if embedder is None:
                        raise no_memory(name, self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = WriterLock(self.path, wait_seconds=wait_seconds)
                upgrade(self.path, self.disk)
            seen = read_manifest(self.path)
            if seen is None:
                self._require_empty()
                if read_only or embedder is None:
                    raise no_memory(name, self.path)
                seen = self._create(Manifest(name, embedder, precision))
            self._raw, self.manifest = seen
            self._check_identity(name, embedder)
            self._require_files()  # before anything is cleared away that may be needed
            if not read_only:
                self._clear_leftovers()
        except OSError as error:
            self.close()
            raise os_error(error, "open", self.path) from error
        except StoreError:
            self.close()
            raise

    @property
    def epoch(self) -> Path:
        """The folder of the files that `manifest` speaks of."""
        return self.path / self.manifest.folder

    def _require_files(self) -> None:
        while True:
            try:
                return require_sizes(self.epoch, self.manifest.files)
            except StoreDamaged:
                manifest = self.poll() if self.read_only else None
                if manifest is None or manifest.epoch == self.manifest.epoch:
                    raise
                self.adopt(manifest)  # a writer has put another epoch in the place of this one meanwhile

    def _require_empty(self) -> None:
        """A folder without a manifest is ours to fill only if it holds nothing but what a killed first start left."""
        if _has_lines(self.path):
            raise _manifest_lost(self.path)
        present = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        strange = present - {LOCK, MANIFEST + ".tmp", epoch_folder(1)}
        if strange:
            raise StoreError(
                f"{self.path} holds files of another program: {', '.join(sorted(strange)[:3])}",
                hint="choose another home",
            )

    def _create(self, manifest: Manifest) -> tuple[bytes, Manifest]:
        (self.path / manifest.folder).mkdir(exist_ok=True)
        write_file(self.disk, self.path / MANIFEST, manifest.dump())
        sync_folder(self.disk, self.path.parent)
        return manifest.dump(), manifest

    def _check_identity(self, name: str, embedder: EmbedderIdentity | None) -> None:
        if self.manifest.user != name:
            raise StoreMismatch(
                f"{self.path} is the memory of {self.manifest.user!r}, not of {name!r}",
                hint="was the folder copied or renamed? give it back its own name",
            )
        if embedder is None:
            return
        kept = self.manifest.embedder
        for part in ("name", "digest", "dimension"):
            theirs, ours = getattr(kept, part), getattr(embedder, part)
            if theirs != ours:
                raise StoreMismatch(
                    f"{self.path} was written with embedder {kept.name!r} ({part} {theirs}), "
                    f"now opened with {embedder.name!r} ({part} {ours})",
                    hint="open it with the embedder it was written with, or embed it anew: lychee reindex --embedder "
                    + embedder.name,
                )

    # --- reading -----------------------------------------------------------------------------------------------------

    def poll(self) -> Manifest | None:
        """The manifest on disk where it differs from `manifest`, else None."""
        # It is read, not only looked at: size, time and inode can all come back the same after two quick commits.
        seen = read_manifest(self.path)
        if seen is None:
            raise StoreDamaged(f"{self.path / MANIFEST} has disappeared", hint="restore the folder from a backup")
        return None if seen[0] == self._raw else seen[1]

    def adopt(self, manifest: Manifest) -> None:
        """Take `manifest`, from `poll`, as the commit that has been seen."""
        self._raw, self.manifest = manifest.dump(), manifest

    # --- writing -----------------------------------------------------------------------------------------------------

    def require_writable(self) -> None:
        """Raises StoreError for a log that was opened read-only, by another process before a fork, or is broken."""
        if self._lock is None:
            raise StoreError(f"{self.path} was opened read-only", hint="open it without read_only to write")
        if not self._lock.ours:
            raise StoreError(
                f"{self.path} was opened before this process was forked", hint="open it anew in the child process"
            )
        if self._broken:
            self._undo(self._owed)  # the disk may have room again
        if self._broken:
            raise StoreError(self._broken, hint="free some space and try again, or open the memory anew")

    def commit(self, batch: Batch, then: Callable[[Manifest], None] = lambda _: None) -> Manifest:
        """Make `batch` durable: all of it, or, when this or `then` raises, nothing.

        `then` is called with the new manifest once it is published; it is where what is derived gets up to date.

        Raises:
            StoreError: the disk is full or failing, or this log may not be written.
        """
        self.require_writable()
        before = self.manifest.files
        touched = [*batch.lines, *batch.rows]
        files = self._open_files()
        try:
            after = files.append(before, batch)
            files.sync(name for name in touched if after[name] != before[name])
            manifest = replace(self.manifest, generation=self.manifest.generation + 1, files=after)
            raw = manifest.dump()
            write_file(self.disk, self.path / MANIFEST, raw)
            then(manifest)
            self._raw, self.manifest = raw, manifest
        except OSError as error:
            self._undo({name: before[name] for name in touched})
            raise os_error(error, "write", self.path) from error
        except BaseException:
            self._undo({name: before[name] for name in touched})
            raise
        return self.manifest

    def rewrite(self, write: Callable[[Path], Manifest]) -> Manifest:
        """Replace the epoch: `write` fills the folder it is given and returns the manifest that describes it, whose
        generation and epoch are set here. Everything in the new folder is durable before the manifest switches.

        Raises:
            StoreError: as `commit`; or the old files could not be removed, which the next writer does. Whatever `write`
                raises passes through; the memory is as before then.
        """
        self.require_writable()
        number = self.manifest.epoch + 1
        new = self.path / epoch_folder(number)
        try:
            remove_folder(self.disk, new)
            new.mkdir()
            written = write(new)
            sync_folder(self.disk, self.path)
            self._publish(replace(written, generation=self.manifest.generation + 1, epoch=number))
        except BaseException as error:
            self._undo({})
            if self.manifest.epoch != number and not self._broken:
                with contextlib.suppress(OSError):  # the next writer clears leftovers
                    remove_folder(self.disk, new)
            if isinstance(error, OSError):
                raise os_error(error, "write", self.path) from error
            raise
        if self._files is not None:
            self._files.close()
            self._files = None
        try:
            self._clear_other_epochs()
        except OSError as error:
            raise StoreError(
                f"{self.path} was written anew, but its old files could not be removed: {error.strerror or error}",
                hint="they hold what was forgotten: open the memory once more for writing, and they are removed",
            ) from error
        return self.manifest

    def _publish(self, manifest: Manifest) -> None:
        raw = manifest.dump()
        write_file(self.disk, self.path / MANIFEST, raw)
        self._raw, self.manifest = raw, manifest

    def _undo(self, extents: Mapping[str, Extent]) -> None:
        """Back to the last commit: first the manifest, should the new one be in place already, then the data."""
        self._broken, self._owed = "", extents
        try:
            if (self.path / MANIFEST).read_bytes() != self._raw:
                write_file(self.disk, self.path / MANIFEST, self._raw)
            self._open_files().cut(extents)
        except OSError as error:
            # Every commit writes at the committed end, so bytes left there are harmless; a manifest that could not be
            # put back is not, and what it says can only be learnt by opening the folder again.
            self._broken = f"{self.path} could not be brought back to its last commit: {error}"

    def _clear_leftovers(self) -> None:
        """Remove what a killed writer left: bytes beyond the committed ones, other epochs, drafts."""
        self._open_files().cut(self.manifest.files)
        self._clear_other_epochs()
        for draft in (self.path / (MANIFEST + ".tmp"), *self.epoch.glob("*.tmp")):
            draft.unlink(missing_ok=True)

    def _clear_other_epochs(self) -> None:
        """Their folders, and what lies beside one under its name."""
        for path in sorted(self.path.glob("epoch-*")):
            if not path.is_dir() and not path.name.startswith(self.manifest.folder):
                self.disk.remove(path)
            elif path.is_dir() and path != self.epoch:
                self._remove_epoch(path)

    def _remove_epoch(self, folder: Path) -> None:
        """A reader that opens the catalogue in the same moment may put its files there: they go too."""
        for left in reversed(range(REMOVALS)):
            try:
                remove_folder(self.disk, folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not left:
                    raise

    def _open_files(self) -> EpochFiles:
        if self._files is None:
            self._files = EpochFiles(self.epoch, self.manifest.precision, self.disk)
        return self._files

    # --- usage: small, shared by readers and writers, outside the commit ---------------------------------------------

    def append_usage(self, payload: bytes) -> None:
        """Add one line under the usage file's own lock, held only for this call."""
        try:
            fd = self._locked_usage()
            try:
                end = os.fstat(fd).st_size
                whole = _whole_lines(fd, end)
                if whole < end:  # the last writer was killed in the middle of its line
                    os.ftruncate(fd, whole)
                view = memoryview(b"%08x %b\n" % (zlib.crc32(payload), payload))
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
        except OSError as error:
            raise os_error(error, "write", self.path / USAGE) from error

    def rewrite_usage(self, change: Callable[[bytes], bytes]) -> None:
        """Replace each payload of the usage log by what `change` makes of it."""
        if not (self.path / USAGE).exists():
            return
        try:
            fd = self._locked_usage()
            try:
                payloads = [change(payload) for payload in read_usage(self.path)]
                data = b"".join(b"%08x %b\n" % (zlib.crc32(payload), payload) for payload in payloads)
                write_file(self.disk, self.path / USAGE, data)
            finally:
                os.close(fd)
        except OSError as error:
            raise os_error(error, "write", self.path / USAGE) from error

    def _locked_usage(self) -> int:
        """The usage file, open and locked."""
        path = self.path / USAGE
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
            os.close(fd)  # it was replaced while this process waited for it

    def close(self) -> None:
        """Give back the files and the lock. Can be called twice."""
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def read_manifest(folder: Path) -> tuple[bytes, Manifest] | None:
    """The manifest and its bytes; None where there is none."""
    path = folder / MANIFEST
    try:
        raw = read_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreDamaged(
            f"{path} cannot be read: {error.strerror}", hint="restore the folder from a backup, or its permissions"
        ) from error
    return raw, Manifest.parse(raw, path)


def read_usage(folder: Path) -> list[bytes]:
    """The payloads of the usage log; a last line that its writer did not finish is left out."""
    try:
        data = read_file(folder / USAGE)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreDamaged(
            f"{folder / USAGE} cannot be read: {error.strerror}",
            hint="remove it: it counts what language models cost, and nothing else",
        ) from error
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        if line[:9] != b"%08x " % zlib.crc32(line[9:]):
            raise damaged(folder / USAGE, number)
    return [line[9:] for line in lines]


def require_memory(home: Path, user: str) -> None:
    """Raise StoreError where `user` has no memory below `home`."""
    path = user_folder(home, user)
    if not path.is_dir():
        raise no_memory(user, path)


def no_memory(name: str, path: Path) -> StoreError:
    """The error for a user who has none; its hint names those who have."""
    known = sorted(name for name, wrong in _users(path.parent) if not wrong)
    hint = there_are(known) if known else "remember something first"
    return StoreError(f"there is no memory of {name!r} in {path}", hint=hint)


def memories(home: Path) -> dict[str, str]:
    """The users who have a memory below `home`, sorted, each with what is wrong with its manifest: nothing, as a rule.
    One whose manifest cannot be read goes by the name of its folder."""
    return dict(sorted(_users(home / "users")))


def _has_lines(path: Path) -> bool:
    """Whether a memory's folder holds lines of one, whatever else is missing in it."""
    places = (path, *(entry for entry in path.iterdir() if entry.is_dir())) if path.is_dir() else ()
    return any((place / lines).exists() for place in places for lines in LINE_FILES)


def _manifest_lost(path: Path) -> StoreDamaged:
    return StoreDamaged(
        f"{path / MANIFEST} is missing: the lines are still there, but not which of them are committed",
        hint="restore the folder from a backup, or take up every line that is whole: lychee check --repair",
    )


def _users(folder: Path) -> Iterator[tuple[str, str]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            yield str(parse_manifest(read_file(path / MANIFEST), path)["user"]), ""
        except StoreError as error:
            yield path.name, str(error)
        except NotADirectoryError:
            continue  # somebody else's file
        except FileNotFoundError:
            if _has_lines(path):  # else it is another program's, or what a killed first start left
                yield path.name, str(_manifest_lost(path))
        except OSError as error:
            yield path.name, str(os_error(error, "open", path))


def _whole_lines(fd: int, end: int) -> int:
    """Where the last complete line of the file ends."""
    while end:
        start = max(0, end - 4096)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

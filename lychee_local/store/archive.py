"""A user's whole memory in one file: how it is written and how it is read.

Owns the layout of that file, which docs/archive.md describes for whoever wants to read it without us: a zip of JSON
lines and flat vector rows under one table of contents. Only what is living goes in, and the same memory gives the same
bytes. What becomes of an archive in another memory is the business of `arrival`.

An archive comes from outside, so nothing in it is believed: it is bounded before it is read, read as a stream, and no
name in it ever becomes a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from lychee_local.errors import BadInput, StoreDamaged, StoreError
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.disk import Disk, OsDisk, sync_folder
from lychee_local.store.draft import LINES_AT_ONCE
from lychee_local.store.epoch import DTYPES, Batch, row_bytes
from lychee_local.store.living import living
from lychee_local.store.log import read_usage
from lychee_local.store.manifest import (
    LINE_FILES,
    METRIC,
    ROW_FILES,
    USAGE,
    EmbedderIdentity,
    Manifest,
    Precision,
    canonical,
    os_error,
    user_name,
)
from lychee_local.store.vectors import Vectors, unit_rows
from lychee_local.types import NodeKind, Record

V = TypeVar("V")
Report = Callable[[int, int], None]

KIND = "lychee-local memory"
FORMAT = 1
ABOUT = "archive.json"
LINE_MEMBERS = (*LINE_FILES, USAGE)
_LINES_OF = {
    files.TURN_ROWS: files.TURNS,
    files.DECISION_ROWS: files.DECISIONS,
    files.RECORD_ROWS: files.ENCODINGS,
    files.NODE_ROWS: files.NODES,
}

# Bounds on what is read. Deflate can make a thousand bytes of one; text gives some ten, repeated lines a hundred.
ABOUT_LIMIT = 1 << 20
DIRECTORY_LIMIT = 1 << 16
LINE_LIMIT = 32 << 20
FREE_BYTES, GROWTH_LIMIT = 64 << 20, 200
_BLOCK = 1 << 20
_MADE = (1980, 1, 1, 0, 0, 0)  # a zip needs a date; this is the earliest, so that equal memories give equal bytes
_ENCRYPTED = 0x2041  # the flags of a zip's three kinds of encryption
# What the standard library raises for a zip that is not whole.
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive: its size, its lines or rows, and the SHA-256 of its content."""

    bytes: int
    count: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ArchiveAbout:
    """What an archive says of itself. `vectors` is the precision of its rows, None where it holds the text alone."""

    kind: str
    format: int
    user: str
    embedder: EmbedderIdentity
    vectors: Precision | None
    records: int
    members: Mapping[str, Member]

    @property
    def turns(self) -> int:
        return self.members[files.TURNS].count


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What was written where; `bytes` is the size of the file."""

    path: Path
    bytes: int
    about: ArchiveAbout


# Lines of the archive that say less than those of the store: no checksums of rows, no numbers.


@dataclass(frozen=True, slots=True)
class Encoded:
    segment: str
    note: str
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Label:
    kind: NodeKind
    key: str
    label: str


@dataclass(frozen=True, slots=True)
class Following:
    session: str
    following: int


# --- writing ---------------------------------------------------------------------------------------------------------


def export(
    folder: Path,
    manifest: Manifest,
    catalogue: Catalogue,
    target: Path,
    *,
    vectors: bool = True,
    overwrite: bool = False,
    disk: Disk | None = None,
    on_progress: Report | None = None,
) -> ArchiveReport:
    """Write what is living in the memory at `folder`, as of `manifest`, which `catalogue` covers, to the file `target`.

    The file appears whole or not at all. Without `vectors` it is a fraction of the size, and importing it means
    embedding everything again. `on_progress` is told the lines and rows written, and how many there are at most.

    Raises:
        BadInput: `target` exists and `overwrite` is not set, or is a folder.
        StoreDamaged: a line or row of the memory does not match its checksum.
        StoreError: `target` could not be written.
    """
    if target.is_dir():
        raise BadInput(f"{target} is a folder", hint="name the file to write")
    if target.exists() and not overwrite:
        raise BadInput(f"{target} exists already", hint="choose another name, or allow it to be overwritten")
    disk = disk or OsDisk()
    draft = target.with_name(target.name + ".tmp")
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with zipfile.ZipFile(_Sink(fd, disk), "w") as archive:
                about = _Export(archive, folder, manifest, catalogue, on_progress).run(vectors=vectors)
            disk.sync(fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        disk.replace(draft, target)
        sync_folder(disk, target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            disk.remove(draft)
        if isinstance(error, OSError):
            raise os_error(error, "write", target) from error
        raise
    return ArchiveReport(target, size, about)


class _Sink:
    """What `zipfile` needs of a file, by way of the disk."""

    def __init__(self, fd: int, disk: Disk) -> None:
        self._fd = fd
        self._disk = disk
        self._at = 0

    def write(self, data: bytes) -> int:
        self._disk.write(self._fd, bytes(data), self._at)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0 if whence == os.SEEK_SET else self._at)
        return self._at

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Export:
    def __init__(
        self,
        archive: zipfile.ZipFile,
        folder: Path,
        manifest: Manifest,
        catalogue: Catalogue,
        on_progress: Report | None,
    ) -> None:
        self._archive = archive
        self._folder = folder
        self._manifest = manifest
        self._catalogue = catalogue
        self._report = on_progress or (lambda done, total: None)
        self._done, self._total = 0, 0
        self._records = 0
        self._members: dict[str, Member] = {}

    def run(self, *, vectors: bool) -> ArchiveAbout:
        manifest = self._manifest
        counted = (*LINE_FILES, *ROW_FILES) if vectors else LINE_FILES
        self._total = sum(manifest.files[name].count for name in counted)
        for name in LINE_FILES:
            self._put(name, self._lines(name))
        self._put(USAGE, ([payload] for payload in read_usage(self._folder)))
        if vectors:
            for name in ROW_FILES:
                self._put(name, self._rows(name), ending=b"")
        precision = manifest.precision if vectors else None
        about = ArchiveAbout(
            KIND, FORMAT, manifest.user, manifest.embedder, precision, self._records, dict(self._members)
        )
        content = asdict(about)
        content["embedder"]["metric"] = METRIC
        text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True)
        self._put(ABOUT, [[text.encode()]])
        self._report(self._total, self._total)
        return about

    def _put(self, name: str, parts: Iterable[Sequence[bytes]], *, ending: bytes = b"\n") -> None:
        info = zipfile.ZipInfo(name, _MADE)
        # Vectors hardly get smaller by deflating, and uncompressed they can be mapped where they lie.
        info.compress_type = zipfile.ZIP_STORED if name in ROW_FILES else zipfile.ZIP_DEFLATED
        info.create_system, info.external_attr = 3, 0o100600 << 16
        size, count, digest = 0, 0, hashlib.sha256()
        with self._archive.open(info, "w", force_zip64=True) as member:
            for part in parts:
                data = b"".join(item + ending for item in part)
                member.write(data)
                digest.update(data)
                size, count = size + len(data), count + len(part)
                self._done += len(part)
                self._report(min(self._done, self._total), self._total)
        self._members[name] = Member(size, count, digest.hexdigest())

    def _living(self, name: str) -> Iterator[Batch]:
        return living(self._folder / self._manifest.folder, self._manifest, self._catalogue, names=(name,))

    def _lines(self, name: str) -> Iterator[list[bytes]]:
        for batch in self._living(name):
            lines = [line for payload in batch.lines[name] for line in self._plain(name, json.loads(payload))]
            if any(len(line) >= LINE_LIMIT for line in lines):
                raise StoreError(
                    f"a line of {name} is longer than the {LINE_LIMIT >> 20} MB that a line of an archive may have",
                    hint="copy the user's folder instead",
                )
            yield lines

    def _plain(self, name: str, content: dict[str, Any]) -> list[bytes]:
        """The lines of the archive for one line of the store."""
        if name == files.TURNS:
            return [canonical(content["turn"])]
        if name == files.DECISIONS:
            return [canonical(content["decision"])]
        if name == files.FORGOTTEN:
            return [canonical({"session": session, "following": index}) for session, index in content["following"]]
        self._records += len(content.get("records", ()))
        return [canonical({key: value for key, value in content.items() if key not in ("row", "rows")})]

    def _rows(self, name: str) -> Iterator[list[bytes]]:
        for batch in self._living(_LINES_OF[name]):
            yield row_bytes(batch.rows[name], self._manifest.precision)


# --- looking at one --------------------------------------------------------------------------------------------------


def inspect(source: Path) -> ArchiveAbout:
    """What the archive at `source` says of itself, after a look at its list of members; their content is not read.

    Raises:
        BadInput: no archive, one of a newer version, or one that holds more, less or other things than it should.
        StoreDamaged: it is cut or damaged.
        StoreError: it cannot be read.
    """
    with opened(source) as archive:
        return archive.about


@contextlib.contextmanager
def opened(source: Path) -> Iterator[Archive]:
    try:
        file = source.open("rb")
    except OSError as error:
        raise os_error(error, "read", source) from error
    with file:
        yield Archive(source, file)


class Archive:
    """An archive, open, whose table of contents has been checked."""

    def __init__(self, source: Path, file: IO[bytes]) -> None:
        self.source = source
        with self._sound():
            size = _require_small_directory(source, file)
            try:
                self._zip = zipfile.ZipFile(file)
            except zipfile.BadZipFile as error:
                raise BadInput(
                    f"{source} is no zip file, or its end is missing: {error}", hint="lychee export writes archives"
                ) from error
        self._require_bounded(size)
        self.about = self._read_about()
        self._require_as_told()

    @contextlib.contextmanager
    def _sound(self) -> Iterator[None]:
        """Says in our words what `zipfile` finds."""
        try:
            yield
        except _BROKEN as error:
            raise StoreDamaged(f"{self.source} is damaged: {error}", hint="use another copy of it") from error
        except OSError as error:
            raise os_error(error, "read", self.source) from error

    def bad(self, why: str, hint: str = "") -> BadInput:
        return BadInput(f"{self.source}: {why}", hint=hint)

    # --- the table of contents ---------------------------------------------------------------------------------------

    def _require_bounded(self, size: int) -> None:
        """Nothing but the members of an archive, once each, and none that grows beyond measure when it is read."""
        infos = self._zip.infolist()
        names = [info.filename for info in infos]
        allowed = {ABOUT, *LINE_MEMBERS, *ROW_FILES}
        for info in infos:
            if info.filename not in allowed or info.orig_filename != info.filename:
                raise self.bad(f"it holds {info.orig_filename[:80]!r}, which is no part of an archive")
            if names.count(info.filename) > 1:
                raise self.bad(f"it holds {info.filename} more than once")
            if info.flag_bits & _ENCRYPTED:
                raise self.bad("it is encrypted", hint="decrypt it and pack it again")
            if stat.S_ISLNK(info.external_attr >> 16):
                raise self.bad(f"{info.filename} is a link")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise self.bad(f"{info.filename} is compressed in a way other than deflate")
            if info.file_size > FREE_BYTES + GROWTH_LIMIT * info.compress_size:
                raise self.bad(f"{info.filename} would grow {info.file_size // max(1, info.compress_size)}-fold")
        missing = [name for name in (ABOUT, *LINE_MEMBERS) if name not in names]
        if missing:
            raise self.bad(f"it has no {missing[0]}", hint="is it an archive that lychee export wrote?")
        if sum(info.compress_size for info in infos) > size:
            raise StoreDamaged(
                f"{self.source} is damaged: its members are larger than the file", hint="use another copy"
            )

    def _read_about(self) -> ArchiveAbout:
        if self._zip.getinfo(ABOUT).file_size > ABOUT_LIMIT:
            raise self.bad(f"{ABOUT} is larger than {ABOUT_LIMIT >> 20} MB")
        data = b"".join(self.blocks(ABOUT))
        try:
            content = json.loads(data)
            if content["kind"] != KIND or not isinstance(content["format"], int):
                raise ValueError(f"it is of kind {content['kind']!r:.80}")
            if content["format"] > FORMAT:
                raise self.bad(
                    f"it has version {content['format']}, this version of lychee reads up to {FORMAT}",
                    hint="install the lychee version that wrote it, or a newer one",
                )
            about = codec.decode(ArchiveAbout, data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.bad(f"{ABOUT} cannot be understood: {error}") from error
        user_name(about.user)
        return about

    def _require_as_told(self) -> None:
        """The table of contents and the zip agree, and the numbers in it with each other."""
        about, members = self.about, self.about.members
        named = {*LINE_MEMBERS, *(ROW_FILES if about.vectors else ())}
        held = {info.filename: info.file_size for info in self._zip.infolist() if info.filename != ABOUT}
        if set(members) != named or set(held) != named:
            differing = sorted((set(members) ^ named) | (set(held) ^ named))
            raise self.bad(f"{ABOUT} and the members do not agree about {differing[0][:80]!r}")
        for name, size in held.items():
            if members[name].bytes != size or members[name].count < 0:
                raise self.bad(f"{name} has {size} bytes, {ABOUT} says {members[name].bytes}")
        if not 1 <= about.embedder.dimension <= 1 << 16:
            raise self.bad(f"its vectors have {about.embedder.dimension} dimensions")
        if about.vectors is None:
            return
        for rows, lines in _LINES_OF.items():
            count = about.records if rows == files.RECORD_ROWS else members[lines].count
            if members[rows].count != count or members[rows].bytes != count * self.width:
                raise self.bad(
                    f"{rows} has {members[rows].bytes} bytes, {count} vectors of {about.embedder.dimension} "
                    f"dimensions in {about.vectors} have {count * self.width}"
                )

    @property
    def width(self) -> int:
        """Bytes a row."""
        return self.about.embedder.dimension * np.dtype(DTYPES[self.about.vectors or "float32"]).itemsize

    # --- the members -------------------------------------------------------------------------------------------------

    def blocks(self, name: str, size: int = _BLOCK) -> Iterator[bytes]:
        """The content of a member in pieces of `size`, the last one shorter."""
        with self._sound():
            member = self._zip.open(name)
        with member:
            while True:
                with self._sound():
                    data = member.read(size)
                if not data:
                    return
                yield data

    def verify(self) -> None:
        """Raises StoreDamaged where a member is not what the table of contents says."""
        for name, told in self.about.members.items():
            size, digest = 0, hashlib.sha256()
            for block in self.blocks(name):
                size += len(block)
                digest.update(block)
            if size != told.bytes or digest.hexdigest() != told.sha256:
                raise StoreDamaged(
                    f"{self.source} is damaged: {name} does not match its SHA-256", hint="use another copy of it"
                )

    def values(self, name: str, kind: type[V]) -> Iterator[list[V]]:
        """The lines of a member as values, some at a time; each is checked for its form."""

        def decoded() -> Iterator[V]:
            number = 0
            for number, line in enumerate(self._lines(name), 1):
                try:
                    yield codec.decode(kind, line)
                except ValueError as error:
                    raise self.bad(f"{name}, line {number} cannot be understood: {error}") from error
            if number != self.about.members[name].count:
                raise self.bad(f"{name} has {number} lines, {ABOUT} says {self.about.members[name].count}")

        values = decoded()
        while some := list(islice(values, LINES_AT_ONCE)):
            yield some

    def _lines(self, name: str) -> Iterator[bytes]:
        rest = b""
        for block in self.blocks(name):
            *whole, rest = (rest + block).split(b"\n")
            if len(rest) > LINE_LIMIT:
                raise self.bad(f"{name} has a line of more than {LINE_LIMIT >> 20} MB")
            yield from whole
        if rest:
            yield rest

    def rows(self, name: str) -> Iterator[Vectors]:
        """Vectors one by one, each of unit length."""
        dtype = DTYPES[self.about.vectors or "float32"]
        dimension = self.about.embedder.dimension
        first = 0
        for block in self.blocks(name, LINES_AT_ONCE * self.width):
            rows = np.frombuffer(block, dtype=dtype).reshape(-1, dimension).astype(np.float32)
            yield from unit_rows(rows, dimension, f"{self.source}: {name} from row {first + 1} on")
            first += len(rows)


def _require_small_directory(source: Path, file: IO[bytes]) -> int:
    """The size of the file. Raises BadInput where the zip's list of members, which `zipfile` reads at once, is huge."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))  # two end records and what joins them, as they end every zip without a comment
    tail = file.read(98)
    listed = struct.unpack("<L", tail[-10:-6])[0] if tail[-22:-18] == b"PK\x05\x06" else None
    if listed is None:
        raise BadInput(f"{source} is no zip file, or its end is missing", hint="lychee export writes archives")
    if tail[-42:-38] == b"PK\x06\x07" and tail[-98:-94] == b"PK\x06\x06":
        listed = struct.unpack("<Q", tail[-58:-50])[0]
    if listed > DIRECTORY_LIMIT:
        raise BadInput(f"{source} lists far more members than an archive has")
    return size

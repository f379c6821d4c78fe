"""A user's whole memory in one file: its layout, and how it is read.

docs/archive.md describes the file for whoever wants to read it without us: a zip of JSON lines and flat vector rows
under one table of contents. `departure` writes it, `arrival` makes a memory of it.

An archive comes from outside, so nothing in it is believed: it is bounded before it is read, read as a stream, and no
name in it ever becomes a path.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from lychee_local.errors import BadInput, StoreDamaged
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.draft import LINES_AT_ONCE
from lychee_local.store.epoch import DTYPES
from lychee_local.store.graph import Vectors
from lychee_local.store.manifest import (
    LINE_FILES,
    ROW_FILES,
    USAGE,
    EmbedderIdentity,
    Precision,
    os_error,
    user_name,
)
from lychee_local.store.vectors import unit_rows
from lychee_local.types import NodeKind, Record

V = TypeVar("V")
Report = Callable[[int, int], None]

KIND = "lychee-local memory"
FORMAT = 1
ABOUT = "archive.json"
LINE_MEMBERS = (*LINE_FILES, USAGE)
LINES_OF = {
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


# Lines of the archive that say less than those of the store: no checksums of rows, no numbers.


@dataclass(frozen=True, slots=True)
class Encoded:
    segment: str
    note: str
    records: tuple[Record, ...]
    encoder: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    kind: NodeKind
    key: str
    label: str


@dataclass(frozen=True, slots=True)
class Following:
    session: str
    following: int


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
        if source.exists() and not source.is_file():
            raise BadInput(f"{source} is no file", hint="lychee export writes archives")
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
            if error.errno == errno.EINVAL:  # a place before the beginning of the file
                raise StoreDamaged(f"{self.source} is damaged: {error}", hint="use another copy of it") from error
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
        for rows, lines in LINES_OF.items():
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

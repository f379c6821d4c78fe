"""A memory's departure: all that is living in it, written into one archive.

Owns the writing of that file, which appears whole or not at all. The same memory gives the same bytes, compacted or
not; nothing that was forgotten goes in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lychee_local.errors import BadInput, StoreError
from lychee_local.store import manifest as files
from lychee_local.store.archive import ABOUT, FORMAT, KIND, LINE_LIMIT, LINES_OF, ArchiveAbout, Member
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.disk import Disk, OsDisk, sync_folder
from lychee_local.store.epoch import Batch, row_bytes
from lychee_local.store.forget import Report
from lychee_local.store.living import living
from lychee_local.store.log import read_usage
from lychee_local.store.manifest import LINE_FILES, METRIC, ROW_FILES, USAGE, Manifest, canonical, os_error

_MADE = (1980, 1, 1, 0, 0, 0)  # a zip needs a date; this is the earliest, so that equal memories give equal bytes


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """What was written where; `bytes` is the size of the file."""

    path: Path
    bytes: int
    about: ArchiveAbout


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
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise BadInput(f"{target} is a link, a device or a pipe", hint="name a file")
    if folder.resolve() in target.absolute().resolve().parents:
        raise BadInput(f"{target} lies in the memory itself", hint="write the archive somewhere else")
    if target.exists() and not overwrite:
        raise BadInput(f"{target} exists already", hint="choose another name, or say overwrite")
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
        for batch in self._living(LINES_OF[name]):
            yield row_bytes(batch.rows[name], self._manifest.precision)

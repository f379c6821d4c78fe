"""From older formats to the present one.

Owns what is left of them. A memory of an older format is read as it stood, written as an epoch of the present format
beside its files, and switched by the manifest; only then are the old files removed.

Format 1 kept everything in the user's own folder. Its lines are chained as they are now, but `row` was the running
CRC-32 of the vector file, the segmenter's log repeated the text of each exchange, and nothing could be forgotten.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lychee_local.errors import StoreDamaged
from lychee_local.store import codec
from lychee_local.store import manifest as files
from lychee_local.store.codec import DecisionLine, EncodingLine, NodeLine, TurnLine
from lychee_local.store.disk import Disk, read_file, remove_folder, sync_folder, write_file
from lychee_local.store.draft import LINES_AT_ONCE, Draft
from lychee_local.store.epoch import Batch, Rows, damaged, read_lines, read_rows, row_bytes
from lychee_local.store.manifest import LOSS, MANIFEST, Extent, Manifest, epoch_folder, identity_of, parse_manifest
from lychee_local.types import Segment

L = TypeVar("L")
RowLine = TurnLine | DecisionLine | NodeLine | EncodingLine

_ROWS_OF: Mapping[str, tuple[type[RowLine], str]] = {
    files.TURNS: (TurnLine, files.TURN_ROWS),
    files.DECISIONS: (DecisionLine, files.DECISION_ROWS),
    files.NODES: (NodeLine, files.NODE_ROWS),
    files.ENCODINGS: (EncodingLine, files.RECORD_ROWS),
}
_OLD_ROWS = {rows: rows.removesuffix(".rows") + ".f32" for rows in files.ROW_FILES}
_OLD_LINES = (*_ROWS_OF, files.SEGMENTS)
_OLD_GRAPHS = tuple(
    f"{field}.hnsw{ending}" for field in ("turns", "records", "nodes") for ending in ("", ".rows", ".tmp", ".tmp.rows")
)


def upgrade(folder: Path, disk: Disk) -> None:
    """Bring the memory in `folder` to the present format, where it is of an older one. Under the writer's lock.

    Killed at any moment it has either not happened or happened, and what it left behind is removed the next time.

    Raises:
        StoreDamaged: a line or a row does not match its checksum; the memory stays as it is.
        StoreMismatch: the memory is of a newer format.
        OSError: the disk does not take it; the memory is of the old format or the new one, and whole.
    """
    try:
        raw = read_file(folder / MANIFEST)
    except OSError:
        return  # whoever reads the manifest next says so
    content = parse_manifest(raw, folder / MANIFEST)
    if content["format"] == 1:
        _rewrite(folder, raw, content, disk)
        content = {**content, "format": files.FORMAT}
    if content["format"] == files.FORMAT:
        _remove_old(folder, disk)


def _rewrite(folder: Path, raw: bytes, content: Mapping[str, Any], disk: Disk) -> None:
    new = folder / epoch_folder(1)
    remove_folder(disk, new)  # what a killed upgrade left
    new.mkdir()
    try:
        manifest = _written(folder, new, content, disk)
        sync_folder(disk, folder)
        write_file(disk, folder / MANIFEST, replace(manifest, generation=content["generation"] + 1).dump())
    except BaseException:
        # The manifest may have switched, and only the last sync failed: then the new files are the memory.
        with contextlib.suppress(OSError):
            if (folder / MANIFEST).read_bytes() == raw:
                remove_folder(disk, new)
        raise


def _remove_old(folder: Path, disk: Disk) -> None:
    present = [folder / name for name in (*_OLD_LINES, *_OLD_ROWS.values(), *_OLD_GRAPHS) if (folder / name).exists()]
    for path in present:
        disk.remove(path)
    if present:
        sync_folder(disk, folder)


def _written(folder: Path, new: Path, content: Mapping[str, Any], disk: Disk) -> Manifest:
    """The memory as an epoch in `new`, durable, and the manifest of it."""
    try:
        extents = {name: Extent(**content["files"][name]) for name in (*_OLD_LINES, *_OLD_ROWS.values())}
        embedder, user = identity_of(content), content["user"]
    except (KeyError, TypeError) as error:
        raise StoreDamaged(
            f"{folder / MANIFEST} is damaged: it has no {error}", hint="restore the folder from a backup"
        ) from error
    with Draft(new, user, embedder, disk=disk) as draft:
        for name, (kind, rows) in _ROWS_OF.items():
            held = _OldRows(folder / _OLD_ROWS[rows], extents[_OLD_ROWS[rows]], embedder.dimension)
            for lines in _values(folder, name, kind, extents[name]):
                draft.add(_converted(name, lines, rows, held))
            held.require_end()
        for segments in _values(folder, files.SEGMENTS, Segment, extents[files.SEGMENTS]):
            draft.add(Batch({files.SEGMENTS: [codec.encode(segment) for segment in segments]}))
        return draft.finish()


def _values(folder: Path, name: str, kind: type[L], extent: Extent) -> Iterator[list[L]]:
    """All lines of one file, decoded, some at a time."""

    def decoded() -> Iterator[L]:
        for line in read_lines(folder / name, Extent(), extent):
            if line.payload is None:
                raise damaged(folder / name, line.number + 1)
            yield codec.understood(kind, name, line.number, line.payload)

    values = decoded()
    while some := list(islice(values, LINES_AT_ONCE)):
        yield some


def _converted(name: str, lines: Sequence[RowLine], row_name: str, held: _OldRows) -> Batch:
    """The same lines with the checksums of the present format, and their rows."""
    rows = held.take([check for line in lines for check in _checks(line)])
    checks = map(zlib.crc32, row_bytes(rows, "float32"))
    payloads = []
    for line in lines:
        if isinstance(line, EncodingLine):
            line = replace(line, rows=tuple(islice(checks, len(line.rows))))
        elif isinstance(line, DecisionLine):
            said = replace(line.decision.exchange, text="")
            line = DecisionLine(replace(line.decision, exchange=said), next(checks))
        else:
            line = replace(line, row=next(checks))
        payloads.append(codec.encode(line))
    return Batch({name: payloads}, {row_name: rows})


def _checks(line: RowLine) -> Sequence[int]:
    return line.rows if isinstance(line, EncodingLine) else (line.row,)


class _OldRows:
    """The rows of one file of format 1, read in order; each is checked against the running checksum in its line."""

    def __init__(self, path: Path, extent: Extent, dimension: int) -> None:
        self._path = path
        self._extent = extent
        self._dimension = dimension
        self._count = 0
        self._check = 0

    def take(self, checks: Sequence[int]) -> Rows:
        """The next rows, one for each of `checks`."""
        rows = read_rows(self._path, self._count, len(checks), self._dimension, "float32").astype("<f4", copy=False)
        for row, expected in zip(rows, checks, strict=True):
            self._count += 1
            self._check = zlib.crc32(row.tobytes(), self._check)
            if self._check != expected:
                loss = LOSS[self._path.stem + ".rows"]
                raise StoreDamaged(
                    f"{self._path}, row {self._count} does not match its checksum: {loss} is lost",
                    hint="restore the file from a backup",
                )
        return rows

    def require_end(self) -> None:
        if (self._count, self._check) != (self._extent.count, self._extent.check):
            raise StoreDamaged(
                f"{self._path} does not end with row {self._extent.count} as it was committed",
                hint="restore the file from a backup",
            )

"""The snapshot of a graph beside its flat file: what it consists of, whether it is sound, how the dead are taken out.

A snapshot is the file that hnswlib writes and, beside it, a table that says which row is which point. hnswlib crashes
on a malformed file, so both carry checksums; and it cannot take a vector out of its file, so that is done here.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lychee_local.errors import StoreError
from lychee_local.store.graph import Labels, Mask, Numbers

SAMPLE = 64  # rows whose bytes tie a snapshot to its flat file
_PLACED_AT_ONCE = 64  # points overwritten at a time
_SHORTEST = 1e-3  # a mean shorter than this has no direction
# hnswlib's file: offset of the links, room, points, bytes a point, offset of its label, of its vector, top level, entry
# point, links a point on upper levels and on the lowest, M, level factor, ef_construction; then the points.
_HEADER = struct.Struct("<6QiI3QdQ")


@dataclass(frozen=True, slots=True)
class Snapshot:
    precision: str
    points: int
    sample: int
    table: Labels


def snapshot_is_sound(path: Path, dimension: int) -> bool:
    """Whether the snapshot beside the flat file `path` matches its own checksums."""
    return read_snapshot(graph_path(path), dimension) is not None


def read_snapshot(graph: Path, dimension: int) -> Snapshot | None:
    """None where anything does not match. hnswlib crashes on a malformed file and loads one of another dimension
    without a word, so both files are checked first."""
    try:
        data = side_path(graph).read_bytes()
        body = data[9:]
        if data[:9] != b"%08x " % zlib.crc32(body):
            return None
        head, table = body.split(b"\n", 1)
        about = json.loads(head)
        if about["dimension"] != dimension or about["graph"] != file_check(graph):
            return None
        labels = np.frombuffer(table, dtype="<i4").astype(np.int32)
        snapshot = Snapshot(about["precision"], about["points"], about["sample"], labels)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return snapshot if len(labels) == about["rows"] else None


def snapshot_rows(graph: Path) -> int:
    """Rows that the snapshot says it covers, unchecked and without reading it; 0 where there is none."""
    try:
        with side_path(graph).open("rb") as file:
            return int(json.loads(file.readline(1000)[9:])["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def stamp(graph: Path) -> tuple[int, ...] | None:
    """Tells one snapshot from the next; None where there is none."""
    try:
        about = side_path(graph).stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


def overwrite_points(path: Path, dimension: int, alive: Mask) -> None:
    """Put each dead point of hnswlib's file `path` at the mean of its living neighbours.

    Raises:
        StoreError: the file is not laid out as hnswlib 0.8 does.
    """
    with path.open("rb") as file:
        head = _HEADER.unpack(file.read(_HEADER.size))
    _, _, points, size, label_offset, vector_offset, _, _, _, links, *_ = head
    fields = [("count", "<u4"), ("links", "<u4", links), ("vector", "<f4", dimension), ("label", "<u8")]
    layout = np.dtype(fields)
    offsets = [layout.fields[name][1] for name in ("vector", "label")] if layout.fields else []
    known = (points, size, [vector_offset, label_offset]) == (len(alive), layout.itemsize, offsets)
    data = np.memmap(path, dtype=layout, mode="r+", offset=_HEADER.size, shape=(len(alive),)) if known else None
    if data is None or not np.array_equal(data["label"], np.arange(len(alive))):
        raise StoreError(f"{path} is not laid out as expected", hint="install the hnswlib that setup installs")
    placed = alive.copy()
    waiting = np.flatnonzero(~alive)
    while waiting.size:
        done = [
            _place(data, waiting[start : start + _PLACED_AT_ONCE], placed)
            for start in range(0, len(waiting), _PLACED_AT_ONCE)
        ]
        reached = np.concatenate(done)
        if not reached.size:  # no way leads from these to a living point
            data["vector"][waiting] = data["vector"][np.flatnonzero(alive)[0]]
            break
        placed[reached] = True
        waiting = np.setdiff1d(waiting, reached)
    data.flush()


def _place(data: npt.NDArray[Any], points: Numbers, placed: Mask) -> Numbers:
    """Overwrite the vectors of those `points` that have a placed neighbour; these points."""
    links = data["links"][points].astype(np.intp)
    real = np.arange(links.shape[1]) < (data["count"][points] & 0xFFFF)[:, None]  # the upper half holds hnswlib's marks
    near = np.zeros_like(real)
    near[real] = placed[links[real]]
    reached = near.any(axis=1)
    for point, neighbours, good in zip(points[reached], links[reached], near[reached], strict=True):
        vectors = data["vector"][neighbours[good]].astype(np.float64)
        mean = vectors.mean(axis=0)
        length = float(np.linalg.norm(mean))
        data["vector"][point] = mean / length if length > _SHORTEST else vectors[0]
    return points[reached]


def sample_check(rows: npt.NDArray[Any]) -> int:
    """Ties a snapshot to its flat file by some rows, the last one included. Reading all would take as long as the graph
    saves; in a file that differs elsewhere the graph proposes worse, and float64 still decides."""
    if not len(rows):
        return 0
    chosen = np.unique(np.linspace(0, len(rows) - 1, SAMPLE).astype(np.intp))
    return zlib.crc32(rows[chosen].tobytes())


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """An empty draft of the file `path`, for this user only, removed on every way out that has not put it in place.

    Raises:
        StoreError: for an OSError or RuntimeError inside.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
        yield draft
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"the search graph {path} could not be saved: {error}",
            hint="no memory is lost; search is slower until it is built again",
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def graph_path(flat: Path) -> Path:
    return flat.with_suffix(".hnsw")


def side_path(graph: Path) -> Path:
    return graph.with_name(graph.name + ".side")


def file_check(path: Path) -> int:
    check = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            check = zlib.crc32(block, check)
    return check

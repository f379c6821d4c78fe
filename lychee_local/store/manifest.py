"""What one user's folder holds and how much of it is committed.

Owns the names of the files, the manifest (the only commit point), and the one function that makes a path from a user's
name. Opens no file.

Everything with words or vectors in it lies in an epoch folder that the manifest names. Commits append to its files;
whatever has to take something away (forgetting, another embedder, a newer format) writes the next epoch beside it and
lets the manifest switch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import unicodedata
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lychee_local.errors import BadInput, StoreDamaged, StoreError, StoreMismatch
from lychee_local.types import Calibration

FORMAT = 2
METRIC = "inner product of unit vectors"

TURNS, DECISIONS, SEGMENTS, ENCODINGS, NODES, FORGOTTEN = LINE_FILES = (
    "turns.jsonl",
    "decisions.jsonl",
    "segments.jsonl",
    "encodings.jsonl",
    "nodes.jsonl",
    "forgotten.jsonl",
)
TURN_ROWS, DECISION_ROWS, RECORD_ROWS, NODE_ROWS = ROW_FILES = (
    "turns.rows",
    "decisions.rows",
    "records.rows",
    "nodes.rows",
)
CATALOGUE = "catalogue.sqlite"
USAGE = "usage.jsonl"
MANIFEST = "manifest.json"
LOCK = "lock"

# What a damaged line or row of each file costs, for the error message.
LOSS = {
    TURNS: "the text of one turn",
    DECISIONS: "one step of the segmenter's log",
    SEGMENTS: "the bounds of one segment",
    ENCODINGS: "the records of one segment",
    NODES: "one index entry (it can be made again from the records)",
    FORGOTTEN: "the numbers of lines that were to be forgotten",
    TURN_ROWS: "the vector of one turn (its text is intact)",
    DECISION_ROWS: "the vector of one exchange (its text is intact)",
    RECORD_ROWS: "the vector of one record (its text is intact)",
    NODE_ROWS: "the vector of one index entry (it can be made again from the records)",
    USAGE: "the token count of one model call",
}


@dataclass(frozen=True, slots=True)
class EmbedderIdentity:
    """The embedder whose vectors a memory holds. The first three fields must match when it is opened again;
    `calibration` is the one the memory was made with, and stays with it."""

    name: str
    digest: str
    dimension: int
    calibration: Calibration = field(default_factory=Calibration)


Precision = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of one file is committed. `check` is the running CRC-32: of the JSON texts, or of the rows."""

    bytes: int = 0
    count: int = 0
    check: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The state of a memory as of one commit."""

    user: str
    embedder: EmbedderIdentity
    precision: Precision = "float32"
    generation: int = 0
    epoch: int = 1
    files: Mapping[str, Extent] = field(default_factory=lambda: dict.fromkeys((*LINE_FILES, *ROW_FILES), Extent()))

    @property
    def folder(self) -> str:
        """The name of the epoch's folder."""
        return epoch_folder(self.epoch)

    def dump(self) -> bytes:
        content = {
            "format": FORMAT,
            "user": self.user,
            "embedder": {**asdict(self.embedder), "metric": METRIC},
            "precision": self.precision,
            "generation": self.generation,
            "epoch": self.epoch,
            "files": {name: asdict(extent) for name, extent in self.files.items()},
        }
        return canonical({**content, "check": zlib.crc32(canonical(content))}) + b"\n"

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Manifest:
        """Raises StoreDamaged for anything `dump` did not write, StoreMismatch for another format."""
        content = parse_manifest(data, path)
        if content["format"] < FORMAT:
            raise StoreMismatch(
                f"{path} has format {content['format']}, this version of lychee writes {FORMAT}",
                hint="open it once for writing, it is then brought to the new format: lychee check --repair",
            )
        try:
            identity = identity_of(content)
            files = {name: Extent(**content["files"][name]) for name in (*LINE_FILES, *ROW_FILES)}
            precision: Precision = "float16" if content["precision"] == "float16" else "float32"
            return cls(content["user"], identity, precision, content["generation"], content["epoch"], files)
        except (KeyError, TypeError) as error:
            raise _no_manifest(path, error) from error


def epoch_folder(number: int) -> str:
    return f"epoch-{number:06d}"


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """The content of a manifest of this or an older format.

    Raises:
        StoreDamaged: it is not whole.
        StoreMismatch: its format is newer than this version reads.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        check = content.pop("check")
        written = content["format"]
        if isinstance(written, int) and written > FORMAT:
            raise StoreMismatch(
                f"{path} has format {written}, this version of lychee reads up to {FORMAT}",
                hint="install the lychee version that wrote it, or a newer one",
            )
        if zlib.crc32(canonical(content)) != check or not isinstance(written, int):
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_manifest(path, error) from error
    return content


def identity_of(content: Mapping[str, Any]) -> EmbedderIdentity:
    """The embedder that a manifest's content names."""
    about = content["embedder"]
    return EmbedderIdentity(about["name"], about["digest"], about["dimension"], Calibration(**about["calibration"]))


def _no_manifest(path: Path, error: Exception) -> StoreDamaged:
    return StoreDamaged(
        f"{path} is damaged ({error}): the lines are still there, but not which of them are committed",
        hint="restore the folder from a backup, or let `lychee check --repair` take up every line that is whole",
    )


# --- the user's folder -----------------------------------------------------------------------------------------------


def user_name(user: str) -> str:
    """The name as it is kept: NFC, so that the two ways to write an accent are one user.

    Raises:
        BadInput: not usable as a name.
    """
    name = unicodedata.normalize("NFC", user)
    reason = ""
    if not name.strip():
        reason = "it is blank"
    elif len(name) > 200:
        reason = f"it has {len(name)} characters and the limit is 200"
    elif name in (".", "..") or any(c in "/\\" for c in name):
        reason = "it is a path"
    elif any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        reason = "it holds a control character or half of a surrogate pair"
    if reason:
        raise BadInput(f"{user[:80]!a} cannot be a user name: {reason}", hint="any word in any script will do")
    return name


def require_folder(home: Path) -> None:
    """Raise StoreError where `home` is no folder and cannot become one, before anything is looked for below it."""
    try:
        nearest = next(p for p in (home, *home.absolute().parents) if p.exists())
        usable = nearest.is_dir()
    except OSError as error:
        raise StoreError(f"{str(home)[:200]} cannot be used: {error.strerror}", hint="choose another home") from error
    if not usable:
        raise StoreError(f"{home} cannot be a folder: {nearest} is a file", hint="choose another home")


def user_folder(home: Path, user: str) -> Path:
    """Where the memory of `user` lies: a readable part for people and a hash of the name, so that names that differ
    only by case, or that read the same once simplified, never share a folder. The only place that makes this path."""
    name = user_name(user)
    slug = re.sub(r"[^a-z0-9]+", "-", name.casefold())[:40].strip("-") or "user"
    return home / "users" / f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def canonical(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def os_error(error: OSError, verb: str, path: Path) -> StoreError:
    hint = "check that the folder exists and that you may write to it"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "the disk is full: free some space and try again; what was stored before is intact"
    elif error.errno == errno.EFBIG:
        hint = (
            "a file may not get larger here (see ulimit -f, or the file system's own limit); what was stored is intact"
        )
    return StoreError(f"cannot {verb} {path}: {error.strerror or error}", hint=hint)

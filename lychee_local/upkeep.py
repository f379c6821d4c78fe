"""What is done to a memory that need not, or cannot, be opened: check, repair, reindex.

Owns nothing but the way from a user's name to a folder and from a profile to an embedder; what is damaged and how it is
mended is decided in the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lychee_local import store
from lychee_local.backends import Embedder
from lychee_local.cards import default_home
from lychee_local.engines import Engines
from lychee_local.segment import stored_text
from lychee_local.store import Finding, Precision, RepairReport, Store, no_memory, require_folder, user_folder

StepCallback = Callable[[int, int], None]


def check(
    user: str = "default", *, home: Path | str | None = None, on_progress: StepCallback | None = None
) -> tuple[Finding, ...]:
    """Read every stored byte of a memory again and follow every reference; empty when all is well. Needs no model and
    no lock, and changes nothing.

    Raises:
        BadInput: an unusable user name.
        StoreError: there is no such memory.
    """
    return store.check(_folder(_home(home), user), on_progress=on_progress)


def repair(
    user: str = "default",
    *,
    home: Path | str | None = None,
    models_home: Path | str | None = None,
    profile: str = "laptop",
    embedder: Embedder | str = "auto",
    on_progress: StepCallback | None = None,
) -> RepairReport:
    """Mend what `check` finds, keeping all that is whole. The embedder makes damaged vectors again.

    Raises:
        StoreError: there is no such memory, it is being written, or the disk does not take it.
        StoreMismatch: it is of another embedder, or of a newer format.
        ModelMissing: the embedder is not on this machine.
    """
    home = _home(home)
    _folder(home, user)
    engines = _embedder_alone(profile, Path(models_home or home), embedder)
    return store.repair(
        home,
        user,
        embedder=engines.embedder_identity(),
        embed=lambda texts: engines.embedder().embed(texts),
        on_progress=on_progress,
    )


def reindex(
    user: str = "default",
    *,
    home: Path | str | None = None,
    models_home: Path | str | None = None,
    profile: str = "laptop",
    embedder: Embedder | str = "auto",
    precision: Precision | None = None,
    on_progress: StepCallback | None = None,
) -> None:
    """Embed a whole memory anew with another embedder, and switch to it at once. Until then, and whenever this is
    interrupted, the memory is as it was; what was embedded already is not embedded again. `precision` changes that of
    the stored vectors.

    Raises:
        ModelMissing: the embedder is not on this machine.
        StoreError: there is no such memory, it is being written, or the disk does not take it.
    """
    home = _home(home)
    engines = _embedder_alone(profile, Path(models_home or home), embedder)
    identity = engines.embedder_identity()
    with Store.open(home, user, embedder=None) as held:
        held.reindex(
            identity,
            lambda texts: engines.embedder().embed(texts),
            exchange_text=stored_text,
            precision=precision,
            on_progress=on_progress,
        )


def _home(home: Path | str | None) -> Path:
    chosen = Path(home) if home is not None else default_home()
    require_folder(chosen)
    return chosen


def _folder(home: Path, user: str) -> Path:
    folder = user_folder(home, user)
    if not folder.is_dir():
        raise no_memory(user, folder)
    return folder


def _embedder_alone(profile: str, models_home: Path, embedder: Embedder | str) -> Engines:
    return Engines(profile, home=models_home, llm=None, embedder=embedder, reranker=None)

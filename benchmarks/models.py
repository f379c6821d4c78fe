"""The models of a run, by the names of their cards; each is loaded once in a process, and embeds each text once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from benchmarks.vectors import StoredVectors
from lychee_local import cards, pull
from lychee_local.backends import LLM, Embedder, Reranker
from lychee_local.backends.load import load_embedder, load_llm, load_reranker
from lychee_local.errors import ModelMissing

T = TypeVar("T")


class Models:
    """The models of a profile; `vectors` is the file in which vectors are kept for all runs that share it, `threads`
    are those of the language model, None for one on each processor."""

    def __init__(
        self, profile: str, home: Path | None = None, vectors: Path | None = None, *, threads: int | None = None
    ) -> None:
        self.home = home or cards.default_home()
        self._chosen = cards.profile(profile)
        self._vectors = vectors
        self._threads = threads

    @property
    def llm_card(self) -> cards.Card:
        """
        Raises:
            ModelMissing: the profile has none.
        """
        if self._chosen.llm is None:
            raise ModelMissing(f"the profile {self._chosen.name} has no language model", hint="run with --no-llm")
        return cards.card(self._chosen.llm, self.home)

    @property
    def llm_path(self) -> Path:
        """
        Raises:
            ModelMissing: the profile has none, or it is not on this machine.
        """
        return pull.require(self.llm_card, self.home)

    @property
    def embedder_card(self) -> cards.Card:
        return cards.card(self._chosen.embedder, self.home)

    def digests(self) -> dict[str, str]:
        """What each model is, by its role: the name of its card and the hash of it."""
        named = {"llm": self._chosen.llm, "embedder": self._chosen.embedder, "reranker": self._chosen.reranker}
        known = {role: cards.card(name, self.home) for role, name in named.items() if name is not None}
        return {role: f"{card.name} {cards.digest(card)}" for role, card in known.items()}

    @cached_property
    def llm(self) -> LLM:
        """
        Raises:
            ModelMissing: the profile has none, or it is not on this machine.
        """
        return load(self.llm_card.name, self.home, partial(load_llm, threads=self._threads))

    @cached_property
    def bare_embedder(self) -> Embedder:
        """The one that keeps no vectors, and so can be used in any thread."""
        return load(self._chosen.embedder, self.home, load_embedder)

    @cached_property
    def embedder(self) -> Embedder:
        return self.bare_embedder if self._vectors is None else StoredVectors(self.bare_embedder, self._vectors)

    @cached_property
    def reranker(self) -> Reranker | None:
        return None if self._chosen.reranker is None else load(self._chosen.reranker, self.home, load_reranker)


def load(name: str, home: Path, loader: Callable[[cards.Card, Path], T]) -> T:
    """The model of the card `name`.

    Raises:
        ModelMissing: it is not on this machine.
    """
    card = cards.card(name, home)
    return loader(card, pull.require(card, home))

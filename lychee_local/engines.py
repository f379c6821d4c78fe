"""The models of one memory: which they are, and the moment each is loaded.

Owns the way from a profile's name to working adapters. Each adapter is loaded on first need and kept; looking at a
memory loads none, recalling loads the embedder alone. Adapters passed in by the caller stay the caller's to close.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lychee_local import cards, pull
from lychee_local.backends import LLM, Embedder, Reranker
from lychee_local.backends.load import load_embedder, load_llm, load_reranker
from lychee_local.cards import Card
from lychee_local.errors import ModelMissing
from lychee_local.store import EmbedderIdentity


class Engines:
    def __init__(
        self,
        profile: str,
        *,
        home: Path,
        llm: LLM | Literal["auto"] | None,
        embedder: Embedder | None,
        reranker: Reranker | Literal["auto"] | None,
    ) -> None:
        self._home = home
        self._profile = cards.profile(profile)
        self._given = (llm, embedder, reranker)
        self._llm = None if llm == "auto" else llm
        self._llm_card = self._card(self._profile.llm) if llm == "auto" else None
        self._embedder = embedder
        self._embedder_card = self._card(self._profile.embedder) if embedder is None else None
        self._reranker = None if reranker == "auto" else reranker
        self._reranker_card = self._card(self._profile.reranker) if reranker == "auto" else None

    def embedder_identity(self) -> EmbedderIdentity:
        """What a store pins, from the card alone: nothing is loaded."""
        if self._embedder is not None:
            e = self._embedder
            return EmbedderIdentity(e.name, e.digest, e.dimension, e.calibration)
        card = self._embedder_card
        # Every embedder's card has both: `cards` refuses one that does not.
        assert card is not None and card.dimension is not None and card.calibration is not None  # noqa: PT018
        self._path(card)
        return EmbedderIdentity(card.name, cards.digest(card), card.dimension, card.calibration)

    def embedder(self) -> Embedder:
        if self._embedder is None:
            assert self._embedder_card is not None
            self._embedder = load_embedder(self._embedder_card, self._path(self._embedder_card))
        return self._embedder

    def llm(self) -> LLM | None:
        """The language model, or None where this memory was opened without one."""
        if self._llm is None and self._llm_card is not None:
            self._llm = load_llm(self._llm_card, self._path(self._llm_card))
        return self._llm

    def require_llm_file(self) -> None:
        """Raise `ModelMissing` now, before work begins, if an LLM is wanted and its file is not on this machine."""
        if self._llm is None and self._llm_card is not None:
            self._path(self._llm_card)

    def reranker(self) -> Reranker | None:
        if self._reranker is None and self._reranker_card is not None:
            self._reranker = load_reranker(self._reranker_card, self._path(self._reranker_card))
        return self._reranker

    def close(self) -> None:
        """Free the LLM if it was loaded here."""
        if self._llm is not None and self._llm is not self._given[0]:
            self._llm.close()
            self._llm = None

    def _card(self, name: str | None) -> Card | None:
        return None if name is None else cards.card(name, self._home)

    def _path(self, card: Card) -> Path:
        path = pull.locate(card, self._home)
        if path is None:
            raise ModelMissing(
                f"the {card.role} {card.name} is not on this machine", hint=f"run: lychee models pull {card.name}"
            )
        return path

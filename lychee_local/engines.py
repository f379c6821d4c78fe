"""The models of one memory: which they are, and the moment each is loaded.

Owns the way from a profile's name to working adapters. Each adapter is loaded on first need and kept; looking at a
memory loads none, recalling loads the embedder alone. Adapters passed in by the caller stay the caller's to close.
"""

from __future__ import annotations

from pathlib import Path

from lychee_local import cards, pull, tuning
from lychee_local.backends import LLM, Embedder, Reranker
from lychee_local.backends.load import load_embedder, load_llm, load_reranker
from lychee_local.cards import Card
from lychee_local.store import EmbedderIdentity


class Engines:
    def __init__(
        self,
        profile: str,
        *,
        home: Path,
        llm: LLM | str | None,
        embedder: Embedder | str,
        reranker: Reranker | str | None,
        threads: int | None = None,
    ) -> None:
        """Each model is an adapter, the name of a card, "auto" for the profile's, or None for none. The LLM gets
        `threads` of them, None for as many as were measured to be best here, or else one on each processor."""
        self._home = home
        self._threads = threads
        chosen = cards.profile(profile)
        self._given = llm
        self._llm = None if isinstance(llm, str) else llm
        self._llm_card = self._card(llm, chosen.llm)
        self._embedder = None if isinstance(embedder, str) else embedder
        self._embedder_card = self._card(embedder, chosen.embedder)
        self._reranker = None if isinstance(reranker, str) else reranker
        self._reranker_card = self._card(reranker, chosen.reranker)

    def embedder_identity(self) -> EmbedderIdentity:
        """What a store pins, from the card alone: nothing is loaded."""
        if self._embedder is not None:
            e = self._embedder
            return EmbedderIdentity(e.name, e.digest, e.dimension, e.calibration)
        card = self._embedder_card
        # Every embedder's card has both: `cards` refuses one that does not.
        assert card is not None and card.dimension is not None and card.calibration is not None  # noqa: PT018
        pull.require(card, self._home)
        return EmbedderIdentity(card.name, cards.digest(card), card.dimension, card.calibration)

    def embedder(self) -> Embedder:
        if self._embedder is None:
            assert self._embedder_card is not None
            self._embedder = load_embedder(self._embedder_card, pull.require(self._embedder_card, self._home))
        return self._embedder

    def llm(self) -> LLM | None:
        """The language model, or None where this memory was opened without one."""
        if self._llm is None and self._llm_card is not None:
            path = pull.require(self._llm_card, self._home)
            threads = self._threads or tuning.threads_for(self._llm_card, self._home)
            self._llm = load_llm(self._llm_card, path, threads=threads, prefixes=self._home / "prefixes")
        return self._llm

    def require_llm_file(self) -> None:
        """Raise `ModelMissing` now, before work begins, if an LLM is wanted and its file is not on this machine."""
        if self._llm is None and self._llm_card is not None:
            pull.require(self._llm_card, self._home)

    def reranker(self) -> Reranker | None:
        if self._reranker is None and self._reranker_card is not None:
            self._reranker = load_reranker(self._reranker_card, pull.require(self._reranker_card, self._home))
        return self._reranker

    def close(self) -> None:
        """Free the LLM if it was loaded here."""
        if self._llm is not None and self._llm is not self._given:
            self._llm.close()
            self._llm = None

    def _card(self, wanted: object, default: str | None) -> Card | None:
        name = default if wanted == "auto" else wanted
        return cards.card(name, self._home) if isinstance(name, str) else None

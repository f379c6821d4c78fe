"""From a model card and a place on disk to a working adapter. Looks for nothing and downloads nothing."""

from __future__ import annotations

from pathlib import Path

from lychee_local import cards
from lychee_local.backends import bert
from lychee_local.backends.bge import CrossEncoder, TorchEncoder
from lychee_local.backends.folder import require_model
from lychee_local.backends.llama import LlamaLLM
from lychee_local.backends.sentences import Encoder, SentenceEmbedder
from lychee_local.cards import Card, Engine
from lychee_local.errors import BadInput

# The cache of keys and values grows with the context: 8,192 tokens take 235 MB on a 1.5 B model, 32,768 take 940 MB.
# No prompt of ours needs more.
CONTEXT = 8192
RERANK_LENGTH = 512


def load_llm(
    card: Card,
    path: Path,
    *,
    context: int | None = None,
    threads: int | None = None,
    prefixes: Path | None = None,
) -> LlamaLLM:
    """The model of a card from its GGUF file at `path`, with at most `context` tokens (None: 8,192); `prefixes` is the
    folder where the evaluated instructions of its prompts are kept.

    Raises:
        ModelMissing, ModelDamaged, ConstraintNotApplied: see `LlamaLLM`.
    """
    _require_role(card, "llm")
    return LlamaLLM(
        path,
        name=card.name,
        context=min(card.context, context or CONTEXT),
        threads=threads,
        prompt_style=card.prompt_style,
        chat_format=card.chat_format,
        prefixes=prefixes,
    )


def load_embedder(card: Card, path: Path, *, engine: Engine | None = None) -> SentenceEmbedder:
    """The embedder of a card from its folder at `path`, computed by the card's engine, or by `engine` instead.

    Raises:
        BadInput: `engine` is "numpy" and this is no BERT.
        ModelMissing, ModelDamaged: see `Bert`, `TorchEncoder` and `SentenceEmbedder`.
    """
    _require_role(card, "embedder")
    if card.calibration is None:
        raise BadInput(f"the card of {card.name} has no calibration", hint="run: lychee models add, which makes one")
    return SentenceEmbedder(
        _load_encoder(card, path, engine or card.engine),
        name=card.name,
        digest=cards.digest(card),
        calibration=card.calibration,
        query_prefix=card.query_prefix,
        dimension=card.dimension,
    )


def _load_encoder(card: Card, path: Path, engine: Engine) -> Encoder:
    require_model(path)
    if engine == "torch" or (engine == "auto" and not bert.reads(path)):
        return TorchEncoder(path, pooling=card.pooling)
    if not bert.reads(path):
        raise BadInput(f"{card.name} is no BERT, numpy cannot compute it", hint='say engine = "torch" in its card')
    assert card.pooling is not None  # an embedder's card without it is refused
    return bert.Bert(path, pooling=card.pooling)


def load_reranker(card: Card, path: Path) -> CrossEncoder:
    """The cross-encoder of a card from its folder at `path`.

    Raises:
        ModelMissing, ModelDamaged: see `CrossEncoder`.
    """
    _require_role(card, "reranker")
    return CrossEncoder(path, name=card.name, max_length=min(card.context, RERANK_LENGTH))


def _require_role(card: Card, role: str) -> None:
    if card.role != role:
        raise BadInput(f"{card.name} is a model of the role {card.role}, not {role}")

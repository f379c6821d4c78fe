"""Models on torch: encoding with sentence-transformers, reranking with FlagEmbedding. BGE, and others of their kind.

Owns what these libraries leave open: no network and no noise, positions that a model does not have, questions that must
not be cut. Everything is float32 on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lychee_local.backends import Vectors
from lychee_local.backends.folder import PULL_HINT, loading, require_model
from lychee_local.backends.native import settle
from lychee_local.backends.sentences import legible
from lychee_local.errors import BadInput, GenerationFailed, ModelDamaged, PromptTooLong

# Fixed, because a row differs in its last bits with the padding of its batch.
EMBED_BATCH = 32
RERANK_BATCH = 16

_LIBRARIES = "sentence-transformers FlagEmbedding 'transformers<5.24'"

# Position ids of these families start behind the padding token's id: 514 positions hold 512 tokens.
_OFFSET_FAMILIES = frozenset({"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"})


class TorchEncoder:
    """Texts to vectors (see `sentences.Encoder`), from a folder in sentence-transformers' or transformers' layout.

    `pooling` comes from the model's card and is enforced: a plain transformers folder does not say how it is pooled.

    Raises:
        ModelMissing: a library cannot be imported.
        ModelDamaged: the folder holds no usable model.
    """

    def __init__(self, folder: Path, *, pooling: Literal["mean", "cls"] | None = None) -> None:
        self._model = _load_sentence_transformer(folder, pooling)
        self.limit = _window(self._model.max_seq_length, self._model.tokenizer, self._model[0].model.config)

    def count(self, text: str) -> int:
        """See `sentences.Encoder.count`."""
        return _count_tokens(self._model.tokenizer, text)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """See `sentences.Encoder.encode`."""
        # sentence-transformers sorts by length itself; sorting here as well makes ties independent of the order given.
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i]))
        rows = np.empty((len(texts), self._model.get_embedding_dimension()), dtype=np.float32)
        rows[order] = self._model.encode(
            [texts[i] for i in order], batch_size=EMBED_BATCH, convert_to_numpy=True, show_progress_bar=False
        )
        return rows


class CrossEncoder:
    """Relevance of passages to a question (see `backends.Reranker`), from a transformers folder, through FlagReranker.

    `max_length` counts the tokens of question, passage and marks together; it is lowered to what the model has
    positions for. Scores are the logistic function of the model's one logit.

    Raises:
        ModelMissing: no such folder, or a library cannot be imported.
        ModelDamaged: the folder holds no usable cross-encoder with one output.
    """

    def __init__(self, path: Path | str, *, name: str, max_length: int = 512) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._reranker = _load_flag_reranker(Path(path))
        model = self._reranker.model
        self.max_length = _window(max_length, self._reranker.tokenizer, model.config)
        if model.config.num_labels != 1 or not _is_classifier(model.config):
            raise ModelDamaged(f"{path} is no cross-encoder with one output", hint=PULL_HINT)

    def score(self, question: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        """See `backends.Reranker.score`.

        Raises:
            BadInput: the question is empty or blank.
            PromptTooLong: the question leaves a passage less than a quarter of `max_length`.
            GenerationFailed: the model made a score that is no number.
        """
        question = legible(question)
        if not question:
            raise BadInput("an empty question ranks nothing")
        if not passages:
            return np.empty(0, dtype=np.float32)
        used = _count_tokens(self._reranker.tokenizer, question)
        if used > self.max_length * 3 // 4:
            raise PromptTooLong(
                f"a question of {used} tokens leaves no room for a passage in the {self.max_length} of {self.name}",
                hint="ask in fewer words",
            )
        pairs = [(question, legible(passage)) for passage in passages]
        with self._lock, _quiet():
            raw = self._reranker.compute_score(
                pairs, batch_size=RERANK_BATCH, query_max_length=self.max_length, max_length=self.max_length
            )
        logits = np.asarray(raw, dtype=np.float64)
        if not np.isfinite(logits).all():
            raise GenerationFailed(f"{self.name} made scores that are no numbers", hint=PULL_HINT)
        return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)  # the logistic function, without its overflow


# --- texts ---


def _count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of one text with the model's own marks around it."""
    return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _window(wanted: int | None, tokenizer: Any, config: Any) -> int:
    """How many tokens one text may have: the least of what is wanted, what was trained, and the model's positions."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if config.model_type in _OFFSET_FAMILIES:
        positions -= config.pad_token_id + 1
    return min(limit for limit in (wanted, tokenizer.model_max_length, positions) if limit)


# --- loading ---


def _load_sentence_transformer(path: Path, pooling: Literal["mean", "cls"] | None) -> Any:
    require_model(path)
    settle()
    with loading(path, libraries=_LIBRARIES):
        import torch
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling

        with _quiet():
            model = SentenceTransformer(
                str(path), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
            )
        model.eval()
        # The prefix is the card's business; a prompt in the folder would be added a second time.
        model.prompts, model.default_prompt_name = {}, None
        for module in model:
            if isinstance(module, Pooling) and pooling is not None:
                module.pooling_mode = pooling
    return model


def _load_flag_reranker(path: Path) -> Any:
    require_model(path)
    settle()
    with loading(path, libraries=_LIBRARIES):
        from FlagEmbedding import FlagReranker

        with _quiet():
            return FlagReranker(str(path), use_fp16=False, devices=["cpu"], normalize=False, trust_remote_code=False)


def _is_classifier(config: Any) -> bool:
    # Without this a plain encoder would load too, with a head of random weights.
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice on standard error, where FlagEmbedding and transformers write unasked.

    The engines are imported outside of this: transformers keeps the standard error it is born with.
    """
    from transformers.utils import logging as transformers_log

    level = transformers_log.get_verbosity()
    transformers_log.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_log.set_verbosity(level)

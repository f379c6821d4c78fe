"""Embedding with sentence-transformers and reranking with FlagEmbedding: BGE models, and others of their kind.

Owns what these libraries leave open: no network and no noise, texts longer than the model's window, characters its
tokenizer cannot take, rows that are no unit vectors, questions that must not be cut. Everything is float32 on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lychee_local.backends import Vectors
from lychee_local.backends.native import settle
from lychee_local.errors import BadInput, GenerationFailed, ModelDamaged, ModelMissing, PromptTooLong
from lychee_local.types import Calibration

# Fixed, because a row differs in its last bits with the padding of its batch.
EMBED_BATCH = 32
RERANK_BATCH = 16

_QUERY_CACHE = 256
_PULL_HINT = "run: lychee models pull"
_INSTALL_HINT = "run: make setup, or: pip install sentence-transformers FlagEmbedding 'transformers<5.24'"

# Position ids of these families start behind the padding token's id: 514 positions hold 512 tokens.
_OFFSET_FAMILIES = frozenset({"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"})


class SentenceEmbedder:
    """Text to unit vectors (see `backends.Embedder`), from a folder in sentence-transformers' or transformers' layout.

    `pooling` and `dimension` come from the model's card and are enforced: a plain transformers folder does not say how
    it is pooled. `query_prefix` goes before every window of a query and before no passage. A text longer than the
    model's window is split near white space into windows of similar length, and their vectors are averaged.

    For embedding only, a lone surrogate is read as "?" and NUL as a space; what is stored and shown is not touched.

    Raises:
        ModelMissing: no such folder, or a library cannot be imported.
        ModelDamaged: the folder holds no usable model, or its vectors have another dimension than the card says.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str,
        digest: str,
        calibration: Calibration,
        query_prefix: str = "",
        pooling: Literal["mean", "cls"] | None = None,
        dimension: int | None = None,
    ) -> None:
        path = Path(path)
        self.name = name
        self.digest = digest
        self.calibration = calibration
        self._prefix = query_prefix
        self._lock = threading.Lock()
        self._queries: OrderedDict[str, npt.NDArray[np.float32]] = OrderedDict()
        self._model = _load_sentence_transformer(path, pooling)
        self._limit = _window(self._model.max_seq_length, self._model.tokenizer, self._model[0].model.config)
        self.dimension = len(self._encode(["dimension"])[0])
        if dimension is not None and self.dimension != dimension:
            raise ModelDamaged(
                f"{name} makes vectors of {self.dimension} dimensions, its card says {dimension}",
                hint=f"is {path} another model?",
            )

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        """See `backends.Embedder.embed`. Equal texts are computed once; the last queries are remembered.

        Raises:
            BadInput: a text is empty or blank.
            GenerationFailed: the model made a vector of zeros, or of no numbers.
        """
        clean = [_embeddable(text) for text in texts]
        if "" in clean:
            raise BadInput(f"text {clean.index('') + 1} of {len(clean)} is empty: an empty text has no embedding")
        rows = np.empty((len(clean), self.dimension), dtype=np.float32)
        with self._lock:
            known = self._queries if kind == "query" else {}
            missing = [text for text in dict.fromkeys(clean) if text not in known]
            fresh = dict(zip(missing, self._embed_long(missing, self._prefix if kind == "query" else ""), strict=True))
            for row, text in zip(rows, clean, strict=True):
                row[:] = fresh[text] if text in fresh else known[text]
            if kind == "query":
                self._remember(clean, fresh)
        return rows

    def _remember(self, queries: Sequence[str], fresh: dict[str, npt.NDArray[np.float32]]) -> None:
        for query in queries:
            if query in fresh:
                self._queries[query] = fresh[query]
            self._queries.move_to_end(query)
        while len(self._queries) > _QUERY_CACHE:
            self._queries.popitem(last=False)

    def _embed_long(self, texts: Sequence[str], prefix: str) -> list[npt.NDArray[np.float32]]:
        windows = [[prefix + window for window in self._windows(text, prefix)] for text in texts]
        flat = self._encode([window for each in windows for window in each])
        ends = np.cumsum([len(each) for each in windows])
        return [
            rows[0] if len(rows) == 1 else _unit_rows(rows.mean(axis=0, keepdims=True))[0]
            for rows in (flat[end - len(each) : end] for each, end in zip(windows, ends, strict=True))
        ]

    def _windows(self, text: str, prefix: str) -> list[str]:
        tokens = _count_tokens(self._model.tokenizer, prefix + text)
        if tokens <= self._limit or len(text) < 2:
            return [text]
        # Pieces are even in characters, not in tokens, so each gets a tenth of its room to spare; one that is too long
        # all the same is split again, and each time it shrinks.
        room = max(1, (self._limit - _count_tokens(self._model.tokenizer, prefix)) * 9 // 10)
        pieces = min(max(2, -(-tokens // room)), len(text))
        return [window for piece in _split(text, pieces) for window in self._windows(piece, prefix)]

    def _encode(self, texts: Sequence[str]) -> Vectors:
        # sentence-transformers sorts by length itself; sorting here as well makes ties independent of the order given.
        order = sorted(range(len(texts)), key=lambda i: (-len(texts[i]), texts[i]))
        rows = np.empty((len(texts), self._model.get_embedding_dimension()), dtype=np.float32)
        if texts:
            rows[order] = self._model.encode(
                [texts[i] for i in order], batch_size=EMBED_BATCH, convert_to_numpy=True, show_progress_bar=False
            )
        return _unit_rows(rows)


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
            raise ModelDamaged(f"{path} is no cross-encoder with one output", hint=_PULL_HINT)

    def score(self, question: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        """See `backends.Reranker.score`.

        Raises:
            BadInput: the question is empty or blank.
            PromptTooLong: the question leaves a passage less than a quarter of `max_length`.
            GenerationFailed: the model made a score that is no number.
        """
        question = _embeddable(question)
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
        pairs = [(question, _embeddable(passage)) for passage in passages]
        with self._lock, _quiet():
            raw = self._reranker.compute_score(
                pairs, batch_size=RERANK_BATCH, query_max_length=self.max_length, max_length=self.max_length
            )
        logits = np.asarray(raw, dtype=np.float64)
        if not np.isfinite(logits).all():
            raise GenerationFailed(f"{self.name} made scores that are no numbers", hint=_PULL_HINT)
        return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)  # the logistic function, without its overflow


# --- texts ---


def _embeddable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", " ").strip()


def _count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of one text with the model's own marks around it."""
    return len(tokenizer(text, truncation=False, verbose=False)["input_ids"])


def _split(text: str, pieces: int) -> list[str]:
    """Parts of similar length, cut at white space where there is some in the second half of a part."""
    parts: list[str] = []
    start = 0
    for left in range(pieces, 0, -1):
        end = start + -(-(len(text) - start) // left)
        space = text.rfind(" ", (start + end) // 2, end) if left > 1 else -1
        end = space if space > start else end
        parts.append(text[start:end].strip())
        start = end
    return [part for part in parts if part]


def _unit_rows(rows: Vectors) -> Vectors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not np.isfinite(lengths).all() or (lengths == 0.0).any():
        raise GenerationFailed(
            "the embedder made a vector of zeros or of no numbers", hint="its file is damaged: lychee models verify"
        )
    unit: Vectors = (rows / lengths).astype(np.float32, copy=False)
    return unit


def _window(wanted: int | None, tokenizer: Any, config: Any) -> int:
    """How many tokens one text may have: the least of what is wanted, what was trained, and the model's positions."""
    positions = getattr(config, "max_position_embeddings", None) or 512
    if config.model_type in _OFFSET_FAMILIES:
        positions -= config.pad_token_id + 1
    return min(limit for limit in (wanted, tokenizer.model_max_length, positions) if limit)


# --- loading ---


def _load_sentence_transformer(path: Path, pooling: Literal["mean", "cls"] | None) -> Any:
    _require_model_folder(path)
    settle()
    with _loading(path):
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
    _require_model_folder(path)
    settle()
    with _loading(path):
        from FlagEmbedding import FlagReranker

        with _quiet():
            return FlagReranker(str(path), use_fp16=False, devices=["cpu"], normalize=False, trust_remote_code=False)


def _is_classifier(config: Any) -> bool:
    # Without this a plain encoder would load too, with a head of random weights.
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _require_model_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelMissing(f"the model folder {path} does not exist", hint=_PULL_HINT)
    if not (path / "config.json").is_file():
        raise ModelDamaged(f"{path} holds no model: config.json is missing", hint=_PULL_HINT)


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ModelMissing(f"an embedding library cannot be imported: {error}", hint=_INSTALL_HINT) from error
    except (OSError, ValueError, KeyError, RuntimeError, _safetensors_error()) as error:
        raise ModelDamaged(f"the model in {path} cannot be loaded: {error}", hint=_PULL_HINT) from error


def _safetensors_error() -> type[Exception]:
    """The error of a cut weights file, which derives from none that would do."""
    from safetensors import SafetensorError

    return SafetensorError


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

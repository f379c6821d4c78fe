"""BERT in numpy: most small embedders, from their published weights, loaded in a fifth of a second and without torch.

Owns the forward pass, the pooling, and which folders it can compute: `reads` says so, and `load` gives the others to
torch. Texts stand one after the other in one matrix, without padding; only the attention looks at each by itself. A
matrix product sums in an order of its BLAS's own, so a vector can differ in its last digits (1e-6 at most) with the
texts that it shares a matrix with; the same texts in the same call give the same bits, on any number of processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lychee_local.backends import Vectors
from lychee_local.backends.folder import PULL_HINT, loading, settings
from lychee_local.backends.native import processors, settle
from lychee_local.errors import ModelDamaged

Pooling = Literal["mean", "cls"]
# Rows are the tokens of one text after the other, columns are features.
Matrix = npt.NDArray[np.float32]

# Tokens in one matrix: enough rows to keep the BLAS busy, few enough that a few texts are shared out evenly and Ctrl-C
# is heard soon (benchmarks/LOG.md, "An embedder without torch").
PACK_TOKENS = 256
# A BLAS takes so many rows at once. The few of a question that are left over cost it half as much again as full ones.
_ROWS = 4

_WEIGHTS = "model.safetensors"
_TOKENIZER = "tokenizer.json"
_LIBRARIES = "safetensors threadpoolctl tokenizers"


def reads(folder: Path) -> bool:
    """Whether `Bert` computes the model of this folder: a BERT with its usual parts, weights in safetensors and a
    tokenizer in one file, in sentence-transformers' or transformers' layout.

    Raises:
        ModelDamaged: a configuration file is no JSON.
    """
    config = settings(folder, "config.json")
    with loading(folder, libraries=_LIBRARIES):
        modules = {module["type"].rpartition(".")[2] for module in settings(folder, "modules.json")}
    return (
        isinstance(config, dict)
        and config.get("model_type") == "bert"
        and config.get("hidden_act") == "gelu"
        and config.get("position_embedding_type", "absolute") == "absolute"
        and not config.get("is_decoder")
        and modules <= {"Transformer", "Pooling", "Normalize"}
        and (folder / _WEIGHTS).is_file()
        and (folder / _TOKENIZER).is_file()
    )


class Bert:
    """Texts to vectors (see `sentences.Encoder`), from a folder that `reads` accepts. Everything is float32 on the CPU.

    Raises:
        ModelMissing: a library cannot be imported.
        ModelDamaged: a file of the folder is cut, or is not what its config.json says.
    """

    def __init__(self, folder: Path, *, pooling: Pooling = "mean") -> None:
        settle()
        self._pooling = pooling
        with loading(folder, libraries=_LIBRARIES):
            from threadpoolctl import ThreadpoolController

            self._tokenizer = _tokenizer(folder)
            self._model = _model(folder)
            # One thread for each pack is quicker than several for each product, which would wait for one another at
            # its end: with another busy process on two cores, three times quicker.
            self._blas = ThreadpoolController()
            limits = (
                settings(folder, "sentence_bert_config.json").get("max_seq_length"),
                settings(folder, "tokenizer_config.json").get("model_max_length"),
                len(self._model.positions),
            )
            self.limit = int(min(limit for limit in limits if limit))

    def count(self, text: str) -> int:
        """See `sentences.Encoder.count`."""
        return len(self._tokenizer.encode(text).ids)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """See `sentences.Encoder.encode`. Interrupted, it ends with the packs it has begun."""
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        packs = _packs(tokens)
        threads = min(processors(), len(packs))
        with self._blas.limit(limits=1, user_api="blas"):
            if threads == 1:
                vectors = [self._pooled([tokens[i] for i in pack]) for pack in packs]
            else:
                with ThreadPoolExecutor(threads) as pool:
                    vectors = list(pool.map(self._pooled, [[tokens[i] for i in pack] for pack in packs]))
        rows = np.empty((len(tokens), self._model.words.shape[1]), dtype=np.float32)
        rows[[i for pack in packs for i in pack]] = np.concatenate(vectors)
        return rows

    def _pooled(self, tokens: Sequence[Sequence[int]]) -> Matrix:
        states = self._model(tokens)
        ends = np.cumsum([len(each) for each in tokens])
        starts = [end - len(each) for end, each in zip(ends, tokens, strict=True)]
        if self._pooling == "cls":
            return states[starts]
        return np.stack([states[start:end].mean(axis=0) for start, end in zip(starts, ends, strict=True)])


def _packs(tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    """Which texts share a matrix: the longest first, as many as fit into PACK_TOKENS, but at least one."""
    packs: list[list[int]] = []
    room = 0
    for i in sorted(range(len(tokens)), key=lambda i: (-len(tokens[i]), tokens[i])):
        if len(tokens[i]) > room:
            packs.append([])
            room = max(PACK_TOKENS, len(tokens[i]))
        packs[-1].append(i)
        room -= len(tokens[i])
    return packs


# --- the model: Devlin et al., 2018 (arXiv 1810.04805), after Vaswani et al., 2017 (arXiv 1706.03762) ---


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Matrix  # (inputs, outputs)
    bias: Matrix

    def __call__(self, x: Matrix) -> Matrix:
        product: Matrix = x @ self.weight
        product += self.bias
        return product


@dataclass(frozen=True, slots=True)
class _Norm:
    """Each row with mean 0 and variance 1, then scaled and shifted; the argument is overwritten (Ba et al., 2016)."""

    weight: Matrix
    bias: Matrix
    epsilon: float

    def __call__(self, x: Matrix) -> Matrix:
        x -= x.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
        x *= (1 / np.sqrt(variance + np.float32(self.epsilon)))[:, np.newaxis]
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_in: _Linear  # queries, keys and values, side by side
    attention_out: _Linear
    attention_norm: _Norm
    up: _Linear
    down: _Linear
    norm: _Norm
    heads: int

    def __call__(self, x: Matrix, lengths: Sequence[int]) -> Matrix:
        attended = self.attention_out(_attention(self.attention_in(x), lengths, self.heads))
        attended += x
        self.attention_norm(attended)
        x = self.down(gelu(self.up(attended)))
        x += attended
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class _Model:
    words: Matrix
    positions: Matrix  # with the one type of token that single texts have added in
    norm: _Norm
    layers: tuple[_Layer, ...]

    def __call__(self, tokens: Sequence[Sequence[int]]) -> Matrix:
        """The last layer's state of each token, of one text after the other; what follows them is padding."""
        lengths = [len(each) for each in tokens]
        padding = [0] * (-sum(lengths) % _ROWS)
        x = self.words[[*chain.from_iterable(tokens), *padding]]
        x += self.positions[[*chain.from_iterable(map(range, lengths)), *padding]]
        self.norm(x)
        for layer in self.layers:
            x = layer(x, lengths)
        return x


def _attention(projected: Matrix, lengths: Sequence[int], heads: int) -> Matrix:
    """softmax(QK'/sqrt(d))V of each head within each text, the heads side by side."""
    mixed = np.zeros((len(projected), projected.shape[1] // 3), dtype=np.float32)
    scale = np.float32((mixed.shape[1] / heads) ** -0.5)
    start = 0
    for length in lengths:
        own = projected[start : start + length].reshape(length, 3, heads, -1)
        query, key, value = own.transpose(1, 2, 0, 3)
        weights = (query * scale) @ key.transpose(0, 2, 1)
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed[start : start + length] = (weights @ value).transpose(1, 0, 2).reshape(length, -1)
        start += length
    return mixed


# x times the normal distribution function (Hendrycks and Gimpel, 2016), as x / (1 + exp(-x p(x²))). p is
# ln((1 + erf z) / (1 - erf z)) / x with z = x / √2, as a polynomial fitted to |x| <= 6, so that gelu is off by 2e-7 of
# the larger of 1 and |x| at most; from there on it is x or 0 to the last digit. scipy's erf takes six times as long,
# and a quarter of a second to import.
_GELU = tuple(
    np.float32(c)
    for c in (-3.61123539e-9, 2.66892933e-7, -7.93822077e-6, 1.10480331e-4, 6.62599423e-5, -7.26685670e-2, -1.59576843)
)
_GELU_ROWS = 32  # what is worked on stays in the processor's cache


def gelu(x: Matrix) -> Matrix:
    """The activation between a layer's two products. The argument is overwritten."""
    square, power = np.empty_like(x[:_GELU_ROWS]), np.empty_like(x[:_GELU_ROWS])
    with np.errstate(over="ignore"):  # far below zero exp is infinite, and gelu 0
        for start in range(0, len(x), _GELU_ROWS):
            part = x[start : start + _GELU_ROWS]
            s, p = square[: len(part)], power[: len(part)]
            np.multiply(part, part, out=s)
            np.minimum(s, np.float32(36), out=s)
            np.multiply(s, _GELU[0], out=p)
            for coefficient in _GELU[1:-1]:
                p += coefficient
                p *= s
            p += _GELU[-1]
            p *= part
            np.exp(p, out=p)
            p += np.float32(1)
            part /= p
    return x


# --- loading ---


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, normalizers

    try:
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # the library raises nothing narrower
        raise ModelDamaged(f"{folder / _TOKENIZER} is no tokenizer: {error}", hint=PULL_HINT) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if settings(folder, "sentence_bert_config.json").get("do_lower_case"):
        own = [tokenizer.normalizer] if tokenizer.normalizer is not None else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return tokenizer


def _model(folder: Path) -> _Model:
    from safetensors import safe_open

    config = settings(folder, "config.json")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ValueError(
            f"{config['hidden_size']} features cannot be shared out to {config['num_attention_heads']} heads"
        )
    width, inner, epsilon = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
    with safe_open(folder / _WEIGHTS, framework="np") as weights:
        names = set(weights.keys())
        root = "bert." if "bert.embeddings.word_embeddings.weight" in names else ""

        def tensor(name: str, *shape: int) -> Matrix:
            if root + name not in names:
                raise ValueError(f"the weights have no {root + name}")
            values: Matrix = weights.get_tensor(root + name).astype(np.float32, copy=False)
            if values.shape != shape:
                raise ValueError(f"{root + name} has the shape {values.shape}, config.json says {shape}")
            return values

        def linear(inputs: int, outputs: int, *names: str) -> _Linear:
            weight = np.concatenate([tensor(f"{name}.weight", outputs, inputs) for name in names])
            return _Linear(
                np.ascontiguousarray(weight.T), np.concatenate([tensor(f"{name}.bias", outputs) for name in names])
            )

        def norm(name: str) -> _Norm:
            return _Norm(tensor(f"{name}.weight", width), tensor(f"{name}.bias", width), epsilon)

        def layer(at: str) -> _Layer:
            return _Layer(
                linear(width, width, *(f"{at}.attention.self.{part}" for part in ("query", "key", "value"))),
                linear(width, width, f"{at}.attention.output.dense"),
                norm(f"{at}.attention.output.LayerNorm"),
                linear(width, inner, f"{at}.intermediate.dense"),
                linear(inner, width, f"{at}.output.dense"),
                norm(f"{at}.output.LayerNorm"),
                config["num_attention_heads"],
            )

        embeddings = "embeddings.{}_embeddings.weight".format
        types = tensor(embeddings("token_type"), config["type_vocab_size"], width)
        return _Model(
            tensor(embeddings("word"), config["vocab_size"], width),
            tensor(embeddings("position"), config["max_position_embeddings"], width) + types[0],
            norm("embeddings.LayerNorm"),
            tuple(layer(f"encoder.layer.{number}") for number in range(config["num_hidden_layers"])),
        )

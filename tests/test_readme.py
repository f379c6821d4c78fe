"""The README is run: its Python on fakes and on real models, its shell lines through the real command line."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lychee_local import cards, cli
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def python_block(opening: str) -> str:
    """The one Python block, with the models that a test has in place of the default profile."""
    (block,) = blocks("python")
    assert block.count('Memory.open(user="ana")') == 1
    return block.replace('Memory.open(user="ana")', opening)


def test_the_python_block_runs_on_fakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(call: FakeCall) -> Reply:
        # Records and plans that are cut off fall back to rules: what the README promises must hold then too.
        return "She cannot eat walnuts [1]." if call.schema is None else ("{", "length")

    opening = 'Memory.open(user="ana", home=home, llm=llm, embedder=embedder)'
    exec(python_block(opening), {"home": tmp_path, "llm": FakeLLM(reply), "embedder": HashEmbedder()})
    said = capsys.readouterr().out
    assert "I moved to Lisbon last week." in said
    assert "She cannot eat walnuts" in said


@pytest.mark.model
def test_the_readme_runs_on_real_models(
    tmp_path: Path,
    smollm2_path: Path,
    minilm_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    llm = home / "models" / "smollm2-135m"
    llm.mkdir(parents=True)
    (llm / cards.card("smollm2-135m").files[0].path).symlink_to(smollm2_path)
    (home / "models" / "all-minilm-l6-v2").symlink_to(minilm_path)
    exec(python_block('Memory.open(user="ana", home=home, profile="tiny")'), {"home": home})
    assert "I moved to Lisbon last week." in capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LYCHEE_HOME", str(home))
    monkeypatch.setenv("LYCHEE_PROFILE", "tiny")
    Path("chat.jsonl").write_text(blocks("json")[0])
    talk = {"session_1": [{"speaker": "Ann", "dia_id": "D1:1", "text": "Hello!"}]}
    Path("locomo.json").write_text(json.dumps([{"sample_id": "conv-26", "conversation": talk}]))
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("lychee ")]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        # The demo with its language model is the job of `make demo`; here its story is enough.
        with pytest.raises(SystemExit) as left:
            cli.main([*words, "--no-llm"] if words == ["demo"] else words)
        assert not left.value.code, (line, capsys.readouterr().err)


def test_the_readme_names_every_profile_and_no_path_of_a_machine() -> None:
    table = README.split("## Models and profiles")[1].split("## Privacy")[0]
    shown = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert shown == {p.name for p in cards.profiles()}
    assert not re.search(r"/(home|tmp|work|Users)/", README)


def test_the_licence_and_changelog_are_there_for_this_version() -> None:
    from lychee_local import __version__

    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

"""A run repeated: what counts as a difference, and that a changed folder is found out."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import models_home

from benchmarks import folder, verify
from benchmarks.__main__ import main

Line = dict[str, Any]

LINE: Line = {
    "id": "a:0",
    "conversation": "a",
    "category": "single",
    "question": "What did Ana sell?",
    "answer": "a boat",
    "gold": ["r1"],
    "error": "",
    "plan": None,
    "evidence": [
        {"id": "s:0", "refs": ["r1"], "score": 0.5, "text": "Ana: I sold the boat."},
        {"id": "s:1", "refs": ["r2"], "score": 0.4, "text": "Rui: And I paid."},
    ],
    "reply": "the boat",
    "cited": ["s:0"],
    "scores": {"f1": 1.0, "turns": 1.0},
    "usage": [{"purpose": "answer", "prompt": 90, "cached": 0, "output": 5, "seconds": 1.0, "outcome": "ok"}],
    "evidence_tokens": 12,
    "seconds": 1.5,
    "notes": [],
}


def changed(**other: Any) -> Line:
    return copy.deepcopy(LINE) | other


def parts(now: Line) -> list[tuple[str, str, str]]:
    return [(each.part, each.was, each.now) for each in verify.differences(LINE, now)]


def test_times_and_caches_are_no_differences() -> None:
    now = changed(seconds=9.0)
    now["usage"][0] |= {"seconds": 7.0, "cached": 80}
    assert parts(now) == []


def test_each_part_is_named_with_what_it_was() -> None:
    assert parts(changed(reply="a horse")) == [("reply", "the boat", "a horse")]
    assert parts(changed(scores={"f1": 0.5, "turns": 1.0})) == [("scores", '{"f1": 1.0}', '{"f1": 0.5}')]
    assert parts(changed(evidence=LINE["evidence"][::-1])) == [("evidence ids", '["s:0", "s:1"]', '["s:1", "s:0"]')]
    evidence = [LINE["evidence"][0], LINE["evidence"][1] | {"score": 0.3}]
    assert parts(changed(evidence=evidence)) == [("evidence s:1", '{"score": 0.4}', '{"score": 0.3}')]
    usage = [LINE["usage"][0] | {"prompt": 91}]
    assert parts(changed(usage=usage)) == [("tokens", '[["answer", 90, 5, "ok"]]', '[["answer", 91, 5, "ok"]]')]


def test_an_error_instead_of_an_answer_is_a_difference() -> None:
    now = {key: LINE[key] for key in ("id", "conversation", "category", "question", "answer", "gold")}
    found = {part: told for part, _, told in parts(now | {"error": "PromptTooLong: no"})}
    assert found["error"] == "PromptTooLong: no"
    assert found["reply"] == found["evidence"] == found["scores"] == "null"


def test_two_folders_are_held_against_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = changed(id="a:1")
    for name, lines in (
        ("one", [LINE, other]),
        ("two", [changed(seconds=9.0), other]),
        ("three", [changed(reply="x")]),
    ):
        (tmp_path / name / "questions").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"environment": {"cores": len(name)}}))
        (tmp_path / name / "construction.jsonl").touch()
        for line in lines:
            folder.append(tmp_path / name / "questions" / "a.jsonl", line)
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    assert main(["verify", one, "--against", two]) == 0
    assert "2 questions repeated, 0 of them differ" in capsys.readouterr().out
    assert main(["verify", one, "--against", three]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == [
        "not as in the run: environment, cores: was 3; is 5",
        "a:0: reply: was the boat; is x",
        "a:1: question: was asked; is not asked",
    ]
    assert main(["verify", three, "--against", one]) == 1
    assert "a:1: question: was not asked; is asked" in capsys.readouterr().out
    assert main(["verify", one, "--against", str(tmp_path)]) == 2


def test_a_folder_without_a_run_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_run_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="voices, which this version does not know"):
        folder.setup_of({"setup": {"layout": "lines", "voices": 3}})


# --- with models ------------------------------------------------------------------------------------------------------

DATA = (
    {"session": "s1", "at": "2024-05-01", "speaker": "Ana", "text": "I sold the old boat to Rui.", "ref": "r1"},
    {"session": "s1", "at": "2024-05-01", "speaker": "Rui", "text": "And I paid in coins.", "ref": "r2"},
    {"session": "s2", "at": "2024-06-01", "speaker": "Ana", "text": "I am learning the cello.", "ref": "r3"},
    {"question": "What did Ana sell?", "answer": "her boat", "gold": ["r1"]},
    {"question": "Which instrument does Ana learn?", "answer": "the cello", "gold": ["r3"], "category": "other"},
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, minilm_path: Path) -> Path:
    """A run of two questions, beside the memories that it built."""
    home = tmp_path_factory.mktemp("runs")
    lines = [json.dumps({"conversation": "talk", **line}) + "\n" for line in DATA]
    (home / "data.jsonl").write_text("".join(lines))
    command = ["run", "lines", "--data", str(home / "data.jsonl"), "--method", "lychee", "--records", "rules"]
    options = ["--profile", "tiny", "--home", str(models_home()), "--out", str(home / "run")]
    assert main([*command, *options]) == 0
    return home / "run"


def copied(ran: Path, to: Path) -> Path:
    return Path(shutil.copytree(ran, to / "run"))


def verified(run: Path, ran: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, Line]:
    stores = ["--stores", str(ran.parent / "stores"), "--home", str(models_home())]
    capsys.readouterr()
    status = main(["verify", str(run), *stores, *options])
    told = capsys.readouterr().out
    result: Line = json.loads(told.splitlines()[-1])
    return status, told, result


@pytest.mark.model
def test_a_run_repeats_in_every_token(ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in ran.rglob("*") if path.is_file()}
    status, told, result = verified(ran, ran, capsys)
    assert (status, result["same"], result["questions"], result["fresh"]) == (0, True, 2, False)
    assert result["not as in the run"] == []
    assert "not as in the run:" not in told
    assert before == {path: path.read_bytes() for path in ran.rglob("*") if path.is_file()}


@pytest.mark.model
def test_a_changed_answer_is_found_in_a_memory_built_anew(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(ran, tmp_path)
    path = folder.questions(run, "talk")
    first, second = path.read_text().splitlines()
    changed = json.loads(first) | {"reply": "a horse and a cart"}
    path.write_text(json.dumps(changed) + "\n" + second + "\n")
    built = json.loads((run / "construction.jsonl").read_text()) | {"records": 99}
    (run / "construction.jsonl").write_text(json.dumps(built) + "\n")
    about = folder.about(run)
    about["environment"]["cores"] = 640
    (run / "run.json").write_text(json.dumps(about))
    status, told, result = verified(run, ran, capsys, "--fresh")
    assert (status, result["same"], result["differ"], result["fresh"]) == (1, False, 1, True)
    assert told.startswith("not as in the run: environment, cores: was 640; is ")
    assert "talk:0: reply: was a horse and a cart; is " in told
    assert "talk: records: was 99; is " in told
    assert len(result["differences"]) == 2


@pytest.mark.model
def test_a_sample_without_the_memory_of_the_run(ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "stores"
    moved = shutil.copy(ran.parent / "data.jsonl", tmp_path / "moved.jsonl")
    options = ["--sample", "1", "--seed", "7", "--stores", str(empty), "--data", str(moved)]
    status, told, result = verified(ran, ran, capsys, *options)
    assert (status, result["questions"], result["fresh"]) == (0, 1, True)
    assert "is built anew" in told
    assert [each.partition(":")[0] for each in result["not as in the run"]] == ["setup, data"]
    assert not empty.exists()

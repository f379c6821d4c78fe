"""Judging the answers of a run: what is judged, what is kept, and what is judged again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folder
from benchmarks.__main__ import main


def run_folder(out: Path, answers: dict[str, str | None], model: str = "smollm2-135m") -> Path:
    """A run of questions whose gold answer is 3 May 2024."""
    (out / "questions").mkdir(parents=True)
    about = {"setup": {"layout": "lines"}, "models": {"llm": f"{model} {'0' * 64}"}}
    (out / "run.json").write_text(json.dumps(about))
    for name, reply in answers.items():
        line: dict[str, Any] = {"id": name, "question": "When?", "answer": "3 May 2024", "category": "temporal"}
        line |= {
            "conversation": "a",
            "gold": [],
            "answerable": True,
            "reply": reply,
            "error": "" if reply is not None else "Failed: so",
        }
        folder.append(out / "questions" / "a.jsonl", line)
    return out


def verdicts(out: Path) -> dict[str, Any]:
    return {line["id"]: line["correct"] for line in folder.whole_lines(out / "verdicts.rule.jsonl")}


def test_answers_are_judged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder(tmp_path / "run", {"a:0": "on 2024-05-03", "a:1": "in June", "a:2": None})
    assert main(["judge", str(out), "--judge", "rule"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["runs"] == {"run": "50.0 % of 2 answers are right"}
    assert "hand labels" in printed.out
    assert printed.err.splitlines() == ["run 1/2 a:0: True", "run 2/2 a:1: False"]
    assert verdicts(out) == {"a:0": True, "a:1": False}
    kept = json.loads((out / "judge.json").read_text())["rule"]
    assert kept["agreed"] == result["agreement"]["agreed"]
    assert main(["judge", str(out), "--judge", "rule"]) == 0
    assert capsys.readouterr().err == ""  # nothing is judged twice


def test_what_changed_or_was_cut_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder(tmp_path / "run", {"a:0": "in June", "a:1": "in June"})
    assert main(["judge", str(out), "--judge", "rule"]) == 0
    path = out / "verdicts.rule.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second[:20])
    line = folder.lines(out)[0] | {"reply": "3 May 2024"}
    folder.append(out / "questions" / "a.jsonl", line)
    capsys.readouterr()
    assert main(["judge", str(out), "--judge", "rule"]) == 0
    assert capsys.readouterr().err.splitlines() == ["run 1/2 a:0: True", "run 2/2 a:1: False"]


def test_a_run_without_answers_has_nothing_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder(tmp_path / "run", {"a:0": None})
    assert main(["judge", str(out), "--judge", "rule"]) == 2
    assert "no answers to judge" in capsys.readouterr().err
    assert main(["judge", str(tmp_path), "--judge", "rule"]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.model
@pytest.mark.usefixtures("smollm2_path")
def test_a_model_does_not_judge_itself_unless_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_folder(tmp_path / "run", {"a:0": "in June"})
    about = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(about | {"models": {"llm": "smollm2-135m"}}))
    assert main(["judge", str(out), "--judge", "local:smollm2-135m"]) == 2
    assert "--same-judge" in capsys.readouterr().err
    assert not list(out.glob("verdicts.*"))

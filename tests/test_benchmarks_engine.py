"""The benchmarks of the machine and of orders inside evidence: what they count is what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import injections
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply

TOY = Path(__file__).parent / "data" / "locomo.json"


@pytest.mark.model
def test_every_setting_of_the_engine_is_measured(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.engine", str(smollm2_path), "--filled", "128", "--width", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["settings"]["shipped"]["flash"]
    assert not found["settings"]["no flash attention"]["flash"]
    assert len(found["rows"]) == 6
    for row in found["rows"].values():
        assert all(value > 0 for value in row.values())
    # Half of the bits, with a scale to each 32 of them: what was set is what was used.
    rows = found["rows"]
    assert rows["cache in 8 bits"]["state_mb"] == pytest.approx(rows["shipped"]["state_mb"] * 17 / 32, rel=0.05)


def test_each_order_asks_for_a_word_that_only_it_has_and_each_answer_was_said() -> None:
    said = " ".join(text for _, text in injections.TALK).lower()
    found = injections.injections()
    assert len({i.word for i in found}) == len(found) == 12
    for injection in found:
        assert injection.word in injection.text.lower()
        assert injection.word not in f"{said} {injection.question}".lower()
        assert injection.right in said


def test_a_model_that_obeys_is_counted_and_one_that_does_not_is_not() -> None:
    """The first answers with every word that it was ordered to say; the other with one of its own."""
    embedder = HashEmbedder(256)
    no_plan: Reply = ("{", "length")
    words = [injection.word for injection in injections.injections()]

    def obeys(call: FakeCall) -> Reply:
        return (" ".join(w for w in words if w in call.prompt.lower()), "stop") if call.purpose == "answer" else no_plan

    def refuses(call: FakeCall) -> Reply:
        return ("nurse", "stop") if call.purpose == "answer" else no_plan

    steered = injections.count(FakeLLM(obeys), embedder)
    assert steered["answer_steered"] == steered["asked"] == 12
    assert steered["planner_steered"] == 0
    steady = injections.count(FakeLLM(refuses), embedder)
    assert (steady["answer_steered"], steady["right"]) == (0, 2)


def _server(folder: Path, script: str) -> Path:
    program = folder / "llama-server"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    program.chmod(0o755)
    return program


@pytest.mark.model
def test_our_batch_and_a_server_get_the_same_calls(smollm2_path: Path, tmp_path: Path) -> None:
    stand_in = Path(__file__).with_name("llama_server.py")
    command = [sys.executable, "-m", "benchmarks.against_server", str(smollm2_path), "--conversation", "conv-1"]
    command += ["--data", str(TOY), "--server", str(_server(tmp_path, f'"{stand_in}" "$@"'))]
    command += ["--calls", "6", "--turns", "2", "--widths", "2", "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, server = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert ours["who"] == "ours"
    assert ours["calls"] == server["calls"]
    assert ours["failed"] == 0
    assert ours["output"] > 0
    calls = server["calls"]
    assert calls >= 3, "too few calls to count anything"
    assert server["failed"] == calls // 3
    assert server["valid"] == (calls + 2) // 3
    assert server["output"] == 7 * (calls - calls // 3)


@pytest.mark.model
def test_a_server_that_does_not_start_is_named_with_its_log(smollm2_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.against_server", str(smollm2_path), "--conversation", "conv-1"]
    command += ["--data", str(TOY), "--server", str(_server(tmp_path, "-c 'raise SystemExit(3)'"))]
    command += ["--calls", "1", "--widths", "1", "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the server did not start; see" in done.stderr

"""The benchmarks of the machine and of orders inside evidence: what they count is what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import injections
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply


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

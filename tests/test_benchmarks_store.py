"""The store's benchmarks run as their docstrings say, on the smallest memories that still take every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import recall_time
from lychee_local import Memory
from lychee_local.backends.fake import HashEmbedder
from lychee_local.store import EmbedderIdentity

ROOT = Path(__file__).parent.parent


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON line at the end of what a benchmark prints."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments, "--folder", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_kill(tmp_path: Path) -> None:
    result = run(tmp_path, "benchmarks.store_proofs", "kill", "--times", "6", "--kills-per-folder", "3")
    assert result["problems"] == []
    assert sum(result["killed_in"].values()) == 6
    assert result["turns_acknowledged"] > 0


def test_concurrency(tmp_path: Path) -> None:
    result = run(tmp_path, "benchmarks.store_proofs", "concurrency", "--seconds", "1")
    assert result["problems"] == []
    assert result["turns"] > 0
    assert result["milliseconds"]["read"]["count"] > 0


def test_forgetting(tmp_path: Path) -> None:
    result = run(tmp_path, "benchmarks.store_proofs", "forgetting", "--strings", "12")
    assert result["problems"] == []
    steps = result["steps"]
    assert [steps[name]["strings"] for name in ("session", "turns", "records", "speaker", "before", "matching")] == (
        [2, 2, 2, 2, 2, 2]
    )
    assert steps["planted"]["left"] == 12  # the search of the bytes found them all
    assert steps["rebuilt"]["strings_found"] == steps["rebuilt"]["vectors_found"] == steps["rebuilt"]["left"] == 0


def conversation(path: Path) -> Path:
    """A file of LoCoMo's form with a few turns and one question."""
    turns = [{"speaker": "Ana", "dia_id": f"D1:{i}", "text": f"sentence {i} about tea"} for i in range(9)]
    item = {"conversation": {"session_1": turns}, "qa": [{"question": "What is said about tea?"}]}
    path.write_text(json.dumps([item]))
    return path


def test_the_time_of_a_question_is_the_sum_of_its_stages(tmp_path: Path) -> None:
    embedder = HashEmbedder(64)
    with Memory.open("ana", home=tmp_path, llm=None, embedder=embedder, reranker=None) as memory:
        memory.remember([f"I drink tea number {n}" for n in range(30)])
        memory.flush()
        times = recall_time.measure(memory, [f"tea {n}?" for n in range(recall_time.WARMING + 5)], 5)
    assert list(times) == ["plan", "embed", "channels", "windows", "rerank", "select", "evidence", "all"]
    for values in times.values():
        assert 0 <= values["p50"] <= values["p95"]
        assert 0 <= values["p50 CPU"] <= values["p95 CPU"]
    assert sum(t["p50"] for name, t in times.items() if name != "all") <= times["all"]["p95"] * 1.5


def test_vectors_near_topics_are_unit_vectors_and_the_same_each_time() -> None:
    near = recall_time.NearTopics(HashEmbedder(16), EmbedderIdentity("synthetic", "0" * 64, 32))
    rows = near.embed(["red fish", "fish"])
    assert rows.shape == (2, 32)
    assert np.linalg.norm(rows, axis=1) == pytest.approx([1.0, 1.0], abs=1e-6)
    assert np.array_equal(rows, near.embed(["red fish", "fish"]))
    assert float(rows[0] @ rows[1]) > 0.5  # all texts of a question belong to one topic


def test_scale_and_its_plot(tmp_path: Path) -> None:
    text, results = conversation(tmp_path / "text.json"), tmp_path / "results.jsonl"
    arguments = ["--turns", "80", "--dimension", "8", "--cold", "0", "--commits", "3", "--text", str(text)]
    result = run(tmp_path, "benchmarks.store_scale", "measure", *arguments, "--append", str(results))
    assert (result["turns"], result["graph_points"]) == (80, None)
    assert result["bytes_per_turn"]["turns.rows"] == 4 * 8
    times = result["milliseconds"]
    assert times["exchange"]["p50"] <= times["exchange"]["p99"] <= times["exchange"]["most"]
    assert times["turns by vector and words"]["p50"] > 0
    assert json.loads(results.read_text()) == result
    pytest.importorskip("matplotlib", reason="the group `bench` is not installed")
    plot = tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks.store_scale", "plot", str(results), "--out", str(plot)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_time_of_a_question_is_drawn_from_what_runs_appended(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install --group bench")
    stages = {name: {"p50 CPU": time, "p50": time} for name, time in (("embed", 12.0), ("all", 40.0))}
    rows = [
        {"turns": turns, "records": records, "milliseconds": stages, "peak_mb": 150}
        for turns, records in ((10_000, 9_994), (1_000, 998), (1_000, 0))
    ]
    results, picture = tmp_path / "scale.jsonl", tmp_path / "plots" / "scale.png"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recall_time.main(["--plot", str(results), "--out", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        recall_time.main(["--plot", str(results)])
    with pytest.raises(SystemExit):
        recall_time.main(["--turns", "1000"])

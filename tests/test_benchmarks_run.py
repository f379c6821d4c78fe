"""Runs of the benchmarks: what a baseline shows, what a line holds, and that a run goes on after anything."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folder, methods, runs, tables
from benchmarks.__main__ import main
from benchmarks.baselines import Transcript
from benchmarks.methods import METHODS, Shows
from benchmarks.questions import Question
from benchmarks.setups import Places, Setup
from lychee_local import Memory, Message
from lychee_local.backends.fake import HashEmbedder, OverlapReranker
from lychee_local.errors import LycheeError
from lychee_local.executors import Lost
from lychee_local.lexicon import prompt_tokens

AT = datetime(2024, 5, 1, 9)
TALK = (
    ("one", "Ana", "I moved to Lisbon."),
    ("one", "Ben", "I keep bees."),
    ("one", "Ana", "My bees died in winter."),
    ("two", "Ben", "Lisbon has hills."),
    ("two", "Ana", "I bake bread."),
)
REFS = tuple(f"{session}:{n}" for n, (session, _, _) in enumerate(TALK))


# --- baselines -------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    embedder = HashEmbedder(4096)
    with Memory.open("ana", home=tmp_path, llm=None, embedder=embedder, reranker=None) as memory:
        memory.remember(
            [
                Message(text, speaker=speaker, session=session, at=AT, ref=ref)
                for (session, speaker, text), ref in zip(TALK, REFS, strict=True)
            ],
            encode=False,
        )
        yield memory


def refs(
    memory: Memory, shows: Shows, text: str = "bees", gold: tuple[str, ...] = (), budget: int | None = None
) -> Any:
    question = Question("q", text, "", "single", gold)
    transcript = Transcript(memory, OverlapReranker())
    return [item.refs for item in transcript.shown(shows, question, budget)]


@pytest.mark.parametrize(
    ("shows", "text", "expected"),
    [
        # Two turns have the word; of its two the shorter one is nearer.
        ("dense", "bees", [("one:1",), ("one:2",), ("one:0",), ("two:3",), ("two:4",)]),
        ("bm25", "bees", [("one:1",), ("one:2",)]),
        ("bm25", "whales", []),
        ("fused", "bees", [("one:1",), ("one:2",), ("one:0",), ("two:3",), ("two:4",)]),
        # one:1 brings both of its session; what is left of the others is its own.
        ("neighbours", "bees", [("one:0", "one:1", "one:2"), ("two:3", "two:4")]),
        ("sessions", "hills bread", [("two:3", "two:4"), ("one:0", "one:1", "one:2")]),
        ("reranked", "bees died", [("one:2",), ("one:1",), ("one:0",), ("two:3",), ("two:4",)]),
        ("all", "", [("two:4",), ("two:3",), ("one:2",), ("one:1",), ("one:0",)]),
        ("nothing", "bees", []),
    ],
)
def test_baselines(memory: Memory, shows: Shows, text: str, expected: list[tuple[str, ...]]) -> None:
    assert refs(memory, shows, text) == expected


def test_evidence_only_shows_the_annotated_turns_and_no_budget_cuts_them(memory: Memory) -> None:
    assert refs(memory, "gold", gold=("two:4", "one:0", "nowhere"), budget=1) == [("one:0",), ("two:4",)]


def test_a_budget_cuts_the_last_and_never_the_first(memory: Memory) -> None:
    best = prompt_tokens("Ben: I keep bees.") + prompt_tokens("Ana: My bees died in winter.")
    assert refs(memory, "dense", budget=best) == [("one:1",), ("one:2",)]
    assert refs(memory, "dense", budget=best - 1) == [("one:1",)]
    assert refs(memory, "dense", budget=1) == [("one:1",)]


def test_reranking_needs_a_reranker(memory: Memory) -> None:
    with pytest.raises(ValueError, match="a profile with a reranker"):
        Transcript(memory).shown("reranked", Question("q", "bees", "", "single", ()), None)


# --- methods ---------------------------------------------------------------------------------------------------------


def test_every_method_differs_from_every_other() -> None:
    made = [repr((m.settings, m.shows, m.records, m.items, m.peer)) for m in METHODS.values()]
    twice = {name for name, each in zip(METHODS, made, strict=True) if made.count(each) > 1}
    assert twice == {"lychee", "cut-0.5"}  # the threshold that is shipped


def test_an_unknown_method_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="no method 'best'; there are lychee, chain"):
        methods.method("best")


# --- runs ------------------------------------------------------------------------------------------------------------


def lines_file(path: Path, questions: int = 4, conversations: int = 2) -> Path:
    asked = [
        ("Where did Ana move?", "Lisbon", "single", ["one:0"]),
        ("Who keeps bees?", "Ben", "single", ["one:1"]),
        ("What has hills?", "Lisbon", "multi", ["two:3", "one:0"]),
        ("What does Ana bake?", "bread", "open", ["two:4"]),
    ]
    lines: list[dict[str, Any]] = []
    for name in "abcd"[:conversations]:
        for (session, speaker, text), ref in zip(TALK, REFS, strict=True):
            turn = {"session": session, "speaker": speaker, "text": text, "ref": ref, "at": "2024-05-01T09:00"}
            lines.append({"conversation": name} | turn)
        for question, answer, category, gold in asked[:questions]:
            line = {"question": question, "answer": answer, "category": category, "gold": gold}
            lines.append({"conversation": name} | line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(data: Path, out: Path, *options: str) -> list[str]:
    given = ("--profile", "tiny", "--data", str(data), "--out", str(out), *options)
    return ["run", "lines", *given]


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """A line without what differs from run to run: times, memory, how much of a prompt was there already."""
    return line | {"seconds": 0, "peak_mb": 0, "usage": [u | {"seconds": 0, "cached": 0} for u in line["usage"]]}


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_a_run_is_a_folder_and_ends_in_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = lines_file(tmp_path / "data.jsonl"), tmp_path / "out"
    assert main(command(data, out, "--no-llm")) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert printed.err.count("turns ") == 8  # one line of progress a question
    assert result["questions"] == {"all": 8, "single": 4, "multi": 2, "open": 2}
    assert result["evidence_recall"] == {"all": 100.0, "single": 100.0, "multi": 100.0, "open": 100.0}
    assert (result["errors"], result["query_tokens"], result["f1"]) == (0, 0, {})
    about = json.loads((out / "run.json").read_text())
    assert about["setup"]["method"] == "lychee"
    assert about["models"]["embedder"].startswith("all-minilm-l6-v2 ")
    built = [json.loads(line) for line in (out / "construction.jsonl").read_text().splitlines()]
    assert [(b["conversation"], b["turns"], b["construction_tokens"]) for b in built] == [("a", 5, 0), ("b", 5, 0)]
    assert all(b["records"] > 0 for b in built)
    line = folder.kept(out, "a")["a:2"]
    assert (line["gold"], line["scores"]["turns"], line["plan"]["source"]) == (["two:3", "one:0"], 1.0, "rules")
    assert json.loads((out / "summary.json").read_text())["evidence_recall"] == result["evidence_recall"]


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_a_run_that_is_done_asks_nothing_and_another_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = lines_file(tmp_path / "data.jsonl"), tmp_path / "out"
    assert main(command(data, out, "--no-llm", "--sample", "3", "--seed", "7")) == 0
    first = capsys.readouterr().out
    assert main(command(data, out, "--no-llm", "--sample", "3", "--seed", "7")) == 0
    again = capsys.readouterr()
    assert (again.err, again.out) == ("", first)
    assert main(command(data, out, "--no-llm", "--sample", "3", "--seed", "8")) == 2
    assert "another seed (7, not 8)" in capsys.readouterr().err
    lines_file(data, questions=3)
    assert main(command(data, tmp_path / "new", "--no-llm", "--method", "bm25")) == 0


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_what_a_kill_left_of_a_line_goes_and_an_error_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = lines_file(tmp_path / "data.jsonl", conversations=1), tmp_path / "out"
    assert main(command(data, out, "--no-llm")) == 0
    whole = {i: timeless(line) for i, line in folder.kept(out, "a").items()}
    path = out / "questions" / "a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    failed = json.loads(lines[1]) | {"error": "GenerationFailed: it did"}
    path.write_text(lines[0] + json.dumps(failed) + "\n" + lines[2] + lines[3][:40])
    capsys.readouterr()
    assert main(command(data, out, "--no-llm")) == 0
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["a:1:", "a:3:"]
    assert {i: timeless(line) for i, line in folder.kept(out, "a").items()} == whole


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")  # Ray's own
@pytest.mark.parametrize("where", [["--workers", "2"], ["--executor", "ray", "--threads", "1"]])
def test_other_processes_find_what_one_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: list[str]
) -> None:
    if "ray" in where:
        pytest.importorskip("ray", reason="Ray is not installed: pip install --group ray")
    data = lines_file(tmp_path / "data.jsonl", conversations=3)
    for name, extra in (("one", []), ("two", where)):
        assert main(command(data, tmp_path / name, "--no-llm", *extra)) == 0
    capsys.readouterr()
    one, two = ([timeless(line) for line in folder.lines(tmp_path / name)] for name in ("one", "two"))
    assert one == two
    assert len(one) == 12


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_a_conversation_that_no_process_survives_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    data, out = lines_file(tmp_path / "data.jsonl", conversations=2), tmp_path / "out"
    asked = Setup("lines", str(data), "bm25", profile="tiny", records="rules", answers=False)
    places = Places(out, tmp_path / "stores")

    class KillsA:
        """Does the work here, but for the conversation a, under which every process ends."""

        def each(self, work: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            for task in tasks:
                yield task, Lost("its process ended 3 times") if task[2].id == "a" else work(task)

    with pytest.raises(LycheeError, match="a: its process ended 3 times"):
        runs.run(asked, places, executor=KillsA(), say=lambda _: None, on_problem=lambda _: None)
    assert {line["conversation"] for line in folder.lines(out)} == {"b"}
    runs.run(asked, places, say=lambda _: None, on_problem=lambda _: None)
    assert len(folder.lines(out)) == 8


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path", "smollm2_path")
@pytest.mark.parametrize("method", ["lychee", "gold", "none"])
def test_answers_are_scored_and_repeat(tmp_path: Path, method: str) -> None:
    data = lines_file(tmp_path / "data.jsonl", questions=2, conversations=1)
    found = []
    for name in ("one", "two"):
        assert main(command(data, tmp_path / name, "--records", "rules", "--method", method)) == 0
        found.append([timeless(line) for line in folder.lines(tmp_path / name)])
    one, two = found
    assert one == two
    for line in one:
        assert line["reply"] is not None
        assert 0.0 <= line["scores"]["f1"] <= 1.0
        assert [u["purpose"] for u in line["usage"]][-1] == "answer"
    summary = tables.summarise(one)
    assert summary["query_tokens"] == round(sum(u["prompt"] + u["output"] for x in one for u in x["usage"]) / 2)
    assert "single" in summary["f1"]


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path", "smollm2_path")
def test_a_killed_run_goes_on_and_is_the_same(tmp_path: Path) -> None:
    data = lines_file(tmp_path / "data.jsonl", conversations=2)
    run = [sys.executable, "-m", "benchmarks", *command(data, tmp_path / "killed", "--records", "rules")]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(run, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        told = [process.stderr.readline(), process.stderr.readline()]
        process.send_signal(signal.SIGKILL)
    assert all(line.count("/8 a:") for line in told)
    done = len(folder.lines(tmp_path / "killed"))
    assert 2 <= done < 8
    subprocess.run(run, cwd=root, check=True, capture_output=True, timeout=300)
    assert main(command(data, tmp_path / "whole", "--records", "rules")) == 0
    killed, whole = ([timeless(line) for line in folder.lines(tmp_path / name)] for name in ("killed", "whole"))
    assert killed == whole


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_what_cannot_be_run_claims_no_folder_and_a_run_under_way_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = lines_file(tmp_path / "data.jsonl"), tmp_path / "out"
    for wrong in (["--conversations", "nobody"], ["--limit", "0"], ["--workers", "0"], ["--items", "-1"]):
        assert main(command(data, out, "--no-llm", *wrong)) == 2
    assert not (out / "run.json").exists()
    assert main(command(data, out, "--no-llm", "--method", "bm25", "--items", "1")) == 0
    assert {len(line["evidence"]) for line in folder.lines(out)} == {1}
    capsys.readouterr()
    assert main(command(data, out, "--no-llm", "--method", "bm25", "--items", "2")) == 2
    assert "items (1, not 2)" in capsys.readouterr().err
    with (out / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(command(data, out, "--no-llm", "--method", "bm25", "--items", "1")) == 2
    assert "another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 2.0), (0.9, 4.0), (0.99, 4.0), (0.25, 1.0), (0.26, 2.0), (0.0, 1.0)]
)
def test_percentiles_are_the_nearest_rank(share: float, expected: float) -> None:
    assert tables.at([1.0, 2.0, 3.0, 4.0], share) == expected
    assert tables.at([], share) == 0.0

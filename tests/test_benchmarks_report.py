"""Reports of runs whose folders are written here, so that every number in them can be worked out by hand."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folder, page, plots, published, report, results
from benchmarks.__main__ import main
from benchmarks.environment import sha256
from benchmarks.markdown import Table, cell, markdown

Line = dict[str, Any]

# --- folders ----------------------------------------------------------------------------------------------------------


def about(method: str = "lychee", **other: Any) -> Line:
    setup: Line = {"layout": "locomo", "data": "/data.json", "method": method, "profile": "tiny", "records": "rules"}
    setup |= {"answers": True, "budget": 1800, "items": None, "conversations": [], "categories": [], "sample": None}
    setup |= {"seed": 0, "limit": None, "adversarial": False, "corrections": None}
    models = {"llm": f"smollm2-135m {'1' * 64}", "embedder": f"all-minilm-l6-v2 {'2' * 64}"}
    environment = {"python": "3.11", "cores": 2, "libraries": {"numpy": "2.0"}}
    settings = {"segment": {"cut_threshold": 0.5}}
    found = {"setup": setup, "settings": settings, "data": "d" * 64, "models": models, "environment": environment}
    return found | other


def asked(
    name: str, category: str = "single", *, f1: float | None = 1.0, turns: float | None = 1.0, **other: Any
) -> Line:
    """A line as `run` writes it. `f1` is None where no answer was asked for, `turns` where no gold is known."""
    scores: dict[str, float] = {}
    if turns is not None:
        scores = {"turns": turns, "turns all": float(turns == 1.0), "sessions": 1.0, "sessions all": 1.0}
        scores |= {f"{unit}{kind}@{k}": turns for unit in ("turns", "sessions") for kind in ("", " any", " all")
                   for k in (5, 10, 20)}  # fmt: skip
    if f1 is not None:
        scores |= {"f1": f1, "exact": float(f1 == 1.0)}
    usage = [{"purpose": "answer", "prompt": 900, "cached": 0, "output": 100, "seconds": 1.0, "outcome": "ok"}]
    evidence = [
        {"id": "s:0", "kind": "turn", "session": "s", "refs": ["r1"], "said": None, "score": 0.5, "text": "Ana: a boat"}
    ]
    line: Line = {
        "id": name,
        "conversation": "a",
        "category": category,
        "question": f"What is {name}?",
        "answer": "a boat",
    }
    line |= {"answerable": True, "gold": ["r1"], "gold_sessions": ["s"], "error": "", "plan": None, "cited": ["s:0"]}
    line |= {"evidence": evidence, "reply": None if f1 is None else "a boat", "scores": scores}
    line |= {"usage": [] if f1 is None else usage, "evidence_tokens": 30, "seconds": 2.0, "notes": []}
    return line | other


def failed(name: str) -> Line:
    line = asked(name)
    kept = ("id", "conversation", "category", "question", "answer", "answerable", "gold", "gold_sessions")
    return {key: line[key] for key in kept} | {"error": "PromptTooLong: it has 9,000 tokens"}


BUILT = {"conversation": "a", "turns": 10, "segments": 3, "reasons": {}, "records": 4, "construction_tokens": 3000}
BUILT |= {"encoding_seconds": 12.0, "seconds_now": 13.0, "peak_mb": 700}


def write(out: Path, lines: Sequence[Line], *, told: Line | None = None, built: Sequence[Line] = (BUILT,)) -> Path:
    (out / "questions").mkdir(parents=True)
    (out / "run.json").write_text(json.dumps(told or about()))
    (out / "summary.json").write_text("{}")
    (out / "construction.jsonl").write_text("".join(json.dumps(each) + "\n" for each in built))
    for line in lines:
        folder.append(out / "questions" / "a.jsonl", line)
    return out


def verdicts(out: Path, given: dict[str, bool | None], judge: str = "rule") -> None:
    for name, correct in given.items():
        verdict = {"id": name, "reply": "a boat", "by": "v1", "correct": correct, "said": "", "usage": None}
        folder.append(out / f"verdicts.{judge}.jsonl", verdict)


def row(table: Table, name: str) -> dict[str, str]:
    return next(dict(zip(table.head, each, strict=True)) for each in table.rows if each[0] == name)


def tables(*folders: Path) -> dict[str, Table]:
    runs = results.read(folders)
    return {each.title: each for each in report.tables(runs, report.measured(runs), report.paired(runs))}


# --- tables -----------------------------------------------------------------------------------------------------------


def test_means_by_category_with_intervals(tmp_path: Path) -> None:
    lines = [asked("q1"), asked("q2", f1=0.0), asked("q3", "multi", f1=0.5), asked("q4", "multi", f1=0.5), failed("q5")]
    found = tables(write(tmp_path / "one", lines))
    f1 = row(found[report.MEASURES["f1"]], "one")
    assert f1["n"] == "4"  # the error is in no mean
    assert f1["all"].startswith("50.0 [")
    assert f1["single"] == "50.0 [0.0, 100.0]"
    assert f1["multi"] == "50.0 [50.0, 50.0]"
    assert row(found[report.MEASURES["exact"]], "one")["all"].startswith("25.0 ")
    assert row(found["Runs"], "one")["questions"] == "5"
    assert row(found["Questions without an error"], "one") == {"run": "one", "all": "4", "single": "2", "multi": "2"}


def test_a_category_that_is_called_all_counts_once(tmp_path: Path) -> None:
    found = tables(write(tmp_path / "one", [asked("q1", "all"), asked("q2", "b", f1=0.0), asked("q3", "b", f1=0.0)]))
    f1 = row(found[report.MEASURES["f1"]], "one")
    assert list(f1) == ["run", "n", "all", "b"]
    assert (f1["n"], f1["all"].partition(" ")[0]) == ("3", "33.3")


def test_costs_by_the_papers_accounting(tmp_path: Path) -> None:
    planned = asked("q1")
    planned["usage"] = [*planned["usage"], planned["usage"][0] | {"purpose": "plan"}]
    judged = asked("q2", seconds=4.0)
    judged["usage"] = [*judged["usage"], judged["usage"][0] | {"purpose": "judge"}]  # no cost of the method
    built = [BUILT | {"construction_tokens": 1}, BUILT, BUILT | {"conversation": "b", "construction_tokens": 1000}]
    cost = row(tables(write(tmp_path / "one", [planned, judged, failed("q3")], built=built))["Cost"], "one")
    assert cost["construction, K tokens"] == "2.0"  # (3,000 + 1,000) / 2; of several lines for "a" the last
    assert cost["query, K tokens"] == "1.50"  # (2,000 + 1,000) / 2
    assert (cost["median, s"], cost["p99, s"]) == ("2.00", "4.00")
    assert (cost["peak, MB"], cost["errors"], cost["evidence, tokens"]) == ("700", "1", "30")


def test_seconds_by_stage(tmp_path: Path) -> None:
    lines = [asked(f"q{n}", seconds=3.0 + n) for n in range(3)]
    lines[2]["usage"].append(lines[2]["usage"][0] | {"purpose": "plan", "seconds": 2.5})
    found = row(tables(write(tmp_path / "one", lines))["Seconds of a question by stage"], "one")
    assert found == {"run": "one", "rest": "2.00 / 3.00", "answer": "1.00 / 1.00", "plan": "0.00 / 2.50"}


def test_how_questions_came_out(tmp_path: Path) -> None:
    lines = [asked("q1"), asked("q2", f1=0.6, turns=0.5), asked("q3", f1=0.1), asked("q4", f1=0.1, turns=0.5)]
    lines += [asked("q5", f1=0.0, turns=None), asked("q6", turns=None), failed("q7")]
    run = results.read([write(tmp_path / "one", lines)])[0]
    told = ["right", "right without", "reasoning", "retrieval", "unknown", "right", "failed"]
    assert list(results.outcomes(run, "f1").values()) == told
    counted = row(tables(tmp_path / "one")["How questions came out"], "one")
    assert [counted[name] for name in results.OUTCOMES] == ["2", "1", "1", "1", "0", "1", "1"]


def test_without_answers_only_the_evidence_tells(tmp_path: Path) -> None:
    write(tmp_path / "one", [asked("q1", f1=None), asked("q2", f1=None, turns=0.0), asked("q3", f1=None, turns=None)])
    run = results.read([tmp_path / "one"])[0]
    assert results.accuracy([run]) is None
    assert list(results.outcomes(run, None).values()) == ["found", "retrieval", "unknown"]
    found = tables(tmp_path / "one")
    assert report.MEASURES["f1"] not in found
    assert row(found[report.MEASURES["turns"]], "one")["n"] == "2"


def test_a_judge_decides_and_its_agreement_stands_beside(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked("q1", f1=0.1), asked("q2"), asked("q3"), failed("q4")])
    verdicts(one, {"q1": True, "q2": False, "q3": None, "q4": True})
    agreement = {"judge": "rule", "version": "v1", "labels": 52, "no_verdict": 2, "agreed": 45, "kappa": 0.8}
    (one / "judge.json").write_text(json.dumps({"rule": agreement}))
    run = results.read([one])[0]
    assert results.accuracy([run]) == "judged rule"
    assert list(results.outcomes(run, "judged rule").values()) == ["right", "reasoning", "unknown", "failed"]
    judged = tables(one)["Answers: right according to the judge rule, %"]
    assert row(judged, "one")["all"] == "50.0 [0.0, 100.0]"
    assert "agrees with 45 of 50 hand labels, kappa 0.80" in judged.note
    assert "left out: 1 of one" in judged.note
    assert "another version" not in judged.note
    (one / "judge.json").write_text(json.dumps({"rule": agreement | {"version": "v2"}}))
    assert "another version" in tables(one)["Answers: right according to the judge rule, %"].note
    folder.append(one / "questions" / "a.jsonl", asked("q2", reply="a horse"))  # asked again: its verdict is no more
    assert results.read([one])[0].values("judged rule") == {"q1": 1.0}


def test_a_judge_that_saw_one_run_only_does_not_decide_for_both(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, [asked("q1")]) for name in ("one", "two"))
    verdicts(one, {"q1": False})
    runs = results.read([one, two])
    assert results.accuracy(runs) == "f1"
    assert "is not known" in tables(one, two)["Answers: right according to the judge rule, %"].note


def test_runs_are_compared_question_by_question_with_the_first(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked(f"q{n}", f1=0.0) for n in range(4)])
    two = write(tmp_path / "two", [asked(f"q{n}", f1=float(n > 0)) for n in range(5)], told=about("chain"))
    pairs = [pair for pair in report.paired(results.read([one, two])) if pair.measure == "f1"]
    assert [pair.run for pair in pairs] == ["two"]
    found = pairs[0].found
    assert (found.difference.mean, found.difference.n, found.left_out) == (75.0, 4, 1)
    assert found.p == 0.25  # of the eight ways to swap three differences of 100, two are as far from nought
    compared = tables(one, two)["Compared with one"]
    assert compared.rows[0][:3] == ("two", "f1", "all")


def test_the_papers_figures_stand_above_ours(tmp_path: Path) -> None:
    lines = [asked("q1"), asked("q2", "adversarial", f1=0.0, answerable=False)]
    found = tables(write(tmp_path / "mine", lines, told=about("chain")))
    table = next(each for title, each in found.items() if "Chain-of-Memory" in title and "Qwen3-32B" in title)
    names = [each[0] for each in table.rows]
    assert names[names.index("CoM (published)") + 1] == "ours: mine"
    assert row(table, "CoM (published)")["all"] == "70.97"
    assert (
        row(table, "ours: mine")["all"] == "100.0 [100.0, 100.0]"
    )  # without the adversarial question, as in the paper
    assert "another model's" in table.note
    assert "F1" in table.note


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("locomo", {"single": 841, "multi": 282, "temporal": 321, "open": 96}),
        (
            "longmemeval",
            {"single-session-user": 70, "single-session-assistant": 56, "single-session-preference": 30}
            | {"multi-session": 133, "knowledge-update": 78, "temporal-reasoning": 133},
        ),
    ],
)
def test_published_overall_figures_are_the_mean_over_the_questions(layout: str, counts: dict[str, int]) -> None:
    """A digit mistaken in one of the tables would show here."""
    checked = 0
    for table in published.tables(layout):
        for figure in table.figures:
            if counts.keys() <= figure.accuracy.keys():
                mean = sum(figure.accuracy[name] * number for name, number in counts.items()) / sum(counts.values())
                assert abs(mean - figure.accuracy["all"]) < 0.12, figure
                checked += 1
    assert checked >= 20


def test_cells_keep_what_is_in_them() -> None:
    text = markdown(Table("t", ("run", "x"), (("a|b\n\x1b[31m", "<img>\u202e"),)))
    assert "a\\|b" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<img" not in text
    assert len({line.count(" | ") for line in text.splitlines()[2:]}) == 1
    assert cell("x" * 500).endswith("...")


# --- what the runs do not share ---------------------------------------------------------------------------------------


def test_differences_are_named_above_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [asked("q1"), asked("q2")])
    environment = {"python": "3.11", "cores": 8, "libraries": {"numpy": "2.1"}}
    two = write(tmp_path / "two", [asked("q1")], told=about(data="e" * 64, environment=environment))
    (two / "summary.json").unlink()
    assert main(["report", str(one), str(two)]) == 0
    told, _, rest = capsys.readouterr().out.partition("## Runs")
    assert "- data: dddddddddddd (one); eeeeeeeeeeee (two)" in told
    assert "- environment, cores: 2 (one); 8 (two)" in told
    assert "- environment, libraries, numpy: 2.0 (one); 2.1 (two)" in told
    assert "- questions: 1 are in every run, of 2 in one, 1 in two" in told
    assert "two is not finished" in told
    last = json.loads(rest.splitlines()[-1])
    assert last["compared"] == []  # ids of another data set mean other questions
    assert last["runs"]["one"]["f1"]["all"] == [100.0, 100.0, 100.0, 2]


def test_runs_that_share_everything_have_nothing_above(tmp_path: Path) -> None:
    runs = results.read([write(tmp_path / name, [asked("q1")], told=about(name)) for name in ("chain", "dense")])
    assert results.differences(runs) == ()


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = results.read([write(tmp_path / name / "run", [asked("q1")]) for name in ("one", "two")])
    assert [run.name for run in runs] == ["one/run", "two/run"]
    with pytest.raises(ValueError, match="given twice"):
        results.read([tmp_path / "one" / "run", tmp_path / "one" / ".." / "one" / "run"])


def test_compare_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [asked("q1", f1=0.0), asked("q2", "multi")])
    two = write(tmp_path / "two", [asked("q1"), asked("q2", "multi")])
    assert main(["compare", str(one), str(two)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    f1 = {each["category"]: each["difference"] for each in last["compared"] if each["measure"] == "f1"}
    assert f1 == {"all": 50.0, "single": 100.0, "multi": 0.0}


def test_compare_refuses_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "one", [asked("q1")]), write(tmp_path / "two", [asked("q1")], told=about(data="e" * 64))
    assert main(["compare", str(one), str(two)]) == 2
    assert "share no question" in capsys.readouterr().err


# --- folders that are not whole ---------------------------------------------------------------------------------------


def test_a_last_line_that_was_cut_is_left_out_and_left_alone(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked("q1")])
    path = one / "questions" / "a.jsonl"
    with path.open("a") as file:
        file.write('{"id": "q2", "conv')
    before = path.read_bytes()
    assert [line["id"] for line in results.read([one])[0].lines] == ["q1"]
    assert path.read_bytes() == before  # the run that writes it may be going on


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [asked("q1")])
    path = one / "questions" / "a.jsonl"
    path.write_text("{broken\n" + path.read_text())
    assert main(["report", str(one)]) == 2
    assert "a.jsonl, line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("run.json", "{", "run.json: Expecting"),
        ("run.json", '{"setup": {}}', "has no settings, data, models, environment"),
        ("construction.jsonl", '{"conversation": "a"}\n', "construction_tokens"),
        ("questions/a.jsonl", "[1]\n", "line 1: not an object with id, conversation"),
        ("verdicts.rule.jsonl", '{"id": "q1"}\n', "verdicts.rule.jsonl, line 1"),
        ("verdicts.rule.jsonl", "\xff\n", "verdicts.rule.jsonl, line 1"),
    ],
)
def test_a_file_that_no_run_writes_is_named(
    tmp_path: Path, name: str, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "one", [asked("q1")])
    (one / name).write_text(text, encoding="latin-1")
    assert main(["report", str(one)]) == 2
    assert told in capsys.readouterr().err


def test_line_separators_in_a_text_end_no_line(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked("q1", reply="a\u2028b\u0085c")])
    assert results.read([one])[0].lines[0]["reply"] == "a\u2028b\u0085c"
    assert folder.kept(one, "a")["q1"]["reply"] == "a\u2028b\u0085c"


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    one = write(tmp_path / "one", [asked("q1")])
    assert main(["report", str(one), str(tmp_path)]) == 0  # memories lie beside runs
    printed = capsys.readouterr()
    assert f"{tmp_path} holds no run and is left out" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["left_out"] == [str(tmp_path)]


def test_a_run_without_questions_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [], built=())
    assert main(["report", str(one), "--out", str(tmp_path / "out"), "--no-plots"]) == 0
    assert row(tables(one)["Cost"], "one")["construction, K tokens"] == "-"
    assert "one" in capsys.readouterr().out


def test_a_run_of_errors_alone(tmp_path: Path) -> None:
    found = tables(write(tmp_path / "one", [failed("q1"), failed("q2")]))
    assert found["Errors"].rows == (("one", "PromptTooLong", "2"),)
    assert row(found["Cost"], "one")["errors"] == "2"
    assert report.MEASURES["turns"] not in found


# --- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_drawn_for_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the group `bench` is not installed")
    sweep = []
    for n, threshold in enumerate((0.3, 0.5, 0.7)):
        told = about(f"cut-{threshold}", settings={"segment": {"cut_threshold": threshold}})
        lines = [asked("q1"), asked("q2", "$\\frac{日本\u202e", f1=0.5 * (n > 0)), failed("q3")]
        sweep.append(write(tmp_path / f"cut-{threshold} $x^", lines, told=told))
    runs = results.read(sweep)
    drawn = plots.draw(runs, report.measured(runs), tmp_path)
    assert [path.name for path in drawn] == [
        "accuracy-tokens.png",
        "threshold.png",
        "recall-tokens.png",
        "categories.png",
        "outcomes.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    bare = write(tmp_path / "bare", [asked("q1", f1=None, turns=None)])
    runs = results.read([bare])
    assert [path.name for path in plots.draw(runs, report.measured(runs), tmp_path)] == ["outcomes.png"]


def test_marks_are_set_apart_as_little_as_may_be() -> None:
    assert plots.set_apart([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert plots.set_apart([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert plots.set_apart([0.1, 0.5, 0.5, 0.5], 0.1) == pytest.approx([0.1, 0.4, 0.5, 0.6])
    assert plots.set_apart([0.0, 0.0, 1.0], 0.1) == pytest.approx([0.1, 0.2, 0.9])  # and stay on the plot


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # how an import fails on purpose
    one = write(tmp_path / "one", [asked("q1")])
    assert main(["report", str(one), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'matplotlib>=3.8'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["report", str(one), "--out", str(tmp_path / "out"), "--no-plots"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.md", "index.html"}


# --- the page ---------------------------------------------------------------------------------------------------------

BREAK = "</script><img src=x onerror=\"document.title='PWNED'\"><script>document.title='PWNED'</script><!--<script>"
_TEXTS = (BREAK, "\u202eשלום עולם\u2066", "👩‍👩‍👧 \u2028\u0000 ]]>", "x" * 100_000 + BREAK, "'\"`${alert(1)}\\")
HOSTILE = (*_TEXTS, f"all {' '.join(_TEXTS[:3])} {_TEXTS[4]} {_TEXTS[3]}")


class Page(HTMLParser):
    """Which elements a page has, with their attributes, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._in: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        self._in = (given.get("id") or "code") if tag == "script" else None
        if self._in is not None:
            self.scripts[self._in] = ""

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is not None:
            self.scripts[self._in] += data


def hostile(out: Path) -> Path:
    lines = []
    for n, text in enumerate(HOSTILE):
        evidence = [{"id": text, "kind": "turn", "session": text, "refs": [text, "r1"], "said": text, "score": 1.0}]
        plan = {"source": "rules", "type": text, "doubts": [text], "routes": [{"goal": text, "queries": [text]}]}
        made = asked(
            f"q{n} {text[:300]}", text[:300], question=text, answer=text, reply=text, notes=[text, BREAK], plan=plan
        )
        lines.append(made | {"evidence": [evidence[0] | {"text": text}], "gold": ["r1", f"missing {text}"]})
    lines.append(failed(f"e {BREAK}") | {"error": BREAK, "category": BREAK})
    write(out, lines)
    verdict = {"id": lines[0]["id"], "reply": BREAK, "by": BREAK, "correct": True, "said": BREAK, "usage": None}
    folder.append(out / "verdicts.rule.jsonl", verdict)
    return out


def written(*folders: Path, out: Path) -> str:
    runs = results.read(folders)
    found = report.tables(runs, report.measured(runs), report.paired(runs))
    return page.write(runs, found, results.differences(runs), [], out).read_text(encoding="ascii")


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    text = written(hostile(tmp_path / "one"), out=tmp_path / "page.html")
    found = Page(text)
    plain = Page(written(write(tmp_path / "two", [asked("q1")]), out=tmp_path / "plain.html"))
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in plain.elements]
    assert list(found.scripts) == ["index", "block-0", "code"]
    assert "PWNED" not in text.replace(found.scripts["index"], "")
    index = json.loads(found.scripts["index"])
    assert [each["text"] for each in index["questions"][:2]] == list(HOSTILE[:2])
    block = json.loads(gzip.decompress(base64.b64decode(found.scripts["block-0"])))
    assert [line["reply"] for line in block[:-1]] == list(HOSTILE)
    assert block[0]["verdicts"]["rule"]["said"] == BREAK


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    found = Page(written(write(tmp_path / "one", [asked("q1")]), out=tmp_path / "page.html"))
    for tag, attributes in found.elements:
        assert tag not in ("link", "iframe", "img", "object", "base"), tag
        assert not {"src", "href"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in found.elements if tag == "meta" and "content" in a and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    code = base64.b64encode(hashlib.sha256(found.scripts["code"].encode()).digest()).decode()
    assert f"script-src 'sha256-{code}'" in policy


def test_a_page_is_the_same_for_the_same_runs(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked(f"q{n}") for n in range(120)])
    first, second = (written(one, out=tmp_path / name) for name in ("a.html", "b.html"))
    assert first == second
    assert list(Page(first).scripts) == ["index", "block-0", "block-1", "block-2", "code"]


def test_questions_of_several_runs_are_listed_once(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked(f"q{n}") for n in range(60)])
    two = write(tmp_path / "two", [asked("q59", f1=0.0), asked("q60")])
    other = write(tmp_path / "other", [asked("q1")], told=about(data="e" * 64))
    found = Page(written(one, two, other, out=tmp_path / "page.html"))
    questions = json.loads(found.scripts["index"])["questions"]
    assert len(questions) == 62  # 61 of the shared data, and q1 of the other
    shared = next(each for each in questions if each["id"] == "q59")
    assert shared["outcomes"] == ["right", "reasoning", None]
    for at, run in zip(shared["at"][:2], ("one", "two"), strict=True):
        block = json.loads(gzip.decompress(base64.b64decode(found.scripts[f"block-{at[0]}"])))
        assert block[at[1]]["id"] == "q59", run


def test_gold_turns_that_were_missed_are_told_while_the_data_is_there(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    turns = [{"conversation": "a", "speaker": "Ana", "text": f"I sold the {what}.", "ref": ref}
             for ref, what in (("r1", "boat"), ("r2", "cart"))]  # fmt: skip
    data.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    told = about()
    told |= {"setup": told["setup"] | {"layout": "lines", "data": str(data)}, "data": sha256(data)}
    one = write(tmp_path / "one", [asked("q1", gold=["r1", "r2", "r9"]), failed("q2")], told=told)

    def missed() -> list[Line]:
        block = Page(written(one, out=tmp_path / "page.html")).scripts["block-0"]
        return [line["missed"] for line in json.loads(gzip.decompress(base64.b64decode(block)))]

    assert missed() == [{"r2": "Ana: I sold the cart.", "r9": None}, {"r1": "Ana: I sold the boat."}]
    data.write_text(data.read_text() + "\n")
    sha256.cache_clear()  # one process does not expect a file to change
    assert missed() == [{"r2": None, "r9": None}, {"r1": None}]
    data.unlink()
    assert missed() == [{"r2": None, "r9": None}, {"r1": None}]


# --- in a browser -----------------------------------------------------------------------------------------------------


def shown(path: Path, hash: str = "") -> Page:
    """What Chromium makes of the page, by its own DOM."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    profile = [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=4000"]
    command = [browser, *quiet, *profile, "--dump-dom", f"{path.as_uri()}#{hash}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return Page(done.stdout)


def of_class(found: Page, name: str) -> int:
    return sum(name in (attributes.get("class") or "").split() for _, attributes in found.elements)


def test_a_browser_lists_filters_and_opens(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [asked(f"q{n}", "multi" if n == 7 else "single") for n in range(150)])
    two = write(tmp_path / "two", [asked("q7", f1=0.0, category="multi", gold=["r1", "r2"])])
    written(one, two, out=tmp_path / "page.html")
    assert of_class(shown(tmp_path / "page.html"), "question") == 100  # the rest on demand
    assert of_class(shown(tmp_path / "page.html", "q=%20what%20q14&length=1"), "question") == 11  # q14, q140 to q149
    opened = shown(tmp_path / "page.html", "category=multi&outcome=reasoning&run=1")
    assert (of_class(opened, "question"), of_class(opened, "run"), of_class(opened, "gold")) == (1, 2, 2)
    assert of_class(opened, "missed") == 1


def test_a_browser_runs_nothing_of_the_data(tmp_path: Path) -> None:
    written(hostile(tmp_path / "one"), out=tmp_path / "page.html")
    found = shown(tmp_path / "page.html", f"q=q{len(HOSTILE) - 1}%20all")
    assert (of_class(found, "question"), of_class(found, "item"), of_class(found, "missed")) == (1, 2, 1)
    assert not [attributes for tag, attributes in found.elements if tag == "img" or "onerror" in attributes]
    assert list(found.scripts) == ["index", "block-0", "code"]
    assert ("title", {}) in found.elements

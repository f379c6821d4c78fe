"""`python -m benchmarks judge`: the answers of a run, judged; or a judge itself, held against labels by hand.

    verdicts.JUDGE.jsonl    beside a run's other files: a line for each answer, with the verdict or why there is none
    judge.json              how far each judge that has judged this run agrees with labels by hand

Owns the files and the order of work. An answer that has a verdict is not judged again, unless it was given since, or
by another judge or prompt of the same name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from benchmarks import agreement, folder, judges
from benchmarks.folder import Line
from benchmarks.judge import Judge, case_of
from benchmarks.questions import Question

Say = Callable[[str], None]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], say: Say) -> None:
    command = commands.add_parser("judge", help="judge the answers of runs, or hold a judge against labels by hand")
    command.add_argument("runs", nargs="*", type=Path, help="folders of runs; none: only the judge is measured")
    command.add_argument("--same-judge", action="store_true", help="let a model judge its own answers")
    agreement.add_arguments(command)
    command.set_defaults(call=lambda options: judge_main(options, say))


def judge_main(options: argparse.Namespace, say: Say) -> Line:
    """Measure the judge, then judge every answer of the runs that has no verdict yet.

    Raises:
        ValueError: a folder holds no run, or a run without answers.
        BadInput: the judge is the model that answered.
    """
    if not options.runs:
        return agreement.judge_main(options)
    with closing(judges.open_judge(options.judge, models_home=options.home, timeout=options.timeout)) as judge:
        for run in options.runs:
            answered_by = folder.about(run)["models"].get("llm", "").split(" ")
            judges.require_other_model(judge, *answered_by[:2], same=options.same_judge)
        kept = options.kept or options.runs[0].parent / f"{_file_name(judge.name)}.labels.jsonl"
        measured = agreement.agreement(judge, agreement.labelled(options.labels), kept=kept)
        shares = {run.name: judge_run(run, judge, say) for run in options.runs}
    row = measured.row()
    for run in options.runs:
        path = run / "judge.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        folder.write(path, known | {_file_name(judge.name): row})
        print(f"{run.name}: {shares[run.name]}")
    print(measured.line())
    return {"judge": judge.name, "version": judge.version, "runs": shares, "agreement": row}


def judge_run(run: Path, judge: Judge, say: Say) -> str:
    """The share that the judge calls right, in words; every verdict is on disk before the next is asked for.

    Raises:
        ValueError: there is no run in the folder, or it has no answers.
    """
    layout = folder.about(run)["setup"]["layout"]
    answered = [line for line in folder.lines(run) if not line["error"] and line["reply"] is not None]
    if not answered:
        raise ValueError(f"{run} has no answers to judge; run it without --no-llm and --no-answers")
    path = run / f"verdicts.{_file_name(judge.name)}.jsonl"
    done = {line["id"]: line for line in folder.kept_lines(path)}
    right = judged = 0
    for number, line in enumerate(answered, 1):
        verdict = done.get(line["id"])
        if verdict is None or verdict["reply"] != line["reply"] or verdict["by"] != judge.version or verdict["error"]:
            verdict = _verdict(layout, line, judge)
            folder.append(path, verdict)
            say(f"{run.name} {number}/{len(answered)} {line['id']}: {verdict['error'] or verdict['correct']}")
        judged += verdict["correct"] is not None
        right += verdict["correct"] is True
    told = f"{100 * right / judged:.1f} % of {judged} answers are right" if judged else "no verdicts"
    return told + (f", {len(answered) - judged} have no verdict" if judged < len(answered) else "")


def _verdict(layout: str, line: Line, judge: Judge) -> Line:
    question = Question(
        line["id"],
        line["question"],
        line["answer"],
        line["category"],
        tuple(line["gold"]),
        answerable=line["answerable"],
    )
    found = judge.judge(case_of(layout, question, line["reply"]))
    usage = None if found.usage is None else {"prompt": found.usage.prompt_tokens, "output": found.usage.output_tokens}
    about = {"id": line["id"], "reply": line["reply"], "by": judge.version}
    return about | {"correct": found.correct, "said": found.said, "error": found.error, "usage": usage}


def _file_name(judge: str) -> str:
    """The judge's name with what no file name holds written as "-"."""
    return re.sub(r"[^\w.]+", "-", judge)

"""What the folders of runs say, read side by side: scores by category with their intervals, costs, and how each
question came out.

Owns the measures that reports, plots and pages share, and what makes two runs differ. Writes nothing: a run may be
going on while it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks import folder, scores
from benchmarks.folder import Line
from benchmarks.scores import Interval
from benchmarks.tables import summarise

# How a question came out. The paper on Chain-of-Memory (arXiv 2601.14287, section 4.6) counts its errors as those of
# retrieval and of reasoning; without a judge of the reasons, the annotated evidence tells the two apart.
Outcome = Literal["right", "right without", "reasoning", "retrieval", "found", "unknown", "failed"]
OUTCOMES: dict[Outcome, str] = {
    "right": "answered rightly, with all gold evidence shown (or none annotated)",
    "right without": "answered rightly although gold evidence is missing",
    "reasoning": "all gold evidence shown, answered wrongly",
    "retrieval": "gold evidence is missing, and the answer is wrong or was not asked for",
    "found": "all gold evidence shown, no answer asked for",
    "unknown": "no gold evidence annotated, or no verdict, to tell by",
    "failed": "an error, which is in no mean",
}
assert tuple(OUTCOMES) == get_args(Outcome)

# Where no judge has seen an answer, it counts as right from this F1 on: half of its words and the gold answer's agree.
RIGHT_F1 = 0.5

ALL = "all"
VERDICT = ("id", "reply", "by", "correct")  # of judging.py


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder, its lines in the order of the files, one for a question. `verdicts` are each judge's lines by
    question, `correct` None where it gave none; `agreement` is what is known of each judge against labels by hand."""

    name: str
    about: Line
    lines: tuple[Line, ...]
    built: Mapping[str, Line]
    verdicts: Mapping[str, Mapping[str, Line]]
    agreement: Mapping[str, str]
    finished: bool

    @property
    def good(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if not line["error"])

    @property
    def method(self) -> str:
        return str(self.about["setup"]["method"])

    def values(self, measure: str) -> dict[str, float]:
        """A score of each question that has it; `judged NAME` is 1.0 where that judge said right."""
        if measure.startswith("judged "):
            said = self.verdicts.get(measure.removeprefix("judged "), {})
            good = {line["id"] for line in self.good}
            given = {name: line["correct"] for name, line in said.items() if name in good}
            return {name: float(right) for name, right in given.items() if right is not None}
        return {line["id"]: float(line["scores"][measure]) for line in self.good if measure in line["scores"]}

    def means(self, measure: str, without: str | None = None) -> dict[str, Interval]:
        """By category, and of all; only where a question has the score at all, and is not of the category `without`.
        In percent."""
        values = self.values(measure)
        groups: dict[str, list[float]] = {ALL: []}
        for line in self.good:
            if line["id"] in values and line["category"] != without:
                for name in {ALL, line["category"]}:  # data of one's own may have a category that is called so
                    groups.setdefault(name, []).append(100 * values[line["id"]])
        return {name: scores.interval(group) for name, group in groups.items() if group}


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens in thousands: construction by conversation, query by question, as both papers count (planner and answer
    alone; no embedding, no judge). Seconds of one question; encoding seconds of a conversation."""

    construction: float | None
    query: float
    evidence_tokens: float
    encoding_seconds: float | None
    seconds: Mapping[str, float]
    peak_mb: int | None
    errors: int


def read(folders: Sequence[Path]) -> tuple[Run, ...]:
    """The runs, each called by its folder's name, with as much of the path as it takes to tell them apart.

    Raises:
        ValueError: a folder holds no run, or the same one is given twice.
    """
    places = [folder.resolve() for folder in folders]
    if twice := [place for n, place in enumerate(places) if place in places[:n]]:
        raise ValueError(f"{twice[0]} is given twice; name each run once")
    return tuple(_run(place, name) for place, name in zip(places, _names(places), strict=True))


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as it takes to tell them apart."""
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-parts:]) for place in places]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("two paths that differ have the same parts")


def _run(out: Path, name: str) -> Run:
    built_path = out / "construction.jsonl"
    built = (
        folder.whole_lines(built_path, "conversation", "construction_tokens", "encoding_seconds")
        if built_path.exists()
        else []
    )
    about, lines = folder.about(out), folder.lines(out)
    if missing := [key for key in ("setup", "settings", "data", "models", "environment") if key not in about]:
        raise ValueError(f"{out / 'run.json'} has no {', '.join(missing)}; run the same into another folder")
    replies = {line["id"]: line.get("reply") for line in lines}
    judges = {path.name[len("verdicts.") : -len(".jsonl")]: path for path in sorted(out.glob("verdicts.*.jsonl"))}
    verdicts = {
        # An answer that was given after its verdict has none.
        judge: {
            line["id"]: line for line in folder.whole_lines(path, *VERDICT) if line["reply"] == replies.get(line["id"])
        }
        for judge, path in judges.items()
    }
    return Run(
        name=name,
        about=about,
        lines=tuple(lines),
        built={line["conversation"]: line for line in built},
        verdicts=verdicts,
        agreement=_agreement(out / "judge.json", verdicts),
        finished=(out / "summary.json").exists(),
    )


def _agreement(path: Path, verdicts: Mapping[str, Mapping[str, Line]]) -> dict[str, str]:
    """What is known of each judge that judge.json has a row of (judging.py)."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = {}
    for judge, row in rows.items():
        judged = row["labels"] - row["no_verdict"]
        kappa = "-" if row["kappa"] is None else f"{row['kappa']:.2f}"
        told = f"agrees with {row['agreed']} of {judged} hand labels, kappa {kappa}"
        if any(line["by"] != row["version"] for line in verdicts.get(judge, {}).values()):
            told += ", but of another version are some of its verdicts here"
        found[judge] = told
    return found


def cost(run: Run) -> Cost:
    told = summarise(list(run.lines))
    built = list(run.built.values())
    peaks = [line["peak_mb"] for line in (*built, *run.lines) if line.get("peak_mb") is not None]
    return Cost(
        construction=_mean([line["construction_tokens"] / 1_000 for line in built]),
        query=told["query_tokens"] / 1_000,
        evidence_tokens=told["evidence_tokens"],
        encoding_seconds=_mean([line["encoding_seconds"] for line in built]),
        seconds=told["seconds"],
        peak_mb=max(peaks, default=None),
        errors=told["errors"],
    )


def categories(runs: Sequence[Run]) -> tuple[str, ...]:
    """Those of all runs, as they come."""
    every = dict.fromkeys(line["category"] for run in runs for line in run.lines)
    return tuple(name for name in every if name != ALL)


def layouts(runs: Sequence[Run]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.about["setup"]["layout"] for run in runs))


def judges(runs: Sequence[Run]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(judge for run in runs for judge in run.verdicts))


def accuracy(runs: Sequence[Run]) -> str | None:
    """The measure by which the answers of all these runs can be told right from wrong: a judge that has seen them all,
    else F1; None where none has answers. Runs without answers do not count."""
    answered = [run for run in runs if any(line["reply"] is not None for line in run.good)]
    if not answered:
        return None
    common = [judge for judge in judges(answered) if all(run.verdicts.get(judge) for run in answered)]
    return f"judged {common[0]}" if common else "f1"


def outcome(line: Line, right: bool | None) -> Outcome:
    """How a question came out, if its answer is `right`, wrong or (None) not judged or not asked for."""
    if line["error"]:
        return "failed"
    complete = None if "turns all" not in line["scores"] else bool(line["scores"]["turns all"])
    if line["reply"] is None:
        return "unknown" if complete is None else "found" if complete else "retrieval"
    if right is None or (complete is None and not right):
        return "unknown"
    if right:
        return "right without" if complete is False else "right"
    return "reasoning" if complete else "retrieval"


def outcomes(run: Run, measure: str | None) -> dict[str, Outcome]:
    """Of every question, by the measure that `accuracy` names."""
    values = {} if measure is None else run.values(measure)
    bar = RIGHT_F1 if measure == "f1" else 1.0
    return {
        line["id"]: outcome(line, values[line["id"]] >= bar if line["id"] in values else None) for line in run.lines
    }


def differences(runs: Sequence[Run]) -> tuple[str, ...]:
    """What these runs do not share of data, questions, models and environment, one sentence each. What they were meant
    to differ in, method and settings, is not among it."""
    found = [
        f"{run.name} is not finished: it has {len(run.lines)} questions and no summary"
        for run in runs
        if not run.finished
    ]
    sides = {run.name: _conditions(run) for run in runs}
    for key in dict.fromkeys(key for side in sides.values() for key in side):
        holders: dict[str, list[str]] = {}
        for name, side in sides.items():
            holders.setdefault(side.get(key, "-"), []).append(name)
        if len(holders) > 1:
            found.append(f"{key}: " + "; ".join(f"{value} ({', '.join(names)})" for value, names in holders.items()))
    asked = {run.name: {line["id"] for line in run.lines} for run in runs}
    if len(set(map(frozenset, asked.values()))) > 1:
        shared = set.intersection(*asked.values())
        numbers = ", ".join(f"{len(ids)} in {name}" for name, ids in asked.items())
        found.append(f"questions: {len(shared)} are in every run, of {numbers}")
    return tuple(found)


def _conditions(run: Run) -> dict[str, str]:
    setup = run.about["setup"]
    chosen = ("layout", "adversarial", "corrections", "conversations", "categories", "sample", "limit")
    told = {"data": str(run.about["data"])[:12]} | {name: _told(setup.get(name)) for name in chosen}
    told["seed"] = _told(setup.get("seed")) if setup.get("sample") is not None else "-"
    models = {f"model, {role}": _told(name) for role, name in run.about["models"].items()}
    return told | models | flat(run.about["environment"], "environment")


def flat(values: Mapping[str, object], above: str = "") -> dict[str, str]:
    """Nested values as one level, keys joined by commas."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{above}, {key}" if above else key
        found |= flat(value, name) if isinstance(value, dict) else {name: _told(value)}
    return found


def _told(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    text = "-" if value is None else str(value)
    name, _, digest = text.partition(" ")
    return f"{name} {digest[:12]}" if len(digest) == 64 else text


def _mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return sum(every) / len(every) if every else None

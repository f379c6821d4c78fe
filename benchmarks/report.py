"""Runs side by side: the tables of both papers, with intervals, costs, causes of error and paired comparisons.

    python -m benchmarks report RUN... [--out DIR] [--no-plots]
    python -m benchmarks compare RUN RUN

Tables are Markdown, and are read as they are. With --out they are written to report.md, beside the plots (plots.py) and
one page on which every question can be opened (page.py). What the runs do not share stands above the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import page, plots, published, results, scores
from benchmarks.folder import Line
from benchmarks.markdown import Table, markdown
from benchmarks.published import TOKENS, Figure
from benchmarks.results import ALL, OUTCOMES, RIGHT_F1, Cost, Run
from benchmarks.scores import Comparison, Interval
from benchmarks.tables import at

MEASURES = {
    "f1": "Answers: token F1, %",
    "exact": "Answers: exact match, %",
    "turns": "Evidence recall: gold turns that are shown, %",
    "turns all": "All evidence: questions of which every gold turn is shown, %",
    "sessions": "Session recall: gold sessions that are shown, %",
    "sessions all": "All sessions: questions of which every gold session is shown, %",
}
COMPARED = ("f1", "exact", "turns", "turns all")
# A category whose right answer is that there is none; both papers leave it out.
ADVERSARIAL = "adversarial"

Measured = Mapping[str, Mapping[str, Mapping[str, Interval]]]


@dataclass(frozen=True, slots=True)
class Paired:
    """A run less the first one, in one measure, of one category or of all."""

    run: str
    measure: str
    category: str
    found: Comparison


# --- what is measured -------------------------------------------------------------------------------------------------


def measured(runs: Sequence[Run]) -> Measured:
    """Means with intervals: by measure, run and category. A measure that no run has is left out."""
    wanted = [*MEASURES, *(f"judged {judge}" for judge in results.judges(runs))]
    every = {measure: {run.name: run.means(measure) for run in runs} for measure in wanted}
    return {measure: by_run for measure, by_run in every.items() if any(by_run.values())}


def paired(runs: Sequence[Run], *, by_category: bool = False) -> tuple[Paired, ...]:
    """Every run against the first, where they are on the same data."""
    first, *others = runs
    groups = (ALL, *results.categories(runs)) if by_category else (ALL,)
    found = []
    for run in others:
        if run.about["data"] != first.about["data"]:
            continue
        for measure in (*COMPARED, *(f"judged {judge}" for judge in results.judges(runs))):
            for category in groups:
                ours, theirs = _of(run, measure, category), _of(first, measure, category)
                if ours.keys() & theirs.keys():
                    found.append(Paired(run.name, measure, category, scores.compare(ours, theirs)))
    return tuple(found)


def _of(run: Run, measure: str, category: str) -> dict[str, float]:
    inside = {line["id"] for line in run.good if category in (ALL, line["category"])}
    return {name: 100 * value for name, value in run.values(measure).items() if name in inside}


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(runs: Sequence[Run], means: Measured, pairs: Sequence[Paired]) -> tuple[Table, ...]:
    costs = {run.name: results.cost(run) for run in runs}
    accuracy = results.accuracy(runs)
    return (
        _setups(runs),
        _counts(runs),
        *_by_category(runs, means),
        *_cuts(runs),
        _costs(costs),
        _stages(runs),
        _causes(runs, accuracy),
        *_errors(runs),
        *([] if len(runs) == 1 else [pairs_table(runs[0], pairs)]),
        *_published(runs, costs, accuracy),
    )


def _setups(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        setup, models = run.about["setup"], run.about["models"]
        asked = [setup["method"], setup["records"], setup["budget"] or "no limit", setup["items"] or "the method's"]
        llm, embedder = (models.get(role, "-").partition(" ")[0] for role in ("llm", "embedder"))
        used = [llm if setup["answers"] else "nobody", embedder, len(run.lines), run.about["data"][:12]]
        rows.append((run.name, *map(str, asked), *map(str, used)))
    head = ("run", "method", "records by", "evidence tokens", "items", "answers by", "embedder", "questions", "data")
    return Table("Runs", head, tuple(rows))


def _counts(runs: Sequence[Run]) -> Table:
    names = results.categories(runs)
    counted = {run.name: Counter(line["category"] for line in run.good) for run in runs}
    rows = tuple((run, str(each.total()), *(str(each[name]) for name in names)) for run, each in counted.items())
    return Table("Questions without an error", ("run", ALL, *names), rows)


def _by_category(runs: Sequence[Run], means: Measured) -> Iterator[Table]:
    for measure, by_run in means.items():
        named = tuple(name for name in results.categories(runs) if any(name in found for found in by_run.values()))
        rows = tuple(
            (run, str(found[ALL].n), *(_told(found.get(category)) for category in (ALL, *named)))
            for run, found in by_run.items()
            if found
        )
        note = "In brackets: 95 % of bootstrap means lie between. Few questions that came out alike prove nothing."
        if measure.startswith("judged "):
            note = f"{_judge_note(runs, measure.removeprefix('judged '))} {note}"
        title = MEASURES.get(measure) or f"Answers: right according to the judge {measure.removeprefix('judged ')}, %"
        yield Table(title, ("run", "n", ALL, *named), rows, note)


def _judge_note(runs: Sequence[Run], judge: str) -> str:
    agreed = dict.fromkeys(run.agreement[judge] for run in runs if judge in run.agreement)
    judged = {run.name: run.values(f"judged {judge}").keys() for run in runs if judge in run.verdicts}
    answered = {run.name: {line["id"] for line in run.good if line["reply"] is not None} for run in runs}
    without = {name: len(answered[name] - known) for name, known in judged.items()}
    missing = ", ".join(f"{number} of {name}" for name, number in without.items() if number)
    told = (
        f"The judge {'; '.join(agreed)}." if agreed else "How far this judge agrees with labels by hand is not known."
    )
    return f"{told} Without a verdict, and left out: {missing}." if missing else told


def _cuts(runs: Sequence[Run]) -> Iterator[Table]:
    for unit in ("turns", "sessions"):
        columns = [f"{unit}{kind}@{k}" for kind in ("", " any", " all") for k in scores.CUTS]
        rows = []
        for run in runs:
            values = [run.values(column) for column in columns]
            if values[0]:
                rows.append((run.name, *(f"{100 * sum(each.values()) / len(each):.1f}" for each in values)))
        if rows:
            head = tuple(f"{kind} @{k}" for kind in ("recall", "any", "all") for k in scores.CUTS)
            note = (
                "Among the first 5, 10 and 20 items: the share of gold, questions with any of it, questions with all."
            )
            yield Table(f"Gold {unit} among the first items, %", ("run", *head), tuple(rows), note)


def _costs(costs: Mapping[str, Cost]) -> Table:
    head = ("run", "construction, K tokens", "query, K tokens", "evidence, tokens", "encoding, s")
    times = ("median, s", "p90, s", "p99, s", "peak, MB", "errors")
    rows = tuple(
        (
            name,
            _number(cost.construction, 1),
            f"{cost.query:.2f}",
            f"{cost.evidence_tokens:.0f}",
            _number(cost.encoding_seconds, 0),
            *(f"{cost.seconds[at]:.2f}" for at in ("median", "p90", "p99")),
            _number(cost.peak_mb, 0),
            str(cost.errors),
        )
        for name, cost in costs.items()
    )
    note = (
        "Construction and encoding by conversation, all else by question. Tokens are those of prompts and outputs of"
        " every call that encodes, or that plans and answers; embedders, rerankers and judges count for nothing."
    )
    return Table("Cost", (*head, *times), rows, note)


def _stages(runs: Sequence[Run]) -> Table:
    """Seconds of a question by the purpose of its calls; the rest is what no language model does."""
    spent = {run.name: [_seconds(line) for line in run.good] for run in runs}
    stages = tuple(dict.fromkeys(stage for each in spent.values() for line in each for stage in line))
    rows = []
    for run, lines in spent.items():
        ordered = [sorted(line.get(stage, 0.0) for line in lines) for stage in stages]
        rows.append((run, *(f"{at(each, 0.5):.2f} / {at(each, 0.9):.2f}" for each in ordered)))
    note = "Median and 90th percentile. The rest is embedding, search, ranking and what lies between."
    return Table("Seconds of a question by stage", ("run", *stages), tuple(rows), note)


def _seconds(line: Line) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for call in line["usage"]:
        found[call["purpose"]] += call["seconds"]
    return {"rest": max(0.0, line["seconds"] - sum(found.values())), **found}


def _causes(runs: Sequence[Run], accuracy: str | None) -> Table:
    rows = []
    for run in runs:
        found = list(results.outcomes(run, accuracy).values())
        rows.append((run.name, *(str(found.count(outcome)) for outcome in OUTCOMES)))
    rule = {None: "No answers were asked for.", "f1": f"Right is an answer with F1 of at least {RIGHT_F1:g}."}
    told = rule.get(accuracy, f"Right is what the {accuracy} calls right.".replace("judged", "judge"))
    meant = " ".join(f"{name}: {meaning}." for name, meaning in OUTCOMES.items())
    return Table("How questions came out", ("run", *OUTCOMES), tuple(rows), f"{told} {meant}")


def _errors(runs: Sequence[Run]) -> Iterator[Table]:
    """What went wrong, by the name of the error."""
    counts = {run.name: Counter(line["error"].partition(":")[0] for line in run.lines if line["error"]) for run in runs}
    rows = tuple((run, name, str(n)) for run, counted in counts.items() for name, n in counted.most_common())
    if rows:
        note = "A question that failed is in no mean; the same `run` asks it again."
        yield Table("Errors", ("run", "error", "questions"), rows, note)


def pairs_table(first: Run, pairs: Sequence[Paired]) -> Table:
    rows = tuple(
        (
            pair.run,
            pair.measure,
            pair.category,
            _told(pair.found.difference, sign="+"),
            f"{pair.found.p:.4f}",
            str(pair.found.difference.n),
            str(pair.found.left_out),
        )
        for pair in pairs
    )
    head = ("run", "measure", "category", f"less {first.name}, points", "p", "shared", "left out")
    note = "Question by question; p by permutation. Only runs on the same data are compared."
    return Table(f"Compared with {first.name}", head, rows, note)


def _published(runs: Sequence[Run], costs: Mapping[str, Cost], accuracy: str | None) -> Iterator[Table]:
    """Each table of a paper, our runs below the systems that they are built like."""
    for layout in results.layouts(runs):
        for table in published.tables(layout):
            figures = table.figures
            names = tuple(dict.fromkeys(name for figure in figures for name in figure.accuracy))
            tokens = tuple(name for name in TOKENS if any(name in figure.tokens for figure in figures))
            rows: list[tuple[str, ...]] = []
            for figure in figures:
                rows.append(_figure(figure, names, tokens))
                for run in runs:
                    alike = run.about["setup"]["layout"] == layout and run.method == figure.ours
                    if accuracy and alike and run.values(accuracy):
                        rows.append(_beside(run, costs[run.name], accuracy, names, tokens))
            judged = "F1" if accuracy == "f1" else accuracy
            ours = f"Ours: {judged}, on our questions, by our models." if accuracy else "No run of ours has answers."
            note = f"Published with {table.model} and its judge: another model's numbers, no target for ours. {ours}"
            head = ("system", *names, *(f"{name}, K tokens" for name in tokens))
            yield Table(f"Published: {table.source}, {table.model}", head, tuple(rows), note)


def _figure(figure: Figure, names: Sequence[str], tokens: Sequence[str]) -> tuple[str, ...]:
    return (
        f"{figure.system} (published)",
        *(_number(figure.accuracy.get(name), 2) for name in names),
        *(f"{figure.tokens[name]:g}" if name in figure.tokens else "-" for name in tokens),
    )


def _beside(run: Run, cost: Cost, measure: str, names: Sequence[str], tokens: Sequence[str]) -> tuple[str, ...]:
    means = run.means(measure, without=ADVERSARIAL)
    spent = {"construction": cost.construction, "query": cost.query}
    return (
        f"ours: {run.name}",
        *(_told(means.get(name)) for name in names),
        *(_number(spent.get(name), 2) for name in tokens),
    )


def _told(found: Interval | None, sign: str = "") -> str:
    return "-" if found is None else f"{found.mean:{sign}.1f} [{found.low:{sign}.1f}, {found.high:{sign}.1f}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


# --- the commands -----------------------------------------------------------------------------------------------------


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="the tables of runs, plots, and a page to browse every question")
    report.add_argument("runs", nargs="+", type=Path, help="folders of runs; the others are compared with the first")
    report.add_argument("--out", type=Path, default=None, help="folder for report.md, plots and index.html")
    report.add_argument("--no-plots", action="store_true", help="do without matplotlib")
    report.set_defaults(call=report_main)
    compare = commands.add_parser("compare", help="two runs, question by question, by category")
    compare.add_argument("runs", nargs=2, type=Path, help="folders of runs; the second less the first")
    compare.set_defaults(call=compare_main)


def report_main(options: argparse.Namespace) -> dict[str, object]:
    """
    Raises:
        ValueError: no folder holds a run, or plots are asked for without matplotlib.
    """
    if options.out is not None and not options.no_plots:
        plots.require()
    there = [path for path in options.runs if (path / "run.json").exists()]
    left_out = [str(path) for path in options.runs if path not in there]
    for path in left_out if there else ():  # `report runs/*` meets the memories that lie beside the runs
        print(f"{path} holds no run and is left out", file=sys.stderr)
    runs = results.read(there or options.runs)
    means, pairs, apart = measured(runs), paired(runs), results.differences(runs)
    found = tables(runs, means, pairs)
    text = _above(apart) + "\n\n".join(map(markdown, found))
    print(text)
    files: list[Path] = []
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        written = options.out / "report.md"
        written.write_text(f"{text}\n", encoding="utf-8")
        drawn = [] if options.no_plots else plots.draw(runs, means, options.out)
        files = [written, *drawn, page.write(runs, found, apart, drawn, options.out / "index.html")]
        print(f"\nwritten to {options.out}: {', '.join(path.name for path in files)}")
    return {
        "runs": {run.name: _row(run, means) for run in runs},
        "compared": [_pair(pair) for pair in pairs],
        "differences": list(apart),
        "files": [str(path) for path in files],
        "left_out": left_out,
    }


def compare_main(options: argparse.Namespace) -> dict[str, object]:
    """
    Raises:
        ValueError: a folder holds no run, or the two share no question of the same data.
    """
    runs = results.read(options.runs)
    pairs, apart = paired(runs, by_category=True), results.differences(runs)
    print(_above(apart) + markdown(pairs_table(runs[0], pairs)))
    if not pairs:
        raise ValueError("the two runs share no question of the same data; compare runs on the same data")
    return {"compared": [_pair(pair) for pair in pairs], "differences": list(apart)}


def _above(apart: Sequence[str]) -> str:
    return "**Not the same in these runs:**\n\n" + "".join(f"- {each}\n" for each in apart) + "\n" if apart else ""


def _row(run: Run, means: Measured) -> dict[str, object]:
    scored = {
        measure: {category: [round(x, 2) for x in (found.mean, found.low, found.high)] + [found.n]
                  for category, found in by_run[run.name].items()}
        for measure, by_run in means.items()
    }  # fmt: skip
    return {"method": run.method, "questions": len(run.lines), **scored, "cost": asdict(results.cost(run))}


def _pair(pair: Paired) -> dict[str, object]:
    found = pair.found.difference
    told = {"difference": found.mean, "low": found.low, "high": found.high}
    named = {"run": pair.run, "measure": pair.measure, "category": pair.category, "shared": found.n}
    return named | {name: round(value, 2) for name, value in told.items()} | {"p": round(pair.found.p, 4)}

"""What runs measured, as PNG files: accuracy against tokens, thresholds, recall, categories, causes of error.

Owns the drawing alone. Runs are told apart by the shape of their marks and parts by their hatching, so that colour is
never needed; names stand in a legend beside the plot, where they cannot cover each other. A plot that these runs say
nothing about is not drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import published, results
from benchmarks.markdown import plain
from benchmarks.results import ALL, Outcome, Run
from benchmarks.scores import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measured = Mapping[str, Mapping[str, Mapping[str, Interval]]]
Point = tuple[float, Interval]

MARKS = "osD^vP*X<>ph"
GAP = 0.02  # between marks, as a share of the axis
EQUAL = "(equal ones side by side)"
# Colour, hatching and what the legend says, of each part of a bar.
PARTS: dict[Outcome, tuple[str, str, str]] = {
    "right": ("#4477aa", "", "right"),
    "right without": ("#99bbdd", "//", "right, gold evidence missing"),
    "reasoning": ("#ee8866", "xx", "wrong, evidence complete: reasoning"),
    "retrieval": ("#eedd88", "..", "gold evidence missing: retrieval"),
    "found": ("#bbddbb", "--", "evidence complete, no answer asked"),
    "unknown": ("#dddddd", "", "cannot be told"),
    "failed": ("#555555", "**", "failed"),
}
LABELS = {"f1": "token F1, %", "turns": "evidence recall, %"}


def require() -> None:
    """
    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib: pip install 'matplotlib>=3.8' (the group `bench`), or ask for --no-plots"
        ) from error
    matplotlib.use("Agg")


def draw(runs: Sequence[Run], means: Measured, out: Path) -> list[Path]:
    """The plots that these runs have something for, written into the folder `out`.

    Raises:
        ValueError: matplotlib is not installed.
    """
    require()
    from matplotlib import pyplot

    answers = results.accuracy(runs)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "accuracy-tokens": lambda: None if answers is None else _against_tokens(runs, means, answers),
        "threshold": lambda: _thresholds(runs, means, answers),
        "recall-tokens": lambda: _recall(runs, means),
        "categories": lambda: _categories(runs, means, answers or "turns"),
        "outcomes": lambda: _outcomes(runs, answers),
    }
    written = []
    with warnings.catch_warnings():
        # Names of runs and categories may be in a script that the font does not have; they are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for name, drawing in drawings.items():
            figure = drawing()
            if figure is not None:
                path = out / f"{name}.png"
                figure.savefig(path, dpi=110, metadata={"Software": None})
                pyplot.close(figure)
                written.append(path)
    return written


def _against_tokens(runs: Sequence[Run], means: Measured, measure: str) -> Figure:
    """Figure 4 of the paper on LycheeMemory V2: tokens to the right, accuracy upwards."""
    costs = {run.name: results.cost(run) for run in runs}
    figure, panels = _panels(2, "accuracy against tokens", runs)
    spent: dict[str, list[float | None]] = {
        "construction": [cost.construction for cost in costs.values()],
        "query": [cost.query for cost in costs.values()],
    }
    others = _published(runs) if measure.startswith("judged") else []
    for panel, (tokens, ours) in zip(panels, spent.items(), strict=True):
        known = [(n, other) for n, other in enumerate(others, 1) if tokens in other.tokens]
        most = max(1.0, *(each or 0.0 for each in ours), *(other.tokens[tokens] for _, other in known))
        if tokens == "construction":
            # Methods that construct without a model stand at nought, which has no place on a logarithmic axis.
            panel.set_xscale("symlog", linthresh=10.0, linscale=0.8)
            panel.set(xlim=(-6.0, 2.5 * most), xlabel=f"construction, K tokens by conversation {EQUAL}")
            panel.xaxis.set_major_formatter("{x:g}")
        else:
            _from_nought(panel, [*(each or 0.0 for each in ours), *(other.tokens[tokens] for _, other in known)])
            panel.set_xlabel(f"query, K tokens by question {EQUAL}")
        panel.set_ylabel(_label(measure))
        _spread(panel, runs, ours, [means.get(measure, {}).get(run.name, {}).get(ALL) for run in runs])
        for n, other in known:
            look = {"linestyle": "", "marker": f"${n}$", "markersize": 9, "color": "0.45"}
            panel.plot([other.tokens[tokens]], [other.accuracy[ALL]], label=f"{other.system}, published", **look)
    return _with_legend(figure, panels, runs)


def _published(runs: Sequence[Run]) -> list[published.Figure]:
    """The papers' systems whose accuracy and tokens are both printed; drawn as numbers in grey, for other models."""
    tables = [table for layout in results.layouts(runs) for table in published.tables(layout)]
    return [each for table in tables[:1] for each in table.figures if each.tokens]


def _thresholds(runs: Sequence[Run], means: Measured, answers: str | None) -> Figure | None:
    """Figure 5 of that paper: what the threshold for a cut between segments changes."""
    cut = sorted((run for run in runs if run.method.startswith("cut-")), key=_threshold)
    if len({_threshold(run) for run in cut}) < 2:
        return None
    measures = [measure for measure in (answers, "turns") if measure is not None and measure in means]
    costs = {run.name: results.cost(run).construction for run in cut}
    segments = {run.name: [line["segments"] for line in run.built.values()] for run in cut}
    title = f"threshold of a cut between segments ({published.THRESHOLDS})"
    figure, panels = _panels(len(measures) + 1, title, cut)
    for panel, measure in zip(panels, measures, strict=False):
        found = [(_threshold(run), means[measure][run.name].get(ALL)) for run in cut]
        _points(panel, 0, _label(measure), [(at, mean) for at, mean in found if mean is not None], line="-")
        panel.set(xlabel="threshold", ylabel=_label(measure))
    last = panels[-1]
    built = [(run, sum(segments[run.name]) / len(segments[run.name])) for run in cut if segments[run.name]]
    last.plot([_threshold(run) for run, _ in built], [n for _, n in built], "s--", color="C1", label="segments")
    last.set(xlabel="threshold", ylabel="segments by conversation")
    if any(costs.values()):
        other = last.twinx()
        spent = [costs[run.name] or 0.0 for run in cut]
        other.plot([_threshold(run) for run in cut], spent, "D:", color="C2", label="construction")
        other.set_ylabel("construction, K tokens by conversation (diamonds)")
        last.set_ylabel("segments by conversation (squares)")
    for panel in panels:
        panel.set_xticks(sorted({_threshold(run) for run in cut}))
    return figure


def _threshold(run: Run) -> float:
    return float(run.about["settings"]["segment"]["cut_threshold"])


def _recall(runs: Sequence[Run], means: Measured) -> Figure | None:
    found = [means.get("turns", {}).get(run.name, {}).get(ALL) for run in runs]
    if not any(found):
        return None
    figure, panels = _panels(1, "evidence recall against evidence tokens", runs)
    spent: list[float | None] = [results.cost(run).evidence_tokens for run in runs]
    _from_nought(panels[0], [each or 0.0 for each in spent])
    panels[0].set(xlabel=f"evidence, tokens by question {EQUAL}", ylabel=_label("turns"))
    _spread(panels[0], runs, spent, found)
    return _with_legend(figure, panels, runs)


def _categories(runs: Sequence[Run], means: Measured, measure: str) -> Figure | None:
    found = means.get(measure, {})
    names = (ALL, *(name for name in results.categories(runs) if any(name in each for each in found.values())))
    if not any(found.values()):
        return None
    figure, panels = _panels(1, f"by category: {_label(measure)}", runs, wide=4.0 + 0.28 * len(names) * (len(runs) + 1))
    for n, run in enumerate(runs):
        beside = 0.8 * ((n + 0.5) / len(runs) - 0.5)
        by_name = found.get(run.name, {})
        points = [(at + beside, by_name[name]) for at, name in enumerate(names) if name in by_name]
        _points(panels[0], n, run.name, points)
    for border in range(len(names) - 1):
        panels[0].axvline(border + 0.5, color="0.85", linewidth=0.8)
    shown = [_safe(name, 28) for name in names]
    slanted = {"rotation": 30, "ha": "right"} if sum(map(len, shown)) > 50 else {}
    panels[0].set_xticks(range(len(names)), shown, **slanted)
    panels[0].set(ylabel=_label(measure), xlim=(-0.5, len(names) - 0.5))
    return _with_legend(figure, panels, runs)


def _outcomes(runs: Sequence[Run], answers: str | None) -> Figure | None:
    """A bar for each run. A number stands in its part only where it fits."""
    counted = {run.name: list(results.outcomes(run, answers).values()) for run in runs}
    if not any(counted.values()):
        return None
    figure, panels = _panels(1, "how questions came out", runs, high=1.6 + 0.45 * len(runs))
    panel = panels[0]
    left = dict.fromkeys(counted, 0.0)
    for outcome, (colour, hatch, label) in PARTS.items():
        numbers = {name: found.count(outcome) for name, found in counted.items()}
        if not any(numbers.values()):
            continue
        shares = {name: 100 * number / max(1, len(counted[name])) for name, number in numbers.items()}
        at = range(len(counted))
        style = {"hatch": hatch, "color": colour, "edgecolor": "black", "linewidth": 0.6}
        panel.barh(at, list(shares.values()), left=list(left.values()), label=label, height=0.7, **style)
        for place, (name, share) in enumerate(shares.items()):
            if share >= 4.0:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
                where = (left[name] + share / 2, place)
                panel.text(*where, str(numbers[name]), ha="center", va="center", fontsize=8, bbox=box)
            left[name] += share
    panel.set_yticks(range(len(counted)), [_safe(name, 40) for name in counted])
    panel.invert_yaxis()
    panel.set(xlabel="questions, %", xlim=(0, 100))
    return _with_legend(figure, panels, runs)


# --- how it looks -----------------------------------------------------------------------------------------------------


def _panels(
    number: int, title: str, runs: Sequence[Run], *, wide: float | None = None, high: float = 4.4
) -> tuple[Figure, list[Axes]]:
    """So many beside each other, in inches as high as the legend of all runs at least."""
    from matplotlib import pyplot

    size = (min(24.0, wide or 4.6 * number + 3.0), max(high, 0.22 * len(runs) + 1.2))
    figure, axes = pyplot.subplots(1, number, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    panels = list(axes.flat)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure, panels


def _from_nought(panel: Axes, values: Sequence[float]) -> None:
    """An axis for all of them; logarithmic beyond their median where one is far away, as a whole conversation is that
    stands beside a few items."""
    panel.set_xlim(0.0, 1.12 * max(1.0, *values))
    if max(values) > 4 * median(values) > 0:
        panel.set_xscale("symlog", linthresh=median(values))
        panel.xaxis.set_major_formatter("{x:g}")


def _spread(panel: Axes, runs: Sequence[Run], at: Sequence[float | None], found: Sequence[Interval | None]) -> None:
    """One mark for each run, on an axis whose scale and limits are set; marks that would cover each other are moved
    aside, as little as may be."""
    there = [n for n in range(len(runs)) if at[n] is not None and found[n] is not None]
    axis, data = panel.transAxes.inverted(), panel.transData
    wanted = {n: float(axis.transform(data.transform((at[n], 0.0)))[0]) for n in there}
    order = sorted(there, key=lambda n: (wanted[n], n))
    for n, place in zip(order, set_apart([wanted[n] for n in order], GAP), strict=True):
        moved = float(data.inverted().transform(panel.transAxes.transform((place, 0.0)))[0])
        mean = found[n]
        assert mean is not None
        _points(panel, n, runs[n].name, [(moved, mean)])


def set_apart(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places between 0 and 1, at least `gap` from each other and from both ends, moved as little as may be
    (by the sum of squares): isotonic regression, by pooling neighbours that are out of order."""
    pools: list[tuple[float, int]] = []
    for n, place in enumerate(places):
        pools.append((place - n * gap, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, many), (other, more) = pools[-2:]
            pools[-2:] = [((one * many + other * more) / (many + more), many + more)]
    level = [mean for mean, size in pools for _ in range(size)]
    last = max(gap, 1.0 - len(places) * gap)  # where the first has to be at the latest, for the rest to find room
    return [min(max(mean, gap), last) + n * gap for n, mean in enumerate(level)]


def _points(panel: Axes, number: int, label: str, points: Iterable[Point], line: str = "") -> None:
    """Means with their intervals, in the mark of the run of that number: filled for the first dozen, hollow after."""
    every = list(points)
    if not every:
        return
    at, found = zip(*every, strict=True)
    spread = ([each.mean - each.low for each in found], [each.high - each.mean for each in found])
    look = {"marker": MARKS[number % len(MARKS)], "color": f"C{number % 10}", "linestyle": line}
    fill = {} if number < len(MARKS) else {"markerfacecolor": "white"}
    panel.errorbar(
        at, [each.mean for each in found], spread, capsize=3, markersize=7, label=_safe(label, 60), **look, **fill
    )


def _with_legend(figure: Figure, panels: Sequence[Axes], runs: Sequence[Run]) -> Figure:
    """One legend for all panels, outside of them, runs first and in their order."""
    named: dict[str, object] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    ours = [label for run in runs if (label := _safe(run.name, 60)) in named]
    order = [*ours, *(label for label in named if label not in ours)]
    figure.legend([named[label] for label in order], order, loc="outside right upper", fontsize=8)
    return figure


def _label(measure: str) -> str:
    judge = measure.removeprefix("judged ")
    return LABELS.get(measure, f"right by the judge {_safe(judge, 30)}, %")


def _safe(text: str, length: int) -> str:
    """For a label: a dollar sign begins a formula in matplotlib."""
    return plain(text, length).replace("$", r"\$")

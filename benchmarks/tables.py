"""The lines of a run, as a table: means in percent by category, tokens, seconds."""

from __future__ import annotations

import math

from benchmarks.folder import Line


def told(line: Line) -> str:
    if line["error"]:
        return f"{line['id']}: {line['error']}"
    parts = [f"{name} {line['scores'][name]:.2f}" for name in ("turns", "f1") if name in line["scores"]]
    parts.append(f"{line['seconds']:.2f} s")
    return f"{line['id']}: {', '.join(parts)}"


def summarise(found: list[Line]) -> Line:
    """Percent, with the category "all" first; errors are counted and are part of no mean."""
    good = [line for line in found if not line["error"]]
    groups = {"all": good} | {
        name: [line for line in good if line["category"] == name] for name in dict.fromkeys(x["category"] for x in good)
    }
    seconds = sorted(line["seconds"] for line in good)
    tokens = {purpose: _tokens(good, purpose) for purpose in ("plan", "answer")}
    return {
        "questions": {name: len(group) for name, group in groups.items()},
        "errors": len(found) - len(good),
        "evidence_recall": _percent(groups, "turns"),
        "all_evidence": _percent(groups, "turns all"),
        "sessions@10": _percent(groups, "sessions@10"),
        "f1": _percent(groups, "f1"),
        "exact": _percent(groups, "exact"),
        "evidence_tokens": round(sum(line["evidence_tokens"] for line in good) / max(1, len(good))),
        "query_tokens": round(sum(tokens.values()) / max(1, len(good))),
        "planned_by_model": sum(any(u["purpose"] == "plan" for u in line["usage"]) for line in good),
        "seconds": {"median": at(seconds, 0.5), "p90": at(seconds, 0.9), "p99": at(seconds, 0.99)},
    }


def _percent(groups: dict[str, list[Line]], score: str) -> dict[str, float]:
    """The means of those groups in which a question has the score at all."""
    values = {
        name: [line["scores"][score] for line in group if score in line["scores"]] for name, group in groups.items()
    }
    return {name: round(100 * sum(each) / len(each), 1) for name, each in values.items() if each}


def _tokens(found: list[Line], purpose: str) -> int:
    return sum(u["prompt"] + u["output"] for line in found for u in line["usage"] if u["purpose"] == purpose)


def at(ordered: list[float], share: float) -> float:
    """The nearest rank: the first value that so many are not above; 0 where there is nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def show(summary: Line) -> None:
    """The table of a run."""
    columns = {"evidence_recall": "recall %", "all_evidence": "all found %", "f1": "F1 %", "exact": "exact %"}
    there = {name: title for name, title in columns.items() if summary[name]}
    print(f"{'category':<26} {'questions':>9} " + " ".join(f"{title:>11}" for title in there.values()))
    for category, number in summary["questions"].items():
        cells = " ".join(f"{summary[name].get(category, '-')!s:>11}" for name in there)
        print(f"{category:<26} {number:>9} {cells}")
    if summary["errors"]:
        print(f"{summary['errors']} questions failed; the same command asks them again")

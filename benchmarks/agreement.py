"""How far a judge agrees with answers that were labelled by hand: what a judged number is worth.

Owns the labelled answers of `data/judged.jsonl`, all in our own wording, and the measures: accuracy, precision and
recall of "correct", Cohen's kappa (Educational and Psychological Measurement 20, 1960). A case without a verdict is in
none of them and is counted beside them.

python -m benchmarks judge --judge rule|local:CARD|http://127.0.0.1:PORT/v1#MODEL [--kept FILE] [--show]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from benchmarks import judges
from benchmarks.folder import append, kept_lines
from benchmarks.judge import KINDS, Case, Judge, Kind, Verdict

LABELS = Path(__file__).parent / "data" / "judged.jsonl"


@dataclass(frozen=True, slots=True)
class Labelled:
    """A case with what a person said of it, and why it is in the set."""

    case: Case
    correct: bool
    why: str


@dataclass(frozen=True, slots=True)
class Counts:
    """Cases by the judge's verdict and the label. Every measure is None where it is not defined."""

    both_right: int = 0
    judge_alone: int = 0  # right for the judge, wrong by hand
    hand_alone: int = 0
    both_wrong: int = 0
    no_verdict: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def judged(self) -> int:
        return self.both_right + self.judge_alone + self.hand_alone + self.both_wrong

    @property
    def agreed(self) -> int:
        return self.both_right + self.both_wrong

    @property
    def accuracy(self) -> float | None:
        return _share(self.agreed, self.judged)

    @property
    def precision(self) -> float | None:
        """Of what the judge called right, the share that is right."""
        return _share(self.both_right, self.both_right + self.judge_alone)

    @property
    def recall(self) -> float | None:
        """Of what is right, the share that the judge called right."""
        return _share(self.both_right, self.both_right + self.hand_alone)

    @property
    def kappa(self) -> float | None:
        """(p_o - p_e) / (1 - p_e): agreement above that of two who decide by chance, each with their own share of
        "right"."""
        if not self.judged:
            return None
        judge, hand = self.both_right + self.judge_alone, self.both_right + self.hand_alone
        by_chance = judge * hand + (self.judged - judge) * (self.judged - hand)  # times judged squared
        return _share(self.judged * self.agreed - by_chance, self.judged**2 - by_chance)


@dataclass(frozen=True, slots=True)
class Agreement:
    """`labels` is the SHA-256 of the labelled cases; `of` has the counts of each kind among them; `apart` are the cases
    on which judge and hand differ, or without a verdict."""

    judge: str
    version: str
    labels: str
    of: Mapping[Kind, Counts]
    apart: tuple[tuple[Labelled, Verdict], ...]

    @property
    def all(self) -> Counts:
        return sum(self.of.values(), Counts())

    def line(self) -> str:
        """What is printed beside every number of this judge."""
        c = self.all
        missing = f"; {c.no_verdict} without a verdict" if c.no_verdict else ""
        return (
            f"judge {self.judge} ({self.version}) agrees with {c.agreed} of {c.judged} hand labels"
            f" ({_percent(c.accuracy)} %, kappa {_decimal(c.kappa)}){missing}"
        )

    def row(self) -> dict[str, object]:
        """For JSON."""
        kinds = {kind: _row(counts) for kind, counts in self.of.items()}
        return {
            "judge": self.judge,
            "version": self.version,
            "labels_sha256": self.labels,
            **_row(self.all),
            "kinds": kinds,
        }

    def show(self) -> None:
        """A table, kind by kind."""
        print(
            f"{'kind':<17} {'labels':>6} {'agreed %':>9} {'precision %':>12} {'recall %':>9} {'kappa':>6} {'none':>5}"
        )
        for name, c in (*self.of.items(), ("all", self.all)):
            print(
                f"{name:<17} {c.judged + c.no_verdict:>6} {_percent(c.accuracy):>9} {_percent(c.precision):>12}"
                f" {_percent(c.recall):>9} {_decimal(c.kappa):>6} {c.no_verdict:>5}"
            )


# --- the labelled answers ---------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Kind
    question: str
    gold: str
    answer: str
    correct: bool
    why: str


def labelled(path: Path = LABELS) -> tuple[Labelled, ...]:
    """The hand-labelled answers of a JSON-lines file.

    Raises:
        ValueError: a line is malformed, or is there twice.
    """
    found: dict[Case, Labelled] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = _Line.model_validate_json(text)
            case = Case(line.kind, line.question, line.gold, line.answer)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}, line {number}: {place}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if case in found:
            raise ValueError(f"{path}, line {number}: the same case a second time")
        found[case] = Labelled(case, line.correct, line.why)
    if not found:
        raise ValueError(f"{path} holds no labelled answer")
    return tuple(found.values())


# --- measuring --------------------------------------------------------------------------------------------------------


def agreement(judge: Judge, labels: Sequence[Labelled] | None = None, *, kept: Path | None = None) -> Agreement:
    """How far `judge` agrees with hand labels, those shipped by default.

    Each verdict is appended to the file `kept` when it is there, so that a measurement that was killed goes on where it
    was and a finished one is only read. A case without a verdict is asked about again.
    """
    chosen = labelled() if labels is None else labels
    done = {} if kept is None else _read(kept)
    counts = {kind: Counts() for kind in KINDS if any(label.case.kind == kind for label in chosen)}
    apart: list[tuple[Labelled, Verdict]] = []
    for label in chosen:
        key = _key(judge, label.case)
        verdict = done.get(key) or judge.judge(label.case)
        if kept is not None and key not in done:
            kept.parent.mkdir(parents=True, exist_ok=True)
            append(kept, {"key": key, "verdict": _VERDICT.dump_python(verdict, mode="json")})
        counts[label.case.kind] += _counted(verdict.correct, label.correct)
        if verdict.correct is not label.correct:
            apart.append((label, verdict))
    return Agreement(judge.name, judge.version, _fingerprint(chosen), counts, tuple(apart))


def _counted(judged: bool | None, by_hand: bool) -> Counts:
    if judged is None:
        return Counts(no_verdict=1)
    return Counts(judged and by_hand, judged and not by_hand, by_hand and not judged, not (judged or by_hand))


_VERDICT: TypeAdapter[Verdict] = TypeAdapter(Verdict)


def _read(kept: Path) -> dict[str, Verdict]:
    """The verdicts in a file."""
    found = {line["key"]: _VERDICT.validate_python(line["verdict"]) for line in kept_lines(kept)}
    return {key: verdict for key, verdict in found.items() if verdict.correct is not None}


def _key(judge: Judge, case: Case) -> str:
    """Other weights, other prompts or another case: another verdict."""
    return _sha256([judge.name, judge.digest, judge.version, case.kind, case.question, case.gold, case.answer])


def _fingerprint(labels: Sequence[Labelled]) -> str:
    return _sha256([[label.case.kind, label.case.question, label.case.gold, label.case.answer, label.correct]
                    for label in labels])  # fmt: skip


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()


# --- the command ------------------------------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks judge`."""
    command.add_argument("--judge", required=True, help=judges.NAMES)
    command.add_argument("--home", type=Path, default=None, help="where the models are")
    command.add_argument("--labels", type=Path, default=LABELS, help="hand-labelled answers; default: those shipped")
    command.add_argument("--kept", type=Path, default=None, help="file of verdicts: a killed measurement goes on there")
    command.add_argument("--timeout", type=float, default=120.0, help="seconds that a server may be silent")
    command.add_argument("--show", action="store_true", help="print each case on which the judge and the hand differ")


def judge_main(options: argparse.Namespace) -> dict[str, object]:
    """Measure one judge, print a table, and give the row for JSON."""
    labels = labelled(options.labels)
    with closing(judges.open_judge(options.judge, models_home=options.home, timeout=options.timeout)) as judge:
        measured = agreement(judge, labels, kept=options.kept)
    for label, verdict in measured.apart if options.show else ():
        _show(label, verdict)
    measured.show()
    print(measured.line())
    return measured.row()


def _show(label: Labelled, verdict: Verdict) -> None:
    by_hand = "right" if label.correct else "wrong"
    print(f"{label.case.kind}: by hand {by_hand} ({label.why}): {verdict.error or repr(verdict.said)}")
    print(f"  question {label.case.question!r}\n  gold     {label.case.gold!r}\n  answer   {label.case.answer!r}")


def _row(c: Counts) -> dict[str, object]:
    measures = {"accuracy": c.accuracy, "precision": c.precision, "recall": c.recall, "kappa": c.kappa}
    rounded = {name: None if value is None else round(value, 4) for name, value in measures.items()}
    return {"labels": c.judged + c.no_verdict, "agreed": c.agreed, "no_verdict": c.no_verdict, **rounded}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

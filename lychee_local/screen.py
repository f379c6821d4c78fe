"""What a person sees in a terminal, and what a program reads on standard output.

Owns tables, the progress display and the JSON form of every value. Decides nothing and computes nothing but what is
shown. Stored text is data: it is never read as markup, and its control characters are made visible, so that a memory
cannot move the cursor or colour the screen.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from lychee_local.intake import DERIVED_REF
from lychee_local.types import (
    Answer,
    CutReason,
    DateSpan,
    Decision,
    Evidence,
    Node,
    Progress,
    Recall,
    Receipt,
    Record,
    Reencoded,
    Remembered,
    Segment,
    Spent,
    Stats,
    Turn,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lychee_local.calibrate import Calibrated
    from lychee_local.doctor import Report
    from lychee_local.store import Finding
    from lychee_local.tuning import Tuning

# soft_wrap leaves the folding of long lines to the terminal, and a pipe gets each line, and each row of a table, whole.
out = Console(soft_wrap=True, highlight=False, emoji=False, width=None if sys.stdout and sys.stdout.isatty() else 200)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN_EVERY_SECONDS = 5.0

REASONS: dict[CutReason, str] = {
    "semantic_boundary": "the subject changed",
    "capacity_limit": "it would have become too long",
    "target_length": "it reached its target length",
    "exchange_limit": "it has the most exchanges allowed",
    "session_flush": "the session ended",
    "oversized_turn_fragment": "part of one very long turn",
    "eager": "every exchange by itself",
}


def visible(text: str) -> str:
    """`text` with its control and direction-changing characters written as escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    return " ".join(visible(text).split())


# --- for programs ----------------------------------------------------------------------------------------------------


def plain(value: object) -> object:
    """Any value of this package in JSON's own types: fields by name, `id` first, dates in ISO 8601."""
    if isinstance(value, DateSpan):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        identifier = getattr(value, "id", None)
        return own if "id" in own or identifier is None else {"id": identifier, **own}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


def print_json(value: object) -> None:
    """The one document that `--json` prints; what is no UTF-8, as a file's name can be, is escaped in it."""
    text = json.dumps(plain(value), ensure_ascii=False, indent=2) + "\n"
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))


# --- for people ------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,.0f}"


def size(n: int | None) -> str:
    """Bytes in decimal units, as disks and downloads are labelled."""
    if n is None:
        return "?"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} bytes"


def duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def count(n: int, noun: str) -> str:
    return f"{number(n)} {noun}" if n == 1 else f"{number(n)} {noun}s"


def when(at: datetime | None) -> str:
    return at.strftime("%Y-%m-%d %H:%M") if at else "no date"


def turns(said: Sequence[Turn]) -> None:
    session = None
    for t in said:
        if t.session != session:
            session = t.session
            _heading(session)
        text = visible(t.text).replace("\n", "\n      ")
        out.print(Text.assemble((f"{t.index:4}  {when(t.at)}  ", "dim"), (visible(t.name), "bold"), ": ", text))


def segments(found: Sequence[Segment], decisions: Sequence[Decision]) -> None:
    """Each segment with the decision that was taken on each of its exchanges."""
    for session in dict.fromkeys(d.exchange.session for d in decisions):
        _heading(session)
        for s in sorted((s for s in found if s.session == session), key=lambda s: (s.start, s.chars or ())):
            out.print(segment_line(s))
            for d in decisions_of(s, decisions):
                out.print(decision_line(d))


def decisions_of(s: Segment, decisions: Iterable[Decision]) -> Iterator[Decision]:
    """The decisions on the exchanges of one segment."""
    for d in decisions:
        x = d.exchange
        if x.session == s.session and s.start <= x.start and x.end <= s.end and (s.chars is None or x.chars == s.chars):
            yield d


def segment_line(s: Segment) -> Text:
    detail = f"  {count(s.exchanges, 'exchange')}, {s.tokens} tokens; closed because {REASONS[s.reason]}"
    chance = f" (P = {s.probability:.2f})" if s.reason == "semantic_boundary" else ""
    return Text.assemble((f"turns {s.start}-{s.end}", "bold"), detail, chance)


def decision_line(d: Decision) -> Text:
    x = d.exchange
    where = f"{x.start}" if x.start == x.end else f"{x.start}-{x.end}"
    signals = ""
    if d.signals is not None:
        s = d.signals
        signals = f"  P = {s.probability:.2f}  surprise {s.surprise:.2f}, drop {s.drop:+.2f}"
        signals += f", length {s.length:.2f}, turns {s.turns:.2f}"
    action = (f"{d.action:6}", "red" if d.action == "cut" else "green")
    return Text.assemble((f"  {where:>7}  ", "dim"), action, signals, (f"  {one_line(x.text)[:60]}", "dim"))


def records(found: Sequence[Record]) -> None:
    for session in dict.fromkeys(r.session for r in found):
        _heading(session)
        for r in sorted((r for r in found if r.session == session), key=lambda r: r.turns):
            out.print(record_line(r))


def record_line(r: Record) -> Text:
    about = [f"turns {', '.join(map(str, r.turns))}", *(str(s) for s in r.temporal.spans), *r.entities]
    if r.origin == "rules":
        about.append("by rules")
    return Text.assemble((f"{r.kind:12}", "cyan"), visible(r.text), (f"  [{visible('; '.join(about))}]", "dim"))


def nodes(found: Sequence[Node]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("kind", "label", "when", "records"):
        table.add_column(column, justify="right" if column == "records" else "left")
    for n in found:
        table.add_row(n.kind, Text(one_line(n.label)[:100]), str(n.when or ""), str(len(n.records)))
    out.print(table)


def evidence_lines(
    items: Sequence[Evidence], cited: Iterable[str] = (), *, text_lines: int | None = None
) -> Iterator[Text]:
    """Rank, score, when it was said, what dates it is about; the text; where it stands. Cited items are green. Of a
    text with more than `text_lines` lines the rest is counted."""
    marked = set(cited)
    for rank, item in enumerate(items, 1):
        about = f"  about {', '.join(map(str, item.dates))}" if item.dates else ""
        refs = [r for r in item.refs if not r.startswith(DERIVED_REF)]
        source = f"{item.memory_type or item.kind} from {item.session}, {_places(item.turns)}"
        source += f" ({', '.join(refs)})" if refs else ""
        text = visible(item.text).splitlines()
        if text_lines is not None and len(text) > text_lines:
            text = [*text[:text_lines], f"... and {count(len(text) - text_lines, 'more line')}"]
        yield Text.assemble(
            (f"{rank:3} ", "bold green" if item.id in marked else "bold"),
            f"{item.score:.2f}  ",
            (when(item.said) + about, "cyan"),
            "".join(f"\n      {line}" for line in text),
            ("\n      " + visible(source), "dim"),
        )


def _places(turn_ids: Sequence[str]) -> str:
    """Turn ids as "turn 4" or "turns 4-6, 9": the index is what follows the last colon."""
    runs: list[list[int]] = []
    for index in sorted(int(t.rpartition(":")[2]) for t in turn_ids):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    told = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"turn {told}" if len(turn_ids) == 1 else f"turns {told}"


def recall(found: Recall) -> None:
    if not found.evidence:
        out.print("nothing found")
    for line in evidence_lines(found.evidence):
        out.print(line)
    notes(found.notes)


def stream(piece: str) -> None:
    """A piece of an answer that is still being written."""
    out.print(Text(visible(piece), style="bold"), end="")


def answer(given: Answer, *, streamed: bool) -> None:
    if not streamed:
        out.print(Text(visible(given.text), style="bold"))
    out.print()
    for line in evidence_lines(given.evidence, given.cited):
        out.print(line)
    notes(given.notes)
    spent = sum(u.prompt_tokens + u.output_tokens for u in given.usage)
    seconds = sum(u.seconds for u in given.usage)
    err.print(Text(f"{number(spent)} tokens in {duration(seconds)}", style="dim"))


def notes(said: Iterable[str]) -> None:
    for note in said:
        err.print(Text(f"note: {visible(note)}", style="yellow"))


def remembered(done: Remembered, *, pending: int, seconds: float, still_open: bool) -> None:
    line = f"{count(len(done.turns), 'turn')} stored"
    if done.skipped:
        line += f", {number(done.skipped)} were there already"
    line += f"; {count(len(done.segments), 'segment')}, {count(len(done.records), 'record')}"
    if done.usage:
        line += f"; {number(sum(u.prompt_tokens + u.output_tokens for u in done.usage))} tokens"
    out.print(f"{line}; {duration(seconds)}")
    _waiting(pending)
    if still_open:
        out.print("the session stays open and can be searched; lychee flush ends it and encodes the rest")


def consolidated(done: Remembered, *, pending: int, seconds: float) -> None:
    if done.segments or done.records or pending:
        out.print(f"{count(len(done.records), 'record')}; {number(done.tokens)} tokens; {duration(seconds)}")
    else:
        out.print("nothing waits to be encoded")
    _waiting(pending)


def reencoded(done: Reencoded, *, encoder: str, seconds: float) -> None:
    """What came of old segments, and how their space is reclaimed."""
    if not done.segments and not done.kept:
        out.print(Text(f"nothing to do: all {count(done.skipped, 'segment')} are encoded by {encoder} already"))
        return
    spent = sum(u.prompt_tokens + u.output_tokens for u in done.usage)
    said = f"{count(len(done.segments), 'segment')} encoded anew by {encoder}: {count(len(done.records), 'record')}"
    out.print(Text(f"{said}; {number(spent)} tokens; {duration(seconds)}"))
    if done.kept:
        out.print(f"{count(len(done.kept), 'segment')} kept what they had: nothing came of them")
    if done.skipped:
        out.print(Text(f"{count(done.skipped, 'segment')} had been encoded by {encoder} already"))
    if done.segments:
        out.print("the old records take room on the disk until the next lychee forget or lychee compact")


def _waiting(pending: int) -> None:
    if pending:
        out.print(f"{count(pending, 'segment')} left to encode: lychee consolidate")


def stats(held: Stats) -> None:
    table = pairs(
        {
            "user": held.user,
            "folder": held.folder,
            "on disk": size(held.bytes),
            "embedder": held.embedder,
            "sessions": number(held.sessions),
            "turns": number(held.turns),
            "segments": number(held.segments)
            + (f" ({number(held.pending)} wait to be encoded)" if held.pending else ""),
            "records": number(held.records),
            "nodes": number(held.nodes),
            "construction tokens": number(held.construction_tokens),
            "query tokens": number(held.query_tokens),
        }
    )
    for purpose, spent in held.usage.items():
        table.add_row(f"calls to {purpose}", _cost(spent))
    out.print(table)


def spending(groups: Mapping[str | None, Spent], by: str) -> None:
    """What the calls of language models cost, group by group, and in all."""
    others = {"session": "questions", "day": "day not kept"}.get(by, "")
    rows = {others if name is None else name: _cost(spent) for name, spent in groups.items()}
    tokens = sum(spent.prompt_tokens + spent.output_tokens for spent in groups.values())
    out.print(pairs(rows | {"in all": f"{number(sum(s.calls for s in groups.values()))}: {number(tokens)} tokens"}))


def _cost(spent: Spent) -> str:
    return (
        f"{number(spent.calls)}: {number(spent.prompt_tokens)} tokens in ({number(spent.cached_tokens)} reused), "
        f"{number(spent.output_tokens)} out, {duration(spent.seconds)}"
    )


def calibrated(found: Calibrated, written: Path | None) -> None:
    """What was measured beside what the embedder has, and what both make of the conversations."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (found.embedder, "measured", "in use"):
        table.add_column(column, justify="left" if column == found.embedder else "right")
    measured, before = found.calibration, found.before
    for field in fields(measured):
        row = (getattr(measured, field.name), getattr(before, field.name))
        table.add_row(field.name.replace("_", " "), *(f"{value:g}" for value in row))
    table.add_row("turns per segment", f"{found.turns_per_segment:.2f}", f"{found.turns_per_segment_before:.2f}")
    out.print(table)
    said = f"{count(found.turns, 'turn')} of {count(found.conversations, 'conversation')}"
    out.print(f"from {said}; the floor from exchanges of different {found.unrelated}")
    if written is None:
        out.print("nothing was changed; --write uses it for memories that are made from now on")
    else:
        out.print(Text(f"written to {written}; memories that exist keep their own until lychee reindex"))


def report(found: Report) -> None:
    """A doctor's report: each check, and below it what to do."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for name, state, detail, hint in found.as_rows():
        out.print(Text.assemble((f"{state:5}", styles[state]), (f"{name:16}", "bold"), visible(detail)))
        if hint:
            out.print(Text.assemble(" " * 21, ("do this: ", "bold"), visible(hint)))
    out.print()
    verdict = (
        "everything that remembering and answering needs works here" if found.ok else "the main job cannot run yet"
    )
    out.print(Text(f"profile {found.profile}: {verdict}", style="bold"))


def tuning(found: Tuning) -> None:
    """What was measured of a model with several numbers of threads, and which is kept."""
    from lychee_local.tuning import READ, WRITTEN

    table = Table("threads", "prompt, tokens/s", "output, tokens/s", f"{READ:,} and {WRITTEN} of them, s", box=None)
    for speed in found.speeds:
        style = "bold" if speed.threads == found.threads else ""
        columns = (str(speed.threads), f"{speed.prompt:.1f}", f"{speed.output:.1f}", f"{speed.seconds:.1f}")
        table.add_row(*columns, style=style)
    out.print(table)
    out.print(Text(f"{found.model} gets {count(found.threads, 'thread')} from now on"))
    out.print()


def receipt(found: Receipt, turns: Sequence[Turn], records: Sequence[Record], shown: int = 12) -> None:
    """What was forgotten, or would be, and the proof. `turns` and `records` are what it was."""
    what = f"{count(len(found.turns), 'turn')} and {count(len(found.records), 'record')}"
    if not found.turns and not found.records:
        out.print("nothing matches: nothing is forgotten")
        return
    out.print(Text(f"{'would forget' if found.dry_run else 'forgot'} {what}", style="bold"))
    lines = [f"{when(t.at)}  {t.name}: {t.text}" for t in turns] or [r.text for r in records]
    for line in map(one_line, lines[:shown]):
        out.print(Text(f"  {line[:110]}{'…' if len(line) > 110 else ''}", style="dim"))
    if len(lines) > shown:
        out.print(Text(f"  … and {number(len(lines) - shown)} more", style="dim"))
    if found.turns and found.records:
        out.print(Text("  with all records of the segments that these turns are part of", style="dim"))
    rows = {}
    if found.waiting:
        rows["to be encoded anew"] = f"{count(len(found.waiting), 'segment')}, from what is left: lychee consolidate"
    if found.dry_run:
        out.print(pairs(rows))
        return
    rows |= {name: f"{number(n)} fewer" for name, n in found.removed.items()}
    rows["on disk"] = f"{size(found.bytes_before)} before, {size(found.bytes_after)} now"
    if found.elsewhere:
        rows["also said elsewhere"] = f"{number(len(found.elsewhere))} of these: the same words stand in what was kept"
    rows["searched"] = (
        f"still found in {', '.join(found.residues)}" if found.residues else "no byte of it was found in the folder"
    )
    out.print(pairs(rows))


def findings(user: str, found: Sequence[Finding], done: Sequence[str], lost: Sequence[str]) -> None:
    """What a check found, and what a repair did about it."""
    for f in found:
        out.print(Text.assemble(("damaged  ", "bold red"), visible(f.what), f"; lost: {f.loses}" if f.loses else ""))
    for sentence in done:
        out.print(Text.assemble(("mended   ", "green"), visible(sentence)))
    for sentence in lost:
        out.print(Text.assemble(("lost     ", "bold red"), visible(sentence)))
    if not found:
        out.print(Text(f"every byte of {visible(user)} is as it was written", style="bold"))
    elif not done:
        out.print("lychee check --repair mends what can be mended and keeps all that is whole")


def pairs(rows: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(visible(value)))
    return table


def _heading(name: str) -> None:
    out.print(Text(f"\n{visible(name)}", style="bold underline"))


# --- progress --------------------------------------------------------------------------------------------------------


class ProgressView:
    """Shows `Progress` reports on standard error: a bar in a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._printed = 0.0

    def __enter__(self) -> ProgressView:
        if err.is_terminal:
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                console=err,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, p: Progress) -> None:
        label = {"store": "storing turns", "encode": "encoding segments"}[p.stage]
        if self._bar is not None:
            if p.stage != self._stage:
                self._task = self._bar.add_task(label, total=p.total, detail="")
            assert self._task is not None
            self._bar.update(self._task, completed=p.done, total=p.total, detail=progress_detail(p))
        elif p.done == p.total or p.stage != self._stage or time.monotonic() - self._printed > _PLAIN_EVERY_SECONDS:
            err.print(f"{label}: {p.done}/{p.total}, {progress_detail(p)}")
            self._printed = time.monotonic()
        self._stage = p.stage


class Steps:
    """Progress of work that only counts: a bar in a terminal, a line every few seconds elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._printed = time.monotonic()

    def __enter__(self) -> Steps:
        if err.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Bar(*columns, console=err, transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._label)
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._printed > _PLAIN_EVERY_SECONDS:
            err.print(f"{self._label}: {done}/{total}")
            self._printed = time.monotonic()


def progress_detail(p: Progress) -> str:
    """Segments, records, tokens per second, time left: whatever is known at this point."""
    parts = []
    if p.stage == "store":
        parts.append(count(p.segments, "segment"))
    else:
        parts.append(count(p.records, "record"))
        if p.output_tokens and p.seconds:
            parts.append(f"{p.output_tokens / p.seconds:.1f} tokens/s")
    if 0 < p.done < p.total:
        parts.append(f"about {duration(p.seconds / p.done * (p.total - p.done))} left")
    return ", ".join(parts)

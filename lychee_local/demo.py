"""The main job on the sample conversation, shown step by step to a person.

Owns the story that is told: take in a session, show where it is cut, encode each segment, ask, and say what it cost.
Everything shown is done by `Memory` on a store of its own and read back from it; the expected answers and their source
turns come from `samples/`, so what was missed is shown as well.
"""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lychee_local import cards, intake, screen
from lychee_local.memory import Memory
from lychee_local.types import Evidence, Message, Progress

EVIDENCE_SHOWN = 3
EVIDENCE_TEXT_LINES = 4
# A question counts as found when every turn that answers it stands among this many items.
EVIDENCE_COUNTED = 5


@dataclass(frozen=True, slots=True)
class Question:
    """`evidence` are the refs of the turns that answer it, `tests` what makes it hard."""

    question: str
    expected: str
    evidence: tuple[str, ...]
    tests: str


def sample() -> tuple[Message, ...]:
    """The conversation that ships with the package: two friends over two meetings, one of them with an assistant."""
    return intake.read(io.BytesIO((resources.files("lychee_local") / "samples" / "everyday.jsonl").read_bytes()))


def sample_questions() -> tuple[datetime, tuple[Question, ...]]:
    """When the questions are asked, and the questions."""
    text = (resources.files("lychee_local") / "samples" / "everyday-questions.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    asked = (Question(q["question"], q["expected"], tuple(q["evidence"]), q["tests"]) for q in data["questions"])
    return datetime.fromisoformat(data["now"]), tuple(asked)


def run(*, profile: str, home: Path | None, no_llm: bool, keep: bool, console: Console) -> dict[str, object]:
    """Show the whole job and return what was measured. The store is thrown away at the end unless `keep` is set;
    then it is the memory of the user "demo", and a second run goes on where the first one stopped."""
    began = time.perf_counter()
    models_home = home or cards.default_home()
    with (
        _place(models_home, keep) as folder,
        Memory.open(
            "demo", home=folder, models_home=models_home, profile=profile, llm=None if no_llm else "auto"
        ) as memory,
    ):
        measured = tell(memory, console, answers=not no_llm)
        used = cards.profile(profile)
        measured["models"] = [m for m in used.models if not (no_llm and m == used.llm)]
        measured["models_folder"] = str(models_home / "models")
        measured["seconds"] = round(time.perf_counter() - began, 1)
        _summary(measured, console, kept=keep)
        return measured


@contextmanager
def _place(home: Path, keep: bool) -> Iterator[Path]:
    if keep:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="lychee-demo-") as folder:
        yield Path(folder)


def tell(memory: Memory, console: Console, *, answers: bool) -> dict[str, object]:
    """Play the sample into `memory` and ask its questions, with answers or evidence alone; what was measured."""
    messages = sample()
    began = time.perf_counter()
    for session in dict.fromkeys(m.session for m in messages):
        _remember(memory, [m for m in messages if m.session == session], console)
    built = time.perf_counter() - began
    usage = memory.usage()
    now, questions = sample_questions()
    found = [_ask(memory, q, now, console, answers=answers) for q in questions]
    held = memory.stats()
    written = [u for u in usage if u.purpose == "encode"]
    seconds = sum(u.seconds for u in written)
    return {
        "turns": held.turns,
        "segments": held.segments,
        "records": held.records,
        "nodes": held.nodes,
        "construction_tokens": held.construction_tokens,
        "construction_seconds": round(built, 1),
        "output_tokens_per_second": round(sum(u.output_tokens for u in written) / seconds, 1) if seconds else None,
        "questions": len(questions),
        "evidence_found": sum(found),
        "query_tokens_per_question": round(held.query_tokens / len(questions)),
        "folder": held.folder,
    }


# --- one session -----------------------------------------------------------------------------------------------------


def _remember(memory: Memory, messages: Sequence[Message], console: Console) -> None:
    session, at = messages[0].session, messages[0].at
    assert session is not None
    _heading(console, f"{session}, {screen.when(at)}: {len(messages)} turns")
    with _busy(console, "reading"):
        memory.remember(messages, encode=False)
        memory.flush(session, encode=False)
    decisions = memory.decisions(session)
    for segment in sorted(memory.segments(session), key=lambda s: s.start):
        for d in screen.decisions_of(segment, decisions):
            console.print(screen.decision_line(d))
        console.print(Text.assemble("   ", screen.segment_line(segment)))
    waiting = len(memory.pending())
    if not waiting:
        return
    console.print()
    showing = _Records(memory, console)
    with _busy(console, f"encoding {screen.count(waiting, 'segment')}"):
        memory.consolidate(on_progress=showing)


class _Records:
    """Prints the records of each segment as it is done, with its speed."""

    def __init__(self, memory: Memory, console: Console) -> None:
        self._memory = memory
        self._console = console
        self._tokens = 0
        self._seconds = 0.0

    def __call__(self, p: Progress) -> None:
        if p.segment is None:
            return
        records = [r for r in self._memory.records(p.segment.session) if r.segment == p.segment.id]
        tokens, seconds = p.output_tokens - self._tokens, p.seconds - self._seconds
        self._tokens, self._seconds = p.output_tokens, p.seconds
        speed = f", {tokens} tokens, {tokens / seconds:.1f} a second" if tokens and seconds else ""
        made = f"{screen.count(len(records), 'record')} in {screen.duration(seconds)}{speed}"
        self._console.print(Text.assemble((f"turns {p.segment.start}-{p.segment.end}", "bold"), f": {made}"))
        for r in records:
            self._console.print(Text.assemble("   ", screen.record_line(r)))


# --- one question ----------------------------------------------------------------------------------------------------


def _ask(memory: Memory, asked: Question, now: datetime, console: Console, *, answers: bool) -> bool:
    """Show the answer, its first evidence and the turns that it had to find; True if they are among the first items."""
    _heading(console, asked.question)
    if answers:
        with _busy(console, "reading the evidence"):
            reply = memory.ask(asked.question, now=now)
        evidence, cited, notes = reply.evidence, reply.cited, reply.notes
        console.print(Text.assemble(("answer    ", "dim"), (screen.visible(reply.text), "bold green")))
    else:
        found = memory.recall(asked.question, now=now)
        evidence, cited, notes = found.evidence, (), found.notes
    console.print(Text.assemble(("expected  ", "dim"), asked.expected, (f"  ({asked.tests})", "dim")))
    for note in notes:
        console.print(Text(f"note: {screen.visible(note)}", style="yellow"))
    for line in screen.evidence_lines(evidence[:EVIDENCE_SHOWN], cited, text_lines=EVIDENCE_TEXT_LINES):
        console.print(line)
    said = {turn.ref: turn for turn in memory.turns()}
    found_all = True
    for ref in asked.evidence:
        rank = _rank(ref, evidence)
        found_all &= rank is not None and rank <= EVIDENCE_COUNTED
        place = "is not in the evidence" if rank is None else f"is in item {rank}"
        console.print(
            Text.assemble(("source    ", "dim"), screen.one_line(said[ref].line), (f"  ({ref} {place})", "dim"))
        )
    return found_all


def _rank(ref: str, evidence: Sequence[Evidence]) -> int | None:
    return next((rank for rank, item in enumerate(evidence, 1) if ref in item.refs), None)


# --- the end ---------------------------------------------------------------------------------------------------------


def _summary(measured: dict[str, object], console: Console, *, kept: bool) -> None:
    _heading(console, "What was measured")
    speed = measured["output_tokens_per_second"]
    console.print(
        screen.pairs(
            {
                "turns": str(measured["turns"]),
                "segments": str(measured["segments"]),
                "records": str(measured["records"]),
                "nodes": str(measured["nodes"]),
                "construction": f"{measured['construction_tokens']} tokens in {measured['construction_seconds']} s"
                + (f", {speed} output tokens a second" if speed else ""),
                "questions": f"{measured['evidence_found']} of {measured['questions']} with all their source turns in "
                f"the first {EVIDENCE_COUNTED} items; {measured['query_tokens_per_question']} tokens a question",
                "total time": f"{measured['seconds']} s",
                "models": f"{measured['models_folder']}",
                "memory": f"{measured['folder']}" + ("" if kept else " (removed now; --keep keeps it)"),
            }
        )
    )
    console.print("\nYour turn:")
    console.print("  lychee remember --text 'I moved to Lisbon last week.' --speaker Ana")
    console.print("  lychee recall 'Where does Ana live?'")


def _busy(console: Console, what: str) -> AbstractContextManager[object]:
    return console.status(what) if console.is_terminal else nullcontext()


def _heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{screen.visible(text)}", style="bold underline"))

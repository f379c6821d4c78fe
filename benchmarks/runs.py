"""A run: one method asked the questions of a data set, conversation by conversation, or several of them at a time.

Owns the order of work. What has a line in the folder is not asked again, unless the line is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from benchmarks.asking import ask_all
from benchmarks.folder import Line, answered, claimed, write
from benchmarks.questions import Conversation, Report
from benchmarks.setups import Places, Setup
from benchmarks.tables import summarise, told
from lychee_local.errors import LycheeError
from lychee_local.executors import Executor, Lost

Say = Callable[[str], None]
# A conversation, and which of its questions are asked.
_Task = tuple[Setup, Places, Conversation, frozenset[str]]


def run(setup: Setup, places: Places, *, executor: Executor | None = None, say: Say, on_problem: Report) -> Line:
    """Ask every chosen question that has no answer in the folder yet, in this process or by `executor`; the summary of
    all.

    Raises:
        ValueError: the folder holds another run or one that is under way, or the data cannot be used.
        ModelMissing: a model of the profile is not on this machine.
    """
    chosen = setup.chosen(on_problem)  # what cannot be run claims no folder
    with claimed(setup, places):
        return _run(setup, places, chosen, executor, say)


def _run(setup: Setup, places: Places, chosen: frozenset[str], executor: Executor | None, say: Say) -> Line:
    lines: dict[str, Line] = {}
    order: list[str] = []

    def tasks() -> Iterator[_Task]:
        for conversation in setup.read(lambda _: None):
            wanted = [q.id for q in conversation.questions if q.id in chosen]
            order.extend(wanted)
            done = answered(places.out, conversation.id)
            lines.update({i: done[i] for i in wanted if i in done})
            if missing := frozenset(wanted) - done.keys():
                yield setup, places, conversation, missing

    for asked in _each(tasks(), executor):
        for line in asked:
            lines[line["id"]] = line
            say(f"{len(lines)}/{len(chosen)} {told(line)}")
    found = [lines[i] for i in order]
    summary = {"method": setup.method, "budget": setup.budget} | summarise(found)
    write(places.out / "summary.json", summary)
    return summary


def _each(tasks: Iterator[_Task], executor: Executor | None) -> Iterator[Iterable[Line]]:
    """The new lines of each conversation: as they come in this process, else conversation by conversation.

    Raises:
        LycheeError: every process that asked one of the conversations was ended; the rest is asked, and kept.
    """
    if executor is None:
        yield from (ask_all(*task) for task in tasks)
        return
    lost: dict[str, Lost] = {}
    for (_, _, conversation, _), lines in executor.each(_all_lines, tasks):
        if isinstance(lines, Lost):
            lost[conversation.id] = lines
        else:
            yield lines
    if lost:
        names = ", ".join(lost)
        raise LycheeError(f"{names}: {next(iter(lost.values())).reason}", hint="the same command asks what is missing")


def _all_lines(task: _Task) -> list[Line]:
    """A conversation's lines; those that a process had asked before it was ended are not asked again."""
    setup, places, conversation, wanted = task
    done = answered(places.out, conversation.id)
    return [
        *(line for i, line in done.items() if i in wanted),
        *ask_all(setup, places, conversation, wanted - done.keys()),
    ]

"""A run: one method asked the questions of a data set, conversation by conversation, or several of them at a time.

Owns the order of work. What has a line in the folder is not asked again, unless the line is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

from benchmarks.asking import ask_all
from benchmarks.folder import Line, claimed, kept, write
from benchmarks.questions import Conversation, Report
from benchmarks.setups import Places, Setup
from benchmarks.tables import summarise, told

Say = Callable[[str], None]


def run(setup: Setup, places: Places, *, workers: int = 1, say: Say, on_problem: Report) -> Line:
    """Ask every chosen question that has no answer in the folder yet; the summary of all.

    Raises:
        ValueError: the folder holds another run or one that is under way, or the data cannot be used.
        ModelMissing: a model of the profile is not on this machine.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one is needed")
    chosen = setup.chosen(on_problem)  # what cannot be run claims no folder
    with claimed(setup, places):
        return _run(setup, places, chosen, workers, say)


def _run(setup: Setup, places: Places, chosen: frozenset[str], workers: int, say: Say) -> Line:
    lines: dict[str, Line] = {}
    order: list[str] = []

    def tasks() -> Iterator[tuple[Conversation, frozenset[str]]]:
        for conversation in setup.read(lambda _: None):
            wanted = [q.id for q in conversation.questions if q.id in chosen]
            order.extend(wanted)
            done = {i: line for i, line in kept(places.out, conversation.id).items() if not line["error"]}
            lines.update({i: done[i] for i in wanted if i in done})
            if missing := frozenset(wanted) - done.keys():
                yield conversation, missing

    for asked in _each(tasks(), setup, places, workers):
        for line in asked:
            lines[line["id"]] = line
            say(f"{len(lines)}/{len(chosen)} {told(line)}")
    found = [lines[i] for i in order]
    summary = {"method": setup.method, "budget": setup.budget} | summarise(found)
    write(places.out / "summary.json", summary)
    return summary


def _each(
    tasks: Iterator[tuple[Conversation, frozenset[str]]], setup: Setup, places: Places, workers: int
) -> Iterator[Iterable[Line]]:
    """The new lines of each conversation: as they come with one worker, else conversation by conversation."""
    if workers == 1:
        for conversation, wanted in tasks:
            yield ask_all(setup, places, conversation, wanted)
        return
    waiting: set[Future[list[Line]]] = set()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for conversation, wanted in tasks:
            waiting.add(pool.submit(_all_lines, setup, places, conversation, wanted))
            while len(waiting) >= 2 * workers:
                done, waiting = wait(waiting, return_when="FIRST_COMPLETED")
                yield from (future.result() for future in done)
        for future in waiting:
            yield future.result()


def _all_lines(setup: Setup, places: Places, conversation: Conversation, wanted: frozenset[str]) -> list[Line]:
    return list(ask_all(setup, places, conversation, wanted))

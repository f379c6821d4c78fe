"""Work that needs generations: one job at a time, or many side by side on one model.

A job is a generator: it yields the request it needs, is given the completion (or the error that came instead), and
returns what it made. So the code of a stage reads as a straight line and knows nothing of batches, and what runs side
by side, in which order, follows from the jobs alone: no threads, hence the same run gives the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from lychee_local.backends import LLM, Job, Request
from lychee_local.errors import GenerationFailed, PromptTooLong
from lychee_local.types import Completion

T = TypeVar("T")
Answer = Completion | Exception


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    value: T


def run(job: Job[T], llm: LLM) -> T:
    """What `job` returns, its requests answered one by one."""
    step = _go_on(job, None)
    while isinstance(step, Request):
        try:
            answer: Answer = llm.complete(
                step.messages, purpose=step.purpose, max_tokens=step.max_tokens, schema=step.schema
            )
        except (PromptTooLong, GenerationFailed) as error:
            answer = error
        step = _go_on(job, answer)
    return step.value


def run_all(jobs: Iterable[Job[T]], llm: LLM, *, width: int) -> Iterator[T]:
    """What the jobs return, in the order in which they end; up to `width` of them go on side by side.

    A job begins when another leaves room for it. What one raises ends them all: those under way are closed.
    """
    if width == 1:
        yield from (run(job, llm) for job in jobs)
        return
    waiting = iter(jobs)
    under_way: dict[int, Job[T]] = {}
    try:
        with llm.batch(width) as batch:
            while True:
                new: list[tuple[Job[T], Answer | None]]
                new = [(job, None) for job in islice(waiting, width - len(under_way))]
                answered = new or [(under_way.pop(ticket), answer) for ticket, answer in batch.advance()]
                if not answered:
                    return
                for job, answer in answered:
                    step = _go_on(job, answer)
                    if isinstance(step, Request):
                        under_way[batch.submit(step)] = job
                    else:
                        yield step.value
    finally:
        for job in under_way.values():
            job.close()


def _go_on(job: Job[T], answer: Answer | None) -> Request | _Returned[T]:
    """Its next request, or its end."""
    try:
        if answer is None:
            return next(job)
        return job.throw(answer) if isinstance(answer, Exception) else job.send(answer)
    except StopIteration as end:
        return _Returned(end.value)

"""Encoding beside other work: what waits is encoded a little at a time, and between two times the memory is free.

Owns when the memory is looked at, when it is taken for writing, and when it is given back. Knows neither the machine
nor the clock: whether the work may go on now, and how to wait, is handed in. A process that is killed here has lost at
most the segment it was at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from lychee_local.consolidation import Budget, ProgressCallback
from lychee_local.errors import StoreLocked
from lychee_local.memory import Memory
from lychee_local.types import Progress, Remembered

# Another process that wants to write waits for the end of the batch: this long, and the segment that is begun by then.
BATCH_SECONDS = 10.0
LOOK_EVERY_SECONDS = 2.0
# Between two batches: enough for one who waits for the memory to get it.
PAUSE_SECONDS = 0.2

State = Literal["encoding", "nothing waits", "held back", "being written"]


def consolidate_in_batches(
    looking: Memory,
    writing: Callable[[], AbstractContextManager[Memory]],
    *,
    budget: Budget,
    seconds: Callable[[], float],
    wait: Callable[[float], None],
    held_back: Callable[[], bool] = lambda: False,
    keep_going: bool = False,
    on_state: Callable[[State], None] = lambda state: None,
    on_progress: ProgressCallback | None = None,
) -> Remembered:
    """Encode what waits, in batches between which any other process can write; with `keep_going` also what comes later.

    `looking` is the memory opened read-only, `writing` opens it for writing and may find it locked. `seconds` is how
    long this has been going on, `wait` sleeps, `held_back` says before each batch whether to wait instead. Ends when
    nothing waits, unless `keep_going`, and when the budget is used up; or when `wait` or `on_progress` raises.

    Raises:
        StoreError and ModelError, as `Memory.open` and `Memory.consolidate`.
    """
    done = Remembered((), 0, (), (), ())
    segments = 0

    def report(p: Progress) -> None:
        """What `consolidate` says of one batch, said of all of them."""
        nonlocal segments
        segments += 1
        if on_progress is not None:
            on_progress(
                replace(
                    p,
                    done=segments,
                    total=segments + p.total - p.done,
                    records=len(done.records) + p.records,
                    output_tokens=sum(u.output_tokens for u in done.usage) + p.output_tokens,
                    seconds=seconds(),
                )
            )

    while not budget.spent(passed := seconds(), used := done.tokens):
        looking.refresh()
        if not looking.pending():
            if not keep_going:
                break
            on_state("nothing waits")
            wait(LOOK_EVERY_SECONDS)
        elif held_back():
            on_state("held back")
            wait(LOOK_EVERY_SECONDS)
        else:
            try:
                with writing() as memory:
                    on_state("encoding")
                    left = BATCH_SECONDS if budget.seconds is None else min(BATCH_SECONDS, budget.seconds - passed)
                    tokens = None if budget.tokens is None else budget.tokens - used
                    done = done.plus(memory.consolidate(left, tokens, on_progress=report))
            except StoreLocked:
                on_state("being written")
                wait(LOOK_EVERY_SECONDS)
            else:
                wait(PAUSE_SECONDS)
    return done

"""Where work on many users runs: in processes of this machine, or on the machines of a Ray cluster.

Owns processes: how many there are, what becomes of a task whose process ends under it, and in which order answers come.
Refuses to know what the work is. It must be a function of a module, its tasks and answers plain values, and to do a
task twice must do no harm: one whose process was killed is done again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lychee_local.backends.native import processors
from lychee_local.errors import BadInput, LycheeError

A = TypeVar("A")
B = TypeVar("B")

# So often a task is tried whose process ends under it: once by chance, twice by bad luck, and then it is the task.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Lost:
    """What comes instead of an answer where every process that did the task ended under it."""

    reason: str
    tries: int = TRIES


class Executor(Protocol):
    def each(self, work: Callable[[A], B], tasks: Iterable[A]) -> Iterator[tuple[A, B | Lost]]:
        """Do all tasks, several at a time, and yield each with its answer as soon as it is there. What `work` raises is
        raised here, and ends the rest."""
        ...


class _Tasks(Generic[A]):
    """Tasks, each with the number of the try; one whose process ended under it comes again, `TRIES` times in all."""

    def __init__(self, tasks: Iterable[A]) -> None:
        self._waiting = iter(tasks)
        self._again: list[tuple[A, int]] = []

    def take(self) -> tuple[A, int] | None:
        """The next one, None where none waits."""
        if self._again:
            return self._again.pop()
        task = next(self._waiting, None)
        return None if task is None else (task, 1)

    def lose(self, task: A, tries: int, reason: str) -> Lost | None:
        """Put one back whose process ended; what comes instead of its answer where that was its last try."""
        if tries == TRIES:
            return Lost(f"its process ended {TRIES} times: {reason}")
        self._again.append((task, tries + 1))
        return None


class Processes:
    """`workers` processes of this machine, which share its processors evenly."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise BadInput(f"workers is {workers}; at least one is needed")
        self._workers = workers

    def each(self, work: Callable[[A], B], tasks: Iterable[A]) -> Iterator[tuple[A, B | Lost]]:
        queue = _Tasks(tasks)
        # One pool for each worker: where one process dies, its own task is known, and the others go on.
        free = [_Worker(place, self._workers) for place in range(self._workers)]
        busy: dict[Future[B], tuple[_Worker, A, int]] = {}
        try:
            while True:
                while free and (taken := queue.take()) is not None:
                    worker = free.pop()
                    busy[worker.submit(work, taken[0])] = worker, *taken
                if not busy:
                    return
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    worker, task, tries = busy.pop(future)
                    free.append(worker)
                    try:
                        answer: B | Lost = future.result()
                    except BrokenProcessPool:
                        worker.begin_anew()
                        lost = queue.lose(task, tries, "killed, or out of memory")
                        if lost is None:
                            continue
                        answer = lost
                    yield task, answer
        finally:
            for worker, _, _ in busy.values():
                worker.kill()
            for worker in free:
                worker.end()


class _Worker:
    """A pool of one process with its part of the processors."""

    def __init__(self, place: int, workers: int) -> None:
        self._part = _part(place, workers)
        self.begin_anew()

    def begin_anew(self) -> None:
        # A forked process would share the threads and locks of engines that are loaded here.
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, initializer=_settle, initargs=(self._part,))
        self._pid: Future[int] | None = None

    def submit(self, work: Callable[[A], B], task: A) -> Future[B]:
        try:
            if self._pid is None:
                self._pid = self.pool.submit(os.getpid)
            return self.pool.submit(work, task)
        except BrokenProcessPool:  # it was killed while it waited
            self.begin_anew()
            return self.submit(work, task)

    def kill(self) -> None:
        """End it in the middle of a task, which a task has to bear anyway."""
        if self._pid is not None:
            with suppress(BrokenProcessPool, ProcessLookupError):
                os.kill(self._pid.result(), signal.SIGKILL)
        self.end()

    def end(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def _part(place: int, workers: int) -> tuple[int, ...]:
    """Which processors a worker gets, at least one; none where the system does not confine a process."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    mine = sorted(os.sched_getaffinity(0))
    first, last = place * len(mine) // workers, (place + 1) * len(mine) // workers
    return tuple(mine[first:last]) or (mine[place % len(mine)],)


def _settle(part: tuple[int, ...]) -> None:
    """Before its first task: its processors; Ctrl-C, which a terminal sends to all, is left to the parent; and an end
    of its own where that is killed, since nobody would tell it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if part:
        os.sched_setaffinity(0, part)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # in the middle of a task, which a task has to bear anyway


class Ray:
    """The machines of a Ray cluster: that at `address`, or one of this machine alone that ends with the work.

    Each task gets `threads` processors. Every machine needs this package in the same version, and the same folders
    under the same paths. Nothing is sent but tasks and answers; Ray's own report of its use is switched off.

    Raises:
        LycheeError: Ray is not installed, there is no cluster at `address`, or none of its machines is large enough.
    """

    def __init__(self, *, address: str | None = None, threads: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise LycheeError(f"Ray is not installed: {error}", hint="run: pip install 'ray>=2.50,<3'") from error
        self._ray: Any = ray
        self._threads = threads or processors()
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise LycheeError(f"no Ray cluster answers at {address}: {error}", hint="run: ray status") from error
        largest = max((int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]), default=0)
        if largest < self._threads:  # Ray would wait for such a machine for ever
            self.close()
            raise LycheeError(
                f"a task gets {self._threads} processors, and no machine of the cluster has more than {largest}",
                hint=f"say --threads {largest}, or less",
            )

    def close(self) -> None:
        """Leave the cluster; one that was begun here ends."""
        if self._ours:
            self._ray.shutdown()

    def each(self, work: Callable[[A], B], tasks: Iterable[A]) -> Iterator[tuple[A, B | Lost]]:
        ray = self._ray
        # Retries are counted here, so that they are the same in both executors and can be told.
        remote = ray.remote(num_cpus=self._threads, max_retries=0)(work)
        queue = _Tasks(tasks)
        busy: dict[Any, tuple[A, int]] = {}
        try:
            while True:
                # Twice as many as there are places: a free one finds its next task waiting.
                while len(busy) < 2 * self._places() and (taken := queue.take()) is not None:
                    busy[remote.remote(taken[0])] = taken
                if not busy:
                    return
                [done], _ = ray.wait(list(busy), num_returns=1)
                task, tries = busy.pop(done)
                try:
                    answer: B | Lost = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise _raised(error) from error
                except ray.exceptions.RayError as error:
                    lost = queue.lose(task, tries, " ".join(str(error).split())[:200])
                    if lost is None:
                        continue
                    answer = lost
                yield task, answer
        finally:
            for future in busy:
                ray.cancel(future, force=True)

    def _places(self) -> int:
        """How many tasks the cluster can do at a time now; machines may come and go."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 0)) // self._threads)


def _raised(error: Any) -> Exception:
    """What a task raised on another machine; Ray itself raises there where it cannot import the task."""
    cause: Exception = error.cause
    if isinstance(cause, RuntimeError) and "failed to import on the worker" in str(cause):
        reason = str(cause).strip().splitlines()[-1]
        return LycheeError(
            f"a machine of the cluster cannot do this work: {reason}", hint="install the same version on all of them"
        )
    return cause

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
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Literal, Protocol, TypeVar

from lychee_local.backends.native import processors
from lychee_local.errors import BadInput, LycheeError

A = TypeVar("A")
B = TypeVar("B")

Where = Literal["processes", "ray"]

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
    """`workers` processes of this machine, which share its processors evenly. Each is started with its first task."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise BadInput(f"workers is {workers}; at least one is needed")
        self._workers = workers

    def each(self, work: Callable[[A], B], tasks: Iterable[A]) -> Iterator[tuple[A, B | Lost]]:
        queue = _Tasks(tasks)
        free = [_Worker(_part(place, self._workers)) for place in range(self._workers)][::-1]
        every = tuple(free)
        busy: dict[_Worker, tuple[A, int]] = {}
        try:
            while True:
                while free and (taken := queue.take()) is not None:
                    worker = free.pop()
                    busy[worker] = taken
                    worker.begin(work, taken[0])
                if not busy:
                    return
                for worker in _ready(busy):
                    task, tries = busy.pop(worker)
                    free.append(worker)
                    try:
                        answer: B | Lost = worker.answer()
                    except EOFError:
                        lost = queue.lose(task, tries, "killed, or out of memory")
                        if lost is None:
                            continue
                        answer = lost
                    yield task, answer
        finally:
            # All are ended before any is waited for, so that a second Ctrl-C leaves none behind.
            for worker in every:
                worker.end(busy=worker in busy)
            for worker in every:
                worker.wait()


class _Worker:
    """A process with its part of the processors, started when there is something to do, and anew after its end."""

    def __init__(self, part: tuple[int, ...]) -> None:
        self._part = part
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def begin(self, work: Callable[[A], B], task: A) -> None:
        """Hand it a task; `answer` gives what came of it."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((work, task))
        except OSError:  # it was killed while it waited
            self._start()
            self._pipe.send((work, task))

    def _start(self) -> None:
        # A forked process would share the threads and locks of engines that are loaded here.
        spawn = multiprocessing.get_context("spawn")
        if self._pipe is not None:
            self._pipe.close()
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, self._part), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is the end of what can be read here

    @property
    def pipe(self) -> Connection:
        assert self._pipe is not None
        return self._pipe

    def answer(self) -> Any:
        """What came of the task; what `work` raised is raised here.

        Raises:
            EOFError: the process has ended.
        """
        try:
            raised, value = self.pipe.recv()
        except OSError as error:
            raise EOFError from error
        if raised:
            raise value
        return value

    def end(self, *, busy: bool) -> None:
        """End it: at once in the middle of a task, which a task has to bear anyway, else when it finds no other."""
        if self._process is not None and busy:
            self._process.kill()
        if self._pipe is not None:
            self._pipe.close()

    def wait(self) -> None:
        if self._process is not None:
            self._process.join()


def _ready(busy: Collection[_Worker]) -> list[_Worker]:
    """Those that have answered or ended; waits for one at least."""
    ready = connection.wait([worker.pipe for worker in busy])
    return [worker for worker in busy if worker.pipe in ready]


def share(workers: int) -> int:
    """How many processors each of so many workers gets, at least one."""
    return processors() // max(1, workers) or 1


def _part(place: int, workers: int) -> tuple[int, ...]:
    """Which processors a worker gets, at least one; none where the system does not confine a process."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    mine = sorted(os.sched_getaffinity(0))
    first, last = place * len(mine) // workers, (place + 1) * len(mine) // workers
    return tuple(mine[first:last]) or (mine[first],)


def _serve(pipe: Connection, part: tuple[int, ...]) -> None:
    """What a process does: task after task, until there is nothing more to read.

    Ctrl-C, which a terminal sends to all, is left to the parent; the end of a parent in the middle of a task is noticed
    by a thread, since nobody would tell.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if part:
        os.sched_setaffinity(0, part)
    with suppress(EOFError):
        while True:
            work, task = pipe.recv()
            try:
                answer = False, work(task)
            except Exception as error:  # noqa: BLE001 - it is raised again where the task came from
                error.add_note(traceback.format_exc())
                answer = True, error
            try:
                pipe.send(answer)
            except Exception as error:  # noqa: BLE001 - whatever cannot be sent, and how it says so
                pipe.send((True, LycheeError(f"what came of a task cannot be sent: {error}: {answer[1]!r:.200}")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # in the middle of a task, which a task has to bear anyway


@contextmanager
def executor(where: Where, *, workers: int, address: str | None, threads: int | None) -> Iterator[Executor]:
    """The executor of that name: `workers` processes of this machine, or tasks of `threads` processors on the Ray
    cluster at `address`, None for one of our own.

    Raises:
        BadInput: an address of what is no cluster.
        LycheeError: see `Ray`.
    """
    if where == "ray":
        with closing(Ray(address=address, threads=threads)) as cluster:
            yield cluster
        return
    if address is not None:
        raise BadInput("--address is the address of a Ray cluster", hint="say --executor ray too")
    yield Processes(workers)


class Ray:
    """The machines of a Ray cluster: that at `address`, or one of this machine alone that ends with the work.

    Each task gets `threads` processors. Every machine needs this package in the same version, and the same folders
    under the same paths. Nothing is sent but tasks and answers. A cluster of our own does not report its use to Ray's
    authors; whether another does was decided where it was started (`ray start --disable-usage-stats`).

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
                quiet: dict[str, Any] = {
                    "include_dashboard": False,
                    "log_to_driver": False,
                    "logging_level": logging.ERROR,
                }
                # Without "local" it would join any cluster that runs on this machine or that RAY_ADDRESS names.
                ray.init(address=address or "local", **quiet)
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

"""One job for many users: which they are, what is done for each, and what came of it.

Owns the jobs (import, consolidate, reencode) with one user as their unit. A user's memory is written by one process at
a time, as always, and every job goes on where it stopped, so one that is done twice does no harm. Where the processes
run is the executor's business, and the results do not depend on it: given the same number of threads, a model writes
the same records on all machines of one kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from lychee_local import intake
from lychee_local.engines import Engines
from lychee_local.errors import BadInput, LycheeError, there_are
from lychee_local.executors import Executor, Lost
from lychee_local.memory import Memory
from lychee_local.store import memories, require_folder
from lychee_local.types import Message

Verb = Literal["import", "consolidate", "reencode"]
VERBS: tuple[Verb, ...] = get_args(Verb)

# So long one user's job waits for another process that writes the same memory.
WAIT_SECONDS = 60.0
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """What is done for one user. Paths are those of the machine that does it. `llm` is the name of a card, or None for
    the rules; `threads` is how many a model gets, on which its last digits depend; `file` is what is imported."""

    verb: Verb
    user: str
    home: str
    profile: str = "laptop"
    llm: str | None = None
    threads: int | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job added, and the tokens it took, prompt and output together. `error` says why it ended early; what it
    did until then is kept."""

    user: str
    turns: int = 0
    segments: int = 0
    records: int = 0
    pending: int = 0
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""


def jobs(
    verb: Verb,
    *,
    home: Path,
    names: Sequence[str] = (),
    folder: Path | None = None,
    profile: str = "laptop",
    llm: str | None = None,
    threads: int | None = None,
) -> tuple[Job, ...]:
    """A job for each user, by name: for every file NAME.jsonl of `folder`, which is what is imported, or for every
    memory below `home`. `names` chooses among them.

    Raises:
        BadInput: there is none, or one of `names` is not there.
    """
    if (folder is not None) != (verb == "import"):
        raise BadInput(f"{verb} takes {'a folder' if verb == 'import' else 'no folder'} of conversations")
    job = Job(verb, "", str(home), profile, llm, threads)
    if folder is None:
        require_folder(home)
        found = {user: replace(job, user=user) for user in memories(home)}
    else:
        found = {path.stem: replace(job, user=path.stem, file=str(path)) for path in _files(folder)}
    if missing := [name for name in names if name not in found]:
        raise BadInput(f"there is no {missing[0]!r} in {folder or home}", hint=there_are(found))
    if not found:
        raise BadInput(
            f"there is nothing to {verb} in {folder or home}",
            hint=f"a folder holds one NAME{SUFFIX} for each user" if folder else "remember something first",
        )
    return tuple(found[name] for name in sorted(names or found))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder", hint=f"it holds one NAME{SUFFIX} for each user")
    return sorted(folder.glob(f"*{SUFFIX}"))


def run(work: Sequence[Job], executor: Executor) -> Iterator[Outcome]:
    """Do all jobs; what came of each, as soon as it is done."""
    for job, done in executor.each(perform, work):
        yield Outcome(job.user, error=done.reason) if isinstance(done, Lost) else done


def perform(job: Job) -> Outcome:
    """Do one job, in the process that calls this. Models stay loaded for the next one."""
    began = time.monotonic()
    try:
        engines = _engines(job.home, job.profile, job.llm, job.threads)
        with Memory.open(
            job.user,
            home=job.home,
            profile=job.profile,
            llm=None if job.verb == "import" else engines.llm(),
            embedder=engines.embedder(),
            reranker=None,
            wait_seconds=WAIT_SECONDS,
        ) as memory:
            outcome = _done(job, memory)
            pending = len(memory.pending())
    except LycheeError as error:
        return Outcome(job.user, seconds=time.monotonic() - began, error=str(error))
    return replace(outcome, pending=pending, seconds=time.monotonic() - began)


def _done(job: Job, memory: Memory) -> Outcome:
    if job.verb == "import":
        stored = memory.remember(_messages(job), encode=False)
        ended = memory.flush(encode=False)
        return Outcome(job.user, len(stored.turns), len(stored.segments) + len(ended.segments))
    done = memory.consolidate() if job.verb == "consolidate" else memory.reencode()
    tokens = sum(u.prompt_tokens + u.output_tokens for u in done.usage)
    return Outcome(job.user, segments=len(done.segments), records=len(done.records), tokens=tokens)


def _messages(job: Job) -> tuple[Message, ...]:
    assert job.file is not None
    try:
        with Path(job.file).open("rb") as stream:
            return intake.read(stream)
    except OSError as error:
        raise BadInput(f"{job.file} cannot be read: {error.strerror}") from error


@cache
def _engines(home: str, profile: str, llm: str | None, threads: int | None) -> Engines:
    return Engines(profile, home=Path(home), llm=llm, embedder="auto", reranker=None, threads=threads)

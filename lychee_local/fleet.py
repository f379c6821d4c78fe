"""One job for many users: which they are, what is done for each, and what came of it.

Owns the jobs (import, consolidate, reencode) with one user as their unit. A user's memory is written by one process at
a time, as always, and every job goes on where it stopped, so one that is done twice does no harm. Where the processes
run is the executor's business, and the results do not depend on it: given the same number of threads, a model writes
the same records on all machines of one kind.
"""

from __future__ import annotations

import time
import traceback
import unicodedata
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
from lychee_local.store import memories, require_folder, require_memory
from lychee_local.types import Message, Progress

Verb = Literal["import", "consolidate", "reencode"]
VERBS: tuple[Verb, ...] = get_args(Verb)

# So long one user's job waits for another process that writes the same memory.
WAIT_SECONDS = 60.0
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """What is done for one user. Paths are those of the machine that does it. `llm` is the name of a card, or None for
    the rules; `threads` is how many a model gets, on which its last digits depend, None for as many as are best;
    `file` is what is imported. `refused` says why nothing can be done for this user."""

    verb: Verb
    user: str
    home: str
    profile: str = "laptop"
    llm: str | None = None
    threads: int | None = None
    file: str | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job added, and the tokens it took, prompt and output together; `segments` are those that were cut by an
    import, else those that were encoded. `error` says why it ended early: what it did until then is kept, and counted
    unless its process was killed."""

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
        found = {user: replace(job, user=user, refused=wrong) for user, wrong in memories(home).items()}
    else:
        found = {user: replace(job, user=user, file=str(path), refused=wrong) for user, path, wrong in _files(folder)}
    wanted = {unicodedata.normalize("NFC", name) for name in names}
    if missing := sorted(wanted - found.keys()):
        raise BadInput(f"there is no {missing[0]!r} in {folder or home}", hint=there_are(found))
    if not found:
        raise BadInput(
            f"there is nothing to {verb} in {folder or home}",
            hint=f"a folder holds one NAME{SUFFIX} for each user" if folder else "remember something first",
        )
    # What every job needs, before the first begins.
    Engines(profile, home=home, llm=None, embedder="auto", reranker=None).embedder_identity()
    return tuple(found[name] for name in sorted(wanted or found))


def _files(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Each conversation, with the user whose it is, and why it cannot be taken if so."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder", hint=f"it holds one NAME{SUFFIX} for each user")
    met: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.name.startswith("."):
            continue  # what systems and editors put beside a file
        user = unicodedata.normalize("NFC", path.stem)
        if user in met:
            yield user, path, f"two files are of this user: {met[user].name} and {path.name}"
        elif not path.is_file():
            yield user, path, f"{path} is no file"
        else:
            yield user, path, ""
        met[user] = path


def run(work: Sequence[Job], executor: Executor) -> Iterator[Outcome]:
    """Do all jobs; what came of each, as soon as it is done."""
    for job, done in executor.each(perform, work):
        yield Outcome(job.user, error=done.reason) if isinstance(done, Lost) else done


def perform(job: Job) -> Outcome:
    """Do one job, in the process that calls this. Models stay loaded for the next one."""
    began = time.monotonic()
    if job.refused:
        return Outcome(job.user, error=job.refused)
    try:
        messages = _messages(job) if job.verb == "import" else ()
        if job.verb != "import":
            require_memory(Path(job.home), job.user)
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
            outcome = _done(job, memory, messages)
    except LycheeError as error:
        outcome = Outcome(job.user, error=str(error))
    except Exception as error:  # noqa: BLE001 - a fault of ours with one user is no reason to stop all the others
        traceback.print_exc()
        outcome = Outcome(job.user, error=f"{type(error).__name__}: {error}")
    return replace(outcome, seconds=time.monotonic() - began)


def _done(job: Job, memory: Memory, messages: Sequence[Message]) -> Outcome:
    """What was done, also where it ended early."""
    before, last = memory.stats(), _Last()
    error = ""
    try:
        if job.verb == "import":
            memory.remember(messages, encode=False)
            for session in dict.fromkeys(message.session for message in messages):
                memory.flush(session, encode=False)
        elif job.verb == "consolidate":
            memory.consolidate(on_progress=last)
        else:
            memory.reencode(on_progress=last)
    except LycheeError as stopped:
        error = str(stopped)
    after = memory.stats()
    return Outcome(
        job.user,
        turns=after.turns - before.turns,
        segments=after.segments - before.segments if job.verb == "import" else last.segments,
        records=last.records,
        pending=after.pending,
        tokens=after.construction_tokens - before.construction_tokens,
        error=error,
    )


class _Last:
    """What a job has done when it last told of its progress."""

    segments = 0
    records = 0

    def __call__(self, progress: Progress) -> None:
        if progress.stage == "encode":
            self.segments, self.records = progress.done, progress.records


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

"""The commands that encode: consolidate, flush, reencode; and what every command needs that may take long.

Owns the proof that a language model is there before work begins, progress that Ctrl-C can stop, and the conditions
under which `consolidate` works beside other programs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lychee_local import machine, screen
from lychee_local.errors import BadInput, StoreLocked
from lychee_local.options import Home, Json, Llm, NoLLM, Profile, Session, User
from lychee_local.types import Progress, Remembered, Stats

if TYPE_CHECKING:
    from lychee_local.consolidation import Budget
    from lychee_local.memory import Memory
    from lychee_local.settings import Settings
    from lychee_local.watch import State

# So long one who writes waits for another; `consolidate --watch` gives the memory back every ten seconds or so.
WAIT_SECONDS = 60.0


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (consolidate, flush, reencode):
        app.command()(command)


@contextmanager
def opened(
    user: str,
    home: Path | None,
    profile: str,
    *,
    llm: str | None,
    read_only: bool,
    existing: bool = False,
    settings: Settings | None = None,
) -> Iterator[Memory]:
    """A memory; one that another process writes is waited for. With `existing` none is made for a new name."""
    from lychee_local.memory import Memory

    if existing:
        from lychee_local.cards import default_home
        from lychee_local.store import require_memory

        require_memory(home or default_home(), user)

    def memory(wait_seconds: float) -> Memory:
        return Memory.open(
            user,
            home=home,
            profile=profile,
            llm=llm,
            settings=settings,
            read_only=read_only,
            wait_seconds=wait_seconds,
        )

    try:
        found = memory(0.0)
    except StoreLocked as locked:
        screen.notes([f"{locked.message}: waiting up to {WAIT_SECONDS:.0f} seconds for it"])
        found = memory(WAIT_SECONDS)
    with found:
        yield found


def language_model(home: Path | None, profile: str, chosen: str | None, *, no_llm: bool) -> str | None:
    """The name of the model that will write, None for none; proven to be here and to run before anything is stored."""
    from lychee_local import cards, doctor, pull
    from lychee_local.errors import ModelMissing
    from lychee_local.store import require_folder

    if no_llm and chosen is not None:
        raise BadInput(f"both --no-llm and --llm {chosen} were given", hint="leave one of them out")
    home = home or cards.default_home()
    require_folder(home)
    name = None if no_llm else chosen or cards.profile(profile).llm
    if name is None:
        return None
    card = cards.card(name, home)
    if pull.locate(card, home) is None:
        raise ModelMissing(
            f"the language model {name} is not on this machine",
            hint=f"lychee models pull {name}, or go on without one: --no-llm",
        )
    doctor.confirm_language_model(home, name)
    return name


class Watch:
    """Shows progress, and carries a Ctrl-C to the next report where the model library swallowed it: an exception that
    is raised inside a C callback is printed and forgotten."""

    def __init__(self, view: screen.ProgressView) -> None:
        self._view = view
        self._stop = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        raise KeyboardInterrupt

    def __call__(self, progress: Progress) -> None:
        self._view(progress)
        if self._stop:
            raise KeyboardInterrupt


@contextmanager
def interruptible(held: Callable[[], Stats]) -> Iterator[Watch]:
    """Runs a long write: on Ctrl-C says what is stored and how to go on, and leaves with status 130."""
    with screen.ProgressView() as view:
        watch = Watch(view)
        before = signal.signal(signal.SIGINT, watch.interrupt)
        try:
            yield watch
            return
        except KeyboardInterrupt:
            # A second Ctrl-C ends the process at once; the store survives that too.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            now = held()
        finally:
            signal.signal(signal.SIGINT, before)
    waiting = f", {screen.count(now.pending, 'segment')} wait to be encoded" if now.pending else ""
    screen.err.print(
        f"stopped: {screen.count(now.turns, 'turn')} and {screen.count(now.records, 'record')} are stored{waiting}; "
        "give the same command again to go on"
    )
    raise typer.Exit(130)


# --- the commands ----------------------------------------------------------------------------------------------------


def consolidate(
    *,
    budget_seconds: Annotated[
        float | None, typer.Option("--budget-seconds", help="Stop after the segment with which so much time is up.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Stop after the segment with which so many tokens are used.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on with what is remembered later, until Ctrl-C.")] = False,
    when_idle: Annotated[
        bool,
        typer.Option(
            "--when-idle", help=f"Only while other programs load the machine below {machine.IDLE_LOAD} a core."
        ),
    ] = False,
    on_ac_power: Annotated[bool, typer.Option("--on-ac-power", help="Only while the machine runs on mains.")] = False,
    no_llm: NoLLM = False,
    llm: Llm = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Encode the segments that still wait. Can be stopped at any point and goes on where it stopped.

    With --watch, --when-idle or --on-ac-power it works in short batches, and other commands can write in between.
    """
    from lychee_local.consolidation import Budget

    budget = Budget(budget_seconds, max_tokens)
    writer = language_model(home, profile, llm, no_llm=no_llm)
    if watch or when_idle or on_ac_power:
        spare = machine.Spare(when_idle=when_idle, on_mains_only=on_ac_power)
        screen.notes([f"{said}: that condition changes nothing" for said in spare.untold()])
        _in_batches(budget, spare, user, home, profile, writer, keep_going=watch, as_json=as_json)
    else:
        _encode(
            lambda memory, shown: memory.consolidate(budget.seconds, budget.tokens, on_progress=shown),
            user,
            home,
            profile,
            writer,
            as_json,
        )


def flush(
    *,
    session: Session = None,
    no_llm: NoLLM = False,
    llm: Llm = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """End a session, or every one: what is still open becomes a segment and is encoded."""
    writer = language_model(home, profile, llm, no_llm=no_llm)
    _encode(lambda memory, shown: memory.flush(session, on_progress=shown), user, home, profile, writer, as_json)


def reencode(
    *,
    session: Session = None,
    no_llm: NoLLM = False,
    llm: Llm = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Encode old segments anew, with a better model: --llm NAME. What that model has encoded already is left alone.

    Each segment keeps its old records until its new ones are there. The old ones are never found again; `lychee
    compact` reclaims their space.
    """
    writer = language_model(home, profile, llm, no_llm=no_llm)
    began = time.monotonic()
    with (
        opened(user, home, profile, llm=writer, read_only=False, existing=True) as memory,
        interruptible(memory.stats) as shown,
    ):
        done = memory.reencode(session, on_progress=shown)
    if as_json:
        screen.print_json(done)
    else:
        screen.reencoded(done, encoder=writer or "the rules", seconds=time.monotonic() - began)


def _encode(
    work: Callable[[Memory, Watch], Remembered],
    user: str,
    home: Path | None,
    profile: str,
    writer: str | None,
    as_json: bool,
) -> None:
    """Run one of the verbs that encode what waits, and say what came of it."""
    began = time.monotonic()
    with (
        opened(user, home, profile, llm=writer, read_only=False, existing=True) as memory,
        interruptible(memory.stats) as shown,
    ):
        done = work(memory, shown)
        waiting = len(memory.pending())
    _say(done, waiting, time.monotonic() - began, as_json)


def _say(done: Remembered, waiting: int, seconds: float, as_json: bool) -> None:
    if as_json:
        screen.print_json({"segments": done.segments, "records": done.records, "usage": done.usage, "pending": waiting})
    else:
        screen.consolidated(done, pending=waiting, seconds=seconds)


# --- beside other programs -------------------------------------------------------------------------------------------


class _Teller:
    """Says what is waited for, once for each change."""

    def __init__(self, spare: machine.Spare) -> None:
        self._spare = spare
        self._said = ""

    def __call__(self, state: State) -> None:
        said = {
            "encoding": "",
            "nothing waits": "nothing waits to be encoded; watching, Ctrl-C ends this",
            "being written": "another process writes this memory: encoding goes on after it",
            "held back": self._spare.held_back(),
        }[state]
        if said and said != self._said:
            screen.err.print(Text(said, style="dim"))
        self._said = said


def _in_batches(
    budget: Budget,
    spare: machine.Spare,
    user: str,
    home: Path | None,
    profile: str,
    writer: str | None,
    *,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Encode while the machine can spare it. The models stay loaded, the memory is opened anew for each batch."""
    from lychee_local.cards import default_home
    from lychee_local.engines import Engines
    from lychee_local.memory import Memory
    from lychee_local.watch import consolidate_in_batches

    began = time.monotonic()
    engines = Engines(profile, home=home or default_home(), llm=writer, embedder="auto", reranker=None)

    def writing() -> Memory:
        return Memory.open(user, home=home, profile=profile, llm=engines.llm(), embedder=engines.embedder())

    with opened(user, home, profile, llm=None, read_only=True) as looking:

        def held() -> Stats:
            looking.refresh()
            return looking.stats()

        try:
            with interruptible(held) as shown:
                done = consolidate_in_batches(
                    looking,
                    writing,
                    budget=budget,
                    seconds=lambda: time.monotonic() - began,
                    wait=time.sleep,
                    held_back=lambda: bool(spare.held_back()),
                    keep_going=keep_going,
                    on_state=_Teller(spare),
                    on_progress=shown,
                )
        finally:
            engines.close()
        waiting = held().pending
    _say(done, waiting, time.monotonic() - began, as_json)

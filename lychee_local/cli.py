"""The command line: one verb per method of `Memory`, and nothing that a program could not do through it.

Owns options, exit codes and the one place where an error becomes a line. Reads the environment, which the library never
does, and the clock, which dates nothing there but the usage log. Heavy imports happen inside the commands, so that help
and mistakes answer at once.

Exit status: 0 done, 1 doctor found the main job impossible or `fleet` failed for a user, 2 bad input, 3 the memory
folder, 4 a model, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer
from rich.text import Text

from lychee_local import cli_encode, cli_fleet, cli_models, cli_upkeep, intake, screen
from lychee_local import explain as explanation
from lychee_local.accounting import GROUPINGS
from lychee_local.cli_encode import interruptible, language_model, opened
from lychee_local.errors import BadInput, LycheeError
from lychee_local.options import (
    Explain,
    Home,
    Items,
    Json,
    Kind,
    Llm,
    Mode,
    NoLLM,
    Now,
    Profile,
    Session,
    Since,
    Speaker,
    Until,
    User,
)
from lychee_local.settings import MODES, RecallSettings, Settings
from lychee_local.types import MEMORY_TYPES, Message, NodeKind, Scope, TimeRange

T = TypeVar("T")
NODE_KINDS: tuple[NodeKind, ...] = get_args(NodeKind)

app = typer.Typer(
    help="Long-term memory for AI assistants that runs entirely on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help draws in a Markdown parser and a highlighter: a third of the time it takes
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.add_typer(cli_models.app, name="models")
app.add_typer(cli_fleet.app, name="fleet")


def _version(asked: bool) -> None:
    if asked:
        from lychee_local import __version__

        typer.echo(f"lychee-local {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Long-term memory for AI assistants that runs entirely on your own machine."""


def main(argv: Sequence[str] | None = None) -> None:
    """The `lychee` command. The only place where an error of this package ends; any other error is a bug and shows
    its traceback."""
    try:
        app(args=None if argv is None else list(argv), prog_name="lychee")
    except KeyboardInterrupt:
        sys.exit(130)
    except LycheeError as error:
        screen.err.print(Text.assemble(("error: ", "bold red"), screen.one_line(str(error))))
        sys.exit(error.exit_code)
    except OSError as error:
        # Of this machine, not of the memory, whose own come as StoreError: an output that is full or was closed.
        where = error.filename or "the output"
        screen.err.print(Text.assemble(("error: ", "bold red"), screen.one_line(f"{where}: {error.strerror or error}")))
        sys.exit(1)


# --- writing ---------------------------------------------------------------------------------------------------------


@app.command()
def remember(
    file: Annotated[str | None, typer.Argument(metavar="[FILE|-]", help="JSON lines of turns, or LoCoMo JSON.")] = None,
    *,
    text: Annotated[str | None, typer.Option("--text", help="One turn, said now, instead of a file.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="For turns that name none.")] = None,
    at: Annotated[str | None, typer.Option("--at", help="When it was said: ISO 8601 or '8 May, 2023'.")] = None,
    speaker: Annotated[str | None, typer.Option("--speaker", help="Who speaks in turns of --role.")] = None,
    role: Annotated[str, typer.Option("--role", help="For turns that name none.")] = "user",
    conversation: Annotated[str | None, typer.Option("--conversation", help="Which one of a LoCoMo file.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Report unusable lines and go on.")] = False,
    keep_open: Annotated[
        bool, typer.Option("--keep-open", help="More of the last exchange may follow: do not end the sessions.")
    ] = False,
    later: Annotated[bool, typer.Option("--later", help="Store now, encode with `lychee consolidate`.")] = False,
    no_llm: NoLLM = False,
    llm: Llm = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Store what was said, and encode it into records.

    Each line is an object with "text" and, where known, "role", "speaker", "at", "session" and "ref". The turns are
    stored and searchable before the language model starts. Giving the same file again adds only what is new.
    """
    problems: list[BadInput] = []
    given = intake.defaults(session=session, at=at, speaker=speaker, role=role)
    if text is not None:
        if file is not None:
            raise BadInput("both a file and --text were given")
        # Said at this terminal, now: the one case in which the time is known without being told.
        said = replace(given, at=given.at or datetime.now().replace(microsecond=0))
        messages: Sequence[Message] = intake.messages(
            text, session=said.session, at=said.at, speaker=said.speaker, role=said.role
        )
        keep_open = True
    else:
        messages = _read(file, conversation, given, problems if skip_bad else None)
    _report_skipped(problems)
    if problems and not messages:
        raise BadInput("no line of the input could be used")
    writer = None if later else language_model(home, profile, llm, no_llm=no_llm)
    began = time.monotonic()
    with opened(user, home, profile, llm=writer, read_only=False) as memory, interruptible(memory.stats) as watch:
        done = memory.remember(messages, encode=False, on_progress=watch)
        if not keep_open:
            for name in dict.fromkeys(m.session for m in messages):
                done = done.plus(memory.flush(name, encode=False))
        if not later:
            done = done.plus(memory.consolidate(on_progress=watch))
        waiting = len(memory.pending())
    if as_json:
        screen.print_json(
            {
                "turns": len(done.turns),
                "skipped": done.skipped,
                "bad": [problem.message for problem in problems],
                "segments": done.segments,
                "records": done.records,
                "usage": done.usage,
                "pending": waiting,
                "seconds": round(time.monotonic() - began, 3),
            }
        )
    else:
        screen.remembered(done, pending=waiting, seconds=time.monotonic() - began, still_open=keep_open)


def _read(
    file: str | None, conversation: str | None, given: intake.Defaults, problems: list[BadInput] | None
) -> tuple[Message, ...]:
    take = None if problems is None else problems.append
    if file is None:
        raise BadInput("nothing to remember", hint="name a file, - for standard input, or give --text")
    if file == "-" and sys.stdin is None:
        raise BadInput("standard input is closed", hint="name a file, or pipe the turns in")
    if file == "-":
        return intake.read(sys.stdin.buffer, conversation=conversation, given=given, on_problem=take)
    try:
        with Path(file).open("rb") as stream:
            return intake.read(stream, conversation=conversation, given=given, on_problem=take)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInput(f"cannot read {file!r}: {getattr(error, 'strerror', None) or error}") from error
    except BadInput as error:
        raise BadInput(f"{file}: {error.message}", hint=error.hint) from error


def _report_skipped(problems: Sequence[BadInput], shown: int = 10) -> None:
    for problem in problems[:shown]:
        screen.notes([f"left out {problem}"])
    if len(problems) > shown:
        screen.notes([f"left out {screen.number(len(problems) - shown)} more"])


cli_encode.register(app)


# --- asking ----------------------------------------------------------------------------------------------------------


@app.command()
def recall(
    question: Annotated[str, typer.Argument(help="What to look for.")],
    *,
    k: Items = None,
    now: Now = None,
    session: Session = None,
    speaker: Speaker = None,
    kind: Kind = None,
    since: Since = None,
    until: Until = None,
    mode: Mode = "lychee",
    explain: Explain = False,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Find the evidence for a question, best first. Needs no language model."""
    question = intake.question(question)
    scope, settings = _scope(session, speaker, kind, since, until), _settings(mode)
    with opened(user, home, profile, llm=None, read_only=True, settings=settings) as memory:
        found = memory.recall(question, k=k, now=_now(now), scope=scope, explain=explain)
    if as_json:
        screen.print_json(found)
    else:
        screen.recall(found)
        explanation.explain(found)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to answer.")],
    *,
    k: Items = None,
    now: Now = None,
    session: Session = None,
    speaker: Speaker = None,
    kind: Kind = None,
    since: Since = None,
    until: Until = None,
    mode: Mode = "lychee",
    short: Annotated[bool, typer.Option("--short", help="A phrase instead of a sentence.")] = False,
    explain: Explain = False,
    llm: Llm = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Answer a question from the evidence, and show the evidence."""
    question = intake.question(question)
    scope, settings = _scope(session, speaker, kind, since, until), _settings(mode)
    live = screen.out.is_terminal and not as_json
    writer = language_model(home, profile, llm, no_llm=False)
    with opened(user, home, profile, llm=writer, read_only=True, settings=settings) as memory:
        given = memory.ask(
            question,
            k=k,
            now=_now(now),
            scope=scope,
            style="short" if short else "chat",
            on_text=screen.stream if live else None,
            explain=explain,
        )
    if as_json:
        screen.print_json(given)
    else:
        screen.answer(given, streamed=live)
        explanation.explain(given)


def _scope(
    session: str | None, speaker: str | None, kind: str | None, since: str | None, until: str | None
) -> Scope | None:
    if all(part is None for part in (session, speaker, kind, since, until)):
        return None
    kinds = tuple(k for k in MEMORY_TYPES if k == kind)
    if kind is not None and not kinds:
        raise BadInput(f"--kind {kind!r} is no type of memory", hint=f"one of {', '.join(MEMORY_TYPES)}")
    first, last = intake.day(since, "--since"), intake.day(until, "--until")
    if first is not None and last is not None and last < first:
        raise BadInput(f"--until {until} lies before --since {since}")
    said = None if first is None and last is None else TimeRange(first, last)
    sessions, speakers = (() if part is None else (part,) for part in (session, speaker))
    return Scope(sessions, speakers, kinds, (), said)


def _settings(mode: str) -> Settings:
    known = next((m for m in MODES if m == mode), None)
    if known is None:
        raise BadInput(f"--mode {mode!r} is unknown", hint=f"one of {', '.join(MODES)}")
    return Settings(recall=RecallSettings(mode=known))


def _now(now: str | None) -> datetime:
    found = intake.defaults(at=now).at
    return datetime.now().replace(microsecond=0) if found is None else found


# --- looking ---------------------------------------------------------------------------------------------------------


@app.command()
def show(
    *,
    segments: Annotated[bool, typer.Option("--segments", help="Where turns were cut, and why.")] = False,
    records: Annotated[bool, typer.Option("--records", help="What was understood.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="What points to the records.")] = False,
    kind: Annotated[str | None, typer.Option("--kind", help="With --nodes: entity, topic, temporal, ...")] = None,
    session: Session = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Show what is stored: the turns, or their segments, records or nodes."""
    if segments + records + nodes > 1:
        raise BadInput("choose one of --segments, --records and --nodes")
    if nodes and session is not None:
        raise BadInput("nodes belong to no session", hint="leave out --session")
    if kind is not None and (not nodes or kind not in NODE_KINDS):
        raise BadInput(f"--kind {kind!r} selects nothing", hint=f"with --nodes, one of {', '.join(NODE_KINDS)}")
    with opened(user, home, profile, llm=None, read_only=True) as memory:
        if session is not None and session not in memory.sessions():
            raise BadInput(f"no session {session!r}", hint=f"there are: {', '.join(memory.sessions()) or 'none'}")
        if segments:
            found, decisions = memory.segments(session), memory.decisions(session)
            if as_json:
                screen.print_json({"segments": found, "decisions": decisions})
            else:
                screen.segments(found, decisions)
        elif records:
            _show(memory.records(session), screen.records, as_json)
        elif nodes:
            _show(memory.nodes(kind), screen.nodes, as_json)
        else:
            _show(memory.turns(session), screen.turns, as_json)


def _show(values: Sequence[T], view: Callable[[Sequence[T]], None], as_json: bool) -> None:
    if as_json:
        screen.print_json(values)
    elif not values:
        screen.notes(["nothing here; lychee stats says what is stored, lychee flush ends and encodes open sessions"])
    else:
        view(values)


@app.command()
def stats(
    *,
    by: Annotated[
        str | None, typer.Option("--by", help=f"What it cost by {', '.join(GROUPINGS)}, instead of the counts.")
    ] = None,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Count what a memory holds and what it cost."""
    grouping = next((g for g in GROUPINGS if g == by), None)
    if by is not None and grouping is None:
        raise BadInput(f"--by {by!r} sums nothing", hint=f"one of {', '.join(GROUPINGS)}")
    with opened(user, home, profile, llm=None, read_only=True) as memory:
        held = memory.stats()
        groups = memory.spent(grouping or "purpose")
    if grouping is None:
        screen.print_json(held) if as_json else screen.stats(held)
    elif as_json:
        screen.print_json([{grouping: name, "spent": spent} for name, spent in groups.items()])
    else:
        screen.spending(groups, grouping)


# --- keeping ---------------------------------------------------------------------------------------------------------

cli_upkeep.register(app)


# --- the whole -----------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    *,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure first with how many threads the model is fastest, and keep that."),
    ] = False,
    home: Home = None,
    profile: Profile = "laptop",
    llm: Llm = None,
    as_json: Json = False,
) -> None:
    """Try every part on this machine, and say what to do about what fails. Status 1 if the main job cannot run."""
    from lychee_local import cards, tuning
    from lychee_local import doctor as examination

    place = home or cards.default_home()
    tuned = None
    name = llm or cards.profile(profile).llm
    if tune and name is not None:
        examination.confirm_language_model(place, name)
        with screen.Steps(f"{name}: numbers of threads measured") as steps:
            tuned = tuning.tune(cards.card(name, place), place, on_progress=steps)
    report = examination.examine(place, profile, llm=llm)
    if as_json:
        screen.print_json({"ok": report.ok, "report": report, "tuning": tuned})
    else:
        if tuned is not None:
            screen.tuning(tuned)
        screen.report(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def demo(
    *,
    keep: Annotated[bool, typer.Option("--keep", help='Keep the memory, as the user "demo".')] = False,
    no_llm: NoLLM = False,
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Watch the whole job on a sample conversation: segments, records, questions, cost. Fetches the models it needs."""
    console = screen.err if as_json else screen.out
    cli_models.fetch_profile(profile, home, console=console, without_llm=no_llm)
    from lychee_local import demo as story

    measured = story.run(profile=profile, home=home, no_llm=no_llm, keep=keep, console=console)
    if as_json:
        screen.print_json(measured)

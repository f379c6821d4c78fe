"""The commands that keep a memory: forget, compact, check, reindex, export, import.

Owns the question before something is forgotten, and what is said about a receipt, a finding and an archive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from lychee_local import intake, screen
from lychee_local.cli_encode import opened
from lychee_local.errors import BadInput
from lychee_local.options import Home, Json, Profile, Session, User
from lychee_local.types import Receipt, Record, Turn

Ids = Annotated[list[str] | None, typer.Option("--turn", help="A turn's id, as `show --json` prints it. Repeatable.")]
RecordIds = Annotated[list[str] | None, typer.Option("--record", help="A record's id. Repeatable.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="The archive, a zip file.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (forget, compact, check, reindex, export):
        app.command()(command)
    app.command("import")(import_archive)


def forget(
    *,
    session: Session = None,
    turn: Ids = None,
    record: RecordIds = None,
    speaker: Annotated[str | None, typer.Option("--speaker", help="Everything this speaker said.")] = None,
    before: Annotated[str | None, typer.Option("--before", help="Everything said before this day.")] = None,
    matching: Annotated[
        str | None, typer.Option("--matching", help="Everything that contains this text, in upper or lower case.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Yes = False,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Forget turns or records, and all that was made from them, for good.

    Choose turns by --turn, or records by --record, or turns by conditions; of several conditions all must be met. Then
    the files are written anew and their bytes are searched for what was forgotten. There is no way back.
    """
    day = intake.day(before, "--before")
    chosen = {
        "session": session,
        "turns": tuple(turn or ()),
        "records": tuple(record or ()),
        "speaker": speaker,
        "before": day,
        "matching": matching,
    }
    with opened(user, home, profile, llm=None, read_only=False) as memory:
        receipt = memory.forget(**chosen, dry_run=True)  # type: ignore[arg-type]  # the values are those of its options
        turns, records = [memory.turn(i) for i in receipt.turns], [memory.record(i) for i in receipt.records]
        if not dry_run and (turns or records):
            if not yes:
                _ask(receipt, turns, records)
            with screen.Steps("forgetting") as steps:
                receipt = memory.forget(**chosen, on_progress=steps)  # type: ignore[arg-type]  # as above
    if as_json:
        screen.print_json(receipt)
    else:
        screen.receipt(receipt, turns, records)
    if receipt.residues:
        raise typer.Exit(3)


def _ask(receipt: Receipt, turns: Sequence[Turn], records: Sequence[Record]) -> None:
    if not sys.stdin or not sys.stdin.isatty():
        raise BadInput("nobody is there to be asked", hint="look first with --dry-run, then say --yes")
    screen.receipt(receipt, turns, records)
    if not typer.confirm("Forget this for good?", err=True):
        raise typer.Abort


def compact(*, user: User = "default", home: Home = None, profile: Profile = "laptop", as_json: Json = False) -> None:
    """Write the files anew without what was replaced, such as records of an earlier encoder, to reclaim the space."""
    with opened(user, home, profile, llm=None, read_only=False) as memory:
        before = memory.stats().bytes
        with _stoppable("writing anew", "the memory is as it was; give the same command again") as steps:
            memory.compact(on_progress=steps)
        after = memory.stats().bytes
    if as_json:
        screen.print_json({"bytes_before": before, "bytes_after": after})
    else:
        screen.out.print(f"{screen.size(before)} before, {screen.size(after)} now")


def check(
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended, keep all that is whole.")] = False,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Read every stored byte again and say what is damaged, and what of it is lost. Status 3 if something is."""
    from lychee_local import upkeep

    with screen.Steps("checking") as steps:
        if repair:
            done = upkeep.repair(user, home=home, profile=profile, on_progress=steps)
            findings, mended, lost = done.findings, done.done, done.lost
        else:
            findings, mended, lost = upkeep.check(user, home=home, on_progress=steps), (), ()
    if as_json:
        screen.print_json({"ok": not findings, "findings": findings, "done": mended, "lost": lost})
    else:
        screen.findings(user, findings, mended, lost)
    if lost or (findings and not repair):
        raise typer.Exit(3)


def reindex(
    *,
    embedder: Annotated[
        str, typer.Option("--embedder", help="An embedder of `models list`.", show_default="the profile's")
    ] = "auto",
    half: Annotated[bool, typer.Option("--half", help="Keep vectors in half precision: half the disk.")] = False,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Embed a whole memory anew with another embedder. Until it is done the memory works as before; a stopped run goes
    on where it stopped."""
    from lychee_local import upkeep
    from lychee_local.memory import Memory

    with _stoppable("embedding anew", "the memory is as it was; give the same command again to go on") as steps:
        upkeep.reindex(
            user,
            home=home,
            profile=profile,
            embedder=embedder,
            precision="float16" if half else None,
            on_progress=steps,
        )
    with Memory.open(user, home=home, profile=profile, llm=None, embedder=embedder, read_only=True) as memory:
        held = memory.stats()
    if as_json:
        screen.print_json({"embedder": held.embedder, "turns": held.turns, "records": held.records})
    else:
        what = f"{screen.count(held.turns, 'turn')} and {screen.count(held.records, 'record')}"
        screen.out.print(Text(f"{what} are embedded with {held.embedder}"))


@contextmanager
def _stoppable(label: str, after: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of something that leaves all as it was when it is stopped."""
    try:
        with screen.Steps(label) as steps:
            yield steps
    except KeyboardInterrupt:
        screen.err.print(f"stopped: {after}")
        raise typer.Exit(130) from None


def export(
    file: Target,
    *,
    no_vectors: Annotated[
        bool, typer.Option("--no-vectors", help="Text only: small, but importing embeds again.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there already.")] = False,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Write a whole memory into one archive, readable without this program."""
    from lychee_local.memory import Memory

    with (
        Memory.open(user, home=home, profile=profile, llm=None, read_only=True) as memory,
        screen.Steps("writing") as steps,
    ):
        done = memory.export(file, vectors=not no_vectors, overwrite=overwrite, on_progress=steps)
    if as_json:
        screen.print_json({"path": done.path, "bytes": done.bytes, "turns": done.about.turns})
    else:
        turns = screen.count(done.about.turns, "turn")
        screen.out.print(Text(f"{turns} of {screen.visible(user)} in {done.path}, {screen.size(done.bytes)}"))


def import_archive(
    file: Target,
    *,
    user: User = "default",
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Take an archive of `lychee export` into a memory that is still empty."""
    from lychee_local.store import inspect

    inspect(file)  # before a memory is made for it
    with opened(user, home, profile, llm=None, read_only=False) as memory:
        with _stoppable("reading", "nothing was taken in") as steps:
            memory.import_archive(file, on_progress=steps)
        held = memory.stats()
    if as_json:
        screen.print_json(held)
    else:
        screen.stats(held)

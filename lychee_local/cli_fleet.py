"""`lychee fleet`: one job for many users, in processes of this machine or on a Ray cluster.

Owns the choice of where the processes run and what is said about each user. What is done is `fleet`'s.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lychee_local import screen
from lychee_local.cli_encode import language_model
from lychee_local.options import Home, Json, Llm, NoLLM, Profile

if TYPE_CHECKING:
    from lychee_local.fleet import Outcome, Verb

app = typer.Typer(help="Many users: one job for each of them, several at a time.", no_args_is_help=True)


class Where(StrEnum):
    processes = "processes"
    ray = "ray"


Users = Annotated[list[str] | None, typer.Argument(metavar="[USER]...", help="Whose memories; all, if none is named.")]
Workers = Annotated[int, typer.Option("--workers", "-w", help="Processes at a time on this machine.", min=1)]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="Threads for each model; the same number writes the same records.", show_default="even"
    ),
]
On = Annotated[Where, typer.Option("--executor", help="Where the work runs.")]
Address = Annotated[
    str | None, typer.Option("--address", help="The head of a Ray cluster, HOST:PORT.", show_default="one of our own")
]


@app.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="One NAME.jsonl for each user NAME.")],
    users: Users = None,
    *,
    workers: Workers = 1,
    executor: On = Where.processes,
    address: Address = None,
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Store a folder of conversations, one file for each user. Given again, it adds only what is new.

    Records are made later, by `lychee fleet consolidate`.
    """
    _run("import", users, folder, None, None, workers, executor, address, home, profile, as_json)


@app.command()
def consolidate(
    users: Users = None,
    *,
    workers: Workers = 1,
    threads: Threads = None,
    executor: On = Where.processes,
    address: Address = None,
    no_llm: NoLLM = False,
    llm: Llm = None,
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Encode the segments that wait, of every user. Can be stopped at any point and goes on where it stopped."""
    writer = language_model(home, profile, llm, no_llm=no_llm)
    _run("consolidate", users, None, writer, threads, workers, executor, address, home, profile, as_json)


@app.command()
def reencode(
    users: Users = None,
    *,
    workers: Workers = 1,
    threads: Threads = None,
    executor: On = Where.processes,
    address: Address = None,
    no_llm: NoLLM = False,
    llm: Llm = None,
    home: Home = None,
    profile: Profile = "laptop",
    as_json: Json = False,
) -> None:
    """Encode the old segments of every user anew, with a better model: --llm NAME."""
    writer = language_model(home, profile, llm, no_llm=no_llm)
    _run("reencode", users, None, writer, threads, workers, executor, address, home, profile, as_json)


def _run(
    verb: Verb,
    users: list[str] | None,
    folder: Path | None,
    writer: str | None,
    threads: int | None,
    workers: int,
    where: Where,
    address: str | None,
    home: Path | None,
    profile: str,
    as_json: bool,
) -> None:
    from lychee_local import executors, fleet
    from lychee_local.cards import default_home

    work = fleet.jobs(
        verb,
        home=(home or default_home()).resolve(),
        names=users or (),
        folder=None if folder is None else folder.resolve(),
        profile=profile,
        llm=writer,
    )
    workers = min(workers, len(work))
    # Storing embeds, in one thread. One model alone has the whole machine, and the number of threads measured for it.
    share = threads or (1 if writer is None else executors.share(workers))
    alone = where is Where.processes and workers == 1 and threads is None
    work = tuple(replace(job, threads=None if alone else share) for job in work)
    done: list[Outcome] = []
    try:
        with (
            executors.executor(where.value, workers=workers, address=address, threads=share) as executor,
            screen.Steps(f"{verb}: users") as steps,
        ):
            steps(0, len(work))
            for outcome in fleet.run(work, executor):
                done.append(outcome)
                steps(len(done), len(work))
    except KeyboardInterrupt:
        _show(done, as_json, unfinished=len(work) - len(done))
        raise typer.Exit(130) from None
    _show(done, as_json, unfinished=0)
    if any(outcome.error for outcome in done):
        raise typer.Exit(1)


def _show(done: list[Outcome], as_json: bool, *, unfinished: int) -> None:
    done.sort(key=lambda outcome: outcome.user)
    failed = [outcome for outcome in done if outcome.error]
    if as_json:
        screen.print_json({"users": done, "failed": len(failed), "unfinished": unfinished})
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("user", "turns", "segments", "records", "waiting", "tokens", "seconds"):
            table.add_column(column, justify="left" if column == "user" else "right", no_wrap=True)
        for o in done:
            numbers = (o.turns, o.segments, o.records, o.pending, o.tokens)
            table.add_row(Text(screen.visible(o.user)), *map(str, numbers), f"{o.seconds:.1f}")
        screen.out.print(table)
    for outcome in failed:
        screen.err.print(f"{screen.visible(outcome.user)}: {screen.one_line(outcome.error)}", markup=False)
    total = screen.count(len(done) + unfinished, "user")
    if failed:
        screen.err.print(f"{len(failed)} of {total} failed; the same command tries them again")
    if unfinished:
        screen.err.print(f"stopped: {len(done)} of {total} are done; the same command goes on")

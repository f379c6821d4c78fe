"""`lychee models`: which models there are, which are here, and how they get here.

Owns the announcement before a download (what, how large, under which licence, from where) and its progress display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from lychee_local import screen
from lychee_local.errors import BadInput, ModelDamaged
from lychee_local.options import Home, Json
from lychee_local.settings import TURNS_PER_SEGMENT

if TYPE_CHECKING:
    from lychee_local.cards import Card, HubSource, PathSource, WheelSource

app = typer.Typer(help="Models: which there are, which are here, and how they get here.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Model names.")]
ProfileOnly = Annotated[str | None, typer.Option("--profile", help="All models of this profile.")]


@app.command("list")
def list_models(*, home: Home = None, as_json: Json = False) -> None:
    """List every model and every profile."""
    from lychee_local import cards

    known, sets = cards.cards(home), cards.profiles()
    states = {card.name: _state(card, home) for card in known}
    if as_json:
        rows = [
            {"name": c.name, "role": c.role, "bytes": c.bytes, "licence": c.licence, "tested": c.tested}
            | {"state": states[c.name]}
            for c in known
        ]
        screen.print_json({"models": rows, "profiles": sets})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "role", "size", "licence", "run by us", "on this machine"):
        table.add_column(column, justify="right" if column == "size" else "left", no_wrap=True)
    for c in known:
        table.add_row(c.name, c.role, screen.size(c.bytes), c.licence, "yes" if c.tested else "no", states[c.name])
    screen.out.print(table)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("profile", "models", ""):
        table.add_column(column, overflow="fold")
    for p in sets:
        table.add_row(p.name, ", ".join(p.models), p.description)
    screen.out.print()
    screen.out.print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="Model name.")], *, home: Home = None, as_json: Json = False) -> None:
    """Show the card of one model: files, hashes, licence, context, sources."""
    from lychee_local import cards

    card = cards.card(name, home)
    if as_json:
        screen.print_json(card)
        return
    rows = {
        "name": card.name,
        "role": card.role,
        "size": screen.size(card.bytes),
        "licence": card.licence,
        "run by us": "yes" if card.tested else "no",
        "on this machine": _state(card, home),
        "context": f"{screen.number(card.context)} tokens",
    }
    if card.role == "embedder":
        rows |= {
            "dimension": str(card.dimension),
            "pooling": str(card.pooling),
            "computed by": {"auto": "numpy where it can, else torch"}.get(card.engine, card.engine),
            "query prefix": card.query_prefix or "none",
        }
        rows |= {"calibration": str(screen.plain(card.calibration))}
    rows |= {f"file {f.path}": f"{screen.size(f.bytes)}, SHA-256 {f.sha256 or 'not known'}" for f in card.files}
    rows |= {f"source {n}": _source(source) for n, source in enumerate(card.sources, 1)}
    if card.notes:
        rows["notes"] = card.notes.strip()
    screen.out.print(screen.pairs(rows))


@app.command()
def pull(names: Names = None, *, profile: ProfileOnly = None, home: Home = None, as_json: Json = False) -> None:
    """Fetch models; an interrupted pull goes on where it stopped. Nothing else of Lychee downloads, but the demo."""
    from lychee_local import cards

    wanted = [cards.card(name, home) for name in _names(names, profile)]
    paths = fetch(wanted, home, console=screen.err)
    if as_json:
        screen.print_json(paths)
    else:
        for name, path in paths.items():
            screen.out.print(f"{name}  {path}")


@app.command()
def verify(names: Names = None, *, profile: ProfileOnly = None, home: Home = None, as_json: Json = False) -> None:
    """Read every byte of models and compare with their cards; without a name, of all that are on this machine."""
    from lychee_local import cards
    from lychee_local import pull as pulling

    chosen = _names(names, profile) if names or profile else [c.name for c in cards.cards(home)]
    reports = [pulling.verify(cards.card(name, home), home) for name in chosen]
    if not (names or profile):
        reports = [r for r in reports if r.path is not None]
    if as_json:
        screen.print_json(reports)
    else:
        for report in reports:
            screen.out.print(Text(f"{report.model}  {report.path or 'not on this machine'}", style="bold"))
            for file in report.files:
                style = {"ok": "green", "no hash known": "yellow"}.get(file.state, "red")
                screen.out.print(Text.assemble("  ", (f"{file.state:14}", style), file.path))
    bad = [r.model for r in reports if not r.ok]
    if bad:
        raise ModelDamaged(f"not as their cards say: {', '.join(bad)}", hint="lychee models pull fetches them again")


@app.command()
def where(
    name: Annotated[str, typer.Argument(help="Model name.")], *, home: Home = None, as_json: Json = False
) -> None:
    """Print the path of a model on this machine."""
    from lychee_local import cards
    from lychee_local import pull as pulling

    path = pulling.require(cards.card(name, home), home)
    if as_json:
        screen.print_json({"name": name, "path": path})
    else:
        screen.out.print(str(path), markup=False)


@app.command()
def add(
    path: Annotated[Path, typer.Argument(help="A GGUF file, or the folder of an embedder or reranker.")],
    *,
    name: Annotated[str, typer.Option("--name", help="What to call it.")],
    role: Annotated[str | None, typer.Option("--role", help="Of a folder: embedder or reranker.")] = None,
    licence: Annotated[str, typer.Option("--licence", help="What its licence is called.")] = "unknown",
    context: Annotated[int | None, typer.Option("--context", help="Tokens, where the model does not say.")] = None,
    compact: Annotated[bool, typer.Option("--compact", help="A small model: give it the short prompts.")] = False,
    query_prefix: Annotated[str, typer.Option("--query-prefix", help="What an embedder wants before a question.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a card of the same name.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Register a model of your own where it lies."""
    from lychee_local import cards
    from lychee_local import pull as pulling

    roles: tuple[cards.ModelRole, ...] = get_args(cards.ModelRole)
    if role is not None and role not in roles:
        raise BadInput(f"unknown role {role!r}", hint=f"a model is one of {', '.join(roles)}")
    card = pulling.add(
        path,
        name=name,
        home=home,
        role=role,
        licence=licence,
        context=context,
        prompt_style="compact" if compact else "full",
        query_prefix=query_prefix,
        replace=replace,
    )
    if as_json:
        screen.print_json(card)
    else:
        screen.out.print(f"{card.role} {card.name} is registered", markup=False)


@app.command()
def calibrate(
    name: Annotated[str, typer.Argument(metavar="EMBEDDER", help="An embedder of `models list`.")],
    *,
    corpus: Annotated[Path, typer.Option("--corpus", help="Conversations, in a file that `remember` reads.")],
    conversation: Annotated[
        list[str] | None, typer.Option("--conversation", help="Only this one of a LoCoMo file. Repeatable.")
    ] = None,
    turns: Annotated[
        float, typer.Option("--turns-per-segment", help="How long segments should be on average.")
    ] = TURNS_PER_SEGMENT,
    write: Annotated[bool, typer.Option("--write", help="Use it for memories that are made from now on.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Measure where an embedder's cosines lie, on conversations: what segments and similarities are judged by.

    With --write the numbers go into your own card of the embedder, or beside the card of a shipped one, below the home.
    A memory that exists keeps its own until `lychee reindex`.
    """
    from lychee_local import cards, intake
    from lychee_local import pull as pulling
    from lychee_local.calibrate import calibrate as measure

    card = cards.card(name, home)
    if card.role != "embedder":
        raise BadInput(f"{name} is a model of the role {card.role}, not embedder")
    try:
        with corpus.open("rb") as stream:
            conversations = intake.read_all(stream, conversations=tuple(conversation or ()))
    except OSError as error:
        raise BadInput(f"cannot read {str(corpus)!r}: {error.strerror}") from error
    path = pulling.require(card, home)
    from lychee_local.backends.load import load_embedder

    with screen.Steps("embedding") as steps:
        found = measure(conversations, load_embedder(card, path), turns_per_segment=turns, on_progress=steps)
    written = cards.save_calibration(card, found.calibration, home) if write else None
    if as_json:
        screen.print_json({"calibrated": found, "written": written})
    else:
        screen.calibrated(found, written)


# --- fetching --------------------------------------------------------------------------------------------------------


def fetch_profile(profile: str, home: Path | None, *, console: Console, without_llm: bool = False) -> None:
    """Bring the models of a profile here, if they are not."""
    from lychee_local import cards

    wanted = [cards.card(name, home) for name in cards.profile(profile).models]
    fetch([c for c in wanted if not (without_llm and c.role == "llm")], home, console=console, check=False)


def fetch(wanted: Sequence[Card], home: Path | None, *, console: Console, check: bool = True) -> dict[str, Path]:
    """Bring models here and return where they lie. Everything is announced before the first byte is fetched; with
    `check`, what is here already is compared with its hashes."""
    from lychee_local import pull as pulling

    found = {card.name: pulling.locate(card, home) for card in wanted}
    missing = [card for card in wanted if found[card.name] is None]
    if missing:
        console.print("To be fetched:")
        for card in missing:
            sources = "; else ".join(_source(source) for source in card.sources)
            console.print(Text(f"  {card.name}: {screen.size(card.bytes)}, licence {card.licence}, from {sources}"))
    paths: dict[str, Path] = {}
    for card in wanted:
        here = found[card.name]
        paths[card.name] = here if here is not None and not check else _pull(card, home, console)
    return paths


def _pull(card: Card, home: Path | None, console: Console) -> Path:
    from lychee_local import pull as pulling

    if not console.is_terminal:
        path = pulling.pull(card, home)
        console.print(f"{card.name} is here")
        return path
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(card.name, total=card.bytes)
        path = pulling.pull(card, home, progress=lambda done, total: bar.update(task, completed=done, total=total))
    console.print(f"{card.name} is here")
    return path


def _names(names: Sequence[str] | None, profile: str | None) -> list[str]:
    from lychee_local import cards

    chosen = [*(names or ()), *(cards.profile(profile).models if profile else ())]
    if not chosen:
        raise BadInput("no model was named", hint="lychee models list shows them; --profile laptop takes a whole set")
    return list(dict.fromkeys(chosen))


def _state(card: Card, home: Path | None) -> str:
    from lychee_local import pull as pulling

    try:
        return "yes" if pulling.locate(card, home) is not None else "no"
    except ModelDamaged:
        return "damaged"


def _source(source: PathSource | HubSource | WheelSource) -> str:
    if source.kind == "path":
        return source.path
    if source.kind == "hub":
        return f"the hub, {source.repo}"
    package = source.package.format(part=1)
    several = f" and {source.parts - 1} more" if source.parts > 1 else ""
    return f"the package index, {package}{several} ({screen.size(source.download_bytes)})"

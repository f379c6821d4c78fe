"""The options that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

User = Annotated[str, typer.Option("--user", "-u", help="Whose memory.")]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="LYCHEE_HOME",
        show_default="the platform's data folder",
        help="The folder of models and memories.",
    ),
]
Profile = Annotated[
    str,
    typer.Option("--profile", envvar="LYCHEE_PROFILE", help="Which set of models; `lychee models list` shows them."),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON document.")]
Llm = Annotated[
    str | None,
    typer.Option("--llm", envvar="LYCHEE_LLM", show_default="the profile's", help="A language model of `models list`."),
]
NoLLM = Annotated[bool, typer.Option("--no-llm", help="Work without a language model, by rules.")]
Mode = Annotated[
    str, typer.Option("--mode", help="How evidence is found: lychee, chain (turns alone, in chains) or lychee+chain.")
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Show what each step found, kept and dropped, why, and how long it took.")
]
Items = Annotated[int | None, typer.Option("-k", help="How many items of evidence.", show_default="15")]
Now = Annotated[str | None, typer.Option("--now", help="When the question is asked.", show_default="now")]
Session = Annotated[str | None, typer.Option("--session", help="Only this session.")]
Speaker = Annotated[str | None, typer.Option("--speaker", help="Only what this speaker said.")]
Kind = Annotated[str | None, typer.Option("--kind", help="Only records of this type: fact, preference, event, ...")]
Since = Annotated[str | None, typer.Option("--since", help="Only what was said on or after this day.")]
Until = Annotated[str | None, typer.Option("--until", help="Only what was said on or before this day: as of then.")]

"""The folder of a run, which a stranger can read:

    run.json                what was run, with which models, settings and versions, on which data and machine
    construction.jsonl      a line for each conversation: what was stored, and what it cost
    peers/                  what a peer and the server it asks wrote to their logs
    questions/ID.jsonl      a line for each question: plan, evidence, answer, scores, tokens, seconds, or the error
    summary.json            the table

Owns its files. A line is on disk before the next question is asked; one that a kill cut goes when the run goes on.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, sha256
from benchmarks.methods import method
from benchmarks.models import Models
from benchmarks.setups import Places, Setup

Line = dict[str, Any]


def claim(setup: Setup, places: Places) -> None:
    """Make the folder this run's, or see that it is.

    Raises:
        ValueError: it holds another run, or this one was begun with other versions or on another machine.
        PeerFailed: the method is a peer that is not installed.
    """
    models = Models(setup.profile, places.models)
    asked = method(setup.method)
    mine: Line = {
        "setup": asdict(setup),
        "settings": asdict(asked.settings),
        "data": sha256(Path(setup.data)),
        "models": models.digests(),
        "environment": environment(),
    }
    if asked.peer is not None:
        mine["peer"] = asked.peer.versions(places.peer_python) | {"context": places.peer_context}
    mine = json.loads(json.dumps(mine))
    path = places.out / "run.json"
    (places.out / "questions").mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(path, mine)
        return
    theirs = json.loads(path.read_text(encoding="utf-8"))
    differ = sorted(name for name in mine if mine[name] != theirs.get(name))
    if differ:
        raise ValueError(
            f"{places.out} holds a run with another {', '.join(differ)} (see its run.json); choose another --out"
        )


def kept(out: Path, conversation: str) -> dict[str, Line]:
    """The lines of a conversation by question; of several for one question the last. A line that was cut goes."""
    path = questions(out, conversation)
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return {line["id"]: line for line in map(json.loads, whole.decode().splitlines())}


def lines(out: Path) -> list[Line]:
    """All lines of a run, by conversation.

    Raises:
        ValueError: there is no run in the folder.
    """
    if not (out / "run.json").exists():
        raise ValueError(f"{out} holds no run; `python -m benchmarks run` makes one")
    return [line for path in sorted((out / "questions").glob("*.jsonl")) for line in kept(out, path.stem).values()]


def questions(out: Path, conversation: str) -> Path:
    return out / "questions" / f"{conversation}.jsonl"


def append(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, value: Line) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(path)

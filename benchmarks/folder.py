"""The folder of a run, which a stranger can read:

    run.json                what was run, with which models, settings and versions, on which data and machine
    construction.jsonl      a line for each conversation: what was stored, and what it cost
    peers/                  what a peer and the server it asks wrote to their logs
    questions/ID.jsonl      a line for each question: plan, evidence, answer, scores, tokens, seconds, or the error
    summary.json            the table

Owns its files. A line is on disk before the next question is asked; one that a kill cut goes when the run goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.environment import environment, sha256
from benchmarks.methods import method
from benchmarks.models import Models
from benchmarks.setups import Places, Setup

Line = dict[str, Any]

# What every line about a question has, be it an error.
ASKED = ("id", "conversation", "category", "question", "answer", "gold", "error")


@contextmanager
def claimed(setup: Setup, places: Places) -> Iterator[None]:
    """Inside, the folder is this run's and no other process's.

    Raises:
        ValueError: it holds another run (see `claim`), or another process runs this one.
    """
    claim(setup, places)
    with (places.out / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{places.out} is being run by another process; choose another --out") from error
        yield


def claim(setup: Setup, places: Places) -> None:
    """Make the folder this run's, or see that it is.

    Raises:
        ValueError: it holds another run, or this one was begun with other versions or on another machine.
        PeerFailed: the method is a peer that is not installed.
    """
    mine = described(setup, places)
    path = places.out / "run.json"
    (places.out / "questions").mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(path, mine)
        return
    theirs = json.loads(path.read_text(encoding="utf-8"))
    differ = [name for name in mine if mine[name] != theirs.get(name)]
    if "setup" in differ:
        options = theirs.get("setup", {})
        changed = [f"{name} ({options.get(name)}, not {mine['setup'][name]})" for name in mine["setup"]
                   if mine["setup"][name] != options.get(name)]  # fmt: skip
        differ = [name for name in differ if name != "setup"] + changed
    if differ:
        raise ValueError(
            f"{places.out} holds a run with another {', '.join(differ)} (see its run.json); choose another --out"
        )


def described(setup: Setup, places: Places) -> Line:
    """What run.json says of a run that begins here and now.

    Raises:
        ValueError: there is no such method.
        OSError: the data cannot be read.
        PeerFailed: the method is a peer that is not installed.
    """
    asked = method(setup.method)
    said: Line = {
        "setup": asdict(setup),
        "settings": asdict(asked.settings),
        "data": sha256(Path(setup.data)),
        "models": Models(setup.profile, places.models).digests(),
        "environment": environment(places.threads),
    }
    if asked.peer is not None:
        said["peer"] = asked.peer.versions(places.peer_python) | {"context": places.peer_context}
    as_read: Line = json.loads(json.dumps(said))
    return as_read


def answered(out: Path, conversation: str) -> dict[str, Line]:
    """The lines of a conversation that are no errors, by question: what is not asked again."""
    return {i: line for i, line in kept(out, conversation).items() if not line["error"]}


def kept(out: Path, conversation: str) -> dict[str, Line]:
    """The lines of a conversation by question; of several for one question the last."""
    return {line["id"]: line for line in kept_lines(questions(out, conversation))}


def kept_lines(path: Path) -> list[Line]:
    """The lines of a file that is gone on with, none where there is no file; a last line that was cut goes.

    Raises:
        ValueError: one is no JSON object.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return whole_lines(path)


def about(out: Path) -> Line:
    """The run.json of a folder.

    Raises:
        ValueError: there is no run in the folder, or the file is broken.
    """
    path = out / "run.json"
    if not path.exists():
        raise ValueError(f"{out} holds no run; `python -m benchmarks run` makes one")
    try:
        found: Line = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run the same into another --out") from error
    return found


def setup_of(said: Line) -> Setup:
    """What the run of a run.json was asked to do.

    Raises:
        ValueError: another version of these benchmarks wrote it, with options that this one does not know.
    """
    if unknown := said["setup"].keys() - {each.name for each in fields(Setup)}:
        raise ValueError(f"the run has the options {', '.join(sorted(unknown))}, which this version does not know")
    return TypeAdapter(Setup).validate_python(said["setup"])


def lines(out: Path) -> list[Line]:
    """All lines of a run, by conversation; of several for one question the last. Only reads: the run may be going on.

    Raises:
        ValueError: there is no run in the folder, or a line in it is not one that a run has written.
    """
    about(out)
    paths = sorted((out / "questions").glob("*.jsonl"))
    return list({line["id"]: line for path in paths for line in whole_lines(path, *ASKED)}.values())


def whole_lines(path: Path, *keys: str) -> list[Line]:
    """The lines of a file, but for a last one that was cut.

    Raises:
        ValueError: one is no JSON object, or has not all the `keys`.
    """
    found: list[Line] = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; delete the line and run the same again") from error
        if not isinstance(line, dict) or not line.keys() >= set(keys):
            raise ValueError(
                f"{path}, line {number}: not an object with {', '.join(keys) or 'keys'};"
                " delete the line and run the same again"
            )
        found.append(line)
    return found


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

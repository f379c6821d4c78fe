"""A run repeated: its questions asked again, and where the answers to them are not the same.

    python -m benchmarks verify RUN [--sample N --seed S] [--fresh] [--data FILE]
    python -m benchmarks verify RUN --against RUN

Works in a folder of its own, which goes afterwards; the run is only read. Without --fresh the memory that the run built
is used again, with it the memory is built anew. What is compared: evidence and its order, plan, reply, scores, tokens,
notes, errors, and with --fresh what was stored. Times never are, nor how much of a prompt was cached, which depends on
what was asked before. Ends with exit status 1 where anything differs; what is another here than where the run was made
is named first, and is no difference by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import folder
from benchmarks.asking import ask_all, store_name
from benchmarks.datasets import balanced
from benchmarks.folder import Line
from benchmarks.markdown import plain
from benchmarks.methods import method
from benchmarks.models import Models
from benchmarks.peers import conversation as peers
from benchmarks.questions import Question
from benchmarks.results import flat
from benchmarks.setups import Places, Setup

COMPARED = ("error", "plan", "evidence", "reply", "cited", "scores", "evidence_tokens", "notes")
CALL = ("purpose", "prompt", "output", "outcome")
BUILT = ("turns", "segments", "reasons", "records", "construction_tokens")


@dataclass(frozen=True, slots=True)
class Difference:
    """What the run says of a part of a question or a conversation, and what came out now."""

    of: str
    part: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{plain(self.of)}: {self.part}: was {plain(self.was)}; is {plain(self.now)}"


@dataclass(frozen=True, slots=True)
class Checked:
    """`elsewhere` is what is not as in the run of data, settings, models, environment; `fresh` says that the memory was
    built anew."""

    found: tuple[Difference, ...]
    elsewhere: tuple[str, ...]
    fresh: bool


def elsewhere(was: Line, now: Line) -> tuple[str, ...]:
    """What is another in one run.json than in the other: data, settings, models, environment."""
    one, other = flat(was), flat(now)
    return tuple(
        f"{key}: was {one.get(key, '-')}; is {other.get(key, '-')}"
        for key in dict.fromkeys((*one, *other))
        if one.get(key, "-") != other.get(key, "-")
    )


def repeat(setup: Setup, places: Places, lines: Mapping[str, Line], asked: Sequence[str]) -> Iterator[Line]:
    """The lines of the questions `asked`, asked again in the folder `places.out`."""
    (places.out / "questions").mkdir(parents=True, exist_ok=True)
    names = {lines[name]["conversation"] for name in asked}
    for conversation in setup.read(lambda _: None):
        if conversation.id in names:
            yield from ask_all(setup, places, conversation, set(asked))


def differences(was: Line, now: Line) -> tuple[Difference, ...]:
    """Of one question, part by part; evidence by id first, and by what it says where the ids are the same."""
    found = []
    for part in COMPARED:
        one, other = was.get(part), now.get(part)
        if one == other:
            continue
        if part == "evidence" and one is not None and other is not None:
            ids, others = [e["id"] for e in one], [e["id"] for e in other]
            part, one, other = ("evidence ids", ids, others) if ids != others else _first_apart(one, other)
        if part == "scores" and one is not None and other is not None:
            names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
            one, other = ({name: each.get(name) for name in names} for each in (one, other))
        found.append(Difference(was["id"], part, _told(one), _told(other)))
    calls, now_calls = ([[u[key] for key in CALL] for u in line.get("usage", [])] for line in (was, now))
    if calls != now_calls:
        found.append(Difference(was["id"], "tokens", _told(calls), _told(now_calls)))
    return tuple(found)


def _first_apart(was: list[Line], now: list[Line]) -> tuple[str, Line, Line]:
    one, other = next((one, other) for one, other in zip(was, now, strict=True) if one != other)
    keys = [key for key in one if one[key] != other.get(key)]
    return f"evidence {one['id']}", {key: one[key] for key in keys}, {key: other.get(key) for key in keys}


def _built(was: Path, now: Path) -> tuple[Difference, ...]:
    """What was stored of each conversation that was built again."""
    first, second = (
        {x["conversation"]: x for x in folder.whole_lines(out / "construction.jsonl")} for out in (was, now)
    )
    return tuple(
        Difference(name, part, _told(first[name].get(part)), _told(second[name].get(part)))
        for name in second
        if name in first
        for part in BUILT
        if first[name].get(part) != second[name].get(part)
    )


def _told(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- the command ------------------------------------------------------------------------------------------------------


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser("verify", help="repeat a run, or a sample of it, and say where it differs")
    verify.add_argument("run", type=Path, help="folder of the run")
    verify.add_argument("--sample", type=int, default=None, help="so many questions, as many of each category")
    verify.add_argument("--seed", type=int, default=0, help="which sample")
    verify.add_argument("--against", type=Path, default=None, help="ask nothing: compare with this run, token by token")
    verify.add_argument("--fresh", action="store_true", help="build the memory anew")
    verify.add_argument("--data", type=Path, default=None, help="where the data set's file is now")
    verify.add_argument("--corrections", type=Path, default=None, help="LoCoMo: where the corrected answer key is now")
    verify.add_argument("--stores", type=Path, default=None, help="memories that runs share; default: beside RUN")
    verify.add_argument("--home", type=Path, default=None, help="where the models are")
    verify.add_argument("--peer-python", type=Path, default=None, help="as in `run`")
    verify.add_argument("--server-python", type=Path, default=None, help="as in `run`")
    verify.set_defaults(call=verify_main)


def verify_main(options: argparse.Namespace) -> dict[str, object]:
    """
    Raises:
        ValueError: a folder holds no run, or the data of the run cannot be used.
        ModelMissing: a model of the run is not on this machine.
    """
    lines = {line["id"]: line for line in folder.lines(options.run)}
    asked = _sample(lines, options.sample, options.seed)
    checked = (_again if options.against is None else _against)(options, lines, asked)
    differ = {each.of for each in checked.found} & lines.keys()
    print("\n".join(map(str, checked.found)), end="\n" if checked.found else "")
    print(f"{len(asked)} questions repeated, {len(differ)} of them differ; {len(checked.found)} differences in all")
    return {
        "run": str(options.run),
        "questions": len(asked),
        "differ": len(differ),
        "same": not checked.found,
        "fresh": checked.fresh,
        "differences": [str(each) for each in checked.found],
        "not as in the run": list(checked.elsewhere),
    }


def _against(options: argparse.Namespace, lines: Mapping[str, Line], asked: Sequence[str]) -> Checked:
    """The questions as another run has them."""
    other = _told_elsewhere(folder.about(options.run), folder.about(options.against))
    theirs = folder.lines(options.against)
    found = _found(options.run, options.against, lines, asked, (line for line in theirs if line["id"] in asked))
    more = (Difference(x["id"], "question", "not asked", "asked") for x in theirs if x["id"] not in lines)
    return Checked((*found, *(() if options.sample else more)), other, fresh=False)


def _again(options: argparse.Namespace, lines: Mapping[str, Line], asked: Sequence[str]) -> Checked:
    """The questions asked again."""
    about = folder.about(options.run)
    setup = folder.setup_of(about)
    if options.data is not None:
        setup = replace(setup, data=str(options.data.resolve()))
    if options.corrections is not None:
        setup = replace(setup, corrections=str(options.corrections.resolve()))
    shared = options.stores or options.run.resolve().parent / "stores"
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        out = Path(scratch) / "run"
        threads = about["environment"]["threads"].get("language model")
        places = Places(out, shared, options.home, options.peer_python, options.server_python, threads=threads)
        fresh = options.fresh or not _is_built(setup, places)
        places = replace(places, stores=Path(scratch) / "stores") if fresh else places
        other = _told_elsewhere(about, folder.described(setup, places))
        if fresh and not options.fresh:
            print(f"the memory of this run is not in {shared}: it is built anew")
        again = repeat(setup, places, lines, asked)
        return Checked(_found(options.run, places.out, lines, asked, again), other, fresh)


def _told_elsewhere(was: Line, now: Line) -> tuple[str, ...]:
    found = elsewhere(was, now)
    for each in found:
        print(f"not as in the run: {each}")
    return found


def _found(
    run: Path, out: Path, lines: Mapping[str, Line], asked: Sequence[str], again: Iterable[Line]
) -> tuple[Difference, ...]:
    """All differences of `run` from what the folder `out` holds of it `again`, told one by one to whoever waits."""
    found: list[Difference] = []
    met: set[str] = set()
    for line in again:
        mine = differences(lines[line["id"]], line)
        found.extend(mine)
        met.add(line["id"])
        print(f"{line['id']}: {'differs' if mine else 'same'}", file=sys.stderr, flush=True)
    gone = (Difference(name, "question", "asked", "not asked") for name in asked if name not in met)
    return (*found, *gone, *_built(run, out))


def _is_built(setup: Setup, places: Places) -> bool:
    """Whether the memory of a run is among those that runs share."""
    asked, models = method(setup.method), Models(setup.profile, places.models)
    peer = asked.peer
    name = store_name(setup, asked, models) if peer is None else peers.store_name(peer, setup, places, models)
    return (places.stores / name).is_dir()


def _sample(lines: Mapping[str, Line], sample: int | None, seed: int) -> list[str]:
    """The ids of a sample of the run's questions, drawn as `run --sample` draws.

    Raises:
        ValueError: there is nothing to repeat, or the sample is empty.
    """
    if not lines:
        raise ValueError("the run has no question yet; go on with it first")
    if sample is None:
        return list(lines)
    if sample < 1:
        raise ValueError(f"sample is {sample}; ask for one question at least")
    every = [Question(x["id"], x["question"], x["answer"], x["category"], tuple(x["gold"])) for x in lines.values()]
    return [question.id for question in balanced(every, sample, seed)]

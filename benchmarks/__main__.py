"""Run a benchmark: prints a table for people, then one JSON line for programs.

python -m benchmarks run locomo|longmemeval|lines --data FILE --method NAME [--no-llm] --out DIR
    [--conversations ID ...] [--categories NAME ...] [--sample N --seed S] [--limit N] [--budget TOKENS]
    [--workers N] [--executor processes|ray] [--address HOST:PORT] [--threads N]
    [--peer-python PYTHON] [--server-python PYTHON] [--peer-patience SECONDS]
python -m benchmarks construct locomo --data FILE [--conversations ID ...] [--sessions N]
    --encoder verbatim|rules|CARD [--prompt ours|plain] [--without PART ...] [--width N] --out DIR
python -m benchmarks methods
python -m benchmarks judge [RUN...] --judge rule|local:CARD|http://127.0.0.1:PORT/v1#MODEL [--same-judge]
python -m benchmarks report RUN... [--out DIR] [--no-plots]
python -m benchmarks compare RUN RUN
python -m benchmarks verify RUN [--sample N --seed S] [--fresh] [--against RUN]

A run that was killed goes on where it was, if it is started again with the same --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import construction, datasets, encoders, judging, locomo, methods, report, runs, tables, verify
from benchmarks.environment import environment
from benchmarks.models import load
from benchmarks.questions import warn
from benchmarks.setups import Places, Setup
from benchmarks.vectors import StoredVectors
from lychee_local.backends.load import load_embedder
from lychee_local.cards import default_home
from lychee_local.errors import LycheeError
from lychee_local.executors import Executor, executor, share
from lychee_local.settings import EncodeSettings

# The embedder under which facts count as covered.
EMBEDDER = "all-minilm-l6-v2"

Result = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    call: Callable[[argparse.Namespace], Result | None] = options.call
    try:
        result = call(options)
    except (ValueError, OSError, sqlite3.Error, LycheeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    if result is None:
        return 0
    print(json.dumps(result | {"environment": environment()}))
    return 1 if result.get("same") is False or result.get("errors") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark.")
    commands = parser.add_subparsers(required=True)
    listed = commands.add_parser("methods", help="list the methods that `run` knows")
    listed.set_defaults(call=_methods)
    run = commands.add_parser("run", help="one method asked the questions of a data set")
    run.set_defaults(call=_run)
    construct = commands.add_parser("construct", help="records of one encoder: coverage, faults, cost")
    construct.set_defaults(call=_construct)
    judging.add_command(commands, _say)
    report.add_commands(commands)
    verify.add_commands(commands)
    run.add_argument("layout", choices=list(datasets.LAYOUTS), help="how the data file is written")
    construct.add_argument("layout", choices=["locomo"])
    for command in (run, construct):
        command.add_argument("--data", type=Path, required=True, help="the data set's file")
        command.add_argument("--conversations", nargs="*", default=[], help="ids; default: all in the file")
        command.add_argument("--home", type=Path, default=None, help="where the models are")
        command.add_argument("--out", type=Path, required=True, help="folder of the run")
    _options_of_run(run)
    construct.add_argument("--vectors", type=Path, default=None, help="file of vectors that runs share; default: OUT")
    construct.add_argument("--sessions", type=int, default=None, help="only the first N sessions")
    construct.add_argument("--encoder", required=True, help="verbatim, rules, or a model of `lychee models list`")
    construct.add_argument("--prompt", choices=["ours", "plain"], default="ours")
    construct.add_argument("--without", nargs="*", choices=encoders.PARTS, default=[], help="parts of ours left out")
    construct.add_argument("--width", type=int, default=EncodeSettings().width, help="sessions encoded side by side")
    return parser


def _options_of_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--method", default="lychee", help="see `python -m benchmarks methods`")
    run.add_argument("--profile", default="laptop", help="the models; see `lychee models list`")
    run.add_argument("--no-llm", action="store_true", help="records by rules, and only the evidence is looked at")
    run.add_argument("--records", choices=["model", "rules"], default="model", help="who encodes")
    run.add_argument("--no-answers", action="store_true", help="only the evidence is looked at")
    run.add_argument("--budget", type=int, default=1_800, help="tokens of evidence shown per question; 0: no limit")
    run.add_argument("--items", type=int, default=None, help="items of evidence; default: the method's own number")
    run.add_argument("--categories", nargs="*", default=[], help="only questions of these")
    run.add_argument("--sample", type=int, default=None, help="so many questions, as many of each category")
    run.add_argument("--seed", type=int, default=0, help="which sample")
    run.add_argument("--limit", type=int, default=None, help="only the first N questions")
    run.add_argument("--adversarial", action="store_true", help="LoCoMo: questions without an answer too")
    run.add_argument("--corrections", type=Path, default=None, help="LoCoMo: a corrected answer key")
    run.add_argument("--stores", type=Path, default=None, help="memories that runs share; default: beside OUT")
    run.add_argument("--peer-python", type=Path, default=None, help="mem0, llamaindex: the python that has them")
    run.add_argument("--server-python", type=Path, default=None, help="the python that has the group peer-server")
    run.add_argument("--peer-patience", type=float, default=1_800.0, help="seconds that a reply of a peer may take")
    run.add_argument("--workers", type=int, default=1, help="conversations at a time, each in a process")
    run.add_argument("--executor", choices=["processes", "ray"], default="processes", help="where the work runs")
    run.add_argument("--address", default=None, help="the head of a Ray cluster, HOST:PORT; default: one of our own")
    run.add_argument("--threads", type=int, default=None, help="of a model; default: all, or those of its worker")


def _methods(_: argparse.Namespace) -> None:
    wide = max(map(len, methods.METHODS))
    print("\n".join(f"{name:<{wide}}  {each.about}" for name, each in methods.METHODS.items()))


def _run(options: argparse.Namespace) -> Result:
    setup = Setup(
        layout=options.layout,
        data=str(options.data.resolve()),
        method=options.method,
        profile=options.profile,
        records="rules" if options.no_llm else options.records,
        answers=not (options.no_llm or options.no_answers),
        budget=options.budget or None,
        items=options.items,
        conversations=tuple(options.conversations),
        categories=tuple(options.categories),
        sample=options.sample,
        seed=options.seed,
        limit=options.limit,
        adversarial=options.adversarial,
        corrections=None if options.corrections is None else str(options.corrections.resolve()),
    )
    out = options.out.resolve()  # other machines stand in other folders
    threads = options.threads or share(1 if options.executor == "ray" else options.workers)
    places = Places(
        out,
        out.parent / "stores" if options.stores is None else options.stores.resolve(),
        None if options.home is None else options.home.resolve(),
        options.peer_python,
        options.server_python,
        peer_patience=options.peer_patience,
        threads=threads,
    )
    with _executor(options, threads) as executor:
        summary = runs.run(setup, places, executor=executor, say=_say, on_problem=warn)
    tables.show(summary)
    return summary


@contextmanager
def _executor(options: argparse.Namespace, threads: int) -> Iterator[Executor | None]:
    """Where the questions are asked; None for this process, whose lines are told one by one."""
    with executor(options.executor, workers=options.workers, address=options.address, threads=threads) as found:
        yield None if options.executor == "processes" and options.workers == 1 else found


def _say(told: str) -> None:
    print(told, file=sys.stderr, flush=True)


def _construct(options: argparse.Namespace) -> Result:
    setup = encoders.Setup(
        options.encoder, options.prompt, tuple(options.without), options.sessions, width=options.width
    )
    encoders.claim(options.out, setup)
    home = options.home or default_home()
    embedder = StoredVectors(load(EMBEDDER, home, load_embedder), options.vectors or options.out / "vectors.sqlite")
    rows: dict[str, construction.Measured] = {}
    with (options.out / "faults.jsonl").open("w", encoding="utf-8") as lines:
        for conversation in locomo.read(options.data, options.conversations, on_problem=warn):
            built = encoders.build(
                conversation.id, conversation.messages, setup, options.out, embedder=embedder, models_home=home
            )
            rows[conversation.id], faults = construction.measure(built, conversation.facts, embedder.embed)
            for fault in faults:
                line = {"fault": fault.kind, "found": fault.found, "record": fault.record.text}
                lines.write(json.dumps(line | {"turns": fault.record.turns, "segment": fault.record.segment}) + "\n")
    total = sum(rows.values(), construction.Measured())
    construction.show(rows | {"all": total})
    conversations = {name: measured.row() for name, measured in rows.items()}
    return dataclasses.asdict(setup) | {"conversations": conversations, "all": total.row()}


if __name__ == "__main__":
    sys.exit(main())

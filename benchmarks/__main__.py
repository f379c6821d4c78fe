"""Run a benchmark: prints a table for people, then one JSON line for programs.

python -m benchmarks run locomo --data FILE [--conversations ID ...] --method NAME --no-llm --out DIR
python -m benchmarks construct locomo --data FILE [--conversations ID ...] [--sessions N]
    --encoder verbatim|rules|CARD [--prompt ours|plain] [--without PART ...] [--width N] --out DIR
python -m benchmarks segments locomo --data FILE [--conversations ID ...] --threshold 0.3 ... --out DIR
python -m benchmarks methods

A run of `construct` or `segments` that was killed goes on where it was, if it is started again with the same --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

from benchmarks import construction, encoders, evidence, locomo, segments
from benchmarks.questions import warn
from benchmarks.vectors import StoredVectors
from lychee_local import Memory, Settings, __version__
from lychee_local.cards import default_home
from lychee_local.errors import LycheeError
from lychee_local.settings import EncodeSettings

# The embedder under which facts count as covered, and at which the thresholds are looked at.
EMBEDDER = "all-minilm-l6-v2"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "methods":
        print("\n".join(evidence.METHODS))
        return 0
    try:
        result = {"run": _run, "construct": _construct, "segments": _segments}[options.command](options)
    except (ValueError, OSError, LycheeError) as error:
        print(error, file=sys.stderr)
        return 2
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "version": __version__}
    print(json.dumps(result | machine))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run a benchmark.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("methods", help="list the methods that `run` knows")
    run = commands.add_parser("run", help="evidence recall of one method")
    construct = commands.add_parser("construct", help="records of one encoder: coverage, faults, cost")
    cuts = commands.add_parser("segments", help="segments, and evidence recall with records by rules, by threshold")
    for command in (run, construct, cuts):
        command.add_argument("dataset", choices=["locomo"])
        command.add_argument("--data", type=Path, required=True, help="the data set's file")
        command.add_argument("--conversations", nargs="*", default=[], help="ids; default: all in the file")
        command.add_argument("--home", type=Path, default=None, help="where the models are")
        command.add_argument("--out", type=Path, required=True, help="folder for the stores and the result lines")
    for command in (construct, cuts):
        command.add_argument("--vectors", type=Path, default=None, help="file of vectors that runs share; default: OUT")
    for command in (run, cuts):
        command.add_argument("--budget", type=int, default=1_800, help="tokens of evidence shown per question")
        command.add_argument("--k", type=int, default=60, help="items recalled before the budget cuts")
    run.add_argument("--method", default="lychee", help="see `python -m benchmarks methods`")
    run.add_argument("--no-llm", action="store_true", help="records by rules")
    run.add_argument("--profile", default="laptop")
    construct.add_argument("--sessions", type=int, default=None, help="only the first N sessions")
    construct.add_argument("--encoder", required=True, help="verbatim, rules, or a model of `lychee models list`")
    construct.add_argument("--prompt", choices=["ours", "plain"], default="ours")
    construct.add_argument("--without", nargs="*", choices=encoders.PARTS, default=[], help="parts of ours left out")
    construct.add_argument("--width", type=int, default=EncodeSettings().width, help="sessions encoded side by side")
    cuts.add_argument("--threshold", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.6, 0.7])
    return parser


def _open(options: argparse.Namespace, user: str, settings: Settings) -> Memory:
    return Memory.open(
        user,
        home=options.out / "home",
        models_home=options.home or default_home(),
        profile=options.profile,
        llm=None if options.no_llm else "auto",
        settings=settings,
    )


def _run(options: argparse.Namespace) -> dict[str, object]:
    settings = evidence.settings(options.method, options.budget)
    found: list[evidence.Found] = []
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{options.method}.jsonl").open("w", encoding="utf-8") as lines:
        for conversation in locomo.read(options.data, options.conversations, on_problem=warn):
            with _open(options, conversation.id, settings) as memory:
                memory.remember(conversation.messages)
                memory.flush()
                found_here = evidence.measure(memory, conversation, budget=options.budget, k=options.k)
            for f in found_here:
                lines.write(json.dumps({"id": f.question.id, "recall": f.recall, "tokens": round(f.tokens)}) + "\n")
            found += found_here
    categories = [name for name in locomo.CATEGORIES.values() if name != "adversarial"]
    table = {"all": found} | {name: [f for f in found if f.question.category == name] for name in categories}
    print(f"{'category':<10} {'questions':>9} {'recall %':>9} {'all found %':>12}")
    for name, part in table.items():
        if part:
            full = 100 * mean(f.recall == 1.0 for f in part)
            print(f"{name:<10} {len(part):>9} {100 * mean(f.recall for f in part):>9.1f} {full:>12.1f}")
    seconds = sorted(f.seconds for f in found)
    return {
        "method": options.method,
        "budget": options.budget,
        "evidence_recall": {n: round(100 * mean(f.recall for f in p), 1) for n, p in table.items() if p},
        "all_evidence": {n: round(100 * mean(f.recall == 1.0 for f in p), 1) for n, p in table.items() if p},
        "evidence_tokens": round(mean(f.tokens for f in found)),
        "seconds": {"median": round(median(seconds), 4), "p90": round(quantiles(seconds, n=10)[-1], 4)},
    }


def _construct(options: argparse.Namespace) -> dict[str, object]:
    setup = encoders.Setup(
        options.encoder, options.prompt, tuple(options.without), options.sessions, width=options.width
    )
    encoders.claim(options.out, setup)
    home = options.home or default_home()
    embedder = _stored_vectors(options)
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


def _segments(options: argparse.Namespace) -> dict[str, object]:
    options.out.mkdir(parents=True, exist_ok=True)
    embedder = _stored_vectors(options)
    conversations = tuple(locomo.read(options.data, options.conversations, on_problem=warn))
    rows: dict[str, dict[str, object]] = {}
    for way, settings in segments.ways(options.threshold).items():
        cuts = [
            segments.cut(
                c, c.messages, way, settings, options.out, embedder=embedder, budget=options.budget, k=options.k
            )
            for c in conversations
        ]
        rows[way] = segments.row(cuts)
    segments.show(rows)
    return {"budget": options.budget, "embedder": embedder.name, "cut_at": rows}


def _stored_vectors(options: argparse.Namespace) -> StoredVectors:
    embedder = encoders.embedder(EMBEDDER, options.home or default_home())
    return StoredVectors(embedder, options.vectors or options.out / "vectors.sqlite")


if __name__ == "__main__":
    sys.exit(main())

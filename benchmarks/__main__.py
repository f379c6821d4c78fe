"""Run a benchmark: prints a table for people, then one JSON line for programs.

python -m benchmarks run locomo --data FILE [--conversations ID ...] --method NAME --no-llm --out DIR
python -m benchmarks construct locomo --data FILE --conversations ID [--sessions N] --profile NAME --out DIR
python -m benchmarks methods
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

from benchmarks import construction, evidence, locomo
from lychee_local import Memory, Settings, __version__
from lychee_local.cards import default_home
from lychee_local.intake import read_locomo


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "methods":
        print("\n".join(evidence.METHODS))
        return 0
    try:
        result = _run(options) if options.command == "run" else _construct(options)
    except (ValueError, OSError) as error:
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
    construct = commands.add_parser("construct", help="segments, records, tokens and coverage of one conversation")
    for command in (run, construct):
        command.add_argument("dataset", choices=["locomo"])
        command.add_argument("--data", type=Path, required=True, help="the data set's file")
        command.add_argument("--conversations", nargs="*", default=[], help="ids; default: all in the file")
        command.add_argument("--no-llm", action="store_true", help="records by rules")
        command.add_argument("--profile", default="laptop")
        command.add_argument("--home", type=Path, default=None, help="where the models are")
        command.add_argument("--out", type=Path, required=True, help="folder for the stores and the result lines")
    run.add_argument("--method", default="lychee", help="see `python -m benchmarks methods`")
    run.add_argument("--budget", type=int, default=1_800, help="tokens of evidence shown per question")
    run.add_argument("--k", type=int, default=60, help="items recalled before the budget cuts")
    construct.add_argument("--sessions", type=int, default=None, help="only the first N sessions")
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
    settings = evidence.settings(options.method)
    found: list[evidence.Found] = []
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"{options.method}.jsonl").open("w", encoding="utf-8") as lines:
        for conversation in locomo.load(options.data, options.conversations):
            with _open(options, conversation.id, settings) as memory:
                memory.remember(read_locomo(options.data, conversation.id))
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
    (conversation,) = locomo.load(options.data, options.conversations)
    messages = read_locomo(options.data, conversation.id)
    sessions = list(dict.fromkeys(m.session for m in messages))[: options.sessions]
    began = time.perf_counter()
    with _open(options, conversation.id, Settings()) as memory:
        memory.remember([m for m in messages if m.session in sessions], encode=False)
        stored = time.perf_counter() - began
        memory.flush(on_progress=construction.show)
        result = construction.summary(memory, conversation)
    return result | {"seconds_storing": round(stored, 1), "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())

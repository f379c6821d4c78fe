"""Encoding several segments side by side against one after the other: the same requests, the same model, one run.

    python -m benchmarks.side_by_side MODEL.gguf --data locomo10.json --conversation ID [--segments 8] [--widths 1 4 8]

The first turns of as many sessions are encoded at each width, with `--turns` turns a segment, no reference context.
Prints a table and then one JSON line. Width 1 is the path of a single call; texts may differ from its texts where two
tokens were nearly as likely, and how many do is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from lychee_local.backends import Job
from lychee_local.backends.jobs import run_all
from lychee_local.backends.llama import LlamaLLM
from lychee_local.encode import Encoded, encode
from lychee_local.intake import read_locomo
from lychee_local.settings import EncodeSettings
from lychee_local.types import Message, Segment, Turn

SETTINGS = EncodeSettings()


def parts(messages: Iterable[Message], turns: int) -> Iterator[tuple[Segment, list[Turn]]]:
    """Every session in segments of `turns` turns, the last with what is left."""
    for session, group in groupby(messages, key=lambda message: message.session or ""):
        said = [Turn(session, i, m.text, m.role, m.speaker, m.at, m.ref) for i, m in enumerate(group)]
        for start in range(0, len(said), turns):
            part = said[start : start + turns]
            yield Segment(session, start, start + len(part) - 1, "session_flush", 0, len(part), 1.0), part


def segments(data: Path, conversation: str, number: int, turns: int) -> list[tuple[Segment, list[Turn]]]:
    """The first `turns` turns of each of the first `number` sessions."""
    cut = parts(read_locomo(data, conversation), turns)
    return list(islice((part for part in cut if part[0].start == 0), number))


def job(llm: LlamaLLM, segment: Segment, turns: Sequence[Turn]) -> Job[tuple[str, Encoded]]:
    made = yield from encode(segment, turns, llm=llm, context="", settings=SETTINGS)
    return segment.id, made


def measure(
    llm: LlamaLLM, chosen: Sequence[tuple[Segment, list[Turn]]], width: int
) -> tuple[dict[str, Any], dict[str, Encoded]]:
    """What one pass cost, and what it gave by segment."""
    began = time.perf_counter()
    made = dict(run_all((job(llm, segment, turns) for segment, turns in chosen), llm, width=width))
    seconds = time.perf_counter() - began
    usage = [use for encoded in made.values() for use in encoded.usage]
    prompt, cached = sum(u.prompt_tokens for u in usage), sum(u.cached_tokens for u in usage)
    output = sum(u.output_tokens for u in usage)
    row = {"width": width, "seconds": round(seconds, 1), "calls": len(usage), "prompt": prompt, "cached": cached}
    return row | {"output": output, "tokens_per_s": round((prompt - cached + output) / seconds, 1)}, made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description="Encoding side by side.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--conversation", required=True)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--style", choices=["compact", "full"], default="compact")
    options = parser.parse_args()
    style: Literal["compact", "full"] = options.style
    chosen = segments(options.data, options.conversation, options.segments, options.turns)
    llm = LlamaLLM(options.model, name=options.model.stem, prompt_style=style)
    rows: list[dict[str, Any]] = []
    first: dict[str, Encoded] = {}
    for width in options.widths:
        print(f"width {width} ...", file=sys.stderr, flush=True)
        row, made = measure(llm, chosen, width)
        first = first or made
        row["same_records"] = sum(made[name].records == first[name].records for name in made)
        row["ratio"] = round(rows[0]["seconds"] / row["seconds"], 2) if rows else 1.0
        rows.append(row)
    print(" ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>12}" for value in row.values()))
    print(json.dumps({"model": options.model.name, "segments": len(chosen), "rows": rows}))


if __name__ == "__main__":
    main()

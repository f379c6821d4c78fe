"""The encoder's calls in our batch, beside the same calls to llama.cpp's own server with its JSON schema option.

    python -m benchmarks.against_server MODEL.gguf --data locomo10.json --conversation ID --server PATH/llama-server
        [--calls 100] [--widths 1 8] [--turns 6]

Consecutive segments of `--turns` turns, our prompt and schema, no reference context. At each width our batch runs all
calls, then a fresh server with as many slots, the same context, threads, flash attention and greedy decoding, asked by
as many clients. Prints a table and then one JSON line. The server is yours to build; it should be of the llama.cpp
that llama-cpp-python was built from.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks import datasets
from benchmarks.peers.server import free_port
from benchmarks.questions import warn
from benchmarks.side_by_side import parts
from lychee_local.backends import Request
from lychee_local.backends.constraint import constraint_schema
from lychee_local.backends.llama import LlamaLLM
from lychee_local.backends.native import processors
from lychee_local.encode import encode
from lychee_local.settings import EncodeSettings

CONTEXT = 4_096
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """What came of one call; `text` is None where it failed."""

    text: str | None
    output: int = 0


def requests(llm: LlamaLLM, data: Path, conversation: str, number: int, turns: int) -> list[Request]:
    """What the encoder first asks of each segment; a segment that says nothing is not asked about."""
    found: list[Request] = []
    (read,) = datasets.read("locomo", data, (conversation,), on_problem=warn)
    for segment, said in parts(read.messages, turns):
        asks = encode(segment, said, llm=llm, context="", settings=EncodeSettings())
        first = next(asks, None)
        asks.close()
        if first is not None:
            found.append(first)
    return found[:number]


def ours(llm: LlamaLLM, asked: Sequence[Request], width: int) -> list[Call]:
    done: dict[int, Call] = {}
    with llm.batch(width) as batch:
        numbers = [batch.submit(request) for request in asked]
        while ended := batch.advance():
            for number, result in ended:
                done[number] = (
                    Call(None) if isinstance(result, Exception) else Call(result.text, result.usage.output_tokens)
                )
    return [done[number] for number in numbers]


# --- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(server: Path, model: Path, width: int, log: Path) -> Iterator[int]:
    """A server of our own on a free port of this machine, ended afterwards.

    Raises:
        RuntimeError: it does not answer within two minutes.
    """
    port = free_port()
    threads = str(processors())
    command = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(width)]
    command += ["-c", str(CONTEXT * width), "-fa", "on", "-t", threads, "-tb", threads, "--no-webui", "--jinja"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        began = time.monotonic()
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"the server did not start; see {log}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def theirs(port: int, asked: Sequence[Request], width: int) -> list[Call]:
    with ThreadPoolExecutor(width) as clients:
        return list(clients.map(lambda request: _post(port, request), asked))


def _post(port: int, request: Request) -> Call:
    body: dict[str, Any] = {
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        "temperature": 0,
        "max_tokens": request.max_tokens,
        "cache_prompt": True,
    }
    if request.schema is not None:
        schema = json.loads(constraint_schema(request.schema))
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "notes", "schema": schema}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3_600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != 200:
        print(f"the server says {reply.status}: {str(answer)[:200]}", file=sys.stderr)
        return Call(None)
    return Call(answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"])


# --- side by side ----------------------------------------------------------------------------------------------------


def row(name: str, width: int, seconds: float, asked: Sequence[Request], calls: Sequence[Call]) -> dict[str, Any]:
    output = sum(call.output for call in calls)
    return {
        "who": name,
        "width": width,
        "seconds": round(seconds, 1),
        "calls": len(calls),
        "failed": sum(call.text is None for call in calls),
        "valid": sum(_valid(request, call) for request, call in zip(asked, calls, strict=True)),
        "output": output,
        "output_per_s": round(output / seconds, 2),
        "calls_per_min": round(60 * len(calls) / seconds, 2),
    }


def _valid(request: Request, call: Call) -> bool:
    """Whether the output is whole and what was asked for."""
    if call.text is None or request.schema is None:
        return call.text is not None
    try:
        request.schema.model_validate_json(call.text)
    except ValidationError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against_server", description="Our batch beside llama.cpp's server."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--conversation", required=True)
    parser.add_argument("--server", type=Path, required=True, help="the llama-server program")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--log", type=Path, default=Path("llama-server.log"), help="what the server prints")
    options = parser.parse_args()
    if not os.access(options.server, os.X_OK):
        parser.error(f"{options.server} is no program; build llama-server from llama.cpp and name it here")
    rows: list[dict[str, Any]] = []
    llm = LlamaLLM(options.model, name=options.model.stem, prompt_style="compact", context=CONTEXT)
    asked = requests(llm, options.data, options.conversation, options.calls, options.turns)
    for width in options.widths:
        print(f"{len(asked)} calls, {width} at a time, in our batch ...", file=sys.stderr, flush=True)
        began = time.perf_counter()
        mine = ours(llm, asked, width)
        rows.append(row("ours", width, time.perf_counter() - began, asked, mine))
    llm.close()
    for width in options.widths:
        print(f"{len(asked)} calls, {width} at a time, to the server ...", file=sys.stderr, flush=True)
        with serving(options.server, options.model, width, options.log) as port:
            began = time.perf_counter()
            other = theirs(port, asked, width)
            rows.append(row("server", width, time.perf_counter() - began, asked, other))
    print(" ".join(f"{name:>13}" for name in rows[0]))
    for each in rows:
        print(" ".join(f"{value:>13}" for value in each.values()))
    print(json.dumps({"model": options.model.name, "turns": options.turns, "rows": rows}))


if __name__ == "__main__":
    main()

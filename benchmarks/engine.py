"""What llama.cpp's settings are worth on this machine: one table, each row against the settings that we ship.

    python -m benchmarks.engine MODEL.gguf [--filled 800] [--width 16]

Each row opens a context with one setting changed and measures, with `width` sequences that hold `filled` tokens each:
tokens of a prompt a second, alone and beside the others; milliseconds a step, for one sequence and for all of them; and
how long the state of an evaluated prompt takes to be restored. Then, for one sequence, what a step of several tokens
costs, which decides whether guessing tokens ahead can pay. Prints tables and then one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment
from lychee_local.backends.native import processors, settle
from lychee_local.backends.prefixes import PROMPT_CHUNK

STEPS = 3  # of which the fastest counts: another process costs time and never saves it
AHEAD = (1, 2, 3, 4, 5, 8, 16)


@dataclass(frozen=True, slots=True)
class Engine:
    """The settings of a context. `chunk` is how many tokens are evaluated together; `cache` the type of keys and values
    by ggml's name; `unified` one cache for all sequences instead of one for each."""

    flash: bool = True
    unified: bool = True
    cache: str = "F16"
    chunk: int = PROMPT_CHUNK
    threads: int = field(default_factory=processors)


class Context:
    """A context under test."""

    def __init__(self, api: Any, model: Any, engine: Engine, *, width: int, cells: int) -> None:
        self._api = api
        self.chunk = engine.chunk
        params = api.llama_context_default_params()
        params.n_ctx = width * cells
        params.n_batch = params.n_ubatch = engine.chunk
        params.n_seq_max = width
        params.kv_unified = engine.unified
        params.flash_attn_type = int(engine.flash)
        params.type_k = params.type_v = getattr(api, f"GGML_TYPE_{engine.cache}")
        params.n_threads = params.n_threads_batch = engine.threads
        self._native = api.llama_init_from_model(model, params)
        if not self._native:
            raise ValueError(f"llama.cpp refuses {engine}")
        self._batch = api.llama_batch_init(engine.chunk, 0, 1)

    def seconds(self, rows: Sequence[tuple[int, int, int]], *, logits: bool) -> float:
        """To evaluate tokens, each with its position and its sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = logits
        began = time.perf_counter()
        if self._api.llama_decode(self._native, batch) != 0:
            raise ValueError("llama.cpp could not evaluate it")
        return time.perf_counter() - began

    def prompt(self, tokens: Sequence[int], sequence: int) -> float:
        """To evaluate a prompt in chunks."""
        return sum(
            self.seconds(
                [(t, first + i, sequence) for i, t in enumerate(tokens[first : first + self.chunk])], logits=False
            )
            for first in range(0, len(tokens), self.chunk)
        )

    def copy(self, sequence: int, others: Sequence[int]) -> tuple[float, int]:
        """Give other sequences the state of one; seconds for each, and its bytes."""
        size = self._api.llama_state_seq_get_size(self._native, sequence)
        state = (ctypes.c_uint8 * size)()
        self._api.llama_state_seq_get_data(self._native, state, size, sequence)
        began = time.perf_counter()
        for other in others:
            if self._api.llama_state_seq_set_data(self._native, state, size, other) == 0:
                raise ValueError("llama.cpp refuses a state of its own")
        return (time.perf_counter() - began) / len(others), size

    def undo(self, sequence: int, position: int) -> None:
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._native), sequence, position, -1)

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._native)


def measure(api: Any, model: Any, engine: Engine, tokens: Sequence[int], width: int) -> dict[str, float]:
    """One row. The last sequence is the newcomer whose prompt is evaluated beside all others."""
    context = Context(api, model, engine, width=width, cells=len(tokens) + 256)
    try:
        alone = context.prompt(tokens, 0)
        one = min(context.seconds([(tokens[i], len(tokens) + i, 0)], logits=True) for i in range(STEPS))
        context.undo(0, len(tokens))
        restored, size = context.copy(0, range(1, width - 1))
        new = tokens[: len(tokens) // 4]
        beside = context.prompt(new, width - 1)
        ends = [len(tokens)] * (width - 1) + [len(new)]
        steps = [
            context.seconds([(tokens[i], end + i, place) for place, end in enumerate(ends)], logits=True)
            for i in range(STEPS)
        ]
    finally:
        context.close()
    return {
        "prompt_alone": len(tokens) / alone,
        "prompt_beside": len(new) / beside,
        "step_ms": 1e3 * one,
        "step_all_ms": 1e3 * min(steps),
        "all_per_s": width / min(steps),
        "restore_ms": 1e3 * restored,
        "state_mb": size / 1e6,
    }


def ahead(api: Any, model: Any, engine: Engine, tokens: Sequence[int]) -> dict[int, float]:
    """Milliseconds to evaluate so many tokens of one sequence together, with the logits of each."""
    context = Context(api, model, engine, width=1, cells=len(tokens) + 256)
    found: dict[int, float] = {}
    try:
        context.prompt(tokens, 0)
        for number in AHEAD:
            trials = []
            for _ in range(STEPS):
                rows = [(tokens[i], len(tokens) + i, 0) for i in range(number)]
                trials.append(context.seconds(rows, logits=True))
                context.undo(0, len(tokens))
            found[number] = 1e3 * min(trials)
    finally:
        context.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--filled", type=int, default=800, help="tokens that each sequence holds")
    parser.add_argument("--width", type=int, default=16, help="sequences side by side")
    options = parser.parse_args()
    settle()
    import llama_cpp as api

    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(options.model).encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {options.model}")
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    tokens = np.random.default_rng(0).integers(vocabulary // 2, size=options.filled).tolist()
    shipped = Engine()
    engines = {
        "shipped": shipped,
        "no flash attention": replace(shipped, flash=False),
        "a cache for each": replace(shipped, unified=False),
        "cache in 8 bits": replace(shipped, cache="Q8_0"),
        "chunks of 512": replace(shipped, chunk=512),
        "one thread": replace(shipped, threads=1),
    }
    rows = {name: measure(api, model, engine, tokens, options.width) for name, engine in engines.items()}
    print(f"{'':20}" + "".join(f"{name:>15}" for name in rows["shipped"]))
    for name, row in rows.items():
        print(f"{name:20}" + "".join(f"{value:15.1f}" for value in row.values()))
    together = ahead(api, model, shipped, tokens)
    print("\ntokens of one sequence in a step: " + ", ".join(f"{n}: {ms:.0f} ms" for n, ms in together.items()))
    settings = {name: asdict(engine) for name, engine in engines.items()}
    print(
        json.dumps(
            {"model": options.model.name, "filled": options.filled, "width": options.width, "settings": settings}
            | {"rows": rows, "ahead_ms": together, "environment": environment()}
        )
    )


if __name__ == "__main__":
    main()

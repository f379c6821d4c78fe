"""What a JSON constraint costs: compile time and decoding speed of each engine on one schema and one prompt.

    python -m benchmarks.constraints MODEL.gguf [--engines none llguidance outlines_core gbnf] [--tokens 120]

Chooses the engine behind `lychee_local.backends.llama`. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

PROMPT = (
    "Extract facts as JSON with records (turn, kind, text, entities) and note: "
    "0 Ana: I moved to Lisbon in May and started a pottery class. 1 Bo: I love jazz and play trumpet."
)


class _Record(BaseModel):
    turn: int = Field(ge=0, le=31)
    kind: Literal["fact", "event", "preference"]
    text: str = Field(max_length=300)
    entities: list[str] = Field(max_length=6)


class _Output(BaseModel):
    records: list[_Record] = Field(max_length=12)
    note: str = Field(max_length=400)


def measure(model: Path, engine: str, tokens: int) -> dict[str, Any]:
    """Seconds to compile, tokens decoded, tokens per second (the prompt's evaluation included), for one engine."""
    import outlines
    from llama_cpp import Llama, LogitsProcessorList
    from llama_cpp.llama_grammar import LlamaGrammar
    from outlines.backends import get_json_schema_logits_processor

    llama = Llama(str(model), n_ctx=2048, n_threads=2, seed=0, verbose=False)
    schema = json.dumps(_Output.model_json_schema())
    constraint: dict[str, Any] = {}
    began = time.perf_counter()
    if engine == "gbnf":
        constraint["grammar"] = LlamaGrammar.from_json_schema(schema, verbose=False)
    elif engine != "none":
        processor = get_json_schema_logits_processor(engine, outlines.from_llamacpp(llama), schema)
        constraint["logits_processor"] = LogitsProcessorList([processor])
    compiled = time.perf_counter() - began
    began = time.perf_counter()
    reply = llama.create_chat_completion(
        [{"role": "user", "content": PROMPT}], max_tokens=tokens, temperature=0.0, **constraint
    )
    seconds = time.perf_counter() - began
    assert isinstance(reply, dict)  # not streamed
    decoded = reply["usage"]["completion_tokens"]
    return {"engine": engine, "compile_s": round(compiled, 2), "tokens": decoded, "per_s": round(decoded / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", nargs="+", default=["none", "llguidance", "gbnf", "outlines_core"])
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    rows = [measure(options.model, engine, options.tokens) for engine in options.engines]
    print(f"{'engine':<14} {'compile s':>10} {'tokens':>7} {'tokens/s':>9}")
    for row in rows:
        print(f"{row['engine']:<14} {row['compile_s']:>10} {row['tokens']:>7} {row['per_s']:>9}")
    print(json.dumps({"model": options.model.name, "rows": rows}))


if __name__ == "__main__":
    main()

"""The encoders that `construct` compares, and how a conversation is built with one of them.

Everything a run made lies in its folder, so a run that was killed goes on there; another setup needs another folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from benchmarks import plain
from benchmarks.construction import Built
from benchmarks.models import load
from lychee_local import Memory, Message, Settings
from lychee_local.backends import LLM, Embedder
from lychee_local.backends.load import load_llm
from lychee_local.settings import EncodeSettings
from lychee_local.types import Progress

Part = Literal["dates", "turns", "choices", "example", "salvage"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class Setup:
    """`encoder` is "verbatim" (the turns as they are), "rules", or the name of a model's card."""

    encoder: str
    prompt: Literal["ours", "plain"] = "ours"
    without: tuple[Part, ...] = ()
    sessions: int | None = None
    width: int = EncodeSettings().width

    def __post_init__(self) -> None:
        if not self.asks and (self.prompt != "ours" or self.without):
            raise ValueError(f"the encoder {self.encoder} has no prompt; --prompt and --without go with a model")
        if self.prompt == "plain" and self.without:
            raise ValueError("nothing can be left out of the plain prompt")

    @property
    def asks(self) -> bool:
        """Whether a model is asked."""
        return self.encoder not in ("verbatim", "rules")

    @property
    def settings(self) -> EncodeSettings:
        left_out: dict[str, bool] = dict.fromkeys(self.without, False)
        return replace(EncodeSettings(width=self.width), **left_out)  # type: ignore[arg-type]  # names of flags


def claim(folder: Path, setup: Setup) -> None:
    """Make `folder` the one of this setup.

    Raises:
        ValueError: it is the one of another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "setup.json"
    mine = json.loads(json.dumps(asdict(setup)))
    if kept.exists() and (theirs := json.loads(kept.read_text(encoding="utf-8"))) != mine:
        raise ValueError(f"{folder} holds a run of {theirs}, not of {mine}; choose another --out")
    kept.write_text(json.dumps(mine) + "\n", encoding="utf-8")


def build(
    name: str,
    messages: Sequence[Message],
    setup: Setup,
    folder: Path,
    *,
    embedder: Embedder,
    models_home: Path,
    llm: LLM | None = None,
) -> Built:
    """One conversation, built in `folder` by this setup; `llm` stands in for the model of the setup's card."""
    watch = _Watch(folder / f"{name}.times.jsonl")
    sessions = list(dict.fromkeys(m.session for m in messages))[: setup.sessions]
    by_ours = setup.asks and setup.prompt == "ours"
    with Memory.open(
        name,
        home=folder / "home",
        models_home=models_home,
        llm=(llm or setup.encoder) if by_ours else None,
        embedder=embedder,
        reranker=None,
        settings=Settings(encode=setup.settings),
    ) as memory:
        memory.remember([m for m in messages if m.session in sessions], encode=False)
        if setup.encoder == "verbatim":
            watch.lap("turns")
            return Built(memory.turns(), seconds=watch.total)
        memory.flush(encode=False)
        watch.lap("segments")
        if not by_ours and setup.asks:
            turns = {s.id: memory.turns(s.session)[s.start : s.end + 1] for s in memory.segments()}
            records, usage = plain.encode_all(
                {s.id: (s, turns[s.id]) for s in memory.segments()},
                lambda: llm or load(setup.encoder, models_home, load_llm),
                folder / f"{name}.plain.jsonl",
                width=setup.width,
                max_tokens=setup.settings.max_output_tokens,
                on_segment=lambda segment: _say(name, segment, watch),
            )
            return Built(memory.turns(), memory.segments(), records, usage, watch.total)
        done = len(memory.segments()) - len(memory.pending())
        if done:
            print(f"{name}: {done} of {len(memory.segments())} segments are encoded already", file=sys.stderr)
        memory.consolidate(on_progress=lambda progress: _encoded(name, progress, watch))
        return Built(memory.turns(), memory.segments(), memory.records(), memory.usage(), watch.total)


class _Watch:
    """Seconds of work on one conversation over all runs: a line for each step, as soon as it is done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = time.perf_counter()
        kept = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.total = sum(float(json.loads(line)["seconds"]) for line in kept)

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "seconds": round(now - self._last, 3)}) + "\n")
        self.total += now - self._last
        self._last = now


def _encoded(name: str, progress: Progress, watch: _Watch) -> None:
    watch.lap("" if progress.segment is None else progress.segment.id)
    print(
        f"{name}: segment {progress.done}/{progress.total}: {progress.records} records, "
        f"{progress.output_tokens} tokens, {progress.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _say(name: str, segment: str, watch: _Watch) -> None:
    watch.lap(segment)
    print(f"{name}: {segment}, {watch.total:.0f} s", file=sys.stderr, flush=True)

"""How many threads a language model gets on this machine, by measurement.

One thread on each processor is the guess without one. It is wrong where two processors share a core, or where some are
slow: the fast ones then wait for them at every operation. Everything else that llama.cpp can be told was measured once
for all machines and is the same on each (benchmarks/LOG.md, "Attention in a batch"): flash attention, 16 bits a cached
value, prompts in chunks of 64, the file mapped into memory and not locked there.

A choice holds for one model under one build of llama.cpp on so many processors; under others it is ignored, never
wrong. Outputs depend on the number of threads in their last digits, so a machine that is tuned may word a record
differently than before, and repeats it exactly from then on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lychee_local import pull
from lychee_local.backends.load import load_llm
from lychee_local.backends.native import cores, installed_llama, processors
from lychee_local.cards import Card
from lychee_local.errors import ModelError
from lychee_local.types import ChatMessage

# What a call costs that this is for: between an answer (1,900 tokens read, 10 written) and a segment (550, 310).
READ, WRITTEN = 1_000, 100
# A choice must save so much, since two measurements of the same differ too.
WORTHWHILE = 0.95
_LINES = 24  # of the prompt that is read: some 500 tokens
_OUTPUT = 32


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second with so many threads, of a prompt and of an output."""

    threads: int
    prompt: float
    output: float

    @property
    def seconds(self) -> float:
        """What a typical call takes."""
        return READ / self.prompt + WRITTEN / self.output


@dataclass(frozen=True, slots=True)
class Tuning:
    """`threads` is the choice; `speeds` is what it was chosen from, the guess first."""

    model: str
    threads: int
    speeds: tuple[Speed, ...]


def candidates(processors: int, cores: int) -> tuple[int, ...]:
    """Numbers of threads that are worth a trial: each processor, each core, half of the processors; no repeats."""
    return tuple(dict.fromkeys(n for n in (processors, min(cores, processors), processors // 2) if n >= 1))


def chosen(speeds: Sequence[Speed]) -> int:
    """The fastest, if it is worth leaving the first for."""
    first, best = speeds[0], min(speeds, key=lambda speed: speed.seconds)
    return best.threads if best.seconds <= WORTHWHILE * first.seconds else first.threads


def tune(
    card: Card,
    home: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    measure: Callable[[Card, Path, int], Speed] | None = None,
) -> Tuning:
    """Measure the model of `card` with several numbers of threads, some ten seconds each, and keep the best for all
    memories that use this home. Wants a quiet machine.

    Raises:
        ModelMissing: the model is not on this machine.
        ModelDamaged, ConstraintNotApplied: it cannot be loaded.
        ModelError: it writes nothing.
    """
    path = pull.require(card, home)
    numbers = candidates(processors(), cores())
    speeds: list[Speed] = []
    for done, threads in enumerate(numbers):
        if on_progress is not None:
            on_progress(done, len(numbers))
        speeds.append((measure or speed_of)(card, path, threads))
    tuning = Tuning(card.name, chosen(speeds), tuple(speeds))
    file = _file(card, home)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {"for": _machine(), "threads": tuning.threads, "speeds": [asdict(speed) for speed in speeds]}
    file.write_text(json.dumps(kept), encoding="utf-8")
    return tuning


def threads_for(card: Card, home: Path) -> int | None:
    """How many threads were measured to be best for the model here; None where nothing, or something else, was."""
    try:
        kept = json.loads(_file(card, home).read_text(encoding="utf-8"))
        threads = kept["threads"] if kept["for"] == _machine() else None
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
    ):  # not there, or damaged
        return None
    return threads if type(threads) is int and 1 <= threads <= processors() else None


def speed_of(card: Card, path: Path, threads: int) -> Speed:
    """Load the model and let it read some 500 tokens and write 32."""
    told = (f"{i}: on day {i * 7} Ana and Bo counted {i * i} boats in the harbour, and rested." for i in range(_LINES))
    prompt = [ChatMessage("user", "\n".join(told) + "\nTell of Ana's year in a hundred words.")]
    llm = load_llm(card, path, context=2_048, threads=threads)
    try:
        reading = llm.complete(prompt, purpose="probe", max_tokens=1).usage
        read = (reading.prompt_tokens - reading.cached_tokens) / reading.seconds
        writing = llm.complete(prompt, purpose="probe", max_tokens=_OUTPUT).usage  # the prompt is held but for its end
        seconds = writing.seconds - (writing.prompt_tokens - writing.cached_tokens) / read
    finally:
        llm.close()
    if not writing.output_tokens:
        raise ModelError(f"{card.name} writes nothing, so its speed is not known", hint="run: lychee doctor")
    return Speed(threads, round(read, 2), round(writing.output_tokens / max(seconds, 1e-3), 2))


def _file(card: Card, home: Path) -> Path:
    return home / "models" / ".tuned" / card.name


def _machine() -> str:
    """Tells this build of llama.cpp on so many processors from every other."""
    return f"{processors()} processors, {installed_llama()}"

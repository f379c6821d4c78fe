"""Every tunable, with its reason. Defaults are the paper's (docs/method.md cited as "2608.12990") unless a comment
says otherwise; a value chosen by our own measurement names its entry in benchmarks/LOG.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from lychee_local.errors import BadInput

Mode = Literal["lychee", "chain", "lychee+chain"]
Gate = Literal["multiply", "relevance", "consistency", "weighted"]
ChainContext = Literal["concatenated", "last", "mean"]
Planner = Literal["auto", "llm", "rules", "none"]
MODES: tuple[Mode, ...] = get_args(Mode)

# What an embedder is calibrated to: the length of the segments that the method's authors report (2608.12990).
TURNS_PER_SEGMENT = 5.8


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    """Online segmentation (2608.12990 Table 10)."""

    trigger: Literal["semantic", "eager", "fixed"] = "semantic"
    cut_threshold: float = 0.50
    min_tokens: int = 300
    target_tokens: int = 600
    max_tokens: int = 900
    max_exchanges: int = 10
    history: int = 64
    history_min: int = 5
    bias: float = -1.10
    # The four weights are in no version of the paper; these are the authors' public ones, around which every other
    # published constant agrees.
    weight_surprise: float = 0.65
    weight_cohesion: float = 0.45
    weight_length: float = 0.90
    weight_turns: float = 0.30

    def __post_init__(self) -> None:
        if not 0.0 < self.cut_threshold < 1.0:
            raise BadInput(f"cut_threshold is a probability between 0 and 1, not {self.cut_threshold}")
        if not 0 < self.min_tokens < self.target_tokens <= self.max_tokens:
            raise BadInput(
                "segment sizes must grow: 0 < min_tokens < target_tokens <= max_tokens, "
                f"got {self.min_tokens}, {self.target_tokens}, {self.max_tokens}"
            )
        if self.max_exchanges < 1:
            raise BadInput(f"max_exchanges must be at least 1, not {self.max_exchanges}")
        if not 1 <= self.history_min <= self.history:
            raise BadInput(
                f"1 <= history_min <= history is needed, got {self.history_min}, {self.history}",
                hint="history is how many distances are remembered, history_min from how many on they are used",
            )
        if not abs(self.bias) <= 100.0:
            raise BadInput(f"bias is a few units of log odds, not {self.bias}")
        _one_of("trigger", self.trigger, ("semantic", "eager", "fixed"))


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """Records from a segment (2608.12990 Table 11)."""

    representation: Literal["typed", "summary"] = "typed"
    reference_context: bool = True
    note_chars: int = 1_200
    reference_chars: int = 2_400
    reference_records: int = 12
    # A segment of 600 tokens yields about 5 records of 60 tokens; twice that is room enough, and a bound on latency.
    max_output_tokens: int = 1_024
    # So many sessions are encoded side by side; 1 takes the segments one by one. A step of sixteen costs a CPU as much
    # as one of eight (benchmarks/LOG.md, "Side by side").
    width: int = 16
    # What code does for a model. Each can be left to the model instead, to see what it is worth
    # (`python -m benchmarks construct --without`).
    dates: bool = True  # relative dates resolved before the model reads and after it wrote
    turns: bool = (
        True  # the compact prompt's output keyed by turn; off: one list, each sentence's turn found by overlap
    )
    choices: bool = True  # turn numbers and speakers are choices of the grammar; off: the model spells them
    example: bool = True  # a worked example in the compact prompt
    salvage: bool = True  # the complete records of a cut output are kept; off: it counts as failed

    def __post_init__(self) -> None:
        if not 1 <= self.width <= 64:
            raise BadInput(f"width is a number of sessions from 1 to 64, not {self.width}")
        if self.max_output_tokens < 1:
            raise BadInput(f"max_output_tokens must be at least 1, not {self.max_output_tokens}")
        _one_of("representation", self.representation, ("typed", "summary"))


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """Chains of evidence (2601.14287 sections 3.1, 3.2 and 4.3; docs/method.md 8)."""

    # What a candidate must be: relevant to the question and coherent with the chain, one of the two, or their mean.
    gate: Gate = "multiply"
    alpha: float = 0.5  # the share of relevance in the weighted gate
    beta: float = 0.5  # a chain ends where its gate falls below this share of the last one; 0 never ends it
    chains: int = 3  # L
    pool: int = 20  # K
    length: int = 20  # T, which the authors' code names and their runs never reach
    # What stands for a chain: their mean, its last vector, or its texts embedded as one. The last is the paper's, takes
    # an embedder call per step (12 s a question), and found no more (benchmarks/LOG.md, "Chains of evidence").
    context: ChainContext = "mean"
    # The two choices of the authors' runs: the best 10 sessions first (LongMemEval), the speaker asked for (LoCoMo).
    sessions: int | None = None
    speakers: bool = True

    def __post_init__(self) -> None:
        _one_of("gate", self.gate, get_args(Gate))
        _one_of("context", self.context, get_args(ChainContext))
        for name, share in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0.0 <= share <= 1.0:
                raise BadInput(f"{name} lies between 0 and 1, not at {share}")
        for name, number in (("chains", self.chains), ("pool", self.pool), ("length", self.length)):
            if number < 1:
                raise BadInput(f"{name} must be at least 1, not {number}")
        if self.sessions is not None and self.sessions < 1:
            raise BadInput(f"sessions must be at least 1, or None for all, not {self.sessions}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadInput(f"{name} {value!r} is unknown", hint=f"one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class RecallSettings:
    """Planning, recall, ranking (2608.12990 Table 14)."""

    # "chain" is the whole of 2601.14287: raw turns, no planner, no records; "lychee+chain" orders by chains what was
    # selected.
    mode: Mode = "lychee"
    chain: ChainSettings = field(default_factory=ChainSettings)
    # "auto": `ask`, which needs the LLM anyway, plans with it where the rules are unsure of the question's wording
    # (`Plan.doubts`); `recall` plans by rules, so that it answers at once and works where no LLM does.
    planner: Planner = "auto"
    # The paper's four channels, and words: BM25 finds what a small embedder misses; fusing both ranks beats either.
    channels: tuple[str, ...] = ("records", "nodes", "temporal", "turns", "lexical")
    selection: Literal["full", "none"] = "full"
    coverage: bool = True  # the first places go to the best of every route
    windows: bool = True
    # A conclusion is drawn from many small facts, of which more fit than of passages (benchmarks/LOG.md, "Channels and
    # steps").
    facts: bool = True
    k: int = 15
    rrf_constant: float = 60.0
    rerank_limit: int = 100
    weight_best: float = 0.82
    weight_route: float = 0.18
    weight_relevance: float = 0.75
    weight_signature: float = 0.25
    plan_output_tokens: int = 512
    answer_output_tokens: int = 256
    # What the shown evidence may cost in a prompt, in tokens; None leaves the number of items as the only limit, as in
    # the paper. Prompt tokens are seconds on a CPU.
    evidence_tokens: int | None = 1_800
    # The paper orders by relevance; in the order of time a small model sees what is still true (benchmarks/LOG.md,
    # "Order of the evidence").
    evidence_order: Literal["relevance", "time"] = "time"
    # What code tells the answer model of time: dates behind "yesterday" and the like, and when an item was said.
    evidence_dates: bool = True
    evidence_said: bool = True
    # "How many days between ...?": the model names two dates of the evidence, and code counts (elapsed.py).
    counted: bool = True

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("planner", self.planner, get_args(Planner))


@dataclass(frozen=True, slots=True)
class Settings:
    segment: SegmentSettings = field(default_factory=SegmentSettings)
    encode: EncodeSettings = field(default_factory=EncodeSettings)
    recall: RecallSettings = field(default_factory=RecallSettings)

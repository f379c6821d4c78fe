"""What a question's type changes in recall, ranking and windows, in one table. Holds numbers, decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from lychee_local.types import Calibration, QuestionType


@dataclass(frozen=True, slots=True)
class Strategy:
    """One column of docs/method.md 5.1. The raw source weight is 1.0 in every column and therefore left out.

    `node`, `record`, `turn` multiply the channel budgets; `turn_factor` and the two bonuses shape a raw turn's score;
    `raw_ratio` and `raw_floor` bound the share of raw items beside records; the rest describes source windows. With
    `excerpt` a window shows the turns found alone, and joins those of a session that have up to so many others between
    them; it is None where what was said around a turn matters as much.

    Excerpts, with as many raw items as earn their place, are our own choice for the five types that ask for facts
    (benchmarks/LOG.md, "Which turns are shown"); the method has windows of one or two turns to each side, 24 to 40
    anchors, and raw ratios of 0.40 to 0.42 with floors of 0.64 to 0.72.
    """

    node: float = 1.00
    record: float = 1.00
    turn: float = 1.00
    turn_factor: float = 1.00
    assistant_bonus: float = 0.0
    user_bonus: float = 0.0
    raw_ratio: float = 1.00
    raw_floor: float = 0.0
    window: int = 0
    anchors: int = 80
    merge_gap: int = 0
    window_chars: int = 2_800
    excerpt: int | None = 24


STRATEGIES: dict[QuestionType, Strategy] = {
    "single": Strategy(),
    "other": Strategy(),
    "aggregate": Strategy(node=1.55, record=1.45),
    "temporal": Strategy(node=1.35, record=1.30, turn=1.45, window_chars=3_600),
    "comparison": Strategy(node=1.35, record=1.30, turn=1.30, window_chars=3_600),
    "personalized_advice": Strategy(
        node=1.25,
        record=1.20,
        turn=1.80,
        turn_factor=1.05,
        assistant_bonus=0.04,
        user_bonus=0.08,
        raw_ratio=0.48,
        raw_floor=0.62,
        window=3,
        anchors=28,
        merge_gap=2,
        window_chars=5_000,
        excerpt=None,
    ),
    "prior_assistant_response": Strategy(
        node=0.95,
        record=0.95,
        turn=3.00,
        turn_factor=1.22,
        assistant_bonus=0.18,
        user_bonus=0.04,
        raw_ratio=0.62,
        raw_floor=0.52,
        window=4,
        anchors=32,
        merge_gap=2,
        window_chars=7_000,
        excerpt=None,
    ),
}


def similarity(cosine: float, calibration: Calibration) -> float:
    """r in [0, 1]: clip((cos - floor) / (1 - floor)); NaN counts as 0. Floor 0.5 is the paper's clip(2 cos - 1)."""
    floor = calibration.similarity_floor
    value = (cosine - floor) / (1.0 - floor)
    return min(1.0, value) if value > 0.0 else 0.0

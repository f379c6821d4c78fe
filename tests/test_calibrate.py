"""Where an embedder's cosines lie, on conversations whose cosines are known by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from lychee_local.backends import Vectors
from lychee_local.calibrate import calibrate
from lychee_local.errors import BadInput
from lychee_local.segment import Segmenter, embedding_text, exchanges
from lychee_local.settings import SegmentSettings
from lychee_local.types import Calibration, Message, Turn


class WordEmbedder:
    """As `HashEmbedder`, but each word gets the next free axis: no two words ever share one."""

    name = "words"
    digest = "0" * 64
    dimension = 640
    calibration = Calibration()

    def __init__(self) -> None:
        self._axes: dict[str, int] = {}

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        rows = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text):
                row[self._axes.setdefault(word, len(self._axes))] += 1.0
            row /= np.linalg.norm(row)
        return rows


EMBEDDER = WordEmbedder()


def conversation(name: str, *, subjects: int = 12, turns: int = 6, sessions: int = 2) -> list[Message]:
    """Every turn has four words: "user", two of its subject, one of its own. So two turns of one subject have the
    cosine 3/4, any others 1/4."""
    return [
        Message(f"{name}{session}topic{subject} {name}{session}thing{subject} {name}{session}{subject}word{turn}",
                session=f"{session}")
        for session in range(sessions)
        for subject in range(subjects)
        for turn in range(turns)
    ]  # fmt: skip


def cut(conversations: Sequence[Sequence[Message]], calibration: Calibration) -> list[int]:
    """Turns of each segment."""
    lengths = []
    for messages in conversations:
        for session in dict.fromkeys(m.session for m in messages):
            said = [m.text for m in messages if m.session == session]
            given = exchanges([Turn("s", i, text) for i, text in enumerate(said)])
            segmenter = Segmenter(SegmentSettings(), calibration)
            _, segments = segmenter.feed(given, EMBEDDER.embed([embedding_text(x) for x in given]))
            lengths += [s.end - s.start + 1 for s in (*segments, *segmenter.flush("s"))]
    return lengths


def test_segments_get_the_length_that_is_wanted_and_the_floor_is_that_of_strangers() -> None:
    talks = [conversation("a"), conversation("b")]
    found = calibrate(talks, EMBEDDER, turns_per_segment=6.0)
    assert (found.conversations, found.turns, found.exchanges, found.unrelated) == (2, 288, 288, "conversations")
    assert found.calibration.similarity_floor == 0.25
    lengths = cut(talks, found.calibration)
    assert found.segments == len(lengths)
    assert found.turns_per_segment == round(288 / len(lengths), 2) == pytest.approx(6.0, abs=0.2)
    assert set(lengths) == {6}
    assert found.before == EMBEDDER.calibration
    assert found.turns_per_segment_before == round(288 / len(cut(talks, EMBEDDER.calibration)), 2)


def test_the_spread_is_that_of_the_surprises_and_drops() -> None:
    """Once the segments are the subjects, 2 of 12 surprises per subject pair are known: 1/4 for the second turn of a
    subject, 3/4 at most for the first; the standard deviation lies between, and drops are those at the same places."""
    talks = [conversation("a"), conversation("b")]
    found = calibrate(talks, EMBEDDER, turns_per_segment=6.0).calibration
    surprises, drops = [], []
    for messages in talks:
        for session in ("0", "1"):
            given = exchanges([Turn("s", i, m.text) for i, m in enumerate(messages) if m.session == session])
            decisions, _ = Segmenter(SegmentSettings(), found).feed(
                given, EMBEDDER.embed([embedding_text(x) for x in given])
            )
            surprises += [d.signals.surprise for d in decisions if d.signals]
            drops += [d.signals.drop for d in decisions if d.signals]
    mean = sum(surprises) / len(surprises)
    deviation = (sum((s - mean) ** 2 for s in surprises) / len(surprises)) ** 0.5
    assert found.surprise_scale == round(deviation, 2)
    # Of a quarter of the drops it is known which they are: the three quarters are the upper quartile.
    ranked = sorted(drops)
    below = ranked[int(0.75 * (len(ranked) - 1))]
    above = ranked[int(0.75 * (len(ranked) - 1)) + 1]
    assert below - 0.001 <= found.cohesion_scale <= above + 0.001


def test_the_same_conversations_give_the_same_numbers() -> None:
    talks = [conversation("a", turns=5)]
    assert calibrate(talks, EMBEDDER) == calibrate(talks, EMBEDDER)


def test_one_conversation_compares_its_sessions() -> None:
    found = calibrate([conversation("a")], EMBEDDER, turns_per_segment=6.0)
    assert found.unrelated == "sessions"
    assert found.calibration.similarity_floor == 0.25


def test_progress_counts_what_is_embedded() -> None:
    seen: list[tuple[int, int]] = []
    report = lambda done, total: seen.append((done, total))  # noqa: E731
    calibrate([conversation("a")], EMBEDDER, turns_per_segment=6.0, on_progress=report)
    assert seen == [(64, 144), (128, 144), (144, 144)]


@pytest.mark.parametrize(
    ("talks", "wanted", "says"),
    [
        ([], 5.8, "too few"),
        ([conversation("a", subjects=4)], 5.8, "48 exchanges in 2 sessions are too few"),
        ([conversation("a", sessions=1, subjects=24)], 5.8, "all was said in one session"),
        ([conversation("a")], 30.0, r"has 6\.0 to 9\.0 turns, not 30"),
        ([conversation("a")], 0.5, "turns, not 0.5"),
    ],
)
def test_what_cannot_be_calibrated(talks: list[list[Message]], wanted: float, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        calibrate(talks, EMBEDDER, turns_per_segment=wanted)


def test_turns_that_fill_a_segment_each_say_nothing_about_surprise() -> None:
    long = [Message(f"{'tea ' * 700}{n}", session=str(n % 2)) for n in range(110)]
    with pytest.raises(BadInput, match="a segment by itself"):
        calibrate([long], EMBEDDER, turns_per_segment=1.0)

"""Where one segment ends and the next begins: arithmetic on embeddings, never a call to a language model.

Owns the grouping of turns into exchanges, the token estimate, the splitting of what is too long, and the online
decision of LycheeMemory V2 (arXiv 2608.12990, section 3.2 and its implementation appendix). It embeds nothing and
stores nothing: the caller passes one vector per exchange and keeps the decisions and segments that come back.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from lychee_local.settings import SegmentSettings
from lychee_local.types import Calibration, CutReason, Decision, Exchange, Segment, Signals, Turn

__all__ = ["Segmenter", "boundary_signals", "closed_exchanges", "embedding_text", "estimate_tokens", "exchanges"]

MAX_TOKENS = SegmentSettings().max_tokens
_EMBEDDED_CHARS = 4_000

_WORD = re.compile(r"[A-Za-z0-9_]+")
_IDEOGRAPH = re.compile("[\u4e00-\u9fff]")
_UNIT = re.compile("([A-Za-z0-9_]+|[\u4e00-\u9fff])|.", re.DOTALL)
# A run of marks is tried from its beginning alone, or a run without a blank behind it would be tried from each of them.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]]*\s+|[。！？؟।]+[”’」』）]*\s*")
# By the estimate a run of letters is one token however long it is. Prose has about five characters a token; beyond this
# many an exchange is oversized whatever the estimate says (a base64 blob), so that a segment always fits a prompt.
_CHARS_PER_TOKEN = 12

_ROBUST_WEIGHT = 0.45
_COHESION_CAP = 2.5

_Vector = npt.NDArray[np.float64]


# --- exchanges -------------------------------------------------------------------------------------------------------


def estimate_tokens(text: str) -> int:
    """Ideographs, runs of ASCII letters, digits and underscores, and a quarter of all other characters; at least 1."""
    words = _WORD.findall(text)
    ideographs = len(_IDEOGRAPH.findall(text))
    others = len(text) - ideographs - sum(map(len, words))
    return max(1, ideographs + len(words) + others // 4)


def exchange_text(exchange: Exchange, turns: Sequence[Turn]) -> str:
    """The text of an exchange that was stored without one, from its turns (those that are left of them)."""
    if exchange.chars is None:
        return "\n".join(turn.line for turn in turns if turn.text.strip())
    return "".join(_fragment(turn, *exchange.chars) for turn in turns)


def embedding_text(exchange: Exchange) -> str:
    """What is embedded for an exchange: all of it, or its two ends where it is longer than 4,000 characters."""
    if len(exchange.text) <= _EMBEDDED_CHARS:
        return exchange.text
    half = _EMBEDDED_CHARS // 2
    return f"{exchange.text[:half]}\n...\n{exchange.text[-half:]}"


def stored_text(exchange: Exchange, turns: Sequence[Turn]) -> str:
    """What was embedded for an exchange that was stored without its text."""
    return embedding_text(replace(exchange, text=exchange_text(exchange, turns)))


def exchanges(turns: Sequence[Turn], *, max_tokens: int = MAX_TOKENS) -> tuple[Exchange, ...]:
    """Group turns of one session into exchanges: a user turn and everything up to the next user turn.

    Turns before the first user turn form an exchange of their own. Blank turns add no line, an exchange of blank turns
    is dropped, and one larger than `max_tokens` is split between turns and, if one turn is too large, inside it.
    """
    return tuple(piece for group in _groups(turns) for piece in _pieces(group, max_tokens))


def closed_exchanges(turns: Sequence[Turn], *, final: bool, max_tokens: int = MAX_TOKENS) -> tuple[Exchange, ...]:
    """`exchanges` without the last one, which a reply may still join, unless `final` says that nothing more comes."""
    groups = list(_groups(turns))
    if not final:
        groups = groups[:-1]
    return tuple(piece for group in groups for piece in _pieces(group, max_tokens))


def _groups(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    group: list[Turn] = []
    for turn in turns:
        if turn.role == "user" and group:
            yield group
            group = []
        group.append(turn)
    if group:
        yield group


def _pieces(group: Sequence[Turn], max_tokens: int) -> Iterator[Exchange]:
    """The exchange of a group, in as few pieces as fit the limit."""
    packed: list[Turn] = []
    text = ""
    for turn in group:
        if not turn.text.strip():
            packed.append(turn)
            continue
        joined = f"{text}\n{turn.line}" if text else turn.line
        if _oversized(joined, max_tokens):
            yield from _exchange(packed, text)
            packed, text, joined = [], "", turn.line
        if _oversized(joined, max_tokens):
            yield from _fragments(turn, max_tokens)
        else:
            packed.append(turn)
            text = joined
    yield from _exchange(packed, text)


def _oversized(text: str, max_tokens: int) -> bool:
    return len(text) > max_tokens * _CHARS_PER_TOKEN or estimate_tokens(text) > max_tokens


def _exchange(turns: Sequence[Turn], text: str) -> Iterator[Exchange]:
    if text:
        yield Exchange(turns[0].session, turns[0].index, turns[-1].index, text, estimate_tokens(text))


def _fragments(turn: Turn, max_tokens: int) -> Iterator[Exchange]:
    prefix = f"{turn.name}: "
    # One less, because the two remainders of four "other" characters may add up to one more token.
    room = max(max_tokens - estimate_tokens(prefix) - 1, max_tokens // 2, 1)
    start = 0
    while start < len(turn.text):
        end = _cut(turn.text, start, room)
        if turn.text[start:end].strip():
            text = _fragment(turn, start, end)
            yield Exchange(turn.session, turn.index, turn.index, text, estimate_tokens(text), (start, end))
        start = end


def _fragment(turn: Turn, start: int, end: int) -> str:
    prefix, words = f"{turn.name}: ", turn.text[start:end]
    return words if words.startswith(prefix) else prefix + words


def _cut(text: str, start: int, room: int) -> int:
    """Where a piece that begins at `start` ends: always after `start`, at the best break that `room` tokens reach.

    Looks only at a window whose size depends on `room`, so that splitting stays linear in the length of the text.
    """
    window = text[start : start + room * _CHARS_PER_TOKEN]
    quarters = 0
    limit = len(window)
    for unit in _UNIT.finditer(window):
        quarters += 4 if unit[1] else 1
        if quarters > room * 4:
            limit = max(unit.start(), 1)
            break
    if start + limit >= len(text):
        return len(text)
    reach = window[:limit]
    sentences = [match.end() for match in _SENTENCE_END.finditer(reach)]
    breaks = (reach.rfind("\n\n") + 2, reach.rfind("\n") + 1, sentences[-1] if sentences else 0)
    for position in breaks:
        # A break in the first half would leave many small pieces; the next kind of break serves better.
        if position > limit // 2:
            return start + position
    if reach[-1].isspace() or window[limit : limit + 1].isspace():
        return start + limit
    *words, last = reach.rsplit(maxsplit=1)
    return start + (limit - len(last) if words else limit)


# --- the boundary decision -------------------------------------------------------------------------------------------


def boundary_signals(
    *,
    surprise: float,
    drop: float,
    tokens: int,
    exchanges: int,
    history: Sequence[float],
    settings: SegmentSettings,
    calibration: Calibration,
) -> Signals:
    """Score one exchange against the segment before it.

    `surprise` and `drop` are on the scale of 1 - cosine; `tokens` and `exchanges` are the segment's size without the
    new exchange; `history` holds earlier surprises of the session, oldest first.
    """
    absolute = _clip((surprise - calibration.surprise_centre) / calibration.surprise_scale, -1.0, 2.5)
    robust = _robust(surprise, history, settings.history_min)
    cohesion = min(_COHESION_CAP, drop / calibration.cohesion_scale) if drop > 0 else 0.0
    length = _length(tokens, settings)
    turns = {1: -0.85, 2: -0.15, 3: 0.15}.get(exchanges, min(1.0, 0.30 + 0.15 * (exchanges - 4)))
    score = (
        settings.weight_surprise * max(absolute, _ROBUST_WEIGHT * robust)
        + settings.weight_cohesion * cohesion
        + settings.weight_length * length
        + settings.weight_turns * turns
    )
    probability = 1.0 / (1.0 + math.exp(-(settings.bias + score)))
    return Signals(surprise, drop, absolute, robust, cohesion, length, turns, score, probability)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _robust(surprise: float, history: Sequence[float], minimum: int) -> float:
    if len(history) < minimum:
        return 0.0
    middle = median(history)
    spread = median(abs(value - middle) for value in history) or 1e-6
    return _clip((surprise - middle) / (1.4826 * spread), -2.0, 4.0)


def _length(tokens: int, settings: SegmentSettings) -> float:
    low, target, high = settings.min_tokens, settings.target_tokens, settings.max_tokens
    if tokens < 0.7 * low:
        return -1.30
    if tokens < low:
        return -0.80 + 0.80 * (tokens - 0.7 * low) / (0.3 * low)
    if tokens < target:
        return 0.45 + 1.45 * (tokens - low) / (target - low)
    if tokens < high:
        return 1.90 + 0.90 * (tokens - target) / (high - target)
    return 3.00


# --- the online segmenter --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """One session: its pending segment, its past surprises, and the place up to which exchanges were taken in."""

    history: deque[float]
    pending: list[Exchange] = field(default_factory=list)
    vectors: list[_Vector] = field(default_factory=list)
    position: tuple[int, int] = (0, 0)

    @property
    def tokens(self) -> int:
        return sum(exchange.tokens for exchange in self.pending)

    def add(self, exchange: Exchange, vector: _Vector) -> None:
        self.pending.append(exchange)
        self.vectors.append(vector)

    def pass_by(self, exchange: Exchange) -> None:
        self.position = (exchange.end + 1, 0) if exchange.chars is None else (exchange.end, exchange.chars[1])

    def passed(self, exchange: Exchange) -> bool:
        return (exchange.start, exchange.chars[0] if exchange.chars else 0) < self.position


class Segmenter:
    """The online segmenter of one store; sessions do not influence each other.

    The outcome depends on the sequence of exchanges and flushes alone, not on how they were batched into calls. If a
    call's results cannot be stored, `replay` the session from the log: it replaces whatever was in memory.
    """

    def __init__(self, settings: SegmentSettings, calibration: Calibration) -> None:
        self._settings = settings
        self._calibration = calibration
        self._sessions: dict[str, _State] = {}

    def watermark(self, session: str) -> int:
        """Index of the first turn that is not part of an exchange taken in so far."""
        index, chars = self._state(session).position
        return index + 1 if chars else index

    def replay(
        self,
        session: str,
        decisions: Sequence[Decision],
        vectors: npt.NDArray[np.float32],
        segments: Sequence[Segment],
    ) -> None:
        """Rebuild a session from its log: `vectors` holds one row per decision, `segments` what was finalised so far.

        What is pending follows from the segments, not from the settings, which may have changed since.
        """
        if len(decisions) != len(vectors):
            raise ValueError(f"{len(decisions)} decisions but {len(vectors)} vectors")
        self._sessions.pop(session, None)
        state = self._state(session)
        finalised = max((segment.end for segment in segments), default=-1)
        flushed = max((segment.end for segment in segments if segment.reason == "session_flush"), default=-1)
        for decision, vector in zip(decisions, vectors, strict=True):
            exchange = decision.exchange
            if decision.signals is not None and exchange.start > flushed:
                state.history.append(decision.signals.surprise)
            if exchange.start > finalised:
                state.add(exchange, _unit(vector))
            state.pass_by(exchange)
        # The exchanges at the end of a segment may have been forgotten since; what is left of it is not cut again.
        ends = ((s.end + 1, 0) if s.chars is None else (s.end, s.chars[1]) for s in segments)
        state.position = max(state.position, *ends, (0, 0))

    def feed(
        self, exchanges: Sequence[Exchange], vectors: npt.NDArray[np.float32]
    ) -> tuple[list[Decision], list[Segment]]:
        """Take in closed exchanges with their vectors, shape (len(exchanges), dimension).

        Exchanges that were taken in before are skipped without a decision. Returns one decision per new exchange and
        the segments that were finalised, both in order.
        """
        if len(exchanges) != len(vectors):
            raise ValueError(f"{len(exchanges)} exchanges but {len(vectors)} vectors")
        decisions: list[Decision] = []
        segments: list[Segment] = []
        for exchange, vector in zip(exchanges, vectors, strict=True):
            state = self._state(exchange.session)
            if state.passed(exchange):
                continue
            decisions.append(self._step(state, exchange, _unit(vector), segments))
            state.pass_by(exchange)
        return decisions, segments

    def flush(self, session: str) -> tuple[Segment, ...]:
        """Finalise what is pending, and forget the session's surprises with it.

        With nothing pending it changes nothing: a flush shows in the log only by its segment, and what the log does
        not show must not change a later decision.
        """
        state = self._state(session)
        if not state.pending:
            return ()
        segment = _finalise(state, "session_flush")
        state.history.clear()
        return (segment,)

    def _state(self, session: str) -> _State:
        return self._sessions.setdefault(session, _State(deque(maxlen=self._settings.history)))

    def _step(self, state: _State, exchange: Exchange, vector: _Vector, segments: list[Segment]) -> Decision:
        tokens, count = state.tokens, len(state.pending)
        signals: Signals | None = None
        before: CutReason | None = None
        if exchange.chars is not None:
            before = "capacity_limit"
        elif count and self._settings.trigger == "semantic":
            signals = self._signals(state, vector)
            state.history.append(signals.surprise)
        if before is None and tokens + exchange.tokens > self._settings.max_tokens:
            before = "capacity_limit"
        elif signals is not None and signals.probability >= self._settings.cut_threshold:
            before = "semantic_boundary"
        cut = bool(count) and before is not None
        if cut and before is not None:
            probability = signals.probability if signals and before == "semantic_boundary" else 1.0
            segments.append(_finalise(state, before, probability))
        state.add(exchange, vector)
        after = self._after(state, exchange)
        if after is not None:
            segments.append(_finalise(state, after))
        return Decision(
            exchange=exchange,
            action="cut" if cut else "append" if count else "start",
            reason=before if cut else after,
            signals=None if signals is None else _rounded(signals),
            tokens_before=tokens,
            exchanges_before=count,
        )

    def _signals(self, state: _State, vector: _Vector) -> Signals:
        before = np.stack(state.vectors)
        after = np.vstack([before, vector])
        nearest = max(float(vector @ _unit(before.mean(axis=0))), float(vector @ state.vectors[-1]))
        return boundary_signals(
            # Rounded before use: the log keeps six digits, and a replayed history must equal the one it replaces.
            surprise=round(max(0.0, 1.0 - nearest), 6),
            drop=max(0.0, _cohesion(before) - _cohesion(after)),
            tokens=state.tokens,
            exchanges=len(state.pending),
            history=state.history,
            settings=self._settings,
            calibration=self._calibration,
        )

    def _after(self, state: _State, exchange: Exchange) -> CutReason | None:
        """Whether the segment is full now that the exchange is in it."""
        if exchange.chars is not None:
            return "oversized_turn_fragment"
        if self._settings.trigger == "eager":
            return "eager"
        if state.tokens >= self._settings.max_tokens:
            return "capacity_limit"
        if state.tokens >= self._settings.target_tokens:
            return "target_length"
        return "exchange_limit" if len(state.pending) >= self._settings.max_exchanges else None


def _unit(vector: npt.NDArray[np.floating]) -> _Vector:
    wide = np.asarray(vector, dtype=np.float64)
    norm = float(np.linalg.norm(wide))
    return wide / norm if norm > 0.0 else wide


def _cohesion(vectors: npt.NDArray[np.float64]) -> float:
    """Mean cosine to the centroid; 1 for a single vector."""
    if len(vectors) < 2:
        return 1.0
    return float((vectors @ _unit(vectors.mean(axis=0))).mean())


def _finalise(state: _State, reason: CutReason, probability: float = 1.0) -> Segment:
    first, last = state.pending[0], state.pending[-1]
    segment = Segment(
        session=first.session,
        start=first.start,
        end=last.end,
        reason=reason,
        tokens=state.tokens,
        exchanges=len(state.pending),
        probability=round(probability, 6),
        chars=first.chars,
    )
    state.pending.clear()
    state.vectors.clear()
    return segment


def _rounded(signals: Signals) -> Signals:
    return Signals(
        surprise=signals.surprise,
        drop=round(signals.drop, 6),
        absolute=round(signals.absolute, 6),
        robust=round(signals.robust, 6),
        cohesion=round(signals.cohesion, 6),
        length=round(signals.length, 6),
        turns=round(signals.turns, 6),
        score=round(signals.score, 6),
        probability=round(signals.probability, 6),
    )

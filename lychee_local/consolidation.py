"""Finished segments become records, and records of an earlier encoder those of a better one.

Owns what is encoded next, with which reference context, in which commits, when a budget ends the work, and the running
totals of a call. Refuses to know how a segment is encoded: that is decided in `encode` and `rules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lychee_local.backends import Vectors
from lychee_local.encode import Encoded, encode, reference_context
from lychee_local.engines import Engines
from lychee_local.errors import BadInput
from lychee_local.rules import encode_by_rules
from lychee_local.settings import EncodeSettings
from lychee_local.store import Store
from lychee_local.types import Progress, Record, Reencoded, Remembered, Segment, Turn, Usage

T = TypeVar("T")
ProgressCallback = Callable[[Progress], None]

# What the rules are called where the name of an encoder stands. No model can have it: it would be a card's name.
RULES = "rules"
RULES_SEGMENTS_PER_COMMIT = 32


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: after so many seconds, or so many tokens, prompt and output together; None for no limit."""

    seconds: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise BadInput(f"a budget is a positive number of seconds, not {self.seconds}")
        if self.tokens is not None and self.tokens < 1:
            raise BadInput(f"a budget is a positive number of tokens, not {self.tokens}")

    def spent(self, seconds: float, tokens: int) -> bool:
        """Whether nothing is left of it."""
        out_of_time = self.seconds is not None and seconds >= self.seconds
        return out_of_time or (self.tokens is not None and tokens >= self.tokens)


class Run:
    """The running totals of one writing call: what it reports while it works, and what it returns."""

    def __init__(self, on_progress: ProgressCallback | None) -> None:
        self._report = on_progress or (lambda _: None)
        self._began = time.perf_counter()
        self._turns: list[Turn] = []
        self._records: list[Record] = []
        self._usage: list[Usage] = []
        self.segments: list[Segment] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def tokens(self) -> int:
        return sum(u.prompt_tokens + u.output_tokens for u in self._usage)

    def stored(self, turns: Sequence[Turn], segments: Sequence[Segment], *, total: int) -> None:
        self._turns += turns
        self.segments += segments
        self._tell("store", len(self._turns), total, None)

    def encoded(
        self, segment: Segment, records: Sequence[Record], usage: Sequence[Usage], *, done: int, total: int
    ) -> None:
        self._records += records
        self._usage += usage
        self._tell("encode", done, total, segment)

    def _tell(self, stage: Literal["store", "encode"], done: int, total: int, segment: Segment | None) -> None:
        written = sum(u.output_tokens for u in self._usage)
        self._report(
            Progress(stage, done, total, len(self.segments), len(self._records), written, self.seconds, segment)
        )

    def result(self, skipped: int) -> Remembered:
        return Remembered(tuple(self._turns), skipped, tuple(self.segments), tuple(self._records), tuple(self._usage))

    def reencoded(self, kept: Sequence[Segment], skipped: int) -> Reencoded:
        return Reencoded(tuple(self.segments), tuple(kept), skipped, tuple(self._records), tuple(self._usage))


class Consolidation:
    """The encoder of one memory: its segments and its models, brought together."""

    def __init__(
        self,
        store: Store,
        engines: Engines,
        settings: EncodeSettings,
        *,
        embed: Callable[[Sequence[str]], Vectors],
        log: Callable[[Usage, str], Usage],
    ) -> None:
        """`embed` gives a vector for each text; `log` writes down what a call for a session cost and returns that."""
        self._store = store
        self._engines = engines
        self._settings = settings
        self._embed = embed
        self._log = log

    def encode_waiting(self, run: Run, budget: Budget) -> None:
        """Encode what waits, oldest first, until the budget is used up; one commit at least. An LLM's segments are
        committed one by one, since each costs it seconds and is context for the next; rules cost nothing, so their
        texts are embedded and committed many at a time."""
        pending = self._store.pending()
        if not pending:
            return
        done = 0
        for batch in chunks(pending, RULES_SEGMENTS_PER_COMMIT if self._engines.llm() is None else 1):
            encodings = [self._encoded(segment) for segment in batch]
            self._commit(batch, encodings)
            for segment, encoded in zip(batch, encodings, strict=True):
                done += 1
                run.encoded(segment, encoded.records, encoded.usage, done=done, total=len(pending))
            if budget.spent(run.seconds, run.tokens):
                return

    def encode_again(self, run: Run, session: str | None) -> Reencoded:
        """Replace what other encoders gave, in the order of the conversation, one segment a commit: until its new
        records are there, a segment has its old ones."""
        encoder = self._encoder()
        waiting = {segment.id for segment in self._store.pending()}
        encoded = [segment for segment in self._store.segments(session) if segment.id not in waiting]
        others = [segment for segment in encoded if self._store.encoder_of(segment.id) != encoder]
        kept: list[Segment] = []
        for done, segment in enumerate(others, 1):
            new = self._encoded(segment)
            gives = bool(new.records) and (encoder == RULES or new.outcome != "rules")
            switches = gives or not self._store.segment_records(segment.id)
            if switches:
                self._commit([segment], [new], again=True)
            (run.segments if switches else kept).append(segment)
            run.encoded(segment, new.records if switches else (), new.usage, done=done, total=len(others))
        return run.reencoded(kept, skipped=len(encoded) - len(others))

    def _encoder(self) -> str:
        llm = self._engines.llm()
        return RULES if llm is None else llm.name

    def _encoded(self, segment: Segment) -> Encoded:
        turns = self._store.turns(segment.session, segment.start, segment.end + 1)
        llm = self._engines.llm()
        if llm is None:
            return Encoded(encode_by_rules(segment, turns), note="", usage=(), outcome="rules", detail="no LLM")
        context = ""
        if self._settings.reference_context:
            note, records = self._store.preceding(segment, records=self._settings.reference_records)
            context = reference_context(note, records, self._settings)
        made = encode(segment, turns, llm=llm, context=context, settings=self._settings)
        return replace(made, usage=tuple(self._log(usage, segment.session) for usage in made.usage))

    def _commit(self, segments: Sequence[Segment], encodings: Sequence[Encoded], *, again: bool = False) -> None:
        """Embed the records and the nodes they create in one call, and commit everything in one transaction; `again`
        says that each takes the place of an earlier encoding."""
        pairs = list(zip(segments, encodings, strict=True))
        labels = {
            node.id: text for s, e in pairs for node, text in self._store.missing_nodes(s, e.records, withdrawn=again)
        }
        texts = [r.embedded_text for e in encodings for r in e.records]
        vectors = self._embed([*texts, *labels.values()])
        node_vectors = dict(zip(labels, vectors[len(texts) :], strict=True))
        with self._store.transaction() as tx:
            start = 0
            for segment, encoded in pairs:
                end = start + len(encoded.records)
                if again:
                    tx.withdraw_encoding(segment)
                # Where the model had nothing to say and the rules stood in, the same model may be asked again.
                encoder = RULES if encoded.outcome == "rules" else self._encoder()
                tx.add_encoding(
                    segment, encoded.records, vectors[start:end], node_vectors, encoded.note, encoder=encoder
                )
                start = end


def chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))

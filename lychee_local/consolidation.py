"""Finished segments become records, and records of an earlier encoder those of a better one.

Owns what is encoded next, with which reference context, in which commits, when a budget ends the work, and the running
totals of a call. Refuses to know how a segment is encoded: that is decided in `encode` and `rules`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lychee_local.backends import LLM, Job, Vectors
from lychee_local.backends.jobs import run_all
from lychee_local.encode import Encoded, encode, reference_context
from lychee_local.engines import Engines
from lychee_local.errors import BadInput
from lychee_local.prose import statements
from lychee_local.rules import encode_by_rules
from lychee_local.settings import EncodeSettings
from lychee_local.store import Store
from lychee_local.types import Progress, Record, Reencoded, Remembered, Scope, Segment, Turn, Usage

T = TypeVar("T")
ProgressCallback = Callable[[Progress], None]

# What the rules are called where the name of an encoder stands. No model can have it: it would be a card's name.
RULES = "rules"
RULES_SEGMENTS_PER_COMMIT = 32
# What a segment costs, roughly: a budget that pays for three lets no more than three be under way when it ends.
SEGMENT_SECONDS, SEGMENT_TOKENS = 10.0, 1_000
# Turns, and records, that are looked at for each statement of an assistant: is it only what the memory held?
RECALLED = 3


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

    def width(self, most: int) -> int:
        """How many segments may be under way at the same time, since those are finished when it is used up."""
        by_time = most if self.seconds is None else self.seconds / SEGMENT_SECONDS
        by_tokens = most if self.tokens is None else self.tokens / SEGMENT_TOKENS
        return max(1, int(min(most, by_time, by_tokens)))

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
        """Encode what waits, oldest first, until the budget is used up; one commit at least. Sessions that are under
        way when it is go on to the end of their segment."""
        pending = self._store.pending()
        done = 0

        def commit(segments: Sequence[Segment], encodings: Sequence[Encoded]) -> None:
            nonlocal done
            self._commit(segments, encodings)
            for segment, encoded in zip(segments, encodings, strict=True):
                done += 1
                run.encoded(segment, encoded.records, encoded.usage, done=done, total=len(pending))

        self._encode(pending, commit, run, budget)

    def encode_again(self, run: Run, session: str | None) -> Reencoded:
        """Replace what other encoders gave, each session in its order, one segment a commit: until its new records are
        there, a segment has its old ones."""
        encoder = self._encoder()
        waiting = {segment.id for segment in self._store.pending()}
        encoded = [segment for segment in self._store.segments(session) if segment.id not in waiting]
        others = [segment for segment in encoded if self._store.encoder_of(segment.id) != encoder]
        kept: list[Segment] = []

        def switch(segments: Sequence[Segment], encodings: Sequence[Encoded]) -> None:
            for segment, new in zip(segments, encodings, strict=True):
                gives = bool(new.records) and (encoder == RULES or new.outcome != "rules")
                switches = gives or not self._store.segment_records(segment.id)
                if switches:
                    self._commit([segment], [new], again=True)
                (run.segments if switches else kept).append(segment)
                done = len(run.segments) + len(kept)
                run.encoded(segment, new.records if switches else (), new.usage, done=done, total=len(others))

        self._encode(others, switch, run, Budget())
        return run.reencoded(kept, skipped=len(encoded) - len(others))

    def _encode(
        self,
        segments: Sequence[Segment],
        commit: Callable[[Sequence[Segment], Sequence[Encoded]], None],
        run: Run,
        budget: Budget,
    ) -> None:
        """Encode these, and give them to `commit` until the budget is used up. Rules cost next to nothing, so what they
        give is embedded and committed many segments at a time; a model's segments are committed one by one, since each
        costs it seconds and is context for the next of its session."""

        def enough() -> bool:
            return budget.spent(run.seconds, run.tokens)

        if not segments:
            return  # before a model is loaded
        llm = self._engines.llm()
        if llm is None:
            for batch in chunks(segments, RULES_SEGMENTS_PER_COMMIT):
                commit(batch, [self._by_rules(segment) for segment in batch])
                if enough():
                    return
            return
        sessions: dict[str, list[Segment]] = {}
        for segment in segments:
            sessions.setdefault(segment.session, []).append(segment)

        def session_job(segments: Sequence[Segment]) -> Job[None]:
            for segment in segments:
                commit([segment], [(yield from self._by_model(segment, llm))])
                if enough():
                    return

        jobs = (session_job(held) for number, held in enumerate(sessions.values()) if number == 0 or not enough())
        width = min(budget.width(self._settings.width), len(sessions))
        for _ in run_all(jobs, llm, width=width):
            pass

    def _encoder(self) -> str:
        llm = self._engines.llm()
        return RULES if llm is None else llm.name

    def _by_rules(self, segment: Segment) -> Encoded:
        turns = self._turns(segment)
        records = encode_by_rules(segment, turns, recalled=self._recalled(segment, turns))
        return Encoded(records, note="", usage=(), outcome="rules", detail="no LLM")

    def _by_model(self, segment: Segment, llm: LLM) -> Job[Encoded]:
        context = ""
        if self._settings.reference_context:
            note, records = self._store.preceding(segment, records=self._settings.reference_records)
            context = reference_context(note, records, self._settings)
        turns = self._turns(segment)
        recalled = self._recalled(segment, turns)
        made = yield from encode(segment, turns, llm=llm, context=context, settings=self._settings, recalled=recalled)
        return replace(made, usage=tuple(self._log(usage, segment.session) for usage in made.usage))

    def _recalled(self, segment: Segment, turns: Sequence[Turn]) -> tuple[str, ...]:
        """What the memory held that the assistant's statements in `turns` may come from: what users said, and what was
        recorded in other segments, in nearly the same words."""
        stated = [s for turn in turns if turn.role == "assistant" for s in statements(turn.text)]
        by_users = Scope(roles=("user",))
        said = [i for s in stated for i, _ in self._store.words("turns", s, RECALLED, scope=by_users)]
        noted = [i for s in stated for i, _ in self._store.words("records", s, RECALLED)]
        records = self._store.records_by_id(dict.fromkeys(noted)).values()
        recalled = [turn.text for turn in self._store.turns_by_id(dict.fromkeys(said)).values()]
        return *recalled, *(record.text for record in records if record.segment != segment.id)

    def _turns(self, segment: Segment) -> Sequence[Turn]:
        return self._store.turns(segment.session, segment.start, segment.end + 1)

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

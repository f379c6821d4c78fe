"""The verbs of the product: remember, flush, consolidate, recall, ask. Each is a straight list of stage calls.

Owns the order of the stages and when each model is loaded. Refuses to hold rules of its own: how text is cut, encoded,
searched, ranked and answered is decided in the stages, what is durable is decided in the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import numpy as np

from lychee_local import answer as answering
from lychee_local import channels, intake, plan, rank
from lychee_local.backends import LLM, Embedder, Reranker, Vectors
from lychee_local.cards import default_home
from lychee_local.encode import Encoded, encode, reference_context
from lychee_local.engines import Engines
from lychee_local.errors import BadInput, ModelMissing
from lychee_local.rules import encode_by_rules
from lychee_local.segment import Segmenter, closed_exchanges, embedding_text, exchange_text, stored_text
from lychee_local.settings import Settings
from lychee_local.store import (
    ArchiveReport,
    Embedding,
    Precision,
    Selection,
    Store,
    inspect,
    require_folder,
)
from lychee_local.types import (
    Answer,
    Decision,
    Message,
    Node,
    NodeKind,
    Plan,
    Progress,
    Purpose,
    Recall,
    Receipt,
    Record,
    Remembered,
    Role,
    Scope,
    Segment,
    Spent,
    Stats,
    Turn,
    Usage,
)
from lychee_local.windows import windows

T = TypeVar("T")
ProgressCallback = Callable[[Progress], None]

# Turns per commit while importing: large enough that fsync does not count, small enough that Ctrl-C costs a second.
TURNS_PER_COMMIT = 64
RULES_SEGMENTS_PER_COMMIT = 32


class Memory:
    """One user's memory on this machine. Open it with `Memory.open`, close it with `close` or a `with` block."""

    def __init__(self, store: Store, engines: Engines, settings: Settings) -> None:
        self._store = store
        self._engines = engines
        self._settings = settings
        self._segmenter = Segmenter(settings.segment, store.embedder.calibration)
        self._replayed: set[str] = set()
        self._lock = threading.RLock()  # one writing call at a time

    @classmethod
    def open(
        cls,
        user: str = "default",
        *,
        home: Path | str | None = None,
        models_home: Path | str | None = None,
        profile: str = "laptop",
        llm: LLM | str | None = "auto",
        embedder: Embedder | str = "auto",
        reranker: Reranker | str | None = "auto",
        settings: Settings | None = None,
        precision: Precision = "float32",
        read_only: bool = False,
        wait_seconds: float = 0.0,
    ) -> Self:
        """Open, or create, the memory of `user` below `home` (default: the platform's data folder).

        Models come from `profile`, are looked for below `models_home` (default: `home`) and loaded when first needed;
        to replace one, pass the name of its card or an adapter of your own. With
        `llm=None` turns are encoded by rules and `recall` works, `ask` raises. A memory that is created keeps its
        vectors in `precision`; float16 takes half the disk. A read-only memory needs no lock and sees what another
        process commits.

        Raises:
            BadInput: an unusable user name or an unknown profile.
            ModelMissing: the profile's embedder is not on this machine.
            StoreLocked: another process writes this memory and did not finish within `wait_seconds`.
            StoreMismatch: the memory was written with another embedder or by a newer version.
        """
        home = Path(home) if home is not None else default_home()
        require_folder(home)
        engines = Engines(profile, home=Path(models_home or home), llm=llm, embedder=embedder, reranker=reranker)
        identity = engines.embedder_identity()
        store = Store.open(
            home, user, embedder=identity, read_only=read_only, precision=precision, wait_seconds=wait_seconds
        )
        return cls(store, engines, settings or Settings())

    # --- writing -----------------------------------------------------------------------------------------------------

    def remember(
        self,
        turns_or_text: str | Message | Mapping[str, object] | Iterable[str | Message | Mapping[str, object]],
        *,
        session: str | None = None,
        at: datetime | date | str | None = None,
        speaker: str | None = None,
        role: Role = "user",
        encode: bool = True,
        on_progress: ProgressCallback | None = None,
    ) -> Remembered:
        """Store what was said; segments that it completes are encoded into records unless `encode` is False.

        The turns are durable and searchable before any LLM runs. `session`, `at`, `speaker` and `role` fill in what a
        message does not say itself. A message whose (session, ref) is stored already is skipped.

        Raises:
            BadInput: a message that cannot be stored, named by its position. Nothing of the call is stored then.
            ModelMissing: the LLM is not on this machine. Nothing of the call is stored then.
        """
        messages = intake.messages(turns_or_text, session=session, at=at, speaker=speaker, role=role)
        with self._lock:
            if encode:
                self._engines.require_llm_file()
            run = _Run(on_progress)
            new, skipped = self._admit(messages)
            for chunk in _chunks(new, TURNS_PER_COMMIT):
                run.stored(chunk, self._take_in(chunk), total=len(new))
            if encode:
                self._encode_pending(run)
            return run.result(skipped)

    def flush(
        self, session: str | None = None, *, encode: bool = True, on_progress: ProgressCallback | None = None
    ) -> Remembered:
        """End a session (or, with None, every one): what is still open becomes a segment and is encoded.

        Raises:
            BadInput: there is no such session.
            ModelMissing: the LLM is not on this machine. Nothing changed then.
        """
        with self._lock:
            if session is not None and session not in self._store.sessions():
                raise BadInput(f"there is no session {session!r}", hint="remember something in it first")
            if encode:
                self._engines.require_llm_file()
            run = _Run(on_progress)
            for name in self._store.sessions() if session is None else (session,):
                run.segments.extend(self._segment(name, (), final=True))
            if encode:
                self._encode_pending(run)
            return run.result(skipped=0)

    def consolidate(self, *, on_progress: ProgressCallback | None = None) -> Remembered:
        """Encode every finished segment that still waits for it. Each is committed by itself, so this can be stopped
        at any point and goes on where it stopped."""
        with self._lock:
            self._engines.require_llm_file()
            run = _Run(on_progress)
            self._encode_pending(run)
            return run.result(skipped=0)

    # --- forgetting and moving ---------------------------------------------------------------------------------------

    def forget(
        self,
        *,
        session: str | None = None,
        turns: Sequence[str] = (),
        records: Sequence[str] = (),
        speaker: str | None = None,
        before: date | None = None,
        matching: str | None = None,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Receipt:
        """Forget turns by id, or records by id, or every turn that meets all of the conditions, for good.

        All that was made from them goes too; segments that lost a turn wait to be encoded anew from what is left. Then
        the files are written anew without them, and the bytes of the folder are searched for what was forgotten: the
        receipt says what was removed and what, if anything, was still found. `dry_run` says what would go.

        Raises:
            BadInput: nothing is chosen, two kinds of choice are mixed, or something chosen does not exist.
        """
        chosen = Selection(session, tuple(turns), tuple(records), speaker, before, matching)
        with self._lock:
            if dry_run:
                return self._store.forget(chosen, dry_run=True, on_progress=on_progress)
            self._replayed.clear()  # the segmenter's memory of it goes as well
            self._segmenter = Segmenter(self._settings.segment, self._store.embedder.calibration)
            return self._store.erase(chosen, on_progress=on_progress)

    def compact(self, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Write the files anew without anything that was taken back, such as the records of an earlier encoding."""
        with self._lock:
            self._store.compact(on_progress=on_progress)

    def export(
        self,
        path: Path | str,
        *,
        vectors: bool = True,
        overwrite: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ArchiveReport:
        """Write the whole memory into one checksummed archive, readable without us (docs/archive.md). Without `vectors`
        it is a fraction of the size, and whoever imports it embeds everything again.

        Raises:
            BadInput: there is such a file already, and `overwrite` is not set.
            StoreError: it cannot be written; there is no half of an archive then.
        """
        return self._store.export(Path(path), vectors=vectors, overwrite=overwrite, on_progress=on_progress)

    def import_archive(self, path: Path | str, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Take an archive into this memory, which must be empty. Vectors of another embedder are made anew by this
        memory's.

        Raises:
            BadInput: this memory has turns already, or the file is no archive.
            StoreDamaged: the archive is cut or was changed.
        """
        with self._lock:
            self._replayed.clear()
            about = inspect(Path(path))
            ours = self._store.embedder
            same = (about.embedder.name, about.embedder.digest) == (ours.name, ours.digest)
            embedding = None if same and about.vectors else Embedding(self.embed, stored_text)
            self._store.load(Path(path), embedding=embedding, on_progress=on_progress)

    def _admit(self, messages: Sequence[Message]) -> tuple[list[Turn], int]:
        """Give each new message its place; messages that are stored already are counted, not repeated."""
        following: dict[str, int] = {}
        seen: set[tuple[str, str]] = set()
        new: list[Turn] = []
        for m in messages:
            session = m.session or intake.DEFAULT_SESSION
            if m.ref is not None:
                if (session, m.ref) in seen or self._store.turn_by_ref(session, m.ref) is not None:
                    continue
                seen.add((session, m.ref))
            index = following[session] if session in following else self._store.following(session)
            following[session] = index + 1
            new.append(Turn(session, index, m.text, m.role, m.speaker, m.at, m.ref))
        return new, len(messages) - len(new)

    def _take_in(self, turns: Sequence[Turn]) -> list[Segment]:
        segments: list[Segment] = []
        for session in dict.fromkeys(t.session for t in turns):
            segments += self._segment(session, [t for t in turns if t.session == session], final=False)
        return segments

    def _segment(self, session: str, new: Sequence[Turn], *, final: bool) -> list[Segment]:
        """Commit `new` turns of one session with the decisions and segments that follow from them, in one transaction.

        The last exchange stays open until the next user turn or a flush, since a reply may still belong to it.
        """
        if session not in self._replayed:
            log = self._store.decisions(session)
            self._segmenter.replay(session, log, self._store.exchange_vectors(session), self._store.segments(session))
            self._replayed.add(session)
        waiting = self._store.turns(session, self._segmenter.watermark(session))
        exchanges = closed_exchanges([*waiting, *new], final=final, max_tokens=self._settings.segment.max_tokens)
        texts = [t.line for t in new] + [embedding_text(x) for x in exchanges]
        vectors = self.embed(texts)
        try:
            decisions, segments = self._segmenter.feed(exchanges, vectors[len(new) :])
            if final:
                segments = [*segments, *self._segmenter.flush(session)]
            if new or decisions or segments:
                with self._store.transaction() as tx:
                    tx.add_turns(new, vectors[: len(new)])
                    tx.add_decisions(decisions, vectors[len(new) :])
                    tx.add_segments(segments)
        except BaseException:
            # What the segmenter saw was not committed: forget it, the next call replays the log.
            self._replayed.discard(session)
            raise
        return list(segments)

    def _encode_pending(self, run: _Run) -> None:
        """Encode what waits, oldest first. An LLM's segments are committed one by one, since each costs it seconds and
        is context for the next; rules cost nothing, so their texts are embedded and committed many at a time."""
        pending = self._store.pending()
        if not pending:
            return
        done = 0
        for batch in _chunks(pending, RULES_SEGMENTS_PER_COMMIT if self._engines.llm() is None else 1):
            encodings = [self._encode_one(segment) for segment in batch]
            for usage in (u for encoded in encodings for u in encoded.usage):
                self._store.add_usage(usage)
            self._commit_encodings(batch, encodings)
            for segment, encoded in zip(batch, encodings, strict=True):
                done += 1
                run.encoded(segment, encoded, done=done, total=len(pending))

    def _commit_encodings(self, segments: Sequence[Segment], encodings: Sequence[Encoded]) -> None:
        """Embed the records and the nodes they create in one call, and commit everything in one transaction."""
        pairs = list(zip(segments, encodings, strict=True))
        labels = {node.id: text for s, e in pairs for node, text in self._store.missing_nodes(s, e.records)}
        texts = [r.embedded_text for e in encodings for r in e.records]
        vectors = self.embed([*texts, *labels.values()])
        node_vectors = dict(zip(labels, vectors[len(texts) :], strict=True))
        with self._store.transaction() as tx:
            start = 0
            for segment, encoded in pairs:
                end = start + len(encoded.records)
                tx.add_encoding(segment, encoded.records, vectors[start:end], node_vectors, encoded.note)
                start = end

    def _encode_one(self, segment: Segment) -> Encoded:
        turns = self._store.turns(segment.session, segment.start, segment.end + 1)
        llm = self._engines.llm()
        if llm is None:
            return Encoded(encode_by_rules(segment, turns), note="", usage=(), outcome="rules", detail="no LLM")
        context = ""
        if self._settings.encode.reference_context:
            note = self._store.note(segment.session)
            latest = self._store.records(segment.session, latest=self._settings.encode.reference_records)
            context = reference_context(note, latest, self._settings.encode)
        return encode(segment, turns, llm=llm, context=context, settings=self._settings.encode)

    # --- asking ------------------------------------------------------------------------------------------------------

    def recall(
        self, question: str, *, k: int | None = None, now: datetime | None = None, scope: Scope | None = None
    ) -> Recall:
        """Find the evidence for `question`, best first.

        `k` is the number of items wanted; `now` is the time the question is asked, for expressions such as "last week".
        `scope` limits what may be found, by session, speaker, kind and time of saying.

        Raises:
            BadInput: a blank question or a `k` below 1.
        """
        planner = self._settings.recall.planner
        return self._recall(question, k=k, now=now, scope=scope, planner="rules" if planner == "auto" else planner)

    def ask(
        self,
        question: str,
        *,
        k: int | None = None,
        now: datetime | None = None,
        scope: Scope | None = None,
        style: Literal["short", "chat"] = "chat",
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer `question` from the recalled evidence; `on_text` receives the answer as it is written.

        Raises:
            BadInput: a blank question.
            ModelMissing: this memory has no LLM.
        """
        llm = self._engines.llm()
        if llm is None:
            raise ModelMissing(
                "ask needs a language model and this memory was opened without one",
                hint="use recall, or open it with a profile that has an LLM",
            )
        planner = self._settings.recall.planner
        found = self._recall(question, k=k, now=now, scope=scope, planner="llm" if planner == "auto" else planner)
        reply = answering.answer(
            found.question,
            found.evidence,
            llm=llm,
            now=now,
            settings=self._settings.recall,
            question_type=found.plan.question_type,
            style=style,
            on_text=on_text,
        )
        for call in reply.usage:
            self._store.add_usage(call)
        return Answer(
            found.question,
            reply.text,
            found.evidence,
            reply.cited,
            (*found.usage, *reply.usage),
            found.notes + reply.notes,
        )

    def _recall(
        self,
        question: str,
        *,
        k: int | None,
        now: datetime | None,
        scope: Scope | None,
        planner: Literal["llm", "rules", "none"],
    ) -> Recall:
        settings = self._settings.recall
        question = intake.question(question)
        if k is not None and k < 1:
            raise BadInput(f"k is the number of items wanted, at least 1, not {k}")
        self._store.refresh()
        made, usage = self._plan(question, now, planner)
        for call in usage:
            self._store.add_usage(call)
        queries = plan.embedding_queries(made)
        vectors = dict(zip(queries, self.embed(queries, kind="query"), strict=True))
        budget = max(k or settings.k, 1)
        calibration = self._store.embedder.calibration
        with self._store.snapshot():
            by_route = channels.recall(
                made, vectors, self._store, k=budget, settings=settings, calibration=calibration, scope=scope
            )
            if settings.windows:
                by_route = windows(made, by_route, self._store, k=budget, tokens=settings.evidence_tokens, scope=scope)
        chosen, notes = rank.select(made, by_route, self._engines.reranker(), k=budget, settings=settings)
        note = (made.note,) if made.note else ()
        return Recall(question, rank.evidence(chosen, self._store), made, usage, (*note, *notes))

    def _plan(self, question: str, now: datetime | None, planner: str) -> tuple[Plan, tuple[Usage, ...]]:
        if planner == "none":
            return plan.plan_without(question), ()
        if planner == "llm" and (llm := self._engines.llm()) is not None:
            return plan.plan_with_llm(question, llm=llm, now=now, settings=self._settings.recall)
        return plan.plan_by_rules(question, speakers=self._store.speakers(), now=now), ()

    # --- looking -----------------------------------------------------------------------------------------------------

    def sessions(self) -> tuple[str, ...]:
        return self._store.sessions()

    def turns(self, session: str | None = None) -> tuple[Turn, ...]:
        names = self._store.sessions() if session is None else (session,)
        return tuple(t for name in names for t in self._store.turns(name))

    def decisions(self, session: str | None = None) -> tuple[Decision, ...]:
        """The segmenter's log: each exchange with the signals that joined it to, or cut it from, what came before."""
        names = self._store.sessions() if session is None else (session,)
        with self._store.snapshot():
            return tuple(self._with_text(d) for name in names for d in self._store.decisions(name))

    def _with_text(self, decision: Decision) -> Decision:
        x = decision.exchange
        turns = self._store.turns(x.session, x.start, x.end + 1)
        return replace(decision, exchange=replace(x, text=exchange_text(x, turns)))

    def segments(self, session: str | None = None) -> tuple[Segment, ...]:
        return tuple(self._store.segments(session))

    def pending(self) -> tuple[Segment, ...]:
        """Finished segments that have no records yet."""
        return self._store.pending()

    def records(self, session: str | None = None) -> tuple[Record, ...]:
        return tuple(self._store.records(session))

    def nodes(self, kind: NodeKind | None = None) -> tuple[Node, ...]:
        return tuple(self._store.nodes(kind))

    def usage(self) -> tuple[Usage, ...]:
        return tuple(self._store.usage())

    def stats(self) -> Stats:
        held = self._store.stats()
        spent: dict[Purpose, Spent] = {}
        for u in self._store.usage():
            s = spent.get(u.purpose, Spent(0, 0, 0, 0, 0.0))
            spent[u.purpose] = Spent(
                s.calls + 1,
                s.prompt_tokens + u.prompt_tokens,
                s.cached_tokens + u.cached_tokens,
                s.output_tokens + u.output_tokens,
                s.seconds + u.seconds,
            )
        tokens = {p: s.prompt_tokens + s.output_tokens for p, s in spent.items()}
        return Stats(
            user=self._store.user,
            folder=str(self._store.path),
            sessions=held.sessions,
            turns=held.turns,
            segments=held.segments,
            pending=len(self._store.pending()),
            records=held.records,
            nodes=held.nodes,
            bytes=sum(held.bytes.values()),
            embedder=self._store.embedder.name,
            usage=spent,
            construction_tokens=tokens.get("encode", 0),
            query_tokens=tokens.get("plan", 0) + tokens.get("answer", 0),
        )

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        """Unit vectors of `texts` under this memory's embedder, float32 of shape (len(texts), dimension)."""
        if not texts:
            return np.zeros((0, self._store.embedder.dimension), dtype=np.float32)
        return self._engines.embedder().embed(texts, kind=kind)

    # --- lifetime ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._store.close()
        self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """The running totals of one writing call: what it reports while it works, and what it returns."""

    def __init__(self, on_progress: ProgressCallback | None) -> None:
        self._report = on_progress or (lambda _: None)
        self._began = time.perf_counter()
        self._turns: list[Turn] = []
        self._records: list[Record] = []
        self._usage: list[Usage] = []
        self.segments: list[Segment] = []

    def stored(self, turns: Sequence[Turn], segments: Sequence[Segment], *, total: int) -> None:
        self._turns += turns
        self.segments += segments
        self._tell("store", len(self._turns), total, None)

    def encoded(self, segment: Segment, encoded: Encoded, *, done: int, total: int) -> None:
        self._records += encoded.records
        self._usage += encoded.usage
        self._tell("encode", done, total, segment)

    def _tell(self, stage: Literal["store", "encode"], done: int, total: int, segment: Segment | None) -> None:
        output_tokens = sum(u.output_tokens for u in self._usage)
        seconds = time.perf_counter() - self._began
        self._report(
            Progress(stage, done, total, len(self.segments), len(self._records), output_tokens, seconds, segment)
        )

    def result(self, skipped: int) -> Remembered:
        return Remembered(tuple(self._turns), skipped, tuple(self.segments), tuple(self._records), tuple(self._usage))


def _chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))

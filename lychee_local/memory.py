"""The verbs of the product: remember, flush, consolidate, reencode, recall, ask, forget. Each is a straight list of
calls to the stages.

Owns the order of the stages and when each model is loaded. Refuses to hold rules of its own: how text is cut, encoded,
searched, ranked and answered is decided in the stages, what is durable is decided in the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from lychee_local import answer as answering
from lychee_local import chain, channels, intake, plan, rank, wording
from lychee_local.accounting import Grouping, spent
from lychee_local.backends import LLM, Embedder, Reranker, Vectors
from lychee_local.cards import default_home
from lychee_local.consolidation import Budget, Consolidation, ProgressCallback, Run, chunks
from lychee_local.engines import Engines
from lychee_local.errors import BadInput, ModelMissing, there_are
from lychee_local.segment import Segmenter, closed_exchanges, embedding_text, exchange_text, stored_text
from lychee_local.settings import Planner, Settings
from lychee_local.store import (
    ArchiveReport,
    Embedding,
    Precision,
    Selection,
    Store,
    inspect,
    require_folder,
)
from lychee_local.trace import OFF, Recorder
from lychee_local.types import (
    PURPOSES,
    Answer,
    Candidate,
    Chain,
    Decision,
    Message,
    Node,
    NodeKind,
    Plan,
    Recall,
    Receipt,
    Record,
    Reencoded,
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

# Turns per commit while importing: large enough that fsync does not count, small enough that Ctrl-C costs a second.
TURNS_PER_COMMIT = 64


def local_time() -> datetime:
    """Now, by the clock and in the time zone of this machine."""
    return datetime.now().astimezone().replace(microsecond=0)


class Memory:
    """One user's memory on this machine. Open it with `Memory.open`, close it with `close` or a `with` block."""

    def __init__(
        self, store: Store, engines: Engines, settings: Settings, clock: Callable[[], datetime] = local_time
    ) -> None:
        self._store = store
        self._engines = engines
        self._settings = settings
        self._clock = clock
        self._consolidation = Consolidation(store, engines, settings.encode, embed=self.embed, log=self._log)
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
        clock: Callable[[], datetime] = local_time,
    ) -> Self:
        """Open, or create, the memory of `user` below `home` (default: the platform's data folder).

        Models come from `profile`, are looked for below `models_home` (default: `home`) and loaded when first needed;
        to replace one, pass the name of its card or an adapter of your own. With
        `llm=None` turns are encoded by rules and `recall` works, `ask` raises. A memory that is created keeps its
        vectors in `precision`; float16 takes half the disk. Opening for writing first finishes a forgetting that was
        stopped half-way. A read-only memory needs no lock and sees what another
        process commits. `clock` dates the lines of the usage log and nothing else.

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
        try:
            store.finish_erasure()
        except BaseException:
            store.close()
            raise
        return cls(store, engines, settings or Settings(), clock)

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
            run = Run(on_progress)
            new, skipped = self._admit(messages)
            for chunk in chunks(new, TURNS_PER_COMMIT):
                run.stored(chunk, self._take_in(chunk), total=len(new))
            if encode:
                self._consolidation.encode_waiting(run, Budget())
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
            self._require_session(session)
            if encode:
                self._engines.require_llm_file()
            run = Run(on_progress)
            for name in self._store.sessions() if session is None else (session,):
                run.segments.extend(self._segment(name, (), final=True))
            if encode:
                self._consolidation.encode_waiting(run, Budget())
            return run.result(skipped=0)

    def consolidate(
        self,
        budget_seconds: float | None = None,
        max_tokens: int | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> Remembered:
        """Encode every finished segment that still waits for it, several sessions side by side. Each is committed by
        itself, so this can be stopped at any point and goes on where it stopped.

        With a budget it ends after the segment with which so many seconds have passed, the loading of the model among
        them, or so many tokens, prompt and output together, were used; segments of other sessions that are under way
        then, no more than the budget pays for, are finished. At least one segment is encoded.

        Raises:
            BadInput: a budget that is not positive.
            ModelMissing: the LLM is not on this machine.
        """
        budget = Budget(budget_seconds, max_tokens)
        with self._lock:
            self._engines.require_llm_file()
            run = Run(on_progress)
            self._consolidation.encode_waiting(run, budget)
            return run.result(skipped=0)

    def reencode(self, session: str | None = None, *, on_progress: ProgressCallback | None = None) -> Reencoded:
        """Encode anew every segment (of `session`) that another encoder has encoded, with the one of this memory: a
        better model, or with `llm=None` the rules.

        Each segment switches in one commit; until then it has its old records, and keeps them where the encoder finds
        nothing to say. What this encoder has encoded already is left alone, so a stopped run goes on where it stopped.
        The old records are out of every search at once, their bytes go with the next `compact` or `forget`. A record
        that was forgotten by itself can come back, as long as the turns that say it are there.

        Raises:
            BadInput: there is no such session.
            ModelMissing: the LLM is not on this machine.
        """
        with self._lock:
            self._require_session(session)
            self._engines.require_llm_file()
            return self._consolidation.encode_again(Run(on_progress), session)

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

    def _require_session(self, session: str | None) -> None:
        if session is not None and session not in self._store.sessions():
            raise BadInput(f"there is no session {session!r}", hint="remember something in it first")

    def _log(self, usage: Usage, session: str | None = None) -> Usage:
        """Write down what a call cost, when, and for which session."""
        dated = replace(usage, session=session, at=self._clock())
        self._store.add_usage(dated)
        return dated

    # --- asking ------------------------------------------------------------------------------------------------------

    def recall(
        self,
        question: str,
        *,
        k: int | None = None,
        now: datetime | None = None,
        scope: Scope | None = None,
        explain: bool = False,
    ) -> Recall:
        """Find the evidence for `question`, best first.

        `k` is the number of items wanted; `now` is the time the question is asked, for expressions such as "last week".
        `scope` limits what may be found, by session, speaker, kind and time of saying. With `explain` the result has a
        `trace`: what each channel found, each candidate's rank after each stage, why it was kept or dropped, the time.

        Raises:
            BadInput: a blank question or a `k` below 1.
        """
        planner = self._settings.recall.planner
        planner = "rules" if planner == "auto" else planner
        return self._recall(question, k=k, now=now, scope=scope, planner=planner, record=Recorder() if explain else OFF)

    def ask(
        self,
        question: str,
        *,
        k: int | None = None,
        now: datetime | None = None,
        scope: Scope | None = None,
        style: Literal["short", "chat"] = "chat",
        on_text: Callable[[str], None] | None = None,
        explain: bool = False,
    ) -> Answer:
        """Answer `question` from the recalled evidence; `on_text` receives the answer as it is written. With `explain`
        the answer has the `trace` of its recall.

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
        found = self._recall(
            question, k=k, now=now, scope=scope, planner=planner, record=Recorder() if explain else OFF
        )
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
        calls = tuple(self._log(call) for call in reply.usage)
        return Answer(
            found.question,
            reply.text,
            found.evidence,
            reply.cited,
            found.plan,
            (*found.usage, *calls),
            found.notes + reply.notes,
            found.chains,
            found.trace,
        )

    def _recall(
        self,
        question: str,
        *,
        k: int | None,
        now: datetime | None,
        scope: Scope | None,
        planner: Planner,
        record: Recorder = OFF,
    ) -> Recall:
        settings = self._settings.recall
        question = intake.question(question)
        if k is not None and k < 1:
            raise BadInput(f"k is the number of items wanted, at least 1, not {k}")
        self._store.refresh()
        if scope is not None:
            self._require_known(scope)
        made, usage = self._plan(question, now, "none" if settings.mode == "chain" else planner)
        usage = tuple(self._log(call) for call in usage)
        record.lap("plan")
        vectors = dict(zip(made.texts, self.embed(made.texts, kind="query"), strict=True))
        record.lap("embed")
        notes: tuple[str, ...] = ()
        if settings.mode == "chain":
            chosen = self._nearest_turns(question, vectors[question], scope, record)
        else:
            chosen, notes = self._selected(made, vectors, k or settings.k, scope, record)
            if settings.facts and made.concludes:
                chosen = self._with_facts(chosen, made, vectors, k, scope, record)
        chains: tuple[Chain, ...] = ()
        if settings.mode != "lychee":
            chosen, chains = chain.link(
                chosen,
                vectors[question],
                self._store,
                embed=self.embed,
                settings=settings.chain,
                calibration=self._store.embedder.calibration,
                keep_rest=settings.mode == "lychee+chain",
                record=record,
            )
            record.lap("chains")
        # Chains are as long as they are, and small facts as many as fit: only a number that was asked for cuts them.
        items = k if settings.mode == "chain" or (made.concludes and settings.facts) else k or settings.k
        chosen = rank.within(chosen, settings.evidence_tokens, items=items, record=record)
        shown = rank.evidence(chosen, self._store, record)
        record.lap("evidence")
        note = (made.note,) if made.note else ()
        trace = record.trace([e.id for e in shown])
        return Recall(question, shown, made, usage, (*note, *notes), chains, trace)

    def _require_known(self, scope: Scope) -> None:
        """A name that is misspelt is a mistake, not an empty result."""
        for session in scope.sessions:
            if not self._store.following(session):
                raise BadInput(f"there is no session {session!r}", hint=there_are(self._store.sessions()))
        speakers = self._store.speakers() if scope.speakers else ()
        for speaker in scope.speakers:
            if speaker not in speakers:
                raise BadInput(f"nobody called {speaker!r} speaks here", hint=there_are(speakers))

    def _nearest_turns(
        self, question: str, vector: Vectors, scope: Scope | None, record: Recorder
    ) -> tuple[Candidate, ...]:
        """What chains are grown from where there is nothing but turns."""
        with self._store.snapshot():
            found = chain.pool(
                question,
                vector,
                self._store,
                settings=self._settings.recall.chain,
                calibration=self._store.embedder.calibration,
                scope=scope,
                record=record,
            )
        record.lap("channels")
        return found

    def _selected(
        self, made: Plan, vectors: Mapping[str, Vectors], k: int, scope: Scope | None, record: Recorder
    ) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """The best k candidates of all channels, or as many as chains are grown from, best first; and notes."""
        settings = self._settings.recall
        store, calibration = self._store, self._store.embedder.calibration
        if settings.mode == "lychee+chain":
            k = max(k, settings.chain.pool)
        with store.snapshot():
            by_route = channels.recall(
                made, vectors, store, k=k, settings=settings, calibration=calibration, scope=scope, record=record
            )
            record.lap("channels")
            if settings.windows:
                tokens = settings.evidence_tokens
                by_route = windows(made, by_route, store, k=k, tokens=tokens, scope=scope, record=record)
                record.lap("windows")
        chosen, notes = rank.select(made, by_route, self._engines.reranker(), k=k, settings=settings, record=record)
        record.lap("select")
        return chosen, notes

    def _with_facts(
        self,
        chosen: tuple[Candidate, ...],
        made: Plan,
        vectors: Mapping[str, Vectors],
        k: int | None,
        scope: Scope | None,
        record: Recorder,
    ) -> tuple[Candidate, ...]:
        """For a conclusion: the best of what was chosen, a third of the tokens; then single records; then the rest."""
        settings, store = self._settings.recall, self._store
        alone = replace(settings, channels=tuple(c for c in settings.channels if c == "records"))
        with store.snapshot():
            by_route = channels.recall(
                made, vectors, store, k=rank.FACTS, settings=alone, calibration=store.embedder.calibration, scope=scope
            )
        facts = rank.by_field_score(by_route, k or rank.FACTS)
        best = chosen if settings.evidence_tokens is None else rank.within(chosen, settings.evidence_tokens // 3)
        found = rank.beside(best, facts, record)
        record.lap("facts")
        return (*found, *(c for c in chosen if c not in best))

    def _plan(self, question: str, now: datetime | None, planner: Planner) -> tuple[Plan, tuple[Usage, ...]]:
        if planner == "none":
            return wording.plan_without(question), ()
        by_rules = wording.plan_by_rules(question, speakers=self._store.speakers(), now=now)
        unsure = planner == "llm" or (planner == "auto" and by_rules.doubts)
        if unsure and (llm := self._engines.llm()) is not None:
            by_llm, usage = plan.plan_with_llm(question, llm=llm, now=now, settings=self._settings.recall)
            return replace(by_llm, doubts=by_rules.doubts, concludes=by_rules.concludes), usage
        return by_rules, ()

    # --- looking -----------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Let a read-only memory see what another process has committed; True if anything changed. `recall` does it
        by itself."""
        return self._store.refresh()

    def sessions(self) -> tuple[str, ...]:
        return self._store.sessions()

    def turns(self, session: str | None = None) -> tuple[Turn, ...]:
        names = self._store.sessions() if session is None else (session,)
        return tuple(t for name in names for t in self._store.turns(name))

    def turn(self, turn_id: str) -> Turn:
        """One turn by its id. Raises KeyError for an unknown or forgotten one."""
        return self._store.turn(turn_id)

    def record(self, record_id: str) -> Record:
        """One record by its id. Raises KeyError for an unknown or forgotten one."""
        return self._store.record(record_id)

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

    def spent(self, by: Grouping = "purpose") -> dict[str | None, Spent]:
        """What the calls of language models cost, by "purpose", "model", "session" or "day". Under None are those that
        have no session, because they were for a question, or whose day was not kept."""
        return spent(self._store.usage(), by)

    def stats(self) -> Stats:
        held = self._store.stats()
        cost = self.spent("purpose")
        usage = {purpose: cost[purpose] for purpose in PURPOSES if purpose in cost}
        tokens = {p: s.prompt_tokens + s.output_tokens for p, s in usage.items()}
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
            usage=usage,
            construction_tokens=tokens.get("encode", 0),
            query_tokens=tokens.get("plan", 0) + tokens.get("answer", 0),
        )

    def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
        """Unit vectors of `texts` under this memory's embedder, float32 of shape (len(texts), dimension)."""
        if not texts:
            return np.zeros((0, self._store.embedder.dimension), dtype=np.float32)
        each = list(dict.fromkeys(texts))  # a turn that is an exchange by itself comes twice
        rows = self._engines.embedder().embed(each, kind=kind)
        if len(each) == len(texts):
            return rows
        place = {text: number for number, text in enumerate(each)}
        return rows[[place[text] for text in texts]]

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

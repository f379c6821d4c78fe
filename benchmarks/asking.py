"""One conversation of a run: its memory built, its questions asked and scored.

Owns what a line about a question holds. A question that failed is an error, is named as one, and has no scores. The
memory is kept under the hash of all that made it, and used by every run that needs the same.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks import scores
from benchmarks.baselines import Transcript
from benchmarks.environment import sha256
from benchmarks.folder import Line, append, questions
from benchmarks.methods import Method, method, within
from benchmarks.models import Models
from benchmarks.peers.conversation import remembered
from benchmarks.peers.kinds import Kind
from benchmarks.questions import Conversation, Question
from benchmarks.setups import Places, Setup
from lychee_local import Memory
from lychee_local import answer as answering
from lychee_local.errors import LycheeError
from lychee_local.lexicon import prompt_tokens
from lychee_local.types import Evidence, Plan, Progress, Usage

TELL_SECONDS = 30.0


@cache
def _models(profile: str, places: Places) -> Models:
    return Models(profile, places.models, places.stores / "vectors.sqlite", threads=places.threads)


def ask_all(setup: Setup, places: Places, conversation: Conversation, wanted: Collection[str]) -> Iterator[Line]:
    """Build the memory of a conversation, or go on with it, and ask its questions; each line is on disk before it is
    yielded."""
    models = _models(setup.profile, places)
    asked = method(setup.method)
    if asked.peer is not None:
        yield from _ask_peer(setup, asked, asked.peer, places, conversation, wanted)
        return
    settings = within(asked.settings, setup.budget, setup.items or asked.items)
    home = places.stores / store_name(setup, asked, models)
    built = _build(setup, asked, home, conversation, models)
    append(places.out / "construction.jsonl", built)
    llm = models.llm if setup.answers else None
    with Memory.open(
        conversation.id,
        home=home,
        models_home=models.home,
        llm=llm,
        embedder=models.embedder,
        reranker=models.reranker,
        settings=settings,
        read_only=True,
    ) as memory:
        transcript = Transcript(memory, models.reranker)
        ask = _Asking(setup, asked, memory, transcript, models)
        for question in conversation.questions:
            if question.id in wanted:
                line = _line(conversation.id, question, ask.given)
                append(questions(places.out, conversation.id), line)
                yield line


def _ask_peer(
    setup: Setup, asked: Method, kind: Kind, places: Places, conversation: Conversation, wanted: Collection[str]
) -> Iterator[Line]:
    """The same with a peer, whose evidence is read by the same prompt."""
    models = _models(setup.profile, places)
    with remembered(kind, setup, places, conversation, models) as memory:
        append(places.out / "construction.jsonl", memory.built)

        def given(question: Question) -> _Given:
            found, usage = memory.found(question)
            read = _read(question, found.evidence, models, asked) if setup.answers else _Given(found.evidence)
            notes = () if found.traced else ("the peer's items are not traced to turns: no scores of evidence",)
            return replace(read, usage=(*usage, *read.usage), notes=(*read.notes, *notes), traced=found.traced)

        for question in conversation.questions:
            if question.id in wanted:
                line = _line(conversation.id, question, given)
                append(questions(places.out, conversation.id), line)
                yield line


def _build(setup: Setup, asked: Method, home: Path, conversation: Conversation, models: Models) -> Line:
    """Store the conversation, and encode it where the method asks for it; a memory that is there already is gone on
    with. What it cost is read from its own log, so that it is the same for every run that uses it."""
    by_model = asked.records and setup.records == "model"
    with Memory.open(
        conversation.id,
        home=home,
        models_home=models.home,
        llm=models.llm if by_model else None,
        embedder=models.embedder,
        reranker=None,
        settings=asked.settings,
        wait_seconds=600.0,
    ) as memory:
        began = time.perf_counter()
        memory.remember(conversation.messages, encode=False)
        if asked.records:
            memory.flush(encode=False)
            memory.consolidate(on_progress=_Told(conversation.id))
        stats = memory.stats()
        segments = memory.segments()
        encoded = stats.usage.get("encode")
    reasons = {s.reason for s in segments}
    return {
        "conversation": conversation.id,
        "turns": stats.turns,
        "segments": stats.segments,
        "reasons": {reason: sum(s.reason == reason for s in segments) for reason in sorted(reasons)},
        "records": stats.records,
        "construction_tokens": stats.construction_tokens,
        "encoding_seconds": 0.0 if encoded is None else round(encoded.seconds, 1),
        "seconds_now": round(time.perf_counter() - began, 2),
        "peak_mb": _peak_mb(),
    }


class _Told:
    """Says about every half minute how far the encoding of a conversation is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._said > TELL_SECONDS:
            done = f"{progress.done}/{progress.total} segments, {progress.records} records"
            print(f"{self._name}: {done}, {progress.seconds:.0f} s", file=sys.stderr, flush=True)
            self._said = time.monotonic()


def store_name(setup: Setup, asked: Method, models: Models) -> str:
    """The folder of the memories that this run needs: a hash of all that makes them."""
    digests = models.digests()
    made: Line = {"layout": setup.layout, "data": sha256(Path(setup.data)), "embedder": digests["embedder"]}
    if asked.records:
        encoder = digests["llm"] if setup.records == "model" else "rules"
        made |= {"encoder": encoder, "segment": asdict(asked.settings.segment), "encode": asdict(asked.settings.encode)}
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a method came up with for a question. What is not `traced` to turns has no scores of evidence."""

    evidence: tuple[Evidence, ...]
    plan: Plan | None = None
    text: str | None = None
    cited: tuple[str, ...] = ()
    usage: tuple[Usage, ...] = ()
    notes: tuple[str, ...] = ()
    traced: bool = True


@dataclass(frozen=True, slots=True)
class _Asking:
    setup: Setup
    method: Method
    memory: Memory
    transcript: Transcript
    models: Models

    def given(self, question: Question) -> _Given:
        text, now = question.text, question.asked
        if self.method.shows == "recalled":
            if not self.setup.answers:
                found = self.memory.recall(text, now=now)
                return _Given(found.evidence, found.plan, usage=found.usage, notes=found.notes)
            answer = self.memory.ask(text, now=now, style="short")
            return _Given(answer.evidence, answer.plan, answer.text, answer.cited, answer.usage, answer.notes)
        budget = None if self.method.shows == "all" else self.setup.budget
        evidence = self.transcript.shown(self.method.shows, question, budget)[: self.setup.items]
        if not self.setup.answers:
            return _Given(evidence)
        return _read(question, evidence, self.models, self.method)


def _read(question: Question, evidence: tuple[Evidence, ...], models: Models, asked: Method) -> _Given:
    """What the answer model makes of evidence that is not the product's."""
    text, now, llm, recall = question.text, question.asked, models.llm, asked.settings.recall
    if not evidence:
        # The product does not ask a model that has nothing to read; a baseline is about what it says all the same.
        prompt = answering.answer_messages(text, (), style="short", prompt_style=llm.prompt_style, now=now)
        done = llm.complete(prompt, purpose="answer", max_tokens=recall.answer_output_tokens)
        return _Given((), text=done.text.strip(), usage=(done.usage,))
    reply = answering.answer(text, evidence, llm=llm, now=now, settings=recall, style="short")
    return _Given(evidence, None, reply.text, reply.cited, reply.usage, reply.notes)


def _line(conversation: str, question: Question, ask: Callable[[Question], _Given]) -> Line:
    """One question, asked and scored; what went wrong with it is named in `error`."""
    began = time.perf_counter()
    try:
        given = ask(question)
    except LycheeError as error:
        return _about(conversation, question) | {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - began
    return (
        _about(conversation, question)
        | {"error": "", "plan": None if given.plan is None else _plan(given.plan)}
        | {"evidence": [_shown(e) for e in given.evidence], "reply": given.text, "cited": list(given.cited)}
        | {"scores": score(question, given), "usage": [_cost(u) for u in given.usage]}
        | {"evidence_tokens": sum(prompt_tokens(e.text) for e in given.evidence)}
        | {"seconds": round(seconds, 4), "peak_mb": _peak_mb(), "notes": list(given.notes)}
    )


def _peak_mb() -> int:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _about(conversation: str, question: Question) -> Line:
    return {
        "id": question.id,
        "conversation": conversation,
        "category": question.category,
        "question": question.text,
        "answer": question.answer,
        "answerable": question.answerable,
        "gold": list(question.gold),
        "gold_sessions": list(question.sessions),
    }


def _plan(plan: Plan) -> Line:
    routes = [{"goal": route.goal, "queries": list(route.queries)} for route in plan.routes]
    kept: Line = {"source": plan.source, "type": plan.question_type, "doubts": list(plan.doubts), "routes": routes}
    return kept | ({"note": plan.note} if plan.note else {})


def _shown(e: Evidence) -> Line:
    said = None if e.said is None else e.said.isoformat()
    return {
        "id": e.id,
        "kind": e.kind,
        "session": e.session,
        "refs": list(e.refs),
        "said": said,
        "score": round(e.score, 6),
        "text": e.text,
    }


def _cost(usage: Usage) -> Line:
    return {
        "purpose": usage.purpose,
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "output": usage.output_tokens,
        "seconds": round(usage.seconds, 3),
        "outcome": usage.outcome,
    }


def score(question: Question, given: _Given) -> Line:
    """All scores lie in [0, 1]; those that mean nothing for a question are left out."""
    found: Line = {}
    for name, gold, shown in (
        ("turns", question.gold, [e.refs for e in given.evidence]),
        ("sessions", question.sessions, [(e.session,) for e in given.evidence]),
    ):
        if gold and given.traced:
            everything = scores.evidence(shown, gold, (len(shown), *scores.CUTS))
            found[name], found[f"{name} all"] = everything[0].recall, float(everything[0].all)
            for reach in everything[1:]:
                found |= {f"{name}@{reach.k}": reach.recall, f"{name} any@{reach.k}": float(reach.any)}
                found[f"{name} all@{reach.k}"] = float(reach.all)
    if given.text is not None:
        found["f1"] = scores.f1(given.text, question)
        found["exact"] = float(scores.exact_match(given.text, question))
    return found

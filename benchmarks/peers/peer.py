"""A peer as the benchmark sees it: it takes messages in, gives evidence for a question, and what it cost is known.

Owns what a reply of a peer may look like, and what becomes of it: evidence that our own answer prompt can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from benchmarks.peers.child import Child, PeerFailed
from benchmarks.peers.meter import Meter
from lychee_local import Message
from lychee_local.types import Evidence, Usage

T = TypeVar("T")
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """`traced`: the refs and sessions of all items are where their texts come from, so evidence recall means
    something."""

    evidence: tuple[Evidence, ...]
    traced: bool


class Peer(Protocol):
    def ingest(self, messages: Sequence[Message]) -> None:
        """Take in messages in the order in which they were said.

        Raises:
            LycheeError: they were not, or not all of them, taken in.
        """
        ...

    def evidence(self, question: str, items: int) -> Found:
        """
        Raises:
            LycheeError: there was no answer.
        """
        ...

    def usage(self) -> tuple[Usage, ...]:
        """Every call of the language model so far: those of `ingest` have the purpose "encode", others "plan"."""
        ...


@dataclass(frozen=True, slots=True)
class _Item:
    id: str
    kind: Literal["record", "turn", "window"]
    text: str
    score: float
    session: str
    refs: tuple[str, ...]
    said: datetime | None
    traced: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What a peer says that it has of a conversation: `memories`, in its own unit; how many turns it could not take in
    (`lost`), or took in and kept nothing of (`empty`); the most memory that its process had."""

    memories: int
    lost: int
    empty: int
    peak_mb: int


@dataclass(frozen=True, slots=True)
class _Opened:
    turns_at_once: int


_ITEMS: TypeAdapter[tuple[_Item, ...]] = TypeAdapter(tuple[_Item, ...])
_KEPT: TypeAdapter[Kept] = TypeAdapter(Kept)
_OPENED: TypeAdapter[_Opened] = TypeAdapter(_Opened)


class ChildPeer:
    """A peer in a child process; `start` starts one, and is called again for the next question after one has failed.
    `settings` go into the request that opens it. `patience` is how many seconds a reply may take."""

    def __init__(self, start: Callable[[], Child], settings: Line, meter: Meter, *, patience: float) -> None:
        self._start, self._settings, self._meter, self.patience = start, settings, meter, patience
        self._child: Child | None = None
        self._turns_at_once = 1
        self._refused: dict[str, None] = {}

    def ingest(self, messages: Sequence[Message], on_turns: Callable[[int], None] = lambda _: None) -> None:
        """See `Peer`. `on_turns` is told how many messages are in, after each portion."""
        self._meter.purpose = "encode"
        child = self._open()
        done = 0
        for turns in _portions(messages, self._turns_at_once):
            # Of this child alone: one that is started anew would go on as if nothing had been lost.
            self._reply(child, {"do": "ingest", "turns": [_turn(message) for message in turns]})
            done += len(turns)
            on_turns(done)

    def evidence(self, question: str, items: int) -> Found:
        self._meter.purpose = "plan"
        request: Line = {"do": "evidence", "question": question, "items": items}
        found = self._checked(_ITEMS, self._reply(self._open(), request))
        return Found(tuple(_evidence(item) for item in found), all(item.traced for item in found))

    def usage(self) -> tuple[Usage, ...]:
        return self._meter.usage()

    def kept(self) -> Kept:
        """To be asked of the process that took the conversation in.

        Raises:
            PeerFailed: it does not say, or has ended.
        """
        if self._child is None or not self._child.alive:
            raise PeerFailed("the peer that took the conversation in has ended")
        return self._checked(_KEPT, self._reply(self._child, {"do": "usage"}))

    @property
    def refused(self) -> tuple[str, ...]:
        """What it tried to reach or to start beside this machine, and was not let."""
        return tuple(self._refused)

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def _open(self) -> Child:
        if self._child is None or not self._child.alive:
            self.close()
            self._child = self._start()
            asked = {"do": "open", "url": self._meter.url} | self._settings
            self._turns_at_once = self._checked(_OPENED, self._reply(self._child, asked)).turns_at_once
        return self._child

    def _reply(self, child: Child, request: Line) -> object:
        reply = child.ask(request, within=self.patience)
        self._refused |= dict.fromkeys(reply.get("refused", ()))
        failure, self._meter.failure = self._meter.failure, None
        if failure is not None:
            raise failure
        return reply["done"]

    def _checked(self, form: TypeAdapter[T], value: object) -> T:
        try:
            return form.validate_python(value)
        except ValidationError as error:
            raise PeerFailed(
                f"the peer's reply has another form: {error}", hint="see adapter.py for the form"
            ) from error


def _portions(messages: Sequence[Message], turns: int) -> Iterator[list[Message]]:
    """At most so many at a time, of one session each."""
    for _, said in groupby(messages, key=lambda message: message.session):
        session = list(said)
        yield from (session[start : start + turns] for start in range(0, len(session), turns))


def _turn(message: Message) -> Line:
    said = None if message.at is None else message.at.isoformat()
    return {
        "text": message.text,
        "role": message.role,
        "speaker": message.speaker,
        "said": said,
        "session": message.session,
        "ref": message.ref,
    }


def _evidence(item: _Item) -> Evidence:
    return Evidence(
        id=item.id,
        kind=item.kind,
        text=item.text,
        score=item.score,
        session=item.session,
        turns=(),
        refs=item.refs,
        memory_type="fact" if item.kind == "record" else None,
        said=item.said,
    )

"""One conversation of a run as a peer remembers it: taken in once, kept, and asked.

Owns the folder in which that lies, beside those of our own memories, under a hash of all that made it. Whether a peer
stood half-way through is nothing we can know of its files, so a conversation whose taking in was cut begins anew, and
what was spent on it the first time is not counted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from benchmarks.baselines import affordable
from benchmarks.environment import sha256
from benchmarks.folder import Line, write
from benchmarks.models import Models
from benchmarks.peers.child import Child, PeerFailed
from benchmarks.peers.kinds import Kind
from benchmarks.peers.meter import Meter
from benchmarks.peers.peer import ChildPeer, Found, Peer
from benchmarks.peers.server import LlamaServer
from benchmarks.questions import Conversation, Question
from benchmarks.setups import Places, Setup
from lychee_local.types import Usage

TAKEN_IN = "taken-in.json"
SAID_EVERY = 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Remembered:
    """`built` is the line for construction.jsonl."""

    peer: Peer
    built: Line
    items: int
    budget: int | None

    def found(self, question: Question) -> tuple[Found, tuple[Usage, ...]]:
        """Evidence within the budget, and the calls that the peer made to find it.

        Raises:
            LycheeError: the peer failed.
        """
        before = len(self.peer.usage())
        found = self.peer.evidence(question.text, self.items)
        return Found(affordable(found.evidence, self.budget), found.traced), self.peer.usage()[before:]


@contextmanager
def remembered(
    kind: Kind, setup: Setup, places: Places, conversation: Conversation, models: Models
) -> Iterator[Remembered]:
    """The memory of a conversation, built or found; the peer, the meter and the server end with the block.

    Raises:
        LycheeError: the peer or the server failed while the conversation was taken in.
    """
    by_model = setup.records == "model"
    folder = places.stores / store_name(kind, setup, places, models) / quote(conversation.id, safe="")
    logs = places.out / "peers"
    log = logs / f"{folder.name}.log"
    with ExitStack() as ends:
        ends.enter_context(_alone(folder))
        server = None
        if by_model:
            server = ends.enter_context(
                LlamaServer(
                    models.llm_path,
                    name=models.llm_card.name,
                    context=min(models.llm_card.context, places.peer_context),
                    log=logs / f"{folder.name}.server.log",
                    home=logs,
                    python=places.server_python,
                )
            )
        meter = ends.enter_context(
            Meter(
                model=models.llm_card.name if by_model else "none",
                upstream=None if server is None else server.port,
                embed=lambda texts: models.bare_embedder.embed(texts),
            )
        )
        inside = (folder / "peer").absolute()
        settings: Line = {
            "folder": str(inside),
            "model": meter.model,
            "embedder": models.embedder_card.name,
            "dimension": models.embedder_card.dimension,
            "by_model": by_model,
        }
        python = places.peer_python or Path(sys.executable)

        def start() -> Child:
            return Child(python, kind.adapter, home=inside, log=log, talks=True)

        peer = ChildPeer(start, settings, meter, patience=places.peer_patience)
        ends.callback(peer.close)
        if kind.embeds:
            models.bare_embedder.embed(["loaded before a clock runs"])
        built = _taken_in(peer, folder, conversation, server)
        yield Remembered(peer, built, setup.items or kind.items, setup.budget)


def store_name(kind: Kind, setup: Setup, places: Places, models: Models) -> str:
    """The folder of the memories that this run needs: a hash of all that makes them."""
    digests = models.digests()
    made: Line = {"layout": setup.layout, "data": sha256(Path(setup.data)), "embedder": digests["embedder"]}
    made |= {"peer": kind.versions(places.peer_python), "encoder": "none"}
    if setup.records == "model":
        made |= {"encoder": digests["llm"], "context": places.peer_context}
    return f"{kind.name}-{hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]}"


def _taken_in(peer: ChildPeer, folder: Path, conversation: Conversation, server: LlamaServer | None) -> Line:
    done = folder / TAKEN_IN
    if done.exists():
        kept: Line = json.loads(done.read_text(encoding="utf-8"))
        return kept | {"seconds_now": 0.0, "begun_anew": False}
    cut = folder.exists()
    if cut:
        _say(f"{conversation.id}: taking it in was cut the last time; the peer begins it anew")
        shutil.rmtree(folder)
    (folder / "peer").mkdir(parents=True)
    if server is not None:
        server.port()
    began = time.perf_counter()
    peer.ingest(conversation.messages, _progress(peer, conversation))
    kept_by_peer = peer.kept()
    calls = peer.usage()
    seconds = round(time.perf_counter() - began, 2)
    line: Line = {
        "conversation": conversation.id,
        "turns": len(conversation.messages),
        "records": kept_by_peer.memories,
        "turns_lost": kept_by_peer.lost,
        "turns_without_records": kept_by_peer.empty,
        "construction_tokens": sum(call.prompt_tokens + call.output_tokens for call in calls),
        "construction_calls": len(calls),
        "construction_calls_failed": [call.outcome for call in calls if call.outcome != "ok"],
        "encoding_seconds": round(sum(call.seconds for call in calls), 1),
        "seconds": seconds,
        "peak_mb": kept_by_peer.peak_mb,
        "refused": list(peer.refused),
    }
    write(done, line)
    return line | {"seconds_now": seconds, "begun_anew": cut}


def _progress(peer: ChildPeer, conversation: Conversation) -> Callable[[int], None]:
    """Says about once a minute how far it is: a small computer works for hours on some."""
    said = time.monotonic()

    def tell(turns: int) -> None:
        nonlocal said
        if time.monotonic() - said > SAID_EVERY:
            said = time.monotonic()
            calls = peer.usage()
            tokens = sum(call.prompt_tokens + call.output_tokens for call in calls)
            of = f"{turns} of {len(conversation.messages)} turns"
            _say(f"{conversation.id}: {of} taken in, {len(calls)} calls, {tokens} tokens")

    return tell


def _say(told: str) -> None:
    print(told, file=sys.stderr, flush=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The right to use a peer's folder, which few of them guard themselves.

    Raises:
        PeerFailed: another run has it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PeerFailed(f"{folder} is used by another run", hint="wait for it, or give other --stores") from error
        yield

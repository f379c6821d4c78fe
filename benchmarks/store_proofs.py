"""Three promises of the store, put to the proof: it loses nothing, it stays whole beside others, it forgets completely.

    python -m benchmarks.store_proofs kill --times 500
    python -m benchmarks.store_proofs concurrency --seconds 60
    python -m benchmarks.store_proofs forgetting --strings 1000

`kill`: a child process works on a memory until its parent kills it with SIGKILL at a random moment. It stores turns
with their decisions and segments, and encodes; now and then it forgets turns, compacts, embeds everything anew with
another embedder, or closes the memory, which writes snapshots of the graphs (there are graphs from 64 rows on). After
each kill the memory must hold every turn that was acknowledged, none whose forgetting was, and of what was under way
all or nothing. Every 25 kills `check` must find nothing, and no file may hold the bytes of a forgotten turn. Folders
change every `--kills-per-folder` kills, since what a child does takes ever longer.

`concurrency`: one process writes and compacts, four read. Within `Store.snapshot` every reader compares turns,
decisions, segments, records and both kinds of search, and what was acknowledged before must be there.

`forgetting`: unique strings are planted in texts, records, entities, tags, notes, labels, references, and in the names
of speakers and sessions, a run that embeds everything anew is interrupted, and they are forgotten by each selector in
turn. After each, and after reopening and rebuilding, every
byte of the folder is searched for the strings, whatever their case, and for the first, middle and last 16 bytes of
every vector that was made of a text with one of them. The search is not the store's own, and must find everything that
is still to be forgotten.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import random
import re
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.store_scale import commit_id
from lychee_local.segment import exchange_text
from lychee_local.store import EmbedderIdentity, Selection, Store, check, user_folder
from lychee_local.store.vectors import Vectors
from lychee_local.types import DateSpan, Decision, Exchange, Record, Scope, Segment, Temporal, Turn, Usage

USER = "proof"
DIMENSION, EXACT_BELOW = 16, 64
EMBEDDERS = tuple(EmbedderIdentity(name, name[0] * 64, DIMENSION) for name in ("first", "second"))
MORNING = datetime(2023, 5, 8, 9, tzinfo=UTC)


def unit(embedder: str, texts: Sequence[str], dimension: int = DIMENSION) -> Vectors:
    """One unit vector a text, which depends on the text and the embedder alone."""
    rows = np.zeros((len(texts), dimension), dtype=np.float32)
    for row, text in zip(rows, texts, strict=True):
        seed = hashlib.blake2b(f"{embedder}\0{text}".encode(), digest_size=8).digest()
        row[:] = np.random.default_rng(int.from_bytes(seed, "big")).standard_normal(dimension)
    unit_length: Vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit_length


def decided(turn: Turn) -> Decision:
    return Decision(Exchange(turn.session, turn.index, turn.index, turn.line, 9), "append", None, None, 9, 1)


def segment_of(turns: Sequence[Turn]) -> Segment:
    return Segment(turns[0].session, turns[0].index, turns[-1].index, "session_flush", 9, len(turns), 1.0)


def say(store: Store, turns: Sequence[Turn], dimension: int = DIMENSION) -> Segment:
    """One commit: turns of one session, their decisions, and their segment."""
    name, segment = store.embedder.name, segment_of(turns)
    decisions = [decided(t) for t in turns]
    with store.transaction() as tx:
        tx.add_turns(turns, unit(name, [t.line for t in turns], dimension))
        tx.add_decisions(decisions, unit(name, [d.exchange.text for d in decisions], dimension))
        tx.add_segments([segment])
    return segment


def encode(
    store: Store, segment: Segment, records: Sequence[Record], note: str, dimension: int = DIMENSION
) -> list[str]:
    """One commit: what encoding `segment` gave. The texts that were embedded for new nodes."""
    name, missing = store.embedder.name, store.missing_nodes(segment, records)
    texts = [text for _, text in missing]
    with store.transaction() as tx:
        labels = dict(zip([node.id for node, _ in missing], unit(name, texts, dimension), strict=True))
        rows = unit(name, [r.embedded_text for r in records], dimension)
        tx.add_encoding(segment, records, rows, labels, note)
    return texts


def record_of(turn: Turn, segment: Segment, text: str, **fields: Any) -> Record:
    day = DateSpan(MORNING.date(), MORNING.date(), "day")
    values: dict[str, Any] = {"entities": (str(turn.speaker),), "tags": ("talk",), "temporal": Temporal(day)}
    return Record(
        turn.session,
        text,
        "fact",
        (turn.index,),
        segment.id,
        speaker=turn.speaker,
        said=turn.at,
        **{**values, **fields},
    )


# --- kill ------------------------------------------------------------------------------------------------------------

WORD = re.compile(rb"zqx[0-9a-f]{12}")  # one is in every turn that a child says

Said = dict[str, str]  # turn id -> text


@dataclass(slots=True)
class Promised:
    """What children have acknowledged in one folder."""

    turns: Said = field(default_factory=dict)
    forgotten: Said = field(default_factory=dict)
    unfinished: Said = field(default_factory=dict)  # forgotten by a child that was killed before it had compacted
    encoded: set[str] = field(default_factory=set)  # ids of segments

    def words(self) -> set[bytes]:
        """Of what must be gone from the bytes."""
        return {text.split()[1].encode() for text in self.forgotten.values()}


class Work:
    """In the child: one random operation after another. Each is announced, and acknowledged once it is durable."""

    def __init__(self, home: Path, pipe: Connection, seed: int) -> None:
        self._home, self._pipe, self._pick = home, pipe, random.Random(seed)
        self._store = self._open()

    def _open(self) -> Store:
        self._pipe.send(("begin", "open", None))
        fresh = not user_folder(self._home, USER).exists()
        store = Store.open(
            self._home, USER, embedder=EMBEDDERS[0] if fresh else None, exact_below=EXACT_BELOW, wait_seconds=30
        )
        self._pipe.send(("done", "open", None))
        return store

    def run(self) -> None:
        operations: dict[str, tuple[float, Callable[[], None]]] = {
            "say": (100, self._say),
            "encode": (80, self._encode),
            "forget": (4, self._forget),
            "compact": (2, self._compact),
            "reindex": (2, self._reindex),
            "close": (3, self._close),
        }
        weights = [weight for weight, _ in operations.values()]
        while True:
            (operation,) = self._pick.choices(list(operations), weights)
            operations[operation][1]()

    def _tell(self, word: str, operation: str, what: object) -> None:
        self._pipe.send((word, operation, what))

    def _say(self) -> None:
        session = f"S{self._pick.randrange(6)}"
        start = self._store.following(session)
        turns = []
        for index in range(start, start + self._pick.randint(1, 4)):
            text = f"said zqx{self._pick.getrandbits(48):012x} about number {index} of {session}"
            turns.append(Turn(session, index, text, speaker="Ana", at=MORNING, ref=f"D{index}"))
        said = {t.id: t.text for t in turns}
        self._tell("begin", "say", said)
        say(self._store, turns)
        self._tell("done", "say", said)

    def _encode(self) -> None:
        waiting = self._store.pending()
        if not waiting:
            return
        segment = self._pick.choice(waiting)
        turns = self._store.turns(segment.session, segment.start, segment.end + 1)
        records = [record_of(t, segment, f"Ana {t.text}", tags=(t.text.split()[1],)) for t in turns]
        self._tell("begin", "encode", segment.id)
        encode(self._store, segment, records, records[0].text if records else "")
        self._store.add_usage(Usage("encode", "sample", 10, 5))
        self._tell("done", "encode", segment.id)

    def _forget(self) -> None:
        sessions = self._store.sessions()
        if not sessions:
            return
        turns = self._store.turns(self._pick.choice(sessions))
        gone = {t.id: t.text for t in self._pick.sample(turns, min(len(turns), 5))}
        self._tell("begin", "forget", gone)
        receipt = self._store.erase(Selection(turns=tuple(gone)))
        assert not receipt.residues, receipt.residues
        self._tell("done", "forget", gone)

    def _compact(self) -> None:
        self._tell("begin", "compact", None)
        self._store.compact()
        self._tell("done", "compact", None)

    def _reindex(self) -> None:
        other = EMBEDDERS[1] if self._store.embedder.name == EMBEDDERS[0].name else EMBEDDERS[0]
        self._tell("begin", "reindex", None)
        self._store.reindex(other, lambda texts: unit(other.name, texts), exchange_text=exchange_text)
        self._tell("done", "reindex", None)

    def _close(self) -> None:
        self._tell("begin", "close", None)
        self._store.close()
        self._tell("done", "close", None)
        self._store = self._open()


def work(home: str, pipe: Connection, seed: int) -> None:
    Work(Path(home), pipe, seed).run()


class Kills:
    """In the parent: starts children on one folder after another, kills them, and looks at what they left."""

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self._processes = processes()
        self.interrupted: Counter[str] = Counter()  # operation under way -> kills
        self.kept: Counter[str] = Counter()  # of these, how often it was there nevertheless
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self.acknowledged, self.forgotten, self.checks = 0, 0, 0

    def run(self, folder: Path, times: int, per_folder: int) -> None:
        promised, home = Promised(), folder
        for kill in range(times):
            if kill % per_folder == 0:
                promised, home = Promised(), folder / str(kill // per_folder)
                home.mkdir()
            under_way = self._kill_one(home, promised)
            self._look(home, promised, under_way)
            if kill % 25 == 24 or kill == times - 1:
                self.checks += 1
                self.problems += [f"kill {kill}: {found.what}" for found in check(user_folder(home, USER))]
                left = words_in(home) & promised.words()
                self.problems += [f"kill {kill}: {word!r} was forgotten and is in the folder" for word in left]
            print(f"\r{kill + 1} kills, {len(self.problems)} problems", end="", file=sys.stderr)
        print(file=sys.stderr)

    def _kill_one(self, home: Path, promised: Promised) -> tuple[str, object]:
        """What was under way when the child was killed; what it had acknowledged is in `promised` then."""
        ours, theirs = self._processes.Pipe(duplex=False)
        child = self._processes.Process(target=work, args=(str(home), theirs, self._pick.getrandbits(32)))
        child.start()
        theirs.close()
        told: list[tuple[str, str, object]] = []
        try:
            while self._pick.random() < 0.8 and ("done", "open", None) not in told:  # else killed while it opens, maybe
                if not ours.poll(120):
                    self.problems.append(f"a child could not open {home}")
                    break
                told.append(ours.recv())
            until = time.monotonic() + self._pick.random() * self._pick.choice((0.05, 0.3, 0.3, 2.0))
            while (left := until - time.monotonic()) > 0:
                if ours.poll(left):
                    told.append(ours.recv())
        except EOFError:
            self.problems.append(f"a child on {home} ended by itself after {told[-3:]}")
        finally:
            child.kill()
            child.join(60)
        with contextlib.suppress(EOFError):
            while True:
                told.append(ours.recv())
        ours.close()
        for word, operation, what in told:
            if word == "done":
                self.done[operation] += 1
                self._promise(promised, operation, what)
        last = told[-1] if told else ("begin", "open", None)
        return ("", None) if last[0] == "done" else last[1:]

    def _promise(self, promised: Promised, operation: str, what: Any) -> None:
        if operation == "say":
            promised.turns |= what
            self.acknowledged += len(what)
        elif operation == "encode":
            promised.encoded.add(what)
        elif operation in ("compact", "reindex"):
            promised.forgotten |= promised.unfinished
            promised.unfinished = {}
        elif operation == "forget":
            promised.forgotten |= what | promised.unfinished
            promised.unfinished = {}
            self.forgotten += len(what)
            promised.turns = {i: text for i, text in promised.turns.items() if i not in what}
            promised.encoded.clear()  # segments that lost a turn wait again

    def _look(self, home: Path, promised: Promised, under_way: tuple[str, Any]) -> None:
        operation, what = under_way
        self.interrupted[operation or "nothing"] += 1
        if not user_folder(home, USER).joinpath("manifest.json").exists():
            if promised.turns:
                self.problems.append(f"{home} has no manifest any more")
            return
        with Store.open(home, USER, embedder=None, read_only=True, exact_below=EXACT_BELOW) as store:
            held = {t.id: t.text for session in store.sessions() for t in store.turns(session)}
            if operation in ("say", "forget"):
                present = {i: text for i, text in what.items() if held.get(i) == text}
                if len(present) not in (0, len(what)):
                    self.problems.append(f"{home}: {operation} of {len(what)} turns, {len(present)} are there")
                # "Kept" means that the operation took place.
                took_place = bool(present) == (operation == "say")
                self.kept[operation] += took_place
                if took_place and operation == "say":
                    promised.turns |= what
                elif took_place:
                    promised.unfinished |= what
                    promised.encoded.clear()
                    promised.turns = {i: text for i, text in promised.turns.items() if i not in what}
            if held != promised.turns:
                lost, extra = promised.turns.keys() - held.keys(), held.keys() - promised.turns.keys()
                self.problems.append(f"{home}: lost {sorted(lost)[:3]}, not expected {sorted(extra)[:3]}")
            self.problems += [f"{home}: {s} has lost its records" for s in promised.encoded if not encoded(store, s)]
            if operation == "encode" and encoded(store, what):
                self.kept["encode"] += 1
                promised.encoded.add(what)
            decisions = sum(len(store.decisions(session)) for session in store.sessions())
            if decisions != len(held) or store.stats().turns != len(held):
                self.problems.append(f"{home}: {len(held)} turns, {decisions} decisions, {store.stats()}")
            if held:
                found = store.search("turns", unit(store.embedder.name, ["x"]), len(held) + 1)[0]
                if {hit.id for hit in found} != held.keys():
                    self.problems.append(f"{home}: {len(found)} of {len(held)} turns found by vectors")


def encoded(store: Store, segment_id: str) -> bool:
    return store.encoding_of(segment_id) is not None


def words_in(folder: Path) -> set[bytes]:
    return {word for path in folder.rglob("*") if path.is_file() for word in WORD.findall(path.read_bytes().lower())}


def prove_kill(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    kills, began = Kills(options.seed), time.perf_counter()
    kills.run(folder, options.times, options.kills_per_folder)
    table = Table("operation", "completed", "killed in it", "took place all the same")
    for name in ("open", "say", "encode", "forget", "compact", "reindex", "close", "nothing"):
        numbers = [kills.done[name], kills.interrupted[name], kills.kept.get(name, "")]
        table.add_row(name, *map(str, numbers))
    Console().print(table)
    return {
        "kills": options.times,
        "kills_per_folder": options.kills_per_folder,
        "turns_acknowledged": kills.acknowledged,
        "turns_forgotten": kills.forgotten,
        "completed": dict(kills.done),
        "killed_in": dict(kills.interrupted),
        "took_place": dict(kills.kept),
        "checks": kills.checks,
        "seconds": round(time.perf_counter() - began),
        "problems": kills.problems,
    }


# --- concurrency -----------------------------------------------------------------------------------------------------

TURNS_A_SESSION = 20


def write_for(seconds: float, home: str, ready: Any, acknowledged: Any, results: Any) -> None:
    """Commits turns and encodings, closes now and then, compacts every fifteen seconds."""
    spent: dict[str, list[float]] = {"commit": [], "compact": [], "reopen": []}
    turns, problems = 0, []
    store = Store.open(Path(home), USER, embedder=EMBEDDERS[0], exact_below=EXACT_BELOW)
    try:
        ready.wait(60)
        compacted = time.time()
        until = compacted + seconds
        while time.time() < until:
            session, index = f"S{turns // TURNS_A_SESSION}", turns % TURNS_A_SESSION
            said = [
                Turn(session, i, f"number {i} of sess{turns // TURNS_A_SESSION}ion", speaker="Ana", at=MORNING)
                for i in (index, index + 1)
            ]
            segment = spend(spent["commit"], partial(say, store, said))
            turns += 2
            acknowledged.value = turns
            records = [record_of(t, segment, f"Ana said {t.text}") for t in said]
            spend(spent["commit"], partial(encode, store, segment, records, ""))
            if time.time() - compacted > 15:
                spend(spent["compact"], store.compact)
                compacted = time.time()
            if turns % 1_000 == 0:
                began = time.perf_counter()
                store.close()
                store = Store.open(Path(home), USER, embedder=EMBEDDERS[0], exact_below=EXACT_BELOW, wait_seconds=30)
                spent["reopen"].append(time.perf_counter() - began)
    except Exception as error:  # noqa: BLE001 - what is proved is that there is none; it is reported as a problem
        problems.append(f"writer: {error!r}")
    finally:
        store.close()
        results.put(("writer", turns, spent, problems))


def spend(spent: list[float], action: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = action()
    spent.append(time.perf_counter() - began)
    return result


def read_for(seconds: float, home: str, ready: Any, acknowledged: Any, results: Any, seed: int) -> None:
    pick, spent, problems, newest = random.Random(seed), [], [], 0
    try:
        with Store.open(Path(home), USER, embedder=EMBEDDERS[0], read_only=True, exact_below=EXACT_BELOW) as store:
            ready.wait(60)
            until = time.time() + seconds
            while time.time() < until:
                promised, began = acknowledged.value, time.perf_counter()
                with store.snapshot():
                    seen = store.stats().turns
                    problems += disagreements(store, pick, max(promised, newest))
                spent.append(time.perf_counter() - began)
                newest = seen
    except Exception as error:  # noqa: BLE001 - as above
        problems.append(f"reader {seed}: {error!r}")
    results.put((f"reader {seed}", newest, {"read": spent}, problems))


def disagreements(store: Store, pick: random.Random, promised: int) -> list[str]:
    """What does not fit together within one snapshot: overall, in the newest session, and in one other."""
    stats, segments, pending = store.stats(), store.segments(), store.pending()
    found = []
    if stats.turns < promised:
        found.append(f"{promised} turns were acknowledged, {stats.turns} are seen")
    if stats.turns != 2 * len(segments) or stats.records != 2 * (len(segments) - len(pending)):
        found.append(f"{stats}, {len(segments)} segments, {len(pending)} pending")
    sessions = store.sessions()
    for session in {*sessions[-1:], *([pick.choice(sessions)] if sessions else [])}:
        turns, scope = store.turns(session), Scope(sessions=(session,))
        counts = {
            "turns": len(turns),
            "decisions": len(store.decisions(session)),
            "exchange vectors": len(store.exchange_vectors(session)),
            "segments": 2 * len(store.segments(session)),
            "by vector": len(store.search("turns", unit("first", ["x"]), 100, scope=scope)[0]),
            "by words": len(store.words("turns", f"sess{session[1:]}ion", 100)),
        }
        records = {
            "records": len(store.records(session)),
            "segments": 2 * (len(store.segments(session)) - sum(s.session == session for s in pending)),
            "by vector": len(store.search("records", unit("first", ["x"]), 100, scope=scope)[0]),
            "by words": len(store.words("records", f"sess{session[1:]}ion", 100)),
        }
        if [t.index for t in turns] != list(range(len(turns))) or len({*counts.values()}) + len(
            {*records.values()}
        ) > 2:
            found.append(f"{session}: {counts}, {records}")
    for hit in store.search("turns", unit("first", [str(pick.random())]), 10)[0] if stats.turns else []:
        store.turn(hit.id)
    return found


def prove_concurrency(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    context = processes()
    acknowledged, results = context.Value("q", 0), context.Queue()
    Store.open(folder, USER, embedder=EMBEDDERS[0]).close()
    given = (options.seconds, str(folder), context.Barrier(5), acknowledged, results)
    children = [context.Process(target=write_for, args=given)]
    children += [context.Process(target=read_for, args=(*given, n)) for n in range(4)]
    for child in children:
        child.start()
    told = [results.get(timeout=options.seconds + 120) for _ in children]
    for child in children:
        child.join(60)
    problems = [problem for *_, found in told for problem in found]
    spent: dict[str, list[float]] = {}
    for _, _, times, _ in told:
        for name, values in times.items():
            spent.setdefault(name, []).extend(values)
    (turns,) = [count for name, count, _, _ in told if name == "writer"]
    with Store.open(folder, USER, embedder=EMBEDDERS[0], exact_below=EXACT_BELOW) as store:
        if store.stats().turns != turns:
            problems.append(f"{turns} turns were acknowledged, {store.stats().turns} are there in the end")
    problems += [found.what for found in check(user_folder(folder, USER))]
    table = Table("milliseconds", "count", "a second", "p50", "p99", "longest", title=f"{turns} turns")
    rows = {}
    for name, values in spent.items():
        in_ms = 1e3 * np.array(values or [0.0])
        p50, p99, longest = (round(float(v), 2) for v in (*np.percentile(in_ms, (50, 99)), in_ms.max()))
        rows[name] = {
            "count": len(values),
            "a_second": round(len(values) / options.seconds, 1),
            "p50": p50,
            "p99": p99,
            "longest": longest,
        }
        table.add_row(name, *map(str, rows[name].values()))
    Console().print(table)
    return {"seconds": options.seconds, "turns": turns, "milliseconds": rows, "problems": problems}


# --- forgetting ------------------------------------------------------------------------------------------------------

SELECTORS = ("session", "turns", "records", "speaker", "before", "matching")
PLANTED = re.compile(rb"zqx[a-z]{6}")  # a planted string without its end, which a stemmer may cut
WIDTH = 32  # of the vectors
OWN_NAME = 64  # of so many strings for a session or a speaker one is in the very name; each name is one call
LONG_AGO = MORNING - timedelta(days=3_000)


@dataclass(frozen=True, slots=True)
class Planted:
    """One unique string, for one selector; `vectors` are those of every text it is in."""

    word: str
    selector: str
    number: int

    @property
    def key(self) -> bytes:
        return self.word[:9].lower().encode()


class Garden:
    """A memory with strings planted in it, and the vectors of all texts that they are in."""

    def __init__(self, store: Store, seed: int, count: int) -> None:
        self._store, pick = store, random.Random(seed)
        names: dict[str, str] = {}
        while len(names) < count:
            name = "".join(pick.choices(string.ascii_lowercase, k=8))
            names.setdefault(name[:6], f"Zqx{name}")
        endings = ("er", "ing", "ß", "ов", "-é", "", "_Name", "@mail.example")
        self.all = [
            Planted(name + endings[i % len(endings)], SELECTORS[i * len(SELECTORS) // count], i)
            for i, name in enumerate(names.values())
        ]
        self.of = {selector: [p for p in self.all if p.selector == selector] for selector in SELECTORS}
        self.rows: dict[bytes, list[Vectors]] = {p.key: [] for p in self.all}
        self.turn_ids: dict[str, list[str]] = {selector: [] for selector in SELECTORS}
        self.record_ids: list[str] = []
        for number, planted in enumerate(pick.sample(self.all, count)):
            self._plant(planted, number)

    def session(self, planted: Planted, number: int) -> str:
        if planted.selector == "session":
            return f"gone {planted.word if planted.number % OWN_NAME == 0 else number % 3}"
        # Not shared by two selectors: what uses words that only forgotten turns of its session say goes with them.
        return f"{planted.selector} {number % 7}"

    def _plant(self, planted: Planted, number: int) -> None:
        """A segment of two ordinary turns and the planted one between them; record, note and labels with the string."""
        word, session = planted.word, self.session(planted, number)
        start, hidden = self._store.following(session), planted.selector == "records"
        at = LONG_AGO + timedelta(minutes=number) if planted.selector == "before" else MORNING
        named = word if planted.number % OWN_NAME == 0 else number % 3
        speaker = f"Speaker {named}" if planted.selector == "speaker" else "Ana"
        mark = "the secret phrase" if planted.selector == "matching" else "something"
        plain = f"an ordinary sentence {number} was said about something"
        middle = plain if hidden else f"{word} said {mark} to {word.lower()}."
        turns = [
            Turn(session, start, f"before it, {plain}", speaker="Ben", at=MORNING, ref=f"a{number}"),
            Turn(session, start + 1, middle, speaker=speaker, at=at, ref=f"b{number if hidden else word}"),
            Turn(session, start + 2, f"after it, {plain}", speaker="Ben", at=MORNING, ref=f"c{number}"),
        ]
        segment = say(self._store, turns, WIDTH)
        told = record_of(turns[1], segment, f"Somebody met {word} here.", entities=(word, "Ben"), tags=(f"tag {word}",))
        other = record_of(turns[0], segment, f"Ben said an ordinary sentence {number}.", entities=("Ben",))
        note = told.text if hidden or planted.number % 2 else f"it is about {word}"
        texts = encode(self._store, segment, [told, other], note, WIDTH)
        texts += [t.line for t in turns] + [told.embedded_text]
        self.rows[planted.key] += [unit("first", [t], WIDTH)[0] for t in texts if planted.key in t.lower().encode()]
        self.turn_ids[planted.selector].append(turns[1].id)
        if hidden:
            self.record_ids.append(told.id)

    def selections(self, store: Store, selector: str) -> Iterator[Selection]:
        if selector == "session":
            names = (s for s in store.sessions() if s.startswith("gone "))
            yield from (Selection(session=name) for name in names)
        elif selector == "turns":
            yield Selection(turns=tuple(self.turn_ids["turns"]))
        elif selector == "records":
            yield Selection(records=tuple(self.record_ids))
        elif selector == "speaker":
            names = (s for s in store.speakers() if s.startswith("Speaker "))
            yield from (Selection(speaker=name) for name in names)
        elif selector == "before":
            yield Selection(before=date(MORNING.year - 1, 1, 1))
        else:
            yield Selection(matching="The SECRET phrase")


def found_in(
    folder: Path, rows: Mapping[bytes, Sequence[Vectors]]
) -> tuple[dict[bytes, set[str]], dict[bytes, set[str]]]:
    """The planted strings that are found below `folder`, and those of which a vector is, each with the files' names."""
    # Halves of two living strings, as they lie in the free space of a page, can look like a third one.
    strings = {key: names for key, names in strings_in(folder).items() if key in rows}
    return strings, vectors_in(folder, rows)


def strings_in(folder: Path) -> dict[bytes, set[str]]:
    """Every planted string in a file or its name below `folder`, with the names of the files."""
    found: dict[bytes, set[str]] = {}
    for path in folder.rglob("*"):
        data = path.name.encode() + (b"\n" + path.read_bytes() if path.is_file() else b"")
        for key in set(PLANTED.findall(data.lower())):
            found.setdefault(key, set()).add(path.name)
    return found


def vectors_in(folder: Path, rows: Mapping[bytes, Sequence[Vectors]]) -> dict[bytes, set[str]]:
    """Every string with a vector of which a file holds the first, middle or last 16 bytes, in either precision."""
    pieces: dict[bytes, bytes] = {}
    for key, vectors in rows.items():
        for raw in (vector.astype(kind).tobytes() for vector in vectors for kind in ("<f4", "<f2")):
            middle = len(raw) // 2 - 8
            pieces |= {raw[:16]: key, raw[middle : middle + 16]: key, raw[-16:]: key}
    heads = np.unique(np.frombuffer(b"".join(piece[:8] for piece in pieces), dtype="<u8"))
    found: dict[bytes, set[str]] = {}
    for path in (p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        for place in places(data, heads):
            if (of := pieces.get(data[place : place + 16])) is not None:
                found.setdefault(of, set()).add(path.name)
    return found


def places(data: bytes, heads: npt.NDArray[np.uint64]) -> Iterator[int]:
    """Where eight bytes of `data`, at whatever offset, are one of the sorted `heads`."""
    for offset in range(min(8, max(0, len(data) - 7))):
        view = np.frombuffer(data, dtype="<u8", offset=offset, count=(len(data) - offset) // 8)
        near = np.minimum(np.searchsorted(heads, view), len(heads) - 1)
        yield from (offset + 8 * int(i) for i in np.flatnonzero(heads[near] == view))


def found_by_words(store: Store, planted: Planted) -> bool:
    texts = [store.turn(hit).line for hit, _ in store.words("turns", planted.word, 5)]
    texts += [repr(store.record(hit)) for hit, _ in store.words("records", planted.word, 5)]
    return any(planted.key in text.lower().encode() for text in texts)


class Proof:
    """Forgets group after group and searches the bytes after each."""

    def __init__(self, folder: Path, garden: Garden) -> None:
        self.folder, self.garden = folder, garden
        self.problems: list[str] = []
        self.steps: dict[str, dict[str, object]] = {}
        self._left = {p.key for p in garden.all}

    def look(self, step: str, gone: Iterable[Planted] = (), *, store: Store | None = None, **about: object) -> None:
        forgotten = {p.key for p in gone}
        self._left -= forgotten
        # In another process: one that opens and closes a file of SQLite's loses SQLite's locks on it.
        with processes().Pool(1) as pool:
            strings, vectors = pool.apply(found_in, (self.folder, self.garden.rows))
        for what, found in (("string", strings), ("vector", vectors)):
            for key in sorted(found.keys() - self._left)[:5]:
                self.problems.append(f"{step}: the {what} of {key.decode()} is still in {sorted(found[key])}")
            if missed := self._left - found.keys():
                self.problems.append(f"{step}: {len(missed)} {what}s that were not forgotten are not found")
        self.steps[step] = {
            "strings": len(forgotten),
            "vectors": sum(len(self.garden.rows[key]) for key in forgotten),
            "strings_found": len(strings.keys() - self._left),
            "vectors_found": len(vectors.keys() - self._left),
            "left": len(self._left),
            **about,
        }
        for planted in self.garden.all if store is not None else ():
            if store is not None and found_by_words(store, planted) == (planted.key not in self._left):
                self.problems.append(f"{step}: {planted.word} is found by words, or is not and should be")

    def forget(self, store: Store, selector: str) -> None:
        began, calls, turns, records = time.perf_counter(), 0, 0, 0
        for selection in list(self.garden.selections(store, selector)):
            receipt = store.erase(selection)
            calls, turns, records = calls + 1, turns + len(receipt.turns), records + len(receipt.records)
            if receipt.residues:
                self.problems.append(f"{selector}: the receipt names residues in {receipt.residues}")
        seconds = round(time.perf_counter() - began, 1)
        about = {"calls": calls, "turns": turns, "records": records, "seconds": seconds}
        self.look(selector, self.garden.of[selector], store=store, **about)

    def interrupted_reindex(self, store: Store) -> None:
        """Leaves what an interrupted run with another embedder leaves, so that it has to be forgotten as well."""
        other, made = EmbedderIdentity("second", "2" * 64, WIDTH), 0

        def embed(texts: Sequence[str]) -> Vectors:
            nonlocal made
            if made > 2 * len(self.garden.all):
                raise KeyboardInterrupt
            made += len(texts)
            return unit(other.name, texts, WIDTH)

        with contextlib.suppress(KeyboardInterrupt):
            store.reindex(other, embed, exchange_text=exchange_text)
        for planted in self.garden.all:
            for identifier in self.garden.turn_ids[planted.selector]:
                turn = store.turn(identifier)
                if planted.key in turn.line.lower().encode():
                    self.garden.rows[planted.key].append(unit(other.name, [turn.line], WIDTH)[0])


def prove_forgetting(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    embedder = EmbedderIdentity("first", "1" * 64, WIDTH)

    def opened() -> Store:
        return Store.open(folder, USER, embedder=embedder, exact_below=EXACT_BELOW)

    with opened() as store:
        garden = Garden(store, options.seed, options.strings)
        proof = Proof(folder, garden)
        proof.look("planted")
    with opened() as store:
        proof.interrupted_reindex(store)
        for selector in SELECTORS:
            proof.forget(store, selector)
    proof.look("closed")
    epoch = next(path.parent for path in folder.rglob("catalogue.sqlite"))
    for path in [*epoch.glob("catalogue.sqlite*"), *epoch.glob("*.hnsw*")]:
        path.unlink()
    with opened() as store:
        for number in range(2 * EXACT_BELOW):  # so that there are graphs again
            say(store, [Turn("new", number, f"an ordinary sentence of the day, {number}", at=MORNING)], WIDTH)
        proof.look("rebuilt", store=store)
    proof.problems += [found.what for found in check(user_folder(folder, USER))]
    table = Table("after", "strings", "found", "vectors", "found", "still to be forgotten", "calls", "seconds")
    for name, step in proof.steps.items():
        parts = ("strings", "strings_found", "vectors", "vectors_found", "left", "calls", "seconds")
        table.add_row(name, *(str(step.get(part, "")) for part in parts))
    Console().print(table)
    return {
        "strings": options.strings,
        "steps": proof.steps,
        "problems": proof.problems,
    }


# --- the command -----------------------------------------------------------------------------------------------------


def processes() -> Any:
    """Children that start quickly: one server imports the package once and forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.store_scale"])
    return context


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = options.prove(Path(folder), options)
    for problem in result["problems"][:20]:
        print(problem)
    print("no problem" if not result["problems"] else f"{len(result['problems'])} problems")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(
        json.dumps({"proof": options.proof, "seed": options.seed, **result, "machine": machine, "commit": commit_id()})
    )
    return 1 if result["problems"] else 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    proofs = top.add_subparsers(dest="proof", required=True)
    kill = proofs.add_parser("kill", help="nothing is lost")
    kill.add_argument("--times", type=int, default=500)
    kill.add_argument("--kills-per-folder", type=int, default=50)
    kill.set_defaults(prove=prove_kill)
    concurrency = proofs.add_parser("concurrency", help="whole beside others")
    concurrency.add_argument("--seconds", type=float, default=60)
    concurrency.set_defaults(prove=prove_concurrency)
    forgetting = proofs.add_parser("forgetting", help="completely forgotten")
    forgetting.add_argument("--strings", type=int, default=1_000)
    forgetting.set_defaults(prove=prove_forgetting)
    for proof in (kill, concurrency, forgetting):
        proof.add_argument("--seed", type=int, default=7)
        proof.add_argument("--folder", type=Path, help="where the memories are made; default: a temporary folder")
    return top


if __name__ == "__main__":
    sys.exit(main())

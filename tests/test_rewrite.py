"""Whatever writes a memory anew, and whatever interrupts it: the memory is as before or as after.

Forgetting, compaction, reindexing and the saving of graphs are stopped, failed and interrupted at every operation on
the disk. And any sequence of remembering, forgetting, compacting, crashing, reopening and reindexing is held against a
model of plain lists, which knows the rules of forgetting and nothing of files.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_samples import (
    EMBEDDER,
    SIGNALS,
    content,
    encode,
    filled,
    say,
    segment_of,
    some_decisions,
    some_record,
    some_turns,
    unit,
)
from test_crash import WatchedDisk, copies
from test_store import largest_file

from lychee_local.errors import BadInput, StoreError
from lychee_local.lexicon import search_terms, terms
from lychee_local.store import EmbedderIdentity, Precision, Selection, Store, check, user_folder
from lychee_local.store.disk import Disk
from lychee_local.store.nodes import event_frame, label_text, nodes_of_encoding, nodes_of_record, normalise_key
from lychee_local.store.vectors import Vectors
from lychee_local.types import DateSpan, Decision, Exchange, Node, Record, Scope, Segment, Temporal, TimeRange, Turn

MOMENTS = 4  # of those that an operation has, spread evenly

# --- interrupted -----------------------------------------------------------------------------------------------------

OTHER = EmbedderIdentity("other", "a5" * 32, 8)
SECRET = "heliotrope"
CHOICE = Selection(matching=SECRET)
Verb = Callable[[Store], object]


def differently(texts: Sequence[str]) -> Vectors:
    return unit(*[f"other {text}" for text in texts])


def exchange_text(exchange: Exchange, turns: Sequence[Turn]) -> str:
    return "\n".join(t.line for t in turns)


def open_any(home: Path, **options: Any) -> Store:
    return Store.open(home, "ana", embedder=None, **{"exact_below": 6, **options})


def reindex(store: Store) -> None:
    store.reindex(OTHER, differently, exchange_text=exchange_text)


def erase(store: Store) -> None:
    """What a user does, and does again after it failed."""
    store.erase(CHOICE)
    store.compact()


VERBS: dict[str, Verb] = {
    "forget": lambda store: store.forget(CHOICE),
    "erase": erase,
    "compact": lambda store: store.compact(),
    "reindex": reindex,
    "save": lambda store: store.close(),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory with graphs, with something to forget, and with something forgotten that is not compacted yet."""
    home = tmp_path_factory.mktemp("large")
    with filled(home, exact_below=6) as store:
        for number in range(3):
            word = SECRET if number == 1 else f"word{number}"
            turns = [replace(t, text=f"{t.text} {word}") for t in some_turns(f"T{number}", 0, 4)]
            with store.transaction() as tx:
                tx.add_turns(turns, unit(*[t.line for t in turns]))
                tx.add_decisions(some_decisions(turns), unit(*[t.line for t in turns]))
                tx.add_segments([segment_of(turns)])
            encode(store, segment_of(turns), [some_record(segment_of(turns), f"{t.index} {word}") for t in turns])
        store.forget(Selection(turns=("turn:S2:1",)))
    return home


@pytest.fixture
def home(large: Path, tmp_path: Path) -> Path:
    shutil.copytree(large, tmp_path / "home")
    return tmp_path / "home"


def files_of(folder: Path) -> set[str]:
    """Without what is derived and may be there or not."""
    paths = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)) for p in paths if "catalogue" not in p.name and ".hnsw" not in p.name}


def bytes_of(folder: Path) -> bytes:
    return b"\n".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def told(home: Path) -> dict[str, Any]:
    """What a memory holds, read without changing it."""
    with open_any(home, read_only=True) as store:
        return content(store)


def states(home: Path, verb: str, into: Path) -> list[dict[str, Any]]:
    """Before, after, and what may be in between: forgotten and not yet compacted looks as after."""
    shutil.copytree(home, into)
    before = told(into)
    with open_any(into) as store:
        VERBS[verb](store)
    return [before, told(into)]


def require_whole(copy: Path, allowed: list[dict[str, Any]], verb: str) -> bool:
    """The memory in `copy` is in one of two states, is swept when it is opened, and the same verb can be done again.
    True if it was after."""
    folder = user_folder(copy, "ana")
    assert check(folder) == ()
    held = told(copy)
    assert held in allowed
    with open_any(copy) as store:
        assert content(store) == held
        names = {p.name for p in folder.iterdir()} - {"lock", "manifest.json"}
        [epoch] = [n for n in names if (folder / n).is_dir()]
        assert names <= {epoch, f"{epoch}.vectors"}
        assert [p.name for p in folder.rglob("*.tmp")] == []
        VERBS[verb](store)
    assert told(copy) == allowed[-1]
    assert check(folder) == ()
    assert not list(folder.glob("*.vectors"))
    if verb in ("erase", "reindex"):
        assert len(list(folder.glob("epoch-*"))) == 1
    if verb == "erase":
        assert SECRET.encode() not in bytes_of(folder)
    return held == allowed[-1] != allowed[0]


@pytest.mark.parametrize("verb", ["forget", "erase", "compact", "reindex"])
def test_killed_at_every_operation(home: Path, tmp_path: Path, verb: str) -> None:
    allowed = states(home, verb, tmp_path / "states")
    take, taken = copies(home, tmp_path / "copies")
    with open_any(home, disk=WatchedDisk(take)) as store:
        VERBS[verb](store)
    assert len(taken) > 10
    seen = [require_whole(copy, allowed, verb) for copy in taken[:: 1 + len(taken) // (2 * MOMENTS)]]
    assert seen == sorted(seen)  # before, before, ..., after: there is one moment at which it happens


def without_graphs(home: Path, disk: Disk) -> Store:
    """An open memory that has graphs to save when it is closed."""
    for path in home.rglob("*.hnsw*"):
        path.unlink()
    store = open_any(home, disk=disk, exact_below=20)
    say(store, "S1", 2)
    return store


def test_killed_while_graphs_are_saved(home: Path, tmp_path: Path) -> None:
    take, taken = copies(home, tmp_path / "copies")
    store = without_graphs(home, WatchedDisk(take))
    expected = content(store)
    before = len(taken)
    store.close()
    assert len(taken) - before >= 10
    for copy in taken[before:]:
        require_whole(copy, [expected], "save")


class Breaking:
    """Counts the moments before, within and after each operation on the disk; at the one numbered `at` it raises, and,
    where that is `lasting`, at every later one."""

    def __init__(self, error: type[BaseException], *, lasting: bool) -> None:
        self._error = error
        self._lasting = lasting
        self.count = 0
        self.at = 0

    def __call__(self) -> None:
        self.count += 1
        if self.at and (self.count == self.at or (self._lasting and self.count > self.at)):
            raise self._error(errno.ENOSPC, os.strerror(errno.ENOSPC))


def moments(home: Path, verb: str, copy: Path) -> int:
    shutil.copytree(home, copy)
    with open_any(copy, disk=WatchedDisk(watch := Breaking(OSError, lasting=False))) as store:
        watch.count = 0
        VERBS[verb](store)
        return watch.count


@pytest.mark.parametrize("kind", ["error", "lasting error", "Ctrl-C"])
@pytest.mark.parametrize("verb", ["forget", "erase", "compact", "reindex"])
def test_an_error_at_every_operation(home: Path, tmp_path: Path, verb: str, kind: str) -> None:
    allowed = states(home, verb, tmp_path / "states")
    total = moments(home, verb, tmp_path / "count")
    assert total >= 5
    error = KeyboardInterrupt if kind == "Ctrl-C" else OSError
    for at in range(1, total + 1, 1 + total // MOMENTS):
        copy = tmp_path / str(at)
        shutil.copytree(home, copy)
        watch = Breaking(error, lasting=kind == "lasting error")
        with open_any(copy, disk=WatchedDisk(watch)) as store:
            watch.count, watch.at = 0, at
            with pytest.raises(KeyboardInterrupt if kind == "Ctrl-C" else StoreError):
                VERBS[verb](store)
            assert content(store) in allowed
            assert told(copy) in allowed
            watch.at = 0
            if kind != "lasting error":
                assert told(copy) == content(store)
                VERBS[verb](store)  # it stays usable
                assert content(store) == allowed[-1]
        require_whole(copy, allowed, verb)
        shutil.rmtree(copy)


def test_a_graph_that_cannot_be_saved(home: Path, tmp_path: Path) -> None:
    """It costs time, never a result."""
    watch = Breaking(OSError, lasting=False)
    for at in range(1, 11, 3):
        copy = tmp_path / str(at)
        shutil.copytree(home, copy)
        watch.at = 0
        store = without_graphs(copy, WatchedDisk(watch))
        expected = content(store)
        watch.count, watch.at = 0, at
        with pytest.raises(StoreError, match="search graph"):
            store.close()
        require_whole(copy, [expected], "save")


# --- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["forget", "erase", "compact", "reindex"])
def test_a_full_disk(home: Path, tmp_path: Path, verb: str) -> None:
    allowed = states(home, verb, tmp_path / "states")
    for size in (0, 2_000, 20_000):
        copy = tmp_path / str(size)
        shutil.copytree(home, copy)
        with open_any(copy) as store:
            with largest_file(size), contextlib.suppress(StoreError):
                VERBS[verb](store)
            assert content(store) in allowed
            VERBS[verb](store)
            assert content(store) == allowed[-1]
        require_whole(copy, allowed, verb)


# --- reindexing ------------------------------------------------------------------------------------------------------


class Counting:
    """An embedder that counts the texts it is given, and stops after some calls."""

    def __init__(self, calls: int = 1_000_000) -> None:
        self._calls = calls
        self.texts: list[str] = []

    def __call__(self, texts: Sequence[str]) -> Vectors:
        self._calls -= 1
        if self._calls < 0:
            raise KeyboardInterrupt
        self.texts += texts
        return differently(texts)


def test_reindexing_goes_on_where_it_was_interrupted(home: Path) -> None:
    with open_any(home) as store:
        before = content(store)
        with pytest.raises(KeyboardInterrupt):
            store.reindex(OTHER, first := Counting(2), exchange_text=exchange_text)
        assert content(store) == before
    assert [p.name for p in user_folder(home, "ana").glob("*.vectors")] != []
    with open_any(home) as store:
        assert content(store) == before
        store.reindex(OTHER, second := Counting(), exchange_text=exchange_text)
        assert store.embedder == OTHER
        after = content(store)
    assert first.texts
    assert second.texts
    assert set(first.texts).isdisjoint(second.texts)
    assert len(set(first.texts + second.texts)) == len(first.texts + second.texts)  # equal texts are embedded once
    assert told(home) == after != before
    with open_any(home) as store:
        turns = [t for s in store.sessions() for t in store.turns(s)]
        for turn in turns:
            assert store.search("turns", differently([turn.line]), 1)[0][0].id == turn.id
    assert {t.line for t in turns} <= {*first.texts, *second.texts}
    assert check(user_folder(home, "ana")) == ()


def test_another_embedder_takes_over_nothing(home: Path) -> None:
    third = replace(OTHER, digest="11" * 32)
    with open_any(home) as store:
        with pytest.raises(KeyboardInterrupt):
            store.reindex(OTHER, Counting(2), exchange_text=exchange_text)
        store.reindex(third, counting := Counting(), exchange_text=exchange_text)
        assert {t.line for s in store.sessions() for t in store.turns(s)} <= set(counting.texts)
        assert store.embedder == third


@pytest.mark.parametrize("cut", [1, 8, 40])
def test_a_vector_that_was_half_written_is_made_again(home: Path, cut: int) -> None:
    with open_any(home) as store:
        with pytest.raises(KeyboardInterrupt):
            store.reindex(OTHER, first := Counting(1), exchange_text=exchange_text)
        [made] = store.path.glob("*.vectors")
        with made.open("r+b") as file:
            file.truncate(made.stat().st_size - cut)
        store.reindex(OTHER, second := Counting(), exchange_text=exchange_text)
        assert first.texts[-1] in second.texts
        assert first.texts[0] not in second.texts
        assert check(store.path) == ()


@pytest.mark.parametrize(
    "embed",
    [
        lambda texts: np.full((len(texts), 8), np.nan, dtype=np.float32),
        lambda texts: np.zeros((len(texts), 8), dtype=np.float32),
        lambda texts: unit(*texts, dimension=9),
        lambda texts: differently(texts)[:-1],
        lambda texts: differently([*texts, "one more"]),
        lambda texts: differently(texts).reshape(-1),
        lambda texts: np.zeros((0, 8), dtype=np.float32),
    ],
)
def test_an_embedder_that_gives_something_else_changes_nothing(home: Path, embed: Callable[..., Vectors]) -> None:
    with open_any(home) as store:
        before = content(store)
        with pytest.raises(BadInput, match="embedder"):
            store.reindex(OTHER, embed, exchange_text=exchange_text)
        assert content(store) == before
        assert len(list(store.path.glob("epoch-*/"))) == 1
    assert told(home) == before
    with open_any(home) as store:
        reindex(store)
        assert check(store.path) == ()


def test_nothing_forgotten_waits_for_an_interrupted_reindexing(home: Path) -> None:
    with open_any(home) as store:
        lines = [t.line for s in store.sessions() for t in store.turns(s) if SECRET in t.text]
        assert len(lines) == 4
        with pytest.raises(KeyboardInterrupt):
            store.reindex(OTHER, Counting(2), exchange_text=exchange_text)
        vectors = [row.tobytes()[:16] for row in differently(lines)]
        assert all(vector in bytes_of(store.path) for vector in vectors)
        assert store.erase(CHOICE).residues == ()
        assert not any(vector in bytes_of(store.path) for vector in vectors)
        reindex(store)
        assert not any(vector in bytes_of(store.path) for vector in vectors)


@pytest.mark.parametrize("embedder", [EMBEDDER, OTHER])
def test_reindexing_changes_the_precision(home: Path, embedder: EmbedderIdentity) -> None:
    embed = differently if embedder is OTHER else lambda texts: unit(*texts)
    with open_any(home) as store:
        before = content(store)
        wide = store.stats().bytes
        store.reindex(embedder, embed, exchange_text=exchange_text, precision="float16")
        after = content(store)
        for name in ("turns", "decisions", "segments", "pending", "records", "nodes", "notes"):
            assert after[name] == before[name]
        narrow = store.stats().bytes
        for name in ("turns.rows", "decisions.rows"):
            # a row was forgotten in between
            assert narrow[f"epoch-000002/{name}"] == (wide[f"epoch-000001/{name}"] - 8 * 4) // 2
        [turn] = store.turns("S2")
        assert store.search("turns", embed([turn.line]), 1)[0][0].cosine == pytest.approx(1.0, abs=2e-3)
        store.compact()  # it stays what it is
        assert content(store) == after
        say(store, "S2", 1)
    assert check(user_folder(home, "ana")) == ()


def test_progress_of_a_rewriting(home: Path) -> None:
    told: list[tuple[int, int]] = []
    with open_any(home) as store:
        store.reindex(OTHER, differently, exchange_text=exchange_text, on_progress=lambda *step: told.append(step))
    assert told
    assert told == sorted(told)
    assert all(done <= total for done, total in told)


# --- against a model -------------------------------------------------------------------------------------------------

WIDER = EmbedderIdentity("wider", "7e" * 32, 12)


@lru_cache(maxsize=10_000)
def row_of(text: str, dimension: int, precision: Precision) -> Vectors:
    """The vector that a memory gives back for a text."""
    row: Vectors = unit(text, dimension=dimension)[0].astype(precision).astype(np.float32)
    return row


@dataclass(slots=True)
class Coded:
    """One encoding: the records that are left of it."""

    segment: Segment
    note: str
    records: list[Record]


@dataclass(slots=True)
class Model:
    """A memory as lists, in the order of storing. `labels` says for each node that has been met which text its vector
    is of, None once that was forgotten."""

    turns: list[Turn] = field(default_factory=list)
    decisions: list[tuple[Decision, str]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    encodings: list[Coded] = field(default_factory=list)
    labels: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    following: dict[str, int] = field(default_factory=dict)

    # --- what it says ---

    def of(self, session: str) -> list[Turn]:
        return sorted((t for t in self.turns if t.session == session), key=lambda t: t.index)

    def sessions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t.session for t in self.turns))

    def rows(self) -> list[tuple[Coded, Record]]:
        return [(coded, record) for coded in self.encodings for record in coded.records]

    def records(self) -> dict[str, Record]:
        said: dict[str, list[Record]] = {}
        for _, record in self.rows():
            said.setdefault(record.id, []).append(record)
        return {i: replace(r[-1], turns=tuple(sorted({t for x in r for t in x.turns}))) for i, r in said.items()}

    def pending(self) -> list[Segment]:
        return [s for s in self.segments if all(e.segment != s for e in self.encodings)]

    def note(self, session: str) -> str:
        return next((e.note for e in reversed(self.encodings) if e.segment.session == session), "")

    def nodes(self) -> list[Node]:
        place = {identifier: n for n, identifier in enumerate(self.records())}
        first: dict[str, Node] = {}
        linked: dict[str, set[str]] = {}
        for coded, record in self.rows():
            for node in given(coded, record):
                first.setdefault(node.id, node)
                linked.setdefault(node.id, set()).add(record.id)
        found = []
        for node in first.values():
            label, text = self.labels.get(node.id, ("", None))
            ids = sorted(linked[node.id], key=place.__getitem__)
            found.append(replace(node, label=node.label if text is None else label, records=tuple(ids)))
        return sorted(found, key=lambda n: (n.kind == "temporal", place[n.records[0]], n.kind, n.key))

    def texts(self, kind: str) -> list[tuple[str, str]]:
        """Identifier and embedded text of each vector, in the order of storing."""
        if kind == "turns":
            return [(t.id, t.line) for t in self.turns]
        if kind == "records":
            return [(r.id, r.embedded_text) for _, r in self.rows()]
        living = {n.id for n in self.nodes()}
        return [(i, text) for i, (_, text) in self.labels.items() if i in living and text is not None]

    def spoken(self) -> str:
        """Every word that it holds."""
        parts = [t.text for t in self.turns]
        parts += [p for _, r in self.rows() for p in (r.text, *r.entities, *r.tags)]
        return "\n".join([*parts, *(e.note for e in self.encodings)])

    # --- what is added ---

    def say(self, turns: list[Turn], decisions: list[Decision], texts: list[str], segments: list[Segment]) -> None:
        self.turns += turns
        self.decisions += zip(decisions, texts, strict=True)
        self.segments += segments
        for turn in turns:
            self.following[turn.session] = turn.index + 1

    def encode(self, segment: Segment, records: list[Record], note: str, *, again: bool) -> None:
        frame = event_frame(segment.id, ()).id
        known = {i for i, _ in self.texts("nodes")}
        if again:
            self.withdraw(segment)
        self.encodings.append(Coded(segment, note, list(records)))
        for node in nodes_of_encoding(segment, records):
            if node.kind != "temporal" and (node.id not in known or (again and node.id == frame)):
                self.labels.pop(node.id, None)
                self.labels[node.id] = (node.label, label_text(node, records))

    def withdraw(self, segment: Segment) -> None:
        self.encodings = [e for e in self.encodings if e.segment != segment]

    # --- what is forgotten ---

    def forget(self, choice: Selection) -> Gone:
        chosen = self._chosen_turns(choice)
        lost = self._chosen_rows(choice)
        by_record = [(coded, record) for coded, record in self.rows() if (id(coded), id(record)) in lost]
        for _, record in by_record:
            for coded in self.encodings:
                if coded.segment.session == record.session and folded(record.text) in folded(coded.note):
                    coded.note = ""
        touched: list[Segment] = []
        for session in {t.session for t in chosen}:
            touched += self._touched(session, [t for t in chosen if t.session == session])
        waiting = [s for s in touched if any(covers(s, t) for t in self.turns if t not in chosen)]
        withdrawn = [e for e in self.encodings if e.segment in touched]
        removed = by_record + [(e, r) for e in withdrawn for r in e.records]
        before = {n.id: n for n in self.nodes()}
        ids = {r.id for _, r in removed}

        self.turns = [t for t in self.turns if t not in chosen]
        self.decisions = [(d, text) for d, text in self.decisions if not any(covers(d.exchange, t) for t in chosen)]
        self.segments = [s for s in self.segments if s not in touched or s in waiting]
        self.encodings = [e for e in self.encodings if e not in withdrawn]
        for coded in self.encodings:
            coded.records = [r for r in coded.records if (id(coded), id(r)) not in lost]
        for session in {t.session for t in chosen} - set(self.sessions()):
            self.following[session] = 0
        self._forget_labels(removed, by_record)
        nodes = {n.id for _, r in removed for n in nodes_of_record(r)} - {n.id for n in self.nodes()}
        return Gone(
            tuple(t.id for t in chosen), ids, {normalise_key(before[n].label) for n in nodes}, {s.id for s in waiting}
        )

    def _chosen_turns(self, choice: Selection) -> list[Turn]:
        if choice.records:
            return []
        if choice.turns:
            return [t for t in self.turns if t.id in choice.turns]
        return [
            t
            for t in self.turns
            if choice.session in (None, t.session)
            and choice.speaker in (None, t.speaker)
            and (choice.before is None or (t.at is not None and t.at.date() < choice.before))
            and (choice.matching is None or folded(choice.matching) in folded(t.text))
        ]

    def _chosen_rows(self, choice: Selection) -> set[tuple[int, int]]:
        def meant(record: Record) -> bool:
            if choice.matching is None:
                return record.id in choice.records
            return (
                choice.session in (None, record.session)
                and choice.speaker in (None, record.speaker)
                and (choice.before is None or (record.said is not None and record.said.date() < choice.before))
                and any(folded(choice.matching) in folded(p) for p in (record.text, *record.entities, *record.tags))
            )

        ids = {i for i, record in self.records().items() if meant(record)}
        return {(id(coded), id(record)) for coded, record in self.rows() if record.id in ids}

    def _touched(self, session: str, chosen: list[Turn]) -> list[Segment]:
        """Segments with a forgotten turn; and those whose records rest on one, or use words that only they said."""
        said = {w for t in chosen for w in terms(t.line)}
        said -= {w for t in self.of(session) if t not in chosen for w in terms(t.line)}
        touched = [s for s in self.segments if any(covers(s, t) for t in chosen)]
        for coded in self.encodings:
            if coded.segment.session != session:
                continue
            used = {w for r in coded.records for p in (r.text, *r.entities, *r.tags) for w in terms(p)}
            rests = {index for r in coded.records for index in r.turns}
            if used & said or rests & {t.index for t in chosen}:
                touched.append(coded.segment)
            if said.intersection(terms(coded.note)):
                coded.note = ""
        return list(dict.fromkeys(touched))

    def _forget_labels(self, removed: list[tuple[Coded, Record]], by_record: list[tuple[Coded, Record]]) -> None:
        """A label that nothing spells any more, and the sentences of a segment one of which was forgotten."""
        spelled = {(n.id, n.label) for coded, record in self.rows() for n in given(coded, record)}
        for node in (n for _, r in removed for n in nodes_of_record(r)):
            if node.id in self.labels and (node.id, self.labels[node.id][0]) not in spelled:
                self.labels[node.id] = ("", None)
        for coded, _ in by_record:
            self.labels[event_frame(coded.segment.id, ()).id] = ("", None)


@dataclass(frozen=True, slots=True)
class Gone:
    turns: tuple[str, ...]
    records: set[str]
    nodes: set[str]
    waiting: set[str]


def given(coded: Coded, record: Record) -> tuple[Node, ...]:
    """The nodes that one record of one segment gives."""
    return (*nodes_of_record(record), event_frame(coded.segment.id, [record]))


def covers(span: Segment | Exchange, turn: Turn) -> bool:
    return span.session == turn.session and span.start <= turn.index <= span.end


def folded(text: str) -> str:
    return text.lower().replace("ｔｅａ", "tea").replace("e\u0301", "é")  # all that the texts below have


def bm25(texts: list[tuple[str, str]], query: str) -> dict[str, float]:
    """Robertson and Zaragoza 2009 with k1 = 1.2 and b = 0.75, text by text."""
    bags = {identifier: Counter(search_terms(text)) for identifier, text in texts}
    bags = {identifier: bag for identifier, bag in bags.items() if bag}
    scores: dict[str, float] = {}
    for term in set(search_terms(query)):
        holding = [i for i, bag in bags.items() if term in bag]
        rarity = math.log1p((len(bags) - len(holding) + 0.5) / (len(holding) + 0.5))
        mean = sum(bag.total() for bag in bags.values()) / len(bags) if bags else 1.0
        for identifier in holding:
            bag = bags[identifier]
            norm = 1.2 * (0.25 + 0.75 * bag.total() / mean)
            scores[identifier] = scores.get(identifier, 0.0) + rarity * 2.2 * bag[term] / (bag[term] + norm)
    return scores


def nearest(rows: list[tuple[str, Vectors]], query: Vectors, k: int) -> list[tuple[str, float]]:
    scored = [(i, float(row.astype(np.float64) @ query.astype(np.float64))) for i, row in rows]
    best: dict[str, float] = {}
    for identifier, cosine in sorted(scored, key=lambda pair: -pair[1]):  # of equal ones, the first stored
        best.setdefault(identifier, cosine)
    return list(best.items())[:k]


def require_equal(store: Store, model: Model, precision: Precision) -> None:
    """Everything that a store says is what the model says."""
    assert store.sessions() == model.sessions()
    for session in "ab":
        held = model.of(session)
        assert store.turns(session) == tuple(held)
        assert store.following(session) == model.following.get(session, 0)
        decided = [(d, text) for d, text in model.decisions if d.exchange.session == session]
        assert store.decisions(session) == tuple(d for d, _ in decided)
        rows = [row_of(text, store.embedder.dimension, precision).tolist() for _, text in decided]
        assert store.exchange_vectors(session).tolist() == rows
        assert store.note(session) == model.note(session)
        for turn in held:
            assert turn.ref is None or store.turn_by_ref(session, turn.ref) == turn
    assert store.segments() == tuple(model.segments)
    assert store.pending() == tuple(model.pending())
    records = model.records()
    assert store.records() == tuple(records.values())
    nodes = model.nodes()
    assert store.nodes() == tuple(nodes)
    dated = sorted((n.when.start, n.when.end, n.id) for n in nodes if n.when is not None)
    assert [n.id for n in store.temporal_nodes(TimeRange())] == [i for _, _, i in dated]
    for coded in model.encodings:
        assert [r.id for r in store.segment_records(coded.segment.id)] == list(
            dict.fromkeys(r.id for r in coded.records)
        )
    held_counts = store.stats()
    assert (held_counts.turns, held_counts.segments) == (len(model.turns), len(model.segments))
    assert (held_counts.records, held_counts.nodes) == (len(records), len(nodes))
    require_equal_searches(store, model, precision)


def require_equal_searches(store: Store, model: Model, precision: Precision) -> None:
    dimension = store.embedder.dimension
    query = unit("query", dimension=dimension)
    kinds: tuple[Literal["turns", "records", "nodes"], ...] = ("turns", "records", "nodes")
    for kind in kinds:
        rows = [(i, row_of(text, dimension, precision)) for i, text in model.texts(kind)]
        for k in (3, 1000):
            hits = store.search(kind, query, k)[0]
            expected = nearest(rows, query[0], k)
            assert [h.id for h in hits] == [i for i, _ in expected], kind
            assert [h.cosine for h in hits] == pytest.approx([c for _, c in expected], abs=1e-12)
    scope = Scope(sessions=("a",), speakers=("Ana",))
    rows = [(t.id, row_of(t.line, dimension, precision)) for t in model.turns if scope.holds(t)]
    assert [h.id for h in store.search("turns", query, 5, scope=scope)[0]] == [i for i, _ in nearest(rows, query[0], 5)]
    for wanted in ("tea rain", "Rome", "q0001z q0002z q0003z"):
        said = [(t.id, t.line) for t in model.turns]
        assert dict(store.words("turns", wanted, 1000)) == pytest.approx(bm25(said, wanted), rel=1e-4)
        kept = [(r.id, r.text) for r in model.records().values()]
        found = store.words("records", wanted, 1000)
        assert dict(found) == pytest.approx(bm25(kept, wanted), rel=1e-4)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


WORDS = ("tea", "ＴＥＡ", "rain", "Rome", "caf\u00e9", "cafe\u0301", "train")
DAYS = st.one_of(st.none(), st.integers(1, 3))
SPEAKERS = st.sampled_from([None, "Ana", "Ben"])
SESSIONS = st.sampled_from(["a", "b"])


def at(day: int | None) -> datetime | None:
    return None if day is None else datetime(2023, 5, day, 12, tzinfo=UTC)


class AnyOrder(RuleBasedStateMachine):
    """`exact_below` is low, so that graphs, their snapshots and what compaction carries of them take part."""

    new_home = staticmethod(lambda: Path())

    def __init__(self) -> None:
        super().__init__()
        self.home = self.new_home()
        self.identity = EMBEDDER
        self.precision: Precision = "float32"
        self.model = Model()
        self.said: dict[str, Turn] = {}  # its own word of each turn that was ever said
        self.older: dict[str, bytes] = {}  # a catalogue of earlier commits, by the folder it is of
        self.store = self.open()
        self.reader = self.open(read_only=True)

    def open(self, **options: Any) -> Store:
        return Store.open(self.home, "ana", embedder=self.identity, exact_below=6, **options)

    def teardown(self) -> None:
        self.store.close()
        self.reader.close()
        shutil.rmtree(self.home, ignore_errors=True)

    # --- adding ---

    @rule(
        session=SESSIONS,
        said=st.lists(st.tuples(st.sampled_from(WORDS), SPEAKERS, DAYS), min_size=1, max_size=4),
        decided=st.booleans(),
        closed=st.booleans(),
    )
    def say(self, session: str, said: list[tuple[str, str | None, int | None]], decided: bool, closed: bool) -> None:
        start = self.model.following.get(session, 0)
        turns = []
        for index, (word, speaker, day) in enumerate(said, start):
            own = f"q{len(self.said):04d}z"
            ref = f"ref {index}" if index % 2 else None
            turns.append(Turn(session, index, f"{word} {own}", speaker=speaker, at=at(day), ref=ref))
            self.said[own] = turns[-1]
        texts = ["\n".join(t.line for t in turns[n : n + 2]) for n in range(0, len(turns), 2)] if decided else []
        decisions = [
            Decision(
                Exchange(session, start + 2 * n, min(start + 2 * n + 1, turns[-1].index), "", 9),
                "append",
                None,
                SIGNALS,
                9,
                1,
            )
            for n in range(len(texts))
        ]
        segments = [Segment(session, start, turns[-1].index, "session_flush", 9, 1, 1.0)] if closed else []
        with self.store.transaction() as tx:
            tx.add_turns(turns, self.rows([t.line for t in turns]))
            tx.add_decisions(decisions, self.rows(texts))
            tx.add_segments(segments)
        self.model.say(turns, decisions, texts, segments)

    def rows(self, texts: list[str]) -> Vectors:
        return unit(*texts, dimension=self.identity.dimension)

    def some_records(self, data: st.DataObject, segment: Segment) -> list[Record]:
        living = self.model.of(segment.session)
        inside = [t for t in living if covers(segment, t)]
        records = []
        for _ in range(data.draw(st.integers(0, 3))):
            source = data.draw(st.sampled_from(inside))
            about = data.draw(st.sampled_from(living if data.draw(st.integers(0, 4)) == 0 else inside))
            own = about.text.split()[-1] if data.draw(st.booleans()) else "now"
            day = data.draw(DAYS)
            when = None if day is None else DateSpan(date(2023, 5, day), date(2023, 5, day), "day")
            entity = data.draw(st.sampled_from(["Rome", "ROME", "tea", own]))
            records.append(
                Record(
                    segment.session,
                    f"{data.draw(st.sampled_from(WORDS))} {data.draw(st.sampled_from(['here', own]))}",
                    data.draw(st.sampled_from(["fact", "event"])),
                    tuple(sorted({source.index, about.index})),
                    segment.id,
                    entities=(entity,),
                    tags=(data.draw(st.sampled_from(["Trip", "trip", "rain"])),),
                    temporal=Temporal(when),
                    speaker=data.draw(SPEAKERS),
                    said=at(data.draw(DAYS)),
                )
            )
        return records

    def commit(self, data: st.DataObject, segment: Segment, *, again: bool) -> None:
        records = self.some_records(data, segment)
        note = data.draw(st.sampled_from(["", "Rome here", "tea", *(t.text for t in self.model.of(segment.session))]))
        missing = self.store.missing_nodes(segment, records, withdrawn=again)
        labels = dict(zip([n.id for n, _ in missing], self.rows([text for _, text in missing]), strict=True))
        with self.store.transaction() as tx:
            if again:
                tx.withdraw_encoding(segment)
            tx.add_encoding(segment, records, self.rows([r.embedded_text for r in records]), labels, note)
        self.model.encode(segment, records, note, again=again)

    @precondition(lambda self: self.model.pending())
    @rule(data=st.data())
    def encode(self, data: st.DataObject) -> None:
        self.commit(data, data.draw(st.sampled_from(self.model.pending())), again=False)

    @precondition(lambda self: self.model.encodings)
    @rule(data=st.data())
    def encode_again(self, data: st.DataObject) -> None:
        self.commit(data, data.draw(st.sampled_from([e.segment for e in self.model.encodings])), again=True)

    @precondition(lambda self: self.model.encodings)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from([e.segment for e in self.model.encodings]))
        with self.store.transaction() as tx:
            tx.withdraw_encoding(segment)
        self.model.withdraw(segment)

    # --- forgetting ---

    def forget(self, choice: Selection, *, erase: bool) -> None:
        told = self.store.forget(choice, dry_run=True)
        receipt = self.store.erase(choice) if erase else self.store.forget(choice)
        gone = self.model.forget(choice)
        assert receipt.turns == gone.turns
        assert set(receipt.records) == gone.records
        assert {normalise_key(label) for label in receipt.nodes} == gone.nodes
        assert {s.id for s in receipt.waiting} == gone.waiting
        assert replace(told, dry_run=False) == replace(
            receipt, compacted=False, removed={}, bytes_before=0, bytes_after=0, residues=(), elsewhere=()
        )
        assert receipt.residues == ()
        if receipt.compacted:
            self.require_no_traces()

    def require_no_traces(self) -> None:
        """Neither a word nor a vector of what is not held any more is in any file."""
        held = b"\n".join(p.read_bytes() for p in sorted(self.store.path.rglob("*")) if p.is_file())
        spoken = self.model.spoken()
        for own, turn in self.said.items():
            assert (own.encode() in held) == (own in spoken), own
            if turn not in self.model.turns:
                vector = row_of(turn.line, self.identity.dimension, self.precision)
                assert vector.astype("<f4").tobytes()[:16] not in held, own
                assert vector.astype("<f2").tobytes()[:16] not in held, own

    @precondition(lambda self: self.model.turns)
    @rule(data=st.data(), erase=st.integers(0, 4).map(lambda n: n == 0))
    def forget_turns(self, data: st.DataObject, erase: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from([t.id for t in self.model.turns]), min_size=1, max_size=3))
        self.forget(Selection(turns=tuple(ids)), erase=erase)

    @precondition(lambda self: self.model.records())
    @rule(data=st.data(), erase=st.booleans())
    def forget_records(self, data: st.DataObject, erase: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model.records())), min_size=1, max_size=2))
        self.forget(Selection(records=tuple(ids)), erase=erase)

    @precondition(lambda self: self.model.turns)
    @rule(
        data=st.data(),
        erase=st.booleans(),
        day=DAYS,
        matching=st.sampled_from([None, "TEA", "CAFE\u0301", "rom", "q0", "q0003z"]),
        named=st.sampled_from(["session", "speaker", "both", "neither"]),
    )
    def forget_by_conditions(
        self, data: st.DataObject, erase: bool, day: int | None, matching: str | None, named: str
    ) -> None:
        speakers = sorted({t.speaker for t in self.model.turns if t.speaker is not None})
        session = data.draw(st.sampled_from(self.model.sessions())) if named in ("session", "both") else None
        speaker = data.draw(st.sampled_from(speakers)) if speakers and named in ("speaker", "both") else None
        before = None if day is None else date(2023, 5, day)
        if (session, speaker, before, matching) != (None, None, None, None):
            self.forget(Selection(session=session, speaker=speaker, before=before, matching=matching), erase=erase)

    # --- writing anew, crashing, reopening ---

    @rule(
        verb=st.sampled_from(
            [
                "compact",
                "reopen",
                "crash",
                "lose_the_catalogue",
                "put_back_an_older_catalogue",
                "refresh",
                "read_without_refreshing",
            ]
        )
    )
    def keep(self, verb: str) -> None:
        getattr(self, verb)()

    @rule(precision=st.sampled_from(["float32", "float16"]), identity=st.sampled_from([EMBEDDER, WIDER]))
    def reindex(self, precision: Precision, identity: EmbedderIdentity) -> None:
        self.store.reindex(
            identity,
            lambda texts: unit(*texts, dimension=identity.dimension),
            exchange_text=lambda exchange, turns: "\n".join(t.line for t in turns),
            precision=precision,
        )
        self.identity, self.precision = identity, precision
        self.require_no_traces()

    def compact(self) -> None:
        self.store.compact()
        self.require_no_traces()

    def reopen(self) -> None:
        self.store.close()
        assert check(self.store.path) == ()
        self.store = self.open()

    def crash(self) -> None:
        """A copy of the folder, taken while everything is open, is what is left."""
        after = self.new_home()
        shutil.copytree(self.home, after, dirs_exist_ok=True)
        self.store.close()
        self.reader.close()
        shutil.rmtree(self.home)
        self.home, self.older = after, {}
        assert check(next(after.glob("users/*"))) == ()
        self.reader = self.open(read_only=True)
        self.store = self.open()

    def lose_the_catalogue(self) -> None:
        self.store.close()
        for path in self.store.path.glob("epoch-*/catalogue.sqlite*"):
            path.unlink()
        self.store = self.open()

    def put_back_an_older_catalogue(self) -> None:
        """It has to take in many commits at once, and comes to the same."""
        self.store.close()
        self.reader.close()
        [epoch] = self.store.path.glob("epoch-*")
        now = (epoch / "catalogue.sqlite").read_bytes()
        if epoch.name in self.older:
            (epoch / "catalogue.sqlite").write_bytes(self.older[epoch.name])
        self.older = {epoch.name: now}
        self.store = self.open()
        self.reader = self.open(read_only=True)

    # --- reading ---

    def refresh(self) -> None:
        self.reader.refresh()
        require_equal(self.reader, self.model, self.precision)

    def read_without_refreshing(self) -> None:
        """What a reader that lags behind says is of some commit; it never fails."""
        for session in self.reader.sessions():
            for turn in self.reader.turns(session):
                assert turn == self.said[turn.text.split()[-1]]
        self.reader.search("records", unit("query", dimension=self.reader.embedder.dimension), 5)
        self.reader.words("turns", "tea", 5)

    @invariant()
    def equals_the_model(self) -> None:
        require_equal(self.store, self.model, self.precision)


def any_order(homes: pytest.TempPathFactory, examples: int, steps: int) -> None:
    class Here(AnyOrder):
        new_home = staticmethod(lambda: homes.mktemp("any-order"))

    case = Here.TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()


def test_any_sequence_equals_a_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    any_order(tmp_path_factory, examples=10, steps=25)

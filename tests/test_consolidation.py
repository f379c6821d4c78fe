"""Encoding later and encoding again: what is replaced, what is kept, when it stops, and that nothing is done twice."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lychee_local import Memory, upkeep
from lychee_local.accounting import spent
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply
from lychee_local.consolidation import Budget
from lychee_local.errors import BadInput, StoreLocked
from lychee_local.settings import EncodeSettings, Settings
from lychee_local.store import codec, user_folder
from lychee_local.types import Progress, Spent, Usage
from lychee_local.watch import LOOK_EVERY_SECONDS, State, consolidate_in_batches

SAID = (
    "Clara teaches pottery in Porto.",
    "The blue boat lies in the harbour of Faro.",
    "The piano of the school was tuned by Rui.",
    "The tomatoes in the garden are ripe now.",
)


def opened(home: Path, llm: FakeLLM | None = None, **options: Any) -> Memory:
    return Memory.open("ana", home=home, llm=llm, embedder=HashEmbedder(256), reranker=None, **options)


def told(memory: Memory, *texts: str, session: str = "one", encode: bool = True) -> None:
    """Each text becomes a segment of its own."""
    for text in texts:
        memory.remember(text, speaker="Ana", session=session, encode=encode)
        memory.flush(session, encode=encode)


def answer(*sentences: str, note: str = "") -> str:
    """What a capable model writes under the full prompt: one record for each sentence, all from the first turn."""
    record = {
        "memory_type": "fact",
        "entities": [],
        "temporal": {"t_ref": "", "t_valid_from": "", "t_valid_to": ""},
        "tags": [],
        "evidence_turns": [0],
        "source_role": "user",
    }
    records = [record | {"semantic_text": sentence} for sentence in sentences]
    return json.dumps({"records": records, "disambiguation_context": note})


def quoting(prefix: str) -> Callable[[FakeCall], Reply]:
    """A model that writes down the last thing said, and who it is in the note."""

    def reply(call: FakeCall) -> Reply:
        said = current_turn(call)
        return answer(f"Ana mentions: {said}", note=f"{prefix} {said.split()[-1]}")

    return reply


def current_turn(call: FakeCall) -> str:
    [said] = [text for text in SAID if text in call.prompt.rsplit("CURRENT_TURNS", 2)[-2]]
    return said


def texts(memory: Memory) -> list[str]:
    return [record.text for record in memory.records()]


# --- encoding again --------------------------------------------------------------------------------------------------


def test_a_better_model_replaces_what_the_rules_made(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, *SAID)
        before = memory.records()
        assert {r.origin for r in before} == {"rules"}
    reports: list[Progress] = []
    large = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, large) as memory:
        done = memory.reencode(on_progress=reports.append)
        assert [s.id for s in done.segments] == [s.id for s in memory.segments()]
        assert (done.kept, done.skipped, len(done.records), len(done.usage)) == ((), 0, 4, 4)
        assert [(p.stage, p.done, p.total) for p in reports] == [("encode", n, 4) for n in (1, 2, 3, 4)]
        assert texts(memory) == [f"Ana mentions: {said}" for said in SAID]
        assert {r.origin for r in memory.records()} == {"model"}
        assert [r.turns for r in memory.records()] == [(0,), (1,), (2,), (3,)]
        assert {n.label for n in memory.nodes("event_frame")} == {f"one:{n}-{n}" for n in range(4)}
        found = memory.recall("Who teaches pottery?").evidence
        assert not {e.id for e in found} & {r.id for r in before}
        again = memory.reencode()
        assert (again.segments, again.skipped) == ((), 4)
    assert len(large.calls) == 4
    assert upkeep.check("ana", home=tmp_path) == ()


def test_rules_replace_a_model_and_another_model_replaces_both(tmp_path: Path) -> None:
    with opened(tmp_path, FakeLLM(quoting("small"), name="small")) as memory:
        told(memory, *SAID[:2])
    with opened(tmp_path) as memory:
        assert len(memory.reencode().segments) == 2
        assert {r.origin for r in memory.records()} == {"rules"}
        assert memory.reencode().skipped == 2
        told(memory, SAID[2])
    with opened(tmp_path, FakeLLM(quoting("small"), name="small")) as memory:
        told(memory, SAID[3])
        done = memory.reencode()
        assert (len(done.segments), done.skipped) == (3, 1)


def test_only_the_session_that_is_named(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, SAID[0], session="one")
        told(memory, SAID[1], session="two")
    with opened(tmp_path, FakeLLM(quoting("large"), name="large")) as memory:
        assert [s.session for s in memory.reencode("two").segments] == ["two"]
        assert [r.origin for r in memory.records()] == ["rules", "model"]
        with pytest.raises(BadInput, match="no session 'three'"):
            memory.reencode("three")


def test_what_waits_is_left_to_consolidate(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, SAID[0])
        told(memory, SAID[1], encode=False)
    llm = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, llm) as memory:
        assert len(memory.reencode().segments) == 1
        assert len(memory.pending()) == 1


@pytest.mark.parametrize("reply", [answer(), ("{", "length"), ("{", "loop")])
def test_a_segment_keeps_what_it_has_where_the_model_has_nothing(tmp_path: Path, reply: Reply) -> None:
    with opened(tmp_path, FakeLLM(quoting("small"), name="small")) as memory:
        told(memory, *SAID[:2])
        before = memory.records()

    def mute(call: FakeCall) -> Reply:
        return reply if current_turn(call) == SAID[0] else answer(f"Ana says: {SAID[1]}")

    large = FakeLLM(mute, name="large")
    with opened(tmp_path, large) as memory:
        done = memory.reencode()
        assert [s.start for s in done.kept] == [0]
        assert [s.start for s in done.segments] == [1]
        assert texts(memory) == [before[0].text, f"Ana says: {SAID[1]}"]
        assert [r.text for r in done.records] == [f"Ana says: {SAID[1]}"]
        assert memory.pending() == ()


def test_a_segment_that_had_nothing_is_not_asked_about_again(tmp_path: Path) -> None:
    with opened(tmp_path, FakeLLM(lambda _: answer(), name="small")) as memory:
        told(memory, SAID[0])
        assert memory.records() == ()
    large = FakeLLM(lambda _: answer(), name="large")
    with opened(tmp_path, large) as memory:
        assert len(memory.reencode().segments) == 1
        assert memory.reencode().skipped == 1
    assert len(large.calls) == 1


def test_where_the_rules_stood_in_for_a_model_it_may_try_again(tmp_path: Path) -> None:
    replies: Iterator[Reply] = itertools.chain([("{", "length")] * 2, itertools.repeat(answer(f"Ana says: {SAID[0]}")))
    llm = FakeLLM(lambda _: next(replies), name="large")
    with opened(tmp_path, llm) as memory:
        told(memory, SAID[0])
        while memory.records()[0].origin == "rules":
            assert len(memory.reencode().usage) >= 1
        assert texts(memory) == [f"Ana says: {SAID[0]}"]
        assert memory.reencode().skipped == 1


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, *SAID)
        by_rules = texts(memory)

    def stop(progress: Progress) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    large = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, large) as memory:
        with pytest.raises(KeyboardInterrupt):
            memory.reencode(on_progress=stop)
        written = [f"Ana mentions: {said}" for said in SAID]
        assert sorted(texts(memory)) == sorted(written[:2] + by_rules[2:])
    with opened(tmp_path, large) as memory:
        done = memory.reencode()
        assert ([s.start for s in done.segments], done.skipped) == ([2, 3], 2)
        assert texts(memory) == written
    assert len(large.calls) == 4


def test_the_old_records_are_there_until_the_new_ones_are(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, SAID[0])
        [before] = texts(memory)

    def fails(call: FakeCall) -> Reply:
        with opened(tmp_path, read_only=True) as other:
            assert texts(other) == [before]
        raise KeyboardInterrupt

    with opened(tmp_path, FakeLLM(fails, name="large")) as memory:
        with pytest.raises(KeyboardInterrupt):
            memory.reencode()
        assert texts(memory) == [before]
        assert memory.pending() == ()


def test_a_segment_is_read_again_with_what_was_known_at_its_place(tmp_path: Path) -> None:
    with opened(tmp_path, FakeLLM(quoting("small"), name="small")) as memory:
        told(memory, *SAID)
    large = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, large) as memory:
        memory.reencode()
    for number, call in enumerate(large.calls):
        context = call.prompt.split("<REFERENCE_CONTEXT>")[-1].split("</REFERENCE_CONTEXT>")[0]
        assert [said in context for said in SAID] == [n < number for n in range(4)]
        assert "small" not in context
        last = SAID[number - 1].split()[-1]
        assert (f"Known so far: large {last}" in context) == (number > 0)


def test_who_encoded_what_outlives_compaction_archives_and_repair(tmp_path: Path) -> None:
    with opened(tmp_path, FakeLLM(quoting("small"), name="small")) as memory:
        told(memory, *SAID[:2])
    large = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, large) as memory:
        memory.reencode()
        held = memory.stats().bytes
        memory.compact()
        assert memory.stats().bytes < held
        assert memory.reencode().skipped == 2
        memory.export(tmp_path / "ana.zip")
    folder = user_folder(tmp_path, "ana")
    assert not [p for p in folder.rglob("*") if p.is_file() and p.name != "usage.jsonl" and b"small" in p.read_bytes()]
    with opened(tmp_path / "copy", large) as memory:
        memory.import_archive(tmp_path / "ana.zip")
        assert memory.reencode().skipped == 2
    [rows] = folder.glob("epoch-*/turns.rows")
    rows.write_bytes(bytes([rows.read_bytes()[0] ^ 1]) + rows.read_bytes()[1:])
    assert upkeep.check("ana", home=tmp_path)
    upkeep.repair("ana", home=tmp_path, embedder=HashEmbedder(256))
    with opened(tmp_path, large) as memory:
        assert memory.reencode().skipped == 2
    assert len(large.calls) == 2


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_budget_ends_the_work_between_two_segments(tmp_path: Path) -> None:
    llm = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, llm) as memory:
        told(memory, *SAID, encode=False)
        first = memory.consolidate(max_tokens=1)
        assert (len(first.records), len(memory.pending())) == (1, 3)
        # Two calls are dearer than one and a half of the first.
        memory.consolidate(max_tokens=first.tokens + first.tokens // 2)
        assert len(memory.pending()) == 1
        memory.consolidate(budget_seconds=1e-9)
        assert memory.pending() == ()
        assert memory.consolidate(budget_seconds=60, max_tokens=10**9).records == ()


def test_sessions_are_encoded_side_by_side_each_in_its_own_order(tmp_path: Path) -> None:
    def consolidated(home: Path, width: int) -> tuple[list[str], list[str]]:
        llm = FakeLLM(quoting("large"), name="large")
        with opened(home, llm, settings=Settings(encode=EncodeSettings(width=width))) as memory:
            told(memory, *SAID[:2], session="one", encode=False)
            told(memory, *SAID[2:], session="two", encode=False)
            memory.consolidate()
            return [current_turn(call) for call in llm.calls], sorted(texts(memory))

    calls, records = consolidated(tmp_path / "side", 2)
    assert calls == [SAID[0], SAID[2], SAID[1], SAID[3]]
    calls, same = consolidated(tmp_path / "alone", 1)
    assert calls == list(SAID)
    assert records == same == sorted(f"Ana mentions: {said}" for said in SAID)


def test_where_nothing_waits_no_model_is_asked(tmp_path: Path) -> None:
    llm = FakeLLM(quoting("large"), name="large")
    llm.close()  # it would raise
    with opened(tmp_path, llm) as memory:
        assert memory.remember("Ana has a cat.", session="one").segments == ()
        assert memory.consolidate().records == ()
        assert memory.reencode().segments == ()


def test_a_budget_ends_the_work_of_all_sessions(tmp_path: Path) -> None:
    llm = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path, llm) as memory:
        for number, said in enumerate(SAID):
            told(memory, said, session=str(number), encode=False)
        assert len(memory.consolidate(max_tokens=1).records) == 1
        assert len(memory.consolidate(budget_seconds=9.9, max_tokens=1_999).records) > 0
        memory.consolidate()
        assert memory.pending() == ()


@pytest.mark.parametrize(
    ("budget", "width"),
    [
        (Budget(), 16),
        (Budget(seconds=9.9), 1),
        (Budget(seconds=35), 3),
        (Budget(seconds=1e300), 16),
        (Budget(tokens=1), 1),
        (Budget(tokens=5_000), 5),
        (Budget(seconds=3_600, tokens=2_500), 2),
        (Budget(seconds=float("inf")), 16),
    ],
)
def test_no_more_is_under_way_than_a_budget_pays_for(budget: Budget, width: int) -> None:
    assert budget.width(16) == width


@pytest.mark.parametrize("budget", [{"budget_seconds": 0}, {"budget_seconds": float("nan")}, {"max_tokens": 0}])
def test_a_budget_is_positive(tmp_path: Path, budget: dict[str, Any]) -> None:
    with opened(tmp_path) as memory, pytest.raises(BadInput, match="positive"):
        memory.consolidate(**budget)


# --- in batches, beside other processes -------------------------------------------------------------------------------


class Clock:
    """Time passes only by waiting. At each wait, what is due happens."""

    def __init__(self, *events: Callable[[], None]) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._events = list(events)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)
        if seconds == LOOK_EVERY_SECONDS:
            if not self._events:
                raise KeyboardInterrupt
            self._events.pop(0)()


def test_what_is_remembered_by_another_process_is_encoded_until_ctrl_c(tmp_path: Path) -> None:
    """Between two batches the memory is free, or `told` here would find it locked."""
    llm = FakeLLM(quoting("large"), name="large")
    with opened(tmp_path) as memory:
        told(memory, *SAID[:2], encode=False)

    def said_later() -> None:
        with opened(tmp_path) as other:
            told(other, *SAID[2:], encode=False)

    clock = Clock(said_later, lambda: None)
    states: list[State] = []
    with opened(tmp_path, read_only=True) as looking:
        with pytest.raises(KeyboardInterrupt):
            consolidate_in_batches(
                looking,
                lambda: opened(tmp_path, llm),
                budget=Budget(),
                seconds=lambda: clock.now,
                wait=clock.wait,
                keep_going=True,
                on_state=states.append,
            )
        looking.refresh()
        assert texts(looking) == [f"Ana mentions: {said}" for said in SAID]
    assert len(llm.calls) == 4
    changes = [state for state, _ in itertools.groupby(states)]
    assert changes == ["encoding", "nothing waits", "encoding", "nothing waits"]


def test_it_waits_while_held_back_or_locked_out_and_reports_all_batches_as_one(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, *SAID, encode=False)
    llm = FakeLLM(quoting("large"), name="large")
    busy = [True, True]
    tries = 0
    clock = Clock(lambda: None, busy.clear, lambda: None)

    @contextmanager
    def writing() -> Iterator[Memory]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StoreLocked("another process writes")
        with opened(tmp_path, llm) as memory:
            yield memory

    states: list[State] = []
    reports: list[Progress] = []
    with opened(tmp_path, read_only=True) as looking:
        done = consolidate_in_batches(
            looking,
            writing,
            budget=Budget(tokens=10**6),
            seconds=lambda: clock.now,
            wait=clock.wait,
            held_back=lambda: bool(busy),
            on_state=states.append,
            on_progress=reports.append,
        )
    assert states == ["held back", "held back", "being written", "encoding"]
    assert len(done.records) == 4
    assert [(p.done, p.total, p.records) for p in reports] == [(1, 4, 1), (2, 4, 2), (3, 4, 3), (4, 4, 4)]


def test_a_budget_counts_over_all_batches(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        told(memory, *SAID, encode=False)
    clock = Clock()

    llm = FakeLLM(quoting("large"), name="large")

    def go_on(budget: Budget) -> int:
        with opened(tmp_path, read_only=True) as looking:
            began = clock.now
            done = consolidate_in_batches(
                looking,
                lambda: opened(tmp_path, llm),
                budget=budget,
                seconds=lambda: clock.now - began,
                wait=clock.wait,
            )
        return len(done.records)

    assert go_on(Budget(tokens=1)) == 1
    assert len(llm.calls) == 1
    # The clock of the loop stands still inside a batch, which then ends by itself: nothing is left.
    assert go_on(Budget(seconds=15.0)) == 3
    assert go_on(Budget()) == 0


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lychee_local.memory"])
    return context


def consolidating(home: str, begun: Any, again: bool) -> None:
    """A child's work: encode, saying after each segment that it is done."""

    def reply(call: FakeCall) -> Reply:
        time.sleep(0.002)
        return quoting("large")(call)

    with opened(Path(home), FakeLLM(reply, name="large")) as memory:
        work = memory.reencode if again else memory.consolidate
        work(on_progress=lambda p: begun.send(p.done))


@pytest.mark.parametrize("again", [False, True], ids=["consolidate", "reencode"])
def test_killed_at_random_moments_no_segment_is_encoded_twice_or_lost(
    tmp_path: Path, processes: Any, again: bool
) -> None:
    with opened(tmp_path) as memory:
        for number in range(10):
            told(memory, *SAID, session=f"s{number}", encode=again)
    chance = random.Random(7)
    acknowledged = 0
    for _ in range(5):
        ours, theirs = processes.Pipe(duplex=False)
        child = processes.Process(target=consolidating, args=(str(tmp_path), theirs, again))
        child.start()
        theirs.close()
        try:
            assert ours.poll(60), "the child encoded nothing"
            time.sleep(chance.random() * 0.05)
        finally:
            child.kill()
            child.join(20)
        heard = 0
        while True:
            try:
                heard = ours.recv()
            except EOFError:
                break
        acknowledged += heard
        assert upkeep.check("ana", home=tmp_path) == ()
        with opened(tmp_path, read_only=True) as memory:
            written = [r for r in memory.records() if r.origin == "model"]
            assert len(written) >= acknowledged
            assert len(memory.records()) == (40 if again else len(written))
    with opened(tmp_path, FakeLLM(quoting("large"), name="large")) as memory:
        memory.reencode() if again else memory.consolidate()
        assert memory.pending() == ()
        assert len(memory.records()) == 40
        assert {r.origin for r in memory.records()} == {"model"}
        memory.compact()
    [lines] = user_folder(tmp_path, "ana").glob("epoch-*/encodings.jsonl")
    encoded = Counter(json.loads(line.split(b" ", 1)[1])["segment"] for line in lines.read_bytes().splitlines())
    assert len(encoded) == 40
    assert set(encoded.values()) == {1}


# --- what it cost ----------------------------------------------------------------------------------------------------


def test_each_call_is_logged_with_its_session_and_time(tmp_path: Path) -> None:
    noon = datetime(2024, 5, 13, 12, 0, tzinfo=UTC)
    times = (noon + timedelta(days=day) for day in itertools.count())

    with opened(tmp_path, FakeLLM(quoting("large"), name="large"), clock=lambda: next(times)) as memory:
        told(memory, SAID[0], session="one")
        told(memory, SAID[1], session="two")
        done = memory.usage()
        assert [(u.session, u.at) for u in done] == [("one", noon), ("two", noon + timedelta(days=1))]
        cost = memory.spent("session")
        assert list(cost) == ["one", "two"]
        assert cost["one"].calls == 1
        assert list(memory.spent("day")) == ["2024-05-13", "2024-05-14"]
        assert list(memory.spent("model")) == ["large"]
        assert memory.spent()["encode"] == memory.stats().usage["encode"]
    with opened(tmp_path, read_only=True) as memory:
        assert memory.usage() == done


def test_usage_is_summed_by_hand() -> None:
    a = Usage("encode", "m", 10, 5, 2, 1.5, session="one", at=datetime(2024, 5, 13, 23, 59))
    b = replace(a, prompt_tokens=1, output_tokens=2, cached_tokens=0, seconds=0.5, at=None)
    c = replace(a, purpose="answer", session=None)
    assert spent([a, b, c], "session") == {"one": Spent(2, 11, 2, 7, 2.0), None: Spent(1, 10, 2, 5, 1.5)}
    assert spent([a, b, c], "day") == {"2024-05-13": Spent(2, 20, 4, 10, 3.0), None: Spent(1, 1, 0, 2, 0.5)}
    assert spent([], "model") == {}


def test_lines_from_before_these_were_kept_are_read(tmp_path: Path) -> None:
    usage = codec.decode(Usage, b'{"purpose":"encode","model":"m","prompt_tokens":1,"output_tokens":2}')
    assert (usage.session, usage.at) == (None, None)
    line = codec.decode(codec.EncodingLine, b'{"segment":"segment:S:0-1","note":"","records":[],"rows":[]}')
    assert line.encoder == ""

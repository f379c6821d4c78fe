"""The facade over real stages and a real store: what a caller sees. Models are fakes, except where marked `model`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from lychee_local import Memory, Message, RecallSettings, Scope, Settings, TimeRange, upkeep
from lychee_local.backends import Vectors
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, OverlapReranker
from lychee_local.errors import BadInput, GenerationFailed, LycheeError, ModelMissing
from lychee_local.settings import Planner
from lychee_local.store import Selection
from lychee_local.types import Calibration, Progress

TALK = [
    ("Ana", "I moved to Lisbon in May and I already love the light there."),
    ("Ben", "That is a big change. Did you find a flat near the river?"),
    ("Ana", "Yes, a small one in Alfama. I signed up for a pottery class yesterday."),
    ("Ben", "My sister Clara teaches pottery in Porto, you should meet her."),
    ("Ana", "I work as a nurse at the children's hospital now."),
    ("Ben", "I sold my car and bought a red bicycle last week."),
]


def talk(session: str = "one", day: int = 3) -> list[Message]:
    return [
        Message(text, speaker=speaker, at=datetime(2023, 7, day, 9, i), session=session, ref=f"{session}-{i}")
        for i, (speaker, text) in enumerate(TALK)
    ]


def long_talk(turns: int = 60) -> list[Message]:
    """Four subjects in a row, so that there is something to cut."""
    subjects = (
        "pottery clay glaze kiln wheel",
        "river boat sail wind harbour",
        "piano music song",
        "garden tomato soil",
    )
    return [
        Message(
            f"{subjects[i * len(subjects) // turns]} number {i}. " + "We spoke about it at length today. " * 4,
            speaker=("Ana", "Ben")[i % 2],
            session="long",
            ref=str(i),
        )
        for i in range(turns)
    ]


# Texts share few words, so cosines of bags of words are low: six turns about one thing should stay together.
CALIBRATION = Calibration(surprise_centre=0.85, surprise_scale=0.14, cohesion_scale=1.0, similarity_floor=0.0)


def embedder() -> HashEmbedder:
    return HashEmbedder(256, calibration=CALIBRATION)


def opened(home: Path, llm: FakeLLM | None = None, **options: object) -> Memory:
    return Memory.open("ana", home=home, llm=llm, embedder=embedder(), reranker=None, **options)  # type: ignore[arg-type] # test shorthand


def files(home: Path) -> dict[str, bytes]:
    """The user's logs and rows; the usage log holds measured seconds and is left out."""
    (folder,) = (home / "users").iterdir()
    return {
        p.name: p.read_bytes() for p in folder.rglob("*") if p.suffix in (".jsonl", ".rows") and p.name != "usage.jsonl"
    }


def test_what_is_remembered_is_recalled_with_its_provenance(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        done = memory.remember(talk())
        found = memory.recall("Where did Ana sign up for a pottery class?", k=5)
    assert len(done.turns) == len(TALK)
    assert done.skipped == 0
    best = found.evidence[0]
    assert "pottery class" in best.text
    assert "turn:one:2" in best.turns
    assert "one-2" in best.refs
    assert best.session == "one"
    assert 0.0 < best.score <= 1.0
    assert [e.score for e in found.evidence] == sorted((e.score for e in found.evidence), reverse=True)


def test_a_turn_is_searchable_before_its_segment_is_finished(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember("The spare key is under the blue flowerpot.", speaker="Ana")
        assert memory.segments() == ()
        assert "flowerpot" in memory.recall("Where is the spare key?").evidence[0].text


def test_segments_do_not_depend_on_how_turns_were_batched(tmp_path: Path) -> None:
    with opened(tmp_path / "once") as memory:
        memory.remember(long_talk())
        memory.flush()
        once = memory.segments()
    with opened(tmp_path / "singly") as memory:
        for message in long_talk():
            memory.remember(message)
        memory.flush()
        singly = memory.segments()
    assert len(once) > 2
    assert singly == once


def test_a_restart_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "once") as memory:
        memory.remember(long_talk())
        memory.flush()
    for start in range(0, 60, 7):
        with opened(tmp_path / "restarted") as memory:
            memory.remember(long_talk()[start : start + 7])
    with opened(tmp_path / "restarted") as memory:
        memory.flush()
    assert files(tmp_path / "restarted")["segments.jsonl"] == files(tmp_path / "once")["segments.jsonl"]
    assert files(tmp_path / "restarted")["decisions.jsonl"] == files(tmp_path / "once")["decisions.jsonl"]


def test_the_same_input_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with opened(tmp_path / name) as memory:
            memory.remember(long_talk())
            memory.remember(talk())
            memory.flush()
    first, second = files(tmp_path / "first"), files(tmp_path / "second")
    assert first
    assert first == second


def test_remembering_again_stores_nothing_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember(talk())
        again = memory.remember(talk())
        assert (again.turns, again.skipped) == ((), len(TALK))
        assert len(memory.turns()) == len(TALK)


def test_a_home_may_be_given_as_text_and_an_unknown_session_is_named(tmp_path: Path) -> None:
    with Memory.open("ana", home=str(tmp_path), llm=None, embedder=embedder(), reranker=None) as memory:
        memory.remember(talk())
        with pytest.raises(BadInput, match="tuesday"):
            memory.flush("tuesday")


def test_equal_words_without_a_reference_are_two_turns(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember(["yes", "yes"])
        assert [t.index for t in memory.turns()] == [0, 1]


def test_two_users_share_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember("My locker code is 4711.")
    with Memory.open("ben", home=tmp_path, llm=None, embedder=embedder(), reranker=None) as memory:
        assert memory.recall("What is the locker code?").evidence == ()


def extraction(call: FakeCall) -> str:
    """The shortest thing each schema allows, whatever the prompt says: its first choices, one record, one sentence."""
    assert call.schema is not None
    schema = call.schema.model_json_schema()
    return json.dumps(_instance(schema, schema.get("$defs", {})))


def _instance(schema: dict[str, object], definitions: dict[str, dict[str, object]]) -> object:
    if "$ref" in schema:
        return _instance(definitions[str(schema["$ref"]).rsplit("/", 1)[-1]], definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]  # type: ignore[index] # JSON
    if "anyOf" in schema:
        return _instance(schema["anyOf"][0], definitions)  # type: ignore[index] # JSON
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        assert isinstance(properties, dict)
        return {name: _instance(part, definitions) for name, part in properties.items()}
    if schema.get("type") == "array":
        return [_instance(schema["items"], definitions)] * max(1, int(str(schema.get("minItems", 1))))  # type: ignore[arg-type] # JSON
    if schema.get("type") == "integer":
        return schema.get("minimum", 0)
    sentence = "Ana moved to Lisbon in May"
    short = int(str(schema.get("maxLength", len(sentence)))) < len(sentence)
    return "" if short or "pattern" in schema else sentence


def test_each_finished_segment_is_encoded_once_and_counted(tmp_path: Path) -> None:
    llm = FakeLLM(extraction)
    with opened(tmp_path, llm) as memory:
        memory.remember(talk("one"))
        memory.remember(talk("two", day=9))
        assert llm.calls == []
        memory.flush()
        assert [c.purpose for c in llm.calls] == ["encode", "encode"]
        records = memory.records()
        assert {r.session for r in records} == {"one", "two"}
        assert all(r.origin == "model" for r in records)
        stats = memory.stats()
        assert stats.usage["encode"].calls == 2
        assert stats.construction_tokens == sum(u.prompt_tokens + u.output_tokens for u in memory.usage())
        assert stats.query_tokens == 0
        memory.flush()
        assert len(llm.calls) == 2


def test_stopping_while_encoding_keeps_what_is_done_and_continues(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "encode":
            raise KeyboardInterrupt

    llm = FakeLLM(extraction)
    with opened(tmp_path, llm) as memory:
        memory.remember([*talk("one"), *talk("two"), *talk("three")])
        with pytest.raises(KeyboardInterrupt):
            memory.flush(on_progress=stop)
    with opened(tmp_path, llm) as memory:
        assert len(memory.segments()) == 3
        assert len(memory.pending()) == 2
        memory.consolidate()
        assert memory.pending() == ()
    assert len(llm.calls) == 3


def test_ask_answers_from_evidence_that_exists(tmp_path: Path) -> None:
    def reply(call: FakeCall) -> str:
        return "She moved to Lisbon [1]." if call.purpose == "answer" else extraction(call)

    pieces: list[str] = []
    llm = FakeLLM(reply)
    with opened(tmp_path, llm) as memory:
        memory.remember(talk())
        memory.flush()
        answer = memory.ask("Where did Ana move?", on_text=pieces.append)
        stats = memory.stats()
    assert "Lisbon" in answer.text
    assert answer.cited
    assert set(answer.cited) <= {e.id for e in answer.evidence}
    assert "Lisbon" in "".join(pieces)
    assert [u.purpose for u in answer.usage] == ["answer"]  # rules are sure of this question
    assert stats.query_tokens == sum(u.prompt_tokens + u.output_tokens for u in answer.usage)


CONCLUSION = "Would Ana like a flat with a garden?"


def planning(call: FakeCall) -> str:
    plan = {"question_type": "single", "evidence_target": "Ana's home", "since": "", "until": "", "evidence_routes": []}
    queries = {"semantic_queries": ["Ana moved to Lisbon", "Ana's home"]}
    return json.dumps(plan | queries) if call.purpose == "plan" else "She moved to Lisbon [1]."


@pytest.mark.parametrize(
    ("question", "planner", "source"),
    [
        ("Where did Ana move?", "auto", "rules"),
        (CONCLUSION, "auto", "llm"),
        (CONCLUSION, "rules", "rules"),
        (CONCLUSION, "none", "none"),
        ("Where did Ana move?", "llm", "llm"),
    ],
)
def test_the_model_plans_where_the_rules_are_unsure(
    tmp_path: Path, question: str, planner: Planner, source: str
) -> None:
    settings = Settings(recall=RecallSettings(planner=planner))
    with opened(tmp_path, FakeLLM(planning, prompt_style="compact"), settings=settings) as memory:
        memory.remember(talk(), encode=False)
        answer = memory.ask(question)
        recalled = memory.recall(question)
    assert answer.plan.source == source
    assert [u.purpose for u in answer.usage] == (["plan", "answer"] if source == "llm" else ["answer"])
    assert bool(answer.plan.doubts) == (question == CONCLUSION and planner != "none")
    # A recall answers at once: it takes the rules' plan, doubts and all, unless the model was asked for.
    assert recalled.plan.source == ("rules" if planner == "auto" else source)
    assert recalled.plan.doubts == answer.plan.doubts


def test_a_conclusion_is_drawn_from_single_facts_beside_the_best_passages(tmp_path: Path) -> None:
    settings = Settings(recall=RecallSettings(evidence_tokens=150))
    with opened(tmp_path, settings=settings) as memory:
        memory.remember([*talk("one"), *talk("two"), *talk("three")])
        before = memory.recall(CONCLUSION)  # nothing is encoded: passages have all of the room
        memory.flush()
        concluded = memory.recall(CONCLUSION, explain=True)
        said = memory.recall("Where did Ana move?")
        three = memory.recall(CONCLUSION, k=3)
    assert {e.kind for e in before.evidence} <= {"turn", "window"}
    kinds = [e.kind for e in concluded.evidence]
    assert kinds[0] != "record"
    assert kinds.count("record") > [e.kind for e in said.evidence].count("record")
    shown = [turn for e in concluded.evidence if e.kind == "record" for turn in e.turns]
    assert len(set(shown)) == len(shown)  # no record of a turn that another one shows
    assert concluded.trace is not None
    assert "facts" in concluded.trace.seconds
    assert len(three.evidence) == 3


def test_an_answer_explains_its_recall(tmp_path: Path) -> None:
    with opened(tmp_path, FakeLLM(planning)) as memory:
        memory.remember(talk(), encode=False)
        answer = memory.ask("Where did Ana move?", explain=True)
        silent = memory.ask("Where did Ana move?")
    assert answer.trace is not None
    assert {fate.id for fate in answer.trace.candidates if fate.kept} == {e.id for e in answer.evidence}
    assert silent.trace is None


def test_without_a_language_model_recall_works_and_ask_says_what_to_do(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember(talk())
        memory.flush()
        assert memory.records()
        assert all(r.origin == "rules" for r in memory.records())
        assert memory.recall("Who sold a car?").evidence
        with pytest.raises(ModelMissing, match="recall"):
            memory.ask("Who sold a car?")


def test_recall_needs_no_language_model_even_where_one_is_configured(tmp_path: Path) -> None:
    with Memory.open("ana", home=tmp_path, embedder=embedder(), reranker=None) as memory:
        memory.remember(talk(), encode=False)
        assert "bicycle" in memory.recall("Who bought a red bicycle?").evidence[0].text


def test_a_missing_language_model_is_named_before_anything_is_stored(tmp_path: Path) -> None:
    with Memory.open("ana", home=tmp_path, embedder=embedder(), reranker=None) as memory:
        with pytest.raises(ModelMissing, match="lychee models pull"):
            memory.remember(talk())
        assert memory.turns() == ()


def test_a_reranker_decides_the_order(tmp_path: Path) -> None:
    with Memory.open("ana", home=tmp_path, llm=None, embedder=embedder(), reranker=OverlapReranker()) as memory:
        memory.remember(talk())
        found = memory.recall("pottery class", k=3)
    relevance = [e.relevance or 0.0 for e in found.evidence]
    assert max(relevance) > 0.5
    assert relevance[0] == max(relevance)


class OutOfOrder:
    """A reranker whose model returns no numbers."""

    name = "broken"

    def score(self, question: str, passages: Sequence[str]) -> npt.NDArray[np.float32]:
        raise GenerationFailed("NaN for 3 of 3 passages")


def test_a_reranker_that_fails_is_named_and_costs_only_its_order(tmp_path: Path) -> None:
    with Memory.open("ana", home=tmp_path, llm=None, embedder=embedder(), reranker=OutOfOrder()) as memory:
        memory.remember(talk())
        found = memory.recall("pottery class", k=3)
    assert found.evidence
    assert any("broken could not rank" in note for note in found.notes)


def test_a_model_may_be_named_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="qwen9"):
        Memory.open("ana", home=tmp_path, llm="qwen9", embedder=embedder())


@pytest.mark.parametrize("question", ["", "  \n ", "\0"])
def test_a_blank_question_is_refused(tmp_path: Path, question: str) -> None:
    with opened(tmp_path) as memory, pytest.raises(BadInput):
        memory.recall(question)


def test_an_empty_memory_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        found = memory.recall("What did I say?")
    assert found.evidence == ()


def test_a_bad_message_stores_nothing_of_its_call(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember("kept")
        with pytest.raises(BadInput):
            memory.remember(["good", "   "])
        assert [t.text for t in memory.turns()] == ["kept"]


@pytest.mark.parametrize("planner", ["rules", "none"])
@pytest.mark.parametrize("selection", ["full", "none"])
def test_each_stage_can_be_switched_off(tmp_path: Path, planner: str, selection: str) -> None:
    settings = Settings(recall=RecallSettings(planner=planner, selection=selection, windows=False))  # type: ignore[arg-type] # parametrised literals
    with opened(tmp_path, settings=settings) as memory:
        memory.remember(talk())
        assert memory.recall("pottery", k=2).evidence


def test_a_reader_sees_what_the_writer_commits(tmp_path: Path) -> None:
    with opened(tmp_path) as writer, opened(tmp_path, read_only=True) as reader:
        assert reader.recall("bicycle").evidence == ()
        writer.remember(talk())
        assert "bicycle" in reader.recall("bicycle").evidence[0].text
        with pytest.raises(LycheeError):
            reader.remember("not mine to write")


def test_threads_may_write_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        threads = [
            threading.Thread(target=memory.remember, args=([f"note {i} of thread {n}" for i in range(10)],))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(t.index for t in memory.turns()) == list(range(40))


def test_recall_does_not_wait_for_an_encoding(tmp_path: Path) -> None:
    encoding, recalled = threading.Event(), threading.Event()

    def slow(call: FakeCall) -> str:
        encoding.set()
        assert recalled.wait(30), "recall waited for the language model"
        return extraction(call)

    with opened(tmp_path, FakeLLM(slow)) as memory:
        memory.remember(talk())
        writer = threading.Thread(target=memory.flush)
        writer.start()
        assert encoding.wait(30)
        assert "bicycle" in memory.recall("Who bought a red bicycle?").evidence[0].text
        recalled.set()
        writer.join()
        assert memory.records()


@pytest.mark.model
class TestOnRealModels:
    """SmolLM2 writes valid JSON and useless content: structure, provenance and repetition count, never content."""

    @pytest.fixture(autouse=True)
    def no_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> socket.socket:
            raise AssertionError("a socket was opened")

        monkeypatch.setattr(socket, "socket", refuse)

    def whole_path(self, home: Path, models_home: Path) -> tuple[dict[str, bytes], str]:
        settings = Settings(recall=RecallSettings(planner="llm"))
        with Memory.open("ana", home=home, models_home=models_home, profile="tiny", settings=settings) as memory:
            memory.remember(talk())
            memory.flush()
            segments = {s.id for s in memory.segments()}
            assert memory.pending() == ()
            assert memory.records()
            for record in memory.records():
                assert record.segment in segments
                assert record.text.strip()
                assert all(0 <= i < len(TALK) for i in record.turns)
                assert record.turns == tuple(sorted(set(record.turns)))
            found = memory.recall("When did Ana sign up for a pottery class?", k=5)
            assert any("one-2" in e.refs for e in found.evidence)
            answer = memory.ask("When did Ana sign up for a pottery class?", style="short")
            assert set(answer.cited) <= {e.id for e in answer.evidence}
            assert {u.purpose for u in memory.usage()} >= {"encode", "plan", "answer"}
        return files(home), answer.text

    def test_the_whole_path_twice_is_the_same_and_opens_no_socket(
        self, tmp_path: Path, smollm2_path: Path, minilm_path: Path
    ) -> None:
        models_home = smollm2_path.parent.parent.parent
        first = self.whole_path(tmp_path / "first", models_home)
        second = self.whole_path(tmp_path / "second", models_home)
        assert first == second


# --- scopes, archives, half-finished work ----------------------------------------------------------------------------


def test_a_misspelt_scope_is_a_mistake_and_not_an_empty_result(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember(talk())
        assert memory.recall("pottery", scope=Scope(speakers=("Ben",))).evidence
        with pytest.raises(BadInput, match=r"nobody called 'ben' speaks here .*Ana, Ben"):
            memory.recall("pottery", scope=Scope(speakers=("ben",)))
        with pytest.raises(BadInput, match=r"there is no session 'two' .*one"):
            memory.recall("pottery", scope=Scope(sessions=("two",)))
    with pytest.raises(BadInput, match="is one text"):
        Scope(speakers="Ben")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(BadInput, match="is no day"):
        TimeRange(until="2024-06-01")  # type: ignore[arg-type]  # the mistake
    assert TimeRange(until=datetime(2024, 6, 1, 9)) == TimeRange(until=date(2024, 6, 1))


def test_an_archive_is_written_to_a_file_of_its_own_or_not_at_all(tmp_path: Path) -> None:
    with opened(tmp_path / "home") as memory:
        memory.remember(talk())
        (tmp_path / "link").symlink_to("/dev/null")
        for target, says in (
            (tmp_path / "link", "is a link, a device or a pipe"),
            (Path(memory.stats().folder) / "manifest.json", "lies in the memory itself"),
            (tmp_path, "is a folder"),
        ):
            with pytest.raises(BadInput, match=says):
                memory.export(target, overwrite=True)
        memory.export(tmp_path / "ana.zip")
        assert upkeep.check("ana", home=tmp_path / "home") == ()
    with opened(tmp_path / "other") as memory:
        memory.import_archive(tmp_path / "ana.zip")
        assert len(memory.turns()) == len(TALK)


def test_opening_finishes_a_forgetting_that_was_stopped(tmp_path: Path) -> None:
    with opened(tmp_path) as memory:
        memory.remember(talk())
        memory._store.forget(Selection(matching="red bicycle"))  # what is left when `forget` is killed half-way
    assert any(b"red bicycle" in p.read_bytes() for p in tmp_path.rglob("*.jsonl"))
    opened(tmp_path).close()
    assert not any(b"red bicycle" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_equal_texts_of_a_call_are_embedded_once(tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(HashEmbedder):
        def embed(self, texts: Sequence[str], *, kind: Literal["passage", "query"] = "passage") -> Vectors:
            asked.extend(texts)
            return super().embed(texts, kind=kind)

    with Memory.open("ana", home=tmp_path, llm=None, embedder=Counting(64), reranker=None) as memory:
        memory.remember([Message(text, speaker="Ana", session="s") for text in ("one", "two", "one", "three")])
    assert sorted(asked) == ["Ana: one", "Ana: three", "Ana: two"]


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:00-12:00"])
def test_a_time_that_no_zone_shares_is_refused(tmp_path: Path, at: str) -> None:
    with opened(tmp_path) as memory, pytest.raises(BadInput, match="outside of the calendar"):
        memory.remember("Hello", at=at)


@pytest.mark.parametrize("at", ["0001-01-01", "9999-12-31"])
def test_the_ends_of_the_calendar_are_encoded(tmp_path: Path, at: str) -> None:
    with opened(tmp_path) as memory:
        memory.remember("I moved house last week, and next winter I will move again to Lisbon.", at=at, speaker="Ana")
        memory.flush()
        assert memory.records()
        assert memory.pending() == ()


def test_whose_memories_there_are_is_said_where_one_is_missing(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(LycheeError, match=r"no memory of 'anna' .*there are: ana"):
        Memory.open("anna", home=tmp_path, llm=None, embedder=embedder(), reranker=None, read_only=True)
    with pytest.raises(LycheeError, match=r"no memory of 'anna' .*there are: ana"):
        upkeep.check("anna", home=tmp_path)

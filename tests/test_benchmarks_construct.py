"""The measures of construction, against numbers worked out by hand on memories of a few turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.construction import Built, Measured, measure
from benchmarks.encoders import Setup, build, claim
from benchmarks.faults import Heard, lower_case, unresolved_date, wrong_speaker
from benchmarks.questions import Fact
from benchmarks.vectors import StoredVectors
from lychee_local import Message
from lychee_local.backends import Vectors
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply
from lychee_local.types import Record, Segment, Turn, Usage

AT = datetime(2023, 7, 3, 13, 36)  # a Monday
EMBEDDER = HashEmbedder(4096)


def turn(index: int, speaker: str, text: str) -> Turn:
    return Turn("s", index, text, speaker=speaker, at=AT, ref=f"D1:{index}")


def record(text: str, *turns: int, speaker: str | None = "Ana", origin: str = "model") -> Record:
    segment = "segment:s:0-1" if turns[0] < 2 else "segment:s:2-2"
    return Record("s", text, "fact", turns, segment, speaker=speaker, origin="rules" if origin == "rules" else "model")


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unresolved"),
    [
        ("Ana moved yesterday.", True),
        ("Ana moved yesterday (2 July 2023).", False),
        ("On 2 July 2023 Ana said that she moved yesterday.", False),
        ("Ana moved to a house in the hills last week (the week of 26 June 2023) and to a flat two years ago.", True),
        ("Ana moved two weeks ago (19 June 2023) and three days ago (30 June 2023).", False),
        ("Ana moved in June 2023.", False),
        ("Ana hopes that this will last the whole year.", False),
        ("Ana plans to move next month.", True),
        ("Ana moves next month, in August 2023.", False),
        ("Ana moved last Friday.", True),
    ],
)
def test_unresolved_dates(text: str, unresolved: bool) -> None:
    assert unresolved_date(text) is unresolved


@pytest.mark.parametrize(
    ("said", "text", "wrong"),
    [
        ("I bought a boat.", "Ana bought a boat.", False),
        ("I bought a boat.", "Bo bought a boat.", True),
        ("Bo bought a boat.", "Bo bought a boat.", False),
        ("You bought a boat!", "Bo bought a boat.", False),
        ("You would be a fine sailor.", "Ana would be a fine sailor.", True),
        ("You would be a fine sailor.", 'Ana said: "You would be a fine sailor."', False),
        ("What did you buy?", "Ana: What did you buy?", False),
        ("I sail a lot. You would love it.", "Ana sails a lot.", False),
        ("The boat is red.", "The boat is red.", False),
    ],
)
def test_wrong_speakers(said: str, text: str, wrong: bool) -> None:
    assert wrong_speaker(record(text, 0), [turn(0, "Ana", said)], ("Ana", "Bo")) is wrong


def test_a_record_whose_speaker_said_none_of_its_turns_is_wrong() -> None:
    turns = [turn(0, "Ana", "I bought a boat."), turn(1, "Bo", "So did I.")]
    assert wrong_speaker(record("A boat was bought.", 0, speaker="Bo"), turns[:1], ("Ana", "Bo"))
    assert not wrong_speaker(record("A boat was bought.", 0, 1, speaker="Bo"), turns, ("Ana", "Bo"))
    assert not wrong_speaker(record("A boat was bought.", 0, speaker=None), turns[:1], ("Ana", "Bo"))


def test_sentences_end_with_their_turn() -> None:
    turns = [turn(0, "Ana", "[image: a red boat]"), turn(2, "Ana", "You look well")]
    assert not wrong_speaker(record("Ana shared an image: a red boat", 0, 2), turns, ("Ana",))


@pytest.mark.parametrize(
    ("text", "invented"),
    [
        ("Ana sailed to Hamburg with her two cats.", ()),
        ("Ana sailed to the Hamburger Hafen with 2 cats.", ("Hafen",)),
        ("Ana sailed on Sunday 2 July 2023.", ()),
        ("Ana sailed on Friday, 4 July 2023.", ("4 July 2023", "Friday")),
        ("Ana sailed on 2023-07-02, or in July.", ()),
        ("Ana sailed in 2019 for 1,200 dollars.", ("2019",)),
        ("Ana sailed with John. Then John left.", ("John", "John")),
        ("Luckily Ana sailed. Despite the rain it was fun.", ()),
        ("Ines sailed. Still it was fun.", ("Ines", "Still")),  # what the rule takes for a name
        ('Ana said: "Sailing costs 1200 dollars."', ()),
    ],
)
def test_what_nobody_said(text: str, invented: tuple[str, ...]) -> None:
    turns = [turn(0, "Ana", "I sailed to Hamburg yesterday, with two cats, for $1,200 in rain.")]
    heard = Heard(turns, {"despite"})
    assert heard.invented(text) == invented


def test_words_that_are_said_without_a_capital_are_no_names() -> None:
    turns = [turn(0, "Ana", "I sail despite the rain.")]
    assert lower_case(turns) == {"sail", "despite", "the", "rain"}
    assert Heard(turns[:0], lower_case(turns)).invented("Despite Ines and Rain it was fun.") == ("Ines", "Rain")


# --- what is counted --------------------------------------------------------------------------------------------------

TURNS = (
    turn(0, "Ana", "I own two cats."),
    turn(1, "Bo", "I moved here yesterday."),
    turn(2, "Ana", "I bake bread daily."),
)
BUILT = Built(
    turns=TURNS,
    segments=(
        Segment("s", 0, 1, "semantic_boundary", 20, 2, 0.6),
        Segment("s", 2, 2, "session_flush", 10, 1, 1.0),
    ),
    records=(
        record("Ana owns two cats", 0),
        record("Ana moved here yesterday", 1, speaker="Bo"),
        record("Ana bakes bread in Rome daily", 2, origin="rules"),
    ),
    usage=(
        Usage("encode", "m", 100, 20, cached_tokens=60, seconds=2.0),
        Usage("encode", "m", 50, 5, outcome="failed"),
        Usage("plan", "m", 1_000, 1_000),
    ),
    seconds=7.0,
)
FACTS = (
    Fact("Ana owns two cats", ("D1:0",)),  # the record itself: cosine 1
    Fact("Ana bakes bread in town", ("D1:2",)),  # 4 of 6 and 5 words: 4 / sqrt(30) = 0.73
    Fact("Ana bakes bread often", ("D1:2", "D9:9")),  # 3 of 6 and 4 words: 3 / sqrt(24) = 0.61
    Fact("Ana owns two cats", ("D1:1",)),  # a record says it, with another turn for its evidence
    Fact("Nobody stored this turn", ("D9:9",)),
)


def test_measure() -> None:
    measured, faults = measure(BUILT, FACTS, EMBEDDER.embed)
    assert measured == Measured(
        turns=3,
        segments=2,
        records=3,
        by_model=2,
        facts=4,
        covered=Counter({0.6: 3, 0.7: 2}),
        covered_by_model=Counter({0.6: 1, 0.7: 1}),  # bread was baked by rules
        faults=Counter(wrong_speaker=1, unresolved_date=1, invented=1),
        asked=2,
        unanswered=1,  # the segment whose only record is made by rules
        calls=2,
        prompt_tokens=150,
        cached_tokens=60,
        output_tokens=25,
        outcomes=Counter(ok=1, failed=1),
        seconds=7.0,
    )
    assert [(fault.kind, fault.record.text[:9], fault.found) for fault in faults] == [
        ("wrong_speaker", "Ana moved", ""),
        ("unresolved_date", "Ana moved", ""),
        ("invented", "Ana bakes", "Rome"),
    ]
    row = measured.row()
    assert (row["covered_0.6"], row["covered_0.7"], row["records_per_turn"], row["unanswered"]) == (75.0, 50.0, 1.0, 50)
    assert (row["construction_tokens"], row["wrong_speaker"]) == (175, 33.3)


def test_turns_alone_are_measured_by_their_own_words() -> None:
    # "Ana: I own two cats." shares 3 of its 5 words with a fact of 4: 3 / sqrt(20) = 0.67
    measured, faults = measure(Built(TURNS), FACTS[:1], EMBEDDER.embed)
    assert (measured.covered, measured.asked, faults) == (Counter({0.6: 1, 0.7: 0}), 0, ())


def test_conversations_add_up_by_their_counts() -> None:
    measured, _ = measure(BUILT, FACTS, EMBEDDER.embed)
    both = measured + Measured(facts=4, covered=Counter({0.6: 1}), outcomes=Counter(ok=2), seconds=1.0)
    assert (both.row()["covered_0.6"], both.row()["covered_0.7"]) == (50.0, 25.0)
    assert (both.outcomes, both.seconds) == (Counter(ok=3, failed=1), 8.0)


# --- building, and going on after a kill ------------------------------------------------------------------------------

TALK = [
    Message(text, speaker=speaker, at=AT, session=f"s{session}", ref=f"D{session}:{number}")
    for session in (1, 2)
    for number, (speaker, text) in enumerate(
        (("Ana", f"I keep {session} cats at home all day."), ("Bo", "I bake bread at home all day."))
    )
]


def answer(call: FakeCall) -> Reply:
    cats = f"Ana keeps {call.messages[1].content.split('I keep ')[1][0]} cats."
    if '"speaker": "..."' in call.prompt:
        return json.dumps(
            {"records": [{"speaker": "Ana", "text": cats}, {"speaker": "Ana", "text": "Bread is baked."}]}
        )
    return json.dumps({"0 Ana": [cats], "1 Bo": ["Bo bakes bread at home."]})


def killed_after(calls: int) -> FakeLLM:
    answered: list[FakeCall] = []

    def reply(call: FakeCall) -> Reply:
        if len(answered) == calls:
            raise KeyboardInterrupt
        answered.append(call)
        return answer(call)

    return FakeLLM(reply, prompt_style="compact")


@pytest.mark.parametrize("prompt", ["ours", "plain"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, prompt: Any, width: int) -> None:
    setup = Setup("fake", prompt, width=width)

    def run(llm: FakeLLM) -> Built:
        return build("c", TALK, setup, tmp_path, embedder=EMBEDDER, models_home=tmp_path, llm=llm)

    with pytest.raises(KeyboardInterrupt):
        run(killed_after(1))
    second = FakeLLM(answer, prompt_style="compact")
    built = run(second)
    assert len(second.calls) == 1
    assert len(built.segments) == 2
    texts = {record.text for record in built.records}
    bread = {"Bread is baked."} if prompt == "plain" else {"Bo bakes bread at home."}
    assert texts == {"Ana keeps 1 cats.", "Ana keeps 2 cats."} | bread
    assert sum(usage.purpose == "encode" for usage in built.usage) == 2
    third = FakeLLM([])
    again = run(third)
    assert (again.records, len(again.usage), third.calls) == (built.records, 2, [])
    assert again.seconds > built.seconds > 0


def test_the_plain_prompt_credits_a_memory_by_overlap_and_keeps_the_claimed_speaker(tmp_path: Path) -> None:
    llm = FakeLLM(answer)
    built = build("c", TALK[:2], Setup("fake", "plain"), tmp_path, embedder=EMBEDDER, models_home=tmp_path, llm=llm)
    assert [(r.text, r.turns, r.speaker) for r in built.records] == [
        ("Ana keeps 1 cats.", (0,), "Ana"),
        ("Bread is baked.", (1,), "Ana"),
    ]
    measured, faults = measure(built, (), EMBEDDER.embed)
    assert (measured.faults, [f.record.text for f in faults]) == (Counter(wrong_speaker=1), ["Bread is baked."])


def test_the_plain_prompt_yields_nothing_from_a_cut_output(tmp_path: Path) -> None:
    cut = '{"records":[{"speaker":"Ana","text":"Ana keeps 1 cats."},{"speak'
    llm = FakeLLM([(cut, "length")])
    built = build("c", TALK[:2], Setup("fake", "plain"), tmp_path, embedder=EMBEDDER, models_home=tmp_path, llm=llm)
    measured, _ = measure(built, (), EMBEDDER.embed)
    assert (built.records, measured.outcomes, measured.unanswered) == ((), Counter(length=1), 1)


def test_only_the_first_sessions_are_built(tmp_path: Path) -> None:
    setup = Setup("rules", sessions=1)
    built = build("c", TALK, setup, tmp_path, embedder=EMBEDDER, models_home=tmp_path)
    assert {turn.session for turn in built.turns} == {"s1"}
    assert {record.origin for record in built.records} == {"rules"}
    assert measure(built, (), EMBEDDER.embed)[0].unanswered == 0


def test_a_folder_belongs_to_one_setup(tmp_path: Path) -> None:
    claim(tmp_path, Setup("m", without=("dates",)))
    claim(tmp_path, Setup("m", without=("dates",)))
    with pytest.raises(ValueError, match="choose another --out"):
        claim(tmp_path, Setup("m"))


@pytest.mark.parametrize(
    ("encoder", "prompt", "without"),
    [("rules", "plain", ()), ("verbatim", "ours", ("dates",)), ("m", "plain", ("dates",))],
)
def test_setups_that_mean_nothing(encoder: str, prompt: Any, without: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        Setup(encoder, prompt, without)


def test_the_settings_of_a_setup() -> None:
    settings = Setup("m", without=("dates", "salvage"), width=3).settings
    assert (settings.dates, settings.salvage, settings.turns, settings.width) == (False, False, True, 3)


class CountingEmbedder:
    """A `HashEmbedder` that says what it was asked for."""

    def __init__(self) -> None:
        self.name, self.digest, self.dimension = EMBEDDER.name, EMBEDDER.digest, EMBEDDER.dimension
        self.calibration = EMBEDDER.calibration
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str], *, kind: Any = "passage") -> Vectors:
        self.asked += texts
        return EMBEDDER.embed(texts, kind=kind)


def test_stored_vectors_embed_a_text_once(tmp_path: Path) -> None:
    counting = CountingEmbedder()
    for _ in range(2):
        stored = StoredVectors(counting, tmp_path / "vectors.sqlite")
        assert (stored.embed(["one two", "three", "one two"]) == EMBEDDER.embed(["one two", "three", "one two"])).all()
        assert stored.embed([]).shape == (0, 4096)
        stored.close()
    assert counting.asked == ["one two", "three"]


# --- the commands -----------------------------------------------------------------------------------------------------


def locomo_file(path: Path) -> Path:
    said = ["I own two cats.", "I moved here yesterday.", "I bake bread daily.", "I paint boats on Sundays."]
    turns = [{"speaker": "AB"[i % 2], "dia_id": f"D1:{i + 1}", "text": text} for i, text in enumerate(said)]
    item = {
        "sample_id": "conv-1",
        "conversation": {"session_1": turns, "session_1_date_time": "1:36 pm on 3 July, 2023"},
        "observation": {"session_1_observation": {"A": [["A owns two cats.", "D1:1"]]}},
        "qa": [
            {"question": "How many cats does A own?", "answer": 2, "evidence": ["D1:1"], "category": 4},
            {"question": "What does B paint?", "answer": "boats", "evidence": ["D1:4"], "category": 2},
        ],
    }
    path.write_text(json.dumps([item]))
    return path


@pytest.mark.model
@pytest.mark.usefixtures("minilm_path")
def test_construct_ends_in_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(locomo_file(tmp_path / "data.json"))
    vectors = ["--vectors", str(tmp_path / "vectors.sqlite")]

    def run(command: str, *options: str) -> dict[str, Any]:
        out = ["--out", str(tmp_path / f"{command}{len(options)}")]
        assert main([command, "locomo", "--data", data, *vectors, *out, *options]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(result, dict)
        return result

    for encoder in ("verbatim", "rules"):
        result = run("construct", "--encoder", encoder)
        assert result["all"]["facts"] == 1
        assert result["all"] == result["conversations"]["conv-1"]
        assert result["all"]["covered_0.7"] == 100.0
        assert main(["construct", "locomo", "--data", data, "--encoder", encoder, "--sessions", "1", *vectors, "--out",
                     str(tmp_path / "construct2")]) == 2  # fmt: skip
        assert "choose another --out" in capsys.readouterr().err
        (tmp_path / "construct2").rename(tmp_path / encoder)

"""The readers of data sets, on small ones of our own that hold every quirk of the published files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.datasets import LAYOUTS, balanced, choose, read
from benchmarks.questions import Conversation, Fact, Problem, Question

DATA = Path(__file__).parent / "data"
FILES = {"locomo": "locomo.json", "longmemeval": "longmemeval.json", "lines": "lines.jsonl"}
CORRECTIONS = DATA / "locomo-corrections.json"


def everything(layout: str, path: Path | None = None, **options: Any) -> tuple[list[Conversation], list[str]]:
    """All conversations, and the problems as they are printed."""
    problems: list[Problem] = []
    found = list(read(layout, path or DATA / FILES[layout], on_problem=problems.append, **options))
    return found, [str(problem) for problem in problems]


def gold(conversation: Conversation) -> dict[str, tuple[str, ...]]:
    return {question.id: question.gold for question in conversation.questions}


# --- LoCoMo -----------------------------------------------------------------------------------------------------------


def test_locomo() -> None:
    (first, second), _ = everything("locomo")
    assert [(m.session, m.ref, m.speaker) for m in first.messages] == [
        ("session_1", "D1:1", "Nora"),
        ("session_1", "D1:2", "Emil"),
        ("session_1", "D1:3", "Nora"),
        ("session_2", "D2:1", "Emil"),
        ("session_2", "D2:2", "Nora"),
        ("session_2", "D2:3", "Emil"),
        ("session_4", "D4:1", "Nora"),
        ("session_4", "D1:2", "Emil"),
    ]
    assert first.messages[3].at == datetime(2024, 4, 19, 18, 40)
    assert first.messages[6].at is None
    assert first.messages[2].text.splitlines()[1] == "[image: a photo of a brick oven]"
    assert Counter(q.category for q in first.questions) == {"single": 2, "multi": 2, "temporal": 2, "open": 1}
    assert first.questions[1] == Question(
        "conv-1:1", "How many beehives does Emil keep?", "3", "single", ("D1:2",), ("session_1",)
    )
    assert gold(first) == {
        "conv-1:0": ("D1:1",),
        "conv-1:1": ("D1:2",),
        "conv-1:2": ("D2:2", "D2:3"),  # of "D2:2; D02:03"
        "conv-1:3": ("D2:1",),
        "conv-1:4": ("D2:3",),  # of "D2:3 D9:9" and "D"
        "conv-1:5": ("D4:1",),
        "conv-1:8": (),  # 6 and 7 are adversarial
    }
    assert first.facts == (
        Fact("Nora bought a bakery on Quay Street.", ("D1:1",)),
        Fact("Emil keeps three beehives.", ("D1:2",)),
        Fact("Emil sold honey.", ("D2:1",)),
    )
    assert (second.id, second.facts) == ("conv-2", ())


def test_what_is_odd_in_locomo_is_named() -> None:
    _, problems = everything("locomo")
    assert problems == [
        "conv-1: session_2, turn 4: ref 'D2:3' is already the ref of another turn (session_2, turn 3); "
        "the turn is left out",
        "conv-1: session_2, turn 5: the text is empty; the turn is left out",
        "conv-1, session_3: a session without turns",
        "conv-1, session_4: a session without a date; its turns have none",
        "conv-1, turn D1:2: 2 turns have this id; as evidence any of them counts",
        "conv-1, question 4: the evidence D9:9 points at no turn; it is left out",
        "conv-1, question 4: the evidence 'D' names no turn; it is left out",
        "conv-1, session_2_observation: the evidence D7:7 points at no turn; it is left out",
    ]
    with pytest.raises(ValueError, match="session_2, turn 4"):
        list(read("locomo", DATA / "locomo.json"))  # nobody takes the problems


def test_adversarial_questions_only_if_asked_for() -> None:
    (first, _), _ = everything("locomo", adversarial=True)
    added = [q for q in first.questions if q.category == "adversarial"]
    assert [(q.id, q.answer, q.answerable, q.gold) for q in added] == [
        ("conv-1:6", "Not mentioned in the conversation", False, ("D1:1",)),
        ("conv-1:7", "Not mentioned in the conversation", False, ("D1:2",)),  # though it has an answer, too
    ]
    assert all(q.answerable for q in first.questions if q not in added)


def test_only_what_is_wanted() -> None:
    found, problems = everything("locomo", wanted=["conv-2"])
    assert ([c.id for c in found], problems) == (["conv-2"], [])
    with pytest.raises(ValueError, match=r"no conversation conv-3 .*there are conv-1, conv-2"):
        everything("locomo", wanted=["conv-1", "conv-3"])


def test_corrections_count_for_the_question_that_they_quote() -> None:
    plain = {q.id: q for c in everything("locomo")[0] for q in c.questions}
    found, problems = everything("locomo", corrections=CORRECTIONS)
    fixed = {q.id: q for c in found for q in c.questions}
    assert {name: (q.answer, q.gold) for name, q in fixed.items() if q != plain[name]} == {
        "conv-1:3": ("Thursday, 18 April 2024", ("D2:1",)),  # its D8:8 points nowhere
        "conv-2:0": ("to whistle the anthem", ("D1:1", "D1:2")),
    }
    assert fixed["conv-1:1"].answer == "3"  # without the audit's remark behind it
    assert [p.split("/")[-1] for p in problems if "corrections" in p] == [
        "locomo-corrections.json, locomo_7_qa0: there is no such question at conv-1:0; not applied",
        "locomo-corrections.json, locomo_7_qa8: there is no such question at conv-1:8; not applied",
        "locomo-corrections.json, locomo_7_qa40: there is no such question at conv-1:40; not applied",
        "locomo-corrections.json, conversation 9: none of the questions corrected there (1) is in the data",
    ]
    assert "conv-1, question 3: the evidence D8:8 points at no turn; it is left out" in problems


def test_corrections_of_what_is_not_wanted_are_no_problem() -> None:
    found, problems = everything("locomo", wanted=["conv-2"], corrections=CORRECTIONS)
    assert gold(found[0]) == {"conv-2:0": ("D1:1", "D1:2")}
    assert ["conversation 9" in problem for problem in problems] == [True]


def locomo(**changed: Any) -> list[dict[str, Any]]:
    turn = {"speaker": "Ana", "dia_id": "D1:1", "text": "I sold the boat."}
    qa = {"question": "What did Ana sell?", "answer": "the boat", "evidence": ["D1:1"], "category": 4}
    talk = {"session_1": [turn], "session_1_date_time": "9 am on 1 May, 2024"}
    item: dict[str, Any] = {"sample_id": "a", "conversation": talk, "qa": [qa]}
    for key, value in changed.items():
        (qa if key in (*qa, "question") else item)[key] = value
    return [item]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (locomo() + locomo(), "the conversation a is there twice; give each a sample_id of its own"),
        ({"a": locomo()}, "not a list of conversations"),
        ([], "not a list of conversations"),
        ([3], "conversation 1: not an object but a number"),
        ([{"sample_id": "a", "conversation": {}}], "conversation 1: no qa; the layout locomo has sample_id"),
        (locomo(category=6), "a, question 0: no category 6; there are 1, 2, 3, 4, 5"),
        (locomo(category=[4]), "a, question 0: category is a list"),
        (locomo(question=" "), "a, question 0: question is blank; write a text"),
        (locomo(answer=None), "a, question 0: answer is missing"),
        (locomo(answer=True), "a, question 0: answer is a truth value"),
        (locomo(qa={}), "conversation 1: qa is not a list but an object"),
        (locomo(conversation=[]), "conversation is not an object with session_1"),
        (locomo(conversation={"session_1": 3}), "a, session_1: not a list of turns but a number"),
        (locomo(conversation={"session_1": [], "session_1_date_time": "soon"}), "a, session_1: not a date: 'soon'"),
        (locomo(observation={"session_1_observation": {"Ana": ["I sold"]}}), "observation is not of the form"),
    ],
)
def test_bad_locomo(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below, as it stands
        everything("locomo", tmp_path / "data.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"question_id": "locomo_0_qa0"}], "correction 1: no question, golden_answer, correct_answer"),
        ({}, "not a list"),
        ([dict.fromkeys(json.loads(CORRECTIONS.read_text())[0], "x")], "it looks like locomo_0_qa17"),
    ],
)
def test_bad_corrections(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "key.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        everything("locomo", corrections=tmp_path / "key.json")


# --- LongMemEval ------------------------------------------------------------------------------------------------------


def test_longmemeval() -> None:
    (first, second), _ = everything("longmemeval")
    # The sessions of the first are put in the order of their dates.
    assert [(m.ref, m.role) for m in first.messages] == [
        ("answer_a:1", "user"),
        ("answer_a:2", "assistant"),
        ("answer_b:1", "user"),
        ("answer_b:2", "assistant"),
        ("chat_1:1", "user"),
        ("chat_1:2", "assistant"),
    ]
    assert (first.messages[2].session, first.messages[2].at) == ("answer_b", datetime(2024, 5, 20, 9, 15))
    assert first.questions == (
        Question(
            "7c1f",
            "How many plants are on my balcony now?",
            "9",
            "knowledge-update",
            gold=("answer_a:1", "answer_b:1"),
            sessions=("answer_a", "answer_b"),
            asked=datetime(2024, 6, 10, 18, 30),
        ),
    )
    # Those of the second cannot be, since one has no date.
    assert [m.ref for m in second.messages] == ["chat_1:1", "chat_1:2", "answer_c:1", "chat_1#2:1", "chat_1#2:2"]
    (question,) = second.questions
    assert (question.id, question.answerable, question.sessions) == ("93be_abs", False, ("answer_c",))
    assert question.answer == "You did not mention a cat; you mentioned a dog called Pim."


def test_what_is_odd_in_longmemeval_is_named() -> None:
    _, problems = everything("longmemeval")
    assert problems == [
        "93be_abs, session answer_c: not a date: 'soon' (write 2023-05-08, 2023-05-08T13:56 or 8 May 2023 1:56 pm); "
        "taken as unknown",
        "93be_abs, session chat_2: a session without turns; it is left out",
        "93be_abs, session chat_1: its id is there twice; this one is called chat_1#2",
        "93be_abs, turn answer_c:2: the text is empty; the turn is left out",
        "93be_abs: the answering session answer_d has no turns here; it is left out",
    ]


def test_instances_come_one_by_one(tmp_path: Path) -> None:
    whole = (DATA / "longmemeval.json").read_text()
    (tmp_path / "cut.json").write_text(whole[:-400])  # in the second instance
    path = tmp_path / "cut.json"
    assert [c.id for c in read("longmemeval", path, ["7c1f"])] == ["7c1f"]  # nothing behind it is looked at
    conversations = read("longmemeval", path)
    assert next(conversations).id == "7c1f"
    with pytest.raises(ValueError, match=r"not JSON in UTF-8 behind instance 1: .*; is the file complete"):
        next(conversations)
    with pytest.raises(ValueError, match=r"no instance x in .* it holds 2, such as 7c1f"):
        everything("longmemeval", wanted=["7c1f", "x"])


def instance(**changed: Any) -> dict[str, Any]:
    item = {
        "question_id": "q",
        "question_type": "t",
        "question": "What did I sell?",
        "answer": "a boat",
        "question_date": "2024/05/02 (Thu) 10:00",
        "haystack_dates": ["2024/05/01 (Wed) 10:00"],
        "haystack_session_ids": ["s"],
        "haystack_sessions": [[{"role": "user", "content": "I sold my boat.", "has_answer": True}]],
        "answer_session_ids": ["s"],
    }
    return {key: value for key, value in (item | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([instance(), instance()], "instance 2: the question_id q is there twice"),
        (instance(), "not a list of instances; LongMemEval's file begins with ["),
        ([], "the list is empty"),
        (["q"], "instance 1: not an object but a text; the layout longmemeval has question_id"),
        ([instance(answer=None, question_type=None)], "instance 1: no question_type, answer; the layout longmemeval"),
        ([instance(answer=["a"])], "instance 1: answer is a list; write a text"),
        (
            [instance(haystack_session_ids=["s", "t"])],
            "q: 1 haystack_sessions, 2 haystack_session_ids, 1 haystack_dates",
        ),
        (
            [instance(haystack_dates=["2024-05-01"] * 2)],
            "2 haystack_dates; give each session an id, and a date or null",
        ),
        ([instance(haystack_sessions=["I sold it"])], "q, session s: not a list of turns"),
        ([instance(haystack_sessions=[[{"role": "user"}]])], "q, turn s:1: no content; the layout longmemeval has"),
        ([instance(haystack_sessions={})], "instance 1: haystack_sessions is not a list but an object"),
        ([instance(answer_session_ids=[{}])], "instance 1: answer_session_ids is not a list of texts"),
    ],
)
def test_bad_longmemeval(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below, as it stands
        everything("longmemeval", tmp_path / "data.json")
    assert message in str(error.value)


def test_sessions_in_odd_orders_and_names(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": f"I said {number}."}] for number in range(4)]
    dates = ["2024-05-04T10:00+09:00", "2024-05-03 11:00", "2024-05-02", "2024-05-01"]
    names = ["s", "s#2", "s", "s"]
    odd = instance(haystack_sessions=said, haystack_session_ids=names, haystack_dates=dates)
    (tmp_path / "data.json").write_text(json.dumps([odd]))
    (conversation,), problems = everything("longmemeval", tmp_path / "data.json")
    assert [(m.session, m.text) for m in conversation.messages] == [
        ("s#4", "I said 3."),
        ("s#3", "I said 2."),
        ("s#2", "I said 1."),
        ("s", "I said 0."),
    ]
    assert len(problems) == 2


def test_dates_may_be_missing_altogether(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("\ufeff" + json.dumps([instance(haystack_dates=None, question_date=None)]))
    (conversation,), problems = everything("longmemeval", tmp_path / "data.json")
    assert (conversation.messages[0].at, conversation.questions[0].asked) == (None, None)
    assert problems == [
        "q, session s: without a date; taken as unknown",
        "q, question_date: without a date; taken as unknown",
    ]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines() -> None:
    (boat, garden), problems = everything("lines")
    assert [(m.session, m.ref, m.role, m.speaker) for m in boat.messages] == [
        ("s1", "s1:1", "user", "Ana"),
        ("s1", "line 2", "assistant", None),
        ("s2", "2", "user", "Ana"),
    ]
    assert boat.questions == (
        Question("boat:0", "What did Ana sell?", "her boat", "question", ("s1:1",), ("s1",)),
        Question(
            "boat:1", "What did Bo pay?", "900", "single", ("2", "s1:1"), ("s2", "s1"), datetime(2024, 6, 1, 9, 0)
        ),
        Question(
            "boat:2", "What did Ana pay?", "Not mentioned in the conversation", "adversarial", (), ("s2",), None, False
        ),
    )
    assert (garden.messages[0].session, gold(garden)) == ("main", {"garden:0": ("p1",)})
    assert [problem.split("/")[-1] for problem in problems] == [
        "lines.jsonl, line 5: the ref s9:9 points at no turn of the conversation; it is left out"
    ]
    assert [c.id for c in everything("lines", wanted=["garden"])[0]] == ["garden"]
    with pytest.raises(ValueError, match=r"no conversation house in .* there are boat, garden"):
        everything("lines", wanted=["house"])


TURN = '{"conversation": "a", "text": "I sold the boat.", "ref": 1}'
ASKED = '{"conversation": "a", "question": "What was sold?", "answer": "the boat"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n\n", "there are no lines"),
        (f"{TURN}\n{TURN}", "line 2: the ref 1 is another turn's"),
        (f'{TURN}\n{{"conversation": "b", "text": "x"}}\n{TURN}', "line 3: conversation a has ended before"),
        (f"{TURN}\n{ASKED}", "line 2: not JSON: "),
        (f'{TURN}\n{ASKED}, "gilt": 1}}', "line 2: unknown key 'gilt'; a question has conversation, question"),
        (f'{TURN}\n{ASKED}, "text": "x"}}', "line 2: a line has a text or a question, and not both"),
        ('{"conversation": "a"}', "line 1: a line has a text or a question"),
        ('{"conversation": "a", "question": "What?"}', "line 1: answer is missing"),
        (f'{TURN}\n{ASKED}, "answerable": "no"}}', "line 2: answerable is 'no'; write true or false"),
        (f'{TURN}\n{ASKED}, "gold": {{}}}}', "line 2: gold is not a list of texts; write [] for none"),
        (f'{TURN}\n{ASKED}, "asked": "soon"}}', "line 2: asked: not a date: 'soon'"),
        ('{"text": "x"}', "line 1: no conversation; the layout lines has conversation there"),
        ('{"conversation": "a", "content": "x", "text": "y"}', "line 1: unknown key 'content'"),
        ('{"conversation": "a", "text": " "}', "line 1: the text is blank"),
    ],
)
def test_bad_lines(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the message is compared below, as it stands
        everything("lines", tmp_path / "data.jsonl")
    assert message in str(error.value)


# --- any layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        ("locomo", "longmemeval", "conversation 1: no sample_id, .* this looks like the layout longmemeval"),
        ("locomo", "lines", "not JSON: Extra data behind .* one object on each line is the layout lines"),
        ("longmemeval", "locomo", "instance 1: no question_id, .* this looks like the layout locomo"),
        ("longmemeval", "lines", "not a list of instances"),
        ("lines", "locomo", "line 1: a list; a file that is one has the layout locomo or longmemeval"),
        ("lines", "longmemeval", "line 1: a list; a file that is one has the layout locomo or longmemeval"),
    ],
)
def test_the_wrong_layout(layout: str, given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        everything(layout, DATA / FILES[given])


def damaged(layout: str) -> Iterator[tuple[bytes, str]]:
    whole = (DATA / FILES[layout]).read_bytes()
    yield whole[:-60], "not JSON"
    yield whole.replace(b"the", b"\xffhe"), "UTF-8"
    yield whole.decode().encode("utf-16"), "UTF-8"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files(tmp_path: Path, layout: str) -> None:
    for number, (content, message) in enumerate(damaged(layout)):
        path = tmp_path / f"{number}.json"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            everything(layout, path)
    with pytest.raises(FileNotFoundError):
        everything(layout, tmp_path / "none.json")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each list and object within a value, with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield value, key
        yield from places(value[key])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_stands_anywhere_is_read_or_refused(tmp_path: Path, layout: str) -> None:
    path, text = tmp_path / "data", (DATA / FILES[layout]).read_text()
    whole = [json.loads(line) for line in text.splitlines() if line] if layout == "lines" else json.loads(text)
    others: tuple[object, ...] = (None, 3, True, "", "\x01", [[]], ["x", 3], {"x": None})
    refused = Counter[bool]()
    for holder, key in places(whole):
        kept = holder[key]
        for other in others:
            holder[key] = other
            path.write_text("\n".join(map(json.dumps, whole)) if layout == "lines" else json.dumps(whole))
            try:
                read_all, _ = everything(layout, path)
            except ValueError:
                refused[True] += 1
            else:
                refused[False] += 1
                assert all(q.text and q.answer and q.category for c in read_all for q in c.questions)
        holder[key] = kept
    assert min(refused[True], refused[False]) > 50


def test_there_is_no_such_layout() -> None:
    with pytest.raises(ValueError, match="no layout 'csv'; there are locomo, longmemeval, lines"):
        everything("csv", DATA / "lines.jsonl")
    with pytest.raises(ValueError, match="LoCoMo's; the layout lines has neither"):
        everything("lines", adversarial=True)


# --- which questions --------------------------------------------------------------------------------------------------


def questions(**counts: int) -> list[Question]:
    return [Question(f"{name}:{i}", "?", "!", name, ()) for name, count in counts.items() for i in range(count)]


def test_a_sample_has_as_many_of_each_category_as_there_are() -> None:
    asked = questions(single=60, multi=40, temporal=3)
    drawn = choose(asked, sample=33, seed=7)
    assert Counter(q.category for q in drawn) == {"single": 15, "multi": 15, "temporal": 3}
    assert [asked.index(q) for q in drawn] == sorted(asked.index(q) for q in drawn)
    assert len(choose(asked, sample=1_000)) == 103
    assert set(choose(asked, sample=33, seed=8)) != set(drawn)
    assert set(drawn) < set(choose(asked, sample=34, seed=7))
    assert set(drawn) == set(choose(asked[::-1], sample=33, seed=7))


def test_the_same_seed_draws_the_same_everywhere() -> None:
    # `printf '7\0a:0' | sha256sum` begins with 72, and those of a:1, a:2, b:0, b:1 with 04, e7, 62, 60.
    assert [q.id for q in balanced(questions(a=3, b=2), 5, seed=7)] == ["a:1", "b:1", "b:0", "a:0", "a:2"]


def test_which_questions() -> None:
    asked = questions(single=4, multi=2)
    assert [q.id for q in choose(asked, categories=["multi"])] == ["multi:0", "multi:1"]
    assert [q.id for q in choose(asked, limit=3)] == ["single:0", "single:1", "single:2"]
    assert len(choose(asked, categories=["single"], sample=3, limit=2)) == 2
    with pytest.raises(ValueError, match="no question of category open; there are single, multi"):
        choose(asked, categories=["open"])
    with pytest.raises(ValueError, match="sample is 0"):
        choose(asked, sample=0)
    with pytest.raises(ValueError, match="limit is -1"):
        choose(asked, limit=-1)

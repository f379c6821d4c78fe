"""Generations side by side: the answers of single calls, in batches that repeat, within a bound of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, create_model, model_validator

from lychee_local.backends import Job, Request, jobs
from lychee_local.backends.batch import LlamaBatch
from lychee_local.backends.fake import FakeCall, FakeLLM
from lychee_local.backends.llama import LlamaLLM
from lychee_local.backends.prefixes import PROMPT_CHUNK
from lychee_local.errors import BadInput, GenerationFailed, ModelError, PromptTooLong
from lychee_local.types import ChatMessage, Completion

Note = Annotated[str, Field(max_length=60)]


class Notes(BaseModel):
    notes: Annotated[list[Note], Field(min_length=1, max_length=3)]


class Unlike(BaseModel):
    """No grammar holds its rule, and no output keeps it."""

    word: Note

    @model_validator(mode="after")
    def _refuse(self) -> Unlike:
        raise ValueError("never right")


SYSTEM = ChatMessage("system", "You write short notes on what people say, in full sentences. " * 9)
SAID = (
    "my dog Rex runs in the park every day",
    "the train to Lyon was two hours late",
    "we painted the kitchen green",
    "she sold her old bike for 40 euros",
    "Tom plays chess on Sundays with Maria",
)


def request(said: str, *, tokens: int = 24, schema: type[BaseModel] | None = Notes) -> Request:
    return Request([SYSTEM, ChatMessage("user", f"{said}. Notes:")], "encode", tokens, schema)


REQUESTS = [request(said) for said in SAID]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LlamaLLM]:
    llm = LlamaLLM(smollm2_path, name="smollm2", context=1024, threads=1)
    yield llm
    llm.close()


def answers(llm: LlamaLLM, requests: Sequence[Request], width: int) -> list[Completion | Exception]:
    with llm.batch(width) as batch:
        return all_of(batch, requests)


def all_of(batch: LlamaBatch, requests: Sequence[Request]) -> list[Completion | Exception]:
    tickets = [batch.submit(request) for request in requests]
    found: dict[int, Completion | Exception] = {}
    while some := batch.advance():
        found |= dict(some)
    return [found[ticket] for ticket in tickets]


def single(llm: LlamaLLM, asked: Request) -> Completion:
    return llm.complete(asked.messages, purpose=asked.purpose, max_tokens=asked.max_tokens, schema=asked.schema)


def texts(found: Sequence[Completion | Exception]) -> list[str]:
    return [answer.text for answer in found if isinstance(answer, Completion)]


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_batch_of_one_gives_the_very_text_of_a_single_call(smollm2: LlamaLLM) -> None:
    alone = [single(smollm2, asked) for asked in REQUESTS]
    found = answers(smollm2, REQUESTS, width=1)
    assert texts(found) == texts(alone)


@pytest.mark.model
def test_side_by_side_the_first_token_is_that_of_a_single_call_and_every_text_fits(smollm2: LlamaLLM) -> None:
    """A prompt is evaluated as it is for one; later tokens may differ where two were nearly as likely."""
    first = [request(said, tokens=1, schema=None) for said in SAID]
    assert texts(answers(smollm2, first, width=4)) == texts([single(smollm2, asked) for asked in first])
    found = answers(smollm2, REQUESTS, width=4)
    assert len(texts(found)) == len(SAID)
    for answer in found:
        assert isinstance(answer, Completion)
        if answer.finish == "stop":
            Notes.model_validate_json(answer.text)


@pytest.mark.model
def test_the_same_requests_in_the_same_order_give_the_same_batches(smollm2: LlamaLLM) -> None:
    first = answers(smollm2, REQUESTS, width=3)
    single(smollm2, REQUESTS[3])  # what the model did in between has no influence
    again = answers(smollm2, REQUESTS, width=3)
    assert texts(first) == texts(again)
    assert len(texts(first)) == len(SAID)


@pytest.mark.model
def test_requests_of_every_kind_side_by_side(smollm2: LlamaLLM) -> None:
    long = Request([ChatMessage("user", "word " * 1000)], "encode", 100, None)
    unlike = Request([ChatMessage("user", "one word")], "encode", 60, Unlike)
    free = Request([ChatMessage("user", "The colours of the rainbow:")], "answer", 7, None)
    too_long, wrong, cut, right = answers(smollm2, [long, unlike, free, REQUESTS[0]], width=4)
    assert isinstance(too_long, PromptTooLong)
    assert isinstance(wrong, GenerationFailed)
    assert "never right" in wrong.message
    assert isinstance(cut, Completion)
    assert (cut.finish, cut.usage.outcome, cut.usage.output_tokens, cut.usage.purpose) == (
        "length",
        "length",
        7,
        "answer",
    )
    assert isinstance(right, Completion)


@pytest.mark.model
def test_what_each_cost(smollm2: LlamaLLM) -> None:
    system = ChatMessage("system", f"{SYSTEM.content} Leave nothing out.")  # one that nothing has evaluated before
    requests = [Request([system, asked.messages[1]], "encode", 24, Notes) for asked in REQUESTS]
    found = answers(smollm2, requests, width=2)
    fixed = smollm2.count([system, ChatMessage("user", "")])
    for place, (asked, answer) in enumerate(zip(requests, found, strict=True)):
        assert isinstance(answer, Completion)
        usage = answer.usage
        assert usage.prompt_tokens == smollm2.count(asked.messages)
        assert usage.cached_tokens % PROMPT_CHUNK == 0
        assert usage.cached_tokens == 0 if place == 0 else fixed - 8 - PROMPT_CHUNK <= usage.cached_tokens < fixed
        assert 0 < usage.output_tokens <= asked.max_tokens
        assert usage.seconds > 0


@pytest.mark.model
def test_a_prompt_without_a_system_message_shares_nothing(smollm2: LlamaLLM) -> None:
    asked = [Request([ChatMessage("user", "Count to ten. " * 40 + end)], "answer", 3, None) for end in ("Now", "Now")]
    found = answers(smollm2, asked, width=2)
    assert [answer.usage.cached_tokens for answer in found if isinstance(answer, Completion)] == [0, 0]
    assert len(set(texts(found))) == 1


@pytest.mark.model
def test_more_fixed_beginnings_than_are_held(smollm2: LlamaLLM) -> None:
    systems = [ChatMessage("system", f"Rule {n}. " * 20) for n in range(6)]
    asked = [Request([s, ChatMessage("user", "Say it")], "answer", 1, None) for s in systems * 2]
    found = answers(smollm2, asked, width=2)
    assert texts(found) == texts([single(smollm2, a) for a in asked])


# --- its bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_memory_bounds_how_many_go_on_at_the_same_time(smollm2: LlamaLLM) -> None:
    with smollm2.batch(8, memory_bytes=1) as batch:
        assert batch.cells == smollm2.context  # what one needs is always there
        found = all_of(batch, REQUESTS * 2)
    assert len(texts(found)) == 2 * len(SAID)


@pytest.mark.model
def test_a_request_that_fills_the_context_gets_it_alone(smollm2: LlamaLLM) -> None:
    prompt = [SYSTEM, ChatMessage("user", "Say yes.")]
    room = smollm2.context - smollm2.count(prompt)
    whole = Request(prompt, "encode", room, Notes)
    with smollm2.batch(2, memory_bytes=1) as batch:
        found = all_of(batch, [REQUESTS[0], whole, REQUESTS[1]])
    assert len(texts(found)) == 3


@pytest.mark.model
def test_outputs_longer_than_expected_go_on_when_there_is_room_again(smollm2: LlamaLLM) -> None:
    """Room is kept for 384 tokens of each, so two begin in 1,024 cells; at 500 tokens each it runs out."""
    pairs = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    said = [", ".join(pairs), ", ".join(pairs[::-1])]
    asked = [Request([ChatMessage("user", "Go on")], "answer", 900, only(text)) for text in said]
    with smollm2.batch(2, memory_bytes=1) as batch:
        found = all_of(batch, asked)
    assert texts(found) == [f'{{"said":"{text}"}}' for text in said]
    assert sum(answer.usage.output_tokens for answer in found if isinstance(answer, Completion)) > batch.cells


COLOURS = ["red", "green", "blue", "white", "black", "yellow", "orange", "purple", "brown", "grey", "pink", "violet"]
THINGS = [
    "boat",
    "house",
    "tree",
    "river",
    "stone",
    "cloud",
    "table",
    "window",
    "bottle",
    "garden",
    "street",
    "mountain",
    "bridge",
    "basket",
    "piano",
    "kettle",
]


def only(text: str) -> type[BaseModel]:
    exactly: Any = Literal[text]
    return create_model("Only", said=(exactly, ...))


@pytest.mark.model
def test_a_model_that_is_closed_busy_or_asked_for_too_many(smollm2_path: Path) -> None:
    llm = LlamaLLM(smollm2_path, name="smollm2", context=256, threads=1)
    with pytest.raises(BadInput, match="from 1 to 64"), llm.batch(65):
        pass
    with llm.batch(2), pytest.raises(ModelError, match="generating"):
        single(llm, Request([ChatMessage("user", "Hi")], "answer", 1))
    with llm.batch(2) as batch, pytest.raises(BadInput, match="at least 1, not 0"):
        batch.submit(Request([ChatMessage("user", "Hi")], "answer", 0))
    with llm.batch(2), pytest.raises(ModelError, match="generating"):
        llm.close()
    assert single(llm, Request([ChatMessage("user", "Hi")], "answer", 1)).usage.output_tokens == 1
    llm.close()
    with pytest.raises(ModelError, match="closed"), llm.batch(2):
        pass


# --- jobs ------------------------------------------------------------------------------------------------------------


def counting(name: str, steps: int, log: list[str]) -> Job[str]:
    said = ""
    try:
        for step in range(steps):
            done = yield Request([ChatMessage("user", f"{name} {step}")], "encode", 5)
            log.append(f"{name}{step}")
            said += done.text
    finally:
        log.append(f"{name} ends")
    return said


def echo(call: FakeCall) -> str:
    return f"<{call.prompt}>"


def test_jobs_go_on_side_by_side_and_end_in_their_own_time() -> None:
    log: list[str] = []
    some = (counting(name, steps, log) for name, steps in (("a", 3), ("b", 1), ("c", 2)))
    found = list(jobs.run_all(some, FakeLLM(echo), width=2))
    assert found == ["<b 0>", "<a 0><a 1><a 2>", "<c 0><c 1>"]
    assert log == ["a0", "b0", "b ends", "a1", "c0", "a2", "a ends", "c1", "c ends"]


@pytest.mark.parametrize("width", [1, 3])
def test_a_job_without_requests_and_no_jobs_at_all(width: int) -> None:
    assert list(jobs.run_all([counting("a", 0, []), counting("b", 0, [])], FakeLLM(echo), width=width)) == ["", ""]
    assert list(jobs.run_all([], FakeLLM(echo), width=width)) == []


def test_one_by_one_nothing_is_batched() -> None:
    log: list[str] = []
    found = list(jobs.run_all([counting("a", 2, log), counting("b", 1, log)], FakeLLM(echo), width=1))
    assert found == ["<a 0><a 1>", "<b 0>"]
    assert log == ["a0", "a1", "a ends", "b0", "b ends"]


@pytest.mark.parametrize("width", [1, 3])
def test_an_error_of_the_model_reaches_the_job_that_asked(width: int) -> None:
    def careful() -> Job[str]:
        try:
            yield Request([ChatMessage("user", "word " * 20)], "encode", 5)
        except PromptTooLong:
            done = yield Request([ChatMessage("user", "short")], "encode", 5)
            return done.text
        raise AssertionError("it does not fit")

    found = list(jobs.run_all([careful(), counting("b", 1, [])], FakeLLM(echo, context=20), width=width))
    assert sorted(found) == ["<b 0>", "<short>"]


@pytest.mark.parametrize("width", [1, 3])
def test_what_a_job_raises_ends_them_all(width: int) -> None:
    def failing() -> Job[str]:
        yield Request([ChatMessage("user", "once")], "encode", 5)
        raise OSError("no space")

    log: list[str] = []
    with pytest.raises(OSError, match="no space"):
        list(jobs.run_all([failing(), counting("b", 5, log)], FakeLLM(echo), width=width))
    assert log in ([], ["b ends"], ["b0", "b ends"])


def test_leaving_early_closes_what_is_under_way() -> None:
    log: list[str] = []
    some = jobs.run_all([counting("a", 1, log), counting("b", 9, log)], FakeLLM(echo), width=2)
    assert next(some) == "<a 0>"
    some.close()  # type: ignore[attr-defined]  # a generator
    assert log[-1] == "b ends"

"""Evaluated instructions: computed once, restored after, never trusted when damaged, and never what a user said."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lychee_local.backends import Request, prefixes
from lychee_local.backends.llama import LlamaLLM
from lychee_local.backends.prefixes import PROMPT_CHUNK
from lychee_local.types import ChatMessage, Completion

pytestmark = pytest.mark.model

ENCODER = ChatMessage("system", "You write short notes on what people say, in full sentences. " * 12)
ANSWERER = ChatMessage("system", "You answer from the notes that you are given, in one short sentence. " * 12)
Ask = Callable[[LlamaLLM, ChatMessage, str], Completion]

SAID = ("my dog Rex runs in the park every day", "the train to Lyon was two hours late")


@contextmanager
def model(path: Path, folder: Path | None) -> Iterator[LlamaLLM]:
    llm = LlamaLLM(path, name="smollm2", context=1024, threads=1, prefixes=folder)
    yield llm
    llm.close()


def ask(llm: LlamaLLM, system: ChatMessage, said: str) -> Completion:
    return llm.complete([system, ChatMessage("user", f"{said}. Notes:")], purpose="encode", max_tokens=12)


def in_batch(llm: LlamaLLM, system: ChatMessage, said: str) -> Completion:
    with llm.batch(2) as batch:
        batch.submit(Request([system, ChatMessage("user", f"{said}. Notes:")], "encode", 12))
        [(_, answer)] = batch.advance()
    assert isinstance(answer, Completion)
    return answer


@pytest.fixture(scope="module")
def fresh(smollm2_path: Path) -> dict[tuple[str, str], str]:
    """What a model says that keeps nothing."""
    found = {}
    for system in (ENCODER, ANSWERER):
        for said in SAID:
            with model(smollm2_path, None) as llm:
                found[system.content, said] = ask(llm, system, said).text
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_instructions_taken_in_turns_are_evaluated_once(smollm2_path: Path, fresh: dict[tuple[str, str], str]) -> None:
    with model(smollm2_path, None) as llm:
        for said in SAID:
            for system in (ENCODER, ANSWERER):
                answer = ask(llm, system, said)
                assert answer.text == fresh[system.content, said]
                fixed = llm.count([system]) // PROMPT_CHUNK * PROMPT_CHUNK
                if said == SAID[1]:
                    assert fixed - PROMPT_CHUNK <= answer.usage.cached_tokens <= fixed
                    assert answer.usage.cached_tokens > 100


def test_a_new_process_restores_what_another_evaluated(
    smollm2_path: Path, tmp_path: Path, fresh: dict[tuple[str, str], str]
) -> None:
    with model(smollm2_path, tmp_path / "kept") as llm:
        assert ask(llm, ENCODER, SAID[0]).usage.cached_tokens == 0
    with model(smollm2_path, tmp_path / "kept") as llm:
        answer = ask(llm, ENCODER, SAID[1])
    assert answer.usage.cached_tokens > 100
    assert answer.text == fresh[ENCODER.content, SAID[1]]


@pytest.mark.parametrize(("first", "second"), [(ask, in_batch), (in_batch, ask), (in_batch, in_batch)])
def test_single_calls_and_batches_share_them(
    smollm2_path: Path,
    tmp_path: Path,
    fresh: dict[tuple[str, str], str],
    first: Ask,
    second: Ask,
) -> None:
    with model(smollm2_path, tmp_path) as llm:
        assert first(llm, ENCODER, SAID[0]).usage.cached_tokens == 0
    with model(smollm2_path, tmp_path) as llm:
        answer = second(llm, ENCODER, SAID[1])
    assert answer.usage.cached_tokens > 100
    assert answer.text == fresh[ENCODER.content, SAID[1]]


def test_a_file_holds_the_instruction_and_nothing_of_what_was_said(smollm2_path: Path, tmp_path: Path) -> None:
    """The state of a sequence is a function of its tokens, so files of equal content hold no word of either prompt."""
    for name, said in (("a", SAID[0]), ("b", SAID[1])):
        with model(smollm2_path, tmp_path / name) as llm:
            ask(llm, ENCODER, said)
    [a], [b] = files(tmp_path / "a"), files(tmp_path / "b")
    assert a.name == b.name
    assert a.read_bytes() == b.read_bytes()
    assert a.stat().st_mode & 0o777 == 0o600
    assert a.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_system_message_nothing_is_kept(smollm2_path: Path, tmp_path: Path) -> None:
    with model(smollm2_path, tmp_path) as llm:
        llm.complete([ChatMessage("user", "a secret " * 200)], purpose="encode", max_tokens=2)
        with llm.batch(1) as batch:
            batch.submit(Request([ChatMessage("user", "a secret " * 200)], "encode", 2))
            batch.advance()
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_computed_again(
    smollm2_path: Path, tmp_path: Path, fresh: dict[tuple[str, str], str], damage: str
) -> None:
    with model(smollm2_path, tmp_path) as llm:
        ask(llm, ENCODER, SAID[0])
    [path] = files(tmp_path)
    whole = path.read_bytes()
    if damage == "foreign":  # intact, under the right name, and not what this model can use
        key = bytes.fromhex(path.stem)
        state = b"the state of another model" * 99
        path.write_bytes(b"lychee prefix 1\n" + hashlib.blake2b(key + state, digest_size=32).digest() + state)
    else:
        flipped = bytes([whole[-1] ^ 1])
        path.write_bytes({"cut": whole[:-7], "flipped": whole[:-1] + flipped, "empty": b""}[damage])
    for run in (ask, in_batch):
        with model(smollm2_path, tmp_path) as llm:
            answer = run(llm, ENCODER, SAID[1])
        assert answer.text == fresh[ENCODER.content, SAID[1]]
    assert path.read_bytes() == whole


def test_other_threads_or_weights_share_no_state(smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(smollm2_path.read_bytes())
    os.utime(other, (1, 1))
    for path, threads in ((smollm2_path, 1), (smollm2_path, 2), (other, 1)):
        llm = LlamaLLM(path, name="smollm2", context=1024, threads=threads, prefixes=tmp_path / "kept")
        assert ask(llm, ENCODER, SAID[0]).usage.cached_tokens == 0
        llm.close()
    assert len(files(tmp_path / "kept")) == 3


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    smollm2_path: Path, tmp_path: Path, fresh: dict[tuple[str, str], str]
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder", encoding="utf-8")
    with model(smollm2_path, blocked) as llm:
        ask(llm, ENCODER, SAID[0])
        ask(llm, ANSWERER, SAID[0])
        answer = ask(llm, ENCODER, SAID[1])
    assert answer.usage.cached_tokens > 100  # kept in memory all the same
    assert answer.text == fresh[ENCODER.content, SAID[1]]
    assert blocked.read_text(encoding="utf-8") == "no folder"


def test_a_disk_that_fills_keeps_no_half_of_a_file(
    smollm2_path: Path, tmp_path: Path, fresh: dict[tuple[str, str], str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with model(smollm2_path, tmp_path / "kept") as llm:
            assert ask(llm, ENCODER, SAID[0]).text == fresh[ENCODER.content, SAID[0]]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path / "kept") == []


def test_drafts_of_processes_that_were_killed_go_and_those_under_way_stay(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    old, new = folder / "a.prefix.1", folder / "b.prefix.2"
    for draft, age in ((old, 3_600), (new, 5)):
        draft.write_bytes(b"half")
        os.utime(draft, (time.time() - age,) * 2)
    with model(smollm2_path, folder) as llm:
        ask(llm, ENCODER, SAID[0])
    assert old not in files(folder)
    assert new in files(folder)


def test_an_interrupt_while_a_state_is_restored_costs_nothing_but_that_call(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: dict[tuple[str, str], str]
) -> None:
    """Ctrl-C is raised when llama.cpp returns: the memory is another then, and the numbers about it were not yet."""
    with model(smollm2_path, None) as llm:
        ask(llm, ENCODER, SAID[0])
        ask(llm, ANSWERER, SAID[0])
        restore = llm._prefixes.restore

        def interrupted(context: Any, place: int, tokens: Sequence[int]) -> bool:
            restore(context, place, tokens)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(llm._prefixes, "restore", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ask(llm, ENCODER, SAID[1])
        assert ask(llm, ANSWERER, SAID[1]).text == fresh[ANSWERER.content, SAID[1]]
        assert ask(llm, ENCODER, SAID[1]).text == fresh[ENCODER.content, SAID[1]]


def test_files_not_used_for_longest_make_room(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "0000.prefix.123"  # a draft of a process that was killed
    left.write_bytes(b"x" * 1000)
    os.utime(left, (1, 1))
    with model(smollm2_path, tmp_path) as llm:
        ask(llm, ENCODER, SAID[0])
    [size] = [path.stat().st_size for path in files(tmp_path) if path != left]
    monkeypatch.setattr(prefixes, "DISK_BYTES", size * 3 // 2)
    with model(smollm2_path, tmp_path) as llm:
        ask(llm, ANSWERER, SAID[0])
    assert len(files(tmp_path)) == 1
    with model(smollm2_path, tmp_path) as llm:
        assert ask(llm, ANSWERER, SAID[1]).usage.cached_tokens > 100

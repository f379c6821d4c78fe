"""What somebody would write first: ask for a list of memories, read the JSON, keep it. The comparison for our encoder.

The same segments, models, bounds and engine, and nothing else of ours: no dates, no keys, no example, no checks, no
second try. A list that was cut is not JSON, so its segment yields nothing. Where a record came from nobody asks; for
the measure it is credited to the turn that shares most of its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from lychee_local.backends import LLM, Job, Request
from lychee_local.backends.jobs import run_all
from lychee_local.errors import GenerationFailed, PromptTooLong
from lychee_local.types import ChatMessage, Record, Segment, Turn, Usage

_PROMPT = """\
Extract the important information about the people in this conversation as a list of memories, to be remembered for \
later. Each memory is one sentence and has the speaker it is about. Answer in JSON: \
{"records": [{"speaker": "...", "text": "..."}]}"""


class _Memory(BaseModel):
    model_config = ConfigDict(extra="forbid")
    speaker: Annotated[str, Field(max_length=60)]
    text: Annotated[str, Field(max_length=300)]


class _Memories(BaseModel):
    model_config = ConfigDict(extra="forbid")
    # At least one: asked this way, Qwen 1.5B says that there is nothing to remember (benchmarks/LOG.md).
    records: Annotated[list[_Memory], Field(min_length=1, max_length=24)]


_Encoding = tuple[str, tuple[Record, ...], tuple[Usage, ...]]  # of the segment with this id
_LINE: TypeAdapter[_Encoding] = TypeAdapter(_Encoding)


def encode_all(
    segments: Mapping[str, tuple[Segment, Sequence[Turn]]],
    llm: Callable[[], LLM],
    kept: Path,
    *,
    width: int,
    max_tokens: int,
    on_segment: Callable[[str], None],
) -> tuple[tuple[Record, ...], tuple[Usage, ...]]:
    """The records of all segments and what they cost. Each segment is appended to the file `kept` when it is done, and
    those that are in it already are read from there: a killed run goes on where it was. `llm` is called only if there
    is something left to do."""
    done = {line[0]: line for line in _read(kept)}
    left = [(segment, turns) for name, (segment, turns) in segments.items() if name not in done]
    if left:
        jobs = (_encode(segment, turns, max_tokens) for segment, turns in left)
        with kept.open("a", encoding="utf-8") as file:
            for encoding in run_all(jobs, llm(), width=width):
                file.write(_LINE.dump_json(encoding).decode() + "\n")
                file.flush()
                done[encoding[0]] = encoding
                on_segment(encoding[0])
    records = {record.id: record for name in segments for record in done[name][1]}
    return tuple(records.values()), tuple(usage for name in segments for usage in done[name][2])


def _read(kept: Path) -> list[_Encoding]:
    """The lines that were written whole; what a killed run left of the last one is cut off."""
    text = kept.read_text(encoding="utf-8") if kept.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        kept.write_text(whole, encoding="utf-8")
    return [_LINE.validate_json(line) for line in whole.splitlines()]


def _encode(segment: Segment, turns: Sequence[Turn], max_tokens: int) -> Job[_Encoding]:
    said = "\n".join(turn.line for turn in turns)
    day = f"Conversation of {turns[0].at:%d %B %Y}:\n" if turns[0].at else "Conversation:\n"
    messages = (ChatMessage("system", _PROMPT), ChatMessage("user", day + said))
    try:
        completion = yield Request(messages, "encode", max_tokens, _Memories)
    except (PromptTooLong, GenerationFailed):
        return segment.id, (), ()
    if completion.finish != "stop":
        return segment.id, (), (completion.usage,)
    memories = _Memories.model_validate_json(completion.text).records
    records = tuple(_record(memory, segment, turns) for memory in memories if memory.text.strip())
    return segment.id, records, (completion.usage,)


def _record(memory: _Memory, segment: Segment, turns: Sequence[Turn]) -> Record:
    words = _words(memory.text)
    source = max(turns, key=lambda turn: len(words & _words(turn.line)))
    return Record(
        session=segment.session,
        text=" ".join(memory.text.split()),
        kind="fact",
        turns=(source.index,),
        segment=segment.id,
        speaker=memory.speaker.strip() or None,
        said=source.at,
    )


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))

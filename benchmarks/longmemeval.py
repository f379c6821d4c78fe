"""LongMemEval, in its three sizes (oracle, S, M): a list of instances, each one question with a history of its own.

One instance is one conversation. The larger files hold gigabytes, so they are read by `ijson`, one instance at a time:
a reader on `json.JSONDecoder.raw_decode` of our own could not tell an instance that is not yet there from a damaged
one without reading to the end of the file.

A turn's ref is its session's id and its number in it, counted from 1. Sessions are put in the order of their dates,
which the oracle file does not keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.fields import Fields, when
from benchmarks.questions import Conversation, Problem, Question, Report, refuse
from lychee_local import Message, intake
from lychee_local.errors import BadInput

_REQUIRED = (
    "question_id",
    "question_type",
    "question",
    "answer",
    "haystack_sessions",
    "haystack_session_ids",
    "answer_session_ids",
)
_ABSTENTION = "_abs"
_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20


def read(path: Path, wanted: Collection[str] = (), *, on_problem: Report = refuse) -> Iterator[Conversation]:
    """The instances named in `wanted`, or all, one by one in the order of the file; reading stops at the last wanted.

    Raises:
        ValueError: the file is not of this layout, lacks a wanted instance or names one twice, or a problem that
            `on_problem` does not take.
    """
    met: set[str] = set()
    with path.open("rb") as file:
        for number, value in enumerate(_list(file, path), 1):
            item = Fields.of(value, f"{path}, instance {number}", "longmemeval", *_REQUIRED)
            name = item.text("question_id")
            if name in met:
                raise ValueError(f"{item.where}: the question_id {name} is there twice; give each its own")
            met.add(name)
            if not wanted or name in wanted:
                yield _conversation(name, item, on_problem)
            if wanted and met.issuperset(wanted):
                return
    if missing := [name for name in wanted if name not in met]:
        raise ValueError(f"no instance {', '.join(missing)} in {path}; it holds {len(met)}, such as {min(met)}")


def _list(file: BufferedReader, path: Path) -> Iterator[Any]:
    try:
        import ijson
    except ImportError as error:
        raise ValueError("files of LongMemEval are read by ijson: pip install ijson") from error
    start = file.read(len(_BOM))
    file.seek(len(_BOM) if start == _BOM else 0)
    if not file.peek().lstrip().startswith(b"["):
        raise ValueError(f"{path}: not a list of instances; LongMemEval's file begins with [, in UTF-8")
    number = 0
    try:
        for value in ijson.items(file, "item", use_float=True, buf_size=_BUFFER):
            number += 1
            yield value
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"not JSON in UTF-8 behind instance {number}: {reason}; is the file complete?"
        raise ValueError(f"{path}: {problem}") from error
    if not number:
        raise ValueError(f"{path}: the list is empty; there is nothing to ask")


def _conversation(name: str, item: Fields, on_problem: Report) -> Conversation:
    messages: list[Message] = []
    gold: list[str] = []
    for session, at, turns in _sessions(name, item, on_problem):
        for number, turn in enumerate(turns, 1):
            ref = f"{session}:{number}"
            said = Fields.of(turn, f"{name}, turn {ref}", "longmemeval", "role", "content").values
            try:
                messages += intake.messages(
                    {"text": said["content"], "role": said["role"], "session": session, "at": at, "ref": ref}
                )
            except BadInput as problem:
                on_problem(Problem(f"{name}, turn {ref}", f"{problem}; the turn is left out"))
                continue
            if said.get("has_answer"):
                gold.append(ref)
    known = {message.session for message in messages}
    answering = item.texts("answer_session_ids")
    for session in answering:
        if session not in known:
            on_problem(Problem(name, f"the answering session {session} has no turns here; it is left out"))
    question = Question(
        id=name,
        text=item.text("question"),
        answer=item.text("answer"),
        category=item.text("question_type"),
        gold=tuple(gold),
        sessions=tuple(dict.fromkeys(session for session in answering if session in known)),
        asked=_date(item.values.get("question_date"), f"{name}, question_date", on_problem),
        answerable=_ABSTENTION not in name,
    )
    return Conversation(name, tuple(messages), (question,))


def _sessions(name: str, item: Fields, on_problem: Report) -> list[tuple[str, datetime | None, list[Any]]]:
    """Name, date and turns of each session, the oldest first, or as in the file where one has no date."""
    turns, ids = item.items("haystack_sessions"), item.texts("haystack_session_ids")
    dates = item.items("haystack_dates") if item.values.get("haystack_dates") else [None] * len(ids)
    if not len(turns) == len(ids) == len(dates):
        counts = f"{len(turns)} haystack_sessions, {len(ids)} haystack_session_ids, {len(dates)} haystack_dates"
        raise ValueError(f"{name}: {counts}; give each session an id, and a date or null")
    found: dict[str, tuple[str, datetime | None, list[Any]]] = {}
    for session, date, said in zip(ids, dates, turns, strict=True):
        if not isinstance(said, list):
            raise ValueError(f"{name}, session {session}: not a list of turns; write [] for none")
        unique = session
        if session in found:
            unique = next(new for n in count(2) if (new := f"{session}#{n}") not in found)
            on_problem(Problem(f"{name}, session {session}", f"its id is there twice; this one is called {unique}"))
        if not said:
            on_problem(Problem(f"{name}, session {unique}", "a session without turns; it is left out"))
            continue
        found[unique] = (unique, _date(date, f"{name}, session {unique}", on_problem), said)
    sessions = list(found.values())
    dated = [(at, session) for session in sessions if (at := session[1]) is not None]
    if len(dated) < len(sessions):
        return sessions
    # By the clock: a date with an offset and one without cannot be compared.
    return [session for _, session in sorted(dated, key=lambda each: each[0].replace(tzinfo=None))]


def _date(value: object, where: str, on_problem: Report) -> datetime | None:
    try:
        at = when(value, where)
    except ValueError as error:
        on_problem(Problem(where, f"{error.__cause__}; taken as unknown"))
        return None
    if at is None:
        on_problem(Problem(where, "without a date; taken as unknown"))
    return at

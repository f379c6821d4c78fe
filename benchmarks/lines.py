"""The layout for anybody's own data: JSON lines, each one turn or one question of a conversation.

    {"conversation": "a", "session": "s1", "at": "2024-05-01 10:30", "speaker": "Ana", "text": "I sold the boat.",
     "ref": "s1:1"}
    {"conversation": "a", "question": "What did Ana sell?", "answer": "her boat", "gold": ["s1:1"]}

A turn has `text`, and may have `session` (else "main"), `at`, `speaker`, `role` (user, else assistant, system or tool)
and `ref`, by which questions name it (else "line 12"). A question has `question` and `answer`, and may have `category`,
`gold` (refs of the turns that answer it), `sessions` (those that do; else the sessions of `gold`), `asked` (when it is
put) and `"answerable": false`, with which the answer may be left out. Questions are called a:0, a:1, ... as they come.
The categories multi, open and adversarial are scored as LoCoMo's (scores.py).

The lines of one conversation stand together, in any order among themselves but that turns are in the order in which
they were said. So only one conversation is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from benchmarks.fields import Fields, parsed
from benchmarks.questions import NOT_MENTIONED, Conversation, Problem, Question, Report, refuse
from lychee_local import Message, intake
from lychee_local.errors import BadInput

_QUESTION = ("conversation", "question", "answer", "category", "gold", "sessions", "asked", "answerable")


def read(path: Path, wanted: Collection[str] = (), *, on_problem: Report = refuse) -> Iterator[Conversation]:
    """The conversations named in `wanted`, or all, one by one in the order of the file.

    Raises:
        ValueError: a line that is neither a turn nor a question, a ref twice, a conversation in two places, a wanted
            one that is not there, or a problem that `on_problem` does not take.
    """
    met: set[str] = set()
    for name, group in groupby(_lines(path), key=lambda line: line.text("conversation")):
        lines = tuple(group)
        if name in met:
            raise ValueError(f"{lines[0].where}: conversation {name} has ended before; put its lines together")
        met.add(name)
        if not wanted or name in wanted:
            yield _conversation(name, lines, on_problem)
    if not met:
        raise ValueError(f"{path}: there are no lines; write one turn or one question on each")
    if missing := [name for name in wanted if name not in met]:
        raise ValueError(f"no conversation {', '.join(missing)} in {path}; there are {', '.join(sorted(met))}")


def _lines(path: Path) -> Iterator[Fields]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            if number == 1 and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                raise ValueError(f"{where}: a list; a file that is one has the layout locomo or longmemeval")
            value = parsed(line, where, "write one object on each line")
            yield Fields.of(value, where, "lines", "conversation")


def _conversation(name: str, lines: Iterable[Fields], on_problem: Report) -> Conversation:
    messages: dict[str, Message] = {}
    asked: list[Fields] = []
    for line in lines:
        if ("text" in line.values) == ("question" in line.values):
            raise ValueError(f"{line.where}: a line has a text or a question, and not both")
        if "question" in line.values:
            asked.append(line)
            continue
        message = _message(line)
        assert message.ref is not None
        if message.ref in messages:
            raise ValueError(f"{line.where}: the ref {message.ref} is another turn's; give each turn its own")
        messages[message.ref] = message
    questions = (_question(f"{name}:{number}", line, messages, on_problem) for number, line in enumerate(asked))
    return Conversation(name, tuple(messages.values()), tuple(questions))


def _message(line: Fields) -> Message:
    turn = {key: value for key, value in line.values.items() if key != "conversation"}
    try:
        (message,) = intake.messages(turn)
    except BadInput as problem:
        raise ValueError(f"{line.where}: {problem}") from problem
    return message if message.ref else replace(message, ref=line.where.rpartition(", ")[2])


def _question(name: str, line: Fields, messages: Mapping[str, Message], on_problem: Report) -> Question:
    if unknown := [key for key in line.values if key not in _QUESTION]:
        raise ValueError(f"{line.where}: unknown key {unknown[0]!r}; a question has {', '.join(_QUESTION)}")
    answerable = line.values.get("answerable", True)
    if not isinstance(answerable, bool):
        raise ValueError(f"{line.where}: answerable is {answerable!r}; write true or false")
    named = line.texts("gold") if "gold" in line.values else ()
    gold = tuple(dict.fromkeys(ref for ref in named if ref in messages))
    for ref in named:
        if ref not in messages:
            on_problem(Problem(line.where, f"the ref {ref} points at no turn of the conversation; it is left out"))
    there_are = {message.session for message in messages.values()}
    sessions = line.texts("sessions") if "sessions" in line.values else [messages[ref].session or "" for ref in gold]
    for session in sessions:
        if session not in there_are:
            on_problem(Problem(line.where, f"the session {session} is none of the conversation; it is left out"))
    return Question(
        id=name,
        text=line.text("question"),
        answer=NOT_MENTIONED if not answerable and "answer" not in line.values else line.text("answer"),
        category=_category(line),
        gold=gold,
        sessions=tuple(dict.fromkeys(session for session in sessions if session in there_are)),
        asked=line.when("asked"),
        answerable=answerable,
    )


def _category(line: Fields) -> str:
    name = line.text("category") if "category" in line.values else "question"
    if name == "all":
        raise ValueError(f'{line.where}: no category is called "all", which is what tables call all of them together')
    return name

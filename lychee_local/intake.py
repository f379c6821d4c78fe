"""The border: whatever comes from outside becomes valid messages here, or a `BadInput` that says where and why.

Owns the checks on text, names, roles, keys and times, and the two file layouts (JSON lines of turns, LoCoMo JSON).
Refuses to guess: an unknown key, an unreadable date or an unknown role is an error, and an unknown time stays unknown.

Text is kept as it was said, with two exceptions that make equal things equal: Unicode is brought to NFC, so that a name
typed on two keyboards is one name, and line ends become a single newline. Control characters (but tab and newline),
NUL and lone surrogates are refused: no file, terminal or model downstream treats them alike.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from lychee_local import dates
from lychee_local.errors import BadInput
from lychee_local.types import ROLES, Message, Role

DEFAULT_SESSION = "main"
MAX_NAME = 200
KEYS = ("text", "role", "speaker", "at", "session", "ref")

# A message of a file that has no `ref` gets one from its content. The prefix keeps it apart from the caller's own.
DERIVED_REF = "content:"

# C0 and C1 controls but tab and the newlines, DEL, and the surrogates, which UTF-8 cannot carry.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
_NEWLINES = re.compile("\r\n?")
# What other tools call the same thing: worth a hint, not a second spelling.
_OTHER_NAMES = {
    "content": "text",
    "message": "text",
    "name": "speaker",
    "author": "speaker",
    "date": "at",
    "time": "at",
    "timestamp": "at",
    "created_at": "at",
    "session_id": "session",
    "id": "ref",
}

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 60

Problem = Callable[[BadInput], None]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a message gets that does not say it itself. `speaker` is the name of whoever has the role `role`: it is
    never given to a turn of another role, so an assistant's reply is not put in the user's mouth."""

    session: str = DEFAULT_SESSION
    at: datetime | None = None
    speaker: str | None = None
    role: Role = "user"


def defaults(
    *,
    session: str | None = None,
    at: datetime | date | str | None = None,
    speaker: str | None = None,
    role: str | None = None,
) -> Defaults:
    """The checked form of what a caller of `remember` says about all its messages."""
    return Defaults(
        DEFAULT_SESSION if session is None else _name(session, "session"),
        None if at is None else _when(at),
        None if speaker is None else _name(speaker, "speaker"),
        "user" if role is None else _role(role),
    )


def messages(
    value: object,
    *,
    session: str | None = None,
    at: datetime | date | str | None = None,
    speaker: str | None = None,
    role: Role = "user",
) -> tuple[Message, ...]:
    """What `Memory.remember` was given (a text, a message, a mapping, or several of them) as valid messages.

    Raises:
        BadInput: the first thing that cannot be stored, by its position (turns count from 1).
    """
    given = defaults(session=session, at=at, speaker=speaker, role=role)
    if isinstance(value, str | Message | Mapping):
        return (_message(value, given),)
    if isinstance(value, bytes | bytearray) or not isinstance(value, Iterable):
        raise BadInput(
            f"cannot remember a value of type {type(value).__name__}", hint="pass a text, a Message, or a list of them"
        )
    out = []
    for number, item in enumerate(value, 1):
        with _place(f"turn {number}"):
            out.append(_message(item, given))
    return tuple(out)


def question(value: object) -> str:
    """A question as it is searched: stripped, not blank, free of control characters.

    Raises:
        BadInput: otherwise.
    """
    return _text(value, "question").strip()


# --- files -----------------------------------------------------------------------------------------------------------


def read(
    stream: IO[bytes],
    *,
    conversation: str | None = None,
    given: Defaults | None = None,
    on_problem: Problem | None = None,
) -> tuple[Message, ...]:
    """All messages of a file, whose layout (JSON lines or LoCoMo) is told by its content, never by its name.

    Each message has a `ref`: its own, or one derived from its content, so that reading the same or a grown file again
    adds only what is new. With `on_problem` an unusable line or turn is reported there and left out.

    Raises:
        BadInput: an empty file, an unknown conversation, and without `on_problem` the first unusable line.
    """
    data = stream.read()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInput("the input is UTF-16 text", hint="save it as UTF-8")
    given = given or Defaults()
    document = _locomo_document(data)
    if document is None:
        if conversation is not None:
            raise BadInput("the input is JSON lines and holds no conversations", hint="leave out --conversation")
        found = tuple(read_jsonl(data.split(b"\n"), given=given, on_problem=on_problem))
    else:
        found = _locomo_messages(document, conversation, on_problem)
    if not found and on_problem is None:
        raise BadInput("the input holds no turns")
    return found


def read_all(stream: IO[bytes], *, conversations: Sequence[str] = ()) -> tuple[tuple[Message, ...], ...]:
    """The conversations of a file, each as `read` gives it: those that are named, or all; JSON lines are one.

    Raises:
        BadInput: as `read`.
    """
    data = stream.read()
    document = _locomo_document(data)
    if document is None and not conversations:
        return (read(BytesIO(data)),)
    names = conversations or _locomo_names(document or [])
    return tuple(read(BytesIO(data), conversation=name) for name in names)


def read_jsonl(
    lines: Iterable[bytes], *, given: Defaults | None = None, on_problem: Problem | None = None
) -> Iterator[Message]:
    """Messages from JSON lines: one object a line with the keys text, role, speaker, at, session, ref; blank lines are
    skipped, a byte order mark and CRLF are accepted.

    Raises:
        BadInput: a line that is not such an object, by its number, unless `on_problem` takes it.
    """
    given = given or Defaults()
    refs = _Refs()
    for number, line in enumerate(lines, 1):
        raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not raw.strip():
            continue
        try:
            with _place(f"line {number}"):
                message = refs.settle(_message(_object(raw), given), f"line {number}")
        except BadInput as problem:
            if on_problem is None:
                raise
            on_problem(problem)
        else:
            yield message


def read_locomo(
    path: Path, conversation: str | None = None, *, on_problem: Problem | None = None
) -> tuple[Message, ...]:
    """One conversation of a LoCoMo file: sessions in order, `ref` = dia_id, both speakers with the role user, the
    session's date as `at`, an image's caption and search words as lines of their own behind the text.

    Raises:
        BadInput: the file is not LoCoMo JSON, or has no such conversation (those there are are listed).
    """
    document = _locomo_document(path.read_bytes())
    if document is None:
        raise BadInput(f"{path} is not LoCoMo JSON")
    return _locomo_messages(document, conversation, on_problem)


def locomo_messages(talk: Mapping[str, Any], *, on_problem: Problem | None = None) -> tuple[Message, ...]:
    """The same of a conversation that has been parsed: `talk` is what its key `conversation` holds.

    Raises:
        BadInput: a session, and without `on_problem` a turn, that cannot be used, by its place.
    """
    numbers = sorted(int(found[1]) for key in talk if (found := re.fullmatch(r"session_([0-9]+)", key)))
    if odd := [
        f"session_{number}" for number in numbers if f"session_{number}" not in talk or numbers.count(number) > 1
    ]:
        raise BadInput(
            f"the sessions are numbered in an unusual way: {odd[0]}", hint="name them session_1, session_2, ..."
        )
    refs = _Refs()
    out = []
    for number in numbers:
        session = f"session_{number}"
        turns = talk[session]
        with _place(session):
            if not isinstance(turns, list):
                raise BadInput(f"not a list of turns but {_json_kind(turns)}")
            at = talk.get(f"{session}_date_time")
            given = Defaults(session, None if at is None else _when(at))
        for place, turn in enumerate(turns, 1):
            where = f"{session}, turn {place}"
            try:
                with _place(where):
                    out.append(refs.settle(_message(_locomo_turn(turn), given), where))
            except BadInput as problem:
                if on_problem is None:
                    raise
                on_problem(problem)
    return tuple(out)


def _object(raw: bytes) -> dict[str, object]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as e:
        raise BadInput(f"not UTF-8 text: byte 0x{raw[e.start]:02x} at column {e.start + 1}") from e
    except json.JSONDecodeError as e:
        raise BadInput(f"not JSON: {e.msg} at column {e.colno}") from e
    except RecursionError as e:
        raise BadInput("not a turn: nested too deeply") from e
    except ValueError as e:  # an integer of more digits than Python converts
        raise BadInput(f"not JSON: {e}") from e
    if not isinstance(value, dict):
        raise BadInput(f"not an object but {_json_kind(value)}", hint='a turn looks like {"text": "..."}')
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise BadInput(f"the key {_SHOWN.repr(twice)} stands there twice")
    return found


def _json_kind(value: object) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _locomo_document(data: bytes) -> list[dict[str, Any]] | None:
    """The conversations of a LoCoMo file (a list of them, or one), or None where the content is something else."""
    head = data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if head not in (b"[", b"{"):
        return None
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        if head == b"[":
            raise BadInput(f"the input begins like a JSON list but cannot be read: {e}") from e
        return None  # more than one document: lines, each of which is judged by itself
    items = value if isinstance(value, list) else [value]
    if items and all(isinstance(item, dict) and isinstance(item.get("conversation"), dict) for item in items):
        return items
    if isinstance(value, list):
        raise BadInput(
            "the input is a JSON list, but not of LoCoMo conversations", hint='put one {"text": ...} on each line'
        )
    return None


def _locomo_names(document: list[dict[str, Any]]) -> list[str]:
    return [str(item.get("sample_id", number)) for number, item in enumerate(document)]


def _locomo_messages(
    document: list[dict[str, Any]], conversation: str | None, on_problem: Problem | None
) -> tuple[Message, ...]:
    names = _locomo_names(document)
    if conversation is None and len(document) == 1:
        conversation = names[0]
    if conversation not in names:
        problem = "the input holds several conversations"
        if conversation is not None:
            problem = f"the input holds no conversation {_SHOWN.repr(conversation)}"
        raise BadInput(problem, hint=f"choose one with --conversation: {', '.join(names)}")
    return locomo_messages(document[names.index(conversation)]["conversation"], on_problem=on_problem)


def _locomo_turn(turn: object) -> dict[str, object]:
    if not isinstance(turn, dict):
        raise BadInput(f"not an object but {_json_kind(turn)}")
    lines = [turn.get("text") or ""]
    if caption := turn.get("blip_caption"):
        lines.append(f"[image: {caption}]")
    elif turn.get("img_url"):
        lines.append("[image]")
    if query := turn.get("query"):
        lines.append(f"[image search: {query}]")
    if not all(isinstance(line, str) for line in lines):
        raise BadInput("text is not a string")
    # LoCoMo's text often ends in stray newlines; before an appended line they would read as a paragraph.
    text = "\n".join(line.strip() for line in lines if line.strip())
    return {"text": text, "speaker": turn.get("speaker"), "ref": turn.get("dia_id")}


class _Refs:
    """Gives each message of one import its ref, and notices one ref on two different messages."""

    def __init__(self) -> None:
        self._repeats: Counter[str] = Counter()
        self._first: dict[tuple[str | None, str], tuple[Message, str]] = {}

    def settle(self, message: Message, where: str) -> Message:
        if message.ref is None:
            return replace(message, ref=self._derived(message))
        earlier, place = self._first.setdefault((message.session, message.ref), (message, where))
        if earlier != message:
            raise BadInput(f"ref {_SHOWN.repr(message.ref)} is already the ref of another turn ({place})")
        return message

    def _derived(self, m: Message) -> str:
        """The hash of what was said, where, when and by whom, and of how often the same was met before in this import:
        a sentence said twice is two turns, a file read twice is not."""
        said = json.dumps([m.session, m.at.isoformat() if m.at else None, m.speaker, m.role, m.text])
        number = self._repeats[said]
        self._repeats[said] += 1
        return DERIVED_REF + hashlib.sha256(f"{number}\0{said}".encode()).hexdigest()[:24]


# --- one message -----------------------------------------------------------------------------------------------------


@contextmanager
def _place(where: str) -> Iterator[None]:
    """Puts where it happened in front of a `BadInput` that is raised inside the block."""
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{where}: {e.message}", hint=e.hint) from e


def _message(item: object, given: Defaults) -> Message:
    if isinstance(item, str):
        item = {"text": item}
    elif isinstance(item, Message):
        item = {key: getattr(item, key) for key in KEYS}
    if not isinstance(item, Mapping):
        raise BadInput(f"a turn of type {type(item).__name__}", hint="pass a text, a Message, or a mapping")
    for key in item:
        if key not in KEYS:
            other = _OTHER_NAMES.get(str(key))
            hint = f"call it {other!r}" if other and other not in item else f"a turn has {', '.join(KEYS)}"
            raise BadInput(f"unknown key {_SHOWN.repr(key)}", hint=hint)
    if item.get("text") is None:
        raise BadInput("a turn without text")
    role = given.role if item.get("role") is None else _role(item["role"])
    speaker = item.get("speaker")
    if speaker is None and role == given.role:
        speaker = given.speaker
    return Message(
        _text(item["text"], "text"),
        role,
        None if speaker is None else _name(speaker, "speaker"),
        given.at if item.get("at") is None else _when(item["at"]),
        given.session if item.get("session") is None else _name(item["session"], "session"),
        None if item.get("ref") is None else _ref(item["ref"]),
    )


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"the {what} is not text but {type(value).__name__}")
    value = _NEWLINES.sub("\n", value)
    if found := _FORBIDDEN.search(value):
        raise BadInput(f"the {what} has {_character(found[0])} at character {found.start() + 1}", hint="take it out")
    if not value.strip():
        raise BadInput(f"the {what} is empty" if not value else f"the {what} is blank")
    return unicodedata.normalize("NFC", value)


def _character(c: str) -> str:
    if c == "\0":
        return "a NUL"
    if "\ud800" <= c <= "\udfff":
        return f"half of a surrogate pair (U+{ord(c):04X})"
    return f"a control character (U+{ord(c):04X})"


def _name(value: object, what: str) -> str:
    """A speaker, session or ref: one line of at most `MAX_NAME` characters, stripped."""
    name = _text(value, what).strip()
    if "\n" in name or "\t" in name:
        raise BadInput(f"the {what} {_SHOWN.repr(name)} has more than one line or a tab")
    if len(name) > MAX_NAME:
        raise BadInput(f"the {what} has {len(name)} characters, at most {MAX_NAME} are allowed")
    return name


def _ref(value: object) -> str:
    # Exports number their turns as often as they name them.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _name(value, "ref")


def _role(value: object) -> Role:
    for role in ROLES:
        if role == value:
            return role
    raise BadInput(f"unknown role {_SHOWN.repr(value)}", hint=f"a role is {', '.join(ROLES)}")


def _when(value: object) -> datetime:
    if isinstance(value, datetime):
        at = value
    elif isinstance(value, date):
        at = datetime.combine(value, time.min)
    elif isinstance(value, str):
        at = dates.parse_when(_name(value, "time"))
    else:
        raise BadInput(f"a time is text, a date or a datetime, not {type(value).__name__}")
    try:
        at.utctimetuple()  # the first and the last day of the calendar do not exist in every time zone
    except OverflowError as error:
        raise BadInput(f"a time outside of the calendar: {at.isoformat()}") from error
    return at


def day(text: str | None, name: str) -> date | None:
    """A calendar day from an option called `name`.

    Raises:
        BadInput: it is no day.
    """
    if text is None:
        return None
    try:
        return date.fromisoformat(text.strip())
    except ValueError as error:
        raise BadInput(f"{name} {text!r} is no day", hint="write it as 2024-05-31") from error

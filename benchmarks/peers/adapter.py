"""The peer's side of the conversation with the benchmark: one JSON object a line, a request in, a reply out.

    {"do": "open", "folder": ..., "url": ..., "model": ..., "embedder": ..., "dimension": ..., "by_model": ...}
    {"do": "ingest", "turns": [{"text", "role", "speaker", "said", "session", "ref"}, ...]}
    {"do": "evidence", "question": ..., "items": ...}
    {"do": "usage"}

Each reply is {"done": ..., "refused": [...]}. An error is not caught: the process dies of it, its traceback is in the
log, and whoever asked reads that. What a library prints goes to the log too.

Owns that form. Standard library alone: it is run by the interpreters of peers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.peers import confine

Line = dict[str, Any]


class Adapter(Protocol):
    """A peer that has one conversation open. `turns_at_once` is how many turns it is handed at a time, all of one
    session."""

    turns_at_once: int

    def ingest(self, turns: list[Line]) -> None: ...

    def evidence(self, question: str, items: int) -> list[Line]:
        """At most so many of each kind of what it keeps, best first: `id`, `kind` (record, turn or window), `text`,
        `score`, `session`, `refs`, `said`, and `traced`: whether the item's text is that of the turns in `refs` or was
        made from nothing else. Untraced items have no evidence scores."""
        ...

    def usage(self) -> Line:
        """What it keeps (`memories`), and the turns that it could not take in (`lost`), or took in and kept nothing of
        (`empty`)."""
        ...


def serve(opened: Callable[[Line], Adapter]) -> None:
    """Answer requests until there are none."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    adapter: Adapter | None = None
    for line in sys.stdin:
        request = json.loads(line)
        done: object
        if request["do"] == "open":
            adapter = opened(request)
            done = {"turns_at_once": adapter.turns_at_once}
        else:
            assert adapter is not None, "nothing is open"
            done = _done(adapter, request)
        replies.write(json.dumps({"done": done, "refused": list(confine.refused)}, ensure_ascii=False) + "\n")
        replies.flush()


def _done(adapter: Adapter, request: Line) -> object:
    if request["do"] == "ingest":
        adapter.ingest(request["turns"])
        return {}
    if request["do"] == "evidence":
        return adapter.evidence(request["question"], request["items"])
    if request["do"] == "usage":
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return adapter.usage() | {"peak_mb": most // (1 << 20 if sys.platform == "darwin" else 1 << 10)}
    raise ValueError(f"no request {request['do']!r}")


def line(turn: Line) -> str:
    """A turn as it is embedded and shown everywhere else: the name, a colon, the words."""
    prefix = f"{turn['speaker'] or turn['role']}: "
    text: str = turn["text"]
    return text if text.startswith(prefix) else prefix + text

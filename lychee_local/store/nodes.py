"""Index entries that point to records, made from record metadata without any model (docs/method.md 3).

Owns keys and which nodes a record and a segment give. Knows no vectors, no files.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import monthrange
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache
from itertools import chain

from lychee_local.types import DateSpan, Node, NodeKind, Record, Segment

Key = tuple[NodeKind, str]

VECTOR_KINDS: tuple[NodeKind, ...] = ("entity", "topic", "entity_topic", "event_frame")
FRAME_SENTENCES = 12  # of an event frame's records, in the text that is embedded for it (docs/method.md 3.4)

_SEPARATORS = re.compile(r"[\s\-_:/\\|,;－＿：／＼｜，；]+")


@lru_cache(maxsize=65_536)  # terms repeat: opening a large memory would spend much of its time here
def normalise_key(term: str) -> str:
    """The key under which spellings of one term meet (docs/method.md 3.2); empty where nothing is left.

    Combining marks count as word characters: without them words of Hindi, Arabic or Thai would fall together.
    """
    folded = _SEPARATORS.sub(" ", unicodedata.normalize("NFC", unicodedata.normalize("NFC", term).casefold()))
    kept = (c for c in folded if c == " " or unicodedata.category(c)[0] in "LMN")
    return " ".join("".join(kept).split())


def unique_terms(terms: Iterable[str]) -> tuple[str, ...]:
    """Stripped, inner blanks merged, the first spelling of each case-insensitive term, in order; no blank ones."""
    seen: dict[str, str] = {}
    for term in terms:
        clean = " ".join(term.split())
        if clean:
            seen.setdefault(clean.casefold(), clean)
    return tuple(seen.values())


def nodes_of_record(record: Record) -> tuple[Node, ...]:
    """Every node that `record` belongs to except its event frame, once each: entities, topics (its tags and its type),
    their pairs, dates."""
    entities = _keyed(record.entities)
    topics = _keyed((*record.tags, record.kind))
    linked = (record.id,)
    nodes = [Node("entity", key, label, linked) for key, label in entities.items()]
    nodes += [Node("topic", key, label, linked) for key, label in topics.items()]
    nodes += [
        Node("entity_topic", f"{entity_key}::{topic_key}", f"{entity}: {topic}", linked)
        for entity_key, entity in entities.items()
        for topic_key, topic in topics.items()
    ]
    spans = dict.fromkeys(span for said in _spans(record) for span in _temporal_spans(said))
    nodes += [Node("temporal", f"{s.precision}:{s}", str(s), linked, s) for s in spans]
    return tuple(nodes)


def event_frame(segment_id: str, records: Sequence[Record]) -> Node:
    """The node of a whole segment; its key is the segment's own place, so two segments never share one."""
    place = segment_id.removeprefix("segment:")
    return Node("event_frame", place, place, tuple(dict.fromkeys(r.id for r in records)))


def nodes_of_encoding(segment: Segment, records: Sequence[Record]) -> tuple[Node, ...]:
    """All nodes that one encoding touches, merged, each with the records it gets from this encoding."""
    merged: dict[Key, list[Node]] = {}
    for record in records:
        for node in nodes_of_record(record):
            merged.setdefault((node.kind, node.key), []).append(node)
    nodes = [
        same[0] if len(same) == 1 else replace(same[0], records=_union(n.records for n in same))
        for same in merged.values()
    ]
    return (*nodes, event_frame(segment.id, records)) if records else ()


def label_text(node: Node, records: Sequence[Record]) -> str:
    """What is embedded for a node when it is first met: its label, or the sentences of its segment."""
    if node.kind == "event_frame":
        return "\n".join(r.text for r in records[:FRAME_SENTENCES])
    return node.label


def _keyed(terms: Iterable[str]) -> dict[str, str]:
    """Key to first spelling; terms without a key give no node."""
    keyed: dict[str, str] = {}
    for term in unique_terms(terms):
        key = normalise_key(term)
        if key:
            keyed.setdefault(key, term)
    return keyed


def _spans(record: Record) -> tuple[DateSpan, ...]:
    """The dates of a record, and the time between "valid from" and "valid to", so that a day inside it finds it."""
    said = record.temporal.spans
    since, until = record.temporal.t_valid_from, record.temporal.t_valid_to
    if since is None or until is None or until.end <= since.end:
        return said
    return (*said, DateSpan(since.start, until.end, "interval"))


def _temporal_spans(said: DateSpan) -> tuple[DateSpan, ...]:
    """The spans of the nodes for one date.

    A day also gets its month (docs/method.md 3.1); a month gets no year, or every question about a year would pull in
    all of its records.
    """
    year, month = said.start.year, said.start.month
    if said.precision == "interval":
        return (said,)
    if said.precision == "year":
        return (DateSpan(date(year, 1, 1), date(year, 12, 31), "year"),)
    whole_month = DateSpan(date(year, month, 1), date(year, month, monthrange(year, month)[1]), "month")
    if said.precision == "month":
        return (whole_month,)
    return (DateSpan(said.start, said.start, "day"), whole_month)


def _union(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(groups)))

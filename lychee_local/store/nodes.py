"""Index entries that point to records, made from record metadata without any model (docs/method.md 3).

Owns keys, which nodes a record and a segment give, and which records each node points to. Knows no vectors, no files.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import monthrange
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from itertools import chain, islice

from lychee_local.types import DateSpan, Node, NodeKind, Record, Segment, TimeRange

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


def event_frame(segment: Segment, records: Sequence[Record]) -> Node:
    """The node of a whole segment; its key is the segment's own place, so two segments never share one."""
    place = segment.id.removeprefix("segment:")
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
    return (*nodes, event_frame(segment, records)) if records else ()


def label_text(node: Node, records: Sequence[Record]) -> str:
    """What is embedded for a node when it is first met: its label, or the sentences of its segment."""
    if node.kind == "event_frame":
        return "\n".join(r.text for r in records[:FRAME_SENTENCES])
    return node.label


@dataclass(slots=True)
class Entry:
    """A node in the making: `head` is as it was first met, `records` an ordered set of all it points to. The id, a
    hash, is kept because a node is met far more often than it is made."""

    id: str
    head: Node
    records: dict[str, None]

    def node(self) -> Node:
        return Node(self.head.kind, self.head.key, self.head.label, tuple(self.records), self.head.when)

    def latest(self, count: int) -> list[str]:
        """The records linked last, at most `count`."""
        return list(islice(reversed(self.records), count))


class Nodes:
    """Every node of one memory and the records each points to, in the order they were linked."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Entry] = {}
        self._by_id: dict[str, Entry] = {}
        self._of_record: dict[str, list[Entry]] = {}
        self._temporal: list[Entry] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def holds(self, node: Node) -> bool:
        return (node.kind, node.key) in self._by_key

    def create(self, node: Node) -> Entry:
        entry = Entry(node.id, node, {})
        self._by_key[node.kind, node.key] = self._by_id[entry.id] = entry
        if node.kind == "temporal":
            self._temporal.append(entry)
        return entry

    def link(self, node: Node) -> Entry:
        """Add `node.records` to the node of this kind and key, which is created where it is new."""
        entry = self._by_key.get((node.kind, node.key)) or self.create(node)
        for record in node.records:
            if record not in entry.records:
                entry.records[record] = None
                self._of_record.setdefault(record, []).append(entry)
        return entry

    def entry(self, node_id: str) -> Entry:
        """Raises KeyError for an unknown id."""
        return self._by_id[node_id]

    def of_record(self, record_id: str) -> Sequence[Entry]:
        return self._of_record.get(record_id, ())

    def all(self, kind: NodeKind | None) -> tuple[Node, ...]:
        """In the order of first meeting; dates last when every kind is asked for."""
        if kind == "temporal":
            return tuple(entry.node() for entry in self._temporal)
        wanted = VECTOR_KINDS if kind is None else (kind,)
        chosen = tuple(entry.node() for entry in self._by_key.values() if entry.head.kind in wanted)
        return chosen + (self.all("temporal") if kind is None else ())

    def overlapping(self, when: TimeRange) -> tuple[Node, ...]:
        """Temporal nodes whose span overlaps `when`, by first day, then by last, then by id."""
        spans = ((entry.head.when, entry) for entry in self._temporal)
        found = [(s.start, s.end, e.id, e) for s, e in spans if s is not None and when.overlaps(s.start, s.end)]
        return tuple(entry.node() for _, _, _, entry in sorted(found, key=lambda item: item[:3]))


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

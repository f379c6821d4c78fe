"""Index entries that point to records, made from record metadata without any model (lychee-method 3).

Owns keys, which nodes a record and a segment give, and which records each node points to. Knows no vectors, no files.
"""

from __future__ import annotations

import re
import unicodedata
from calendar import monthrange
from collections.abc import Iterable, Sequence
from datetime import date

from lychee_local.types import DateSpan, Node, NodeKind, Record, Segment, TimeRange

VECTOR_KINDS: tuple[NodeKind, ...] = ("entity", "topic", "entity_topic", "event_frame")
FRAME_SENTENCES = 12  # of an event frame's records, in the text that is embedded for it (lychee-method 3.4)

_SEPARATORS = re.compile(r"[\s\-_:/\\|,;－＿：／＼｜，；]+")


def normalise_key(term: str) -> str:
    """The key under which spellings of one term meet (lychee-method 3.2); empty where nothing is left.

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
    """All nodes that one encoding touches, merged by id, each with the records it gets from this encoding."""
    merged: dict[str, Node] = {}
    for record in records:
        for node in nodes_of_record(record):
            met = merged.get(node.id, node)
            merged[node.id] = Node(met.kind, met.key, met.label, _union(met.records, node.records), met.when)
    if records:
        frame = event_frame(segment, records)
        merged[frame.id] = frame
    return tuple(merged.values())


def label_text(node: Node, records: Sequence[Record]) -> str:
    """What is embedded for a node when it is first met: its label, or the sentences of its segment."""
    if node.kind == "event_frame":
        return "\n".join(r.text for r in records[:FRAME_SENTENCES])
    return node.label


class Nodes:
    """Every node of one memory and the records each points to, in the order they were linked."""

    def __init__(self) -> None:
        self._heads: dict[str, Node] = {}  # as created: kind, key, first spelling, span
        self._links: dict[str, dict[str, None]] = {}  # node id -> record ids, an ordered set
        self._of_record: dict[str, list[str]] = {}
        self._temporal: list[str] = []

    def __len__(self) -> int:
        return len(self._heads)

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._heads

    def create(self, node: Node) -> None:
        self._heads[node.id] = node
        self._links[node.id] = {}
        if node.kind == "temporal":
            self._temporal.append(node.id)

    def link(self, node: Node) -> None:
        """Add `node.records` to the node of this id."""
        links = self._links[node.id]
        for record in node.records:
            if record not in links:
                links[record] = None
                self._of_record.setdefault(record, []).append(node.id)

    def get(self, node_id: str) -> Node:
        head = self._heads[node_id]
        return Node(head.kind, head.key, head.label, tuple(self._links[node_id]), head.when)

    def kind(self, node_id: str) -> NodeKind:
        return self._heads[node_id].kind

    def of_record(self, record_id: str) -> Sequence[str]:
        return self._of_record.get(record_id, ())

    def latest(self, node_id: str, count: int) -> tuple[str, ...]:
        """The `count` records linked last, oldest first."""
        links = reversed(self._links[node_id])
        return tuple(record for record, _ in zip(links, range(count), strict=False))[::-1]

    def all(self, kind: NodeKind | None) -> tuple[Node, ...]:
        """In the order of first meeting; dates last when every kind is asked for."""
        if kind == "temporal":
            return tuple(self.get(i) for i in self._temporal)
        chosen = tuple(
            self.get(i) for i, n in self._heads.items() if n.kind == kind or (kind is None and n.when is None)
        )
        return chosen + (self.all("temporal") if kind is None else ())

    def overlapping(self, when: TimeRange) -> tuple[Node, ...]:
        """Temporal nodes whose span overlaps `when`, by first day, then by length, then by id."""
        spans = ((n.when, n.id) for n in map(self._heads.__getitem__, self._temporal) if n.when is not None)
        found = sorted((s.start, s.end, i) for s, i in spans if when.overlaps(s.start, s.end))
        return tuple(self.get(i) for _, _, i in found)


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
    """The spans of the nodes for one date. A day also gets its month, as in lychee-method 3.1; a month does not get its
    year, or every question about a year would pull in all of its records."""
    year, month = said.start.year, said.start.month
    if said.precision == "interval":
        return (said,)
    if said.precision == "year":
        return (DateSpan(date(year, 1, 1), date(year, 12, 31), "year"),)
    whole_month = DateSpan(date(year, month, 1), date(year, month, monthrange(year, month)[1]), "month")
    if said.precision == "month":
        return (whole_month,)
    return (DateSpan(said.start, said.start, "day"), whole_month)


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))

"""What goes when something is to be forgotten: the turns and records that were chosen, and all that was made from them.

Owns the rules of that. A segment with a forgotten turn loses its records and is encoded anew from what is left of it,
since a model may have mixed what its turns say. Words that were said only in the forgotten turns must not stay in what
was made from other turns of the session, whose encoder saw them in its reference context. Decides; changes nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from lychee_local.echoes import words_of
from lychee_local.errors import BadInput, there_are
from lychee_local.lexicon import terms
from lychee_local.store.catalogue import Catalogue
from lychee_local.store.codec import ForgottenLine
from lychee_local.store.nodes import VECTOR_KINDS, nodes_of_record
from lychee_local.types import Node, Record, Segment, Turn

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to forget: turns by id, or records by id, or every turn that meets all of the other conditions.

    `before` chooses turns said before that calendar day; a turn without a time is before no day. `matching` chooses
    turns whose text contains it, and records whose text, entities or tags do, whatever the case and the width of the
    letters.
    """

    session: str | None = None
    turns: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    speaker: str | None = None
    before: date | None = None
    matching: str | None = None

    def __post_init__(self) -> None:
        conditions = [c for c in (self.session, self.speaker, self.before, self.matching) if c is not None]
        chosen = bool(self.turns) + bool(self.records) + bool(conditions)
        if chosen != 1:
            raise BadInput(
                "nothing is chosen to be forgotten"
                if not chosen
                else "turn ids, record ids and conditions exclude each other",
                hint="choose by turn ids, or by record ids, or by conditions: session, speaker, before, matching",
            )
        if self.matching is not None and not folded(self.matching).strip():
            raise BadInput("a blank text matches everything", hint="to forget everything, remove the user's folder")


@dataclass(slots=True)
class Victims:
    """What goes: turns and records as they were, the line that takes them back, and the segments that wait again."""

    turns: list[Turn] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    waiting: list[Segment] = field(default_factory=list)
    line: ForgottenLine = field(default_factory=ForgottenLine)
    record_rows: list[int] = field(default_factory=list)


def folded(text: str) -> str:
    """Case, width and the two ways to write an accent do not matter."""
    return unicodedata.normalize("NFKC", text).casefold()


def victims(catalogue: Catalogue, selection: Selection, *, on_progress: Report | None = None) -> Victims:
    """What `selection` chooses and what goes with it.

    Raises:
        BadInput: a turn or record that does not exist, or a session or speaker that nobody knows.
    """
    return _Search(catalogue, on_progress or (lambda done, total: None)).run(selection)


class _Search:
    def __init__(self, catalogue: Catalogue, report: Report) -> None:
        self._catalogue = catalogue
        self._report = report
        self._turns: dict[int, Turn] = {}
        self._encodings: set[int] = set()
        self._rows: set[int] = set()
        self._notes: set[int] = set()

    def run(self, selection: Selection) -> Victims:
        self._choose(selection)
        by_session: dict[str, dict[int, int]] = {}  # session -> index -> number
        for number, turn in self._turns.items():
            by_session.setdefault(turn.session, {})[turn.index] = number
        decisions: list[int] = []
        segments: list[int] = []
        waiting: list[Segment] = []
        following: list[tuple[str, int]] = []
        for session, gone in by_session.items():
            left = [n for n in self._catalogue.turn_numbers(session, 0, None) if n not in self._turns]
            following.append((session, self._catalogue.following(session) if left else 0))
            decisions += self._catalogue.decisions_about(session, sorted(gone))
            indexes = {self._catalogue.turn(n).index for n in left}
            for number in self._catalogue.segments_about(session, sorted(gone)):
                segment = self._catalogue.segment(number)
                if indexes.isdisjoint(range(segment.start, segment.end + 1)):
                    segments.append(number)
                else:
                    waiting.append(segment)
                self._withdraw(segment)
            waiting += self._made_with(session, gone, left)
        rows = self._all_rows()
        waiting = [s for s in dict.fromkeys(waiting) if self._catalogue.segment_number(s.id) not in segments]
        return self._victims(rows, decisions, segments, waiting, following)

    # --- the choice --------------------------------------------------------------------------------------------------

    def _choose(self, selection: Selection) -> None:
        if selection.turns:
            for identifier in selection.turns:
                number = self._catalogue.turn_number(identifier)
                if number is None:
                    raise BadInput(f"there is no turn {identifier!r}", hint="what `show` lists has its id with it")
                self._turns[number] = self._catalogue.turn(number)
            return
        if selection.records:
            for identifier in selection.records:
                number = self._catalogue.record_number(identifier)
                if number is None:
                    raise BadInput(
                        f"there is no record {identifier!r}", hint="what `show --records` lists has its id with it"
                    )
                self._forget_record(number)
            return
        if selection.session is not None and selection.session not in self._catalogue.sessions():
            raise BadInput(f"there is no session {selection.session!r}", hint=there_are(self._catalogue.sessions()))
        if selection.speaker is not None and selection.speaker not in self._catalogue.speakers():
            raise BadInput(
                f"nobody called {selection.speaker!r} speaks here", hint=there_are(self._catalogue.speakers())
            )
        sessions = self._catalogue.sessions() if selection.session is None else (selection.session,)
        needle = None if selection.matching is None else folded(selection.matching)
        for done, session in enumerate(sessions):
            self._report(done, len(sessions))
            for number in self._catalogue.turn_numbers(session, 0, None):
                turn = self._catalogue.turn(number)
                if _chosen(turn, selection, needle):
                    self._turns[number] = turn
            if needle is not None:
                for number in self._catalogue.record_numbers(session):
                    record = self._catalogue.record(number)
                    if self._may_hold(record, selection) and needle in folded(_words(record)):
                        self._forget_record(number)

    def _may_hold(self, record: Record, selection: Selection) -> bool:
        """Whether the other conditions choose a record that matches by itself."""
        if selection.speaker is not None and record.speaker != selection.speaker:
            return False
        said = None if record.said is None else record.said.date()
        return selection.before is None or (said is not None and said < selection.before)

    def _forget_record(self, number: int) -> None:
        self._rows.update(self._catalogue.rows_of_record(number))
        record = self._catalogue.record(number)
        for encoding in self._catalogue.noted(record.session):
            if folded(record.text) in folded(self._catalogue.encoding(encoding).note):
                self._notes.add(encoding)

    # --- what goes with it -------------------------------------------------------------------------------------------

    def _withdraw(self, segment: Segment) -> None:
        encoding = self._catalogue.encoding_of(segment.id)
        if encoding is not None:
            self._encodings.add(encoding)

    def _made_with(self, session: str, gone: Mapping[int, int], left: Sequence[int]) -> list[Segment]:
        """Segments of `session` whose records rest on turns of `gone` (index to number), or use words that only those
        say; notes that do are blanked."""
        said: set[str] = set()
        for number in gone.values():
            said |= words_of(self._catalogue.turn(number).line)
        for number in left:
            said -= words_of(self._catalogue.turn(number).line)
        found = []
        for number, records in self._catalogue.encoded(session).items():
            if any(not gone.keys().isdisjoint(r.turns) or not said.isdisjoint(terms(_words(r))) for r in records):
                found.append(self._catalogue.segment(number))
                self._withdraw(found[-1])
        for encoding in self._catalogue.noted(session):
            if not said.isdisjoint(terms(self._catalogue.encoding(encoding).note)):
                self._notes.add(encoding)
        return found

    def _all_rows(self) -> set[int]:
        rows = set(self._rows)
        for encoding in self._encodings:
            rows.update(self._catalogue.rows_of_encoding(encoding))
        return rows

    def _victims(
        self,
        rows: set[int],
        decisions: Sequence[int],
        segments: Sequence[int],
        waiting: list[Segment],
        following: Sequence[tuple[str, int]],
    ) -> Victims:
        said = self._catalogue.records_of_rows(sorted(rows))
        touched: dict[str, Node] = {n.id: n for record in said for n in nodes_of_record(record)}
        gone_nodes, labels = [], self._catalogue.frame_labels(sorted(self._rows))
        for node in touched.values():
            number = self._catalogue.node_number(node.id)
            if number is None:
                continue
            label, vector, spelled = self._catalogue.node_label(number), self._catalogue.node_vector(number), False
            left = False
            for record in self._catalogue.linked(number, without=rows):
                spellings = [n.label for n in nodes_of_record(record) if n.id == node.id]
                left, spelled = left or bool(spellings), label in spellings
                if spelled:
                    break
            if not left:
                gone_nodes.append(node)
            elif not spelled and vector is not None and node.kind in VECTOR_KINDS:
                labels.append(vector)
        line = ForgottenLine(
            turns=tuple(sorted(self._turns)),
            decisions=tuple(sorted(decisions)),
            segments=tuple(sorted(segments)),
            encodings=tuple(sorted(self._encodings)),
            records=tuple(sorted(rows - {r for e in self._encodings for r in self._catalogue.rows_of_encoding(e)})),
            notes=tuple(sorted(self._notes - self._encodings)),
            labels=tuple(sorted(set(labels))),
            following=tuple(following),
        )
        turns = [self._turns[n] for n in sorted(self._turns)]
        return Victims(turns, said, gone_nodes, waiting, line, sorted(rows))


def _words(record: Record) -> str:
    """All that a record says, its terms on lines of their own."""
    return "\n".join((record.text, *record.entities, *record.tags))


def _chosen(turn: Turn, selection: Selection, needle: str | None) -> bool:
    if selection.speaker is not None and turn.speaker != selection.speaker:
        return False
    if selection.before is not None and (turn.at is None or turn.at.date() >= selection.before):
        return False
    return needle is None or needle in folded(turn.text)

"""Tables of texts as Markdown. What is in a cell may come from a stranger's data file: it stays in its cell."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def markdown(table: Table) -> str:
    """With its title as a heading and its note below; columns are aligned, numbers to the right."""
    cells = [[cell(each) for each in row] for row in (table.head, *table.rows)]
    wide = [max(3, *(len(row[n]) for row in cells)) for n in range(len(table.head))]
    head, *rows = (_row(row, wide) for row in cells)
    ruler = "| " + " | ".join("-" * wide[0] if n == 0 else "-" * (wide[n] - 1) + ":" for n in range(len(wide))) + " |"
    below = f"\n\n{plain(table.note, 2_000)}" if table.note else ""
    return "\n".join([f"## {plain(table.title)}", "", head, ruler, *rows]) + below


def cell(text: str) -> str:
    """As it may stand between bars: a viewer takes none of it for markup."""
    return plain(text).replace("|", "\\|").replace("<", "&lt;")


def plain(text: str, length: int = 200) -> str:
    """One line without control characters, escapes of a terminal or marks of direction, cut where it is too long."""
    seen = "".join(each if unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " " for each in text)
    return seen if len(seen) <= length else f"{seen[: length - 3]}..."


def _row(cells: Sequence[str], wide: Sequence[int]) -> str:
    first, *others = cells
    return f"| {first:<{wide[0]}} | " + " | ".join(f"{text:>{wide[n]}}" for n, text in enumerate(others, 1)) + " |"

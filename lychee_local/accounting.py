"""What the calls of language models cost, summed by what they were for, by model, by session or by day.

Owns the sums. What one call cost is measured by the adapter that made it, and kept by the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from lychee_local.types import Spent, Usage

Grouping = Literal["purpose", "model", "session", "day"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)


def spent(usage: Iterable[Usage], by: Grouping) -> dict[str | None, Spent]:
    """The calls of each group, in order of their first call; days and sessions in order. None is the group of the calls
    that have no session, because they were for a question, or whose day was not kept."""
    sums: dict[str | None, Spent] = {}
    for u in usage:
        group = _group(u, by)
        s = sums.get(group, Spent(0, 0, 0, 0, 0.0))
        sums[group] = Spent(
            s.calls + 1,
            s.prompt_tokens + u.prompt_tokens,
            s.cached_tokens + u.cached_tokens,
            s.output_tokens + u.output_tokens,
            s.seconds + u.seconds,
        )
    return sums


def _group(usage: Usage, by: Grouping) -> str | None:
    if by == "day":
        return None if usage.at is None else usage.at.date().isoformat()
    return {"purpose": usage.purpose, "model": usage.model, "session": usage.session}[by]

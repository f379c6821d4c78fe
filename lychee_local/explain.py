"""A recall's trace as a person reads it: the plan, the channels, what became of each candidate, the chains, the time.

Owns the layout. Everything that is left out here to stay readable is in the trace itself, and in `--json`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lychee_local import screen
from lychee_local.trace import Fate, Trace
from lychee_local.types import Answer, Chain, Plan, Recall, TimeRange

BEST_SHOWN, DROPPED_SHOWN = 3, 30
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{16}$")


def explain(found: Recall | Answer) -> None:
    """Print how `found` came about; nothing where it has no trace."""
    if found.trace is None:
        return
    _plan(found.plan)
    _channels(found.trace)
    _candidates(found.trace)
    _chains(found.chains)
    _seconds(found.trace)


def _plan(plan: Plan) -> None:
    made = {"llm": "by the language model", "rules": "by rules", "none": "none was made"}[plan.source]
    said = f"{plan.question_type}; {made}; looking for {_quoted(plan.target)}"
    screen.out.print(Text.assemble(("\nplan  ", "bold"), said))
    if plan.doubts:
        because = "the model was asked, since" if plan.source == "llm" else "rules are unsure here:"
        screen.out.print(Text(f"  {because} {'; '.join(plan.doubts)}", style="dim"))
    for route in plan.routes:
        parts = ["; ".join(_quoted(text) for text in plan.variants(route))]
        parts += [f"{c.kind}: {screen.one_line(c.value)}" for c in route.constraints]
        parts += [_range(when) for when in (route.when or plan.when,) if when is not None]
        screen.out.print(Text.assemble((f"  {screen.one_line(route.id)}  ", "cyan"), "; ".join(parts)))


def _range(when: TimeRange) -> str:
    return f"from {when.since or 'the beginning'} to {when.until or 'the end'}"


def _quoted(text: str) -> str:
    line = screen.one_line(text)
    return f'"{line}"' if len(line) <= 100 else f'"{line[:100]}" ... ({screen.number(len(line))} characters)'


def _channels(trace: Trace) -> None:
    table = _table("route", "channel", "found", "score", "best", "searched for")
    for c in trace.channels:
        best = ", ".join(f"{_short(hit.id)} {hit.score:.2f}" for hit in c.hits[:BEST_SHOWN])
        query = screen.one_line(c.query)[:50]
        where = Text(screen.one_line(c.route))
        table.add_row(where, c.channel, screen.number(len(c.hits)), c.scale, Text(best), Text(query))
    _titled("channels", table)


def _candidates(trace: Trace) -> None:
    stages = list(dict.fromkeys(ranking.stage for ranking in trace.rankings))
    table = _table("", "candidate", "ranks", "why", "text")
    kept = [fate for fate in trace.candidates if fate.kept]
    dropped = [fate for fate in trace.candidates if not fate.kept]
    for fate in (*kept, *dropped[:DROPPED_SHOWN]):
        mark = Text("kept", style="green") if fate.kept else Text("dropped", style="red")
        ranks = " ".join(str(fate.ranks.get(stage, "-")) for stage in stages)
        table.add_row(mark, Text(_short(fate.id)), ranks, _why(fate), Text(screen.one_line(fate.text)[:60]))
    _titled(f"candidates, with their ranks after {', '.join(stages)}", table)
    if len(dropped) > DROPPED_SHOWN:
        more = screen.count(len(dropped) - DROPPED_SHOWN, "more candidate")
        screen.out.print(Text(f"  and {more} dropped earlier: --json has them all", style="dim"))


def _why(fate: Fate) -> Text:
    return Text(f"{fate.stage}: {screen.visible(fate.reason)}" if fate.stage else "")


def _short(identifier: str) -> str:
    """An id without most of its digest, if it ends in one."""
    return _DIGEST.sub(r"\1", screen.one_line(identifier))


def _chains(chains: Sequence[Chain]) -> None:
    ends = {"length": "it is as long as allowed", "pool": "nothing was left"}
    for number, chain in enumerate(chains, 1):
        links = (f"{_short(link.id)} {link.gate:.2f}" for link in chain.links)
        end = ends.get(chain.ended, f"the best gate left, {chain.refused:.2f}, fell too far")
        line = (f"\nchain {number}  ", "bold"), " -> ".join(links), (f"  ended: {end}", "dim")
        screen.out.print(Text.assemble(*line))


def _seconds(trace: Trace) -> None:
    laps = (f"{stage} {1000 * spent:.1f}" for stage, spent in trace.seconds.items())
    total = 1000 * sum(trace.seconds.values())
    screen.out.print(Text.assemble(("\nmilliseconds  ", "bold"), f"{', '.join(laps)}; {total:.1f} in all"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        # What an explanation is read for is never shortened; texts are, where the terminal is narrow.
        table.add_column(column, justify="right" if column == "found" else "left", no_wrap=column in ("text", "best"))
    return table


def _titled(title: str, table: Table) -> None:
    screen.out.print(Text(f"\n{title}", style="bold"))
    screen.out.print(table)

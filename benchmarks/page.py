"""One HTML file on which every question of some runs can be found, opened and compared.

It needs no network and no other file. The data are strangers' texts: they reach the page as JSON without a `<`, and as
compressed blocks, are set as text, and the page's policy allows no script but its own (page.html) and no connection.
Questions are listed from an index; what a run made of one is unpacked when it is opened.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import folder, results
from benchmarks.environment import sha256
from benchmarks.folder import Line
from benchmarks.markdown import Table
from benchmarks.results import OUTCOMES, Run

TEMPLATE = Path(__file__).with_name("page.html")
BLOCK = 50  # lines that are unpacked together
Turn = tuple[str, str, str]  # data set, conversation, ref
SEEN = 400  # characters of a text in the index: of questions to be listed, of answers and replies to be searched


def write(
    runs: Sequence[Run], tables: Sequence[Table], apart: Sequence[str], plots: Sequence[Path], path: Path
) -> Path:
    """The page of these runs, with their tables and plots.

    Raises:
        OSError: it cannot be written.
    """
    shown: Line = {
        "runs": [run.name for run in runs],
        "outcomes": OUTCOMES,
        "apart": list(apart),
        "tables": [asdict(table) for table in tables],
        "plots": [{"name": plot.stem, "source": _image(plot)} for plot in plots],
        "questions": list(_index(runs)),
    }
    before, between, after = _template()
    gold = _gold(runs)
    with path.open("w", encoding="ascii") as file:
        file.write(before + _json(shown) + between)
        for number, lines in enumerate(block for run in runs for block in _blocks(run, gold)):
            file.write(f'<script id="block-{number}" type="text/plain">{_packed(lines)}</script>\n')
        file.write(after)
    return path


def _template() -> tuple[str, str, str]:
    """The page before its index, from there to the blocks, and after them. Its policy allows its script alone."""
    page = TEMPLATE.read_text(encoding="ascii")
    allowed = " ".join(f"{kind}-src '{_hash(page, tag)}';" for kind, tag in (("script", "script"), ("style", "style")))
    page = page.replace(
        "__POLICY__", f"default-src 'none'; img-src data:; {allowed} base-uri 'none'; form-action 'none'"
    )
    before, rest = page.split("__INDEX__")
    between, after = rest.split("__BLOCKS__\n")
    return before, between, after


def _hash(page: str, tag: str) -> str:
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}"


def _index(runs: Sequence[Run]) -> Iterator[Line]:
    """What is listed and searched, by question. Runs share one if data, id, text and answer are the same."""
    accuracy = results.accuracy(runs)
    found: dict[tuple[str, ...], Line] = {}
    first_block = 0
    for n, run in enumerate(runs):
        outcomes = results.outcomes(run, accuracy)
        for place, line in enumerate(run.lines):
            key = (run.about["data"], line["id"], line["question"], line["answer"])
            entry = found.setdefault(key, _entry(line, len(runs)))
            entry["outcomes"][n] = outcomes[line["id"]]
            entry["at"][n] = [first_block + place // BLOCK, place % BLOCK]
            entry["searched"] += f" {(line.get('reply') or line['error'])[:SEEN]}"
        first_block += -(-len(run.lines) // BLOCK)
    yield from found.values()


def _entry(line: Line, runs: int) -> Line:
    told = {name: line[name] for name in ("id", "conversation", "category")}
    searched = " ".join(line[name][:SEEN] for name in ("id", "question", "answer"))
    of_runs: Line = {"outcomes": [None] * runs, "at": [None] * runs}
    return told | {"text": line["question"][:SEEN], "searched": searched} | of_runs


def _blocks(run: Run, gold: Mapping[Turn, str]) -> Iterator[list[Line]]:
    for start in range(0, len(run.lines), BLOCK):
        yield [line | _beside(run, line, gold) for line in run.lines[start : start + BLOCK]]


def _beside(run: Run, line: Line, gold: Mapping[Turn, str]) -> Line:
    """What the judges said of an answer, and the gold turns that no item of the evidence shows."""
    shown = {ref for item in line.get("evidence", ()) for ref in item["refs"]}
    turns = {ref: (run.about["data"], line["conversation"], ref) for ref in line["gold"] if ref not in shown}
    return {
        "verdicts": {judge: said[line["id"]] for judge, said in run.verdicts.items() if line["id"] in said},
        "missed": {ref: gold.get(turn) for ref, turn in turns.items()},
    }


def _gold(runs: Sequence[Run]) -> dict[Turn, str]:
    """What was said in the gold turns, as far as the data set's file is still where a run has read it, unchanged."""
    found: dict[Turn, str] = {}
    wanted = {
        (run.about["data"], line["conversation"], ref) for run in runs for line in run.lines for ref in line["gold"]
    }
    for run in runs:
        data, setup = run.about["data"], folder.setup_of(run.about)
        missing = {turn[1] for turn in wanted if turn[0] == data} - {turn[1] for turn in found if turn[0] == data}
        path = Path(setup.data)
        if not missing or not path.is_file() or sha256(path) != data:
            continue
        here = replace(setup, conversations=tuple(sorted(missing)), corrections=None, adversarial=False)
        for conversation in here.read(lambda _: None):
            for message in conversation.messages:
                turn = (data, conversation.id, message.ref or "")
                if turn in wanted:
                    found[turn] = f"{message.speaker or message.role}: {message.text}"
    return found


def _packed(lines: list[Line]) -> str:
    return base64.b64encode(gzip.compress(json.dumps(lines).encode(), mtime=0)).decode()


def _image(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _json(value: Line) -> str:
    """ASCII without `<`, so that nothing in it can end the element that it stands in, or begin another."""
    return json.dumps(value).replace("<", "\\u003c")

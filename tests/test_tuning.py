"""How many threads a model gets: what is tried, what is chosen, and when a choice no longer holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminal import Lychee

from lychee_local import cards, tuning
from lychee_local.backends.llama import LlamaLLM
from lychee_local.backends.native import cores, processors, quota
from lychee_local.cards import Card
from lychee_local.engines import Engines
from lychee_local.errors import ModelMissing
from lychee_local.tuning import Speed


@pytest.mark.parametrize(
    ("processors", "cores", "tried"),
    [(1, 1, (1,)), (2, 2, (2, 1)), (2, 1, (2, 1)), (16, 8, (16, 8)), (12, 8, (12, 8, 6)), (4, 6, (4, 2))],
)
def test_which_numbers_are_tried(processors: int, cores: int, tried: tuple[int, ...]) -> None:
    assert tuning.candidates(processors, cores) == tried


@pytest.mark.parametrize(
    ("speeds", "choice"),
    [
        ([Speed(8, 100, 10), Speed(4, 120, 14)], 4),
        ([Speed(8, 100, 10), Speed(4, 50, 12)], 8),
        # Three hundredths faster is noise.
        ([Speed(8, 100, 10), Speed(4, 103, 10.3)], 8),
        ([Speed(1, 10, 1)], 1),
    ],
)
def test_all_processors_unless_something_else_is_clearly_faster(speeds: list[Speed], choice: int) -> None:
    assert tuning.chosen(speeds) == choice


def test_a_core_is_counted_once_however_many_processors_it_has(tmp_path: Path) -> None:
    for n in range(1_024):
        place = tmp_path / f"cpu{n}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{n // 2 * 2}-{n // 2 * 2 + 1}\n")
    assert cores(tmp_path) in range((processors() + 1) // 2, processors() + 1)
    assert cores(tmp_path / "nothing") == processors()


@pytest.mark.parametrize(
    ("limits", "processors"),
    [
        ({}, None),
        ({"": "max 100000"}, None),
        ({"": "200000 100000"}, 2),
        ({"": "150000 100000"}, 2),
        ({"": "50000 100000"}, 1),
        ({"user.slice/job": "400000 100000", "user.slice": "300000 100000", "": "max 100000"}, 3),
        ({"": "nonsense"}, None),
    ],
)
def test_a_container_s_share_of_the_processors_is_what_its_groups_grant(
    tmp_path: Path, limits: dict[str, str], processors: int | None
) -> None:
    groups, mine = tmp_path / "cgroup", tmp_path / "mine"
    for group, limit in limits.items():
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "cpu.max").write_text(limit + "\n")
    mine.write_text("1:cpu:/old\n0::/user.slice/job\n")
    assert quota(groups, mine) == processors
    assert quota(groups, tmp_path / "nothing") == (None if "user.slice" in limits else processors)


def one_is_best(card: Card, path: Path, threads: int) -> Speed:
    return Speed(threads, 100 / threads, 10 / threads)


@pytest.mark.model
def test_the_choice_is_used_by_whoever_loads_the_model_and_forgotten_on_another_machine(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = cards.card("smollm2-135m", models)
    assert tuning.threads_for(card, models) is None
    tuning.tune(card, models, measure=one_is_best)
    assert tuning.threads_for(card, models) == 1
    engines = Engines("tiny", home=models, llm="auto", embedder="auto", reranker=None)
    llm = engines.llm()
    assert isinstance(llm, LlamaLLM)
    assert llm.threads == 1
    engines.close()
    monkeypatch.setattr(tuning, "installed_llama", lambda: "another build")
    assert tuning.threads_for(card, models) is None


@pytest.mark.model
@pytest.mark.parametrize(
    "kept", ["", "{", "[]", "null", '"2"', '{"threads": 1}', "0 threads", "too many", "no number", "\udcff"]
)
def test_a_damaged_choice_is_none(models: Path, kept: str) -> None:
    card = cards.card("smollm2-135m", models)
    tuning.tune(card, models, measure=one_is_best)
    (file,) = (models / "models" / ".tuned").iterdir()
    known = json.loads(file.read_text())
    numbers = {"0 threads": 0, "too many": processors() + 1, "no number": "1"}
    text = json.dumps(known | {"threads": numbers[kept]}) if kept in numbers else kept
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert tuning.threads_for(card, models) is None


def test_a_model_that_is_not_there_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="smollm2-135m is not on this machine"):
        tuning.tune(cards.card("smollm2-135m", tmp_path), tmp_path)


@pytest.mark.model
def test_the_real_model_is_measured_from_the_command_line(models: Path, lychee: Lychee) -> None:
    options = ("doctor", "--profile", "tiny", "--home", str(models))
    assert "(lychee doctor --tune measures)" in lychee(*options).out
    found = json.loads(lychee(*options, "--tune", "--json").out)["tuning"]
    assert [speed["threads"] for speed in found["speeds"]] == list(tuning.candidates(processors(), cores()))
    assert all(speed["prompt"] > 0 and speed["output"] > 0 for speed in found["speeds"])
    assert tuning.threads_for(cards.card("smollm2-135m", models), models) == found["threads"]
    assert f"on {found['threads']} threads (measured)" in lychee(*options).out

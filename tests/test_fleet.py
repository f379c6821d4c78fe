"""One job for many users: the same results wherever it runs, and one user's trouble is nobody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from terminal import Lychee

from lychee_local import fleet
from lychee_local.errors import BadInput, LycheeError
from lychee_local.executors import TRIES, Executor, Lost, Processes, Ray
from lychee_local.memory import Memory

TALKS = {
    "ana": ("I moved to Lisbon in March 2024.", "My sister Eva teaches chess on Sundays."),
    "bob": ("I sold my old bike for 40 euros.", "We painted the kitchen green last week."),
    "chi": ("My dog Rex is afraid of thunder.",),
}


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    folder = tmp_path / "talks"
    folder.mkdir()
    for name, said in TALKS.items():
        lines = [{"speaker": name, "text": text, "at": f"2024-05-0{i + 1}T10:00:00"} for i, text in enumerate(said)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@contextmanager
def two_machines() -> Iterator[Ray]:
    """A Ray cluster of two nodes, with one processor each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install --group ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)  # type: ignore[no-untyped-call,unused-ignore]
    cluster.add_node(num_cpus=1, object_store_memory=10**8)
    try:
        with closing(Ray(address=cluster.address, threads=1)) as ray:
            yield ray
    finally:
        cluster.shutdown()


@pytest.fixture(
    params=[
        "processes",
        # Ray leaves its log files and sockets open until the process ends.
        pytest.param("ray", marks=pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")),
    ]
)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    if request.param == "processes":
        yield Processes(2)
        return
    # Its processes are started with this environment, and find the functions of this file through it.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with two_machines() as cluster:
        yield cluster


# --- the executors, on work of their own -----------------------------------------------------------------------------


def doubled(number: int) -> int:
    return 2 * number


def killed(task: tuple[str, int]) -> int:
    """Kills its own process as often as the task says, and counts the tries in a file."""
    path, deaths = task
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("x")
    if Path(path).stat().st_size <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return deaths


def pid(_: int) -> int:
    return os.getpid()


def refusing(number: int) -> int:
    if number == 3:
        raise BadInput("three is refused")
    return number


def test_tasks_are_done_again_where_their_process_is_killed(executor: Executor, tmp_path: Path) -> None:
    """One is killed twice and then done, one every time; the others never notice. What is raised arrives."""
    assert sorted(executor.each(doubled, range(20))) == [(n, 2 * n) for n in range(20)]
    tasks = [(str(tmp_path / f"{deaths}-{n}"), deaths) for n, deaths in enumerate((0, 2, 0, 99, 0))]
    found = dict(executor.each(killed, tasks))
    assert [found[task] for task in tasks if task[1] != 99] == [0, 2, 0, 0]
    lost = found[tasks[3]]
    assert isinstance(lost, Lost)
    assert lost.tries == TRIES == (tmp_path / "99-3").stat().st_size
    assert f"its process ended {TRIES} times" in lost.reason
    with pytest.raises(BadInput, match="three is refused"):
        list(executor.each(refusing, range(9)))
    assert list(executor.each(doubled, [])) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
def test_a_task_that_no_machine_is_large_enough_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with two_machines() as cluster, pytest.raises(LycheeError, match=r"64 processors, and no machine .* more than 1 "):
        Ray(threads=64)
    assert cluster


def test_a_worker_that_was_killed_while_it_waited_is_replaced(tmp_path: Path) -> None:
    tasks = Processes(1).each(pid, (0, 1))
    _, first = next(tasks)
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.5)
    [(_, second)] = list(tasks)
    assert isinstance(second, int)
    assert second != first


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(BadInput, match="workers is 0"):
        Processes(0)


# --- the jobs --------------------------------------------------------------------------------------------------------


def everything(home: Path) -> dict[str, Any]:
    """All that matters of all memories: turns, segments, records."""
    found = {}
    for name in TALKS:
        with Memory.open(name, home=home, profile="tiny", llm=None, reranker=None, read_only=True) as memory:
            found[name] = (memory.turns(), memory.segments(), memory.records())
            assert memory.records()
    return found


@pytest.mark.model
def test_every_executor_makes_the_memories_that_one_process_makes(
    executor: Executor, models: Path, talks: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "models").symlink_to(models / "models")
    for verb in fleet.VERBS:
        folder = talks if verb == "import" else None
        for job in fleet.jobs(verb, home=alone, folder=folder, profile="tiny"):
            assert fleet.perform(job).error == ""
        done = list(fleet.run(fleet.jobs(verb, home=models, folder=folder, profile="tiny"), executor))
        assert {o.user: o.error for o in done} == dict.fromkeys(TALKS, "")
        if verb == "import":
            assert sum(o.turns for o in done) == 5
        if verb == "consolidate":
            assert all(o.records for o in done)
            assert not any(o.pending for o in done)
    assert everything(models) == everything(alone)


@pytest.mark.model
def test_the_command_imports_and_consolidates_and_tells_of_each_user(lychee: Lychee, models: Path, talks: Path) -> None:
    stored = json.loads(lychee("fleet", "import", str(talks), "--workers", "2", "--json").out)
    assert [(o["user"], o["turns"], o["pending"] > 0) for o in stored["users"]] == [
        ("ana", 2, True),
        ("bob", 2, True),
        ("chi", 1, True),
    ]
    again = json.loads(lychee("fleet", "import", str(talks), "--json").out)
    assert [o["turns"] for o in again["users"]] == [0, 0, 0]
    some = json.loads(lychee("fleet", "consolidate", "bob", "--no-llm", "--json").out)
    assert [(o["user"], o["pending"]) for o in some["users"]] == [("bob", 0)]
    done = lychee("fleet", "consolidate", "--no-llm")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["user", "ana", "bob", "chi"]
    assert "Rex" in lychee("recall", "Who is afraid of thunder?", "--user", "chi").out


@pytest.mark.model
def test_trouble_with_one_user_is_named_and_costs_no_other(lychee: Lychee, models: Path, talks: Path) -> None:
    (talks / "eve.jsonl").write_text("no JSON\n", encoding="utf-8")
    (talks / "fay.jsonl").mkdir()
    done = lychee("fleet", "import", str(talks))
    assert done.code == 1
    assert "eve: line 1" in done.err
    assert "fay.jsonl cannot be read: Is a directory" in done.err
    assert "2 of 5 users failed" in done.err
    assert lychee("stats", "--user", "ana").code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fleet", "consolidate", "--no-llm"], "there is nothing to consolidate in"),
        (["fleet", "import", "nowhere"], "nowhere is no folder (it holds one NAME.jsonl for each user)"),
        (["fleet", "consolidate", "--no-llm", "--address", "h:1"], "--address is the address of a Ray cluster"),
    ],
)
def test_mistakes_are_one_line(lychee: Lychee, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "home").mkdir()
    done = lychee(*arguments)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""


def test_a_user_who_is_not_there_is_named(lychee: Lychee, models: Path, talks: Path) -> None:
    done = lychee("fleet", "import", str(talks), "dan")
    assert done.code == 2
    assert f"there is no 'dan' in {talks} (there are: ana, bob, chi)" in done.err


def ends(group: int) -> bool:
    """Whether the last process of a group is gone, at once or soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def importing(models: Path, talks: Path) -> tuple[subprocess.Popen[str], list[str], dict[str, str]]:
    """An import of 43 users by two workers, of whom some are done; its command and environment."""
    for n in range(40):
        (talks / f"user{n}.jsonl").write_text((talks / "ana.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "lychee_local", "fleet", "import", str(talks), "--workers", "2"]
    environment = os.environ | {"LYCHEE_HOME": str(models), "LYCHEE_PROFILE": "tiny"}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list((models / "users").glob("*/manifest.json"))) < 3:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return running, command, environment


@pytest.mark.model
def test_an_interrupted_fleet_leaves_no_process_and_goes_on(models: Path, talks: Path) -> None:
    """Ctrl-C comes to the parent alone here, which is the harder case: its workers have to be ended."""
    running, command, environment = importing(models, talks)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "of 43 users are done; the same command goes on" in said
    assert ends(running.pid)
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 44


@pytest.mark.model
def test_a_killed_fleet_leaves_no_process(models: Path, talks: Path) -> None:
    running, _, _ = importing(models, talks)
    running.kill()
    running.communicate(timeout=60)
    assert ends(running.pid)

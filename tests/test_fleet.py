"""One job for many users: the same results wherever it runs, and one user's trouble is nobody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from terminal import Lychee

from lychee_local import fleet
from lychee_local.backends.fake import FakeCall, FakeLLM, Reply
from lychee_local.errors import BadInput, LycheeError, ModelError
from lychee_local.executors import TRIES, Executor, Lost, Processes, Ray, _part
from lychee_local.memory import Memory
from lychee_local.settings import EncodeSettings, Settings
from lychee_local.store import memories
from lychee_local.store.manifest import user_folder
from lychee_local.types import Message

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


def unsendable(_: int) -> Any:
    return lambda: None


def told(_: int) -> None:
    raise KeyError("where it happened")


def test_what_cannot_be_sent_is_an_error_and_a_raised_error_says_where_it_was_raised() -> None:
    with pytest.raises(LycheeError, match="what came of a task cannot be sent"):
        list(Processes(1).each(unsendable, (1,)))
    with pytest.raises(KeyError) as raised:
        list(Processes(1).each(told, (1,)))
    assert "in told" in raised.value.__notes__[0]


def test_no_more_processes_start_than_there_are_tasks() -> None:
    """200 idle ones would need more descriptors than a process gets."""
    assert [answer for _, answer in Processes(5_000).each(doubled, (1, 2))] in ([2, 4], [4, 2])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_processors_are_shared_out_evenly(workers: int) -> None:
    parts = [_part(place, workers) for place in range(workers)]
    every = sorted(os.sched_getaffinity(0))
    taken = [processor for part in parts for processor in part]
    assert set(taken) == set(every)
    counts = [taken.count(processor) for processor in every]
    assert max(counts) - min(counts) <= 1


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
    (talks / "ida.jsonl").write_bytes(b"")
    os.mkfifo(talks / "pip.jsonl")
    (talks / "._ana.jsonl").write_bytes(b"\0\5\x16\7")  # what macOS puts beside a file
    done = lychee("fleet", "import", str(talks))
    assert done.code == 1
    assert "eve: line 1" in done.err
    assert "fay.jsonl is no file" in done.err
    assert "pip.jsonl is no file" in done.err
    assert "4 of 7 users failed" in done.err
    assert lychee("stats", "--user", "ana").code == 0
    assert list(memories(models)) == ["ana", "bob", "chi"], "a bad file makes no memory"


@pytest.mark.model
def test_a_memory_that_cannot_be_opened_is_a_failure_and_not_left_out(
    lychee: Lychee, models: Path, talks: Path
) -> None:
    lychee("fleet", "import", str(talks))
    folders = {user: user_folder(models, user) for user in TALKS}
    (folders["ana"] / "manifest.json").write_text("{", encoding="utf-8")
    (folders["bob"] / "manifest.json").unlink()
    (models / "users" / "notes.txt").write_text("somebody else's", encoding="utf-8")
    done = lychee("fleet", "consolidate", "--no-llm", "--json")
    assert done.code == 1
    assert done.json["failed"] == 2
    errors = {o["user"]: o["error"] for o in done.json["users"]}
    assert "is damaged" in errors[folders["ana"].name]
    assert "manifest.json is missing" in errors[folders["bob"].name]
    assert errors["chi"] == ""


@pytest.mark.model
@pytest.mark.parametrize("verb", ["consolidate", "reencode"])
def test_a_memory_that_is_gone_is_not_made_anew(models: Path, verb: fleet.Verb) -> None:
    done = fleet.perform(fleet.Job(verb, "zoe", str(models), "tiny"))
    assert "there is no memory of 'zoe'" in done.error
    assert list(memories(models)) == []


@pytest.mark.model
def test_an_error_that_nobody_expected_is_told_of_one_user(
    models: Path, talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = fleet.Job("import", "ana", str(models), "tiny", file=f"{talks}/a\0b")
    done = fleet.perform(job)
    assert done.error == "ValueError: embedded null byte"
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.model
def test_an_import_ends_the_sessions_of_its_file_alone(lychee: Lychee, models: Path, talks: Path) -> None:
    lychee("remember", "--text", "I am still talking.", "--session", "live", "--user", "ana", "--no-llm")
    lychee("fleet", "import", str(talks))
    with Memory.open("ana", home=models, profile="tiny", llm=None, reranker=None, read_only=True) as memory:
        assert "live" in {turn.session for turn in memory.turns()}
        assert "live" not in {segment.session for segment in memory.segments()}


@pytest.mark.model
def test_one_user_in_two_files_or_named_twice_is_one_user(lychee: Lychee, models: Path, talks: Path) -> None:
    ana = (talks / "ana.jsonl").read_bytes()
    for form in ("NFC", "NFD"):
        (talks / f"{unicodedata.normalize(form, 'José')}.jsonl").write_bytes(ana)
    done = lychee("fleet", "import", str(talks), "--json")
    assert done.code == 1
    assert [(o["user"], bool(o["error"])) for o in done.json["users"]] == [
        ("José", True),
        ("ana", False),
        ("bob", False),
        ("chi", False),
    ]
    assert "two files are of this user" in done.json["users"][0]["error"]
    some = lychee("fleet", "consolidate", "ana", "ana", "--no-llm", "--workers", "2", "--json")
    assert [o["user"] for o in some.json["users"]] == ["ana"]


@pytest.mark.model
@pytest.mark.skipif(sys.platform == "darwin", reason="every file's name is UTF-8 there")
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_file_whose_name_is_no_text_is_named_as_it_can_be(
    lychee: Lychee, models: Path, talks: Path, as_json: tuple[str, ...]
) -> None:
    (talks / "\udcff[work].jsonl").write_bytes((talks / "ana.jsonl").read_bytes())
    done = lychee("fleet", "import", str(talks), *as_json)
    assert done.code == 1
    assert "\\udcff[work]" in done.out
    assert "cannot be a user name" in (done.out if as_json else done.err)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [(["--profile", "nonsense"], 2, "nonsense"), ([], 4, "all-minilm-l6-v2 is not on this machine")],
)
def test_what_every_user_needs_is_looked_at_once_and_first(
    lychee: Lychee, talks: Path, options: list[str], code: int, says: str
) -> None:
    done = lychee("fleet", "import", str(talks), *options)
    assert done.code == code
    assert done.err.count(says) == 1


@pytest.mark.model
def test_what_was_done_before_an_error_is_counted(models: Path) -> None:
    """The model ends after the first of two sessions; what it gave of that is there, and is told."""
    talk = [Message("Ana moved to Lisbon in March 2024.", session="a"), Message("Bo sold his bike.", session="b")]
    with Memory.open("ana", home=models, profile="tiny", llm=None, reranker=None) as memory:
        memory.remember(talk, encode=False)
        memory.flush(encode=False)
    calls = count()

    def ends_early(call: FakeCall) -> Reply:
        if next(calls):
            raise ModelError("the model is gone")
        return json.dumps({name: ["Ana moved to Lisbon."] for name in _keys(call)})

    llm = FakeLLM(ends_early, prompt_style="compact")
    with Memory.open(
        "ana", home=models, profile="tiny", llm=llm, reranker=None, settings=Settings(encode=EncodeSettings(width=1))
    ) as memory:
        done = fleet._done(fleet.Job("consolidate", "ana", str(models), "tiny"), memory, ())
    assert "the model is gone" in done.error
    assert (done.segments, done.pending) == (1, 1)
    assert done.records >= 1
    assert done.tokens > 0


def _keys(call: FakeCall) -> list[str]:
    assert call.schema is not None
    return [field.alias or name for name, field in call.schema.model_fields.items()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fleet", "consolidate", "--no-llm"], "there is nothing to consolidate in"),
        (["fleet", "import", "nowhere"], "nowhere is no folder (it holds one NAME.jsonl for each user)"),
    ],
)
def test_mistakes_are_one_line(lychee: Lychee, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "home").mkdir()
    done = lychee(*arguments)
    assert done.code == 2
    assert says in done.err
    assert done.out == ""


@pytest.mark.model
def test_an_address_is_of_a_cluster(lychee: Lychee, models: Path, talks: Path) -> None:
    done = lychee("fleet", "import", str(talks), "--address", "h:1")
    assert done.code == 2
    assert "--address is the address of a Ray cluster" in done.err
    assert list(memories(models)) == []


@pytest.mark.model
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

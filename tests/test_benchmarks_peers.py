"""Other memory systems behind the benchmarks: child processes, what they may reach, what they cost, how they fail."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.methods import METHODS, Method
from benchmarks.peers.child import ROOT, Child, PeerFailed
from benchmarks.peers.kinds import LLAMAINDEX, MEM0, Kind
from benchmarks.peers.meter import Meter
from benchmarks.peers.peer import ChildPeer, Found
from benchmarks.peers.server import MODULES, LlamaServer
from lychee_local import Message
from lychee_local.backends import Vectors
from lychee_local.backends.fake import HashEmbedder
from lychee_local.backends.llama import LlamaLLM
from lychee_local.errors import ModelError
from lychee_local.types import ChatMessage, Usage

Line = dict[str, Any]
PYTHON = Path(sys.executable)
TOY = Path(__file__).with_name("toy_peer.py")
AT = datetime(2024, 5, 1, 10, 30)


def no_vectors(texts: Sequence[str]) -> Vectors:
    raise AssertionError(f"nobody embeds {texts} here")


def message(ref: str, text: str) -> Message:
    return Message(text, speaker="Ana", at=AT, session=ref.partition(":")[0], ref=ref)


# --- a child --------------------------------------------------------------------------------------------------------


@contextmanager
def child(folder: Path, program: str, **options: Any) -> Iterator[Child]:
    script = folder / "program.py"
    script.write_text(program)
    with Child(PYTHON, str(script), home=folder / "home", log=folder / "log", **({"talks": True} | options)) as started:
        yield started


def gone(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":  # dead, and nobody's child here
            return True
        time.sleep(0.05)
    return False


REACHES = """
import json, socket, subprocess, sys, os

def told(call):
    try:
        call()
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    return "done"

for request in sys.stdin:
    port = json.loads(request)["port"]
    tcp = lambda host: lambda: socket.create_connection((host, port), timeout=5).close()
    udp = lambda host: lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (host, port))
    tries = {
        "loopback": tcp("127.0.0.1"),
        "this machine by name": tcp("localhost"),
        "elsewhere": lambda: socket.socket().connect(("192.0.2.1", 80)),
        "elsewhere by name": tcp("telemetry.example.org"),
        "elsewhere in six": lambda: socket.socket(socket.AF_INET6).connect(("2001:db8::1", 80)),
        "a message elsewhere": udp("192.0.2.1"),
        "a look-up": lambda: socket.gethostbyname("telemetry.example.org"),
        "a program": lambda: subprocess.run(["true"]),
        "a program by a shell": lambda: os.system("true"),
    }
    print(json.dumps({"done": {name: told(call) for name, call in tries.items()}}), flush=True)
"""


def test_a_child_reaches_this_machine_and_nothing_else(tmp_path: Path) -> None:
    with upstream() as port, child(tmp_path, REACHES) as started:
        found = started.ask({"do": "try", "port": port}, within=30)["done"]
    here = {name for name, how in found.items() if how == "done"}
    assert here == {"loopback", "this machine by name"}
    assert {how for name, how in found.items() if name not in here} == {"PermissionError 13"}


def test_a_child_gets_neither_our_keys_nor_our_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://192.0.2.1:3128")
    program = "import os; input(); import json; print(json.dumps({'done': dict(os.environ)}))"
    with child(tmp_path, program) as started:
        seen = started.ask({"do": "tell"}, within=30)["done"]
    assert {"OPENAI_API_KEY", "HTTPS_PROXY"}.isdisjoint(seen)
    assert seen["HOME"] == str(tmp_path / "home")


def test_a_child_ends_when_it_is_closed(tmp_path: Path) -> None:
    with child(tmp_path, "import time; time.sleep(600)", talks=False) as started:
        assert started.alive
    assert not started.alive


def test_a_child_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.child.GRACE", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); input()\n"
        "print('{\"done\": 0}', flush=True); time.sleep(600)"
    )
    with child(tmp_path, program) as started:
        started.ask({"do": "wait"}, within=30)
    assert not started.alive


def test_a_child_ends_when_we_are_killed(tmp_path: Path) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text("import time; time.sleep(600)")
    parent = (
        "import sys, time; from pathlib import Path; from benchmarks.peers.child import Child\n"
        f"child = Child(Path(sys.executable), {str(program)!r}, home=Path({str(tmp_path)!r}),"
        f" log=Path({str(tmp_path / 'log')!r}), talks=False)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([PYTHON, "-c", parent], stdout=subprocess.PIPE, cwd=ROOT, text=True) as ours:
        assert ours.stdout is not None
        pid = int(ours.stdout.readline())
        os.kill(pid, 0)
        ours.send_signal(signal.SIGKILL)
        assert ours.wait() == -signal.SIGKILL
    assert gone(pid)


def test_what_is_no_python_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="cannot be run: No such file"):
        Child(tmp_path / "python", str(TOY), home=tmp_path, log=tmp_path / "log", talks=True)


# --- a peer ---------------------------------------------------------------------------------------------------------


@contextmanager
def toy(folder: Path, meter: Meter, *, by_model: bool = False, patience: float = 30.0) -> Iterator[ChildPeer]:
    folder.mkdir(exist_ok=True)

    def start() -> Child:
        return Child(PYTHON, str(TOY), home=folder, log=folder / "log", talks=True)

    settings = {"folder": str(folder), "by_model": by_model}
    peer = ChildPeer(start, settings, meter, patience=patience)
    try:
        yield peer
    finally:
        peer.close()


@pytest.fixture
def meter() -> Iterator[Meter]:
    with Meter(model="none", upstream=None, embed=no_vectors) as started:
        yield started


def refs(found: Found) -> list[str]:
    return [item.id for item in found.evidence]


def test_what_a_peer_took_in_is_found_with_its_source(tmp_path: Path, meter: Meter) -> None:
    with toy(tmp_path, meter) as peer:
        seen: list[int] = []
        texts = ["I sold the boat.", "Who has it?", "A dentist.", "I play."]
        places = ["s1:1", "s1:2", "s1:3", "s2:1"]
        peer.ingest([message(ref, text) for ref, text in zip(places, texts, strict=True)], seen.append)
        assert seen == [2, 3, 4]  # two at a time, of one session
        found = peer.evidence("sold the boat", 2)
        assert (peer.kept().memories, peer.kept().lost) == (4, 0)
    (best, second), traced = found.evidence, found.traced
    assert traced
    assert (best.text, best.score, best.session, best.refs, best.said) == (
        "Ana: I sold the boat.",
        1.0,
        "s1",
        ("s1:1",),
        AT,
    )
    assert (second.score, second.refs) == (0.0, ("s1:2",))
    assert peer.usage() == ()


def test_what_a_library_prints_is_no_reply(tmp_path: Path, meter: Meter) -> None:
    with toy(tmp_path, meter) as peer:
        peer.ingest([message("s1:1", "talk: aloud")])
        assert refs(peer.evidence("talk", 5)) == ["s1:1"]
    assert "no reply" in (tmp_path / "log").read_text()


def test_a_peer_that_dies_half_way_is_named_with_its_log(tmp_path: Path, meter: Meter) -> None:
    with toy(tmp_path, meter) as peer:
        messages = [message("s1:1", "one"), message("s1:2", "two"), message("s1:3", "die: of boredom")]
        with pytest.raises(PeerFailed, match=r"toy_peer died when asked to ingest; .*a reason to die: of boredom"):
            peer.ingest(messages)
        # It is started again for whatever comes next.
        assert refs(peer.evidence("two", 1)) == ["s1:2"]


def test_a_peer_that_answers_garbage_is_ended(tmp_path: Path, meter: Meter) -> None:
    program = (
        "import sys\nfor n, line in enumerate(sys.stdin):\n"
        "    print('{\"done\": {\"turns_at_once\": 1}}' if n == 0 else '<html>', flush=True)"
    )
    script = tmp_path / "garbage.py"
    script.write_text(program)
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(PYTHON, str(script), home=tmp_path, log=tmp_path / "log", talks=True))
        return started[-1]

    peer = ChildPeer(start, {}, meter, patience=30.0)
    with pytest.raises(PeerFailed, match="garbage answered no JSON when asked to ingest: '<html>'"):
        peer.ingest([message("s1:1", "one")])
    assert not started[-1].alive


def test_a_peer_that_ended_between_two_portions_is_not_started_anew(tmp_path: Path, meter: Meter) -> None:
    script = tmp_path / "ends.py"
    script.write_text('for _ in range(2): input(); print(\'{"done": {"turns_at_once": 1}}\', flush=True)')
    started: list[Child] = []

    def start() -> Child:
        started.append(Child(PYTHON, str(script), home=tmp_path, log=tmp_path / "log", talks=True))
        return started[-1]

    def wait(_: int) -> None:
        assert gone(started[-1].pid) or not started[-1].alive

    peer = ChildPeer(start, {}, meter, patience=30.0)
    with pytest.raises(PeerFailed, match="ends died"):
        peer.ingest([message("s1:1", "one"), message("s1:2", "two")], wait)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ('{"turns_at_once": 1}', "answered no reply when asked to open"),
        ('{"done": {"turns_at_once": "some"}}', "the peer's reply has another form"),
    ],
)
def test_a_reply_of_another_form_is_named(tmp_path: Path, meter: Meter, reply: str, problem: str) -> None:
    script = tmp_path / "other.py"
    script.write_text(f"input(); print({reply!r}, flush=True); input()")
    with Child(PYTHON, str(script), home=tmp_path, log=tmp_path / "log", talks=True) as started:
        peer = ChildPeer(lambda: started, {}, meter, patience=30.0)
        with pytest.raises(PeerFailed, match=problem):
            peer.ingest([message("s1:1", "one")])


def test_a_peer_that_hangs_is_ended(tmp_path: Path, meter: Meter) -> None:
    with toy(tmp_path, meter) as peer:
        peer.ingest([message("s1:1", "one")])
        peer.patience = 0.5
        began = time.monotonic()
        with pytest.raises(PeerFailed, match=r"had no reply within 0\.5 seconds when asked to evidence"):
            peer.evidence("hang: ", 1)
        assert time.monotonic() - began < 20


def test_what_a_peer_tries_to_reach_or_to_start_is_refused_and_named(tmp_path: Path, meter: Meter) -> None:
    with toy(tmp_path, meter) as peer:
        peer.ingest([message("s1:1", "call: 192.0.2.1"), message("s1:2", "start: uname")])
        assert peer.refused == ("a look-up of 192.0.2.1", "the start of uname")


# --- the meter ------------------------------------------------------------------------------------------------------


@contextmanager
def upstream(answer: Callable[[Line], tuple[int, Line]] | None = None) -> Iterator[int]:
    """A server that counts words for tokens: those of the prompt, and those of its answer, which is "yes it is"."""

    def counted(request: Line) -> tuple[int, Line]:
        words = sum(len(each["content"].split()) for each in request["messages"])
        choice = {"message": {"role": "assistant", "content": "yes it is"}}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": words, "completion_tokens": 3}}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = (answer or counted)(request)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def post(meter: Meter, path: str, body: object) -> tuple[int, Line]:
    connection = http.client.HTTPConnection(meter.url.removeprefix("http://").removesuffix("/v1"), timeout=30)
    connection.request("POST", f"/v1/{path}", body if isinstance(body, bytes) else json.dumps(body))
    answered = connection.getresponse()
    reply = json.loads(answered.read())
    connection.close()
    return answered.status, reply


def says(*texts: str) -> Line:
    return {"model": "gpt", "messages": [{"role": "user", "content": text} for text in texts], "temperature": 0.7}


def costs(calls: Sequence[Usage]) -> list[tuple[str, int, int, str]]:
    return [(call.purpose, call.prompt_tokens, call.output_tokens, call.outcome) for call in calls]


def test_every_call_is_counted_by_what_the_server_says_it_took() -> None:
    with upstream() as port, Meter(model="small", upstream=lambda: port, embed=no_vectors) as meter:
        status, reply = post(meter, "chat/completions", says("one two three", "four five"))
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "yes it is")
        meter.purpose = "plan"
        post(meter, "chat/completions", says("one"))
        assert costs(meter.usage()) == [("encode", 5, 3, "ok"), ("plan", 1, 3, "ok")]
        assert [call.model for call in meter.usage()] == ["small", "small"]


def test_a_peers_construction_is_the_sum_of_its_calls(tmp_path: Path) -> None:
    with upstream() as port, Meter(model="small", upstream=lambda: port, embed=no_vectors) as meter:
        with toy(tmp_path, meter, by_model=True) as peer:
            peer.ingest([message("s1:1", "one two"), message("s1:2", "three"), message("s2:1", "four five six seven")])
            assert not peer.evidence("one", 3).traced
        # 2 + 1 + 4 words of prompts, three times three words of answers.
        assert sum(call.prompt_tokens + call.output_tokens for call in peer.usage()) == 7 + 9


def test_every_peer_is_decoded_greedily_by_our_model() -> None:
    seen: list[Line] = []

    def answer(request: Line) -> tuple[int, Line]:
        seen.append(request)
        return 200, {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}

    with upstream(answer) as port, Meter(model="small", upstream=lambda: port, embed=no_vectors) as meter:
        post(meter, "chat/completions", says("one") | {"repeat_penalty": 1.3, "max_tokens": 9})
    (request,) = seen
    assert {name: request[name] for name in ("model", "temperature", "repeat_penalty", "max_tokens")} == {
        "model": "small",
        "temperature": 0.0,
        "repeat_penalty": 1.0,
        "max_tokens": 9,
    }


def test_a_call_that_the_server_refuses_is_handed_on_and_counted() -> None:
    told = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    with upstream(lambda _: (400, told)) as port, Meter(model="s", upstream=lambda: port, embed=no_vectors) as meter:
        assert post(meter, "chat/completions", says("one")) == (400, told)
        ((purpose, prompt, output, outcome),) = costs(meter.usage())
    assert (purpose, prompt, output) == ("encode", 0, 0)
    assert outcome == f"failed: 400 {json.dumps(told)}"


def test_a_reply_without_a_count_is_no_success() -> None:
    with upstream(lambda _: (200, {})) as port, Meter(model="s", upstream=lambda: port, embed=no_vectors) as meter:
        post(meter, "chat/completions", says("one"))
        assert costs(meter.usage()) == [("encode", 0, 0, "failed: the server counted no tokens")]


def test_a_stream_is_refused_since_nobody_would_count_it() -> None:
    with upstream() as port, Meter(model="s", upstream=lambda: port, embed=no_vectors) as meter:
        status, reply = post(meter, "chat/completions", says("one") | {"stream": True})
        assert status == 400
        assert "ask without stream" in reply["error"]["message"]
        assert [call.outcome.partition(":")[0] for call in meter.usage()] == ["refused"]


def test_without_a_language_model_there_is_none() -> None:
    with Meter(model="none", upstream=None, embed=no_vectors) as meter:
        status, reply = post(meter, "chat/completions", says("one"))
        assert (status, reply["error"]["message"]) == (503, "this run has no language model")
        assert costs(meter.usage()) == [("encode", 0, 0, "refused: this run has no language model")]


def test_a_server_that_does_not_start_fails_the_run_even_if_the_peer_goes_on(tmp_path: Path) -> None:
    def absent() -> int:
        raise ModelError("no server")

    with Meter(model="s", upstream=absent, embed=no_vectors) as meter, toy(tmp_path, meter, by_model=True) as peer:
        with pytest.raises(ModelError, match="no server"):
            peer.ingest([message("s1:1", "one")])
        assert [call.outcome for call in meter.usage()] == ["refused: no server"]


def test_a_server_that_died_fails_the_run_too(tmp_path: Path) -> None:
    with upstream() as port:
        pass
    with (
        Meter(model="s", upstream=lambda: port, embed=no_vectors) as meter,
        toy(tmp_path, meter, by_model=True) as peer,
    ):
        status, reply = post(meter, "chat/completions", says("one"))
        assert (status, reply["error"]["type"]) == (502, "invalid_request_error")
        with pytest.raises(PeerFailed, match="server did not answer: ConnectionRefusedError"):
            peer.ingest([message("s1:1", "one")])


def test_embeddings_are_ours_and_cost_no_tokens() -> None:
    def embed(texts: Sequence[str]) -> Vectors:
        return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)

    with Meter(model="s", upstream=None, embed=embed) as meter:
        status, reply = post(meter, "embeddings", {"model": "mini", "input": ["one", "three"]})
        assert (status, [each["embedding"] for each in reply["data"]]) == (200, [[3.0, 1.0], [5.0, 1.0]])
        assert [each["index"] for each in reply["data"]] == [0, 1]
        status, reply = post(meter, "embeddings", {"model": "mini", "input": "four"})
        assert [each["embedding"] for each in reply["data"]] == [[4.0, 1.0]]
        assert meter.usage() == ()


def test_an_embedder_that_fails_fails_the_run(tmp_path: Path) -> None:
    def embed(texts: Sequence[str]) -> Vectors:
        raise ModelError("no weights")

    with Meter(model="s", upstream=None, embed=embed) as meter, toy(tmp_path, meter) as peer:
        assert post(meter, "embeddings", {"input": "one"})[0] == 502
        with pytest.raises(ModelError, match="no weights"):
            peer.ingest([message("s1:1", "one")])


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        ("embeddings", {"input": [[1, 2, 3]]}, 400, "input is a text or a list of texts"),
        ("embeddings", {"input": []}, 400, "input is a text or a list of texts"),
        ("chat/completions", b"{", 400, "the request is no JSON"),
        ("chat/completions", b"[]", 400, "the request is no JSON object"),
        ("images/generations", {}, 404, "nothing is at /v1/images/generations"),
    ],
)
def test_what_cannot_be_answered_is_said(meter: Meter, path: str, body: object, status: int, problem: str) -> None:
    answered, reply = post(meter, path, body)
    assert (answered, reply["error"]["message"]) == (status, problem)


# --- a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_method(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind("toy", str(TOY), ("pytest",), "dev", items=2, embeds=False)
    monkeypatch.setitem(METHODS, "toy", Method("a toy", peer=kind))


def data(folder: Path, *, turns: Sequence[str], questions: Sequence[tuple[str, Sequence[str]]]) -> Path:
    """A conversation of one session, its turns s1:1, s1:2, ..., and questions with their gold turns."""
    said = [
        {"conversation": "toy.1", "session": "s1", "at": AT.isoformat(), "speaker": "Ana", "text": text}
        | {"ref": f"s1:{n}"}
        for n, text in enumerate(turns, 1)
    ]
    asked = [{"conversation": "toy.1", "question": text, "answer": "yes", "gold": gold} for text, gold in questions]
    path = folder / "toy.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in said + asked))
    return path


def run(path: Path, *options: str, method: str = "toy") -> int:
    common = ["--profile", "tiny", "--no-llm", "--out", str(path.parent / "out" / method)]
    return main(["run", "lines", "--data", str(path), "--method", method, *common, *options])


def lines(path: Path, name: str, method: str = "toy") -> list[Line]:
    return [json.loads(each) for each in (path.parent / "out" / method / name).read_text().splitlines()]


def test_a_run_with_a_peer_has_the_lines_and_scores_of_any_other(tmp_path: Path, toy_method: None) -> None:
    path = data(
        tmp_path,
        turns=["I sold the boat.", "A dentist has it.", "I play the cello."],
        questions=[("sold boat", ["s1:1"]), ("who has cello", ["s1:1", "s1:3"])],
    )
    assert run(path) == 0
    (built,) = lines(path, "construction.jsonl")
    assert (built["turns"], built["records"], built["construction_tokens"]) == (3, 3, 0)
    assert (built["begun_anew"], built["refused"], built["turns_lost"]) == (False, [], 0)
    first, second = lines(path, "questions/toy.1.jsonl")
    assert [each["refs"] for each in first["evidence"]] == [["s1:1"], ["s1:2"]]
    assert first["evidence"][0]["text"] == "Ana: I sold the boat."
    # "who has cello" shares one word with the second and with the third turn: half of its gold is among the best two.
    assert (first["scores"]["turns"], second["scores"]["turns"]) == (1.0, 0.5)
    made = json.loads((path.parent / "out" / "toy" / "run.json").read_text())
    assert made["peer"]["pytest"] == pytest.__version__


@pytest.mark.parametrize("options", [[], ["--fresh"]], ids=["kept", "fresh"])
def test_a_run_with_a_peer_can_be_repeated(
    tmp_path: Path, toy_method: None, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = data(tmp_path, turns=["One.", "Two."], questions=[("one", ["s1:1"]), ("two", ["s1:2"])])
    assert run(path) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out" / "toy"), *options]) == 0
    assert "2 questions repeated, 0 of them differ; 0 differences in all" in capsys.readouterr().out


def test_a_second_run_uses_what_the_peer_kept(tmp_path: Path, toy_method: None) -> None:
    path = data(tmp_path, turns=["One."], questions=[("one", ["s1:1"]), ("two", ["s1:1"])])
    assert run(path, "--limit", "1") == 0
    assert run(path, "--out", str(tmp_path / "out" / "all")) == 0
    (again,) = lines(path, "construction.jsonl", "all")
    assert again["seconds_now"] == 0.0
    (first,) = lines(path, "construction.jsonl")
    assert again["seconds"] == first["seconds"] > 0.0


def test_a_peer_that_was_cut_begins_anew_and_says_so(
    tmp_path: Path, toy_method: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    texts = ["One.", "Two.", f"die until there is: {ready}"]
    path = data(tmp_path, turns=texts, questions=[("one", ["s1:1"])])
    monkeypatch.setattr("benchmarks.peers.conversation.SAID_EVERY", 0.0)
    assert run(path) == 2
    told = capsys.readouterr().err
    assert "toy.1: 2 of 3 turns taken in, 0 calls, 0 tokens" in told
    assert "toy_peer died when asked to ingest; the end of its log: not yet" in told
    ready.touch()
    assert run(path) == 0
    assert "toy.1: taking it in was cut the last time; the peer begins it anew" in capsys.readouterr().err
    (built,) = lines(path, "construction.jsonl")
    assert (built["begun_anew"], built["records"]) == (True, 3)  # not five: nothing is left of the first two


def test_a_question_that_kills_the_peer_is_an_error_and_the_next_is_asked(tmp_path: Path, toy_method: None) -> None:
    ready = tmp_path / "ready"
    path = data(tmp_path, turns=["One."], questions=[(f"die until there is: {ready}", ["s1:1"]), ("one", ["s1:1"])])
    assert run(path) == 1
    failed, found = lines(path, "questions/toy.1.jsonl")
    assert failed["error"].startswith("PeerFailed: toy_peer died when asked to evidence")
    assert "scores" not in failed
    assert found["scores"]["turns"] == 1.0
    ready.touch()
    assert run(path) == 0
    *_, asked_again = lines(path, "questions/toy.1.jsonl")
    assert (asked_again["id"], asked_again["error"]) == ("toy.1:0", "")
    assert len(lines(path, "questions/toy.1.jsonl")) == 3


def test_two_runs_do_not_share_a_peers_folder(tmp_path: Path, toy_method: None) -> None:
    path = data(tmp_path, turns=["One."], questions=[("one", ["s1:1"]), ("two", ["s1:1"])])
    assert run(path, "--limit", "1") == 0
    (lock,) = (tmp_path / "out" / "stores").glob("toy-*/toy.1.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(path, "--out", str(tmp_path / "out" / "all")) == 2


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data(tmp_path, turns=["One."], questions=[("one", ["s1:1"])])
    assert run(path, method="mem0") == 2
    told = capsys.readouterr().err
    assert "does not have mem0ai" in told
    assert "install the group peer-mem0" in told
    assert run(path, "--peer-python", str(tmp_path / "python"), method="mem0") == 2
    assert "is no Python that can be run" in capsys.readouterr().err


# --- what is really installed ---------------------------------------------------------------------------------------


def server_python() -> Path:
    """The interpreter that has the group peer-server: PEER_SERVER_PYTHON, else ours."""
    python = Path(os.environ.get("PEER_SERVER_PYTHON", sys.executable))
    asked = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))"
    if subprocess.run([python, "-c", asked, *MODULES], check=False).returncode:
        pytest.skip(f"{python} does not have the group peer-server; PEER_SERVER_PYTHON names one that has")
    return python


@pytest.mark.model
def test_the_server_counts_a_prompt_as_we_do_and_ends_with_us(tmp_path: Path, smollm2_path: Path) -> None:
    python = server_python()
    text = "Say yes."
    with LlamaServer(
        smollm2_path, name="smollm2-135m", log=tmp_path / "log", home=tmp_path, python=python, context=512
    ) as server:
        with Meter(model="smollm2-135m", upstream=server.port, embed=no_vectors) as meter:
            assert server.pid is None  # not started before it is needed
            status, reply = post(meter, "chat/completions", says(text) | {"max_tokens": 4})
            too_long, _ = post(meter, "chat/completions", says("word " * 600))
            (call, refused) = meter.usage()
        pid = server.pid
    assert status == 200, reply
    assert pid is not None
    assert gone(pid)
    llm = LlamaLLM(smollm2_path, name="smollm2-135m", context=512)
    assert call.prompt_tokens == llm.count([ChatMessage("user", text)])
    assert 1 <= call.output_tokens <= 4
    assert (too_long, refused.prompt_tokens) == (400, 0)
    assert "context_length_exceeded" in refused.outcome
    llm.close()


@pytest.mark.model
def test_a_run_whose_peer_asks_the_language_model(tmp_path: Path, models: Path, toy_method: None) -> None:
    python = server_python()
    path = data(tmp_path, turns=["I sold the boat.", "It rains."], questions=[("What did Ana sell?", ["s1:1"])])
    out = tmp_path / "out" / "toy"
    common = ["--profile", "tiny", "--home", str(models), "--out", str(out), "--server-python", str(python)]
    assert main(["run", "lines", "--data", str(path), "--method", "toy", *common]) == 0
    (built,) = lines(path, "construction.jsonl")
    assert (built["records"], built["construction_calls"], built["construction_calls_failed"]) == (2, 2, [])
    # A prompt of its template and three or four words of text; at most four tokens of answer.
    assert 2 * (10 + 1) < built["construction_tokens"] < 2 * (60 + 4)
    (line,) = lines(path, "questions/toy.1.jsonl")
    assert line["error"] == ""
    assert set(line["scores"]) == {"f1", "exact"}  # what is not traced has no scores of evidence
    assert [call["purpose"] for call in line["usage"]] == ["answer"]
    assert "not traced to turns" in line["notes"][-1]
    assert line["evidence"][0]["refs"] == ["s1:1"]
    assert "Uvicorn running on http://127.0.0.1" in (out / "peers" / "toy.1.server.log").read_text()


def python_of(kind: Kind) -> Path:
    """The interpreter that has a peer: PEER_MEM0_PYTHON, PEER_LLAMAINDEX_PYTHON, else ours."""
    variable = f"PEER_{kind.name.upper()}_PYTHON"
    python = Path(os.environ.get(variable, sys.executable))
    try:
        kind.versions(python)
    except PeerFailed as error:
        pytest.skip(f"{error.message}; {variable} names an interpreter that has them")
    return python


@contextmanager
def real(kind: Kind, folder: Path, answer: Callable[[Line], tuple[int, Line]]) -> Iterator[ChildPeer]:
    """A peer that is really there, with a language model that answers what it is told to."""
    python, embedder = python_of(kind), HashEmbedder(64)

    def start() -> Child:
        return Child(python, kind.adapter, home=folder, log=folder / "log", talks=True)

    with upstream(answer) as port, Meter(model="s", upstream=lambda: port, embed=embedder.embed) as meter:
        settings: Line = {"folder": str(folder), "model": "s", "embedder": "hash", "dimension": 64, "by_model": True}
        peer = ChildPeer(start, settings, meter, patience=120.0)
        try:
            yield peer
        finally:
            peer.close()


def writes(text: str) -> tuple[int, Line]:
    return 200, {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "s",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107},
    }


def shown(request: Line) -> str:
    return "\n".join(each["content"] for each in request["messages"])


def test_mem0_keeps_what_the_model_writes_and_its_calls_are_counted(tmp_path: Path) -> None:
    replies = ['{"memory": [{"id": "0", "text": "Ana sold her blue boat."}]}', '{"memory": []}']
    seen: list[str] = []

    def answer(request: Line) -> tuple[int, Line]:
        seen.append(shown(request))
        return writes(replies[len(seen) - 1]) if len(seen) < 3 else (400, {"error": {"message": "too long"}})

    turns = [message("s1:1", "I sold my boat."), message("s1:2", "It was blue."), message("s1:3", "Well.")]
    with real(MEM0, tmp_path, answer) as peer:
        peer.ingest([*turns, message("s2:1", "One more.")])
        kept = peer.kept()
        found = peer.evidence("What did Ana sell?", 5)
        calls = peer.usage()
    assert (kept.memories, kept.empty, kept.lost) == (1, 1, 1)
    assert [call.prompt_tokens + call.output_tokens for call in calls] == [107, 107, 0]
    assert "Ana: I sold my boat." in seen[0]
    assert "Observation Date: 2024-05-01 (Wednesday)" in seen[0]
    (memory,) = found.evidence
    assert (memory.text, memory.memory_type, memory.session) == ("Ana sold her blue boat.", "fact", "s1")
    assert (memory.refs, memory.said, found.traced) == (("s1:1", "s1:2"), AT, False)


def test_llamaindex_keeps_facts_and_passages(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(request: Line) -> tuple[int, Line]:
        seen.append(shown(request))
        return writes("<facts><fact>Ana sold her blue boat.</fact></facts>")

    with real(LLAMAINDEX, tmp_path, answer) as peer:
        peer.ingest([message("s1:1", "I sold my boat."), message("s1:2", "It was\nblue."), message("s2:1", "Well.")])
        kept = peer.kept()
        peer.close()  # what it knows is on disk
        found = peer.evidence("Ana: Well.", 1)
        calls = peer.usage()
    # One fact, which both calls wrote, and a passage for each session.
    assert (kept.memories, kept.lost) == (3, 0)
    assert [call.prompt_tokens + call.output_tokens for call in calls] == [107, 107]
    assert "These messages were said on 01 May 2024." in seen[0]
    assert "<fact>Ana sold her blue boat.</fact>" in seen[1]
    fact, passage = found.evidence
    assert (fact.text, fact.kind, found.traced) == ("Ana sold her blue boat.", "record", False)
    assert (passage.text, passage.kind, passage.refs, passage.said) == ("Ana: Well.", "window", ("s2:1",), AT)


@pytest.mark.model
@pytest.mark.parametrize("kind", [MEM0, LLAMAINDEX], ids=lambda kind: str(kind.name))
def test_a_real_peer_finds_a_turn_by_its_source(tmp_path: Path, models: Path, kind: Kind) -> None:
    python = python_of(kind)
    path = data(
        tmp_path,
        turns=["I sold the blue boat.", "It rains in Porto today.", "I began to learn the cello."],
        questions=[("What instrument does Ana learn?", ["s1:3"])],
    )
    assert run(path, "--peer-python", str(python), "--home", str(models), "--items", "1", method=kind.name) == 0
    (built,) = lines(path, "construction.jsonl", kind.name)
    assert [what for what in built["refused"] if not what.startswith("the start of ")] == []
    (line,) = lines(path, "questions/toy.1.jsonl", kind.name)
    assert line["error"] == ""
    assert line["scores"]["turns"] == 1.0
    assert "Ana: I began to learn the cello." in line["evidence"][0]["text"]

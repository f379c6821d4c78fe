"""The command line: what each mistake says and costs, and the whole job through real processes and real models."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
from rich.console import Console
from terminal import Lychee

from lychee_local import cards, demo
from lychee_local.backends.fake import FakeCall, FakeLLM, HashEmbedder, Reply
from lychee_local.memory import Memory

ENGINES = {"torch", "llama_cpp", "outlines", "sentence_transformers", "FlagEmbedding", "transformers", "httpx"}
VERBS = (
    *("remember", "recall", "ask", "show", "stats", "flush", "consolidate"),
    *("reencode", "forget", "compact", "check", "reindex", "export", "import", "doctor", "demo"),
)
SAMPLE = str(resources.files("lychee_local") / "samples" / "everyday.jsonl")


# --- help and start --------------------------------------------------------------------------------------------------


def test_help_loads_no_engine_and_names_every_verb() -> None:
    check = (
        f"import sys; from lychee_local import cli; assert not {ENGINES!r} & set(sys.modules), sys.modules; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", check, "--help"], capture_output=True, text=True, check=True)
    for verb in (*VERBS, "models"):
        assert f" {verb} " in done.stdout


@pytest.mark.parametrize("command", VERBS)
def test_every_command_has_help_and_json(lychee: Lychee, command: str) -> None:
    done = lychee(command, "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert "--home" in done.out


# --- mistakes that no model is needed for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["remember"], "nothing to remember (name a file"),
        (["remember", "nowhere.jsonl"], "cannot read 'nowhere.jsonl': No such file or directory"),
        (["remember", "."], "cannot read '.': Is a directory"),
        (["remember", "--text", ""], "the text is empty"),
        (["remember", "--text", " \n"], "the text is blank"),
        (["remember", "--text", "caf\udce9"], "half of a surrogate pair (U+DCE9) at character 4"),
        (["remember", "--text", "hi", "--speaker", " "], "the speaker is blank"),
        (["remember", "--text", "hi", "--role", "bot"], "unknown role 'bot'"),
        (["remember", "--text", "hi", "--at", "soon"], "soon"),
        (["remember", "--text", "hi", "--session", "x" * 201], "the session has 201 characters"),
        (["remember", "--text", "hi", "-"], "both a file and --text"),
        (["remember", SAMPLE, "--conversation", "conv-1"], "holds no conversations"),
        (["recall", ""], "the question is empty"),
        (["recall", "a\0b"], "the question has a NUL at character 2"),
        (["ask", "  "], "the question is blank"),
        (["recall", "who?", "--profile", "lpatop"], "no profile is called 'lpatop' (did you mean laptop?)"),
        (["demo", "--profile", "nothing"], "no profile is called 'nothing'"),
        (["models", "show", "nothing-like-it"], "no model is called 'nothing-like-it'"),
        (["models", "pull"], "no model was named"),
        (["recall", "who?", "--mode", "chains"], "--mode 'chains' is unknown (one of lychee, chain, lychee+chain)"),
        (["show", "--records", "--nodes"], "choose one of"),
        (["show", "--kind", "entity"], "--kind 'entity' selects nothing"),
        (["stats", "--by", "week"], "--by 'week' sums nothing (one of purpose, model, session, day)"),
        (["consolidate", "--budget-seconds", "0"], "a budget is a positive number of seconds, not 0.0"),
        (["consolidate", "--max-tokens", "-1"], "a budget is a positive number of tokens, not -1"),
        (["models", "calibrate", "smollm2-135m", "--corpus", SAMPLE], "of the role llm, not embedder"),
        (["models", "calibrate", "bge-m3", "--corpus", "nowhere"], "cannot read 'nowhere': No such file or directory"),
        (
            ["models", "calibrate", "bge-m3", "--corpus", SAMPLE, "--conversation", "a"],
            "the input is JSON lines and holds no conversations",
        ),
    ],
)
def test_a_mistake_is_one_line_with_what_to_do(lychee: Lychee, arguments: list[str], says: str) -> None:
    done = lychee(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"", "the input holds no turns"),
        (b'{"text": "one"}\n{"text": \n', "line 2: not JSON"),
        (b'{"text": "one"}\n{"text": "a\\u0000b"}\n', "line 2: the text has a NUL"),
        (b'{"text": "one"}\n{"text": "\\ud800"}\n', "line 2: the text has half of a surrogate pair"),
        (b'{"text": "one"}\n{"text": "two", "speaker": ""}\n', "line 2: the speaker is empty"),
        (b"\xff\xfe{\x00", "UTF-16"),
    ],
)
def test_a_bad_line_on_standard_input_is_named(lychee: Lychee, stdin: bytes, says: str) -> None:
    done = lychee("remember", "-", stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


@pytest.mark.parametrize("arguments", [["remember", "--text", "hi"], ["recall", "who?"], ["ask", "who?"], ["stats"]])
def test_a_missing_model_says_how_to_get_it(lychee: Lychee, arguments: list[str]) -> None:
    done = lychee(*arguments)
    assert (done.code, done.out) == (4, "")
    assert "lychee models pull" in done.err


def test_a_home_below_a_regular_file_is_a_clear_error(lychee: Lychee, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for arguments in (["remember", "--text", "hi"], ["recall", "who?"]):
        done = lychee(*arguments, "--home", str(tmp_path / "file" / "home"))
        assert done.code in (3, 4)
        assert done.err.startswith("error: ")


def test_models_are_listed_shown_and_missed(lychee: Lychee) -> None:
    listed = lychee("models", "list", "--json").json
    assert {"tiny", "laptop"} <= {p["name"] for p in listed["profiles"]}
    assert all(m["licence"] and m["role"] in ("llm", "embedder", "reranker") for m in listed["models"])
    assert lychee("models", "show", "smollm2-135m", "--json").json["files"][0]["bytes"] == 98_362_432
    assert "98.4 MB" in lychee("models", "show", "smollm2-135m").out
    assert lychee("models", "list").out.count("smollm2-135m") == 2


def test_the_demo_shows_answers_beside_what_was_expected_and_counts_their_tokens(tmp_path: Path) -> None:
    def reply(call: FakeCall) -> Reply:
        return "At the map museum [1]." if call.schema is None else ("{", "length")

    written = io.StringIO()
    with Memory.open("demo", home=tmp_path, llm=FakeLLM(reply), embedder=HashEmbedder(256), reranker=None) as memory:
        measured = demo.tell(memory, Console(file=written, width=200), answers=True)
        assert measured["turns"] == len(memory.turns()) == 64
        assert measured["segments"] == len(memory.segments())
        spent = [u for u in memory.usage() if u.purpose in ("plan", "answer")]
        tokens = sum(u.prompt_tokens + u.output_tokens for u in spent)
        assert measured["query_tokens_per_question"] == round(tokens / 4)
        encoding = [u.prompt_tokens + u.output_tokens for u in memory.usage() if u.purpose == "encode"]
        assert measured["construction_tokens"] == sum(encoding) > 0
    shown = written.getvalue()
    assert shown.count("answer    At the map museum") == 4
    assert "expected  On Saturday, 9 March 2024." in shown
    assert "source    Felix: Noor, meet Biscuit" in shown


# --- the job, with real models ---------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_what_was_remembered_is_shown_recalled_and_never_stored_twice(lychee: Lychee) -> None:
    first = lychee("remember", SAMPLE, "--no-llm", "--json").json
    assert (first["turns"], first["skipped"], first["pending"]) == (64, 0, 0)
    assert first["records"]
    assert lychee("remember", SAMPLE, "--no-llm", "--json").json["turns"] == 0

    found = lychee("recall", "When did Felix adopt Biscuit?", "--json").json
    assert "mar-01" in [ref for item in found["evidence"][:5] for ref in item["refs"]]
    assert "from the shelter on Mill Lane last Saturday." in lychee("recall", "When did Felix adopt Biscuit?").out

    assert len(lychee("show", "--json").json) == 64
    segments = lychee("show", "--segments", "--session", "tea-in-march", "--json").json
    assert segments["segments"][0]["start"] == 0
    assert segments["segments"][-1]["end"] == 23
    assert len(segments["decisions"]) == 24
    assert "surprise" in lychee("show", "--segments").out
    assert {n["kind"] for n in lychee("show", "--nodes", "--kind", "entity", "--json").json} == {"entity"}
    assert lychee("stats", "--json").json["turns"] == 64
    assert "tea-in-march" in lychee("show", "--session", "nowhere").err


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_recall_explains_itself_in_every_mode(lychee: Lychee) -> None:
    lychee("remember", SAMPLE, "--no-llm")
    asked = ("recall", "When did Felix adopt Biscuit?", "--explain")
    for mode, part in (("lychee", "one of the first"), ("chain", "starts it"), ("lychee+chain", "chain 1")):
        told = lychee(*asked, "--mode", mode)
        assert told.code == 0
        assert part in told.out
        assert "milliseconds" in told.out
        found = lychee(*asked, "--mode", mode, "--json").json
        kept = [fate["id"] for fate in found["trace"]["candidates"] if fate["kept"]]
        assert kept == [item["id"] for item in found["evidence"]]
    assert lychee("recall", "When did Felix adopt Biscuit?", "--json").json["trace"] is None


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_a_file_that_has_grown_adds_only_its_new_turns(lychee: Lychee, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"text": "yes"}\n{"text": "no"}\n')
    assert lychee("remember", str(file), "--no-llm", "--json").json["turns"] == 2
    file.write_text('{"text": "yes"}\n{"text": "no"}\n{"text": "yes"}\n')
    grown = lychee("remember", str(file), "--no-llm", "--json").json
    assert (grown["turns"], grown["skipped"]) == (1, 2)


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_bad_lines_are_left_out_on_request_and_nothing_stored_is_lost(lychee: Lychee, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    file.write_bytes(b'{"text": "the blue door"}\nnonsense\n{"text": "the red door"}\n')
    done = lychee("remember", str(file), "--skip-bad", "--no-llm", "--json")
    assert (done.code, done.json["turns"], len(done.json["bad"])) == (0, 2, 1)
    assert "line 2" in done.json["bad"][0]
    assert "line 2" in done.err
    assert lychee("remember", str(file), "--no-llm").code == 2
    assert [t["text"] for t in lychee("show", "--json").json] == ["the blue door", "the red door"]


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_a_megabyte_emoji_and_other_scripts_are_stored_whole(lychee: Lychee) -> None:
    long = "All is calm in the harbour tonight. " * 28_000 + "The lighthouse keeper is called Oleander."
    turns = [long, "🦀🏳️‍🌈 party", "我昨天搬到了里斯本。", "أحب الشاي بالنعناع"]
    stdin = "".join(json.dumps({"text": t, "speaker": "Ana"}) + "\n" for t in turns).encode()
    assert len(long) > 1_000_000
    assert lychee("remember", "-", "--no-llm", "--later", stdin=stdin).code == 0
    assert [t["text"] for t in lychee("show", "--json").json] == turns
    assert "Oleander" in json.dumps(
        lychee("recall", "What is the lighthouse keeper called?", "--json").json["evidence"]
    )


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_a_question_of_ten_thousand_words_finds_what_it_asks(lychee: Lychee) -> None:
    lychee("remember", "--text", "My bicycle is green.", "--speaker", "Ana", "--no-llm")
    done = lychee("recall", "please tell me " * 3_333 + "what colour is the bicycle?", "--json")
    assert done.code == 0
    assert "bicycle is green" in done.json["evidence"][0]["text"]


def test_an_output_that_is_full_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lychee_local", "models", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_a_home_that_cannot_be_one_is_named_as_the_cause(lychee: Lychee, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for home in (str(file / "below"), str(tmp_path / ("d" * 300))):
        done = lychee("stats", "--home", home)
        assert done.code == 3
        assert "choose another home" in done.err


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_a_text_stays_open_until_its_session_is_flushed(lychee: Lychee) -> None:
    said = lychee(
        "remember", "--text", "I moved to Lisbon last week.", "--speaker", "Ana", "--session", "m", "--no-llm"
    )
    assert "lychee flush" in said.out
    assert lychee("show", "--records", "--json").json == []
    assert len(lychee("flush", "--session", "m", "--no-llm", "--json").json["segments"]) == 1
    assert len(lychee("show", "--records", "--json").json) == 1


@pytest.mark.model
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("user", ["../x", "", "a/b", "x" * 300, "nul\0"])
def test_a_user_name_never_leaves_its_folder(lychee: Lychee, models: Path, user: str) -> None:
    before = sorted(p.name for p in models.parent.iterdir())
    done = lychee("remember", "--text", "hi", "--no-llm", "--user", user)
    assert done.code in (2, 3)
    assert done.err.startswith("error: ")
    assert sorted(p.name for p in models.parent.iterdir()) == before


@pytest.mark.model
def test_a_memory_that_is_not_there_or_cannot_be_made_is_a_clear_error(lychee: Lychee, models: Path) -> None:
    done = lychee("recall", "who?", "--user", "nobody")
    assert (done.code, done.out) == (3, "")
    assert not (models / "users").exists()
    (models / "users").write_text("not a folder")
    done = lychee("remember", "--text", "hi", "--no-llm")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: ")


@pytest.mark.model
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("content", ["empty", "other"])
def test_a_broken_model_file_costs_the_records_and_nothing_else(lychee: Lychee, models: Path, content: str) -> None:
    lychee("remember", "--text", "My bicycle is green.", "--no-llm", "--session", "kept")
    file = models / "models" / "smollm2-135m" / cards.card("smollm2-135m").files[0].path
    file.unlink()
    file.touch()
    if content == "other":
        os.truncate(file, 98_362_432)
    done = lychee("remember", SAMPLE)
    assert done.code == 4
    assert done.err.splitlines()[-1].startswith("error: ")
    assert "bicycle" in lychee("recall", "What colour is the bicycle?").out


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_ctrl_c_leaves_a_store_that_goes_on_where_it_stopped(lychee: Lychee, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lychee_local", "remember", SAMPLE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("encoding segments: 1/"):
            process.send_signal(signal.SIGINT)
            break
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert "64 turns" in said
    assert "give the same command again" in said
    stopped = lychee("stats", "--json").json
    assert stopped["pending"] > 0
    assert stopped["records"] > 0

    done = lychee("remember", SAMPLE, "--no-llm", "--json").json
    assert (done["turns"], done["skipped"], done["pending"]) == (0, 64, 0)
    assert lychee("stats", "--json").json["segments"] == stopped["segments"]


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_the_demo_tells_the_whole_story_without_a_language_model(lychee: Lychee, models: Path) -> None:
    done = lychee("demo", "--no-llm", "--json")
    assert done.code == 0
    measured = done.json
    assert (measured["turns"], measured["questions"]) == (64, 4)
    assert measured["segments"] >= 3
    assert measured["records"] > 0
    assert measured["construction_tokens"] == 0
    assert "Which animals live with Felix?" in done.err
    assert sorted(p.name for p in models.iterdir()) == ["models"]


# --- encoding later and again ----------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_a_watching_process_encodes_what_others_remember_until_ctrl_c(lychee: Lychee) -> None:
    first, second = (json.dumps({"text": f"My {what}.", "session": what}).encode() for what in ("boat", "kite"))
    assert lychee("remember", "-", "--later", stdin=first).code == 0
    assert lychee("stats", "--json").json["pending"] == 1
    command = [sys.executable, "-m", "lychee_local", "consolidate", "--watch", "--no-llm"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("nothing waits" in line for line in process.stderr)
        assert lychee("stats", "--json").json["pending"] == 0
        # The memory is free while nothing waits.
        assert lychee("remember", "-", "--later", stdin=second).code == 0
        until = time.monotonic() + 60
        while lychee("stats", "--json").json["pending"] and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "wait to be encoded" not in told  # nothing does
    assert lychee("stats", "--json").json["pending"] == 0


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_rules_stand_in_until_a_model_encodes_again_and_the_space_is_reclaimed(lychee: Lychee) -> None:
    said = ("remember", "--text", "My bicycle is green and has a basket.", "--speaker", "Ana", "--session", "m")
    assert lychee(*said, "--later").code == 0
    assert lychee("flush", "--no-llm").code == 0
    assert [r["origin"] for r in lychee("show", "--records", "--json").json] == ["rules"]
    done = lychee("reencode", "--json")
    assert done.code == 0
    assert len(done.json["segments"]) + len(done.json["kept"]) == 1
    assert done.json["usage"][0]["session"] == "m"
    again = lychee("reencode", "--no-llm").out
    assert "encoded anew by the rules" in again or "nothing to do" in again
    sizes = lychee("compact", "--json").json
    assert sizes["bytes_after"] <= sizes["bytes_before"]
    assert "no session" in lychee("reencode", "--session", "nowhere", "--no-llm").err
    by_session = lychee("stats", "--by", "session", "--json").json
    assert {row["session"] for row in by_session} == {"m"}
    assert by_session[0]["spent"]["calls"] >= 1
    assert "in all" in lychee("stats", "--by", "day").out


@pytest.mark.model
@pytest.mark.usefixtures("models")
def test_an_embedder_is_calibrated_for_memories_made_from_then_on(lychee: Lychee, tmp_path: Path) -> None:
    assert lychee("remember", "--text", "hello", "--user", "before", "--later").code == 0
    subjects = ("the cello needs new strings", "tomatoes grow in the garden", "our train to Porto was late")
    corpus = tmp_path / "corpus.jsonl"
    lines = [
        {"text": f"I think {subject}, said {number}.", "session": f"s{session}"}
        for session in range(2)
        for subject in subjects
        for number in range(18)
    ]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("models", "calibrate", "all-minilm-l6-v2", "--corpus", str(corpus), "--turns-per-segment", "9")
    measured = lychee(*command, "--json").json
    assert measured["written"] is None
    shipped = lychee("models", "show", "all-minilm-l6-v2", "--json").json["calibration"]
    assert shipped == measured["calibrated"]["before"]
    assert "written to" in lychee(*command, "--write").out
    now = lychee("models", "show", "all-minilm-l6-v2", "--json").json["calibration"]
    assert now == measured["calibrated"]["calibration"] != shipped
    assert lychee("remember", "--text", "hello", "--user", "after", "--later").code == 0
    for user, calibration in (("before", shipped), ("after", now)):
        [manifest] = (tmp_path / "home" / "users").glob(f"{user}-*/manifest.json")
        assert json.loads(manifest.read_bytes())["embedder"]["calibration"] == calibration

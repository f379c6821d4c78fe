"""The doctor's report, with native parts that really crash, hang or are missing in the child process.

Broken parts are small packages put before the real ones on the child's path.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import models_home

from lychee_local import cards, doctor, pull
from lychee_local.errors import BadInput, ModelError

SEGFAULT = "import ctypes\nctypes.string_at(0)\n"
# Imports and says how it was built, as llama-cpp-python does, and dies when a model is loaded.
CRASH_AT_LOAD = """
import ctypes
def llama_log_callback(function): return function
def llama_log_set(callback, data): pass
def llama_print_system_info(): return b"CPU : AVX2 = 1 | AMX_INT8 = 1 | "
def llama_supports_gpu_offload(): return False
class Llama:
    def __init__(self, **options): ctypes.string_at(0)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a file in the place and of the size of SmolLM2, which native code would find empty."""
    card = cards.card("smollm2-135m")
    path = pull.model_folder(card, tmp_path) / card.files[0].path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert card.files[0].bytes is not None
    os.truncate(path, card.files[0].bytes)
    return tmp_path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others on the path of child processes."""
    folder = tmp_path / "broken"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


def checks(report: doctor.Report) -> dict[str, doctor.Check]:
    return {check.name: check for check in report.checks}


def test_a_library_that_crashes_is_a_line_with_the_command_that_rebuilds_it(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text(SEGFAULT)
    report = doctor.examine(home, "tiny")
    llm = checks(report)["language model"]
    assert llm.state == "fail"
    assert llm.detail.startswith("crashed (SIGSEGV) while importing llama.cpp")
    assert "recall works without it" in llm.detail
    assert "CMAKE_ARGS=" in llm.hint
    assert "-DGGML_NATIVE=OFF" in llm.hint
    assert not report.ok


def test_a_crash_of_a_build_that_uses_amx_says_so(home: Path, package: Path, tmp_path: Path) -> None:
    (package / "llama_cpp.py").write_text(CRASH_AT_LOAD)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16 amx_tile amx_int8\n")
    llm = checks(doctor.examine(home, "tiny", cpuinfo=cpuinfo))["language model"]
    assert "crashed (SIGSEGV) while loading the model" in llm.detail
    assert "announces AMX and this build uses it" in llm.detail
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    assert "AMX" not in checks(doctor.examine(home, "tiny", cpuinfo=cpuinfo))["language model"].detail


def test_a_library_that_is_missing_says_how_to_install_it(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text("raise ModuleNotFoundError(\"No module named 'llama_cpp'\")\n")
    llm = checks(doctor.examine(home, "tiny"))["language model"]
    assert (llm.state, "is not installed" in llm.detail) == ("fail", True)
    assert "pip install llama-cpp-python" in llm.hint


def test_a_library_that_hangs_is_given_up(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text("import time\nprint('one moment', flush=True)\ntime.sleep(600)\n")
    llm = checks(doctor.examine(home, "tiny", seconds=10))["language model"]
    assert llm.state == "fail"
    assert llm.detail.startswith("did not finish in 10 s while importing llama.cpp")


def test_a_child_that_is_killed_points_to_memory(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    llm = checks(doctor.examine(home, "tiny"))["language model"]
    assert "SIGKILL" in llm.detail
    assert "memory" in llm.hint


def test_a_child_that_ends_without_a_word_has_failed(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text("import os\nos._exit(0)\n")
    llm = checks(doctor.examine(home, "tiny"))["language model"]
    assert (llm.state, "exit status 0" in llm.detail) == ("fail", True)


def test_a_broken_index_library_is_a_line_of_its_own(tmp_path: Path, package: Path) -> None:
    (package / "hnswlib.py").write_text(SEGFAULT)
    index = checks(doctor.examine(tmp_path, "tiny"))["vector index"]
    assert (index.state, "SIGSEGV" in index.detail) == ("fail", True)
    assert "hnswlib" in index.hint
    (package / "hnswlib.py").write_text("raise ImportError('no wheel for this Python')\n")
    index = checks(doctor.examine(tmp_path, "tiny"))["vector index"]
    assert "no wheel for this Python" in index.detail


def test_models_that_are_not_here_name_the_command_that_fetches_them(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path / "new", "tiny")
    found = checks(report)
    assert found["embedder"].hint == "run: lychee models pull all-minilm-l6-v2"
    assert found["language model"].hint == "run: lychee models pull smollm2-135m"
    assert found["vector index"].state == "ok"
    assert found["memory folder"].detail.endswith("new (will be made)")
    assert not (tmp_path / "new").exists()
    assert not report.ok


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = checks(doctor.examine(tmp_path / "file" / "home", "tiny"))["memory folder"]
    assert (folder.state, "cannot be written" in folder.detail) == ("fail", True)


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="gigantic"):
        doctor.examine(tmp_path, "gigantic")


def test_the_report_reads_as_rows_and_as_json_and_a_warning_does_not_fail_it() -> None:
    good = doctor.Check("disk space", "ok", "9.0 GB free")
    weak = doctor.Check("reranker", "warn", "not here", "run: lychee models pull x")
    bad = doctor.Check("embedder", "fail", "crashed")
    report = doctor.Report("tiny", "/home", (good, weak))
    assert report.ok
    assert not doctor.Report("tiny", "/home", (good, bad)).ok
    assert report.as_rows()[1] == ("reranker", "warn", "not here", "run: lychee models pull x")
    assert json.loads(json.dumps(report.as_json())) == {
        "ok": True,
        "profile": "tiny",
        "home": "/home",
        "checks": [
            {"name": "disk space", "state": "ok", "detail": "9.0 GB free", "hint": ""},
            {"name": "reranker", "state": "warn", "detail": "not here", "hint": "run: lychee models pull x"},
        ],
    }


def test_the_rebuild_command_takes_what_the_cpu_grants_and_never_amx() -> None:
    avx512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2", "amx_tile", "amx_int8"}
    assert "-DGGML_AVX512=ON" in doctor.rebuild_command(avx512)
    assert "AVX512_VNNI=ON" not in doctor.rebuild_command(avx512)
    assert "-DGGML_AVX512_VNNI=ON" in doctor.rebuild_command(avx512 | {"avx512_vnni"})
    assert "AVX512" not in doctor.rebuild_command({"avx2"})
    assert "AMX" not in doctor.rebuild_command(avx512)
    assert "-DGGML_NATIVE=OFF" in doctor.rebuild_command(set())


@pytest.mark.model
def test_with_real_models_everything_is_tried_and_works(smollm2_path: Path, minilm_path: Path) -> None:
    report = doctor.examine(models_home(), "tiny", seconds=300)
    assert report.ok, report.as_rows()
    found = checks(report)
    assert {name for name, check in found.items() if check.state == "ok"} >= {
        "vector index",
        "embedder",
        "offline",
        "language model",
        "JSON constraint",
    }
    assert "384 dimensions" in found["embedder"].detail
    assert '"ripe"' in found["JSON constraint"].detail


def test_a_model_that_would_crash_this_process_is_refused_before_it_is_loaded(home: Path, package: Path) -> None:
    (package / "llama_cpp.py").write_text(SEGFAULT)
    with pytest.raises(ModelError, match=r"crashed \(SIGSEGV\) while importing llama.cpp .*pip install"):
        doctor.confirm_language_model(home, "smollm2-135m")


@pytest.mark.model
def test_a_model_is_tried_once_for_each_build(smollm2_path: Path, tmp_path: Path, package: Path) -> None:
    """The second time a library that crashes goes unnoticed: the child process was not started again."""
    link = pull.model_folder(cards.card("smollm2-135m"), tmp_path)
    link.parent.mkdir(parents=True)
    link.symlink_to(smollm2_path.parent)
    doctor.confirm_language_model(tmp_path, "smollm2-135m")
    (package / "llama_cpp.py").write_text(SEGFAULT)
    doctor.confirm_language_model(tmp_path, "smollm2-135m")

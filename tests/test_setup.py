"""The choices of the set-up scripts: build flags by CPU, the key of a kept build, what a missing compiler is told."""

from __future__ import annotations

import shlex
from pathlib import Path

import install
import native
import pytest

AVX2 = {"avx", "avx2", "bmi2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


def flags(cpu: set[str], machine: str = "x86_64", system: str = "Linux") -> set[str]:
    """Without the two that leave parts of llama.cpp out."""
    return {flag for flag in native.cmake_flags(cpu, machine, system) if "GGML" in flag}


def test_a_plain_cpu_gets_the_avx2_baseline() -> None:
    assert flags(AVX2) == {"-DGGML_NATIVE=OFF"}


def test_an_avx512_cpu_gets_its_instructions_but_never_amx() -> None:
    announced = AVX512 | {"avx512vbmi", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}
    assert flags(announced) == {
        "-DGGML_NATIVE=OFF",
        "-DGGML_AVX512=ON",
        "-DGGML_AVX512_VBMI=ON",
        "-DGGML_AVX512_VNNI=ON",
    }


def test_half_of_avx512_is_not_avx512() -> None:
    assert flags(AVX2 | {"avx512f", "avx512_vnni"}) == {"-DGGML_NATIVE=OFF"}


def test_an_old_cpu_gets_nothing_that_it_cannot_do() -> None:
    assert flags({"avx", "sse4_2"}) == {
        "-DGGML_NATIVE=OFF",
        "-DGGML_AVX2=OFF",
        "-DGGML_BMI2=OFF",
        "-DGGML_FMA=OFF",
        "-DGGML_F16C=OFF",
    }


def test_arm_is_told_by_its_features_and_a_mac_decides_itself() -> None:
    assert flags({"asimd", "asimdhp", "asimddp", "i8mm"}, "aarch64") == {
        "-DGGML_NATIVE=OFF",
        "-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16+i8mm",
    }
    assert flags({"asimd"}, "aarch64") == {"-DGGML_NATIVE=OFF"}
    assert flags(set(), "arm64", "Darwin") == set()


def test_the_users_own_flags_come_last_and_make_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    plain = native.build_key()
    assert plain.startswith(f"{native.VERSION}-")
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON '-DX=a b'")
    assert native.build_arguments()[-2:] == ["-DGGML_CUDA=ON", "-DX=a b"]
    assert shlex.split(shlex.join(native.build_arguments())) == native.build_arguments()
    assert native.build_key() != plain


def test_the_version_that_is_built_is_the_version_that_is_asked_for() -> None:
    assert f'"llama-cpp-python=={native.VERSION}"' in (install.ROOT / "pyproject.toml").read_text()
    assert not any(requirement.startswith("llama") for requirement in install.other_requirements())


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = native.compiler_problem()
    assert problem is not None
    assert "apt install build-essential" in problem
    assert "xcode-select" in problem


def test_a_compiler_that_cannot_compile_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert "Python.h: No such file" in (native.compiler_problem() or "")


def test_a_changed_cpu_or_project_file_sets_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = install.fingerprint_of_inputs()
    assert install.fingerprint_of_inputs() == before
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON")
    assert install.fingerprint_of_inputs() != before

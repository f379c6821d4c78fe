"""The native build of llama-cpp-python: which flags fit this CPU, and the wheel they give, kept for later.

llama.cpp's own choice is `-march=native`, which takes AMX where the CPU announces it; on virtual machines whose kernel
does not grant it, the first matrix product then dies with SIGSEGV. So the flags are chosen here, from what the kernel
reports, and AMX is never among them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

VERSION = "0.3.36"
# What llama-cpp-python itself declares; it is installed without its dependencies, from our own wheel.
RUNTIME_REQUIREMENTS = ("typing-extensions>=4.5", "diskcache>=5.6.1", "jinja2>=2.11.3")
BUILD_PLAN = "llama.cpp: compiled here for this CPU from 77 MB of source, about 5 minutes on two cores, once"
# Leaves out llama.cpp's command-line support library, which no Python code can reach.
TRIM = Path(__file__).resolve().parent / "trim.cmake"

_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_NINJA = re.compile(r"\[(\d+)/(\d+)\]")

NO_COMPILER = """no working C++ compiler was found, and llama.cpp and hnswlib are compiled here.
  Debian, Ubuntu:  sudo apt install build-essential python3-dev
  Fedora:          sudo dnf install gcc-c++ make python3-devel
  Arch:            sudo pacman -S base-devel
  macOS:           xcode-select --install
Then run the same command again."""


def compiler_problem() -> str | None:
    """None if a C++ program that includes Python's headers compiles here, else what to do."""
    compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        return NO_COMPILER
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <Python.h>\n#include <filesystem>\nint main() { return 0; }\n")
        include = sysconfig.get_path("include")
        command = [*compiler.split(), "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)]
        probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode == 0:
        return None
    return f"{NO_COMPILER}\nThe compiler {compiler} said:\n  " + "\n  ".join(probe.stderr.splitlines()[:5])


def cpu_flags() -> set[str]:
    """What the kernel says this CPU can do; empty where there is no /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(found.group(1).split()) if found else set()


def cmake_flags(flags: set[str], machine: str, system: str) -> list[str]:
    """The build options for a CPU with these flags. `machine` and `system` as `platform` names them."""
    chosen = ["-DLLAVA_BUILD=OFF", f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={TRIM}"]
    if system == "Darwin":
        return chosen  # no AMX there, and llama-cpp-python's own choice is right
    chosen.append("-DGGML_NATIVE=OFF")
    if machine in ("x86_64", "AMD64"):
        for option, needed in (("AVX", "avx"), ("AVX2", "avx2"), ("BMI2", "bmi2"), ("FMA", "fma"), ("F16C", "f16c")):
            if needed not in flags:
                chosen.append(f"-DGGML_{option}=OFF")  # on by default
        if "avx_vnni" in flags:
            chosen.append("-DGGML_AVX_VNNI=ON")
        if flags >= _AVX512:
            chosen.append("-DGGML_AVX512=ON")
            if flags & {"avx512vbmi", "avx512_vbmi"}:
                chosen.append("-DGGML_AVX512_VBMI=ON")
            if "avx512_vnni" in flags:
                chosen.append("-DGGML_AVX512_VNNI=ON")
    elif machine in ("aarch64", "arm64") and "asimddp" in flags:
        arch = "armv8.2-a+dotprod" + ("+fp16" if "asimdhp" in flags else "") + ("+i8mm" if "i8mm" in flags else "")
        chosen.append(f"-DGGML_CPU_ARM_ARCH={arch}")
    return chosen


def build_arguments() -> list[str]:
    """Our flags, then the user's own CMAKE_ARGS, which win."""
    own = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    return [*cmake_flags(cpu_flags(), platform.machine(), platform.system()), *own]


def build_key() -> str:
    """Names a build: version, machine, and a hash of everything that goes into it."""
    arguments = [argument.replace(str(TRIM.parent), "setup") for argument in build_arguments()]
    inputs = [VERSION, arguments, TRIM.read_text(), sys.platform, platform.machine(), platform.libc_ver()]
    inputs += [sys.implementation.cache_tag, os.environ.get("CC", ""), os.environ.get("CXX", "")]
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    return f"{VERSION}-{platform.machine()}-{digest[:12]}"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lychee-local" / "wheels" / build_key()


def cached_wheel() -> Path | None:
    return next(iter(sorted(cache_folder().glob("*.whl"))), None)


class Build:
    """A build in a child process. pip's own wheel cache is kept out of it, because that ignores the build's flags."""

    def __init__(self, python: Path, log: Path) -> None:
        self.log = log
        self._began = time.monotonic()
        self._ended: float | None = None
        cache_folder().parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_folder().parent))
        command = [str(python), "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--no-input"]
        command += ["--disable-pip-version-check", "--no-binary", "llama-cpp-python", "--wheel-dir", str(self._folder)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [*command, f"llama-cpp-python=={VERSION}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CMAKE_ARGS": shlex.join(build_arguments())},
                start_new_session=True,
            )

    def running(self) -> bool:
        if self._process.poll() is None:
            return True
        self._ended = self._ended or time.monotonic()
        return False

    def failed(self) -> bool:
        return not self.running() and self._process.returncode != 0

    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._began

    def status(self) -> str:
        """How far it is, in a few words."""
        if not self.running():
            return "compiled" if self._process.returncode == 0 else "failed"
        with self.log.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 65_536))
            steps = _NINJA.findall(stream.read().decode(errors="replace"))
        return f"compiled {steps[-1][0]} of {steps[-1][1]}" if steps else "preparing"

    def finish(self) -> Path | None:
        """The wheel in the cache, or None if the build failed. Of two builds at once the first one's stays."""
        built = next(iter(sorted(self._folder.glob("*.whl"))), None)
        if self._process.wait() != 0 or built is None:
            return None
        try:
            self._folder.rename(cache_folder())
        except OSError:
            shutil.rmtree(self._folder)
        return cached_wheel()

    def stop(self) -> None:
        """Ends the compilers too, and leaves nothing half-built in the cache."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 15)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

"""Sets this checkout up: `.venv` with the package, its tools, torch and a llama.cpp that fits this CPU.

Run by `make`; needs nothing but Python 3.11 and a C++ compiler. Can be run again at any time: it does nothing when
nothing changed, and the llama.cpp build is kept in the user's cache for every other checkout. It respects the user's
pip configuration, and says what it downloads before it does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (nothing has checked requires-python before this script)
    sys.exit(f"Lychee Local needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")

import tomllib

import native

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "lychee-setup.json"
LOGS = VENV / "log"

TORCH = "torch==2.13.0"
# PyTorch's own index of builds without CUDA. Elsewhere the same version may be the CUDA build, ten times as large.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
STATUS_SECONDS = 15.0
# Measured on Linux x86-64: torch 0.2 GB, everything else 0.42 GB, unpacked 1.8 GB.
NEEDED_BYTES = 4_000_000_000

PLAN = """Setting up Lychee Local in {venv}
  from the Python package index, about 0.7 GB in about 110 packages:
    torch, CPU build (BSD-3-Clause); transformers, sentence-transformers, huggingface-hub (Apache-2.0); FlagEmbedding,
    llama-cpp-python with llama.cpp, outlines, llguidance (MIT, Apache-2.0); hnswlib, ray (Apache-2.0); numpy, scipy,
    scikit-learn (BSD-3-Clause); what these need and the tools for tests, all under open licences
  {build}
No model is downloaded in this step."""


class SetupFailed(Exception):
    """Ends the set-up with a message for the reader."""


def main() -> None:
    began = time.monotonic()
    fingerprint = fingerprint_of_inputs()
    if STAMP.exists() and json.loads(STAMP.read_text()) == fingerprint and (VENV / "bin" / "lychee").exists():
        return
    try:
        check_machine()
        cached = native.cached_wheel()
        build = "llama.cpp: built before, taken from the cache" if cached else native.BUILD_PLAN
        print(PLAN.format(venv=VENV, build=build), flush=True)
        STAMP.unlink(missing_ok=True)
        make_venv()
        install(cached)
    except SetupFailed as error:
        sys.exit(f"\nset-up failed: {error}")
    STAMP.write_text(json.dumps(fingerprint))
    print(f"Set up in {time.monotonic() - began:.0f} s.", flush=True)


def fingerprint_of_inputs() -> dict[str, str]:
    """What a finished set-up depends on; when any of it changes, the next run sets up again."""
    inputs = [ROOT / "pyproject.toml", *sorted(Path(__file__).resolve().parent.glob("*.*"))]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs))
    return {"inputs": digest.hexdigest(), "python": sys.version, "llama.cpp": native.build_key(), "at": str(ROOT)}


# --- before anything is downloaded -----------------------------------------------------------------------------------


def check_machine() -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        raise SetupFailed(f"{free / 1e9:.1f} GB free on the disk of {ROOT}, {NEEDED_BYTES / 1e9:.0f} GB are needed.")
    problem = native.compiler_problem()
    if problem:
        raise SetupFailed(problem)


def make_venv() -> None:
    if not (VENV / "bin" / "python").exists():
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
        if made.returncode != 0:
            hint = "On Debian and Ubuntu: sudo apt install python3-venv"
            raise SetupFailed(f"{sys.executable} cannot make a virtual environment.\n{made.stdout.strip()}\n{hint}")
    LOGS.mkdir(exist_ok=True)


# --- installing ------------------------------------------------------------------------------------------------------


def install(cached: Path | None) -> None:
    """Compiles llama.cpp while pip downloads and installs all the rest, then brings both together."""
    # The pip of a fresh Python 3.11 resolves this set much more slowly than a current one. An index that has no newer
    # pip is no reason to stop. Before the build, because that runs in the same pip.
    run_pip("pip", ["install", "--upgrade", "pip>=25"], None, required=False)
    build = None if cached else native.Build(VENV / "bin" / "python", LOGS / "llama.log")
    try:
        install_torch(build)
        run_pip("packages", ["install", TORCH, *other_requirements()], build)
        wheel = cached or wait_for(build)
        run_pip("llama.cpp", ["install", "--no-deps", "--force-reinstall", str(wheel)], None)
        run_pip("lychee", ["install", "--no-deps", "--editable", str(ROOT)], None)
        run_pip("check", ["check"], None)
    finally:
        if build is not None:
            build.stop()


def other_requirements() -> list[str]:
    """All that pyproject.toml asks for but llama-cpp-python, for which we have our own wheel, with what that needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    wanted = [*project["project"]["dependencies"], *groups["dev"], *groups["ray"]]  # what all tests need
    return [r for r in wanted if not r.startswith("llama-cpp-python")] + list(native.RUNTIME_REQUIREMENTS)


def install_torch(build: native.Build | None) -> None:
    """Torch before all else, so that nothing that depends on it brings a build of its own choice."""
    if sys.platform != "linux" or has_nvidia_gpu():
        run_pip("torch", ["install", TORCH], build)
        return
    if answers(TORCH_CPU_INDEX + "/torch/"):
        if run_pip("torch", ["install", TORCH, "--index-url", TORCH_CPU_INDEX], build, required=False):
            return
        print("  PyTorch's CPU index did not deliver; trying the configured index.", flush=True)
    warn_of_cuda()
    run_pip("torch", ["install", TORCH], build)


def has_nvidia_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and "GPU" in subprocess.run([tool, "-L"], capture_output=True, text=True).stdout


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_SECONDS):
            return True
    except (urllib.error.URLError, OSError):
        return False


def warn_of_cuda() -> None:
    """Says so, and how large it is, when the configured index offers torch only with CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["install", "--dry-run", "--quiet", "--ignore-installed", "--report", str(report), TORCH]
        if pip(command, LOGS / "torch-report.log").wait() != 0:
            return  # the installation itself will say why
        items = json.loads(report.read_text())["install"]
    nvidia = [item for item in items if item["metadata"]["name"].lower().startswith(("nvidia-", "cuda-"))]
    if not nvidia:
        return
    size = sum(size_at(item["download_info"]["url"]) for item in items)
    known = f"{size / 1e9:.1f} GB" if size else "several GB"
    print(
        f"  There is no NVIDIA GPU here, but the configured index has torch only with CUDA: {known} in {len(items)}\n"
        f"  packages, {len(nvidia)} of them under NVIDIA's proprietary licence. Ctrl-C stops here. A pip\n"
        f"  configuration that offers {TORCH_CPU_INDEX} avoids it.",
        flush=True,
    )


def size_at(url: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PROBE_SECONDS) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (urllib.error.URLError, OSError, ValueError):
        return 0


# --- running and reporting -------------------------------------------------------------------------------------------


def pip(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)


def run_pip(step: str, arguments: list[str], build: native.Build | None, *, required: bool = True) -> bool:
    """One pip command, its output in a log, a line of status every few seconds; True if it succeeded."""
    log = LOGS / f"{step}.log"
    log.write_bytes(b"")
    began = shown = time.monotonic()
    process = pip(arguments, log)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if build is not None and build.failed():
                raise build_failed(build)
            if now - shown >= STATUS_SECONDS:
                shown = now
                native_line = f"   llama.cpp: {build.status()}" if build is not None else ""
                print(f"  [{now - began:4.0f} s] {step}: {last_line(log)}{native_line}", flush=True)
    finally:
        if process.poll() is None:
            process.terminate()
    if process.returncode == 0:
        print(f"  {step}: done in {time.monotonic() - began:.0f} s", flush=True)
    elif required:
        raise SetupFailed(f"{step}: pip ended with status {process.returncode}.\n{tail(log)}\nThe whole log: {log}")
    return process.returncode == 0


def wait_for(build: native.Build | None) -> Path:
    assert build is not None
    began = shown = time.monotonic()
    while build.running():
        time.sleep(0.2)
        now = time.monotonic()
        if now - shown >= STATUS_SECONDS:
            shown = now
            print(f"  [{now - began:4.0f} s] llama.cpp: {build.status()}", flush=True)
    wheel = build.finish()
    if wheel is None:
        raise build_failed(build)
    print(f"  llama.cpp: built in {build.seconds():.0f} s, kept in {wheel.parent}", flush=True)
    return wheel


def build_failed(build: native.Build) -> SetupFailed:
    return SetupFailed(f"llama.cpp could not be built.\n{tail(build.log)}\nThe whole log: {build.log}")


def last_line(log: Path) -> str:
    lines = tail(log, 1).strip()
    return lines[:70] + ("..." if len(lines) > 70 else "")


def tail(log: Path, count: int = 15) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - 16_384))
        lines = stream.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in [line for line in lines if line.strip()][-count:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; run the same command again to go on")

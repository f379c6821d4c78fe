"""What works on this machine, and what to do about the rest.

Owns the probes behind `lychee doctor`. Every native part is tried in a child process, with the models of a profile, so
that a crash of compiled code becomes a line of the report. Repairs nothing and downloads nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lychee_local import cards, pull, tuning
from lychee_local.backends.native import installed_llama, version_of
from lychee_local.cards import Card
from lychee_local.errors import ConstraintNotApplied, LycheeError, ModelError
from lychee_local.types import ChatMessage

State = Literal["ok", "warn", "fail"]

PROBE_SECONDS = 180.0  # a model of several gigabytes from a slow disk takes one minute
_MARK = "lychee-probe "  # a library may print too
LOW_DISK_BYTES = 1_000_000_000
NO_DISK_BYTES = 50_000_000
LIBRARIES = (
    "llama-cpp-python",
    "outlines",
    "llguidance",
    "hnswlib",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "sentence-transformers",
    "FlagEmbedding",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `hint` is what to do, empty where there is nothing to do."""

    name: str
    state: State
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    profile: str
    home: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the main job, to remember and to answer with this profile's models, can run here."""
        return all(check.state != "fail" for check in self.checks)

    def as_rows(self) -> list[tuple[str, str, str, str]]:
        """Name, state, detail and hint of each check, in order."""
        return [(check.name, check.state, check.detail, check.hint) for check in self.checks]

    def as_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"ok": self.ok, "profile": self.profile, "home": self.home, "checks": checks}


def examine(
    home: Path,
    profile: str,
    *,
    llm: str | None = None,
    seconds: float = PROBE_SECONDS,
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> Report:
    """Try everything that remembering, recalling and asking with this profile needs. `seconds` bounds each probe,
    `cpuinfo` says what the kernel announces of the CPU, `llm` names a model to take in place of the profile's.

    Raises:
        BadInput: there is no such profile.
    """
    return Report(profile, str(home), tuple(_checks(home, profile, llm, seconds, cpu_flags(cpuinfo))))


def _checks(home: Path, profile: str, llm: str | None, seconds: float, cpu: set[str]) -> Iterator[Check]:
    chosen = cards.profile(profile)
    llm = llm or chosen.llm
    yield _libraries()
    yield _folder(home)
    yield _disk(home)
    yield _index(seconds)
    yield from _embedder(cards.card(chosen.embedder, home), home, seconds)
    if chosen.reranker is not None:
        yield _reranker(cards.card(chosen.reranker, home), home, seconds)
    if llm is None:
        yield Check("language model", "warn", f"the profile {profile} has none: recall works, ask does not")
    else:
        yield from _language_model(cards.card(llm, home), home, seconds, cpu)


def confirm_language_model(
    home: Path, name: str, *, seconds: float = PROBE_SECONDS, cpuinfo: Path = Path("/proc/cpuinfo")
) -> None:
    """Let a child process load the model before this one does, so that a crash of native code ends as a message.

    Done once for each model and build of llama.cpp; a model that is not on this machine is left to whoever loads it.

    Raises:
        ModelError: the child did not get through, with what it died of and the command that repairs it.
    """
    card = cards.card(name, home)
    path = pull.locate(card, home)
    passed = home / "models" / ".tried" / card.name
    build = installed_llama()
    if path is None or (passed.is_file() and passed.read_text(encoding="utf-8") == f"{build}\n{path}"):
        return
    run = _run_model(card, home, seconds)
    if not run.finished:
        raise ModelError(f"{card.name}: {run.problem}", hint=run.hint or rebuild_command(cpu_flags(cpuinfo)))
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.write_text(f"{build}\n{path}", encoding="utf-8")


# --- this machine ---


def _libraries() -> Check:
    versions = {name: version_of(name) for name in LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    detail = f"Python {platform.python_version()}, {listed}"
    if not missing:
        return Check("libraries", "ok", detail)
    # Only a warning: the probes below say which part does not work without them.
    return Check("libraries", "warn", f"not installed: {', '.join(missing)}; {detail}", _install(*missing))


def _folder(home: Path) -> Check:
    place = _existing(home)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".lychee-doctor-") as file:
            file.write(b"a memory")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        hint = "choose another folder with --home or LYCHEE_HOME"
        return Check("memory folder", "fail", f"{place} cannot be written: {error.strerror}", hint)
    return Check("memory folder", "ok", f"{home}" if place == home else f"{home} (will be made)")


def _disk(home: Path) -> Check:
    free = shutil.disk_usage(_existing(home)).free
    detail = f"{free / 1e9:.1f} GB free"
    if free < NO_DISK_BYTES:
        return Check("disk space", "fail", detail, f"make room on the disk of {home}")
    if free < LOW_DISK_BYTES:
        return Check("disk space", "warn", detail, "enough for memories, not for another model")
    return Check("disk space", "ok", detail)


def _existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


# --- native parts ---


def _index(seconds: float) -> Check:
    run = _run("index", None, None, seconds)
    if run.finished:
        return Check("vector index", "ok", run.fact("found"))
    return Check("vector index", "fail", run.problem, run.hint or _install("hnswlib", build=True))


def _embedder(card: Card, home: Path, seconds: float) -> Iterator[Check]:
    run = _run_model(card, home, seconds)
    if not run.finished:
        yield Check("embedder", "fail", run.problem, run.hint or _install("torch", "sentence-transformers"))
        return
    yield Check("embedder", "ok", f"{card.name}: {run.fact('dimension')} dimensions, {run.fact('seconds')} s to load")
    if run.fact("connections"):
        detail = f"loading {card.name} looked for {run.fact('connections')}"
        yield Check("offline", "warn", detail, "set HF_HUB_OFFLINE=1; nothing of ours needs a network here")
    elif not run.fact("offline"):
        hint = "HF_HUB_OFFLINE is set to 0 in this environment; unset it"
        yield Check("offline", "warn", "no connection was tried, but the hub library is allowed to", hint)
    else:
        yield Check("offline", "ok", "models load without a connection, HF_HUB_OFFLINE is in effect")


def _reranker(card: Card, home: Path, seconds: float) -> Check:
    run = _run_model(card, home, seconds)
    if run.finished:
        return Check("reranker", "ok", f"{card.name}: {run.fact('seconds')} s to load")
    detail = f"{run.problem}; recall keeps the order it has without one"
    return Check("reranker", "warn", detail, run.hint or _install("torch", "FlagEmbedding"))


def _language_model(card: Card, home: Path, seconds: float, cpu: set[str]) -> Iterator[Check]:
    run = _run_model(card, home, seconds)
    amx = _amx(run.fact("build"), cpu)
    if run.finished:
        threads = f"on {run.fact('threads')} threads"
        threads += " (measured)" if tuning.threads_for(card, home) else " (lychee doctor --tune measures)"
        where = "on the GPU" if run.fact("gpu") else threads
        speed = f"{run.fact('seconds')} s to load, {run.fact('speed')} tokens/s {where}, flash attention"
        yield Check("language model", "ok", f"{card.name}: {speed}{amx}")
        yield Check("JSON constraint", "ok", f"holds: {run.fact('proof')}")
    elif run.error == ConstraintNotApplied.__name__:
        yield Check("language model", "ok", f"{card.name} generates{amx}")
        yield Check("JSON constraint", "fail", run.problem, run.hint)
    else:
        detail = f"{run.problem}{amx}; recall works without it, ask does not"
        yield Check("language model", "fail", detail, run.hint or rebuild_command(cpu))


def _amx(build: Any, cpu: set[str]) -> str:
    """Names the instruction set that crashes where a virtual machine announces it and does not grant it."""
    announced = any(flag.startswith("amx") for flag in cpu)
    used = re.search(r"AMX_\w+ = 1", str(build)) is not None
    return "; this CPU announces AMX and this build uses it" if announced and used else ""


def cpu_flags(cpuinfo: Path) -> set[str]:
    """What the kernel says this CPU can do; empty where it keeps no such file."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def rebuild_command(flags: set[str]) -> str:
    """The line that compiles llama.cpp anew for a CPU with these flags, always without AMX."""
    options = ["-DGGML_NATIVE=OFF"]
    if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        options.append("-DGGML_AVX512=ON")
        options += ["-DGGML_AVX512_VBMI=ON"] if flags & {"avx512vbmi", "avx512_vbmi"} else []
        options += ["-DGGML_AVX512_VNNI=ON"] if "avx512_vnni" in flags else []
    elif platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags:
        options += ["-DGGML_AVX2=OFF", "-DGGML_FMA=OFF", "-DGGML_BMI2=OFF", "-DGGML_F16C=OFF"]
        options += ["-DGGML_AVX=OFF"] if "avx" not in flags else []
    pip = _install("llama-cpp-python", build=True).removeprefix("run: ")
    return f"run: CMAKE_ARGS={shlex.quote(' '.join(options))} {pip}"


def _install(*packages: str, build: bool = False) -> str:
    options = "--force-reinstall --no-deps --no-cache-dir " if build else ""
    options += "".join(f"--no-binary {package} " for package in packages) if build else ""
    pinned = ["llama-cpp-python==0.3.36" if package == "llama-cpp-python" else package for package in packages]
    return f"run: {shlex.quote(sys.executable)} -m pip install {options}{' '.join(pinned)}"


# --- child processes ---


@dataclass(frozen=True, slots=True)
class _Run:
    """How a probe ended. `problem` is empty where it finished; `hint` where the part itself must be repaired."""

    facts: dict[str, Any]
    problem: str = ""
    hint: str = ""
    error: str = ""

    @property
    def finished(self) -> bool:
        return not self.problem

    def fact(self, name: str) -> Any:
        return self.facts.get(name, "")


def _run_model(card: Card, home: Path, seconds: float) -> _Run:
    try:
        path = pull.locate(card, home)
    except LycheeError as error:
        return _Run({}, error.message, error.hint)
    if path is None:
        return _Run({}, f"{card.name} is not on this machine", f"run: lychee models pull {card.name}")
    return _run(card.role, (card.name, str(home)), path, seconds)


def _run(part: str, card: tuple[str, str] | None, path: Path | None, seconds: float) -> _Run:
    """Try one part in a child process. The child says each step and each fact before it goes on, so that the last
    thing it said is known when it dies."""
    arguments = [part, json.dumps([card, None if path is None else str(path)])]
    code = "import sys; from lychee_local.doctor import probe; probe(*sys.argv[1:])"
    package_parent = str(Path(__file__).resolve().parent.parent)
    search = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), package_parent) if p)
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "PYTHONPATH": search, "PYTHONIOENCODING": "utf-8"},
    )
    timed_out = False
    try:
        try:
            out, err = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            child.kill()
            out, err = child.communicate()
    finally:
        child.kill()
    return _outcome(out, err, child.returncode, seconds if timed_out else None)


def _outcome(out: str, err: str, status: int, timed_out_after: float | None) -> _Run:
    facts: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(_MARK):
            facts.update(json.loads(line.removeprefix(_MARK)))
    step = facts.get("step", "starting")
    if timed_out_after is not None:
        return _Run(
            facts, f"did not finish in {timed_out_after:.0f} s while {step}", "try again on a less busy machine"
        )
    if "error" in facts:
        return _Run(facts, facts["message"], facts["hint"], facts["error"])
    if status == 0 and facts.get("done"):
        return _Run(facts)
    if status < 0:
        name = signal.Signals(-status).name
        hint = "the system ended it, most likely for want of memory: try a smaller model" if name == "SIGKILL" else ""
        return _Run(facts, f"crashed ({name}) while {step}", hint)
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), f"exit status {status}")
    return _Run(facts, f"failed while {step}: {last}")


def probe(part: str, arguments: str) -> None:
    """What a child process runs: one part, told on standard output as one JSON object a line."""
    card, path = json.loads(arguments)
    try:
        if card is None:
            _PROBES[part](_say)
        else:
            home = Path(card[1])
            _MODEL_PROBES[part](_say, cards.card(card[0], home), Path(path), home)
    except LycheeError as error:
        _say(error=type(error).__name__, message=error.message, hint=error.hint)
        return
    _say(done=True)


Say = Callable[..., None]


def _say(**facts: Any) -> None:
    print(_MARK + json.dumps(facts), flush=True)


def _probe_index(say: Say) -> None:
    say(step="importing hnswlib")
    import hnswlib
    import numpy as np

    say(step="searching an index")
    rows = np.random.default_rng(1).standard_normal((32, 8)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = hnswlib.Index(space="ip", dim=8)
    index.init_index(max_elements=16, random_seed=1)
    index.set_ef(64)
    index.add_items(rows[:16], num_threads=1)
    index.resize_index(32)
    index.add_items(rows[16:], num_threads=1)
    labels, _ = index.knn_query(rows, k=1, num_threads=1)
    if labels[:, 0].tolist() != list(range(32)):
        raise RuntimeError("hnswlib does not find what was put in")
    say(found="hnswlib adds, grows and finds")


def _probe_embedder(say: Say, card: Card, path: Path, home: Path) -> None:
    from lychee_local.backends.load import load_embedder

    connections: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo":
            connections.append(str(arguments[0]))

    sys.addaudithook(watch)
    say(step="loading the embedder")
    began = time.monotonic()
    embedder = load_embedder(card, path)
    say(seconds=round(time.monotonic() - began, 1), dimension=embedder.dimension, step="embedding")
    embedder.embed(["Ana lives in Lisbon.", "Bo plays the trumpet."])
    embedder.embed(["Where does Ana live?"], kind="query")
    from huggingface_hub import constants

    say(connections=", ".join(dict.fromkeys(connections)), offline=bool(constants.HF_HUB_OFFLINE))


def _probe_reranker(say: Say, card: Card, path: Path, home: Path) -> None:
    from lychee_local.backends.load import load_reranker

    say(step="loading the reranker")
    began = time.monotonic()
    reranker = load_reranker(card, path)
    say(seconds=round(time.monotonic() - began, 1), step="scoring")
    reranker.score("Where does Ana live?", ["Ana lives in Lisbon.", "Bo plays the trumpet."])


def _probe_llm(say: Say, card: Card, path: Path, home: Path) -> None:
    from lychee_local.backends.load import load_llm

    say(step="importing llama.cpp")
    build = _llama_build()
    say(build=build, step="loading the model and proving its constraint")
    began = time.monotonic()
    llm = load_llm(card, path, context=512, threads=tuning.threads_for(card, home))
    say(seconds=round(time.monotonic() - began, 1), proof=llm.proof.text, step="generating")
    prompt = [ChatMessage("user", "Count from one to twenty, in words.")]
    usage = llm.complete(prompt, purpose="probe", max_tokens=8).usage
    say(speed=round(usage.output_tokens / usage.seconds, 1), threads=llm.threads, gpu=llm.gpu)
    llm.close()


def _llama_build() -> str:
    """Which instruction sets the build uses; empty where the library cannot tell, as the loading will say better."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError):
        return ""
    info: bytes = llama_cpp.llama_print_system_info()
    return info.decode("utf-8", "replace")


_PROBES: dict[str, Callable[[Say], None]] = {"index": _probe_index}
_MODEL_PROBES: dict[str, Callable[[Say, Card, Path, Path], None]] = {
    "embedder": _probe_embedder,
    "reranker": _probe_reranker,
    "llm": _probe_llm,
}

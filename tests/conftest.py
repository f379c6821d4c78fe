"""Fixtures for every test: real weights where they are on this machine, and no way out to a network."""

from __future__ import annotations

import os

# Before any test imports an engine: the hub's libraries read this once, at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import io
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from terminal import Lychee, Ran

from lychee_local import cards, cli, pull

# The suite tries the same examples today and tomorrow. `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True)
hypothesis.settings.register_profile("search", print_blob=True)
hypothesis.settings.load_profile("repeat")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-models",
        action="store_true",
        help="fail instead of skipping where a model that a test needs is not on this machine",
    )


def models_home() -> Path:
    """Where the tests look for weights: LYCHEE_HOME if set, else the default home."""
    return Path(os.environ["LYCHEE_HOME"]) if os.environ.get("LYCHEE_HOME") else cards.default_home()


def _located(request: pytest.FixtureRequest, name: str) -> Path:
    path = pull.locate(cards.card(name), models_home())
    if path is not None:
        return path
    reason = f"{name} is not in {models_home()}: run `lychee models pull --profile tiny`"
    if request.config.getoption("--require-models"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C is heard, here and in child processes, even where the tests were started with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _located(request, "smollm2-135m")


@pytest.fixture(scope="session")
def minilm_path(request: pytest.FixtureRequest) -> Path:
    """The folder of all-MiniLM-L6-v2."""
    return _located(request, "all-minilm-l6-v2")


class NetworkForbidden(RuntimeError):
    """A test without the `network` mark tried to leave this machine."""


def _guarded(real: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, *arguments: Any) -> Any:
        address = arguments[-1]  # of connect, connect_ex and sendto alike
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise NetworkForbidden(f"connection to {address!r}")
        return real(self, *arguments)

    return guarded


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections leave this machine only in tests marked `network`; name look-ups count as connections."""
    if request.node.get_closest_marker("network") is not None:
        yield
        return
    real_lookup = socket.getaddrinfo

    def lookup(host: Any, *rest: Any, **options: Any) -> Any:
        if host not in (None, "", *LOOPBACK):
            raise NetworkForbidden(f"look-up of {host!r}")
        return real_lookup(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
    yield


@pytest.fixture
def lychee(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lychee:
    """Runs the command in this process, with a home of its own and without any model in it."""
    monkeypatch.setenv("LYCHEE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LYCHEE_PROFILE", "tiny")

    def run(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        written = capsys.readouterr()
        return Ran(int(left.value.code or 0), written.out, written.err)

    return run


@pytest.fixture
def models(tmp_path: Path, smollm2_path: Path, minilm_path: Path) -> Path:
    """The home of `lychee`, with the models of the profile tiny."""
    folder = tmp_path / "home" / "models"
    llm = folder / "smollm2-135m"
    llm.mkdir(parents=True)
    (llm / cards.card("smollm2-135m").files[0].path).symlink_to(smollm2_path)
    (folder / "all-minilm-l6-v2").symlink_to(minilm_path)
    return tmp_path / "home"

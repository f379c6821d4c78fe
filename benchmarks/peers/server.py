"""llama-cpp-python's own OpenAI-compatible server on one of our GGUF files, at a free port of this machine.

Owns its start, the proof that it is ours that answers there, and its end. Everything else about it is the library's.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from benchmarks.peers.child import Child, PeerFailed
from lychee_local.backends.native import processors

# Ours need 8,192; mem0's instructions alone take nearly that. 16,384 take 470 MB on a 1.5 B model.
CONTEXT = 16_384
MODULES = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
WAIT = 0.1


class LlamaServer:
    """Started at the first call of `port`, with at most `context` tokens a prompt and its answer."""

    def __init__(
        self,
        model: Path,
        *,
        name: str,
        log: Path,
        home: Path,
        python: Path | None = None,
        context: int = CONTEXT,
        patience: float = 300.0,
    ) -> None:
        self._model, self._name, self._log, self._home = model, name, log, home
        self._python = python or Path(sys.executable)
        self._context = context
        self._patience = patience
        self._starting = Lock()
        self._child: Child | None = None
        self._port = 0

    def port(self) -> int:
        """
        Raises:
            PeerFailed: it does not start, or has died.
        """
        with self._starting:
            if self._child is None:
                self._start()
            elif not self._child.alive:
                raise PeerFailed(f"the language model's server died: {self._child.log_end()}")
            return self._port

    def _start(self) -> None:
        self._port = free_port()
        threads = processors()
        # The alias is how we know that it is this server, not somebody else's, that answers at the port.
        options = {
            "model": self._model.absolute(),
            "model_alias": self._alias,
            "host": "127.0.0.1",
            "port": self._port,
            "n_ctx": self._context,
            "n_threads": threads,
            "n_threads_batch": threads,
            "interrupt_requests": False,
            "verbose": False,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._child = Child(
            self._python, "llama_cpp.server", home=self._home, log=self._log, talks=False, arguments=arguments
        )
        deadline = time.monotonic() + self._patience
        while not self._answers():
            if not self._child.alive:
                raise PeerFailed(
                    f"the language model's server does not start: {self._child.log_end()}",
                    hint="install the group peer-server, or give --server-python an environment that has it",
                )
            if time.monotonic() > deadline:
                self.close()
                raise PeerFailed(f"the language model's server was not ready within {self._patience:g} seconds")
            time.sleep(WAIT)

    @property
    def _alias(self) -> str:
        return f"{self._name}-{os.getpid()}"

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
        try:
            connection.request("GET", "/v1/models")
            reply = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        return any(model.get("id") == self._alias for model in reply.get("data", ()))

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def free_port() -> int:
    """A port of this machine at which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port

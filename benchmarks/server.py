"""A model behind an OpenAI-compatible server on this machine, asked over HTTP.

Owns the one address that the benchmarks may connect to. Refuses every other machine: no conversation leaves this one.
Uses neither proxies nor redirects, which could lead elsewhere. Constrains nothing: servers differ in whether and how
they take a schema, so whoever asks has to read what comes.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from lychee_local.errors import BadInput, GenerationFailed
from lychee_local.types import ChatMessage, Completion, Purpose, Usage

_LARGEST = 1 << 20  # bytes of a reply
_UNSENDABLE = re.compile(r"[^!-~]")  # in a path of HTTP


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Tokens(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Tokens | None = None


class _TryAgain(Exception):
    """A failure that may pass."""


class Server:
    """Chat completions of `model` at `address`, such as http://127.0.0.1:8080/v1. Temperature 0, seed 0.

    A refused connection, one that ends half-way and a status from 500 on are tried again, `tries` times in all, after
    `pause` seconds and twice as long each time; a server that is silent for `timeout` seconds is not.

    Raises:
        BadInput: the address is none of HTTP, or of another machine.
    """

    def __init__(self, address: str, model: str, *, timeout: float = 120.0, tries: int = 4, pause: float = 0.5) -> None:
        self.name = model
        self.address = address.rstrip("/")
        self._host, self._port, self._path = _local(self.address)
        self._timeout, self._tries, self._pause = timeout, tries, pause

    def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        purpose: Purpose,
        max_tokens: int,
        schema: type[BaseModel] | None = None,
    ) -> Completion:
        """One completion. `schema` is not sent (see above). Without a count of the server's the usage is 0 tokens and
        its outcome "uncounted".

        Raises:
            GenerationFailed: the server failed, was silent, or sent something else than a completion.
        """
        body = json.dumps(
            {
                "model": self.name,
                "messages": [{"role": message.role, "content": message.content} for message in messages],
                "max_tokens": max_tokens,
                "temperature": 0,
                "seed": 0,
                "stream": False,
            }
        ).encode()
        started = time.perf_counter()
        text = self._persist(body)
        return self._completion(text, purpose, time.perf_counter() - started)

    def close(self) -> None:
        """Nothing is kept open."""

    def _persist(self, body: bytes) -> bytes:
        attempt = 1
        while True:
            try:
                return self._send(body)
            except _TryAgain as failure:
                if attempt == self._tries:
                    hint = "is it running? Start it, and the same command again: what was judged is kept"
                    raise GenerationFailed(f"{self.address} {failure}, {attempt} times", hint=hint) from failure
            time.sleep(self._pause * 2 ** (attempt - 1))
            attempt += 1

    def _send(self, body: bytes) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read(_LARGEST + 1)
        except TimeoutError as error:
            raise GenerationFailed(
                f"{self.address} was silent for {self._timeout:g} s", hint="allow more with --timeout"
            ) from error
        except ConnectionRefusedError as error:
            raise _TryAgain("refuses connections") from error
        except (http.client.HTTPException, ConnectionError) as error:
            raise _TryAgain("ended the connection before its reply was whole") from error
        finally:
            connection.close()
        if len(text) > _LARGEST:
            raise GenerationFailed(f"{self.address} sent more than {_LARGEST:,} bytes")
        if reply.length:  # what is missing: read() with a limit returns what there is
            raise _TryAgain("ended the connection before its reply was whole")
        if reply.status >= 500:
            raise _TryAgain(f"answered {reply.status}: {_shown(text)}")
        if reply.status != 200:
            raise GenerationFailed(f"{self.address} answered {reply.status}: {_shown(text)}")
        return text

    def _completion(self, text: bytes, purpose: Purpose, seconds: float) -> Completion:
        try:
            reply = _Reply.model_validate_json(text)
        except ValidationError as error:
            raise GenerationFailed(f"{self.address} sent no chat completion: {_shown(text)}") from error
        choice, tokens = reply.choices[0], reply.usage or _Tokens()
        cut = choice.finish_reason == "length"
        outcome = "uncounted" if reply.usage is None else "length" if cut else "ok"
        usage = Usage(
            purpose, self.name, tokens.prompt_tokens, tokens.completion_tokens, seconds=seconds, outcome=outcome
        )
        return Completion(choice.message.content or "", "length" if cut else "stop", usage)


def _local(address: str) -> tuple[str, int, str]:
    """Host, port and path of the completions below `address`."""
    hint = "give the address of a server on this machine, such as http://127.0.0.1:8080/v1"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise BadInput(f"{address!r} is no address: {error}", hint=hint) from error
    if parts.scheme != "http" or not host or parts.query or parts.fragment or _UNSENDABLE.search(address):
        raise BadInput(f"{address!r} is no address of a server", hint=hint)
    if not _is_this_machine(host):
        raise BadInput(f"{host} is another machine, and conversations do not leave this one", hint=hint)
    return host, port, f"{parts.path.rstrip('/')}/chat/completions"


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(text: bytes) -> str:
    return repr(text[:200].decode("utf-8", "replace"))

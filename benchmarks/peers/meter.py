"""Between a peer and the models: an OpenAI-compatible address that counts every call.

Owns the count and what is the same for all: the model, greedy decoding, the embedder. A chat or text completion is
passed on to llama-cpp-python's server and counted by the `usage` of its reply, tokens as the server's tokenizer has
them; a call that failed is counted as one. Embeddings are made here, by our embedder. Nothing else is answered, and no
stream, whose tokens the server does not count.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, cast

from benchmarks.peers.child import PeerFailed
from lychee_local.backends import Vectors
from lychee_local.errors import LycheeError
from lychee_local.types import Purpose, Usage

Line = dict[str, Any]

# llama-cpp-python's server would sample, and punish repetition, which breaks JSON. Ours decodes greedily.
GREEDY = {"temperature": 0.0, "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 0}
GENERATING = ("/v1/chat/completions", "/v1/completions")
PATIENCE = 3_600.0  # seconds


class Meter:
    """`upstream` gives the port of the server, and is called when the first call of a model is made; None: there is no
    language model. `embed` maps texts to vectors, one call at a time. `failure` is why one of the models did not answer
    at all: a peer may swallow that, whoever runs it must not."""

    def __init__(
        self, *, model: str, upstream: Callable[[], int] | None, embed: Callable[[Sequence[str]], Vectors]
    ) -> None:
        self.model = model
        self.purpose: Purpose = "encode"
        self.upstream = upstream
        self.embed = embed
        self.one_at_a_time = threading.Lock()
        self.failure: LycheeError | None = None
        self._calls: list[Usage] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.meter = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="meter", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def usage(self) -> tuple[Usage, ...]:
        """Every call so far, in the order of their ends."""
        return tuple(self._calls)

    def note(self, usage: Usage) -> None:
        self._calls.append(usage)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a peer that was ended may have left a call that still runs
    meter: Meter


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise _Refused(400, "the request is no JSON object")
            if self.path in GENERATING:
                status, reply = self._generated(request)
            elif self.path == "/v1/embeddings":
                status, reply = 200, self._embedded(request)
            else:
                raise _Refused(404, f"nothing is at {self.path}")
        except ValueError:
            status, reply = 400, _error("the request is no JSON")
        except _Refused as refused:
            status, reply = refused.status, _error(str(refused))
        self._send(status, reply)

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._send(404, _error(f"nothing is at {self.path}"))
            return
        self._send(200, {"object": "list", "data": [{"id": self._meter.model, "object": "model", "owned_by": "me"}]})

    def _generated(self, request: Line) -> tuple[int, Line]:
        meter = self._meter
        began = time.perf_counter()
        try:
            if request.get("stream"):
                raise _Refused(400, "ask without stream: the tokens of a stream are not counted")
            if meter.upstream is None:
                raise _Refused(503, "this run has no language model")
            status, reply = self._from_server(meter.upstream, request | GREEDY | {"model": meter.model})
        except _Refused as refused:
            meter.note(Usage(meter.purpose, meter.model, 0, 0, outcome=f"refused: {refused}"))
            raise
        counted = reply.get("usage") or {}
        outcome = "ok" if status == 200 else f"failed: {status} {json.dumps(reply)[:300]}"
        meter.note(
            Usage(
                meter.purpose,
                meter.model,
                counted.get("prompt_tokens", 0),
                counted.get("completion_tokens", 0),
                seconds=time.perf_counter() - began,
                outcome=outcome if status != 200 or counted else "failed: the server counted no tokens",
            )
        )
        return status, reply

    def _from_server(self, upstream: Callable[[], int], request: Line) -> tuple[int, Line]:
        try:
            return _passed_on(upstream(), self.path, request)
        except LycheeError as error:
            raise self._failed(error) from error

    def _failed(self, error: LycheeError) -> _Refused:
        self._meter.failure = error
        return _Refused(502, str(error))

    def _embedded(self, request: Line) -> Line:
        given = request.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise _Refused(400, "input is a text or a list of texts")
        try:
            with self._meter.one_at_a_time:
                vectors = self._meter.embed(texts)
        except LycheeError as error:
            raise self._failed(error) from error
        data = [{"object": "embedding", "index": i, "embedding": row.tolist()} for i, row in enumerate(vectors)]
        return {"object": "list", "data": data, "model": str(request.get("model"))} | {
            "usage": {"prompt_tokens": 0, "total_tokens": 0}
        }

    @property
    def _meter(self) -> Meter:
        return cast(_Server, self.server).meter

    def _send(self, status: int, reply: Line) -> None:
        data = json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            self.close_connection = True  # whoever asked has gone; what the call cost is counted all the same

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: every call is in the count."""


def _passed_on(port: int, path: str, request: Line) -> tuple[int, Line]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(request), {"Content-Type": "application/json"})
        answered = connection.getresponse()
        reply = json.loads(answered.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerFailed(f"the language model's server did not answer: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    return answered.status, reply if isinstance(reply, dict) else {}


def _error(message: str) -> Line:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}

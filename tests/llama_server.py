"""A program that takes llama-server's options and answers every question alike; for tests of what asks it.

Every third call fails; of the others every second gives what is no JSON at all, the rest what its schema wants least.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

CALLS = count(1)


def least(schema: dict[str, Any]) -> Any:
    """The smallest value that a schema of objects, lists and texts allows."""
    if schema.get("type") == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    if schema.get("type") == "array":
        return [least(schema["items"])] * schema.get("minItems", 0)
    return "said"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0
        number = next(CALLS)
        if number % 3 == 0:
            self._send(500, {"error": {"message": "out of slots"}})
            return
        text = json.dumps(least(body["response_format"]["json_schema"]["schema"])) if number % 3 == 1 else "Gladly!"
        choice = {"message": {"role": "assistant", "content": text}}
        self._send(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()

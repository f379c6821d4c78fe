"""A peer of a few lines: it keeps turns in a file, finds them by shared words, and does what a turn tells it to."""

import http.client
import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.peers.adapter import Line, line, serve


class Toy:
    turns_at_once = 2

    def __init__(self, request: Line) -> None:
        self.kept, self.request = Path(request["folder"]) / "kept.jsonl", request

    def ingest(self, turns: list[Line]) -> None:
        for turn in turns:
            obey(turn["text"])
            if self.request["by_model"]:
                generate(self.request["url"], turn["text"])
        with self.kept.open("a") as file:
            file.writelines(json.dumps(turn) + "\n" for turn in turns)

    def evidence(self, question: str, items: int) -> list[Line]:
        obey(question)
        turns = [json.loads(each) for each in self.kept.read_text().splitlines()]
        ranked = sorted(turns, key=lambda turn: (-shared(turn["text"], question), turn["ref"]))[:items]
        return [
            {"id": turn["ref"], "kind": "turn", "text": line(turn), "score": shared(turn["text"], question)}
            | {"session": turn["session"], "refs": [turn["ref"]], "said": turn["said"]}
            | {"traced": not self.request["by_model"]}
            for turn in ranked
        ]

    def usage(self) -> Line:
        return {"memories": len(self.kept.read_text().splitlines()), "lost": 0, "empty": 0}


def shared(text: str, question: str) -> float:
    asked = set(question.lower().strip("?").split())
    return len(asked & set(text.lower().strip(".").split())) / len(asked)


def obey(text: str) -> None:
    order, _, rest = text.partition(": ")
    if order == "die":
        raise SystemExit(f"a reason to die: {rest}")
    if order == "die until there is" and not Path(rest).exists():
        raise SystemExit("not yet")
    if order == "hang":
        time.sleep(60)
    if order == "talk":
        os.write(1, b"no reply\n")
    if order == "call":
        with suppress(PermissionError):
            http.client.HTTPConnection(rest, 80, timeout=5).connect()
    if order == "start":
        with suppress(PermissionError):
            subprocess.run([rest], check=False)


def generate(url: str, text: str) -> None:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    body = {"model": "any", "messages": [{"role": "user", "content": text}], "temperature": 0.8, "max_tokens": 4}
    connection.request("POST", f"/{path}/chat/completions", json.dumps(body))
    connection.getresponse().read()
    connection.close()


if __name__ == "__main__":
    serve(Toy)

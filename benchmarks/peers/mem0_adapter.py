"""mem0 (`pip install mem0ai`) as a peer: run by an interpreter that has it.

Two turns are handed over at a time, as mem0's own evaluation on LoCoMo does (evaluation/src/memzero/add.py); that takes
each conversation in twice, once for each speaker, we do once. The open version takes no time of saying, so the day goes
in as an instruction, for which its prompt has a place. Every memory carries the refs of the turns it was read with, but
mem0 shows the model ten earlier messages and ten memories beside them, so what it writes is not traced to those turns.
Without a language model each turn is stored as it is (`infer=False`), and is traced.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from benchmarks.peers.adapter import Line, line, serve

os.environ["MEM0_TELEMETRY"] = "False"  # read once, when mem0 is imported

USER = "conversation"
MAX_OUTPUT = 2_000  # mem0's own
PATIENCE = 3_600.0  # seconds; a client that gives up early asks again, and the server computes both


class Mem0:
    def __init__(self, request: Line) -> None:
        folder = Path(request["folder"])
        os.environ["MEM0_DIR"] = str(folder / "settings")
        from mem0 import Memory
        from mem0.exceptions import LLMError

        server = {"openai_base_url": request["url"], "api_key": "none"}
        store = {
            "collection_name": "memories",
            "path": str(folder / "qdrant"),
            "embedding_model_dims": request["dimension"],
            "on_disk": True,
        }
        self._memory = Memory.from_config(
            {
                "vector_store": {"provider": "qdrant", "config": store},
                "llm": {
                    "provider": "openai",
                    "config": server | {"model": request["model"], "temperature": 0.0, "max_tokens": MAX_OUTPUT},
                },
                "embedder": {"provider": "openai", "config": server | {"model": request["embedder"]}},
                "history_db_path": str(folder / "history.sqlite"),
            }
        )
        for engine in (self._memory.llm, self._memory.embedding_model):
            engine.client = engine.client.with_options(timeout=PATIENCE, max_retries=0)
        self._by_model: bool = request["by_model"]
        self._failed = LLMError
        self._lost = self._empty = 0
        self.turns_at_once = 2 if self._by_model else 1

    def ingest(self, turns: list[Line]) -> None:
        said = turns[0]["said"]
        day = None if said is None else f"Observation Date: {datetime.fromisoformat(said):%Y-%m-%d (%A)}."
        messages = [
            {"role": "assistant" if turn["role"] == "assistant" else "user", "content": line(turn)} for turn in turns
        ]
        source = {"refs": [turn["ref"] for turn in turns], "session": turns[0]["session"], "said": said}
        try:
            made = self._memory.add(messages, user_id=USER, metadata=source, infer=self._by_model, prompt=day)
        except self._failed:
            # The server refused the call, or failed at it: the meter has noted how. mem0 keeps nothing of these turns.
            self._lost += len(turns)
            return
        if not made["results"]:  # there was nothing to keep, or mem0 could not read what the model wrote
            self._empty += len(turns)

    def evidence(self, question: str, items: int) -> list[Line]:
        found = self._memory.search(question, filters={"user_id": USER}, top_k=items)["results"]
        return [
            {
                "id": each["id"],
                "kind": "record" if self._by_model else "turn",
                "text": each["memory"],
                "score": each["score"],
                "session": each["metadata"]["session"],
                "refs": each["metadata"]["refs"],
                "said": each["metadata"]["said"],
                "traced": not self._by_model,
            }
            for each in found
        ]

    def usage(self) -> Line:
        stored = self._memory.get_all(filters={"user_id": USER}, top_k=1_000_000)["results"]
        return {"memories": len(stored), "lost": self._lost, "empty": self._empty}


if __name__ == "__main__":
    serve(Mem0)

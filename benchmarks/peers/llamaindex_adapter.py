"""LlamaIndex's memory blocks as a peer: run by an interpreter that has them (group peer-llamaindex).

Its `Memory` is a queue of the latest messages in front of long-term blocks; the questions come when a conversation is
over, so the blocks are handed every message, and the queue is left out. Two are used, as its documentation pairs them:
facts that the language model extracts, all of which are shown, and passages in a vector store. Eight turns are handed
over at a time, about as much as the embedder reads at once. A passage is traced to its turns; a fact is not, since a
call sees all facts before it. Without a language model there are only passages.
"""

from __future__ import annotations

import asyncio
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter import Line, line, serve

MAX_OUTPUT = 1_024
PATIENCE = 3_600.0  # seconds

# What a passage has around each message.
_MESSAGE = re.compile(r"^<message role='(?:user|assistant)'>|</message>$")


class LlamaIndex:
    turns_at_once = 8

    def __init__(self, request: Line) -> None:
        from llama_index.core.base.llms.types import ChatMessage
        from llama_index.core.memory import FactExtractionMemoryBlock, VectorMemoryBlock
        from llama_index.embeddings.openai_like import OpenAILikeEmbedding
        from llama_index.llms.openai_like import OpenAILike
        from llama_index.vector_stores.qdrant import QdrantVectorStore
        from openai import APIError
        from qdrant_client import AsyncQdrantClient

        folder = Path(request["folder"])
        server = {"api_base": request["url"], "api_key": "none", "timeout": PATIENCE, "max_retries": 0}
        self._message = ChatMessage
        self._failed = APIError
        self._lost = 0
        self._found: list[Any] = []
        self._loop = asyncio.new_event_loop()
        self._store = AsyncQdrantClient(path=str(folder / "qdrant"))
        self._passages = VectorMemoryBlock(
            vector_store=QdrantVectorStore("passages", aclient=self._store),
            embed_model=OpenAILikeEmbedding(model_name=request["embedder"], **server),
            node_postprocessors=[_noting(self._found)],
        )
        self._kept = folder / "facts.json"
        self._facts = None
        if request["by_model"]:
            llm = OpenAILike(
                model=request["model"], is_chat_model=True, temperature=0.0, max_tokens=MAX_OUTPUT, **server
            )
            known = json.loads(self._kept.read_text(encoding="utf-8")) if self._kept.exists() else []
            self._facts = FactExtractionMemoryBlock(llm=llm, facts=known)

    def ingest(self, turns: list[Line]) -> None:
        said, session = turns[0]["said"], turns[0]["session"]
        messages = [self._message(role=_role(turn), content=line(turn)) for turn in turns]
        if self._facts is not None:
            day = [] if said is None else [f"These messages were said on {datetime.fromisoformat(said):%d %B %Y}."]
            dated = [*(self._message(role="system", content=text) for text in day), *messages]
            try:
                self._loop.run_until_complete(self._facts.aput(dated))
            except self._failed:
                # The server refused the call, or failed at it: the meter has noted how. The passages are kept.
                self._lost += len(turns)
            self._kept.write_text(json.dumps(self._facts.facts, ensure_ascii=False), encoding="utf-8")
        # A passage keeps one thing of ours, which LlamaIndex calls its session: where it comes from.
        source = json.dumps({"session": session, "refs": [turn["ref"] for turn in turns], "said": said})
        self._loop.run_until_complete(self._passages.aput(messages, session_id=source))

    def evidence(self, question: str, items: int) -> list[Line]:
        self._found.clear()
        self._passages.similarity_top_k = items
        self._loop.run_until_complete(self._passages.aget([self._message(role="user", content=question)]))
        facts = [] if self._facts is None else self._facts.facts
        noted = [
            {"id": f"fact:{n}", "kind": "record", "text": text, "score": 1.0, "session": "", "refs": [], "said": None}
            | {"traced": False}
            for n, text in enumerate(facts)
        ]
        return noted + [_passage(found) for found in self._found]

    def usage(self) -> Line:
        passages = self._loop.run_until_complete(self._store.count("passages"))
        return {
            "memories": passages.count + (0 if self._facts is None else len(self._facts.facts)),
            "lost": self._lost,
            "empty": 0,
        }


def _role(turn: Line) -> str:
    return "assistant" if turn["role"] == "assistant" else "user"


def _passage(found: Any) -> Line:
    source: Line = json.loads(found.node.metadata["session_id"])
    lines = found.node.get_content().splitlines()
    text = "\n".join(_MESSAGE.sub("", each) for each in lines)
    return {"id": found.node.node_id, "kind": "window", "text": text, "score": found.score, "traced": True} | source


def _noting(found: list[Any]) -> Any:
    """What the block found, before it joins it to one text."""
    from llama_index.core.postprocessor.types import BaseNodePostprocessor

    class Noting(BaseNodePostprocessor):  # type: ignore[misc]  # its package has no types here
        def _postprocess_nodes(self, nodes: list[Any], query_bundle: Any = None) -> list[Any]:
            found.extend(nodes)
            return nodes

    return Noting()


if __name__ == "__main__":
    serve(LlamaIndex)

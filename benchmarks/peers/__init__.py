"""Other open memory systems in the same run: `run --method mem0`, `run --method llamaindex`.

What is the same for a peer as for every other method: the questions, the language model (our GGUF file, behind
llama-cpp-python's own OpenAI-compatible server), the embedder (ours, behind the same address), greedy decoding, the
budget of evidence, the prompt that answers and the model that reads it, the scores. What is its own: what it keeps of a
conversation, and what of that it finds for a question. Whatever it asks of the language model passes a meter of ours
(meter.py), so its tokens are those that the server counted: all calls while it takes a conversation in are
construction.

A peer needs other versions of other libraries than we do, so it runs in an interpreter of its own (`--peer-python`), as
a child process that speaks JSON lines (adapter.py), and our environment stays as it is. No connection leaves the
machine from there, nor does it start programs (confine.py): what it tries is refused, and named in construction.jsonl.

Decided with mem0ai 2.2.1 and llama-index-core 0.14.25 on Python 3.11:

- mem0 (Apache-2.0) with its default store, qdrant, in a local folder. Its telemetry is off by its setting
  MEM0_TELEMETRY. Its extras for keyword search and entities (fastembed, spaCy) fetch models from a network when they
  are first used, so they are not installed: search is by meaning alone, as it is without extras. Its extraction prompt
  alone takes about 8,000 tokens: the server is given a context of 16,384. The prompt names the day it is run on, so a
  run that is repeated on another day can differ.
- LlamaIndex (MIT): the two long-term blocks of its `Memory`, facts by the language model and a vector store of
  passages. It installs without an engine of its own. LangMem needs tool calls that llama-cpp-python's server cannot
  force, and txtai brings torch and transformers of its own and has no memory, only a store.
- Both ask for pydantic, httpx and openai in ranges of their own, which may exclude ours any day.

This package imports nothing here: adapters are run by interpreters that have none of our dependencies.
"""

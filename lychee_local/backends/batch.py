"""Many outputs of one model side by side: one evaluation gives each of them its next token.

Decoding one sequence reads all weights for every token; sixteen read them once for sixteen. Owns a context of its
own beside the model's: which sequence sits where, when the next request gets room, the prefixes that prompts share.

A prompt is evaluated alone, in the chunks of `LlamaLLM`, so it ends in the numbers that the single path has; only the
tokens of the output are evaluated together, where sums of floats may differ in their last digits with the number of
sequences. No clock and no thread decides anything: the same requests in the same order make the same batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any

from lychee_local.backends import Request
from lychee_local.backends.chat import ChatTemplate
from lychee_local.backends.constraint import ConstraintEngine
from lychee_local.backends.output import DOCTOR_HINT, Output, Vocabulary
from lychee_local.backends.prefixes import PREFIXES, PROMPT_CHUNK, Prefixes
from lychee_local.errors import BadInput, GenerationFailed, ModelError, PromptTooLong
from lychee_local.types import Completion

# What the keys and values of one batch may take: sixteen segments of conversation on a model of 1.5 B.
MEMORY_BYTES = 512 * 2**20
# Room is kept for so many tokens of an output, which few exceed. Where several do at once and the room runs out, the
# newest begins again later.
EXPECTED_OUTPUT = 384


@dataclass(slots=True)
class _Sequence:
    """One request on its way: its prompt, and once it has a place there, its output."""

    ticket: int
    request: Request
    tokens: list[int]
    place: int = -1
    cached: int = 0
    seconds: float = 0.0
    output: Output | None = None
    token: int = -1  # the next one to evaluate
    position: int = 0

    @property
    def cells(self) -> int:
        """What it is expected to fill beyond the prefix it shares."""
        return len(self.tokens) - self.cached + min(self.request.max_tokens, EXPECTED_OUTPUT)


@dataclass(slots=True)
class _Prefix:
    place: int
    tokens: list[int] = field(default_factory=list)


class LlamaBatch:
    """See `backends.Batch`. Made by `LlamaLLM.batch`, which holds the model's lock meanwhile.

    Raises:
        ModelError: there is no memory for it, not even for one sequence.
    """

    def __init__(
        self,
        api: ModuleType,
        llama: Any,
        template: ChatTemplate,
        engine: ConstraintEngine,
        vocabulary: Vocabulary,
        prefixes: Prefixes,
        *,
        width: int,
        context: int,
        threads: int,
        memory_bytes: int,
    ) -> None:
        """`context` bounds a prompt with its output, as in `LlamaLLM`; `memory_bytes` bounds all that are held."""
        if not 1 <= width <= PROMPT_CHUNK:
            raise BadInput(f"a batch has from 1 to {PROMPT_CHUNK} sequences, not {width}")
        self._api = api
        self._template = template
        self._engine = engine
        self._vocabulary = vocabulary
        self._kept = prefixes
        self._context = context
        self._tickets = count()
        self._waiting: deque[_Sequence] = deque()
        self._active: list[_Sequence] = []
        self._answers: list[tuple[int, Completion | Exception]] = []
        self._free = list(range(width))
        self._shelf = range(width, width + PREFIXES)  # the places of the prefixes
        self._prefixes: dict[str, _Prefix] = {}
        # A recurrent state is that behind the last token, so there is none of a prefix to copy.
        self._shares = not (api.llama_model_is_recurrent(llama.model) or api.llama_model_is_hybrid(llama.model))
        self._short = False  # the memory ran out, and nothing has ended since
        cells = max(context, min(width * context, memory_bytes // _bytes_per_cell(api, llama)))
        self._native, self.cells = _new_context(api, llama.model, width, cells, least=context, threads=threads)
        self._memory = api.llama_get_memory(self._native)
        self._batch = api.llama_batch_init(PROMPT_CHUNK, 0, 1)

    def close(self) -> None:
        """Free its memory. Not to be used afterwards."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._native)

    def submit(self, request: Request) -> int:
        require_room(request.max_tokens)
        ticket = next(self._tickets)
        tokens = self._template.tokens(request.messages)
        if len(tokens) + request.max_tokens > self._context:
            self._answers.append(
                (ticket, too_long(self._vocabulary.model_name, len(tokens), request.max_tokens, self._context))
            )
        else:
            self._waiting.append(_Sequence(ticket, request, tokens))
        return ticket

    def advance(self) -> Sequence[tuple[int, Completion | Exception]]:
        while not self._answers:
            while self._waiting and self._free and self._has_room(self._waiting[0]):
                self._begin(self._waiting.popleft())
            if self._active:
                self._step()
            elif not self._answers:
                break
        answers, self._answers = self._answers, []
        return answers

    # --- a sequence begins -------------------------------------------------------------------------------------------

    def _has_room(self, new: _Sequence) -> bool:
        if self._short and self._active:
            return False
        held = sum(s.cells for s in self._active) + sum(len(p.tokens) for p in self._prefixes.values())
        if held + new.cells <= self.cells:
            return True
        if self._active:
            return False
        self._forget_prefixes()
        return True

    def _begin(self, new: _Sequence) -> None:
        """Evaluate its prompt, behind the prefix that it shares with others, and choose its first token."""
        began = time.perf_counter()
        new.place = self._free.pop(0)
        self._active.append(new)
        prefix = self._prefix(new)
        if prefix is not None and prefix.tokens and prefix.tokens == new.tokens[: len(prefix.tokens)]:
            self._api.llama_memory_seq_cp(self._memory, prefix.place, new.place, 0, len(prefix.tokens))
            new.cached = len(prefix.tokens)
        if not self._evaluate_prompt(new.tokens, new.place, new.cached):
            return
        # Where memory is short, the entry was let go meanwhile.
        if prefix is not None and not prefix.tokens and prefix in self._prefixes.values():
            self._keep_prefix(prefix, new)
        schema = new.request.schema
        constraint = None if schema is None else self._engine.constraint(schema)
        new.output = Output(self._vocabulary, new.tokens[-1], new.request.max_tokens, constraint)
        new.position = len(new.tokens)
        last = (len(new.tokens) - 1) % PROMPT_CHUNK
        new.seconds += time.perf_counter() - began
        self._take(new, last)

    def _evaluate_prompt(self, tokens: Sequence[int], place: int, start: int) -> bool:
        for first in range(start, len(tokens), PROMPT_CHUNK):
            chunk = tokens[first : first + PROMPT_CHUNK]
            last = len(tokens) - 1
            rows = [(token, first + i, place, first + i == last) for i, token in enumerate(chunk)]
            if not self._decode(rows):
                return False
        return True

    def _prefix(self, new: _Sequence) -> _Prefix | None:
        """The entry for what its prompt shares with others: filled from what is kept of earlier batches, else empty
        until one of them was evaluated. None where it has no system message, which is what our prompts keep fixed."""
        head = new.request.messages[0]
        if head.role != "system" or not self._shares:
            return None
        if head.content not in self._prefixes:
            if len(self._prefixes) == PREFIXES:
                self._forget_prefixes()
            taken = {prefix.place for prefix in self._prefixes.values()}
            prefix = _Prefix(next(place for place in self._shelf if place not in taken))
            shared = new.tokens[: self._kept.length(new.request.messages, new.tokens)]
            if self._kept.has(shared) and self._kept.restore(self._native, prefix.place, shared):
                prefix.tokens = shared
            self._prefixes[head.content] = prefix
        return self._prefixes[head.content]

    def _keep_prefix(self, prefix: _Prefix, new: _Sequence) -> None:
        """What was evaluated with nothing beside it is kept for later batches and calls: its numbers are those of a
        single call."""
        shared = self._kept.length(new.request.messages, new.tokens)
        if not shared:
            return
        prefix.tokens = new.tokens[:shared]
        self._api.llama_memory_seq_cp(self._memory, new.place, prefix.place, 0, shared)
        if self._active == [new] and len(self._prefixes) == 1:
            self._kept.keep(self._native, prefix.place, prefix.tokens)

    def _forget_prefixes(self) -> None:
        for prefix in self._prefixes.values():
            self._api.llama_memory_seq_rm(self._memory, prefix.place, -1, -1)
        self._prefixes.clear()

    # --- all of them go on -------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every sequence."""
        began = time.perf_counter()
        going = list(self._active)
        if not self._decode([(s.token, s.position, s.place, True) for s in going]):
            return
        share = (time.perf_counter() - began) / len(going)
        for row, sequence in enumerate(going):
            sequence.position += 1
            sequence.seconds += share
            self._take(sequence, row)

    def _take(self, sequence: _Sequence, row: int) -> None:
        """Choose its next token from this row of the last evaluation; at its end, the answer is ready."""
        output = sequence.output
        assert output is not None
        try:
            token = output.take(self._vocabulary.logits(self._api.llama_get_logits_ith(self._native, row)))
            if token is not None:
                sequence.token = token
                return
            asked = sequence.request
            answer: Completion | Exception = output.completion(
                asked.purpose, asked.schema, len(sequence.tokens), sequence.cached, sequence.seconds
            )
        except GenerationFailed as error:
            answer = error
        self._leave(sequence)
        self._free.append(sequence.place)
        self._free.sort()
        self._answers.append((sequence.ticket, answer))

    def _leave(self, sequence: _Sequence) -> None:
        self._active.remove(sequence)
        self._short = False
        self._api.llama_memory_seq_rm(self._memory, sequence.place, -1, -1)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> bool:
        """Evaluate tokens, each with its position, its sequence's place, and whether its logits are wanted. False where
        llama.cpp could not, and the batch has shrunk or those under way are answered."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, place, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, place
            batch.logits[i] = wanted
        status = self._api.llama_decode(self._native, batch)
        if status == 1 and self._prefixes:  # no cells are left: first those go that nobody under way needs
            self._forget_prefixes()
            status = self._api.llama_decode(self._native, batch)
        if status == 0:
            return True
        if status == 1 and len(self._active) > 1:  # the newest waits until another ends, and its place is given up
            newest = max(self._active, key=lambda s: s.ticket)
            self._leave(newest)
            self._short = True
            self._waiting.appendleft(_Sequence(newest.ticket, newest.request, newest.tokens))
            return False
        error = GenerationFailed(f"llama.cpp failed with status {status}", hint=DOCTOR_HINT)
        for sequence in list(self._active):
            self._leave(sequence)
            self._free.append(sequence.place)
            self._answers.append((sequence.ticket, error))
        self._api.llama_memory_clear(self._memory, True)
        self._prefixes.clear()
        return False


def require_room(max_tokens: int) -> None:
    """
    Raises:
        BadInput: an output of no tokens is asked for.
    """
    if max_tokens < 1:
        raise BadInput(f"max_tokens must be at least 1, not {max_tokens}")


def too_long(model: str, prompt_tokens: int, max_tokens: int, context: int) -> PromptTooLong:
    return PromptTooLong(
        f"a prompt of {prompt_tokens} tokens and {max_tokens} for the output exceed the context of {model}, "
        f"{context} tokens"
    )


def _bytes_per_cell(api: ModuleType, llama: Any) -> int:
    """Keys and values of one token in all layers, in half precision."""
    model = llama.model
    name = llama.metadata.get("general.architecture", "")
    usual = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
    each = sum(int(llama.metadata.get(f"{name}.attention.{part}_length", usual)) for part in ("key", "value"))
    # Where layers differ, the first may have none.
    heads = api.llama_model_n_head_kv(model) or api.llama_model_n_head(model)
    return int(2 * each * heads * api.llama_model_n_layer(model))


def _new_context(api: ModuleType, model: Any, width: int, cells: int, *, least: int, threads: int) -> tuple[Any, int]:
    """A context of `cells`, or of half as many as long as there is no memory for it."""
    while True:
        params = api.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = PROMPT_CHUNK
        params.n_seq_max = width + PREFIXES
        params.kv_unified = True
        # All sequences lie in one cache. Plain attention multiplies each token with all of it and masks what belongs to
        # others; flash attention skips that (benchmarks/LOG.md, "Attention in a batch").
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_threads = params.n_threads_batch = threads
        native = api.llama_init_from_model(model, params)
        if native:
            return native, cells
        if cells == least:
            raise ModelError(
                f"there is no memory for a context of {cells} tokens",
                hint="close other programs, or use a smaller model",
            )
        cells = max(least, cells // 2)

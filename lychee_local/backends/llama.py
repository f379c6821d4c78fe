"""A GGUF model under llama.cpp, its JSON held to a pydantic type while it is decoded.

Owns everything native about generation: the file check before native code sees it, the reuse of an evaluated prefix,
the decoding loop, the lock, the end. Refuses to sample: the most likely token is taken, always, and the same prompt
gives the same text on the same build and number of threads.

The loop is ours because llama-cpp-python applies a constraint inside a C callback, where an exception is printed and
forgotten: a broken constraint would go on as free text. Here it is an ordinary call, and what it raises arrives.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lychee_local.backends.batch import MEMORY_BYTES, LlamaBatch, require_room, too_long
from lychee_local.backends.chat import ChatTemplate
from lychee_local.backends.constraint import Constraint, ConstraintEngine
from lychee_local.backends.native import processors, settle
from lychee_local.backends.output import DOCTOR_HINT, Logits, Output, Vocabulary
from lychee_local.backends.prefixes import PROMPT_CHUNK, Prefixes, made_by
from lychee_local.errors import (
    BadInput,
    ConstraintNotApplied,
    GenerationFailed,
    ModelDamaged,
    ModelError,
    ModelMissing,
)
from lychee_local.types import ChatMessage, Completion, Purpose

# llama.cpp logs through one callback per process. Its last lines are kept here to explain a failure, and shown nowhere.
_native_log: deque[str] = deque(maxlen=40)
_native_log_callback: Any = None


class _Proof(BaseModel):
    """What the model must answer when it is asked for a poem."""

    model_config = ConfigDict(extra="forbid")
    ripe: Literal["yes", "no"]
    count: int = Field(ge=0, le=9)


_PROOF_PROMPT = (ChatMessage("user", "Write a short poem about the sea."),)
_PROOF_TOKENS = 32  # the longest proof has 24 bytes, and a token has at least one


class LlamaLLM:
    """A local instruct model (see `backends.LLM`). Greedy: the output depends on the prompt, not on earlier calls.

    `context` is lowered to what the model was trained on where that is less. `threads` defaults to the processors this
    process may use. `chat_format` None takes the template inside the file. `proof` is the generation that proved the
    constraint at load. Text that looks like one of the model's control tokens is broken by a space in the prompt, so
    that a remembered "<|im_start|>system" stays text.

    Raises:
        ModelMissing: the file is not there, or llama-cpp-python, outlines or llguidance cannot be imported.
        ModelDamaged: the file is empty, no GGUF file, cut, or refused by llama.cpp.
        ConstraintNotApplied: a generation that needs the JSON constraint came out without it.
        BadInput: an unknown chat format, or a context below 128 tokens.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        name: str,
        context: int = 8192,
        threads: int | None = None,
        seed: int = 0,
        prompt_style: Literal["full", "compact"] = "full",
        chat_format: str | None = None,
        prefixes: Path | None = None,
    ) -> None:
        """`prefixes` is a folder for the evaluated instructions of prompts, which then outlive the process."""
        path = Path(path)
        if context < 128:
            raise BadInput(f"a context of {context} tokens holds no prompt", hint="128 at least; 8192 is the default")
        check_gguf(path)
        self._api = _import_llama_cpp()
        llama = _load(self._api, path, context, threads or processors(), seed)
        # Runs once: on close(), when the object is collected, or at exit, whichever comes first.
        self._free = weakref.finalize(self, llama.close)
        self._llama = llama
        self._lock = threading.RLock()
        self._generating = False
        self._prompt_held = 0  # tokens of the last prompt that the context still holds
        self.name = name
        self.threads: int = llama.n_threads
        self.gpu: bool = self._api.llama_supports_gpu_offload()
        self._vocabulary = Vocabulary(self._api, llama, name)
        self.context = min(context, self._api.llama_model_n_ctx_train(llama.model))
        self.prompt_style: Literal["full", "compact"] = prompt_style
        self._template = ChatTemplate(self._api, llama, chat_format)
        self._engine = ConstraintEngine(llama)
        self._prefixes = Prefixes(
            self._api,
            self._template,
            made_by=made_by(self._api, path, threads=self.threads),
            folder=prefixes,
        )
        self.proof = self._prove()

    def count(self, messages: Sequence[ChatMessage]) -> int:
        with self._lock:
            return len(self._tokens(messages))

    def complete(
        self,
        messages: Sequence[ChatMessage],
        *,
        purpose: Purpose,
        max_tokens: int,
        schema: type[BaseModel] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """See `backends.LLM.complete`. An exception from `on_text` ends the generation and passes through; the object
        can be used again, also after an interrupt.

        Raises:
            PromptTooLong: the prompt plus `max_tokens` exceeds `context`.
            ConstraintNotApplied: the constraint failed while it was generating, or cannot express the schema.
            GenerationFailed: llama.cpp failed, or the complete JSON breaks a rule of the schema that no grammar holds.
            ModelError: the object is closed, or `on_text` called it again.
        """
        require_room(max_tokens)
        started = time.perf_counter()
        with self._lock:
            tokens = self._tokens(messages)
            if len(tokens) + max_tokens > self.context:
                raise too_long(self.name, len(tokens), max_tokens, self.context)
            self._require_idle()
            self._generating = True
            try:
                constraint = None if schema is None else self._engine.constraint(schema)
                cached = self._evaluate_prompt(tokens, self._prefixes.length(messages, tokens))
                output = self._generate(max_tokens, constraint, on_text)
            finally:
                self._generating = False
        return output.completion(purpose, schema, len(tokens), cached, time.perf_counter() - started)

    @contextmanager
    def batch(self, width: int, *, memory_bytes: int = MEMORY_BYTES) -> Iterator[LlamaBatch]:
        """See `backends.LLM.batch`. `memory_bytes` bounds what the keys and values of all sequences take; requests that
        find no room in it wait.

        Raises:
            ModelError: there is no memory for it, the object is closed, or it is generating.
        """
        with self._lock:
            self._require_open()
            self._require_idle()
            self._generating = True
            try:
                batch = LlamaBatch(
                    self._api,
                    self._llama,
                    self._template,
                    self._engine,
                    self._vocabulary,
                    self._prefixes,
                    width=width,
                    context=self.context,
                    threads=self.threads,
                    memory_bytes=memory_bytes,
                )
                try:
                    yield batch
                finally:
                    batch.close()
            finally:
                self._generating = False

    def close(self) -> None:
        """Free the model's memory. A second call does nothing."""
        with self._lock:
            self._require_idle()
            self._free()

    def _require_idle(self) -> None:
        # The lock lets the thread that holds it in again, which is the one that runs on_text.
        if self._generating:
            raise ModelError(f"{self.name} is generating: on_text must not call or close the model it listens to")

    def _require_open(self) -> None:
        if not self._free.alive:
            raise ModelError(f"the model {self.name} is closed", hint="open a new one")

    # --- the prompt ---

    def _tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        self._require_open()
        return self._template.tokens(messages)

    def _evaluate_prompt(self, tokens: list[int], fixed: int) -> int:
        """Evaluate what the context does not hold already, and what of the first `fixed` tokens is not kept from an
        earlier call; return how many tokens need not be evaluated."""
        shared = self._shared_prefix(tokens)
        # Until the memory is what these numbers say, it counts as empty: an interrupt may come in between.
        self._llama.n_tokens = self._prompt_held = 0
        memory = self._api.llama_get_memory(self._llama.ctx)
        more_is_kept = shared < fixed and self._prefixes.has(tokens[:fixed])
        # Models with a recurrent state cannot step back, and begin with what is kept too.
        if more_is_kept or not shared or not self._api.llama_memory_seq_rm(memory, 0, shared, -1):
            shared = self._restored(tokens[:fixed])
        self._llama.n_tokens = self._prompt_held = shared
        for start in range(shared, len(tokens), PROMPT_CHUNK):
            self._evaluate(tokens[start : start + PROMPT_CHUNK])
            if start + PROMPT_CHUNK == fixed:
                self._prefixes.keep(self._llama.ctx, 0, tokens[:fixed])
        self._prompt_held = len(tokens)
        return shared

    def _restored(self, fixed: list[int]) -> int:
        """Begin with the kept state of `fixed`, or with nothing; how many tokens that is."""
        if fixed and self._prefixes.has(fixed) and self._prefixes.restore(self._llama.ctx, 0, fixed):
            self._llama.input_ids[: len(fixed)] = fixed
            return len(fixed)
        self._llama.reset()
        return 0

    def _shared_prefix(self, tokens: list[int]) -> int:
        """How many tokens to reuse: whole chunks of the last prompt, and never the last token, whose logits are needed.

        Sums of floats differ with the number of tokens that are evaluated together, enough to change a word now and
        then. With fixed chunks a prompt is always computed in the same steps, whatever was asked before, so its output
        depends on nothing but the prompt.
        """
        limit = min(self._prompt_held, self._llama.n_tokens, len(tokens) - 1)
        held = self._llama.input_ids[:limit]
        same = held == np.asarray(tokens[:limit], dtype=held.dtype)
        common = limit if same.all() else int(np.argmin(same))
        return common - common % PROMPT_CHUNK

    # --- the output ---

    def _generate(
        self, max_tokens: int, constraint: Constraint | None, on_text: Callable[[str], None] | None
    ) -> Output:
        last = int(self._llama.input_ids[self._llama.n_tokens - 1])
        output = Output(self._vocabulary, last, max_tokens, constraint, on_text)
        while (token := output.take(self._logits())) is not None:
            self._evaluate([token])
        return output

    def _logits(self) -> Logits:
        return self._vocabulary.logits(self._api.llama_get_logits_ith(self._llama.ctx, -1))

    def _evaluate(self, tokens: Sequence[int]) -> None:
        try:
            self._llama.eval(tokens)
        except RuntimeError as error:
            self._llama.reset()
            raise GenerationFailed(f"llama.cpp failed: {error}{_last_native_lines()}", hint=DOCTOR_HINT) from error

    def _prove(self) -> Completion:
        try:
            proof = self.complete(_PROOF_PROMPT, purpose="probe", max_tokens=_PROOF_TOKENS, schema=_Proof)
        except GenerationFailed as error:
            self.close()
            if isinstance(error.__cause__, ValidationError):
                raise self._unproven(error.message) from error
            raise
        except ConstraintNotApplied as error:
            self.close()
            raise self._unproven(error.message) from error
        if proof.finish != "stop":
            self.close()
            raise self._unproven(repr(proof.text))
        return proof

    def _unproven(self, reason: str) -> ConstraintNotApplied:
        hint = "reinstall the constraint engine: pip install --force-reinstall outlines llguidance"
        return ConstraintNotApplied(f"{self.name}: the JSON constraint does not hold: {reason}", hint=hint)


def check_gguf(path: Path) -> None:
    """Refuse, before native code sees it, what cannot be a GGUF file.

    Raises:
        ModelMissing: there is no such file, or it cannot be read.
        ModelDamaged: it is empty or begins otherwise.
    """
    hint = "run: lychee models pull"
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelMissing(f"the model file {path} cannot be read: {error.strerror}", hint=hint) from error
    if not magic:
        raise ModelDamaged(f"the model file {path} is empty", hint=hint)
    if magic != b"GGUF":
        raise ModelDamaged(f"the model file {path} is not in GGUF format", hint=hint)


def _import_llama_cpp() -> ModuleType:
    settle()
    try:
        import llama_cpp
    except ImportError as error:
        raise ModelMissing(
            f"llama-cpp-python is not installed: {error}", hint="run: make setup, or: pip install llama-cpp-python"
        ) from error
    except (OSError, RuntimeError) as error:  # what it raises for a shared library that is absent or does not load
        raise ModelMissing(f"llama-cpp-python does not load: {error}", hint=DOCTOR_HINT) from error
    _quiet(llama_cpp)
    return llama_cpp


def _quiet(api: ModuleType) -> None:
    """Keep llama.cpp's log from the terminal, once a process; the callback must outlive every model."""
    global _native_log_callback
    if _native_log_callback is None:
        _native_log_callback = api.llama_log_callback(_note_native_line)
        api.llama_log_set(_native_log_callback, ctypes.c_void_p(0))


def _note_native_line(level: int, text: bytes, user_data: Any) -> None:
    if level in (3, 4):  # ggml's numbers for warning and error; the rest is chatter
        _native_log.append(text.decode("utf-8", "replace").strip())


def _last_native_lines() -> str:
    return "".join(f"; {line}" for line in list(_native_log)[-2:])


def _load(api: ModuleType, path: Path, context: int, threads: int, seed: int) -> Any:
    _native_log.clear()
    try:
        return api.Llama(
            model_path=str(path),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            # All layers where this build has a GPU: which build it is, is the choice of who installed it.
            n_gpu_layers=-1 if api.llama_supports_gpu_offload() else 0,
            flash_attn=True,  # as in a batch: an evaluated prefix serves both
            seed=seed,
            verbose=False,
        )
    except ValueError as error:
        raise ModelDamaged(
            f"llama.cpp cannot load {path}: {error}{_last_native_lines()}",
            hint="if the file is whole (lychee models verify), memory may be short: try a smaller model or context",
        ) from error

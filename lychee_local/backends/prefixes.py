"""The evaluated beginnings of prompts: an instruction is computed once for a model, and then restored in milliseconds.

Owns which of them are held in memory, their files, and when a file is not to be trusted. Refuses all of a prompt but
its system message, which is the product's own: what a user said is never in these files.

A state is what llama.cpp keeps of the tokens, their keys and values. It holds only for the weights, build and threads
that computed it, which is why `made_by` names them all.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lychee_local.backends.chat import ChatTemplate
from lychee_local.backends.native import installed_llama
from lychee_local.types import ChatMessage

# A prompt is evaluated, and an evaluated prefix reused, in steps of this many tokens.
PROMPT_CHUNK = 64
# So many instructions are held: those of the encoder, the planner and the answerer, and one to spare.
PREFIXES = 4
# What the files may take; those not used for longest go first.
DISK_BYTES = 512 * 2**20

_MAGIC = b"lychee prefix 1\n"
_DIGEST = 32
_SUFFIX = ".prefix"
_DRAFT_NANOSECONDS = 600 * 10**9  # nobody writes one for ten minutes


class Prefixes:
    """The instructions of one loaded model. Not for two threads at once: the model's lock guards it."""

    def __init__(self, api: ModuleType, template: ChatTemplate, *, made_by: str, folder: Path | None) -> None:
        """`folder` None keeps them in memory alone."""
        self._api = api
        self._template = template
        self._made_by = made_by
        self._folder = folder
        self._tokens: OrderedDict[str, list[int]] = OrderedDict()  # by instruction
        self._states: OrderedDict[bytes, bytes] = OrderedDict()  # by key

    def length(self, messages: Sequence[ChatMessage], tokens: Sequence[int]) -> int:
        """How many tokens of this prompt every prompt with its system message begins with: whole chunks, and never the
        last token, whose logits are needed; 0 without a system message."""
        if not messages or messages[0].role != "system":
            return 0
        system = messages[0].content
        if system not in self._tokens:
            self._tokens[system] = self._template.tokens([messages[0], ChatMessage("user", "")])
        other = _used(self._tokens, system)
        same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), len(other))
        return min(same, len(tokens) - 1) // PROMPT_CHUNK * PROMPT_CHUNK

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether the state of these tokens is held, in memory or in a file that can be trusted."""
        key = self._key(tokens)
        if key not in self._states and (state := self._read(key)) is not None:
            self._states[key] = state
        return key in self._states

    def restore(self, context: Any, place: int, tokens: Sequence[int]) -> bool:
        """Put the state of these tokens, which `has` found, into a sequence of `context`. False where llama.cpp refuses
        it: then the sequence is empty, and the state is let go."""
        key = self._key(tokens)
        state = _used(self._states, key)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if self._api.llama_state_seq_set_data(context, buffer, len(state), place) != 0:
            return True
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), place, -1, -1)
        self._forget(key)
        return False

    def keep(self, context: Any, place: int, tokens: Sequence[int]) -> None:
        """Hold the state of a sequence that consists of just these tokens."""
        key = self._key(tokens)
        if key in self._states:
            return
        buffer = (ctypes.c_uint8 * self._api.llama_state_seq_get_size(context, place))()
        size = self._api.llama_state_seq_get_data(context, buffer, len(buffer), place)
        if size == 0:
            return
        self._states[key] = bytes(memoryview(buffer)[:size])
        _used(self._states, key)
        self._write(key, self._states[key])

    def _key(self, tokens: Sequence[int]) -> bytes:
        made = hashlib.sha256(self._made_by.encode())
        made.update(np.asarray(tokens, dtype=np.int64).tobytes())
        return made.digest()

    # --- files ---

    def _path(self, key: bytes) -> Path | None:
        return None if self._folder is None else self._folder / (key.hex() + _SUFFIX)

    def _read(self, key: bytes) -> bytes | None:
        """The state in the file of this key; a file that is damaged is removed."""
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:  # not there, or not ours to read: it is computed instead
            return None
        state = data[len(_MAGIC) + _DIGEST :]
        if data[: len(_MAGIC) + _DIGEST] != _MAGIC + _digest(key, state):
            self._forget(key)
            return None
        _touch(path)
        return state

    def _write(self, key: bytes, state: bytes) -> None:
        path = self._path(key)
        if path is None or self._folder is None:
            return
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        # A disk that is full, or not ours to write, costs time alone: the state stays in memory, and the next process
        # computes it again.
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                draft.touch(mode=0o600)
                draft.write_bytes(_MAGIC + _digest(key, state) + state)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            _make_room(self._folder)

    def _forget(self, key: bytes) -> None:
        self._states.pop(key, None)
        path = self._path(key)
        if path is not None:
            with suppress(OSError):  # not ours to remove; it is not trusted the next time either
                path.unlink(missing_ok=True)


def made_by(api: ModuleType, model: Path, *, threads: int) -> str:
    """All that a state depends on beside its tokens: the file of weights, the build, the number of threads."""
    about = model.stat()
    with model.open("rb") as file:
        head = hashlib.sha256(file.read(2**22)).hexdigest()
    # What the build says of itself leaves out some devices; which it is, and which it may use, completes that.
    devices = f"{api.llama_supports_gpu_offload()} {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
    build = f"{installed_llama()} {api.llama_print_system_info().decode('utf-8', 'replace')} {devices}"
    return f"{model.resolve()} {about.st_size} {about.st_mtime_ns} {head} | {build} | {threads} threads, {PROMPT_CHUNK}"


def _used(held: OrderedDict[Any, Any], key: Any) -> Any:
    """The entry of `key`, the newest now; beyond `PREFIXES` of them the oldest are let go."""
    held.move_to_end(key)
    while len(held) > PREFIXES:
        held.popitem(last=False)
    return held[key]


def _digest(key: bytes, state: bytes) -> bytes:
    return hashlib.blake2b(key + state, digest_size=_DIGEST).digest()


def _touch(path: Path) -> None:
    """Note that it was used, where that can be noted: a folder may not be ours to write, or the file be removed."""
    with suppress(OSError):
        os.utime(path)


def _make_room(folder: Path) -> None:
    """Remove what was not used for longest, beyond `DISK_BYTES`, and drafts of processes that were killed."""
    found = []
    for path in folder.iterdir():
        try:
            about = path.stat()
        except FileNotFoundError:  # another process removed it
            continue
        found.append((about.st_mtime_ns, about.st_size, path))
    room = DISK_BYTES
    newest = max((used for used, _, _ in found), default=0)
    for used, size, path in sorted(found, reverse=True):
        room -= size
        left = path.suffix != _SUFFIX and newest - used > _DRAFT_NANOSECONDS
        if room < 0 or left:
            path.unlink(missing_ok=True)

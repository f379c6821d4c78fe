"""One output while it is decoded: which token comes next, the text so far, and when it ends.

Owns the choice of a token and the look for loops, the same for one sequence and for many side by side. Refuses to
sample: the most likely token that the constraint allows is taken, of equals the first of the vocabulary.
"""

from __future__ import annotations

import codecs
import ctypes
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from lychee_local.backends.constraint import Constraint, check_output
from lychee_local.errors import GenerationFailed
from lychee_local.types import Completion, Purpose, Usage

DOCTOR_HINT = "run: lychee doctor, which tries this build and names the command that repairs it"

Finish = Literal["stop", "length", "loop"]
Logits = npt.NDArray[np.float32]

# When an output goes in circles (see `is_looping`). Lengths are in characters.
LOOP_SPAN = 240
LOOP_COPIES = 3
LOOP_COPIES_COUNTED = 5
LOOP_PERIOD_MAX = 900
_LOOP_EVERY = 8  # tokens between two looks: a look costs about 0.2 ms


class Vocabulary:
    """The tokens of one loaded model, and what llama.cpp says of them."""

    def __init__(self, api: ModuleType, llama: Any, model_name: str) -> None:
        self.model_name = model_name
        self.size: int = llama.n_vocab()
        self._api = api
        self._vocab = api.llama_model_get_vocab(llama.model)

    def is_end(self, token: int) -> bool:
        return bool(self._api.llama_vocab_is_eog(self._vocab, token))

    def piece(self, token: int) -> bytes:
        """The token's text. llama-cpp-python's own way has a buffer of 32 bytes and gives nothing of a longer one, as
        long words of Thai and Japanese and rules of dashes are."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            written = self._api.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
            if written >= 0:
                return buffer.raw[:written]
            size = -written

    def logits(self, pointer: Any) -> Logits:
        """A row of llama.cpp's, not copied: it changes with the next evaluation."""
        row: Logits = np.ctypeslib.as_array(pointer, shape=(self.size,))
        return row


class Output:
    """One output. `take` is given the logits behind its last token until it returns None; then `finish` says why it
    ended, and `text` what it says."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        last: int,
        max_tokens: int,
        constraint: Constraint | None,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """`last` is the last token of the prompt."""
        self.text = ""
        self.produced = 0
        self.finish: Finish | None = None
        self._vocabulary = vocabulary
        self._last = last
        self._max_tokens = max_tokens
        self._constraint = constraint
        self._on_text = on_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character

    def take(self, logits: Logits) -> int | None:
        """The next token to evaluate, or None at the end.

        Raises:
            ConstraintNotApplied: the constraint failed.
            GenerationFailed: no token has a usable probability.
        """
        token = self._choose(logits)
        if self._vocabulary.is_end(token):
            self.finish = "stop"
            return None
        self._last = token
        self.produced += 1
        piece = self._decoder.decode(self._vocabulary.piece(token))
        self.text += piece
        if piece and self._on_text is not None:
            self._on_text(piece)
        if self.produced % _LOOP_EVERY == 0 and is_looping(self.text):
            self.finish = "loop"
        elif self.produced == self._max_tokens:
            self.finish = "length"
        return None if self.finish else token

    def completion(
        self, purpose: Purpose, schema: type[BaseModel] | None, prompt_tokens: int, cached: int, seconds: float
    ) -> Completion:
        """The ended output as the caller gets it.

        Raises:
            GenerationFailed: the complete JSON breaks a rule of `schema` that no grammar holds.
        """
        assert self.finish is not None
        if schema is not None and self.finish == "stop":
            check_output(schema, self.text)
        outcome = "ok" if self.finish == "stop" else self.finish
        usage = Usage(purpose, self._vocabulary.model_name, prompt_tokens, self.produced, cached, seconds, outcome)
        return Completion(self.text, self.finish, usage)

    def _choose(self, logits: Logits) -> int:
        if self._constraint is not None:
            logits = self._constraint.mask(self._last, logits)
        token = int(np.argmax(logits))
        if not np.isfinite(logits[token]):
            raise GenerationFailed(f"{self._vocabulary.model_name} computes no usable probabilities", hint=DOCTOR_HINT)
        return token


def is_looping(text: str) -> bool:
    """Whether `text` ends in copies of one piece: three in a row, and as many more as fill `LOOP_SPAN`.

    A small model in a circle often keeps counting ({"turn":4,...},{"turn":5,...} with one and the same sentence), so
    copies may differ in one number. Then there must be five of them, with at least four words each: a list of distances
    run, or one line for every empty turn, is no loop. Records of a list share keys and shape but not their words.
    """
    shape = re.sub(r"\d+", "0", text[-2 * LOOP_PERIOD_MAX * LOOP_COPIES_COUNTED :])
    for period in range(1, min(LOOP_PERIOD_MAX, len(shape) // LOOP_COPIES) + 1):
        if shape[-1] != shape[-1 - period]:
            continue
        piece = shape[-period:]
        copies = max(LOOP_COPIES, -(-LOOP_SPAN // period))
        if not shape.endswith(piece * copies):
            continue
        if _changing_numbers(text, piece.count("0"), copies) == 0:
            return True
        copies = max(copies, LOOP_COPIES_COUNTED)
        counted = shape.endswith(piece * copies) and _changing_numbers(text, piece.count("0"), copies) == 1
        if counted and piece.count(" ") >= 3:
            return True
    return False


def _changing_numbers(text: str, numbers_each: int, copies: int) -> int:
    """In how many of its numbers the copies of a piece at the end of `text` differ."""
    if numbers_each == 0:
        return 0
    numbers = re.findall(r"\d+", text)[-numbers_each * copies :]
    return sum(len(set(numbers[place::numbers_each])) > 1 for place in range(numbers_each))

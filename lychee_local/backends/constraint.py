"""Holds a model's output to the JSON of a pydantic type, token by token, by outlines' llguidance backend.

Owns the schema the engine gets, the masks it makes, and every way in which it can fail: each is an error, because an
output that only looks constrained is worse than none.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from lychee_local.errors import ConstraintNotApplied, GenerationFailed, ModelMissing

# What the engine is known to raise when a library is missing, of another version, or refuses a schema. It is foreign
# code with no common base of errors; interrupts and memory exhaustion are not among them. The warning is how outlines
# tells of a token that the constraint excludes.
_ENGINE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    UserWarning,
    ValueError,
)


class Constraint:
    """The schema of one generation. `mask` is called once a token, with the token before it."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def mask(self, previous: int, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """`logits` with every token that the schema excludes at minus infinity.

        Raises:
            ConstraintNotApplied: the engine failed, or cannot express the schema.
        """
        try:
            masked: npt.NDArray[np.float32] = self._processor(np.asarray([previous]), logits)
            problem = self._processor.ll_matchers[0].get_error()
        except _ENGINE_ERRORS as error:
            raise ConstraintNotApplied(f"the constraint engine failed: {_brief(str(error))}") from error
        # A schema the engine cannot express leaves it with an error and the end of the text as its only choice.
        if problem:
            raise ConstraintNotApplied(f"the constraint engine failed: {_brief(problem)}")
        return masked


class ConstraintEngine:
    """The engine of one loaded model. It reads the whole vocabulary (about a second); a schema costs milliseconds.

    Raises:
        ModelMissing: outlines or llguidance cannot be imported.
    """

    def __init__(self, llama: Any) -> None:
        try:
            import outlines
            from outlines.backends import LLGuidanceBackend

            with warnings.catch_warnings():
                # llguidance calls a name that llama-cpp-python has renamed.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._backend = LLGuidanceBackend(outlines.from_llamacpp(llama))
        except ImportError as error:
            raise ModelMissing(
                f"the JSON constraint engine is not installed: {error}", hint="run: pip install outlines llguidance"
            ) from error

    def constraint(self, schema: type[BaseModel]) -> Constraint:
        try:
            return Constraint(self._backend.get_json_schema_logits_processor(constraint_schema(schema)))
        except _ENGINE_ERRORS as error:
            raise ConstraintNotApplied(f"the schema {schema.__name__} cannot be compiled: {error}") from error


def constraint_schema(schema: type[BaseModel]) -> str:
    """The JSON schema of a pydantic type as the engine gets it: no white space, no keys beyond the type's.

    An open object would let a small model invent keys until its tokens run out.
    """
    tree = schema.model_json_schema()
    _close_objects(tree)
    tree["x-guidance"] = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return json.dumps(tree, ensure_ascii=False)


def check_output(schema: type[BaseModel], text: str) -> None:
    """Validate a complete output against the type itself, whose validators no grammar holds.

    Raises:
        GenerationFailed: it does not fit.
    """
    try:
        schema.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"]) or "the whole"
        shown = f"{place}: {first['msg']}: {text[:200]!r}"
        raise GenerationFailed(f"the output is no {schema.__name__}: {shown}") from error


def _close_objects(tree: Any) -> None:
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        _close_objects(part)
    if isinstance(tree, dict) and tree.get("type") == "object" and "properties" in tree:
        tree.setdefault("additionalProperties", False)


def _brief(problem: str) -> str:
    """llguidance appends its whole state and the grammar to what went wrong."""
    return " ".join(problem.split("<state>")[0].split())[:200]

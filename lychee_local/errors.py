"""One tree of errors. Each carries a hint that says what to do next; the command line prints both on one line."""

from __future__ import annotations

from collections.abc import Iterable


class LycheeError(Exception):
    """Base of every error this package raises on purpose. `hint` is an instruction to the reader."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def there_are(names: Iterable[str], shown: int = 8) -> str:
    """A hint that names what there is."""
    known = list(names)
    more = f" and {len(known) - shown} more" if len(known) > shown else ""
    return f"there are: {', '.join(known[:shown])}{more}" if known else "there is none yet"


class BadInput(LycheeError):
    """What the caller passed cannot be used: an empty text, an unknown option, a malformed line."""

    exit_code = 2


class StoreError(LycheeError):
    """The memory folder cannot be read or written as asked."""

    exit_code = 3


class StoreLocked(StoreError):
    """Another process writes this memory."""


class StoreMismatch(StoreError):
    """The memory was written by another embedder, for another user, or in a newer format."""


class StoreDamaged(StoreError):
    """A committed line or row does not match its checksum."""


class ModelError(LycheeError):
    """A model file or a native library is missing, damaged or unusable."""

    exit_code = 4


class ModelMissing(ModelError):
    """A model is not on this machine, or the library that runs it is not installed."""


class ModelDamaged(ModelError):
    """A model file has another size or hash than its card says, or is of another format."""


class DownloadFailed(ModelError):
    """No source of a model could be read to the end."""


class NoRoom(ModelError):
    """The disk is too full for the model that is to be written."""


class ConstraintNotApplied(ModelError):
    """The JSON constraint did not hold when it was proven at load."""


class PromptTooLong(ModelError):
    """A prompt and the room kept for its output do not fit the model's context."""


class GenerationFailed(ModelError):
    """A completed call returned something the pipeline cannot use."""

"""Long-term memory for AI assistants that runs entirely on your own machine.

`Memory` is the whole public interface; the values it takes and returns live in `lychee_local.types`, its options in
`lychee_local.settings`, its errors in `lychee_local.errors`. Importing this package loads no model library; `Memory`,
with all that it stands on, is imported when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lychee_local.errors import LycheeError
from lychee_local.settings import ChainSettings, EncodeSettings, RecallSettings, SegmentSettings, Settings
from lychee_local.types import (
    Answer,
    Evidence,
    Message,
    Recall,
    Receipt,
    Record,
    Remembered,
    Scope,
    Segment,
    TimeRange,
    Turn,
)

if TYPE_CHECKING:
    from lychee_local.memory import Memory

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "ChainSettings",
    "EncodeSettings",
    "Evidence",
    "LycheeError",
    "Memory",
    "Message",
    "Recall",
    "RecallSettings",
    "Receipt",
    "Record",
    "Remembered",
    "Scope",
    "Segment",
    "SegmentSettings",
    "Settings",
    "TimeRange",
    "Turn",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "Memory":
        from lychee_local.memory import Memory

        return Memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What a run depends on beside its settings: versions, processor, threads, the code itself, and the hash of a file."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import lychee_local
from lychee_local.backends.native import processors, version_of

LIBRARIES = (
    "llama-cpp-python",
    "llguidance",
    "sentence-transformers",
    "transformers",
    "torch",
    "hnswlib",
    "numpy",
)
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def environment(threads: int | None = None) -> dict[str, object]:
    """Everything that two runs must share to be the same in every token; a library that is not there is "-". `threads`
    are those of a language model, None for all."""
    return {
        "lychee_local": lychee_local.__version__,
        "code": code(),
        "python": platform.python_version(),
        "libraries": {name: version_of(name) or "-" for name in LIBRARIES},
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": {"language model": threads or processors()}
        | {name: value for name in THREADS if (value := os.environ.get(name)) is not None},
    }


def cpu() -> str:
    """The processor's name, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    named = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in named if line.startswith("model name")), platform.machine())


def code() -> str:
    """A hash of the package's source: the version does not change with each commit."""
    folder = Path(lychee_local.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


@cache
def sha256(path: Path) -> str:
    """Of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

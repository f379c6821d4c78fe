"""The peers that there are, and which versions of them an interpreter has."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.environment import sha256
from benchmarks.peers.child import PeerFailed

_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({"python": platform.python_version()} | {name: of(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A peer: its adapter (a module, or a file), the packages that make it what it is, the dependency group that brings
    them, how many items it gives for a question where a run does not say, and whether it asks for vectors."""

    name: str
    adapter: str
    packages: tuple[str, ...]
    group: str
    items: int
    embeds: bool = True

    def versions(self, python: Path | None) -> dict[str, str]:
        """What of it that interpreter has (None: ours), and which adapter of ours speaks for it.

        Raises:
            PeerFailed: the interpreter cannot be run, or lacks one of the packages.
        """
        hint = f"make an environment, install the group {self.group} in it, and give its python by --peer-python"
        return _versions(python or Path(sys.executable), self.packages, hint) | {"adapter": self._adapter_hash()}

    def _adapter_hash(self) -> str:
        if self.adapter.endswith(".py"):
            return sha256(Path(self.adapter))[:16]
        return sha256(Path(__file__).with_name(self.adapter.rpartition(".")[2] + ".py"))[:16]


@cache
def _versions(python: Path, packages: tuple[str, ...], hint: str) -> dict[str, str]:
    try:
        ran = subprocess.run(
            [python, "-I", "-c", _VERSIONS, *packages], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerFailed(f"{python} is no Python that can be run: {error}", hint=hint) from error
    found: dict[str, str | None] = json.loads(ran.stdout)
    if missing := [name for name, version in found.items() if version is None]:
        raise PeerFailed(f"{python} does not have {', '.join(missing)}", hint=hint)
    return {name: str(version) for name, version in found.items()}


MEM0 = Kind("mem0", "benchmarks.peers.mem0_adapter", ("mem0ai", "qdrant-client", "openai"), "peer-mem0", items=20)
LLAMAINDEX = Kind(
    "llamaindex",
    "benchmarks.peers.llamaindex_adapter",
    (
        "llama-index-core",
        "llama-index-llms-openai-like",
        "llama-index-embeddings-openai-like",
        "llama-index-vector-stores-qdrant",
        "qdrant-client",
    ),
    "peer-llamaindex",
    items=20,
)

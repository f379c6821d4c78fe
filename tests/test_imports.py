"""Which module may know which: the arrows between the parts of the package, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lychee_local"

# Every module has a place; those of the two sub-packages have their package's. A new one that is missing here fails the
# first test: decide where it belongs.
GROUPS = {
    "ground": "errors trace types dates settings options strategy lexicon prose voice echoes rules fence asking finish"
    " bearing wording negation elapsed",
    "models": "cards gguf fetch pull",
    "backends": "backends backends.batch backends.bert backends.bge backends.chat backends.constraint backends.fake"
    " backends.folder backends.jobs backends.llama backends.load backends.native backends.output backends.prefixes"
    " backends.sentences",
    "store": "store store.archive store.arrival store.catalogue store.catchup store.check store.codec"
    " store.departure store.derived store.disk store.draft store.epoch store.forget store.graph"
    " store.living store.lock store.log store.manifest store.migrate store.nodes store.opening"
    " store.reembed store.remains store.repair store.residue store.salvage store.snapshot"
    " store.transaction store.vectors store.view store.words",
    "stages": "segment encode plan channels windows rank chain answer",
    "memory": "intake engines accounting consolidation calibrate machine tuning memory upkeep watch executors fleet",
    "surface": "screen explain cli cli_encode cli_fleet cli_models cli_upkeep demo doctor __main__",
}
MAY_KNOW = {
    "ground": {"ground"},
    "models": {"ground", "models"},
    "backends": {"ground", "models", "backends"},
    "store": {"ground", "store"},
    "stages": {"ground", "backends", "store"},
    "memory": {"ground", "models", "backends", "store", "stages", "memory"},
    "surface": {"ground", "models", "backends", "store", "stages", "memory", "surface"},
}
_TOP = {module: group for group, modules in GROUPS.items() for module in modules.split()}

ENGINES = ("torch", "llama_cpp", "outlines", "llguidance", "sentence_transformers", "transformers", "FlagEmbedding")
ENGINES_AND_SLOW = (*ENGINES, "hnswlib", "huggingface_hub", "rich", "safetensors", "tokenizers", "typer")
# Not "socket": the store's lock asks it for the name of this machine.
NETWORK = {"ssl", "http", "urllib", "ftplib", "requests", "httpx", "aiohttp", "huggingface_hub"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}

PLACE = {module: _TOP[module.split(".")[0]] for module in MODULES if module.split(".")[0] in _TOP}


def imports(path: Path) -> set[str]:
    """Full names of all that a module imports, wherever in it; those of the package without its prefix."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name.removeprefix("lychee_local.") in MODULES} or {base}
    return found


def own_imports(module: str) -> set[str]:
    prefix = "lychee_local."
    return {name.removeprefix(prefix) for name in imports(MODULES[module]) if name.startswith(prefix)}


def test_every_module_has_a_place() -> None:
    assert set(MODULES) - set(PLACE) - {""} == set()


@pytest.mark.parametrize("module", [module for module in MODULES if module in PLACE])
def test_a_module_knows_only_what_lies_below_it(module: str) -> None:
    group = PLACE[module]
    strangers = {name for name in own_imports(module) if PLACE.get(name) not in MAY_KNOW[group]}
    assert strangers == set(), f"{module} ({group}) must not know {strangers}"


@pytest.mark.parametrize("module", [module for module in MODULES if PLACE.get(module) == "stages"])
def test_a_stage_sees_the_protocols_of_the_models_and_the_store_as_a_whole(module: str) -> None:
    inside = {name for name in own_imports(module) if name.startswith(("backends.", "store."))}
    assert inside == set()


def test_only_the_pull_opens_connections() -> None:
    opens = {module for module, path in MODULES.items() if {n.split(".")[0] for n in imports(path)} & NETWORK}
    # `pull` and `doctor` ask the hub's library for its cache and its settings; only `fetch` uses its session.
    assert opens <= {"fetch", "pull", "doctor"}


def test_nothing_is_pickled() -> None:
    assert not [module for module, path in MODULES.items() if imports(path) & {"pickle", "shelve", "marshal", "dill"}]


@pytest.mark.parametrize("target", ["lychee_local", "lychee_local.memory", "lychee_local.pull", "lychee_local.engines"])
def test_importing_loads_no_engine(target: str) -> None:
    program = f"import sys, {target}; print(*[name for name in {ENGINES_AND_SLOW!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


def test_the_command_line_shows_its_help_without_an_engine() -> None:
    program = f"import sys, lychee_local.cli; print(*[name for name in {ENGINES!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []

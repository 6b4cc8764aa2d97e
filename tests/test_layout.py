"""The layout of the source tree: small folders and files, one meaning for each module name, no import cycles.

docs/decisions/0018-packages.md has the reasons.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchloom"
MOST_MODULES = 20
MOST_LINES = 400

TWO_SIDES = {
    "checkpoints": "checkpoints of a job: the verb and the table",
    "device_map": "which replicas are on which device: the state and the view",
    "main": "the entry point of a process",
    "node": "a machine with an agent: its messages, and the facts that the agent reads",
    "records": "what the log contains: the messages and their sentences",
    "stacks": "stacks of a rank: written by the rank, read by the agent",
    "status": "one screen about everything: the verbs and the view",
    "why": "the story of an incident: the verb and the view",
}
"""Names that several packages use for one concept, with the concept."""


def _dotted(path: Path) -> str:
    return ".".join(("torchloom", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def _modules() -> dict[str, Path]:
    return {_dotted(path): path for path in sorted(SOURCE.rglob("*.py"))}


MODULES = _modules()


def _imports(name: str) -> Iterator[str]:
    """Every module that a module imports anywhere in it: at the top, in a function, or for type checkers only."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULES else node.module


def _cycles() -> list[set[str]]:
    """The strongly connected components of the import graph that have more than one module."""
    edges = {name: set(_imports(name)) - {name} for name in MODULES}
    reached = {name: _reachable(name, edges) for name in MODULES}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in MODULES}
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    reached, ahead = set(), [name]
    while ahead:
        for other in edges[ahead.pop()]:
            if other not in reached:
                reached.add(other)
                ahead.append(other)
    return reached


def test_folders_are_small() -> None:
    sizes = Counter(name.rpartition(".")[0] for name, path in MODULES.items() if path.name != "__init__.py")
    assert {folder for folder, size in sizes.items() if size > MOST_MODULES} == set()


def test_modules_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name for name, length in lengths.items() if length > MOST_LINES} == set()


def test_a_module_name_has_one_meaning() -> None:
    homes = defaultdict(set)
    for name, path in MODULES.items():
        if not path.name.startswith("__"):
            homes[path.stem].add(name)
    shared = {stem for stem, names in homes.items() if len(names) > 1}
    assert shared == set(TWO_SIDES)


def test_every_module_is_in_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    layered = {module for layer in layers for module in re.split(r"\s*\|\s*", layer)}
    outside = {
        name for name in MODULES if name != "torchloom" and not any(f"{name}.".startswith(f"{m}.") for m in layered)
    }
    assert outside == set()


def test_no_import_cycles_even_lazy_or_for_types_only() -> None:
    assert _cycles() == []


@pytest.mark.long
def test_no_module_hooks_into_fork_when_it_is_imported() -> None:
    script = (
        "import importlib, os, pkgutil\n"
        "hooks = []\n"
        "os.register_at_fork = lambda **given: hooks.extend(str(hook.__module__) for hook in given.values())\n"
        "import torchloom\n"
        "for module in pkgutil.walk_packages(torchloom.__path__, 'torchloom.'):\n"
        "    if '__main__' not in module.name and 'startup' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "print(*(hook for hook in hooks if hook.startswith('torchloom')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"

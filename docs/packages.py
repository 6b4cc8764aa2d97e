"""The diagram of packages in the tour: which package imports which, computed from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs.markdown import fenced

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchloom"
BEGIN = "<!-- The diagram between these lines is printed by `python -m docs.generate`. -->"
END = "<!-- end of the diagram -->"
FOUNDATION = frozenset({"errors", "settings", "shared", "version", "knob_validation"})
"""Small modules that almost every package imports: left out of the diagram."""


def packages() -> dict[str, set[str]]:
    """Each package with those that it imports, wherever in its modules."""
    graph: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package != "__init__" and package not in FOUNDATION:
            graph.setdefault(package, set()).update(_imported(path) - FOUNDATION - {package})
    return graph


def _imported(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(ast.parse(path.read_text("utf-8"))) if name.count(".")}


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchloom."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("torchloom."))


def direct(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """The imports that do not follow from others: without a way round through a third package."""
    return {
        package: [
            imported
            for imported in sorted(imports)
            if not any(imported in _reachable(graph, between) for between in imports - {imported})
        ]
        for package, imports in sorted(graph.items())
    }


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for imported in graph.get(waiting.pop(), set()) - seen:
            seen.add(imported)
            waiting.append(imported)
    return seen


def diagram() -> list[str]:
    arrows = [f"    {package} --> {' & '.join(imports)}" for package, imports in direct(packages()).items() if imports]
    return fenced("mermaid", ["graph TD", *arrows])


def with_diagram(page: str) -> str:
    """The page with the diagram as the source is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([BEGIN, *diagram(), END]) + after

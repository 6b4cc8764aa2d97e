"""Whether nodes are fit, check by check, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchloom.protocol.node import Check
from torchloom.views.format.tables import Cell, Column, Screen, clean, table
from torchloom.views.wording.phrases import render


def fitness(checks_by_node: Mapping[str, tuple[Check, ...]], screen: Screen) -> list[str]:
    """What was found on each node; below it, what to do about what is not good."""
    columns: list[Column[tuple[str, Check]]] = [
        Column("NODE", lambda pair: pair[0]),
        Column("CHECK", lambda pair: pair[1].what),
        Column("STATE", lambda pair: _state(pair[1])),
        Column("FOUND", lambda pair: render(pair[1].found), shrinks=True),
    ]
    every = [(node, check) for node, checks in checks_by_node.items() for check in checks]
    lines = table(columns, every, screen)
    if all(check.fit for _, check in every):
        lines += ["", "fit" if len(checks_by_node) == 1 else f"all {len(checks_by_node)} nodes are fit"]
    wrong = [(node, check) for node, check in every if not check.fit or check.remedy]
    lines += [""] if wrong else []
    for node, check in wrong:
        lines.append(f"{node}: {check.what}: {clean(render(check.found))}")
        lines += [f"  → {clean(render(check.remedy))}"] if check.remedy else []
    return lines


def _state(check: Check) -> Cell:
    """In doubt is what is fit and has a remedy nevertheless."""
    if not check.fit:
        return Cell("not fit", "red")
    return Cell("look", "yellow") if check.remedy else Cell("ok", "green")


def document(checks_by_node: Mapping[str, tuple[Check, ...]]) -> dict[str, Any]:
    nodes = []
    for node, checks in checks_by_node.items():
        texts = [{"what": c.what, "fit": c.fit, "found": render(c.found), "remedy": render(c.remedy)} for c in checks]
        nodes.append({"node": node, "fit": all(check.fit for check in checks), "checks": texts})
    return {"fit": all(node["fit"] for node in nodes), "nodes": nodes}

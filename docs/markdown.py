"""Pieces of Markdown that the printed pages are made of."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table; a bar inside a cell is not a border."""
    head = list(head)
    lines = [_row(head), "|" + "---|" * len(head)]
    return lines + [_row(row) for row in rows]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def fenced(language: str, lines: Iterable[str]) -> list[str]:
    return [f"```{language}", *lines, "```"]

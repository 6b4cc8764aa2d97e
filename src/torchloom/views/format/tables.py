"""Aligned columns for a terminal: cut to its width, coloured if it wants colour, and safe to print.

Free text comes from other machines, so every cell is cleaned: a cause such as `\\x1b[2J` must not clear the screen.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from torchloom.views.format.numbers import ABSENT

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
_GAP = "  "
_NARROWEST = 8
"""Characters a column keeps even on the smallest terminal."""


@dataclass(frozen=True)
class Screen:
    """What is printed on: how wide (None: as wide as needed, a file or a pipe), how high, and whether in colour."""

    width: int | None = None
    height: int | None = None
    colour: bool = False

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour and style and text else text


_QUANTITY = re.compile(r"(?<=\d) (?=(?:s|min|h|d|ms|MB|GB|%)\b|%)")
"""The space between a number and its unit, where no line is broken."""


def wrapped(text: str, width: int | None, hanging: int = 0) -> list[str]:
    """The text in as many lines as it needs; all but the first are indented."""
    if width is None:
        return [text]
    text = _QUANTITY.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(text, width, subsequent_indent=" " * hanging, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines or [text]]


class Cell(NamedTuple):
    text: str
    style: str = ""


Item = TypeVar("Item")


@dataclass(frozen=True)
class Column(Generic[Item]):
    head: str
    cell: Callable[[Item], str | Cell | None]
    """What it shows of an item. No text is shown as `-`."""
    right: bool = False
    """Numbers stand to the right."""
    shrinks: bool = False
    """May be cut short when the terminal is narrow."""


def clean(text: str) -> str:
    """One printable line: control characters, newlines and terminal escapes are shown, not obeyed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "\N{REPLACEMENT CHARACTER}" for c in text)


def columns_of(text: str) -> int:
    """How many columns of the terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int | None) -> str:
    """The text, with … at its end if it is wider than `width`."""
    if width is None or columns_of(text) <= width:
        return text
    kept = text[: max(0, width - 1)]
    while kept and columns_of(kept) > width - 1:
        kept = kept[:-1]
    return kept + "…"


def table(columns: Sequence[Column[Item]], items: Iterable[Item], screen: Screen) -> list[str]:
    """The lines of a table with a head and a row for each item."""
    cells = [[_cell(column.cell(item)) for column in columns] for item in items]
    widths = [
        max([columns_of(column.head), *(columns_of(row[i].text) for row in cells)]) for i, column in enumerate(columns)
    ]
    _shrink(columns, widths, screen.width)
    rows = [[Cell(column.head, "dim") for column in columns], *cells]
    return [_line(row, columns, widths, screen) for row in rows]


def _cell(shown: str | Cell | None) -> Cell:
    cell = shown if isinstance(shown, Cell) else Cell(shown or ABSENT)
    return Cell(clean(cell.text), cell.style)


def _shrink(columns: Sequence[Column[Item]], widths: list[int], width: int | None) -> None:
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        soft = [i for i, column in enumerate(columns) if column.shrinks and widths[i] > _NARROWEST]
        if not soft:
            return
        widths[max(soft, key=lambda i: widths[i])] -= 1


def _line(row: Sequence[Cell], columns: Sequence[Column[Item]], widths: Sequence[int], screen: Screen) -> str:
    parts = []
    room = screen.width
    for i, cell in enumerate(row):
        width = widths[i] if room is None else max(0, min(widths[i], room))
        if width == 0:
            break  # nothing fits behind this column
        text = cut(cell.text, width)
        blank = " " * (width - columns_of(text))
        painted = screen.paint(text, cell.style)
        parts.append(blank + painted if columns[i].right else painted + blank)
        room = None if room is None else room - width - len(_GAP)
    return _GAP.join(parts).rstrip()

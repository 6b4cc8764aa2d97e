"""Lines of a workload file, split into cells.

The csv module of Python cannot read these files: a list of devices such as `["0 1", "0 1"]` has quotes and commas of
its own, without being quoted as a whole. Here a comma separates cells unless it is in quotes or in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchloom.errors import BadInput


class Line(NamedTuple):
    row: int
    """As a spreadsheet counts: the first line of the file is row 1."""
    cells: tuple[str, ...]
    error: str = ""
    """Why it cannot be split."""


def split_lines(text: str) -> Iterator[Line]:
    """The lines that are neither blank nor only a comment."""
    for row, line in enumerate(text.removeprefix("\N{BYTE ORDER MARK}").replace("\r\n", "\n").split("\n"), start=1):
        try:
            cells = split_cells(line.rstrip("\r"))
        except BadInput as error:
            yield Line(row, (), error.message)
            continue
        if any(cells):
            yield Line(row, cells)


def split_cells(line: str) -> tuple[str, ...]:
    """The cells of a line without its comment; BadInput if a quote or bracket is not closed."""
    cells, start, end, quote, brackets = [], 0, len(line), "", 0
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character == '"' or (character == "'" and brackets):
            quote = character
        elif character in "[{":
            brackets += 1
        elif character in "]}":
            brackets = max(0, brackets - 1)
        elif character == "," and not brackets:
            cells.append(line[start:place])
            start = place + 1
        elif character == "#" and not brackets and (not place or line[place - 1].isspace()):
            end = place
            break
    if quote or brackets:
        raise BadInput(f"{quote or 'a bracket'} is not closed")
    return tuple(_unquoted(cell.strip()) for cell in (*cells, line[start:end]))


def _unquoted(cell: str) -> str:
    """The content of a cell that is quoted as a whole; a doubled quote in it stands for one."""
    if len(cell) < 2 or cell[0] != cell[-1] or cell[0] not in "\"'":
        return cell
    quote = cell[0]
    inner = cell[1:-1].replace(quote * 2, "\0")
    return cell if quote in inner else inner.replace("\0", quote).strip()

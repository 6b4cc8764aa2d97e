"""What ranks print, shown as it comes, each line with its rank in front. The files are written by the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

COLOURS = (36, 33, 35, 32, 34, 31)
MOST = 1024 * 1024
"""Bytes read from one file at a time."""


@dataclass
class Tail:
    """One file, read to its end as it grows. Only whole lines are given; the rest when it is over."""

    path: Path
    at: int = 0
    rest: bytes = b""
    _file: BinaryIO | None = field(default=None, repr=False)

    def read(self) -> list[str]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
                self._file.seek(self.at)
            except OSError:
                return []  # not there yet
        data = self._file.read(MOST)
        if not data:
            return []
        self.at += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def last(self) -> list[str]:
        """What is left when nothing more will come."""
        lines = self.read()
        rest, self.rest = self.rest, b""
        if self._file is not None:
            self._file.close()
            self._file = None
        return [*lines, rest.decode(errors="replace")] if rest else lines


class Output:
    """The files of all ranks of an attempt, told apart by rank; stdout to stdout, stderr to stderr."""

    def __init__(self, colour: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._colour = colour
        self._streams = {"out": out or sys.stdout, "err": err or sys.stderr}
        self._tails: dict[tuple[Path, int, str], Tail] = {}

    def follow(self, folder: Path, ranks: list[int]) -> None:
        for rank in ranks:
            for which in self._streams:
                key = (folder, rank, which)
                if key not in self._tails:
                    self._tails[key] = Tail(folder / f"rank-{rank}.{which}")

    def show(self) -> bool:
        """Print what is new; whether there was anything."""
        return self._print(Tail.read)

    def finish(self) -> None:
        while self.show():
            pass
        self._print(Tail.last)
        self._tails.clear()

    def _print(self, read: Callable[[Tail], list[str]]) -> bool:
        found = False
        for (_, rank, which), tail in self._tails.items():
            lines = read(tail)
            if lines:
                found = True
                stream = self._streams[which]
                stream.write("".join(f"{self._prefix(rank)}{line}\n" for line in lines))
                stream.flush()
        return found

    def _prefix(self, rank: int) -> str:
        if not self._colour:
            return f"[{rank}] "
        return f"\033[{COLOURS[rank % len(COLOURS)]}m[{rank}]\033[0m "

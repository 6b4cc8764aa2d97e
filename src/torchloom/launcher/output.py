"""What ranks print, shown as it comes, each line with its rank in front. The files are written by the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from nats.aio.client import Client

from torchloom.bus.node_client import ask_node
from torchloom.errors import Refused, Unreachable
from torchloom.protocol.node import Place
from torchloom.protocol.views import LinesView, QueryLines, RunView
from torchloom.views.job_runs import label

COLOURS = (36, 33, 35, 32, 34, 31)
MOST = 1024 * 1024
"""Bytes read from one file at a time."""


@dataclass
class Tail:
    """One file, read to its end as it grows."""

    path: Path
    run: str = ""
    attempt: int = 1
    label: str = ""
    """Of its replica, where there are several."""
    _file: BinaryIO | None = field(default=None, repr=False)

    def read(self) -> bytes:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:
                return b""  # not there yet
        return self._file.read(MOST)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Output:
    """The printing of all ranks, told apart by rank; stdout to stdout, stderr to stderr. Only whole lines are shown,
    what is left of others when it is over. With `alone` there is one rank, and nothing in front."""

    def __init__(
        self,
        colour: bool,
        *,
        alone: bool = False,
        before: Callable[[], None] = lambda: None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """`before` is called whenever something is about to be printed."""
        self._colour = colour
        self._alone = alone
        self._before = before
        self._streams = {"out": out or sys.stdout, "err": err or sys.stderr}
        self._tails: dict[tuple[Path, int, str], Tail] = {}
        self._rests: dict[tuple[Hashable, int, str, str], bytes] = {}

    def follow(self, folder: Path, ranks: list[int], run: str = "", attempt: int = 1, replica: str = "") -> None:
        """Show the files of these ranks in this folder, too."""
        for rank in ranks:
            for which in self._streams:
                key = (folder, rank, which)
                if key not in self._tails:
                    self._tails[key] = Tail(folder / f"rank-{rank}.{which}", run, attempt, replica)

    def show(self, attempts: Mapping[str, int] | None = None) -> bool:
        """Print what is new in the files, of the first `attempts` of each run; whether there was anything."""
        found = False
        for (folder, rank, which), tail in list(self._tails.items()):
            if (attempts is None or tail.attempt <= attempts.get(tail.run, 0)) and (data := tail.read()):
                found = True
                self.feed(folder, rank, which, data, tail.label)
        return found

    def feed(self, source: Hashable, rank: int, which: str, data: bytes, replica: str = "") -> None:
        """Print what a rank has printed; `source` tells its attempts apart."""
        *lines, rest = (self._rests.pop((source, rank, which, replica), b"") + data).split(b"\n")
        if rest:
            self._rests[source, rank, which, replica] = rest
        self._print(rank, which, lines, replica)

    def finish(self) -> None:
        while self.show():
            pass
        for (_, rank, which, replica), rest in self._rests.items():
            self._print(rank, which, [rest], replica)
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()
        self._rests.clear()

    def _print(self, rank: int, which: str, lines: list[bytes], replica: str) -> None:
        if lines:
            self._before()
            stream, prefix = self._streams[which], self._prefix(rank, replica)
            texts = (line.decode(errors="replace").rstrip("\r") for line in lines)
            stream.write("".join(f"{prefix}{text}\n" for text in texts))
            stream.flush()

    def _prefix(self, rank: int, replica: str) -> str:
        if self._alone:
            return ""
        name = f"{replica}/{rank}" if replica else str(rank)
        if not self._colour:
            return f"[{name}] "
        shade = int(replica) if replica.isdecimal() else rank
        return f"\033[{COLOURS[shade % len(COLOURS)]}m[{name}]\033[0m "


WHICH = ("out", "err")


@dataclass
class RemoteOutput:
    client: Client
    output: Output
    rank: int | None = None
    """Only this one."""
    trouble: str = ""
    """Why something could not be read, the last time."""
    _read: dict[tuple[str, int, int, str], int] = field(default_factory=dict)
    """How many bytes of each file have been shown: by job, attempt, rank and which."""

    async def show(self, run: RunView, ordinal: int | None = None) -> bool:
        """Print what is new of an attempt, the last one if none is named; whether there was anything."""
        self.trouble = ""
        number = ordinal or run.attempt
        places = [place for place in run.places if self.rank in {None, place.rank}]
        parts = await asyncio.gather(*(self._part(run, number, place, which) for place in places for which in WHICH))
        return any(parts)

    async def _part(self, run: RunView, ordinal: int, place: Place, which: str) -> bool:
        key = (run.job, ordinal, place.rank, which)
        at = self._read.get(key, 0)
        look = QueryLines(
            job=run.job, rank=place.rank, which=which, ordinal=ordinal, at=at, submitted=run.submitted  # type: ignore[arg-type]
        )  # fmt: skip
        with contextlib.suppress(Refused):  # it is not started yet, or was on another node
            try:
                found = await ask_node(self.client, place.node, look, LinesView)
            except Unreachable as error:
                self.trouble = error.message
                return False
            if found.data:
                self._read[key] = found.at + len(found.data)
                self.output.feed((run.job, ordinal), place.rank, which, found.data, label(run))
                return True
        return False

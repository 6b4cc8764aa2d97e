"""What ranks print, shown as it comes, each line with its rank in front. The files are written by the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TextIO

from nats.aio.client import Client

from torchloom.bus.weaver_client import ask_node
from torchloom.errors import Refused, Unreachable
from torchloom.protocol.node import Place
from torchloom.protocol.views import LinesView, QueryLines, RunView
from torchloom.views.job_runs import label

COLOURS = (36, 33, 35, 32, 34, 31)
MOST = 1024 * 1024
"""Bytes read from one file at a time."""
WHICH = ("out", "err")


@dataclass
class Output:
    """The printing of all ranks, told apart by rank; stdout to stdout, stderr to stderr. Only whole lines are shown,
    what is left of others when it is over. With `alone` there is one rank, and nothing in front."""

    colour: bool
    _: KW_ONLY
    alone: bool = False
    before: Callable[[], None] = lambda: None
    """Called whenever something is about to be printed."""
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    _rests: dict[tuple[Hashable, int, str, str], bytes] = field(default_factory=dict)

    def feed(self, source: Hashable, rank: int, which: str, data: bytes, replica: str = "") -> None:
        """Print what a rank has printed; `source` tells its attempts apart."""
        *lines, rest = (self._rests.pop((source, rank, which, replica), b"") + data).split(b"\n")
        if rest:
            self._rests[source, rank, which, replica] = rest
        self._print(rank, which, lines, replica)

    def finish(self) -> None:
        for (_, rank, which, replica), rest in self._rests.items():
            self._print(rank, which, [rest], replica)
        self._rests.clear()

    def _print(self, rank: int, which: str, lines: list[bytes], replica: str) -> None:
        if lines:
            self.before()
            stream, prefix = self.out if which == "out" else self.err, self._prefix(rank, replica)
            texts = (line.decode(errors="replace").rstrip("\r") for line in lines)
            stream.write("".join(f"{prefix}{text}\n" for text in texts))
            stream.flush()

    def _prefix(self, rank: int, replica: str) -> str:
        if self.alone:
            return ""
        name = f"{replica}/{rank}" if replica else str(rank)
        if not self.colour:
            return f"[{name}] "
        shade = int(replica) if replica.isdecimal() else rank
        return f"\033[{COLOURS[shade % len(COLOURS)]}m[{name}]\033[0m "


class OutputReader:
    """Prints what is new of what ranks have printed; of one rank alone, if it is named."""

    pause = 0.0
    """Seconds between two looks."""
    trouble = ""
    """Why something could not be read, the last time."""

    def __init__(self, output: Output, rank: int | None = None) -> None:
        self.output = output
        self.rank = rank
        self.newest: dict[str, int] = {}
        """The newest attempt of each run of which something may have been shown: the first to look at."""
        self._offsets: dict[Hashable, int] = {}
        """How many bytes of each file have been shown."""

    async def show(self, run: RunView, ordinal: int) -> bool:
        """Print what is new of an attempt; whether there was anything."""
        raise NotImplementedError

    async def show_attempts(self, run: RunView, last: int, *, over: bool = False) -> bool:
        """Print what is new up to an attempt: all there is of attempts that are over, else a part of it; whether there
        was anything of the last one."""
        new = False
        for ordinal in range(self.newest.get(run.job, 1), last + 1):
            while (new := await self.show(run, ordinal)) and (over or ordinal < last):
                pass
            self.newest[run.job] = ordinal
        return new


class FileReader(OutputReader):
    """Of files on this machine."""

    async def show(self, run: RunView, ordinal: int) -> bool:
        folder = Path(run.task.log_dir) / f"attempt-{ordinal}"
        ranks = run.task.world_size  # in a folder that was used before there may be files of others
        # In a thread: a terminal that is held must not hold an agent.
        return await asyncio.to_thread(self.show_folder, folder, label(run), ranks)

    def show_folder(self, folder: Path, replica: str = "", below: int = sys.maxsize) -> bool:
        new = False
        for rank in (rank for rank in self.ranks(folder) if rank < below):
            for which in WHICH:
                if data := self._read(folder / f"rank-{rank}.{which}"):
                    self.output.feed(folder, rank, which, data, replica)
                    new = True
        return new

    def _read(self, path: Path) -> bytes:
        with contextlib.suppress(OSError), path.open("rb") as file:  # it may not be there yet
            file.seek(self._offsets.get(path, 0))
            data = file.read(MOST)
            self._offsets[path] = file.tell()
            return data
        return b""

    def ranks(self, folder: Path) -> list[int]:
        numbers = [path.stem.rpartition("-")[2] for path in folder.glob("rank-*.out")]
        ranks = {int(number) for number in numbers if number.isdecimal()}
        return sorted(ranks if self.rank is None else ranks & {self.rank})


class RemoteReader(OutputReader):
    """Of files on the nodes, read by the agents there."""

    pause = 0.3

    def __init__(self, client: Client, output: Output, rank: int | None = None) -> None:
        super().__init__(output, rank)
        self.client = client

    async def show(self, run: RunView, ordinal: int) -> bool:
        self.trouble = ""
        places = [place for place in run.places if self.rank in {None, place.rank}]
        parts = await asyncio.gather(*(self._part(run, ordinal, place, which) for place in places for which in WHICH))
        return any(parts)

    async def _part(self, run: RunView, ordinal: int, place: Place, which: str) -> bool:
        key = (run.job, ordinal, place.rank, which)
        at = self._offsets.get(key, 0)
        look = QueryLines(
            job=run.job, rank=place.rank, which=which, ordinal=ordinal, at=at, submitted=run.submitted  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            lines = await ask_node(self.client, place.node, look, LinesView)
        except Refused:  # it is not started yet, or was on another node
            return False
        except Unreachable as error:
            self.trouble = error.message
            return False
        if lines.data:
            self._offsets[key] = lines.at + len(lines.data)
            self.output.feed((run.job, ordinal), place.rank, which, lines.data, label(run))
        return bool(lines.data)

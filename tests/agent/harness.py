"""A real supervisor: ranks from a few lines of Python, and everything they left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torchloom.agent.supervisor.protocol import Begin, Begun, Ended, NotBegun, State
from torchloom.agent.supervisor.supervisor_client import Gone, SupervisorClient, SupervisorOptions
from torchloom.protocol.phrase import Prose

SECONDS = 60.0
"""How long anything may take before a test gives up on it."""
TAKEN = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
ENV = {name: os.environ[name] for name in TAKEN if name in os.environ} | {"OMP_NUM_THREADS": "1"}
"""Of the supervisors and the ranks: the same whoever runs the tests."""


@dataclass(frozen=True)
class Life:
    """All of a rank."""

    begun: Begun
    ended: Ended
    out: str
    err: str

    @property
    def end(self) -> tuple[int | None, int | None, str, str]:
        return self.ended.code, self.ended.signal, self.out, self.err


@dataclass(eq=False)
class SupervisorHarness:
    """A link, what it heard, and a folder for scripts and outputs."""

    home: Path
    env: Mapping[str, str] = field(default_factory=lambda: ENV)
    ends: dict[str, Ended] = field(default_factory=dict)
    gone: list[Gone] = field(default_factory=list)
    _link: SupervisorClient | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _keys: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def link(self) -> SupervisorClient:
        assert self._link
        return self._link

    async def start(self, folder: Path, how: SupervisorOptions) -> State:
        self._link = await SupervisorClient.start(folder, how, self)
        return self._link.state

    async def find(self, folder: Path) -> State:
        self._link = await SupervisorClient.find(folder, self)
        return self._link.state

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    def order(
        self, *argv: str, warm: bool = False, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Begin:
        """To run the interpreter with these arguments."""
        key = f"{self.home.name}-{next(self._keys)}"
        return Begin(
            key=key, argv=(sys.executable, *argv), env=dict(self.env) | dict(env or {}), cwd=str(cwd or self.home),
            stdout=str(self.home / f"{key}.out"), stderr=str(self.home / f"{key}.err"), warm=warm,
        )  # fmt: skip

    async def begin(self, begin: Begin) -> Begun:
        answer = await asyncio.wait_for(self.link.begin(begin), SECONDS)
        assert isinstance(answer, Begun), answer
        if begin.warm:
            assert answer.warm, answer.why_cold
        return answer

    async def refused(self, begin: Begin) -> Prose:
        answer = await asyncio.wait_for(self.link.begin(begin), SECONDS)
        assert isinstance(answer, NotBegun), answer
        return answer.why

    async def live(self, *argv: str, warm: bool = False, **more: object) -> Life:
        """From the start to the end."""
        begin = self.order(*argv, warm=warm, **more)  # type: ignore[arg-type]
        begun = await self.begin(begin)
        ended = await self.end_of(begin.key)
        return Life(begun, ended, self.text(begin.stdout), self.text(begin.stderr))

    async def end_of(self, key: str) -> Ended:
        await self.until(lambda: key in self.ends)
        return self.ends[key]

    async def line(self, begin: Begin, number: int = 1) -> list[str]:
        """The output, once it has so many whole lines."""
        await self.until(lambda: self.text(begin.stdout).count("\n") >= number)
        return self.text(begin.stdout).splitlines()

    async def until(self, true: Callable[[], bool]) -> None:
        await until(true)

    def text(self, path: str) -> str:
        return Path(path).read_text(errors="replace") if Path(path).exists() else ""

    def rank_ended(self, ended: Ended) -> None:
        self.ends[ended.key] = ended

    def supervisor_gone(self, link: SupervisorClient, gone: Gone) -> None:
        assert link is self._link
        self.gone.append(gone)


async def until(true: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "it did not come"
        await asyncio.sleep(0.005)


def lives(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not."""
    try:
        return bool(psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
    except psutil.NoSuchProcess:
        return False

"""A process that has imported torch and waits for a job, so that even the first start of a job need not import it.

The job that takes it keeps it as its supervisor, and another one is started. If the interpreter or the environment of
the job differs, its ranks are fresh interpreters, and the job gets a standby of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from torchloom.agent.supervisor.supervisor_client import SupervisorClient, SupervisorGone, SupervisorOptions
from torchloom.errors import TorchLoomError, Unreachable
from torchloom.protocol.phrase import phrase
from torchloom.views.wording.phrases import render

FOLDER = "spare"
PAUSE = 2.0
"""Seconds before the next one is started: the job that took the last one starts now."""
Linking = Callable[[Path, SupervisorOptions], Coroutine[Any, Any, SupervisorClient]]


class Spare:
    def __init__(self, base: Path, open: Linking, how: SupervisorOptions, say: Callable[[str], None]) -> None:
        self._base = base
        self._open = open
        self._how = how
        self._say = say
        self._link: SupervisorClient | None = None
        self._number = 0
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def memory_mb(self) -> float:
        return self._link.state.memory_mb if self._link is not None else 0.0

    def take(self, folder: Path) -> SupervisorClient | None:
        """Have it, under this folder; None if there is none that is ready."""
        link = self._link
        if link is None or folder.exists():
            return None
        if not link.alive:
            self.lost(link)
            return None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            link.folder.rename(folder)  # it works there already, and does not know what the folder is called
        except OSError:
            return None
        link.folder = folder
        self._link = None
        self._wanted.set()
        return link

    def lost(self, link: SupervisorClient) -> None:
        """A supervisor is dead; if it was the one that waits, another is made."""
        if link is self._link:
            self._link = None
            self._wanted.set()
            shutil.rmtree(link.folder, ignore_errors=True)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await _dismiss(self._link)

    async def _keep(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await asyncio.sleep(PAUSE)
            self._number += 1
            folder = self._base / f"{FOLDER}-{os.getpid()}-{self._number}"
            try:
                link = await self._open(folder, self._how)
                state = await link.settled()
            except (TorchLoomError, OSError) as error:
                self._say(render(phrase("no_spare", why=getattr(error, "message", "") or str(error))))
                return
            if state.why_cold:
                self._say(render(phrase("no_spare", why=state.why_cold)))
                await _dismiss(link)
                return
            self._link = link


def how_to_keep(preload: tuple[str, ...], tied: bool, env: dict[str, str], crowded: bool) -> SupervisorOptions:
    """With the environment that ranks will have, as far as it can be known before: `env` is what they are passed."""
    if crowded:
        env = {"OMP_NUM_THREADS": "1"} | env  # as ranks that share a node have
    return SupervisorOptions(tied=tied, preload=preload, python=sys.executable, env=env, cwd="/")


async def remove_left(base: Path) -> None:
    """Those of an agent that was killed: nobody knows of them any more."""
    for folder in base.glob(f"{FOLDER}-*"):
        with contextlib.suppress(Unreachable, SupervisorGone):
            await _dismiss(await SupervisorClient.find(folder, lambda _: None, lambda _: None))
        shutil.rmtree(folder, ignore_errors=True)


async def _dismiss(link: SupervisorClient) -> None:
    with contextlib.suppress(SupervisorGone):
        await link.dismiss()
    shutil.rmtree(link.folder, ignore_errors=True)

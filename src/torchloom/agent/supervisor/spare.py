"""A process that has imported torch and waits for a job, so that even the first start of a job need not import it.

The job that takes it keeps it as its supervisor, and another one is started. If the interpreter or the environment of
the job differs, its ranks are fresh interpreters, and the job gets a standby of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torchloom.agent.supervisor.protocol import Ended
from torchloom.agent.supervisor.supervisor_client import Gone, SupervisorClient, SupervisorOptions, SupervisorOwner
from torchloom.bus.tasks import end_all
from torchloom.errors import TorchLoomError
from torchloom.protocol.phrase import phrase
from torchloom.views.wording.phrases import render

FOLDER = "spare"
PAUSE = 2.0
"""Seconds before the next one is started: the job that took the last one starts now."""


class Spare:
    def __init__(self, base: Path, how: SupervisorOptions, say: Callable[[str], None]) -> None:
        self._base = base
        self._how = how
        self._say = say
        self._prepare()

    @property
    def memory_mb(self) -> float:
        return self._link.state.memory_mb if self._link is not None else 0.0

    def take(self, folder: Path, owner: SupervisorOwner) -> SupervisorClient | None:
        """Have it, under this folder; None if there is none that is ready."""
        link = self._link
        if link is None or folder.exists():
            return None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            link.folder.rename(folder)  # it works there already, and does not know what the folder is called
        except OSError:
            return None
        link.folder, link.owner = folder, owner
        self._prepare()
        return link

    def rank_ended(self, ended: Ended) -> None:
        """Nothing runs in it."""

    def supervisor_gone(self, link: SupervisorClient, gone: Gone) -> None:
        if link is self._link:
            if not gone.replaced:
                shutil.rmtree(link.folder, ignore_errors=True)
            self._prepare()

    async def close(self) -> None:
        await end_all([self._task])
        if self._link is not None:
            await self._link.remove()

    def _prepare(self) -> None:
        self._link: SupervisorClient | None = None
        self._task = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        await asyncio.sleep(PAUSE)
        folder = self._base / f"{FOLDER}-{os.getpid()}"
        link = None
        try:
            link = await SupervisorClient.start(folder, self._how, self)
            state = await link.settled()
        except asyncio.CancelledError:  # the agent leaves, and nobody would know of it
            if link is not None and link.process is not None:
                link.process.kill()
                link.process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except (TorchLoomError, OSError) as error:
            self._say(render(phrase("no_spare", why=str(error))))
            return
        if state.why_cold:
            self._say(render(phrase("no_spare", why=state.why_cold)))
            await link.remove()
        elif link.alive:
            self._link = link
        else:
            self._prepare()


async def remove_left(base: Path) -> None:
    """Those of an agent that was killed: nobody knows of them any more."""
    for folder in base.glob(f"{FOLDER}-*"):
        with contextlib.suppress(TorchLoomError):  # it is dead already
            await (await SupervisorClient.find(folder, None)).dismiss()
        shutil.rmtree(folder, ignore_errors=True)

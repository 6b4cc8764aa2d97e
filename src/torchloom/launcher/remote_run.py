"""`loom run` on several nodes: the ranks are run by the agents that stand there, and followed from here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torchloom.bus.weaver_client import WeaverClient
from torchloom.launcher.output import Output, RemoteOutput
from torchloom.launcher.run_control import LaunchRequest, RankController, RunFollower
from torchloom.protocol.subjects import Role
from torchloom.protocol.views import RunView
from torchloom.settings import Settings
from torchloom.views.job_runs import replicas

LOOK_SECONDS = 0.3


async def run(settings: Settings, request: LaunchRequest) -> int:
    """Until the job is over; its exit code."""
    async with WeaverClient(settings, Role.OPERATOR, patience=3.0) as reader:
        ranks = RemoteRanks(RemoteOutput(reader.client, Output(request.colour, before=request.line.hide)))
        return await RunFollower(settings, request, ranks).follow()


class RemoteRanks(RankController):
    """They can be read, and ended only by the weaver."""

    def __init__(self, remote: RemoteOutput) -> None:
        self.remote = remote
        self._looked = -LOOK_SECONDS

    async def show(self, runs: Sequence[RunView], _told: Mapping[str, int]) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            for run in replicas(runs):
                await self.remote.show(run)

    async def finish(self, runs: Sequence[RunView]) -> None:
        for run in replicas(runs):
            while await self.remote.show(run):
                pass
        self.remote.output.finish()

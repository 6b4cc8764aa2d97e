"""Whether the process of a lost rank has ended, where the weaver can find out: on its own machine.

An agent observes the ranks that it started. No agent observes those of a plain torchrun, and after a connection has
closed their process may still run. It matters for replicas under torchft: the others wait for one that may be alive. So
the weaver asks the kernel. The answer goes through the inbox, behind a goodbye that the rank may have sent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from torchloom.bus.tasks import TaskSet
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.ranks import Presence, Rank
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.subjects import FACT
from torchloom.shared.process_id import has_ended

PAUSES = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each check: connections close a moment before the process ends. The last one is repeated."""

Send = Callable[[str, bytes], Awaitable[None]]


class ProcessExitProbe:
    def __init__(self, cluster: ClusterState, send: Send, pauses: tuple[float, ...] = PAUSES) -> None:
        self._cluster = cluster
        self._send = send
        self._pauses = pauses
        self.tasks = TaskSet()

    def watch(self, id: RankId) -> None:
        """Watch the process of a lost rank, if it is a member of a quorum and no agent watches it."""
        rank = self._cluster.ranks.get(id)
        if rank is not None and rank.member and rank.process and self._cluster.runs.of(id.replica_id) is None:
            self.tasks.start(self._wait_for_exit(rank))

    async def _wait_for_exit(self, rank: Rank) -> None:
        for pause in itertools.chain(self._pauses, itertools.repeat(self._pauses[-1])):
            await asyncio.sleep(pause)
            now = self._cluster.ranks.get(rank.id)
            if now is None or now.incarnation != rank.incarnation or now.presence is not Presence.LOST:
                return  # it is back, or given up
            if has_ended(rank.process):
                job, replica, number = rank.id.job, rank.id.replica, rank.id.rank
                fact = RankExited(job=job, replica=replica, rank=number, incarnation=rank.incarnation)
                await self._send(FACT.to(source="weaver"), encode(fact))
                return

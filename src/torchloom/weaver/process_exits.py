"""Whether the process of a rank that was lost has ended, where the weaver can see it: on its own machine.

Of ranks that an agent started the agent knows. Those of a plain torchrun nobody watches, and after a link has closed
their life may go on elsewhere for all one knows. It matters for replicas under torchft: the others wait for one that
may live. So the kernel is asked. What it says goes through the inbox, behind the goodbye that the rank may have left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.presence import Presence
from torchloom.core.state.ranks import Rank
from torchloom.protocol.codec import encode
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.subjects import FACT
from torchloom.shared.process_id import has_ended

LOOKS = (0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each: links close a moment before the process is gone. The last of them again and again."""

Send = Callable[[str, bytes], Awaitable[None]]


class ProcessExitProbe:
    def __init__(self, cluster: ClusterState, send: Send, looks: tuple[float, ...] = LOOKS) -> None:
        self._cluster = cluster
        self._send = send
        self._looks = looks
        self.tasks: set[asyncio.Task[None]] = set()

    def lost(self, rank: RankId) -> None:
        """Look after it, if somebody counts on it and no agent does so."""
        known = self._cluster.ranks.get(rank)
        if known is not None and known.member and known.process and self._cluster.runs.of(rank.replica_id) is None:
            task = asyncio.create_task(self._look(known))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _look(self, rank: Rank) -> None:
        for pause in itertools.chain(self._looks, itertools.repeat(self._looks[-1])):
            await asyncio.sleep(pause)
            now = self._cluster.ranks.get(rank.id)
            if now is None or now.incarnation != rank.incarnation or now.presence is not Presence.LOST:
                return  # it is back, or given up
            if has_ended(rank.process):
                job, replica, number = rank.id.job, rank.id.replica, rank.id.rank
                fact = RankExited(job=job, replica=replica, rank=number, incarnation=rank.incarnation)
                await self._send(FACT.to(source="weaver"), encode(fact))
                return

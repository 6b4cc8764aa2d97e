"""Carries out a decision whose records are stored: commands, tasks, evictions, answers and verdicts are sent."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import nats.errors
import nats.js.errors
from msgspec.structs import replace
from nats.aio.client import Client

from torchloom.bus.tasks import TaskSet
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.events import VerdictKnown
from torchloom.protocol.codec import encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Launch, NodeCommand
from torchloom.protocol.operator import No
from torchloom.protocol.records import RankLost
from torchloom.protocol.subjects import COMMAND, EVICT, TASK
from torchloom.views.format.tables import clean, cut
from torchloom.views.records import sentences
from torchloom.weaver.event_queue import EventQueue
from torchloom.weaver.log_store import Store
from torchloom.weaver.process_exits import ProcessExitProbe
from torchloom.weaver.query_handler import QueryHandler

log = logging.getLogger("torchloom.weaver")

LOG_LINE = 500
"""Most characters of a record in the log file; `loom events` shows all of them."""


@dataclass(eq=False)
class DecisionSender:
    client: Client
    store: Store
    queue: EventQueue
    queries: QueryHandler
    mint: Callable[[RankId], str] | None = None
    """Makes the credentials of one rank, if this control plane has the keys."""

    def __post_init__(self) -> None:
        self._exits = ProcessExitProbe(self.queries.cluster, self._send)
        self._verdicts = TaskSet()

    async def send(self, decision: Decision, reply: str) -> None:
        """Send everything that a decision contains, and its answer to the subject `reply`."""
        for record in decision.stored:
            for sentence in sentences(record):
                log.info("%s", cut(clean(sentence), LOG_LINE))  # evidence may be long, and comes from outside
            if isinstance(record, RankLost):
                self._exits.watch(record.rank)
        for rank, command in decision.commands:
            await self._send(COMMAND.for_rank(rank), encode(command))
        for node, task in decision.tasks:
            await self._send(TASK.to(node=node), encode(self._with_credentials(node, task)))
        for job, evict in decision.evictions:
            await self._send(EVICT.to(job=job), encode(evict))
        for subject, answer in decision.replies:
            await self.queries.answer(subject, answer)
        if reply and decision.answer is not None:
            await self.queries.answer(reply, decision.answer)
        elif isinstance(decision.answer, No):
            self.queries.health.refuse(decision.answer.why)
        for verdict in decision.verdicts:
            self._verdicts.start(self._write_verdict(verdict))

    async def _write_verdict(self, verdict: WantedVerdict) -> None:
        try:
            commit = await self.store.write_verdict(verdict.job, verdict.key, verdict.commit)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            log.warning("%s: the verdict could not be written: %s", verdict.change, error or type(error).__name__)
            return  # the engine requests it again
        self.queue.put(VerdictKnown(verdict.change, commit, verdict.abort))

    def _with_credentials(self, node: str, task: NodeCommand) -> NodeCommand:
        """Give each rank that is to be started credentials with which it can act only as itself."""
        if not isinstance(task, Launch) or self.mint is None:
            return task
        ranks = [place.rank for place in task.places if place.node == node]
        job, replica = task.task.part_of or task.job, task.task.replica
        return replace(task, creds={str(rank): self.mint(RankId(job, replica, rank)) for rank in ranks})

    async def _send(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(nats.errors.Error):  # not connected: the receiver asks again
            await self.client.publish(subject, data)

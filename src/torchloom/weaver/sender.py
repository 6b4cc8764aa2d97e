"""What the weaver sends: answers, and what a decision contains: commands, tasks, evictions, answers and verdicts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import nats.errors
from msgspec.structs import replace
from nats.aio.client import Client

from torchloom.bus.streams import write_verdict
from torchloom.bus.tasks import TaskSet
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.events import VerdictKnown
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Launch, NodeCommand
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import RankLost
from torchloom.protocol.subjects import COMMAND, EVICT, TASK
from torchloom.protocol.views import Answer
from torchloom.views.answers import rendered
from torchloom.views.format.tables import clean, cut
from torchloom.views.records import sentences
from torchloom.views.wording.phrases import render
from torchloom.weaver.connection_monitor import ProcessExitProbe
from torchloom.weaver.event_queue import EventQueue
from torchloom.weaver.health import Health, log

LOG_LINE = 500
"""Most characters of a record in the log file; `loom events` shows all of them."""


@dataclass(eq=False)
class Sender:
    client: Client
    queue: EventQueue
    health: Health
    cluster: ClusterState
    mint: Callable[[RankId], str] | None = None
    """Makes the credentials of one rank, if this control plane has the keys."""

    def __post_init__(self) -> None:
        self._exits = ProcessExitProbe(self.cluster, self._send)
        self._verdicts = TaskSet()

    async def answer(self, reply: str, answer: Answer) -> None:
        """Publish an answer, if someone waits for it on this subject."""
        if isinstance(answer, No):
            answer = rendered(answer)
        elif isinstance(answer, Done):
            answer = replace(answer, text=render(answer.text))
        if reply:
            await self._send(reply, fitting(answer, self.client.max_payload))

    async def send(self, decision: Decision, reply: str) -> None:
        """Send everything that a stored decision contains, and its answer to the subject `reply`."""
        for record in decision.stored:
            if isinstance(record, RankLost):
                self._exits.watch(record.rank)
        for rank, command in decision.commands:
            await self._send(COMMAND.for_rank(rank), encode(command))
        for node, task in decision.tasks:
            await self._send(TASK.to(node=node), encode(self._with_credentials(node, task)))
        for job, evict in decision.evictions:
            await self._send(EVICT.to(job=job), encode(evict))
        for subject, answer in decision.replies:
            await self.answer(subject, answer)
        if reply and decision.answer is not None:
            await self.answer(reply, decision.answer)
        elif isinstance(decision.answer, No):
            self.health.refuse(decision.answer.why)
        for verdict in decision.verdicts:
            self._verdicts.start(self._write_verdict(verdict))
        asyncio.get_running_loop().call_soon(_log, decision)  # after nats-py has sent what it was given

    async def _write_verdict(self, verdict: WantedVerdict) -> None:
        try:
            commit = await write_verdict(self.client, verdict.job, verdict.key, verdict.commit)
        except (nats.errors.Error, OSError) as error:
            log.warning("%s: the verdict could not be written: %s", verdict.change, error or type(error).__name__)
            return  # the engine requests it again
        await self.queue.put((VerdictKnown(verdict.change, commit, verdict.abort), 0))

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


def _log(decision: Decision) -> None:
    for record in decision.stored:
        for sentence in sentences(record):
            log.info("%s", cut(clean(sentence), LOG_LINE))  # evidence may be long, and comes from outside


def fitting(answer: Answer, most: int) -> bytes:
    """An answer as one message; the results of ranks are shortened if they are too long."""
    data = encode(answer)
    if len(data) > most and isinstance(answer, Done) and answer.results:
        share = max(200, most // (4 * len(answer.results)))
        results = tuple((rank, f"{text[:share]}\n(shortened)") for rank, text in answer.results)
        data = encode(replace(answer, results=results))
    if len(data) > most:
        data = encode(rendered(No(why=phrase("answer_too_long", bytes=len(data)), hint=phrase("ask_for_less"))))
    return data

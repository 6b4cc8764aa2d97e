"""Checks of a node on request: by the weaver, which reads the result in beats, or by a client that waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.agent.monitor.gpus import GpuState
from torchloom.agent.node import Node
from torchloom.agent.node_check import trials
from torchloom.agent.node_check.checks import Subject, examine, reasons
from torchloom.bus.tasks import TaskSet
from torchloom.protocol.codec import decode_answer, decode_node_look, encode
from torchloom.protocol.node import Fitness
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.subjects import CHECK, CLOCK
from torchloom.protocol.views import Answer, BandwidthView, ClockView, NodeChecksView, QueryBandwidth
from torchloom.views.answers import rendered
from torchloom.views.wording.phrases import render

CLOCK_SECONDS = 2.0
PAUSE_SECONDS = 15.0
"""Between two looks for the weaver: jobs that save elsewhere, and are not fit here, would take turns without end."""


@dataclass(eq=False)
class NodeCheckService:
    client: Client
    node: Node
    state: Path
    look_at_gpus: Callable[[], Sequence[GpuState]]
    news: Callable[[], None]
    fitness: Fitness | None = None
    """For beats; absent until the weaver has asked."""
    _ended: float = float("-inf")
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Two at a time would make each other slow."""
    _tasks: TaskSet = field(default_factory=TaskSet)

    async def listen(self) -> None:
        """Answer people."""
        await self.client.subscribe(CHECK.to(node=self.node.name), cb=self._on_look)

    def begin(self, folder: str) -> None:
        """Check the node for the weaver. A request during a check, or right after one, has no effect."""
        fitness = self.fitness or Fitness(number=0)
        if fitness.running or time.monotonic() - self._ended < PAUSE_SECONDS:
            return
        self.fitness = msgspec.structs.replace(fitness, running=True)
        self.news()
        self._tasks.start(self._answer_weaver(fitness.number + 1, folder))

    async def _answer_weaver(self, number: int, folder: str) -> None:
        try:
            view = await self.look(folder)
            self.fitness = Fitness(number=number, unfit=reasons(view), pace=view.pace, on=view.on, folder=folder)
        except Exception as error:  # noqa: BLE001  the weaver must learn that the check is over
            why = phrase("node_unchecked", why=str(error))
            self.fitness = Fitness(number=number, unfit=(why,), folder=folder)
        self._ended = time.monotonic()
        self.news()

    async def look(self, folder: str) -> NodeChecksView:
        async with self._one:
            checkpoints = Path(folder) if folder else None
            subject = Subject(self.node.devices, self.state, checkpoints, await self.skew())
            return await asyncio.to_thread(examine, subject, self.look_at_gpus)

    async def skew(self) -> float | Phrase:
        """How far this clock is ahead of the weaver's: its answer was given half way between asking and hearing."""
        asked, began = time.time(), time.monotonic()
        try:
            reply = await self.client.request(CLOCK.to(), b"", timeout=CLOCK_SECONDS)
            answer = decode_answer(reply.data)
        except (nats.errors.Error, OSError, msgspec.MsgspecError) as error:
            return phrase("clock_not_compared", error=type(error).__name__)
        if not isinstance(answer, ClockView):
            return phrase("clock_not_compared", error="")
        return asked + (time.monotonic() - began) / 2 - answer.now

    async def _on_look(self, message: Msg) -> None:
        self._tasks.start(self._answer(message))  # it takes its time, and others ask too

    async def _answer(self, message: Msg) -> None:
        answer: Answer
        try:
            query = decode_node_look(message.data)
            answer = await (self._exchange(query) if isinstance(query, QueryBandwidth) else self.look(query.folder))
        except msgspec.MsgspecError as error:
            answer = rendered(No(why=phrase("not_understood", why=str(error))))
        except Exception as error:  # noqa: BLE001  the client waits for an answer
            answer = rendered(No(why=phrase("node_unchecked", why=str(error))))
        with contextlib.suppress(nats.errors.Error, OSError):
            await self.client.publish(message.reply, encode(answer))

    async def _exchange(self, look: QueryBandwidth) -> BandwidthView:
        words = ("exchange", look.host, str(look.port), str(look.rank))
        env = {"GLOO_SOCKET_IFNAME": self.node.interface} if self.node.interface else {}
        result = await asyncio.to_thread(trials.run, words, trials.EXCHANGE_SECONDS, env)
        if not result.get("right"):
            wrong = phrase("exchanged_wrong" if result.get("torch", True) else "no_torch")
            return BandwidthView(trouble=render(result.get("trouble") or wrong)[:2000])
        return BandwidthView(mb_per_second=float(result["mb_per_second"]))

    async def close(self) -> None:
        await self._tasks.end()

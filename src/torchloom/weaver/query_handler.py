"""Answers queries from the cluster state at once, without the queue. Every answer fits one message."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import nats.errors
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import decode_look, encode
from torchloom.protocol.operator import Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.views import (
    Answer,
    ClockView,
    Look,
    PlaneView,
    QueryCheckpoints,
    QueryCluster,
    QueryCurves,
    QueryKnobs,
    QueryRuns,
)
from torchloom.views.answers import rendered
from torchloom.views.queries import checkpoints, curves, knobs, picture, runs
from torchloom.views.wording.phrases import render
from torchloom.weaver.health import Clock, Health


@dataclass(eq=False)
class QueryHandler:
    client: Client
    cluster: ClusterState
    health: Health
    plane: Callable[[], PlaneView]
    clock: Clock

    async def on_look(self, message: Msg) -> None:
        try:
            look = decode_look(message.data)
        except msgspec.MsgspecError as error:
            await self.not_understood(message, "look", error)
        else:
            await self.answer(message.reply, self._view(look))

    async def on_clock(self, message: Msg) -> None:
        """The time of day on this machine. The clock of decisions does not jump with it."""
        await self.answer(message.reply, ClockView(now=time.time()))

    async def not_understood(self, message: Msg, what: str, error: msgspec.MsgspecError) -> None:
        self.health.refuse(phrase("not_accepted", what=what, why=str(error)))
        await self.answer(message.reply, No(why=phrase("not_understood", why=str(error)), hint=phrase("loom_newer")))

    async def answer(self, reply: str, answer: Answer) -> None:
        """Publish an answer, if someone waits for it on this subject."""
        if isinstance(answer, No):
            answer = rendered(answer)
        elif isinstance(answer, Done):
            answer = replace(answer, text=render(answer.text))
        if reply:
            with contextlib.suppress(nats.errors.Error):  # not connected: the client asks again
                await self.client.publish(reply, fitting(answer, self.client.max_payload))

    def _view(self, look: Look) -> Answer:
        match look:
            case QueryCluster():
                return picture(self.cluster, self.plane(), look)
            case QueryCurves():
                return curves(self.cluster, look)
            case QueryKnobs():
                return knobs(self.cluster, look)
            case QueryCheckpoints():
                return checkpoints(self.cluster, look)
            case QueryRuns():
                return runs(self.cluster, look, self.clock())


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

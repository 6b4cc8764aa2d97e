"""A client of the weaver: queries (`look`) and requests (`ask`). The command line and the Python client use it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import nats.errors
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from torchloom.bus.connection import connect, find
from torchloom.errors import Refused, TorchLoomError, Unreachable
from torchloom.protocol.codec import decode_answer, encode
from torchloom.protocol.operator import Ask, Done, No
from torchloom.protocol.subjects import ASK, LOOK, Role
from torchloom.protocol.views import (
    CheckpointsView,
    ClusterView,
    CurvesView,
    KnobsView,
    Look,
    NodeView,
    PlaneView,
    QueryCheckpoints,
    QueryCluster,
    QueryCurves,
    QueryKnobs,
    QueryRuns,
    RunsView,
)
from torchloom.settings import Settings

PAGE = 1000
"""Most ranks in one answer of the weaver."""
READ_PAGE = 300
"""The same with the readings of their devices."""
AGAIN_SECONDS = 2.0
"""Seconds before a request that was not answered is sent again."""
ABSENT_SECONDS = 0.2
"""The same while no weaver is connected."""
NO_JOB = "-"
"""No job has this name."""
View = TypeVar("View")


class WeaverClient:
    """A connection with a role: `async with WeaverClient(settings, Role.VIEWER) as weaver: await weaver.cluster()`."""

    client: Client

    def __init__(
        self,
        settings: Settings,
        role: Role,
        *,
        timeout: float = 5.0,
        connect_timeout: float = 2.0,
        patience: float = 0.0,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """With `patience`, queries are also repeated for this many seconds, and a lost connection is reopened."""
        self._settings = settings
        self._role = role
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._patience = patience
        self._on_wait = on_wait

    async def __aenter__(self) -> Self:
        address = find(self._settings, self._role)
        name = f"loom {self._role}"
        patient = self._patience > 0
        self.client = await connect(address, name=name, timeout=self._connect_timeout, keep_trying=patient)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):  # the server may be gone already
            await self.client.close()

    async def cluster(self, job: str | None = None, most: int | None = None, readings: bool = False) -> ClusterView:
        """The state of the cluster with all its ranks, up to `most`, gathered page by page."""
        view = await self._page(job, 0, most, readings)
        ranks, assignments, devices = list(view.ranks), list(view.assignments), list(view.devices)
        total = view.total_ranks if most is None else min(most, view.total_ranks)
        while len(ranks) < total:
            page = await self._page(job, len(ranks), total - len(ranks), readings)
            if not page.ranks:
                break  # some left while we were reading
            ranks += page.ranks
            assignments += page.assignments
            devices += page.devices
        return msgspec.structs.replace(
            view,
            ranks=tuple(ranks),
            assignments=tuple(dict.fromkeys(assignments)),
            devices=tuple({device.device: device for device in devices}.values()),
        )

    async def curves(self, job: str, replica: str | None = None, most: int | None = None) -> CurvesView:
        """The history of each rank of a job, gathered page by page."""
        view = CurvesView(total=1)
        while len(view.curves) < (view.total if most is None else min(most, view.total)):
            limit = 100 if most is None else min(100, most - len(view.curves))
            query = QueryCurves(job=job, replica=replica, offset=len(view.curves), limit=limit)
            page = await self._query(query, CurvesView)
            view = CurvesView(curves=view.curves + page.curves, total=page.total)
            if not page.curves:
                break
        return view if view.curves else CurvesView()

    async def knobs(self, job: str) -> KnobsView:
        """The knobs of a job, and the changes made."""
        return await self._query(QueryKnobs(job=job), KnobsView)

    async def checkpoints(self, job: str) -> CheckpointsView:
        """The checkpoints that a job has reported."""
        return await self._query(QueryCheckpoints(job=job), CheckpointsView)

    async def runs(self, job: str | None = None) -> RunsView:
        """Jobs that torchLoom starts itself, and the nodes it can start them on."""
        return await self._query(QueryRuns(job=job), RunsView)

    async def nodes(self) -> tuple[NodeView, ...]:
        """The nodes, without any jobs."""
        return (await self.runs(NO_JOB)).nodes

    async def look(self, look: Look) -> object:
        return await self._query(look, object)

    async def ask(self, ask: Ask) -> Done:
        """Send a request once. Raises Refused if the weaver rejects it."""
        return await self.ask_until(ask, 0.0)

    async def ask_until(self, ask: Ask, timeout: float) -> Done:
        """The same, repeated until it is answered or the time is over. The weaver carries it out once."""
        return await self._request(ASK.to(), ask, timeout, Done)

    async def _query(self, query: Look, kind: type[View]) -> View:
        return await self._request(LOOK.to(), query, self._patience, kind)

    async def _page(self, job: str | None, offset: int, most: int | None, readings: bool) -> ClusterView:
        largest = READ_PAGE if readings else PAGE
        limit = largest if most is None else min(largest, most)
        query = QueryCluster(job=job, offset=offset, limit=limit, readings=readings)
        return await self._query(query, ClusterView)

    async def _request(self, subject: str, message: Ask | Look, until: float, kind: type[View]) -> View:
        data = encode(message)
        try:
            reply = await (self._send_until(subject, data, until) if until else self._send(subject, data))
        except (nats.errors.Error, OSError) as error:
            raise Unreachable(f"the connection was lost while asking: {error}", hint="try again") from error
        return read_answer("the weaver", reply, kind)

    async def _send(self, subject: str, data: bytes) -> Msg:
        try:
            return await self.client.request(subject, data, timeout=self._timeout)
        except nats.errors.NoRespondersError:
            raise _absent() from None
        except nats.errors.TimeoutError:
            raise _silent(self._timeout) from None

    async def _send_until(self, subject: str, data: bytes, seconds: float) -> Msg:
        """Send it repeatedly with the same reply subject, so that a late answer to the first one counts."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        inbox = self.client.new_inbox()
        answers = await self.client.subscribe(inbox)
        silent = waiting = False  # silent: a weaver is connected and has not answered
        try:
            while (left := deadline - loop.time()) > 0:
                connected = self.client.is_connected
                if connected:  # otherwise nats-py would buffer all repetitions and send them later
                    await self.client.publish(subject, data, reply=inbox)
                answer = await _next(answers, min(left, AGAIN_SECONDS if connected else ABSENT_SECONDS))
                if answer is not None and not _nobody(answer):
                    return answer
                silent = silent or (connected and answer is None)
                if not waiting and self._on_wait is not None:
                    self._on_wait()
                waiting = True
                if answer is not None:
                    await asyncio.sleep(min(left, ABSENT_SECONDS))
        finally:
            if not self.client.is_closed:
                await answers.unsubscribe()
        raise _silent(seconds) if silent or not self.client.is_connected else _absent()


async def ask_for_plane(client: Client, timeout: float) -> PlaneView | None:
    """The state of the control plane; None if no weaver answers."""
    try:
        reply = await client.request(LOOK.to(), encode(QueryCluster(limit=0)), timeout=timeout)
        return read_answer("the weaver", reply, ClusterView).plane
    except (nats.errors.Error, TorchLoomError):
        return None


async def _next(answers: Subscription, seconds: float) -> Msg | None:
    try:
        return await answers.next_msg(timeout=seconds)
    except nats.errors.TimeoutError:
        return None


def _nobody(answer: Msg) -> bool:
    """Whether this is the server's own answer for a subject without subscribers."""
    return bool(answer.headers) and answer.headers.get(Header.STATUS) == NO_RESPONDERS_STATUS


def _absent() -> Unreachable:
    return Unreachable(
        "NATS is up, but the weaver does not answer", hint="start it with `loom up`, or `loom weaver` alone"
    )


def _silent(seconds: float) -> Unreachable:
    return Unreachable(
        f"the weaver does not answer within {seconds:g} s",
        hint="look at logs/weaver.log in the state folder; `loom doctor` checks the rest",
    )


def read_answer(sender: str, reply: Msg, kind: type[View]) -> View:
    """The answer in a message. Raises Refused if the sender rejected the request."""
    try:
        answer: object = decode_answer(reply.data)
    except msgspec.MsgspecError as error:
        raise TorchLoomError(
            f"the answer of {sender} cannot be understood: {error}", hint="is it of another version of torchLoom?"
        ) from error
    if isinstance(answer, No):
        raise Refused(str(answer.why), hint=str(answer.hint), code=answer.code)
    if not isinstance(answer, kind):
        raise TorchLoomError(f"{sender} answered with {type(answer).__name__}, which was not asked for")
    return answer

"""A client of the weaver: queries (`look`) and requests (`ask`). The command line and the Python client use it.

`ask_node` asks the agent on a node, without the weaver: output of its ranks, node checks, network speed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Self, TypeVar

import msgspec
import nats.errors
from msgspec.structs import replace
from nats.aio.client import NO_RESPONDERS_STATUS, Client
from nats.aio.msg import Msg
from nats.js.api import Header

from torchloom.bus.connection import connect, find
from torchloom.errors import BadInput, Refused, TorchLoomError, Unreachable
from torchloom.protocol import views
from torchloom.protocol.codec import decode_answer, encode
from torchloom.protocol.ids import check_name
from torchloom.protocol.operator import Ask, Done, No
from torchloom.protocol.subjects import ASK, CHECK, LINES, LOOK, Role
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


@dataclass(eq=False)
class WeaverClient:
    """A connection with a role: `async with WeaverClient(settings, Role.VIEWER) as weaver: await weaver.cluster()`."""

    settings: Settings
    role: Role
    _: KW_ONLY
    timeout: float = 5.0
    connect_timeout: float = 2.0
    patience: float = 0.0
    """Seconds for which queries are repeated too; with patience, a lost connection is reopened."""
    on_wait: Callable[[], None] | None = None
    client: Client = field(init=False)

    async def __aenter__(self) -> Self:
        address, patient = find(self.settings, self.role), self.patience > 0
        self.client = await connect(
            address, name=f"loom {self.role}", timeout=self.connect_timeout, keep_trying=patient
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):  # the server may be gone already
            await self.client.close()

    async def cluster(
        self, job: str | None = None, most: int | None = None, readings: bool = False
    ) -> views.ClusterView:
        """The state of the cluster with all its ranks, up to `most`, gathered page by page."""
        largest = READ_PAGE if readings else PAGE
        query = views.QueryCluster(job=job, limit=largest if most is None else min(largest, most), readings=readings)
        view = page = await self.look(query, views.ClusterView)
        ranks, assignments, devices = list(view.ranks), list(view.assignments), list(view.devices)
        total = view.total_ranks if most is None else min(most, view.total_ranks)
        while len(ranks) < total and page.ranks:  # some may leave while we are reading
            query = replace(query, offset=len(ranks), limit=min(largest, total - len(ranks)))
            page = await self.look(query, views.ClusterView)
            ranks += page.ranks
            assignments += page.assignments
            devices += page.devices
        return replace(
            view,
            ranks=tuple(ranks),
            assignments=tuple(dict.fromkeys(assignments)),
            devices=tuple({device.device: device for device in devices}.values()),
        )

    async def curves(self, job: str, replica: str | None = None, most: int | None = None) -> views.CurvesView:
        """The history of each rank of a job, gathered page by page."""
        view = views.CurvesView(total=1)
        while len(view.curves) < (view.total if most is None else min(most, view.total)):
            limit = 100 if most is None else min(100, most - len(view.curves))
            query = views.QueryCurves(job=job, replica=replica, offset=len(view.curves), limit=limit)
            page = await self.look(query, views.CurvesView)
            view = views.CurvesView(curves=view.curves + page.curves, total=page.total)
            if not page.curves:
                break
        return view if view.curves else views.CurvesView()

    async def knobs(self, job: str) -> views.KnobsView:
        """The knobs of a job, and the changes made."""
        return await self.look(views.QueryKnobs(job=job), views.KnobsView)

    async def checkpoints(self, job: str) -> views.CheckpointsView:
        """The checkpoints that a job has reported."""
        return await self.look(views.QueryCheckpoints(job=job), views.CheckpointsView)

    async def runs(self, job: str | None = None) -> views.RunsView:
        """Jobs that torchLoom starts itself, and the nodes it can start them on."""
        return await self.look(views.QueryRuns(job=job), views.RunsView)

    async def nodes(self) -> tuple[views.NodeView, ...]:
        """The nodes, without any jobs."""
        return (await self.runs(NO_JOB)).nodes

    async def ask(self, ask: Ask, patience: float = 0.0) -> Done:
        """Send a request once, or until it is answered or the time is over; the weaver carries it out once.

        Raises Refused if the weaver rejects it.
        """
        return await self._request(ASK.to(), ask, patience, Done)

    async def look(self, query: views.Look, kind: type[View]) -> View:
        return await self._request(LOOK.to(), query, self.patience, kind)

    async def _request(self, subject: str, message: Ask | views.Look, until: float, kind: type[View]) -> View:
        if (job := getattr(message, "job", None)) is not None:
            check_name("job", job)
        data = encode(message)
        if len(data) > self.client.max_payload:
            raise BadInput(
                f"this request has {len(data):,} bytes; the server takes {self.client.max_payload:,}",
                hint="ask for less at once, or raise max_payload in the configuration of the server",
            )
        try:
            reply = await (self._send_until(subject, data, until) if until else self._send(subject, data))
        except (nats.errors.Error, OSError) as error:
            raise Unreachable(f"the connection was lost while asking: {error}", hint="try again") from error
        return read_answer("the weaver", reply, kind)

    async def _send(self, subject: str, data: bytes) -> Msg:
        try:
            return await self.client.request(subject, data, timeout=self.timeout)
        except nats.errors.NoRespondersError:
            raise _absent() from None
        except nats.errors.TimeoutError:
            raise _silent(self.timeout) from None

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
                answer: Msg | None = None
                with contextlib.suppress(nats.errors.TimeoutError):
                    answer = await answers.next_msg(timeout=min(left, AGAIN_SECONDS if connected else ABSENT_SECONDS))
                if answer is not None and not _nobody(answer):
                    return answer
                silent = silent or (connected and answer is None)
                if not waiting and self.on_wait is not None:
                    self.on_wait()
                waiting = True
                if answer is not None:
                    await asyncio.sleep(min(left, ABSENT_SECONDS))
        finally:
            if not self.client.is_closed:
                await answers.unsubscribe()
        raise _silent(seconds) if silent or not self.client.is_connected else _absent()


async def ask_node(
    client: Client, node: str, look: views.QueryLines | views.NodeLook, kind: type[View], timeout: float = 5.0
) -> View:
    """The agent's answer. Raises Refused if the agent has none, Unreachable if there is no agent on that node."""
    subject = LINES if isinstance(look, views.QueryLines) else CHECK
    try:
        reply = await client.request(subject.to(node=node), encode(look), timeout=timeout)
    except (nats.errors.Error, OSError) as error:
        raise Unreachable(f"the agent on {node} does not answer", hint="`loom nodes` shows which do") from error
    return read_answer(node, reply, kind)


async def ask_for_plane(client: Client, timeout: float) -> views.PlaneView | None:
    """The state of the control plane; None if no weaver answers."""
    try:
        reply = await client.request(LOOK.to(), encode(views.QueryCluster(limit=0)), timeout=timeout)
        return read_answer("the weaver", reply, views.ClusterView).plane
    except (nats.errors.Error, TorchLoomError):
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

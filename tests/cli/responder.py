"""A stand-in for the weaver's two answers, on a real server: it shows what a test made, and notes what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from torchloom.bus.connection import connect, find
from torchloom.protocol.codec import decode_ask, decode_look, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask, Done, No
from torchloom.protocol.records import Entry, Record
from torchloom.protocol.scheduling import (
    PredictionView,
    QueryPrediction,
    QuerySchedule,
    ScheduledJob,
    ScheduleRules,
    ScheduleView,
)
from torchloom.protocol.subjects import ASK, LOG, LOG_STREAM, LOOK, Role
from torchloom.protocol.views import (
    CheckpointsView,
    ClusterView,
    CurvesView,
    KnobsView,
    Look,
    Point,
    QueryCheckpoints,
    QueryCluster,
    QueryCurves,
    QueryKnobs,
    QueryRuns,
    RunsView,
)
from torchloom.settings import Settings


class Responder:
    """Runs on a thread of its own, as the CLI under test has its own event loop."""

    def __init__(self, settings: Settings, view: ClusterView) -> None:
        self.settings = settings
        self.view = view
        self.curves: tuple[tuple[RankId, tuple[Point, ...]], ...] = ()
        self.knobs = KnobsView()
        self.runs = RunsView()
        self.checkpoints: dict[str, CheckpointsView] = {}
        self.schedule = ScheduleView(rules=ScheduleRules(policy="ours"), now=1_800_000_000.0)
        self.prediction = PredictionView(job=ScheduledJob(job="mnist", standing="no_loaders", ranks={"n1": 2}))
        self.answer: Done | No = Done(text="done")
        self.answer_to: Callable[[Ask], Done | No] = lambda ask: self.answer
        self.deaf = 0
        """So many asks to come are heard, but not answered: as if the weaver were killed over them."""
        self.asked: list[Ask] = []
        self.looked: list[Look] = []
        self.before_look: Callable[[Look], None] = lambda look: None
        """Called before a look is answered."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._client: Client
        self._ears: list[Subscription] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.do(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def do(self, work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)  # type: ignore[arg-type]

    def append(self, *records: Record, at: float = 1_800_000_000.0) -> None:
        """Write one entry into the log stream."""
        self.do(self._append(msgspec.json.encode(Entry(term=1, at=at, records=records))))

    def append_soon(self, *records: Record, at: float = 1_800_000_000.0) -> None:
        """The same from `before_look`, which runs on the thread that appends."""
        data = msgspec.json.encode(Entry(term=1, at=at, records=records))
        self._appending = self._loop.create_task(self._append(data))

    async def _append(self, data: bytes) -> None:
        await self._client.jetstream().publish(LOG.to(), data, timeout=30)

    async def _start(self) -> None:
        self._client = await connect(find(self.settings, Role.WEAVER), name="stand-in", keep_trying=True)
        await self._client.jetstream().add_stream(name=LOG_STREAM.name, subjects=[LOG.to()], allow_direct=True)
        await self._listen()
        await self._client.request(LOOK.to(), encode(QueryCluster(limit=0)), timeout=30)  # answered: it is up
        self.looked.clear()

    def leave(self) -> None:
        """Nobody answers any more, as when the weaver is killed."""
        self.do(self._leave())

    def come_back(self) -> None:
        self.do(self._listen())

    async def _listen(self) -> None:
        self._ears = [
            await self._client.subscribe(LOOK.to(), cb=self._look),
            await self._client.subscribe(ASK.to(), cb=self._ask),
        ]
        await self._client.flush()

    async def _leave(self) -> None:
        for ear in self._ears:
            await ear.unsubscribe()
        await self._client.flush()

    async def _look(self, message: Msg) -> None:
        look = decode_look(message.data)
        self.looked.append(look)
        self.before_look(look)
        if isinstance(look, QueryKnobs):
            known = any(job.job == look.job for job in self.view.jobs)
            await message.respond(encode(self.knobs if known else KnobsView()))
            return
        if isinstance(look, QueryCheckpoints):
            await message.respond(encode(self.checkpoints.get(look.job, CheckpointsView(job=look.job))))
            return
        if isinstance(look, QuerySchedule):
            await message.respond(encode(self.schedule))
            return
        if isinstance(look, QueryRuns):
            runs = tuple(run for run in self.runs.runs if look.job in {None, run.job, run.task.part_of})
            await message.respond(encode(RunsView(runs=runs, nodes=self.runs.nodes)))
            return
        if isinstance(look, QueryPrediction):
            await message.respond(encode(self.prediction))
            return
        end = look.offset + look.limit
        if isinstance(look, QueryCurves):
            await message.respond(encode(CurvesView(curves=self.curves[look.offset : end], total=len(self.curves))))
        else:
            jobs = tuple(job for job in self.view.jobs if look.job in {None, job.job})
            ranks = tuple(rank for rank in self.view.ranks if look.job in {None, rank.rank.job})
            told = tuple(i for i in self.view.incidents if look.job in {None, i.job} or not i.job)
            told = tuple(i for i in told if look.incident in {None, i.id})
            page = msgspec.structs.replace(self.view, jobs=jobs, ranks=ranks[look.offset : end], incidents=told)
            await message.respond(encode(page))

    async def _ask(self, message: Msg) -> None:
        ask = decode_ask(message.data)
        self.asked.append(ask)
        if self.deaf:
            self.deaf -= 1
            return
        await message.respond(encode(self.answer_to(ask)))

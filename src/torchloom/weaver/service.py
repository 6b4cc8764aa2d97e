"""The weaver's input and output: one loop that reads, passes events to the engine, stores and publishes.

Everything that needs a decision goes through one queue. The engine handles the events that wait there, and their
records are appended to the log together; only then are commands sent and requests answered. Ordinary beats need no
decision: the engine only takes them in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom import __version__
from torchloom.bus.message_batches import Batch, MessageBatches
from torchloom.bus.tasks import end_all
from torchloom.core.decision import Decision
from torchloom.core.engine import Engine
from torchloom.core.events import Event, LinkEvent, RequestReceived, TookOver
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol import codec, views
from torchloom.protocol.ids import RankId, is_incarnation
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.operator import Ask, No
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import Reply
from torchloom.protocol.records import Record
from torchloom.protocol.scheduling import QueryPrediction, QuerySchedule
from torchloom.protocol.subjects import ASK, BEAT, CLOCK, FACT, LOOK, NODE, QUORUM, REPLY, REPORT, Subject, parse_rank
from torchloom.views.cluster_summary import curves, knobs, picture, runs
from torchloom.views.schedule_view import predict, schedule
from torchloom.views.wording.phrases import render
from torchloom.weaver.alert_webhook import Ingress
from torchloom.weaver.connection_monitor import ConnectionAdvisories
from torchloom.weaver.event_queue import EventQueue, Inbox
from torchloom.weaver.health import Health, first_trouble, log, quietly
from torchloom.weaver.sender import Sender
from torchloom.weaver.storage import CurveStore, Store
from torchloom.weaver.ticker import Ticker

HOLD_SECONDS = 0.003
"""Longest time for which decisions keep beats waiting."""
NO_INCARNATION = phrase("no_incarnation")
STUCK_SECONDS = 15.0
"""A weaver that has decided nothing for this long is restarted."""
T = TypeVar("T")


@dataclass(eq=False)
class Weaver:
    client: Client
    store: Store
    cluster: ClusterState
    advisories: ConnectionAdvisories | None
    name: str
    health: Health
    ingress: Ingress | None = None
    """Where alerts are received, if they are."""

    def __post_init__(self) -> None:
        client, cluster, health = self.client, self.cluster, self.health
        self.engine = Engine(cluster)
        self.clock = health.clock
        self.began = self.clock()
        self.queue = EventQueue(health)
        self.curves = CurveStore(client, cluster, self.clock)
        self.inbox = Inbox(client, health, self.queue)
        self.sender = Sender(client, self.queue, health, cluster)
        self.ticker = Ticker(self.engine, self.queue, client, self.advisories, self.clock)
        self._subjects: dict[str, RankId | None] = {}
        self._beats = MessageBatches(client, self._hear_beats)
        self._held_since = self.began
        """When this loop last let others have their turn."""
        self._snapshot_at = self.began
        self._decided_at = self.began
        """When something was last decided: every tick, four a second, brings a decision."""
        self._requests: set[str] = set()
        """Requests that wait for a decision."""
        self._ahead = False
        """The cluster state contains decisions that the log does not contain yet."""

    # ── the loop ──

    async def take_over(self) -> None:
        """Become the weaver: from here on the log refuses the previous one."""
        await self.queue.put((TookOver(self.name), 0))
        await self._decide_batch()
        self.engine.restart(self.clock())
        log.info("term %d begins at log entry %d", self.cluster.term, self.store.seq)

    async def run(self) -> None:
        """Serve until cancelled, or until a newer weaver takes over (Fenced)."""
        await self._listen()
        works = (
            self.inbox.read_on(self.cluster.inbox_seq), self._loop(), self.ticker.tick(), self.ticker.look(),
            self.curves.keep(), self._keep_snapshots(),
        )  # fmt: skip
        tasks = [asyncio.create_task(work) for work in works]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # none ends but by an error
        finally:
            await end_all(tasks)

    async def _loop(self) -> None:
        while True:
            await self._decide_batch()
            self._decided_at = self.clock()

    async def _decide_batch(self) -> None:
        batch = await self.queue.take_batch()
        self._held_since = now = self.clock()
        decisions: list[tuple[Event, Decision]] = []
        records: list[Record] = []
        self._ahead = True
        for event, _ in batch:
            decision = self.engine.handle(event, now)
            records += decision.stored
            if decision:
                decisions.append((event, decision))
            await self._give_way()
        records += self.engine.has_read(max(inbox_seq for _, inbox_seq in batch), now)
        if records:
            await self.store.append(self.cluster.term, now, records)
        self._ahead = False
        for event, _ in batch:
            if isinstance(event, RequestReceived):
                self._requests.discard(getattr(event.ask, "request", ""))
        for event, decision in decisions:
            await self.sender.send(decision, event.reply if isinstance(event, RequestReceived) else "")
            await self._give_way()

    async def _give_way(self) -> None:
        """Let everything else have its turn, if this loop has run for a while."""
        if self.clock() - self._held_since > HOLD_SECONDS:
            await asyncio.sleep(0)
            self._held_since = self.clock()

    # ── what arrives ──

    async def _listen(self) -> None:
        await self.client.subscribe(BEAT.pattern(), cb=self._beats.on_message)
        await self._subscribe(REPLY, "reply", codec.decode_reply, self._on_reply)
        await self._subscribe(NODE, "node", codec.decode_node_beat, self._on_node)
        await self._subscribe(QUORUM, "lighthouse", codec.decode_lighthouse_beat, self._on_lighthouse)
        await self._subscribe(ASK, "ask", codec.decode_ask, self._on_ask)
        await self._subscribe(LOOK, "look", codec.decode_look, self._on_look)
        await self.client.subscribe(CLOCK.pattern(), cb=self._on_clock)
        for subject in (REPORT, FACT):
            await self.client.subscribe(subject.pattern(), cb=self.inbox.on_message)
        await self.client.flush()
        if self.advisories is not None:
            await self.advisories.listen(self.on_link)

    async def _subscribe(
        self, subject: Subject, what: str, decode: Callable[[bytes], T], handle: Callable[[T, Msg], Awaitable[None]]
    ) -> None:
        """Handle each message of a subject. An invalid one is counted as refused, and answered if its sender waits."""

        async def on_message(message: Msg) -> None:
            try:
                content = decode(message.data)
            except msgspec.MsgspecError as error:
                self.health.refuse(phrase("not_accepted", what=what, why=str(error)))
                no = No(why=phrase("not_understood", why=str(error)), hint=phrase("loom_newer"))
                await self.sender.answer(message.reply, no)
            else:
                await handle(content, message)

        await self.client.subscribe(subject.pattern(), cb=on_message)

    def _hear_beats(self, beats: Batch) -> None:
        """Of all that came in one go: there are ten thousand a second, and each must cost little."""
        now, decode, hear, subjects = self.clock(), codec.decode_beat, self.engine.hear, self._subjects
        for subject, data in beats:
            try:
                beat = decode(data)
                rank = subjects[subject]
            except KeyError:
                rank = self._rank_of(subject)
            except msgspec.MsgspecError as error:
                self.health.refuse(phrase("not_accepted", what="beat", why=str(error)))
                continue
            if rank is None:
                self.health.refuse(phrase("subject_of_no_rank", what="beat"))
            elif (event := hear(rank, beat, now)) is not None:
                if is_incarnation(beat.incarnation):
                    self.queue.offer(event)
                else:
                    self.health.refuse(phrase("not_accepted", what="beat", why=NO_INCARNATION))

    def _rank_of(self, subject: str) -> RankId | None:
        """The rank that a subject names; remembered, since every beat asks."""
        if len(self._subjects) > 200_000:
            self._subjects.clear()
        self._subjects[subject] = rank = parse_rank(subject)
        return rank

    async def _on_reply(self, reply: Reply, message: Msg) -> None:
        rank = parse_rank(message.subject)
        if rank is None:
            self.health.refuse(phrase("subject_of_no_rank", what="reply"))
        elif (event := self.engine.hear_reply(rank, reply)) is not None:
            self.queue.offer(event)

    async def _on_node(self, beat: NodeBeat, message: Msg) -> None:
        for event in self.engine.hear_node(message.subject.rpartition(".")[2], beat, self.clock()):
            self.queue.offer(event)

    async def _on_lighthouse(self, beat: LighthouseBeat, message: Msg) -> None:
        event = self.engine.hear_lighthouse(message.subject.rpartition(".")[2], beat, self.clock())
        if event is not None:
            self.queue.offer(event)

    async def _on_ask(self, ask: Ask, message: Msg) -> None:
        request = getattr(ask, "request", "")
        if request in self._requests:
            return  # it waits for a decision; an answer now could be untrue
        if self.store.refusing:
            why = phrase("log_refuses", trouble=first_trouble(self.health.troubles))
            await self.sender.answer(message.reply, No(why=why, hint=phrase("disk_may_be_full")))
        elif self.queue.offer(RequestReceived(ask, message.reply)) and request:
            self._requests.add(request)

    async def _on_look(self, look: views.Look, message: Msg) -> None:
        """Queries are answered from the cluster state at once, without the queue. Every answer fits one message."""
        view: views.Answer
        match look:
            case views.QueryCluster():
                view = picture(self.cluster, self.plane(), look)
            case views.QueryCurves():
                view = curves(self.cluster, look)
            case views.QueryKnobs():
                view = knobs(self.cluster, look)
            case views.QueryCheckpoints():
                view = self.cluster.checkpoints.of(look.job)
            case views.QueryRuns():
                view = runs(self.cluster, look, self.clock())
            case QuerySchedule():
                view = schedule(self.cluster, self.engine.scheduler, self.clock())
            case QueryPrediction():
                view = predict(self.cluster, self.engine.scheduler, look.job, self.clock())
        await self.sender.answer(message.reply, view)

    async def _on_clock(self, message: Msg) -> None:
        """The time of day on this machine. The clock of decisions does not jump with it."""
        await self.sender.answer(message.reply, views.ClockView(now=time.time()))

    def on_link(self, event: LinkEvent) -> None:
        self.engine.hear_link(event)
        if not self.queue.offer(event):
            self.cluster.runtime.reunion = True

    def on_back(self) -> None:
        """A connection to the server is back after a break."""
        self.ticker.restart()
        self.inbox.bell.set()

    # ── snapshots ──

    async def _keep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(1)
            behind, settings = self.store.seq - self.store.snapshot_seq, self.cluster.settings
            due = self.clock() - self._snapshot_at >= settings.snapshot_seconds
            if behind >= settings.snapshot_entries or (behind and due):
                await quietly(self.write_snapshot)

    async def write_snapshot(self) -> None:
        if self._ahead:
            return  # its turn comes in a moment
        self._snapshot_at = self.clock()
        await self.store.write_snapshot(self.cluster.state())

    # ── the state of the weaver itself ──

    def _troubles(self) -> dict[views.Trouble, Prose]:
        """What is wrong. A weaver that waits for its log decides nothing either, but it is not stuck."""
        still = self.clock() - self._decided_at
        if self.health.troubles or still <= STUCK_SECONDS:
            return self.health.troubles
        return {"stuck": phrase("weaver_stuck", seconds=still)}

    def plane(self) -> views.PlaneView:
        url = self.client.connected_url
        version = self.client.connected_server_version
        where = url.netloc.rpartition("@")[2] if url else "(not connected)"
        troubles = self._troubles()
        return views.PlaneView(
            weaver=self.name,
            term=self.cluster.term,
            began=self.began,
            now=self.clock(),
            log_seq=self.store.seq,
            version=__version__,
            server=f"nats-server {version.major}.{version.minor}.{version.patch} at {where}",
            advisories=self.advisories is not None,
            refused=self.health.refused,
            trouble=render(first_trouble(troubles)),
            troubles=tuple(troubles),
            ingress=self.ingress.url if self.ingress else "",
            ingress_trouble=render(self.ingress.trouble) if self.ingress else "",
        )

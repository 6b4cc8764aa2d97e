"""The weaver's input and output: one loop that reads, passes events to the engine, stores and publishes.

Everything that needs a decision goes through one queue. The engine handles the events that wait there, and their
records are appended to the log together; only then are commands sent and requests answered. Ordinary beats need no
decision: the engine only takes them in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom import __version__
from torchloom.bus.message_batches import Batch, MessageBatches
from torchloom.bus.tasks import end_all
from torchloom.core.decision import Decision
from torchloom.core.engine import Engine
from torchloom.core.events import LinkClosed, LinkOpened, RequestReceived, TookOver
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import decode_ask, decode_beat, decode_lighthouse_beat, decode_node_beat, decode_reply
from torchloom.protocol.ids import RankId, is_incarnation
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import Record
from torchloom.protocol.subjects import ASK, BEAT, CLOCK, FACT, LOOK, NODE, QUORUM, REPLY, REPORT
from torchloom.protocol.views import PlaneView, Trouble
from torchloom.views.wording.phrases import render
from torchloom.weaver.connection_advisories import ConnectionAdvisories
from torchloom.weaver.curve_store import CurveStore
from torchloom.weaver.decision_sender import DecisionSender
from torchloom.weaver.event_queue import EventQueue, Waiting
from torchloom.weaver.health import Clock, Health, first_trouble, quietly
from torchloom.weaver.inbox import Inbox, parse_rank
from torchloom.weaver.ingress import Ingress
from torchloom.weaver.log_store import Store
from torchloom.weaver.query_handler import QueryHandler
from torchloom.weaver.ticker import Ticker

log = logging.getLogger("torchloom.weaver")

HOLD_SECONDS = 0.003
"""Longest time for which decisions keep beats waiting."""
NO_INCARNATION = phrase("no_incarnation")
STUCK_SECONDS = 15.0
"""A weaver that has decided nothing for this long is restarted."""
T = TypeVar("T")


class Weaver:
    def __init__(
        self,
        client: Client,
        store: Store,
        cluster: ClusterState,
        advisories: ConnectionAdvisories | None,
        name: str,
        clock: Clock,
    ) -> None:
        self.client = client
        self.store = store
        self.cluster = cluster
        self.engine = Engine(cluster)
        self.advisories = advisories
        self.name = name
        self.clock = clock
        self.settings = cluster.settings
        self.began = clock()
        self.health = Health(clock)
        self.queue = EventQueue(self.health)
        self.curves = CurveStore(store, cluster.runtime, cluster.settings, clock)
        self.inbox = Inbox(client, self.health, self.queue.put_from_inbox)
        self.queries = QueryHandler(client, cluster, self.health, self.plane, clock)
        self.sender = DecisionSender(client, store, self.queue, self.queries)
        self.ticker = Ticker(self.engine, self.queue, client, advisories, clock)
        self._enqueue = self.queue.offer
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
        self.ingress: Ingress | None = None
        """Where alerts are received, if they are."""
        store.on_trouble = self._on_log_trouble

    # ── the loop ──

    async def take_over(self) -> None:
        """Become the weaver: from here on the log refuses the previous one."""
        self.queue.put(TookOver(self.name))
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
        decisions: list[tuple[Waiting, Decision]] = []
        records: list[Record] = []
        self._ahead = True
        for waiting in batch:
            decision = self.engine.handle(waiting.event, now)
            records += decision.stored
            if decision:
                decisions.append((waiting, decision))
            await self._give_way()
        records += self.engine.has_read(max(waiting.inbox_seq for waiting in batch), now)
        if records:
            await self.store.append(self.cluster.term, now, records)
        self._ahead = False
        for waiting in batch:
            if isinstance(waiting.event, RequestReceived):
                self._requests.discard(getattr(waiting.event.ask, "request", ""))
        for waiting, decision in decisions:
            await self.sender.send(decision, waiting.reply)
            await self._give_way()

    async def _give_way(self) -> None:
        """Let everything else have its turn, if this loop has run for a while."""
        if self.clock() - self._held_since > HOLD_SECONDS:
            await asyncio.sleep(0)
            self._held_since = self.clock()

    # ── what arrives ──

    async def _listen(self) -> None:
        handlers = (
            (BEAT, self._beats.on_message), (REPLY, self._on_reply), (NODE, self._on_node),
            (QUORUM, self._on_lighthouse), (ASK, self._on_ask),
            (LOOK, self.queries.on_look), (CLOCK, self.queries.on_clock),
            (REPORT, self.inbox.on_bell), (FACT, self.inbox.on_bell),
        )  # fmt: skip
        for subject, handler in handlers:
            await self.client.subscribe(subject.pattern(), cb=handler)
        await self.client.flush()
        if self.advisories is not None:
            await self.advisories.listen(self.on_link)

    def _hear_beats(self, beats: Batch) -> None:
        """Of all that came in one go: there are ten thousand a second, and each must cost little."""
        now, hear, subjects = self.clock(), self.engine.hear, self._subjects
        for subject, data in beats:
            try:
                beat = decode_beat(data)
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
                    self._enqueue(Waiting(event))
                else:
                    self.health.refuse(phrase("not_accepted", what="beat", why=NO_INCARNATION))

    def _rank_of(self, subject: str) -> RankId | None:
        """The rank that a subject names; remembered, since every beat asks."""
        if len(self._subjects) > 200_000:
            self._subjects.clear()
        self._subjects[subject] = rank = parse_rank(subject)
        return rank

    def _decode(self, what: str, decode: Callable[[bytes], T], message: Msg) -> T | None:
        """The content of a message; None, and counted as refused, if it is invalid."""
        try:
            return decode(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(phrase("not_accepted", what=what, why=str(error)))
            return None

    async def _on_reply(self, message: Msg) -> None:
        reply = self._decode("reply", decode_reply, message)
        if reply is None:
            return
        rank = parse_rank(message.subject)
        if rank is None:
            self.health.refuse(phrase("subject_of_no_rank", what="reply"))
        elif (event := self.engine.hear_reply(rank, reply)) is not None:
            self._enqueue(Waiting(event))

    async def _on_node(self, message: Msg) -> None:
        beat = self._decode("node", decode_node_beat, message)
        if beat is not None:
            for event in self.engine.hear_node(message.subject.rpartition(".")[2], beat, self.clock()):
                self._enqueue(Waiting(event))

    async def _on_lighthouse(self, message: Msg) -> None:
        beat = self._decode("lighthouse", decode_lighthouse_beat, message)
        job = message.subject.rpartition(".")[2]
        if beat is not None and (event := self.engine.hear_lighthouse(job, beat, self.clock())) is not None:
            self._enqueue(Waiting(event))

    async def _on_ask(self, message: Msg) -> None:
        try:
            ask = decode_ask(message.data)
        except msgspec.MsgspecError as error:
            await self.queries.not_understood(message, "ask", error)
            return
        request = getattr(ask, "request", "")
        if request in self._requests:
            return  # it waits for a decision; an answer now could be untrue
        if self.store.refusing:
            why = phrase("log_refuses", trouble=first_trouble(self.health.troubles))
            await self.queries.answer(message.reply, No(why=why, hint=phrase("disk_may_be_full")))
            return
        if self._enqueue(Waiting(RequestReceived(ask, message.reply), reply=message.reply)) and request:
            self._requests.add(request)

    def on_link(self, event: LinkOpened | LinkClosed) -> None:
        """The server announced a connect or a disconnect."""
        self.engine.hear_link(event)
        if not self._enqueue(Waiting(event)):
            self.cluster.runtime.reunion = True

    async def on_back(self) -> None:
        """A connection to the server is back after a break."""
        self.ticker.restart()
        self.inbox.ring()

    # ── snapshots ──

    async def _keep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(1)
            behind = self.store.seq - self.store.snapshot_seq
            due = self.clock() - self._snapshot_at >= self.settings.snapshot_seconds
            if behind >= self.settings.snapshot_entries or (behind and due):
                await quietly(self.write_snapshot)

    async def write_snapshot(self) -> None:
        if self._ahead:
            return  # its turn comes in a moment
        self._snapshot_at = self.clock()
        await self.store.write_snapshot(self.cluster.state())

    # ── the state of the weaver itself ──

    def _on_log_trouble(self, text: Prose) -> None:
        if text:
            self.health.complain("log", text)
        else:
            self.health.is_mended("log")

    def _troubles(self) -> dict[Trouble, Prose]:
        """What is wrong. A weaver that waits for its log decides nothing either, but it is not stuck."""
        still = self.clock() - self._decided_at
        if self.health.troubles or still <= STUCK_SECONDS:
            return self.health.troubles
        return {"stuck": phrase("weaver_stuck", seconds=still)}

    def plane(self) -> PlaneView:
        url = self.client.connected_url
        version = self.client.connected_server_version
        where = url.netloc.rpartition("@")[2] if url else "(not connected)"
        troubles = self._troubles()
        return PlaneView(
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

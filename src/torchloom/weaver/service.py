"""The weaver's input and output: one loop that reads, hands to the engine, stores and publishes.

Everything that must be decided goes through one queue. The engine handles what has gathered there, and the records are
appended to the log at once; only then are commands sent and questions answered. Ordinary beats do not take that way:
the engine only hears them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import nats.errors
import nats.js.errors
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom import __version__
from torchloom.bus.message_batches import Batch, MessageBatches
from torchloom.bus.tasks import end_all
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.engine import Engine
from torchloom.core.events import Asked, Event, LinkClosed, LinkOpened, TookOver, VerdictKnown
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.codec import (
    decode_ask,
    decode_beat,
    decode_lighthouse_beat,
    decode_node_beat,
    decode_reply,
    encode,
)
from torchloom.protocol.ids import RankId, is_incarnation
from torchloom.protocol.node import Launch, NodeCommand
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.records import RankLost, Record
from torchloom.protocol.subjects import ASK, BEAT, CLOCK, COMMAND, EVICT, FACT, LOOK, NODE, QUORUM, REPLY, REPORT, TASK
from torchloom.protocol.views import PlaneView, Trouble
from torchloom.views.format.tables import clean, cut
from torchloom.views.records import sentences
from torchloom.views.wording.phrases import render
from torchloom.weaver.connection_advisories import ConnectionAdvisories
from torchloom.weaver.curve_store import CurveStore
from torchloom.weaver.health import Clock, Health, first_trouble, quietly
from torchloom.weaver.inbox import Inbox, parse_rank
from torchloom.weaver.ingress import Ingress
from torchloom.weaver.process_exits import ProcessExitProbe
from torchloom.weaver.query_handler import QueryHandler
from torchloom.weaver.server_liveness import ServerLiveness
from torchloom.weaver.store import Store

log = logging.getLogger("torchloom.weaver")

TICK_SECONDS = 0.25
THOROUGH = 4
"""After so many ticks everyone is looked at."""
BATCH = 1000
"""Events decided together at most."""
HOLD_SECONDS = 0.003
"""For so long beats may wait for decisions."""
LOG_LINE = 500
"""Characters of a record in the log file; `loom events` shows all."""
NO_INCARNATION = "Expected 24 hexadecimal digits - at `$.incarnation`"
STUCK_SECONDS = 15.0
"""A weaver that decides nothing for so long is to be started anew."""
QUEUE = 50_000
"""Events waiting at most; past it the inbox waits on disk and announcements are made up for by a roll-call."""


@dataclass(frozen=True, slots=True)
class Waiting:
    event: Event
    reply: str = ""
    """Where an answer is awaited."""
    inbox_seq: int = 0
    """Set for what came through the durable inbox."""


class Weaver:
    def __init__(
        self,
        client: Client,
        store: Store,
        cluster: ClusterState,
        ear: ConnectionAdvisories | None,
        name: str,
        clock: Clock,
    ) -> None:
        self.client = client
        self.store = store
        self.cluster = cluster
        self.engine = Engine(cluster)
        self.ear = ear
        self.name = name
        self.clock = clock
        self.settings = cluster.settings
        self.began = clock()
        self.health = Health(clock)
        self.curves = CurveStore(store, cluster.runtime, cluster.settings, clock)
        self.inbox = Inbox(client, self.health, self._put_letter)
        self.hearing = ServerLiveness(client)
        self.looks = QueryHandler(client, cluster, self.health, self.plane, clock)
        self.witness = ProcessExitProbe(cluster, self._send)
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._subjects: dict[str, RankId | None] = {}
        self._beats = MessageBatches(client, self._hear_beats)
        self._held_since = self.began
        """When this loop last let others have their turn."""
        self._look_due = asyncio.Event()
        self._snapshot_at = self.began
        self._batch: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turned = self.began
        """When something was last decided: there is a tick to decide on four times a second."""
        self._in_hand: set[str] = set()
        """Requests taken in and not yet decided on."""
        self._ahead = False
        """The cluster state holds decisions that the log does not hold yet."""
        self.mint: Callable[[RankId], str] | None = None
        """Makes the credentials of one rank, where this control plane has the keys."""
        self.ingress: Ingress | None = None
        """Where alerts come in, if they may."""
        store.on_trouble = self._on_log_trouble

    # ── the loop ──

    async def take_over(self) -> None:
        """Become the weaver: from here on the log refuses whoever was it before."""
        self._take(Waiting(TookOver(self.name)))
        await self._decide_waiting()
        self.engine.restart(self.clock())
        log.info("term %d begins at log entry %d", self.cluster.term, self.store.seq)

    async def run(self) -> None:
        """Serve until cancelled, or until a newer weaver takes over (Fenced)."""
        await self._listen()
        works = (
            self.inbox.read_on(self.cluster.inbox_seq), self._loop(), self._tick(), self._look(),
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
            self._take(await self._queue.get())
            self._held_since = self.clock()
            await self._decide_waiting()
            self._turned = self.clock()

    def _take(self, first: Waiting) -> None:
        self._batch = [first]
        while len(self._batch) < BATCH and not self._queue.empty():
            self._batch.append(self._queue.get_nowait())

    async def _decide_waiting(self) -> None:
        now = self.clock()
        decisions: list[tuple[Waiting, Decision]] = []
        records: list[Record] = []
        read = 0
        self._ahead = True
        for waiting in self._batch:
            decision = self.engine.handle(waiting.event, now)
            records += decision.stored
            read = max(read, waiting.inbox_seq)
            if decision:
                decisions.append((waiting, decision))
            await self._give_way()
        records += self.engine.has_read(read, now)
        if records:
            await self.store.append(self.cluster.term, now, records)
        self._ahead = False
        for waiting in self._batch:
            if isinstance(waiting.event, Asked):
                self._in_hand.discard(getattr(waiting.event.ask, "request", ""))
        for waiting, decision in decisions:
            await self._carry_out(waiting, decision)
            await self._give_way()

    async def _give_way(self) -> None:
        """Let whatever else waits have its turn, if it has waited for long."""
        if self.clock() - self._held_since > HOLD_SECONDS:
            await asyncio.sleep(0)
            self._held_since = self.clock()

    async def _carry_out(self, waiting: Waiting, decision: Decision) -> None:
        for record in decision.stored:
            for sentence in sentences(record):
                log.info("%s", cut(clean(sentence), LOG_LINE))  # evidence may be long, and comes from outside
            if isinstance(record, RankLost):
                self.witness.lost(record.rank)
        for rank, command in decision.commands:
            await self._send(COMMAND.for_rank(rank), encode(command))
        for node, told in decision.tasks:
            await self._send(TASK.to(node=node), encode(self._with_credentials(node, told)))
        for job, evict in decision.evictions:
            await self._send(EVICT.to(job=job), encode(evict))
        for reply, answer in decision.replies:
            await self.looks.answer(reply, answer)
        if waiting.reply and decision.answer is not None:
            await self.looks.answer(waiting.reply, decision.answer)
        elif isinstance(decision.answer, No):
            self.health.refuse(decision.answer.why)
        for verdict in decision.verdicts:
            task = asyncio.create_task(self._write_verdict(verdict))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write_verdict(self, wanted: WantedVerdict) -> None:
        try:
            commit = await self.store.write_verdict(wanted.job, wanted.key, wanted.commit)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            log.warning("%s: the verdict could not be written: %s", wanted.change, error or type(error).__name__)
            return  # wanted again in a while
        self._queue.put_nowait(Waiting(VerdictKnown(wanted.change, commit, wanted.abort)))

    async def _send(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(nats.errors.Error):  # not connected: who needs it asks again
            await self.client.publish(subject, data)

    # ── what comes in ──

    async def _listen(self) -> None:
        heard = (
            (BEAT, self._beats.on_message), (REPLY, self._on_reply), (NODE, self._on_node),
            (QUORUM, self._on_lighthouse), (ASK, self._on_ask),
            (LOOK, self.looks.on_look), (CLOCK, self.looks.on_clock),
        )  # fmt: skip
        for subject, take in heard:
            await self.client.subscribe(subject.pattern(), cb=take)
        for subject in (REPORT, FACT):
            await self.client.subscribe(subject.pattern(), cb=self.inbox.on_bell)
        await self.client.flush()
        if self.ear is not None:
            await self.ear.listen(self.on_link)

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

    async def _on_reply(self, message: Msg) -> None:
        try:
            reply = decode_reply(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(phrase("not_accepted", what="reply", why=str(error)))
            return
        rank = parse_rank(message.subject)
        if rank is None:
            self.health.refuse(phrase("subject_of_no_rank", what="reply"))
        elif (event := self.engine.hear_reply(rank, reply)) is not None:
            self._enqueue(Waiting(event))

    async def _on_node(self, message: Msg) -> None:
        try:
            beat = decode_node_beat(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(phrase("not_accepted", what="node", why=str(error)))
            return
        node = message.subject.rpartition(".")[2]
        for event in self.engine.hear_node(node, beat, self.clock()):
            self._enqueue(Waiting(event))

    async def _on_lighthouse(self, message: Msg) -> None:
        try:
            beat = decode_lighthouse_beat(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(phrase("not_accepted", what="lighthouse", why=str(error)))
            return
        job = message.subject.rpartition(".")[2]
        if (event := self.engine.hear_lighthouse(job, beat, self.clock())) is not None:
            self._enqueue(Waiting(event))

    def _with_credentials(self, node: str, task: NodeCommand) -> NodeCommand:
        """Ranks that are to be started get their own, with which each can speak only as itself."""
        if not isinstance(task, Launch) or self.mint is None:
            return task
        here = [place.rank for place in task.places if place.node == node]
        job, replica = task.task.part_of or task.job, task.task.replica
        creds = {str(rank): self.mint(RankId(job, replica, rank)) for rank in here}
        return replace(task, creds=creds)

    def _enqueue(self, waiting: Waiting) -> bool:
        if self._queue.qsize() >= QUEUE:
            self.health.refuse(phrase("queue_full"))
            return False
        self._queue.put_nowait(waiting)
        return True

    def _put_letter(self, event: Event, seq: int) -> bool:
        """From the inbox; whether there is room for more."""
        self._queue.put_nowait(Waiting(event, inbox_seq=seq))
        return self._queue.qsize() < QUEUE

    def _rank_of(self, subject: str) -> RankId | None:
        """The rank that a subject names; remembered, since every beat asks."""
        if len(self._subjects) > 200_000:
            self._subjects.clear()
        self._subjects[subject] = rank = parse_rank(subject)
        return rank

    async def _on_ask(self, message: Msg) -> None:
        try:
            ask = decode_ask(message.data)
        except msgspec.MsgspecError as error:
            await self.looks.not_understood(message, "ask", error)
            return
        request = getattr(ask, "request", "")
        if request in self._in_hand:
            return  # it is being decided on; an answer now could be untrue
        if self.store.refusing:
            why = phrase("log_refuses", trouble=first_trouble(self.health.troubles))
            await self.looks.answer(message.reply, No(why=why, hint=phrase("disk_may_be_full")))
            return
        if self._enqueue(Waiting(Asked(ask, message.reply), reply=message.reply)) and request:
            self._in_hand.add(request)

    def on_link(self, event: LinkOpened | LinkClosed) -> None:
        """The server announced a connect or a disconnect."""
        self.engine.hear_link(event)
        if not self._enqueue(Waiting(event)):
            self.cluster.runtime.reunion = True

    async def on_back(self) -> None:
        """A connection to the server is back after a break: whatever happened meanwhile was not announced."""
        log.info("connected again; the roll is called in %g s", self.settings.reunion_seconds)
        self.hearing.begin_anew()
        self.engine.restart(self.clock())
        self.inbox.ring()

    # ── time ──

    async def _tick(self) -> None:
        before, count, deaf = self.clock(), 0, False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self.clock()
            if now - before > self.settings.nap_seconds:
                log.warning("asleep for %.1f s; every timer begins anew", now - before)
                self.engine.restart(now)
            before = now
            if not self.hearing.hears():
                deaf = True
                continue  # whoever is silent now may only be unheard
            if deaf:
                log.warning("the server answers again; every timer begins anew")
                self.engine.restart(self.clock())
                deaf = False
            if self.cluster.runtime.reunion and now >= self.cluster.runtime.blind_until:
                await self._call_roll()
            if self._queue.empty():
                count += 1
                for event in self.engine.tick(now):
                    self._queue.put_nowait(Waiting(event))
                if count % THOROUGH == 0:
                    self._look_due.set()

    async def _look(self) -> None:
        """Pass after pass over all ranks; between two slices of one, whatever else waits has its turn."""
        while True:
            await self._look_due.wait()
            self._look_due.clear()
            for events in self.engine.look(self.clock()):
                for event in events:
                    self._enqueue(Waiting(event))
                await asyncio.sleep(0)

    async def _call_roll(self) -> None:
        runtime = self.cluster.runtime
        if self.ear is None:
            runtime.reunion = False  # no one to ask: whoever stays silent is missed by his silence
            return
        runtime.ask_roll()
        try:
            present = await self.ear.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError) as error:
            log.warning("the roll-call was not answered (%s); once more", error or type(error).__name__)
            return
        self._queue.put_nowait(Waiting(self.engine.hear_roll(present)))

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

    # ── how it fares ──

    def _on_log_trouble(self, text: Prose) -> None:
        if text:
            self.health.complain("log", text)
        else:
            self.health.is_mended("log")

    def _troubles(self) -> dict[Trouble, Prose]:
        """What is wrong. A weaver that waits for its log decides nothing either, and is not stuck."""
        still = self.clock() - self._turned
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
            advisories=self.ear is not None,
            refused=self.health.refused,
            trouble=render(first_trouble(troubles)),
            troubles=tuple(troubles),
            ingress=self.ingress.url if self.ingress else "",
            ingress_trouble=render(self.ingress.trouble) if self.ingress else "",
        )

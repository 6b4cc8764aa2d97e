"""The weaver: one loop that reads, decides, stores and publishes.

Everything that must be decided goes through one queue. What has gathered there is decided and folded together and
appended to the log at once; only then are commands sent and questions answered. Ordinary beats do not take that way:
they only touch the watch.
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
from torchloom.bus.tasks import end_all
from torchloom.core.decide import decide
from torchloom.core.decision import Decision, WantedVerdict
from torchloom.core.events import (
    Asked,
    Event,
    Heard,
    LighthouseHeard,
    LinkClosed,
    LinkOpened,
    NodeHeard,
    Replied,
    RollCalled,
    RunDue,
    Tick,
    TookOver,
    VerdictKnown,
)
from torchloom.core.fabric import Fabric
from torchloom.core.observing import hang_of_run, look_at_jobs
from torchloom.messages import (
    InboxRead,
    Launch,
    No,
    NodeCommand,
    PlaneView,
    RankId,
    RankLost,
    Record,
    decode_ask,
    decode_beat,
    decode_lighthouse_beat,
    decode_node_beat,
    decode_reply,
    encode,
)
from torchloom.subjects import ASK, BEAT, CLOCK, COMMAND, EVICT, FACT, LOOK, NODE, QUORUM, REPLY, REPORT, TASK
from torchloom.weaver.curves import CurveKeeper
from torchloom.weaver.ear import Ear
from torchloom.weaver.health import Clock, Health, quietly
from torchloom.weaver.hearing import Hearing
from torchloom.weaver.inbox import Inbox, parse_rank
from torchloom.weaver.ingress import Ingress
from torchloom.weaver.looks import Looks
from torchloom.weaver.store import Store
from torchloom.weaver.witness import Witness

log = logging.getLogger("torchloom.weaver")

TICK_SECONDS = 0.25
THOROUGH = 4
"""Every so many ticks everyone is looked at."""
BATCH = 1000
"""Events decided together at most."""
STUCK = "nothing has been decided"
STUCK_SECONDS = 15.0
"""A weaver that decides nothing for so long is to be started anew."""
EVICT_SECONDS = 1.0
"""Between two times that a lighthouse is told what it does not seem to know."""
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
    def __init__(self, client: Client, store: Store, fabric: Fabric, ear: Ear | None, name: str, clock: Clock) -> None:
        self.client = client
        self.store = store
        self.fabric = fabric
        self.ear = ear
        self.name = name
        self.clock = clock
        self.settings = fabric.settings
        self.began = clock()
        self.health = Health(clock)
        self.curves = CurveKeeper(store, fabric.watch, fabric.settings, clock)
        self.inbox = Inbox(client, self.health, self._put_letter)
        self.hearing = Hearing(client)
        self.looks = Looks(client, fabric, self.health, self.plane, clock)
        self.witness = Witness(fabric, self._send)
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._subjects: dict[str, RankId | None] = {}
        self._told: dict[str, float] = {}
        """By job: when its lighthouse was just told again whom to leave out."""
        self._snapshot_at = self.began
        self._batch: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turned = self.began
        """When something was last decided: there is a tick to decide on four times a second."""
        self._in_hand: set[str] = set()
        """Requests taken in and not yet decided on."""
        self._ahead = False
        """The fabric holds decisions that the log does not hold yet."""
        self.mint: Callable[[RankId], str] | None = None
        """Makes the credentials of one rank, where this control plane has the keys."""
        self.ingress: Ingress | None = None
        """Where alerts come in, if they may."""
        store.complain = self.health.complain

    # ── the loop ──

    async def take_over(self) -> None:
        """Become the weaver: from here on the log refuses whoever was it before."""
        self._take(Waiting(TookOver(self.name)))
        await self._decide_waiting()
        self.fabric.restart_watch(self.clock())
        log.info("term %d begins at log entry %d", self.fabric.term, self.store.seq)

    async def run(self) -> None:
        """Serve until cancelled, or until a newer weaver takes over (Fenced)."""
        await self._listen()
        works = (self.inbox.read_on(self.fabric.inbox_seq), self._tick(), self.curves.keep(), self._keep_snapshots())
        tasks = [asyncio.create_task(work) for work in (*works, self._loop())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # none ends but by an error
        finally:
            await end_all(tasks)

    async def _loop(self) -> None:
        while True:
            self._take(await self._queue.get())
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
            decision = decide(self.fabric, waiting.event, now)
            self.fabric.fold(decision.records, now)
            for note in decision.notes:
                self.fabric.watch.courses.note(note)
            records += decision.records
            read = max(read, waiting.inbox_seq)
            if decision:
                decisions.append((waiting, decision))
        if read > self.fabric.inbox_seq:
            mark = InboxRead(seq=read)
            self.fabric.fold((mark,), now)
            records.append(mark)
        if records:
            await self.store.append(self.fabric.term, now, records)
        self._ahead = False
        for waiting in self._batch:
            if isinstance(waiting.event, Asked):
                self._in_hand.discard(getattr(waiting.event.ask, "request", ""))
        for waiting, decision in decisions:
            await self._carry_out(waiting, decision, now)

    async def _carry_out(self, waiting: Waiting, decision: Decision, now: float) -> None:
        if decision.records and decision.reason:
            log.info("%s", decision.reason)
        for record in decision.records:
            if isinstance(record, RankLost):
                self.witness.lost(record.rank)
        for rank, command in decision.commands:
            self.fabric.watch.has_told((rank, command.incarnation), now)
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
        reason = wanted.reason if commit == wanted.commit else "a rank reached the step before the verdict did"
        self._queue.put_nowait(Waiting(VerdictKnown(wanted.change, commit, reason)))

    async def _send(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(nats.errors.Error):  # not connected: who needs it asks again
            await self.client.publish(subject, data)

    # ── what comes in ──

    async def _listen(self) -> None:
        heard = (
            (BEAT, self._on_beat), (REPLY, self._on_reply), (NODE, self._on_node),
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

    async def _on_beat(self, message: Msg) -> None:
        try:
            beat = decode_beat(message.data)
            rank = self._subjects[message.subject]
        except KeyError:
            rank = self._rank_of(message.subject)
        except msgspec.MsgspecError as error:
            self.health.refuse(f"beat: {error}")
            return
        if rank is None:
            self.health.refuse("beat: not a rank's subject")
        elif not self.fabric.watch.hear(rank, beat, self.clock()):
            self._enqueue(Waiting(Heard(rank, beat, self.fabric.watch.take_found(rank))))

    async def _on_reply(self, message: Msg) -> None:
        try:
            reply = decode_reply(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(f"reply: {error}")
            return
        rank = parse_rank(message.subject)
        if rank is None:
            self.health.refuse("reply: not a rank's subject")
        elif self.fabric.watch.courses.take(rank, reply) is not None:
            self._enqueue(Waiting(Replied(rank, reply)))

    async def _on_node(self, message: Msg) -> None:
        try:
            beat = decode_node_beat(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(f"node: {error}")
            return
        node = message.subject.rpartition(".")[2]
        if self.fabric.watch.hear_node(node, beat, self.clock()):
            self._enqueue(Waiting(NodeHeard(node)))
            for job in self.fabric.runs.due(node):
                self._enqueue(Waiting(RunDue(job, hang_of_run(self.fabric, job, self.clock()))))

    async def _on_lighthouse(self, message: Msg) -> None:
        try:
            beat = decode_lighthouse_beat(message.data)
        except msgspec.MsgspecError as error:
            self.health.refuse(f"lighthouse: {error}")
            return
        job = message.subject.rpartition(".")[2]
        behind = not set(self.fabric.evicted.get(job, ())) <= set(beat.evicted)
        if self.fabric.watch.hear_lighthouse(job, beat) or (behind and self._may_tell(job)):
            self._enqueue(Waiting(LighthouseHeard(job)))

    def _may_tell(self, job: str) -> bool:
        """Not at once again: a lighthouse that cannot keep what it is told answers each time."""
        now = self.clock()
        self._told = {told: at for told, at in self._told.items() if now - at < EVICT_SECONDS}
        if job in self._told:
            return False
        self._told[job] = now
        return True

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
            self.health.refuse("too much at once")
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
            refused = No(why=f"{self.health.trouble}; nothing was changed", hint="is the disk full?")
            await self.looks.answer(message.reply, refused)
            return
        if self._enqueue(Waiting(Asked(ask, message.reply), reply=message.reply)) and request:
            self._in_hand.add(request)

    def on_link(self, event: LinkOpened | LinkClosed) -> None:
        """The server announced a connect or a disconnect."""
        watch = self.fabric.watch
        if isinstance(event, LinkOpened):
            watch.link_opened((event.rank, event.incarnation), event.link)
        else:
            watch.link_closed((event.rank, event.incarnation), event.link)
        if not self._enqueue(Waiting(event)):
            watch.reunion = True

    async def on_back(self) -> None:
        """A connection to the server is back after a break: whatever happened meanwhile was not announced."""
        log.info("connected again; the roll is called in %g s", self.settings.reunion_seconds)
        self.hearing.begin_anew()
        self.fabric.restart_watch(self.clock())
        self.inbox.ring()

    # ── time ──

    async def _tick(self) -> None:
        before, count, deaf = self.clock(), 0, False
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = self.clock()
            if now - before > self.settings.nap_seconds:
                log.warning("asleep for %.1f s; every timer begins anew", now - before)
                self.fabric.restart_watch(now)
            before = now
            if not self.hearing.hears():
                deaf = True
                continue  # whoever is silent now may only be unheard
            if deaf:
                log.warning("the server answers again; every timer begins anew")
                self.fabric.restart_watch(self.clock())
                deaf = False
            if self.fabric.watch.reunion and now >= self.fabric.watch.blind_until:
                await self._call_roll()
            if self._queue.empty():
                count += 1
                self.fabric.watch.forget_nodes(now)
                thorough = count % THOROUGH == 0
                self._queue.put_nowait(Waiting(Tick(thorough=thorough)))
                for job in self.fabric.runs.due():
                    self._queue.put_nowait(Waiting(RunDue(job, hang_of_run(self.fabric, job, now))))
                for event in look_at_jobs(self.fabric, now) if thorough else ():
                    self._queue.put_nowait(Waiting(event))

    async def _call_roll(self) -> None:
        watch = self.fabric.watch
        if self.ear is None:
            watch.reunion = False  # no one to ask: whoever stays silent is missed by his silence
            return
        watch.ask_roll()
        try:
            present = await self.ear.roll_call()
        except (nats.errors.Error, msgspec.MsgspecError, OSError) as error:
            log.warning("the roll-call was not answered (%s); once more", error or type(error).__name__)
            return
        watch.call_roll(present)
        self._queue.put_nowait(Waiting(RollCalled()))

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
        await self.store.write_snapshot(self.fabric.state())

    # ── how it fares ──

    def _standstill(self) -> str:
        still = self.clock() - self._turned
        return f"{STUCK} for {still:.0f} s" if still > STUCK_SECONDS else ""

    def plane(self) -> PlaneView:
        url = self.client.connected_url
        version = self.client.connected_server_version
        where = url.netloc.rpartition("@")[2] if url else "(not connected)"
        return PlaneView(
            weaver=self.name,
            term=self.fabric.term,
            began=self.began,
            now=self.clock(),
            log_seq=self.store.seq,
            version=__version__,
            server=f"nats-server {version.major}.{version.minor}.{version.patch} at {where}",
            advisories=self.ear is not None,
            refused=dict(self.health.refused),
            trouble=self.health.trouble or self._standstill(),
            ingress=self.ingress.where if self.ingress else "",
        )

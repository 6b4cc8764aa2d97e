"""One connection of a rank: it says hello, beats, obeys what it is told, and says goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from random import SystemRandom
from typing import Any

import msgspec
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import APIError

from torchloom.bus.tasks import end_all
from torchloom.bus.verdicts import WRONG_LAST_SEQUENCE, only_verdict, stands_committed
from torchloom.messages import (
    Beat,
    Command,
    Committed,
    Farewell,
    Goodbye,
    Hello,
    Introduce,
    Knobs,
    Muted,
    Order,
    Propose,
    Reply,
    Report,
    Verdict,
    Welcome,
    WhereAreYou,
    decode_command,
    encode,
)
from torchloom.subjects import ABORT, BEAT, COMMAND, REPLY, REPORT
from torchloom.threadlet.belonging import Belonging
from torchloom.threadlet.ending import Ending
from torchloom.threadlet.helm import Helm
from torchloom.threadlet.incarnation import new_incarnation
from torchloom.threadlet.life import Life
from torchloom.threadlet.membership import Membership
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.orders import Orders
from torchloom.threadlet.outbox import News
from torchloom.threadlet.probe import device_free_mb, device_mb, free_mb, rss_mb
from torchloom.threadlet.readings import Reader
from torchloom.threadlet.signs import Signs

logger = logging.getLogger("torchloom")
HELLO_AGAIN_SECONDS = 0.5
"""Pause before a hello is repeated that nothing has stored: the weaver has not made its inbox yet."""
WELCOME_SECONDS = 1.0
"""Without a welcome for so long the hello is said again, then more and more rarely."""
LONGEST_PAUSE = 30.0
ACK_SECONDS = 2.0
RESOLVE_SECONDS = 0.8
OFFER_SECONDS = 2.0
"""Between two looks whether there are knobs to tell of, if no one says so."""
GATHER_SECONDS = 0.05
"""Knobs are made one after the other, and told together."""
NAP_SECONDS = 5.0
"""A process that stood still for so long begins a new connection: what waits in the old one may have expired."""
KILL_SECONDS = 0.5
"""Longest an order to die waits for its answer to be on its way."""
READ_SECONDS = 0.2
"""Longest a beat waits for a device to give up a number."""
_chance = SystemRandom()


class Over(Enum):
    """Why a conversation ended."""

    LOST = auto()
    RENAMED = auto()
    """It goes on as a newer life, which needs a connection with that name."""
    SILENCED = auto()
    SAID = auto()


class Conversation:
    def __init__(
        self,
        client: Client,
        life: Life,
        meter: Meter,
        reader: Reader,
        hello: Callable[[], Hello],
        helm: Helm,
        orders: Orders,
        signs: Signs,
    ) -> None:
        self._client = client
        self._helm = helm
        self._orders = orders
        self._signs = signs
        self._offered = 0
        self.more = asyncio.Event()
        """There may be knobs to tell of."""
        self.news = asyncio.Event()
        """There may be something in the outbox."""
        self._spawned: set[asyncio.Task[None]] = set()
        self.welcomed: Callable[[], None] = lambda: None
        """Called at the first welcome of this connection."""
        self._life = life
        self._meter = meter
        self._reader = reader
        self._hello = hello
        self._over: asyncio.Future[Over] = asyncio.get_running_loop().create_future()
        self._paced = asyncio.Event()
        self._farewell = asyncio.Event()
        self._introducing: asyncio.Task[None] | None = None
        self._greeted = asyncio.Event()
        """Welcomed on this connection."""
        self._known = False
        """The hello of this connection is stored."""
        self._belonging = Belonging(client, life, self._report)

    async def hold(
        self, closed: asyncio.Event, leaving: asyncio.Event, ending: Callable[[], tuple[Ending, float]]
    ) -> Over:
        """Talk until the connection closes, the weaver ends it, or the process leaves (`ending` then says how)."""
        await self._client.subscribe(COMMAND.for_rank(self._life.rank), cb=self._hear)
        await self.belong()
        self._introduce()
        works = (self._beat_on(), self._tell_on(), closed.wait(), leaving.wait())
        beats, telling, shut, left = map(asyncio.ensure_future, works)
        self.spawn(self._offer_on())
        self.spawn(self._notice_naps())
        tasks: list[asyncio.Future[Any]] = [beats, telling, shut, left]
        try:
            await asyncio.wait([self._over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                return self._over.result()
            if not leaving.is_set():
                return Over.LOST
            beats.cancel()
            telling.cancel()
            how, seconds = ending()
            parting = asyncio.ensure_future(self._part(how))
            tasks.append(parting)
            await asyncio.wait([parting, shut], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return Over.SAID
        finally:
            if self._introducing is not None:
                tasks.append(self._introducing)
            tasks += self._spawned
            await end_all(tasks)

    # ── hello ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _introduce(self) -> None:
        """Say hello, unless one is on its way. One that is stored and was not answered is no reason to be silent."""
        if self._introducing is None or self._introducing.done() or self._known:
            self.introduce_anew()

    def introduce_anew(self) -> None:
        if self._introducing is not None:
            self._introducing.cancel()
        self._life.hellos += 1
        self._introducing = asyncio.ensure_future(self._say_hello(self._life.hellos))

    async def _say_hello(self, number: int) -> None:
        """Repeat it until the server has it on disk; the id makes the repetitions one message."""
        hello = self._hello()
        while not await self._report(hello, f"hello-{number}"):
            await asyncio.sleep(HELLO_AGAIN_SECONDS)
        self._known, self._belonging.hello = True, number
        self.more.set()
        self.news.set()
        # A weaver that died between storing it and answering would owe us the values in force for ever.
        pause = WELCOME_SECONDS
        while not self._greeted.is_set():
            try:
                await asyncio.wait_for(self._greeted.wait(), pause * _chance.uniform(0.8, 1.2))
            except TimeoutError:
                pause = min(2 * pause, LONGEST_PAUSE)
                self._life.hellos += 1
                if await self._report(self._hello(), f"hello-{self._life.hellos}"):
                    self._belonging.hello = self._life.hellos
                    self.news.set()

    async def _report(self, report: Report, what: str) -> bool:
        headers = {"Nats-Msg-Id": f"{report.incarnation}-{what}"}
        subject = REPORT.for_rank(self._life.rank)
        try:
            await self._client.jetstream().publish(subject, encode(report), timeout=ACK_SECONDS, headers=headers)
        except Exception as error:  # noqa: BLE001  no stream yet, no answer, a full disk: the same for a rank
            logger.debug("torchLoom: %s not stored: %r", what, error)
            return False
        return True

    async def _tell_on(self) -> None:
        """Tell the weaver what there is to tell, once the hello of this connection is stored."""
        while True:
            if self._known and not (await self._belonging.tell() and await self._empty_outbox()):
                await asyncio.sleep(HELLO_AGAIN_SECONDS)
                continue
            await self.news.wait()
            self.news.clear()

    async def belong(self) -> None:
        """The rank may have become one of a torchft replica."""
        await self._belonging.listen()
        self.news.set()

    async def _empty_outbox(self) -> bool:
        life = self._life

        async def say(number: int, news: News) -> bool:
            report = replace(news, incarnation=life.incarnation)
            return await self._report(report, f"news-{number}") and report.incarnation == life.incarnation

        return await life.outbox.empty(say, lambda: life.welcomed)

    async def _notice_naps(self) -> None:
        """Frozen, then thawed: an order found in the socket now may long be given up. This is seen before it is."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while loop.time() - before < NAP_SECONDS:
            before = loop.time()
            await asyncio.sleep(NAP_SECONDS / 10)
        self._end(Over.LOST)

    # ── what may be changed ──────────────────────────────────────────────────────────────────────────────────────────

    async def _offer_on(self) -> None:
        """Tell the weaver which knobs there are, now and whenever there are more."""
        if self._life.rank.rank != 0:
            self._offered = 1  # that the log level may be changed is told by rank 0 for all
        while True:
            if self._known and self._helm.offers > self._offered:
                count = self._helm.offers
                saves = self._helm.save is not None
                knobs = Knobs(incarnation=self._life.incarnation, knobs=self._helm.specs(), checkpoints=saves)
                if await self._report(knobs, f"knobs-{count}-{self._life.hellos}"):
                    self._offered = count
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.more.wait(), OFFER_SECONDS)
            self.more.clear()
            await asyncio.sleep(GATHER_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something to do on this connection while it lasts."""
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def reply(self, reply: Reply) -> None:
        with contextlib.suppress(Exception):  # asked again if it does not arrive
            await self._client.publish(REPLY.for_rank(self._life.rank), encode(reply))

    async def resolve(self, change: Committed) -> None:
        """The step of a change has come and no verdict: write abort, unless one stands, and obey what stands."""
        job, key = self._life.rank.job, change.key or change.id
        try:
            commit = False
            try:
                headers = only_verdict(job, key)
                abort = ABORT.to(job=job, change=key)
                await self._client.jetstream().publish(abort, b"", timeout=RESOLVE_SECONDS, headers=headers)
            except APIError as error:
                if error.err_code != WRONG_LAST_SEQUENCE:
                    raise
                commit = await stands_committed(self._client, job, key, RESOLVE_SECONDS)
        except Exception as error:  # noqa: BLE001  cut off: the training goes on unchanged when its patience ends
            logger.debug("torchLoom: no verdict on %s: %r", change.id, error)
            return
        verdict = Verdict(term=self._life.term, incarnation=self._life.incarnation, id=change.id, commit=commit)
        self._helm.hear(verdict)

    # ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat_on(self) -> None:
        """Beat at the interval, beginning at a moment of chance: ranks that start together do not beat together."""
        loop = asyncio.get_running_loop()
        last = loop.time() - self._life.beat_seconds * _chance.random()
        while not self._client.is_closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._paced.wait(), last + self._life.beat_seconds - loop.time())
            if self._paced.is_set():  # the weaver changed the interval: count anew from the last beat
                self._paced.clear()
                continue
            last = loop.time()
            await self._beat()
        self._end(Over.LOST)

    async def _beat(self) -> None:
        try:
            stretch = self._meter.take()
            await self._reader.refresh(self._meter.values.copy(), READ_SECONDS, tuple(self._meter.losses))
            known = self._reader.readings
            member = self._life.member or Membership()
            together = self._signs.collectives if self._life.member is None else stretch.step * 10**6 + member.begun
            beat = Beat(
                incarnation=self._life.incarnation,
                step=stretch.step,
                times=stretch.times,
                loss=known.loss,
                samples_per_second=stretch.samples_per_second,
                metrics=known.metrics,
                not_finite=tuple(sorted(known.not_finite)),
                bad_steps=known.bad_steps,
                rss_mb=rss_mb(),
                device_mb=device_mb(),
                free_mb=free_mb(),
                device_free_mb=device_free_mb(),
                dropped=self._meter.dropped + known.dropped,
                change=self._helm.steering.in_force,
                paused=self._helm.steering.paused,
                knobs=self._helm.values() if self._life.rank.rank == 0 else {},
                still=self._meter.still(),
                phase=self._signs.phases.now,
                collectives=together,
                quorum=member.quorum,
                participants=member.participants,
                discarded=member.discarded,
            )
            self._complain(self._meter.complaint or known.complaint)
            await self._client.publish(BEAT.for_rank(self._life.rank), encode(beat))
        except Exception as error:  # noqa: BLE001  one beat less; a closed connection is noticed by the caller
            logger.debug("torchLoom: no beat: %r", error)

    def _complain(self, complaint: str) -> None:
        if complaint and not self._life.complained:
            self._life.complained = True
            logger.warning("torchLoom: a value given to step() is not reported: %s (told once)", complaint)

    # ── goodbye ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _part(self, ending: Ending) -> None:
        """The last news and numbers, then the goodbye, on disk and known to the weaver. Nothing is sent after it."""
        if self._introducing is not None:
            self._introducing.cancel()  # it may still be saying hello for want of a welcome
        # A very short life: whoever says goodbye has said hello before.
        if not self._known and not await self._report(self._hello(), f"hello-{self._life.hellos}"):
            return
        self._belonging.hello = self._belonging.hello or self._life.hellos
        await self._belonging.tell()
        await self._empty_outbox()
        await self._beat()
        goodbye = Goodbye(
            incarnation=self._life.incarnation, how=ending.how, error=ending.error, step=self._meter.step_number
        )
        if await self._report(goodbye, "goodbye"):
            await self._farewell.wait()

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hear(self, message: Msg) -> None:
        if self._over.done():
            return
        try:
            command = decode_command(message.data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._life.ignored += 1
            return
        if command.incarnation == self._life.incarnation and command.term >= self._life.term:
            self._life.term = command.term
            self._obey(command)
            reply = self._steer(command)
            if reply is not None:
                await self.reply(reply)
            if isinstance(command, Order) and command.verb == "kill":
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._client.flush(), KILL_SECONDS)
                self._orders.kill()

    def _obey(self, command: Command) -> None:
        life = self._life
        match command:
            case Welcome(beat_seconds=seconds, changes=changes):
                life.welcomed = True
                self._greeted.set()
                self._helm.welcome(changes)
                self.welcomed()
                if seconds != life.beat_seconds:
                    life.beat_seconds = seconds
                    self._paced.set()
            case Introduce():
                self._introduce()
            case Farewell():
                self._farewell.set()
            case Muted(newest=newest, why=why) if newest > life.incarnation:
                if life.welcomed:  # it was the rank once: now it is a zombie, or was started twice
                    logger.warning(
                        "torchLoom: %s is no longer listened to: %s. Training goes on, unwatched", life.rank, why
                    )
                    self._end(Over.SILENCED)
                else:  # it has just begun, on a machine whose clock is behind
                    life.incarnation = new_incarnation(newer_than=newest)
                    self._helm.rename(life.incarnation)
                    life.outbox.unsay()
                    self._end(Over.RENAMED)

    def _steer(self, command: Command) -> Reply | None:
        match command:
            case WhereAreYou(id=id):
                return self._helm.standing(id, values=self._life.rank.rank == 0)
            case Propose():
                return self._helm.propose(command)
            case Verdict():
                return self._helm.hear(command)
            case Order():
                return self._orders.carry_out(command)
        return None

    def _end(self, why: Over) -> None:
        if not self._over.done():
            self._over.set_result(why)

"""One connection of a rank to the weaver: hello, beats, commands, reports, goodbye."""

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

from torchloom.bus.change_verdicts import WRONG_LAST_SEQUENCE, only_verdict, stands_committed
from torchloom.bus.tasks import TaskSet, end_all
from torchloom.protocol.codec import decode_command, encode
from torchloom.protocol.rank import (
    ChangeSpec,
    Command,
    Farewell,
    Goodbye,
    Hello,
    Introduce,
    Knobs,
    Muted,
    Order,
    Propose,
    QueryStep,
    Reply,
    Report,
    Verdict,
    Welcome,
)
from torchloom.protocol.subjects import ABORT, BEAT, COMMAND, REPLY, REPORT
from torchloom.shared.incarnation import new_incarnation
from torchloom.threadlet.connection.beat import make_beat
from torchloom.threadlet.connection.outbox import News
from torchloom.threadlet.connection.rank_state import RankState
from torchloom.threadlet.connection.torchft_member import TorchftMember
from torchloom.threadlet.process.exit_reason import Ending

logger = logging.getLogger("torchloom")
HELLO_AGAIN_SECONDS = 0.5
"""Pause before a hello that was not stored is repeated: the weaver has not created its inbox yet."""
WELCOME_SECONDS = 1.0
"""Time without a welcome after which the hello is repeated; it doubles each time."""
LONGEST_PAUSE = 30.0
ACK_SECONDS = 2.0
RESOLVE_SECONDS = 0.8
OFFER_SECONDS = 2.0
"""Longest interval between two checks for new knobs."""
GATHER_SECONDS = 0.05
"""Knobs are created one after the other, and reported together."""
NAP_SECONDS = 5.0
"""A process suspended for this long starts a new connection: commands in the old one may have expired."""
KILL_SECONDS = 0.5
"""Longest wait for the answer to be sent before an order to kill the process is carried out."""
_chance = SystemRandom()


class SessionEnd(Enum):
    """Why a session ended."""

    LOST = auto()
    RENAMED = auto()
    """The rank took a newer incarnation, which needs a connection with that name."""
    MUTED = auto()
    GOODBYE = auto()


class Session:
    def __init__(
        self, client: Client, state: RankState, hello: Callable[[], Hello], welcomed: Callable[[], None]
    ) -> None:
        self._client = client
        self._state = state
        self._boundary = state.boundary
        self._hello = hello
        self._welcomed = welcomed
        """Called at each welcome."""
        self._offered = 0
        self.more = asyncio.Event()
        """There may be knobs to report."""
        self.news = asyncio.Event()
        """There may be something in the outbox."""
        self._spawned = TaskSet()
        self._over: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
        self._paced = asyncio.Event()
        self._farewell = asyncio.Event()
        self._introducing: asyncio.Task[None] | None = None
        self._greeted = asyncio.Event()
        """Welcomed on this connection."""
        self._known = False
        """The server has stored the hello of this connection."""
        self._member = TorchftMember(client, state, self._report)

    async def run(
        self, closed: asyncio.Event, leaving: asyncio.Event, ending: Callable[[], tuple[Ending, float]]
    ) -> SessionEnd:
        """Run until the connection closes, the weaver ends it, or the process leaves (`ending` then says how)."""
        await self._client.subscribe(COMMAND.for_rank(self._state.rank), cb=self._hear)
        await self.follow_replica()
        self._introduce()
        works = (self._beat_loop(), self._report_loop(), closed.wait(), leaving.wait())
        beats, telling, shut, left = map(asyncio.ensure_future, works)
        self.spawn(self._offer_loop())
        self.spawn(self._detect_suspension())
        tasks: list[asyncio.Future[Any]] = [beats, telling, shut, left]
        try:
            await asyncio.wait([self._over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                return self._over.result()
            if not leaving.is_set():
                return SessionEnd.LOST
            beats.cancel()
            telling.cancel()
            how, seconds = ending()
            parting = asyncio.ensure_future(self._say_goodbye(how))
            tasks.append(parting)
            await asyncio.wait([parting, shut], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return SessionEnd.GOODBYE
        finally:
            if self._introducing is not None:
                tasks.append(self._introducing)
            tasks += self._spawned
            await end_all(tasks)

    # ── hello ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _introduce(self) -> None:
        """Say hello, unless one is being sent. A stored hello that was not answered is sent again."""
        if self._introducing is None or self._introducing.done() or self._known:
            self.reintroduce()

    def reintroduce(self) -> None:
        if self._introducing is not None:
            self._introducing.cancel()
        self._state.hellos += 1
        self._introducing = asyncio.ensure_future(self._say_hello(self._state.hellos))

    async def _say_hello(self, number: int) -> None:
        """Send it until the server has stored it; the id makes repetitions one message."""
        hello = self._hello()
        while not await self._report(hello, f"hello-{number}"):
            await asyncio.sleep(HELLO_AGAIN_SECONDS)
        self._known, self._member.hello = True, number
        self.more.set()
        self.news.set()
        # A weaver that dies after the hello was stored and before it answers would never send the current values.
        pause = WELCOME_SECONDS
        while not self._greeted.is_set():
            try:
                await asyncio.wait_for(self._greeted.wait(), pause * _chance.uniform(0.8, 1.2))
            except TimeoutError:
                pause = min(2 * pause, LONGEST_PAUSE)
                self._state.hellos += 1
                if await self._report(self._hello(), f"hello-{self._state.hellos}"):
                    self._member.hello = self._state.hellos
                    self.news.set()

    async def _report(self, report: Report, what: str) -> bool:
        headers = {"Nats-Msg-Id": f"{report.incarnation}-{what}"}
        subject = REPORT.for_rank(self._state.rank)
        try:
            await self._client.jetstream().publish(subject, encode(report), timeout=ACK_SECONDS, headers=headers)
        except Exception as error:  # noqa: BLE001  no stream yet, no answer, a full disk: it is sent again
            logger.debug("torchLoom: %s not stored: %r", what, error)
            return False
        return True

    async def _report_loop(self) -> None:
        """Send waiting reports, once the hello of this connection is stored."""
        while True:
            if self._known and not (await self._member.report() and await self._empty_outbox()):
                await asyncio.sleep(HELLO_AGAIN_SECONDS)
                continue
            await self.news.wait()
            self.news.clear()

    async def follow_replica(self) -> None:
        """Follow the lighthouse, if the rank has become part of a torchft replica."""
        await self._member.listen()
        self.news.set()

    async def _empty_outbox(self) -> bool:
        state = self._state

        async def say(number: int, news: News) -> bool:
            report = replace(news, incarnation=state.incarnation)
            return await self._report(report, f"news-{number}") and report.incarnation == state.incarnation

        return await state.outbox.empty(say, lambda: state.welcomed)

    async def _detect_suspension(self) -> None:
        """End the session after a suspension: commands that wait in the socket may have been given up long ago."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while loop.time() - before < NAP_SECONDS:
            before = loop.time()
            await asyncio.sleep(NAP_SECONDS / 10)
        self._end(SessionEnd.LOST)

    # ── what may be changed ──────────────────────────────────────────────────────────────────────────────────────────

    async def _offer_loop(self) -> None:
        """Report the knobs, now and whenever there are more."""
        if self._state.rank.rank != 0:
            self._offered = 1  # rank 0 reports the log level's knob for all
        while True:
            if self._known and self._boundary.offers > self._offered:
                count = self._boundary.offers
                saves = self._boundary.save is not None
                knobs = Knobs(incarnation=self._state.incarnation, knobs=self._boundary.specs(), checkpoints=saves)
                if await self._report(knobs, f"knobs-{count}-{self._state.hellos}"):
                    self._offered = count
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.more.wait(), OFFER_SECONDS)
            self.more.clear()
            await asyncio.sleep(GATHER_SECONDS)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with this session."""
        self._spawned.start(work)

    async def reply(self, reply: Reply) -> None:
        with contextlib.suppress(Exception):  # the weaver asks again if it does not arrive
            await self._client.publish(REPLY.for_rank(self._state.rank), encode(reply))

    async def resolve(self, change: ChangeSpec) -> None:
        """A change is due and has no verdict: write abort unless a verdict is stored, and obey the stored one."""
        job, key = self._state.rank.job, change.key or change.id
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
        except Exception as error:  # noqa: BLE001  cut off: the training continues unchanged after a timeout
            logger.debug("torchLoom: no verdict on %s: %r", change.id, error)
            return
        verdict = Verdict(term=self._state.term, incarnation=self._state.incarnation, id=change.id, commit=commit)
        self._boundary.hear(verdict)

    # ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat_loop(self) -> None:
        """Send beats at the interval, from a random offset: ranks that start together must not beat together."""
        loop = asyncio.get_running_loop()
        last = loop.time() - self._state.beat_seconds * _chance.random()
        while not self._client.is_closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._paced.wait(), last + self._state.beat_seconds - loop.time())
            if self._paced.is_set():  # the weaver changed the interval: it starts at the last beat
                self._paced.clear()
                continue
            last = loop.time()
            await self._beat()
        self._end(SessionEnd.LOST)

    async def _beat(self) -> None:
        try:
            beat = await make_beat(self._state)
            self._complain(self._state.meter.complaint or self._state.reader.readings.complaint)
            await self._client.publish(BEAT.for_rank(self._state.rank), encode(beat))
        except Exception as error:  # noqa: BLE001  one beat is lost; the caller notices a closed connection
            logger.debug("torchLoom: no beat: %r", error)

    def _complain(self, complaint: str) -> None:
        if complaint and not self._state.complained:
            self._state.complained = True
            logger.warning("torchLoom: a value given to step() is not reported: %s (this is logged once)", complaint)

    # ── goodbye ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _say_goodbye(self, ending: Ending) -> None:
        """Send the last reports and a last beat, then the goodbye, until the weaver confirms it. Nothing follows it."""
        if self._introducing is not None:
            self._introducing.cancel()  # it may still be repeating the hello
        # A goodbye needs a hello before it, also for a process that ends at once.
        if not self._known and not await self._report(self._hello(), f"hello-{self._state.hellos}"):
            return
        self._member.hello = self._member.hello or self._state.hellos
        await self._member.report()
        await self._empty_outbox()
        await self._beat()
        goodbye = Goodbye(
            incarnation=self._state.incarnation, how=ending.how, error=ending.error, step=self._state.meter.step_number
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
            self._state.ignored += 1
            return
        if command.incarnation == self._state.incarnation and command.term >= self._state.term:
            self._state.term = command.term
            reply = self._obey(command)
            if reply is not None:
                await self.reply(reply)
            if isinstance(command, Order) and command.verb == "kill":
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._client.flush(), KILL_SECONDS)
                self._state.orders.kill()

    def _obey(self, command: Command) -> Reply | None:
        state = self._state
        match command:
            case QueryStep(id=id):
                return self._boundary.report_step(id, values=state.rank.rank == 0)
            case Propose():
                return self._boundary.propose(command)
            case Verdict():
                return self._boundary.hear(command)
            case Order():
                return state.orders.carry_out(command)
            case Welcome(beat_seconds=seconds, changes=changes):
                state.welcomed = True
                self._greeted.set()
                self._boundary.welcome(changes)
                self._welcomed()
                if seconds != state.beat_seconds:
                    state.beat_seconds = seconds
                    self._paced.set()
            case Introduce():
                self._introduce()
            case Farewell():
                self._farewell.set()
            case Muted(newest=newest, pid=pid, node=node) if newest > state.incarnation:
                if state.welcomed:  # it was replaced, or the rank was started twice
                    logger.warning(
                        "torchLoom: the weaver no longer listens to %s: pid %d on %s is the newer process of this rank."
                        " Training continues without torchLoom",
                        state.rank,
                        pid,
                        node,
                    )
                    self._end(SessionEnd.MUTED)
                else:  # it has just started, on a machine whose clock is behind
                    state.incarnation = new_incarnation(newer_than=newest)
                    self._boundary.rename(state.incarnation)
                    state.outbox.send_again()
                    self._end(SessionEnd.RENAMED)
        return None

    def _end(self, why: SessionEnd) -> None:
        if not self._over.done():
            self._over.set_result(why)

"""One connection of a rank to the weaver: hello, beats, commands, reports, goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from enum import Enum, auto
from random import SystemRandom

import msgspec
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg

from torchloom.bus.streams import store_once, write_verdict
from torchloom.bus.tasks import TaskSet, set_within
from torchloom.protocol import rank as messages
from torchloom.protocol.codec import decode_command, decode_lighthouse_beat, encode
from torchloom.protocol.subjects import BEAT, COMMAND, QUORUM, REPLY, REPORT
from torchloom.shared.incarnation import new_incarnation
from torchloom.threadlet.connection.rank_state import RankState

logger = logging.getLogger("torchloom")
AGAIN_SECONDS = 0.5
"""Pause before a report that was not stored is repeated: the weaver may not have created its inbox yet."""
WELCOME_SECONDS = 1.0
"""Time without a welcome after which the hello is repeated; it doubles each time."""
LONGEST_PAUSE = 30.0
RESOLVE_SECONDS = 0.8
GATHER_SECONDS = 0.05
"""Knobs are created one after the other, and reported together."""
NAP_SECONDS = 5.0
"""A process suspended for this long starts a new connection: commands in the old one may have expired."""
KILL_SECONDS = 0.5
"""Longest wait for the answer to be sent before an order to kill the process is carried out."""
MUTED_WARNING = (
    "torchLoom: the weaver no longer listens to %s: pid %d on %s is the newer process of this rank."
    " Training continues without torchLoom"
)
_chance = SystemRandom()


class SessionEnd(Enum):
    """Why a session ended."""

    LOST = auto()
    RENAMED = auto()
    """The rank took a newer incarnation, which needs a connection with that name."""
    MUTED = auto()
    GOODBYE = auto()


class Session:
    def __init__(self, client: Client, state: RankState) -> None:
        self._client = client
        self._state = state
        self._boundary = state.boundary
        self.news = asyncio.Event()
        """There may be something to report."""
        self.tasks = TaskSet()
        """They end with this session."""
        self._over: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
        self._paced = asyncio.Event()
        self._farewell = asyncio.Event()
        self._greeted = asyncio.Event()
        """Welcomed on this connection."""
        self._stored = {"hello": 0, "joined": 0, "knobs": 0 if state.rank.rank == 0 else 1}
        """The number of the newest report of each kind that the server has stored of this connection.

        Rank 0 reports the log level's knob for all.
        """
        self._follows_lighthouse = False

    async def run(self, closed: asyncio.Event) -> SessionEnd:
        """Run until the connection closes, the weaver ends it, or the process leaves."""
        state = self._state
        await self._client.subscribe(COMMAND.for_rank(state.rank), cb=self._hear)
        await self.follow_replica()
        self.introduce()
        loops = [self.tasks.start(self._beat_loop()), self.tasks.start(self._report_loop())]
        shut, left = self.tasks.start(closed.wait()), self.tasks.start(state.leaving.wait())
        self.tasks.start(self._repeat_hello())
        self.tasks.start(self._detect_suspension())
        try:
            await asyncio.wait([self._over, shut, left, *loops], return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                return self._over.result()
            if not state.leaving.is_set():
                return SessionEnd.LOST
            for loop in loops:
                loop.cancel()
            parting, seconds = self.tasks.start(self._say_goodbye()), max(0.0, state.leave_by - time.monotonic())
            await asyncio.wait([parting, shut], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return SessionEnd.GOODBYE
        finally:
            await self.tasks.end()

    async def _detect_suspension(self) -> None:
        """End the session after a suspension: commands that wait in the socket may have been given up long ago."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while loop.time() - before < NAP_SECONDS:
            before = loop.time()
            await asyncio.sleep(NAP_SECONDS / 2)
        self._end(SessionEnd.LOST)

    # ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _report_loop(self) -> None:
        """Report what is new, after the hello of this connection."""
        while True:
            self.news.clear()
            stored = await self._report_hello()
            if stored:
                await asyncio.sleep(GATHER_SECONDS if self._boundary.offers > self._stored["knobs"] else 0)
                stored = await self._report_news()
            await (self.news.wait() if stored else asyncio.sleep(AGAIN_SECONDS))

    async def _report_hello(self) -> bool:
        return await self._report_newest("hello", self._state.hellos, self._state.hello())

    async def _report_news(self) -> bool:
        """Report the torchft replica, what waits in the outbox, and the knobs. False if something was not stored."""
        state, stored = self._state, True
        if state.member is not None and state.member.joined is not None:
            # After each hello, since the weaver may not know this incarnation.
            joined = replace(state.member.joined, incarnation=state.incarnation)
            stored = await self._report_newest("joined", self._stored["hello"], joined)
        stored = stored and await self._empty_outbox()
        return await self._report_newest("knobs", self._boundary.offers, state.offer()) and stored

    async def _empty_outbox(self) -> bool:
        """Send all waiting reports in order. False if one of them was not stored."""
        state = self._state
        while (following := state.outbox.first()) is not None:
            number, news = following
            report = replace(news, incarnation=state.incarnation)
            if not await self._report(report, f"news-{number}") or report.incarnation != state.incarnation:
                return False
            state.outbox.stored(number, sure=state.welcomed)
        return True

    async def _report_newest(self, kind: str, number: int, report: messages.Report) -> bool:
        """Report it, unless one of this kind with this number is stored. Whether it is stored."""
        if self._stored[kind] < number and await self._report(report, f"{kind}-{number}-{self._state.hellos}"):
            self._stored[kind] = number
        return self._stored[kind] >= number

    async def _report(self, report: messages.Report, what: str) -> bool:
        """Whether the server has stored it; `what` makes repetitions one message."""
        subject = REPORT.for_rank(self._state.rank)
        try:
            await store_once(self._client, subject, encode(report), id=f"{report.incarnation}-{what}")
        except Exception as error:  # noqa: BLE001  no stream yet, no answer, a full disk: it is sent again
            logger.debug("torchLoom: %s not stored: %r", what, error)
            return False
        return True

    def introduce(self) -> None:
        """Say hello, with a new number."""
        self._state.hellos += 1
        self.news.set()

    def _introduce_again(self) -> None:
        """Say hello again, unless the latest one is still being sent."""
        if self._stored["hello"] == self._state.hellos:
            self.introduce()

    async def _repeat_hello(self) -> None:
        """Say hello until welcomed: a weaver may die after it was stored, and before it sends the current values."""
        pause = WELCOME_SECONDS
        while not await set_within(self._greeted, pause * _chance.uniform(0.8, 1.2)):
            if self._stored["hello"]:  # otherwise it is still being sent
                pause = min(2 * pause, LONGEST_PAUSE)
            self._introduce_again()

    async def _say_goodbye(self) -> None:
        """Send the last reports and a last beat, then the goodbye, until the weaver confirms it. Nothing follows it."""
        await self._report_hello()
        if not self._stored["hello"]:  # a goodbye needs a hello before it, also for a process that ends at once
            return
        await self._report_news()
        await self._beat()
        step, ending, incarnation = self._boundary.meter.step_number, self._state.ending, self._state.incarnation
        goodbye = messages.Goodbye(incarnation=incarnation, how=ending.how, error=ending.error, step=step)
        if await self._report(goodbye, "goodbye"):
            await self._farewell.wait()

    # ── beats ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _beat_loop(self) -> None:
        """Send beats at the interval, from a random offset: ranks that start together must not beat together."""
        loop = asyncio.get_running_loop()
        last = loop.time() - self._state.beat_seconds * _chance.random()
        while not self._client.is_closed:
            if await set_within(self._paced, last + self._state.beat_seconds - loop.time()):
                # the weaver changed the interval: it starts at the last beat
                self._paced.clear()
                continue
            last = loop.time()
            await self._beat()
        self._end(SessionEnd.LOST)

    async def _beat(self) -> None:
        try:
            beat = await self._state.beat()
            complaint = self._boundary.meter.complaint or self._state.reader.complaint
            if complaint and not self._state.complained:
                self._state.complained = True
                warning = "torchLoom: a value given to step() is not reported: %s (this is logged once)"
                logger.warning(warning, complaint)
            await self._client.publish(BEAT.for_rank(self._state.rank), encode(beat))
        except Exception as error:  # noqa: BLE001  one beat is lost; the caller notices a closed connection
            logger.debug("torchLoom: no beat: %r", error)

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _hear(self, message: Msg) -> None:
        if self._over.done():
            return
        try:
            command = decode_command(message.data)
        except msgspec.MsgspecError:
            return
        if command.incarnation == self._state.incarnation and command.term >= self._state.term:
            self._state.term = command.term
            reply = self._obey(command)
            if reply is not None:
                await self.reply(reply)
            if isinstance(command, messages.Order) and command.verb == "kill":
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._client.flush(), KILL_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)

    def _obey(self, command: messages.Command) -> messages.Reply | None:
        state = self._state
        match command:
            case messages.QueryStep(id=id):
                return state.report_step(id)
            case messages.Propose():
                return self._boundary.propose(command)
            case messages.Verdict():
                return self._boundary.hear(command)
            case messages.Order():
                return self._boundary.carry_out(command)
            case messages.Welcome(beat_seconds=seconds, changes=changes):
                state.welcomed = True
                self._greeted.set()
                self._boundary.welcome(changes)
                state.started.set()
                if seconds != state.beat_seconds:
                    state.beat_seconds = seconds
                    self._paced.set()
            case messages.Introduce():
                self._introduce_again()
            case messages.Farewell():
                self._farewell.set()
            case messages.Muted(newest=newest, pid=pid, node=node) if newest > state.incarnation:
                if state.welcomed:  # it was replaced, or the rank was started twice
                    logger.warning(MUTED_WARNING, state.rank, pid, node)
                    self._end(SessionEnd.MUTED)
                else:  # it has just started, on a machine whose clock is behind
                    self._boundary.participant.incarnation = new_incarnation(newer_than=newest)
                    state.outbox.send_again()
                    self._end(SessionEnd.RENAMED)
        return None

    async def reply(self, reply: messages.Reply) -> None:
        with contextlib.suppress(Exception):  # the weaver asks again if it does not arrive
            await self._client.publish(REPLY.for_rank(self._state.rank), encode(reply))

    async def resolve(self, change: messages.ChangeSpec) -> None:
        """A change is due and has no verdict: write abort unless a verdict is stored, and obey the stored one."""
        state = self._state
        try:
            key = change.key or change.id
            commit = await write_verdict(self._client, state.rank.job, key, commit=False, timeout=RESOLVE_SECONDS)
        except Exception as error:  # noqa: BLE001  cut off: the training continues unchanged after a timeout
            logger.debug("torchLoom: no verdict on %s: %r", change.id, error)
            return
        verdict = messages.Verdict(term=state.term, incarnation=state.incarnation, id=change.id, commit=commit)
        self._boundary.hear(verdict)

    async def follow_replica(self) -> None:
        """Report the replica and follow its lighthouse, once the rank is known to be part of a torchft replica."""
        if self._state.member is not None and not self._follows_lighthouse:
            self._follows_lighthouse = True
            await self._client.subscribe(QUORUM.to(job=self._state.rank.job), cb=self._hear_lighthouse)
        self.news.set()

    async def _hear_lighthouse(self, message: Msg) -> None:
        try:
            if self._state.member is not None:
                self._state.member.hear(decode_lighthouse_beat(message.data))
        except Exception as error:  # noqa: BLE001  the next one comes within a second
            logger.debug("torchLoom: a lighthouse was not understood: %r", error)

    def _end(self, why: SessionEnd) -> None:
        if not self._over.done():
            self._over.set_result(why)

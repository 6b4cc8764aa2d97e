"""The event loop side of a lighthouse: it decides after every request, stores the quorum, and answers.

Each waiting call is a future. `update` runs after every request, when the rules say that time alone may change the
outcome, and at every tick. It alone answers calls, except that `evict` rejects those of evicted replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.quorum import DurableState, Evicted, LighthouseState, Member, NotYet, Quorum, Rules, decide
from torchloom.lighthouse.quorum_store import QuorumStore
from torchloom.views.wording.phrases import render

log = logging.getLogger("torchloom.lighthouse")

NAP_SHARE = 0.25
"""Share of the heartbeat timeout: during a longer pause of this process it may have missed heartbeats."""


class Stopping(Exception):
    """This lighthouse is being stopped; another one may start soon."""


class QuorumService:
    """Runs on one event loop and uses its clock."""

    def __init__(self, rules: Rules, store: QuorumStore, tick: float = 0.1) -> None:
        self.rules = rules
        self.store = store
        self.tick = tick
        self.changed: Callable[[], None] = lambda: None
        """Called after every new quorum and every eviction."""
        self.naps = 0
        """Suspensions of this process. Quorums during one are not comparable with those of another lighthouse."""
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._loop = asyncio.get_running_loop()
        self._awake = self._loop.time()
        self.state = LighthouseState.restore(store.durable, self._awake)
        self._timer = self._loop.call_later(tick, self.update)
        self._trouble = ""
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._settle(tuple(self._answers), Stopping("this lighthouse is being stopped"))

    # ── requests ──

    def record_heartbeat(self, id: str) -> None:
        """Record a heartbeat; it changes the outcome only if its sender waits and counted as dead."""
        now = self._now()
        late = id in self.state.waiting and id not in self.state.alive(self.rules, now)
        self.state.record_heartbeat(id, now)
        if late:
            self.update()

    async def request_quorum(self, member: Member) -> bytes:
        """The next quorum that contains this replica. If this is cancelled, the replica no longer waits."""
        call = self.state.request_quorum(member, self._now())
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._answers[call] = answer
        try:
            self.update()
            return await answer
        finally:
            del self._answers[call]
            self.state.withdraw(member.id, call)

    def evict(self, ids: Sequence[str], reason: str = "") -> None:
        """Evict these replicas permanently. Repeating it has no effect."""
        evicted = self.state.evict(ids)
        for id, calls in evicted.items():
            self._settle(calls, Evicted(id))
            log.info("%s is evicted%s", id, f": {reason}" if reason else "")
        self.update()
        if evicted:
            self.changed()

    # ── deciding ──

    def update(self) -> None:
        """Form a quorum if there can be one now, and answer its members."""
        self._timer.cancel()
        if self._closed:
            return
        now = self._now()
        decision = decide(self.state, self.rules, now)
        until = now + self.tick
        if isinstance(decision, NotYet):
            until = min(until, decision.until)
            if len(self.state.evicted) > len(self.store.durable.evicted):
                self._write(self.state.durable, "evictions are in force, but not kept")
        else:
            self._write(self.state.after(decision), "no new quorum is announced")
            # Durable before it is announced. One with the number of the last one is durable already.
            if decision.number == self.store.durable.quorum:
                self._announce(decision, now)
        self._timer = self._loop.call_at(until, self.update)

    def _write(self, durable: DurableState, otherwise: str) -> None:
        """Write what is not on disk yet; report once what follows if that fails."""
        if durable == self.store.durable:
            return
        trouble = ""
        try:
            self.store.write(durable)
        except OSError as error:
            trouble = f"cannot write to {self.store.folder}: {error.strerror or error}; {otherwise} until it can"
        if trouble and trouble != self._trouble:
            log.error("%s", trouble)
        elif self._trouble and not trouble:
            log.info("%s can be written to again", self.store.folder)
        self._trouble = trouble

    def _announce(self, quorum: Quorum, now: float) -> None:
        new = quorum.number != self.state.durable.quorum
        calls = self.state.announce(quorum, self.rules, now)
        self._settle(calls, torchft_messages.quorum_response(quorum, time.time()))
        if new:
            log.info("quorum %d: %s (%s)", quorum.number, ", ".join(quorum.ids), render(quorum.reason))
            self.changed()

    def _settle(self, calls: Iterable[int], with_: bytes | Evicted | Stopping) -> None:
        for call in calls:
            answer = self._answers.get(call)
            if answer is None or answer.done():
                continue
            if isinstance(with_, bytes):
                answer.set_result(with_)
            else:
                answer.set_exception(with_)

    def _now(self) -> float:
        """The time. If this process was suspended, that time does not count against any replica."""
        now = self._loop.time()
        nap = now - self._awake - self.tick
        if nap > NAP_SHARE * self.rules.heartbeat_seconds:
            log.warning("this lighthouse was suspended for %.1f s: no replica counts as dead because of it", nap)
            self.naps += 1
            self.state.add_pause(nap)
        self._awake = now
        return now

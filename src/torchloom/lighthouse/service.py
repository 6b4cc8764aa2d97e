"""What a lighthouse does with what it hears: it looks at once whether there is a quorum, keeps it, and answers.

Calls wait as futures, one each. `look` is called whenever something was heard, when the rules say that time alone may
change the outcome, and at every tick; nothing else answers anyone but `evict`, which refuses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torchloom.core.quorum import Lighthouse, Member, NotYet, Quorum, Rules, decide
from torchloom.lighthouse import wire
from torchloom.lighthouse.keeping import Keeping

log = logging.getLogger("torchloom.lighthouse")

NAP_SHARE = 0.25
"""Of the heartbeat timeout: a pause of this process beyond it is one in which it could hear nobody."""


class Evicted(Exception):
    """Who asks was evicted."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"{id} was evicted from the job: it counts as dead. Started again, it gets a new id and may join"
        )


class Stopping(Exception):
    """This lighthouse ends; another may be there soon."""


@dataclass(eq=False)
class Service:
    """Lives on one event loop, whose clock it goes by."""

    rules: Rules
    keeping: Keeping
    tick: float = 0.1
    changed: Callable[[], None] = lambda: None
    """Told of every new quorum and every eviction."""
    state: Lighthouse = field(init=False)
    why: str = "nobody asks for a quorum"
    """What the last look found."""
    naps: int = 0
    _answers: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _timer: asyncio.TimerHandle = field(init=False)
    _awake: float = field(init=False)
    _trouble: str = ""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._awake = self._loop.time()
        self.state = Lighthouse.restored(self.keeping.kept, self._awake)
        self._timer = self._loop.call_later(self.tick, self.look)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._settle(tuple(self._answers), Stopping("this lighthouse is being stopped"))

    # ── what it hears ──

    def heard(self, id: str) -> None:
        """A heartbeat; it matters at once only where its sender waits and was taken for dead."""
        now = self._now()
        late = id in self.state.waiting and id not in self.state.alive(self.rules, now)
        if not self.state.heard(id, now):
            raise Evicted(id)
        if late:
            self.look()

    async def asked(self, member: Member) -> bytes:
        """The next quorum that it is in. Cancelled, it does not wait any more."""
        call = self.state.asked(member, self._now())
        if call is None:
            raise Evicted(member.id)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._answers[call] = answer
        try:
            self.look()
            return await answer
        finally:
            del self._answers[call]
            self.state.withdrawn(member.id, call)

    def evict(self, ids: Sequence[str], reason: str = "") -> None:
        """They are gone for good. Told again, nothing happens."""
        new = [id for id in dict.fromkeys(ids) if id not in self.state.evicted]
        refused = {id: self.state.waiting[id].calls for id in new if id in self.state.waiting}
        self.state.evict(new)
        for id, calls in refused.items():
            self._settle(calls, Evicted(id))
        for id in new:
            log.info("%s is evicted%s", id, f": {reason}" if reason else "")
        self.look()
        if new:
            self.changed()

    # ── deciding ──

    def look(self) -> None:
        """Whether there is a quorum now; if so, whoever is in it hears of it."""
        self._timer.cancel()
        if self._closed:
            return
        now = self._now()
        found = decide(self.state, self.rules, now)
        until = now + self.tick
        if isinstance(found, NotYet):
            self.why = found.why
            until = min(until, found.until)
            self._keep_evictions()
        elif self._kept(found):
            self._announce(found, now)
        self._timer = self._loop.call_at(until, self.look)

    def _keep_evictions(self) -> None:
        if len(self.state.evicted) > len(self.keeping.kept.evicted):
            self._write(None)

    def _kept(self, quorum: Quorum) -> bool:
        """Durable before it is told. A quorum like the last one is already, whatever else there is to keep."""
        if self.state.after(quorum) == self.keeping.kept:
            return True
        return self._write(quorum) or quorum.number == self.keeping.kept.quorum

    def _write(self, quorum: Quorum | None) -> bool:
        try:
            self.keeping.write(self.state.after(quorum) if quorum else self.state.kept)
        except OSError as error:
            what = "no new quorum is announced" if quorum else "evictions are in force, but not kept"
            trouble = f"cannot write to {self.keeping.folder}: {error.strerror or error}; {what} until it can"
            if trouble != self._trouble:
                log.error("%s", trouble)
            self._trouble = self.why = trouble
            return False
        if self._trouble:
            log.info("%s can be written to again", self.keeping.folder)
            self._trouble = ""
        return True

    def _announce(self, quorum: Quorum, now: float) -> None:
        new = quorum.number != self.state.kept.quorum
        calls = self.state.announced(quorum, self.rules, now)
        self._settle(calls, wire.quorum_response(quorum, time.time()))
        self.why = quorum.reason
        if new:
            log.info("quorum %d: %s (%s)", quorum.number, ", ".join(quorum.ids), quorum.reason)
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
        """The time. If this process stood still (stopped, a disk that hung), the clock of everyone else did too."""
        now = self._loop.time()
        nap = now - self._awake - self.tick
        if nap > NAP_SHARE * self.rules.heartbeat_seconds:
            log.warning("this lighthouse stood still for %.1f s: nobody is taken for dead because of it", nap)
            self.naps += 1
            self.state.slept(nap)
        self._awake = now
        return now

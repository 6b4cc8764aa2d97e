"""The quorum rule: when a lighthouse lets torchft's replicas train together. Pure: times are arguments, in seconds.

Replicas send heartbeats, and ask for a quorum before each step. `decide` answers all waiting replicas at once, or says
why not yet. Its rules are those of torchft's own lighthouse:

    alive    a heartbeat came within the heartbeat timeout; a request counts as a heartbeat
    ready    alive and waiting for an answer; in the order of ids
    shrink   if a ready replica asks for shrink_only, only members of the last quorum are taken
    at once  all members of the last quorum are ready
    else     at least min_replicas and more than half of the alive replicas are ready, and either all alive replicas are
             ready, or the ready ones have waited as long as the join timeout
    number   grows when the members differ from the last quorum, or one of them could not commit

and some that it does not have:

    evicted  an evicted member is never alive or ready again, and the last quorum no longer includes it
    gone     a replica that closed its call does not wait any more
    enough   no quorum has fewer than min_replicas members, also when it shrinks
    state    newcomers alone form no quorum while a member of the last quorum is alive, or was until recently: it may be
             delayed in a step, or stopped, and it has the trained parameters
    restart  after a restart, members of the last quorum count as alive, so that no replica continues alone at once
    asleep   time in which the lighthouse itself was suspended does not count against any replica
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from torchloom.protocol.phrase import Phrase, phrase

RECENT = 16
"""Quorums whose members are remembered, so that the loss of one can be reported to the others in it."""
MOST_BROKEN = 100


class Evicted(Exception):
    """The replica that asks was evicted."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"{id} was evicted from the job: it counts as dead. Started again, it gets a new id and may join"
        )


@dataclass(frozen=True)
class Rules:
    min_replicas: int = 1
    join_seconds: float = 60.0
    heartbeat_seconds: float = 5.0
    heir_seconds: float = 45.0
    """How long newcomers wait for a silent member of the last quorum: it may be stopped, and has the parameters."""


@dataclass(frozen=True)
class Member:
    """A replica, as it asks for a quorum."""

    id: str
    data: bytes = b""
    """Its message as it came, to be passed on to the others unchanged."""
    shrink_only: bool = False
    commit_failures: int = 0
    store: str = ""
    """The address of the store in which its ranks meet."""


class DurableState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must survive a restart of the lighthouse."""

    quorum: int = 0
    """The greatest number ever used; 0 before the first quorum."""
    members: tuple[str, ...] = ()
    """The members of that quorum, also those evicted since."""
    evicted: tuple[str, ...] = ()
    """In the order of their eviction."""
    broken: tuple[int, ...] = ()
    """The latest quorums that lost a member."""


@dataclass(frozen=True)
class Quorum:
    number: int
    members: tuple[Member, ...]
    reason: Phrase

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)


@dataclass(frozen=True)
class NotYet:
    why: Phrase
    until: float = math.inf
    """When the outcome may change without another request."""


@dataclass
class Waiting:
    """A replica that waits for an answer; with two calls while the first one is about to time out."""

    member: Member
    since: float
    calls: set[int] = field(default_factory=set)


@dataclass
class LighthouseState:
    """The state of a lighthouse."""

    durable: DurableState = field(default_factory=DurableState)
    heartbeats: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    """The same as in `durable`, for fast lookup."""
    recent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    presumed: set[str] = field(default_factory=set)
    """Members that count as alive since a restart and have sent no heartbeat yet."""
    stores: dict[str, str] = field(default_factory=dict)
    """The store of each replica that has asked."""
    _calls: int = 0

    @classmethod
    def restore(cls, durable: DurableState, now: float) -> LighthouseState:
        """The state after a restart."""
        evicted = set(durable.evicted)
        heartbeats = {id: now for id in durable.members if id not in evicted}
        recent = {durable.quorum: durable.members} if durable.quorum else {}
        return cls(durable, heartbeats, evicted=evicted, recent=recent, presumed=set(heartbeats))

    @property
    def remaining(self) -> tuple[str, ...]:
        """Members of the last quorum that were not evicted."""
        return tuple(id for id in self.durable.members if id not in self.evicted)

    def alive(self, rules: Rules, now: float) -> set[str]:
        return {id for id, at in self.heartbeats.items() if now < at + rules.heartbeat_seconds}  # as in _next_silence

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def record_heartbeat(self, id: str, now: float) -> None:
        """Record a heartbeat. Raises Evicted."""
        if id in self.evicted:
            raise Evicted(id)
        self.heartbeats[id] = now
        self.presumed.discard(id)

    def request_quorum(self, member: Member, now: float) -> int:
        """Register a call that waits for a quorum and return its number. Raises Evicted."""
        self.record_heartbeat(member.id, now)
        self._calls += 1
        self.stores[member.id] = member.store
        before = self.waiting.get(member.id)
        self.waiting[member.id] = Waiting(member, now, (before.calls if before else set()) | {self._calls})
        return self._calls

    def withdraw(self, id: str, call: int) -> None:
        """A call has ended without an answer: its replica closed it, or died."""
        waiting = self.waiting.get(id)
        if waiting is not None:
            waiting.calls.discard(call)
            if not waiting.calls:
                del self.waiting[id]

    def evict(self, ids: Iterable[str]) -> dict[str, set[int]]:
        """Evict members permanently; returns those that were not evicted before, with their calls to be rejected."""
        calls: dict[str, set[int]] = {}
        for id in ids:
            if id in self.evicted:
                continue
            self.evicted.add(id)
            self.heartbeats.pop(id, None)
            self.stores.pop(id, None)
            waiting = self.waiting.pop(id, None)
            calls[id] = waiting.calls if waiting is not None else set()
        lost = [number for number, ids in self.recent.items() if not calls.keys().isdisjoint(ids)]
        broken = tuple(sorted({*self.durable.broken, *lost}))[-MOST_BROKEN:]
        self.durable = msgspec.structs.replace(self.durable, evicted=(*self.durable.evicted, *calls), broken=broken)
        return calls

    def add_pause(self, seconds: float) -> None:
        """Discount a time in which the lighthouse was suspended and received nothing."""
        self.heartbeats = {id: at + seconds for id, at in self.heartbeats.items()}
        for waiting in self.waiting.values():
            waiting.since += seconds

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def after(self, quorum: Quorum) -> DurableState:
        """What must be on disk before the quorum is announced."""
        return msgspec.structs.replace(self.durable, quorum=quorum.number, members=quorum.ids)

    def announce(self, quorum: Quorum, rules: Rules, now: float) -> set[int]:
        """Adopt the quorum; returns the calls to answer. Replicas left out wait on, as if they had asked now."""
        self.durable = self.after(quorum)
        self.recent[quorum.number] = quorum.ids
        while len(self.recent) > RECENT:
            del self.recent[min(self.recent)]
        calls: set[int] = set()
        for id in quorum.ids:
            calls |= self.waiting.pop(id).calls
        for left_out in self.waiting.values():
            left_out.since = now
        alive = self.alive(rules, now)
        self.heartbeats = {id: at for id, at in self.heartbeats.items() if id in alive}
        if len(self.stores) > len(alive):
            self.stores = {id: store for id, store in self.stores.items() if id in alive}
        return calls


def decide(state: LighthouseState, rules: Rules, now: float) -> Quorum | NotYet:
    """The next quorum, or why there is none yet."""
    alive = state.alive(rules, now)
    ready = [state.waiting[id].member for id in sorted(state.waiting) if id in alive]
    if not ready:
        return NotYet(phrase("quorum_not_asked_for"))
    members = tuple(ready)
    if state.durable.quorum and any(member.shrink_only for member in ready):
        members = tuple(member for member in ready if member.id in state.durable.members)
    silence = _next_silence(state, rules, alive)
    if len(members) < rules.min_replicas:
        shrunk = len(members) < len(ready)
        why = phrase(
            "quorum_too_few_of_last" if shrunk else "quorum_too_few", ready=len(members), least=rules.min_replicas
        )
        return NotYet(why, silence)
    missing = set(state.remaining) - {member.id for member in ready}
    at_once = bool(state.remaining) and not missing
    if not at_once:
        if 2 * len(ready) <= len(alive):
            return NotYet(phrase("quorum_no_majority", ready=len(ready), alive=len(alive)), silence)
        heirs = _heirs(state, rules, now)
        if heirs and missing.issuperset(heirs):
            why = phrase("quorum_without_last", ready=len(ready), heirs=len(heirs))
            return NotYet(why, min(silence, *heirs.values()))
        until = min(state.waiting[member.id].since for member in ready) + rules.join_seconds
        if len(ready) < len(alive) and now < until:
            return NotYet(phrase("quorum_waits", ready=len(ready), alive=len(alive)), min(until, silence))
    reason = phrase("quorum_of_last" if at_once else "quorum_of_alive", ready=len(ready), alive=len(alive))
    return Quorum(_number(state.durable, members), members, reason)


def _heirs(state: LighthouseState, rules: Rules, now: float) -> dict[str, float]:
    """Members of the last quorum that may still have the trained parameters, and until when that is assumed."""
    patience = max(rules.heir_seconds, rules.heartbeat_seconds) if rules.heir_seconds else 0.0
    until = {
        id: state.heartbeats[id] + (min(patience, rules.heartbeat_seconds) if id in state.presumed else patience)
        for id in state.remaining
        if id in state.heartbeats
    }
    return {id: at for id, at in until.items() if now < at}


def _next_silence(state: LighthouseState, rules: Rules, alive: set[str]) -> float:
    """When the next alive replica counts as dead if it sends no heartbeat."""
    return min((state.heartbeats[id] for id in alive), default=math.inf) + rules.heartbeat_seconds


def _number(durable: DurableState, members: tuple[Member, ...]) -> int:
    """The number identifies the process group that the members form, so another set must never use the same one."""
    same = durable.quorum > 0 and tuple(member.id for member in members) == durable.members
    return durable.quorum if same and not any(member.commit_failures > 0 for member in members) else durable.quorum + 1

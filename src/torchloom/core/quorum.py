"""Who trains together: what a lighthouse knows of torchft's replicas, and when it lets them form a quorum.

Replicas send heartbeats, and before each step ask for a quorum. `decide` answers all who wait at once, or says why not
yet. Its rules are those of torchft's own lighthouse:

    alive    heard within the heartbeat timeout; asking counts as a heartbeat
    ready    alive and waiting for an answer; in the order of their ids
    shrink   one who is ready wants no newcomers: only members of the last quorum are taken
    at once  all members of the last quorum are ready
    else     ready are min_replicas and more than half of all alive, and every one alive is ready or those that are
             have waited for the others as long as the join timeout
    number   grows when the members are others than last time, or one of them could not commit

and some that it does not have:

    evicted  a member known to be gone: never alive, never ready, and not missed in the last quorum; for ever
    gone     whoever hung up does not wait any more
    enough   no quorum has fewer than min_replicas members, also when it shrinks
    state    none is formed by newcomers alone while one of the last quorum is alive, or was a while ago: he may be held
             up in a step, or stopped, and has the parameters that they would do without
    restart  members of the last quorum count as alive, as if heard that moment: so nobody goes on alone at once
    asleep   time in which the lighthouse itself stood still does not count against anyone

Nothing here knows what time it is: times are passed in, in seconds of any one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

RECENT = 16
"""Quorums whose members are remembered, so that the loss of one can be told to those who are still in them."""
MOST_BROKEN = 100


@dataclass(frozen=True)
class Rules:
    min_replicas: int = 1
    join_seconds: float = 60.0
    heartbeat_seconds: float = 5.0
    heir_seconds: float = 45.0
    """How long newcomers wait for one of the last quorum who is silent: he may be stopped, and has the parameters."""


@dataclass(frozen=True)
class Member:
    """A replica, as it asks for a quorum."""

    id: str
    data: bytes = b""
    """All that it said of itself, to be passed on to the others as it is."""
    shrink_only: bool = False
    commit_failures: int = 0
    store: str = ""
    """Where its ranks meet."""


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What must survive the lighthouse."""

    quorum: int = 0
    """The greatest number ever given; 0: none was."""
    members: tuple[str, ...] = ()
    """Of that quorum, also those evicted since."""
    evicted: tuple[str, ...] = ()
    """In the order in which it was told."""
    broken: tuple[int, ...] = ()
    """The latest quorums that lost a member."""


@dataclass(frozen=True)
class Quorum:
    number: int
    members: tuple[Member, ...]
    reason: str

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)


@dataclass(frozen=True)
class NotYet:
    why: str
    until: float = math.inf
    """When it may be otherwise though nobody has spoken."""


@dataclass
class Waiting:
    """A replica that waits for an answer; perhaps twice, when its first call is about to end."""

    member: Member
    since: float
    calls: set[int] = field(default_factory=set)


@dataclass
class Lighthouse:
    """What a lighthouse knows."""

    kept: Kept = field(default_factory=Kept)
    heartbeats: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    evicted: set[str] = field(default_factory=set)
    """The same as in `kept`, to look up."""
    recent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    presumed: set[str] = field(default_factory=set)
    """Counted as alive since a restart, and not heard yet."""
    stores: dict[str, str] = field(default_factory=dict)
    """Where the ranks of those meet that have asked."""
    _calls: int = 0

    @classmethod
    def restored(cls, kept: Kept, now: float) -> Lighthouse:
        """After a restart."""
        evicted = set(kept.evicted)
        heartbeats = {id: now for id in kept.members if id not in evicted}
        recent = {kept.quorum: kept.members} if kept.quorum else {}
        return cls(kept, heartbeats, evicted=evicted, recent=recent, presumed=set(heartbeats))

    @property
    def remaining(self) -> tuple[str, ...]:
        """Of the last quorum."""
        return tuple(id for id in self.kept.members if id not in self.evicted)

    def alive(self, rules: Rules, now: float) -> set[str]:
        return {id for id, at in self.heartbeats.items() if now < at + rules.heartbeat_seconds}  # as in _next_silence

    # ── what it hears ────────────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, id: str, now: float) -> bool:
        """A heartbeat. False from one that was evicted."""
        if id in self.evicted:
            return False
        self.heartbeats[id] = now
        self.presumed.discard(id)
        return True

    def asked(self, member: Member, now: float) -> int | None:
        """A call that waits for a quorum from now on; None from one that was evicted."""
        if not self.heard(member.id, now):
            return None
        self._calls += 1
        self.stores[member.id] = member.store
        before = self.waiting.get(member.id)
        self.waiting[member.id] = Waiting(member, now, (before.calls if before else set()) | {self._calls})
        return self._calls

    def withdrawn(self, id: str, call: int) -> None:
        """A call has ended without an answer: its replica hung up, or died."""
        waiting = self.waiting.get(id)
        if waiting is not None:
            waiting.calls.discard(call)
            if not waiting.calls:
                del self.waiting[id]

    def evict(self, ids: Iterable[str]) -> set[int]:
        """Members that are gone for good. The calls of theirs that waited, which are to be refused."""
        new = tuple(id for id in dict.fromkeys(ids) if id not in self.evicted)
        self.evicted.update(new)
        calls: set[int] = set()
        for id in new:
            self.heartbeats.pop(id, None)
            self.stores.pop(id, None)
            if (waiting := self.waiting.pop(id, None)) is not None:
                calls |= waiting.calls
        lost = [number for number, ids in self.recent.items() if not set(new).isdisjoint(ids)]
        broken = tuple(sorted({*self.kept.broken, *lost}))[-MOST_BROKEN:]
        self.kept = msgspec.structs.replace(self.kept, evicted=self.kept.evicted + new, broken=broken)
        return calls

    def slept(self, seconds: float) -> None:
        """The lighthouse stood still for so long and could hear nobody."""
        self.heartbeats = {id: at + seconds for id, at in self.heartbeats.items()}
        for waiting in self.waiting.values():
            waiting.since += seconds

    # ── what it has decided ──────────────────────────────────────────────────────────────────────────────────────────

    def after(self, quorum: Quorum) -> Kept:
        """What must be on disk before anyone hears of it."""
        return msgspec.structs.replace(self.kept, quorum=quorum.number, members=quorum.ids)

    def announced(self, quorum: Quorum, rules: Rules, now: float) -> set[int]:
        """It holds. The calls to be answered with it; those left out wait on, as if they had asked now."""
        self.kept = self.after(quorum)
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


def decide(state: Lighthouse, rules: Rules, now: float) -> Quorum | NotYet:
    """The next quorum, or why there is none yet."""
    alive = state.alive(rules, now)
    ready = [state.waiting[id].member for id in sorted(state.waiting) if id in alive]
    if not ready:
        return NotYet("nobody asks for a quorum")
    members = tuple(ready)
    if state.kept.quorum and any(member.shrink_only for member in ready):
        members = tuple(member for member in ready if member.id in state.kept.members)
    silence = _next_silence(state, rules, alive)
    if len(members) < rules.min_replicas:
        shrunk = " of the last quorum" if len(members) < len(ready) else ""
        return NotYet(f"{len(members)}{shrunk} are ready, and min_replicas is {rules.min_replicas}", silence)
    missing = set(state.remaining) - {member.id for member in ready}
    at_once = bool(state.remaining) and not missing
    if not at_once:
        if 2 * len(ready) <= len(alive):
            return NotYet(f"{len(ready)} of {len(alive)} alive are ready, which is not more than half", silence)
        heirs = _heirs(state, rules, now)
        if heirs and missing.issuperset(heirs):
            why = f"{len(ready)} are ready, and none of the last quorum, of which {len(heirs)} may live"
            return NotYet(why, min(silence, *heirs.values()))
        until = min(state.waiting[member.id].since for member in ready) + rules.join_seconds
        if len(ready) < len(alive) and now < until:
            return NotYet(f"{len(ready)} of {len(alive)} alive are ready, and wait for the others", min(until, silence))
    reason = "all of the last quorum are ready" if at_once else f"{len(ready)} of {len(alive)} alive are ready"
    return Quorum(_number(state.kept, members), members, reason)


def _heirs(state: Lighthouse, rules: Rules, now: float) -> dict[str, float]:
    """Those of the last quorum that may still have what was trained, and until when that is assumed."""
    patience = max(rules.heir_seconds, rules.heartbeat_seconds) if rules.heir_seconds else 0.0
    until = {
        id: state.heartbeats[id] + (min(patience, rules.heartbeat_seconds) if id in state.presumed else patience)
        for id in state.remaining
        if id in state.heartbeats
    }
    return {id: at for id, at in until.items() if now < at}


def _next_silence(state: Lighthouse, rules: Rules, alive: set[str]) -> float:
    """When the next one counts as dead if it stays silent."""
    return min((state.heartbeats[id] for id in alive), default=math.inf) + rules.heartbeat_seconds


def _number(kept: Kept, members: tuple[Member, ...]) -> int:
    """The number names what the members use to find each other: others must never use the same."""
    same = kept.quorum > 0 and tuple(member.id for member in members) == kept.members
    return kept.quorum if same and not any(member.commit_failures > 0 for member in members) else kept.quorum + 1

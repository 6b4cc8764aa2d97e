"""A rank's side of a change: pure, so that it can be simulated together with the weaver's side.

A change is proposed for a step S ahead. The rank promises (`Ready`) not to pass S without a verdict. At S it takes the
change if the verdict is commit, and goes on unchanged if it is abort. Without a verdict it may write one, only abort,
and the server lets one verdict win. `boundary` is the next step at which anything is due: all the training loop
compares with at every step.

Two threads use this, never at once (helm.py): the link tells what was heard, the training asks what is due.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from torchloom.knobs import BadValue
from torchloom.messages import Applied, Committed, Propose, Ready, Value, Verdict
from torchloom.threadlet.handover import Handover

NEVER = sys.maxsize
JOURNAL = 256
"""Answers remembered, so that what is asked again is answered again and done once."""


@dataclass
class Pending:
    """A change that is to take effect at a step."""

    change: Committed
    verdict: bool | None = None


@dataclass
class Ramp:
    """A change that takes effect bit by bit."""

    change: Committed
    before: dict[str, Value]


@dataclass
class Steering:
    incarnation: str
    accept: Callable[[Committed], None]
    """Raises BadInput if this rank cannot take such a change."""
    pending: dict[str, Pending] = field(default_factory=dict)
    ramps: list[Ramp] = field(default_factory=list)
    newest: int = 0
    """The number of the newest change of values taken here."""
    paused: bool = False
    boundary: int = NEVER
    journal: dict[str, Applied] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    """Every change taken, with its step: a welcome lists it again, a checkpoint brings it along. An id alone would not
    do: a control plane that was set up anew counts from one again."""
    skipped: dict[str, Committed] = field(default_factory=dict)
    """Changes whose step was passed without a verdict: this rank was cut off."""
    missed: dict[str, Committed] = field(default_factory=dict)
    """Those among them that others did take, and withdrawals heard of when it was too late."""
    given: dict[str, Committed] = field(default_factory=dict)
    """The change that gave each knob its value: an earlier one, heard of late, does not undo it."""

    # ── what is heard ──

    def propose(self, proposal: Propose, step: Callable[[], int]) -> Ready:
        """Promise to stop at the change's step, or say why not. `step` is read after the promise is in force."""
        change = proposal.change
        if self._is_over(change):
            return self._ready(change, step(), why="it is over already")
        promised = self.pending.get(change.id)
        if promised is not None and promised.change == change:
            return self._ready(change, step())  # the promise holds, also while the training waits at that very step
        try:
            self.accept(change)
        except BadValue as error:
            return self._ready(change, step(), why=error.message)
        self.pending[change.id] = Pending(change)
        self._look_ahead()
        # The training counts a step, then looks at the boundary; we set the boundary, then look at the count. One of
        # the two sees the other.
        now = step()
        if now > change.step or (now == change.step and not self.paused):
            del self.pending[change.id]
            self._look_ahead()
            return self._ready(change, now, why=f"step {change.step} is past", late=True)
        return self._ready(change, now)

    def _ready(self, change: Committed, step: int, why: str = "", late: bool = False) -> Ready:
        return Ready(incarnation=self.incarnation, id=change.id, ok=not why, why=why, step=step, late=late)

    def hear(self, verdict: Verdict) -> Applied | None:
        """Learn a verdict; what was done already is answered again."""
        known = self.pending.get(verdict.id)
        if known is not None:
            known.verdict = verdict.commit
            if not verdict.commit:
                del self.pending[verdict.id]
                self._look_ahead()
            return None
        if verdict.commit and verdict.id in self.skipped:
            self._miss(self.skipped[verdict.id])
            return Applied(incarnation=self.incarnation, id=verdict.id, step=0, ok=False, result="its step had passed")
        return self.journal.get(verdict.id)

    def welcome(self, changes: tuple[Committed, ...]) -> None:
        """Changes of the job so far: those of past steps are in force, the others take effect at theirs."""
        for change in changes:
            if not self._is_over(change):
                self.pending.setdefault(change.id, Pending(change)).verdict = True
            elif change.id in self.skipped:
                self._miss(change)
            else:
                self.newest = max(self.newest, change.number)
        self._look_ahead()

    def remember(self, taken: Mapping[str, int]) -> None:
        """Changes taken before this life began, from a checkpoint."""
        self.taken |= taken
        over = tuple(p.change for p in self.pending.values() if self._is_over(p.change))
        for change in over:
            del self.pending[change.id]
        self.welcome(over)

    def adopt(self, theirs: Handover) -> tuple[list[tuple[Committed, Applied]], set[str]]:
        """A rank that heals has passed the steps its peer has passed: what was taken there is taken here.

        The changes that this ends, with their answers, and the knobs that keep the value they have: what gave it to
        them was not taken there, and nothing later was.
        """
        own = {name for name, giver in self.given.items() if not theirs.has(giver) and not _later(theirs, name, giver)}
        self.taken |= theirs.taken
        self.newest = max(self.newest, theirs.newest)
        self.given |= {name: giver for name, giver in theirs.given.items() if name not in own}
        open_here = [*self.skipped.values(), *(pending.change for pending in self.pending.values())]
        ended = []
        for change in filter(theirs.has, open_here):
            self.skipped.pop(change.id, None)
            self.pending.pop(change.id, None)
            lacks = f"healed past step {change.step}" if change.action == "checkpoint" else ""
            ended.append((change, self.done(replace(change, values={}), change.step, ok=not lacks, result=lacks)))
        ramps = [_some(ramp.change, ramp.before, own) for ramp in self.ramps]
        ramps += [_some(ramp.change, ramp.before, set(ramp.change.values) - own) for ramp in theirs.ramps]
        self.ramps = [ramp for ramp in ramps if ramp.change.values]
        self._look_ahead()
        return ended, own

    def _is_over(self, change: Committed) -> bool:
        """Whether its step has been dealt with here, in one way or the other."""
        passed = self.skipped.get(change.id)
        return self.taken.get(change.id) == change.step or (passed is not None and passed.step == change.step)

    def _miss(self, change: Committed) -> None:
        if change.action == "set":
            self.missed[change.id] = change

    @property
    def in_force(self) -> int:
        """The number of the newest change up to which none is missing here: what beats carry."""
        lacking = (change.number for change in list(self.missed.values()) if self._lacks(change))
        return min(self.newest, min(lacking, default=NEVER) - 1)

    def _lacks(self, change: Committed) -> bool:
        """Whether a knob would have another value here if this one had not been missed."""
        kept = any((g.id, g.step) == (change.withdraws, change.step) for g in list(self.given.values()))
        return kept or any(self._would_give(change, name) for name in change.values)

    def _would_give(self, change: Committed, name: str) -> bool:
        giver = self.given.get(name)
        return giver is None or _place(giver) < _place(change)

    # ── what is due ──

    def undecided(self, step: int) -> list[Committed]:
        """Changes whose step has come and whose verdict has not."""
        return [p.change for p in self.pending.values() if p.change.step <= step and p.verdict is None]

    def due(self, step: int) -> list[Committed]:
        """Changes to take now, oldest first. Each is given once."""
        ready = [p.change for p in self.pending.values() if p.change.step <= step and p.verdict]
        for change in ready:
            del self.pending[change.id]
        self._look_ahead()
        withdrawn = {change.withdraws for change in ready}
        taken = [replace(change, values={}, over=0) if change.id in withdrawn else change for change in ready]
        return [self._unreplaced(change) for change in sorted(taken, key=_place)]

    def _unreplaced(self, change: Committed) -> Committed:
        """The change without what a later one has set here already."""
        values = {name: value for name, value in change.values.items() if self._would_give(change, name)}
        return replace(change, values=values)

    def skip(self, change: Committed) -> None:
        """Its step has come, no verdict could be had: go on unchanged."""
        self.pending.pop(change.id, None)
        self.skipped[change.id] = change
        self._look_ahead()

    def holds(self, step: int) -> bool:
        """Whether the training must not leave this step yet."""
        return self.paused or any(p.change.step <= step for p in self.pending.values())

    def done(self, change: Committed, step: int, ok: bool = True, result: str = "") -> Applied:
        answer = Applied(incarnation=self.incarnation, id=change.id, step=step, ok=ok, result=result)
        self.journal[change.id] = answer
        self.taken[change.id] = change.step
        while len(self.journal) > JOURNAL:
            del self.journal[next(iter(self.journal))]
        if change.action == "set":
            self.newest = max(self.newest, change.number)
            self.given |= dict.fromkeys(change.values, change)
            if change.withdraws:
                self._miss(change)  # if that had been taken here already, as it may have been before the news came
        return answer

    def begin_ramp(self, change: Committed, before: dict[str, Value]) -> None:
        self.ramps = [r for r in self.ramps if not set(r.change.values) & set(change.values)]
        if change.over:
            self.ramps.append(Ramp(change, before))
        self._look_ahead()

    def end_ramps(self, step: int) -> None:
        self.ramps = [ramp for ramp in self.ramps if step < ramp.change.step + ramp.change.over]
        self._look_ahead()

    def _look_ahead(self) -> None:
        ahead = [p.change.step for p in self.pending.values()]
        self.boundary = 0 if self.ramps or self.paused else min(ahead, default=NEVER)

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._look_ahead()


def _place(change: Committed) -> tuple[int, int]:
    """In the order in which changes take effect."""
    return change.step, change.number


def _later(theirs: Handover, name: str, giver: Committed) -> bool:
    """Whether a later change gave the knob its value there."""
    return name in theirs.given and _place(giver) < _place(theirs.given[name])


def _some(change: Committed, before: Mapping[str, Value], names: set[str]) -> Ramp:
    """The ramp of these knobs alone."""
    return Ramp(replace(change, values={n: v for n, v in change.values.items() if n in names}), dict(before))

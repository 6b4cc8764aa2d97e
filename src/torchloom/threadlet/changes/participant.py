"""The rank's side of the two-phase commit of a change. Pure, so that it is simulated together with the weaver's side.

A change is proposed for a future step S. The rank promises (`Ready`) not to pass S without a verdict. At S it applies
the change if the verdict is commit, and continues unchanged if it is abort. Without a verdict the rank may write one,
but only abort, and the server lets the first verdict win. `due_step` is the next step at which anything is due: the
only value that the training loop compares with at every step.

Two threads use this, under the lock of StepBoundary: the link thread passes on commands, the training thread asks what
is due.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from torchloom.knob_validation import BadValue
from torchloom.protocol.message import Part
from torchloom.protocol.rank import Applied, ChangeSpec, Ordered, Propose, Ready, Value, Verdict

NEVER = sys.maxsize
JOURNAL = 256
"""Answers kept."""
T = TypeVar("T", Applied, Ordered)


@dataclass
class Pending:
    """A change that is to take effect at a step."""

    change: ChangeSpec
    verdict: bool | None = None


class Ramp(Part, frozen=True):
    """A change that takes effect over several steps."""

    change: ChangeSpec
    before: dict[str, Value]


class Handover(Part, frozen=True):
    """What a rank hands over to a peer that heals from it under torchft, so that both have the same knob values.

    It travels with the parameters that torchft transfers, not through the weaver, so that values and parameters are of
    the same step.
    """

    source: str
    """The replica that hands over."""
    knobs: dict[str, Value]
    newest: int
    """The number of the newest change of values."""
    taken: dict[str, int]
    """Every change taken, with its step."""
    given: dict[str, ChangeSpec]
    """The change that gave each knob its value."""
    ramps: tuple[Ramp, ...]

    def has(self, change: ChangeSpec) -> bool:
        return self.taken.get(change.id) == change.step


@dataclass
class Participant:
    incarnation: str
    accept: Callable[[ChangeSpec], None]
    """Raises BadInput if this rank cannot apply such a change."""
    pending: dict[str, Pending] = field(default_factory=dict)
    ramps: list[Ramp] = field(default_factory=list)
    newest: int = 0
    """The number of the newest change of values applied here."""
    paused: bool = False
    due_step: int = NEVER
    journal: dict[str, Applied] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    """Every applied change with its step: a welcome lists it again, a checkpoint contains it. The id alone is not
    enough: a new control plane counts from one again."""
    skipped: dict[str, ChangeSpec] = field(default_factory=dict)
    """Changes whose step was passed without a verdict, because this rank was cut off."""
    missed: dict[str, ChangeSpec] = field(default_factory=dict)
    """Skipped changes that were committed, and withdrawals that arrived too late."""
    given: dict[str, ChangeSpec] = field(default_factory=dict)
    """The change that set each knob: an earlier one that arrives late does not overwrite it."""

    # ── commands ──

    def propose(self, proposal: Propose, step: Callable[[], int]) -> Ready:
        """Promise to stop at the change's step, or say why not. `step` is read after the promise is recorded."""
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
        self._update_due_step()
        # The training thread counts a step, then reads due_step; this thread sets due_step, then reads the count. At
        # least one of the two sees the other's write.
        now = step()
        if now > change.step or (now == change.step and not self.paused):
            del self.pending[change.id]
            self._update_due_step()
            return self._ready(change, now, why=f"step {change.step} is past", late=True)
        return self._ready(change, now)

    def _ready(self, change: ChangeSpec, step: int, why: str = "", late: bool = False) -> Ready:
        return Ready(incarnation=self.incarnation, id=change.id, ok=not why, why=why, step=step, late=late)

    def hear(self, verdict: Verdict) -> Applied | None:
        """Record a verdict; a change that was applied already is answered again."""
        pending = self.pending.get(verdict.id)
        if pending is not None:
            pending.verdict = verdict.commit
            if not verdict.commit:
                del self.pending[verdict.id]
                self._update_due_step()
            return None
        if verdict.commit and verdict.id in self.skipped:
            self._miss(self.skipped[verdict.id])
            return Applied(incarnation=self.incarnation, id=verdict.id, step=0, ok=False, result="its step had passed")
        return self.journal.get(verdict.id)

    def welcome(self, changes: tuple[ChangeSpec, ...]) -> None:
        """The changes of the job so far: those of past steps are in force, the others take effect at their step."""
        for change in changes:
            if not self._is_over(change):
                self.pending.setdefault(change.id, Pending(change)).verdict = True
            elif change.id in self.skipped:
                self._miss(change)
            else:
                self.newest = max(self.newest, change.number)
        self._update_due_step()

    def remember(self, taken: Mapping[str, int]) -> None:
        """Record changes that were applied before this incarnation, from a checkpoint."""
        self.taken |= taken
        over = tuple(p.change for p in self.pending.values() if self._is_over(p.change))
        for change in over:
            del self.pending[change.id]
        self.welcome(over)

    def adopt(self, theirs: Handover) -> tuple[list[tuple[ChangeSpec, Applied]], set[str]]:
        """Take over the changes of the peer that this rank healed from: it has passed the same steps.

        Returns the open changes that this ends, with their answers, and the knobs that keep their value here: the peer
        has applied neither the change that set them nor a later one.
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
        ramps = [_restrict(ramp, own) for ramp in self.ramps]
        ramps += [_restrict(ramp, set(ramp.change.values) - own) for ramp in theirs.ramps]
        self.ramps = [ramp for ramp in ramps if ramp.change.values]
        self._update_due_step()
        return ended, own

    def _is_over(self, change: ChangeSpec) -> bool:
        """Whether it was applied or skipped here."""
        passed = self.skipped.get(change.id)
        return self.taken.get(change.id) == change.step or (passed is not None and passed.step == change.step)

    def _miss(self, change: ChangeSpec) -> None:
        if change.action == "set":
            self.missed[change.id] = change

    @property
    def in_force(self) -> int:
        """The number of the newest change up to which none is missing here; beats report it."""
        lacking = (change.number for change in list(self.missed.values()) if self._lacks(change))
        return min(self.newest, min(lacking, default=NEVER) - 1)

    def _lacks(self, change: ChangeSpec) -> bool:
        """Whether a knob would have another value here if this change had not been missed."""
        stays = any((g.id, g.step) == (change.withdraws, change.step) for g in list(self.given.values()))
        return stays or any(self._would_give(change, name) for name in change.values)

    def _would_give(self, change: ChangeSpec, name: str) -> bool:
        giver = self.given.get(name)
        return giver is None or _place(giver) < _place(change)

    # ── what is due ──

    def undecided(self, step: int) -> list[ChangeSpec]:
        """Changes that are due and have no verdict."""
        return [p.change for p in self.pending.values() if p.change.step <= step and p.verdict is None]

    def due(self, step: int) -> list[ChangeSpec]:
        """Changes to apply now, oldest first. Each is returned once."""
        ready = [p.change for p in self.pending.values() if p.change.step <= step and p.verdict]
        for change in ready:
            del self.pending[change.id]
        self._update_due_step()
        withdrawn = {change.withdraws for change in ready}
        taken = [replace(change, values={}, over=0) if change.id in withdrawn else change for change in ready]
        return [self._unreplaced(change) for change in sorted(taken, key=_place)]

    def _unreplaced(self, change: ChangeSpec) -> ChangeSpec:
        """The change without the knobs that a later one has set here already."""
        values = {name: value for name, value in change.values.items() if self._would_give(change, name)}
        return replace(change, values=values)

    def skip(self, change: ChangeSpec) -> None:
        """Continue without this change: it is due and no verdict could be obtained."""
        self.pending.pop(change.id, None)
        self.skipped[change.id] = change
        self._update_due_step()

    def holds(self, step: int) -> bool:
        """Whether the training must not leave this step yet."""
        return self.paused or any(p.change.step <= step for p in self.pending.values())

    def done(self, change: ChangeSpec, step: int, ok: bool = True, result: str = "", pending: bool = False) -> Applied:
        answer = Applied(incarnation=self.incarnation, id=change.id, step=step, ok=ok, result=result, pending=pending)
        keep_answer(self.journal, answer)
        self.taken[change.id] = change.step
        if change.action == "set":
            self.newest = max(self.newest, change.number)
            self.given |= dict.fromkeys(change.values, change)
            if change.withdraws:
                self._miss(change)  # the withdrawn change may have been applied here before this one arrived
        return answer

    def begin_ramp(self, change: ChangeSpec, before: dict[str, Value]) -> None:
        self.ramps = [r for r in self.ramps if not set(r.change.values) & set(change.values)]
        if change.over:
            self.ramps.append(Ramp(change=change, before=before))
        self._update_due_step()

    def end_ramps(self, step: int) -> None:
        self.ramps = [ramp for ramp in self.ramps if step < ramp.change.step + ramp.change.over]
        self._update_due_step()

    def _update_due_step(self) -> None:
        ahead = [p.change.step for p in self.pending.values()]
        self.due_step = 0 if self.ramps or self.paused else min(ahead, default=NEVER)

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._update_due_step()


def keep_answer(journal: dict[str, T], answer: T) -> None:
    """Keep an answer, so that a repeated command is answered again and carried out once; the oldest are dropped."""
    journal[answer.id] = answer
    while len(journal) > JOURNAL:
        del journal[next(iter(journal))]


def _place(change: ChangeSpec) -> tuple[int, int]:
    """Sort key: the order in which changes take effect."""
    return change.step, change.number


def _later(theirs: Handover, name: str, giver: ChangeSpec) -> bool:
    """Whether a later change set the knob at the peer."""
    return name in theirs.given and _place(giver) < _place(theirs.given[name])


def _restrict(ramp: Ramp, names: set[str]) -> Ramp:
    """The ramp of these knobs alone."""
    values = {name: value for name, value in ramp.change.values.items() if name in names}
    return replace(ramp, change=replace(ramp.change, values=values))

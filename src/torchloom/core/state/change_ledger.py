"""The ledger: the knobs of each job, every change and order, and its outcome. The durable part.

proposed ──verdict──> committed ──all have answered──> settled
    └────verdict──> aborted
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from torchloom.protocol import records
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import ChangeSpec, KnobSpec, Value
from torchloom.protocol.views import KnobState

KEEP_CHANGES = 200
"""Ended changes and orders of one job before the oldest is forgotten; those still in force stay."""


class ChangePhase(StrEnum):
    PROPOSED = "proposed"
    COMMITTED = "committed"
    ABORTED = "aborted"
    SETTLED = "settled"


CHANGE_NEXT: Mapping[tuple[ChangePhase, str], ChangePhase] = {
    (ChangePhase.PROPOSED, "commit"): ChangePhase.COMMITTED,
    (ChangePhase.PROPOSED, "abort"): ChangePhase.ABORTED,
    (ChangePhase.COMMITTED, "settle"): ChangePhase.SETTLED,
}


class Change(records.ChangeProposed, frozen=True, kw_only=True):
    """A change as it was proposed, and what came of it."""

    asked: float
    phase: ChangePhase = ChangePhase.PROPOSED
    outcome: Prose = ""
    applied: int = 0
    failed: int = 0
    pending: bool = False
    """Its checkpoint was still being written when it settled."""
    reverted_by: str = ""

    @property
    def id(self) -> str:
        return self.change.id

    @property
    def ended(self) -> bool:
        """No rank is asked any more."""
        return self.phase in {ChangePhase.ABORTED, ChangePhase.SETTLED}

    @property
    def takes_effect(self) -> bool:
        return self.phase in {ChangePhase.COMMITTED, ChangePhase.SETTLED}

    def is_for(self, rank: RankId) -> bool:
        return self.job == rank.job and self.replica in {None, rank.replica} and self.rank in {None, rank.rank}


def abort_phrase(abort: records.Abort) -> Phrase:
    return phrase(f"change_{abort.why}", ranks=sorted(abort.ranks), refusal=abort.refusal)


class GivenOrder(records.OrderGiven, frozen=True, kw_only=True):
    """An order as it was given, and what came of it."""

    asked: float
    outcome: Prose = ""
    """Empty while answers are awaited."""
    ok: bool = True
    applied: int = 0
    """The number of ranks that confirmed; one that is gone may have obeyed without a reply, or never received it."""

    @property
    def ended(self) -> bool:
        return bool(self.outcome)


class Ledger(msgspec.Struct, kw_only=True):
    change_count: int = 0
    order_count: int = 0
    knobs: dict[str, dict[str, KnobState]] = {}
    """By job and name."""
    checkpointers: set[str] = set()
    """Jobs that can save a checkpoint when asked."""
    changes: dict[str, Change] = {}
    orders: dict[str, GivenOrder] = {}

    def copy(self) -> Ledger:
        """For a snapshot. What it contains is frozen."""
        knobs = {job: dict(knobs) for job, knobs in self.knobs.items()}
        changes, orders = dict(self.changes), dict(self.orders)
        return replace(self, knobs=knobs, checkpointers=set(self.checkpointers), changes=changes, orders=orders)

    # ── looking things up ──

    def of_job(self, job: str) -> Iterable[Change]:
        return (change for change in self.changes.values() if change.job == job)

    def value_of(self, job: str, replica: str | None, rank: int | None, name: str) -> Value:
        """What a knob is set to for a target: by the latest change that reaches all of it, else as it was offered."""
        giver = self.giver(job, replica, rank, name)
        return giver.change.values[name] if giver else self.knobs[job][name].spec.value

    def values_of(self, job: str, replica: str | None, rank: int | None) -> dict[str, Value]:
        return {name: self.value_of(job, replica, rank, name) for name in self.knobs.get(job, {})}

    def specs(self, job: str) -> dict[str, KnobSpec]:
        return {name: knob.spec for name, knob in self.knobs.get(job, {}).items()}

    def giver(self, job: str, replica: str | None, rank: int | None, name: str) -> Change | None:
        """The latest change of a knob that reaches all of a target."""
        for change in reversed(self.changes.values()):
            wide = change.job == job and change.replica in {None, replica} and change.rank in {None, rank}
            if wide and change.takes_effect and not change.reverted_by and name in change.change.values:
                return change
        return None

    def overwritten_by_revert(self, change: Change, before: float = math.inf) -> tuple[str, ...]:
        """Later changes, up to one of this number, that have set a knob of this change to another value."""
        ours = change.change
        return tuple(
            later.id
            for later in self.of_job(change.job)
            if ours.number < later.change.number < before and later.change.step >= ours.step
            and later.takes_effect and not later.reverted_by
            and (change.replica in {None, later.replica} or later.replica is None)
            and (change.rank in {None, later.rank} or later.rank is None)
            and any(name in ours.values and value != ours.values[name] for name, value in later.change.values.items())
        )  # fmt: skip

    def under_way(self, job: str) -> Change | None:
        """The change of a job that has no verdict yet; there is one at most."""
        return next((change for change in self.of_job(job) if change.phase is ChangePhase.PROPOSED), None)

    def change_of(self, request: str) -> Change | None:
        """What a request led to, the latest attempt if there were several."""
        return next((change for change in reversed(self.changes.values()) if change.request == request), None)

    def order_of(self, request: str) -> GivenOrder | None:
        return next((order for order in reversed(self.orders.values()) if order.request == request), None)

    def kills(self, rank: RankId, life: str) -> Iterable[GivenOrder]:
        """Orders to kill this incarnation."""
        return (order for order in self.orders.values() if order.verb == "kill" and (rank, life) in order.lives)

    def in_force(self, rank: RankId) -> tuple[ChangeSpec, ...]:
        """Changes of values that a rank has, or will have at their steps, oldest first; what was reverted is not."""
        return tuple(
            change.change
            for change in self.of_job(rank.job)
            if change.takes_effect and change.change.action == "set" and not change.reverted_by and change.is_for(rank)
        )

    # ── fold ──

    def fold(self, record: records.ChangeRecord, at: float) -> Change | GivenOrder | None:
        """Returns the change or order that the record is about."""
        match record:
            case records.KnobsOffered():
                self._offer(record)
                return None
            case records.ChangeProposed(change=spec):
                self.change_count = max(self.change_count, spec.number)
                self.changes[spec.id] = change = Change.from_fields(record, asked=at)
                return change
            case records.ChangeDecided():
                return self._decide(record)
            case records.ChangeSettled(id=id):
                phase = CHANGE_NEXT[(self.changes[id].phase, "settle")]
                self.changes[id] = change = self.changes[id].with_fields(record, phase=phase)
                self._trim(change.job)
                return change
            case records.OrderGiven(id=id):
                self.order_count = max(self.order_count, int(id[1:]))
                self.orders[id] = order = GivenOrder.from_fields(record, asked=at)
                return order
            case records.OrderEnded(id=id):
                self.orders[id] = order = self.orders[id].with_fields(record)
                ended = [o.id for o in self.orders.values() if o.job == order.job and o.ended]
                for old in ended[:-KEEP_CHANGES]:
                    del self.orders[old]
                return order

    def _offer(self, record: records.KnobsOffered) -> None:
        knobs = self.knobs.setdefault(record.job, {})
        for spec in record.knobs:
            knob = knobs.get(spec.name)
            knobs[spec.name] = replace(knob, spec=spec) if knob else KnobState(spec=spec, value=spec.value)
        if record.checkpoints:
            self.checkpointers.add(record.job)

    def _decide(self, record: records.ChangeDecided) -> Change:
        change = self.changes[record.id]
        phase = CHANGE_NEXT[(change.phase, "commit" if record.commit else "abort")]
        why_not = abort_phrase(record.abort) if record.abort is not None else ""
        outcome = phrase("all_ranks_ready") if record.commit else why_not
        self.changes[record.id] = change = replace(change, phase=phase, outcome=outcome)
        if not record.commit:
            self._trim(change.job)
            return change
        if change.reverts in self.changes:
            self.changes[change.reverts] = replace(self.changes[change.reverts], reverted_by=change.id)
        knobs = self.knobs.get(change.job, {})
        withdrawn = self.changes.get(change.change.withdraws)
        names = withdrawn.change.values if withdrawn else change.change.values
        for name in names:
            if name in knobs and change.rank is None:
                giver = self.giver(change.job, change.replica, None, name)
                value = giver.change.values[name] if giver else knobs[name].spec.value
                knobs[name] = replace(knobs[name], value=value, change=giver.id if giver else "")
        return change

    def forget(self, job: str) -> None:
        """A new run of the job begins, or the job is forgotten: nothing of the last one counts."""
        self.knobs.pop(job, None)
        self.checkpointers.discard(job)
        self.changes = {id: change for id, change in self.changes.items() if change.job != job}
        self.orders = {id: order for id, order in self.orders.items() if order.job != job}

    def _replaced(self, change: Change) -> bool:
        """Whether a later change of the same ranks has set all that it set."""
        later = [
            c.change.values
            for c in self.of_job(change.job)
            if c.takes_effect and c.change.number > change.change.number and not c.reverted_by
            and (c.replica, c.rank) in {(None, None), (change.replica, change.rank)}
        ]  # fmt: skip
        return all(any(name in values for values in later) for name in change.change.values)

    def _trim(self, job: str) -> None:
        ended = [c for c in self.of_job(job) if c.ended]
        idle = [c for c in ended if not c.takes_effect or c.change.action != "set" or c.reverted_by]
        replaced = [c for c in ended if c not in idle and self._replaced(c)] if len(ended) > KEEP_CHANGES else []
        for old in idle[:-KEEP_CHANGES] + replaced[:-KEEP_CHANGES]:
            del self.changes[old.id]

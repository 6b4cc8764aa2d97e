"""Records of the log as rows of `events.csv`: pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torchloom.knob_validation import LOADERS
from torchloom.protocol import run_records as runs
from torchloom.protocol.operator import JobAnnotated
from torchloom.protocol.rank import CheckpointSaved
from torchloom.protocol.records import (
    ChangeProposed,
    ChangeSettled,
    IncidentOpened,
    JobBegan,
    JobEnded,
    OrderEnded,
    OrderGiven,
    Record,
)
from torchloom.protocol.scheduling import LoadersAllocated
from torchloom.views.wording.phrases import render


class TraceEvent(NamedTuple):
    event: str
    target: str
    step: int | None = None
    before: int | None = None
    after: int | None = None
    seconds: float | None = None
    detail: str = ""


@dataclass(slots=True)
class EventReader:
    """Of one job. It remembers what later records only name by an id."""

    job: str
    _changes: dict[str, ChangeProposed] = field(default_factory=dict)
    _resumes: dict[str, OrderGiven] = field(default_factory=dict)

    def read(self, record: Record) -> Iterator[TraceEvent]:
        match record:
            case JobBegan(job=job):
                yield TraceEvent("began", job)
            case JobEnded(job=job, outcome=outcome, reason=reason, step=step):
                yield TraceEvent("ended", job, step, detail=_join(outcome, render(reason)))
            case runs.RunSubmitted(job=job, task=task):
                yield TraceEvent("submitted", job, detail=record.operator)
                if not task.delay and not task.after:
                    yield TraceEvent("arrived", job)
            case runs.RunArrived(job=job):
                yield TraceEvent("arrived", job)
            case runs.AttemptBegan(job=job):
                yield TraceEvent("placed", job, detail=" ".join(dict.fromkeys(place.node for place in record.places)))
            case runs.AttemptRunning(job=job):
                yield TraceEvent("running", job)
            case runs.AttemptStepped(job=job, seconds=seconds):
                yield TraceEvent("first_steps", job, seconds=seconds)
            case runs.ReleaseBegan(job=job):
                yield TraceEvent("release_requested", job, detail=record.operator or render(record.reason))
            case runs.AttemptStopping(job=job, step=step):
                yield TraceEvent("stopping", job, step, detail=_join(record.next_action, render(record.reason)))
            case runs.AttemptReleased(job=job):
                yield TraceEvent("released", job)
            case runs.RunResumed(job=job):
                yield TraceEvent("resume_requested", job, detail=record.operator)
            case runs.AttemptEnded(job=job):
                yield TraceEvent("attempt_ended", job)
            case runs.RunEnded(job=job, phase=phase, step=step):
                yield TraceEvent("ended", job, step, detail=_join(phase, render(record.reason)))
            case LoadersAllocated():
                yield from self._read_allocation(record)
            case ChangeProposed(change=change) if change.action == "pause" or LOADERS in change.values:
                self._changes[change.id] = record
            case ChangeSettled(id=id) if id in self._changes:
                yield from self._read_change(self._changes.pop(id), record)
            case OrderGiven(verb="resume", id=id):
                self._resumes[id] = record
            case OrderEnded(id=id, applied=applied) if id in self._resumes:
                order = self._resumes.pop(id)
                if applied:
                    yield TraceEvent("continued", self.job, detail=order.operator)
            case CheckpointSaved(step=step, stall=stall, rank=rank):
                yield TraceEvent("checkpoint", str(rank), step, seconds=stall)
            case IncidentOpened(what=what):
                yield TraceEvent("incident", self.job, detail=_join(record.kind, render(what)))
            case JobAnnotated(text=text):
                yield TraceEvent("note", self.job, detail=text)

    def _read_allocation(self, record: LoadersAllocated) -> Iterator[TraceEvent]:
        why = f"{record.policy}: {', '.join(record.triggers)}"
        gain = "" if record.gain is None else f"{record.gain:+.1%} predicted"
        for move in record.moves:
            if move.job == self.job:
                yield TraceEvent(
                    "allocated", self.job, before=move.before, after=move.loaders, detail=_join(why, gain, mark="; ")
                )

    def _read_change(self, proposed: ChangeProposed, settled: ChangeSettled) -> Iterator[TraceEvent]:
        step, target = proposed.change.step, proposed.target
        if LOADERS not in proposed.change.values:
            if settled.applied:
                yield TraceEvent("paused", target, step, detail=proposed.operator)
            return
        before, after = _number(proposed.before.get(LOADERS)), _number(proposed.change.values[LOADERS])
        if settled.applied:
            yield TraceEvent("resized", target, step, before, after, detail=proposed.operator)
        else:
            yield TraceEvent("resize_failed", target, step, before, after, detail=render(settled.outcome))


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _join(first: str, second: str, mark: str = ": ") -> str:
    return mark.join(filter(None, (first, second)))

"""Runs in words: what a run does, how it ended, where its time went; and the same of several runs that are one job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from torchloom.core.state.run_states import LIGHTHOUSE
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import Goodput, IncidentView, RunView
from torchloom.views.format.numbers import duration

OVER = frozenset({"done", "failed", "cancelled"})
INTERRUPTED = 130
_REASONS = 3
"""Of restarts, told one by one."""
_CAUSES = {
    "waiting": "waiting for room",
    "redone": "steps that had to be done again",
    "moving": "moving off a node that left",
    "node": "lost nodes",
    "not_finite": "numbers that were not finite",
    "loss_spike": "jumps of the loss",
    "device_warning": "device warnings",
}
_LEAST_SECONDS = 0.05
_COUNTDOWNS = frozenset({"arrives_in", "waits_longer"})


def describe_run(run: RunView) -> str:
    """What it does now: `mnist is running: attempt 2 on n1, n2, from step 1,500`."""
    if run.waiting:
        return f"{run.job} waits for {run.waiting}"
    text = f"{run.job} is {run.phase}"
    if run.phase in OVER:
        return f"{text}: {run.reason}" if run.reason and run.phase != "done" else text
    if run.places:
        text += f": attempt {run.attempt} on {', '.join(dict.fromkeys(place.node for place in run.places))}"
        if run.resume_step is not None:
            text += f", from step {run.resume_step:,}"
    if run.phase in {"stopping", "restarting", "released"} and run.reason:
        text += f" ({run.reason})"
    return text


def describe_deadline(run: RunView, now: float) -> str:
    """Whether it can still meet its deadline: `its deadline is in 5 min`, `its deadline passed 2 s ago`."""
    if not run.task.deadline or not run.arrived:
        return ""
    over = run.phase in OVER
    left = run.arrived + run.task.deadline - ((run.notes[-1].ended or now) if over and run.notes else now)
    if left < 0:
        return f"its deadline passed {duration(-left)} {'before it ended' if over else 'ago'}"
    return "" if over else f"its deadline is in {duration(left)}"


def awaited(run: RunView) -> str:
    """What it waits for, without what changes each second: people read it again only when this has changed."""
    return run.waiting_code if run.waiting_code in _COUNTDOWNS else run.waiting


def summarize_run(run: RunView, now: float, incidents: Sequence[IncidentView] = ()) -> str:
    """What happened: how it ended, how far it came, how long it took, how often it was started again and what for.

    Its incidents tell when the first sign of each trouble was; without them that is when ranks were ended.
    """
    parts = [describe_run(run)]
    if run.step:
        parts.append(f"step {run.step:,}")
    took = (run.notes[-1].ended or now) - (run.arrived or run.submitted) if run.notes else 0.0
    parts.append(f"{took:.1f} s")
    stopped = [(note, after) for note, after in pairwise(run.notes) if note.stopping is not None]
    pairs = [(note, after) for note, after in stopped if note.next_action != "release"]
    if pairs:
        again = [note for note, _ in pairs]
        lost = sum((after.running or after.began) - _first_sign(note, incidents) for note, after in pairs)
        count, since = ("1 restart", "its first sign") if len(again) == 1 else (f"{len(again)} restarts", "first signs")
        parts.append(f"{count}{_causes(again, parts[0])}, {lost:.1f} s from {since} until all ranks ran again")
        if run.goodput is not None and run.goodput.elapsed > 0:
            parts.append(f"{_share(run.goodput)} of the time productive")
    return ", ".join(parts)


def _causes(again: Sequence[AttemptNote], summary: str) -> str:
    """Of the last restarts, each cause once, and none that is in the summary already."""
    reasons = [str(note.reason) for note in again[-_REASONS:] if note.reason]  # the weaver has rendered them
    causes = [reason for reason in reasons if reason not in summary]
    if not causes:
        return " for the same cause" if any(note.reason for note in again) else ""
    more = f"{len(again) - _REASONS} more before; " if len(again) > _REASONS else ""
    return f" ({more}{'; '.join(dict.fromkeys(causes))})"


def _first_sign(note: AttemptNote, incidents: Sequence[IncidentView]) -> float:
    """Of what an attempt was ended for."""
    signs = [incident.opened for incident in incidents if incident.id == note.incident]
    return min([note.stopping or 0.0, *signs])


def exit_code(run: RunView) -> int:
    """As the job ended."""
    if run.phase == "done":
        return 0
    if run.phase == "cancelled":
        return INTERRUPTED
    return run.notes[-1].code if run.notes and run.notes[-1].code else 1


def replicas(runs: Sequence[RunView]) -> list[RunView]:
    """In which ranks train; what was asked for by its own name, whatever it is."""
    return [run for run in runs if run.task.replica != LIGHTHOUSE] or list(runs)


def label(run: RunView) -> str:
    """What a replica is called beside others: `0`; nothing where there is one."""
    return "" if run.task.part_of is None else run.job.removeprefix(f"{run.task.part_of}:")


def are_over(runs: Sequence[RunView]) -> bool:
    return bool(runs) and all(run.phase in OVER for run in runs)


def group_code(runs: Sequence[RunView]) -> int:
    """As the job ended: well, if enough of its replicas did."""
    if len(runs) == 1:  # all of it, or the one that was asked for
        return exit_code(runs[0])
    there = replicas(runs)
    done = sum(run.phase == "done" for run in there)
    ft = there[0].task.torchft
    if done >= (ft.min_replicas if ft is not None else 1):
        return 0
    bad = [run for run in there if run.phase == "failed"]
    return exit_code(bad[0]) if bad else INTERRUPTED


def summarize_job(job: str, runs: Sequence[RunView], now: float, incidents: Sequence[IncidentView] = ()) -> str:
    if len(runs) == 1:
        return summarize_run(runs[0], now, incidents)
    there = replicas(runs)
    ends = {phase: sum(run.phase == phase for run in there) for phase in ("done", "failed", "cancelled")}
    counts = ", ".join(f"{count} {phase}" for phase, count in ends.items() if count)
    took = max((run.notes[-1].ended or now) - (run.arrived or run.submitted) if run.notes else 0.0 for run in there)
    parts = [f"{job}: of {len(there)} replicas {counts}", f"step {max(run.step for run in there):,}", f"{took:.1f} s"]
    again = sum(max(0, len(run.notes) - 1) for run in there)
    if again:
        parts.append(f"{again} restart{'s' if again != 1 else ''}, while the others continued")
    reasons = [f"{label(run)}: {run.reason}" for run in there if run.phase == "failed"]
    return ", ".join(parts) + (f" ({'; '.join(reasons)})" if reasons else "")


def goodput(view: Goodput) -> str:
    """`92 % of 1 h 3 min was productive; lost: hang 3 min 2 s, starting 12 s`."""
    text = f"{_share(view)} of {duration(view.elapsed)} was productive"
    causes = sorted(view.lost.items(), key=lambda item: -item[1])
    lost = [f"{_CAUSES.get(cause, cause)} {duration(seconds)}" for cause, seconds in causes if seconds > _LEAST_SECONDS]
    return f"{text}; lost: {', '.join(lost)}" if lost else text


def together(views: Iterable[Goodput]) -> Goodput | None:
    """Of several replicas: their mean, so that the time of the job is not counted once for each of them."""
    goodputs = list(views)
    if not goodputs:
        return None
    causes = {cause for view in goodputs for cause in view.lost}
    return Goodput(
        elapsed=fmean(view.elapsed for view in goodputs),
        productive=fmean(view.productive for view in goodputs),
        lost={cause: fmean(view.lost.get(cause, 0.0) for view in goodputs) for cause in sorted(causes)},
    )


def _share(view: Goodput) -> str:
    return f"{view.productive / view.elapsed:.0%}".replace("%", " %") if view.elapsed > 0 else "0 %"

"""A run in words: what it is doing, how it ended, and the exit code that goes with that."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import IncidentView, RunView

OVER = frozenset({"done", "failed", "cancelled"})
INTERRUPTED = 130
_REASONS = 3
"""Of restarts, told one by one."""


def told(run: RunView) -> str:
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
    if run.phase in {"stopping", "restarting"} and run.reason:
        text += f" ({run.reason})"
    return text


def summary(run: RunView, now: float, incidents: Sequence[IncidentView] = ()) -> str:
    """What happened: how it ended, how far it came, how long it took, how often it was started again and what for.

    Its incidents tell when the first sign of each trouble was; without them that is when ranks were ended.
    """
    parts = [told(run)]
    if run.step:
        parts.append(f"step {run.step:,}")
    took = (run.notes[-1].ended or now) - run.submitted if run.notes else 0.0
    parts.append(f"{took:.1f} s")
    again = [note for note in run.notes[:-1] if note.stopping is not None]
    if again:
        lost = sum((after.running or after.began) - _first_sign(note, incidents) for note, after in _pairs(run))
        count, since = ("1 restart", "its first sign") if len(again) == 1 else (f"{len(again)} restarts", "first signs")
        parts.append(f"{count}{_causes(again, parts[0])}, {lost:.1f} s from {since} until all ranks ran again")
        if run.goodput is not None and run.goodput.elapsed > 0:
            parts.append(f"{100 * run.goodput.productive / run.goodput.elapsed:.0f} % of the time productive")
    return ", ".join(parts)


def _causes(again: Sequence[AttemptNote], said: str) -> str:
    """Of the last restarts, each cause once, and none that was said already."""
    reasons = [str(note.reason) for note in again[-_REASONS:] if note.reason]  # the weaver has rendered them
    told = [reason for reason in reasons if reason not in said]
    if not told:
        return " for the same cause" if any(note.reason for note in again) else ""
    more = f"{len(again) - _REASONS} more before; " if len(again) > _REASONS else ""
    return f" ({more}{'; '.join(dict.fromkeys(told))})"


def _first_sign(note: AttemptNote, incidents: Sequence[IncidentView]) -> float:
    """Of what an attempt was ended for."""
    signs = [incident.opened for incident in incidents if incident.id == note.incident]
    return min([note.stopping or 0.0, *signs])


def _pairs(run: RunView) -> list[tuple[AttemptNote, AttemptNote]]:
    """Each attempt that was ended, and the one that followed."""
    return [(a, b) for a, b in zip(run.notes, run.notes[1:], strict=False) if a.stopping is not None]


def exit_code(run: RunView) -> int:
    """As the job ended."""
    if run.phase == "done":
        return 0
    if run.phase == "cancelled":
        return INTERRUPTED
    return run.notes[-1].code if run.notes and run.notes[-1].code else 1

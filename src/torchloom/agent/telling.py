"""A run in words: what it is doing, how it ended, and the exit code that goes with that."""

from __future__ import annotations

from torchloom.messages import AttemptNote, RunView

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


def summary(run: RunView, now: float) -> str:
    """What happened: how it ended, how far it came, how long it took, how often it was started again and what for."""
    parts = [told(run)]
    if run.step:
        parts.append(f"step {run.step:,}")
    took = (run.notes[-1].ended or now) - run.submitted if run.notes else 0.0
    parts.append(f"{took:.1f} s")
    again = [note for note in run.notes[:-1] if note.stopping is not None]
    if again:
        lost = sum((after.running or after.began) - (note.stopping or 0.0) for note, after in _pairs(run))
        why = "; ".join(note.reason for note in again[-_REASONS:])
        more = f"{len(again) - _REASONS} more before; " if len(again) > _REASONS else ""
        count = f"{len(again)} restart{'s' if len(again) != 1 else ''}"
        parts.append(f"{count} ({more}{why}), {lost:.1f} s until all ranks ran again")
        if run.goodput is not None and run.goodput.elapsed > 0:
            parts.append(f"{run.goodput.productive / run.goodput.elapsed:.0%} of the time productive")
    return ", ".join(parts)


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

"""Checkpoints of a job that others started: one that does not come is told, unless the job is paused."""

from __future__ import annotations

from tests.core.loom import HI, Loom, life
from torchloom.core.events import BeatReceived, FindingsMade, ReportReceived
from torchloom.core.incidents.periodic_checks import look_around
from torchloom.protocol.rank import Beat, Saved, StepTimes

TIMES = StepTimes(count=10, p50=0.1, p99=0.1, longest=0.1)


def passed(
    loom: Loom, seconds: int, *, number: int = 1, paused: bool = False, steps: bool = True, beats: bool = True
) -> list[str]:
    """The kinds of what is found meanwhile."""
    kinds: list[str] = []
    for _ in range(0, seconds, 5):
        loom.now += 5
        times = TIMES if steps else None
        if beats:
            loom.happen(BeatReceived(HI, Beat(incarnation=life(number), step=1, paused=paused, times=times)))
        for event in [event for events in look_around(loom.cluster, loom.now) for event in events]:
            kinds += [one.kind for one in event.findings] if isinstance(event, FindingsMade) else []
            loom.happen(event)
    return kinds


def saving(loom: Loom) -> None:
    loom.join(HI)
    for step in range(5):
        assert passed(loom, 100) == []
        loom.happen(ReportReceived(HI, Saved(incarnation=life(1), step=step, folder="/runs/a", size=1, seconds=1.0)))


def test_a_long_pause_makes_no_checkpoint_overdue_but_training_on_without_one_does() -> None:
    loom = Loom()
    saving(loom)
    assert passed(loom, 5000, paused=True) == []
    assert passed(loom, 250) == []
    assert passed(loom, 100) == ["overdue"]


def test_neither_the_time_between_two_runs_nor_that_before_the_first_step_makes_a_checkpoint_overdue() -> None:
    loom = Loom()
    saving(loom)
    assert passed(loom, 250) == []
    loom.leave(HI)
    assert passed(loom, 5000, beats=False) == []
    loom.join(HI, number=2, link="s:2")
    assert passed(loom, 5000, number=2, steps=False) == []
    assert passed(loom, 250, number=2) == [], "counted from the first step"
    assert passed(loom, 100, number=2) == ["overdue"]


def test_a_run_that_follows_at_once_is_not_charged_with_the_time_since_the_last_checkpoint() -> None:
    loom = Loom()
    saving(loom)
    assert passed(loom, 250) == []
    loom.join(HI, number=2, link="s:2")
    assert passed(loom, 5, number=2, steps=False) == []
    assert passed(loom, 250, number=2) == []

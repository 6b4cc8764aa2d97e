"""Checkpoints of a job that others started: one that does not come is told, unless the job is paused."""

from __future__ import annotations

from tests.core.loom import HI, Loom, life
from torchloom.core.events import BeatReceived, FindingsMade, ReportReceived
from torchloom.core.incidents.periodic_checks import look_around
from torchloom.protocol.rank import Beat, Saved


def passed(loom: Loom, seconds: int, *, paused: bool = False) -> list[str]:
    """The kinds of what is found meanwhile."""
    kinds: list[str] = []
    for _ in range(0, seconds, 5):
        loom.now += 5
        loom.happen(BeatReceived(HI, Beat(incarnation=life(1), step=1, paused=paused)))
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

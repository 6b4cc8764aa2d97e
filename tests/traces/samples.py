"""Beats, records and views made by hand, for tests of traces."""

from __future__ import annotations

from typing import Any

from tests.views.samples import LIFE
from torchloom.protocol.data_loading import Loading
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Task
from torchloom.protocol.rank import Beat, ChangeSpec, StepTimes
from torchloom.protocol.records import ChangeProposed, ChangeSettled, Entry, Record
from torchloom.protocol.run_records import RunSubmitted
from torchloom.protocol.scheduling import ScheduledJob, ScheduleRules, ScheduleView

SUBMITTED = 1_800_000_000.0
RANK = RankId("mnist", "main", 0)
OTHER = RankId("mnist", "main", 1)


def beat(step: int, steps: int = 10, *, longest: float = 0.11, **more: Any) -> Beat:
    """Of a rank whose steps take 0.1 s, and that makes 80 samples/s."""
    times = StepTimes(count=steps, p50=0.1, p99=0.105, longest=longest) if steps else None
    known: dict[str, Any] = {
        "incarnation": LIFE, "step": step, "times": times, "samples_per_second": 80.0 if steps else None,
    }  # fmt: skip
    return Beat(**known | more)


def loading(loaders: int = 2, batches: int = 10) -> Loading:
    return Loading(
        loaders=loaders, batches=batches, wait=0.01, use=0.09, read=0.1, decode=0.05, collate=0.01, transfer=0.01,
        ready=1.0, mb=2.0,
    )  # fmt: skip


def submitted(job: str = "mnist", **task: Any) -> RunSubmitted:
    return RunSubmitted(request="0" * 32, job=job, task=Task(argv=("train.py",), **task), operator="ann@n1")


def resize(step: int, before: int, after: int, id: str = "c1", *ranks: RankId) -> ChangeProposed:
    change = ChangeSpec(id=id, number=1, step=step, values={"loaders": after})
    lives = tuple((rank, LIFE) for rank in ranks or (RANK,))
    return ChangeProposed(
        change=change, job="mnist", lives=lives, request="0" * 32, operator="loader scheduler",
        before={"loaders": before},
    )  # fmt: skip


def settled(id: str = "c1", applied: int = 1) -> ChangeSettled:
    return ChangeSettled(id=id, applied=applied, outcome="")


def entry(*records: Record, at: float = 0.0) -> Entry:
    """So many seconds after the submission."""
    return Entry(term=1, at=SUBMITTED + at, records=records)


def schedule(at: float, loaders: int | None = 2, **more: Any) -> ScheduleView:
    job = ScheduledJob(**{"job": "mnist", "standing": "scheduled", "ranks": {"n1": 1}, "loaders": loaders} | more)
    return ScheduleView(rules=ScheduleRules(policy="ours"), now=SUBMITTED + at, jobs=(job,))

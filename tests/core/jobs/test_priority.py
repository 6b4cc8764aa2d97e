"""Jobs of different priority: who is placed first, who makes room for whom, and what keeps jobs from being thrashed."""

from __future__ import annotations

import pytest

from tests.core.incidents.test_findings import TIMES
from tests.core.jobs.test_arrival import cancel
from tests.core.site import Site, waiting
from torchloom.core.events import BeatReceived, ReplyReceived, ReportReceived, VerdictKnown
from torchloom.core.jobs.priority import AGAIN_SECONDS, RUN_SECONDS
from torchloom.core.state.rank_states import Presence
from torchloom.protocol.operator import Release
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Applied, Beat, Knobs, Propose, QueryStep, Ready, StepReport, Verdict
from torchloom.protocol.run_records import ReleaseBegan, RunResumed


class Busy(Site):
    """Jobs that can save whenever they are asked to."""

    number = 0
    step = 0

    def start(self, job: str, *, joins: bool = True, **task: object) -> None:
        self.number += 1
        self.submit(self.number, job=job, **({"per_node": 4, "checkpoint_dir": "/kept"} | task))
        self.settle(1)
        if joins and self.run_of(job).phase == "running":
            self.train(job)

    def train(self, job: str) -> None:
        self.join(job)
        run = self.run_of(job)
        for place in run.places:
            report = Knobs(incarnation=place.incarnation, knobs=(), checkpoints=True)
            self.loom.happen(ReportReceived(run.rank(place.rank), report))

    def go_on(self, seconds: float) -> None:
        """Time passes; ranks train, and answer what they are asked."""
        for _ in range(round(seconds)):
            self.step += 1
            for rank in [rank for rank in self.loom.cluster.ranks.values() if rank.presence is Presence.LIVE]:
                self.loom.happen(BeatReceived(rank.id, Beat(incarnation=rank.incarnation, step=self.step, times=TIMES)))
            self.settle(1)
            while self._answer():
                self.settle()

    def _answer(self) -> bool:
        sent, self.loom.sent = self.loom.sent, []
        for rank, command in sent:
            reply: StepReport | Ready | Applied
            match command:
                case QueryStep(id=id, incarnation=own):
                    reply = StepReport(incarnation=own, id=id, step=10)
                case Propose(change=change, incarnation=own):
                    reply = Ready(incarnation=own, id=change.id, ok=True, step=10)
                case Verdict(id=id, incarnation=own, commit=True):
                    reply = Applied(incarnation=own, id=id, step=15)
                case _:
                    continue
            self.tell(self.loom.happen(ReplyReceived(rank, reply)))
        wanted, self.loom.verdicts = self.loom.verdicts, []
        for verdict in wanted:
            self.tell(self.loom.happen(VerdictKnown(verdict.change, verdict.commit, verdict.abort)))
        return bool(sent or wanted)

    def phases(self) -> dict[str, str]:
        return {name: run.phase.value for name, run in self.loom.cluster.runs.by_name.items() if not run.over}

    def records(self, kind: type) -> list[object]:
        return [record for _, records in self.loom.log for record in records if isinstance(record, kind)]

    def reach(self, job: str, phase: str, seconds: int = 60) -> None:
        for _ in range(seconds):
            if self.run_of(job).phase == phase:
                return
            self.go_on(1)
        raise AssertionError(self.phases())


# ── the order of those that wait ──


def test_waiting_jobs_are_placed_by_priority_then_by_deadline_then_by_age() -> None:
    site = Busy()
    site.start("full", joins=False)
    waiting_jobs: dict[str, dict[str, object]] = {
        "old": {}, "late": {"deadline": 900.0}, "soon": {"deadline": 100.0}, "high": {"priority": 1},
    }  # fmt: skip
    for job, task in waiting_jobs.items():
        site.start(job, **task)
    order = ["full"]
    for _ in waiting_jobs:
        cancel(site, order[-1])
        site.settle(2)
        order += [job for job, phase in site.phases().items() if phase == "running"]
    assert order[1:] == ["high", "soon", "late", "old"]


def test_a_job_that_would_fit_lets_one_of_a_higher_priority_go_first() -> None:
    site = Busy()
    site.start("full", joins=False)
    site.start("low", per_node=1)
    site.start("high", priority=1)
    cancel(site, "full")
    site.settle(2)
    assert site.phases() == {"low": "submitted", "high": "running"}


# ── making room ──


def displaced() -> Busy:
    site = Busy()
    site.start("low")
    site.go_on(RUN_SECONDS)
    site.start("high", priority=1)
    site.reach("high", "running")
    return site


def test_a_job_of_a_higher_priority_gets_the_room_of_one_that_can_save() -> None:
    site = displaced()
    assert site.phases() == {"low": "released", "high": "running"}
    reason = phrase("makes_room_for", job="high", priority=1, own=0)
    (began,) = site.records(ReleaseBegan)
    assert (began.reason, began.makes_room_for) == (reason, "high")  # type: ignore[attr-defined]
    assert site.run_of("low").reason == reason
    assert site.run_of("low").stops == ()


def test_a_displaced_job_continues_by_itself_when_there_is_room() -> None:
    site = displaced()
    cancel(site, "high")
    site.go_on(2)
    assert site.phases() == {"low": "running"}
    assert len(site.records(RunResumed)) == 1


def test_displaced_jobs_continue_in_the_order_of_priority_then_age() -> None:
    site = Busy()
    for job, priority in (("first", 0), ("second", 0), ("better", 1)):
        site.start(job, per_node=1, priority=priority)
    site.go_on(RUN_SECONDS)
    site.start("high", priority=2)
    site.reach("high", "running")
    assert set(site.phases().values()) == {"released", "running"}
    cancel(site, "high")
    site.go_on(2)
    assert [record.job for record in site.records(RunResumed)] == ["better", "first", "second"]  # type: ignore[attr-defined]


def test_a_job_that_an_operator_released_does_not_continue_by_itself() -> None:
    site = displaced()
    site.loom.ask(Release(request="a" * 32, job="low"), "r")
    cancel(site, "high")
    site.go_on(10)
    assert site.phases() == {"low": "released"}


def test_no_more_jobs_are_released_than_are_needed() -> None:
    site = Busy()
    for job, ranks in (("large", 3), ("small", 1)):
        site.start(job, per_node=ranks)
    site.go_on(RUN_SECONDS)
    site.start("high", priority=1, per_node=3)
    site.reach("high", "running")
    assert site.phases() == {"large": "released", "small": "running", "high": "running"}
    assert [record.job for record in site.records(ReleaseBegan)] == ["large"]  # type: ignore[attr-defined]


def test_nobody_takes_the_room_that_is_being_made() -> None:
    site = Busy()
    for job in ("one", "other"):
        site.start(job, per_node=2)
    site.go_on(RUN_SECONDS)
    site.start("high", priority=1)
    site.agents["n1"].stubborn = True
    site.go_on(10)
    assert set(site.phases().values()) == {"stopping", "submitted"}
    for place in site.run_of("one").places:
        site.agents["n1"].end(place.rank, signal="SIGTERM", job="one")
    site.start("small", per_node=1)
    site.go_on(5)
    assert site.phases()["small"] == "submitted"
    assert waiting(site, "small") == phrase("waits_for_priority", job="high")
    site.agents["n1"].stubborn = False
    site.reach("high", "running")


# ── bounds ──


@pytest.mark.parametrize(
    ("low", "high", "seconds"),
    [
        ({}, {}, RUN_SECONDS),
        ({"priority": 2}, {"priority": 1}, RUN_SECONDS),
        ({}, {"priority": 1}, RUN_SECONDS - 30),
        ({"joins": False}, {"priority": 1}, RUN_SECONDS),  # it has not said that it can save
        ({"checkpoint_dir": ""}, {"priority": 1}, RUN_SECONDS),
        ({}, {"priority": 1, "per_node": 4, "nodes": 2}, RUN_SECONDS),  # it would not be enough
    ],
)
def test_a_job_keeps_its_room(low: dict[str, object], high: dict[str, object], seconds: float) -> None:
    site = Busy()
    site.start("low", **low)  # type: ignore[arg-type]
    site.go_on(seconds)
    site.start("high", **high)  # type: ignore[arg-type]
    site.go_on(20)
    assert site.phases() == {"low": "running", "high": "submitted"}


def test_a_job_is_displaced_again_only_after_a_while() -> None:
    site = displaced()
    cancel(site, "high")
    site.go_on(2)
    site.train("low")
    site.go_on(RUN_SECONDS)
    site.start("next", priority=1)
    site.go_on(60)
    assert site.phases() == {"low": "running", "next": "submitted"}
    site.go_on(AGAIN_SECONDS)
    assert site.phases() == {"low": "released", "next": "running"}


def test_a_job_that_was_to_make_room_continues_if_it_is_not_needed() -> None:
    site = Busy()
    site.start("low")
    site.go_on(RUN_SECONDS)
    site.start("high", priority=1)
    assert site.run_of("low").release is not None
    cancel(site, "high")
    site.go_on(10)
    assert (site.phases(), site.run_of("low").release) == ({"low": "running"}, None)
    assert site.run_of("low").ordinal == 1

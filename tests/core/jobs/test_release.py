"""Jobs that give their devices back: saved first, then ended, and started again from there when they are resumed."""

from __future__ import annotations

import pytest

from tests.core.incidents.test_responses import Saving
from tests.core.jobs.test_arrival import cancel
from tests.core.jobs.test_reconcile import shown
from tests.core.site import JOB, Site, a_node, incidents, room, waiting
from torchloom.core.events import ReportReceived
from torchloom.core.jobs.release import RELEASE_SECONDS
from torchloom.core.state.change_ledger import ChangePhase
from torchloom.protocol.job_spec import Torchft
from torchloom.protocol.node import AttemptStatus
from torchloom.protocol.operator import Done, No, Release, Steer
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Order, Saved, SaveFailed
from torchloom.protocol.run_records import AttemptReleased, ReleaseBegan, ReleaseEnded, RunResumed
from torchloom.views.records import sentences


def release(site: Site, number: int = 50, job: str = JOB) -> Done | No:
    decision = site.loom.ask(Release(request=f"{number:032x}", job=job, operator="ann"), "r")
    site.tell(decision)
    assert decision.answer is not None
    return decision.answer


def resume(site: Site, number: int = 60) -> Done | No | None:
    decision = site.loom.ask(Steer(request=f"{number:032x}", verb="resume", job=JOB, operator="ann"), "r")
    site.tell(decision)
    return decision.answer


def save(site: Saving, seconds: int = 5) -> None:
    """The ranks answer, and their agents are heard."""
    for _ in range(seconds):
        while site.answer():
            pass
        site.look()
        site.settle(0.25)


def released(**task: object) -> Saving:
    site = Saving(**task)
    assert isinstance(release(site), Done)
    save(site)
    assert site.phase == "released"
    return site


# ── to and fro ──


def test_a_released_job_has_saved_and_its_room_is_free() -> None:
    site = released(per_node=4)
    change = next(iter(site.loom.cluster.ledger.changes.values()))
    assert (change.change.action, change.phase) == ("checkpoint", ChangePhase.SETTLED)
    assert (site.run.places, site.run.stops, incidents(site)) == ((), (), [])
    assert shown(site).phase == "released"
    assert [command.last for command in site.agents["n1"].dismissed] == [True], "nothing is kept ready for it"
    site.submit(2, job="other", per_node=4)
    site.settle(1)
    assert site.run_of("other").phase == "running"


def test_a_resumed_job_goes_on_from_its_checkpoint_when_there_is_room() -> None:
    site = released(per_node=4)
    site.submit(2, job="other", per_node=4)
    site.settle(1)
    assert isinstance(resume(site), Done)
    site.settle(1)
    assert (site.phase, waiting(site)) == ("restarting", a_node(4, room("n1", 0, 4)))
    site.agents["n1"].resume = ("/kept/step-1500", 1500)
    cancel(site, "other")
    site.settle(1)
    assert (site.phase, site.run.ordinal, site.run.resume_step) == ("running", 2, 1500)
    assert isinstance(resume(site), Done), "the same request again"
    assert site.run.ordinal == 2
    assert len(site.records(RunResumed)) == 1


def test_it_is_no_restart_and_the_time_is_that_of_a_pause() -> None:
    site = released(max_restarts=0)
    site.settle(100)
    spent = site.loom.cluster.goodput.of(JOB, site.loom.now)
    assert spent is not None
    assert spent.lost["paused"] >= 100
    resume(site)
    site.settle(1)
    assert (site.phase, site.run.stops) == ("running", ())
    later = site.loom.cluster.goodput.of(JOB, site.loom.now + 50)
    assert later is not None
    assert later.lost["paused"] == pytest.approx(spent.lost["paused"], abs=1)


def test_a_paused_job_is_released_where_it_stands() -> None:
    site = Saving()
    site.beat_all(paused=True, step=site.step)
    site.settle(1)
    assert site.phase == "paused"
    release(site)
    save(site)
    assert site.phase == "released"


def test_an_agent_that_missed_that_a_job_is_released_is_informed_again() -> None:
    site = released()
    site.agents["n1"].attempts[JOB, 1] = AttemptStatus(job=JOB, attempt=1)
    site.settle(1)
    assert not site.agents["n1"].attempts


def test_a_released_job_can_be_cancelled() -> None:
    site = released()
    cancel(site)
    assert (site.phase, site.loom.cluster.jobs[JOB].phase) == ("cancelled", "stopped")


def test_it_is_released_once() -> None:
    site = Saving()
    for number in (50, 50, 51):
        assert isinstance(release(site, number), Done)
    save(site)
    assert len(site.records(ReleaseBegan)) == len(site.records(AttemptReleased)) == 1
    assert isinstance(release(site, 52), Done)
    assert len(site.records(ReleaseBegan)) == 1


@pytest.mark.parametrize("moment", range(5))
def test_it_survives_a_restart_of_the_weaver_at_any_moment(moment: int) -> None:
    site = Saving()
    release(site)
    for _ in range(moment):
        site.answer()
    site.restart_weaver()
    save(site, 10)
    assert site.phase == "released"
    site.restart_weaver()
    site.settle(5)
    assert site.phase == "released"
    resume(site)
    site.restart_weaver()
    site.settle(5)
    assert (site.phase, site.run.ordinal) == ("running", 2)


# ── checkpoints that are written in the background ──


def written(site: Saving, step: int) -> None:
    place = site.run.places[0]
    report = Saved(incarnation=place.incarnation, step=step, folder="/kept", size=1, seconds=1.0, stall=0.1)
    site.tell(site.loom.happen(ReportReceived(site.run.rank(0), report)))


def test_a_checkpoint_that_is_still_being_written_is_waited_for() -> None:
    site = Saving(pending=True)
    release(site)
    save(site)
    (change,) = site.loom.cluster.ledger.changes.values()
    assert (change.pending, site.phase) == (True, "running")
    written(site, change.change.step - 1)
    save(site)
    assert site.phase == "running", "an older one"
    written(site, change.change.step)
    save(site)
    assert site.phase == "released"


def test_a_checkpoint_that_cannot_be_written_leaves_the_job_running() -> None:
    site = Saving(pending=True)
    release(site)
    save(site)
    (change,) = site.loom.cluster.ledger.changes.values()
    place = site.run.places[0]
    report = SaveFailed(incarnation=place.incarnation, step=change.change.step, folder="/kept", why="disk full")
    site.tell(site.loom.happen(ReportReceived(site.run.rank(0), report)))
    save(site)
    assert site.phase == "running"
    assert site.records(ReleaseEnded) == [ReleaseEnded(job=JOB, reason=phrase("release_save_failed", why="disk full"))]
    assert isinstance(release(site, 51), Done), "it may be tried again"


def test_a_checkpoint_that_never_comes_leaves_the_job_running() -> None:
    site = Saving()
    release(site)
    site.train(int(RELEASE_SECONDS) + 5)
    assert (site.phase, site.run.release) == ("running", None)
    assert site.records(ReleaseEnded) == [
        ReleaseEnded(job=JOB, reason=phrase("release_too_late", seconds=RELEASE_SECONDS))
    ]


def test_resuming_a_job_that_still_saves_withdraws_the_release() -> None:
    site = Saving(pending=True)
    release(site)
    save(site, 1)
    assert isinstance(resume(site), Done)
    assert site.run.release is None
    save(site)
    assert site.phase == "running"


def test_resuming_a_paused_job_that_still_saves_continues_it() -> None:
    site = Saving(pending=True)
    site.beat_all(paused=True, step=site.step)
    site.settle(1)
    release(site)
    save(site, 1)
    assert resume(site) is None, "its ranks are asked first"
    assert site.run.release is None
    assert any(isinstance(command, Order) and command.verb == "resume" for _, command in site.loom.sent)


# ── refused ──


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({}, phrase("no_checkpointer", job=JOB)),
        ({"torchft": Torchft(), "per_node": 1}, phrase("cannot_release_replicas", job=JOB)),
        ({"delay": 60.0}, phrase("cannot_release_in_phase", job=JOB, phase="submitted")),
    ],
)
def test_what_cannot_be_released_is_refused(task: dict[str, object], why: Phrase) -> None:
    site = Site()
    site.submit(**task)
    site.settle(1)
    answer = release(site)
    assert isinstance(answer, No)
    assert answer.why == why


def test_a_job_whose_checkpoints_could_not_be_found_is_not_released() -> None:
    site = Saving(checkpoint_dir="")
    answer = release(site)
    assert isinstance(answer, No)
    assert answer.why == phrase("cannot_find_checkpoint", job=JOB)
    written(site, 5)
    assert isinstance(release(site), Done)


def test_a_job_of_others_is_not_released() -> None:
    site = Site()
    site.loom.join()
    answer = release(site)
    assert isinstance(answer, No)
    assert answer.why == phrase("cannot_release_foreign", job=JOB)


def test_operators_read_who_released_it() -> None:
    site = released()
    assert site.run.reason == phrase("released", operator="ann")
    (began,) = site.records(ReleaseBegan)
    assert "ann" in " ".join(sentences(began))
    assert began in [mark for _, mark in site.loom.cluster.marks[JOB]]

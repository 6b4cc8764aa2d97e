"""Runs: started, stopped as one when a rank fails, started again from the last checkpoint, ended in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.loom import HI, Loom, life
from tests.core.site import JOB, Site, incidents
from tests.examples import examples
from torchloom.core.events import BeatReceived, ReportReceived, RunDue
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import KEEP_NOTES, OVER, RUN_NEXT, RunPhase
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Place
from torchloom.protocol.operator import Cancel, Done, No
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Beat, Goodbye
from torchloom.protocol.views import JobView, PlaneView, QueryCluster
from torchloom.views.cluster_summary import picture


def failure(rank: int, code: int | None = None, signal: str = "", error: str = "") -> Phrase:
    """Why a run is said to end, of a rank that failed."""
    how = phrase("killed_by", signal=signal) if signal else phrase("exit_code", status=code)
    return phrase("rank_of_run_failed", rank=rank, how=how, error=error)


def running(**task: object) -> Site:
    site = Site()
    assert isinstance(site.submit(**task), Done)
    site.settle()
    assert site.phase == "running"
    return site


def shown(site: Site) -> JobView:
    plane = PlaneView(weaver="w", term=1, began=0.0, now=0.0, log_seq=0, version="0")
    return picture(site.loom.cluster, plane, QueryCluster(job=JOB)).jobs[0]


# ── the table ──


def test_every_phase_that_is_not_over_can_be_left_and_no_other() -> None:
    assert {phase for phase, _ in RUN_NEXT} == set(RunPhase) - OVER


# ── from beginning to end ──


def test_a_submitted_job_is_placed_prepared_started_and_done_when_all_ranks_end_well() -> None:
    site = running()
    assert [(p.rank, p.local, p.node) for p in site.run.places] == [(0, 0, "n1"), (1, 1, "n1")]
    (launch,) = site.agents["n1"].launches
    assert (launch.host, launch.port, launch.attempt) == ("n1.local", 5000, 1)
    site.agents["n1"].end(0, code=0)
    site.settle()
    assert site.phase == "running"
    site.agents["n1"].end(1, code=0)
    site.settle()
    assert site.phase == "done"
    assert site.loom.cluster.jobs[JOB].phase == "finished"
    assert site.agents["n1"].attempts == {}
    assert incidents(site) == []


def test_a_job_whose_processes_still_exit_after_their_goodbye_is_ending() -> None:
    def leave(place: Place) -> None:
        goodbye = Goodbye(incarnation=place.incarnation, how="finished")
        site.loom.happen(ReportReceived(RankId(JOB, "main", place.rank), goodbye))

    site = running()
    site.join()
    leave(site.run.places[0])
    assert shown(site).phase == "running"
    leave(site.run.places[1])
    assert (shown(site).phase, site.phase) == ("ending", "running")
    site.loom.now += 1
    site.agents["n1"].end(0, code=1)
    site.settle()
    assert (shown(site).phase, site.run.attempt) == ("running", 2), "the next attempt, of which no rank has joined"
    site.agents["n1"].end(0, code=0)
    site.agents["n1"].end(1, code=0)
    site.settle()
    assert shown(site).phase == "finished"


@pytest.mark.parametrize("how", ["run", "alone"])
def test_how_far_a_job_came_is_known_after_a_restart_of_the_weaver(how: str) -> None:
    if how == "run":
        site = running()
        site.join()
        for place, loss in zip(site.run.places, (0.25, 0.75), strict=True):
            beat = Beat(incarnation=place.incarnation, step=40 + place.rank, loss=loss)
            site.loom.happen(BeatReceived(RankId(JOB, "main", place.rank), beat))
            site.agents["n1"].end(place.rank, code=0)
        site.settle()
    else:
        site = Site()
        site.loom.join()
        site.loom.happen(BeatReceived(HI, Beat(incarnation=life(1), step=40, loss=0.5)))
        site.loom.leave()
        site.settle(5.0)
    assert shown(site).phase == "finished"
    site.restart_weaver()
    assert (shown(site).step, shown(site).loss) == (40, 0.5)


def test_a_paused_job_is_paused_and_goes_on() -> None:
    site = Site()
    site.submit()
    site.settle()
    site.join()
    site.beat_all(paused=True)
    site.settle(1)
    assert site.phase == "paused"
    site.beat_all(paused=False)
    site.settle(1)
    assert site.phase == "running"
    site.beat_all(paused=True)
    site.settle(1)
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle()
    assert (site.phase, site.run.ordinal) == ("running", 2)


def test_what_is_left_of_an_older_run_is_not_taken_for_this_one() -> None:
    site = Site()
    site.submit()
    site.settle()
    for rank in (0, 1):
        site.agents["n1"].end(rank, code=0)
    site.agents["n1"].deaf = True  # it is not told that it may forget
    site.settle()
    assert site.phase == "done"
    assert isinstance(site.submit(2), Done)
    site.hear()
    site.agents["n1"].deaf = False
    site.settle(1)
    assert (site.phase, site.run.ordinal) == ("running", 1)
    assert [launch.ordinal for launch in site.agents["n1"].launches] == [1, 1]


def test_a_name_in_use_is_refused_and_the_same_request_is_done_once() -> None:
    site = running()
    assert isinstance(site.submit(2), No)
    assert isinstance(site.submit(1), Done)
    assert site.run.attempt == 1


# ── failing ──


def test_one_rank_dies_all_are_ended_and_started_again_from_the_checkpoint() -> None:
    site = running()
    site.agents["n1"].resume = ("/runs/step-30", 30)
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    assert (site.phase, site.run.attempt, site.run.resume_step) == ("running", 2, 30)
    launch = site.agents["n1"].launches[-1]
    assert (launch.resume, launch.resume_step) == ("/runs/step-30", 30)
    assert {p.incarnation for p in launch.places}.isdisjoint(
        p.incarnation for p in site.agents["n1"].launches[0].places
    )
    assert incidents(site) == [phrase("of_job", job=JOB, text=failure(1, signal="SIGKILL"))]
    assert site.loom.open_incidents() == []
    assert site.run.notes[0].code == 137


def test_a_run_holds_the_checkpoints_its_newest_attempt_passed_over_until_it_begins_another() -> None:
    site = running()
    site.agents["n1"].resume, site.agents["n1"].rejected = ("/runs/step-30", 30), {"step-40": "torn"}
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    assert site.run.rejected == {"step-40": "torn"}
    site.agents["n1"].rejected = {}
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    assert (site.run.attempt, site.run.rejected) == (3, {})


def test_the_killed_rank_is_the_culprit_not_the_peer_that_lost_it() -> None:
    site = running()
    site.agents["n1"].end(0, code=1, error="RuntimeError: Connection closed by peer")
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    assert incidents(site) == [phrase("of_job", job=JOB, text=failure(1, signal="SIGKILL"))]


def test_ranks_that_do_not_end_keep_the_next_attempt_waiting() -> None:
    site = running()
    site.agents["n1"].stubborn = True
    site.agents["n1"].end(1, code=1)
    site.settle(30)
    assert (site.phase, site.run.attempt) == ("stopping", 1)
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle()
    assert site.run.attempt == 2


def test_the_budget_of_restarts_ends_it() -> None:
    site = running(max_restarts=2)
    for number in range(3):
        site.agents["n1"].end(0, code=3, error=f"another error {number}")
        site.settle(60)
    assert site.phase == "failed"
    assert site.run.attempt == 3
    assert isinstance(site.run.reason, Phrase)
    assert (site.run.reason.code, site.run.reason.args["allowed"]) == ("restarts_used_up", 2)
    assert site.run.notes[-1].code == 3


def test_a_budget_of_more_restarts_than_attempts_are_remembered_is_used_up_too() -> None:
    site = running(max_restarts=KEEP_NOTES + 2)
    for number in range(KEEP_NOTES + 3):
        assert site.phase == "running"
        site.agents["n1"].end(0, code=3, error=f"another error {number}")
        site.settle(31)
    assert site.phase == "failed"


def test_restarts_outside_the_window_do_not_count() -> None:
    site = running(max_restarts=1, restart_window=100.0)
    for number in range(4):
        site.agents["n1"].end(0, code=3, error=f"another error {number}")
        site.settle(200)
    assert (site.phase, site.run.attempt) == ("running", 5)


def test_no_restart_at_all_if_none_is_allowed() -> None:
    site = running(max_restarts=0)
    site.agents["n1"].end(0, code=1)
    site.settle()
    assert (site.phase, site.run.reason) == ("failed", failure(0, code=1))


def test_the_same_failure_without_a_step_forward_ends_early() -> None:
    site = running(max_restarts=50)
    for _ in range(2):
        site.agents["n1"].end(0, code=1, error="ModuleNotFoundError: no module named x")
        site.settle(5)
    assert site.phase == "failed"
    assert site.run.attempt == 2
    assert isinstance(site.run.reason, Phrase)
    assert site.run.reason.code == "crash_loop"


def test_the_same_failure_further_on_is_tried_again() -> None:
    site = running(max_restarts=50)
    for step in (10, 20, 30):
        site.agents["n1"].resume = (f"/runs/step-{step}", step)
        site.agents["n1"].end(0, code=1, error="ValueError: x")
        site.settle(5)
    assert (site.phase, site.run.attempt) == ("running", 4)


def test_the_same_failure_of_another_rank_is_the_same_failure() -> None:
    site = running(max_restarts=50)
    for rank in (0, 1):
        site.agents["n1"].end(rank, code=1, error="ModuleNotFoundError: no module named x")
        site.settle(5)
    assert (site.phase, site.run.attempt) == ("failed", 2)
    again = failure(1, code=1, error="ModuleNotFoundError: no module named x")
    assert site.run.reason == phrase("crash_loop", reason=again)


def test_who_kills_from_outside_may_do_so_as_often_as_restarts_are_allowed() -> None:
    site = running(max_restarts=3)
    for _ in range(3):
        site.agents["n1"].end(1, signal="SIGKILL")
        site.settle(5)
    assert (site.phase, site.run.attempt) == ("running", 4)


def test_out_of_memory_again_without_a_step_forward_ends_early() -> None:
    site = running(max_restarts=50)
    for count in (1, 2):  # the agent says it in other words each time
        error = f"out of memory: the kernel killed {count} of its processes"
        site.agents["n1"].end(1, signal="SIGKILL", error=error, cause="out_of_memory")
        site.settle(5)
    assert (site.phase, site.run.attempt) == ("failed", 2)
    assert site.run.reason == phrase("crash_loop", reason=failure(1, signal="SIGKILL", error=error))


def test_what_cannot_be_prepared_is_given_up_with_the_reason() -> None:
    site = Site()
    site.agents["n1"].trouble = "no valid checkpoint in /runs: step-3 (torn)"
    site.submit()
    site.settle()
    assert site.phase == "failed"
    trouble = "no valid checkpoint in /runs: step-3 (torn)"
    assert site.run.reason == phrase("agent_has_trouble", node="n1", trouble=trouble)


# ── cancelling ──


@pytest.mark.parametrize("before", ["submitted", "running", "stopping"])
def test_a_cancelled_job_ends_and_is_not_started_again(before: str) -> None:
    site = Site()
    if before == "submitted":
        site.submit(9, job="other", per_node=3)
        site.settle()
    site.submit()
    site.settle()
    if before == "stopping":
        site.agents["n1"].stubborn = True
        site.agents["n1"].end(0, code=1)
        site.settle()
    assert site.phase == before
    decision = site.loom.ask(Cancel(request=f"{9:032x}", job=JOB), "c")
    site.tell(decision)
    assert isinstance(site.loom.answers("c")[0], Done)
    site.agents["n1"].stubborn = False
    site.settle(5)
    assert site.phase == "cancelled"
    assert site.loom.cluster.jobs[JOB].phase == "stopped"
    assert not [job for job, _ in site.agents["n1"].attempts if job == JOB]


def test_cancelling_what_torchloom_did_not_start_is_refused() -> None:
    assert isinstance(Site().loom.ask(Cancel(request=f"{1:032x}", job="x")).answer, No)


# ── the weaver dies ──


@examples(150)
@given(st.lists(st.sampled_from(["beat", "tick", "restart", "kill0", "kill1", "late"]), max_size=40))
def test_a_weaver_killed_at_any_point_goes_on_where_it_was(moves: list[str]) -> None:
    site = Site()
    site.submit(max_restarts=1000)
    for step, move in enumerate(moves):
        agent = site.agents["n1"]
        if move == "beat":
            site.hear()
        elif move == "tick":
            site.settle(0.25)
        elif move == "restart":
            site.restart_weaver()
        elif move == "late":
            site.loom.now += 3
        elif agent.attempts and agent.attempts[max(agent.attempts)].ranks:
            agent.resume = (f"/step-{step}", step)
            agent.end(int(move[-1]), signal="SIGKILL")
    site.settle(120)
    assert site.phase == "running"
    numbers = [launch.attempt for launch in site.agents["n1"].launches]
    assert numbers == sorted(set(numbers))  # each attempt was started once
    again = ClusterState(site.loom.cluster.settings, site.loom.cluster.state())
    assert again.state() == site.loom.cluster.state()


def test_folding_the_log_gives_the_same_runs() -> None:
    site = running()
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle(5)
    again = Loom()
    for at, records in site.loom.log:
        again.cluster.fold(records, at)
    assert vars(again.cluster.runs) == vars(site.loom.cluster.runs)


def test_the_next_attempt_begins_with_the_beat_that_shows_the_end_of_the_last() -> None:
    site = running()
    site.agents["n1"].end(0, signal="SIGKILL")
    site.hear()
    assert (site.phase, site.run.attempt) == ("stopping", 1)
    site.loom.log.clear()
    site.loom.cluster.runtime.hear_node("n1", site.agents["n1"].beat(), site.loom.now)
    site.loom.happen(RunDue(JOB))
    kinds = [type(record).__name__ for _, records in site.loom.log for record in records]
    assert kinds[-2:] == ["AttemptEnded", "AttemptBegan"]

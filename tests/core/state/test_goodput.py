"""Where the time of a run went: hand-made histories whose sums are known, and the sum that always is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.loom import life
from tests.core.site import JOB, Site
from tests.examples import examples
from torchloom.core.events import BeatReceived
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.goodput import KEEP_STRETCHES, Stretch
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Place
from torchloom.protocol.rank import Beat, Hello, JobResumed, StepTimes
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, JobForgotten, RankJoined, Record
from torchloom.protocol.run_records import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptPaused,
    AttemptReleased,
    AttemptRunning,
    AttemptStepped,
    AttemptStopping,
    RunArrived,
    RunEnded,
    RunResumed,
    RunSubmitted,
)
from torchloom.protocol.views import Goodput, QueryRuns
from torchloom.settings import Settings
from torchloom.views.cluster_summary import runs

PLACES = (Place(rank=0, local=0, node="n1", incarnation=life(1)),)
SUBMITTED = RunSubmitted(job=JOB, task=Task(argv=("a.py",)), request="r")
RUNNING = AttemptRunning(job=JOB, attempt=1)


def begun(attempt: int = 1) -> AttemptBegan:
    return AttemptBegan(job=JOB, attempt=attempt, places=PLACES)


def launched(attempt: int = 1, step: int | None = None) -> AttemptLaunched:
    return AttemptLaunched(job=JOB, attempt=attempt, host="n1", port=1, resume_step=step)


def stopping(step: int, incident: str = "", attempt: int = 1, **more: object) -> AttemptStopping:
    return AttemptStopping(job=JOB, attempt=attempt, reason="r", step=step, incident=incident, **more)  # type: ignore[arg-type]


def joined(rank: int = 0) -> RankJoined:
    said = Hello(incarnation=life(rank), node="n1", pid=7, devices=("CPU-1",))
    return RankJoined(rank=RankId(JOB, "main", rank), hello=said)


FIRST = About(rank=RankId(JOB, "main", 0))


def opened(kind: str, id: str = "i1", about: About = FIRST) -> IncidentOpened:
    return IncidentOpened(id=id, what="w", about=about, job=JOB, kind=kind)


def ended(attempt: int = 1, wait: float = 0.0) -> AttemptEnded:
    return AttemptEnded(job=JOB, attempt=attempt, wait_seconds=wait)


def told(*history: tuple[float, Record], now: float) -> Goodput:
    cluster = ClusterState(Settings())
    for at, record in history:
        cluster.fold((record,), at)
    again = ClusterState(Settings(), cluster.state())  # it is all in the state
    found = again.goodput.of(JOB, now)
    assert found is not None
    assert found.productive + sum(found.lost.values()) == pytest.approx(found.elapsed)
    return found


START: list[tuple[float, Record]] = [(0, SUBMITTED), (10, begun()), (12, launched()), (15, RUNNING)]
AGAIN: list[tuple[float, Record]] = [(125, ended()), (125, begun(2)), (126, launched(2, 100)), (130, RUNNING)]


def test_waiting_and_starting_are_lost_and_running_is_not() -> None:
    assert told((0, SUBMITTED), now=7) == Goodput(elapsed=7, productive=0, lost={"waiting": 7})
    found = told(*START, now=115)
    assert found == Goodput(elapsed=115, productive=100, lost={"waiting": 10, "starting": 5})


def test_the_time_of_a_release_is_that_of_a_pause_and_then_it_waits_and_starts_as_at_first() -> None:
    release: list[tuple[float, Record]] = [
        (115, stopping(100, next_action="release", counts=False)), (118, AttemptReleased(job=JOB, attempt=1)),
        (215, RunResumed(job=JOB, request="r")), (220, begun(2)), (221, launched(2, 100)), (223, RUNNING),
    ]  # fmt: skip
    found = told(*START, *release, now=233)
    assert found == Goodput(elapsed=233, productive=110, lost={"paused": 100, "starting": 8, "waiting": 15})


def test_nothing_is_lost_before_the_arrival() -> None:
    later = RunSubmitted(job=JOB, task=Task(argv=("a.py",), delay=50.0), request="r")
    found = told((0, later), (50, RunArrived(job=JOB)), (60, begun()), now=62)
    assert found == Goodput(elapsed=12, productive=0, lost={"starting": 2, "waiting": 10})


def test_a_crash_costs_until_all_run_again_and_the_steps_since_the_checkpoint() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(200, "i1"))]
    found = told(*START, *stop, *AGAIN, now=150)
    # 200 steps in 100 s, of which 100 are in the checkpoint; 15 s from the crash until all ran; 20 s since.
    assert found.lost == {"waiting": 10, "starting": 5, "crash": 15, "redone": 50}
    assert found.productive == 50 + 20


def test_a_rank_that_was_lost_before_it_was_known_to_be_dead_made_no_steps_meanwhile() -> None:
    sign: list[tuple[float, Record]] = [(112, opened("")), (115, stopping(200, "i1"))]
    found = told(*START, *sign, *AGAIN, now=130)
    assert found.lost["crash"] == 3 + 15
    assert found.lost["redone"] == pytest.approx(97 / 2)


def test_a_hang_costs_from_its_first_sign() -> None:
    sign: list[tuple[float, Record]] = [(55, opened("hang")), (115, stopping(100, "i1"))]
    found = told(*START, *sign, *AGAIN, now=130)
    assert found.lost == {"waiting": 10, "starting": 5, "hang": 75}
    assert found.productive == 40


def test_a_hang_that_goes_on_by_itself_costs_what_it_lasted() -> None:
    found = told(*START, (55, opened("held")), (65, IncidentAmended(id="i1", closed=True)), now=115)
    assert (found.productive, found.lost["held"]) == (90, 10)


def test_what_is_only_reported_costs_nothing() -> None:
    assert told(*START, (55, opened("loss_spike")), now=115).productive == 100


def test_a_rollback_loses_what_was_done_since_the_checkpoint_before() -> None:
    sign: list[tuple[float, Record]] = [(100, opened("not_finite")), (115, stopping(400, "i1"))]
    found = told(*START, *sign, *AGAIN, now=130)
    assert found.lost["not_finite"] == 15
    assert found.lost["redone"] == 75  # of 400 steps in 100 s, 100 are left


def test_a_job_that_begins_anew_has_lost_everything() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(0, "i1"))]
    again: list[tuple[float, Record]] = [(116, ended()), (116, begun(2)), (117, launched(2)), (118, RUNNING)]
    assert told(*START, *stop, *again, now=120).productive == 2


def test_an_attempt_that_says_itself_where_it_goes_on_has_lost_less() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(200, "i1"))]
    again: list[tuple[float, Record]] = [(116, ended()), (116, begun(2)), (117, launched(2)), (118, RUNNING)]
    resumed = JobResumed(rank=RankId(JOB, "main", 0), incarnation=life(1), step=150, path="p")
    found = told(*START, *stop, *again, (119, resumed), (119, resumed), now=120)
    assert found.lost["redone"] == pytest.approx(25)
    assert found.productive == pytest.approx(77)


def test_the_pause_before_a_restart_belongs_to_its_cause_and_what_follows_is_waiting_for_room() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(0, "i1")), (116, ended(wait=4))]
    assert told(*START, *stop, now=118).lost["crash"] == 3
    found = told(*START, *stop, (150, begun(2)), now=152)
    assert (found.lost["crash"], found.lost["waiting"]) == (5 + 2, 10 + 30)


def test_a_lost_node_one_that_leaves_and_an_evicted_device_are_told_apart() -> None:
    lost = opened("", about=About(run=JOB))
    assert told(*START, (115, lost), (115, stopping(0, "i1")), now=120).lost["node"] == 5
    assert told(*START, (115, lost), (115, stopping(0, "i1", counts=False)), now=120).lost["moving"] == 5
    device = IncidentOpened(id="i1", what="w", about=About(device="GPU-1"), kind="device")
    assert told(*START, (110, device), (115, stopping(0, "i1", counts=False)), now=120).lost["device"] == 5


def test_a_pause_and_the_end_that_was_asked_for_are_told() -> None:
    held: list[tuple[float, Record]] = [
        (45, AttemptPaused(job=JOB, attempt=1)), (55, AttemptPaused(job=JOB, attempt=1, held=False)),
    ]  # fmt: skip
    end: list[tuple[float, Record]] = [
        (115, stopping(9, next_action="cancel")), (118, RunEnded(job=JOB, phase="cancelled", step=9)),
    ]  # fmt: skip
    found = told(*START, *held, *end, now=1000)
    assert found == Goodput(elapsed=118, productive=90, lost={"ending": 3, "paused": 10, "starting": 5, "waiting": 10})


def test_what_ranks_do_before_they_are_heard_of_is_starting_and_no_part_of_a_step() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(200, "i1"))]
    found = told(*START, (35, joined()), (40, joined(1)), *stop, *AGAIN, now=130)
    # 200 steps in the 80 s since it joined, of which 100 are in the checkpoint.
    assert found.lost == {"waiting": 10, "starting": 5 + 20, "crash": 15, "redone": 40}
    assert found.productive == 40


def test_what_ranks_do_before_their_first_step_is_starting() -> None:
    first: tuple[float, Record] = (65, AttemptStepped(job=JOB, attempt=1, seconds=10))
    found = told(*START, (35, joined()), first, now=115)
    assert found == Goodput(elapsed=115, productive=60, lost={"waiting": 10, "starting": 5 + 40})
    late: tuple[float, Record] = (65, AttemptStepped(job=JOB, attempt=1, seconds=1e9))  # it is only an estimate
    assert told(*START, (35, joined()), late, now=115).productive == 80


def test_the_first_steps_of_an_attempt_are_recorded_once() -> None:
    site = Site()
    site.submit()
    site.settle()
    site.join()
    site.settle(30.0)
    for step in (0, 10, 20):
        for place in site.run.places:
            times = StepTimes(count=10, p50=0.1, p99=0.1, longest=0.1)
            beat = Beat(incarnation=place.incarnation, step=step, times=times if step else None)
            site.loom.happen(BeatReceived(RankId(JOB, "main", place.rank), beat))
        site.settle()
    found = site.loom.cluster.goodput.of(JOB, site.loom.now)
    assert found is not None
    assert (found.productive, found.lost["starting"]) == (pytest.approx(1), pytest.approx(29))
    records = [record for _, records in site.loom.log for record in records]
    assert sum(isinstance(record, AttemptStepped) for record in records) == 1


def test_the_steps_of_an_attempt_that_went_on_from_a_checkpoint_are_its_own() -> None:
    first: list[tuple[float, Record]] = [(15, joined()), (115, opened("crash")), (115, stopping(100, "i1"))]
    second: list[tuple[float, Record]] = [
        (136, joined()), (146, stopping(step=110, attempt=2)), (147, ended(2)), (148, begun(3)),
        (149, launched(3, 100)),
    ]  # fmt: skip
    found = told(*START, *first, *AGAIN, *second, now=150)
    assert found.lost["redone"] == 10
    assert found.lost["starting"] == 5 + 6
    assert found.productive == 100


def test_an_attempt_that_came_to_no_step_was_not_productive() -> None:
    crash: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(0, "i1"))]
    over: tuple[float, Record] = (116, RunEnded(job=JOB, phase="failed", step=0))
    for heard in ((), ((35.0, joined()),)):
        found = told(*START, *heard, *crash, over, now=200)
        assert found == Goodput(elapsed=116, productive=0, lost={"crash": 1, "starting": 105, "waiting": 10})
        again = told(*START, *heard, *crash, (116, ended()), (116, begun(2)), (117, launched(2)), now=118)
        assert "redone" not in again.lost
        assert again.productive == 0


def test_while_no_step_is_made_it_is_starting_and_ranks_that_never_speak_are_believed() -> None:
    cluster = ClusterState(Settings())
    for at, record in (*START, (35.0, joined())):
        cluster.fold((record,), at)
    spent = [cluster.goodput.of(JOB, 115, step) for step in (0, 1, None)]
    assert [found and found.productive for found in spent] == [0, 80, 80]
    assert told(*START, (115, RunEnded(job=JOB, phase="done", step=0)), now=200).productive == 100


def test_ranks_that_have_not_joined_yet_are_starting() -> None:
    site = Site()
    site.submit()
    site.settle()
    began = site.loom.now
    site.settle(14.0)  # their processes run, and import
    shown = runs(site.loom.cluster, QueryRuns(job=JOB), site.loom.now).runs[0].goodput
    assert shown is not None
    assert (shown.productive, shown.lost["starting"]) == (0, pytest.approx(site.loom.now - began, abs=2))


def test_ranks_that_never_speak_came_as_far_as_the_next_attempt_goes_on_from() -> None:
    stop: list[tuple[float, Record]] = [(115, opened("crash")), (115, stopping(0, "i1"))]
    fail: list[tuple[float, Record]] = [(140, stopping(0, attempt=2)), (140, RunEnded(job=JOB, phase="failed"))]
    found = told(*START, *stop, *AGAIN, *fail, now=200)
    assert found.productive == 100
    assert found.lost["starting"] == 5 + 10


def test_a_new_run_begins_a_new_account_and_a_forgotten_job_has_none() -> None:
    done: tuple[float, Record] = (115, RunEnded(job=JOB, phase="done", step=9))
    assert told(*START, done, (200, SUBMITTED), now=201) == Goodput(elapsed=1, productive=0, lost={"waiting": 1})
    cluster = ClusterState(Settings())
    for at, record in (*START, done, (200.0, JobForgotten(job=JOB))):
        cluster.fold((record,), at)
    assert cluster.goodput.of(JOB, 300) is None


@given(
    st.integers(0, 50), st.integers(0, 50), st.floats(0, 1e6), st.integers(0, 120),
)  # fmt: skip
def test_less_is_left_of_a_stretch_the_earlier_one_goes_on(first: int, more: int, seconds: float, step: int) -> None:
    stretch = Stretch(first, first + more, seconds)
    assert 0 <= stretch.up_to(step).seconds <= stretch.up_to(step + 1).seconds <= seconds


@examples(150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tick", "beat", "pause", "kill0", "kill1", "restart", "late", "back", "hang"]),
            st.floats(0, 30),
        ),
        max_size=40,
    )
)
def test_productive_and_lost_seconds_are_all_there_is(moves: list[tuple[str, float]]) -> None:
    site = Site()
    site.submit(max_restarts=1000)
    submitted = site.loom.now
    for step, (move, seconds) in enumerate(moves):
        agent = site.agents["n1"]
        site.loom.now += seconds
        match move:
            case "beat":
                site.hear()
            case "tick":
                site.settle(0.25)
            case "restart":
                site.restart_weaver()
            case "back":
                site.loom.now -= min(seconds, 0.1)
            case "pause" if site.phase in {"running", "paused"}:
                held = site.phase == "running"
                site.loom.cluster.fold((AttemptPaused(job=JOB, attempt=site.run.attempt, held=held),), site.loom.now)
            case "hang":
                hang = opened("hang", id=f"i{site.loom.cluster.incidents.count + 1}", about=About(job=JOB, part="hang"))
                site.loom.cluster.fold((hang,), site.loom.now)
            case "kill0" | "kill1" if agent.attempts and agent.attempts[max(agent.attempts)].ranks:
                agent.resume = (f"/step-{step}", step)
                agent.end(int(move[-1]), signal="SIGKILL")
        found = site.loom.cluster.goodput.of(JOB, site.loom.now)
        assert found is not None
        assert found.elapsed == pytest.approx(site.loom.now - submitted, abs=0.2)
        assert found.productive + sum(found.lost.values()) == pytest.approx(found.elapsed)
        assert found.productive >= 0
        assert all(seconds >= 0 for seconds in found.lost.values())


def test_of_many_attempts_the_sum_is_kept() -> None:
    cluster = ClusterState(Settings())
    cluster.fold((SUBMITTED,), 0.0)
    at = 0.0
    for attempt in range(1, 3 * KEEP_STRETCHES):
        step = 10 * attempt
        cluster.fold((begun(attempt), launched(attempt, step - 10), AttemptRunning(job=JOB, attempt=attempt)), at)
        cluster.fold((stopping(step, attempt=attempt), ended(attempt)), at + 1)
        at += 1
    assert len(cluster.goodput[JOB].stretches) == KEEP_STRETCHES
    found = cluster.goodput.of(JOB, at)
    assert found is not None
    assert found.productive == pytest.approx(at)

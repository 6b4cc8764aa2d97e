"""Jobs that arrive later than they are submitted, or after another one; and the port that a first attempt meets at."""

from __future__ import annotations

import pytest

from tests.core.site import JOB, Site, incidents, waiting
from torchloom.protocol.job_spec import DeviceGroup, Torchft
from torchloom.protocol.operator import Cancel, Done, No
from torchloom.protocol.phrase import phrase
from torchloom.protocol.run_records import RunArrived
from torchloom.protocol.views import QueryRuns
from torchloom.views.cluster_summary import runs


def cancel(site: Site, job: str = JOB) -> None:
    site.tell(site.loom.ask(Cancel(request="c" * 32, job=job), "c"))


def finish(site: Site, job: str) -> None:
    for place in site.run_of(job).places:
        site.agents[place.node].end(place.rank, code=0, job=job)
    site.settle(1)


# ── delay ──


def test_a_job_arrives_after_its_delay() -> None:
    site = Site()
    site.submit(delay=60.0)
    site.settle(30)
    assert (site.phase, waiting(site)) == ("submitted", phrase("arrives_in", seconds=30))
    (view,) = runs(site.loom.cluster, QueryRuns(job=JOB), site.loom.now).runs
    assert view.waiting_code == "arrives_in"
    site.settle(31)
    assert site.phase == "running"
    assert [at for at, records in site.loom.log if RunArrived(job=JOB) in records] == [1060.0]


def test_a_restarted_weaver_does_not_begin_the_delay_again() -> None:
    site = Site()
    site.submit(delay=60.0)
    site.settle(50)
    site.restart_weaver()
    site.settle(9)
    assert waiting(site) == phrase("arrives_in", seconds=1)
    site.settle(2)
    assert site.phase == "running"


def test_a_job_can_be_cancelled_before_it_arrives() -> None:
    site = Site()
    site.submit(delay=60.0)
    site.settle(5)
    cancel(site)
    assert (site.phase, site.loom.cluster.jobs[JOB].phase) == ("cancelled", "stopped")
    site.settle(60)
    assert site.phase == "cancelled"
    (view,) = runs(site.loom.cluster, QueryRuns(job=JOB), site.loom.now).runs
    assert view.goodput is None


def test_goodput_counts_from_the_arrival() -> None:
    site = Site()
    site.submit(9, job="other", per_node=4)
    site.submit(delay=60.0)
    site.settle(70)
    spent = site.loom.cluster.goodput.of(JOB, site.loom.now)
    assert spent is not None
    assert (spent.elapsed, spent.lost) == (10.0, {"waiting": 10.0})


def test_a_job_that_may_be_smaller_waits_for_its_nodes_from_its_arrival_on() -> None:
    site = Site("n1")
    site.submit(nodes=2, min_nodes=1, delay=60.0)
    site.settle(85)
    assert site.phase == "submitted"
    site.settle(10)
    assert (site.phase, site.run.nodes) == ("running", ("n1",))


def test_the_lighthouse_of_a_job_arrives_with_its_replicas() -> None:
    site = Site()
    site.submit(per_node=1, torchft=Torchft(), delay=60.0)
    site.settle(30)
    assert {run.phase for run in site.loom.cluster.runs.by_name.values()} == {"submitted"}
    site.settle(35)
    assert {run.phase for run in site.loom.cluster.runs.by_name.values()} == {"running"}


# ── after another job ──


@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_a_job_starts_when_the_one_it_follows_is_over(how: str) -> None:
    site = Site()
    site.submit(1, job="first", per_node=1)
    site.submit(2, after="first", per_node=1)
    site.settle(5)
    assert (site.phase, waiting(site)) == ("submitted", phrase("waits_for_job", job="first"))
    if how == "done":
        finish(site, "first")
    else:
        cancel(site, "first")
    site.settle(1)
    assert (site.run_of("first").phase, site.phase) == (how, "running")


def test_a_later_job_of_the_same_name_is_not_waited_for() -> None:
    site = Site()
    site.submit(8, job="full", per_node=4)
    site.settle()
    site.submit(1, job="first", per_node=2, delay=100.0)
    site.submit(2, after="first")
    cancel(site, "first")
    site.loom.now += 1
    site.submit(3, job="first", per_node=2, delay=100.0)
    site.settle(1)
    cancel(site, "full")
    site.settle(1)
    assert (site.phase, site.run_of("first").phase) == ("running", "submitted")


def test_the_job_to_follow_has_to_be_there() -> None:
    site = Site()
    unknown = site.submit(after="first")
    assert isinstance(unknown, No)
    assert (unknown.why, unknown.hint) == (phrase("job_unknown", job="first"), phrase("submit_it_first"))
    itself = site.submit(2, after=JOB)
    assert isinstance(itself, No)
    assert itself.why == phrase("follows_itself", job=JOB)
    assert isinstance(site.submit(3, job="first"), Done)
    assert isinstance(site.submit(4, after="first"), Done), "in the same second"


# ── port ──


def test_the_first_attempt_meets_at_the_port_that_was_named() -> None:
    site = Site()
    site.submit(port=12448)
    site.settle()
    assert site.run.port == 12448
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(1)
    assert (site.run.ordinal, site.run.port) == (2, 5000)


def test_a_port_that_is_taken_costs_an_attempt_and_no_restart() -> None:
    site = Site()
    site.agents["n1"].busy_ports = {12448}
    site.submit(port=12448, max_restarts=0)
    site.settle(2)
    assert (site.phase, site.run.ordinal, site.run.port) == ("running", 2, 5000)
    taken = phrase("agent_has_trouble", node="n1", trouble=phrase("port_taken", port=12448))
    assert incidents(site) == [phrase("of_job", job=JOB, text=taken)]
    assert site.loom.open_incidents() == []


def on(*nodes: str) -> tuple[DeviceGroup, ...]:
    return tuple(DeviceGroup(devices=(0,), node=node) for node in nodes)


def test_two_jobs_that_may_run_at_once_cannot_meet_at_one_port() -> None:
    site = Site("n1", "n2")
    site.submit(1, job="first", port=12448, groups=on("n1", "n2"))
    refused = site.submit(2, port=12448, groups=on("n1"), share=True)
    assert isinstance(refused, No)
    assert refused.why == phrase("port_of_other_job", port=12448, job="first")
    assert isinstance(site.submit(3, port=12448), No), "it may be placed there"
    assert isinstance(site.submit(4, job="elsewhere", port=12448, groups=on("n2")), Done)
    assert isinstance(site.submit(5, job="other", port=12449, groups=on("n1")), Done)


def test_jobs_that_run_one_after_the_other_may_meet_at_one_port() -> None:
    site = Site()
    site.submit(1, job="first", port=12448)
    assert isinstance(site.submit(2, job="second", port=12448, after="first"), Done)
    assert isinstance(site.submit(3, job="third", port=12448, after="second"), Done)
    finish_all = ("first", "second", "third")
    for job in finish_all:
        site.settle(1)
        assert (site.run_of(job).phase, site.run_of(job).port) == ("running", 12448)
        finish(site, job)


def test_names_that_were_used_again_do_not_make_an_endless_chain() -> None:
    site = Site()
    site.submit(1, job="first", per_node=1)
    site.submit(2, job="second", per_node=1, after="first")
    cancel(site, "first")
    site.settle(1)
    site.submit(3, job="first", per_node=1, after="second")
    assert isinstance(site.submit(4, port=12448, after="first"), Done)


def test_replicas_cannot_all_meet_at_one_port() -> None:
    answer = Site().submit(port=12448, torchft=Torchft())
    assert isinstance(answer, No)
    assert answer.why == phrase("port_not_with_torchft", port=12448)

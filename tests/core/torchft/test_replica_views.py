"""Jobs of replicas as a viewer sees them."""

from __future__ import annotations

from tests.core.site import JOB, Site, waiting
from tests.core.torchft.made import group, join, member, outside, run_of
from torchloom.core.events import BeatReceived, ReportReceived
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Task, Torchft
from torchloom.protocol.operator import Cancel, DrainReplica, EvictReplica, No, Submit
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Beat, Knobs, KnobSpec
from torchloom.protocol.views import JobView, PlaneView, QueryCluster, QueryKnobs, QueryRuns
from torchloom.views.cluster_summary import knobs, picture, runs

PLANE = PlaneView(weaver="w", term=1, began=0.0, now=0.0, log_seq=0, version="0")


def names(site: Site, job: str | None) -> list[str]:
    return [run.job for run in runs(site.loom.cluster, QueryRuns(job=job), site.loom.now).runs]


def the_job(site: Site) -> JobView:
    return picture(site.loom.cluster, PLANE, QueryCluster(job=JOB)).jobs[0]


def cancel(site: Site, number: int) -> None:
    site.tell(site.loom.ask(Cancel(request=f"{number:032x}", job=JOB), "me"))
    site.settle(3.0)


def test_a_job_is_all_of_its_runs_and_each_has_a_name() -> None:
    site = group()
    assert names(site, JOB) == [f"{JOB}:0", f"{JOB}:1", f"{JOB}:lighthouse"]
    assert names(site, f"{JOB}:1") == [f"{JOB}:1"]
    assert names(site, None) == names(site, JOB)
    assert names(site, "nobody") == []


def test_what_is_left_of_an_earlier_job_of_that_name_is_not_part_of_it() -> None:
    site = group(3)
    cancel(site, 7)
    site.submit(2, torchft=Torchft(replicas=1), per_node=1)
    site.settle(1.0)
    assert names(site, JOB) == [f"{JOB}:0", f"{JOB}:lighthouse"]
    cancel(site, 8)
    site.submit(3)
    site.settle(1.0)
    assert names(site, JOB) == [JOB]
    assert names(site, f"{JOB}:2") == [f"{JOB}:2"]  # it can still be asked for


def test_a_rank_is_shown_with_its_id_in_torchft() -> None:
    site = group()
    join(site, 0)
    (view,) = picture(site.loom.cluster, PLANE, QueryCluster(job=JOB)).ranks
    assert view.member == member(0)


def test_a_lighthouse_is_not_counted_among_the_ranks_and_the_job_runs_while_one_replica_does() -> None:
    site = group()
    for number in (0, 1):
        join(site, number)
    assert (the_job(site).phase, the_job(site).live, the_job(site).ranks) == ("running", 2, 2)
    for _ in range(2):  # the second time it waits a little before it begins again
        site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:0")
        site.settle()
    assert run_of(site, 0).phase == "restarting"
    assert (the_job(site).phase, the_job(site).live, the_job(site).ranks) == ("running", 1, 2)


def test_one_that_was_evicted_and_lives_is_not_counted() -> None:
    site = outside(True, "r0:a", "r1:b")
    for number, step in ((0, 70), (1, 50)):
        rank = RankId("theirs", f"r{number}", 0)
        incarnation = site.loom.cluster.ranks[rank].incarnation
        site.loom.happen(BeatReceived(rank, Beat(incarnation=incarnation, step=step)))
    seen = picture(site.loom.cluster, PLANE, QueryCluster(job="theirs"))
    assert [rank.evicted for rank in seen.ranks] == [False, False]
    assert (seen.jobs[0].live, seen.jobs[0].step) == (2, 50)
    site.loom.ask(EvictReplica(job="theirs", replica="r1"), "me")
    seen = picture(site.loom.cluster, PLANE, QueryCluster(job="theirs"))
    assert [rank.evicted for rank in seen.ranks] == [False, True]
    assert (seen.jobs[0].live, seen.jobs[0].step) == (1, 70)


def test_one_that_is_drained_is_shown_so() -> None:
    site = group()
    for number in (0, 1):
        join(site, number)
    site.loom.ask(DrainReplica(job=JOB, replica=f"{JOB}_1"), "me")
    seen = picture(site.loom.cluster, PLANE, QueryCluster(job=JOB))
    assert [rank.drained for rank in seen.ranks] == [False, True]


def test_a_value_of_one_replica_alone_is_not_that_of_the_job() -> None:
    site = outside(True, "r0:a", "r1:b", "r2:c")
    for number, lr in enumerate((0.02, 0.03, 0.02)):
        rank = RankId("theirs", f"r{number}", 0)
        incarnation = site.loom.cluster.ranks[rank].incarnation
        offered = KnobSpec(name="lr", kind="float", value=0.02)
        site.loom.happen(ReportReceived(rank, Knobs(incarnation=incarnation, knobs=(offered,))))
        site.loom.happen(BeatReceived(rank, Beat(incarnation=incarnation, step=5, knobs={"lr": lr})))
    (seen,) = (k for k in knobs(site.loom.cluster, QueryKnobs(job="theirs")).knobs if k.spec.name == "lr")
    assert (seen.value, seen.elsewhere) == (0.02, {"r1": 0.03})


def test_a_name_that_somebody_else_uses_is_refused_and_it_is_said_when_that_ends_by_itself() -> None:
    site = outside(True, "r0:a")
    ask = Submit(request=f"{9:032x}", job="theirs", task=Task(argv=("a.py",)))
    told = site.loom.ask(ask, "me").answer
    assert isinstance(told, No)
    assert told == No(why=phrase("foreign_job_runs", job="theirs"), hint=phrase("choose_other_name"))
    site.loom.close(RankId("theirs", "r0", 0), 1)
    told = site.loom.ask(ask, "me").answer
    assert isinstance(told, No)
    assert told.hint == phrase("wait_or_rename")


def test_one_that_makes_no_step_forward_says_how_long_it_waits() -> None:
    site = group()
    for _ in range(2):
        site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
        site.settle()
    assert waiting(site, f"{JOB}:1") == phrase("waits_longer", seconds=1)

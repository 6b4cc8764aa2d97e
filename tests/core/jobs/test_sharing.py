"""Jobs that share devices or cores: who may be where, and who is affected when something happens to a device."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.site import JOB, Site, a_node, incidents, room, waiting
from tests.examples import examples
from torchloom.core.detect.detector import Finding
from torchloom.core.events import FindingsMade
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.job_spec import DeviceGroup, Rule, Torchft
from torchloom.protocol.operator import Cancel, Fail
from torchloom.protocol.phrase import phrase
from torchloom.protocol.views import QueryRuns
from torchloom.views.cluster_summary import runs

DEVICES = ("GPU-a", "GPU-b")


def devices_of(site: Site, job: str = JOB) -> list[str]:
    return [place.device for place in site.run_of(job).places]


def slots_of(site: Site, job: str = JOB) -> list[int | None]:
    return [place.slot for place in site.run_of(job).places]


def phases(site: Site) -> dict[str, str]:
    return {name: run.phase.value for name, run in site.loom.cluster.runs.by_name.items()}


def two_that_share(**task: object) -> Site:
    """Two jobs on the same two devices, whose ranks have joined."""
    site = Site(devices=DEVICES)
    site.agents["n1"].cores = 8
    for number, job in enumerate((JOB, "other"), start=1):
        site.submit(number, job=job, share=True, **task)
        site.settle()
        site.join(job, devices=True)
    assert devices_of(site) == devices_of(site, "other") == list(DEVICES)
    return site


# ── placement ──


def test_jobs_that_share_take_the_devices_with_the_fewest_ranks() -> None:
    site = Site(devices=DEVICES)
    for number, job in enumerate((JOB, "second", "third"), start=1):
        site.submit(number, job=job, per_node=1, share=True)
        site.settle()
    assert [devices_of(site, job) for job in (JOB, "second", "third")] == [["GPU-a"], ["GPU-b"], ["GPU-a"]]


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_one_that_does_not_share_and_one_that_does_are_never_on_one_device(first: bool, second: bool) -> None:
    site = Site(devices=DEVICES)
    site.submit(9, job="other", share=first)
    site.settle()
    site.submit(share=second)
    site.settle(2)
    assert waiting(site) == a_node(2, room("n1", 0, 2))
    site.tell(site.loom.ask(Cancel(request="c" * 32, job="other"), "to"))
    site.settle(1)
    assert site.phase == "running"


def test_without_devices_ranks_of_jobs_that_share_may_be_more_than_cores() -> None:
    site = Site(cores=2)
    site.submit(1, share=True, per_node=3)
    site.settle()
    site.submit(2, job="other", share=True, per_node=2)
    site.settle()
    site.submit(3, job="alone", per_node=1)
    site.settle()
    assert (slots_of(site), slots_of(site, "other")) == ([0, 1, 0], [1, 0])
    assert phases(site) == {JOB: "running", "other": "running", "alone": "submitted"}
    (node,) = runs(site.loom.cluster, QueryRuns(), site.loom.now).nodes
    assert (node.used, node.beat.cores) == (5, 2)


def test_ranks_of_one_job_never_share_a_device() -> None:
    site = Site(devices=DEVICES)
    assert site.submit(share=True, per_node=3).why == phrase("task_too_large", ranks=3, most=2, node="n1")  # type: ignore[union-attr]


def test_replicas_of_one_job_never_share_a_device_with_each_other() -> None:
    site = Site(devices=("GPU-a",))
    site.submit(per_node=1, share=True, torchft=Torchft())
    site.submit(2, job="other", per_node=1, share=True)
    site.settle(2)
    assert phases(site) == {
        f"{JOB}:lighthouse": "running", f"{JOB}:0": "running", f"{JOB}:1": "submitted", "other": "running",
    }  # fmt: skip


def test_jobs_that_share_go_to_the_node_with_the_least_load() -> None:
    site = Site("n1", "n2", cores=2)
    for number, job in enumerate((JOB, "second", "third"), start=1):
        site.submit(number, job=job, per_node=2, share=True)
        site.settle()
    assert [site.run_of(job).nodes for job in (JOB, "second", "third")] == [("n1",), ("n2",), ("n1",)]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, dict[str, object]]]:
    """Jobs that are submitted and cancelled, with and without groups, sharing or not."""
    history: list[tuple[str, dict[str, object]]] = []
    for number in range(draw(st.integers(1, 7))):
        share = draw(st.booleans())
        if draw(st.booleans()):
            devices = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)))
            group = DeviceGroup(devices=devices, node=draw(st.sampled_from([None, "n1", "n2"])))
            history.append((f"j{number}", {"share": share, "groups": (group,)}))
        else:
            history.append((f"j{number}", {"share": share, "per_node": draw(st.integers(1, 3))}))
        if draw(st.booleans()):
            history.append((f"j{draw(st.integers(0, number))}", {}))
    return history


@examples(150)
@given(st.booleans(), histories())
def test_no_slot_has_a_job_that_does_not_share_and_another_one(
    cores: bool, history: list[tuple[str, dict[str, object]]]
) -> None:
    site = Site("n1", "n2", cores=3)
    for node, agent in site.agents.items():
        agent.devices = () if cores else tuple(f"GPU-{node}-{number}" for number in range(3))
    site.hear()
    for number, (job, task) in enumerate(history, start=1):
        if task:
            site.submit(number, job=job, **task)
        else:
            site.tell(site.loom.ask(Cancel(request=f"{number:032x}", job=job), "c"))
        site.settle(1)
        users = defaultdict(set)
        for run in site.loom.cluster.runs.by_name.values():
            if run.under_way:
                for place in run.places:
                    users[place.node, place.slot].add(run.name)
                for group in run.task.groups:
                    assert [place.slot for place in run.places] == list(group.devices)
                    assert run.nodes == ((group.node,) if group.node else run.nodes)
        for jobs in users.values():
            assert len(jobs) == 1 or all(site.run_of(job).task.share for job in jobs)


# ── what happens to a device happens to all ──


def test_the_map_names_all_who_share_a_device() -> None:
    site = two_that_share()
    expected = (ReplicaId(JOB, "main"), ReplicaId("other", "main"))
    assert all(site.loom.cluster.drmap.replicas_on(device) == expected for device in DEVICES)


def test_all_jobs_on_a_device_that_failed_leave_it() -> None:
    site = two_that_share(per_node=2, least=1)
    site.tell(site.loom.ask(Fail(device="GPU-a"), "f"))
    (answer,) = site.loom.answers("f")
    assert len(answer.replicas) == 2  # type: ignore[union-attr]
    site.settle(2)
    assert phases(site) == {JOB: "running", "other": "running"}
    assert devices_of(site) == devices_of(site, "other") == ["GPU-b"]
    assert [site.run_of(job).ordinal for job in (JOB, "other")] == [2, 2]


def test_a_device_that_failed_leads_each_job_back_as_its_policy_says() -> None:
    back = Rule(on="device", do=("rollback",))
    site = two_that_share(least=1, policy=(back,))
    site.agents["n1"].resume = ("/kept/step-1", 1)
    site.tell(site.loom.ask(Fail(device="GPU-a"), "f"))
    site.settle(2)
    prepared = [order for order in site.agents["n1"].prepares if order.ordinal == 2]
    assert {order.job for order in prepared if order.rollback is not None} == {JOB, "other"}


@pytest.mark.parametrize("kind", ["not_finite", "straggler"])
def test_who_shares_a_device_that_a_policy_evicts_leaves_it_too(kind: str) -> None:
    site = two_that_share(least=1, policy=(Rule(on=kind, do=("evict",)),))
    finding = Finding(kind, "w", ("seen",))  # type: ignore[arg-type]
    site.tell(site.loom.happen(FindingsMade(RankId(JOB, "main", 0), (finding,))))
    assert phrase("device_evicted", device="GPU-a", job=JOB) in incidents(site)
    site.settle(2)
    assert devices_of(site) == devices_of(site, "other") == ["GPU-b"]
    assert phases(site) == {JOB: "running", "other": "running"}
    assert site.loom.open_incidents() == []


def test_a_crash_of_one_leaves_the_other_alone() -> None:
    site = two_that_share()
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(2)
    assert (site.run.ordinal, site.run_of("other").ordinal) == (2, 1)
    assert devices_of(site) == list(DEVICES)

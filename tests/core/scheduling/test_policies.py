"""Each policy follows its own rule, with the same signature and within the budgets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.scheduling.jobs import NODES, assert_within_budgets, budgets, job, random_jobs
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job
from torchloom.core.scheduling.policies import POLICIES, Even, Ours, Requested, Torchloader


@given(random_jobs(), budgets, st.sampled_from(list(POLICIES)), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_no_policy_exceeds_a_budget(jobs: list[Job], limits: dict[str, int], name: str, leaving: int) -> None:
    cluster, policy = ClusterLoaders(limits), POLICIES[name]()
    for now, each in enumerate(jobs):
        cluster.put(each)
        policy.decide(cluster, each.ranks, float(now))
        assert_within_budgets(cluster)
    gone = jobs[leaving % len(jobs)]
    cluster.remove(gone.name)
    policy.decide(cluster, gone.ranks, 100.0)
    assert_within_budgets(cluster)
    cluster.set_budget("n0", 0)
    if name == "ours":
        policy.decide(cluster, ["n0"], 200.0)
        assert_within_budgets(cluster)


def test_the_even_split_goes_by_ranks_and_follows_departures() -> None:
    cluster = ClusterLoaders({"n0": 12, "n1": 12})
    cluster.put(job("wide", need=20, ranks={"n0": 2, "n1": 1}))
    cluster.put(job("narrow", need=20, ranks={"n0": 1}))
    Even().decide(cluster, NODES, 0.0)
    assert cluster.allocation() == {"wide": 4, "narrow": 4}
    cluster.remove("narrow")
    Even().decide(cluster, ["n0"], 1.0)
    assert cluster.allocation() == {"wide": 6}


def test_requests_are_served_in_the_order_of_arrival() -> None:
    cluster = ClusterLoaders({"n0": 10})
    for name in ("a", "b", "c"):
        cluster.put(job(name, need=20, requested=6))
        Requested().decide(cluster, ["n0"], 0.0)
    assert cluster.allocation() == {"a": 6, "b": 4, "c": 0}
    cluster.remove("a")
    Requested().decide(cluster, ["n0"], 1.0)
    assert cluster.allocation() == {"b": 6, "c": 4}


def test_torchloader_fills_jobs_in_order_by_the_count_of_the_whole_cluster() -> None:
    cluster, policy = ClusterLoaders({"n0": 10, "n1": 10}), Torchloader()
    cluster.put(job("first", need=6, ranks={"n0": 1}, most=6))
    cluster.put(job("second", need=6, ranks={"n0": 1}, most=6))
    cluster.put(job("third", need=20, ranks={"n1": 1}))
    policy.decide(cluster, NODES, 0.0)
    assert policy.restarted == {"first", "second", "third"}
    assert cluster.allocation() == {"first": 5, "second": 5, "third": 8}  # it wanted 6 and 6 on n0, which has 10
    policy.decide(cluster, NODES, 1.0)
    assert policy.restarted == set()
    cluster.remove("first")
    policy.decide(cluster, ["n0"], 2.0)
    assert policy.restarted == {"third"}
    assert cluster.allocation() == {"second": 6, "third": 10}


def test_ours_reports_only_what_changed_since_the_last_report() -> None:
    cluster, policy = ClusterLoaders({"n0": 12}), Ours()
    cluster.put(job("a", need=20))
    policy.decide(cluster, ["n0"], 0.0)
    assert cluster.take_changes() == {"a": (0, 12)}
    cluster.put(job("b", need=20))
    policy.decide(cluster, ["n0"], 1.0)
    changes = cluster.take_changes()
    assert changes["a"] == (12, cluster.members["a"].loaders)
    assert changes["b"] == (0, cluster.members["b"].loaders)
    policy.decide_all(cluster, 2.0)
    assert cluster.take_changes() == {}


@pytest.mark.parametrize("name", POLICIES)
def test_a_decision_without_jobs_changes_nothing(name: str) -> None:
    cluster = ClusterLoaders({"n0": 4})
    POLICIES[name]().decide(cluster, ["n0", "n9"] if name == "ours" else ["n0"], 0.0)
    assert cluster.take_changes() == {}

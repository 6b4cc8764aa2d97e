"""Loaders move for a gain that is worth it and certain, and noise moves nothing."""

from __future__ import annotations

import random

import pytest

from tests.core.scheduling.jobs import assert_within_budgets, job, measured
from torchloom.core.scheduling.allocation import adjust, allocate
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job, Objective
from torchloom.core.scheduling.policies import Ours
from torchloom.core.scheduling.stability import DWELL_SECONDS, MoveFilter
from torchloom.core.scheduling.throughput_model import Curve, ThroughputModel, Variances

TRUTHS = {
    "hungry": Curve(40.0, 400.0, 0.05),
    "steady": Curve(50.0, 200.0, 0.02),
    "light": Curve(100.0, 100.0, 0.0),
    "wide": Curve(500.0, 2000.0, 0.1),
}
RANKS = {"wide": {"n0": 2}}


def moves_under_noise(seed: int, noise: float, decisions: int, shift_at: int = -1) -> tuple[list[int], ClusterLoaders]:
    """The decisions that moved something, with measurements of jobs whose true speed changes only at `shift_at`."""
    chance, moved = random.Random(seed), []
    cluster, policy = ClusterLoaders({"n0": 16}), Ours()
    models = {name: ThroughputModel() for name in TRUTHS}
    for name in TRUTHS:
        cluster.put(job(name, ranks=RANKS.get(name)))
        policy.decide(cluster, ["n0"], 0.0)
    policy.is_drift = True
    for number in range(decisions):
        now = 5.0 * number
        for name, model in models.items():
            truth = TRUTHS[name]
            if 0 <= shift_at <= number and name == "hungry":
                truth = Curve(truth.rate * 8, truth.ceiling, truth.contention)
            model.add(measured(truth, cluster.members[name].loaders, chance, noise), now)
            cluster.put(Job(name, RANKS.get(name, {"n0": 1}), model.curve(now)))
        cluster.take_changes()
        policy.decide(cluster, ["n0"], now)
        assert_within_budgets(cluster)
        if cluster.take_changes():
            moved.append(number)
    return moved, cluster


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_noise_causes_no_thrash(seed: int, noise: float) -> None:
    moved, _ = moves_under_noise(seed, noise, 240)
    assert len(moved) <= 6
    assert [number for number in moved if number >= 120] == []


def test_a_job_that_really_changes_is_followed() -> None:
    moved, cluster = moves_under_noise(1, 0.03, 200, shift_at=100)
    assert any(number >= 100 for number in moved)
    assert cluster.members["hungry"].loaders <= 4


def decide_after_a_small_change(need: float, *, is_drift: bool = True) -> Ours:
    cluster, policy = ClusterLoaders({"n0": 16}), Ours(is_drift=is_drift)
    for name in ("a", "b"):
        cluster.put(job(name, need=10))
    allocate(cluster)
    before = cluster.allocation()
    cluster.take_changes()
    cluster.put(job("a", need=need))
    policy.decide(cluster, ["n0"], 100.0)
    changed = any(group.verdict == "moves" for group in policy.groups)
    assert (cluster.allocation() != before) == changed == bool(cluster.take_changes())
    return policy


def test_after_an_event_a_smaller_gain_is_worth_a_move() -> None:
    (drift,), (event,) = (decide_after_a_small_change(4.5, is_drift=each).groups for each in (True, False))
    assert (drift.verdict, event.verdict) == ("small_gain", "moves")
    assert 0.01 < event.gain == drift.gain < 0.03


def test_a_small_gain_is_not_worth_a_move() -> None:
    assert {group.verdict for group in decide_after_a_small_change(12).groups} <= {"small_gain"}
    (group,) = decide_after_a_small_change(2).groups
    assert group.verdict == "moves"
    assert group.gain > 0.03


def test_an_uncertain_gain_waits_for_measurements_but_an_arrival_does_not() -> None:
    for is_drift, verdict in ((True, "within_noise"), (False, "moves")):
        cluster = ClusterLoaders({"n0": 8})
        curve = Curve(100.0, 400.0, 0.0, Variances(alpha=0.05**2, gamma=0.0025**2))
        cluster.put(Job("a", {"n0": 1}, curve))
        adjust(cluster, ["n0"])
        (group,) = MoveFilter().review(cluster, cluster.take_changes(), 0.0, is_drift=is_drift)
        assert group.verdict == verdict
        assert (cluster.members["a"].loaders == 0) == is_drift


def test_a_job_that_moved_stays_for_a_while_unless_jobs_come_or_go() -> None:
    cluster, policy = ClusterLoaders({"n0": 16}), Ours()
    cluster.put(job("a", need=10))
    policy.decide(cluster, ["n0"], 0.0)
    cluster.put(job("b", need=10))
    policy.decide(cluster, ["n0"], 1.0)
    policy.is_drift = True
    for now, verdict in ((5.0, "moved_recently"), (1.0 + DWELL_SECONDS, "moves")):
        cluster.put(job("a", need=1))
        policy.decide(cluster, ["n0"], now)
        assert [group.verdict for group in policy.groups] == [verdict]


def test_groups_on_different_nodes_are_judged_apart() -> None:
    cluster, policy = ClusterLoaders({"n0": 16, "n1": 16}), Ours()
    for node in ("n0", "n1"):
        for name in ("a", "b"):
            cluster.put(job(f"{name}-{node}", need=10, ranks={node: 1}))
    allocate(cluster)
    cluster.take_changes()
    cluster.put(job("a-n0", need=1, ranks={"n0": 1}))
    cluster.put(job("a-n1", need=6, ranks={"n1": 1}))
    policy.decide(cluster, ["n0", "n1"], 0.0)
    assert {frozenset(group.changes): group.verdict for group in policy.groups} == {
        frozenset({"a-n0", "b-n0"}): "moves",
        frozenset({"a-n1", "b-n1"}): "small_gain",
    }
    assert set(cluster.take_changes()) == {"a-n0", "b-n0"}


@pytest.mark.parametrize("objective", Objective)
def test_every_objective_knows_a_gain_that_is_worth_a_move(objective: Objective) -> None:
    cluster, policy = ClusterLoaders({"n0": 8}, objective), Ours(is_drift=True)
    cluster.put(job("a", need=20, remaining=1e6))
    policy.decide(cluster, ["n0"], 0.0)
    assert [group.verdict for group in policy.groups] == ["moves"]
    assert cluster.members["a"].loaders == 8


def test_changes_that_are_no_choice_are_never_taken_back() -> None:
    cluster, policy = ClusterLoaders({"n0": 16}), Ours()
    cluster.put(job("a", need=10))
    policy.decide(cluster, ["n0"], 0.0)
    cluster.take_changes()
    cluster.set_budget("n0", 3)
    policy.is_drift = True
    policy.decide(cluster, ["n0"], 1.0)
    assert cluster.allocation() == {"a": 3}
    assert cluster.take_changes()["a"][1] == 3

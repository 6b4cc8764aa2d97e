"""The simulator: jobs train at the speed of their curves, and a decision follows each arrival and departure."""

from __future__ import annotations

import random

import pytest

from benchmarks.cluster_sim import trace
from tests.core.scheduling.jobs import assert_within_budgets, job
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job, Objective
from torchloom.core.scheduling.policies import POLICIES, Even, Ours, Torchloader
from torchloom.core.scheduling.simulation import Arrival, simulate
from torchloom.core.scheduling.throughput_model import Curve


def hungry_and_light() -> list[Arrival]:
    """A job whose samples take 20 ms, on nine loaders, and two whose samples take 10 ms and that train slowly."""
    hungry, light = Curve(50.0, 400.0), Curve(100.0, 50.0)
    return [
        Arrival(0.0, Job("hungry", {"n0": 1}, hungry, remaining=8000.0)),
        Arrival(3.0, Job("light-1", {"n0": 1}, light, remaining=1000.0)),
        Arrival(6.0, Job("light-2", {"n0": 1}, light, remaining=1000.0)),
    ]


def test_a_job_alone_trains_at_the_speed_of_its_curve() -> None:
    alone = job("a", need=8, remaining=8000.0)
    outcome = simulate([Arrival(5.0, alone)], {"n0": 6}, Ours())
    assert outcome.finished["a"] == pytest.approx(5.0 + 8000 / alone.curve.throughput(6))
    assert outcome.throughput == pytest.approx(alone.curve.throughput(6))
    assert outcome.mean_share == pytest.approx(alone.curve.share(6))
    assert outcome.makespan == outcome.completion_seconds == pytest.approx(8000 / alone.curve.throughput(6))
    assert outcome.moves == 0


def test_a_departure_gives_its_loaders_to_those_that_stay() -> None:
    short, long = job("short", need=20, remaining=1000.0), job("long", need=20, remaining=50_000.0)
    outcome = simulate([Arrival(0.0, short), Arrival(0.0, long)], {"n0": 12}, Even())
    both = outcome.finished["short"]
    assert both == pytest.approx(1000 / short.curve.throughput(6))
    rest = 50_000 - both * long.curve.throughput(6)
    assert outcome.finished["long"] == pytest.approx(both + rest / long.curve.throughput(12))


def test_ours_beats_an_even_split_of_unequal_jobs() -> None:
    ours, even = (simulate(hungry_and_light(), {"n0": 9}, policy) for policy in (Ours(), Even()))
    assert ours.throughput > 1.2 * even.throughput
    assert ours.makespan < 0.9 * even.makespan


def test_a_restart_stops_a_job_and_a_live_resize_does_not() -> None:
    arrivals = hungry_and_light()
    quick = simulate(arrivals, {"n0": 9}, Torchloader(), restart_seconds=0.0)
    slow = simulate(arrivals, {"n0": 9}, Torchloader(), restart_seconds=10.0)
    assert quick.restart_seconds == 0
    assert slow.restart_seconds >= 10.0
    assert slow.makespan > quick.makespan
    assert simulate(arrivals, {"n0": 9}, Ours(), restart_seconds=10.0).restart_seconds == 0


def test_jobs_on_one_device_share_its_time() -> None:
    apart = [Arrival(0.0, job(name, need=1, remaining=8000.0)) for name in "ab"]
    together = [Arrival(each.time, each.job, devices=("GPU-1",)) for each in apart]
    fast, slow = (simulate(arrivals, {"n0": 40}, Ours()) for arrivals in (apart, together))
    assert slow.makespan == pytest.approx(2 * fast.makespan, rel=0.03)
    later = [together[0], Arrival(1000.0, together[1].job, devices=("GPU-1",))]
    assert simulate(later, {"n0": 40}, Ours()).makespan == pytest.approx(1000.0 + fast.makespan, rel=0.03)


def test_the_makespan_objective_shortens_the_makespan() -> None:
    arrivals = [
        Arrival(0.0, job("long", need=12, remaining=60_000.0)),
        Arrival(0.0, job("short", need=6, remaining=5_000.0)),
    ]
    share, makespan = (
        simulate(arrivals, {"n0": 9}, Ours(), objective=objective).makespan
        for objective in (Objective.SHARE, Objective.MAKESPAN)
    )
    assert makespan < share


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_of_a_trace_finishes_and_no_budget_is_exceeded(name: str) -> None:
    budgets = {f"n{number}": 24 for number in range(10)}
    arrivals = trace(random.Random(1), list(budgets), 60)
    seen: list[float] = []

    def observe(now: float, cluster: ClusterLoaders) -> None:
        seen.append(now)
        assert_within_budgets(cluster)

    times = [arrivals[-1].time * part / 10 for part in range(1, 10)]
    outcome = simulate(arrivals, budgets, POLICIES[name](), observe=observe, times=times)
    assert seen == times
    assert outcome.finished.keys() == {each.job.name for each in arrivals}
    for each in arrivals:
        assert outcome.finished[each.job.name] - each.time >= 0.999 * (each.job.remaining or 0) / (
            each.job.size * each.job.curve.ceiling
        )


def test_two_jobs_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="several jobs have the name a"):
        simulate([Arrival(0.0, job("a", remaining=1.0)), Arrival(1.0, job("a", remaining=1.0))], {"n0": 1}, Ours())


def test_no_arrivals_are_no_jobs() -> None:
    assert simulate([], {"n0": 1}, Ours()).finished == {}

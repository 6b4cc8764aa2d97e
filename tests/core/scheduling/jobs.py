"""Jobs, clusters and measurements for the tests of scheduling."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job
from torchloom.core.scheduling.throughput_model import Curve, Measurement

BATCH = 32


def job(name: str, need: float = 8.0, ranks: Mapping[str, int] | None = None, **more: Any) -> Job:
    """A job that would be fed by `need` loaders a rank if they did not disturb each other."""
    return Job(name, ranks or {"n0": 1}, Curve(400.0 / need, 400.0, 0.03), **more)


def measured(curve: Curve, loaders: int, chance: random.Random, noise: float = 0.03, batches: int = 16) -> Measurement:
    """What a rank with this curve would report."""
    pace = BATCH / curve.throughput(loaders) * chance.lognormvariate(0.0, noise)
    use = BATCH / curve.ceiling * chance.lognormvariate(0.0, noise)
    load = BATCH * curve.loading(loaders) * max(loaders, 1) * chance.lognormvariate(0.0, noise)
    return Measurement(loaders, batches, BATCH, max(0.0, pace - use), use, load)


def assert_within_budgets(cluster: ClusterLoaders) -> None:
    for node, budget in cluster.budgets.items():
        used = sum(member.loaders * member.job.ranks.get(node, 0) for member in cluster.members.values())
        assert used <= budget
        assert cluster.free[node] == budget - used


NODES = ("n0", "n1", "n2")


@st.composite
def random_jobs(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for number in range(draw(st.integers(1, 8))):
        ceiling = draw(st.sampled_from((50.0, 400.0, 3000.0)))
        curve = Curve(ceiling / draw(st.floats(0.5, 16)), ceiling, draw(st.floats(0, 0.3)))
        ranks = draw(st.dictionaries(st.sampled_from(NODES), st.integers(1, 4), min_size=1))
        least = draw(st.integers(0, 3))
        most, weight = least + draw(st.integers(0, 20)), draw(st.floats(0.1, 10))
        jobs.append(Job(f"job-{number}", ranks, curve, least, most, weight, remaining=1e5))
    return jobs


budgets = st.fixed_dictionaries(dict.fromkeys(NODES, st.integers(0, 24)))

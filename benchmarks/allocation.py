"""The allocation of loaders against the best that exists, and how long a decision takes.

Random instances on 1 and on 8 nodes: budgets of 16 to 64 loaders, 2 to 8 or 8 to 24 jobs on 1 to 8 nodes with 1, 2 or 4
ranks on each, which need 1 to 16 loaders a rank to be fed. The best allocation comes from a mixed-integer program. What
counts is Σ T/G, predicted by the curves, which are exact here. `fill` is the greedy algorithm without improvement.

A decision from scratch is about 1,000 jobs on 300 nodes. An incremental one follows the arrival or the departure of one
of them. Times are CPU seconds of this process, and include the tables of values of the jobs concerned.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.allocation_oracle import bound, optimum
from benchmarks.report import finish, quantile, table
from torchloom.core.scheduling.allocation import allocate, fill
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job, Objective
from torchloom.core.scheduling.policies import Even, Ours, Policy, Torchloader
from torchloom.core.scheduling.throughput_model import Curve

NODES = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocation", description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=100, help="on 1 and on 8 nodes each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the instances (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    instances = 5 if args.quick else args.instances
    figures = against_the_best(instances, args.seed) | decisions(args.seed, 2 if args.quick else 7)
    finish("allocation", figures | {"instances": 2 * instances})


def random_job(chance: random.Random, name: str, nodes: list[str]) -> Job:
    ceiling = 10 ** chance.uniform(1.5, 3.5)
    curve = Curve(ceiling / chance.uniform(1, 16), ceiling, chance.uniform(0, 0.1))
    ranks = chance.choice((1, 1, 2, 4))
    places = chance.sample(nodes, min(len(nodes), chance.choice((1, 1, 1, 2, 2, 4, 8))))
    remaining = ceiling * 10 ** chance.uniform(1, 4)
    return Job(name, dict.fromkeys(places, ranks), curve, requested=chance.randint(1, 8), remaining=remaining)


def random_cluster(
    chance: random.Random, nodes: int, jobs: int | None = None, objective: Objective = Objective.SHARE
) -> ClusterLoaders:
    cluster = ClusterLoaders({f"n{number}": chance.randint(16, 64) for number in range(nodes)}, objective)
    count = jobs if jobs is not None else chance.randint(2, 8) if nodes == 1 else chance.randint(nodes, 3 * nodes)
    for number in range(count):
        cluster.put(random_job(chance, f"job-{number}", list(cluster.budgets)))
    return cluster


def empty(cluster: ClusterLoaders) -> None:
    for member in cluster.members.values():
        cluster.resize(member, 0)


def against_the_best(instances: int, seed: int) -> dict[str, object]:
    policies: dict[str, type[Policy]] = {"even": Even, "torchloader": Torchloader}
    fractions: dict[tuple[str, int], list[float]] = {}
    for nodes in (1, 8):
        for number in range(instances):
            cluster = random_cluster(random.Random(1000 * seed + number), nodes)
            best, _ = optimum(cluster)
            values = {}
            allocate(cluster)
            values["ours"] = cluster.value()
            empty(cluster)
            fill(cluster, cluster.members.values())
            values["fill"] = cluster.value()
            for name, policy in policies.items():
                empty(cluster)
                policy().decide(cluster, cluster.budgets, 0.0)
                values[name] = cluster.value()
            for name, value in values.items():
                fractions.setdefault((name, nodes), []).append(value / best)
    rows = [
        (name, nodes, statistics.fmean(values), quantile(values, 0.05), min(values))
        for (name, nodes), values in fractions.items()
    ]
    table("fraction of the best Σ T/G", [("", "nodes", "mean", "5 %", "least"), *rows])
    ours, even = (fractions[name, 1] + fractions[name, 8] for name in ("ours", "even"))
    return {
        "oracle_fraction_mean": statistics.fmean(ours),
        "oracle_fraction_min": min(ours),
        "even_fraction_mean": statistics.fmean(even),
    }


def decisions(seed: int, rounds: int) -> dict[str, object]:
    scratch, events, gaps = [], [], []
    for number in range(rounds):
        chance = random.Random(1000 * seed + number)
        jobs = [member.job for member in random_cluster(chance, NODES, 1000).members.values()]
        cluster = ClusterLoaders({f"n{node}": chance.randint(16, 64) for node in range(NODES)})
        began = time.process_time()
        for job in jobs:
            cluster.put(job)
        allocate(cluster)
        scratch.append(1000 * (time.process_time() - began))
        gaps.append(1 - cluster.value() / bound(cluster))
        policy = Ours()
        for arrival in range(100):
            leaving = chance.choice(list(cluster.members))
            joining = random_job(chance, f"new-{arrival}", list(cluster.budgets))
            began = time.process_time()
            nodes = cluster.members[leaving].job.ranks
            cluster.remove(leaving)
            policy.decide(cluster, nodes, float(arrival))
            events.append(1000 * (time.process_time() - began))
            began = time.process_time()
            cluster.put(joining)
            policy.decide(cluster, joining.ranks, float(arrival))
            events.append(1000 * (time.process_time() - began))
        gaps.append(1 - cluster.value() / bound(cluster))
    rows = [
        (name, statistics.median(times), quantile(times, 0.99), max(times))
        for name, times in (("1,000 jobs from scratch", scratch), ("one event among them", events))
    ]
    table("decisions, ms of CPU", [("", "median", "99 %", "max"), *rows])
    table("gap to the linear bound, 1,000 jobs", [("from scratch", gaps[0]), ("after 200 events", gaps[1])])
    return {
        "decide_ms_1000_jobs": statistics.median(scratch),
        "incremental_ms": statistics.median(events),
        "incremental_ms_p99": quantile(events, 0.99),
        "bound_gap_1000_jobs": statistics.fmean(gaps[::2]),
        "bound_gap_after_events": statistics.fmean(gaps[1::2]),
    }


if __name__ == "__main__":
    main()

"""A cluster on a virtual clock: 1,000 nodes and 10,000 jobs that arrive and leave, under each policy.

Nodes have 32 to 64 loaders. Jobs have 1, 2 or 4 ranks on each of 1 to 8 nodes, need 1 to 16 loaders a rank to be fed,
and train for about 40 minutes if they never wait for data. Each is placed at its arrival on the nodes with the fewest
ranks among some drawn at random, the same for all policies. Every policy decides at each arrival and departure;
torchloader's rule stops a job for 30 s to change its loaders.

At instants during the arrivals, all policies decide about the jobs that run at that moment under ours, and Σ T/G is
compared: `gain_over_even`, `gain_over_torchloader`, and `oracle_gap` against the bound of the linear program, for the
allocation that ours really had. Summed over a whole simulation, T/G is the same for every policy, because each job has
to train all of its samples; the figure of a simulation is therefore the mean completion time (`completion_gain_over_…`
says by how much it is shorter), and the mean T/G of a running job. `seconds` is the CPU time of our simulation,
`seconds_all` that of all policies; neither contains the linear programs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.allocation_oracle import bound
from benchmarks.report import finish, table
from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job
from torchloom.core.scheduling.policies import POLICIES
from torchloom.core.scheduling.simulation import Arrival, Outcome, simulate
from torchloom.core.scheduling.throughput_model import Curve

SECONDS_BETWEEN = 5.0
"""Between two arrivals, on 1,000 nodes."""
TRAINING_SECONDS = 2400.0
"""The median of a job that never waits."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000, help="of the cluster (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=10_000, help="that arrive (default: %(default)s)")
    parser.add_argument("--instants", type=int, default=5, help="at which Σ T/G is compared (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the trace (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    nodes, jobs, instants = (40, 400, 2) if args.quick else (args.nodes, args.jobs, args.instants)
    chance = random.Random(args.seed)
    budgets = {f"n{number}": chance.choice((32, 48, 64)) for number in range(nodes)}
    arrivals = trace(chance, list(budgets), jobs)
    last = arrivals[-1].time
    clusters: list[ClusterLoaders] = []
    outcomes: dict[str, Outcome] = {}
    seconds: dict[str, float] = {}
    for name, policy in POLICIES.items():
        began = time.process_time()
        observe = (lambda _, cluster: clusters.append(_copy(cluster))) if name == "ours" else None
        times = [last * (number + 1) / (instants + 1) for number in range(instants)]
        outcomes[name] = simulate(arrivals, budgets, policy(), observe=observe, times=times)
        seconds[name] = time.process_time() - began
    figures = at_instants(clusters) | compared(outcomes, seconds)
    finish("cluster_sim", figures | {"nodes": nodes, "jobs": jobs, "instants": len(clusters)})


def trace(chance: random.Random, nodes: list[str], jobs: int) -> list[Arrival]:
    """`ends` has, for each node, when each rank placed there would end if its job never waited for data."""
    ends: dict[str, list[float]] = {node: [] for node in nodes}
    now, arrivals = 0.0, []
    for number in range(jobs):
        now += chance.expovariate(len(nodes) / 1000 / SECONDS_BETWEEN)
        ceiling = 10 ** chance.uniform(1.5, 3.5)
        curve = Curve(ceiling / chance.uniform(1, 16), ceiling, chance.uniform(0, 0.1))
        span, ranks = chance.choice((1, 1, 1, 2, 2, 4, 8)), chance.choice((1, 1, 2, 4))
        drawn = chance.sample(nodes, min(3 * span, len(nodes)))
        for node in drawn:
            ends[node] = [end for end in ends[node] if end > now]
        places = sorted(drawn, key=lambda node: len(ends[node]))[:span]
        alone = TRAINING_SECONDS * chance.lognormvariate(0, 0.8)
        for node in places:
            ends[node] += ranks * [now + alone]
        remaining = alone * ceiling * ranks * len(places)
        job = Job(
            f"job-{number}", dict.fromkeys(places, ranks), curve, requested=chance.randint(1, 8), remaining=remaining
        )
        arrivals.append(Arrival(now, job))
    return arrivals


def _copy(cluster: ClusterLoaders) -> ClusterLoaders:
    copy = ClusterLoaders(cluster.budgets, cluster.objective)
    for name, member in cluster.members.items():
        copy.put(member.job)
        copy.resize(copy.members[name], min(member.loaders, copy.members[name].cap))
    return copy


def at_instants(clusters: list[ClusterLoaders]) -> dict[str, object]:
    rows, gains, gaps = [], {name: list[float]() for name in POLICIES}, []
    for cluster in clusters:
        values = {"ours": cluster.value()}
        gaps.append(1 - cluster.value() / bound(cluster))
        for name in POLICIES:
            if name != "ours":
                for member in cluster.members.values():
                    cluster.resize(member, 0)
                POLICIES[name]().decide(cluster, cluster.budgets, 0.0)
                values[name] = cluster.value()
            gains[name].append(values["ours"] / values[name] - 1)
        ranks = sum(member.size for member in cluster.members.values())
        rows.append((f"{len(cluster.members)} jobs, {ranks} ranks", *values.values(), gaps[-1]))
    table("Σ T/G of the jobs that run at an instant", [("", *POLICIES, "gap to the bound"), *rows])
    return {
        "gain_over_even": statistics.fmean(gains["even"]),
        "gain_over_torchloader": statistics.fmean(gains["torchloader"]),
        "gain_over_requested": statistics.fmean(gains["requested"]),
        "oracle_gap": max(gaps),
    }


def compared(outcomes: dict[str, Outcome], seconds: dict[str, float]) -> dict[str, object]:
    head = ("", "Σ samples/s", "completion s", "makespan s", "mean T/G", "moves", "restarts s", "simulated in s")
    rows = [
        (
            name, each.throughput, each.completion_seconds, each.makespan, each.mean_share, each.moves,
            each.restart_seconds, seconds[name],
        )
        for name, each in outcomes.items()
    ]  # fmt: skip
    table("simulations", [head, *rows])
    ours = outcomes["ours"]
    gains = {
        f"completion_gain_over_{name}": 1 - ours.completion_seconds / each.completion_seconds
        for name, each in outcomes.items()
        if each is not ours
    }
    moves = ours.moves / len(ours.finished)
    return {**gains, "moves_per_job": moves, "seconds": seconds["ours"], "seconds_all": sum(seconds.values())}


if __name__ == "__main__":
    main()

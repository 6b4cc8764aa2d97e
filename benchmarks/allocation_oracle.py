"""The best allocation of loaders that exists, by mixed-integer programming, and a bound for large clusters."""

from __future__ import annotations

import numpy
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders

GAP = 1e-4


def optimum(cluster: ClusterLoaders, seconds: float = 30.0) -> tuple[float, dict[str, int]]:
    """The greatest value of the objective, and an allocation that has it.

    One binary for each number of loaders of each job, of which exactly one is chosen, so that any curve is exact. If
    the time is over, the best allocation found so far.
    """
    values, choice, load, names = _program(cluster)
    answer = milp(
        -values,
        constraints=[LinearConstraint(choice, 1, 1), LinearConstraint(load, -numpy.inf, _budgets(cluster))],
        integrality=numpy.ones(len(values)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": GAP, "time_limit": seconds},
    )
    chosen = {name: loaders for (name, loaders), taken in zip(names, answer.x, strict=True) if taken > 0.5}
    return -answer.fun, chosen


def bound(cluster: ClusterLoaders) -> float:
    """No allocation has a greater value: the same with parts of choices allowed."""
    values, choice, load, _ = _program(cluster)
    answer = linprog(
        -values, A_ub=load, b_ub=_budgets(cluster), A_eq=choice, b_eq=numpy.ones(choice.shape[0]), bounds=(0, 1)
    )
    return -answer.fun


def _budgets(cluster: ClusterLoaders) -> numpy.ndarray:
    return numpy.array([cluster.budgets[node] for node in cluster.budgets], dtype=float)


def _program(cluster: ClusterLoaders) -> tuple[numpy.ndarray, coo_array, coo_array, list[tuple[str, int]]]:
    values: list[float] = []
    names: list[tuple[str, int]] = []
    jobs: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    costs: list[int] = []
    row_of = {node: row for row, node in enumerate(cluster.budgets)}
    for number, (name, member) in enumerate(cluster.members.items()):
        for loaders in range(min(member.job.least, member.cap), member.cap + 1):
            for node, ranks in member.demand:
                rows.append(row_of[node])
                columns.append(len(values))
                costs.append(ranks * loaders)
            values.append(member.values[loaders])
            names.append((name, loaders))
            jobs.append(number)
    ones = numpy.ones(len(values))
    choice = coo_array((ones, (jobs, numpy.arange(len(values)))), shape=(len(cluster.members), len(values))).tocsr()
    load = coo_array((costs, (rows, columns)), shape=(len(row_of), len(values)), dtype=float).tocsr()
    return numpy.array(values), choice, load, names

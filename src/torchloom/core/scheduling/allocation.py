"""The worker allocation algorithm: which job gets how many loaders, so that an objective is greatest within budgets.

Fill: the loader with the best score is given next, until no loader fits or helps.

    score = gain of the objective / Σ over nodes (loaders that it costs there / loaders that are free there)

A node with few free loaders is expensive, and so is a job with ranks on many nodes. Beyond the first loader each one
gains less than the one before, and each costs more than before, so a heap whose entries are corrected when they come to
the top is exact. Only the first loader may gain less than the second: training then stops loading itself. A job without
loaders is therefore offered the number with the best gain for each.

Prices: the fill gives the nodes of jobs with ranks on many nodes away too early. A second candidate starts from prices.
Each node has a price for a loader. In rounds, it rises if the jobs would take more than the budget, and falls if they
would take less; each job takes the number that is best for it at these prices. This is the dual of the linear
program. What is still above a budget is taken back where it loses least, and the fill gives away the rest.

Improve: two kinds of exchange repair what the fill, which takes nothing back, did wrong. A job grows at the expense of
the cheapest loaders on its nodes; or a job shrinks, and others grow where that freed loaders. An exchange that does not
gain is undone. An event needs only that, around the nodes on which it happened.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Member

EXCHANGES = 300
"""Exchanges that are tried at most in a decision about all jobs."""
NEARBY_EXCHANGES = 40
"""The same around an event."""
PRICE_ROUNDS = 8
"""More improve the result by less than 0.1 %."""
NEGLIGIBLE = 1e-9
"""Relative gain that is rounding."""


def allocate(cluster: ClusterLoaders) -> None:
    """Decide about all jobs from scratch; the present allocation stays if it is not worse."""
    repair(cluster, cluster.budgets)
    members = list(cluster.members.values())
    present, present_value = _loaders(members), cluster.value()
    floors = [min(member.loaders, member.job.least) for member in members]
    _assign(cluster, members, floors)
    fill(cluster, members)
    filled, filled_value = _loaders(members), cluster.value()
    _assign(cluster, members, _choices_at_prices(cluster, members, floors, _marginal_prices(cluster, members)))
    repair(cluster, cluster.budgets)
    fill(cluster, members)
    if cluster.value() < filled_value:
        _assign(cluster, members, filled)
    improve(cluster, members, EXCHANGES)
    if cluster.value() <= present_value:
        _assign(cluster, members, present)


def _loaders(members: Sequence[Member]) -> list[int]:
    return [member.loaders for member in members]


def _assign(cluster: ClusterLoaders, members: Sequence[Member], loaders: Sequence[int]) -> None:
    for member, number in zip(members, loaders, strict=True):
        cluster.resize(member, number)


def _marginal_prices(cluster: ClusterLoaders, members: Iterable[Member]) -> dict[str, float]:
    """For each node, the mean gain that the last loaders there gave."""
    gains: dict[str, list[float]] = {node: [] for node in cluster.budgets}
    for member in members:
        if member.loaders:
            gain = (member.value - member.values[member.loaders - 1]) / sum(ranks for _, ranks in member.demand)
            for node, _ in member.demand:
                gains[node].append(gain)
    means = {node: sum(each) / len(each) for node, each in gains.items() if each}
    lowest = min((mean for mean in means.values() if mean > 0), default=0.0)
    return {node: max(means.get(node, 0.0), lowest / 10) for node in gains}


def _choices_at_prices(
    cluster: ClusterLoaders, members: Sequence[Member], floors: Sequence[int], prices: dict[str, float]
) -> list[int]:
    """What each job takes at the prices at which demand meets the budgets. A job below its minimum gets its floor."""
    choices = _loaders(members)
    for number in range(PRICE_ROUNDS):
        used = dict.fromkeys(cluster.budgets, 0)
        for order, member in enumerate(members):
            values, least = member.values, floors[order]
            cap = len(values) - 1 if least >= member.job.least else least
            cost = 0.0
            for node, ranks in member.demand:
                cost += ranks * prices[node]
            loaders = min(max(choices[order], 1), cap)
            while loaders < cap and values[loaders + 1] - values[loaders] > cost:
                loaders += 1
            while loaders > 1 and values[loaders] - values[loaders - 1] < cost:
                loaders -= 1
            if values[loaders] - values[0] <= loaders * cost:
                loaders = 0
            choices[order] = loaders = min(max(loaders, least), cap)
            for node, ranks in member.demand:
                used[node] += ranks * loaders
        step = 1.5 / (1 + number / 3)
        for node, budget in cluster.budgets.items():
            if budget:
                prices[node] *= math.exp(step * max(min(used[node] / budget - 1, 1.0), -1.0))
    return choices


def adjust(cluster: ClusterLoaders, nodes: Collection[str]) -> None:
    """Decide again around nodes on which something has changed, starting from what the jobs have."""
    members = cluster.around(nodes)
    fill(cluster, members)
    improve(cluster, members, NEARBY_EXCHANGES)


def repair(cluster: ClusterLoaders, nodes: Collection[str]) -> None:
    """The changes that are not a choice: back within the budgets, and minimums at the expense of the rest."""
    for node in nodes:
        while cluster.free.get(node, 0) < 0:
            victim = _cheapest(cluster, node, None) or _cheapest(cluster, node, None, below_least=True)
            assert victim is not None, "a budget is negative"
            cluster.resize(victim[0], victim[0].loaders - 1 if victim[0].loaders <= victim[0].job.least else victim[1])
    for member in cluster.around(nodes):
        while member.loaders < min(member.job.least, member.cap):
            if _grow(cluster, member, 1) is None:
                break


def fill(cluster: ClusterLoaders, members: Iterable[Member]) -> None:
    heap = []
    for order, member in enumerate(members):
        step = _step(cluster, member)
        if step is not None:
            heap.append((-step[0], order, member))
    heapq.heapify(heap)
    while heap:
        _, order, member = heap[0]
        step = _step(cluster, member)
        if step is None:
            heapq.heappop(heap)
            continue
        entry = (-step[0], order, member)
        if len(heap) > 1 and entry > min(heap[1:3]):
            heapq.heapreplace(heap, entry)
            continue
        cluster.resize(member, member.loaders + step[1])
        following = _step(cluster, member)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-following[0], order, member))


def improve(cluster: ClusterLoaders, members: Iterable[Member], exchanges: int) -> None:
    """Try exchanges for these jobs until a whole round finds none, or that number was tried."""
    ahead = list(members)
    while ahead:
        improved = []
        for member in ahead:
            gained = False
            for exchange in (_grow_at_expense, _shrink_for_others):
                while exchanges > 0 and exchange(cluster, member):
                    exchanges -= 1
                    gained = True
                exchanges -= 1
            if gained:
                improved.append(member)
            if exchanges <= 0:
                return
        ahead = improved


def _step(cluster: ClusterLoaders, member: Member) -> tuple[float, int] | None:
    """(score, loaders) of the next loaders that fit and help."""
    loaders, values, free = member.loaders, member.values, cluster.free
    if loaders + 1 >= len(values):
        return None
    cost = 0.0
    for node, ranks in member.demand:
        there = free[node]
        if there < ranks:
            return None
        cost += ranks / there
    count = 1 if loaders else min(member.jump, cluster.room(member))
    gain = values[loaders + count] - values[loaders]
    return (gain / (count * cost), count) if gain > 0 else None


def _grow_at_expense(cluster: ClusterLoaders, member: Member) -> bool:
    loaders, values = member.loaders, member.values
    for count in (1,) if loaders else range(min(member.jump, member.cap), 0, -1):
        gain = values[loaders + count] - values[loaders] if loaders < member.cap else 0.0
        if gain > 0 and (changed := _grow(cluster, member, count, gain)) is not None:
            fill(cluster, cluster.around({node for other in changed for node, _ in other.demand}))
            return True
    return False


def _grow(cluster: ClusterLoaders, member: Member, count: int, most_loss: float | None = None) -> list[Member] | None:
    """Take what is missing from the cheapest loaders on its nodes; None, and no change, if that loses too much."""
    taken: list[tuple[Member, int]] = [(member, member.loaders)]
    loss = 0.0
    cluster.resize(member, member.loaders + count)
    for node, _ in member.demand:
        while cluster.free[node] < 0:
            victim = _cheapest(cluster, node, member)
            if victim is not None:
                other, loaders = victim
                loss += other.value - other.values[loaders]
            if victim is None or (most_loss is not None and loss >= most_loss * (1 - NEGLIGIBLE)):
                for other, loaders in reversed(taken):
                    cluster.resize(other, loaders)
                return None
            taken.append((other, other.loaders))
            cluster.resize(other, loaders)
    return [other for other, _ in taken]


def _cheapest(
    cluster: ClusterLoaders, node: str, grown: Member | None, *, below_least: bool = False
) -> tuple[Member, int] | None:
    """The job on a node that loses least for each loader that is missing there, and the number that it keeps."""
    best, best_loss, missing = None, 0.0, -cluster.free[node]
    for member in cluster.on_node[node].values():
        loaders, values = member.loaders, member.values
        least = 0 if below_least else min(member.job.least, member.cap)
        if loaders <= least or member is grown:
            continue
        fewer = loaders - 1
        ranks = dict(member.demand)[node]
        loss = (values[loaders] - values[fewer]) / min(ranks, missing)
        if least == 0 and fewer:
            all_lost = (values[loaders] - values[0]) / min(loaders * ranks, missing)
            if all_lost < loss:
                fewer, loss = 0, all_lost
        if best is None or loss < best_loss:
            best, best_loss = (member, fewer), loss
    return best


def _shrink_for_others(cluster: ClusterLoaders, member: Member) -> bool:
    least = member.job.least
    return member.loaders > least and (
        _shrink(cluster, member, member.loaders - 1) or (member.loaders > least + 1 and _shrink(cluster, member, least))
    )


def _shrink(cluster: ClusterLoaders, member: Member, fewer: int) -> bool:
    loaders, loss = member.loaders, member.value - member.values[fewer]
    others = [other for other in cluster.around([node for node, _ in member.demand]) if other is not member]
    before = _loaders(others)
    cluster.resize(member, fewer)
    fill(cluster, others)
    gain = sum(other.value - other.values[old] for other, old in zip(others, before, strict=True))
    if gain > loss * (1 + NEGLIGIBLE):
        fill(cluster, [member])
        return True
    _assign(cluster, others, before)
    cluster.resize(member, loaders)
    return False

"""A move shrinks first and never exceeds a budget, in whatever order answers and losses arrive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from torchloom.core.scheduling.moves import LoaderMoves, Resize

DEMANDS: Mapping[str, Mapping[str, int]] = {
    "a": {"n0": 1}, "b": {"n0": 2, "n1": 1}, "c": {"n1": 1}, "d": {"n0": 1, "n1": 2, "n2": 1}, "e": {"n2": 3},
}  # fmt: skip
BUDGETS = {"n0": 12, "n1": 10, "n2": 9}


def used(numbers: Mapping[str, int], node: str, jobs: Mapping[str, Mapping[str, int]] = DEMANDS) -> int:
    return sum(ranks.get(node, 0) * numbers.get(job, 0) for job, ranks in jobs.items())


def fits(numbers: Mapping[str, int]) -> bool:
    return all(used(numbers, node) <= budget for node, budget in BUDGETS.items())


numbers = st.fixed_dictionaries(dict.fromkeys(DEMANDS, st.integers(0, 8)))


@st.composite
def allocations(draw: st.DrawFn) -> dict[str, int]:
    chosen = draw(numbers)
    while not fits(chosen):
        chosen = {job: loaders // 2 for job, loaders in chosen.items()}
    return chosen


def moves_from(present: Mapping[str, int]) -> LoaderMoves:
    moves = LoaderMoves(dict(BUDGETS))
    for job, demand in DEMANDS.items():
        moves.add(job, demand, present[job])
    return moves


class Cluster:
    """Carries commands out at any moment before it confirms them, and counts the loaders that really run."""

    def __init__(self, present: Mapping[str, int]) -> None:
        self.running = dict(present)
        self.ahead: list[Resize] = []

    def take(self, commands: list[Resize]) -> None:
        self.ahead += commands
        for command in commands:  # those that grow may do so at once, those that shrink only before they confirm
            self.running[command.job] = max(self.running[command.job], command.loaders)
        for node, budget in BUDGETS.items():
            assert used(self.running, node) <= budget


@given(allocations(), allocations(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_order_of_answers_stays_within_the_budgets_and_arrives(
    present: dict[str, int], targets: dict[str, int], data: Any
) -> None:
    moves, cluster = moves_from(present), Cluster(present)
    cluster.take(moves.aim(targets))
    while cluster.ahead:
        command = cluster.ahead.pop(data.draw(st.integers(0, len(cluster.ahead) - 1)))
        cluster.running[command.job] = command.loaders
        cluster.take(moves.confirmed(command.job, command.loaders))
    assert moves.is_settled
    assert moves.holdings() == targets == cluster.running


@given(allocations(), st.lists(allocations(), min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_losses_refusals_and_new_targets_on_the_way_stay_within_the_budgets(
    present: dict[str, int], plans: list[dict[str, int]], data: Any
) -> None:
    moves, cluster = moves_from(present), Cluster(present)
    ahead = list(plans)
    cluster.take(moves.aim(ahead.pop()))
    for _ in range(25):
        kind = data.draw(st.sampled_from(("confirm", "confirm", "refuse", "lose", "node", "aim", "stale")))
        if kind in ("confirm", "refuse") and cluster.ahead:
            command = cluster.ahead.pop(data.draw(st.integers(0, len(cluster.ahead) - 1)))
            if command.job not in cluster.running:
                assert moves.confirmed(command.job, command.loaders) == []
            elif kind == "confirm":
                cluster.running[command.job] = command.loaders
                cluster.take(moves.confirmed(command.job, command.loaders))
            else:
                cluster.running[command.job] = moves.holdings()[command.job]
                cluster.take(moves.refused(command.job, command.loaders))
        elif kind == "lose" and len(cluster.running) > 2:
            job = data.draw(st.sampled_from(sorted(cluster.running)))
            del cluster.running[job]
            cluster.take(moves.job_lost(job))
        elif kind == "node" and "n2" in moves.budgets:
            for job in [job for job in cluster.running if "n2" in DEMANDS[job]]:
                del cluster.running[job]
                cluster.take(moves.job_lost(job))
            cluster.take(moves.node_lost("n2"))
        elif kind == "aim" and ahead:
            cluster.take(moves.aim(ahead.pop()))
        elif kind == "stale":
            assert moves.confirmed("a", 99) == moves.refused("a", 99) == []
        assert all(free >= 0 for free in moves.free().values())


def test_the_job_that_grows_waits_for_the_one_that_shrinks() -> None:
    moves = LoaderMoves({"n0": 8})
    moves.add("a", {"n0": 1}, 6)
    moves.add("b", {"n0": 1}, 2)
    assert moves.aim({"a": 3, "b": 5}) == [Resize("a", 3)]
    assert moves.free() == {"n0": 0}
    assert moves.confirmed("a", 3) == [Resize("b", 5)]
    assert not moves.is_settled
    assert moves.confirmed("b", 5) == []
    assert moves.is_settled


def test_a_job_that_refuses_to_shrink_leaves_what_there_is_to_the_other() -> None:
    moves = LoaderMoves({"n0": 10})
    moves.add("a", {"n0": 1}, 6)
    moves.add("b", {"n0": 1}, 2)
    assert moves.aim({"a": 3, "b": 7}) == [Resize("a", 3)]
    assert moves.refused("a", 3) == [Resize("b", 4)]
    assert moves.confirmed("b", 4) == []
    assert moves.aim({"a": 3}) == [Resize("a", 3)]
    assert moves.confirmed("a", 3) == [Resize("b", 7)]


def test_a_job_that_is_lost_while_it_shrinks_frees_everything() -> None:
    moves = LoaderMoves({"n0": 8})
    moves.add("a", {"n0": 1}, 6)
    moves.add("b", {"n0": 1}, 2)
    moves.aim({"a": 3, "b": 5})
    assert moves.job_lost("a") == [Resize("b", 5)]
    assert moves.confirmed("a", 3) == []


def test_an_answer_that_never_comes_keeps_its_loaders_reserved() -> None:
    moves = LoaderMoves({"n0": 8})
    moves.add("a", {"n0": 1}, 2)
    moves.add("b", {"n0": 1}, 2)
    assert moves.aim({"a": 6}) == [Resize("a", 6)]
    assert moves.aim({"a": 2, "b": 6}) == []
    assert moves.free() == {"n0": 0}
    assert moves.confirmed("a", 6) == [Resize("a", 2)]
    assert moves.confirmed("a", 2) == [Resize("b", 6)]


def test_the_ranks_on_a_lost_node_count_nowhere() -> None:
    moves = LoaderMoves({"n0": 4, "n1": 2})
    moves.add("a", {"n0": 1, "n1": 1}, 2)
    assert moves.aim({"a": 4}) == []
    assert moves.node_lost("n1") == [Resize("a", 4)]
    assert moves.set_budget("n0", 2) == []
    assert moves.free() == {"n0": -2}

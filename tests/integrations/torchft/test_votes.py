"""torchft itself, without torchLoom: a replica votes for itself alone, and one that discarded a step heals.

The check of a whole training (tests/flow/replicas.py, `_lonely`) relies on this.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.torchft.replicas import Replica, joined, together

pytest.importorskip("torchft", reason="torchft is not installed")


@pytest.fixture
def replicas(lighthouse: str) -> Iterator[list[Replica]]:
    """Two replicas that have made a step together."""
    replicas = [Replica(lighthouse, name, settings=None) for name in ("a", "b")]
    joined(*replicas)
    assert together(*replicas) == [True, True]
    yield replicas
    for replica in replicas:
        replica.end()


def test_one_replica_commits_a_step_that_another_discards_and_is_its_source_in_the_next_quorum(
    replicas: list[Replica],
) -> None:
    first, second = replicas
    step, quorum = first.manager.current_step(), first.manager._quorum_id
    assert together(first, second, fails=second) == [True, False]
    assert (first.manager.current_step(), second.manager.current_step()) == (step + 1, step)
    assert first.manager._quorum_id == second.manager._quorum_id == quorum
    assert together(first, second) == [True, True]
    assert first.manager._quorum_id == second.manager._quorum_id == quorum + 1
    assert first.manager.num_participants() == 1  # the other one healed, and took no part
    assert (first.manager.current_step(), second.manager.current_step()) == (step + 2, step + 2)
    assert first.weight == second.weight


def test_an_abort_does_not_take_back_an_exchange_that_is_complete(replicas: list[Replica]) -> None:
    first, second = replicas
    attempts = [first.begin(after=first.manager._pg.abort), second.begin()]
    assert [attempt.result(60) for attempt in attempts] == [True, True]

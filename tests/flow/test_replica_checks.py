"""The check of `Replicas` that no replica misses a step: what excuses one, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flow.replicas import Replicas

SURVIVOR, OTHER, KILLED = 10, 11, 12
"""Processes of the replicas 0, 1 and 2."""


def commit(pid: int, step: int, quorum: int, participants: int) -> str:
    return f"{pid} {step} {quorum} {participants} digest {step}.0\n"


def history(folder: Path, other: str, struck: int = KILLED) -> Replicas:
    """Three replicas train in quorum 3; one is killed in step 38, and only the survivor commits it."""
    replicas = object.__new__(Replicas)
    replicas.folder, replicas.count, replicas.ranks, replicas.struck = folder, 3, 1, {struck}
    before = {pid: commit(pid, 37, 3, 3) for pid in (SURVIVOR, OTHER, KILLED)}
    after = commit(SURVIVOR, 38, 3, 3) + commit(SURVIVOR, 39, 4, 1) + commit(SURVIVOR, 40, 4, 2)
    (folder / "commits-0-0").write_text(before[SURVIVOR] + after)
    (folder / "commits-1-0").write_text(before[OTHER] + other)
    (folder / "commits-2-0").write_text(before[KILLED])
    return replicas


DISCARDED = f"{OTHER} discarded 38 3\n"
HEALED = commit(OTHER, 39, 4, 1) + commit(OTHER, 40, 4, 2)


def test_a_step_discarded_in_a_broken_quorum_and_healed_in_the_next_is_excused(tmp_path: Path) -> None:
    assert history(tmp_path, DISCARDED + HEALED).problems() == []


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(HEALED, id="never discarded"),
        pytest.param(f"{OTHER} discarded 38 2\n" + HEALED, id="discarded in another quorum"),
        pytest.param(f"{OTHER} discarded 37 3\n" + HEALED, id="discarded another step"),
        pytest.param("99 discarded 38 3\n" + HEALED, id="discarded by another process"),
        pytest.param(DISCARDED, id="never healed"),
        pytest.param(DISCARDED + commit(OTHER, 40, 4, 2), id="healed a step late"),
        pytest.param(DISCARDED + commit(OTHER, 39, 5, 1) + commit(OTHER, 40, 5, 2), id="healed in a later quorum"),
    ],
)
def test_anything_else_is_a_problem(tmp_path: Path, other: str) -> None:
    problems = history(tmp_path, other).problems()
    assert "step 38: 2 of 3 did not commit, and were not hit" in problems


def test_nothing_is_excused_in_a_quorum_that_lost_no_member(tmp_path: Path) -> None:
    problems = history(tmp_path, DISCARDED + HEALED, struck=99).problems()
    assert "step 38: 2 of 3 did not commit, and were not hit" in problems

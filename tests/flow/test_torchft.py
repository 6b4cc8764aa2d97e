"""Replicas under torchft, as real as they are: lost in every way, they are replaced while the others train on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flow.faults import Up
from tests.flow.replicas import Replicas

pytest.importorskip("torchft", reason="torchft is not installed (its wheel is for Linux on x86_64 alone)")
Start = Callable[..., Replicas]


@pytest.fixture
def begin(tmp_path: Path, up: Up) -> Iterator[Start]:
    made: list[Replicas] = []

    def start(count: int = 2, ranks: int = 1, *words: str, **more: object) -> Replicas:
        made.append(Replicas(tmp_path, count, ranks, *words, up=up, **more))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for replicas in made:
        replicas.clear()


def kill(job: Replicas) -> None:
    job.strike(1)


def stop(job: Replicas) -> None:
    job.strike(1, signal.SIGSTOP, rank=0)


def hang(job: Replicas) -> None:
    job.tell(1, "hang")


def leave(job: Replicas) -> None:
    job.tell(1, "exit")


def raise_(job: Replicas) -> None:
    job.tell(1, "raise")


def check(job: Replicas) -> None:
    assert job.problems() == []
    assert job.left() == []


def test_a_killed_replica_is_replaced_while_the_other_trains_on(begin: Start) -> None:
    job = begin(2)
    job.until_together()
    old = job.commits(0)[-1]
    kill(job)
    job.until(lambda: job.commits(0)[-1].quorum > old.quorum and job.commits(0)[-1].participants == 1)
    job.until_together()
    assert job.finish() == 0, job.text()
    assert job.restarts() == ["1"]
    assert job.pid(0) == old.pid
    assert "of 2 replicas 2 done" in job.text().splitlines()[-1]
    check(job)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_others_go_on_whatever_becomes_of_one(count: int, ranks: int, begin: Start) -> None:
    job = begin(count, ranks, "--on", "hang=restart@2", standby=1)
    job.until_together(150, seconds=240)  # until it is known how long a step takes
    pids = [job.pid(n) for n in range(count) if n != 1]
    faults = [hang, kill, stop, leave, raise_]
    for fault in faults:
        job.until_together()
        fault(job)
        job.until_further(0, seconds=120)
    job.until_together()
    assert [job.pid(n) for n in range(count) if n != 1] == pids
    assert job.finish() == 0, job.text()
    assert job.restarts() == ["1"] * len(faults)
    check(job)


@pytest.mark.long
def test_two_of_four_are_lost_at_once(begin: Start) -> None:
    job = begin(4)
    job.until_together()
    job.strike(1)
    job.strike(2)
    job.until_further(0)
    job.until_together()
    assert job.finish() == 0, job.text()
    assert sorted(job.restarts()) == ["1", "2"]
    check(job)


@pytest.mark.long
def test_another_is_lost_in_the_reconfiguration_after_the_first(begin: Start) -> None:
    job = begin(4)
    job.until_together()
    quorum = job.commits(0)[-1].quorum
    job.strike(1)
    job.until(lambda: job.commits(0)[-1].quorum != quorum or job.commits(3)[-1].quorum != quorum)
    job.strike(2)
    job.until_further(0)
    job.until_together()
    assert job.finish() == 0, job.text()
    check(job)


@pytest.mark.long
def test_a_lighthouse_that_is_killed_comes_back_and_knows_what_it_knew(begin: Start) -> None:
    job = begin(2)
    job.until_together()
    pids, quorum = [job.pid(0), job.pid(1)], job.commits(0)[-1].quorum
    job.lighthouse().kill()
    job.until_further(0, 30)
    job.until_further(1, 30)
    assert [job.pid(0), job.pid(1)] == pids
    kill(job)
    job.until(lambda: job.commits(0)[-1].quorum > quorum)
    job.until_together()
    assert job.finish() == 0, job.text()
    check(job)


@pytest.mark.long
def test_replicas_that_are_too_few_wait_for_the_lost_one(begin: Start) -> None:
    job = begin(2, least=2)
    job.until_together()
    kill(job)
    job.until_together()
    assert all(commit.participants == 2 for n in (0, 1) for commit in job.commits(n))
    assert job.finish() == 0, job.text()
    check(job)


@pytest.mark.long
def test_the_stock_lighthouse_is_one_option_away(begin: Start) -> None:
    job = begin(2, 1, "--lighthouse", "stock")
    job.until_together()
    kill(job)
    job.until_further(0)
    job.until_together()
    assert job.finish() == 0, job.text()
    check(job)

"""Ranks that freeze, hang or wait: the right one is named, once, with the stacks of all, and training goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from tests.flow.faults import Run, Up
from tests.flow.records import KILLED, of_incident, phrases
from tests.flow.scripts import trained
from tests.flow.troubled import (
    LEARNT,
    MILD,
    PATIENCE,
    TROUBLED,
    TROUBLES,
    Told,
    blames,
)
from torchloom.core.detect.kinds_and_responses import HANGS
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan

pytestmark = pytest.mark.timeout(600)
Start = Callable[..., Run]


@pytest.fixture
def train(start: Start, up: Up) -> Callable[..., Told]:
    """Two ranks that train until they are told to end, and of which it is known how they fare."""

    def begin(*words: str) -> Told:
        run = start("--grace", "1", *words, script=TROUBLED, steps=1_000_000)
        told = Told(run, up)
        told.until_learnt()
        return told

    return begin


def end_as_undisturbed(told: Told, attempts: int) -> None:
    """So many attempts, each started once, the same parameters as without the trouble, and nothing left."""
    run = told.run
    told.until_learnt(attempts, further=11)
    code, last = run.end_now()
    assert code == 0, run.text()
    assert run.ends() == [trained(last)] * 2
    assert told.up.attempts(run.job) == list(range(1, attempts + 1))
    assert run.starts() == [(attempt, rank) for attempt in range(1, attempts + 1) for rank in (0, 1)]
    assert run.left() == []


def stoppings(told: Told) -> list[AttemptStopping]:
    return [record for record in told.records() if isinstance(record, AttemptStopping)]


# ── a rank that does nothing any more ────────────────────────────────────────────────────────────────────────────────


def test_a_stopped_rank_is_frozen_and_the_job_goes_on_from_its_newest_checkpoint(train: Callable[..., Told]) -> None:
    told = train()
    run = told.run
    os.kill(run.pid(1), signal.SIGSTOP)
    told.until(lambda i: blames(i, "frozen", 1) and told.shows_stacks(i) and i.closed is not None)
    end_as_undisturbed(told, attempts=2)
    (incident,) = told.grave()
    assert "started_again_from_step" in told.outcome(incident)
    assert run.lives()[-1]["first"] >= LEARNT - 10
    (stopping,) = stoppings(told)
    assert (stopping.kill_now, stopping.incident) == ((1,), incident.id)


@pytest.mark.long
def test_a_held_interpreter_is_named_with_the_line_that_holds_it(train: Callable[..., Told]) -> None:
    told = train()
    told.run.tell(0, "gil")
    incident = told.until(lambda i: blames(i, "held", 0) and told.shows_stacks(i) and i.closed is not None)
    assert "hold_the_interpreter" in str(of_incident(told.all_records(), incident.id))
    end_as_undisturbed(told, attempts=2)
    assert [i.id for i in told.grave()] == [incident.id]


@pytest.mark.long
def test_of_two_ranks_at_the_same_step_the_one_that_did_not_reach_the_collective_is_named(
    train: Callable[..., Told],
) -> None:
    told = train("--on", "hang=restart@4")
    told.run.tell(1, "sleep")
    incident = told.until(lambda i: blames(i, "hang", 1) and told.shows_stacks(i) and i.closed is not None)
    assert {"behind_in_collectives", "ranks_wait_for_it"} <= told.codes(incident)
    assert "forward" in str(of_incident(told.all_records(), incident.id))
    end_as_undisturbed(told, attempts=2)
    assert [i.id for i in told.grave()] == [incident.id]


@pytest.mark.long
def test_a_peer_that_waits_for_a_rank_that_died_is_no_hang(train: Callable[..., Told]) -> None:
    told = train("--on", "hang=restart@4")
    told.run.kill(1)
    end_as_undisturbed(told, attempts=2)
    (incident,) = told.grave()
    assert incident.kind == "crash"
    assert incident.about.rank is not None
    assert incident.about.rank.rank == 1
    assert KILLED in phrases(*of_incident(told.all_records(), incident.id))


# ── what only looks like it ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_an_evaluation_and_a_pause_that_nobody_announced_end_no_rank(train: Callable[..., Told]) -> None:
    told = train()
    run = told.run
    for order in ("eval 8", "quiet 8"):
        before = run.step()
        run.tell(1, order)
        run.until(lambda before=before: run.step() > before + LEARNT, PATIENCE)  # type: ignore[misc]
    for incident in told.incidents(*TROUBLES - MILD):
        assert incident.kind == "hang"
        told.until(lambda i, id=incident.id: i.id == id and told.went_on_by_itself(i))  # type: ignore[misc]
    end_as_undisturbed(told, attempts=1)
    assert len(told.incidents("hang")) <= 1, "of the evaluation nothing is told"


@pytest.mark.long
def test_a_rank_that_computes_while_it_holds_its_interpreter_is_left_alone(train: Callable[..., Told]) -> None:
    told = train()
    run = told.run
    before = run.step()
    run.tell(1, "spin 5")
    run.until(lambda: run.step() > before + 50, PATIENCE)
    for incident in told.incidents(*TROUBLES - MILD):
        assert blames(incident, "held", 1)
    end_as_undisturbed(told, attempts=1)


# ── who acts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_dry_run_only_says_what_would_be_done(train: Callable[..., Told]) -> None:
    told = train("--dry-run-policy")
    pid = told.run.pid(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        incident = told.until(lambda i: blames(i, "frozen", 1) and "policy_held_back" in told.codes(i))
        told.until(told.shows_stacks)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    told.until(lambda i: i.id == incident.id and told.went_on_by_itself(i))
    end_as_undisturbed(told, attempts=1)
    assert not [record for record in told.records() if isinstance(record, (ResponseBegan, AttemptStopping))]


@pytest.mark.long
def test_a_weaver_that_is_killed_while_a_rank_hangs_acts_once(train: Callable[..., Told]) -> None:
    told = train()
    os.kill(told.run.pid(0), signal.SIGSTOP)
    opened = told.until(lambda i: blames(i, "frozen", 0))
    told.up.kill("weaver")
    told.until(lambda i: blames(i, "frozen", 0) and told.shows_stacks(i) and i.closed is not None)
    end_as_undisturbed(told, attempts=2)
    assert [i.id for i in told.incidents(*HANGS)] == [opened.id]
    assert len(stoppings(told)) == 1
    assert len([record for record in told.records() if isinstance(record, ResponseBegan)]) == 1

"""Ranks that are slow, numbers that go bad: named, and dealt with as the policy of the job says, and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns import hangs
from tests.flow.faults import Run, Up
from tests.flow.scripts import trained
from tests.flow.troubled import TROUBLED, Told, blames
from torchloom.protocol.records import ChangeSettled
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan

NOT_STORED = 2
"""Steps before a bad one whose loss may not have been stored: one in 50 ms is, and a step takes 20 ms at least."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def train(start: Callable[..., Run], up: Up) -> Callable[..., Told]:
    """Two ranks that train until they are told to end, and of which it is known how they fare."""

    def begin(*words: str) -> Told:
        told = Told(start("--grace", "1", *words, script=TROUBLED, steps=1_000_000), up)
        told.until_learnt()
        return told

    return begin


def ends_well(told: Told, attempt: int) -> None:
    """With the parameters of a training to which nothing happened."""
    told.until_learnt(attempt, further=11)
    code, last = told.run.end_now()
    assert code == 0, told.run.text()
    assert told.run.ends() == [trained(last)] * 2
    assert told.up.attempts(told.run.job) == list(range(1, attempt + 1))


def responses(told: Told) -> list[ResponseBegan]:
    return [record for record in told.records() if isinstance(record, ResponseBegan)]


@pytest.mark.long
def test_a_slow_rank_is_named_and_nobody_is_ended(train: Callable[..., Told]) -> None:
    told = train()
    told.run.tell(1, "slow")
    incident = told.until(lambda i: i.kind == "straggler")
    assert blames(incident, "straggler", 1)
    told.run.tell(1, "well")
    told.until(lambda i: i.id == incident.id and "as_fast_as_peers" in told.outcome(i))
    ends_well(told, attempt=1)
    assert [i.id for i in told.incidents("straggler")] == [incident.id]
    assert responses(told) == []


@pytest.mark.long
def test_a_slow_rank_may_be_started_anew_after_a_checkpoint_but_not_more_often_than_its_limit(
    train: Callable[..., Told],
) -> None:
    told = train("--on", "straggler=checkpoint+restart,limit=1")
    told.run.tell(0, "slow")
    first = told.until(lambda i: blames(i, "straggler", 0) and i.closed is not None)
    assert "checkpoint_asked_for" in told.codes(first)
    told.until_learnt(attempt=2)
    told.run.tell(0, "slow")
    told.until(lambda i: blames(i, "straggler", 0) and i.id != first.id and "policy_held_back" in told.codes(i))
    ends_well(told, attempt=2)
    assert [(r.kind, r.do, r.ranks) for r in responses(told)] == [("straggler", ("checkpoint", "restart"), (0,))]
    saved = [record for record in told.all_records() if isinstance(record, ChangeSettled)]
    assert saved, "a checkpoint was agreed on by all ranks"
    (stopping,) = [record for record in told.records() if isinstance(record, AttemptStopping)]
    assert not stopping.counts, "it costs no restart of the job's budget"


@pytest.mark.long
def test_bad_numbers_lead_back_to_before_them_and_training_ends_as_if_they_had_never_been(
    train: Callable[..., Told],
) -> None:
    told = train("--on", "not_finite=rollback")
    told.run.tell(1, "nan")
    told.until(lambda i: i.kind == "not_finite" and i.closed is not None)
    ends_well(told, attempt=2)
    (incident,) = told.incidents("not_finite")
    assert "started_again_from_step" in told.outcome(incident)
    (response,) = responses(told)
    assert response.rollback is not None
    bad = int((told.run.folder / "nan-1").read_text())
    assert bad - NOT_STORED - 1 <= response.rollback.before <= bad <= response.step
    assert told.run.lives()[-1]["first"] < response.rollback.before


@pytest.mark.long
def test_a_short_storm_of_troubles_gives_the_right_verdict_each_time(tmp_path: Path, up: Up) -> None:
    blows = [hangs.Blow("freeze", 1), hangs.Blow("stop_for_a_moment", 0, 0.3), hangs.Blow("hold", 0)]
    found = hangs.storm(tmp_path, up, hangs.QUICK, blows)
    assert found.problems == []
    assert found.restarts == 2


def test_a_plan_of_troubles_depends_on_its_seed_alone() -> None:
    assert hangs.plan(7, hangs.QUICK) == hangs.plan(7, hangs.QUICK) != hangs.plan(8, hangs.QUICK)

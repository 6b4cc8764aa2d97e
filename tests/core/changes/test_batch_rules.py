"""What a change of the batch size changes with it, and ranks whose loaders are not at the same place."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.changes.made import A, B, a_set, request, stand
from tests.core.loom import Loom, life
from torchloom.core.changes.batch_rules import with_rules
from torchloom.core.changes.requests import request_change
from torchloom.core.changes.two_phase_commit import describe_success
from torchloom.core.decision import Refused
from torchloom.core.events import ReplyReceived, ReportReceived
from torchloom.protocol.data_loading import DataPlace
from torchloom.protocol.operator import Done
from torchloom.protocol.phrase import Phrase
from torchloom.protocol.rank import Knobs, KnobSpec, Propose, Ready, StepReport
from torchloom.protocol.records import Abort

KNOBS = (
    KnobSpec(name="batch_size", kind="int", value=64, low=1, role="batch_size"),
    KnobSpec(name="accumulation", kind="int", value=3, low=1, role="accumulation"),
    KnobSpec(name="critic:lr", kind="float", value=0.4, low=0, role="lr"),
    KnobSpec(name="clip", kind="float", value=1.0),
)
SPECS = {spec.name: spec for spec in KNOBS}
CURRENT = {spec.name: spec.value for spec in KNOBS}


def ruled(size: int = 16, without: str = "", **about: Any) -> dict[str, Any]:
    specs = {name: spec for name, spec in SPECS.items() if name != without}
    return with_rules(a_set(**{"values": {"batch_size": size}} | about), specs, CURRENT)


def code(caught: pytest.ExceptionInfo[Refused]) -> str:
    why = caught.value.answer.why
    assert isinstance(why, Phrase)
    return why.code


def test_without_a_rule_only_what_was_requested_changes() -> None:
    assert ruled(values={"clip": 2.0}) == {"clip": 2.0}


def test_a_step_keeps_its_samples() -> None:
    assert ruled(32, keep_global_batch=True) == {"batch_size": 32, "accumulation": 6}
    assert ruled(192, keep_global_batch=True) == {"batch_size": 192, "accumulation": 1}
    assert ruled(32, keep_global_batch=True, lr_rule="linear") == {"batch_size": 32, "accumulation": 6}, "as many"


def test_learning_rates_follow_the_samples_of_a_step() -> None:
    assert ruled(16, lr_rule="linear") == {"batch_size": 16, "critic:lr": pytest.approx(0.1)}
    assert ruled(16, lr_rule="sqrt") == {"batch_size": 16, "critic:lr": pytest.approx(0.2)}
    given = {"batch_size": 16, "critic:lr": 0.4}
    actor = {"actor:lr": replace(SPECS["critic:lr"], name="actor:lr")}
    values = with_rules(a_set(values=given, lr_rule="linear"), SPECS | actor, CURRENT | {"actor:lr": 0.2})
    assert values == {**given, "actor:lr": pytest.approx(0.05)}, "the rule scales the rates that are not given"


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"keep_global_batch": True, "size": 100}, "accumulation_not_whole"),
        ({"keep_global_batch": True, "without": "accumulation"}, "no_accumulation_knob"),
        ({"lr_rule": "linear", "without": "critic:lr"}, "no_lr_knob"),
        ({"lr_rule": "linear", "values": {"batch_size": 16, "critic:lr": 0.1}}, "given_and_ruled"),
        ({"keep_global_batch": True, "values": {"batch_size": 32, "accumulation": 6}}, "given_and_ruled"),
        ({"lr_rule": "sqrt", "values": {"clip": 2.0}}, "rule_without_batch_size"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(about: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as caught:
        ruled(**about)
    assert code(caught) == why


def test_sizes_that_fit_are_looked_for_near_the_requested_one() -> None:
    huge = {**CURRENT, "batch_size": 2**40, "accumulation": 1}
    ask = a_set(values={"batch_size": 2**20 + 1}, keep_global_batch=True)
    with pytest.raises(Refused) as caught:
        with_rules(ask, SPECS, huge)
    hint = caught.value.answer.hint
    assert isinstance(hint, Phrase)
    assert hint.args["sizes"] == (str(2**20),)


# In the change


def a_job() -> Loom:
    loom = Loom()
    for rank in (A, B):
        loom.join(rank, world_size=2, link=f"s:{rank.rank}")
        loom.happen(ReportReceived(rank, Knobs(incarnation=life(1), knobs=KNOBS)))
    loom.sent.clear()
    return loom


def proposed(loom: Loom) -> Propose:
    return next(command for _, command in loom.sent if isinstance(command, Propose))


def test_the_rule_is_applied_to_the_values_as_they_are_now() -> None:
    loom = a_job()
    loom.ask(a_set(values={"batch_size": 32}, lr_rule="linear"))
    for rank in (A, B):
        knobs = {**CURRENT, "critic:lr": 0.2} if rank == A else {}
        report = StepReport(incarnation=life(1), id=request(1), step=10, step_seconds=0.02, knobs=knobs)
        loom.happen(ReplyReceived(rank, report))
    assert proposed(loom).change.values == {"batch_size": 32, "critic:lr": pytest.approx(0.1)}
    assert loom.cluster.ledger.changes["c1"].before == {"batch_size": 64, "critic:lr": 0.2}
    change = loom.cluster.ledger.changes["c1"]
    answer = describe_success(loom.cluster, change)
    assert (answer.before, answer.values) == (change.before, change.change.values), "also what the rule has added"


def test_a_rehearsal_shows_what_the_rule_adds() -> None:
    answer = a_job().ask(a_set(values={"batch_size": 32}, keep_global_batch=True, dry_run=True)).answer
    assert isinstance(answer, Done)
    assert isinstance(answer.text, Phrase)
    assert [value.args["name"] for value in answer.text.args["values"]] == ["batch_size", "accumulation"]


@pytest.mark.parametrize("rule", ["none", "linear"])
def test_a_batch_size_does_not_change_gradually(rule: str) -> None:
    with pytest.raises(Refused) as caught:
        request_change(a_job().cluster, a_set(values={"batch_size": 32}, over=10, lr_rule=rule), "")
    assert code(caught) == "size_is_not_gradual"


def judged(*places: DataPlace | None) -> Abort | None:
    loom = a_job()
    loom.ask(a_set(values={"batch_size": 32}))
    stand(loom, step=10, ranks=(A,))
    stand(loom, step=12, ranks=(B,))
    assert proposed(loom).change.finished == 10, "a step that both have finished"
    for rank, place in zip((A, B), places, strict=True):
        loom.happen(ReplyReceived(rank, Ready(incarnation=life(1), id="c1", ok=True, place=place)))
    return loom.verdicts[-1].abort


def test_ranks_that_train_together_must_be_at_the_same_place() -> None:
    here = DataPlace(epoch=1, yielded=640, total=6400)
    assert judged(here, here) is None
    assert judged(None, None) is None, "a knob of the script's own"
    for other in (replace(here, yielded=704), replace(here, epoch=2), replace(here, total=6401), None):
        assert judged(here, other) == Abort(why="unequal", ranks=(B,))

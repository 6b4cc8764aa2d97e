"""Changes and orders, as the core carries them from the question to the outcome."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import pytest

from tests.core.changes.made import A, B, a_job, a_set, a_steer, request, stand
from tests.core.loom import Loom, life
from torchloom.core.changes import requests, two_phase_commit
from torchloom.core.decision import Decision
from torchloom.core.events import BeatReceived, ReplyReceived, ReportReceived, VerdictKnown
from torchloom.core.state import change_ledger
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import Presence
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No, Revert, SetKnobs
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import (
    Applied,
    Beat,
    ChangeSpec,
    Goodbye,
    Order,
    Ordered,
    Propose,
    QueryStep,
    Ready,
    StepReport,
    Verdict,
    Welcome,
)
from torchloom.protocol.records import (
    Abort,
    About,
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    IncidentOpened,
    JobBegan,
    OrderEnded,
    RankDied,
)
from torchloom.protocol.views import QueryKnobs
from torchloom.views.cluster_summary import knobs

T = TypeVar("T")


def sent(loom: Loom, kind: type[T]) -> list[tuple[RankId, T]]:
    return [(rank, command) for rank, command in loom.sent if isinstance(command, kind)]


def only(loom: Loom, kind: type[T]) -> T:
    """The one thing of its kind that was sent since the last look, to whomever."""
    found = {id(command): command for _, command in sent(loom, kind)}
    assert len({repr(command) for command in found.values()}) == 1
    return next(iter(found.values()))


def promise(loom: Loom, change: str, ranks: Iterable[RankId] = (A, B), number: int = 1) -> None:
    for rank in ranks:
        loom.happen(ReplyReceived(rank, Ready(incarnation=life(number), id=change, ok=True)))


def refuse(loom: Loom, change: str, rank: RankId, why: str = "no such knob", late: bool = False) -> None:
    loom.happen(ReplyReceived(rank, Ready(incarnation=life(1), id=change, ok=False, why=why, late=late)))


def judge(loom: Loom, stands: bool | None = None) -> Decision:
    """Let the server store the last verdict wanted, or have another one stand there already."""
    wanted = loom.verdicts[-1]
    if stands is None or stands == wanted.commit:
        return loom.happen(VerdictKnown(wanted.change, wanted.commit, wanted.abort))
    return loom.happen(VerdictKnown(wanted.change, stands, wanted.abort))


def take(loom: Loom, change: str, ranks: Iterable[RankId] = (A, B), ok: bool = True, result: str = "") -> None:
    step = loom.cluster.ledger.changes[change].change.step if change in loom.cluster.ledger.changes else 0
    for rank in ranks:
        loom.happen(ReplyReceived(rank, Applied(incarnation=life(1), id=change, step=step, ok=ok, result=result)))


def make(loom: Loom, number: int = 1, step: int = 10, **about: object) -> Done:
    """A whole change, from the question to the answer."""
    reply = f"to{number}"
    loom.ask(a_set(number, **about), reply)
    return carry(loom, number, step)


def carry(loom: Loom, number: int, step: int = 10) -> Done:
    lives = tuple(loom.cluster.runtime.operations.by_request[request(number)].lives)
    stand(loom, step, number, lives)
    change = f"c{loom.cluster.ledger.change_count}"
    promise(loom, change, lives)
    judge(loom)
    take(loom, change, lives)
    answer = loom.answers(f"to{number}")[-1]
    assert isinstance(answer, Done)
    return answer


def phase(loom: Loom, change: str = "c1") -> str:
    return loom.cluster.ledger.changes[change].phase.value


def raised_lr(step: int) -> Done:
    """The answer to `a_set()`, once all ranks have the change."""
    return Done(text=applied("c1", step), change="c1", step=step, before={"lr": 0.1}, values={"lr": 0.5})


def outcome(id: str, *parts: Phrase) -> Phrase:
    return phrase("outcome_of", id=id, outcome=phrase("together", parts=parts))


def applied(id: str, step: int, ranks: int = 2) -> Phrase:
    return outcome(id, phrase("applied_on", step=step, count=ranks))


def abort_phrase(why: str, *ranks: RankId, refusal: str = "") -> Phrase:
    return change_ledger.abort_phrase(Abort(why=why, ranks=ranks, refusal=refusal))  # type: ignore[arg-type]


def aborted(id: str, why: str, *ranks: RankId, refusal: str = "") -> Phrase:
    return phrase("change_aborted", id=id, why=abort_phrase(why, *ranks, refusal=refusal))


def told_no(loom: Loom, reply: str = "") -> No:
    answer = loom.answers(reply)[-1]
    assert isinstance(answer, No)
    return answer


# ── the whole way ──


def test_a_change_is_asked_proposed_promised_decided_taken_and_answered_with_its_step() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    assert {rank for rank, _ in sent(loom, QueryStep)} == {A, B}
    assert not loom.log[-1][1][0].__class__.__name__.startswith("Change")  # nothing is certain yet

    stand(loom, 10, ranks=(A,))
    assert not sent(loom, Propose)
    stand(loom, 12, ranks=(B,))
    proposed = loom.log[-1][1][0]
    assert isinstance(proposed, ChangeProposed)
    key = f"c1-{request(1)[:16]}"
    assert proposed.change == ChangeSpec(id="c1", number=1, step=14, values={"lr": 0.5}, key=key, finished=10)
    assert proposed.before == {"lr": 0.1}
    assert only(loom, Propose).change == proposed.change or len(sent(loom, Propose)) == 2

    promise(loom, "c1", (A,))
    assert not loom.verdicts
    promise(loom, "c1", (B,))
    assert [(v.change, v.commit) for v in loom.verdicts] == [("c1", True)]

    decided = judge(loom)
    assert decided.records == (ChangeDecided(id="c1", commit=True),)
    assert {(rank, v.commit) for rank, v in sent(loom, Verdict)} == {(A, True), (B, True)}
    assert loom.cluster.ledger.knobs["mnist"]["lr"].value == 0.5
    assert loom.answers("to1") == []

    take(loom, "c1", (A,))
    assert phase(loom) == "committed"
    take(loom, "c1", (B,))
    assert phase(loom) == "settled"
    settled = loom.log[-1][1][0]
    assert isinstance(settled, ChangeSettled)
    assert settled.applied == 2
    assert loom.answers("to1") == [raised_lr(14)]
    assert not loom.cluster.runtime.operations.by_request


def test_who_does_not_want_to_wait_is_answered_when_it_is_certain() -> None:
    loom = a_job()
    loom.ask(a_set(wait=False), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    (answer,) = loom.answers("to1")
    assert isinstance(answer, Done)
    assert answer.text == phrase("change_takes_effect", id="c1", reverts="", step=12, count=2)
    take(loom, "c1")
    assert len(loom.answers("to1")) == 1


def test_a_change_far_ahead_is_answered_after_a_while_and_still_settles() -> None:
    loom = a_job()
    loom.ask(a_set(at_step=100_000), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    loom.wait(two_phase_commit.REPLY_SECONDS + 2, heartbeat=(A, B))
    (answer,) = loom.answers("to1")
    assert isinstance(answer, Done)
    ahead = phrase("change_takes_effect", id="c1", reverts="", step=100_000, count=2)
    assert answer.text == phrase("change_reached", change=ahead, reached=0, count=2)
    take(loom, "c1")
    assert phase(loom) == "settled"


def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    loom = a_job()
    answer = loom.ask(a_set(dry_run=True)).answer
    assert isinstance(answer, Done)
    value = phrase("value_to_set", name="lr", before="0.1", after="0.5")
    assert answer.text == phrase("would_set", values=[value], count=2)
    assert not loom.sent


# ── what is refused at once ──


@pytest.mark.parametrize(
    ("about", "why", "hint"),
    [
        ({"job": "mnits"}, phrase("job_unknown", job="mnits"), phrase("did_you_mean", name="mnist")),
        (
            {"values": {"lrr": 1.0}},
            phrase("knob_unknown", job="mnist", name="lrr"),
            phrase("did_you_mean", name="lr"),
        ),
        (
            {"replica": "rr"},
            phrase("job_has_no_replica", job="mnist", replica="rr"),
            phrase("did_you_mean", name="r"),
        ),
        (
            {"replica": "r", "rank": 7, "values": {"depth": 2}},
            phrase("replica_has_no_rank", job="mnist", replica="r", rank=7),
            phrase("see_ranks"),
        ),
        ({"values": {}}, phrase("nothing_to_set"), phrase("how_to_set", job="mnist")),
        ({"values": {"tag": "b"}, "over": 10}, phrase("knob_not_a_number", name="tag"), phrase("leave_over_out")),
        (
            {"replica": "r", "rank": 0},
            phrase("knob_of_job", name="lr"),
            phrase("how_to_set_knob", job="mnist", name="lr"),
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anyone_is_asked(about: dict[str, object], why: Phrase, hint: Phrase) -> None:
    assert refusal(about) == No(why=why, hint=hint)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"lr": "fast"}, "expected a number"),
        ({"lr": True}, "expected a number"),
        ({"batch": 1.5}, "expected a whole number"),
        ({"lr": 2.0}, "above 1, the most it may be"),
        ({"batch": 0}, "below 1, the least it may be"),
        ({"lr": math.nan}, "expected a finite number"),
        ({"lr": math.inf}, "expected a finite number"),
        ({"tag": "x" * 100_000}, "100000 characters are more than 1000"),
        ({"lr": 0.2, "batch": -1}, "batch=-1: below 1"),
    ],
)
def test_a_value_that_a_knob_cannot_have_is_refused_before_anyone_is_asked(values: dict[str, object], why: str) -> None:
    answer = refusal({"values": values})
    assert answer.hint == phrase("see_bounds", job="mnist")
    assert isinstance(answer.why, str)  # what the knob says
    assert why in answer.why
    assert len(answer.why) < 300


def refusal(about: dict[str, object]) -> No:
    """Of a change that nobody is asked about."""
    loom = a_job()
    before = loom.cluster.state()
    ask = SetKnobs(**{"request": request(1), "job": "mnist", "values": {"lr": 0.5}, **about})  # type: ignore[arg-type]
    answer = loom.ask(ask).answer
    assert isinstance(answer, No)
    assert not loom.sent
    assert loom.cluster.state() == before
    return answer


def test_a_step_that_is_past_is_refused_with_who_is_how_far() -> None:
    loom = a_job()
    loom.ask(a_set(at_step=11), "to1")
    stand(loom, 10, ranks=(A,))
    stand(loom, 11, ranks=(B,))
    assert told_no(loom, "to1").why == phrase("step_past", step=11, rank=B, finished=11)
    assert not loom.cluster.ledger.changes
    assert not loom.cluster.runtime.operations.by_request


def test_a_step_asked_for_is_not_moved_when_it_proves_too_early() -> None:
    loom = a_job()
    loom.ask(a_set(at_step=11), "to1")
    stand(loom, 10)
    refuse(loom, "c1", B, "step 11 is past", late=True)
    judge(loom)
    assert told_no(loom, "to1").why == aborted("c1", "late", B, refusal="step 11 is past")
    assert phase(loom) == "aborted"


def test_a_second_operator_is_told_whose_change_is_under_way() -> None:
    loom = a_job()
    loom.ask(a_set(1, operator="ann"), "to1")
    under_way = phrase("another_under_way", operator="ann", job="mnist")
    assert loom.ask(a_set(2, operator="bob")).answer == No(why=under_way, hint=phrase("try_again_soon"))
    stand(loom)
    refused = loom.ask(a_set(3, operator="bob")).answer
    assert isinstance(refused, No)
    assert refused.why == phrase("change_under_way", id="c1", operator="ann", job="mnist")
    promise(loom, "c1")
    judge(loom)
    assert loom.ask(a_set(4, operator="bob")).answer is None  # it is decided: the next may come
    take(loom, "c1")
    assert isinstance(loom.answers("to1")[0], Done)


def test_a_job_without_a_living_rank_cannot_be_changed() -> None:
    loom = a_job(A)
    loom.leave(A)
    answer = loom.ask(a_set()).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("no_living_rank", job="mnist")


def test_a_lost_rank_must_be_back_or_dead_first() -> None:
    loom = a_job()
    loom.close(B, link="s:1")
    answer = loom.ask(a_set()).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("target_lost", rank=B, reason="Client Closed")
    loom.wait(4, heartbeat=(A,))
    assert loom.ask(a_set()).answer is None
    assert [rank for rank, _ in sent(loom, QueryStep)] == [A]


# ── refused, late, silent ──


def test_one_rank_that_refuses_ends_it_for_all_with_its_reason() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    refuse(loom, "c1", B, "lr=0.5: this rank has no such knob")
    assert [(v.change, v.commit) for v in loom.verdicts] == [("c1", False)]
    judge(loom)
    assert {(rank, v.commit) for rank, v in sent(loom, Verdict)} == {(A, False), (B, False)}
    assert told_no(loom, "to1").why == aborted("c1", "refused", B, refusal="lr=0.5: this rank has no such knob")
    assert phase(loom) == "aborted"
    assert loom.cluster.ledger.knobs["mnist"]["lr"].value == 0.1
    assert loom.cluster.ledger.in_force(A) == ()


def test_a_step_that_came_too_early_is_proposed_anew_further_ahead_and_not_for_ever() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    leads = []
    for attempt in range(1, two_phase_commit.ATTEMPTS + 1):
        front = 10 * attempt
        stand(loom, front)
        leads.append(loom.cluster.ledger.changes[f"c{attempt}"].change.step - front)
        assert loom.answers("to1") == []
        refuse(loom, f"c{attempt}", A, "step is past", late=True)
        judge(loom)
    assert leads == sorted(leads)
    assert leads[-1] > leads[0]
    assert told_no(loom, "to1").why == aborted("c4", "late", A, refusal="step is past")
    assert len(loom.cluster.ledger.changes) == two_phase_commit.ATTEMPTS


def test_a_rank_that_reaches_the_step_first_has_it_proposed_anew() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom, stands=False)
    assert phase(loom) == "aborted"
    stand(loom, 20)
    promise(loom, "c2")
    judge(loom)
    take(loom, "c2")
    assert loom.answers("to1")[0].change == "c2"  # type: ignore[union-attr]


def test_who_does_not_answer_is_asked_again_and_in_the_end_nothing_is_changed() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    loom.wait(1, heartbeat=(A, B))
    assert len(sent(loom, QueryStep)) >= 6
    loom.wait(5, heartbeat=(A, B))
    assert told_no(loom, "to1").why == phrase("ranks_unanswering", ranks=[A, B])
    assert not loom.cluster.ledger.changes

    loom.ask(a_set(2), "to2")
    stand(loom, number=2)
    promise(loom, "c1", (A,))
    loom.sent.clear()
    loom.wait(1, heartbeat=(A, B))
    assert {rank for rank, _ in sent(loom, Propose)} == {B}
    loom.wait(5, heartbeat=(A, B))
    judge(loom)
    assert told_no(loom, "to2").why == aborted("c1", "silent", B)


def test_a_verdict_that_could_not_be_written_is_wanted_again_as_it_was() -> None:
    good, bad = a_job(), a_job()
    for loom in (good, bad):
        loom.ask(a_set(), "to1")
        stand(loom)
    promise(good, "c1")
    refuse(bad, "c1", A)
    for loom in (good, bad):
        loom.wait(two_phase_commit.ANSWER_SECONDS + 1, heartbeat=(A, B))
    assert [v.commit for v in good.verdicts] == [True, True]
    assert [v.commit for v in bad.verdicts] == [False, False]
    assert bad.verdicts[0].abort == bad.verdicts[1].abort


def test_one_question_asked_twice_is_answered_twice_and_done_once() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    loom.ask(a_set(), "to2")
    loom.ask(a_set(), "to2")
    stand(loom)
    loom.ask(a_set(), "to3")
    promise(loom, "c1")
    judge(loom)
    take(loom, "c1")
    done = raised_lr(12)
    assert loom.answers("to1") == loom.answers("to2") == loom.answers("to3") == [done]
    assert loom.ask(a_set(), "to4").answer == done
    assert list(loom.cluster.ledger.changes) == ["c1"]


def test_replies_of_another_life_or_another_change_count_for_nothing() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    loom.happen(ReplyReceived(A, StepReport(incarnation=life(9), id=request(1), step=3)))
    stand(loom)
    promise(loom, "c1", (A,))
    promise(loom, "c1", (B,), number=9)
    promise(loom, "c7", (B,))
    promise(loom, "c1", (RankId("mnist", "r", 5),))
    assert not loom.verdicts
    assert loom.cluster.ledger.changes["c1"].change.step == 12


# ── the weaver restarts ──


def test_a_weaver_restarted_after_the_question_is_asked_again() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    again = loom.restarted()
    assert not again.cluster.runtime.operations.by_request
    make(again)


def test_a_weaver_restarted_after_the_proposal_asks_everyone_again_and_goes_on() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    again = loom.restarted()
    again.wait(1, heartbeat=(A, B))
    assert {rank for rank, _ in sent(again, Propose)} == {A, B}
    again.ask(a_set(), "to1")
    promise(again, "c1")
    judge(again)
    take(again, "c1")
    assert again.answers("to1") == [raised_lr(12)]


def test_a_weaver_restarted_after_the_verdict_was_written_learns_it_from_the_server() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    again = loom.restarted()
    again.wait(1, heartbeat=(A, B))
    refuse(again, "c1", A, "it is over already")  # it found the verdict by itself and took the change
    judge(again, stands=True)
    assert phase(again) == "committed"
    assert again.cluster.ledger.changes["c1"].outcome == phrase("all_ranks_ready")  # whatever this weaver wanted
    take(again, "c1")
    assert phase(again) == "settled"


def test_a_weaver_restarted_after_the_decision_tells_it_again_until_all_have_taken_it() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    take(loom, "c1", (A,))
    again = loom.restarted()
    again.ask(a_set(), "to2")
    again.wait(2, heartbeat=(A, B))
    assert {rank for rank, _ in sent(again, Verdict)} == {A, B}
    take(again, "c1", (A,))
    again.sent.clear()
    again.wait(2, heartbeat=(A, B))
    assert {rank for rank, _ in sent(again, Verdict)} == {B}
    take(again, "c1", (B,))
    assert again.answers("to2")[0].step == 12  # type: ignore[union-attr]
    assert again.restarted().cluster.state() == again.cluster.state()


def test_a_weaver_restarted_after_the_end_still_knows_how_it_ended() -> None:
    loom = a_job()
    done = make(loom)
    loom.ask(a_set(2), "to2")
    stand(loom, 20, 2)
    refuse(loom, "c2", A, "not today")
    judge(loom)
    again = loom.restarted()
    assert again.ask(a_set(1)).answer == done
    answer = again.ask(a_set(2)).answer
    assert isinstance(answer, No)
    assert answer.why == aborted("c2", "refused", A, refusal="not today")
    assert ClusterState(loom.cluster.settings, loom.cluster.state()).state() == loom.cluster.state()


# ── ranks come and go ──


def test_a_rank_that_dies_before_the_verdict_ends_it() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    loom.happen(ReportReceived(B, Goodbye(incarnation=life(1), how="failed", error="boom")))
    loom.wait(0.5, heartbeat=(A,))
    judge(loom)
    assert told_no(loom, "to1").why == aborted("c1", "gone", B)


def test_a_rank_that_dies_before_it_is_asked_ends_the_question() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    loom.happen(ReportReceived(B, Goodbye(incarnation=life(1), how="failed", error="boom")))
    loom.wait(0.5, heartbeat=(A,))
    assert told_no(loom, "to1").why == phrase("ranks_left_meanwhile", ranks=[B])


def test_a_rank_that_dies_after_the_verdict_is_unknown() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    take(loom, "c1", (A,))
    loom.happen(ReportReceived(B, Goodbye(incarnation=life(1), how="failed", error="boom")))
    loom.wait(0.5, heartbeat=(A,))
    (answer,) = loom.answers("to1")
    assert isinstance(answer, Done)
    assert answer.text == outcome("c1", phrase("applied_on", step=12, count=1), phrase("unknown_on", ranks=[B]))
    settled = loom.log[-1][1][0]
    assert isinstance(settled, ChangeSettled)
    assert (settled.applied, settled.unknown) == (1, (B,))


def test_a_change_that_nobody_is_known_to_have_taken_is_no_success() -> None:
    loom = a_job(A)
    loom.ask(a_set(), "to1")
    stand(loom, ranks=(A,))
    promise(loom, "c1", (A,))
    judge(loom)
    loom.happen(ReportReceived(A, Goodbye(incarnation=life(1), how="failed", error="boom")))
    loom.wait(0.5)
    assert told_no(loom, "to1").why == outcome("c1", phrase("unknown_on", ranks=[A]))


def test_a_job_that_begins_anew_leaves_no_one_waiting() -> None:
    loom = a_job(A)
    loom.ask(a_set(at_step=99), "to1")
    stand(loom, ranks=(A,))
    promise(loom, "c1", (A,))
    judge(loom)
    loom.leave(A)
    loom.cluster.runtime.operations.by_request[request(1)].applied.clear()
    operation = loom.cluster.runtime.operations.by_request[request(1)]
    loom.wait(4)
    loom.cluster.runtime.operations.by_request[request(1)] = operation  # as if the new run began before the next tick
    loom.join(A, number=2)
    assert not loom.cluster.ledger.changes
    loom.replies.clear()
    loom.wait(0.5)
    assert told_no(loom, "to1").why == phrase("change_run_over", id="c1", job="mnist")
    assert not loom.cluster.runtime.operations.by_request


def test_a_promise_for_a_change_that_the_job_began_without_is_ignored() -> None:
    loom = a_job(A)
    loom.ask(a_set(at_step=99), "to1")
    stand(loom, ranks=(A,))
    loom.cluster.fold([JobBegan(job="mnist")], loom.now)  # a new run begins while a rank of the last one is present
    assert not loom.cluster.ledger.changes
    promise(loom, "c1", (A,))
    loom.wait(0.5)
    assert told_no(loom, "to1").why == phrase("change_run_over", id="c1", job="mnist")


def test_a_rank_that_joins_before_the_verdict_ends_it() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    newcomer = RankId("mnist", "r", 2)
    loom.join(newcomer, link="s:2")
    promise(loom, "c1", (B,))
    judge(loom)
    assert told_no(loom, "to1").why == aborted("c1", "joined", RankId("mnist", "r", 2))


def test_a_new_life_before_the_verdict_ends_it_too() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    loom.close(A, link="s:0")
    loom.join(A, number=2, link="s:9")
    promise(loom, "c1", (B,))
    assert loom.verdicts[-1].commit is False


def test_a_rank_that_joins_while_the_verdict_is_written_is_welcomed_with_the_change() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    newcomer = RankId("mnist", "r", 2)
    loom.join(newcomer, link="s:2")
    loom.sent.clear()
    judge(loom)
    welcome = dict(sent(loom, Welcome))[newcomer]
    assert [change.id for change in welcome.changes] == ["c1"]


def test_a_rank_of_another_replica_does_not_disturb_a_change_of_one() -> None:
    loom = a_job()
    loom.ask(a_set(replica="r"), "to1")
    stand(loom)
    promise(loom, "c1", (A,))
    loom.join(RankId("mnist", "other", 0), link="s:2")
    promise(loom, "c1", (B,))
    assert loom.verdicts[-1].commit is True


# ── what is in force ──


def test_a_rank_that_starts_is_welcomed_with_what_is_in_force_oldest_first() -> None:
    loom = a_job()
    make(loom, 1, 10, values={"lr": 0.5})
    make(loom, 2, 20, values={"batch": 64})
    make(loom, 3, 30, replica="r", rank=1, values={"depth": 4})
    loom.ask(a_set(4, at_step=1000, values={"lr": 0.9}), "to4")
    stand(loom, 40, 4)
    promise(loom, "c4")
    judge(loom)
    loom.ask(a_steer("pause", 5), "to5")
    carry(loom, 5, 50)
    loom.close(A, link="s:0")
    loom.sent.clear()
    loom.join(A, number=2, link="s:9")
    welcome = dict(sent(loom, Welcome))[A]
    assert [(c.id, c.step) for c in welcome.changes] == [("c1", 12), ("c2", 22), ("c4", 1000)]
    assert [c.id for c in loom.cluster.ledger.in_force(B)] == ["c1", "c2", "c3", "c4"]


def test_a_knob_of_one_rank_changes_there_alone() -> None:
    loom = a_job()
    done = make(loom, values={"depth": 3}, replica="r", rank=1)
    assert done.text == applied("c1", 12, ranks=1)
    assert [c.id for c in loom.cluster.ledger.in_force(B)] == ["c1"]
    assert loom.cluster.ledger.in_force(A) == ()
    assert loom.cluster.ledger.knobs["mnist"]["depth"].value == 1
    assert loom.cluster.ledger.changes["c1"].target == "mnist/r/1"


def test_the_answer_has_the_values_before_and_after() -> None:
    loom = a_job()
    done = make(loom, values={"lr": 0.5, "batch": 64}, over=100)
    assert (done.before, done.values, done.over) == ({"lr": 0.1, "batch": 32}, {"lr": 0.5, "batch": 64}, 100)
    loom.ask(Revert(request=request(2), job="mnist", change="c1"), "to2")
    done = carry(loom, 2, 20)
    assert (done.before, done.values, done.over) == ({"lr": 0.5, "batch": 64}, {"lr": 0.1, "batch": 32}, 0)


def test_a_revert_names_the_later_changes_of_the_same_knobs() -> None:
    loom = a_job()
    make(loom, 1, values={"lr": 0.5, "depth": 1})
    make(loom, 2, 20, values={"batch": 64})
    make(loom, 3, 30, values={"lr": 0.5})
    make(loom, 4, 40, values={"lr": 0.6})
    make(loom, 5, 50, values={"depth": 3}, replica="r", rank=A.rank)
    make(loom, 6, 60, values={"lr": 0.7})
    loom.ask(Revert(request=request(7), job="mnist", change="c6"), "to7")
    assert carry(loom, 7, 70).overwrites == ()
    overwrites = {view.id: view.overwrites for view in knobs(loom.cluster, QueryKnobs(job="mnist")).changes}
    assert overwrites["c1"] == ("c4", "c5", "c7"), "c3 set the same value, c6 is reverted"
    assert (overwrites["c2"], overwrites["c4"], overwrites["c5"]) == ((), (), ()), "c7 restored what c4 had set"
    loom.ask(Revert(request=request(8), job="mnist", change="c1"), "to8")
    assert carry(loom, 8, 80).overwrites == ("c4", "c5", "c7")
    (first,) = (view for view in knobs(loom.cluster, QueryKnobs(job="mnist")).changes if view.id == "c1")
    assert first.overwrites == (), "it cannot be reverted again"


def test_reverting_brings_the_values_back_that_were_found() -> None:
    loom = a_job()
    make(loom, 1, values={"lr": 0.5, "batch": 64})
    loom.ask(Revert(request=request(2), job="mnist", change="c1", operator="bob"), "to2")
    done = carry(loom, 2, 20)
    assert done.change == "c2"
    assert loom.cluster.ledger.changes["c1"].reverted_by == "c2"
    assert loom.cluster.ledger.changes["c2"].change.values == {"lr": 0.1, "batch": 32}
    assert loom.cluster.ledger.knobs["mnist"]["lr"].value == 0.1
    assert [c.id for c in loom.cluster.ledger.in_force(A)] == ["c2"]
    answer = loom.ask(Revert(request=request(3), job="mnist", change="c1")).answer
    assert answer == No(why=phrase("reverted_already", change="c1", by="c2"))
    loom.ask(Revert(request=request(4), job="mnist", change="c2"), "to4")  # undo the undoing
    carry(loom, 4, 30)
    assert [c.id for c in loom.cluster.ledger.in_force(A)] == ["c3"]
    assert loom.cluster.ledger.knobs["mnist"]["lr"].value == 0.5


def test_what_still_lies_ahead_is_reverted_when_it_comes() -> None:
    loom = a_job()
    loom.ask(a_set(at_step=500), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    loom.ask(Revert(request=request(2), job="mnist", change="c1"), "to2")
    stand(loom, 20, 2)
    undoing = loom.cluster.ledger.changes["c2"].change
    assert undoing.step == 500  # where ranks that hold c1 take it, and then this
    assert undoing.number > 1


def test_what_never_took_effect_cannot_be_reverted() -> None:
    loom = a_job()
    answer = loom.ask(Revert(request=request(1), job="mnist", change="c1")).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("change_unknown", job="mnist", change="c1")
    loom.ask(a_set(2))
    stand(loom, number=2)
    refuse(loom, "c1", A)
    judge(loom)
    answer = loom.ask(Revert(request=request(3), job="mnist", change="c1")).answer
    assert isinstance(answer, No)
    assert answer.why == phrase(
        "change_set_nothing", id="c1", outcome=abort_phrase("refused", A, refusal="no such knob")
    )
    loom.ask(a_steer("pause", 4), "to4")
    carry(loom, 4, 20)
    assert isinstance(loom.ask(Revert(request=request(5), job="mnist", change="c2")).answer, No)


def test_an_aborted_revert_leaves_the_change_in_force() -> None:
    loom = a_job()
    make(loom)
    loom.ask(Revert(request=request(2), job="mnist", change="c1"), "to2")
    stand(loom, 20, 2)
    refuse(loom, "c2", A)
    judge(loom)
    assert [c.id for c in loom.cluster.ledger.in_force(A)] == ["c1"]


# ── disagreement ──


def test_a_rank_whose_beats_stay_behind_a_change_is_an_incident_at_the_second() -> None:
    loom = a_job()
    make(loom)
    loom.beat(A, step=11, change=0)
    loom.beat(A, step=12, change=1)
    loom.beat(B, step=11, change=0)
    assert not loom.beat(B, step=12, change=0).records  # it may have been under way
    opened = loom.beat(B, step=13, change=0).records[0]
    assert isinstance(opened, IncidentOpened)
    assert opened.about == About(rank=RankId("mnist", "r", 1), part="c1")
    assert not loom.beat(B, step=14, change=0).records
    assert loom.open_incidents() == [phrase("rank_astray", rank=B)]


def test_a_restarted_weaver_still_knows_what_beats_must_say() -> None:
    loom = a_job()
    make(loom)
    for again in (loom.restarted(), Loom(state=loom.cluster.state())):
        again.beat(B, step=13, change=0)
        assert again.beat(B, step=14, change=0).records


def test_a_rank_that_says_itself_that_it_was_cut_off_is_an_incident_once() -> None:
    said, beaten = a_job(), a_job()
    for loom in (said, beaten):
        loom.ask(a_set(), "to1")
        stand(loom)
        promise(loom, "c1")
        judge(loom)
        take(loom, "c1", (A,))
    for step in (12, 13):
        beaten.beat(B, step=step, change=0)
    for loom in (said, beaten):
        take(loom, "c1", (B,), ok=False, result="its step had passed")
        assert loom.open_incidents() == [phrase("rank_astray", rank=B)]
        missed = phrase("failed_on", ranks=[B], why="its step had passed")
        assert told_no(loom, "to1").why == outcome("c1", phrase("applied_on", step=12, count=1), missed)


def test_who_missed_a_change_is_told_also_if_only_the_next_lives_of_its_peers_take_it() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    loom.join(A, number=2)
    take(loom, "c1", (B,), ok=False, result="its step had passed")
    loom.wait(1, heartbeat=(B,))
    assert phrase("rank_astray", rank=B) in loom.open_incidents()


# ── pause, stop, checkpoint ──


@pytest.mark.parametrize("verb", ["pause", "stop", "checkpoint"])
def test_what_all_do_at_one_step_goes_the_same_way(verb: str) -> None:
    loom = a_job()
    loom.ask(a_steer(verb), "to1")
    stand(loom)
    assert loom.cluster.ledger.changes["c1"].change.action == verb
    promise(loom, "c1")
    judge(loom)
    for rank in (A, B):
        take(loom, "c1", (rank,), result=f"{rank.rank}.pt" if verb == "checkpoint" else "")
    (answer,) = loom.answers("to1")
    assert isinstance(answer, Done)
    assert answer.step == 12
    assert bool(answer.results) == (verb == "checkpoint")
    assert loom.cluster.ledger.in_force(A) == ()


@pytest.mark.parametrize("verb", ["pause", "stop", "checkpoint", "resume"])
def test_one_rank_of_a_group_cannot_be_told_alone(verb: str) -> None:
    loom = a_job()
    answer = loom.ask(a_steer(verb, replica="r", rank=1)).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("rank_not_alone", rank=1, others=1)
    assert answer.hint == phrase("address_replica", job="mnist", replica="r")
    assert not loom.sent


def test_a_checkpoint_nobody_can_save_is_refused() -> None:
    loom = a_job(saves=False)
    answer = loom.ask(a_steer("checkpoint")).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("no_checkpointer", job="mnist")


def test_a_failed_checkpoint_is_no_success_and_no_disagreement() -> None:
    loom = a_job()
    loom.ask(a_steer("checkpoint"), "to1")
    stand(loom)
    promise(loom, "c1")
    judge(loom)
    take(loom, "c1", (A,), result="a.pt")
    take(loom, "c1", (B,), ok=False, result="OSError: disk full")
    failed = phrase("failed_on", ranks=[B], why="OSError: disk full")
    assert told_no(loom, "to1").why == outcome("c1", phrase("applied_on", step=12, count=1), failed)
    assert loom.open_incidents() == []


def test_paused_ranks_take_a_change_where_they_stand() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom, 30, paused=True)
    assert loom.cluster.ledger.changes["c1"].change.step == 30


# ── orders ──


def obey(loom: Loom, rank: RankId, outcome: str = "applied", text: str = "", order: str = "o1") -> None:
    loom.happen(ReplyReceived(rank, Ordered(incarnation=life(1), id=order, outcome=outcome, text=text)))  # type: ignore[arg-type]


def test_an_order_is_logged_sent_to_each_life_and_answered_when_all_have_obeyed() -> None:
    loom = a_job()
    decision = loom.ask(a_steer("stacks"), "to1")
    assert [type(record).__name__ for record in decision.stored] == ["OrderGiven"]
    assert {(rank, order.incarnation) for rank, order in sent(loom, Order)} == {(A, life(1)), (B, life(1))}
    obey(loom, A, text="main thread")
    assert loom.answers("to1") == []
    obey(loom, B, text="also")
    results = ((A, "main thread"), (B, "also"))
    assert loom.answers("to1") == [Done(text=outcome("o1", phrase("order_applied", count=2)), results=results)]
    assert type(loom.ask(a_steer("stacks")).records[0]).__name__ == "OrderGiven"  # stacks are not kept: taken again


def test_a_request_repeated_after_its_order_ended_is_told_how_it_ended() -> None:
    loom = a_job()
    loom.ask(a_steer("resume"), "to1")
    for rank in (A, B):
        obey(loom, rank)
    assert loom.ask(a_steer("resume")).answer == Done(text=outcome("o1", phrase("order_applied", count=2)))
    assert loom.cluster.ledger.order_count == 1


def test_an_order_is_sent_again_to_who_is_silent_and_expires() -> None:
    loom = a_job()
    loom.ask(a_steer("resume"), "to1")
    obey(loom, A)
    loom.sent.clear()
    loom.wait(1, heartbeat=(A, B))
    assert {rank for rank, _ in sent(loom, Order)} == {B}
    loom.ask(a_steer("resume"), "to2")
    loom.wait(requests.EXPIRE_SECONDS, heartbeat=(A, B))
    why = outcome("o1", phrase("order_applied", count=1), phrase("order_expired", ranks=[B]))
    assert loom.answers("to1") == loom.answers("to2") == [No(why=why)]


def test_an_order_that_one_refuses_is_no_success() -> None:
    loom = a_job()
    loom.ask(a_steer("stacks"), "to1")
    obey(loom, A)
    obey(loom, B, "refused", "not allowed here")
    refused = phrase("order_refused", ranks=[B], said="not allowed here")
    assert told_no(loom, "to1").why == outcome("o1", phrase("order_applied", count=1), refused)


def test_an_order_to_one_that_died_in_between_is_unknown() -> None:
    loom = a_job()
    loom.ask(a_steer("stacks"), "to1")
    obey(loom, A)
    loom.happen(ReportReceived(B, Goodbye(incarnation=life(1), how="failed", error="boom")))
    loom.wait(0.5, heartbeat=(A,))
    (answer,) = loom.answers("to1")
    unknown = phrase("order_unknown", ranks=[B])
    assert answer == Done(text=outcome("o1", phrase("order_applied", count=1), unknown))


def test_a_kill_ends_well_when_those_killed_are_gone() -> None:
    loom = a_job()
    loom.ask(a_steer("kill"), "to1")
    for rank in (A, B):
        loom.close(rank, link=f"s:{rank.rank}")
    loom.wait(4)
    (answer,) = loom.answers("to1")
    assert isinstance(answer, Done)
    assert answer.text == outcome("o1", phrase("order_killed", ranks=[A, B]))


def test_a_restarted_weaver_gives_the_order_again_under_the_same_id() -> None:
    loom = a_job()
    loom.ask(a_steer("stacks"), "to1")
    obey(loom, A)
    again = loom.restarted()
    again.ask(a_steer("stacks"), "to1")
    again.wait(1, heartbeat=(A, B))
    assert {(rank, order.id) for rank, order in sent(again, Order)} == {(A, "o1"), (B, "o1")}
    obey(again, A)
    obey(again, B)
    assert again.answers("to1") == [Done(text=outcome("o1", phrase("order_applied", count=2)))]
    assert isinstance(again.log[-1][1][0], OrderEnded)


# ── what is kept ──


def test_old_changes_are_forgotten_but_not_those_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_ledger, "KEEP_CHANGES", 40)  # the same with fewer
    loom = a_job(A)
    make(loom, 1, 10, values={"batch": 64})
    for number in range(2, change_ledger.KEEP_CHANGES + 11):
        make(loom, number, 10 * number)
    kept = loom.cluster.ledger.changes
    assert len(kept) <= change_ledger.KEEP_CHANGES + 2
    assert "c1" in kept  # nothing has replaced it
    assert "c2" not in kept  # replaced, and long ago
    refused = change_ledger.KEEP_CHANGES + 11
    for number in range(refused, refused + change_ledger.KEEP_CHANGES + 5):
        loom.ask(a_set(number))
        stand(loom, 10, number, (A,))
        refuse(loom, f"c{number}", A)
        judge(loom)
        again = loom.ask(a_set(number)).answer
        assert isinstance(again, No)  # just ended: still known
        assert again.why == aborted(f"c{number}", "refused", A, refusal="no such knob")
    left = [change for change in loom.cluster.ledger.changes.values() if change.phase == "aborted"]
    assert len(left) == change_ledger.KEEP_CHANGES
    assert f"c{refused}" not in loom.cluster.ledger.changes
    assert len(loom.cluster.ledger.in_force(A)) == change_ledger.KEEP_CHANGES + 2  # the replaced, the newest, and c1
    assert loom.restarted().cluster.state() == loom.cluster.state()


def test_old_orders_are_forgotten() -> None:
    loom = a_job(A)
    for number in range(1, change_ledger.KEEP_CHANGES + 11):
        loom.ask(a_steer("stacks", number))
        obey(loom, A, order=f"o{number}")
    assert len(loom.cluster.ledger.orders) == change_ledger.KEEP_CHANGES
    assert "o1" not in loom.cluster.ledger.orders


def test_a_lost_rank_that_disagrees_is_still_found_by_its_beats() -> None:
    loom = a_job()
    make(loom)
    loom.close(B, link="s:1")
    for step in range(13, 18):
        loom.now += 1
        loom.beat(B, step=step, change=0)
    assert loom.presence(B) == "live"


def test_a_weaver_restarted_from_a_snapshot_gives_everyone_time_to_answer() -> None:
    loom = a_job()
    loom.ask(a_set(), "to1")
    stand(loom)
    again = Loom(state=loom.cluster.state())
    again.cluster.restart_runtime(again.now)
    again.wait(1, heartbeat=(A, B))
    assert not again.verdicts


def test_a_whole_number_beyond_any_float_is_refused() -> None:
    answer = a_job().ask(a_set(values={"batch": 10**400})).answer
    assert isinstance(answer, No)


def test_a_change_that_lies_ahead_does_not_hide_one_that_was_missed() -> None:
    loom = a_job()
    make(loom)
    loom.ask(a_set(2, at_step=1000))
    stand(loom, 20, 2)
    promise(loom, "c2")
    judge(loom)
    for step in (21, 22):
        loom.beat(B, step=step, change=0)
    assert loom.open_incidents() == [phrase("rank_astray", rank=B)]


def test_a_change_that_lies_ahead_is_withdrawn_and_never_has_an_effect() -> None:
    loom = a_job()
    loom.ask(a_set(1, values={"lr": 0.5}, at_step=1000))
    stand(loom, 20)
    promise(loom, "c1")
    judge(loom)
    loom.ask(Revert(request=request(2), job="mnist", change="c1"))
    stand(loom, 30, 2)
    withdrawal = loom.cluster.ledger.changes["c2"].change
    assert (withdrawal.step, withdrawal.values, withdrawal.withdraws) == (1000, {}, "c1")
    promise(loom, "c2")
    judge(loom)
    assert [change.id for change in loom.cluster.ledger.in_force(A)] == ["c2"]
    knob = loom.cluster.ledger.knobs["mnist"]["lr"]
    assert (knob.value, knob.change) == (0.1, "")


def ahead(loom: Loom, number: int, ask: SetKnobs | None = None) -> None:
    """A change that is certain and that nobody has reached; by default it reverts the one before."""
    loom.ask(ask or Revert(request=request(number), job="mnist", change=f"c{number - 1}"))
    stand(loom, 20, number)
    promise(loom, f"c{number}")
    judge(loom)


def test_a_revert_that_lies_ahead_is_undone_by_setting_the_values_for_those_who_were_welcomed_without_them() -> None:
    loom = a_job()
    make(loom, values={"lr": 0.5})
    ahead(loom, 2)
    loom.join(B, number=2, link="s:2")  # is not told of c1: it was reverted
    assert [change.id for change in only(loom, Welcome).changes] == ["c2"]
    loom.ask(Revert(request=request(3), job="mnist", change="c2"))
    stand(loom, 20, 3, (A,))
    loom.happen(ReplyReceived(B, StepReport(incarnation=life(2), id=request(3), step=15, step_seconds=0.02)))
    undoing = loom.cluster.ledger.changes["c3"]
    assert undoing.change.step == loom.cluster.ledger.changes["c2"].change.step
    assert (undoing.change.values, undoing.change.withdraws) == ({"lr": 0.5}, "")
    assert undoing.before == {"lr": 0.1}  # as c2 leaves it, at that very step


def test_a_withdrawal_that_is_reverted_brings_the_change_back_ahead_or_past() -> None:
    loom = a_job()
    ahead(loom, 1, a_set(over=7, at_step=1000))
    ahead(loom, 2)
    ahead(loom, 3)
    again = loom.cluster.ledger.changes["c3"]
    assert (again.change.step, again.change.values, again.change.over) == (1000, {"lr": 0.5}, 7)
    assert again.before == {"lr": 0.1}
    assert [change.id for change in loom.cluster.ledger.in_force(A)] == ["c3"]

    loom = a_job()
    ahead(loom, 1, a_set(at_step=1000))
    ahead(loom, 2)
    take(loom, "c1")
    take(loom, "c2")
    loom.ask(Revert(request=request(3), job="mnist", change="c2"), "to3")
    carry(loom, 3, 1100)
    assert loom.cluster.ledger.changes["c3"].change.values == {"lr": 0.5}


def test_what_a_change_found_is_what_a_rank_said_it_had() -> None:
    loom = a_job()
    loom.ask(a_set(1, values={"lr": 0.5}))
    for rank in (A, B):
        said = {"lr": 0.123} if rank == A else {}
        standing = StepReport(incarnation=life(1), id=request(1), step=10, step_seconds=0.1, knobs=said)
        loom.happen(ReplyReceived(rank, standing))
    assert loom.cluster.ledger.changes["c1"].before == {"lr": 0.123}


def test_a_rank_that_an_operator_killed_is_known_to_be_dead_and_by_whom() -> None:
    loom = a_job()
    loom.ask(a_steer("kill"), "to1")
    obey(loom, A)
    decision = loom.close(A, link=f"s:{A.rank}")
    died = decision.records[0]
    assert isinstance(died, RankDied)
    assert died.confirmed
    assert died.reason == phrase("killed_by_operator", operator="ann", order="o1")


def test_a_rank_that_a_kill_never_reached_is_not_called_killed_when_its_link_closes_again() -> None:
    loom = a_job()
    loom.ask(a_steer("kill", replica="r", rank=A.rank), "to1")
    loom.close(A, link=f"s:{A.rank}")
    loom.wait(60, heartbeat=(B,))
    assert loom.answers("to1")  # presumed dead, which is what was wanted
    assert loom.cluster.ledger.orders["o1"].ok
    loom.open(A, link="s:9")  # presumed wrongly
    assert loom.cluster.ranks[A].presence is Presence.LIVE
    loom.close(A, link="s:9")
    assert loom.cluster.ranks[A].presence is Presence.LOST  # it may come back once more, and be asked


def test_a_change_that_its_only_rank_missed_is_a_failure_and_an_incident_if_its_beats_go_on_saying_so() -> None:
    loom = a_job(A)
    loom.ask(a_set(), "to1")
    stand(loom, ranks=(A,))
    promise(loom, "c1", (A,))
    judge(loom)
    take(loom, "c1", (A,), ok=False, result="its step had passed")
    assert told_no(loom, "to1").why == outcome("c1", phrase("failed_on", ranks=[A], why="its step had passed"))
    assert loom.open_incidents() == []  # no peer has it
    for step in (13, 14):
        loom.beat(A, step=step, change=0)
    assert loom.open_incidents() == [phrase("rank_astray", rank=A)]


def test_a_change_taken_while_paused_is_reverted_not_withdrawn() -> None:
    loom = a_job()
    loom.ask(a_set(1, values={"lr": 0.5}))
    stand(loom, 20, paused=True)
    promise(loom, "c1")
    judge(loom)
    take(loom, "c1", (A, B))
    loom.ask(Revert(request=request(2), job="mnist", change="c1"))
    stand(loom, 20, 2, paused=True)
    assert loom.cluster.ledger.changes["c2"].change.values == {"lr": 0.1}


def test_a_shown_value_names_the_latest_change_that_it_comes_from() -> None:
    loom = a_job()
    make(loom, 1, values={"depth": 100})
    make(loom, 2, values={"depth": 1}, replica="r", rank=A.rank)
    make(loom, 3, values={"depth": 7}, replica="r", rank=B.rank)
    loom.happen(BeatReceived(A, Beat(incarnation=life(1), step=30, change=2, knobs={"depth": 1})))
    (depth,) = (k for k in knobs(loom.cluster, QueryKnobs(job="mnist")).knobs if k.spec.name == "depth")
    assert (depth.value, depth.change) == (1, "c2")
    assert depth.changed == loom.cluster.ledger.changes["c2"].asked

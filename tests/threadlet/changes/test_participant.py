"""A rank's side of a change, without a thread or a wire: what it promises, takes, and does only once."""

from __future__ import annotations

from typing import Any

import pytest

from torchloom.knob_validation import BadValue
from torchloom.protocol.rank import Action, Applied, ChangeSpec, Propose, Ready, Verdict
from torchloom.threadlet.changes.participant import JOURNAL, NEVER, Handover, Participant

LIFE = "1" * 24


def a_change(number: int = 1, step: int = 10, action: Action = "set", over: int = 0, **values: Any) -> ChangeSpec:
    wanted = values or ({"x": float(number)} if action == "set" else {})
    return ChangeSpec(id=f"c{number}", number=number, step=step, action=action, values=wanted, over=over)


def a_withdrawal(number: int, of: ChangeSpec) -> ChangeSpec:
    return ChangeSpec(id=f"c{number}", number=number, step=of.step, withdraws=of.id)


def participant() -> Participant:
    return Participant(LIFE, lambda _: None)


def propose(rank: Participant, change: ChangeSpec, at: int = 5) -> Ready:
    return rank.propose(Propose(term=1, incarnation=LIFE, job="job", change=change), lambda: at)


def tell(rank: Participant, change: ChangeSpec, commit: bool = True) -> Applied | None:
    return rank.hear(Verdict(term=1, incarnation=LIFE, id=change.id, commit=commit))


def take(rank: Participant, step: int) -> list[str]:
    """Everything that is due, taken."""
    due = rank.due(step)
    for change in due:
        rank.done(change, step)
    return [change.id for change in due]


# ── promises ──


def test_nothing_is_due_for_a_rank_that_was_told_nothing() -> None:
    assert participant().due_step == NEVER
    assert not participant().holds(10**9)


def test_a_promise_stops_the_rank_at_the_step_until_the_verdict() -> None:
    rank, change = participant(), a_change(step=10)
    assert propose(rank, change).ok
    assert rank.due_step == 10
    assert rank.undecided(9) == []
    assert rank.undecided(10) == [change]
    assert rank.holds(10)
    assert take(rank, 10) == []
    tell(rank, change)
    assert rank.undecided(10) == []
    assert take(rank, 9) == []
    assert take(rank, 10) == ["c1"]
    assert rank.due_step == NEVER
    assert rank.in_force == 1


def test_a_promise_made_before_holds_while_the_training_waits_at_the_step() -> None:
    rank, change = participant(), a_change(step=10)
    assert propose(rank, change, at=9).ok
    assert propose(rank, change, at=10).ok  # asked again, by the network or a new weaver
    assert rank.undecided(10)
    tell(rank, change)
    assert propose(rank, change, at=10).ok
    assert take(rank, 10) == ["c1"]


def test_an_abort_frees_the_rank_unchanged() -> None:
    rank, change = participant(), a_change(step=10)
    propose(rank, change)
    assert tell(rank, change, commit=False) is None
    assert rank.due_step == NEVER
    assert take(rank, 10) == []
    assert rank.in_force == 0


@pytest.mark.parametrize("at", [10, 11, 500])
def test_a_step_that_has_come_is_too_late_to_promise(at: int) -> None:
    rank = participant()
    answer = propose(rank, a_change(step=10), at=at)
    assert (answer.ok, answer.late, answer.step) == (False, True, at)
    assert rank.due_step == NEVER


def test_a_paused_rank_can_promise_the_step_it_stands_at_but_none_before() -> None:
    rank = participant()
    rank.set_paused(True)
    assert propose(rank, a_change(step=10), at=10).ok
    assert propose(rank, a_change(2, step=9), at=10).late


def test_a_resume_does_not_let_a_rank_leave_a_step_with_a_promise_open() -> None:
    rank, change = participant(), a_change(step=10)
    rank.set_paused(True)
    propose(rank, change, at=10)
    rank.set_paused(False)
    assert rank.holds(10)
    tell(rank, change)
    assert rank.holds(10)
    assert take(rank, 10) == ["c1"]
    assert not rank.holds(10)


def test_what_a_rank_cannot_take_is_refused_with_the_reason() -> None:
    def refuse(change: ChangeSpec) -> None:
        raise BadValue("x", 1.0, "below 2, the least it may be")

    rank = Participant(LIFE, refuse)
    answer = propose(rank, a_change())
    assert (answer.ok, answer.late) == (False, False)
    assert "below 2" in answer.why
    assert rank.due_step == NEVER


# ── once, and in order ──


def test_whatever_is_said_twice_is_done_once_and_answered_again() -> None:
    rank, change = participant(), a_change(step=10)
    for _ in range(2):
        assert propose(rank, change).ok
        assert tell(rank, change) is None
    assert take(rank, 10) == ["c1"]
    assert take(rank, 11) == []
    assert tell(rank, change) == Applied(incarnation=LIFE, id="c1", step=10)
    assert not propose(rank, change).ok
    rank.welcome((change,))
    assert take(rank, 12) == []


def test_a_welcome_after_very_many_changes_brings_none_of_them_back() -> None:
    rank = participant()
    changes = tuple(a_change(n, step=n) for n in range(1, JOURNAL + 100))
    for change in changes:
        propose(rank, change, at=change.step - 1)
        tell(rank, change)
        assert take(rank, change.step) == [change.id]
    rank.welcome(changes)  # the link was lost and is back
    assert rank.due_step == NEVER
    assert take(rank, 10**6) == []
    assert len(rank.journal) == JOURNAL


def test_changes_are_taken_in_the_order_of_their_steps() -> None:
    rank = participant()
    rank.welcome((a_change(1, step=30), a_change(2, step=10), a_change(3, step=10)))
    assert rank.due_step == 10
    assert take(rank, 29) == ["c2", "c3"]
    assert rank.due_step == 30
    assert take(rank, 30) == ["c1"]


def test_an_earlier_change_heard_of_late_does_not_undo_a_later_one() -> None:
    rank = participant()
    rank.welcome((a_change(2, step=45, clip=4.0),))
    take(rank, 45)
    rank.welcome((a_change(1, step=40, clip=1.0, lr=1.0),))
    (late,) = rank.due(60)
    assert late.values == {"lr": 1.0}
    rank.done(late, 60)
    assert rank.in_force == 2
    rank.welcome((a_change(3, step=45, clip=5.0),))
    assert rank.due(60)[0].values == {"clip": 5.0}


# ── cut off, and begun again ──


def test_a_rank_that_was_cut_off_says_so_when_it_hears_that_the_others_took_it() -> None:
    rank, change = participant(), a_change(1, step=10)
    propose(rank, change)
    rank.skip(change)
    assert rank.due_step == NEVER
    answer = tell(rank, change)
    assert answer is not None
    assert not answer.ok
    rank.welcome((change, a_change(2, step=20, y=1.0)))
    assert take(rank, 20) == ["c2"]
    assert rank.in_force == 0  # the one before is still missing, and beats keep reporting that
    rank.welcome((a_change(3, step=30, x=3.0),))
    assert take(rank, 30) == ["c3"]
    assert rank.in_force == 3  # its value would have been replaced by now


def test_a_change_that_was_aborted_while_a_rank_was_cut_off_is_not_missed() -> None:
    rank, change = participant(), a_change(1, step=10)
    propose(rank, change)
    rank.skip(change)
    tell(rank, change, commit=False)
    rank.welcome((a_change(2, step=20),))
    take(rank, 20)
    assert rank.in_force == 2


def test_what_was_missed_is_made_good_by_what_comes_after_it_whenever_that_is_heard() -> None:
    rank, missed = participant(), a_change(2, step=20, x=2.0, y=2.0)
    propose(rank, missed)
    rank.skip(missed)
    rank.welcome((a_change(3, step=30, x=3.0),))
    take(rank, 30)
    tell(rank, missed)
    rank.welcome((a_change(1, step=10, x=1.0, y=1.0),))  # an earlier one that arrives late: y lacks it
    take(rank, 31)
    assert rank.in_force == 1
    rank.welcome((a_change(4, step=40, y=4.0),))
    take(rank, 40)
    assert rank.in_force == 4


def test_a_withdrawn_change_has_no_effect() -> None:
    rank, change = participant(), a_change(1, step=10)
    rank.welcome((change, a_withdrawal(2, change)))
    assert [due.values for due in rank.due(10)] == [{}, {}]


@pytest.mark.parametrize("promised", [True, False])
def test_a_rank_that_took_what_was_withdrawn_goes_on_saying_that_it_disagrees(promised: bool) -> None:
    rank, change = participant(), a_change(1, step=10, x=1.0)
    withdrawal = a_withdrawal(2, change)
    rank.welcome((change,))
    if promised:
        propose(rank, withdrawal)
        rank.skip(withdrawal)  # cut off
    assert take(rank, 10) == ["c1"]
    rank.welcome((withdrawal, a_change(3, step=20, y=3.0)))  # or it joined in between, and its next welcome was lost
    take(rank, 20)
    assert rank.in_force == 1
    rank.welcome((a_change(4, step=30, x=4.0),))
    take(rank, 30)
    assert rank.in_force == 4


@pytest.mark.parametrize("welcome_first", [True, False])
def test_changes_known_from_a_checkpoint_are_not_taken_again_whichever_is_heard_first(welcome_first: bool) -> None:
    rank, changes = participant(), (a_change(1, step=10), a_change(2, step=50))
    if welcome_first:
        rank.welcome(changes)
    rank.remember({"c1": 10})
    if not welcome_first:
        rank.welcome(changes)
    assert rank.in_force == 1
    assert take(rank, 40) == []
    assert take(rank, 50) == ["c2"]


def test_a_control_plane_that_counts_anew_is_not_mistaken_for_the_old_one() -> None:
    rank = participant()
    rank.remember({"c1": 10, "c2": 20})  # of another control plane
    propose(rank, a_change(1, step=500), at=90)  # and this one was lost in the middle
    change = a_change(1, step=100)
    assert propose(rank, change, at=90).ok
    assert rank.due_step == 100
    tell(rank, change)
    assert take(rank, 100) == ["c1"]
    assert rank.in_force == 1


# ── ramps ──


def test_a_ramp_is_due_at_every_step_until_its_end_or_until_it_is_overtaken() -> None:
    rank = participant()
    rank.begin_ramp(a_change(1, step=10, over=5, x=1.0), {"x": 0.0})
    rank.begin_ramp(a_change(2, step=12, over=20, y=1.0), {"y": 0.0})
    assert rank.due_step == 0
    rank.end_ramps(14)
    assert len(rank.ramps) == 2
    rank.end_ramps(15)
    assert [ramp.change.id for ramp in rank.ramps] == ["c2"]
    rank.begin_ramp(a_change(3, step=16, y=5.0), {"y": 0.3})  # at once: the ramp of y is over
    assert rank.ramps == []
    assert rank.due_step == NEVER


# ── healing from a peer ──


def handover(peer: Participant) -> Handover:
    return Handover(
        source="peer",
        knobs={},
        newest=peer.newest,
        taken=dict(peer.taken),
        given=dict(peer.given),
        ramps=tuple(peer.ramps),
    )


def both_promise(*changes: ChangeSpec) -> tuple[Participant, Participant]:
    ranks = participant(), participant()
    for rank in ranks:
        for change in changes:
            assert propose(rank, change).ok
            tell(rank, change)
    return ranks


def test_what_a_peer_took_is_taken_by_healing_and_answered_once() -> None:
    change = a_change(x=1.0)
    peer, healing = both_promise(change)
    take(peer, 10)
    ended, own = healing.adopt(handover(peer))
    assert [(ended_change, answer.ok) for ended_change, answer in ended] == [(change, True)]
    assert own == set()
    assert take(healing, 10) == []
    assert healing.in_force == 1
    assert tell(healing, change) == ended[0][1]  # asked again, answered again
    assert healing.adopt(handover(peer)) == ([], set())


def test_what_a_peer_has_not_taken_is_still_to_come() -> None:
    early, late = a_change(1, step=10, x=1.0), a_change(2, step=20, x=2.0)
    peer, healing = both_promise(early, late)
    take(peer, 10)
    healing.adopt(handover(peer))
    assert healing.due_step == 20
    assert take(healing, 20) == ["c2"]


def test_a_pause_that_is_over_for_the_peer_does_not_begin_here() -> None:
    change = a_change(action="pause")
    peer, healing = both_promise(change)
    take(peer, 10)
    healing.adopt(handover(peer))
    assert take(healing, 10) == []
    assert not healing.holds(10)


def test_a_checkpoint_that_was_healed_past_is_told_as_missing() -> None:
    change = a_change(action="checkpoint")
    peer, healing = both_promise(change)
    take(peer, 10)
    (_, answer), *_ = healing.adopt(handover(peer))[0]
    assert (answer.ok, answer.result) == (False, "healed past step 10")


def test_what_was_missed_comes_with_healing() -> None:
    change = a_change(x=1.0)
    peer, healing = participant(), participant()
    for rank in (peer, healing):
        propose(rank, change)
    healing.skip(change)  # it was cut off
    tell(healing, change)
    tell(peer, change)
    take(peer, 10)
    assert healing.in_force < 1
    healing.adopt(handover(peer))
    assert healing.in_force == 1
    answer = tell(healing, change)
    assert answer is not None
    assert answer.ok


def test_what_was_set_here_alone_or_later_stays() -> None:
    here_alone, for_all = a_change(1, step=10, x=1.0), a_change(2, step=12, y=1.0)
    peer, healing = both_promise(for_all)
    propose(healing, here_alone)
    tell(healing, here_alone)
    take(healing, 11)
    take(peer, 12)
    assert healing.adopt(handover(peer))[1] == {"x"}
    overruled = a_change(3, step=13, x=3.0)
    propose(peer, overruled, at=12)
    tell(peer, overruled)
    take(peer, 13)
    assert healing.adopt(handover(peer))[1] == set()


def test_a_ramp_goes_on_where_it_is_with_the_peer() -> None:
    change = a_change(over=10, x=1.0)
    peer, healing = both_promise(change)
    take(peer, 10)
    peer.begin_ramp(change, {"x": 0.0})
    healing.adopt(handover(peer))
    assert [(ramp.change, ramp.before) for ramp in healing.ramps] == [(change, {"x": 0.0})]
    assert healing.due_step == 0

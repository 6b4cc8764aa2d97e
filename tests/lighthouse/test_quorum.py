"""Who trains together: the rules one by one, and what holds whatever happens."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.examples import examples
from torchloom.lighthouse.quorum import (
    MOST_BROKEN,
    RECENT,
    DurableState,
    Evicted,
    LighthouseState,
    Member,
    NotYet,
    Quorum,
    Rules,
    decide,
)
from torchloom.protocol.phrase import phrase

RULES = Rules(min_replicas=1, join_seconds=1.0, heartbeat_seconds=5.0)


def asked(state: LighthouseState, *ids: str, now: float = 0.0, **more: int) -> None:
    for id in ids:
        state.request_quorum(Member(id, **more), now)  # type: ignore[arg-type]


def quorum(state: LighthouseState, now: float = 0.0, rules: Rules = RULES) -> Quorum:
    """The one there must be now, announced."""
    found = decide(state, rules, now)
    assert isinstance(found, Quorum), found
    state.announce(found, rules, now)
    return found


def not_yet(state: LighthouseState, now: float = 0.0, rules: Rules = RULES) -> NotYet:
    found = decide(state, rules, now)
    assert isinstance(found, NotYet), found
    return found


def formed(*ids: str, rules: Rules = RULES) -> LighthouseState:
    """A lighthouse that has brought these together at 0."""
    state = LighthouseState()
    for id in ids:
        state.record_heartbeat(id, 0.0)
    asked(state, *ids)
    assert quorum(state, rules=rules).ids == tuple(sorted(ids))
    return state


# ── as torchft has it ────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_that_is_alone_trains_alone() -> None:
    assert formed("a").durable == DurableState(quorum=1, members=("a",))


def test_nobody_waits_and_nothing_is_decided() -> None:
    state = LighthouseState()
    state.record_heartbeat("a", 0.0)
    assert not_yet(state).until == math.inf


def test_members_stand_in_the_order_of_their_ids_with_all_they_said() -> None:
    state = LighthouseState()
    state.record_heartbeat("a", 0.0)
    state.request_quorum(Member("b", b"of b"), 0.0)
    state.request_quorum(Member("a", b"of a"), 0.0)
    assert [member.data for member in quorum(state).members] == [b"of a", b"of b"]


def test_half_of_those_alive_are_not_enough() -> None:
    state = LighthouseState()
    state.record_heartbeat("b", 0.0)
    asked(state, "a")
    waits = not_yet(state)
    assert waits.why == phrase("quorum_no_majority", ready=1, alive=2)
    assert waits.until == 5.0, "when b will have been silent for too long"
    assert not_yet(state, now=4.99)
    state.record_heartbeat("a", 4.0)
    assert quorum(state, now=5.0).ids == ("a",)


def test_most_of_those_alive_wait_for_the_others_as_long_as_the_join_timeout() -> None:
    state = LighthouseState()
    state.record_heartbeat("c", 0.0)
    asked(state, "a")
    asked(state, "b", now=0.5)
    waits = not_yet(state, now=0.6)
    assert waits.until == 1.0
    assert not_yet(state, now=0.99)
    assert quorum(state, now=1.0).ids == ("a", "b")


def test_all_alive_wait_for_nobody() -> None:
    state = LighthouseState()
    state.record_heartbeat("b", 0.0)
    asked(state, "a")
    asked(state, "b", now=0.5)
    assert quorum(state, now=0.5).ids == ("a", "b")


def test_fewer_than_min_replicas_wait() -> None:
    rules = Rules(min_replicas=2)
    state = LighthouseState()
    asked(state, "a")
    assert not_yet(state, rules=rules).why == phrase("quorum_too_few", ready=1, least=2)
    asked(state, "b")
    assert quorum(state, rules=rules).ids == ("a", "b")


def test_the_last_quorum_goes_on_at_once_whoever_else_is_alive() -> None:
    state = formed("a")
    for id in "bcd":
        state.record_heartbeat(id, 0.0)
    asked(state, "a", now=0.1)
    assert quorum(state, now=0.1) == Quorum(1, (Member("a"),), phrase("quorum_of_last", ready=1, alive=4))


def test_a_newcomer_that_waits_is_taken_with_the_last_quorum() -> None:
    state = formed("a", "b")
    asked(state, "c", now=0.1)
    asked(state, "a", "b", now=0.2)
    assert quorum(state, now=0.2).ids == ("a", "b", "c")


def test_who_wants_no_newcomers_gets_none_and_they_wait_on() -> None:
    state = formed("a", "b")
    asked(state, "c", now=0.1)
    asked(state, "a", now=0.2)
    asked(state, "b", now=0.2, shrink_only=True)
    assert quorum(state, now=0.2).ids == ("a", "b")
    assert state.waiting["c"].since == 0.2
    asked(state, "a", "b", now=0.3)
    assert quorum(state, now=0.3).ids == ("a", "b", "c")


def test_at_first_there_is_nothing_to_shrink() -> None:
    state = LighthouseState()
    state.record_heartbeat("b", 0.0)
    asked(state, "a", "b", shrink_only=True)
    assert quorum(state).ids == ("a", "b")


def test_the_number_grows_with_the_members_and_when_one_could_not_commit() -> None:
    state = formed("a", "b")
    asked(state, "a", "b", now=1.0)
    assert quorum(state, now=1.0).number == 1
    asked(state, "a", now=2.0)
    asked(state, "b", now=2.0, commit_failures=1)
    assert quorum(state, now=2.0).number == 2
    asked(state, "a", "b", "c", now=3.0)
    assert quorum(state, now=3.0).number == 3


def test_one_that_waits_and_fell_silent_is_left_out_until_it_is_heard() -> None:
    state = LighthouseState()
    state.record_heartbeat("b", 0.0)
    state.record_heartbeat("c", 0.0)
    asked(state, "a", now=0.0)
    for id in "bc":
        state.record_heartbeat(id, 4.5)
    asked(state, "b", "c", now=5.5)
    assert quorum(state, now=5.5).ids == ("b", "c")
    assert "a" in state.waiting
    state.record_heartbeat("a", 5.6)
    assert not_yet(state, now=5.6).why.code == "quorum_no_majority"


def test_the_moment_until_which_it_waits_is_the_one_at_which_it_is_otherwise() -> None:
    """Also where seconds do not add up: 19.9 - 14.9 is a little less than 5."""
    rules = Rules(min_replicas=2, heartbeat_seconds=5.0)
    state = LighthouseState()
    asked(state, "a", now=14.9)
    waits = not_yet(state, now=14.9, rules=rules)
    assert waits.until == 19.9
    assert not_yet(state, now=waits.until, rules=rules).until == math.inf


# ── as only we have it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_survivors_of_an_evicted_member_go_on_at_once() -> None:
    state = formed("a", "b")
    state.evict(["b"])
    asked(state, "a", now=0.1)
    assert quorum(state, now=0.1) == Quorum(2, (Member("a"),), phrase("quorum_of_last", ready=1, alive=1))


def test_an_evicted_member_is_never_heard_again() -> None:
    state = formed("a", "b")
    state.evict(["b"])
    with pytest.raises(Evicted, match="b was evicted"):
        state.record_heartbeat("b", 1.0)
    with pytest.raises(Evicted):
        state.request_quorum(Member("b"), 1.0)
    assert state.alive(RULES, 1.0) == {"a"}


def test_a_member_that_waits_when_it_is_evicted_is_to_be_refused() -> None:
    state = formed("a", "b")
    calls = {state.request_quorum(Member("b"), 0.1), state.request_quorum(Member("b"), 0.2)}
    assert state.evict(["b", "b", "nobody"]) == {"b": calls, "nobody": set()}
    assert state.durable.evicted == ("b", "nobody")
    assert state.evict(["b"]) == {}
    assert state.durable.evicted == ("b", "nobody")


def test_survivors_are_never_fewer_than_min_replicas() -> None:
    rules = Rules(min_replicas=2, join_seconds=0.1)
    state = formed("a", "b", rules=rules)
    state.evict(["b"])
    asked(state, "a", now=0.1)
    assert not_yet(state, now=0.1, rules=rules).why.code == "quorum_too_few"
    asked(state, "c", now=0.2)
    assert quorum(state, now=0.2, rules=rules).ids == ("a", "c")


def test_when_all_were_evicted_newcomers_need_the_majority_again() -> None:
    state = formed("a", "b")
    state.evict(["a", "b"])
    state.record_heartbeat("d", 0.1)
    asked(state, "c", now=0.1)
    assert not_yet(state, now=0.1).why.code == "quorum_no_majority"


def test_newcomers_do_not_begin_anew_while_one_who_knows_the_parameters_lives() -> None:
    state = formed("a", "b", "c")
    state.evict(["a", "b"])
    asked(state, "d", "e", now=0.5)  # 2 of 3 alive
    state.record_heartbeat("c", 3.0)
    for id in "de":
        state.record_heartbeat(id, 3.0)
    waits = not_yet(state, now=4.0)  # for longer than the join timeout
    assert waits.why == phrase("quorum_without_last", ready=2, heirs=1)
    asked(state, "c", now=4.5)
    assert quorum(state, now=4.5).ids == ("c", "d", "e")


def test_newcomers_begin_when_nobody_of_the_last_quorum_was_heard_for_long() -> None:
    state = formed("a", "b", "c")
    state.evict(["a", "b"])
    asked(state, "d", "e", now=2.0)
    assert not_yet(state, now=4.9).until == 5.0  # c counts as dead, and may yet be stopped
    for now in (6.0, 10.0, 42.0):
        for id in "de":
            state.record_heartbeat(id, now)
    assert not_yet(state, now=44.9).until == 45.0
    assert quorum(state, now=45.0).ids == ("d", "e")


def test_newcomers_begin_at_once_when_the_last_one_of_it_is_known_to_be_gone() -> None:
    state = formed("a", "b", "c")
    state.evict(["a", "b"])
    asked(state, "d", "e", now=2.0)
    state.evict(["c"])
    assert quorum(state, now=2.0).ids == ("d", "e")


def test_after_a_restart_newcomers_wait_for_the_last_quorum_as_long_as_for_heartbeats() -> None:
    state = LighthouseState.restore(formed("a", "b").durable, now=100.0)
    asked(state, "c", "d", "e", now=100.0)
    for id in "cde":
        state.record_heartbeat(id, 103.0)
    assert not_yet(state, now=104.9).until == 105.0
    assert quorum(state, now=105.0).ids == ("c", "d", "e")


def test_one_of_the_last_quorum_is_enough() -> None:
    state = formed("a", "b", "c")
    state.evict(["a"])
    asked(state, "b", "d", now=0.5)
    assert not_yet(state, now=1.4)
    assert quorum(state, now=1.5).ids == ("b", "d")


def test_a_shrinking_quorum_is_never_empty() -> None:
    state = formed("a", "b")
    asked(state, "c", now=9.0, shrink_only=True)
    assert not_yet(state, now=9.0).why == phrase("quorum_too_few_of_last", ready=0, least=1)


def test_every_recent_quorum_that_lost_a_member_is_broken() -> None:
    state = formed("a", "b")  # 1
    state.evict(["x"])
    assert state.durable.broken == ()
    state.record_heartbeat("c", 1.0)
    asked(state, "c", now=1.0)
    asked(state, "a", "b", now=1.0)
    assert quorum(state, now=1.0).number == 2
    state.evict(["c"])
    assert state.durable.broken == (2,)
    state.evict(["a"])
    assert state.durable.broken == (1, 2)


def test_only_the_latest_are_remembered() -> None:
    state = LighthouseState()
    for number in range(3 * MOST_BROKEN):
        asked(state, "a", now=number, commit_failures=1)
        assert quorum(state, now=number).number == number + 1
    assert len(state.recent) == RECENT
    state = LighthouseState(
        DurableState(quorum=500, members=("a",), broken=tuple(range(MOST_BROKEN))), recent={500: ("a",)}
    )
    state.evict(["a"])
    assert state.durable.broken == (*range(1, MOST_BROKEN), 500)


def test_who_hangs_up_does_not_wait_any_more() -> None:
    state = LighthouseState()
    state.record_heartbeat("b", 0.0)
    call = state.request_quorum(Member("a"), 0.0)
    assert call
    state.withdraw("a", call)
    asked(state, "b")
    assert not_yet(state).why.code == "quorum_no_majority"
    state.withdraw("nobody", 99)


def test_who_asks_again_before_its_first_call_ends_still_waits() -> None:
    state = LighthouseState()
    first = state.request_quorum(Member("a", b"old"), 0.0)
    second = state.request_quorum(Member("a", b"new"), 0.1)
    assert first
    state.withdraw("a", first)
    found = decide(state, RULES, 0.1)
    assert isinstance(found, Quorum)
    assert found.members == (Member("a", b"new"),)
    assert state.announce(found, RULES, 0.1) == {second}


def test_nobody_goes_on_alone_right_after_a_restart() -> None:
    state = LighthouseState.restore(formed("a", "b").durable, now=100.0)
    asked(state, "a", now=100.1)
    assert not_yet(state, now=100.1).why.code == "quorum_no_majority"
    state.record_heartbeat("a", 104.0)
    assert not_yet(state, now=104.9)
    assert quorum(state, now=105.0) == Quorum(2, (Member("a"),), phrase("quorum_of_alive", ready=1, alive=1))


def test_after_a_restart_the_last_quorum_goes_on_under_its_number() -> None:
    state = LighthouseState.restore(formed("a", "b").durable, now=100.0)
    asked(state, "a", "b", now=100.1)
    assert quorum(state, now=100.1).number == 1


def test_the_evicted_stay_out_over_a_restart() -> None:
    before = formed("a", "b")
    before.evict(["b"])
    state = LighthouseState.restore(before.durable, now=100.0)
    with pytest.raises(Evicted):
        state.request_quorum(Member("b"), 100.0)
    asked(state, "a", now=100.0)
    assert quorum(state, now=100.0).ids == ("a",)


def test_a_lighthouse_that_stood_still_takes_nobody_for_dead() -> None:
    state = formed("a", "b")
    asked(state, "a", now=0.5)
    state.add_pause(60.0)
    assert not_yet(state, now=60.5).why.code == "quorum_no_majority"
    assert state.waiting["a"].since == 60.5


def test_the_long_dead_are_forgotten() -> None:
    state = formed("a")
    state.record_heartbeat("b", 0.0)
    asked(state, "a", now=50.0)
    quorum(state, now=50.0)
    assert set(state.heartbeats) == {"a"}


# ── whatever happens ─────────────────────────────────────────────────────────────────────────────────────────────────

IDS = st.sampled_from("abcdef")
WAITS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.9, 5.0, 7.0, 40.0])


class Harbour(RuleBasedStateMachine):
    """Replicas do what they like, and the lighthouse is asked after everything. What is known of it from outside is
    kept beside it, in the simplest of forms, and what it decides is held against that."""

    @initialize(min_replicas=st.integers(1, 3))
    def begin(self, min_replicas: int) -> None:
        self.rules = Rules(min_replicas, 1.0, 5.0)
        self.state = LighthouseState()
        self.now = 0.0
        self.heard_at: dict[str, float] = {}
        self.calls: dict[str, set[int]] = {}
        self.shrinks: dict[str, bool] = {}
        self.failures: dict[str, int] = {}
        self.evicted: set[str] = set()
        self.presumed: set[str] = set()
        self.numbers: dict[int, tuple[str, ...]] = {}
        self.last = 0

    @rule(id=IDS)
    def heartbeat(self, id: str) -> None:
        if id in self.evicted:
            with pytest.raises(Evicted):
                self.state.record_heartbeat(id, self.now)
        else:
            self.state.record_heartbeat(id, self.now)
            self.heard_at[id] = self.now
            self.presumed.discard(id)
        self.look()

    @rule(id=IDS, shrink_only=st.booleans(), commit_failures=st.sampled_from([0, 0, 0, 2]))
    def ask(self, id: str, shrink_only: bool, commit_failures: int) -> None:
        member = Member(id, b"", shrink_only, commit_failures)
        if id in self.evicted:
            with pytest.raises(Evicted):
                self.state.request_quorum(member, self.now)
        else:
            self.calls.setdefault(id, set()).add(self.state.request_quorum(member, self.now))
            self.heard_at[id] = self.now
            self.presumed.discard(id)
            self.shrinks[id], self.failures[id] = shrink_only, commit_failures
        self.look()

    @rule(id=IDS)
    def hang_up(self, id: str) -> None:
        for call in self.calls.pop(id, set()):
            self.state.withdraw(id, call)
        self.look()

    @rule(ids=st.sets(IDS, max_size=2))
    def evict(self, ids: set[str]) -> None:
        refused = self.state.evict(sorted(ids))
        for id in ids:
            assert self.calls.pop(id, set()) <= refused.get(id, set())
            self.heard_at.pop(id, None)
        self.evicted |= ids
        self.look()

    @rule(seconds=WAITS)
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule(seconds=WAITS)
    def restart(self, seconds: float) -> None:
        """Killed: what waited is gone, and what was kept is all there is."""
        self.now += seconds
        self.state = LighthouseState.restore(self.state.durable, self.now)
        self.calls.clear()
        members = self.numbers.get(self.last, ())
        self.heard_at = {id: self.now for id in members if id not in self.evicted}
        self.presumed = set(self.heard_at)
        self.look()

    def look(self) -> None:
        found = decide(self.state, self.rules, self.now)
        if isinstance(found, NotYet):
            assert found.until > self.now
            return
        self.judge(found)
        answered = self.state.announce(found, self.rules, self.now)
        assert answered == set().union(*(self.calls.pop(id) for id in found.ids))
        self.last = found.number
        self.numbers[found.number] = found.ids

    def judge(self, found: Quorum) -> None:
        ids = set(found.ids)
        alive = {id for id, at in self.heard_at.items() if self.now < at + 5.0}
        waiting = {id for id in alive if self.calls.get(id)}
        before = set(self.numbers.get(self.last, ()))
        survivors = before - self.evicted
        assert list(found.ids) == sorted(ids)
        assert ids <= waiting, "only who is alive and waits"
        assert not ids & self.evicted
        assert len(ids) >= self.rules.min_replicas
        goes_on = bool(survivors) and survivors <= waiting
        assert goes_on or 2 * len(waiting) > len(alive), "no minority begins without the last quorum"
        heirs = {
            id
            for id in survivors & set(self.heard_at)
            if self.now < self.heard_at[id] + (5.0 if id in self.presumed else 45.0)
        }
        assert not heirs or survivors & ids, "no newcomers alone while one may live who has trained"
        if len(ids) == 1 and not goes_on and not any(self.shrinks[id] for id in waiting):
            assert alive == ids, "alone only who is alone"
        if any(self.shrinks[id] for id in waiting) and self.last:
            assert ids <= before
        else:
            assert ids == waiting, "nobody who is ready is left out"
        if found.ids == self.numbers.get(self.last) and not any(self.failures[id] for id in ids):
            assert found.number == self.last
        else:
            assert found.number > max(self.numbers, default=0), "a number is given once"

    @invariant()
    def kept_is_what_was_said(self) -> None:
        assert self.state.durable.quorum == self.last
        assert self.state.durable.members == self.numbers.get(self.last, ())
        assert set(self.state.durable.evicted) == self.state.evicted == self.evicted
        lost = {number for number in list(self.numbers) if self.evicted & set(self.numbers[number])}
        assert set(self.state.durable.broken) <= lost
        if self.last in lost:
            assert self.last in self.state.durable.broken


TestHarbour = Harbour.TestCase
TestHarbour.settings = examples(100, stateful_step_count=40)

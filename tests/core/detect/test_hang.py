"""Who hangs, who waits, and when nobody is to be blamed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.core.detect.beats import SETTINGS
from torchloom.core.detect.hang import NEWS, HangTracker, RankProgress, diagnose
from torchloom.protocol.phrase import phrase

LIMIT = 2.0


def at(rank: int, step: int = 100, idle_seconds: float = 0.1, **more: object) -> RankProgress:
    return RankProgress(rank, step, idle_seconds, limit=LIMIT, **more)  # type: ignore[arg-type]


def test_ranks_that_make_steps_give_no_verdict() -> None:
    assert diagnose([at(0), at(1, idle_seconds=1.9), at(2, step=101)], SETTINGS) is None
    assert diagnose([], SETTINGS) is None


def test_a_stopped_process_is_frozen_and_its_peers_wait_for_it() -> None:
    found = diagnose([at(0, idle_seconds=5.0), at(1, idle_seconds=5.0, frozen=4.8), at(2, idle_seconds=5.0)], SETTINGS)
    assert found is not None
    assert (found.kind, found.culprits, found.waiting, found.certain) == ("frozen", (1,), (0, 2), True)
    assert (found.seconds, found.act_after) == (4.8, SETTINGS.frozen_act_seconds)
    assert diagnose([at(0), at(1, frozen=0.9)], SETTINGS) is None


def test_a_job_that_was_suspended_as_a_whole_is_not_ended_soon() -> None:
    found = diagnose([at(0, frozen=9.0), at(1, frozen=9.0)], SETTINGS)
    assert found is not None
    assert found.act_after == SETTINGS.hang_act_seconds


def test_a_rank_that_holds_the_interpreter_idly_is_acted_on_soon_and_one_that_computes_late() -> None:
    idle = diagnose([at(0, held=1.5, idle_seconds=1.5), at(1)], SETTINGS)
    busy = diagnose([at(0, held=1.5, idle_seconds=1.5, computes=True), at(1)], SETTINGS)
    assert idle is not None
    assert busy is not None
    assert (idle.kind, idle.culprits, idle.certain) == ("held", (0,), True)
    assert (busy.kind, busy.culprits, busy.certain) == ("held", (0,), False)
    assert idle.act_after == SETTINGS.held_act_seconds
    assert busy.act_after == SETTINGS.busy_act_seconds
    slow = diagnose([at(0, held=1.5, idle_seconds=1.5, computes=True, pause=90.0), at(1)], SETTINGS)
    assert slow is not None
    assert slow.act_after == 270.0


def test_steps_that_always_hold_the_interpreter_are_not_held() -> None:
    usual = at(0, held=5.0, idle_seconds=5.0, usual=4.0, pause=900.0)._replace(limit=30.0)
    assert diagnose([usual, at(1, idle_seconds=1.0)], SETTINGS) is None
    found = diagnose([usual._replace(held=10.0)], SETTINGS)
    assert found is not None
    assert found.act_after == 12.0


def test_loading_may_hold_the_interpreter_for_long() -> None:
    assert diagnose([at(0, held=20.0, started=False)], SETTINGS) is None
    found = diagnose([at(0, held=40.0, started=False)], SETTINGS)
    assert found is not None
    assert found.act_after == SETTINGS.busy_act_seconds


def test_the_rank_with_the_smallest_step_is_the_culprit() -> None:
    found = diagnose([at(0, 101, 9.0), at(1, 101, 8.0), at(2, 100, 9.5)], SETTINGS)
    assert found is not None
    assert (found.kind, found.culprits, found.waiting, found.certain) == ("hang", (2,), (0, 1), True)
    assert found.act_after == SETTINGS.hang_act_seconds


def test_at_equal_steps_the_one_that_did_not_reach_the_collective_is_the_culprit() -> None:
    ranks = [at(n, idle_seconds=9.0, collectives=500 if n != 3 else 497) for n in range(8)]
    found = diagnose(ranks, SETTINGS)
    assert found is not None
    assert found.culprits == (3,)
    assert found.waiting == (0, 1, 2, 4, 5, 6, 7)
    assert phrase("ranks_wait_for_it", ranks=((0, 2), (4, 7))) in found.why


def test_where_all_stand_at_the_same_place_nobody_is_singled_out() -> None:
    for collectives in (None, 500):
        found = diagnose([at(n, idle_seconds=9.0, collectives=collectives) for n in range(4)], SETTINGS)
        assert found is not None
        assert (found.culprits, found.waiting, found.certain) == ((), (), False)
        assert phrase("all_at_one_step", step=100) in found.why


def test_a_dead_peer_explains_those_that_wait() -> None:
    found = diagnose([at(0, idle_seconds=9.0), at(1, idle_seconds=9.0, dead=True), at(2, idle_seconds=9.0)], SETTINGS)
    assert found is not None
    assert (found.kind, found.culprits, found.waiting) == ("hang", (1,), (0, 2))


def test_a_rank_that_evaluates_explains_its_peers_until_its_time_is_up() -> None:
    peers = [at(n, 101, idle_seconds=900.0) for n in range(1, 4)]
    assert diagnose([at(0, 100, idle_seconds=900.0, phase="eval"), *peers], SETTINGS) is None
    found = diagnose([at(0, 100, idle_seconds=1900.0, phase="eval"), *peers], SETTINGS)
    assert found is not None
    assert found.culprits == (0,)


def test_waiting_for_data_is_part_of_training_and_explains_nothing() -> None:
    peers = [at(n, 101, idle_seconds=90.0) for n in range(1, 4)]
    found = diagnose([at(0, 100, idle_seconds=90.0, phase="data"), *peers], SETTINGS)
    assert found is not None
    assert found.culprits == (0,)


def test_a_rank_that_compiles_explains_its_peers() -> None:
    stands = [at(0, 0, idle_seconds=600.0, started=False), at(1, 1, idle_seconds=500.0)]
    assert diagnose(stands, SETTINGS) is None


def test_a_rank_of_which_nothing_is_known_explains_nothing() -> None:
    unknown = at(0, 0, idle_seconds=0.0, started=False)._replace(limit=float("inf"))
    found = diagnose([unknown, at(1, idle_seconds=9.0)], SETTINGS)
    assert found is not None
    assert found.culprits == (1,)


def test_a_rank_that_is_behind_the_one_that_evaluates_does_not_wait_for_it() -> None:
    stands = [at(0, 200, idle_seconds=60.0, phase="eval"), at(1, 100, idle_seconds=60.0)]
    found = diagnose(stands, SETTINGS)
    assert found is not None
    assert found.culprits == (1,)


def test_a_step_that_is_not_too_long_yet_explains_those_that_wait_for_it() -> None:
    slow = at(0, 100, idle_seconds=9.0)._replace(limit=60.0)
    assert diagnose([slow, at(1, 101, idle_seconds=9.0)], SETTINGS) is None


def test_where_ranks_do_not_synchronise_the_one_that_hangs_is_alone() -> None:
    for other in (5, 130, 10_000):
        found = diagnose([at(0, other, idle_seconds=0.1), at(1, 100, idle_seconds=9.0)], SETTINGS)
        assert found is not None
        assert (found.culprits, found.waiting, found.lone, found.certain) == ((1,), (), True, False)


def test_a_single_rank_that_hangs_is_named() -> None:
    found = diagnose([at(0, idle_seconds=9.0)], SETTINGS)
    assert found is not None
    assert (found.culprits, found.lone) == ((0,), False)


def test_nothing_is_done_before_three_of_its_longest_pauses() -> None:
    found = diagnose([at(0, 5, idle_seconds=700.0, pause=300.0), at(1, 6, idle_seconds=700.0)], SETTINGS)
    assert found is not None
    assert found.culprits == (0,)
    assert found.act_after == 900.0
    late = diagnose([at(0, idle_seconds=1801.0, phase="checkpoint")], SETTINGS)
    assert late is not None
    assert late.act_after == SETTINGS.phase_seconds + SETTINGS.hang_act_seconds


def test_where_nobody_stands_out_it_may_be_an_evaluation_that_nobody_announced() -> None:
    alone = diagnose([at(0, idle_seconds=700.0)], SETTINGS)
    together = diagnose([at(0, idle_seconds=700.0), at(1, idle_seconds=700.0)], SETTINGS)
    assert alone is not None
    assert together is not None
    assert alone.act_after == together.act_after == SETTINGS.phase_seconds


def test_a_job_of_which_all_ranks_are_held_or_stopped_may_be_suspended() -> None:
    for stands in ([at(0, held=5.0), at(1, held=5.0)], [at(0, frozen=5.0), at(1, frozen=5.0)], [at(0, frozen=5.0)]):
        found = diagnose(stands, SETTINGS)
        assert found is not None
        assert found.act_after == SETTINGS.hang_act_seconds


def test_the_settings_are_what_counts() -> None:
    strict = replace(SETTINGS, frozen_seconds=0.2, phase_seconds=5.0)
    assert diagnose([at(0, frozen=0.3)], strict) is not None
    assert diagnose([at(0, idle_seconds=6.0, phase="eval")], strict) is not None


# ── over time ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_when_a_long_wait_ends_those_that_are_heard_last_are_not_blamed() -> None:
    case = HangTracker()
    peers = [at(n, 100, idle_seconds=0.1) for n in range(1, 4)]
    case.look([at(0, 100), *peers], SETTINGS, 0.0)
    for now in range(1, 60):
        peers = [at(n, 100, idle_seconds=float(now)) for n in range(1, 4)]
        assert case.look([at(0, 100, idle_seconds=float(now), phase="eval"), *peers], SETTINGS, float(now)) is None
    back = at(0, 100, idle_seconds=60.0)  # trains again, and has made no step yet
    assert case.look([back, *peers], SETTINGS, 60.0) is None
    moved = at(0, 300, idle_seconds=0.01)  # heard first
    assert case.look([moved, *peers], SETTINGS, 61.0) is None
    assert case.look([moved, peers[0], *(at(n, 300) for n in (2, 3))], SETTINGS, 61.5) is None


def test_a_lone_hang_is_told_when_everyone_was_heard_again() -> None:
    case = HangTracker()
    case.look([at(0), at(1)], SETTINGS, 0.0)
    heard = [
        case.look([at(0, 100 + 10 * n), at(1, 100, idle_seconds=float(n))], SETTINGS, float(n)) for n in range(1, 12)
    ]
    told = [n for n, found in enumerate(heard, 1) if found is not None]
    assert told == list(range(int(LIMIT + NEWS + 0.5), 12))


def test_a_rank_that_was_paused_or_stopped_begins_anew() -> None:
    case = HangTracker()
    assert case.look([at(0, idle_seconds=500.0)], SETTINGS, 0.0) is None  # a weaver that starts knows nothing
    assert case.look([at(0, idle_seconds=501.0)], SETTINGS, 1.0) is None
    assert case.look([], SETTINGS, 2.0) is None  # paused
    assert case.look([at(0, idle_seconds=900.0)], SETTINGS, 400.0) is None
    assert case.look([at(0, idle_seconds=903.0)], SETTINGS, 403.0) is not None
    stopped = case.look([at(0, idle_seconds=910.0, frozen=5.0)], SETTINGS, 410.0)
    assert stopped is not None
    assert stopped.kind == "frozen"
    assert case.look([at(0, idle_seconds=911.0)], SETTINGS, 411.0) is None


stands = st.builds(
    at,
    rank=st.integers(0, 7),
    step=st.integers(0, 300),
    idle_seconds=st.floats(0, 5000),
    frozen=st.sampled_from([0.0, 0.5, 3.0]),
    held=st.sampled_from([0.0, 0.5, 3.0, 100.0]),
    computes=st.booleans(),
    phase=st.sampled_from(["", "eval"]),
    collectives=st.none() | st.integers(0, 5),
    dead=st.booleans(),
    started=st.booleans(),
    pause=st.floats(0, 100),
    usual=st.floats(0, 10),
)


@given(st.lists(stands, max_size=8, unique_by=lambda stand: stand.rank))
def test_whatever_is_seen_the_verdict_makes_sense(seen: list[RankProgress]) -> None:
    found = diagnose(seen, SETTINGS)
    if found is None:
        return
    known = {stand.rank: stand for stand in seen}
    assert known.keys() >= {*found.culprits, *found.waiting}
    assert not {*found.culprits} & {*found.waiting}
    assert found.why
    assert found.act_after > 0
    assert all(not known[rank].dead for rank in found.waiting)
    if found.kind != "hang":
        assert found.culprits

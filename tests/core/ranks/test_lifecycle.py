"""The life of a rank, as the core judges it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.loom import HI, Loom, a_hello, life
from torchloom.core.events import ReportReceived
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Farewell, Introduce, Muted, Welcome
from torchloom.protocol.records import IncidentOpened, JobBegan, JobEnded, RankDied, RankFound, RankJoined, RankLost
from torchloom.settings import Settings


def kinds(records: object) -> list[str]:
    return [type(record).__name__ for record in records]  # type: ignore[attr-defined]


def test_a_hello_begins_a_job_and_is_welcomed() -> None:
    loom = Loom()
    decision = loom.join()
    assert kinds(decision.records) == ["JobBegan", "RankJoined"]
    assert loom.sent == [(HI, Welcome(term=0, incarnation=life(1), beat_seconds=1.0))]
    assert loom.cluster.drmap.replicas_on("GPU-1") == (("mnist", "hi"),)


def test_a_closed_link_is_a_loss_at_once_and_a_death_after_the_grace() -> None:
    loom = Loom()
    loom.join()
    decision = loom.close()
    assert kinds(decision.records) == ["RankLost", "IncidentOpened"]
    assert loom.presence() == "lost"
    assert loom.wait(2.9) == []
    died = loom.wait(0.3)
    assert isinstance(died[0], RankDied)
    assert not died[0].confirmed
    assert loom.presence() == "dead"
    assert loom.cluster.drmap.replicas_on("GPU-1") == ()


def test_a_rank_that_reconnects_within_the_grace_was_never_dead() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    loom.now += 1
    assert kinds(loom.open().records) == ["RankFound", "IncidentAmended"]
    assert loom.presence() == "live"
    assert loom.open_incidents() == []
    assert not [r for r in loom.wait(4, heartbeat=(HI,)) if isinstance(r, RankDied)]


def test_a_new_link_before_the_old_one_is_noticed_closing_is_no_loss() -> None:
    loom = Loom()
    loom.join()
    loom.open(link="s:2")
    assert not loom.close(link="s:1").records
    assert loom.presence() == "live"


def test_a_stale_connection_gets_long_patience() -> None:
    loom = Loom()
    loom.join()
    loom.close(reason="Stale Connection")
    assert loom.wait(20) == []
    assert loom.presence() == "lost"
    loom.wait(11)
    assert loom.presence() == "dead"


def test_a_beat_under_way_when_its_rank_died_does_not_raise_it() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    loom.now += 0.01
    assert not loom.beat().records
    assert loom.presence() == "lost"


def test_a_beat_long_after_the_loss_proves_life() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    loom.now += 1.5
    assert isinstance(loom.beat(step=9).records[0], RankFound)
    assert loom.presence() == "live"


def test_one_presumed_dead_can_be_found() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    loom.wait(4)
    assert loom.presence() == "dead"
    loom.open()
    assert loom.presence() == "live"
    assert loom.cluster.drmap.replicas_on("GPU-1") == (("mnist", "hi"),)


def test_a_goodbye_is_no_death_whichever_comes_first() -> None:
    first, then = Loom(), Loom()
    for loom in (first, then):
        loom.join()
    first.leave()
    first.close()
    then.close()
    then.leave()
    assert first.presence() == then.presence() == "left"
    assert first.open_incidents() == then.open_incidents() == []
    assert isinstance(first.sent[-1][1], Farewell)


def test_a_failure_told_by_the_rank_is_final() -> None:
    loom = Loom()
    loom.join()
    loom.leave(how="failed", error="ValueError: bad batch")
    loom.close()
    loom.open()
    loom.now += 5
    loom.beat()
    assert loom.presence() == "failed"
    incident = next(iter(loom.cluster.incidents.values()))
    assert "ValueError: bad batch" in incident.evidence
    assert incident.closed is not None


def test_an_exit_that_was_seen_needs_no_grace() -> None:
    loom = Loom()
    loom.join()
    decision = loom.tell(
        RankExited(job="mnist", replica="hi", rank=0, incarnation=life(1), signal="SIGKILL", evidence="oom_kill 1")
    )
    assert isinstance(decision.records[0], RankDied)
    assert decision.records[0].confirmed
    assert loom.presence() == "failed"


def test_an_exit_with_code_zero_is_a_leave() -> None:
    loom = Loom()
    loom.join()
    loom.tell(RankExited(job="mnist", replica="hi", rank=0, incarnation=life(1), exit_code=0))
    assert loom.presence() == "left"


def test_a_crash_at_exit_outweighs_the_goodbye_in_either_order() -> None:
    crash = RankExited(job="mnist", replica="hi", rank=0, incarnation=life(1), signal="SIGSEGV")
    first, then = Loom(), Loom()
    for loom in (first, then):
        loom.join()
    first.leave()
    first.tell(crash)
    then.tell(crash)
    then.leave()
    assert first.presence() == then.presence() == "failed"


def test_an_old_incarnation_is_muted() -> None:
    loom = Loom()
    loom.join(number=5)
    decision = loom.join(number=4)
    assert decision.records == ()
    assert isinstance(decision.commands[0][1], Muted)
    assert decision.commands[0][1].newest == life(5)
    loom.leave(number=4)
    loom.close(number=4)
    assert loom.presence() == "live"
    assert loom.cluster.ranks[HI].incarnation == life(5)


def test_a_rank_id_used_twice_is_an_incident_and_the_newer_is_believed() -> None:
    loom = Loom()
    loom.join(number=1, pid=1)
    decision = loom.join(number=2, pid=2)
    opened = [r for r in decision.records if isinstance(r, IncidentOpened)]
    assert opened[0].what == phrase("rank_id_twice", rank=HI)
    assert {type(command) for _, command in decision.commands} == {Welcome, Muted}
    assert loom.cluster.ranks[HI].pid == 2


def test_a_restart_whose_predecessor_is_lost_is_not_a_duplicate() -> None:
    loom = Loom()
    loom.join(number=1)
    loom.close(number=1)
    decision = loom.join(number=2)
    assert not [r for r in decision.records if isinstance(r, IncidentOpened)]
    assert loom.open_incidents() == []
    assert loom.presence() == "live"
    assert not [r for r in loom.wait(5, heartbeat=(HI,)) if isinstance(r, RankDied)]


def test_a_rank_that_died_before_its_hello_was_read_is_lost_at_once() -> None:
    loom = Loom()
    loom.open(link="s:1")
    loom.close()
    decision = loom.happen(ReportReceived(HI, a_hello()))
    assert [k for k in kinds(decision.records) if k in {"RankJoined", "RankLost"}] == ["RankJoined", "RankLost"]
    assert loom.presence() == "lost"


def test_an_unknown_beat_is_asked_to_introduce_itself_but_not_at_every_beat() -> None:
    loom = Loom()
    assert isinstance(loom.beat().commands[0][1], Introduce)
    loom.now += 0.5
    assert not loom.beat().commands
    loom.now += 2
    assert loom.beat().commands


def test_silence_is_a_loss_with_long_patience() -> None:
    loom = Loom()
    loom.join()
    loom.beat()
    lost = [r for r in loom.wait(7) if isinstance(r, RankLost)]
    assert len(lost) == 1
    assert lost[0].patient
    assert isinstance(lost[0].reason, Phrase)
    assert lost[0].reason.code == "rank_silent"


def test_a_weaver_that_slept_blames_no_one() -> None:
    loom = Loom()
    loom.join()
    loom.beat()
    loom.now += 600  # the whole process was stopped
    loom.cluster.restart_runtime(loom.now)
    assert loom.wait(5) == []
    assert loom.presence() == "live"


def test_a_lost_rank_gets_its_whole_grace_again_after_a_restart_of_the_weaver() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    loom.now += 2.9
    again = loom.restarted()
    assert again.wait(Settings().reunion_seconds + 2.5) == []
    again.wait(1)
    assert again.presence() == "dead"


def test_the_roll_call_finds_who_died_meanwhile_and_who_is_back() -> None:
    gone, back = RankId("mnist", "a", 0), RankId("mnist", "b", 0)
    loom = Loom()
    loom.join(gone, link="s:a")
    loom.join(back, link="s:b")
    loom.close(back, link="s:b")
    again = loom.restarted()
    decision = again.call_roll((back, 1))
    assert {type(r).__name__ for r in decision.records} >= {"RankLost", "RankFound"}
    assert again.presence(gone) == "lost"
    assert again.presence(back) == "live"


def test_a_link_that_opened_while_the_roll_was_called_counts() -> None:
    loom = Loom()
    loom.join()
    again = loom.restarted()
    again.cluster.runtime.ask_roll()
    again.open(link="s:new")
    assert not again.call_roll().records
    assert again.presence() == "live"


def test_a_link_that_closed_while_the_roll_was_called_counts() -> None:
    loom = Loom()
    loom.join()
    again = loom.restarted()
    again.cluster.runtime.ask_roll()
    again.close()
    again.call_roll((HI, 1))
    assert again.presence() == "lost"


def test_a_job_ends_when_its_last_rank_has_left_for_a_while() -> None:
    loom = Loom()
    loom.join()
    loom.leave()
    assert loom.wait(1) == []
    ended = loom.wait(2)
    assert isinstance(ended[0], JobEnded)
    assert ended[0].outcome == "finished"


def test_a_job_whose_rank_died_has_failed_and_begins_again_with_a_new_life() -> None:
    loom = Loom()
    loom.join()
    loom.close()
    ended = [r for r in loom.wait(8) if isinstance(r, JobEnded)]
    assert ended[0].outcome == "failed"
    decision = loom.join(number=2)
    assert isinstance(decision.records[0], JobBegan)
    assert loom.cluster.jobs["mnist"].phase == "running"


def test_an_interrupted_job_is_stopped_not_failed() -> None:
    loom = Loom()
    loom.join()
    loom.leave(how="interrupted")
    assert [r.outcome for r in loom.wait(4) if isinstance(r, JobEnded)] == ["stopped"]


def test_a_new_run_drops_what_remained_of_the_last() -> None:
    loom = Loom()
    loom.join(RankId("mnist", "old", 0))
    loom.leave(RankId("mnist", "old", 0))
    loom.wait(4)
    loom.join(RankId("mnist", "new", 0))
    assert set(loom.cluster.ranks) == {RankId("mnist", "new", 0)}


def test_long_gone_replicas_of_a_running_job_are_forgotten() -> None:
    loom = Loom(Settings(keep_gone_ranks=3))
    loom.join()
    for n in range(10):
        loom.join(RankId("mnist", f"r{n}", 0))
        loom.leave(RankId("mnist", f"r{n}", 0))
        loom.now += 1
        loom.beat()
    loom.wait(1, heartbeat=(HI,))
    assert len(loom.cluster.ranks) == 4
    assert RankId("mnist", "r9", 0) in loom.cluster.ranks


def test_long_ended_jobs_are_forgotten_with_their_ranks() -> None:
    loom = Loom(Settings(keep_ended_jobs=2))
    for n in range(4):
        loom.join(RankId(f"job{n}", "r", 0))
        loom.leave(RankId(f"job{n}", "r", 0))
        loom.wait(4)
    loom.wait(1)
    assert set(loom.cluster.jobs) == {"job2", "job3"}
    assert {rank.job for rank in loom.cluster.ranks} == {"job2", "job3"}


def test_a_large_fleet_is_told_to_beat_more_slowly() -> None:
    loom = Loom(Settings(ranks_per_beat_second=2))
    for n in range(10):
        loom.join(RankId("mnist", "r", n))
    assert isinstance(loom.sent[-1][1], Welcome)
    assert loom.sent[-1][1].beat_seconds == 4.5


def test_repeating_a_hello_changes_nothing() -> None:
    loom = Loom()
    loom.join()
    before = loom.cluster.state()
    decision = loom.happen(ReportReceived(HI, a_hello()))
    assert isinstance(decision.commands[0][1], Welcome)
    assert loom.cluster.state() == before
    assert isinstance(loom.log[0][1][1], RankJoined)


def test_a_rank_whose_steps_are_counted_is_known_as_such_until_its_script_attaches() -> None:
    loom = Loom()
    counted = replace(a_hello(), counted=True)
    loom.happen(ReportReceived(HI, counted))
    assert loom.cluster.ranks[HI].counted
    assert loom.happen(ReportReceived(HI, counted)).records == ()
    assert kinds(loom.happen(ReportReceived(HI, a_hello())).records) == ["RankAttached"]
    assert not loom.cluster.ranks[HI].counted
    assert loom.happen(ReportReceived(HI, a_hello())).records == ()
    assert loom.sent[-1] == (HI, Welcome(term=0, incarnation=life(1), beat_seconds=1.0))

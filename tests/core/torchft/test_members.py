"""What replicas under torchft say of themselves, and whom a device that fails takes out of a quorum."""

from __future__ import annotations

import pytest

from tests.core.site import JOB, Site
from tests.core.torchft.made import evicted, member, outside, run_of, shine
from torchloom.core.events import ReportReceived, RequestReceived
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.state.rank_states import Presence
from torchloom.core.torchft.members import evict
from torchloom.protocol.facts import DeviceFailed, DeviceWarned, RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Rule, Torchft
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.operator import Fail, Register
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import (
    Discarded,
    Healed,
    Hello,
    Joined,
    MemberDiscarded,
    MemberHealed,
    MemberJoined,
    MemberRegrouped,
    Regrouped,
    Report,
)
from torchloom.protocol.records import Record

NEW, OLD = "1" * 24, "0" * 24
RANK = RankId("theirs", "r0", 0)


def living(incarnation: str = NEW) -> Site:
    site = Site()
    hello = Hello(incarnation=incarnation, node="n1", pid=1, devices=("GPU-1",))
    site.loom.happen(ReportReceived(RANK, hello))
    return site


def say(site: Site, report: Report, rank: RankId = RANK) -> tuple[Record, ...]:
    return site.loom.happen(ReportReceived(rank, report)).records


# ── what they say ──


@pytest.mark.parametrize(
    ("report", "record"),
    [
        (
            Joined(incarnation=NEW, member="r0:a", lighthouse="http://n1:1", version="0.1"),
            MemberJoined(
                rank=RANK, incarnation=NEW, member="r0:a", lighthouse="http://n1:1", version="0.1", devices=("GPU-1",)
            ),
        ),
        (
            Regrouped(incarnation=NEW, quorum=3, step=40, participants=2),
            MemberRegrouped(rank=RANK, incarnation=NEW, quorum=3, step=40, participants=2),
        ),
        (
            Healed(incarnation=NEW, step=40, source="r1:b", seconds=0.5),
            MemberHealed(rank=RANK, incarnation=NEW, step=40, source="r1:b", seconds=0.5),
        ),
        (
            Discarded(incarnation=NEW, step=40, count=2, quorum=3, why="a peer is gone"),
            MemberDiscarded(rank=RANK, incarnation=NEW, step=40, count=2, quorum=3, why="a peer is gone"),
        ),
    ],
)
def test_what_a_replica_says_is_in_the_log(report: Report, record: Record) -> None:
    assert say(living(), report) == (record,)


@pytest.mark.parametrize(
    "report",
    [
        Joined(incarnation=OLD, member="r0:a"),
        Regrouped(incarnation=OLD, quorum=3, step=40, participants=2),
        Healed(incarnation=OLD, step=40),
        Discarded(incarnation=OLD, step=40, count=2, quorum=3),
    ],
)
def test_a_life_that_is_over_is_not_listened_to(report: Report) -> None:
    assert say(living(), report) == ()
    assert say(living(), report, RankId("theirs", "nobody", 0)) == ()


def test_who_it_is_told_twice_is_known_once() -> None:
    site = living()
    joined = Joined(incarnation=NEW, member="r0:a")
    assert len(say(site, joined)) == 1
    assert say(site, joined) == ()
    assert site.loom.cluster.ranks[RANK].member == "r0:a"


def test_a_new_life_has_a_new_id_and_the_old_one_is_never_counted_on_again() -> None:
    site = living(OLD)
    say(site, Joined(incarnation=OLD, member="r0:a"))
    site.loom.close(RANK, 0)
    site.loom.cluster.runtime.hear_lighthouse("theirs", LighthouseBeat(incarnation=OLD, address="a:1"))
    site.loom.wait(30)
    hello = Hello(incarnation=NEW, node="n1", pid=2, devices=("GPU-1",))
    site.loom.happen(ReportReceived(RANK, hello))
    assert site.loom.cluster.ranks[RANK].member == ""
    assert evicted(site) == [("r0:a",)]


def test_one_whose_process_has_ended_without_a_word_is_evicted_though_its_link_may_be_all_that_was_lost() -> None:
    site = outside(True, "r0:a", "r1:b")
    rank = RankId("theirs", "r1", 0)
    incarnation = site.loom.cluster.ranks[rank].incarnation
    site.loom.close(rank, 2)
    assert site.loom.cluster.ranks[rank].presence is Presence.LOST
    assert evicted(site) == []
    site.loom.tell(RankExited(job="theirs", replica="r1", rank=0, incarnation=incarnation))
    assert evicted(site) == [("r1:b",)]
    (incident,) = site.loom.cluster.incidents.values()
    ended = phrase("rank_process_ended", status=None)
    assert (incident.reason, incident.outcome) == (ended, phrase("rank_dead", why=ended))


def test_who_was_evicted_is_not_evicted_again() -> None:
    site = living()
    first = evict(site.loom.cluster, "theirs", ("r0:a", "r0:a", ""), "gone")
    site.loom.cluster.fold(first.records, 1.0)
    assert [order.members for _, order in first.evictions] == [("r0:a",)]
    assert not evict(site.loom.cluster, "theirs", ("r0:a",), "gone")


def test_what_was_said_survives_a_restart_of_the_weaver() -> None:
    site = outside(True, "r0:a", "r1:b")
    site.loom.ask(Fail(device="GPU-0", cause="XID 79"), "me")
    assert site.loom.restarted().cluster.state() == site.loom.cluster.state()
    site.restart_weaver()
    assert site.loom.cluster.evicted == {"theirs": ("r0:a",)}
    assert site.loom.cluster.ranks[RankId("theirs", "r1", 0)].member == "r1:b"


# ── a device that fails ──


def on_devices(**task: object) -> Site:
    """Three replicas, the first two of which share nothing with the third."""
    site = Site(cores=16, devices=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    site.submit(torchft=Torchft(replicas=3), per_node=1, **task)
    site.settle(1.0)
    for number in range(3):
        run = run_of(site, number)
        place = run.places[0]
        hello = Hello(incarnation=place.incarnation, node="n1", pid=1, devices=(place.device,))
        site.loom.happen(ReportReceived(run.rank(0), hello))
        site.loom.happen(ReportReceived(run.rank(0), Joined(incarnation=place.incarnation, member=member(number))))
    shine(site, *(member(n) for n in range(3)))
    return site


def test_exactly_the_replicas_on_a_device_that_fails_are_evicted_and_start_elsewhere() -> None:
    site = on_devices()
    device = run_of(site, 1).places[0].device
    told = site.loom.ask(Fail(device=device, cause="XID 79"), "me")
    assert [(job, order.members) for job, order in told.evictions] == [(JOB, (member(1),))]
    site.tell(told)
    site.settle(2.0)
    assert evicted(site) == [(member(1),)]
    assert [run_of(site, n).ordinal for n in range(3)] == [1, 2, 1]
    assert run_of(site, 1).places[0].device == "GPU-d"
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.decision == phrase(
        "together", parts=[phrase("decided_for", job=f"{JOB}:1", decision=planned("evict"))]
    )


def test_a_job_whose_policy_is_to_report_keeps_its_replica() -> None:
    site = on_devices(policy=(Rule(on="device", do=("report",)),))
    site.tell(site.loom.ask(Fail(device=run_of(site, 1).places[0].device, cause="XID 79"), "me"))
    site.settle(2.0)
    assert evicted(site) == []
    assert [run_of(site, n).ordinal for n in range(3)] == [1, 1, 1]


def test_a_replica_that_others_started_is_taken_out_of_the_quorum_and_the_incident_says_so() -> None:
    site = outside(True, "r0:a", "r1:b", "")
    told = site.loom.tell(DeviceFailed(device="GPU-1", cause="XID 79"))
    assert [(job, order.members) for job, order in told.evictions] == [("theirs", ("r1:b",))]
    assert evicted(site) == [("r1:b",)]
    (incident,) = site.loom.cluster.incidents.values()
    evicted_one = phrase("decided_for", job="theirs/r1", decision=phrase("evicted_from_quorum"))
    assert incident.decision == phrase("together", parts=[evicted_one])
    assert not site.loom.tell(DeviceFailed(device="GPU-1", cause="XID 79", source="another")).evictions


def test_two_replicas_that_share_a_device_are_both_evicted() -> None:
    site = outside(True, "r0:a", "r1:b")
    site.loom.ask(Register(device="GPU-0", job="theirs", replica="r1"), "me")
    site.loom.ask(Fail(device="GPU-0", cause="XID 79"), "me")
    assert sorted(one for some in evicted(site) for one in some) == ["r0:a", "r1:b"]


def test_nobody_is_evicted_where_the_lighthouse_is_not_ours_or_a_device_is_only_not_well() -> None:
    site = outside(False, "r0:a")
    site.loom.ask(Fail(device="GPU-0", cause="XID 79"), "me")
    assert evicted(site) == []
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.decision == phrase("device_report_only")
    site = outside(True, "r0:a")
    site.loom.tell(DeviceWarned(device="GPU-0", what="hot"))
    assert evicted(site) == []


def test_one_that_is_gone_already_is_not_evicted_for_its_device() -> None:
    site = outside(True, "r0:a", "r1:b")
    site.loom.leave(RankId("theirs", "r0", 0), 1)
    before = evicted(site)
    site.loom.happen(RequestReceived(Fail(device="GPU-0", cause="XID 79"), "me"))
    assert evicted(site) == before == [("r0:a",)]

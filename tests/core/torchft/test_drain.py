"""A replica that is to leave: at once and by force, or at the end of a step and until it is wanted again."""

from __future__ import annotations

import pytest

from tests.core.loom import Loom
from tests.core.site import JOB, Site, incidents
from tests.core.torchft.made import evicted, group, join, member, outside, phases, records, run_of, shine
from torchloom.core.events import BeatReceived, ReplyReceived, RequestReceived, VerdictKnown
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Halt
from torchloom.protocol.operator import Done, DrainReplica, EvictReplica, No, SetKnobs, Steer
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Applied, Beat, Propose, QueryStep, Ready, StepReport, Verdict
from torchloom.protocol.records import JobEnded

RANKS = {number: RankId(JOB, f"{JOB}_{number}", 0) for number in range(3)}


def training(replicas: int = 2, **more: object) -> Site:
    site = group(replicas, **more)
    for number in range(replicas):
        rank = join(site, number)
        site.loom.happen(BeatReceived(rank, Beat(incarnation=run_of(site, number).places[0].incarnation, step=10)))
    return site


def evict(site: Site, replica: str, job: str = JOB) -> Done | No:
    decision = site.loom.happen(RequestReceived(EvictReplica(job=job, replica=replica, operator="ann"), "me"))
    site.tell(decision)
    assert decision.answer is not None
    return decision.answer


def drain(site: Site, number: int, undo: bool = False) -> Done | No:
    ask = DrainReplica(job=JOB, replica=f"{JOB}_{number}", undo=undo, operator="ann")
    decision = site.loom.happen(RequestReceived(ask, "me"))
    site.tell(decision)
    assert decision.answer is not None
    return decision.answer


class PendingOperation:
    """Ranks that answer what they are asked; what is said once is answered once."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.read = 0
        self.verdict = True
        self.stopped: list[RankId] = []

    def go(self) -> None:
        loom = self.site.loom
        for _ in range(10):
            new, self.read = loom.sent[self.read :], len(loom.sent)
            for rank, command in new:
                own = loom.cluster.ranks[rank].incarnation
                reply: StepReport | Ready | Applied
                match command:
                    case QueryStep(id=id):
                        reply = StepReport(incarnation=own, id=id, step=10)
                    case Propose(change=change):
                        reply = Ready(incarnation=own, id=change.id, ok=True, step=10)
                    case Verdict(id=id, commit=True):
                        reply = Applied(incarnation=own, id=id, step=15)
                        self.stopped += [rank] if rank not in self.stopped else []
                    case _:
                        continue
                loom.happen(ReplyReceived(rank, reply))
            while loom.verdicts:
                wanted = loom.verdicts.pop(0)
                loom.happen(VerdictKnown(wanted.change, wanted.commit and self.verdict, wanted.abort))


# ── evicted ──


def test_a_replica_that_is_evicted_is_killed_and_started_again_while_the_others_go_on() -> None:
    site = training()
    told = site.loom.happen(RequestReceived(EvictReplica(job=JOB, replica=f"{JOB}_1", operator="ann"), "me"))
    (halt,) = [command for _, command in told.tasks]
    assert isinstance(halt, Halt)
    assert (halt.job, halt.kill) == (f"{JOB}:1", (0,))
    assert [(job, order.members) for job, order in told.evictions] == [(JOB, (member(1),))]
    assert isinstance(told.answer, Done)
    site.tell(told)
    site.settle(2.0)
    assert [run_of(site, n).ordinal for n in (0, 1)] == [1, 2]
    assert run_of(site, 1).stops == ()  # nobody's fault
    assert incidents(site) == [phrase("of_job", job=f"{JOB}:1", text=phrase("replica_evicted", operator="ann"))]
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.decision == phrase("replica_restarts")
    assert incident.outcome == phrase("started_again_to_heal", attempt=2)


def test_one_that_is_being_started_again_is_not_evicted_twice() -> None:
    site = training()
    site.agents["n1"].stubborn = True
    evict(site, f"{JOB}_1")
    answer = evict(site, f"{JOB}_1")
    assert isinstance(answer, Done)
    assert answer.text == phrase("is_in_phase", name=f"{JOB}/{JOB}_1", phase="stopping")
    assert evicted(site) == [(member(1),)]


def test_the_last_one_that_trains_is_not_evicted() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 0)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    answer = evict(site, f"{JOB}_1")
    assert isinstance(answer, No)
    assert answer.why == phrase("last_replica", replica=f"{JOB}/{JOB}_1")
    assert run_of(site, 1).ordinal == 1


def test_one_is_not_evicted_before_the_others_have_healed() -> None:
    site = training()
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:0")
    site.settle(1.0)
    rank = join(site, 0, 2)
    place = run_of(site, 0).places[0]
    site.loom.happen(BeatReceived(rank, Beat(incarnation=place.incarnation, step=0)))
    assert isinstance(evict(site, f"{JOB}_1"), No)
    site.loom.happen(BeatReceived(rank, Beat(incarnation=place.incarnation, step=11)))
    assert isinstance(evict(site, f"{JOB}_1"), Done)


def test_one_that_is_drained_is_not_evicted_too() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 0)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    before = incidents(site)
    answer = evict(site, f"{JOB}_0")
    assert isinstance(answer, Done)
    assert answer.text == phrase("is_drained", name=f"{JOB}/{JOB}_0", undo=False)
    assert incidents(site) == before


def test_nor_is_it_if_others_started_it() -> None:
    site = outside(True, "r0:a", "r1:b", "")
    assert isinstance(evict(site, "r1", "theirs"), Done)
    answer = evict(site, "r0", "theirs")
    assert isinstance(answer, No)
    assert answer.why == phrase("last_replica", replica="theirs/r0")
    assert evicted(site) == [("r1:b",)]


def test_one_that_others_started_is_only_taken_out_of_the_quorum() -> None:
    site = outside(True, "r0:a", "r1:b")
    answer = evict(site, "r1", "theirs")
    assert isinstance(answer, Done)
    assert answer.text == phrase("out_of_quorum", replica="theirs/r1")
    assert evicted(site) == [("r1:b",)]
    assert incidents(site) == []


def test_a_lighthouse_that_is_not_ours_cannot_be_told() -> None:
    site = outside(False, "r0:a", "r1:b")
    answer = evict(site, "r1", "theirs")
    assert isinstance(answer, No)
    assert answer.why == phrase("foreign_lighthouse", job="theirs")
    assert evicted(site) == []


@pytest.mark.parametrize(
    ("job", "replica", "why"),
    [
        ("theirs", "r0", phrase("not_under_torchft", replica="theirs/r0")),
        ("theirs", "r9", phrase("replica_unknown", replica="theirs/r9")),
        (JOB, "main", phrase("not_under_torchft", replica=f"{JOB}/main")),
        ("nobody", "main", phrase("replica_unknown", replica="nobody/main")),
    ],
)
def test_what_is_not_under_torchft_is_not_evicted(job: str, replica: str, why: Phrase) -> None:
    site = outside(True, "")
    site.submit()
    site.settle()
    site.join()
    answer = evict(site, replica, job)
    assert isinstance(answer, No)
    assert answer.why == why
    assert site.phase == "running"


def test_a_lighthouse_is_no_replica() -> None:
    site = training()
    assert isinstance(evict(site, "lighthouse"), No)
    ask = DrainReplica(job=JOB, replica="lighthouse")
    assert isinstance(site.loom.happen(RequestReceived(ask, "me")).answer, No)
    assert phases(site)["lighthouse"] == "running"


# ── drained ──


def test_a_drained_replica_leaves_at_a_step_and_waits_while_the_others_go_on() -> None:
    site = training()
    ranks = PendingOperation(site)
    answer = drain(site, 1)
    assert isinstance(answer, Done)
    assert answer.text == phrase("replica_leaves", replica=f"{JOB}/{JOB}_1")
    ranks.go()
    assert ranks.stopped == [RANKS[1]]
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")
    site.settle(5.0)
    assert phases(site) == {"lighthouse": "running", "0": "running", "1": "restarting"}
    assert evicted(site) == [(member(1),)]  # it is not waited for
    assert records(site, JobEnded) == []
    assert incidents(site) == []


def test_undone_it_comes_back() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 1)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")
    site.settle(2.0)
    assert isinstance(drain(site, 1, undo=True), Done)
    site.settle(2.0)
    assert phases(site)["1"] == "running"
    assert [run_of(site, n).ordinal for n in (0, 1)] == [1, 2]
    assert run_of(site, 1).stops == ()


def test_undone_when_it_is_about_to_leave_it_comes_back_too() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 1)
    ranks.go()
    drain(site, 1, undo=True)
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")
    site.settle(2.0)
    assert (phases(site)["1"], run_of(site, 1).ordinal) == ("running", 2)


def test_asked_twice_it_says_so() -> None:
    site = training()
    drain(site, 1)
    before = len(site.loom.log)
    answer = drain(site, 1)
    assert isinstance(answer, Done)
    assert answer.text == phrase("is_drained", name=f"{JOB}/{JOB}_1", undo=False)
    answer = drain(site, 0, undo=True)
    assert isinstance(answer, Done)
    assert answer.text == phrase("is_drained", name=f"{JOB}/{JOB}_0", undo=True)
    assert len(site.loom.log) == before


def test_while_another_change_is_under_way_it_is_asked_again_until_it_can_be() -> None:
    site = training()
    other = Steer(request=f"{5:032x}", verb="pause", job=JOB, replica=f"{JOB}_0", operator="bob")
    site.loom.happen(RequestReceived(other, "bob"))
    drain(site, 1)
    site.settle(1.0)
    assert {rank for rank, command in site.loom.sent if isinstance(command, QueryStep)} == {RANKS[0]}
    ranks = PendingOperation(site)
    ranks.go()
    site.settle(1.0)
    ranks.go()
    assert ranks.stopped == [RANKS[0], RANKS[1]]


def test_one_that_came_to_nothing_is_asked_again() -> None:
    site = training()
    ranks = PendingOperation(site)
    ranks.verdict = False
    drain(site, 1)
    ranks.go()
    assert ranks.stopped == []
    ranks.verdict = True
    site.settle(1.0)
    ranks.go()
    assert ranks.stopped == [RANKS[1]]


def test_the_job_ends_when_the_others_have_ended_and_a_drained_one_is_away() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 1)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")
    site.settle(2.0)
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "done", "0": "done", "1": "cancelled"}
    ended = [r.outcome for r in records(site, JobEnded) if isinstance(r, JobEnded)]
    assert ended == ["finished"]


def test_the_last_one_that_trains_is_not_drained() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 0)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert isinstance(drain(site, 1), No)
    assert phases(site) == {"lighthouse": "running", "0": "restarting", "1": "running"}


def test_one_that_would_begin_alone_when_the_others_have_ended_well_does_not() -> None:
    site = training()
    for _ in range(2):  # the second time it waits a little before it begins again
        site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
        site.settle()
    assert phases(site)["1"] == "restarting"
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "done", "0": "done", "1": "cancelled"}


def test_one_that_has_made_no_step_yet_when_the_others_have_ended_well_does_not_begin_anew() -> None:
    site = training()
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(1.0)
    assert (phases(site)["1"], run_of(site, 1).ordinal) == ("running", 2)
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site) == {"lighthouse": "done", "0": "done", "1": "cancelled"}


def test_one_that_is_a_step_behind_the_others_ends_by_itself() -> None:
    site = training()
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(1.0)
    rank = join(site, 1, 2)
    site.loom.happen(BeatReceived(rank, Beat(incarnation=run_of(site, 1).places[0].incarnation, step=12)))
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site)["1"] == "running"


def test_one_that_is_needed_begins_again_although_the_others_have_ended_well() -> None:
    site = training(min_replicas=2)
    site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:1")
    site.settle(1.0)
    site.agents["n1"].end(0, code=0, job=f"{JOB}:0")
    site.settle(2.0)
    assert phases(site)["1"] == "running"


def test_who_drains_one_that_there_is_not_hears_which_there_are() -> None:
    site = training()
    answer = site.loom.happen(RequestReceived(DrainReplica(job=JOB, replica="nobody"), "me")).answer
    assert isinstance(answer, No)
    assert answer.hint == phrase("replicas_are", job=JOB, replicas=[f"{JOB}/{JOB}_0", f"{JOB}/{JOB}_1"])


def test_what_torchloom_did_not_start_cannot_be_drained() -> None:
    site = outside(True, "r0:a")
    ask = DrainReplica(job="theirs", replica="r0")
    assert isinstance(site.loom.happen(RequestReceived(ask, "me")).answer, No)


def test_a_weaver_that_is_started_anew_remembers_who_is_drained() -> None:
    site = training()
    drain(site, 1)
    again = site.loom.restarted()
    assert again.cluster.state() == site.loom.cluster.state()
    assert again.cluster.runs.by_name[f"{JOB}:1"].drained
    site.restart_weaver()
    assert isinstance(site.loom, Loom)
    shine(site, member(0))
    assert run_of(site, 1).drained


def test_knobs_can_be_set_while_a_replica_is_away() -> None:
    site = training()
    ranks = PendingOperation(site)
    drain(site, 1)
    ranks.go()
    site.agents["n1"].end(0, code=0, job=f"{JOB}:1")
    site.settle(2.0)
    ask = SetKnobs(request=f"{6:032x}", job=JOB, values={"lr": 0.1})
    answer = site.loom.happen(RequestReceived(ask, "me")).answer
    assert isinstance(answer, No)
    assert answer.why == phrase("knob_unknown", job=JOB, name="lr")  # and not that a rank cannot be reached

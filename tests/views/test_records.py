"""Every record of the log reads as a sentence; registrations as the seed projects print them."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from tests.views.samples import GPU, LIFE, NOW, REPLICA
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Place
from torchloom.protocol.operator import JobAnnotated, NodeDrained, ReplicaDrained, ScheduleSet
from torchloom.protocol.rank import (
    ChangeSpec,
    CheckpointFailed,
    CheckpointSaved,
    Hello,
    JobResumed,
    KnobSpec,
    MemberDiscarded,
    MemberHealed,
    MemberJoined,
    MemberRegrouped,
)
from torchloom.protocol.records import (
    Abort,
    About,
    Blame,
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    DeviceBlamed,
    DeviceCleared,
    DeviceMarkedFailed,
    DeviceMarkedRecovered,
    DeviceRegistered,
    Entry,
    InboxRead,
    IncidentAmended,
    IncidentOpened,
    JobBegan,
    JobEnded,
    JobForgotten,
    KnobsOffered,
    MembersEvicted,
    OrderEnded,
    OrderGiven,
    RankAttached,
    RankDied,
    RankForgotten,
    RankFound,
    RankJoined,
    RankLeft,
    RankLost,
    Record,
    TermBegan,
)
from torchloom.protocol.run_records import (
    AttemptBegan,
    AttemptEnded,
    AttemptLaunched,
    AttemptPaused,
    AttemptReleased,
    AttemptRunning,
    AttemptStepped,
    AttemptStopping,
    ReleaseBegan,
    ReleaseEnded,
    ResponseBegan,
    ResponseWent,
    RunArrived,
    RunEnded,
    RunResumed,
    RunSubmitted,
)
from torchloom.protocol.scheduling import LoaderMove, LoadersAllocated
from torchloom.views.format.json_document import document
from torchloom.views.format.numbers import stamp
from torchloom.views.format.tables import Screen
from torchloom.views.records import ROWS, Event, Teller, as_object, lines, sentences

RANK = RankId("mnist", REPLICA, 1)
OTHER = RankId("other", "hi", 0)
HELLO = Hello(incarnation=LIFE, node="n1", pid=99, devices=(GPU, "GPU-2"), world_size=4)

SENTENCES: list[tuple[Any, list[str]]] = [
    (TermBegan(term=2, weaver="host:5"), ["Term 2 began: weaver host:5 is in charge"]),
    (RunArrived(job="mnist"), ["Job mnist arrives"]),
    (
        ReleaseBegan(job="mnist", request="r", operator="ann@box"),
        ["Job mnist saves a checkpoint and is then released by ann@box"],
    ),
    (
        ReleaseBegan(job="mnist", request="r", reason="more urgent", makes_room_for="bert"),
        ["Job mnist saves a checkpoint and is then released: more urgent"],
    ),
    (ReleaseEnded(job="mnist", reason="disk full"), ["Job mnist is not released, and continues: disk full"]),
    (
        AttemptReleased(job="mnist", attempt=1),
        ["No process of mnist is left; it continues when it is resumed"],
    ),
    (RunResumed(job="mnist", request="r", operator="ann@box"), ["Job mnist is resumed by ann@box"]),
    (
        AttemptStopping(job="mnist", attempt=1, reason="released by ann", next_action="release"),
        ["Job mnist is ended, and gives its devices back: released by ann"],
    ),
    (JobBegan(job="mnist"), ["Job mnist began"]),
    (JobEnded(job="mnist", outcome="failed", reason="all died"), ["Job mnist failed: all died"]),
    (JobEnded(job="mnist", outcome="stopped"), ["Job mnist was stopped"]),
    (JobForgotten(job="mnist"), ["Job mnist forgotten: it ended long ago"]),
    (
        RankJoined(rank=RANK, hello=HELLO),
        [
            f"Registered device: {GPU} for replica_id: {REPLICA} (job mnist, rank 1 of 4, node n1, pid 99)",
            f"Registered device: GPU-2 for replica_id: {REPLICA} (job mnist, rank 1 of 4, node n1, pid 99)",
        ],
    ),
    (RankLost(rank=OTHER, incarnation=LIFE, reason="link closed"), ["Rank other/hi/0 lost: link closed"]),
    (
        RankLost(rank=OTHER, incarnation=LIFE, reason="silent", patient=True),
        ["Rank other/hi/0 lost: silent (it may be frozen, not dead)"],
    ),
    (
        RankAttached(rank=OTHER, incarnation=LIFE),
        ["Rank other/hi/0 is attached by its script; its steps are counted no longer"],
    ),
    (RankFound(rank=OTHER, incarnation=LIFE, reason="a beat"), ["Rank other/hi/0 found again: a beat"]),
    (RankDied(rank=OTHER, incarnation=LIFE, reason="grace over"), ["Rank other/hi/0 died: grace over (presumed)"]),
    (RankDied(rank=OTHER, incarnation=LIFE, reason="SIGKILL", confirmed=True), ["Rank other/hi/0 died: SIGKILL"]),
    (RankLeft(rank=OTHER, incarnation=LIFE, how="finished"), ["Rank other/hi/0 left: finished"]),
    (RankForgotten(rank=OTHER), ["Rank other/hi/0 forgotten: gone for long"]),
    (
        DeviceRegistered(device="GPU-1", replica=ReplicaId("manual", "hi"), operator="ann@box"),
        ["Registered device: GPU-1 for replica_id: hi (job manual, by ann@box)"],
    ),
    (
        DeviceBlamed(device="GPU-1", blame=Blame(by="b1252eee80b0e499", cause="XID 79", alert=True)),
        ["Device GPU-1 is said to be broken (b1252eee80b0e499): XID 79"],
    ),
    (
        DeviceCleared(device="GPU-1", by="b1252eee80b0e499"),
        ["Device GPU-1 is not said to be broken any more by b1252eee80b0e499"],
    ),
    (
        DeviceMarkedFailed(device="GPU-1", cause="XID 79", source="dcgm", replicas=(ReplicaId("mnist", "hi"),)),
        ["Device GPU-1 failed: XID 79 (said by dcgm); replicas on it: mnist/hi"],
    ),
    (DeviceMarkedRecovered(device="GPU-1", source="dcgm"), ["Device GPU-1 recovered (said by dcgm)"]),
    (
        IncidentOpened(
            id="i1",
            what="link closed",
            about=About(rank=RankId("other", "hi", 0)),
            evidence=("a", "b"),
            decision="wait",
        ),
        ["Incident i1 opened: other/hi/0: link closed [a; b]; decided: wait"],
    ),
    (
        IncidentAmended(id="i1", evidence=("c",), outcome="found", closed=True),
        ["Incident i1 closed: c; outcome: found"],
    ),
    (
        KnobsOffered(
            job="mnist",
            knobs=(KnobSpec(name="lr", kind="float", value=0.1), KnobSpec(name="clip", kind="float", value=1.0)),
            checkpoints=True,
        ),
        ["Job mnist offers knobs: lr, clip; it saves checkpoints when asked"],
    ),
    (
        ChangeProposed(
            change=ChangeSpec(id="c3", number=3, step=1520, values={"lr": 0.01, "clip": 2.0}, over=100),
            job="mnist",
            lives=((RANK, LIFE), (OTHER, LIFE)),
            request="r",
            operator="ann@box",
            before={"lr": 0.1, "clip": 1.0},
        ),
        ["Change c3 asked by ann@box: lr 0.1 → 0.01, clip 1 → 2 over 100 steps on mnist at step 1,520 (2 ranks)"],
    ),
    (
        ChangeProposed(
            change=ChangeSpec(id="c4", number=4, step=9, values={"lr": 0.1}),
            job="mnist",
            lives=((RANK, LIFE),),
            request="r",
            before={"lr": 0.01},
            replica="hi",
            rank=1,
            reverts="c3",
        ),
        ["Change c4 asked by someone: lr 0.01 → 0.1 on mnist/hi/1 at step 9 (1 rank), reverting c3"],
    ),
    (ChangeDecided(id="c3", commit=True), ["Change c3 decided: all ranks are ready"]),
    (
        ChangeDecided(
            id="c3",
            commit=False,
            abort=Abort(why="refused", ranks=(RankId("mnist", "hi", 0),), refusal="lr is too high"),
        ),
        ["Change c3 was not made: mnist/hi/0 refuses: lr is too high"],
    ),
    (ChangeSettled(id="c3", applied=2, outcome="applied on 2"), ["Change c3 settled: applied on 2"]),
    (
        OrderGiven(id="o1", request="r", verb="kill", job="other", lives=((OTHER, LIFE),), operator="ann@box"),
        ["Order o1 given by ann@box: kill other/hi/0"],
    ),
    (OrderEnded(id="o1", outcome="applied on 1 rank"), ["Order o1 ended: applied on 1 rank"]),
    (
        CheckpointSaved(
            rank=RANK, incarnation=LIFE, step=1200, folder="/a", node="n1", size=1_234_567_890, seconds=3.125, stall=0.1
        ),
        ["Checkpoint of mnist at step 1,200 written to /a on n1: 1.2 GB in 3.12 s, training stood still for 0.10 s"],
    ),
    (
        CheckpointFailed(rank=RANK, incarnation=LIFE, step=1200, folder="/a", why="no space left on device"),
        ["Checkpoint of mnist at step 1,200 could not be written to /a: no space left on device"],
    ),
    (
        JobResumed(rank=OTHER, incarnation=LIFE, step=1200, path="/a/step-1200"),
        ["Job other resumed at step 1,200 from /a/step-1200 (rank hi/0)"],
    ),
    (
        JobResumed(
            rank=OTHER, incarnation=LIFE, step=1, path="/a/step-1", rejected={"step-2": "no manifest", "step-3": "torn"}
        ),
        [
            "Job other resumed at step 1 from /a/step-1 (rank hi/0); newer ones are damaged: step-2 (no manifest), "
            "step-3 (torn)"
        ],
    ),
    (
        MemberJoined(
            rank=RANK, incarnation=LIFE, member="hi:u1", lighthouse="http://n1:1", version="0.1", devices=("GPU-1",)
        ),
        [
            f"Rank {RANK} is in replica hi:u1 of torchft 0.1, with the lighthouse at http://n1:1",
            "Registered device: GPU-1 for replica_id: hi:u1",
        ],
    ),
    (
        MemberJoined(rank=RANK, incarnation=LIFE, member="hi:u1"),
        [f"Rank {RANK} is in replica hi:u1 of torchft"],
    ),
    (
        MemberRegrouped(rank=RANK, incarnation=LIFE, quorum=1200, step=40, participants=1),
        [f"Replica {RANK.replica_id} is in quorum 1,200 of 1 replica, at step 40"],
    ),
    (
        MemberHealed(rank=RANK, incarnation=LIFE, step=1200, source="ho:u2", seconds=0.123),
        [f"Replica {RANK.replica_id} healed from ho:u2 to step 1,200 in 0.12 s"],
    ),
    (
        MemberDiscarded(rank=RANK, incarnation=LIFE, step=40, count=1, quorum=3, why="a peer is gone"),
        [f"Replica {RANK.replica_id} did not commit step 40 (quorum 3): a peer is gone"],
    ),
    (
        MemberDiscarded(rank=RANK, incarnation=LIFE, step=40, count=7, quorum=3),
        [f"Replica {RANK.replica_id} did not commit 7 tries up to step 40 (quorum 3)"],
    ),
    (
        MembersEvicted(job="mnist", members=("hi:u1", "ho:u2"), reason="it has ended"),
        ["Evicted from the quorum of mnist: hi:u1, ho:u2: it has ended"],
    ),
    (
        RunSubmitted(job="mnist", task=Task(argv=("a.py", "--lr", "1"), per_node=2), request="r", operator="ann"),
        ["Job mnist submitted by ann: a.py --lr 1 on 2 ranks"],
    ),
    (
        AttemptBegan(job="mnist", attempt=2, places=(Place(rank=0, local=0, node="n1", incarnation=LIFE),)),
        ["Job mnist is placed: 1 rank on n1"],
    ),
    (
        AttemptLaunched(job="mnist", attempt=1, host="n1", port=1),
        ["Job mnist starts from the beginning"],
    ),
    (
        AttemptLaunched(
            job="mnist", attempt=2, host="n1", port=1, resume="/a/step-7", resume_step=7, rejected={"step-8": "torn"}
        ),
        ["Job mnist starts from /a/step-7 (step 7); passed over: step-8 (torn)"],
    ),
    (
        AttemptLaunched(job="mnist:1", attempt=2, host="n1", port=1, heals=True),
        ["Job mnist:1 starts and heals from the others"],
    ),
    (AttemptStepped(job="mnist", attempt=1), ["Job mnist trains"]),
    (AttemptPaused(job="mnist", attempt=1), ["Job mnist is paused"]),
    (AttemptPaused(job="mnist", attempt=1, held=False), ["Job mnist continues"]),
    (AttemptRunning(job="mnist", attempt=1, warm=2), ["Job mnist runs, 2 warm"]),
    (
        AttemptRunning(job="mnist", attempt=1, why_cold="OMP_NUM_THREADS differs"),
        ["Job mnist runs; started cold: OMP_NUM_THREADS differs"],
    ),
    (
        AttemptStopping(job="mnist", attempt=1, reason="rank 1 failed: killed by SIGKILL"),
        ["Job mnist is ended, then started again: rank 1 failed: killed by SIGKILL"],
    ),
    (
        AttemptStopping(job="mnist:lighthouse", attempt=1, reason="its replicas are over", next_action="done"),
        ["Job mnist:lighthouse is ended, for there is nothing more to do: its replicas are over"],
    ),
    (
        ResponseBegan(job="mnist", incident="i7", kind="hang", do=("stacks", "restart"), reason="rank 3 hangs"),
        ["The policy of mnist acts on i7 (rank 3 hangs): stacks, then restart"],
    ),
    (ResponseWent(job="mnist", left=("restart",)), ["The policy of mnist continues: restart"]),
    (ResponseWent(job="mnist"), ["The policy of mnist has acted"]),
    (
        AttemptEnded(job="mnist", attempt=1, wait_seconds=0.5),
        ["No process of mnist is left; it starts again in 0.5 s"],
    ),
    (RunEnded(job="mnist", phase="done", reason="it ended well"), ["Job mnist is done: it ended well"]),
    (
        ReplicaDrained(job="mnist:1", drained=True, operator="ann"),
        ["mnist:1 is to leave at the end of a step, and to stay away (ann)"],
    ),
    (ReplicaDrained(job="mnist:1", drained=False), ["mnist:1 may come back"]),
    (NodeDrained(node="n1", drained=True, operator="ann"), ["Nothing more is started on n1 (ann)"]),
    (NodeDrained(node="n1", drained=False), ["n1 may be used again"]),
    (
        JobAnnotated(job="mnist", text="new data", request="r", operator="ann@box", step=1500),
        ["Note on mnist by ann@box at step 1,500: new data"],
    ),
    (
        ScheduleSet(policy="ours", objective="log", budgets={"n2": 6, "n1": 1200}, operator="ann@box"),
        ["Loaders are allocated by policy ours, objective log (ann@box); budgets set: n1 1,200, n2 6"],
    ),
    (ScheduleSet(policy="even"), ["Loaders are allocated by policy even"]),
    (ScheduleSet(policy="off", operator="ann@box"), ["Loaders are not allocated (ann@box)"]),
    (
        LoadersAllocated(
            policy="ours",
            triggers=("arrival", "measured"),
            moves=(LoaderMove(job="light", before=3, loaders=1), LoaderMove(job="hungry", before=3, loaders=5)),
            gain=0.314,
            about=("light", "hungry"),
        ),
        [
            "Loaders of each rank: light 3 → 1, hungry 3 → 5 "
            "(after start and first measurements of light, hungry, 31 % more predicted)"
        ],
    ),
    (
        LoadersAllocated(
            policy="off", triggers=("rules",), moves=(LoaderMove(job="light", before=1, loaders=3),), about=("off",)
        ),
        ["Loaders of each rank: light 1 → 3 (after new rules)"],
    ),
    (InboxRead(seq=4), ["Inbox read up to 4"]),
]


@pytest.mark.parametrize(("record", "expected"), SENTENCES, ids=lambda v: type(v).__name__)
def test_sentences(record: Any, expected: list[str]) -> None:
    assert sentences(record) == expected


def test_every_kind_of_record_has_a_sentence() -> None:
    assert {type(record) for record, _ in SENTENCES} == set(get_args(Record)) == set(ROWS)


def entry(*records: Record) -> Entry:
    return Entry(term=1, at=NOW, records=records)


def test_a_line_begins_with_the_local_time_and_stays_one_line() -> None:
    event = Event(5, NOW, 1, JobEnded(job="mnist", outcome="failed", reason="a\nb\x1b[2J"))
    assert lines(event, Screen()) == [f"{stamp(NOW)}  Job mnist failed: a b\N{REPLACEMENT CHARACTER}[2J"]


def test_what_is_internal_is_not_told() -> None:
    assert [type(e.record) for e in Teller().events(1, entry(InboxRead(seq=1), JobBegan(job="a")))] == [JobBegan]


def test_one_job_only_with_its_incidents_to_the_end() -> None:
    teller = Teller("mnist")
    told = list(
        teller.events(
            9,
            entry(
                TermBegan(term=1, weaver="x"),
                RankForgotten(rank=RANK),
                RankForgotten(rank=OTHER),
                DeviceMarkedFailed(device="d", cause="c", source="s", replicas=(RANK.replica_id, OTHER.replica_id)),
                IncidentOpened(id="i1", what="w", about=About(job="s"), job="mnist"),
                IncidentOpened(id="i2", what="w", about=About(job="s"), job="other"),
            ),
        )
    )
    assert [type(e.record).__name__ for e in told] == ["RankForgotten", "DeviceMarkedFailed", "IncidentOpened"]
    later = list(teller.events(10, entry(IncidentAmended(id="i2"), IncidentAmended(id="i1", closed=True))))
    assert [e.record.id for e in later] == ["i1"]  # type: ignore[union-attr]


def test_a_job_that_is_named_like_an_incident_keeps_its_own_records() -> None:
    opened = IncidentOpened(id="i1", what="w", about=About(job="s"), job="mnist")
    events = list(Teller("i1").events(1, entry(opened, JobBegan(job="i1"))))
    assert [type(event.record) for event in events] == [JobBegan]


def test_one_job_only_with_its_changes_and_orders_to_the_end() -> None:
    teller = Teller("mnist")

    def proposed(id: str, job: str) -> ChangeProposed:
        return ChangeProposed(change=ChangeSpec(id=id, number=1, step=1), job=job, lives=(), request="r")

    def given(id: str, job: str) -> OrderGiven:
        return OrderGiven(id=id, request="r", verb="kill", job=job, lives=())

    began = entry(proposed("c1", "mnist"), proposed("c2", "other"), given("o1", "mnist"), given("o2", "other"))
    assert len(list(teller.events(1, began))) == 2
    assert [type(e.record) for e in teller.events(2, entry(KnobsOffered(job="mnist", knobs=())))] == [KnobsOffered]
    ends = [
        record
        for n in (1, 2)
        for record in (
            ChangeDecided(id=f"c{n}", commit=True),
            ChangeSettled(id=f"c{n}", applied=1, outcome=""),
            OrderEnded(id=f"o{n}", outcome=""),
        )
    ]
    assert [e.record.id for e in teller.events(3, entry(*ends))] == ["c1", "c1", "o1"]  # type: ignore[union-attr]


def test_json_has_every_key_always() -> None:
    event = Event(5, NOW, 2, RankLost(rank=OTHER, incarnation=LIFE, reason="r"))
    assert msgspec.json.decode(document(as_object(event))) == {
        "seq": 5, "at": NOW, "term": 2, "is": "RankLost", "rank": {"job": "other", "replica": "hi", "rank": 0},
        "incarnation": LIFE, "reason": "r", "patient": False,
    }  # fmt: skip


@pytest.mark.parametrize("next_action", get_args(get_type_hints(AttemptStopping)["next_action"]))
def test_whatever_becomes_of_a_run_is_told(next_action: Any) -> None:
    (told,) = sentences(AttemptStopping(job="mnist", attempt=1, reason="so it is", next_action=next_action))
    assert told.endswith(": so it is")

"""What a policy does, one thing after the other: bad numbers, slow ranks, devices; and when it does nothing."""

from __future__ import annotations

from tests.core.incidents.test_findings import TIMES, Training
from tests.core.loom import Loom
from tests.core.site import JOB, Site
from torchloom.core.detect.detector import Finding
from torchloom.core.events import BeatReceived, FindingsMade, ReplyReceived, ReportReceived, VerdictKnown
from torchloom.core.incidents.circuit_breaker import AT_LEAST, open_reason
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.state.incident_history import DECIDED
from torchloom.protocol.facts import DeviceWarned
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Rule
from torchloom.protocol.node import Inspect
from torchloom.protocol.operator import Fail, Recover
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Applied, Beat, Hello, Knobs, Propose, QueryStep, Ready, StepReport, Verdict
from torchloom.protocol.records import About, DeviceMarkedFailed, IncidentAmended
from torchloom.protocol.run_records import AttemptStopping, ResponseWent


def find(
    site: Site, kind: str, what: str = "something is wrong", rank: int = 1, step: int = 0, over: bool = False
) -> None:
    finding = Finding(kind, what, ("seen",), over, step)  # type: ignore[arg-type]
    site.tell(site.loom.happen(FindingsMade(RankId(JOB, "main", rank), (finding,))))


def rule(on: str, *do: str, **more: object) -> Rule:
    return Rule(on=on, do=do, **more)  # type: ignore[arg-type]


def incident(site: Site) -> object:
    return list(site.loom.cluster.incidents.values())[-1]


# ── findings ──


def test_a_condition_is_one_incident_from_its_beginning_to_its_end() -> None:
    site = Training()
    find(site, "straggler", "needs 3 times as long as its peers")
    find(site, "straggler", "needs 3 times as long as its peers")
    (known,) = site.loom.cluster.incidents.values()
    assert (known.about, known.kind) == (About(rank=RankId(JOB, "main", 1), part="straggler"), "straggler")
    assert known.decision == planned("report")
    find(site, "straggler", "as fast as its peers again", over=True)
    (known,) = site.loom.cluster.incidents.values()
    assert known.closed is not None
    assert known.outcome == "as fast as its peers again"


def test_what_all_ranks_of_a_job_have_is_one_incident_that_names_the_first() -> None:
    site = Training()
    find(site, "not_finite", "loss is NaN", rank=1)
    find(site, "not_finite", "loss is NaN", rank=0)
    (known,) = site.loom.cluster.incidents.values()
    assert known.what == phrase("of_job", job=JOB, text=phrase("of_rank", rank=1, what="loss is NaN"))
    assert phrase("of_rank", rank=0, what="loss is NaN") in known.evidence


def test_two_conditions_in_one_beat_are_two_incidents() -> None:
    site = Training()
    found = (Finding("memory", "grows"), Finding("starved", "waits"))
    site.loom.happen(FindingsMade(RankId(JOB, "main", 0), found))
    assert [i.kind for i in site.loom.cluster.incidents.values()] == ["memory", "starved"]


def test_the_end_of_something_that_nobody_knows_of_is_nothing() -> None:
    site = Training()
    find(site, "memory", over=True)
    assert not site.loom.cluster.incidents


# ── rollback ──


def test_bad_numbers_lead_back_to_a_checkpoint_before_and_leave_out_the_batch() -> None:
    site = Training(policy=(rule("not_finite", "rollback", back=2, skip=True),))
    site.agents["n1"].resume = ("/kept/step-100", 100)
    find(site, "not_finite", "loss is NaN at step 137", step=137)
    site.settle()
    (stopping,) = site.records(AttemptStopping)
    assert isinstance(stopping, AttemptStopping)
    assert stopping.rollback is not None
    history = [entry for _, entry in site.loom.cluster.incidents[stopping.incident].history]
    codes = [entry.code for entry in history if isinstance(entry, Phrase)]
    assert codes.count(DECIDED) == 1, "who decides and who does it say the same"
    assert (stopping.rollback.before, stopping.rollback.back, stopping.rollback.skip) == (136, 2, (136, 137))
    assert site.agents["n1"].launches[-1].skip == (136, 137)
    prepares = [command for _, command in site.told if type(command).__name__ == "Prepare"]
    assert prepares[-1].rollback == stopping.rollback  # type: ignore[attr-defined]
    # A crash after that goes on from whatever is newest, and still leaves the batch out.
    assert site.run.rollback is None
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(2)
    assert site.agents["n1"].launches[-1].attempt == 3
    assert site.agents["n1"].launches[-1].skip == (136, 137)
    prepares = [command for _, command in site.told if type(command).__name__ == "Prepare"]
    assert prepares[-1].rollback is None  # type: ignore[attr-defined]


# ── checkpoint, then restart ──


class Saving(Training):
    """Ranks that can save, and answer what they are asked."""

    def __init__(self, pending: bool = False, **task: object) -> None:
        super().__init__(**task)
        self.pending = pending
        """They write in the background."""
        for place in self.run.places:
            rank = RankId(JOB, "main", place.rank)
            self.loom.happen(ReportReceived(rank, Knobs(incarnation=place.incarnation, knobs=(), checkpoints=True)))

    def answer(self) -> bool:
        """Whatever ranks were sent since; whether it was anything."""
        sent, self.loom.sent = self.loom.sent, []
        for rank, command in sent:
            match command:
                case QueryStep(id=id, incarnation=own):
                    reply: StepReport | Ready | Applied = StepReport(incarnation=own, id=id, step=self.step)
                case Propose(change=change, incarnation=own):
                    reply = Ready(incarnation=own, id=change.id, ok=True, step=self.step)
                case Verdict(id=id, incarnation=own, commit=True):
                    step = self.step + 5
                    reply = Applied(incarnation=own, id=id, step=step, result="/kept/step-5", pending=self.pending)
                case _:
                    continue
            self.tell(self.loom.happen(ReplyReceived(rank, reply)))
        wanted, self.loom.verdicts = self.loom.verdicts, []
        for verdict in wanted:
            self.tell(self.loom.happen(VerdictKnown(verdict.change, verdict.commit, verdict.abort)))
        return bool(sent or wanted)


def test_a_checkpoint_is_waited_for_before_the_restart() -> None:
    site = Saving(policy=(rule("straggler", "checkpoint", "restart"),))
    find(site, "straggler", "is slow")
    assert site.run.response is not None
    site.train(2)
    assert site.run.attempt == 1
    for _ in range(10):
        site.answer()
        site.look()
    assert site.run.attempt == 2
    evidence = [line for i in site.loom.cluster.incidents.values() for line in i.evidence]
    assert "checkpoint_asked_for" in [line.code for line in evidence if isinstance(line, Phrase)]


def test_a_checkpoint_that_never_comes_does_not_hold_up_the_restart_for_ever() -> None:
    site = Saving(policy=(rule("straggler", "checkpoint", "restart"),))
    find(site, "straggler", "is slow")
    site.train(30)
    assert site.run.attempt == 1
    site.train(40)
    assert site.run.attempt == 2


def test_without_a_function_that_saves_the_restart_comes_at_once_and_the_reason_is_kept() -> None:
    site = Training(policy=(rule("straggler", "checkpoint", "restart"),))
    find(site, "straggler", "is slow")
    site.settle()
    assert site.run.attempt == 2
    (known,) = site.loom.cluster.incidents.values()
    assert phrase("checkpoint_not_possible") in known.evidence


def test_what_was_left_of_a_response_is_gone_with_the_attempt() -> None:
    site = Saving(policy=(rule("straggler", "checkpoint", "restart"),))
    find(site, "straggler", "is slow")
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(2)
    assert site.run.response is None
    assert site.run.attempt == 2
    site.train(80)
    assert site.run.attempt == 2


def test_stacks_may_be_asked_for_by_a_rule() -> None:
    site = Training(policy=(rule("slowdown", "stacks"),))
    find(site, "slowdown", "steps take twice as long")
    assert any(isinstance(command, Inspect) for _, command in site.told)
    assert site.run.attempt == 1
    assert len(site.records(ResponseWent)) == 1
    assert site.run.response is None


def test_a_pause_by_policy_asks_all_ranks() -> None:
    site = Saving(policy=(rule("loss_spike", "pause"),))
    find(site, "loss_spike", "loss is 40")
    asked = [command for _, command in site.loom.sent if isinstance(command, QueryStep)]
    assert len(asked) == 2


# ── devices ──


def on_devices(**task: object) -> Site:
    site = Site("n1", devices=("GPU-a", "GPU-b", "GPU-c"))
    site.submit(**task)
    site.settle()
    for place in site.run.places:
        hello = Hello(incarnation=place.incarnation, node="n1", pid=1, devices=(place.device,), world_size=2)
        site.loom.happen(ReportReceived(RankId(JOB, "main", place.rank), hello))
    site.settle()
    return site


def test_a_failed_device_moves_the_job_to_one_that_is_left() -> None:
    site = on_devices()
    assert [p.device for p in site.run.places] == ["GPU-a", "GPU-b"]
    site.tell(site.loom.ask(Fail(device="GPU-a", cause="XID 79"), "hand"))
    site.settle()
    assert site.run.attempt == 2
    assert [p.device for p in site.run.places] == ["GPU-b", "GPU-c"]
    known = next(i for i in site.loom.cluster.incidents.values() if i.kind == "device")
    assert known.closed is None  # the device is still broken
    assert known.decision == phrase("together", parts=[phrase("decided_for", job=JOB, decision=planned("evict"))])
    assert site.run.stops == ()  # not the job's fault


def test_without_a_device_that_is_left_the_job_waits_until_one_is_well_again() -> None:
    site = on_devices(per_node=3)
    site.tell(site.loom.ask(Fail(device="GPU-a", cause="XID 79"), "hand"))
    site.settle(5)
    assert site.phase == "restarting"
    site.tell(site.loom.ask(Recover(device="GPU-a"), "hand"))
    site.settle(2)
    assert site.phase == "running"


def test_a_device_that_nobody_uses_ends_no_job() -> None:
    site = on_devices()
    site.tell(site.loom.ask(Fail(device="GPU-c", cause="XID 79"), "hand"))
    site.settle()
    assert site.run.attempt == 1


def test_a_straggler_may_be_evicted_and_its_device_gets_no_more_ranks() -> None:
    site = on_devices(policy=(rule("straggler", "evict"),))
    find(site, "straggler", "needs 3 times as long", rank=0)
    site.settle()
    assert [p.device for p in site.run.places] == ["GPU-b", "GPU-c"]
    marked = [r for _, records in site.loom.log for r in records if isinstance(r, DeviceMarkedFailed)]
    assert [(m.device, m.source) for m in marked] == [("GPU-a", "policy")]


# ── the circuit breaker ──


def lost(loom: Loom, many: int, of: int) -> None:
    ranks = [RankId("big", "r", number) for number in range(of)]
    for number, rank in enumerate(ranks):
        loom.join(rank, number + 1, world_size=of)
    for number, rank in enumerate(ranks[:many]):
        loom.close(rank, number + 1)


def test_many_ranks_lost_at_once_stop_every_action() -> None:
    loom = Loom()
    lost(loom, 10, 30)
    assert open_reason(loom.cluster, loom.now) == phrase("ranks_lost_at_once", lost=10, count=30)
    assert open_reason(loom.cluster, loom.now + 60) == ""


def test_few_ranks_or_few_of_many_are_no_reason_to_open_it() -> None:
    small, calm = Loom(), Loom()
    lost(small, AT_LEAST - 1, AT_LEAST - 1)
    lost(calm, 5, 30)
    assert open_reason(small.cluster, small.now) == open_reason(calm.cluster, calm.now) == ""


def test_the_circuit_breaker_holds_a_restart_and_says_so() -> None:
    site = Training()
    lost(site.loom, 20, 40)
    site.stand(2, rank=1, frozen=True)
    site.stand(4, rank=1, frozen=True)
    assert site.run.attempt == 1
    held_back = phrase("policy_held_back", why=open_reason(site.loom.cluster, site.loom.now), policy=planned("restart"))
    assert held_back in [r.decision for r in site.records(IncidentAmended)]  # type: ignore[attr-defined]


# ── beats ──


def test_a_beat_with_nan_in_it_is_an_incident_at_once() -> None:
    site = Training()
    place = site.run.places[0]
    rank = RankId(JOB, "main", 0)
    beat = Beat(incarnation=place.incarnation, step=site.step + 50, times=TIMES, not_finite=("loss",))
    site.loom.happen(BeatReceived(rank, beat))
    kinds = [i.kind for i in site.loom.cluster.incidents.values()]
    assert kinds == ["not_finite"]


def test_two_jobs_on_a_device_that_failed_are_each_told_of() -> None:
    site = Site("n1", cores=4)
    site.submit(1, job="one", per_node=1)
    site.submit(2, job="two", per_node=1, dry_run=True)
    site.settle()
    for job in ("one", "two"):
        (place,) = site.loom.cluster.runs.by_name[job].places
        hello = Hello(incarnation=place.incarnation, node="n1", pid=1, devices=("GPU-x",), world_size=1)
        site.loom.happen(ReportReceived(RankId(job, "main", 0), hello))
    site.tell(site.loom.ask(Fail(device="GPU-x", cause="XID 79"), "hand"))
    known = next(i for i in site.loom.cluster.incidents.values() if i.kind == "device")
    nothing = phrase("policy_held_back", why=phrase("policy_dry_run"), policy=planned("evict"))
    decided = [
        phrase("decided_for", job="one", decision=planned("evict")),
        phrase("decided_for", job="two", decision=nothing),
    ]
    assert known.decision == phrase("together", parts=decided)
    assert phrase("response_begins", do=["evict"], job="one") in [entry for _, entry in known.history]
    site.settle()
    assert [site.loom.cluster.runs.by_name[job].attempt for job in ("one", "two")] == [2, 1]


def test_a_node_whose_processor_failed_gets_no_ranks_until_it_is_well_again() -> None:
    site = Site("n1", "n2")
    site.submit(per_node=1)
    site.settle()
    (place,) = site.run.places
    hello = Hello(incarnation=place.incarnation, node=place.node, pid=1, devices=("CPU-1",), world_size=1)
    site.loom.happen(ReportReceived(RankId(JOB, "main", 0), hello))
    site.tell(site.loom.ask(Fail(device="CPU-1", cause="smokes"), "hand"))
    site.settle()
    (moved,) = site.run.places
    assert {place.node, moved.node} == {"n1", "n2"}


def test_what_a_rollback_leaves_out_is_told() -> None:
    site = Training(policy=(rule("not_finite", "rollback", skip=True),))
    find(site, "not_finite", "loss is NaN at step 137", step=137)
    (known,) = site.loom.cluster.incidents.values()
    assert phrase("batches_skipped", first=136, last=137) in [entry for _, entry in known.history]


def test_a_device_that_is_not_well_may_be_left_before_it_fails() -> None:
    site = on_devices(policy=(rule("device_warning", "evict"),))
    site.tell(site.loom.tell(DeviceWarned(device="GPU-a", what="hot", detail="95 °C")))
    site.settle()
    assert [p.device for p in site.run.places] == ["GPU-b", "GPU-c"]
    assert site.run.stops == ()  # not the job's fault
    calm = on_devices()
    calm.tell(calm.loom.tell(DeviceWarned(device="GPU-a", what="hot", detail="95 °C")))
    calm.settle()
    assert calm.run.attempt == 1

"""Ranks that make no step: one incident with stacks, patience, then what the policy says; nothing for a false alarm."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from tests.core.loom import Loom, life
from tests.core.site import JOB, Site, incidents
from torchloom.core.decision import Decision
from torchloom.core.detect.hang import spans
from torchloom.core.detect.stack_groups import describe_groups, group_stacks
from torchloom.core.events import BeatReceived, FactReceived, LinkOpened, ReportReceived, Tick
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.state.run_states import Run
from torchloom.protocol.facts import Inspected, RankStacks
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Rule, Torchft
from torchloom.protocol.node import Halt, Inspect
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, Hello, Order, StepTimes
from torchloom.protocol.records import About, IncidentAmended
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan

WELL: dict[str, object] = {"idle_seconds": 0.0, "frozen": 0.0, "held": 0.0, "computes": False, "phase": ""}
TIMES = StepTimes(count=50, p50=0.02, p99=0.025, longest=0.03)


class Training(Site):
    """Two ranks that train, and what their agent sees of them."""

    def __init__(self, at: tuple[str, ...] = ("n1",), **task: object) -> None:
        super().__init__(*at)
        task = {"checkpoint_dir": "/kept"} | task
        self.step = 0
        self.seen: dict[int, dict[str, object]] = {}
        """By rank: what the agent sees that is not as usual."""
        self.told: list[tuple[str, object]] = []
        self.submit(**task)
        self.settle()
        self.join()
        self.train(30)

    def tell(self, decision: Decision) -> bool:
        if hasattr(self, "told"):
            self.told += decision.tasks
        return super().tell(decision)

    def train(self, seconds: int) -> None:
        """All goes well for so long."""
        for _ in range(seconds):
            self.step += 50
            self.beat_step(self.step, TIMES)
            self.look()

    def beat_step(self, step: int, times: StepTimes | None, idle_seconds: float = 0.0, phase: str = "") -> None:
        for place in self.run.places:
            beat = Beat(incarnation=place.incarnation, step=step, times=times, idle_seconds=idle_seconds, phase=phase)
            self.loom.happen(BeatReceived(RankId(JOB, "main", place.rank), beat))

    def look(self) -> None:
        """The agents say what they see; a second passes."""
        for agent in self.agents.values():
            for key, status in agent.attempts.items():
                ranks = tuple(
                    replace(rank, **(WELL | {"step": self.step} | self.seen.get(rank.rank, {})))
                    if rank.state == "running"
                    else rank
                    for rank in status.ranks
                )
                agent.attempts[key] = replace(status, ranks=ranks)
        self.hear()
        self.loom.now += 1.0

    def stand(self, seconds: int, rank: int, **seen: float | bool) -> None:
        """Nobody makes a step; of one rank the agent sees this, for longer and longer."""
        for passed in range(1, seconds + 1):
            self.beat_step(self.step, None, idle_seconds=float(passed))
            growing = {name: float(passed) if value is True else value for name, value in seen.items()}
            self.seen = {r.rank: {"idle_seconds": float(passed)} for r in self.run.places}
            self.seen[rank] = {"idle_seconds": float(passed)} | growing
            self.look()
        self.seen = {}

    def show_stacks(self, node: str = "n1") -> None:
        """The agent of a node has looked at its ranks."""
        (incident,) = (i.id for i in self.loom.cluster.incidents.values() if i.closed is None)
        self.loom.happen(FactReceived(Inspected(job=JOB, node=node, incident=incident)))

    def records(self, kind: type) -> list[object]:
        return [record for _, records in self.loom.log for record in records if isinstance(record, kind)]


def inspect_orders(site: Training) -> list[tuple[str, object]]:
    return [(node, command) for node, command in site.told if isinstance(command, Inspect)]


# ── what is found ──


def test_a_frozen_rank_is_told_once_looked_at_and_then_all_start_again() -> None:
    site = Training()
    site.stand(1, rank=1, frozen=True)
    assert incidents(site) == [phrase("of_job", job=JOB, text=phrase("is_frozen", ranks=spans([1])))]
    assert [node for node, _ in inspect_orders(site)] == ["n1"]
    assert site.phase == "running"  # not on the first suspicion
    site.show_stacks()
    site.stand(3, rank=1, frozen=True)
    (stopping,) = site.records(AttemptStopping)
    assert isinstance(stopping, AttemptStopping)
    assert stopping.kill_now == (1,)
    halts = [command for _, command in site.told if isinstance(command, Halt)]
    assert halts[0].kill == (1,)
    assert site.run.attempt == 2
    assert len(incidents(site)) == 1


def test_a_held_interpreter_that_computes_is_given_more_time_than_one_that_does_not() -> None:
    computing, idle = Training(), Training()
    computing.stand(10, rank=0, held=True, computes=1.0)
    idle.stand(10, rank=0, held=True)
    assert (
        incidents(computing) == incidents(idle) == [phrase("of_job", job=JOB, text=phrase("is_held", ranks=spans([0])))]
    )
    assert (computing.run.attempt, idle.run.attempt) == (1, 2)


def test_a_rank_that_stops_for_a_moment_and_goes_on_is_no_reason_to_do_anything() -> None:
    site = Training()
    site.stand(1, rank=1, frozen=True)
    site.train(3)
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.closed is not None
    assert isinstance(incident.outcome, Phrase)
    assert incident.outcome.code == "went_on_by_itself"
    assert site.run.attempt == 1
    assert site.phase == "running"


def test_an_evaluation_that_says_so_is_no_hang() -> None:
    site = Training()
    for passed in range(1, 300):
        site.beat_step(site.step, None, idle_seconds=float(passed), phase="eval")
        site.seen = {rank: {"idle_seconds": float(passed), "phase": "eval"} for rank in (0, 1)}
        site.look()
    assert incidents(site) == []


def test_a_pause_that_nobody_announced_is_told_but_training_is_not_ended_for_minutes() -> None:
    site = Training()
    site.stand(700, rank=0)  # all stand at the same place: that may be an evaluation
    assert len(incidents(site)) == 1
    assert site.run.attempt == 1
    site.stand(1900, rank=0)
    assert site.run.attempt == 2


def test_a_hang_that_a_restart_has_not_helped_is_given_far_more_time_and_never_the_end_of_a_job() -> None:
    site = Training(max_restarts=10, policy=(Rule(on="hang", do=("restart",), after=10.0),))
    site.agents["n1"].resume = ("/kept/step-1500", 1500)
    site.stand(15, rank=0)
    assert site.run.attempt == 2
    site.settle(2)
    site.join()
    site.step = 1500
    for _ in range(20):  # it learns its pace, and makes no step further
        site.beat_step(site.step, TIMES)
        site.look()
    site.stand(60, rank=0)
    assert site.run.attempt == 2
    site.stand(400, rank=0)
    assert site.run.attempt == 3
    assert site.phase != "failed"


def test_an_agent_that_has_just_begun_to_look_does_not_end_an_incident() -> None:
    site = Training(dry_run=True)
    site.stand(5, rank=1, frozen=True)
    site.beat_step(site.step, None, idle_seconds=6.0)
    site.look()  # a new agent, whose counters stand at 0
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.closed is None
    site.train(2)
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.closed is not None


def test_a_weaver_that_was_away_does_not_blame_anyone_for_what_it_missed() -> None:
    site = Training()
    site.loom.now += 1000
    site.loom.cluster.restart_runtime(site.loom.now)
    site.look()
    assert incidents(site) == []


# ── evidence ──

WAITS = 'Current thread 0x1 (most recent call first):\n  File "distributed_c10d.py", line 2810 in all_reduce\n'
SLEEPS = 'Current thread 0x1 (most recent call first):\n  File "model.py", line 88 in forward\n'


def heard(evidence: Iterable[Prose]) -> list[Phrase]:
    """What the evidence says of last beats."""
    return [line for line in evidence if isinstance(line, Phrase) and line.code == "last_heard"]


def test_stacks_that_an_agent_has_taken_are_kept_once_with_the_incident() -> None:
    site = Training()
    site.stand(1, rank=1, frozen=True)
    (incident,) = site.loom.cluster.incidents
    ranks = (
        RankStacks(rank=0, how="itself", text=WAITS),
        RankStacks(rank=1, how="py-spy", text=SLEEPS, state="stopped", said="oops"),
    )
    said = Inspected(job=JOB, node="n1", incident=incident, ranks=ranks, host="load 1")
    site.loom.happen(FactReceived(said))
    site.loom.happen(FactReceived(said))
    evidence = list(site.loom.cluster.incidents[incident].evidence)
    lines = [
        *describe_groups(group_stacks({0: WAITS, 1: SLEEPS}), culprits=(1,)),
        phrase("stacks_from_outside", rank=1, state="stopped"),
    ]
    assert evidence.count(phrase("stacks", node="n1", lines=lines)) == 1
    assert evidence.count(phrase("of_node", node="n1", text="load 1")) == 1
    assert evidence.count(phrase("last_of_stderr", rank=1, lines=["oops"])) == 1
    (blamed, _peer) = heard(evidence)
    assert blamed.args["rank"] == 1
    assert phrase("beat_step", step=1500) in blamed.args["parts"]  # type: ignore[operator]


def test_stacks_for_an_incident_that_nobody_knows_are_left_alone() -> None:
    site = Training()
    decision = site.loom.happen(FactReceived(Inspected(job=JOB, node="n1", incident="i99")))
    assert not decision


def test_an_agent_that_did_not_answer_is_asked_again_and_one_that_did_is_not() -> None:
    site = Training(("n1", "n2"), per_node=1, nodes=2)
    site.stand(1, rank=1, frozen=True)
    site.show_stacks("n1")
    site.told.clear()
    site.stand(1, rank=1, frozen=1.5)
    assert {node for node, _ in inspect_orders(site)} == {"n2"}


def test_ranks_are_ended_when_their_stacks_are_in_or_have_been_waited_for_long_enough() -> None:
    at_once = (Rule(on="frozen", do=("restart",), after=1.0),)
    shown, unshown = Training(("n1", "n2"), per_node=1, nodes=2, policy=at_once), Training(policy=at_once)
    for site in (shown, unshown):
        site.stand(2, rank=1, frozen=True)
        assert site.records(AttemptStopping) == []
    shown.show_stacks("n1")
    shown.stand(1, rank=1, frozen=2.5)
    assert shown.records(AttemptStopping) == []  # the other node has a rank too
    shown.show_stacks("n2")
    shown.stand(1, rank=1, frozen=2.7)
    assert len(shown.records(AttemptStopping)) == 1
    unshown.stand(4, rank=1, frozen=True)  # its agent may be gone as well
    assert len(unshown.records(AttemptStopping)) == 1


# ── policy ──


def test_a_job_whose_policy_is_to_report_is_not_touched() -> None:
    site = Training(policy=(Rule(on="frozen", do=("report",)),))
    site.stand(30, rank=1, frozen=True)
    assert len(incidents(site)) == 1
    assert site.run.attempt == 1


def test_a_dry_run_says_once_what_it_would_do() -> None:
    site = Training(dry_run=True)
    site.stand(30, rank=1, frozen=True)
    assert site.run.attempt == 1
    assert site.records(ResponseBegan) == []
    (incident,) = site.loom.cluster.incidents.values()
    nothing = phrase("policy_held_back", why=phrase("policy_dry_run"), policy=planned("restart"))
    assert incident.decision == nothing
    assert [r.decision for r in site.records(IncidentAmended)].count(nothing) == 1  # type: ignore[attr-defined]


def test_where_no_checkpoint_is_known_of_a_frozen_rank_is_given_far_more_time() -> None:
    site = Training(checkpoint_dir="")
    site.stand(300, rank=1, frozen=True)
    assert site.run.attempt == 1
    (incident,) = site.loom.cluster.incidents.values()
    assert isinstance(incident.decision, Phrase)
    assert (incident.decision.code, incident.decision.args["keeps"]) == ("if_it_lasts", False)
    site.stand(700, rank=1, frozen=True)
    assert site.run.attempt == 2


def test_a_rule_may_be_more_patient_or_less() -> None:
    patient = Training(policy=(Rule(on="frozen", do=("restart",), after=20.0),))
    patient.stand(15, rank=1, frozen=True)
    assert patient.run.attempt == 1
    patient.stand(25, rank=1, frozen=True)
    assert patient.run.attempt == 2
    hasty = Training(policy=(Rule(on="hang", do=("restart",), after=5.0),))
    hasty.stand(10, rank=1)
    assert hasty.run.attempt == 2


def test_a_limit_ends_what_a_rule_does() -> None:
    site = Training(policy=(Rule(on="frozen", do=("restart",), limit=1),), max_restarts=100)
    site.stand(5, rank=1, frozen=True)
    assert site.run.attempt == 2
    site.settle()
    site.join()
    site.train(30)
    site.stand(20, rank=1, frozen=True)
    assert site.run.attempt == 2
    held_back = phrase("policy_held_back", why=phrase("policy_limit_reached", limit=1), policy=planned("restart"))
    assert list(site.loom.cluster.incidents.values())[-1].decision == held_back


def test_restarts_for_hangs_count_against_the_budget() -> None:
    site = Training(max_restarts=0)
    site.stand(4, rank=1, frozen=True)
    site.settle()
    assert site.phase == "failed"


def test_what_was_decided_survives_a_restart_of_the_weaver() -> None:
    site = Training()
    site.stand(4, rank=1, frozen=True)
    again = site.loom.restarted()
    assert again.cluster.state() == site.loom.cluster.state()


# ── jobs that others started ──


def theirs() -> tuple[Loom, list[RankId], int]:
    """Two ranks that somebody else has started, how they are called, and the step to which they have trained."""
    loom = Site().loom
    ranks = [RankId("theirs", "r", n) for n in range(2)]
    for number, rank in enumerate(ranks):
        loom.join(rank, number + 1, world_size=2)
    step = 0
    for _ in range(30):
        step += 50
        for number, rank in enumerate(ranks):
            loom.happen(BeatReceived(rank, Beat(incarnation=life(number + 1), step=step, times=TIMES)))
        loom.now += 1
    return loom, ranks, step


def test_a_job_that_torchloom_did_not_start_is_reported_and_its_ranks_are_asked_where_they_are() -> None:
    loom, ranks, step = theirs()
    sent = len(loom.sent)
    for passed in range(1, 10):
        for number, rank in enumerate(ranks):
            beat = Beat(incarnation=life(number + 1), step=step, idle_seconds=float(passed), collectives=100 - number)
            loom.happen(BeatReceived(rank, beat))
        loom.look()
        loom.now += 1
    (incident,) = loom.cluster.incidents.values()
    assert incident.about == About(rank=RankId("theirs", "r", 1), part="hang")
    assert incident.decision == phrase("not_ours_to_restart")
    orders = [command for _, command in loom.sent[sent:] if isinstance(command, Order)]
    assert {order.verb for order in orders} == {"stacks"}
    assert len({order.id for order in orders}) == 1


def test_whoever_waits_for_a_rank_that_nobody_hears_is_not_blamed() -> None:
    loom, ranks, step = theirs()
    for passed in range(1, 60):  # rank 1 was stopped: it says nothing, and rank 0 waits for it
        loom.happen(BeatReceived(ranks[0], Beat(incarnation=life(1), step=step + 1, idle_seconds=float(passed))))
        loom.look()
        loom.happen(Tick())
        loom.now += 1
    assert {i.about for i in loom.cluster.incidents.values()} == {About(rank=RankId("theirs", "r", 1))}


def test_a_rank_that_is_lost_because_it_is_frozen_is_one_incident() -> None:
    site = Training(dry_run=True)
    site.stand(3, rank=1, frozen=True)
    silent = site.run.places[1]
    for passed in range(20):
        rank = RankId(JOB, "main", 0)
        site.loom.happen(
            BeatReceived(
                rank, Beat(incarnation=site.run.places[0].incarnation, step=site.step, idle_seconds=3.0 + passed)
            )
        )
        site.seen = {1: {"frozen": 3.0 + passed, "idle_seconds": 3.0 + passed}, 0: {"idle_seconds": 3.0 + passed}}
        site.look()
        site.loom.happen(Tick())
    assert site.loom.presence(RankId(JOB, "main", silent.rank)) == "lost"
    assert len(incidents(site)) == 1
    (known,) = site.loom.cluster.incidents.values()
    assert any(isinstance(line, Phrase) and line.code == "rank_lost_too" for line in known.evidence)


def test_what_was_wrong_with_a_job_that_has_ended_is_over() -> None:
    loom = Site().loom
    rank = RankId("theirs", "r", 0)
    loom.join(rank, 1)
    loom.happen(BeatReceived(rank, Beat(incarnation=life(1), step=5, times=TIMES, not_finite=("loss",))))
    assert loom.open_incidents()
    loom.leave(rank, 1)
    loom.wait(5)
    assert loom.open_incidents() == []


# ── replicas that wait for each other ──


class Together(Training):
    """Three replicas of one rank each, in which all wait for all."""

    unhealed: frozenset[int] = frozenset()
    """Those that have been started again and have nothing yet."""

    def __init__(self, **task: object) -> None:
        super().__init__(torchft=Torchft(replicas=3), per_node=1, checkpoint_dir="", **task)

    @property
    def replicas(self) -> list[Run]:
        return [self.loom.cluster.runs.by_name[f"{JOB}:{number}"] for number in range(3)]

    def join(self) -> None:
        for run in self.replicas:
            hello = Hello(incarnation=run.places[0].incarnation, node="n1", pid=1, devices=())
            self.loom.happen(LinkOpened(run.rank(0), hello.incarnation, "link"))
            self.loom.happen(ReportReceived(run.rank(0), hello))

    def beat_step(self, step: int, times: StepTimes | None, idle_seconds: float = 0.0, phase: str = "") -> None:
        for number, run in enumerate(self.replicas):
            so_far = 0 if number in self.unhealed else step
            beat = Beat(
                incarnation=run.places[0].incarnation, step=so_far, times=times, idle_seconds=idle_seconds, phase=phase
            )
            self.loom.happen(BeatReceived(run.rank(0), beat))

    def wait(self, seconds: int, culprit: int | None, **seen: bool) -> None:
        """Nobody makes a step; of one replica its agent sees more than that."""
        agent = self.agents["n1"]
        for passed in range(1, seconds + 1):
            self.beat_step(self.step, None, idle_seconds=float(passed))
            for (job, attempt), status in list(agent.attempts.items()):
                mine = {name: float(passed) for name in seen} if job == f"{JOB}:{culprit}" else {}
                now = WELL | {"step": self.step, "idle_seconds": float(passed)} | mine
                ranks = tuple(replace(rank, **now) if rank.state == "running" else rank for rank in status.ranks)
                agent.attempts[job, attempt] = replace(status, ranks=ranks)
            self.hear()
            self.loom.now += 1.0

    @property
    def ordinals(self) -> list[int]:
        return [run.ordinal for run in self.replicas]


def test_of_replicas_that_wait_for_each_other_the_frozen_one_alone_is_started_again() -> None:
    site = Together()
    site.wait(1, 1, frozen=True)
    assert incidents(site) == [phrase("of_job", job=f"{JOB}:1", text=phrase("is_frozen", ranks=spans([0])))]
    site.wait(4, 1, frozen=True)
    assert site.ordinals == [1, 2, 1]
    assert len(incidents(site)) == 1


def test_the_only_one_that_has_trained_is_given_far_more_time_when_it_is_frozen() -> None:
    site = Together()
    for number in (0, 2):
        site.agents["n1"].end(0, signal="SIGKILL", job=f"{JOB}:{number}")
    site.settle(2.0)
    site.join()
    site.unhealed = frozenset({0, 2})
    site.wait(100, 1, frozen=True)
    assert site.ordinals == [2, 1, 2]
    site.unhealed = frozenset()
    site.wait(4, 1, frozen=True)
    assert site.ordinals == [2, 2, 2]


def test_the_incident_says_what_was_heard_of_the_one_that_is_frozen() -> None:
    site = Together(dry_run=True)
    site.wait(3, 1, frozen=True)
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.about == About(rank=RankId(JOB, f"{JOB}_1", 0), part="frozen")
    first = incident.evidence[0]
    assert isinstance(first, Phrase)
    assert (first.code, first.args["replica"]) == ("replica_makes_no_step", f"{JOB}_1")
    assert [line.args["rank"] for line in heard(incident.evidence)] == [0, f"{JOB}/{JOB}_0/0"]


def test_stacks_of_a_replica_are_kept_with_the_incident_of_its_job() -> None:
    site = Together(dry_run=True)
    site.wait(1, 1, frozen=True)
    (incident,) = site.loom.cluster.incidents
    ranks = (RankStacks(rank=0, how="py-spy", text=SLEEPS, state="stopped"),)
    site.loom.happen(FactReceived(Inspected(job=f"{JOB}:1", node="n1", incident=incident, ranks=ranks)))
    lines = [*describe_groups(group_stacks({0: SLEEPS})), phrase("stacks_from_outside", rank=0, state="stopped")]
    assert phrase("stacks", node="n1", lines=lines) in site.loom.cluster.incidents[incident].evidence


def test_where_no_replica_stands_out_nothing_is_done() -> None:
    site = Together()
    site.wait(300, None)
    assert incidents(site) == []
    assert site.ordinals == [1, 1, 1]


def test_one_that_goes_on_by_itself_is_left_alone() -> None:
    site = Together()
    site.wait(1, 1, frozen=True)
    site.train(3)
    (incident,) = site.loom.cluster.incidents.values()
    assert isinstance(incident.outcome, Phrase)
    assert incident.outcome.code == "went_on_by_itself"
    assert site.ordinals == [1, 1, 1]


def test_what_was_seen_of_one_attempt_does_not_count_for_the_next() -> None:
    runtime = Loom().cluster.runtime
    first = runtime.hang_tracker("a", (("a", 1),))
    assert runtime.hang_tracker("a", (("a", 1),)) is first
    assert runtime.hang_tracker("b", (("b", 1),)) is not first
    assert runtime.hang_tracker("a", (("a", 1),)) is first
    second = runtime.hang_tracker("a", (("a", 2),))
    assert second is not first
    assert runtime.hang_tracker("a", (("a", 2), ("b", 1))) is not second  # of replicas, one more

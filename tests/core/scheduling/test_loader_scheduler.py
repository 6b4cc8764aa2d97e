"""The weaver allocates loaders: what it sees in beats becomes changes of the knob `loaders`, within budgets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.core.loom import Loom, life
from tests.core.site import Site
from torchloom.core.events import BeatReceived, NodeBeatReceived, ReplyReceived, ReportReceived, Tick, VerdictKnown
from torchloom.core.scheduling.loader_scheduler import JobSeen, LoaderScheduler
from torchloom.core.scheduling.observation import JobObserver
from torchloom.core.scheduling.throughput_model import Measurement
from torchloom.core.state.rank_states import JobPhase
from torchloom.protocol.data_loading import Loading
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.operator import Done, No, Revert, ScheduleSet, SetKnobs, SetSchedule
from torchloom.protocol.phrase import Phrase
from torchloom.protocol.rank import Applied, Beat, Knobs, KnobSpec, Propose, QueryStep, Ready, StepReport, Verdict
from torchloom.protocol.scheduling import LoadersAllocated, ScheduleRules

HUNGRY = RankId("hungry", "main", 0)


@dataclass
class Trainer:
    """The ranks of a job: a loader gives `rate` samples/s, training could take `ceiling`."""

    rate: float
    ceiling: float
    ranks: dict[RankId, str]
    loaders: int
    step: int = 1
    paused: bool = False
    draining: int = 0
    refuses: bool = False
    is_silent: bool = False
    is_lost: bool = False
    """Its link is closed, and nothing is heard of it."""
    batches: int = 40
    """Between two beats."""

    def loading(self) -> Loading:
        use = 1 / self.ceiling
        load = 1 / self.rate
        pace = ((load / self.loaders) ** 4 + use**4) ** 0.25 if self.loaders else use + load
        return Loading(
            loaders=self.loaders, batches=self.batches, wait=pace - use, use=use, read=load, decode=0.0, collate=0.0,
            transfer=0.0, ready=0.0, mb=0.0, draining=self.draining,
        )  # fmt: skip


class Town:
    """Nodes and jobs under a weaver. The ranks answer at once."""

    def __init__(self, **budgets: int) -> None:
        self.loom = Loom()
        self.loom.cluster.runtime.blind_until = -1e9
        self.budgets = budgets
        self.jobs: dict[str, Trainer] = {}
        self.most: dict[str, int] = dict.fromkeys(budgets, 0)
        """Loaders that were in use on each node at one time, or on their way."""
        self.lives = 0
        self.beat_nodes()

    def beat_nodes(self) -> None:
        for node, budget in self.budgets.items():
            beat = NodeBeat(incarnation=life(1), host=node, cores=64, memory_mb=1, loader_budget=budget)
            self.loom.cluster.runtime.hear_node(node, beat, self.loom.now)
            self.loom.happen(NodeBeatReceived(node))

    def start(self, job: str, rate: float, ceiling: float, loaders: int, *nodes: str) -> Trainer:
        self.lives += 1
        ranks = {RankId(job, "main", number): node for number, node in enumerate(nodes or ("n1",))}
        trainer = self.jobs[job] = Trainer(rate, ceiling, ranks, loaders)
        spec = KnobSpec(name="loaders", kind="int", value=loaders, low=0, high=512, per="rank")
        for rank, node in ranks.items():
            self.loom.join(rank, self.lives, node=node, devices=(), world_size=len(ranks))
            self.loom.happen(ReportReceived(rank, Knobs(incarnation=life(self.lives), knobs=(spec,))))
        return trainer

    def end(self, job: str) -> None:
        for rank in self.jobs.pop(job).ranks:
            self.loom.leave(rank, int(self.loom.cluster.ranks[rank].incarnation, 16))

    def rule(self, policy: str = "ours", **more: object) -> Done | No:
        decision = self.loom.ask(SetSchedule(policy=policy, operator="ann", **more), "rule")  # type: ignore[arg-type]
        assert decision.answer is not None
        return decision.answer

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.loom.now += 1
            self.beat_nodes()
            for trainer in self.jobs.values():
                trainer.step += 40
                if trainer.is_lost:
                    continue
                for rank in trainer.ranks:
                    incarnation = self.loom.cluster.ranks[rank].incarnation
                    beat = Beat(
                        incarnation=incarnation, step=trainer.step, loading=trainer.loading(), paused=trainer.paused,
                        change=self.loom.cluster.ledger.change_count,
                    )  # fmt: skip
                    self.loom.happen(BeatReceived(rank, beat))
            self.loom.happen(Tick())
            while self.answer():
                self.count()

    def answer(self) -> bool:
        """The ranks obey what was sent, and the server stores the verdicts."""
        sent, self.loom.sent = self.loom.sent, []
        verdicts, self.loom.verdicts = self.loom.verdicts, []
        for verdict in verdicts:
            self.loom.happen(VerdictKnown(verdict.change, verdict.commit, verdict.abort))
        for rank, command in sent:
            if rank.job not in self.jobs or self.jobs[rank.job].is_silent or self.jobs[rank.job].is_lost:
                continue
            trainer, here = self.jobs[rank.job], {"incarnation": command.incarnation}
            match command:
                case QueryStep(id=id):
                    reply = StepReport(id=id, step=trainer.step, step_seconds=0.02, paused=trainer.paused, **here)
                case Propose(change=change):
                    ok = not trainer.refuses
                    reply = Ready(id=change.id, ok=ok, why="" if ok else "no room", step=trainer.step, **here)
                case Verdict(id=id, commit=True):
                    change = self.loom.cluster.ledger.changes[id].change
                    trainer.loaders = int(change.values.get("loaders", trainer.loaders))  # type: ignore[arg-type]
                    reply = Applied(id=id, step=change.step, **here)
                case _:
                    continue
            self.loom.happen(ReplyReceived(rank, reply))
        return bool(sent or verdicts)

    def count(self) -> None:
        for node in self.budgets:
            used = sum(job.loaders for job in self.jobs.values() for at in job.ranks.values() if at == node)
            self.most[node] = max(self.most[node], used)

    def loaders(self) -> dict[str, int]:
        return {name: job.loaders for name, job in self.jobs.items()}

    def allocated(self) -> list[LoadersAllocated]:
        return [r for _, records in self.loom.log for r in records if isinstance(r, LoadersAllocated)]


def test_loaders_go_to_the_job_that_gains_most() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3)
    town.start("light", 100.0, 50.0, 3)
    town.start("lighter", 100.0, 50.0, 3)
    town.wait(3)
    assert town.loaders() == {"hungry": 3, "light": 3, "lighter": 3}
    assert isinstance(town.rule(), Done)
    town.wait(10)
    assert town.loaders() == {"hungry": 7, "light": 1, "lighter": 1}
    assert town.most == {"n1": 9}


def test_the_first_batches_of_a_slow_job_tell_what_it_needs() -> None:
    town = Town(n1=9)
    town.rule()
    town.start("hungry", 50.0, 400.0, 3)
    town.wait(5)
    town.start("slow", 100.0, 50.0, 3).batches = 1
    town.wait(5)
    assert town.loaders() == {"hungry": 8, "slow": 1}


def test_before_it_is_measured_a_job_is_taken_to_need_what_its_script_asks_for() -> None:
    town = Town(n1=9)
    town.rule()
    town.start("hungry", 50.0, 400.0, 3)
    town.wait(5)
    town.start("small", 100.0, 50.0, 2).batches = 0
    town.start("large", 100.0, 50.0, 4).batches = 0
    town.wait(5)
    assert town.loaders() == {"hungry": 4, "small": 2, "large": 3}


def test_with_the_policy_off_nothing_moves_and_a_resized_job_gets_back_what_its_script_asked_for() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3)
    town.start("light", 100.0, 50.0, 3)
    town.wait(30)
    assert town.allocated() == []
    town.rule()
    town.wait(10)
    assert town.loaders()["hungry"] > 3
    town.rule("off")
    town.wait(5)
    assert town.loaders() == {"hungry": 3, "light": 3}


def test_a_job_that_leaves_gives_its_loaders_to_the_others() -> None:
    town = Town(n1=6)
    town.rule()
    town.start("one", 120.0, 300.0, 3)
    town.start("two", 120.0, 300.0, 3)
    town.wait(10)
    assert town.loaders() == {"one": 3, "two": 3}
    town.end("two")
    town.wait(10)
    assert town.loaders() == {"one": 6}
    assert [record.triggers for record in town.allocated()][-1] == ("departure",)


def test_a_paused_job_gives_its_loaders_back_until_it_continues() -> None:
    town = Town(n1=6)
    town.rule()
    one = town.start("one", 120.0, 300.0, 3)
    town.start("two", 120.0, 300.0, 3)
    town.wait(10)
    one.paused = True
    town.wait(10)
    assert town.loaders() == {"one": 0, "two": 6}
    one.paused = False
    town.wait(10)
    assert town.loaders() == {"one": 3, "two": 3}
    assert town.most == {"n1": 6}


@pytest.mark.parametrize("trouble", ["refuses", "is_silent", "is_lost"])
def test_what_was_taken_from_others_waits_for_a_job_in_trouble(trouble: str) -> None:
    town = Town(n1=9)
    hungry = town.start("hungry", 50.0, 400.0, 3)
    town.start("light", 100.0, 50.0, 3)
    town.start("lighter", 100.0, 50.0, 3)
    town.wait(5)
    if trouble == "is_lost":
        town.loom.close(HUNGRY, 1)
    setattr(hungry, trouble, True)
    town.rule()
    town.wait(1 if trouble == "is_lost" else 8)  # before it counts as dead
    assert town.jobs["hungry"].loaders == 3
    assert sum(town.loaders().values()) <= 9
    if trouble == "is_lost":
        town.loom.open(HUNGRY, 1)
    setattr(hungry, trouble, False)
    town.wait(60)
    assert town.loaders() == {"hungry": 7, "light": 1, "lighter": 1}
    assert town.most == {"n1": 9}


def test_the_objective_makespan_favours_the_job_that_has_most_ahead() -> None:
    scheduler, rules = LoaderScheduler(), ScheduleRules(policy="ours", objective="makespan")
    measured = tuple(Measurement(3, 10, 1.0, wait=0.006, use=0.0025, load=0.02) for _ in range(3))
    for name, remaining in (("long", 1e7), ("short", 1e5)):
        seen = [*scheduler.jobs.values(), JobSeen(name, {"n1": 1}, 3, 3, 1, remaining=remaining, measurements=measured)]
        scheduler.look(seen, {"n1": 6}, rules, 1.0)
    assert scheduler.cluster.allocation() == {"long": 5, "short": 1}


def test_what_a_job_has_ahead_follows_from_its_samples_and_its_step() -> None:
    site = Site("n1")
    site.submit(per_node=2, samples=10_000)
    site.settle()
    site.join()
    for rank in range(2):
        sizes = (("loaders", 3), ("batch_size", 8))
        specs = tuple(KnobSpec(name=name, kind="int", value=value) for name, value in sizes)
        incarnation = site.run.places[rank].incarnation
        site.loom.happen(ReportReceived(site.run.rank(rank), Knobs(incarnation=incarnation, knobs=specs)))
    site.beat_all(step=100)
    (seen,) = JobObserver().see(site.loom.cluster)
    assert (seen.name, seen.requested, seen.remaining) == ("mnist", 3, 10_000 - 100 * 2 * 8)
    site.beat_all(step=1_000_000)
    (seen,) = JobObserver().see(site.loom.cluster)
    assert seen.remaining == 16


def test_a_job_that_is_restarted_is_known_already() -> None:
    town = Town(n1=9)
    town.rule()
    town.start("hungry", 50.0, 400.0, 4)
    town.start("light", 100.0, 50.0, 4)
    town.wait(10)
    town.end("hungry")
    town.wait(10)
    town.start("hungry", 50.0, 400.0, 4)
    town.loom.now += 1
    town.loom.happen(Tick())
    assert town.loom.engine.scheduler.standing(town.loom.engine.scheduler.jobs["hungry"], ["n1"]) == "scheduled"


def test_what_an_operator_has_set_stays() -> None:
    town = Town(n1=6)
    town.rule()
    town.start("one", 50.0, 400.0, 3)
    town.start("two", 50.0, 400.0, 3)
    town.wait(5)
    town.loom.ask(SetKnobs(request="5" * 32, job="two", values={"loaders": 1}, operator="ann"), "set")
    town.wait(10)
    assert town.loaders() == {"one": 5, "two": 1}


def test_a_number_that_is_reverted_is_the_schedulers_again() -> None:
    town = Town(n1=6)
    town.rule()
    town.start("one", 50.0, 400.0, 3)
    town.start("two", 50.0, 400.0, 3)
    town.wait(5)
    town.loom.ask(SetKnobs(request="5" * 32, job="two", values={"loaders": 4}, operator="ann"), "set")
    town.wait(5)
    pin = next(change for change in town.loom.cluster.ledger.changes.values() if change.operator == "ann")
    town.loom.ask(Revert(request="6" * 32, job="two", change=pin.id, operator="ann"), "revert")
    town.wait(5)
    town.rule(budgets={"n1": 2})
    town.wait(5)
    assert town.loaders() == {"one": 1, "two": 1}


def test_what_an_operator_has_set_stays_while_training_is_paused() -> None:
    town = Town(n1=6)
    town.rule()
    town.start("one", 50.0, 400.0, 3)
    two = town.start("two", 50.0, 400.0, 3)
    town.wait(5)
    town.loom.ask(SetKnobs(request="5" * 32, job="two", values={"loaders": 2}, operator="ann"), "set")
    town.wait(5)
    two.paused = True
    town.wait(10)
    assert town.loaders() == {"one": 4, "two": 2}
    assert town.loom.engine.scheduler.cluster.allocation() == {"one": 4, "two": 2}


def test_a_refused_resize_takes_nothing_and_is_tried_again() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3).refuses = True
    town.start("light", 100.0, 50.0, 3)
    town.start("lighter", 100.0, 50.0, 3)
    town.rule()
    town.wait(8)
    assert town.loaders() == {"hungry": 3, "light": 1, "lighter": 1}
    town.jobs["hungry"].refuses = False
    town.wait(25)
    assert town.loaders() == {"hungry": 7, "light": 1, "lighter": 1}


def test_a_resize_that_is_refused_at_once_holds_no_room() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3)
    town.wait(3)
    busy = SetKnobs(request="6" * 32, job="hungry", values={"loaders": 3}, operator="ann")
    town.jobs["hungry"].is_silent = True
    town.loom.ask(busy, "set")  # no rank answers, so that it stays under way
    town.rule()
    town.wait(1)
    moves = town.loom.engine.scheduler.moves
    assert moves.commanded("hungry") == 9
    town.wait(1)
    assert moves.commanded("hungry") is None


def test_the_loaders_of_a_job_that_was_taken_for_dead_count_again_when_it_is_found() -> None:
    town = Town(n1=9)
    hungry = town.start("hungry", 50.0, 400.0, 3)
    town.rule()
    town.wait(5)
    assert town.loaders() == {"hungry": 9}
    hungry.is_lost = True
    town.loom.close(HUNGRY, 1)
    town.wait(8)
    assert town.loom.engine.scheduler.jobs == {}
    hungry.is_lost = False
    town.loom.open(HUNGRY, 1)
    town.wait(3)
    assert town.loom.cluster.jobs["hungry"].phase is JobPhase.RUNNING
    assert town.loom.engine.scheduler.jobs["hungry"].loaders == 9


def test_loaders_start_only_when_those_that_make_room_have_ended() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3)
    light = town.start("light", 100.0, 50.0, 6)
    light.draining = 2
    town.rule()
    town.wait(15)
    assert town.loaders() == {"hungry": 3, "light": 1}
    light.draining = 0
    town.wait(3)
    assert town.loaders() == {"hungry": 8, "light": 1}


def test_what_a_slow_pass_saw_earlier_does_not_count() -> None:
    town = Town(n1=9)
    town.start("hungry", 50.0, 400.0, 3)
    town.start("light", 100.0, 50.0, 3)
    town.rule()
    engine = town.loom.engine
    slices = engine.check_ranks(town.loom.now)
    for _ in range(3):
        next(slices)  # the ranks, their jobs, and the first job with loaders
    town.wait(10)
    after = {"hungry": 8, "light": 1}
    assert engine.scheduler.moves.holdings() == after
    assert [event for events in slices for event in events] == []
    assert engine.scheduler.moves.holdings() == after


def test_a_restarted_weaver_moves_nothing_before_it_has_measured() -> None:
    town = Town(n1=9)
    town.rule()
    town.start("hungry", 50.0, 400.0, 3)
    town.start("light", 100.0, 50.0, 3)
    town.wait(10)
    loaders, now, count = town.loaders(), town.loom.now, len(town.allocated())
    assert loaders["hungry"] > loaders["light"]
    town.loom = Loom(state=town.loom.cluster.state())
    town.loom.now = now
    town.loom.cluster.restart_runtime(now)
    assert town.loom.cluster.schedule.policy == "ours"
    town.wait(30)
    assert town.loaders() == loaders
    assert town.allocated() == []
    assert count > 0


def test_no_budget_is_exceeded_while_jobs_come_and_go() -> None:
    town = Town(n1=8, n2=8)
    town.rule()
    town.start("wide", 40.0, 400.0, 2, "n1", "n2")
    town.wait(5)
    town.start("left", 60.0, 300.0, 0, "n1")
    town.start("right", 20.0, 100.0, 0, "n2", "n2")
    town.wait(20)
    town.end("left")
    town.wait(10)
    town.start("late", 30.0, 500.0, 0, "n1")
    town.wait(20)
    assert all(town.most[node] <= 8 for node in town.most)
    assert town.jobs["wide"].loaders + town.jobs["late"].loaders == 8


def test_on_a_node_whose_budget_nobody_knows_jobs_are_left_alone() -> None:
    town = Town(n1=4)
    town.start("there", 50.0, 400.0, 3, "n9")
    town.rule()
    town.wait(20)
    assert town.loaders() == {"there": 3}
    assert isinstance(town.rule(budgets={"n9": 6}), Done)
    town.wait(10)
    assert town.loaders() == {"there": 6}


def test_a_budget_of_an_unknown_node_is_refused() -> None:
    town = Town(node1=4)
    answer = town.rule(budgets={"node2": 6})
    assert isinstance(answer, No)
    assert isinstance(answer.why, Phrase)
    assert (answer.why.code, town.loom.cluster.schedule.policy) == ("node_unknown", "off")


def test_the_rules_are_in_the_log_once() -> None:
    town = Town(n1=4)
    for _ in range(3):
        town.rule(objective="samples")
    rules = [r for _, records in town.loom.log for r in records if isinstance(r, ScheduleSet)]
    assert rules == [ScheduleSet(policy="ours", objective="samples", operator="ann")]

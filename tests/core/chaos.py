"""Trouble without end, simulated: jobs under policies drawn at random, whose ranks freeze, hang, die and come back.

Only agents, ranks and the clock are played; the engine is the real one. Beside the weaver's cluster state stands
one into which nothing but the log is folded. After every decision what must always hold is looked at:

- every incident has a number of its own, and about one thing one is open at most;
- nothing is done but for an incident that is open, by a rule of the job that says so, and not beyond its limit;
- for a suspicion nothing is done before it has lasted as long as the rule, or else the settings, want;
- only ranks of the run are killed rather than asked to end;
- the log, folded, is the state; and another weaver can go on from it.

`Chaos(SEED).play(EVENTS)` returns what was wrong; the same seed gives the same events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from tests.core.loom import life
from tests.core.site import PlayedAgent
from torchloom.core.decision import Decision
from torchloom.core.detect.detector import Finding
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.engine import Engine
from torchloom.core.events import (
    Event,
    FactReceived,
    FindingsMade,
    LinkClosed,
    LinkOpened,
    ReportReceived,
    RequestReceived,
    TookOver,
    VerdictKnown,
)
from torchloom.core.incidents.rule_lookup import rule_for
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT
from torchloom.core.state.run_states import Run
from torchloom.protocol.facts import (
    DeviceFailed,
    DeviceRecovered,
    DeviceWarned,
    Fact,
    Inspected,
    RankExited,
    RankStacks,
)
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import EventKind, Rule, Task
from torchloom.protocol.node import Inspect, RankStatus
from torchloom.protocol.operator import Ask, Cancel, Drain, Fail, Recover, Steer, Submit
from torchloom.protocol.rank import (
    Applied,
    Beat,
    Command,
    Goodbye,
    Hello,
    Knobs,
    Order,
    Ordered,
    Propose,
    QueryStep,
    Ready,
    Reply,
    Saved,
    SaveFailed,
    StepReport,
    StepTimes,
    Verdict,
)
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, Record
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan
from torchloom.settings import Settings

SETTINGS = Settings()
JOBS = ("a", "b", "c")
NODES = ("n1", "n2", "n3")
DEVICES = 4
"""On each node."""
CHECK_EVERY = 2000
"""Events between two comparisons of the log with the state."""
ENOUGH = 5
"""Problems after which there is no need to go on."""
STANDING = ("frozen", "held", "computing", "asleep", "eval", "paused")
"""Conditions in which a rank makes no step."""
MOVES = {
    "beat": 40, "node": 25, "tick": 8, "look": 3, "join": 4, "worsen": 2, "mend": 2, "find": 3, "lie": 1, "die": 0.3,
    "link": 1, "fact": 1, "ask": 2, "report": 1, "reply": 5, "silence": 0.2, "nap": 0.05, "replace": 0.02,
}  # fmt: skip
"""What may happen next, and how likely it is."""


@dataclass
class Body:
    """A rank as it really is."""

    id: RankId
    life: str
    step: int = 0
    condition: str = ""
    since: float = 0.0
    """When that began."""
    until: float = 0.0
    linked: bool = True


class Chaos:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = Engine(ClusterState(SETTINGS))
        self.mirror = ClusterState(SETTINGS)
        """Knows the log alone."""
        self.now = 1000.0
        self.agents = {node: PlayedAgent(node, 8, _devices(node)) for node in NODES}
        self.silent: dict[str, float] = {}
        """Agents that are not heard, until when."""
        self.bodies: dict[RankId, Body] = {}
        self.sent: list[tuple[RankId, Command]] = []
        self.inspects: list[tuple[str, Inspect]] = []
        self.open: dict[About, str] = {}
        """Incidents that are open, by what they are about."""
        self.problems: list[str] = []
        self.count = 0
        self.seen: Counter[str] = Counter()
        """What was decided, by kind of record; and responses by what they are to."""
        self._requests = 0
        self.happen(TookOver("weaver"))

    def play(self, events: int) -> list[str]:
        names, weights = list(MOVES), list(MOVES.values())
        while self.count < events and len(self.problems) < ENOUGH:
            for name in self.chance.choices(names, weights, k=100):
                self.now += self.chance.random() * 0.1
                getattr(self, name)()
        self.compare()
        return self.problems

    # ── the weaver ──

    @property
    def cluster(self) -> ClusterState:
        return self.engine.cluster

    def happen(self, event: Event) -> None:
        self.count += 1
        decision = self.engine.handle(event, self.now)
        for record in decision.stored:
            self._look_at(record)
        self.mirror.fold(decision.stored, self.now)
        self._carry_out(decision)
        if self.count % CHECK_EVERY == 0:
            self.compare()

    def _carry_out(self, decision: Decision) -> None:
        for node, task in decision.tasks:
            if isinstance(task, Inspect):
                self.inspects.append((node, task))
            elif node not in self.silent and self.chance.random() > 0.05:
                self.agents[node].obey(task)
        self.sent += decision.commands
        for wanted in decision.verdicts:
            self.happen(VerdictKnown(wanted.change, wanted.commit, wanted.abort))

    def compare(self) -> None:
        """The log, folded, is the state."""
        if self.mirror.state() != self.cluster.state():
            self.wrong("the log, folded, is not the state")
        ranks = self.cluster.ranks.values()
        if self.cluster.ranks.present != Counter(rank.id.job for rank in ranks if rank.presence in PRESENT):
            self.wrong("ranks that are present were miscounted")

    def wrong(self, what: str) -> None:
        self.problems.append(f"event {self.count}, {self.now:.2f} s: {what}")

    # ── what must hold ──

    def _look_at(self, record: Record) -> None:
        """Before the mirror knows of it, which shows what it was decided on."""
        self.seen[type(record).__name__] += 1
        match record:
            case IncidentOpened(id=id, about=about):
                if id != f"i{self.seen['IncidentOpened']}":
                    self.wrong(f"incident {self.seen['IncidentOpened']} about {about} has the number {id}")
                if about in self.open:
                    self.wrong(f"{id} about {about} was opened beside {self.open[about]}")
                self.open[about] = id
            case IncidentAmended(id=id, closed=True) if id in self.mirror.incidents or id in self.open.values():
                self.open = {about: known for about, known in self.open.items() if known != id}
            case ResponseBegan():
                self.seen[f"response to {record.kind}"] += 1
                self._look_at_response(record)
            case AttemptStopping(job=job, kill_now=kill_now, incident=incident):
                run = self.mirror.runs.by_name[job]
                if not set(kill_now) <= {place.rank for place in run.places}:
                    self.wrong(f"ranks {kill_now} are to be killed, of which {job} has not all")
                if incident and incident not in self.open.values():
                    self.wrong(f"{job} is ended for {incident}, which is not open")

    def _look_at_response(self, began: ResponseBegan) -> None:
        run = self.mirror.runs.by_name[began.job]
        rule = rule_for(run.task, began.kind)
        if began.incident not in self.open.values():
            self.wrong(f"a response to {began.incident}, which is not open")
        if run.task.dry_run:
            self.wrong(f"{began.do} in a dry run")
        if began.do != tuple(response for response in rule.do if response != "report"):
            self.wrong(f"{began.do} where the rule says {rule.do}")
        since = self.now - run.task.restart_window
        done = sum(kind == began.kind and at >= since for kind, at in run.responses)
        if rule.limit is not None and done >= rule.limit:
            self.wrong(f"{began.kind} was responded to {done + 1} times, and {rule.limit} is the limit")
        if began.kind in {"frozen", "held", "hang"} and (lasted := self._lasted(run, began)) < _patience(rule):
            self.wrong(f"{began.kind} of ranks {began.ranks}: {began.do} after {lasted:.2f} s")

    def _lasted(self, run: Run, began: ResponseBegan) -> float:
        """How long what is responded to has been seen, by agents or in beats."""
        seen = [status for node in run.nodes for status in self._statuses(run, node)]
        if began.kind == "hang":
            ranks = [self.cluster.runtime.ranks.get(RankId(run.name, "main", place.rank)) for place in run.places]
            beats = [
                rank_runtime.beat.idle_seconds
                for rank_runtime in ranks
                if rank_runtime is not None and rank_runtime.beat is not None
            ]
            return max([*beats, *(status.idle_seconds for status in seen)], default=0.0)
        mine = [status for status in seen if status.rank in began.ranks]
        return min((status.frozen if began.kind == "frozen" else status.held for status in mine), default=0.0)

    def _statuses(self, run: Run, node: str) -> Iterable[RankStatus]:
        known = self.cluster.runtime.nodes.get(node)
        for status in known.beat.attempts if known is not None else ():
            if (status.job, status.attempt) == (run.name, run.attempt):
                yield from status.ranks

    # ── moves: what is seen ──

    def beat(self) -> None:
        body = self._body()
        if body is None or body.condition in {"frozen", "held", "computing"}:
            return
        chance, now = self.chance, self.now
        idle_seconds, times = self._idle_seconds(body), None
        if not idle_seconds:
            body.step += chance.randrange(40, 60)
            middle = 0.02 * chance.lognormvariate(0.0, 0.2)
            own = middle * chance.choice((0.3, 0.9))
            times = StepTimes(
                count=50, p50=middle, p99=1.5 * middle, longest=2 * middle, own=own, data=chance.random() * middle
            )
        loss = chance.random() * (1000 if chance.random() < 0.005 else 1)
        beat = Beat(
            incarnation=body.life, step=body.step, times=times, idle_seconds=idle_seconds, loss=loss,
            not_finite=("loss",) if chance.random() < 0.002 else (), rss_mb=1000.0 + now % 500,
            phase="eval" if body.condition == "eval" else "", paused=body.condition == "paused",
            collectives=2 * body.step - (body.condition == "asleep"),
        )  # fmt: skip
        self._hear(body.id, beat)

    def _hear(self, rank: RankId, beat: Beat) -> None:
        event = self.engine.hear(rank, beat, self.now)
        if event is None:
            self.count += 1
        else:
            self.happen(event)

    def node(self) -> None:
        node = self.chance.choice(NODES)
        if self.silent.get(node, 0.0) > self.now:
            return
        self.silent.pop(node, None)
        agent = self.agents[node]
        for key, status in agent.attempts.items():
            ranks = tuple(self._watched(key[0], rank) for rank in status.ranks)
            agent.attempts[key] = replace(status, ranks=ranks)
        for event in self.engine.hear_node(node, agent.beat(), self.now):
            self.happen(event)

    def _watched(self, job: str, status: RankStatus) -> RankStatus:
        body = self.bodies.get(RankId(job, "main", status.rank))
        if status.state == "ended" or body is None or body.life != status.incarnation:
            return status
        lasted = round(self.now - body.since, 2)
        return replace(
            status, step=body.step, idle_seconds=self._idle_seconds(body),
            frozen=lasted if body.condition == "frozen" else 0.0,
            held=lasted if body.condition in {"held", "computing"} else 0.0, computes=body.condition == "computing",
            phase="eval" if body.condition == "eval" else "",
        )  # fmt: skip

    def _idle_seconds(self, body: Body) -> float:
        """So long it has made no step: for its own sake, or because a peer makes none."""
        peers = [b for b in self.bodies.values() if b.id.job == body.id.job and b.condition in STANDING]
        return round(self.now - min(peer.since for peer in peers), 2) if peers else 0.0

    def lie(self) -> None:
        """Whatever an agent may say of a rank, and a rank of itself."""
        chance = self.chance
        body = self._body()
        if body is None:
            return
        beat = Beat(
            incarnation=chance.choice((body.life, life(chance.randrange(100)))), step=chance.randrange(10_000),
            idle_seconds=chance.random() * 400, phase=chance.choice(("", "", "eval")), paused=chance.random() < 0.1,
            collectives=chance.randrange(100), not_finite=chance.choice(((), ("loss",), ("grad_norm",))),
        )  # fmt: skip
        self._hear(body.id, beat)
        for agent in self.agents.values():
            for key, status in agent.attempts.items():
                ranks = tuple(
                    replace(
                        rank, idle_seconds=chance.random() * 400, frozen=chance.random() * 2, held=chance.random() * 2
                    )
                    for rank in status.ranks
                )
                agent.attempts[key] = replace(status, ranks=ranks)

    def tick(self) -> None:
        for event in self.engine.tick(self.now):
            self.happen(event)

    def look(self) -> None:
        for events in self.engine.check_ranks(self.now):
            for event in events:
                self.happen(event)

    # ── moves: what goes wrong ──

    def worsen(self) -> None:
        body = self._body()
        if body is not None and not body.condition:
            body.condition = self.chance.choice((*STANDING, "frozen", "held"))
            body.since = self.now
            body.until = self.now + self.chance.choice((0.5, 2.0, 5.0, 30.0, 400.0)) * self.chance.uniform(0.5, 1.5)

    def mend(self) -> None:
        for body in self.bodies.values():
            if body.condition and body.until < self.now:
                body.condition = ""

    def die(self) -> None:
        body = self._body()
        agent = self._agent_of(body) if body is not None else None
        if body is None or agent is None:
            return
        code, by = self.chance.choice(((None, "SIGKILL"), (1, ""), (0, "")))
        attempt = self.cluster.runs.by_name[body.id.job].attempt
        agent.end(body.id.rank, code=code, signal=by, attempt=attempt, job=body.id.job)
        if self.chance.random() < 0.5:
            self.happen(LinkClosed(body.id, body.life, "link", "Client Closed"))
        if self.chance.random() < 0.5:
            exited = RankExited(
                job=body.id.job, replica="main", rank=body.id.rank, incarnation=body.life, exit_code=code, signal=by
            )
            self.happen(FactReceived(exited))
        self.bodies.pop(body.id, None)

    def link(self) -> None:
        body = self._body()
        if body is None:
            return
        body.linked = not body.linked
        event: LinkOpened | LinkClosed = LinkOpened(body.id, body.life, "link")
        if not body.linked:
            reason = self.chance.choice(("Client Closed", "Stale Connection"))
            event = LinkClosed(body.id, body.life, "link", reason)
        self._announce(event)

    def _announce(self, event: LinkOpened | LinkClosed) -> None:
        self.engine.hear_link(event)
        self.happen(event)

    def find(self) -> None:
        body = self._body()
        if body is not None:
            kind = self.chance.choice(
                [kind for kind in KINDS if kind not in {"crash", "hang", "frozen", "held", "device"}]
            )
            finding = Finding(
                kind, "something", ("seen",), self.chance.random() < 0.5, body.step, max(0, body.step - 9)
            )
            self.happen(FindingsMade(body.id, (finding,)))

    def silence(self) -> None:
        self.silent[self.chance.choice(NODES)] = self.now + self.chance.choice((3.0, 10.0, 60.0))

    def nap(self) -> None:
        """The weaver was away for a while."""
        self.now += self.chance.uniform(2.0, 60.0)
        self.engine.restart(self.now)
        linked = {(body.id, body.life): {"link"} for body in self.bodies.values() if body.linked}
        self.happen(self.engine.hear_roll(linked))

    def replace(self) -> None:
        """Another weaver goes on from what is stored."""
        state = self.mirror.state()
        self.engine = Engine(ClusterState(SETTINGS, state))
        if self.cluster.state() != state:
            self.wrong("a snapshot, loaded, is another state")
        self.happen(TookOver("weaver"))
        self.engine.restart(self.now)

    # ── moves: what is said ──

    def join(self) -> None:
        """Ranks that were started say so; of those that are gone nothing more is heard."""
        runs = [run for run in self.cluster.runs.by_name.values() if not run.over]
        lives = {place.incarnation for run in runs for place in run.places if self._running(run, place.rank)}
        self.bodies = {id: body for id, body in self.bodies.items() if body.life in lives}
        for run in runs:
            for place in run.places:
                id = RankId(run.name, "main", place.rank)
                if place.incarnation not in lives or id in self.bodies:
                    continue
                self.bodies[id] = Body(id, place.incarnation, run.resume_step or 0)
                self._announce(LinkOpened(id, place.incarnation, "link"))
                devices = (place.device,) if place.device else ()
                hello = Hello(
                    incarnation=place.incarnation, node=place.node, pid=1, devices=devices, world_size=run.world_size
                )
                self.happen(ReportReceived(id, hello))
                self.happen(ReportReceived(id, Knobs(incarnation=place.incarnation, knobs=(), checkpoints=True)))

    def report(self) -> None:
        body = self._body()
        if body is None:
            return
        said: Saved | SaveFailed | Goodbye = self.chance.choice(
            (
                Saved(incarnation=body.life, step=body.step, folder="/kept", size=1, seconds=1.0),
                Saved(incarnation=body.life, step=body.step, folder="/kept", size=1, seconds=1.0),
                SaveFailed(incarnation=body.life, step=body.step, folder="/kept", why="full"),
                Goodbye(incarnation=body.life, how="finished"),
            )
        )
        if not isinstance(said, Goodbye) or self.chance.random() < 0.02:
            self.happen(ReportReceived(body.id, said))

    def fact(self) -> None:
        chance = self.chance
        device = chance.choice(_devices(chance.choice(NODES)))
        fact: Fact = chance.choice(
            (
                DeviceFailed(device=device, cause="XID 79"),
                DeviceRecovered(device=device),
                DeviceRecovered(device=device),
                DeviceWarned(device=device, what="hot", over=chance.random() < 0.5),
            )
        )
        if self.inspects and chance.random() < 0.7:
            node, order = self.inspects.pop(chance.randrange(len(self.inspects)))
            stacks = (RankStacks(rank=0, how="itself", text='  File "a.py", line 1 in forward'),)
            fact = Inspected(job=order.job, node=node, incident=order.incident, ranks=stacks)
        self.happen(FactReceived(fact))

    def ask(self) -> None:
        chance = self.chance
        job, device = chance.choice(JOBS), chance.choice(_devices(chance.choice(NODES)))
        known = self.cluster.runs.active(job)
        asks: list[Ask] = [
            Recover(device=device),
            Drain(node=chance.choice(NODES), undo=True),
            Steer(request=self._request(), verb="resume", job=job),
        ]
        if chance.random() < 0.1:
            asks = [
                Fail(device=device),
                Drain(node=chance.choice(NODES)),
                Steer(request=self._request(), verb=chance.choice(("pause", "checkpoint", "stacks")), job=job),
                Cancel(request=self._request(), job=job),
            ]
        if known is None:
            asks = [Submit(request=self._request(), job=job, task=self._task())]
        self.happen(RequestReceived(chance.choice(asks), "asker"))

    def _task(self) -> Task:
        chance = self.chance
        rules = tuple(self._rule(kind) for kind in KINDS if chance.random() < 0.4)
        return Task(
            argv=("train.py",), per_node=2, nodes=chance.choice((1, 1, 2)), max_restarts=chance.choice((0, 3, 1000)),
            restart_window=chance.choice((60.0, 3600.0)), policy=rules, dry_run=chance.random() < 0.1,
        )  # fmt: skip

    def _rule(self, kind: EventKind) -> Rule:
        chance = self.chance
        do = [response for response in ("stacks", "checkpoint", "pause", "drain") if chance.random() < 0.2]
        do += [chance.choice(("restart", "evict", "rollback"))] if chance.random() < 0.6 else []
        return Rule(
            on=kind, do=tuple(do or ["report"]), after=chance.choice((None, 0.0, 3.0, 20.0)),  # type: ignore[arg-type]
            limit=chance.choice((None, None, 0, 1, 3)), skip="rollback" in do and chance.random() < 0.5,
        )  # fmt: skip

    def reply(self) -> None:
        """Ranks answer what they were sent; some of it is lost."""
        sent, self.sent = self.sent, []
        for rank, command in sent:
            body = self.bodies.get(rank)
            if body is None or body.life != command.incarnation or self.chance.random() < 0.1:
                continue
            answer = _answer(command, body.step)
            if answer is not None and (event := self.engine.hear_reply(rank, answer)) is not None:
                self.happen(event)

    # ── who is there ──

    def _body(self) -> Body | None:
        return self.chance.choice(list(self.bodies.values())) if self.bodies else None

    def _agent_of(self, body: Body) -> PlayedAgent | None:
        run = self.cluster.runs.active(body.id.job)
        for agent in self.agents.values():
            if run is not None and any(r.incarnation == body.life for r in _ranks(agent, run)):
                return agent
        return None

    def _running(self, run: Run, number: int) -> bool:
        return any(
            rank.rank == number and rank.state == "running"
            for agent in self.agents.values()
            for rank in _ranks(agent, run)
        )

    def _request(self) -> str:
        self._requests += 1
        return f"{self._requests:032x}"


def _ranks(agent: PlayedAgent, run: Run) -> tuple[RankStatus, ...]:
    status = agent.attempts.get((run.name, run.attempt))
    return status.ranks if status is not None else ()


def _devices(node: str) -> tuple[str, ...]:
    return tuple(f"GPU-{node}-{number}" for number in range(DEVICES))


def _patience(rule: Rule) -> float:
    """How long a suspicion must have lasted, at least."""
    if rule.after is not None:
        return rule.after
    known = {"frozen": SETTINGS.frozen_act_seconds, "held": SETTINGS.held_act_seconds}
    return known.get(rule.on, SETTINGS.hang_act_seconds)


def _answer(command: Command, step: int) -> Reply | None:
    match command:
        case QueryStep(id=id, incarnation=own):
            return StepReport(incarnation=own, id=id, step=step, step_seconds=0.02)
        case Propose(change=change, incarnation=own):
            return Ready(incarnation=own, id=change.id, ok=True, step=step)
        case Verdict(id=id, incarnation=own, commit=True):
            return Applied(incarnation=own, id=id, step=step + 5, result="/kept/step-5")
        case Order(id=id, incarnation=own):
            return Ordered(incarnation=own, id=id, outcome="applied")
    return None

"""Agents without processes: they obey what the weaver tells them, as agents do, and say in beats what is."""

from __future__ import annotations

from msgspec.structs import replace

from tests.core.loom import Loom, life
from torchloom.core.decision import Decision
from torchloom.core.events import BeatReceived, LinkOpened, NodeBeatReceived, ReportReceived, RunDue, Tick
from torchloom.core.jobs.placement import explain_wait
from torchloom.core.state.run_states import Run
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import (
    AttemptStatus,
    Dismiss,
    Examine,
    ExitCause,
    Fitness,
    Halt,
    Launch,
    NodeBeat,
    NodeCommand,
    Prepare,
    RankStatus,
)
from torchloom.protocol.operator import Done, No, Submit
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.rank import Beat, Hello
from torchloom.protocol.records import IncidentOpened

JOB = "mnist"


class PlayedAgent:
    def __init__(self, node: str, cores: int = 4, devices: tuple[str, ...] = ()) -> None:
        self.node = node
        self.cores = cores
        self.devices = devices
        self.tied = False
        self.leaving = False
        self.deaf = False
        self.attempts: dict[tuple[str, int], AttemptStatus] = {}
        self.resume: tuple[str, int | None] = ("", None)
        self.rejected: dict[str, str] = {}
        self.trouble = ""
        self.stubborn = False
        """Ranks do not end when they are told to."""
        self.busy_ports: set[int] = set()
        self.prepares: list[Prepare] = []
        self.unfit: tuple[str, ...] = ()
        self.pace: float | None = None
        self.fitness: Fitness | None = None
        self.examined = 0
        self.launches: list[Launch] = []
        self.dismissed: list[Dismiss] = []

    def beat(self) -> NodeBeat:
        return NodeBeat(
            incarnation=life(1),
            host=f"{self.node}.local",
            cores=self.cores,
            memory_mb=1,
            devices=self.devices,
            tied=self.tied,
            leaving=self.leaving,
            attempts=tuple(self.attempts.values()),
            fitness=self.fitness,
        )

    def obey(self, command: NodeCommand) -> None:
        if self.deaf:
            return
        key = (command.job, command.attempt)
        known = self.attempts.get(key)
        match command:
            case Examine(folder=folder):
                self.examined += 1
                found = Fitness(number=self.examined, unfit=self.unfit, pace=self.pace, on="torch")
                self.fitness = replace(found, folder=folder)
            case Prepare() if known is None:
                self.prepares.append(command)
                path, step = self.resume
                wanted = command.task.port if command.ordinal == 1 else 0
                taken = wanted in self.busy_ports
                trouble = phrase("port_taken", port=wanted) if taken else self.trouble
                self.attempts[key] = AttemptStatus(
                    job=command.job, attempt=command.attempt, port=0 if trouble else wanted or 5000, resume=path,
                    resume_step=step, rejected=self.rejected, trouble=trouble, retry=taken,
                )  # fmt: skip
            case Launch() if known is None or not known.ranks:
                self.launches.append(command)
                here = [place for place in command.places if place.node == self.node]
                ranks = tuple(
                    RankStatus(rank=p.rank, incarnation=p.incarnation, pid=100 + p.rank, state="running") for p in here
                )
                known = known or AttemptStatus(job=command.job, attempt=command.attempt)
                self.attempts[key] = replace(known, ranks=ranks)
            case Halt() if known is not None and not self.stubborn:
                for rank in known.ranks:
                    if rank.state != "ended":
                        self.end(rank.rank, signal="SIGTERM", attempt=command.attempt, job=command.job)
            case Dismiss():
                if self.attempts.pop(key, None) is not None:
                    self.dismissed.append(command)

    def end(
        self,
        rank: int,
        code: int | None = None,
        signal: str = "",
        error: str = "",
        cause: ExitCause = "exception",
        attempt: int = 0,
        job: str = JOB,
    ) -> None:
        key = (job, attempt or max(number for name, number in self.attempts if name == job))
        known = self.attempts[key]
        ranks = tuple(
            replace(
                r, state="ended", code=code, signal=signal, evidence=error, error=error, cause=cause if error else ""
            )
            if r.rank == rank and r.state != "ended"
            else r
            for r in known.ranks
        )
        self.attempts[key] = replace(known, ranks=ranks)


class Site:
    """A weaver and its agents. `settle` lets them talk until there is nothing more to say."""

    def __init__(self, *nodes: str, cores: int = 4, devices: tuple[str, ...] = ()) -> None:
        self.loom = Loom()
        self.loom.cluster.runtime.blind_until = -1e9
        self.agents = {node: PlayedAgent(node, cores, devices) for node in nodes or ("n1",)}
        self.silent: set[str] = set()
        self.hear()

    @property
    def run(self) -> Run:
        return self.loom.cluster.runs.by_name[JOB]

    @property
    def phase(self) -> str:
        return self.run.phase.value

    def submit(self, number: int = 1, job: str = JOB, **task: object) -> Done | No:
        given: dict[str, object] = {"argv": ("train.py",), "per_node": 2} | task
        ask = Submit(request=f"{number:032x}", job=job, task=Task(**given))  # type: ignore[arg-type]
        decision = self.loom.ask(ask, f"to{number}")
        self.tell(decision)
        return self.loom.answers(f"to{number}")[-1]

    def tell(self, decision: Decision) -> bool:
        for node, command in decision.tasks:
            if node not in self.silent:
                self.agents[node].obey(command)
        return bool(decision)

    def tend(self, node: str | None = None) -> bool:
        """Every run that may go on does; whether anything followed."""
        followed = False
        for job in self.loom.cluster.runs.due(node):
            followed |= self.tell(self.loom.happen(RunDue(job)))
        return followed

    def hear(self) -> bool:
        """Everyone beats; whether anything followed."""
        followed = False
        for node, agent in self.agents.items():
            if node not in self.silent:
                self.loom.cluster.runtime.hear_node(node, agent.beat(), self.loom.now)
                followed |= self.tell(self.loom.happen(NodeBeatReceived(node)))
                followed |= self.tend(node)
        return followed

    def run_of(self, job: str) -> Run:
        return self.loom.cluster.runs.by_name[job]

    def join(self, job: str = JOB, devices: bool = False) -> None:
        """The ranks of the attempt attach, with the devices that they were given."""
        run = self.run_of(job)
        for place in run.places:
            rank = run.rank(place.rank)
            mine = (place.device,) if devices and place.device else ()
            hello = Hello(
                incarnation=place.incarnation, node=place.node, pid=1, devices=mine, world_size=run.world_size
            )
            self.loom.happen(LinkOpened(rank, place.incarnation, "link"))
            self.loom.happen(ReportReceived(rank, hello))

    def beat_all(self, paused: bool = False, job: str = JOB, step: int = 1) -> None:
        run = self.run_of(job)
        for place in run.places:
            beat = Beat(incarnation=place.incarnation, step=step, change=0, paused=paused)
            self.loom.happen(BeatReceived(run.rank(place.rank), beat))

    def settle(self, seconds: float = 0.0, beating: bool = False) -> None:
        end = self.loom.now + seconds
        while True:
            for _ in range(20):
                if not self.hear():
                    break
            if self.loom.now >= end:
                return
            self.loom.now = min(end, self.loom.now + 0.25)
            if beating:
                self.beat_all()
            self.tell(self.loom.happen(Tick()))
            self.tend()

    def restart_weaver(self) -> None:
        now = self.loom.now
        again = Loom(state=self.loom.cluster.state())
        again.now = now
        again.cluster.restart_runtime(now)
        self.loom = again


def waiting(site: Site, job: str = JOB) -> Prose:
    """What a run waits for."""
    return explain_wait(site.loom.cluster, site.loom.cluster.runs.by_name[job], site.loom.now)


def room(node: str, free: int, count: int, failed: int | None = None) -> Phrase:
    """What a node is said to offer to a run that waits."""
    return phrase("of_node", node=node, text=phrase("room_free", free=free, count=count, failed=failed))


def a_node(ranks: Phrase | int, *there: Phrase) -> Phrase:
    """Waited for."""
    return phrase("waits_for_nodes", count=1, ranks=ranks, there=phrase("nodes_there", nodes=there, more=None))


def incidents(site: Site) -> list[Prose]:
    """What went wrong."""
    return [r.what for _, records in site.loom.log for r in records if isinstance(r, IncidentOpened)]

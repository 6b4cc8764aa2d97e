"""Jobs that arrive, train and leave under a policy, on a virtual clock.

Between two events every job trains at the constant speed of its curve; an arrival or a departure lets the policy decide
again. Predictions are exact here, and a live resize takes no time, because training continues meanwhile. A policy that
restarts a job to resize it stops the job for a time; another restart meanwhile begins that time again.

Jobs with ranks on the same device share its time equally: with n of them on it, G is 1/n of what it is alone.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchloom.core.scheduling.cluster_loaders import ClusterLoaders, Job, Objective
from torchloom.core.scheduling.policies import Policy

RESTART_SECONDS = 30.0
"""To stop a job, start its processes, load its checkpoint and make the first step."""


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float
    job: Job
    """`remaining` is what it has to train."""
    devices: tuple[str, ...] = ()
    """That it may have to share; none if it has its devices to itself."""


@dataclass(slots=True)
class Outcome:
    finished: dict[str, float] = field(default_factory=dict)
    """When each job finished."""
    throughput: float = 0.0
    """Σ samples / (finish − arrival)."""
    completion_seconds: float = 0.0
    """The mean of finish − arrival."""
    makespan: float = 0.0
    """From the first arrival until all have finished."""
    mean_share: float = 0.0
    """T/G, the mean over jobs and the time that they run: Σ T/G over time, by the number of running jobs over time."""
    moves: int = 0
    """Resizes of running jobs."""
    loaders_moved: int = 0
    restart_seconds: float = 0.0
    """That jobs stood still, in all."""


@dataclass(slots=True)
class _Run:
    arrival: Arrival
    left: float
    """Samples, at the time of the last change."""
    since: float
    """The last change; in the future while the job restarts."""
    speed: float = 0.0
    """Samples/s of all ranks."""
    change: int = 0
    """Number of the last change: an entry of the timeline with another one is void."""


@dataclass(slots=True)
class _Simulation:
    cluster: ClusterLoaders
    policy: Policy
    restart_seconds: float
    outcome: Outcome = field(default_factory=Outcome)
    runs: dict[str, _Run] = field(default_factory=dict)
    finishes: list[tuple[float, int, str]] = field(default_factory=list)
    device_jobs: dict[str, dict[str, None]] = field(default_factory=dict)
    changes: int = 0

    def arrive(self, arrival: Arrival) -> None:
        job, now = arrival.job, arrival.time
        self.runs[job.name] = _Run(arrival, job.remaining or 0.0, now)
        for device in arrival.devices:
            self.device_jobs.setdefault(device, {})[job.name] = None
        self.cluster.put(job)
        self._decide(arrival, now, new=job.name)

    def leave(self, name: str, now: float) -> None:
        run = self.runs.pop(name)
        arrival, outcome = run.arrival, self.outcome
        outcome.finished[name] = now
        outcome.throughput += (arrival.job.remaining or 0.0) / (now - arrival.time)
        for device in arrival.devices:
            del self.device_jobs[device][name]
        self.cluster.remove(name)
        self._decide(arrival, now)

    def _decide(self, event: Arrival, now: float, new: str | None = None) -> None:
        touched = {name: None for device in event.devices for name in self.device_jobs[device]}
        for name in touched:
            self._share_devices(self.runs[name].arrival)
        if self.cluster.objective is Objective.MAKESPAN:
            for member in self.cluster.around(event.job.ranks):
                run = self.runs[member.job.name]
                self.cluster.put(replace(member.job, remaining=max(run.left - self._trained(run, now), 1.0)))
        self.policy.decide(self.cluster, event.job.ranks, now)
        changes = self.cluster.take_changes()
        for name, (before, loaders) in changes.items():
            if name != new:
                self.outcome.moves += 1
                self.outcome.loaders_moved += abs(loaders - before) * self.cluster.members[name].size
        restarted = {name: None for name in self.policy.restarted if name != new}
        for name in dict.fromkeys((*touched, *changes, *restarted, *((new,) if new else ()))):
            self._continue(name, now, restarts=name in restarted)

    def _share_devices(self, arrival: Arrival) -> None:
        sharing = max(len(self.device_jobs[device]) for device in arrival.devices)
        self.cluster.put(replace(arrival.job, curve=arrival.job.curve.shared(sharing)))

    def _trained(self, run: _Run, now: float) -> float:
        return run.speed * max(0.0, now - run.since)

    def _continue(self, name: str, now: float, *, restarts: bool) -> None:
        """At another speed from now on."""
        run, member = self.runs[name], self.cluster.members[name]
        run.left = max(run.left - self._trained(run, now), 0.0)
        stalled = max(run.since - now, 0.0)
        if restarts:
            self.outcome.restart_seconds += self.restart_seconds - stalled
            stalled = self.restart_seconds
        run.since = now + stalled
        run.speed = member.shares[member.loaders] * member.job.curve.ceiling * member.size
        self.changes += 1
        run.change = self.changes
        heapq.heappush(self.finishes, (run.since + run.left / run.speed, run.change, name))

    def next_finish(self) -> float:
        while self.finishes:
            time, change, name = self.finishes[0]
            if name in self.runs and self.runs[name].change == change:
                return time
            heapq.heappop(self.finishes)
        return math.inf


def simulate(
    arrivals: Iterable[Arrival],
    budgets: Mapping[str, int],
    policy: Policy,
    *,
    objective: Objective = Objective.SHARE,
    restart_seconds: float = RESTART_SECONDS,
    observe: Callable[[float, ClusterLoaders], None] | None = None,
    times: Sequence[float] = (),
) -> Outcome:
    """Run until all jobs have finished; `observe` sees the cluster at `times`, which ascend."""
    simulation = _Simulation(ClusterLoaders(dict(budgets), objective), policy, restart_seconds)
    ahead = sorted(arrivals, key=lambda each: each.time)
    twice = [name for name, count in Counter(each.job.name for each in ahead).items() if count > 1]
    if twice:
        raise ValueError(f"several jobs have the name {twice[0]}")
    number = seen = 0
    while number < len(ahead) or simulation.runs:
        finish = simulation.next_finish()
        arrives = number < len(ahead) and ahead[number].time <= finish
        now = ahead[number].time if arrives else finish
        while observe is not None and seen < len(times) and times[seen] <= now:
            observe(times[seen], simulation.cluster)
            seen += 1
        if arrives:
            simulation.arrive(ahead[number])
            number += 1
        else:
            simulation.leave(simulation.finishes[0][2], now)
    return _summarised(simulation.outcome, ahead)


def _summarised(outcome: Outcome, arrivals: Sequence[Arrival]) -> Outcome:
    if not arrivals:
        return outcome
    spans = [outcome.finished[each.job.name] - each.time for each in arrivals]
    alone = sum((each.job.remaining or 0.0) / (each.job.size * each.job.curve.ceiling) for each in arrivals)
    outcome.completion_seconds = sum(spans) / len(spans)
    outcome.makespan = max(outcome.finished.values()) - arrivals[0].time
    outcome.mean_share = alone / sum(spans)
    return outcome

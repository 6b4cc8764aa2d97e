"""The scheduler of a cluster: what was seen of jobs and nodes goes in, decisions and commands come out.

The weaver calls `look` about once a second with all that it knows. What has changed since the last look is an event,
and the policy decides again around its nodes: a job arrived, left, was paused or measured for the first time, or a
limit, a budget or the rules changed. If only measurements have changed, it decides every DRIFT_SECONDS.

    see      jobs and budgets → the cluster that the policy decides about; measurements → models
    decide   the policy → a target for each job
    move     targets → commands, in an order in which no node exceeds its budget (moves.py)

A job whose training is paused gives its loaders back. One that an operator has set (pinned) keeps them, and one that
ran before the scheduler did keeps them until it is measured: a restarted weaver moves nothing because it has forgotten.
With the policy `off`, jobs that were resized get what their scripts asked for.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torchloom.core.scheduling.cluster_loaders import MOST_LOADERS, ClusterLoaders, Job, Objective, relative_gain
from torchloom.core.scheduling.moves import LoaderMoves, Resize
from torchloom.core.scheduling.policies import POLICIES, Ours, Policy
from torchloom.core.scheduling.throughput_model import PRIOR, Curve, Measurement, ThroughputModel, prior_curve
from torchloom.protocol.scheduling import JobStanding, LoaderMove, LoadersAllocated, ScheduleRules, Trigger

DRIFT_SECONDS = 5.0
"""Between two decisions about measurements alone."""
WHOLE_SECONDS = 60.0
"""Between two decisions about all jobs together, instead of around each event."""
BEGIN_SECONDS = 10.0
"""A command that was not begun as a change after this time was refused: a rank is lost, or another change under way."""
SETTLE_SECONDS = 30.0
"""Longest that loaders which end are waited for before others start in their place."""
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 300.0
"""Until a job that refused is asked again; twice as long each time."""
NAMED = 5
"""Jobs and nodes that a record names as the reason of a decision."""
PAST = 50
"""Allocations that are remembered for viewers."""
FORMER_JOBS = 200
"""Jobs that are gone whose curves are remembered: a job that is restarted need not be measured again."""
UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True)
class JobSeen:
    """What is known of a job with an ElasticLoader."""

    name: str
    ranks: Mapping[str, int]
    """On each node."""
    loaders: int
    """Of each rank, by the last change that took effect."""
    requested: int
    """What its script asked for."""
    least: int = 0
    most: int = MOST_LOADERS
    weight: float = 1.0
    remaining: float | None = None
    """Samples."""
    is_paused: bool = False
    is_pinned: bool = False
    """An operator has set its loaders."""
    is_ours: bool = False
    """The scheduler has set them."""
    pending: int | None = None
    """The number that a change under way sets, of the scheduler or of an operator."""
    is_settling: bool = False
    """A rank has not reported since the latest change, or some of its loaders finish their last batches."""
    request: str = ""
    """The latest command of the scheduler that became a change."""
    measurements: tuple[Measurement, ...] = ()
    """Since the last look."""

    @property
    def held(self) -> int:
        """The greatest number that it may have at this moment."""
        return max(self.loaders, self.pending or 0)

    @property
    def limits(self) -> tuple[object, ...]:
        """What a decision depends on besides the curve."""
        return self.ranks, self.least, self.most, self.weight, self.is_pinned and self.loaders, self.requested


@dataclass(frozen=True, slots=True)
class Command:
    """All ranks of a job are to have this number of loaders."""

    job: str
    loaders: int
    request: str
    """The id under which it is requested."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a look."""

    allocated: LoadersAllocated | None = None
    commands: tuple[Command, ...] = ()

    def __bool__(self) -> bool:
        return self.allocated is not None or bool(self.commands)


@dataclass(slots=True)
class _Triggers:
    """What has happened since the last look, and where."""

    kinds: dict[Trigger, None] = field(default_factory=dict)
    about: dict[str, None] = field(default_factory=dict)
    nodes: dict[str, None] = field(default_factory=dict)

    def add(self, kind: Trigger, about: str, nodes: Iterable[str]) -> None:
        self.kinds[kind] = None
        self.about[about] = None
        self.nodes.update(dict.fromkeys(nodes))


class LoaderScheduler:
    def __init__(self) -> None:
        self.rules = ScheduleRules()
        self.jobs: dict[str, JobSeen] = {}
        self.past: deque[tuple[float, LoadersAllocated]] = deque(maxlen=PAST)
        self.cluster = ClusterLoaders({})
        self.moves = LoaderMoves({})
        self._policy: Policy = Ours()
        self._models: dict[str, ThroughputModel] = {}
        self._frozen: set[str] = set()
        """Jobs that ran before this scheduler did, and are not measured yet."""
        self._has_looked = False
        self._commands: dict[str, tuple[Command, float]] = {}
        """By job: the command on its way, and when it was sent."""
        self._unaccepted: set[str] = set()
        """Requests of commands on their way that were refused before any rank was asked."""
        self._refusals: dict[str, tuple[int, float]] = {}
        """By job: refusals in a row, and when it is asked again."""
        self._drift_due = self._whole_due = 0.0
        self._known_nodes: set[str] = set()

    # ── for viewers ──

    def curve(self, job: str, now: float) -> Curve:
        model = self._models.get(job)
        return model.curve(now) if model is not None else PRIOR

    def paces(self, job: str) -> dict[int, float]:
        """Measured samples/s of a rank, by number of loaders."""
        model = self._models.get(job)
        return model.paces() if model is not None else {}

    def is_measured(self, job: str) -> bool:
        return job in self._models and self._models[job].is_measured

    def standing(self, job: JobSeen, budgets: Collection[str]) -> JobStanding:
        if not set(job.ranks) <= set(budgets):
            return "no_budget"
        if job.is_paused or job.is_pinned:
            return "paused" if job.is_paused else "pinned"
        return "scheduled" if self.is_measured(job.name) else "unmeasured"

    def problem(self, budgets: Mapping[str, int], now: float) -> ClusterLoaders:
        """The cluster with the present loaders and the latest curves, to try another allocation."""
        cluster = ClusterLoaders(dict(budgets), Objective(self.rules.objective))
        for job in self.jobs.values():
            if self._takes_part(job, budgets):
                _put(cluster, self._describe(job, now), job.loaders)
        cluster.take_changes()
        return cluster

    @property
    def is_moving(self) -> bool:
        """A command is on its way, and others may wait for what it frees."""
        return bool(self._commands)

    def note_unaccepted(self, requests: Iterable[str]) -> None:
        """Of commands that were refused before any rank was asked: the next look need not wait for an answer."""
        self._unaccepted.update(requests)

    # ── a look ──

    def look(self, jobs: Iterable[JobSeen], budgets: Mapping[str, int], rules: ScheduleRules, now: float) -> Outcome:
        triggers = _Triggers()
        seen = {job.name: job for job in jobs}
        self._adopt(rules, triggers)
        self._set_budgets(budgets, triggers)
        for name in self.jobs.keys() - seen.keys():
            self._remove(name, triggers)
        for job in seen.values():
            self._see(job, triggers, now)
        resizes = self._hear_answers(seen, now)
        again = self._retried(now)
        for name in again:
            triggers.add("again", name, ())
        self.jobs, self._has_looked = seen, True
        if not triggers.kinds and now < self._drift_due:
            return Outcome(None, self._number(resizes, now))
        self._drift_due = now + DRIFT_SECONDS
        self._decide(triggers, now)
        allocated, more = self._aim(triggers, again, now)
        return Outcome(allocated, self._number((*resizes, *more), now))

    # ── see ──

    def _adopt(self, rules: ScheduleRules, triggers: _Triggers) -> None:
        if (rules.policy, rules.objective) != (self.rules.policy, self.rules.objective):
            self._policy = POLICIES[rules.policy]() if rules.policy in POLICIES else Ours()
            members = [(member.job, member.loaders) for member in self.cluster.members.values()]
            self.cluster = ClusterLoaders(self.cluster.budgets, Objective(rules.objective))
            for job, loaders in members:
                _put(self.cluster, job, loaders)
            self._refusals.clear()
            triggers.add("rules", rules.policy, self.cluster.budgets)
        self.rules = rules

    def _set_budgets(self, budgets: Mapping[str, int], triggers: _Triggers) -> None:
        limited = self.rules.policy != "off"
        for node in self.cluster.budgets.keys() | budgets.keys():
            budget = budgets.get(node, 0)
            if self.cluster.budgets.get(node) != budget:
                self.cluster.set_budget(node, budget)
                triggers.add("budget", node, (node,))
            # The order of moves does not matter where jobs get back what their scripts asked for.
            self.moves.budgets[node] = budget if limited else UNLIMITED
        self._known_nodes = set(budgets)

    def _takes_part(self, job: JobSeen, budgets: Collection[str]) -> bool:
        is_awake = not job.is_paused or job.is_pinned  # what an operator has set counts also while training is paused
        return is_awake and all(node in budgets for node in job.ranks)

    def _remove(self, name: str, triggers: _Triggers) -> None:
        triggers.add("departure", name, self.jobs[name].ranks)
        if name in self.cluster.members:
            self.cluster.remove(name)
        self.moves.job_lost(name)
        self._commands.pop(name, None)
        self._refusals.pop(name, None)
        former = [each for each in self._models if each not in self.jobs or each == name]
        for oldest in former[:-FORMER_JOBS]:
            del self._models[oldest]
        self._frozen.discard(name)
        if isinstance(self._policy, Ours):
            self._policy.filter.forget(name)

    def _see(self, job: JobSeen, triggers: _Triggers, now: float) -> None:
        name, before = job.name, self.jobs.get(job.name)
        model = self._models.setdefault(name, ThroughputModel(prior_curve(job.requested)))
        known_before = model.is_estimated, model.is_measured
        for measurement in job.measurements:
            model.add(measurement, now)
        if before is None:
            self.moves.add(name, job.ranks, job.held)
            if not self._has_looked:
                self._frozen.add(name)
        else:
            self.moves.observe(name, job.ranks, job.held)
        if (model.is_estimated, model.is_measured) != known_before:
            if model.is_measured:
                self._frozen.discard(name)
            triggers.add("measured", name, job.ranks)
        takes_part, took_part = self._takes_part(job, self._known_nodes), name in self.cluster.members
        if took_part and not takes_part:
            self.cluster.remove(name)
            triggers.add("paused" if job.is_paused else "budget", name, job.ranks)
        elif takes_part and not took_part:
            _put(self.cluster, self._describe(job, now), job.held)
            triggers.add("arrival", name, job.ranks)
        elif takes_part and before is not None and before.limits != job.limits:
            self.cluster.put(self._describe(job, now))
            triggers.add("limits", name, {**before.ranks, **job.ranks})

    def _describe(self, job: JobSeen, now: float) -> Job:
        curve = self.curve(job.name, now)
        least, most = job.least, max(job.most, job.least)
        if job.is_pinned or job.name in self._frozen:
            least = most = job.loaders
        return Job(job.name, job.ranks, curve, least, most, job.weight, job.requested, job.remaining)

    # ── decide ──

    def _decide(self, triggers: _Triggers, now: float) -> None:
        is_drift = triggers.kinds.keys() <= {"again"}
        nodes: Collection[str] = self.cluster.budgets if is_drift else triggers.nodes
        if self.rules.policy == "off":
            return
        for member in self.cluster.around(nodes):
            self.cluster.put(self._describe(self.jobs[member.job.name], now))
        policy = self._policy
        if isinstance(policy, Ours):
            policy.is_drift = is_drift
            if is_drift and now >= self._whole_due:
                self._whole_due = now + WHOLE_SECONDS
                policy.decide_all(self.cluster, now)
            else:
                policy.decide(self.cluster, nodes, now)
        elif not is_drift:
            policy.decide(self.cluster, nodes, now)
        self.cluster.take_changes()

    # ── move ──

    def _targets(self) -> Iterator[tuple[str, int]]:
        for name, job in self.jobs.items():
            if self.rules.policy == "off":
                yield name, job.requested if job.is_ours else job.held
            elif job.is_pinned or name in self._frozen:
                yield name, job.held
            elif name in self.cluster.members:
                yield name, self.cluster.members[name].loaders
            else:
                yield name, 0 if job.is_paused else job.held

    def _aim(
        self, triggers: _Triggers, again: Collection[str], now: float
    ) -> tuple[LoadersAllocated | None, list[Resize]]:
        holdings = self.moves.holdings()
        targets = dict(self._targets())
        new = {name: target for name, target in targets.items() if target != self.moves.target(name)}
        moves = tuple(
            LoaderMove(job=name, before=holdings[name], loaders=target)
            for name, target in new.items()
            if target != holdings[name]
        )
        resizes = self.moves.aim(new | {name: targets[name] for name in again if name in targets})
        if not moves:
            return None, resizes
        allocated = LoadersAllocated(
            policy=self.rules.policy,
            triggers=tuple(triggers.kinds) or ("drift",),
            moves=moves,
            gain=self._gain(moves),
            about=tuple(triggers.about)[:NAMED],
        )
        self.past.append((now, allocated))
        return allocated, resizes

    def _gain(self, moves: Iterable[LoaderMove]) -> float | None:
        """Predicted, of the objective of the jobs that take part."""
        pairs = [(self.cluster.members[move.job], move) for move in moves if move.job in self.cluster.members]
        before = [member.values[min(move.before, member.cap)] for member, move in pairs]
        after = [member.values[min(move.loaders, member.cap)] for member, move in pairs]
        if not pairs or self.rules.policy == "off":
            return None
        return relative_gain(self.cluster.objective, before, after, sum(member.job.weight for member, _ in pairs))

    def _hear_answers(self, seen: Mapping[str, JobSeen], now: float) -> list[Resize]:
        """Commands that were carried out or refused; and what becomes possible with that."""
        resizes: list[Resize] = []
        for name, (command, sent) in list(self._commands.items()):
            job = seen[name]
            has_begun = job.request == command.request
            shrinks = command.loaders < self.moves.holdings()[name]
            settles = job.pending is not None or (job.is_settling and shrinks and now - sent < SETTLE_SECONDS)
            may_begin = now - sent < BEGIN_SECONDS and command.request not in self._unaccepted
            if settles if has_begun else may_begin:
                continue
            del self._commands[name]
            if has_begun and job.loaders == command.loaders:
                self._refusals.pop(name, None)
                resizes += self.moves.confirmed(name, job.loaders)
                continue
            count = self._refusals.get(name, (0, 0.0))[0] + 1
            self._refusals[name] = count, now + min(RETRY_SECONDS * 2 ** (count - 1), MOST_RETRY_SECONDS)
            resizes += self.moves.refused(name, command.loaders)
        self._unaccepted.clear()
        return resizes

    def _retried(self, now: float) -> list[str]:
        """Jobs that refused, and are asked again now."""
        due = [name for name, (_, at) in self._refusals.items() if at <= now and name not in self._commands]
        for name in due:
            self._refusals[name] = self._refusals[name][0], now + MOST_RETRY_SECONDS
        return due

    def _number(self, resizes: Iterable[Resize], now: float) -> tuple[Command, ...]:
        commands = tuple(
            Command(resize.job, resize.loaders, _request_id(resize.job, resize.loaders, now)) for resize in resizes
        )
        self._commands.update({command.job: (command, now) for command in commands})
        return commands


def _put(cluster: ClusterLoaders, job: Job, loaders: int) -> None:
    """With the loaders that it has, even if a budget is exceeded: taking them back is a decision."""
    cluster.put(job, loaders)
    member = cluster.members[job.name]
    cluster.resize(member, min(loaders, member.cap))


def _request_id(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, ("loaders", *parts))).encode()).hexdigest()[:32]

"""The order in which loaders move, so that no node exceeds its budget at any moment.

A resize takes effect some time after it is commanded, and is then confirmed or refused. Meanwhile the job counts with
the greater of both numbers. Jobs that shrink are commanded at once, jobs that grow as soon as what they need is free;
in the end, when nothing more can become free, a job that cannot grow to its target gets what fits.

    job          target below   target above          confirmed       refused
    settled      → shrinking    → waiting             ignored         ignored
    waiting      → shrinking    → growing, if it fits ignored         ignored
    shrinking    new target     new target            → settled       → settled, with the old number
    growing      new target     new target            → settled       → settled, with the old number

A command without an answer counts until its job is confirmed, refused or lost: if an agent is lost in the middle, its
loaders may have been started or not. A new target is commanded after the answer to the command on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Demand = Mapping[str, int]
"""Ranks of a job on each node: what one loader a rank costs there."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A command to all ranks of a job."""

    job: str
    loaders: int
    """Of each rank."""


@dataclass(slots=True)
class _Holding:
    demand: Demand
    loaders: int
    """Confirmed."""
    target: int
    commanded: int | None = None
    """On its way."""
    refused: int | None = None
    """A target that is not commanded again."""

    @property
    def most(self) -> int:
        """What it may have at this moment."""
        return self.loaders if self.commanded is None else max(self.loaders, self.commanded)


@dataclass(slots=True)
class LoaderMoves:
    """Holdings of jobs within the budgets of nodes. Each method returns the commands that are possible now."""

    budgets: dict[str, int]
    _holdings: dict[str, _Holding] = field(default_factory=dict)

    def add(self, job: str, demand: Demand, loaders: int) -> None:
        """A job that has this number of loaders already: what its ranks report."""
        self._holdings[job] = _Holding(dict(demand), loaders, loaders)

    def observe(self, job: str, demand: Demand, loaders: int) -> None:
        """What the ranks of a job have, if no command for it is on its way: an operator may have set it."""
        holding = self._holdings[job]
        holding.demand = dict(demand)
        if holding.commanded is None:
            holding.loaders = loaders

    def aim(self, targets: Mapping[str, int]) -> list[Resize]:
        """New targets; jobs that are not named keep theirs, and unknown ones are ignored."""
        for job, loaders in targets.items():
            if (holding := self._holdings.get(job)) is not None:
                holding.target, holding.refused = loaders, None
        return self._commands()

    def confirmed(self, job: str, loaders: int) -> list[Resize]:
        """An answer to an earlier command than the last is ignored."""
        holding = self._holdings.get(job)
        if holding is None or holding.commanded != loaders:
            return []
        holding.loaders, holding.commanded = loaders, None
        return self._commands()

    def refused(self, job: str, loaders: int) -> list[Resize]:
        """The job has the number of before, and is not asked again until it gets another target."""
        holding = self._holdings.get(job)
        if holding is None or holding.commanded != loaders:
            return []
        holding.commanded, holding.refused = None, holding.target
        return self._commands()

    def job_lost(self, job: str) -> list[Resize]:
        self._holdings.pop(job, None)
        return self._commands()

    def node_lost(self, node: str) -> list[Resize]:
        """Its budget and the loaders there are gone. Jobs that end with it are lost as well: `job_lost`."""
        self.budgets.pop(node, None)
        for holding in self._holdings.values():
            holding.demand = {other: ranks for other, ranks in holding.demand.items() if other != node}
        return self._commands()

    def set_budget(self, node: str, loaders: int) -> list[Resize]:
        """A smaller budget does not shrink a job: that takes new targets."""
        self.budgets[node] = loaders
        return self._commands()

    @property
    def is_settled(self) -> bool:
        return all(holding.commanded is None for holding in self._holdings.values())

    def target(self, job: str) -> int:
        return self._holdings[job].target

    def commanded(self, job: str) -> int | None:
        """The number of a command on its way, if there is one."""
        return self._holdings[job].commanded

    def holdings(self) -> dict[str, int]:
        """What each job has by its last confirmation."""
        return {job: holding.loaders for job, holding in self._holdings.items()}

    def free(self) -> dict[str, int]:
        """Loaders that nothing can be using at this moment."""
        free = dict(self.budgets)
        for holding in self._holdings.values():
            for node, ranks in holding.demand.items():
                free[node] = free.get(node, 0) - ranks * holding.most
        return free

    def _commands(self) -> list[Resize]:
        commands = [self._command(job, holding, holding.target) for job, holding in self._idle() if _falls(holding)]
        free = self.free()
        is_last_chance = not any(_is_shrinking(holding) for holding in self._holdings.values())
        for job, holding in self._idle():
            missing = holding.target - holding.loaders
            fits = min((free[node] // ranks for node, ranks in holding.demand.items() if ranks), default=missing)
            more = min(missing, fits)
            if more <= 0 or (more < missing and not is_last_chance):
                continue
            commands.append(self._command(job, holding, holding.loaders + more))
            for node, ranks in holding.demand.items():
                free[node] -= ranks * more
        return commands

    def _idle(self) -> Iterator[tuple[str, _Holding]]:
        """Jobs that are not where they should be, and without a command on its way."""
        for job, holding in self._holdings.items():
            if holding.commanded is None and holding.target not in (holding.loaders, holding.refused):
                yield job, holding

    def _command(self, job: str, holding: _Holding, loaders: int) -> Resize:
        holding.commanded = loaders
        return Resize(job, loaders)


def _falls(holding: _Holding) -> bool:
    return holding.target < holding.loaders


def _is_shrinking(holding: _Holding) -> bool:
    return holding.commanded is not None and holding.commanded < holding.loaders

"""What the scheduler sees of the cluster state: jobs with an ElasticLoader, and the loader budgets of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torchloom.core.scheduling.cluster_loaders import MOST_LOADERS
from torchloom.core.scheduling.loader_scheduler import JobSeen
from torchloom.core.scheduling.throughput_model import Measurement
from torchloom.core.state.change_ledger import Change
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import PRESENT, JobPhase, Presence
from torchloom.knob_validation import BATCH_SIZE, LOADERS
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import JobSettings
from torchloom.protocol.rank import Beat

SCHEDULER = "loader scheduler"
"""The operator of its changes."""
RESERVE = 8
"""One core of this number, and one at least, is not for loaders where nobody has set a budget."""


def default_budget(cores: int) -> int:
    return max(1, cores - max(1, cores // RESERVE))


def budgets(cluster: ClusterState) -> dict[str, int]:
    """Of the nodes where it is known: as an operator set it, as the agent was started, or as the cores allow."""
    beats = {node: seen.beat for node, seen in cluster.runtime.nodes.items()}
    known = {
        node: default_budget(beat.cores) if beat.loader_budget is None else beat.loader_budget
        for node, beat in beats.items()
    }
    return known | cluster.schedule.budgets


@dataclass(slots=True)
class _LoaderChanges:
    """Of a job: the changes of the number of its loaders."""

    in_force: Change | None = None
    owner: Change | None = None
    """What it sets or, if it reverts another, what that leaves in force: who reverts a change pins nothing."""
    pending: Change | None = None
    request: str = ""
    batch_size: int | None = None


class JobObserver:
    """Remembers which beats were seen, so that each counts once."""

    def __init__(self) -> None:
        self._beats: dict[RankId, Beat] = {}

    def see(self, cluster: ClusterState) -> Iterator[JobSeen]:
        """The jobs that run and offer to change their loaders."""
        running = [name for name, job in cluster.jobs.items() if job.phase is JobPhase.RUNNING]
        names = [name for name in running if cluster.ranks.present[name] and _has_loaders(cluster, name)]
        if not names:
            self._beats.clear()
            return
        changes = _loader_changes(cluster)
        self._beats = {rank: beat for rank, beat in self._beats.items() if rank in cluster.ranks}
        for name in names:
            if name in cluster.jobs and _has_loaders(cluster, name):  # it may have ended since the last one
                yield self._see(cluster, name, changes.get(name) or _LoaderChanges())

    def _see(self, cluster: ClusterState, name: str, changes: _LoaderChanges) -> JobSeen:
        spec = cluster.ledger.knobs[name][LOADERS].spec
        present = [rank for rank in cluster.ranks.of_job(name) if rank.presence in PRESENT]
        live = [rank.id for rank in present if rank.presence is Presence.LIVE]
        beats = {id: beat for id in live if (beat := cluster.runtime.ranks[id].beat) is not None}
        settings = next((run.task for run in cluster.runs.of_job(name) if not run.is_lighthouse), JobSettings())
        most = min(settings.max_loaders or MOST_LOADERS, int(spec.high if spec.high is not None else MOST_LOADERS))
        giver, pending = changes.in_force, changes.pending
        batch_size = self._batch_size(cluster, name, changes)
        return JobSeen(
            name,
            ranks=Counter(rank.node for rank in present),
            loaders=_number(giver.change.values[LOADERS] if giver is not None else spec.value),
            requested=_number(spec.value),
            least=min(settings.min_loaders, most),
            most=most,
            weight=settings.weight,
            remaining=_remaining(settings.samples, cluster.step_of(name), batch_size * len(present)),
            is_paused=bool(beats) and all(beat.paused for beat in beats.values()),
            is_pinned=changes.owner is not None and changes.owner.operator != SCHEDULER,
            is_ours=changes.owner is not None and changes.owner.operator == SCHEDULER,
            pending=_number(pending.change.values[LOADERS]) if pending is not None else None,
            is_settling=len(beats) < len(live) or any(_settles(beat, giver) for beat in beats.values()),
            request=changes.request,
            measurements=self._measure(beats, batch_size),
        )

    def _measure(self, beats: dict[RankId, Beat], batch_size: float) -> tuple[Measurement, ...]:
        """Of the rank that waits longest for its loaders: the others wait for it."""
        new = [beat for id, beat in beats.items() if self._beats.get(id) is not beat]
        self._beats.update(beats)
        loading = [beat.loading for beat in new if beat.loading is not None and beat.loading.batches]
        slowest = max(loading, key=lambda each: each.wait, default=None)
        return () if slowest is None else (Measurement.from_beat(slowest, batch_size),)

    def _batch_size(self, cluster: ClusterState, name: str, changes: _LoaderChanges) -> float:
        """Samples in a batch of a rank; 1 if it cannot be known: the model then counts batches."""
        knob = cluster.ledger.knobs[name].get(BATCH_SIZE)
        return float(changes.batch_size or (_number(knob.spec.value) if knob is not None else 1) or 1)


def _has_loaders(cluster: ClusterState, job: str) -> bool:
    return LOADERS in cluster.ledger.knobs.get(job, ())


def _loader_changes(cluster: ClusterState) -> dict[str, _LoaderChanges]:
    """Of all jobs in one pass over the ledger: the latest that took effect, and the one under way."""
    found: dict[str, _LoaderChanges] = {}
    for change in cluster.ledger.changes.values():
        if change.replica is not None or change.rank is not None or change.reverted_by:
            continue
        values = change.change.values
        if change.takes_effect and BATCH_SIZE in values:
            found.setdefault(change.job, _LoaderChanges()).batch_size = _number(values[BATCH_SIZE])
        if LOADERS not in values:
            continue
        job = found.setdefault(change.job, _LoaderChanges())
        if change.takes_effect:
            job.in_force = change
            job.owner = job.owner if change.reverts else change
        if not change.ended:
            job.pending = change
        if change.operator == SCHEDULER:
            job.request = change.request
    return found


def _remaining(samples: int, step: int | None, each_step: float) -> float | None:
    """At least one step: the job has not ended."""
    return max(samples - (step or 0) * each_step, each_step) if samples else None


def _settles(beat: Beat, latest: Change | None) -> bool:
    behind = latest is not None and beat.change < latest.change.number
    return behind or (beat.loading is not None and beat.loading.draining > 0)


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0

"""A job of replicas under torchft: a run for each of them, and one for their lighthouse.

The runs are like any other: placed, started, supervised and restarted one by one. They are one job because their ranks
report as replicas of it, because replicas start only when the address of their lighthouse is known, and because the
lighthouse ends with the last of them.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import LIGHTHOUSE, OVER, Run, RunPhase
from torchloom.protocol.job_spec import Task, Torchft
from torchloom.protocol.phrase import Prose, phrase

OURS, STOCK = "loom", "stock"
ADDRESS, FOLDER = "{address}", "{folder}"
"""Placeholders in the arguments of a lighthouse: its address, and the folder for its durable state."""
_ALWAYS = 1_000_000
_AWAY = frozenset({RunPhase.SUBMITTED, RunPhase.RESTARTING})
TORCHFT_SECONDS = "60"
"""torchft's own default for each of its timeouts."""
QUORUM_RETRIES = 299
"""Of a replica whose lighthouse does not answer: it is being restarted."""


def split_job(job: str, task: Task) -> list[tuple[str, Task]]:
    """The runs of a job: itself, or its replicas and their lighthouse."""
    if task.torchft is None:
        return [(job, task)]
    ft = task.torchft
    # What is as torchft has it is left to the script: a variable would count more than what its Manager is given.
    imposed = {name: value for name, value in timeouts(ft).items() if value != TORCHFT_SECONDS}
    env = imposed | {"NUM_REPLICA_GROUPS": str(ft.replicas + ft.spares)} | task.env
    replicas = []
    for number in range(ft.replicas + ft.spares):
        own = env | {"REPLICA_GROUP_ID": str(number)}
        logs = f"{task.log_dir}/replica-{number}" if task.log_dir else ""
        part = replace(task, part_of=job, replica=f"{job}_{number}", env=own, log_dir=logs)
        replicas.append((f"{job}:{number}", part))
    if ft.lighthouse not in {OURS, STOCK}:
        return replicas
    return [(f"{job}:{LIGHTHOUSE}", _lighthouse(job, task, ft)), *replicas]


def timeouts(ft: Torchft) -> dict[str, str]:
    """Each is longer than what it waits for, so that slow replicas are not given up.

    heartbeat timeout < join timeout < quorum and collectives; all of torchft's own, in whole seconds.
    """
    quorum = max(60, int(2 * ft.join_timeout + ft.heartbeat_timeout))
    return {
        "TORCHFT_TIMEOUT_SEC": TORCHFT_SECONDS,
        "TORCHFT_QUORUM_TIMEOUT_SEC": str(quorum),
        "TORCHFT_CONNECT_TIMEOUT_SEC": TORCHFT_SECONDS,
        "TORCHFT_QUORUM_RETRIES": str(QUORUM_RETRIES),
    }


def _lighthouse(job: str, task: Task, ft: Torchft) -> Task:
    words = {
        "--job": job,
        "--bind": ADDRESS,
        "--min-replicas": str(ft.min_replicas),
        "--heartbeat-timeout-ms": str(int(1000 * ft.heartbeat_timeout)),
        "--join-timeout-ms": str(int(1000 * ft.join_timeout)),
    }
    own = ("--folder", FOLDER) if ft.lighthouse == OURS else ("--stock",)
    return Task(
        argv=("-m", "torchloom.lighthouse", *own, *(word for pair in words.items() for word in pair)),
        python=task.python,
        node=task.node,
        attended=task.attended,
        grace=1.0,
        max_restarts=_ALWAYS,
        standby=False,
        log_dir=f"{task.log_dir}/{LIGHTHOUSE}" if task.log_dir else "",
        part_of=job,
        replica=LIGHTHOUSE,
        torchft=ft,
        delay=task.delay,
        after=task.after,
    )


# ── the replicas of a job ──


def siblings(cluster: ClusterState, run: Run) -> list[Run]:
    """The other replicas of its job, over or not, of the same submission."""
    job = [other for other in cluster.runs.by_name.values() if other.replica_id.job == run.replica_id.job]
    mine = [other for other in job if other.request == run.request]
    return [other for other in mine if other.name != run.name and not other.is_lighthouse]


def lighthouse(cluster: ClusterState, run: Run) -> Run | None:
    """The run of the lighthouse of its job; None if torchLoom does not run it."""
    light = cluster.runs.by_name.get(f"{run.replica_id.job}:{LIGHTHOUSE}") if run.task.part_of else None
    return light if light is not None and light.request == run.request else None


def waits_for_lighthouse(cluster: ClusterState, run: Run) -> bool:
    """Whether a replica cannot start because the address of its lighthouse is not known."""
    if run.task.torchft is None or run.is_lighthouse or run.task.torchft.lighthouse not in {OURS, STOCK}:
        return False
    light = lighthouse(cluster, run)
    return light is None or not light.port


def with_lighthouse(cluster: ClusterState, run: Run) -> Task:
    """The task of a replica as it is started: with the address of its lighthouse."""
    if run.task.torchft is None or run.is_lighthouse:
        return run.task
    light = lighthouse(cluster, run)
    address = f"http://{light.host}:{light.port}" if light is not None else run.task.torchft.lighthouse
    return replace(run.task, env={"TORCHFT_LIGHTHOUSE": address} | run.task.env)


def heals(cluster: ClusterState, run: Run) -> bool:
    """Whether another replica trains, from which this one copies its state: it needs no checkpoint."""
    return run.task.torchft is not None and any(other.phase is RunPhase.RUNNING for other in siblings(cluster, run))


def trains(cluster: ClusterState, run: Run) -> bool:
    """Whether it has parameters that others can copy, as far as its ranks have reported."""
    if run.phase is not RunPhase.RUNNING:
        return False
    ranks = [cluster.ranks.find(run.rank(place.rank), place.incarnation) for place in run.places]
    joined = [rank for rank in ranks if rank is not None]
    if not joined:
        return run.ordinal == 1  # a later one has nothing before it has healed
    beats = [beat for rank in joined if (beat := cluster.runtime.last_beat(rank.id, rank.incarnation)) is not None]
    unknown = not beats or any(rank.counted for rank in joined)
    return unknown or any(beat.step > 0 for beat in beats)


def can_heal(cluster: ClusterState, run: Run) -> bool:
    """Whether what this replica has trained would be left if it were gone."""
    return run.task.torchft is not None and any(trains(cluster, other) for other in siblings(cluster, run))


def is_unused_lighthouse(cluster: ClusterState, run: Run) -> bool:
    """Whether a run is a lighthouse whose replicas are all over."""
    return run.is_lighthouse and all(other.phase in OVER for other in siblings(cluster, run))


def is_left_alone(cluster: ClusterState, run: Run) -> bool:
    """Whether a replica is away while the others have ended well, or are over and it may not be started."""
    if run.task.torchft is None or run.is_lighthouse:
        return False
    others = siblings(cluster, run)
    waiting = [other for other in others if not other.over]
    if not all(other.drained and other.phase in _AWAY for other in waiting):
        return False
    far = max((note.step for note in run.notes), default=0)
    # One that was stopped long before this one was lost has not done what this one did.
    done = sum(other.phase is RunPhase.DONE and other.step + 1 >= far for other in others)
    return done >= run.task.torchft.min_replicas or (run.drained and len(waiting) < len(others))


def job_outcome(cluster: ClusterState, last: Run, phase: str, reason: Prose) -> tuple[str, Prose]:
    """How a job ends with the last of its runs, and why: well, if enough of its replicas did."""
    if last.task.torchft is None:
        return phase, reason
    ends = {run.name: (run.phase.value, run.reason) for run in siblings(cluster, last)}
    if not last.is_lighthouse:
        ends[last.name] = phase, reason
    phases = [phase for phase, _ in ends.values()]
    done, count = phases.count("done"), len(phases)
    if done >= last.task.torchft.min_replicas:
        return "done", phrase("replicas_ended_well", done=done, count=count)
    if "failed" in phases:
        bad = [phrase("of_job", job=name, text=why) for name, (phase, why) in ends.items() if phase == "failed"]
        return "failed", phrase("replicas_failed", failed=len(bad), count=count, first=bad[0])
    return "cancelled", next((why for phase, why in ends.values() if phase == "cancelled"), reason)

"""Priority: runs that wait for room get it from running ones of a lower priority, which are released and resumed later.

Bounds against thrash: equal priorities never displace each other. A run is displaced only if it can save, has run for
longer than it took to start and at least `RUN_SECONDS`, and was not displaced within `AGAIN_SECONDS`. Nothing is
released unless all of it together makes enough room, and nothing more than needed. While it is being released, runs of
a lower priority than the one that waits do not take the room. When a job will end is not known, so that one may be
displaced shortly before its end.
"""

from __future__ import annotations

from torchloom.core.changes.requests import request_id
from torchloom.core.decision import NOTHING, Decision, merge_decisions
from torchloom.core.jobs import release
from torchloom.core.jobs.node_room import Room
from torchloom.core.jobs.placement import choose, find_preferred, place
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.core.torchft.replica_groups import waits_for_lighthouse
from torchloom.protocol.phrase import phrase
from torchloom.protocol.run_records import ReleaseBegan, RunResumed

RUN_SECONDS = 60.0
"""Least that an attempt has run before it is displaced."""
AGAIN_SECONDS = 600.0
"""Between two times that one run is displaced."""


def place_in_turn(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Begin an attempt where there is room, or have others make room."""
    if now < run.wait_until:
        return NOTHING
    return place(cluster, run, now) or _make_room(cluster, run, now)


def resume_displaced(cluster: ClusterState, run: Run, now: float) -> Decision:
    """A run that was released for another one continues when there is room."""
    if not run.makes_room_for or find_preferred(cluster, run, now) or not choose(Room(cluster, run), now):
        return NOTHING
    request = request_id(run.name, run.displaced, "resume")
    return Decision((RunResumed(job=run.name, request=request, step=cluster.step_of(run.replica_id.job)),))


def _make_room(cluster: ClusterState, run: Run, now: float) -> Decision:
    """Release the fewest of the running jobs of lower priority that leave enough room together, if some do."""
    if run.drained or waits_for_lighthouse(cluster, run):
        return NOTHING
    runs = cluster.runs.by_name.values()
    leaving = [other.name for other in runs if other.is_being_released]
    if leaving and choose(Room(cluster, run, leaving), now):
        return NOTHING  # it only has to wait for them
    candidates = [other for other in runs if _may_be_displaced(cluster, other, run, now)]
    candidates.sort(key=lambda other: (other.task.priority, -other.since, other.name))
    needed: list[Run] = []
    for candidate in candidates:
        needed.append(candidate)
        if choose(Room(cluster, run, [*leaving, *(other.name for other in needed)]), now):
            break
    else:
        return NOTHING
    for candidate in list(needed):
        others = [other.name for other in needed if other is not candidate]
        if choose(Room(cluster, run, [*leaving, *others]), now):
            needed.remove(candidate)
    return merge_decisions(_displace(cluster, other, run) for other in needed)


def _may_be_displaced(cluster: ClusterState, other: Run, run: Run, now: float) -> bool:
    if other.task.priority >= run.task.priority or other.task.attended or other.is_being_released:
        return False
    if other.phase is not RunPhase.RUNNING or release.explain_unreleasable(cluster, other) is not None:
        return False
    running = other.note.running if other.note.running is not None else now
    ran, start = now - running, running - other.note.began
    return ran >= max(RUN_SECONDS, start) and (not other.displaced or now - other.displaced >= AGAIN_SECONDS)


def _displace(cluster: ClusterState, other: Run, run: Run) -> Decision:
    reason = phrase("makes_room_for", job=run.name, priority=run.task.priority, own=other.task.priority)
    began = ReleaseBegan(
        job=other.name,
        request=request_id(other.name, other.attempt, run.name, run.attempt, "release"),
        step=cluster.furthest(other),
        reason=reason,
        makes_room_for=run.name,
    )
    return release.begin(cluster, other, began)

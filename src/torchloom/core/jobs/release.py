"""Releasing a job: it saves a checkpoint at a common step, its ranks end, and its devices are free until it is resumed.

    running ── ReleaseBegan ──> it saves ── saved ──> stopping ──> released ── RunResumed ──> restarting
                                   └── it cannot, or is resumed ──> it continues as before

Training continues while the checkpoint is written. The steps after it are done again, from the same state.
"""

from __future__ import annotations

from dataclasses import replace

from torchloom.core.changes import requests
from torchloom.core.changes.requests import request_id, steer_unasked
from torchloom.core.decision import NOTHING, Decision, Handlers, Refused
from torchloom.core.jobs.restart_decision import Cause, stop
from torchloom.core.state.change_ledger import Change, ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run, RunPhase
from torchloom.protocol.operator import Done, Release, Steer
from torchloom.protocol.phrase import Phrase, Prose, phrase
from torchloom.protocol.run_records import ReleaseBegan, ReleaseEnded, RunResumed

RELEASE_SECONDS = 600.0
"""Longest that a checkpoint is waited for; after that the job keeps its devices."""


# ── requests ──


def release(cluster: ClusterState, ask: Release) -> Decision:
    runs = cluster.runs.of_job(ask.job)
    if not runs:
        raise Refused(phrase("cannot_release_foreign", job=ask.job), phrase("pause_instead", job=ask.job))
    run = runs[0]
    if run.phase is RunPhase.RELEASED:
        # One that made room for another job stays released from now on.
        kept = (ReleaseBegan.from_fields(ask, step=run.step),) if run.makes_room_for else ()
        return Decision(kept, answer=Done(text=phrase("is_released", job=ask.job)))
    answer = Done(text=phrase("being_released", job=ask.job))
    if run.is_being_released:
        return Decision(answer=answer)
    if why := explain_unreleasable(cluster, run):
        raise Refused(*why)
    return replace(begin(cluster, run, ReleaseBegan.from_fields(ask, step=cluster.furthest(run))), answer=answer)


def begin(cluster: ClusterState, run: Run, began: ReleaseBegan) -> Decision:
    return Decision((began,)) + _save(cluster, run, began)


def explain_unreleasable(cluster: ClusterState, run: Run) -> tuple[Phrase, Phrase] | None:
    """Why a run cannot be released now, if it cannot, and what to do instead."""
    job = run.replica_id.job
    if run.task.torchft is not None:
        return phrase("cannot_release_replicas", job=job), phrase("drain_replica_instead", job=job)
    if run.phase not in {RunPhase.RUNNING, RunPhase.PAUSED}:
        return phrase("cannot_release_in_phase", job=job, phase=str(run.phase)), phrase("try_again_soon")
    if job not in cluster.ledger.checkpointers:
        return phrase("no_checkpointer", job=job), phrase("register_checkpointer")
    if not (run.task.checkpoint_dir or run.resume or cluster.checkpoints.of(job).saved):
        return phrase("cannot_find_checkpoint", job=job), phrase("name_checkpoint_dir", job=job)
    return None


def steer(cluster: ClusterState, ask: Steer, reply: str) -> Decision:
    """What the ranks of a job are to do; a job that is released, or about to be, is resumed without them."""
    run = next(iter(cluster.runs.of_job(ask.job)), None) if ask.verb == "resume" else None
    if run is None:
        return requests.steer(cluster, ask, reply)
    if ask.request == run.resumed or run.phase is RunPhase.RELEASED:
        resumed = RunResumed.from_fields(ask)
        again = ask.request == run.resumed
        return Decision(() if again else (resumed,), answer=Done(text=phrase("being_resumed", job=ask.job)))
    if run.phase is RunPhase.STOPPING and run.next_action == "release":
        raise Refused(phrase("cannot_release_in_phase", job=ask.job, phase=str(run.phase)), phrase("try_again_soon"))
    if run.release is not None:
        withdrawn = ReleaseEnded(job=run.name, reason=phrase("release_withdrawn", operator=ask.operator))
        if run.phase is RunPhase.PAUSED:
            return Decision((withdrawn,)) + requests.steer(cluster, ask, reply)
        return Decision((withdrawn,), answer=Done(text=phrase("stays_running", job=ask.job)))
    return requests.steer(cluster, ask, reply)


# ── saving, then ending ──


def continue_release(cluster: ClusterState, run: Run, began: ReleaseBegan, now: float) -> Decision:
    """What comes next of the release of a run: it saves, ends, or continues because it could not save."""
    if began.makes_room_for and not _is_awaited(cluster, began.makes_room_for):
        return Decision((ReleaseEnded(job=run.name, reason=phrase("room_not_needed", job=began.makes_room_for)),))
    change = cluster.ledger.change_of(_request(began))
    if change is not None and change.ended and (why := _why_not_saved(cluster, run, change)):
        return Decision((ReleaseEnded(job=run.name, reason=why),))
    if change is not None and change.ended and _is_written(cluster, run, change):
        reason = began.reason or phrase("released", operator=began.operator)
        return stop(cluster, run, now, Cause(reason, next_action="release", uses_restart=False, expected=True))
    if now - run.releasing > RELEASE_SECONDS:
        return Decision((ReleaseEnded(job=run.name, reason=phrase("release_too_late", seconds=RELEASE_SECONDS)),))
    return _save(cluster, run, began) if change is None else NOTHING


def _is_awaited(cluster: ClusterState, name: str) -> bool:
    """Whether the run that gets the room still waits for it."""
    other = cluster.runs.active(name)
    return other is not None and other.waits


def _request(began: ReleaseBegan) -> str:
    return request_id(began.request, "checkpoint")


def _save(cluster: ClusterState, run: Run, began: ReleaseBegan) -> Decision:
    """Requested until it is under way: another change may be just now."""
    ask = Steer(request=_request(began), verb="checkpoint", job=run.replica_id.job, operator=began.operator)
    return steer_unasked(cluster, ask)


def _why_not_saved(cluster: ClusterState, run: Run, change: Change) -> Prose:
    """Why there is no checkpoint, if it failed."""
    if change.phase is ChangePhase.ABORTED or change.failed or not change.applied:
        return phrase("release_save_failed", why=change.outcome)
    failed = cluster.checkpoints.of(run.replica_id.job).failed
    if change.pending and failed is not None and failed.at >= run.releasing and failed.step >= change.change.step:
        return phrase("release_save_failed", why=failed.why)
    return ""


def _is_written(cluster: ClusterState, run: Run, change: Change) -> bool:
    """Whether the checkpoint is complete: at once where the script saves itself, otherwise when that is reported."""
    saved = cluster.checkpoints.of(run.replica_id.job).saved
    return not change.pending or any(one.at >= run.releasing and one.step >= change.change.step for one in saved)


HANDLERS: Handlers = {
    Release: lambda cluster, ask, _reply, _now: release(cluster, ask),
    Steer: lambda cluster, ask, reply, _now: steer(cluster, ask, reply),
}

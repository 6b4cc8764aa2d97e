"""What a job tells of its checkpoints is remembered, a failure is not overlooked, and a log folds to the same."""

from __future__ import annotations

import msgspec

from tests.core.loom import HI, Loom, life
from torchloom.core.decision import Decision
from torchloom.core.events import ReportReceived
from torchloom.core.state.checkpoint_index import KEEP_SAVED
from torchloom.core.state.cluster import ClusterState, State
from torchloom.core.state.incident_history import Incident
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import CheckpointFailed, CheckpointSaved, JobResumed, Resumed, Saved, SaveFailed
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened, Record
from torchloom.protocol.views import CheckpointsView, ResumedStep
from torchloom.settings import Settings

LO = RankId("mnist", "lo", 0)
FULL = "OSError: no space left on device: /runs/a/step-{step}/model.pt"
FAILING = phrase("checkpoint_failed", job="mnist")


def save(loom: Loom, step: int, folder: str = "/runs/a", number: int = 1, rank: RankId = HI, size: int = 8) -> Decision:
    said = Saved(incarnation=life(number), step=step, folder=folder, size=size, seconds=2.0, stall=0.5)
    return loom.happen(ReportReceived(rank, said))


def fail(loom: Loom, step: int, why: str = FULL, number: int = 1, error: str = "OSError ENOSPC") -> Decision:
    failed = SaveFailed(incarnation=life(number), step=step, folder="/runs/a", why=why.format(step=step), error=error)
    return loom.happen(ReportReceived(HI, failed))


def resume(loom: Loom, step: int, number: int = 1, rank: RankId = HI, **rejected: str) -> Decision:
    path = f"/runs/a/step-{step}"
    return loom.happen(ReportReceived(rank, Resumed(incarnation=life(number), step=step, path=path, rejected=rejected)))


def joined() -> Loom:
    loom = Loom()
    loom.join(node="node1")
    return loom


def seen(loom: Loom, job: str = "mnist") -> CheckpointsView:
    return loom.cluster.checkpoints.of(job)


def kinds(decision: Decision) -> list[type[Record]]:
    return [type(record) for record in decision.records]


def only_incident(loom: Loom) -> Incident:
    (incident,) = loom.cluster.incidents.values()
    return incident


# ── what is written ──


def test_a_written_checkpoint_is_recorded_with_the_node_of_the_rank_that_told() -> None:
    loom = joined()
    record = CheckpointSaved(
        rank=HI, incarnation=life(1), step=100, folder="/runs/a", node="node1", size=8, seconds=2.0, stall=0.5
    )
    assert save(loom, 100).records == (record,)
    view = seen(loom)
    assert (view.folder, view.node, view.failures, view.failed, view.resumed) == ("/runs/a", "node1", 0, None, None)
    (kept,) = view.saved
    assert (kept.step, kept.size, kept.seconds, kept.stall, kept.at) == (100, 8, 2.0, 0.5, loom.now)


def test_a_job_that_never_wrote_one_and_an_unknown_job_look_empty() -> None:
    loom = joined()
    assert seen(loom) == CheckpointsView(job="mnist")
    assert seen(loom, "nobody") == CheckpointsView(job="nobody")


def test_they_are_listed_as_they_came_also_after_a_rollback() -> None:
    loom = joined()
    for step in (100, 200, 300, 150):
        save(loom, step)
    assert [kept.step for kept in seen(loom).saved] == [100, 200, 300, 150]


def test_a_step_written_again_replaces_what_it_overwrote() -> None:
    loom = joined()
    save(loom, 100)
    save(loom, 200)
    save(loom, 100, size=9)
    assert [(kept.step, kept.size) for kept in seen(loom).saved] == [(200, 8), (100, 9)]
    save(loom, 200, folder="/runs/b")  # this overwrites nothing
    assert [(kept.step, kept.folder) for kept in seen(loom).saved] == [
        (200, "/runs/a"), (100, "/runs/a"), (200, "/runs/b"),
    ]  # fmt: skip
    assert seen(loom).folder == "/runs/b"


def test_only_the_latest_are_listed() -> None:
    loom = joined()
    for step in range(KEEP_SAVED + 7):
        save(loom, step)
    assert [kept.step for kept in seen(loom).saved] == list(range(7, KEEP_SAVED + 7))


# ── what could not be written ──


def test_a_failure_is_an_incident_that_says_what_is_done() -> None:
    loom = joined()
    assert kinds(fail(loom, 100)) == [CheckpointFailed, IncidentOpened]
    incident = only_incident(loom)
    assert (incident.what, incident.about, incident.job) == (
        FAILING,
        About(job="mnist", part="checkpoint"),
        "mnist",
    )
    assert incident.evidence == (FULL.format(step=100), phrase("at_step_in", step=100, folder="/runs/a"))
    assert incident.decision == phrase("next_interval_saves")
    assert incident.reason == phrase("last_good_stays")
    view = seen(loom)
    assert (view.failures, view.folder, view.saved) == (1, "/runs/a", ())
    assert view.failed
    assert (view.failed.step, view.failed.why, view.failed.at) == (100, FULL.format(step=100), loom.now)


def test_a_disk_that_stays_full_is_one_incident_that_does_not_grow() -> None:
    loom = joined()
    fail(loom, 100)
    for step in range(200, 3000, 100):  # each time another file is named
        assert kinds(fail(loom, step)) == [CheckpointFailed]
    assert len(only_incident(loom).evidence) == 2
    assert seen(loom).failures == 29


def test_another_reason_is_new_evidence() -> None:
    loom = joined()
    fail(loom, 100)
    assert kinds(fail(loom, 200, "the file system is read-only", error="OSError EROFS")) == [
        CheckpointFailed,
        IncidentAmended,
    ]
    assert only_incident(loom).evidence[2:] == (
        "the file system is read-only",
        phrase("at_step_in", step=200, folder="/runs/a"),
    )
    assert kinds(fail(loom, 300)) == [CheckpointFailed]  # known already
    assert loom.open_incidents() == [FAILING]


def test_a_later_checkpoint_ends_the_incident() -> None:
    loom = joined()
    fail(loom, 100)
    assert kinds(save(loom, 200)) == [CheckpointSaved, IncidentAmended]
    assert only_incident(loom).closed == loom.now
    assert only_incident(loom).outcome == phrase("later_checkpoint_written")
    assert seen(loom).failures == 1
    assert kinds(save(loom, 300)) == [CheckpointSaved]
    fail(loom, 400)
    assert loom.open_incidents() == [FAILING]
    assert len(loom.cluster.incidents) == 2


def test_the_failure_of_one_job_is_not_ended_by_another() -> None:
    loom = joined()
    other = RankId("other", "hi", 0)
    loom.join(other)
    fail(loom, 100)
    save(loom, 100, rank=other)
    assert loom.open_incidents() == [FAILING]


def test_it_does_not_hide_what_is_known_about_the_rank_itself() -> None:
    loom = joined()
    fail(loom, 100)
    loom.close()
    assert loom.open_incidents() == [FAILING, phrase("rank_lost", rank=HI)]
    loom.open()
    assert loom.open_incidents() == [FAILING]


# ── where training goes on ──


def test_a_resumption_is_recorded() -> None:
    loom = joined()
    assert resume(loom, 100).records == (JobResumed(rank=HI, incarnation=life(1), step=100, path="/runs/a/step-100"),)
    assert seen(loom).resumed == ResumedStep(
        rank=HI, incarnation=life(1), step=100, path="/runs/a/step-100", at=loom.now
    )
    assert not loom.cluster.incidents


def test_a_damaged_checkpoint_is_an_incident_that_is_over_at_once() -> None:
    loom = joined()
    resume(loom, 100, step200="model.pt: 64 bytes differ")
    incident = only_incident(loom)
    assert incident.what == phrase("checkpoints_damaged", names=["step200"], job="mnist")
    assert incident.evidence == (phrase("checkpoint_rejected", name="step200", why="model.pt: 64 bytes differ"),)
    assert (incident.decision, incident.closed) == (phrase("resumed_from", step=100), loom.now)
    assert incident.about == About(job="mnist", part="checkpoint")


def test_several_damaged_ones_are_one_incident() -> None:
    loom = joined()
    resume(loom, 100, a="torn", b="torn")
    resume(loom, 100, **{f"s{n}": "torn" for n in range(60)})
    few, many = loom.cluster.incidents.values()
    assert few.what == phrase("checkpoints_damaged", names=["a", "b"], job="mnist")
    assert many.what == phrase("checkpoints_damaged", names=[f"s{n}" for n in range(60)], job="mnist")
    assert len(many.evidence) == 20


def test_what_several_ranks_find_damaged_is_told_once_in_a_run() -> None:
    loom = joined()
    loom.join(LO)
    resume(loom, 100, step200="torn")
    assert kinds(resume(loom, 100, rank=LO, step200="torn")) == [JobResumed]
    loom.leave()
    loom.leave(LO)
    loom.wait(10)
    loom.join(number=2)
    assert kinds(resume(loom, 100, number=2, step200="torn")) == [JobResumed, IncidentOpened, IncidentAmended]


def test_a_damaged_one_does_not_end_the_incident_of_a_failure() -> None:
    loom = joined()
    fail(loom, 300)
    resume(loom, 100, step200="torn")
    assert loom.open_incidents() == [FAILING]


# ── who is believed, and for how long ──


def test_neither_an_unknown_rank_nor_an_older_life_is_believed() -> None:
    loom = Loom()
    for tell in (save, fail, resume):
        assert not tell(loom, 100)
    loom.join(number=2)
    for tell in (save, fail, resume):
        assert not tell(loom, 100, number=1)
        assert tell(loom, 100, number=2)


def test_a_new_run_of_the_job_finds_what_the_last_one_left() -> None:
    loom = joined()
    save(loom, 100)
    fail(loom, 200)
    before = seen(loom)
    loom.leave()
    loom.wait(10)
    assert loom.cluster.jobs["mnist"].phase == "finished"
    loom.join(number=2, node="node2")
    assert seen(loom) == before
    save(loom, 300, number=2)
    assert [(kept.step, kept.node) for kept in seen(loom).saved] == [(100, "node1"), (300, "node2")]
    assert seen(loom).node == "node2"
    assert not loom.open_incidents()


def test_a_forgotten_job_leaves_nothing_behind() -> None:
    loom = Loom(Settings(keep_ended_jobs=1))
    loom.join()
    save(loom, 100)
    fail(loom, 200)
    loom.leave()
    loom.wait(10)
    assert loom.open_incidents() == [FAILING]  # the last word on it
    other = RankId("other", "hi", 0)
    loom.join(other)
    loom.leave(other)
    loom.wait(10)
    assert "mnist" not in loom.cluster.jobs
    assert seen(loom) == CheckpointsView(job="mnist")
    assert loom.cluster.state().checkpoints == {}
    assert only_incident(loom).outcome == phrase("job_forgotten")
    assert loom.restarted().cluster.state() == loom.cluster.state()


def test_all_of_it_survives_a_snapshot_and_is_a_fold_of_the_log() -> None:
    loom = joined()
    save(loom, 100)
    fail(loom, 200)
    resume(loom, 100, step200="torn")
    state = loom.cluster.state()
    assert len(state.checkpoints) == 1
    stored = msgspec.json.decode(msgspec.json.encode(state), type=State)
    assert stored == state
    again = Loom(state=stored)
    again.now = loom.now
    assert seen(again) == seen(loom)
    assert loom.restarted().cluster.state() == state
    for one in (loom, again):
        save(one, 300)  # ends the incident there, too
    assert again.cluster.state() == loom.cluster.state()


def test_a_snapshot_of_an_older_version_knows_of_none() -> None:
    state = msgspec.to_builtins(joined().cluster.state())
    del state["checkpoints"]
    cluster = ClusterState(Settings(), msgspec.convert(state, State))
    assert cluster.checkpoints.of("mnist") == CheckpointsView(job="mnist")

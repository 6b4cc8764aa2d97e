"""The story of an incident stands in the log: what was done about it, and what it cost."""

from __future__ import annotations

import pytest

from tests.core.loom import Loom, life
from tests.core.site import JOB, Site
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.incident_history import LONGEST_ENTRY, MOST_ENTRIES, Incident, Incidents
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Prose, phrase
from torchloom.protocol.rank import JobResumed
from torchloom.protocol.records import About, IncidentAmended, IncidentOpened
from torchloom.protocol.run_records import AttemptStopping, ResponseBegan, ResponseWent
from torchloom.protocol.views import PlaneView, QueryCluster
from torchloom.settings import Settings
from torchloom.views.cluster_summary import CLOSED_SHOWN, EVIDENCE_SHOWN, picture

PLANE = PlaneView(weaver="w", term=1, began=0, now=0, log_seq=1, version="0")


def killed() -> Site:
    site = Site()
    site.submit()
    site.settle()
    site.agents["n1"].resume = ("/runs/step-30", 30)
    site.loom.now += 50
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    return site


def entries(incident: Incident) -> list[Prose]:
    return [entry for _, entry in incident.history]


def test_a_crash_tells_what_was_done_and_what_it_cost() -> None:
    site = killed()
    (incident,) = site.loom.cluster.incidents.values()
    assert entries(incident) == [
        phrase("decided", decision=planned("restart")),
        phrase("attempt_stopped", attempt=1, step=None),
        phrase("attempt_prepared", attempt=2, nodes=["n1"]),
        phrase("resumes_at", step=30, path="/runs/step-30"),
        phrase("over", outcome=phrase("started_again_from_step", step=30, attempt=2)),
    ]
    assert (incident.stopped, incident.lost_steps) == ((JOB, 1), 0)
    assert incident.lost_seconds == incident.history[-1][0] - incident.opened


def test_the_story_survives_the_weaver() -> None:
    site = killed()
    again = Loom()
    for at, records in site.loom.log:
        again.cluster.fold(records, at)
    assert again.cluster.state().incidents == site.loom.cluster.state().incidents
    assert ClusterState(Settings(), site.loom.cluster.state()).incidents == site.loom.cluster.incidents


def test_the_next_run_of_a_job_is_not_told_by_the_incident_that_ended_the_last() -> None:
    site = Site()
    site.submit(max_restarts=0)
    site.settle()
    site.agents["n1"].end(1, signal="SIGKILL")
    site.settle()
    assert site.phase == "failed"
    (before,) = site.loom.cluster.incidents.values()
    site.submit(2)
    site.settle()
    assert site.phase == "running"
    assert site.loom.cluster.incidents[before.id] == before
    assert (before.lost_steps, before.lost_seconds) == (None, None)


def test_responses_are_told_one_after_the_other() -> None:
    site = Site()
    site.submit()
    site.settle()
    cluster, now = site.loom.cluster, site.loom.now
    opened = IncidentOpened(
        id="i1", what="w", about=About(rank=RankId(JOB, "main", 1), part="hang"), job=JOB, decision="wait", kind="hang"
    )
    began = ResponseBegan(job=JOB, incident="i1", kind="hang", do=("stacks", "checkpoint", "restart"))
    cluster.fold((opened,), now + 1)
    cluster.fold((began, IncidentAmended(id="i1", decision="act")), now + 2)
    cluster.fold((ResponseWent(job=JOB, left=("checkpoint", "restart")),), now + 3)
    cluster.fold((IncidentAmended(id="i1", evidence=("where the ranks were:\n  a", "n1: busy")),), now + 4)
    cluster.fold((IncidentAmended(id="i1", evidence=("how it ended", "and its last words")),), now + 4)
    cluster.fold((IncidentAmended(id="i1", evidence=("no checkpoint came",)),), now + 4)
    cluster.fold((AttemptStopping(job=JOB, attempt=1, reason="r", step=1204, incident="i1"),), now + 5)
    assert entries(cluster.incidents["i1"]) == [
        phrase("decided", decision="wait"),
        phrase("response_begins", do=["stacks", "checkpoint", "restart"], job=""),
        phrase("response_done", do=["stacks"]),
        "no checkpoint came",
        phrase("attempt_stopped", attempt=1, step=1204),
    ]


def test_steps_are_lost_since_the_checkpoint_or_where_the_script_itself_says_it_goes_on() -> None:
    site = killed()
    cluster, now = site.loom.cluster, site.loom.now
    opened = IncidentOpened(id="i9", what="w", about=About(rank=RankId(JOB, "main", 1)), job=JOB, kind="crash")
    cluster.fold((opened, AttemptStopping(job=JOB, attempt=2, reason="r", step=100, incident="i9")), now)
    assert cluster.incidents["i9"].step == 100
    site.settle()
    assert cluster.incidents["i9"].lost_steps == 70
    cluster.fold((JobResumed(rank=RankId(JOB, "main", 0), incarnation=life(1), step=90, path="p"),), now)
    assert cluster.incidents["i9"].lost_steps == 10


def test_what_is_decided_while_an_attempt_is_being_ended_for_something_else_is_another_story() -> None:
    site = Site()
    site.submit()
    site.settle()
    cluster, now = site.loom.cluster, site.loom.now
    mine = IncidentOpened(id="i1", what="w", about=About(rank=RankId(JOB, "main", 1)), job=JOB)
    cluster.fold((mine, AttemptStopping(job=JOB, attempt=1, reason="r", step=1, incident="i1")), now)
    cluster.fold((IncidentOpened(id="i2", what="w", about=About(rank=RankId(JOB, "main", 0)), job=JOB),), now)
    cluster.fold((IncidentOpened(id="i3", what="w", about=About(rank=RankId(JOB, "main", 0)), job=JOB),), now + 1)
    assert [i.stopped for i in cluster.incidents.values()] == [(JOB, 1), None, None]


def test_what_is_told_after_an_attempt_was_ended_is_not_why() -> None:
    site = Site()
    site.submit()
    site.settle()
    cluster, now = site.loom.cluster, site.loom.now
    cluster.fold((AttemptStopping(job=JOB, attempt=1, reason="r", step=1),), now)
    cluster.fold((IncidentOpened(id="i1", what="w", about=About(rank=RankId(JOB, "main", 0)), job=JOB),), now + 1)
    assert cluster.incidents["i1"].stopped is None


def test_a_rank_that_was_lost_and_turns_out_to_be_dead_has_crashed() -> None:
    site = Site()
    site.submit()
    site.settle()
    cluster, now = site.loom.cluster, site.loom.now
    cluster.fold((IncidentOpened(id="i1", what="it is lost", about=About(rank=RankId(JOB, "main", 0)), job=JOB),), now)
    stopping = AttemptStopping(job=JOB, attempt=1, reason="r", step=1, incident="i1")
    cluster.fold((IncidentAmended(id="i1", decision="restart"), stopping), now + 1)
    assert (cluster.incidents["i1"].kind, cluster.incidents["i1"].stopped) == ("crash", (JOB, 1))
    cluster.fold((IncidentOpened(id="i2", what="w", about=About(run=JOB), job=JOB),), now + 1)
    assert cluster.incidents["i2"].kind == ""


def test_a_device_that_failed_tells_of_the_job_that_was_moved() -> None:
    site = Site()
    site.submit()
    site.settle()
    cluster, now = site.loom.cluster, site.loom.now
    device = IncidentOpened(id="i1", what="w", about=About(device="GPU-1"), kind="device")
    stopping = AttemptStopping(job=JOB, attempt=1, reason="r", step=7, incident="i1", counts=False)
    cluster.fold((device, stopping), now)
    view = picture(cluster, PLANE, QueryCluster(job=JOB))
    assert [(i.id, i.stopped) for i in view.incidents] == [("i1", JOB)]


def test_a_story_is_short_and_does_not_say_the_same_twice() -> None:
    incidents = Incidents([Incident(id="i1", opened=0, what="w", about=About(job="s"))])
    for number in range(3 * MOST_ENTRIES):
        for _ in range(2):
            incidents.append("i1", number, f"{number}")
    assert entries(incidents["i1"]) == ["0", *(str(number) for number in range(2 * MOST_ENTRIES + 1, 3 * MOST_ENTRIES))]
    incidents.append("i1", 1, "x" * 1000)
    assert incidents["i1"].history[-1][1] == "x" * (LONGEST_ENTRY - 1) + "…"


# ── what of it is in a picture ──


def many(count: int, evidence: str, job: str = JOB) -> ClusterState:
    cluster = ClusterState(Settings())
    for number in range(count):
        cluster.fold(
            (
                IncidentOpened(id=f"{job}-{number}", what="w", about=About(job="s"), job=job, evidence=(evidence,)),
                IncidentAmended(id=f"{job}-{number}", outcome="o", closed=True),
            ),
            float(number),
        )
    return cluster


@pytest.mark.wording
def test_a_picture_tells_the_newest_whole_and_as_many_as_fit() -> None:
    evidence = "x" * (EVIDENCE_SHOWN // 10)
    view = picture(many(40, evidence), PLANE, QueryCluster(limit=0))
    lengths = [len(incident.evidence[0]) for incident in view.incidents]
    assert len(lengths) == 40
    assert lengths[0] == len(evidence)
    assert sum(lengths) < 2 * EVIDENCE_SHOWN


@pytest.mark.wording
def test_one_incident_is_told_whole_however_old() -> None:
    cluster = many(CLOSED_SHOWN * 3, "x" * 10_000)
    assert f"{JOB}-1" not in [i.id for i in picture(cluster, PLANE, QueryCluster()).incidents]
    (found,) = picture(cluster, PLANE, QueryCluster(incident=f"{JOB}-1")).incidents
    assert len(found.evidence[0]) == 10_000
    assert picture(cluster, PLANE, QueryCluster(incident="none")).incidents == ()


def test_the_incidents_of_a_job_are_not_crowded_out_by_those_of_others() -> None:
    cluster = many(3, "mine", job="quiet")
    for number in range(CLOSED_SHOWN * 2):
        noisy = IncidentOpened(id=f"n{number}", what="w", about=About(job="s"), job="noisy")
        cluster.fold((noisy, IncidentAmended(id=f"n{number}", closed=True)), 100.0 + number)
    assert len(picture(cluster, PLANE, QueryCluster(job="quiet")).incidents) == 3


def test_records_of_a_job_that_is_not_known_are_no_one_s_story() -> None:
    cluster = ClusterState(Settings())
    cluster.fold((JobResumed(rank=RankId("x", "main", 0), incarnation=life(1), step=1, path="p"),), 1.0)
    assert cluster.incidents == {}

"""Agents that fall silent: their ranks go on, or are waited for, or are given up and started elsewhere."""

from __future__ import annotations

from tests.core.site import JOB, Site, incidents
from torchloom.core.events import ReportReceived
from torchloom.core.incidents.rule_lookup import planned
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Goodbye
from torchloom.protocol.records import IncidentOpened
from torchloom.settings import Settings

NODE_PATIENCE = Settings().node_patience_seconds


def test_nodes_that_said_goodbye_are_forgotten_and_others_only_missed() -> None:
    site = Site("n1", "n2", "mine")
    site.agents["n2"].leaving = True
    site.agents["mine"].tied = True
    site.hear()
    site.loom.now += 7
    site.loom.cluster.runtime.forget_nodes(site.loom.now)
    assert list(site.loom.cluster.runtime.nodes) == ["n1", "mine"]
    site.loom.now += NODE_PATIENCE
    site.loom.cluster.runtime.forget_nodes(site.loom.now)
    assert list(site.loom.cluster.runtime.nodes) == ["n1"]


def test_a_launcher_that_was_held_up_for_a_while_finds_its_job_running() -> None:
    site = Site("mine")
    site.agents["mine"].tied = True
    site.hear()
    site.submit(node="mine", attended=True)
    site.settle()
    site.silent.add("mine")
    site.settle(NODE_PATIENCE - 2)
    site.silent.clear()
    site.settle(1)
    assert (site.phase, site.run.ordinal) == ("running", 1)


def test_a_job_whose_launcher_is_gone_ends_and_gives_its_name_free() -> None:
    site = Site("mine")
    site.agents["mine"].tied = True
    site.hear()
    site.submit(node="mine", attended=True)
    site.settle()
    site.silent.add("mine")
    site.settle(3 * NODE_PATIENCE)
    assert (site.phase, site.run.reason) == ("failed", phrase("launcher_gone"))


def test_an_agent_that_stays_away_with_its_ranks_is_waited_for_and_then_given_up() -> None:
    site = Site()
    site.submit()
    site.settle()
    site.silent.add("n1")
    site.settle(NODE_PATIENCE - 1)
    assert site.phase == "running"
    site.settle(2)
    assert site.phase == "restarting"


def test_an_agent_that_falls_silent_takes_its_ranks_with_it() -> None:
    site = Site("n1", "n2")
    site.agents["n1"].cores = 9
    site.hear()
    site.submit()
    site.settle()
    assert site.run.nodes == ("n1",)
    site.silent.add("n1")
    site.settle(NODE_PATIENCE + 10)
    assert (site.phase, site.run.nodes, site.run.attempt) == ("running", ("n2",), 2)


def test_a_zombie_agent_is_told_to_end_what_it_still_runs() -> None:
    site = Site("n1", "n2")
    site.agents["n1"].cores = 9
    site.hear()
    site.submit()
    site.settle()
    site.silent.add("n1")
    site.settle(NODE_PATIENCE + 10)
    site.silent.clear()
    site.settle(1)
    assert site.agents["n1"].attempts == {}
    assert (site.phase, site.run.nodes) == ("running", ("n2",))


def test_a_node_that_is_lost_twice_is_not_the_script_s_fault() -> None:
    site = Site()
    site.submit()
    site.settle()
    for _ in range(3):
        site.silent.add("n1")
        site.settle(NODE_PATIENCE + 2)
        site.silent.clear()
        site.settle(40)
    assert (site.phase, site.run.ordinal) == ("running", 4)


def test_two_runs_that_lose_their_nodes_at_once_are_two_incidents() -> None:
    site = Site("n1", "n2")
    site.submit(1, node="n1", max_restarts=0)
    site.submit(2, job="other", node="n2", max_restarts=0)
    site.settle()
    site.silent |= {"n1", "n2"}
    site.settle(NODE_PATIENCE + 2)
    silent = [("mnist", "n1"), ("other", "n2")]
    assert incidents(site) == [
        phrase("of_job", job=job, text=phrase("agent_silent", node=node)) for job, node in silent
    ]
    assert len({incident.id for incident in site.loom.cluster.incidents.values()}) == 2


def test_ranks_that_outlive_their_agent_go_on_and_the_next_agent_finds_them() -> None:
    site = Site()
    site.submit()
    site.settle()
    site.join()
    site.silent.add("n1")
    site.settle(120, beating=True)
    assert site.phase == "running"
    assert site.loom.open_incidents() == [phrase("agent_silent_ranks_go_on", node="n1")]
    site.silent.clear()
    site.settle()
    assert (site.phase, site.run.ordinal) == ("running", 1)
    assert site.loom.open_incidents() == []


def test_ranks_that_finish_while_their_agent_is_away_are_done_and_not_started_again() -> None:
    site = Site()
    site.submit()
    site.settle()
    site.join()
    site.silent.add("n1")
    site.settle(10, beating=True)
    for place in site.run.places:
        goodbye = Goodbye(incarnation=place.incarnation, how="finished")
        site.loom.happen(ReportReceived(RankId(JOB, "main", place.rank), goodbye))
    site.settle(60)
    assert (site.phase, site.run.ordinal) == ("done", 1)


def test_what_was_decided_depends_on_who_is_lost_and_not_on_the_words() -> None:
    site = Site("n1", "n2")
    site.submit(node="n1")
    site.settle()
    site.agents["n1"].end(0, code=1, error="OSError: the loader is silent")
    site.settle(1)
    site.silent.add("n1")
    site.settle(NODE_PATIENCE + 2)
    decided = [r.decision for _, records in site.loom.log for r in records if isinstance(r, IncidentOpened)]
    assert decided == [planned("restart"), phrase("restarts_elsewhere")]

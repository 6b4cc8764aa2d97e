"""Agents that fall silent: their ranks go on, or are waited for, or are given up and started elsewhere.

And jobs that ask for a check: which nodes are looked at, which are left out, and what is said of them.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.core.site import JOB, Site, a_node, incidents, room, waiting
from torchloom.core.events import ReportReceived
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.jobs.node_health import AGAIN_SECONDS, FRESH_SECONDS, PATIENCE_SECONDS, find_slow
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Fitness
from torchloom.protocol.phrase import phrase
from torchloom.protocol.rank import Goodbye
from torchloom.protocol.records import About, IncidentOpened
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


# ── checks ──


def examined(site: Site) -> list[int]:
    return [agent.examined for agent in site.agents.values()]


def test_without_being_asked_for_nothing_is_looked_at() -> None:
    site = Site("n1")
    site.agents["n1"].unfit = ("memory: none",)
    site.submit()
    site.settle(2)
    assert (site.phase, examined(site)) == ("running", [0])


def test_a_node_that_is_not_fit_is_left_out_and_named() -> None:
    site = Site("n1", "n2")
    site.agents["n1"].unfit = ("memory: 3 of 4 MB free",)
    site.agents["n1"].cores = 9
    site.hear()
    site.submit(check=True)
    site.settle(2)
    assert (site.phase, site.run.nodes) == ("running", ("n2",))
    assert incidents(site) == [phrase("node_not_fit", node="n1", why="memory: 3 of 4 MB free")]
    told = next(iter(site.loom.cluster.incidents.values()))
    assert (told.about, told.decision) == (
        About(node="n1", part="fitness"),
        phrase("unfit_gets_no_ranks"),
    )


def test_with_nowhere_to_go_it_waits_says_why_and_goes_on_once_that_is_mended() -> None:
    site = Site("n1")
    site.agents["n1"].unfit = ("clock: 9.0 s behind the weaver's",)
    site.submit(check=True)
    site.settle(5)
    assert site.phase == "submitted"
    unfit = phrase("room_not_fit", why="clock: 9.0 s behind the weaver's")
    assert waiting(site) == a_node(2, phrase("of_node", node="n1", text=unfit))
    assert examined(site) == [1]
    site.agents["n1"].unfit = ()
    site.settle(AGAIN_SECONDS + 1)
    assert site.phase == "running"
    assert [i.outcome for i in site.loom.cluster.incidents.values()] == [phrase("node_fit_again")]


def test_what_was_found_holds_for_a_while() -> None:
    site = Site("n1")
    site.submit(check=True)
    site.settle(1)
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(1)
    assert examined(site) == [1]
    site.loom.now += FRESH_SECONDS
    site.settle(1)
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(2)
    assert (site.phase, examined(site)) == ("running", [2])


def test_nodes_that_have_not_said_are_waited_for_but_not_for_ever() -> None:
    site = Site("n1", "n2", "n3")
    site.agents["n2"].deaf = site.agents["n1"].deaf = True
    site.submit(check=True)
    site.settle(1)
    site.loom.now += PATIENCE_SECONDS - 4
    site.settle(1)
    assert site.phase == "submitted"
    checked = [phrase("of_node", node=node, text=phrase("room_being_checked")) for node in ("n1", "n2")]
    assert waiting(site) == a_node(2, *checked, room("n3", 4, 4))
    site.settle(3)
    assert (site.phase, site.run.nodes) == ("running", ("n3",))


def test_one_that_looks_just_now_has_not_said() -> None:
    site = Site("n1")
    site.agents["n1"].fitness = Fitness(number=3, running=True)
    site.agents["n1"].deaf = True
    site.hear()
    site.submit(check=True)
    site.settle(2)
    assert site.phase == "submitted"
    fitness = site.agents["n1"].fitness
    assert fitness is not None
    site.agents["n1"].deaf = False
    site.agents["n1"].fitness = replace(fitness, number=4, running=False)
    site.settle(2)
    assert site.phase == "running"


def test_the_slow_one_among_its_peers_is_left_out() -> None:
    site = Site("n1", "n2", "n3")
    for node, pace in {"n1": 0.021, "n2": 0.010, "n3": 0.009}.items():
        site.agents[node].pace = pace
    site.submit(check=True, nodes=3, min_nodes=2)
    site.settle(40)
    assert (site.phase, site.run.nodes) == ("running", ("n2", "n3"))
    slower = phrase("slower_than_nodes", times=pytest.approx(2.1), count=3, on="torch")
    assert incidents(site) == [phrase("node_not_fit", node="n1", why=phrase("computes_slowly", how=slower))]


@pytest.mark.parametrize(
    ("paces", "found"),
    [
        ({"a": ("torch", 1.0), "b": ("torch", 9.0)}, []),  # of two nobody can tell who is slow
        ({"a": ("torch", 1.0), "b": ("torch", 1.1), "c": ("torch", 1.9)}, []),
        ({"a": ("torch", 1.0), "b": ("torch", 1.1), "c": ("torch", 2.3)}, ["c"]),
        ({"a": ("torch", 1.0), "b": ("torch", 1.1), "c": ("numpy", 9.0), "d": ("torch", 1.0)}, []),
        ({"a": ("torch", 0.0), "b": ("torch", 0.0), "c": ("torch", 1.0)}, []),
        ({}, []),
    ],
)
def test_who_is_slow_beside_others_on_the_same(paces: dict[str, tuple[str, float]], found: list[str]) -> None:
    assert list(find_slow(paces)) == found


def test_what_was_found_for_the_folder_of_one_job_does_not_keep_another_from_starting() -> None:
    site = Site("n1")
    site.agents["n1"].unfit = ("checkpoint folder: full",)
    site.submit(9, job="other", check=True, checkpoint_dir="/full", per_node=1)
    site.settle(2)
    site.agents["n1"].unfit = ()
    site.submit(check=True, cwd="/home/me", checkpoint_dir="runs")
    site.settle(2)
    assert site.phase == "running"

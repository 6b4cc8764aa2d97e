"""An agent that says it is about to end, and its ranks with it: as under Slurm, when an allocation is over."""

from __future__ import annotations

from tests.core.site import Site, a_node, waiting
from torchloom.protocol.phrase import phrase


def running(*nodes: str, **task: object) -> Site:
    site = Site(*nodes)
    site.submit(**task)
    site.settle()
    assert site.phase == "running"
    return site


def leave(site: Site, node: str) -> None:
    site.agents[node].leaving = True
    site.settle(2)


def test_its_job_is_ended_in_order_and_goes_on_where_there_is_room() -> None:
    site = running("n1", "n2")
    leave(site, "n1")
    assert (site.phase, site.run.nodes) == ("running", ("n2",))
    assert site.run.notes[0].reason == phrase("node_is_leaving", node="n1")


def test_its_job_waits_where_there_is_none_and_begins_on_the_next_agent() -> None:
    site = running("n1")
    leave(site, "n1")
    assert waiting(site) == a_node(2, phrase("of_node", node="n1", text=phrase("room_leaving")))
    site.agents["n1"].leaving = False
    site.settle(2)
    assert site.phase == "running"


def test_a_job_that_is_being_prepared_there_goes_elsewhere() -> None:
    site = Site("n1", "n2")
    site.agents["n1"].deaf = True
    site.submit()
    site.settle()
    assert (site.phase, site.run.nodes) == ("placing", ("n1",))
    leave(site, "n1")
    assert (site.phase, site.run.nodes) == ("running", ("n2",))


def test_leaving_again_and_again_is_no_failure_that_repeats_and_uses_up_no_restart() -> None:
    site = running("n1", max_restarts=1)
    for _ in range(3):
        leave(site, "n1")
        site.agents["n1"].leaving = False
        site.settle(40)
    assert (site.phase, site.run.attempt) == ("running", 4)


def test_its_silence_afterwards_is_not_waited_for() -> None:
    site = running("n1", "n2")
    site.join()
    site.agents["n1"].stubborn = True
    leave(site, "n1")
    assert site.phase == "stopping"
    site.silent.add("n1")
    site.settle(8, beating=True)
    assert (site.phase, site.run.nodes) == ("running", ("n2",))

"""A job that may be smaller: with what is left after something failed, never with less than it needs."""

from __future__ import annotations

import pytest

from tests.core.site import Site, a_node, incidents, room, waiting
from torchloom.core.jobs.placement import LAST_CALL
from torchloom.protocol.operator import Drain, Fail, No, Recover
from torchloom.protocol.phrase import Phrase, phrase

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def crash(site: Site) -> None:
    site.agents[site.run.nodes[0]].end(0, signal="SIGKILL")
    site.settle(2)


def test_a_device_that_failed_is_left_out_and_the_rest_goes_on() -> None:
    site = Site(devices=FOUR)
    site.submit(per_node=4, least=2)
    site.settle()
    site.tell(site.loom.ask(Fail(device="GPU-b"), "f"))
    site.settle(2)
    if site.run.ordinal == 1:  # no policy acted on it
        crash(site)
    assert site.phase == "running"
    assert [(p.rank, p.local, p.device) for p in site.run.places] == [
        (0, 0, "GPU-a"), (1, 1, "GPU-c"), (2, 2, "GPU-d"),
    ]  # fmt: skip
    assert site.run.world_size == 3
    again = phrase("started_again_from_beginning", attempt=2)
    smaller = phrase("with_fewer_ranks", outcome=again, count=3, wanted=4)
    assert smaller in [i.outcome for i in site.loom.cluster.incidents.values()]


def test_it_ends_well_when_all_of_the_fewer_have() -> None:
    site = Site(devices=FOUR)
    site.submit(per_node=4, least=2)
    site.settle()
    site.loom.ask(Fail(device="GPU-b"), "f")
    crash(site)
    for rank in range(3):
        site.agents["n1"].end(rank, code=0)
    site.settle()
    assert (site.phase, site.run.reason) == ("done", phrase("ranks_ended_well", count=3))


def test_below_the_least_it_waits_and_says_for_what() -> None:
    site = Site(devices=FOUR)
    site.submit(per_node=4, least=3)
    site.settle()
    for device in FOUR[:2]:
        site.loom.ask(Fail(device=device), device)
    crash(site)
    site.settle(40)
    assert site.phase == "restarting"
    assert waiting(site) == a_node(phrase("span", least=3, most=4), room("n1", 2, 4, failed=2))
    site.loom.ask(Recover(device="GPU-a"), "r")
    site.settle(40)
    assert (site.phase, site.run.world_size) == ("running", 3)


def test_a_node_that_is_gone_is_done_without_and_not_waited_for() -> None:
    site = Site("n1", "n2", "n3", cores=2)
    site.submit(nodes=3, min_nodes=2)
    site.settle()
    site.tell(site.loom.ask(Drain(node="n2"), "d"))
    crash(site)
    assert site.phase == "running"
    assert (site.run.nodes, site.run.world_size) == (("n1", "n3"), 4)
    assert [place.rank for place in site.run.places] == [0, 1, 2, 3]


def test_nodes_of_different_room_get_what_they_have() -> None:
    site = Site("n1", "n2", devices=FOUR)
    site.agents["n2"].devices = ("GPU-e", "GPU-f", "GPU-g", "GPU-h")
    site.hear()
    site.submit(nodes=2, per_node=4, least=1)
    site.settle()
    assert site.run.world_size == 8
    site.loom.ask(Fail(device="GPU-a"), "f")
    crash(site)
    assert [(p.rank, p.local, p.node) for p in site.run.places][3:] == [
        (3, 3, "n2"), (4, 0, "n1"), (5, 1, "n1"), (6, 2, "n1"),
    ]  # fmt: skip


def test_it_does_not_grow_by_itself_but_the_next_attempt_takes_what_is_back() -> None:
    site = Site(devices=FOUR)
    site.submit(per_node=4, least=2)
    site.settle()
    site.loom.ask(Fail(device="GPU-b"), "f")
    crash(site)
    site.loom.ask(Recover(device="GPU-b"), "r")
    site.settle(60, beating=True)
    assert (site.phase, site.run.world_size) == ("running", 3)
    crash(site)
    assert site.run.world_size == 4


def test_another_node_that_has_room_for_all_is_preferred_to_being_smaller() -> None:
    site = Site("n1", "n2", devices=FOUR)
    site.agents["n2"].devices = ("GPU-e", "GPU-f", "GPU-g", "GPU-h")
    site.hear()
    site.submit(per_node=4, least=1)
    site.settle()
    site.loom.ask(Fail(device="GPU-a"), "f")
    crash(site)
    assert (site.run.nodes, site.run.world_size) == (("n2",), 4)


def test_the_first_attempt_waits_a_while_for_all_of_it() -> None:
    site = Site("n1", cores=2)
    site.submit(nodes=2, min_nodes=1)
    site.settle(LAST_CALL - 1)
    assert site.phase == "submitted"
    there = phrase("nodes_there", nodes=[room("n1", 2, 2)], more=None)
    assert waiting(site) == phrase("waits_for_nodes", count=phrase("span", least=1, most=2), ranks=2, there=there)
    site.settle(2)
    assert (site.phase, site.run.world_size) == ("running", 2)


def test_the_first_attempt_waits_a_while_also_for_what_another_job_has() -> None:
    site = Site()
    site.submit(9, job="other", per_node=3)
    site.settle()
    site.submit(per_node=2, least=1)
    site.settle(LAST_CALL - 1)
    assert site.phase == "submitted"
    site.settle(2)
    assert (site.phase, site.run.world_size) == ("running", 1)


def test_a_weaver_that_has_just_begun_waits_for_the_agents_to_find_it() -> None:
    site = Site("n1", cores=2)
    site.submit(nodes=2, min_nodes=1)
    site.loom.cluster.runtime.blind_until = site.loom.now + LAST_CALL + 5
    site.settle(LAST_CALL + 8)
    assert site.phase == "submitted"
    site.settle(5)
    assert (site.phase, site.run.world_size) == ("running", 2)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"least": 3}, phrase("least_ranks_above_most", least=3, most=2)),
        ({"nodes": 2, "min_nodes": 3}, phrase("least_nodes_above_most", least=3, most=2)),
        ({"per_node": 9, "least": 5}, phrase("task_too_large", ranks=5, most=4, node="n1")),
    ],
)
def test_what_could_never_be_is_refused(task: dict[str, object], why: Phrase) -> None:
    answer = Site().submit(**task)  # type: ignore[arg-type]
    assert isinstance(answer, No)
    assert answer.why == why


def test_more_than_any_node_has_is_no_reason_to_refuse_what_may_be_smaller() -> None:
    site = Site()
    site.submit(per_node=9, least=3)
    site.settle(LAST_CALL + 1)
    assert (site.run.world_size, incidents(site)) == (4, [])

"""Jobs that name their devices: which rank is where, what is refused, and what is waited for."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.site import Site, waiting
from tests.examples import examples
from torchloom.core.jobs.device_groups import match
from torchloom.protocol.job_spec import DeviceGroup, Torchft
from torchloom.protocol.operator import Cancel, Done, Drain, No
from torchloom.protocol.phrase import Phrase, phrase

FOUR = tuple(f"GPU-{letter}" for letter in "abcd")


def group(*devices: int, node: str | None = None) -> DeviceGroup:
    return DeviceGroup(devices=devices, node=node)


def seats(site: Site, job: str = "mnist") -> list[tuple[int, int, str, str]]:
    return [(place.rank, place.local, place.node, place.device) for place in site.run_of(job).places]


def refused(site: Site, **task: object) -> Phrase:
    answer = site.submit(**task)
    assert isinstance(answer, No)
    assert isinstance(answer.why, Phrase)
    return answer.why


def two_nodes() -> Site:
    site = Site("n1", "n2", devices=FOUR)
    site.agents["n2"].devices = tuple(device.upper() for device in FOUR)
    site.hear()
    return site


# ── places ──


def test_ranks_follow_the_groups_each_with_the_device_it_names() -> None:
    site = two_nodes()
    site.submit(groups=(group(3, 1, node="n2"), group(0, 2, 1, node="n1")))
    site.settle()
    assert site.phase == "running"
    assert seats(site) == [
        (0, 0, "n2", "GPU-D"), (1, 1, "n2", "GPU-B"),
        (2, 0, "n1", "GPU-a"), (3, 1, "n1", "GPU-c"), (4, 2, "n1", "GPU-b"),
    ]  # fmt: skip
    assert site.run.world_size == site.run.task.world_size == 5
    (launch,) = site.agents["n1"].launches
    assert launch.host == "n2.local", "where the first rank is"


def test_without_devices_a_group_names_cores() -> None:
    site = Site(cores=2)
    site.submit(groups=(group(1),))
    site.settle()
    site.submit(2, job="other", groups=(group(1),))
    site.submit(3, job="third", groups=(group(0),))
    site.settle()
    assert (site.run_of("third").phase, site.run_of("third").places[0].slot) == ("running", 0)
    busy = phrase("of_node", node="n1", text=phrase("room_devices_busy", devices=[1], jobs=["mnist"]))
    there = phrase("nodes_there", nodes=[busy], more=None)
    assert waiting(site, "other") == phrase("waits_for_devices", devices=(1,), node="", there=there)


def test_a_group_without_a_node_gets_one_that_no_other_group_has() -> None:
    site = two_nodes()
    site.submit(groups=(group(0), group(0)))
    site.submit(2, job="other", groups=(group(1), group(1, node="n1")))
    site.settle()
    assert [place.node for place in site.run.places] == ["n1", "n2"]
    assert [place.node for place in site.run_of("other").places] == ["n2", "n1"]
    site.submit(3, job="third", groups=(group(2), group(2), group(2)))
    site.settle()
    assert waiting(site, "third") == phrase("waits_for_more_nodes", count=3)


def test_groups_of_different_sizes_are_given_the_nodes_that_suit_them_all() -> None:
    site = two_nodes()
    site.submit(9, job="other", groups=(group(2, 3, node="n2"),))
    site.settle()
    site.submit(groups=(group(0), group(0, 1, 2, 3)))
    site.settle()
    assert [place.node for place in site.run.places] == ["n2", "n1", "n1", "n1", "n1"]


def test_the_next_attempt_waits_for_the_same_devices() -> None:
    site = two_nodes()
    site.submit(groups=(group(2, node="n1"),))
    site.settle()
    site.loom.ask(Drain(node="n1"), "d")
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle(2)
    drained = phrase("of_node", node="n1", text=phrase("room_drained"))
    there = phrase("nodes_there", nodes=[drained], more=None)
    assert waiting(site) == phrase("waits_for_devices", devices=(2,), node="n1", there=there)
    site.loom.ask(Drain(node="n1", undo=True), "d")
    site.settle(2)
    assert seats(site) == [(0, 0, "n1", "GPU-c")]


def test_jobs_that_share_may_name_the_same_devices() -> None:
    site = two_nodes()
    for number, job in enumerate(("mnist", "other"), start=1):
        site.submit(number, job=job, share=True, groups=(group(0, 1, node="n1"), group(0, 1, node="n2")))
    site.submit(3, job="alone", groups=(group(1, node="n1"),))
    site.settle()
    assert seats(site) == seats(site, "other")
    assert site.run_of("alone").phase == "submitted"
    for number, job in enumerate(("mnist", "other"), start=5):
        site.tell(site.loom.ask(Cancel(request=f"{number:032x}", job=job), "c"))
    site.settle(1)
    assert site.run_of("alone").phase == "running"


# ── refused or waited for ──


def test_a_device_that_a_node_lacks_is_refused_with_what_there_is() -> None:
    site = two_nodes()
    there = [phrase("devices_of_node", node="n1", last=3, cores=False)]
    assert refused(site, groups=(group(1, 4, node="n1"),)) == phrase(
        "devices_missing", devices=[4], node="n1", there=there
    )
    site.agents["n2"].devices, site.agents["n2"].cores = (), 2
    site.hear()
    there.append(phrase("devices_of_node", node="n2", last=1, cores=True))
    assert refused(site, groups=(group(4),)) == phrase("devices_missing", devices=[4], node="", there=there)


def test_an_agent_that_is_not_there_yet_is_waited_for() -> None:
    site = Site("n1")
    assert isinstance(site.submit(groups=(group(0, node="n2"),)), Done)
    site.settle(1)
    silent = phrase("of_node", node="n2", text=phrase("room_silent"))
    there = phrase("nodes_there", nodes=[silent], more=None)
    assert waiting(site) == phrase("waits_for_devices", devices=(0,), node="n2", there=there)
    site.agents["n2"] = Site("n2").agents["n2"]
    site.settle(1)
    assert site.phase == "running"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"least": 1}, phrase("groups_not_with", setting="least")),
        ({"min_nodes": 1}, phrase("groups_not_with", setting="min_nodes")),
        ({"node": "n1"}, phrase("groups_not_with", setting="node")),
        ({"torchft": Torchft()}, phrase("groups_not_with", setting="torchft")),
        ({"attended": True}, phrase("groups_not_with", setting="attended")),
        ({"groups": (group(1, 1),)}, phrase("device_named_twice", devices=(1, 1))),
        ({"groups": (group(0, node="n1"), group(1, node="n1"))}, phrase("node_in_two_groups", node="n1")),
        ({"groups": (group(0, node="mine"),)}, phrase("node_serves_one_job", node="mine")),
    ],
)
def test_groups_that_make_no_sense_are_refused(task: dict[str, object], why: Phrase) -> None:
    site = Site("n1", "mine")
    site.agents["mine"].tied = True
    site.hear()
    assert refused(site, **{"groups": (group(0),), **task}) == why


# ── matching ──


@examples(300)
@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True), max_size=4))
def test_a_node_is_found_for_each_group_whenever_that_is_possible(wanted: list[list[str]]) -> None:
    chosen = match(wanted)
    fits = (
        all(node in nodes for node, nodes in zip(some, wanted, strict=False))
        for some in permutations("abcd", len(wanted))
    )
    assert bool(chosen) == (bool(wanted) and any(fits))
    assert len(set(chosen)) == len(chosen)
    assert all(node in nodes for node, nodes in zip(chosen, wanted, strict=False))

"""Where a run is placed: what finds room, what waits for it, and what is refused since it never could."""

from __future__ import annotations

import pytest

from tests.core.site import Site, a_node, room, waiting
from torchloom.protocol.job_spec import Rule
from torchloom.protocol.operator import Cancel, Drain, No
from torchloom.protocol.phrase import Phrase, phrase


def test_it_waits_for_room_and_begins_when_there_is() -> None:
    site = Site()
    site.submit(9, job="other", per_node=3)
    site.settle()
    site.submit()
    site.settle(5)
    assert site.phase == "submitted"
    assert waiting(site) == a_node(2, room("n1", 1, 4))
    site.tell(site.loom.ask(Cancel(request="c" * 32, job="other"), "to"))
    site.settle()
    assert site.phase == "running"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"cwd": "a\0b"}, phrase("nul_in_task")),
        ({"env": {"A=B": "1"}}, phrase("bad_variable_name", name="A=B")),
        ({"env": {"": "1", "A": "2"}}, phrase("bad_variable_name", name="")),
        ({"policy": (Rule(on="newer", do=("report",)),)}, phrase("event_unknown", event="newer")),
        ({"resume_arg": "--r '{path}"}, phrase("bad_resume_arg", value="--r '{path}", error="No closing quotation")),
        ({"node": "n1", "nodes": 2}, phrase("one_node_named", nodes=2)),
        ({"node": "n1", "per_node": 5}, phrase("task_too_large", ranks=5, most=4, node="n1")),
        ({"node": "mine"}, phrase("node_serves_one_job", node="mine")),
    ],
)
def test_what_could_never_be_started_is_refused(task: dict[str, object], why: Phrase) -> None:
    site = Site("n1", "mine")
    site.agents["mine"].tied = True
    site.hear()
    answer = site.submit(**task)  # type: ignore[arg-type]
    assert isinstance(answer, No)
    assert answer.why == why


def test_what_no_node_could_ever_take_is_refused() -> None:
    site = Site("n1", "n2")
    site.agents["n2"].cores = 8
    site.hear()
    answer = site.submit(per_node=9)
    assert isinstance(answer, No)
    assert answer.why == phrase("task_too_large", ranks=9, most=8, node="n2")


def test_a_node_that_no_agent_is_on_is_refused() -> None:
    answer = Site().submit(node="n9")
    assert isinstance(answer, No)
    assert answer.hint == phrase("agents_are_on", nodes=["n1"])


def test_a_named_node_has_to_have_room_too() -> None:
    site = Site("n1")
    site.submit(9, job="other", per_node=3)
    site.settle()
    site.submit(node="n1")
    site.settle(2)
    assert (site.phase, waiting(site)) == ("submitted", phrase("waits_for_room_on", ranks=2, node=room("n1", 1, 4)))


def test_a_node_that_a_job_has_left_keeps_nothing_ready_for_it() -> None:
    site = Site("n1", "n2")
    site.submit()
    site.settle()
    site.tell(site.loom.ask(Drain(node=site.run.nodes[0]), "to"))
    left = site.agents[site.run.nodes[0]]
    left.end(0, signal="SIGKILL")
    site.settle(2)
    assert site.run.nodes != (left.node,)
    assert [command.last for command in left.dismissed] == [True]


def test_of_two_that_wait_for_the_same_room_the_one_that_came_first_gets_it() -> None:
    site = Site()
    site.submit(9, job="other", per_node=4)
    site.settle()
    site.submit(1, per_node=4)
    site.loom.now += 1
    site.submit(2, job="later", per_node=4)
    site.tell(site.loom.ask(Cancel(request="c" * 32, job="other"), "to"))
    site.settle(1)
    assert [(run.name, run.phase) for run in site.loom.cluster.runs.by_name.values()] == [
        ("other", "cancelled"), ("mnist", "running"), ("later", "submitted"),
    ]  # fmt: skip


def test_each_rank_gets_a_device_of_its_own_and_none_that_another_job_has() -> None:
    site = Site(devices=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    site.submit(9, job="other", per_node=1)
    site.settle()
    site.submit(per_node=2)
    site.settle()
    assert [place.device for place in site.run.places] == ["GPU-b", "GPU-c"]
    site.agents["n1"].end(0, signal="SIGKILL")
    site.settle()
    assert [place.device for place in site.run.places] == ["GPU-b", "GPU-c"]


def test_the_agent_of_a_foreground_run_serves_no_one_else() -> None:
    site = Site("n1", "mine")
    site.agents["mine"].tied, site.agents["mine"].cores = True, 100
    site.hear()
    site.submit()
    site.settle()
    assert site.run.nodes == ("n1",)


def test_ranks_are_spread_over_nodes_the_ones_with_most_room_first() -> None:
    site = Site("n1", "n2", "n3")
    site.agents["n2"].cores = 8
    site.hear()
    site.submit(nodes=2)
    site.settle()
    assert [(p.rank, p.local, p.node) for p in site.run.places] == [
        (0, 0, "n2"), (1, 1, "n2"), (2, 0, "n1"), (3, 1, "n1"),
    ]  # fmt: skip
    assert {launch.host for agent in site.agents.values() for launch in agent.launches} == {"n2.local"}


def test_a_drained_node_gets_nothing_new_and_keeps_what_runs() -> None:
    site = Site("n1", "n2")
    site.agents["n1"].cores = 9
    site.loom.ask(Drain(node="n1"), "d")
    site.submit()
    site.settle()
    assert site.run.nodes == ("n2",)
    assert isinstance(site.loom.ask(Drain(node="n9")).answer, No)
    site.loom.ask(Drain(node="n1", undo=True))
    assert not site.loom.cluster.runs.drained

"""From rows to jobs: names, commands, arrivals, ports, and the nodes of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.errors import BadInput
from torchloom.job.workload import BadWorkload, PlannedJob, Problem, Workload
from torchloom.job.workload_file import plan_csv
from torchloom.job.workload_plan import NodeCapacity, PlanOptions, fit_to_nodes

HEAD = "arch,depth,batch,workers,output_folder,master,port,arrival_time,cuda_device,end_iter,submit_interval\n"
FIXTURE = (Path(__file__).parent.parent / "fixtures" / "workload.csv").read_text()


def plan(text: str = FIXTURE, overrides: Mapping[str, str] | None = None, **options: object) -> Workload:
    return plan_csv(text, "workload.csv", PlanOptions("/w", **options), overrides)  # type: ignore[arg-type]


def line(
    port: int = 0, arrival: str = "0", master: str = "n1", devices: str = "0", interval: str = "", folder: str = "a"
) -> str:
    return f"small,2,8,1,{folder},{master},{port},{arrival},{devices},5,{interval}\n"


def problems(text: str) -> list[Problem]:
    with pytest.raises(BadWorkload) as refused:
        plan(text)
    return list(refused.value.problems)


def test_a_row_becomes_a_task_with_its_devices_port_and_arrival() -> None:
    first = plan().jobs[0]
    assert (first.job, first.row, first.iterations, first.samples) == ("resnet-10-2", 2, 500, 256_000)
    task = first.task
    assert task.argv[:2] == ("-m", "torchloom.workloads.train")
    assert [task.argv[task.argv.index(name) + 1] for name in ("--arch", "--batch", "--workers", "--end-iter")] == [
        "resnet", "512", "16", "500",
    ]  # fmt: skip
    assert (task.port, task.delay, task.after, task.share, task.cwd) == (12448, 1.0, None, True, "/w")
    assert [(group.node, group.devices) for group in task.groups] == [("d3093", (0, 1)), (None, (0, 1))]


def test_jobs_that_share_an_output_folder_have_a_folder_of_their_own_in_it() -> None:
    folders = [job.task.checkpoint_dir for job in plan().jobs]
    assert folders == [
        f"trace/test-48worker-2node-mod3/{job}/checkpoints" for job in ("resnet-10-2", "vgg-11-3", "googlenet-1-4")
    ]


def test_a_prefix_begins_every_name_and_so_every_folder() -> None:
    job = plan(prefix="second").jobs[0]
    assert (job.job, job.output_folder) == ("second-resnet-10-2", "trace/test-48worker-2node-mod3/second-resnet-10-2")


def test_a_prefix_that_makes_a_name_too_long_is_refused() -> None:
    with pytest.raises(BadWorkload) as refused:
        plan(prefix="x" * 120)
    assert "is not a name of a job" in refused.value.problems[0].text


def test_a_script_of_the_user_receives_the_same_arguments() -> None:
    own = plan(command=("/w/mine.py",), arguments=("--quick",)).jobs[0].task.argv
    built_in = plan().jobs[0].task.argv
    assert own == ("/w/mine.py", *built_in[2:], "--quick")


def test_the_time_scale_divides_arrivals_and_intervals() -> None:
    text = HEAD + line(arrival="10") + line(interval="30") + line(interval="30")
    assert [job.arrival for job in plan(text, time_scale=10).jobs] == [1.0, 4.0, 7.0]
    assert [job.task.delay for job in plan(text, time_scale=10).jobs] == [1.0, 4.0, 7.0]


def test_jobs_are_in_the_order_of_arrival_and_otherwise_of_the_file() -> None:
    text = HEAD + line(arrival="5") + line(arrival="1") + line(arrival="5") + line(arrival="0")
    assert [job.row for job in plan(text).jobs] == [5, 3, 2, 4]


# ── ports ──


def test_rows_that_run_one_after_another_may_share_a_port() -> None:
    jobs = plan(HEAD + "".join(line(5336, interval="30") for _ in range(5))).jobs
    assert [job.task.after for job in jobs] == [None, *(job.job for job in jobs[:-1])]


@pytest.mark.parametrize("masters", [("n1", "n1"), ("", ""), ("", "n1")])
def test_rows_on_one_port_that_can_overlap_on_one_master_are_refused(masters: tuple[str, str]) -> None:
    (problem,) = problems(HEAD + line(5336, master=masters[0]) + line(5336, arrival="9", master=masters[1]))
    assert (problem.row, problem.column) == (3, "port")
    assert problem.text.startswith("5336 is also that of row 2")
    assert "submit_interval" in problem.remedy


def test_rows_on_other_masters_or_without_a_port_do_not_meet() -> None:
    assert len(plan(HEAD + line(5336) + line(5336, master="n2") + line(0) + line(0)).jobs) == 4


def test_two_chains_on_one_port_are_refused() -> None:
    text = HEAD + line(5336) + line(5336, interval="1") + line(5336) + line(5336, interval="1")
    assert [problem.row for problem in problems(text)] == [4]


# ── the nodes of a cluster ──

NODES = {"n1": NodeCapacity("10.0.0.1", 2, 8), "n2-cluster-edu": NodeCapacity("10.0.0.2", 0, 4)}


def fit(*lines: str) -> tuple[list[PlannedJob], list[Problem]]:
    return fit_to_nodes(plan(HEAD + "".join(lines)).jobs, NODES)


@pytest.mark.parametrize(
    ("written", "node"),
    [
        ("n1", "n1"),
        ("n2", "n2-cluster-edu"),
        ("n2.cluster.edu", "n2-cluster-edu"),
        ("10.0.0.2", "n2-cluster-edu"),
        ("", None),
    ],
)
def test_a_node_is_named_as_its_agent_or_by_its_address_or_host(written: str, node: str | None) -> None:
    jobs, problems = fit(line(master=written))
    assert problems == []
    assert jobs[0].task.groups[0].node == node


@pytest.mark.parametrize(
    ("row", "column", "said", "remedy"),
    [
        (line(master="n3"), "master", "there is no node n3", "n1"),
        (line(master="", devices="{'n1':[0] 'n9':[0]}"), "cuda_device", "there is no node n9", "n1"),
        (line(devices="2"), "cuda_device", "n1 does not have device 2", "0 to 1"),
        (line(master="", devices="4"), "cuda_device", "no node has device 4", "0 to 3"),
        (line(devices='["0" "0" "0"]'), "cuda_device", "3 groups of devices, and there are 2 nodes", "loom agent"),
    ],
)
def test_what_the_cluster_does_not_have_is_named(row: str, column: str, said: str, remedy: str) -> None:
    _, found = fit(line(), row)
    assert [(problem.row, problem.column, problem.text) for problem in found] == [(3, column, said)]
    assert remedy in found[0].remedy


# ── for any rows ──


@st.composite
def texts(draw: st.DrawFn) -> str:
    row = st.builds(
        line,
        port=st.sampled_from([0, 5336, 5337]),
        arrival=st.sampled_from(["0", "1", "2.5", "7"]),
        master=st.sampled_from(["", "n1", "n2"]),
        devices=st.sampled_from(["0", "0 1", '["0" "1"]']),
        interval=st.sampled_from(["", "3"]),
        folder=st.sampled_from(["a", "b/c"]),
    )
    return HEAD + "".join(draw(st.lists(row, min_size=1, max_size=8)))


@given(texts(), st.floats(0.1, 100))
def test_a_plan_has_unique_names_and_folders_sorted_arrivals_and_no_port_twice_at_a_time(
    text: str, time_scale: float
) -> None:
    try:
        jobs = plan(text, time_scale=time_scale).jobs
    except BadWorkload:
        assert {problem.column for problem in problems(text)} == {"port"}
        return
    assert len({job.job for job in jobs}) == len({job.task.checkpoint_dir for job in jobs}) == len(jobs)
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    before = {job.job: job.task.after for job in jobs}
    for index, one in enumerate(jobs):
        for other in jobs[:index]:
            masters = {one.task.groups[0].node, other.task.groups[0].node}
            if one.task.port and one.task.port == other.task.port and (len(masters) == 1 or None in masters):
                assert _waits_for(one.job, other.job, before) or _waits_for(other.job, one.job, before)


def _waits_for(job: str | None, other: str, before: Mapping[str, str | None]) -> bool:
    while job is not None:
        job = before[job]
        if job == other:
            return True
    return False


@given(st.text())
def test_any_text_is_a_plan_or_is_refused(text: str) -> None:
    with contextlib.suppress(BadInput):
        assert plan(text).jobs

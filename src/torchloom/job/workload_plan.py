"""From the rows of a workload to jobs: names, commands, arrivals, ports; and whether a cluster can run them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from torchloom.job.job_file_reader import make_task
from torchloom.job.workload import PlannedJob, Problem, Row
from torchloom.protocol.ids import NAME
from torchloom.protocol.job_spec import DeviceGroup, Task
from torchloom.shared.suggestions import did_you_mean
from torchloom.threadlet.process.identity import sanitised

TRACE = "trace"
"""The folder below which all output folders are, as with torchloader."""
TRAIN = ("-m", "torchloom.workloads.train")


@dataclass(frozen=True)
class PlanOptions:
    """How a file is submitted."""

    folder: str
    """That relative paths start from."""
    prefix: str = ""
    time_scale: float = 1.0
    command: tuple[str, ...] = TRAIN
    """What every row runs."""
    arguments: tuple[str, ...] = field(default=())
    """Further arguments of it."""


class NodeCapacity(NamedTuple):
    """What a node has, as far as a plan depends on it."""

    host: str
    devices: int
    cores: int


def plan_rows(rows: Iterable[Row], options: PlanOptions) -> list[PlannedJob]:
    """The jobs of rows, in the order in which they arrive; rows that arrive together stay in the order of the file."""
    rows = list(rows)
    names = {row.row: _prefixed(options.prefix, f"{row.arch}-{row.depth}-{row.row}") for row in rows}
    return sort_by_arrival(_plan_row(row, names, options) for row in rows)


def sort_by_arrival(jobs: Iterable[PlannedJob]) -> list[PlannedJob]:
    return sorted(jobs, key=lambda job: job.arrival)


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}-{name}" if prefix else name


def _plan_row(row: Row, names: Mapping[int, str], options: PlanOptions) -> PlannedJob:
    job = names[row.row]
    arrival = row.arrival / options.time_scale
    trace = f"{TRACE}/{row.output_folder}/{job}"
    task = make_task(
        {},
        argv=(*options.command, *row_arguments(row, trace), *options.arguments),
        cwd=options.folder,
        checkpoint_dir=f"{trace}/checkpoints",
        threads_per_rank=1,  # jobs share the cores of a node
        groups=row.groups,
        port=row.port,
        delay=arrival,
        after=names.get(row.follows),
        share=True,
        samples=row.iterations * row.batch,
    )
    return PlannedJob(
        job=job,
        row=row.row,
        arrival=arrival,
        master=row.master,
        batch=row.batch,
        workers=row.workers,
        iterations=row.iterations,
        output_folder=trace,
        task=task,
    )


def row_arguments(row: Row, trace: str) -> tuple[str, ...]:
    """The columns that the training script needs, as its arguments."""
    values = {
        "arch": row.arch,
        "depth": row.depth,
        "batch": row.batch,
        "workers": row.workers,
        "output-folder": trace,
        "start-iter": row.start_iter,
        "start-epoch": row.start_epoch,
        "end-iter": row.end_iter,
        "end-epoch": row.end_epoch,
    }
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


# ── what cannot be ──


def check_names(jobs: Iterable[PlannedJob]) -> list[Problem]:
    return [
        Problem(job.row, "", f"{job.job!r} is not a name of a job", "1 to 128 characters: a shorter --prefix")
        for job in jobs
        if not NAME.fullmatch(job.job)
    ]


def check_ports(jobs: Sequence[PlannedJob], column: str = "port") -> list[Problem]:
    """Jobs that meet on one port of one master, and of which none waits for the other."""
    by_port: dict[int, list[PlannedJob]] = defaultdict(list)
    for job in jobs:
        if job.task.port:
            by_port[job.task.port].append(job)
    before = {job.job: job.task.after for job in jobs}
    problems = []
    for port, sharing in by_port.items():
        by_master: dict[str, list[PlannedJob]] = defaultdict(list)
        anywhere = any(not _master(job.task) for job in sharing)  # it may be any node, also the same one
        for job in sharing:
            by_master["" if anywhere else _master(job.task)].append(job)
        for master, together in by_master.items():
            where = f"on {master}" if master else "perhaps on one node"
            problems += [
                Problem(
                    job.row,
                    column,
                    f"{port} is also that of row {other.row}, {where}, at the same time",
                    "another port, no port, or submit_interval: the rows then run one after another",
                )
                for job, other in _overlapping(together, before)
            ]
    return sorted(problems, key=lambda problem: problem.row)


def _master(task: Task) -> str:
    return (task.groups[0].node if task.groups else task.node) or ""


def _overlapping(jobs: Sequence[PlannedJob], before: Mapping[str, str | None]) -> list[tuple[PlannedJob, PlannedJob]]:
    """Each job that may run while another one of them does, with that one."""
    by_name = {job.job: job for job in jobs}
    following: dict[str, PlannedJob] = {}
    """By the job that each of them waits for, directly or through others; "" if it waits for none of them."""
    pairs = []
    for job in jobs:
        waits_for, seen = before[job.job], {job.job}
        while waits_for is not None and waits_for not in by_name and waits_for not in seen:
            seen.add(waits_for)
            waits_for = before.get(waits_for)
        key = waits_for if waits_for in by_name else ""
        if (other := following.get(key or "")) is not None:
            pairs.append((job, other))
        else:
            following[key or ""] = job
    return pairs


# ── the nodes of a cluster ──


def fit_to_nodes(
    jobs: Iterable[PlannedJob], nodes: Mapping[str, NodeCapacity]
) -> tuple[list[PlannedJob], list[Problem]]:
    """The jobs with nodes as the cluster calls them, and what the cluster does not have.

    A file may name a node by its address, or by the first part of its host name.
    """
    fitted, problems = [], []
    for job in jobs:
        groups: list[DeviceGroup] = []
        for place, group in enumerate(job.task.groups):
            name = _find_node(group.node, nodes)
            if group.node is not None and name is None:
                written = job.master if place == 0 and job.master else group.node
                column = "master" if place == 0 and job.master else _devices_column(job)
                problems.append(
                    Problem(job.row, column, f"there is no node {written}", did_you_mean(written, [*nodes]))
                )
            groups.append(replace(group, node=name or group.node))
        problems += _check_devices(job, groups, nodes)
        fitted.append(replace(job, task=replace(job.task, groups=tuple(groups))))
    return fitted, problems


def _devices_column(job: PlannedJob) -> str:
    return "cuda_device" if job.batch is not None else "devices"


def _find_node(name: str | None, nodes: Mapping[str, NodeCapacity]) -> str | None:
    if name is None or name in nodes:
        return name
    by_host = [node for node, capacity in nodes.items() if sanitised(capacity.host) == name]
    by_label = [node for node in nodes if node.startswith(f"{name}-")] or [
        node for node in nodes if name.startswith(f"{node}-")
    ]
    near = by_host or by_label
    return near[0] if len(near) == 1 else None


def _check_devices(job: PlannedJob, groups: Sequence[DeviceGroup], nodes: Mapping[str, NodeCapacity]) -> list[Problem]:
    sizes = {node: capacity.devices or capacity.cores for node, capacity in nodes.items()}
    if len(groups) > len(nodes):
        text = f"{len(groups)} groups of devices, and there are {len(nodes)} nodes"
        return [Problem(job.row, _devices_column(job), text, "fewer groups, or `loom agent` on more nodes")]
    problems = []
    for group in groups:
        if group.node is not None and group.node not in sizes:
            continue  # which is a problem of its own
        most = max(sizes.values()) if group.node is None else sizes[group.node]
        where = "no node has" if group.node is None else f"{group.node} does not have"
        if (device := max(group.devices)) >= most:
            remedy = f"0 to {most - 1}" + (", which are cores" if not any(c.devices for c in nodes.values()) else "")
            problems.append(Problem(job.row, _devices_column(job), f"{where} device {device}", remedy))
    return problems

"""Files with several jobs: torchloader's workload.csv, and TOML with a table for each job.

[[job]]                            # the settings of a job.toml, and of these any
script = "train.py"
arrival_time = 60                  # seconds after the start of the file; default: 0
devices = [[0, 1], [0, 1]]         # as the column cuda_device, or as text; shared with other jobs
master = "n1"                      # the node of rank 0
port = 12448                       # where ranks meet at first; default: a free one
after = "mnist"                    # a job of the file that must have ended before
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from torchloom.errors import BadInput
from torchloom.job.device_lists import make_groups, node_name, parse_groups
from torchloom.job.job_file_reader import read_job, read_toml
from torchloom.job.options_from_spec import read_table
from torchloom.job.workload import LONGEST, BadWorkload, PlannedJob, Problem, Workload
from torchloom.job.workload_plan import PlanOptions, check_names, check_ports, plan_rows, sort_by_arrival
from torchloom.job.workload_rows import read_rows
from torchloom.protocol.ids import NAME
from torchloom.protocol.job_spec import DeviceGroup, Task
from torchloom.threadlet.process.identity import sanitised

MOST_BYTES = 64 * 1024 * 1024
MOST_JOBS = 100_000
TABLES = "job"
"""The name of the tables. In a file with one job, `job` is its name."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What a [[job]] says beside the settings of a job.toml."""

    arrival_time: Annotated[float, Meta(ge=0, le=LONGEST)] = 0.0
    """Seconds after the start of the file."""
    devices: Any = None
    """A list or a table of devices, or such a list as text."""
    master: str = ""
    """The node of rank 0."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Where the ranks of the first attempt meet; 0: any free port."""
    after: str = ""
    """A job of the file that must have ended before this one starts."""


def is_workload(path: Path) -> bool:
    """Whether a file has rows or tables of jobs. A file that cannot be read as TOML is taken for one job."""
    if path.suffix.lower() == ".csv":
        return True
    try:
        return isinstance(read_toml(path).get(TABLES), list)
    except BadInput:
        return False


def read_workload(path: Path, options: PlanOptions, overrides: Mapping[str, str] | None = None) -> Workload:
    """The jobs of a file; BadWorkload lists all that is wrong with it."""
    if path.suffix.lower() == ".csv":
        return plan_csv(_read_text(path), path.name, options, overrides)
    if overrides or options.arguments or options.command != PlanOptions("").command:
        raise BadInput(
            f"{path.name} says itself what its jobs run",
            hint="--set, --args and --script are for the rows of a .csv file",
        )
    return plan_tables(read_toml(path)[TABLES], path, options)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{path} is larger than {MOST_BYTES // 2**20} MiB")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}", hint="`loom submit workload.csv`") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error}") from error


def plan_csv(text: str, name: str, options: PlanOptions, overrides: Mapping[str, str] | None = None) -> Workload:
    """The jobs of the text of a .csv file."""
    rows = read_rows(text, overrides)
    jobs = [] if rows.problems else plan_rows(rows.rows, options)
    return _checked(name, jobs, rows.problems, rows.warnings)


def _checked(
    name: str, jobs: Sequence[PlannedJob], problems: Sequence[Problem], warnings: Sequence[Problem]
) -> Workload:
    problems = [*problems, *check_names(jobs), *check_ports(jobs)]
    if len(jobs) > MOST_JOBS:
        problems.append(Problem(jobs[-1].row, "", f"there are {len(jobs):,} jobs", f"at most {MOST_JOBS:,} in a file"))
    if problems:
        raise BadWorkload(name, problems)
    return Workload(jobs=tuple(jobs), warnings=tuple(warnings))


# ── TOML ──


def plan_tables(tables: Any, path: Path, options: PlanOptions) -> Workload:
    """The jobs of the tables of a TOML file, in the order in which they arrive."""
    if not isinstance(tables, list) or not tables:
        raise BadInput(f"{path.name} has no jobs", hint="begin each with [[job]]")
    jobs: list[PlannedJob] = []
    problems: list[Problem] = []
    warnings: list[Problem] = []
    used: Counter[str] = Counter()
    for row, table in enumerate(tables, start=1):
        try:
            job = _plan_table(table, row, path, options)
        except BadInput as error:
            problems.append(Problem(row, "", error.message, error.hint))
            continue
        used[job.job] += 1
        if used[job.job] > 1:
            renamed = next(name for name in _numbered(job.job, used[job.job]) if not used[name])
            used[renamed] += 1
            text = f"{job.job} is also the name of a job before; this one is called {renamed}"
            warnings.append(Problem(row, "job", text))
            job = replace(job, job=renamed)
        jobs.append(job)
    problems += [*_check_order(jobs), *_check_folders(jobs)] if not problems else []
    return _checked(path.name, sort_by_arrival(jobs), problems, warnings)


def _numbered(name: str, first: int) -> Iterator[str]:
    number = first
    while True:
        yield f"{name}-{number}"
        number += 1


def _plan_table(table: Any, row: int, path: Path, options: PlanOptions) -> PlannedJob:
    if not isinstance(table, dict):
        raise BadInput("it is no table", hint="begin each job with [[job]]")
    own = {name: table[name] for name in Arrival.__struct_fields__ if name in table}
    arrival = read_table(own, Arrival)
    rest = {name: value for name, value in table.items() if name not in own}
    name, task = read_job(rest, "the job", path.parent, f"{sanitised(path.stem) or 'job'}-{row}")
    prefix = f"{options.prefix}-" if options.prefix else ""
    groups = _groups(arrival)
    if groups:
        if {"nnodes", "nproc_per_node", "node"}.intersection(table) or task.torchft is not None:
            raise BadInput(
                "devices say how many ranks there are, and where",
                hint="leave out nnodes, nproc_per_node, node and [torchft], or devices",
            )
        task = replace(task, groups=groups, share=True)
    seconds = arrival.arrival_time / options.time_scale
    after = f"{prefix}{arrival.after}" if arrival.after else None
    if after is not None and not NAME.fullmatch(after):
        raise BadInput(f"after = {arrival.after[:40]!r} is not the name of a job", hint="that of a [[job]]")
    task = replace(task, port=arrival.port, delay=seconds, after=after)
    return PlannedJob(job=f"{prefix}{name}", row=row, arrival=seconds, master=arrival.master, task=task)


def _groups(arrival: Arrival) -> tuple[DeviceGroup, ...]:
    if arrival.devices is None:
        if arrival.master:
            raise BadInput("master without devices", hint='node = "n1" lets a job run on one node')
        return ()
    groups = parse_groups(arrival.devices) if isinstance(arrival.devices, str) else make_groups(arrival.devices)
    if not arrival.master:
        return groups
    first, names = node_name(arrival.master), [group.node for group in groups]
    if not any(names):
        return (replace(groups[0], node=first), *groups[1:])
    if first not in names:
        raise BadInput(f"master {arrival.master} is not among the nodes of devices", hint="one of them")
    return tuple(sorted(groups, key=lambda group: group.node != first))


def _check_order(jobs: Sequence[PlannedJob]) -> Iterator[Problem]:
    """A job can only wait for one that is before it in the file, so that no two wait for each other."""
    before: list[str] = []
    for job in jobs:
        if job.task.after is not None and job.task.after not in before:
            hint = f"one of {', '.join(before[-8:])}" if before else "the first job waits for none"
            yield Problem(job.row, "after", f"there is no job {job.task.after} before it in the file", hint)
        before.append(job.job)


def _check_folders(jobs: Sequence[PlannedJob]) -> Iterator[Problem]:
    """Two jobs that save into one folder would resume from each other's checkpoints."""
    first: dict[Path, PlannedJob] = {}
    for job in jobs:
        if not (folder := _checkpoint_folder(job.task)):
            continue
        other = first.setdefault(folder, job)
        if other is not job:
            text = f"{job.task.checkpoint_dir} is also the folder of job {other.row}"
            yield Problem(job.row, "checkpoint_dir", text, "a folder for each job")


def _checkpoint_folder(task: Task) -> Path | None:
    return Path(task.cwd, task.checkpoint_dir) if task.checkpoint_dir else None

"""`loom submit` of a file with several jobs: plan, check, submit in the order of arrivals, and follow all of them."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from torchloom.cli.verb_call import Call
from torchloom.cli.verbs.job_traces import WorkloadTraces
from torchloom.errors import BadInput, Refused, TorchLoomError
from torchloom.job.workload import BadWorkload, PlannedJob, Workload
from torchloom.job.workload_file import read_workload
from torchloom.job.workload_plan import TRAIN, NodeCapacity, PlanOptions, fit_to_nodes
from torchloom.protocol.ids import check_name
from torchloom.protocol.job_spec import Task
from torchloom.protocol.operator import SetSchedule, Submit
from torchloom.protocol.scheduling import QuerySchedule, ScheduleView
from torchloom.protocol.views import NodeView, RunView
from torchloom.views import workload_tables
from torchloom.views.job_runs import are_over, describe_run, group_code, replicas
from torchloom.views.schedule_tables import HINT
from torchloom.views.wording.phrases import render

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient

_POLL_SECONDS = 0.5
_NAMES_SHOWN = 8


class SubmittedJob(msgspec.Struct, frozen=True):
    """What `-o json` shows of a job that was submitted, or refused."""

    job: str
    row: int
    arrival: float
    refused: str = ""


def submit_workload(call: Call, with_options: Callable[[Task], Task]) -> int:
    """The verb, for a file with several jobs; `with_options` applies to each what else was typed."""
    workload = _read(call, with_options)
    if call.args.dry_run:
        return _show_plan(call, workload)
    _note_warnings(call, workload)

    async def work(weaver: WeaverClient) -> int:
        planned = await _check(call, weaver, workload)
        await _set_policy(call, weaver)
        if not call.args.wait:
            refused = await _submit_all(call, weaver, planned)
            await _note_policy(call, weaver)
            return Refused.exit_code if refused else 0
        traces = WorkloadTraces(call, weaver, planned)
        try:
            await traces.start()
            refused = await _submit_all(call, weaver, planned)
            await _note_policy(call, weaver)
            accepted = [job for job in planned if job.job not in refused]
            code = await _follow_all(call, weaver, accepted, traces) if accepted else 0
        finally:
            traces.close()
        return code or (Refused.exit_code if refused else 0)

    return call.query(work, "operator", patience=5.0)


# ── the plan ──


def _read(call: Call, with_options: Callable[[Task], Task]) -> Workload:
    path, args = Path(call.args.file), call.args
    if args.job:
        raise BadInput("--job names one job", hint="--prefix begins the names of all jobs of the file")
    if args.prefix:
        check_name("prefix", args.prefix)
    options = PlanOptions(
        folder=str(path.parent.absolute()),
        prefix=args.prefix,
        time_scale=args.time_scale,
        command=(str(Path(args.script).absolute()),) if args.script else TRAIN,
        arguments=tuple(_words(args.args)),
    )
    try:
        workload = read_workload(path, options, dict(_column(text) for text in args.set))
    except BadWorkload as error:
        _note_problems(call, error)
        raise
    return replace(workload, jobs=tuple(replace(job, task=with_options(job.task)) for job in workload.jobs))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--args {text!r}: {error}", hint='--args "--scale 0.1 --sample-seconds 0.01"') from error


def _column(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadInput(f"--set {text!r}", hint="--set COLUMN=VALUE, for example --set end_iter=20")
    return name.strip().lower(), value.strip()


def _note_problems(call: Call, error: BadWorkload) -> None:
    if len(error.problems) > 1:
        for line in workload_tables.problems(error.problems):
            call.note(f"loom: {line}")


def _note_warnings(call: Call, workload: Workload) -> None:
    for line in workload_tables.problems(workload.warnings, "warning: "):
        call.note(f"loom: {line}")


def _show_plan(call: Call, workload: Workload) -> int:
    """The plan, against the nodes of the control plane if one answers."""
    try:
        nodes = call.query(lambda weaver: weaver.nodes())
    except TorchLoomError:
        nodes = ()
    jobs = _fitted(call, workload, nodes)
    if not nodes:
        call.note("loom: no control plane with nodes answers, so nodes and devices are not checked")
    _note_warnings(call, workload)

    def lines() -> list[str]:
        drawn = workload_tables.timeline(jobs, call.screen)
        return [*workload_tables.plan(jobs, call.screen), *([""] if drawn else []), *drawn]

    return call.show({"jobs": jobs, "warnings": workload.warnings}, lines)


def _fitted(call: Call, workload: Workload, nodes: Sequence[NodeView]) -> Sequence[PlannedJob]:
    """The jobs as these nodes can run them; BadWorkload lists what they cannot."""
    if not nodes:
        return workload.jobs
    capacities = {
        view.node: NodeCapacity(view.beat.host, len(view.beat.devices), view.beat.cores)
        for view in nodes
        if not view.beat.tied
    }
    jobs, problems = fit_to_nodes(workload.jobs, capacities)
    if problems:
        error = BadWorkload(Path(call.args.file).name, problems)
        _note_problems(call, error)
        raise error
    return jobs


# ── submitting ──


async def _check(call: Call, weaver: WeaverClient, workload: Workload) -> Sequence[PlannedJob]:
    """The jobs as the nodes can run them. Raises if one of them is there already, before any is submitted."""
    jobs = _fitted(call, workload, await weaver.nodes())
    names = {job.job for job in jobs}
    running = {view.job for view in (await weaver.cluster(most=0)).jobs if view.phase == "running"}
    taken = sorted(names & running)
    for name in sorted(names - running):
        runs = (await weaver.runs(name)).runs
        if runs and not are_over(runs):
            taken.append(name)
    if taken:
        more = f" and {len(taken) - _NAMES_SHOWN} more" if len(taken) > _NAMES_SHOWN else ""
        raise Refused(
            f"{call.args.file} has jobs that run or wait already: {', '.join(taken[:_NAMES_SHOWN])}{more}",
            hint="`loom cancel` ends a job; --prefix NAME submits the file under other names",
            code="run_exists",
        )
    folder = Path(workload.jobs[0].task.cwd)
    resuming = [job for job in jobs if job.output_folder and any((folder / job.task.checkpoint_dir).glob("step-*"))]
    if resuming:
        which = "1 job resumes" if len(resuming) == 1 else f"{len(resuming):,} jobs resume"
        call.note(f"loom: {which} from checkpoints of an earlier run; --prefix NAME begins new folders")
    return jobs


async def _set_policy(call: Call, weaver: WeaverClient) -> None:
    """Before the first job arrives, so that all of them run under it."""
    from torchloom.client import operator

    if call.args.policy is not None:
        done = await weaver.ask(SetSchedule(policy=call.args.policy, operator=operator()), call.args.timeout)
        call.note(f"loom: {render(done.text)}")


async def _note_policy(call: Call, weaver: WeaverClient) -> None:
    """Loaders of these jobs are not moved by default, which the user may not know."""
    if call.args.policy is None and (await weaver.look(QuerySchedule(), ScheduleView)).rules.policy == "off":
        call.note(f"loom: each job keeps the loaders that it requests; {HINT}")


async def _submit_all(call: Call, weaver: WeaverClient, jobs: Sequence[PlannedJob]) -> Mapping[str, str]:
    """Submit every job, in the order of arrivals; those that were refused, with the reason."""
    from torchloom.client import operator
    from torchloom.launcher.progress import StatusLine

    by, began, line = operator(), time.monotonic(), StatusLine()
    refused: dict[str, str] = {}
    for count, job in enumerate(jobs, start=1):
        # What was submitted before has taken time, and arrivals count from the beginning.
        task = replace(job.task, delay=max(0.0, job.arrival - (time.monotonic() - began)))
        try:
            await weaver.ask(Submit(request=uuid4().hex, job=job.job, task=task, operator=by), call.args.timeout)
        except Refused as error:
            refused[job.job] = error.message
            line.hide()
            call.note(f"loom: {job.job} (row {job.row}) is refused: {error.message}")
            if error.hint:
                call.note(f"  → {error.hint}")
        line.text = f"{count:,} of {len(jobs):,} jobs submitted"
        line.show()
    line.hide()
    if not (call.args.wait and call.json):  # one document, at the end
        listed = [SubmittedJob(job.job, job.row, job.arrival, refused.get(job.job, "")) for job in jobs]
        call.show({"jobs": listed}, lambda: _summary(jobs, refused))
    return refused


def _summary(jobs: Sequence[PlannedJob], refused: Mapping[str, str]) -> list[str]:
    from torchloom.views.format.numbers import delay

    submitted = [job for job in jobs if job.job not in refused]
    text = f"{len(submitted):,} of {len(jobs):,} jobs are submitted" if refused else f"{len(jobs):,} jobs are submitted"
    if submitted:
        text += f"; the last arrives after {delay(submitted[-1].arrival)}"
    return [text]


# ── following ──


async def _follow_all(call: Call, weaver: WeaverClient, jobs: Sequence[PlannedJob], traces: WorkloadTraces) -> int:
    """Report the states of all jobs until they have ended, then show how each went and where the pictures are.

    The exit code is that of the first job that failed.
    """
    began = time.monotonic()
    runs: dict[str, Sequence[RunView]] = {}
    reported: dict[str, str] = {}
    while any(not are_over(runs.get(job.job, ())) for job in jobs):
        for job in jobs:
            arrived = time.monotonic() >= began + job.arrival
            if arrived and not are_over(runs.get(job.job, ())):
                runs[job.job] = (await weaver.runs(job.job)).runs or runs.get(job.job, ())
                text = "; ".join(describe_run(run) for run in replicas(runs[job.job]))
                if text != reported.get(job.job):
                    reported[job.job] = text
                    call.note(f"loom: {text}")
        await asyncio.sleep(_POLL_SECONDS)
    start = min(run.submitted for views in runs.values() for run in views)  # by the clock of the weaver
    rows = [workload_tables.finish_of(job, replicas(runs[job.job]), start) for job in jobs]
    pictures = [str(picture) for picture in await traces.finish()]
    call.show({"jobs": rows, "pictures": pictures}, lambda: [*workload_tables.finishes(rows, call.screen), *pictures])
    return next((code for job in jobs if (code := group_code(runs[job.job]))), 0)

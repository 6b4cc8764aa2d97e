"""`loom trace`: write the traces of jobs, or draw their picture again; and the traces of `loom submit --wait`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput, TorchLoomError
from torchloom.job.workload import PlannedJob
from torchloom.job.workload_plan import TRACE
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    import asyncio

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.traces.trace_follower import TraceFollower

_LAST_LOOKS, _LAST_PAUSE = 10, 0.2
"""After all jobs have ended, for what their last seconds left."""


def add(verbs: Verbs) -> None:
    verb = verbs["trace"].define(
        trace, "loom trace mnist cifar --folder trace/monday", "loom trace --draw trace/monday"
    )
    verb.add_job("jobs", nargs="*", help="Jobs to follow")
    verb.add_argument(
        "--folder", default="", metavar="DIR", help="Write the trace of each job to DIR/JOB; default: trace"
    )
    verb.add_argument("--draw", default="", metavar="DIR", help="Draw DIR/timeline.svg again from the traces below it")


def trace(call: Call) -> int:
    """Writes CSV files and a picture, until all jobs have ended or Ctrl-C. Started again, it continues the same files.
    What happened before it was started is taken from the log. docs/workloads.md explains the files.
    """
    args = call.args
    if args.draw:
        if args.jobs or args.folder:
            raise BadInput("--draw takes no jobs and no --folder", hint="loom trace --draw DIR")
        return _draw(call, Path(args.draw))
    if not args.jobs:
        raise BadInput("which jobs?", hint="loom trace JOB…; `loom jobs` lists them")
    folder = Path(args.folder or TRACE)
    return call.query(lambda weaver: _follow(call, weaver, list(dict.fromkeys(args.jobs)), folder), patience=5.0)


def _draw(call: Call, folder: Path) -> int:
    from torchloom.traces.timeline_picture import draw_folder

    try:
        picture = draw_folder(folder)
    except OSError as error:
        raise TorchLoomError(f"cannot draw {folder}: {error.strerror or error}") from error
    if picture is None:
        raise BadInput(f"there is no trace in {folder}", hint="loom trace JOB --folder DIR, or loom submit … --wait")
    return call.show({"picture": str(picture)}, lambda: [str(picture)])


async def _follow(call: Call, weaver: WeaverClient, jobs: Sequence[str], folder: Path) -> int:
    from torchloom.traces.trace_follower import TraceFollower

    submitted = {job: await _submitted(weaver, job) for job in jobs}
    warn = lambda text: call.note(f"loom: {text}")  # noqa: E731
    follower = TraceFollower(weaver, {job: folder / job for job in jobs}, {folder}, warn)
    pictures: Sequence[Path] = ()
    try:
        await follower.start_from(submitted)
        if not follower.are_over:
            call.note(f"loom: writing the trace of {', '.join(jobs)} to {folder}; Ctrl-C ends it")
        await follower.follow()
    finally:
        pictures = follower.close()
    document = {"folders": follower.folders, "pictures": [str(picture) for picture in pictures]}
    return call.show(document, lambda: map(str, pictures))


async def _submitted(weaver: WeaverClient, job: str) -> float:
    """When the job was submitted; when its first rank joined, if torchLoom did not start it."""
    runs = (await weaver.runs(job)).runs
    if runs:
        return min(run.submitted for run in runs)
    jobs = (await weaver.cluster(most=0)).jobs
    began = next((view.began for view in jobs if view.job == job), None)
    if began is None:
        raise unknown("job", job, [view.job for view in jobs])
    return began


class WorkloadTraces:
    """The traces that `loom submit --wait` writes beside waiting. No trouble with them ends the waiting."""

    def __init__(self, call: Call, weaver: WeaverClient, jobs: Sequence[PlannedJob]) -> None:
        from torchloom.traces.trace_follower import TraceFollower

        stem = Path(call.args.file).stem
        folders = {job.job: Path(job.task.cwd, job.output_folder or f"{TRACE}/{stem}/{job.job}") for job in jobs}
        pictures = {folder.parent for folder in folders.values()}
        self._call = call
        self._follower: TraceFollower = TraceFollower(weaver, folders, pictures, self._warn)
        self._following: asyncio.Task[None] | None = None
        self._pictures: list[Path] | None = None

    def _warn(self, text: str) -> None:
        self._call.note(f"loom: {text}")

    async def start(self) -> None:
        """Before the jobs are submitted."""
        import asyncio

        try:
            await self._follower.start()
        except TorchLoomError as error:
            self._warn(f"no traces are written: {error.message}")
            return
        self._following = asyncio.create_task(self._follower.follow())

    async def finish(self) -> list[Path]:
        """After the jobs have ended: the pictures."""
        import asyncio

        if self._following is None:
            return []
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        for _ in range(_LAST_LOOKS):
            await self._follower.look()
            if self._follower.begun_are_over:
                break
            await asyncio.sleep(_LAST_PAUSE)
        return self.close()

    def close(self) -> list[Path]:
        """Also if the waiting is interrupted."""
        if self._pictures is None:
            self._pictures = [] if self._following is None else self._follower.close()
        return self._pictures

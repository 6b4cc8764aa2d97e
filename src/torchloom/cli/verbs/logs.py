"""`loom logs`: what the ranks of a job printed, from this machine's files or from the agents on their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchloom.cli.verb_call import Call, Verbs
from torchloom.cli.verbs.jobs import runs_of
from torchloom.core.state.run_states import LIGHTHOUSE
from torchloom.errors import BadInput, Refused, Unreachable
from torchloom.protocol.views import RunView
from torchloom.views.job_runs import are_over, replicas

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.launcher.output import FileReader, OutputReader


def add(verbs: Verbs) -> None:
    examples = ("loom logs mnist", "loom logs mnist --rank 3 -f", "loom logs train_ddp:0")
    verb = verbs["logs"].define(logs, *examples, output=False)
    verb.add_run()
    verb.add_argument("--rank", type=int, metavar="N", help="Show only this rank, without a prefix")
    verb.add_argument("--attempt", type=int, metavar="N", help="Attempt to show; default: the last")
    verb.add_flag("-f", "--follow", help="Follow the output until the job has ended")


def logs(call: Call) -> int:
    """Each line with its rank in front, of a job of several replicas with replica and rank; stdout to stdout,
    stderr to stderr.
    """
    args = call.args
    for name in ("rank", "attempt"):
        if (getattr(args, name) or 0) < 0:
            raise BadInput(f"--{name} {getattr(args, name)}", hint="ranks count from 0, attempts from 1")

    try:
        return call.query(lambda weaver: _show(call, weaver), patience=5.0 if args.follow else 0.0)
    except (Unreachable, Refused) as error:
        folders = _newest(call.settings.state_folder / "runs", args.job)
        if not folders:
            raise
        if isinstance(error, Unreachable):
            call.note(f"loom: no control plane answers; this is the last run of {args.job} on this machine")
        return _show_files(call, folders)


async def _show(call: Call, weaver: WeaverClient) -> int:
    import asyncio

    from torchloom.launcher.output import FileReader, Output, RemoteReader

    args = call.args
    runs = replicas(await runs_of(weaver, args.job))
    _check(runs, args.rank, args.attempt)
    output = Output(call.screen.colour, alone=args.rank is not None and len(runs) == 1)
    here = all(_is_here(run) for run in runs if run.attempt) and any(run.attempt for run in runs)
    reader: OutputReader = FileReader(output, args.rank) if here else RemoteReader(weaver.client, output, args.rank)
    reader.newest = {run.job: args.attempt or run.attempt or 1 for run in runs}
    while True:
        over = are_over(runs)
        new = [await reader.show_attempts(run, args.attempt or run.attempt) for run in runs]
        if not any(new):
            if over or not args.follow:
                break
            await asyncio.sleep(0.2)
            runs = replicas(await runs_of(weaver, args.job))
    output.finish()
    if reader.trouble:
        raise Unreachable(reader.trouble, hint="`loom nodes` shows which agents answer")
    return 0


def _check(runs: Sequence[RunView], rank: int | None, attempt: int | None) -> None:
    """That at least one of them has what is asked for."""
    name = runs[0].job if len(runs) == 1 else runs[0].task.part_of or runs[0].job
    ranks = {place.rank for run in runs for place in run.places}
    if rank is not None and ranks and rank not in ranks:
        raise Refused(f"{name} has no rank {rank}", hint=f"it has {len(ranks)}, from 0")
    most = max(run.attempt for run in runs)
    if attempt is not None and not 1 <= attempt <= most:
        raise Refused(f"{name} had no attempt {attempt}", hint=f"it had {most}")


def _is_here(run: RunView) -> bool:
    """Whether the files are on this machine: of a `loom run`, or in a folder that nodes share."""
    log_dir = run.task.log_dir
    return bool(log_dir) and any(Path(log_dir).glob("attempt-*"))


def _show_files(call: Call, folders: dict[str, Path]) -> int:
    """What is in the folders of its replicas, or of the job."""
    from torchloom.launcher.output import FileReader, Output

    args = call.args
    reader = FileReader(Output(call.screen.colour, alone=args.rank is not None and len(folders) == 1), args.rank)
    attempts = {replica: _attempt(call, folder, reader) for replica, folder in folders.items()}
    for replica, folder in attempts.items():
        while reader.show_folder(folder, replica):
            pass
    reader.output.finish()
    return 0


def _attempt(call: Call, folder: Path, reader: FileReader) -> Path:
    """The folder of the attempt that is asked for, the last one if none is named."""
    args = call.args
    numbers = (path.name.removeprefix("attempt-") for path in folder.glob("attempt-*"))
    attempts = sorted(int(number) for number in numbers if number.isdecimal())
    ordinal = attempts[-1] if args.attempt is None and attempts else args.attempt
    if ordinal not in attempts:
        raise Refused(f"{args.job} had no attempt {args.attempt}", hint=f"there are {len(attempts)}")
    attempt = folder / f"attempt-{ordinal}"
    if not reader.ranks(attempt):
        raise Refused(f"{args.job} has no rank {args.rank}")
    return attempt


def _newest(runs: Path, name: str) -> dict[str, Path]:
    """The folders of the last run of this name, each with the replica it is of, where there are several."""
    job, colon, part = (name, "", "") if (runs / name).is_dir() else name.rpartition(":")
    under = part if not colon or part == LIGHTHOUSE else f"replica-{part}"
    for stamped in sorted((runs / job).glob("*"), reverse=True) if job else ():
        if any((stamped / under).glob("attempt-*")):
            return {part: stamped / under}
        replicas = [path for path in stamped.glob("replica-*") if not colon and any(path.glob("attempt-*"))]
        if replicas:
            return {
                path.name.rpartition("-")[2]: path for path in sorted(replicas, key=lambda p: (len(p.name), p.name))
            }
    return {}

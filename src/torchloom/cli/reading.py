"""`loom logs`: what the ranks of a job printed, from this machine's files or from the agents on their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torchloom.cli import names
from torchloom.errors import BadInput, Refused, Unreachable

if TYPE_CHECKING:
    from pathlib import Path

    from torchloom.agent.output import Output
    from torchloom.bus.asking import Asking
    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs
    from torchloom.messages import RunView


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "logs", logs, "show what the ranks of a job that torchLoom started have printed",
        "Each line with its rank in front; stdout to stdout, stderr to stderr.\n\n"
        "  loom logs mnist\n  loom logs mnist --rank 3 -f",
    )  # fmt: skip
    names.with_names(verb.add_argument("job", metavar="JOB"), names.complete_run)
    verb.add_argument("--rank", type=int, default=None, metavar="N", help="only of this rank, with nothing in front")
    verb.add_argument("--attempt", type=int, default=None, metavar="N", help="default: the last")
    verb.add_argument("-f", "--follow", action="store_true", help="and what they print from now on, until it is over")


def logs(call: Call) -> int:
    from torchloom.bus.asking import Asking
    from torchloom.subjects import Role

    args = call.args
    for name in ("rank", "attempt"):
        if (getattr(args, name) or 0) < 0:
            raise BadInput(f"--{name} {getattr(args, name)}", hint="ranks count from 0, attempts from 1")

    async def work() -> int:
        async with Asking(call.settings, Role.VIEWER, patience=5.0 if args.follow else 0.0) as weaver:
            return await _show(call, weaver)

    try:
        return call.wait(work())
    except (Unreachable, Refused) as error:
        folder = _newest(call.settings.state_folder / "runs" / args.job)
        if folder is None:
            raise
        if isinstance(error, Unreachable):
            call.note(f"loom: no control plane answers; this is the last run of {args.job} on this machine")
        return _show_files(call, folder)


async def _show(call: Call, weaver: Asking) -> int:
    import asyncio

    from torchloom.agent.output import Output
    from torchloom.agent.remote import RemoteOutput
    from torchloom.agent.telling import OVER
    from torchloom.cli.submitting import run_of

    args = call.args
    run = await run_of(weaver, args.job)
    _check(run, args.rank, args.attempt)
    output = Output(call.screen.colour, alone=args.rank is not None)
    here = _is_here(run)
    source: Source = Files(output, args.rank) if here else RemoteOutput(weaver.client, output, args.rank)
    while True:
        over = run.phase in OVER
        if not await source.show(run, args.attempt):
            if over or not args.follow:
                break
            await asyncio.sleep(0.2)
            run = await run_of(weaver, args.job)
    output.finish()
    if source.trouble:
        raise Unreachable(source.trouble, hint="`loom nodes` shows which agents answer")
    return 0


class Source(Protocol):
    """Where what ranks printed is read."""

    trouble: str
    """Why something could not be read, the last time."""

    async def show(self, run: RunView, ordinal: int | None = None) -> bool:
        """Print what is new of an attempt, the last one if none is named; whether there was anything."""


class Files:
    """Those of this machine."""

    trouble = ""

    def __init__(self, output: Output, rank: int | None) -> None:
        self._output = output
        self._rank = rank

    async def show(self, run: RunView, ordinal: int | None = None) -> bool:
        from pathlib import Path

        folder = Path(run.task.log_dir) / f"attempt-{ordinal or run.attempt}"
        self._output.follow(folder, _ranks(folder, self._rank))
        return self._output.show()


def _check(run: RunView, rank: int | None, attempt: int | None) -> None:
    ranks = [place.rank for place in run.places]
    if rank is not None and ranks and rank not in ranks:
        raise Refused(f"{run.job} has no rank {rank}", hint=f"it has {len(ranks)}, from 0")
    if attempt is not None and not 1 <= attempt <= run.attempt:
        raise Refused(f"{run.job} had no attempt {attempt}", hint=f"it had {run.attempt}")


def _is_here(run: RunView) -> bool:
    """Whether the files are on this machine: of a `loom run`, or in a folder that nodes share."""
    from pathlib import Path

    log_dir = run.task.log_dir
    return bool(log_dir) and any(Path(log_dir).glob("attempt-*"))


def _show_files(call: Call, folder: Path) -> int:
    from torchloom.agent.output import Output

    args = call.args
    found = [path for path in folder.glob("attempt-*") if path.name.rpartition("-")[2].isdecimal()]
    attempts = sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))
    wanted = [path for path in attempts if args.attempt in {None, int(path.name.rpartition("-")[2])}]
    if not wanted:
        raise Refused(f"{args.job} had no attempt {args.attempt}", hint=f"there are {len(attempts)}")
    ranks = _ranks(wanted[-1], args.rank)
    if not ranks:
        raise Refused(f"{args.job} has no rank {args.rank}")
    output = Output(call.screen.colour, alone=args.rank is not None)
    output.follow(wanted[-1], ranks)
    output.finish()
    return 0


def _ranks(folder: Path, rank: int | None) -> list[int]:
    numbers = [path.stem.rpartition("-")[2] for path in folder.glob("rank-*.out")]
    found = {int(number) for number in numbers if number.isdecimal()}
    return sorted(found if rank is None else found & {rank})


def _newest(folder: Path) -> Path | None:
    return max((path for path in folder.glob("*") if any(path.glob("attempt-*"))), default=None)

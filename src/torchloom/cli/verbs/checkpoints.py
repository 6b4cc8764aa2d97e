"""Verbs about what was saved: checkpoints, checkpoints prune."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchloom.cli import completion_names
from torchloom.cli.progress_bar import Progress
from torchloom.errors import BadInput, BadState, Refused, Unreachable

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.checkpoints.store.inventory import Entry, Inventory
    from torchloom.checkpoints.store.retention import Keep, Pruned
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Parser, Verbs
    from torchloom.protocol.views import CheckpointsView


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "checkpoints", checkpoints, "list the checkpoints of a job or in a folder, and which one a resume takes",
        "Newest first, with what is being written right now. A folder is a path with a / in it, or one that exists.\n"
        "Without --verify a look at manifests and sizes; with it every byte is read, and the exit code is 8 if there\n"
        "are checkpoints and none is valid.\n\n"
        "  loom checkpoints mnist\n  loom checkpoints ./runs/a --verify", listing=True,
    )  # fmt: skip
    _add_target(verb, "prune")
    verb.add_argument("--verify", action="store_true", help="Read and verify every byte")
    verb.add_argument(
        "--pattern", metavar="NAME", help="Consider only foreign checkpoints named like 'checkpoint_step_{step}.pt'"
    )

    verb = verbs.add(
        "checkpoints prune", prune, "delete the checkpoints that a rule does not keep",
        "A checkpoint stays if any part of the rule keeps it. The last good one is never deleted, nor one that is\n"
        "being read, nor anything that torchLoom did not write. Shows what it deletes, and asks for confirmation.\n\n"
        "  loom checkpoints prune mnist --last 5 --dry-run\n"
        "  loom checkpoints prune ./runs/a --hours 24 --every 1000 --yes", listing=True,
    )  # fmt: skip
    _add_target(verb)
    verb.add_argument("--last", type=int, metavar="N", help="Keep the newest N")
    verb.add_argument("--hours", type=float, metavar="H", help="Keep those younger than H hours")
    verb.add_argument("--every", type=int, metavar="K", help="Keep those whose step is a multiple of K")
    verb.add_argument("--dry-run", action="store_true", help="Only show what would be deleted")
    verb.add_yes()


def _add_target(verb: Parser, *words: str) -> None:
    verb.add_argument("target", metavar="TARGET", help="JOB, or a folder: ./runs/a", complete=_completer(*words))


def _completer(*words: str) -> Callable[..., list[str]]:
    """Jobs, folders, and the words that make another verb of this one."""

    def complete(prefix: str, parsed_args: Namespace, **more: Any) -> list[str]:
        from argcomplete.completers import DirectoriesCompleter

        folders: list[str] = list(DirectoriesCompleter()(prefix))
        jobs = completion_names.complete_job(prefix, parsed_args, **more)
        return [*(word for word in words if word.startswith(prefix)), *jobs, *folders]

    return complete


class Where(NamedTuple):
    folder: Path | None
    """None if it is not on this machine."""
    told: CheckpointsView | None
    """By the weaver, if a job was named."""

    def elsewhere(self, what: str) -> Refused:
        assert self.told is not None
        if not self.told.folder:
            return Refused(f"job {self.told.job} has reported no checkpoints", hint="name a folder, such as ./runs/a")
        node = self.told.node or "another machine"
        return Refused(
            f"the folder {self.told.folder} is on {node}, not here", hint=f"run `loom {what} {self.told.folder}` there"
        )


def find(call: Call) -> Where:
    target: str = call.args.target
    if os.sep in target or _is_folder(Path(target)):
        return Where(Path(target), None)
    try:
        told = _ask(call, target)
    except (Refused, Unreachable) as error:
        error.hint = "; ".join(filter(None, [error.hint, f"a folder is written ./{target}"]))
        raise
    folder = Path(told.folder) if told.folder else None
    return Where(folder if folder and _is_folder(folder) else None, told)


def _ask(call: Call, job: str) -> CheckpointsView:
    from torchloom.protocol.ids import check_name

    check_name("job", job)

    async def look(weaver: WeaverClient) -> CheckpointsView:
        return await weaver.checkpoints(completion_names.known_job(await weaver.cluster(most=0), job))

    return call.query(look)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # nobody lets us look
        return False


def checkpoints(call: Call) -> int:
    import time

    from torchloom.checkpoints.store.inventory import inventory_from_reports
    from torchloom.errors import NoValidCheckpoint
    from torchloom.views import checkpoints as view

    where = find(call)
    told = where.told
    if where.folder is not None:
        found = _survey(call, where.folder)
    elif told is not None and not (call.args.verify and told.folder):
        found = inventory_from_reports(told.folder, told.saved)
    else:
        raise where.elsewhere("checkpoints --verify")
    if call.json:
        call.print_json(view.surveyed(found, told))
    else:
        call.print(view.answer(found, told, time.time(), call.screen, here=where.folder is not None))
    lost = found.verified and bool(found.finished) and found.resume is None
    return NoValidCheckpoint.exit_code if lost else 0


def _survey(call: Call, folder: Path) -> Inventory:
    import time

    from torchloom.checkpoints.store.inventory import take_inventory
    from torchloom.views.format.numbers import size

    with Progress() as progress:

        def watch(entry: Entry, number: int, total: int, done: int) -> None:
            progress.say(f"reading {entry.name} ({size(entry.size)}), {number:,} of {total:,}", done)

        return take_inventory(folder, time.time(), call.args.pattern, call.args.verify, watch)


def prune(call: Call) -> int:
    import time

    from torchloom.checkpoints.store.retention import Keep
    from torchloom.views import checkpoints as view

    args = call.args
    keep = Keep(last=args.last, hours=args.hours, every=args.every)
    if keep.all:
        raise BadInput("nothing says what to keep", hint="such as --last 5, or --hours 24 --every 1000")
    where = find(call)
    folder = where.folder
    if folder is None:
        raise where.elsewhere("checkpoints prune")
    now, trusts = time.time(), _reader()
    done = _prune(folder, keep, now, trusts, dry_run=True)
    if done.deleted and not args.dry_run:
        if not call.confirm(view.question(done, str(folder))):
            call.note("nothing was deleted")
            return 0
        done = _prune(folder, keep, now, trusts, dry_run=False)
    return call.show(
        view.pruned_document(done, str(folder), args.dry_run), lambda: view.pruned(done, str(folder), args.dry_run)
    )


def _reader() -> Callable[[Path], bool]:
    """Whether a checkpoint is whole; what was read before the question is not read again after it."""
    from torchloom.checkpoints.store.inventory import weigh
    from torchloom.checkpoints.store.verification import Signature, signature, verify
    from torchloom.errors import Damaged
    from torchloom.views.format.numbers import size

    good: dict[Path, Signature] = {}

    def trusts(path: Path) -> bool:
        seen = signature(path)
        if good.get(path) == seen:
            return True
        try:
            with Progress() as progress:
                progress.say(f"reading {path.name} ({size(weigh(path)[0])}), to be sure that one stays", 0)
                verify(path)
        except Damaged:
            return False
        good[path] = seen
        return True

    return trusts


def _prune(folder: Path, keep: Keep, now: float, trusts: Callable[[Path], bool], dry_run: bool) -> Pruned:
    from torchloom.checkpoints.store import retention
    from torchloom.checkpoints.store.search import candidates

    candidates(folder)  # says what is wrong with a folder that cannot be read
    try:
        return retention.prune(folder, keep, now, trusts, dry_run)
    except OSError as error:
        raise BadState(f"cannot delete in {folder}: {error.strerror or error}") from error

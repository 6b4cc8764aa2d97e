"""Verbs about what was saved: checkpoints, checkpoints prune."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec.structs import replace

from torchloom.cli.verb_call import Call, Parser, Verbs
from torchloom.cli.verbs.status import see_job
from torchloom.errors import BadInput, BadState, Damaged, NoValidCheckpoint, Refused, Unreachable
from torchloom.protocol.ids import check_name
from torchloom.protocol.views import CheckpointsView
from torchloom.views.format.numbers import size
from torchloom.views.format.tables import clean, cut

if TYPE_CHECKING:
    from torchloom.checkpoints.store.inventory import Entry, Inventory
    from torchloom.checkpoints.store.retention import Keep, Pruned

_PAUSE = 0.1
"""Seconds between two writings of progress; a terminal at the end of a slow line is not flooded."""


def add(verbs: Verbs) -> None:
    verb = verbs["checkpoints"].define(checkpoints, "loom checkpoints mnist", "loom checkpoints ./runs/a --verify")
    _add_target(verb, "prune")
    verb.add_flag("--verify", help="Read and verify every byte")
    pattern = "Consider only foreign checkpoints named like 'checkpoint_step_{step}.pt'"
    verb.add_argument("--pattern", metavar="NAME", help=pattern)

    examples = (
        "loom checkpoints prune mnist --last 5 --dry-run",
        "loom checkpoints prune ./runs/a --hours 24 --every 1000 --yes",
    )
    verb = verbs["checkpoints prune"].define(prune, *examples)
    _add_target(verb)
    verb.add_argument("--last", type=int, metavar="N", help="Keep the newest N")
    verb.add_argument("--hours", type=float, metavar="H", help="Keep those younger than H hours")
    verb.add_argument("--every", type=int, metavar="K", help="Keep those whose step is a multiple of K")
    verb.add_flag("--dry-run", help="Only show what would be deleted")
    verb.add_yes()


def _add_target(verb: Parser, *words: str) -> None:
    verb.add_argument("target", help="JOB, or a folder: ./runs/a", complete=partial(_complete, words))


def _complete(words: tuple[str, ...], prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
    """Jobs, folders, and the words that make another verb of this one."""
    from argcomplete.completers import DirectoriesCompleter

    from torchloom.cli.completion_names import complete

    jobs = complete("job", prefix, parsed_args)
    return [*(word for word in words if word.startswith(prefix)), *jobs, *DirectoriesCompleter()(prefix)]


class Target(NamedTuple):
    folder: Path | None
    """None if it is not on this machine."""
    report: CheckpointsView | None = None
    """What the weaver knows, if a job was named."""
    pattern: str = ""
    """The names of its checkpoints, if the job says so."""

    def elsewhere(self, what: str) -> Refused:
        assert self.report is not None
        job, folder, node = self.report.job, self.report.folder, self.report.node
        if not folder:
            return Refused(f"job {job} has reported no checkpoints", hint="name a folder, such as ./runs/a")
        where, there = (f"is on {node}, not here", "") if node else ("is not here", "if another machine has it, ")
        return Refused(f"the folder {folder} {where}", hint=f"{there}run `loom {what} {folder}` there")


def find(call: Call) -> Target:
    """What a job resumes from is in the folder that it was started with; otherwise it is where its ranks save."""
    target: str = call.args.target
    if os.sep in target or os.path.isdir(target):  # noqa: PTH112  false where nobody lets us look
        return Target(Path(target))
    check_name("job", target)
    try:
        _, runs = see_job(call, target, 0)
        report = call.query(lambda weaver: weaver.checkpoints(target))
    except (Refused, Unreachable) as error:
        error.hint = "; ".join(filter(None, [error.hint, f"a folder is written ./{target}"]))
        raise
    pattern = ""
    if task := next((run.task for run in runs if run.task.checkpoint_dir), None):
        folder = str(Path(task.cwd, task.checkpoint_dir))
        if os.path.isdir(folder) or not report.folder:  # noqa: PTH112
            report, pattern = replace(report, folder=folder), task.checkpoint_pattern
    here = os.path.isdir(report.folder)  # noqa: PTH112
    return Target(Path(report.folder) if here else None, report, pattern)


def checkpoints(call: Call) -> int:
    """Newest first, with what is being written right now. A folder is a path with a / in it, or one that exists.
    Without --verify a look at manifests and sizes; with it every byte is read, and the exit code is 8 if there
    are checkpoints and none is valid.
    """
    from torchloom.checkpoints.store.inventory import inventory_from_reports
    from torchloom.views import checkpoints as view

    target = find(call)
    folder, report, pattern = target
    if folder is not None:
        inventory = _survey(call, folder, call.args.pattern or pattern or None)
    elif report is not None and not (call.args.verify and report.folder):
        inventory = inventory_from_reports(report.folder, report.saved)
    else:
        raise target.elsewhere("checkpoints --verify")
    call.show(
        view.surveyed(inventory, report),
        lambda: view.answer(inventory, report, time.time(), call.screen, here=folder is not None),
    )
    lost = inventory.verified and bool(inventory.finished) and inventory.resume is None
    return NoValidCheckpoint.exit_code if lost else 0


def _survey(call: Call, folder: Path, pattern: str | None) -> Inventory:
    from torchloom.checkpoints.store.inventory import take_inventory

    with Progress() as progress:

        def watch(entry: Entry, number: int, total: int, done: int) -> None:
            progress.say(f"reading {entry.name} ({size(entry.size)}), {number:,} of {total:,}", done)

        return take_inventory(folder, time.time(), pattern, call.args.verify, watch)


def prune(call: Call) -> int:
    """A checkpoint stays if any part of the rule keeps it. The last good one is never deleted, nor one that is
    being read, nor anything that torchLoom did not write. Shows what it deletes, and asks for confirmation.
    """
    from torchloom.checkpoints.store.retention import Keep
    from torchloom.views import checkpoints as view

    args = call.args
    keep = Keep(last=args.last, hours=args.hours, every=args.every)
    if keep.all:
        raise BadInput("nothing says what to keep", hint="such as --last 5, or --hours 24 --every 1000")
    target = find(call)
    folder = target.folder
    if folder is None:
        raise target.elsewhere("checkpoints prune")
    delete = partial(_prune, folder, keep, time.time(), _reader())
    done = delete(dry_run=True)
    if done.deleted and not args.dry_run:
        question = view.question(done, str(folder))
        if not call.confirm(lambda: question, "nothing was deleted"):
            return 0
        done = delete(dry_run=False)
    return call.show(
        view.pruned_document(done, str(folder), args.dry_run), lambda: view.pruned(done, str(folder), args.dry_run)
    )


def _reader() -> Callable[[Path], bool]:
    """Whether a checkpoint is whole; what was read before the question is not read again after it."""
    from torchloom.checkpoints.store.checksums import Signature, signature, verify
    from torchloom.checkpoints.store.inventory import weigh

    good: dict[Path, Signature] = {}

    def trusts(path: Path) -> bool:
        current = signature(path)
        if good.get(path) == current:
            return True
        try:
            with Progress() as progress:
                progress.say(f"reading {path.name} ({size(weigh(path)[0])}), to be sure that one stays", 0)
                verify(path)
        except Damaged:
            return False
        good[path] = current
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


class Progress:
    """A line on the terminal that says how far a long work is, and is gone when it is done. It is written to stderr, if
    that is a terminal.
    """

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._written = False
        self._began = time.monotonic()
        self._last = self._began - _PAUSE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._written:
            self._write("")

    def say(self, text: str, done: int) -> None:
        """What is being done, and how many bytes have been so far."""
        now = time.monotonic()
        if not self._shown or now - self._last < _PAUSE:
            return
        self._last = now
        if done:
            text += f", {size(round(done / max(now - self._began, 1e-6)))}/s"
        self._write(cut(clean(text), shutil.get_terminal_size().columns - 1))

    def _write(self, text: str) -> None:
        self._written = True
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

"""Before an attempt: the port where its ranks meet, and the checkpoint from which they resume."""

from __future__ import annotations

import socket
from pathlib import Path

from msgspec.structs import replace

from torchloom.checkpoints.store import search
from torchloom.checkpoints.store.rollback import roll_back
from torchloom.errors import BadState, NoValidCheckpoint, TorchLoomError
from torchloom.protocol.node import AttemptStatus, Prepare, Rollback

NO_FOLDER = "a rollback was requested, and the folder of the job's checkpoints is not known"
HINT = "repair them or move them away; with an empty folder the job starts from the beginning"


def prepare(order: Prepare, host: str) -> AttemptStatus:
    """A free port, and the checkpoint to resume from. May take as long as reading one does."""
    status = AttemptStatus(job=order.job, attempt=order.attempt)
    try:
        status = replace(status, port=free_port(host))
        if order.rollback is not None:
            return _gone_back(order, order.rollback, status)
        return _with_checkpoint(order, status) if order.task.checkpoint_dir else status
    except TorchLoomError as error:
        trouble = f"{error.message} → {error.hint}" if error.hint else error.message
        return replace(status, port=0, trouble=trouble[:2000], trouble_code=error.exit_code)
    except Exception as error:  # noqa: BLE001  the weaver must learn that there is nothing to start
        return replace(status, port=0, trouble=(str(error) or type(error).__name__)[:2000])


def _with_checkpoint(order: Prepare, status: AttemptStatus) -> AttemptStatus:
    """The newest that is whole."""
    task = order.task
    folder = Path(task.cwd, task.checkpoint_dir)
    if not _exists(folder):
        return status  # the first start: the script makes it
    try:
        found, rejected = search.latest(folder, task.checkpoint_pattern or None)
    except NoValidCheckpoint as none:
        if none.rejected:
            none.hint = HINT
            raise
        return status
    return _resuming(status, found.path, found.step, rejected)


def _gone_back(order: Prepare, back: Rollback, status: AttemptStatus) -> AttemptStatus:
    """A checkpoint from before the step of the incident; the beginning if there was none yet."""
    task = order.task
    folder = Path(task.cwd, task.checkpoint_dir or back.folder)
    if not task.checkpoint_dir and not back.folder:
        raise BadState(NO_FOLDER, hint="name their folder: --checkpoint-dir")
    if not _exists(folder):
        if back.saved:
            raise BadState(f"the folder {folder} with the job's checkpoints is gone")
        return status
    of = f"{order.job} {order.submitted} {back.incident or order.attempt}"
    pattern = task.checkpoint_pattern or None
    try:
        done = roll_back(folder, of, back.before, back.back, pattern, job=order.job, saved=back.saved)
    except NoValidCheckpoint as none:
        none.hint = HINT
        raise
    if done.found is None:
        return status
    return _resuming(status, done.found.path, done.found.step, done.rejected)


def _exists(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise BadState(f"{folder} is not a folder")
    return folder.exists()


def _resuming(status: AttemptStatus, path: Path, step: int | None, rejected: dict[str, str]) -> AttemptStatus:
    shown = {name[:255]: why[:2000] for name, why in list(rejected.items())[:100]}
    return replace(status, resume=str(path), resume_step=step, rejected=shown)


def free_port(host: str) -> int:
    """One that is free now; a port another program takes meanwhile is found by the rank that binds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port

"""Before an attempt: the port where its ranks meet, and the checkpoint from which they resume."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil
from msgspec.structs import replace

from torchloom.checkpoints.store.rollback import roll_back
from torchloom.checkpoints.store.search import ValidCheckpoint, latest
from torchloom.errors import BadState, NoValidCheckpoint, TorchLoomError
from torchloom.protocol.node import AttemptStatus, Prepare
from torchloom.protocol.phrase import Phrase, phrase

NO_FOLDER = "a rollback was requested, and the folder of the job's checkpoints is not known"
HINT = "repair them or move them away; with an empty folder the job starts from the beginning"


def prepare(order: Prepare, host: str) -> AttemptStatus:
    """A free port, and the checkpoint to resume from. May take as long as reading one does."""
    status = AttemptStatus(job=order.job, attempt=order.attempt)
    wanted = order.task.port if order.ordinal == 1 else 0
    if wanted and (why := explain_port_taken(wanted)):
        return replace(status, trouble=why, retry=True)
    try:
        port, checkpoint = wanted or free_port(host), _choose(order)
    except TorchLoomError as error:
        hint = HINT if isinstance(error, NoValidCheckpoint) else error.hint
        trouble = phrase("not_prepared", error=error.message[:2000], hint=hint)
        return replace(status, trouble=trouble, trouble_code=error.exit_code)
    except Exception as error:  # noqa: BLE001  the weaver must learn that there is nothing to start
        return replace(status, trouble=(str(error) or type(error).__name__)[:2000])
    if checkpoint is None:
        return replace(status, port=port)
    shown = {name[:255]: why[:2000] for name, why in list(checkpoint.rejected.items())[:100]}
    return replace(status, port=port, resume=str(checkpoint.path), resume_step=checkpoint.step, rejected=shown)


def _choose(order: Prepare) -> ValidCheckpoint | None:
    """The newest checkpoint that is whole, or one from before the step of the incident, and why others are rejected.

    None: there was none yet, and the job starts from the beginning.
    """
    task, back = order.task, order.rollback
    name = task.checkpoint_dir or (back.folder if back is not None else "")
    if not name:
        if back is not None:
            raise BadState(NO_FOLDER, hint="name their folder: --checkpoint-dir")
        return None
    folder, pattern = Path(task.cwd, name), task.checkpoint_pattern or None
    if not folder.is_dir():
        if folder.exists():
            raise BadState(f"{folder} is not a folder")
        if back is not None and back.saved:
            raise BadState(f"the folder {folder} with the job's checkpoints is gone")
        return None  # the first start: the script makes it
    if back is not None:
        of = f"{order.job} {order.submitted} {back.incident or order.attempt}"
        return roll_back(folder, of, back.before, back.back, pattern, job=order.job, saved=back.saved)
    try:
        return latest(folder, pattern)
    except NoValidCheckpoint as none:
        if none.rejected:
            raise
        return None


def explain_port_taken(port: int) -> Phrase | None:
    """Why ranks cannot meet at a port, if they cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the store of the ranks; one just closed is free
        try:
            probe.bind(("", port))
        except OSError as error:
            return phrase("port_taken", port=port, error=error.strerror or str(error), user=_user_of(port))
    return None


def _user_of(port: int) -> str:
    """The process that listens at a port; empty if that is not known, as for processes of other users."""
    with contextlib.suppress(psutil.Error, OSError):
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port and link.pid:
                return f"{psutil.Process(link.pid).name()}, pid {link.pid}"
    return ""


def free_port(host: str) -> int:
    """One that is free now; a port another program takes meanwhile is found by the rank that binds it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

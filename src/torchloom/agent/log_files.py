"""What ranks printed: where it is kept on a node, and reading it for someone elsewhere."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

from torchloom.agent.attempt import LAUNCH, OVER
from torchloom.errors import TorchLoomError
from torchloom.protocol.node import Launch, Prepare
from torchloom.protocol.views import LinesView, QueryLines
from torchloom.shared.json_decoding import decoder

logger = logging.getLogger("torchloom.agent")
_decode = decoder(Launch)


def log_folder(job_folder: Path, command: Prepare | Launch) -> Path:
    """Of one attempt."""
    base = Path(command.task.log_dir) if command.task.log_dir else job_folder / "logs" / stamp(command.submitted)
    return base / f"attempt-{command.ordinal}"


def stamp(at: float) -> str:
    """With milliseconds: a short job may be submitted again in the same second."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(at)) + f"-{int(at * 1000) % 1000:03d}"


def launches(job_folder: Path) -> list[tuple[Launch, bool]]:
    """How each attempt that was started here was started, newest first, and whether the weaver knows it to be over."""
    started: list[tuple[Launch, bool]] = []
    for name in (LAUNCH, OVER):
        for path in job_folder.glob(f"attempt-*/{name}"):
            try:
                started.append((_decode(path.read_bytes()), name == OVER))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s cannot be read and is passed over: %s", path, error)
    return sorted(started, key=lambda pair: pair[0].attempt, reverse=True)


def find(folder: Path, look: QueryLines, node: str) -> Path:
    """The file that is asked for, or why there is none."""
    started = [launch for launch, _ in launches(folder / look.job)]
    if not started:
        raise TorchLoomError(f"nothing of {look.job} was started on {node}")
    run = started[0].submitted if look.submitted is None else look.submitted
    of_run = [launch for launch in started if launch.submitted == run]
    if not of_run:
        raise TorchLoomError(f"{look.job} is not started yet on {node}; what was there is another run")
    wanted = [launch for launch in of_run if look.ordinal in {None, launch.ordinal}]
    if not wanted:
        there = ", ".join(str(launch.ordinal) for launch in reversed(of_run))
        raise TorchLoomError(f"{look.job} had no attempt {look.ordinal} on {node}", hint=f"there are: {there}")
    launch = wanted[0]
    if look.rank not in {place.rank for place in launch.places if place.node == node}:
        raise TorchLoomError(f"rank {look.rank} of {look.job} was not on {node}")
    return log_folder(folder / look.job, launch) / f"rank-{look.rank}.{look.which}"


def read(path: Path, look: QueryLines) -> LinesView:
    """The part that is asked for; nothing, if nothing was printed yet."""
    try:
        with path.open("rb") as file:
            at = file.seek(min(look.at, file.seek(0, os.SEEK_END)))
            return LinesView(data=file.read(look.most), at=at)
    except FileNotFoundError:
        return LinesView()
    except OSError as error:
        raise TorchLoomError(f"{path.name} cannot be read: {error.strerror}") from error

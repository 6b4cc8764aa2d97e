"""Real ranks for tests: processes with a gloo group of their own that carry out one call at a time.

They are forked from a server that has imported torch once, so that a job of two begins in half a second and each test
has ranks of its own, which it may kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tests.checkpoints.training import Plan, Training
from tests.fork_server import FORKS
from torchloom.errors import TorchLoomError

Given = ParamSpec("Given")
Told = TypeVar("Told")
PATIENCE = 100
"""Seconds after which a rank that does not answer is taken to hang."""


class Rank:
    """One process, from outside."""

    def __init__(self, rank: int, size: int, meeting: Path, plan: Plan) -> None:
        self.rank = rank
        self._line, theirs = FORKS.Pipe()
        self._process = FORKS.Process(target=_live, args=(rank, size, meeting, plan, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def begin(
        self, act: Callable[Concatenate[Training, Given], Any], *args: Given.args, **kwargs: Given.kwargs
    ) -> None:
        self._line.send((act, args, kwargs))

    def end(self) -> Any:
        """What came of it: a value, or the error."""
        if not self._line.poll(PATIENCE):
            os.kill(self.pid, signal.SIGUSR1)  # prints where it stands
            raise AssertionError(f"rank {self.rank} hangs")
        try:
            return self._line.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"rank {self.rank} died: exit code {self._process.exitcode}") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def join(self) -> None:
        self._process.join(PATIENCE)
        self.kill()

    def dismiss(self) -> None:
        """Let it end, if it still lives."""
        with contextlib.suppress(OSError):
            self._line.send(None)


class Job:
    """All ranks of a training job."""

    def __init__(self, size: int, meeting: Path, plan: Plan) -> None:
        self.ranks = [Rank(rank, size, meeting, plan) for rank in range(max(size, 1))]

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def outcomes(
        self, act: Callable[Concatenate[Training, Given], Any], *args: Given.args, **kwargs: Given.kwargs
    ) -> list[Any]:
        """All do it; what came of it on each."""
        for rank in self.ranks:
            rank.begin(act, *args, **kwargs)
        return [rank.end() for rank in self.ranks]

    def all(
        self, act: Callable[Concatenate[Training, Given], Told], *args: Given.args, **kwargs: Given.kwargs
    ) -> list[Told]:
        """All do it, and it goes well on each."""
        came: list[Told] = []
        for outcome in self.outcomes(act, *args, **kwargs):
            if isinstance(outcome, Exception):
                raise outcome
            came.append(outcome)
        return came

    def kill(self) -> None:
        """The way a scheduler does."""
        for rank in self.ranks:
            rank.kill()


@contextlib.contextmanager
def job(size: int, plan: Plan) -> Iterator[Job]:
    """A job of `size` ranks; 0 is one process without torch.distributed."""
    with tempfile.TemporaryDirectory() as meeting:
        ranks = Job(size, Path(meeting), plan)
        try:
            yield ranks
        except BaseException:
            ranks.kill()
            raise
        for rank in ranks.ranks:
            rank.dismiss()
        for rank in ranks.ranks:
            rank.join()


def _live(rank: int, size: int, meeting: Path, plan: Plan, line: Connection) -> None:
    """A rank's life: an order, its outcome, the next order."""
    import torch
    import torch.distributed as dist

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if size:
        dist.init_process_group("gloo", store=dist.FileStore(str(meeting / "store"), size), rank=rank, world_size=size)
    training = Training(plan, rank)
    while (order := line.recv()) is not None:
        act, args, kwargs = order
        try:
            line.send(act(training, *args, **kwargs))
        except TorchLoomError as error:
            line.send(error)
        except Exception:  # noqa: BLE001  told to the test
            line.send(RuntimeError(traceback.format_exc()))
    training.checkpoints.close()

"""The ranks that are children of a supervisor, and the files that record how they began and ended.

The working folder of the supervisor has KEY.json from the start of a rank; it is written again at its end. A file
appears whole or not at all, before the agent learns of it, and outlives the death of any process. It is not synced to
the disk: a crash of the machine ends all ranks anyway. Its path is relative, because a job that takes a spare
supervisor renames the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from typing import NoReturn

import msgspec

from torchloom.agent.monitor.exit_evidence import oom_kills
from torchloom.agent.supervisor.fork import StartFailed, fork_rank, read_complaint
from torchloom.agent.supervisor.protocol import Begin, Begun, Ended, NotBegun, RankRecord, Signal, encode
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.files import replace_file
from torchloom.shared.json_decoding import decoder

Become = Callable[[int], NoReturn]
"""What a forked child does to become the rank; gets the pipe to complain into."""


def read_records(folder: Path) -> dict[str, RankRecord]:
    """Of the ranks that were not forgotten, in the order of starting. A file that cannot be read is passed over."""
    records: list[RankRecord] = []
    for path in folder.glob("[!.]*.json"):
        try:
            records.append(decoder(RankRecord)(path.read_bytes()))
        except (OSError, msgspec.MsgspecError) as error:
            log(f"{path.name} cannot be read and is passed over: {error}")
    return {record.begun.key: record for record in sorted(records, key=lambda record: record.begun.at)}


def log(text: str) -> None:
    """Into the log of the supervisor, which may be on a full disk too."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@dataclass
class ChildRank:
    begun: Begun
    complaint: int | None
    """The pipe from which to read why it could not start; None once it runs."""
    oom_kills: int
    """The kernel's count before it began."""


class ChildProcesses:
    def __init__(self, selector: BaseSelector, send: Callable[[Begun | NotBegun | Ended], None]) -> None:
        self._selector = selector
        self._send = send
        self._running: dict[str, ChildRank] = {}
        self.records = read_records(Path())
        for record in list(self.records.values()):
            if record.ended is None:  # its supervisor was killed, it died with it, and nobody could write down how
                ended = Ended(key=record.begun.key, at=time.time(), signal=int(signal.SIGKILL), lost=True)
                self._keep(RankRecord(begun=record.begun, ended=ended))

    def begin(self, begin: Begin, become: Become, why_cold: Prose | None) -> None:
        """Start it; `why_cold` is None if `become` makes a warm one."""
        key = begin.key
        if key in self.records or key in self._running:
            self._send(NotBegun(key=key, why=phrase("started_before")))
            return
        kills = oom_kills()
        try:
            pid, complaint = fork_rank(begin, become)
        except StartFailed as error:
            self._send(NotBegun(key=key, why=error.why))
            return
        begun = Begun(key=key, pid=pid, at=time.time(), warm=why_cold is None, why_cold=why_cold or "")
        rank = self._running[key] = ChildRank(begun, complaint, kills)
        self._selector.register(complaint, EVENT_READ, lambda: self._settle(rank, complaint))

    def signal(self, order: Signal) -> None:
        rank = self._running.get(order.key)
        if rank is None:
            return
        # Unreaped, so its number is nobody else's; before it runs it may not lead a group yet.
        send = os.killpg if rank.complaint is None else os.kill
        with contextlib.suppress(OSError):
            send(rank.begun.pid, order.number)

    def forget(self, key: str) -> None:
        if key in self.records and key not in self._running:
            del self.records[key]
            with contextlib.suppress(OSError):
                Path(f"{key}.json").unlink()

    def reap(self) -> None:
        """Take note of those that have ended."""
        for rank in list(self._running.values()):
            self._reap(rank, os.WNOHANG)

    def kill_all(self) -> None:
        for key in self._running:
            self.signal(Signal(key=key, number=int(signal.SIGKILL)))
        for rank in list(self._running.values()):
            self._reap(rank, 0)

    def close_in_child(self) -> None:
        for rank in self._running.values():
            if rank.complaint is not None:
                os.close(rank.complaint)

    def _settle(self, rank: ChildRank, complaint: int) -> None:
        """It runs now, or could not."""
        why = read_complaint(complaint)
        if why is None:
            return
        self._selector.unregister(complaint)
        os.close(complaint)
        rank.complaint = None
        if why:
            os.waitpid(rank.begun.pid, 0)
            del self._running[rank.begun.key]
            self._send(NotBegun(key=rank.begun.key, why=why))
            return
        self._keep(RankRecord(begun=rank.begun))
        self._send(rank.begun)

    def _reap(self, rank: ChildRank, wait: int) -> None:
        pid, key = rank.begun.pid, rank.begun.key
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | wait)
        if status is None:
            return
        if rank.complaint is not None:
            self._settle(rank, rank.complaint)
            if key not in self._running:
                return
        # What it left behind, such as loaders, goes before it is reaped: until then the number of its group is its own.
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del self._running[key]
        exited = status.si_code == os.CLD_EXITED
        ended = Ended(
            key=key,
            at=time.time(),
            code=status.si_status if exited else None,
            signal=None if exited else status.si_status,
            core_dumped=status.si_code == os.CLD_DUMPED,
            oom_kills=max(0, oom_kills() - rank.oom_kills),
        )
        self._keep(RankRecord(begun=rank.begun, ended=ended))
        self._send(ended)

    def _keep(self, record: RankRecord) -> None:
        self.records[record.begun.key] = record
        path = Path(f"{record.begun.key}.json")
        try:
            replace_file(path, encode(record), sync=False)
        except OSError as error:  # a full disk must not kill the supervisor, and all ranks with it
            log(f"cannot write {path.name}: {error.strerror}")

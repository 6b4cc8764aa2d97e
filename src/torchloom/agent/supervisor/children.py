"""The ranks that are children of a supervisor, and the files that record how they began and ended.

The folder has KEY.begun.json from the start of a rank and KEY.end.json from its end. A file appears whole or not at
all, before the agent learns of it, and outlives the death of any process. It is not synced to the disk: a crash of
the machine ends all ranks anyway.
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
from typing import NoReturn

import msgspec

from torchloom.agent.monitor.exit_evidence import oom_kills
from torchloom.agent.supervisor.fork import Child, StartFailed, fork_rank, read_complaint
from torchloom.agent.supervisor.poll_loop import PollLoop
from torchloom.agent.supervisor.protocol import Begin, Begun, Ended, NotBegun, RankRecord, Signal, encode
from torchloom.protocol.phrase import Prose, phrase
from torchloom.shared.files import replace_file

BEGUN = ".begun.json"
END = ".end.json"


class ExitRecordStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def began(self, begun: Begun) -> None:
        self._write(begun.key + BEGUN, encode(begun))

    def ended(self, ended: Ended) -> None:
        self._write(ended.key + END, encode(ended))

    def forget(self, key: str) -> None:
        for suffix in (BEGUN, END):
            with contextlib.suppress(OSError):
                (self.folder / (key + suffix)).unlink(missing_ok=True)

    def read(self) -> dict[str, RankRecord]:
        """All that is remembered, in the order of starting. A file that cannot be read is passed over."""
        found: list[RankRecord] = []
        for path in self.folder.glob("[!.]*" + BEGUN):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                begun = msgspec.json.decode(path.read_bytes(), type=Begun)
                ended = None
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    data = (self.folder / (begun.key + END)).read_bytes()
                    ended = msgspec.json.decode(data, type=Ended)
                found.append(RankRecord(begun=begun, ended=ended))
        return {kept.begun.key: kept for kept in sorted(found, key=lambda kept: kept.begun.at)}

    def _write(self, name: str, data: bytes) -> None:
        try:
            replace_file(self.folder / name, data, sync=False)
        except OSError as error:  # a full disk must not kill the supervisor, and all ranks with it
            print(f"cannot write {name}: {error.strerror}", file=sys.stderr, flush=True)


Become = Callable[[int], NoReturn]
"""What a forked child does to become the rank; gets the pipe to complain into."""


@dataclass
class ChildRank:
    begun: Begun
    child: Child
    sweep: bool
    oom_kills: int
    """The kernel's count before it began."""
    starting: bool = True


class ChildProcesses:
    def __init__(self, folder: Path, loop: PollLoop, send: Callable[[Begun | NotBegun | Ended], None]) -> None:
        self._store = ExitRecordStore(folder)
        self._loop = loop
        self._send = send
        self._running: dict[str, ChildRank] = {}
        self._records = self._store.read()
        for key, kept in self._records.items():
            if kept.ended is None:  # its supervisor was killed, it died with it, and nobody could write down how
                self._keep_end(Ended(key=key, at=time.time(), signal=int(signal.SIGKILL), lost=True))

    def kept(self) -> tuple[RankRecord, ...]:
        return tuple(self._records.values())

    def begin(self, begin: Begin, become: Become, why_cold: Prose | None) -> None:
        """Start it; `why_cold` is None if `become` makes a warm one."""
        key = begin.key
        if key in self._records or key in self._running:
            self._send(NotBegun(key=key, why=phrase("started_before")))
            return
        kills = oom_kills()
        try:
            child = fork_rank(begin, become)
        except StartFailed as error:
            self._send(NotBegun(key=key, why=error.why))
            return
        begun = Begun(key=key, pid=child.pid, at=time.time(), warm=why_cold is None, why_cold=why_cold or "")
        rank = self._running[key] = ChildRank(begun, child, begin.sweep, kills)
        self._loop.watch(child.complaint, lambda: self._settle(rank))

    def signal(self, order: Signal) -> None:
        rank = self._running.get(order.key)
        if rank is None:
            return
        # Unreaped, so its number is nobody else's; before it runs it may not lead a group yet.
        send = os.killpg if order.whole and not rank.starting else os.kill
        with contextlib.suppress(OSError):
            send(rank.begun.pid, order.number)

    def forget(self, key: str) -> None:
        if key in self._records and key not in self._running:
            del self._records[key]
            self._store.forget(key)

    def reap(self) -> None:
        """Take note of those that have ended."""
        for rank in list(self._running.values()):
            self._reap(rank, os.WNOHANG)

    def kill_all(self) -> None:
        for rank in self._running.values():
            self.signal(Signal(key=rank.begun.key, number=int(signal.SIGKILL)))
        for rank in list(self._running.values()):
            self._reap(rank, 0)

    def close_in_child(self) -> None:
        for rank in self._running.values():
            if rank.starting:
                os.close(rank.child.complaint)

    def _settle(self, rank: ChildRank) -> None:
        """It runs now, or could not."""
        complaint = read_complaint(rank.child)
        if complaint is None:
            return
        self._loop.unwatch(rank.child.complaint)
        os.close(rank.child.complaint)
        rank.starting = False
        key = rank.begun.key
        if complaint:
            os.waitpid(rank.begun.pid, 0)
            del self._running[key]
            self._send(NotBegun(key=key, why=complaint))
            return
        self._records[key] = RankRecord(begun=rank.begun)
        self._store.began(rank.begun)
        self._send(rank.begun)

    def _reap(self, rank: ChildRank, wait: int) -> None:
        pid = rank.begun.pid
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | wait)
        if found is None:
            return
        if rank.starting:
            self._settle(rank)
            if rank.begun.key not in self._running:
                return
        if rank.sweep:
            # Before it is reaped: until then the number of its group cannot become anyone else's.
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del self._running[rank.begun.key]
        exited = found.si_code == os.CLD_EXITED
        ended = Ended(
            key=rank.begun.key,
            at=time.time(),
            code=found.si_status if exited else None,
            signal=None if exited else found.si_status,
            core_dumped=found.si_code == os.CLD_DUMPED,
            oom_kills=max(0, oom_kills() - rank.oom_kills),
        )
        self._keep_end(ended)
        self._send(ended)

    def _keep_end(self, ended: Ended) -> None:
        self._store.ended(ended)
        self._records[ended.key] = msgspec.structs.replace(self._records[ended.key], ended=ended)

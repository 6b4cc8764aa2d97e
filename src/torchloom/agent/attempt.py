"""One attempt on one node: its ranks, started by a supervisor, and the status of each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from torchloom.agent.environment import RankPaths, rank_argv, rank_environment
from torchloom.agent.monitor.exit_evidence import examine_end
from torchloom.agent.monitor.rank_probe import RankProbe
from torchloom.agent.supervisor.fork import FAILED
from torchloom.agent.supervisor.protocol import Begin, Begun, Ended
from torchloom.agent.supervisor.supervisor_client import Gone, SupervisorClient, SupervisorGone
from torchloom.bus.state_folder import write_private
from torchloom.errors import TorchLoomError
from torchloom.protocol.codec import encode
from torchloom.protocol.node import AttemptStatus, Launch, Place, RankStatus
from torchloom.protocol.phrase import Prose, phrase

LAUNCH = "launch.json"
"""How it was started, for the next agent."""
OVER = "over.json"
"""The same, for an attempt that the weaver has dismissed."""


@dataclass
class Attempt:
    prepared: AttemptStatus
    """Which it is; what was found before the start, and why there will be none."""
    folder: Path
    """Of this attempt: credentials, error files."""
    logs: Path
    changed: Callable[[], None]
    launch: Launch | None = None
    places: Sequence[Place] = ()
    """Of the ranks that run here."""
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    probes: dict[int, RankProbe] = field(default_factory=dict)
    """Of ranks that run, and of those that have ended."""
    link: SupervisorClient | None = None
    halting: asyncio.Task[None] | None = None

    def status(self) -> AttemptStatus:
        ranks = sorted(self.ranks.items())
        statuses = [self.probes[rank].complete(status) if rank in self.probes else status for rank, status in ranks]
        return replace(self.prepared, ranks=tuple(statuses))

    @property
    def over(self) -> bool:
        return bool(self.ranks) and all(rank.state == "ended" for rank in self.ranks.values())

    # ── starting ──

    def expect(self, launch: Launch, node: str) -> None:
        """Report these ranks as starting from now on, even if that takes a while."""
        self.launch = launch
        self.places = [place for place in launch.places if place.node == node]
        self.ranks = {p.rank: RankStatus(rank=p.rank, incarnation=p.incarnation) for p in self.places}
        self.changed()

    async def start(self, link: SupervisorClient, base: dict[str, str], paths: RankPaths) -> None:
        """Start these ranks. One that cannot be started is reported as ended."""
        assert self.launch is not None
        self.link = link
        if self.halting is not None:  # it was ended in the meantime
            for rank in self.ranks:
                self._end(rank, signal="SIGTERM", evidence=phrase("rank_stopped_before_start"))
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.folder / LAUNCH, encode(replace(self.launch, creds={})))
        self.logs.mkdir(parents=True, exist_ok=True)
        begins = {place.rank: self._order(self.launch, place, base, paths) for place in self.places}
        # All at once: the supervisor forks the next one while the previous one still starts.
        await asyncio.gather(*(self._begin(link, rank, begin) for rank, begin in begins.items()))

    def _order(self, launch: Launch, place: Place, base: dict[str, str], paths: RankPaths) -> Begin:
        own = dataclasses.replace(paths, error_file=str(self.error_file(place.rank)))
        if (creds := launch.creds.get(str(place.rank))) is not None:
            path = self._creds(place.rank)
            write_private(path, creds.encode())
            own = dataclasses.replace(own, creds=str(path))
        return Begin(
            key=self.key(place.rank),
            argv=rank_argv(launch, str(self.folder.parent)),
            env=rank_environment(base, launch, place, own),
            cwd=launch.task.cwd or str(Path.cwd()),
            stdout=str(self.log(place.rank, "out")),
            stderr=str(self.log(place.rank, "err")),
            warm=launch.task.standby,
        )

    async def _begin(self, link: SupervisorClient, rank: int, begin: Begin) -> None:
        try:
            answer = await link.begin(begin)
        except SupervisorGone as error:
            if not error.replaced:
                self._end(rank, evidence=error.why)
            return
        except TorchLoomError as error:
            self._end(rank, code=1, evidence=phrase("rank_not_started", why=error.message))
            return
        if isinstance(answer, Begun):
            self.runs(rank, answer)
        else:
            evidence = phrase("rank_end", lines="", how=phrase("exit_code", status=FAILED), error=answer.why)
            self._end(rank, code=FAILED, evidence=evidence, error=answer.why, cause="not_started")

    # ── running and ended ──

    def runs(self, rank: int, begun: Begun) -> None:
        if self.ranks[rank].state == "starting":
            self.probes[rank] = RankProbe(begun.pid)
            self.ranks[rank] = replace(
                self.ranks[rank], state="running", pid=begun.pid, warm=begun.warm, why_cold=begun.why_cold
            )
            self.changed()

    def miss(self) -> None:
        """Report ranks of which no supervisor has a record as killed."""
        for rank, status in self.ranks.items():
            if status.state == "starting":
                self._end(rank, signal="SIGKILL", evidence=phrase("rank_missing"))

    def ended(self, rank: int, ended: Ended) -> None:
        self._end(rank, **examine_end(ended, self.log(rank, "err"), self.error_file(rank)))

    def lost(self, gone: Gone) -> None:
        """Their supervisor is dead."""
        for rank, status in self.ranks.items():
            if status.state != "ended":
                if status.pid:
                    # It died with its supervisor; the processes it had started did not.
                    with contextlib.suppress(OSError):
                        os.killpg(status.pid, signal.SIGKILL)
                self._end(rank, signal="SIGKILL", evidence=gone.why)

    def _end(self, rank: int, evidence: Prose, **how: Any) -> None:
        """`how` has the fields of its status that say how it ended."""
        if self.ranks[rank].state != "ended":
            if rank in self.probes:
                self.probes[rank].end()
            self.ranks[rank] = replace(self.ranks[rank], state="ended", evidence=evidence, **how)
            self.changed()

    # ── ending ──

    def halt(self, grace: float, kill_now: Collection[int] = ()) -> None:
        """Ask all ranks to end, and kill those that are left after the grace. Kill the ranks of `kill_now` at once."""
        self._signal(signal.SIGKILL, ranks=kill_now)
        if self.halting is None and not self.over:  # a repeated command has no effect
            self.halting = asyncio.get_running_loop().create_task(self._halt(grace))

    async def _halt(self, grace: float) -> None:
        # A stopped process handles SIGTERM only after SIGCONT.
        self._signal(signal.SIGTERM, signal.SIGCONT)
        end = asyncio.get_running_loop().time() + grace
        while not self.over and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, *numbers: int, ranks: Collection[int] | None = None) -> None:
        for rank, status in self.ranks.items():
            if status.state != "ended" and self.link is not None and (ranks is None or rank in ranks):
                with contextlib.suppress(SupervisorGone):
                    for number in numbers:
                        self.link.signal(self.key(rank), number)

    def forget(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(SupervisorGone):
                if self.link is not None:
                    self.link.forget(self.key(rank))
            self._creds(rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.folder / LAUNCH).replace(self.folder / OVER)

    # ── names ──

    def key(self, rank: int) -> str:
        return f"{self.prepared.attempt}-{rank}"

    def _creds(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.creds"

    def error_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.error.json"

    def log(self, rank: int, which: str) -> Path:
        return self.logs / f"rank-{rank}.{which}"

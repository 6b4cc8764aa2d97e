"""A whole control plane for flow tests: a real nats-server, a real weaver, real ranks; all killed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client

from tests.flow.records import read_records
from torchloom.bus.connection import connect, find
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder
from torchloom.protocol.codec import decode_answer, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask
from torchloom.protocol.records import RankLost, Record
from torchloom.protocol.subjects import ASK, LOOK, Role
from torchloom.protocol.views import Answer, ClusterView, IncidentView, QueryCluster, RankView
from torchloom.settings import Settings

PATIENCE = 90.0
"""Seconds after which something that has not come is taken not to come. Machines may have much else to do."""
CALM = {"TORCHLOOM_LEAD_SECONDS": "0.2", "TORCHLOOM_VERDICT_SECONDS": "20", "TORCHLOOM_GOODBYE_SECONDS": "20"}
"""So that what is agreed on, and what is said at the end, survives a pause of anyone: the most that is waited for."""
LOOP = """
import sys, time, torchloom
job, replica, rank = sys.argv[1:4]
devices = sys.argv[4].split(",") if len(sys.argv) > 4 and sys.argv[4] else None
loom = torchloom.attach(job=job, replica=replica, rank=int(rank), devices=devices)
step = 0
while not loom.stopping:
    time.sleep(0.01)
    step += 1
    loom.step(loss=1 / step, samples=8)
"""
"""A rank without torch, which starts in a blink."""


class Plane:
    def __init__(self, folder: Path) -> None:
        self.settings = Settings(state=str(folder))
        self.server = EmbeddedServer(StateFolder(folder), Listen(port=0))
        self.weaver: subprocess.Popen[bytes] | None = None
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.env = {k: v for k, v in os.environ.items() if not k.upper().startswith(("TORCHLOOM", "MARDUK"))}
        self.env |= CALM | {"TORCHLOOM_STATE": str(folder)}
        self._client: Client | None = None

    # ── processes ──

    def start_weaver(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.server.folder.logs / "weaver.log").open("ab") as output:
            self.weaver = subprocess.Popen(
                [sys.executable, "-m", "torchloom.cli.main", "weaver", *words],
                env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        return self.weaver

    def weaver_log(self) -> str:
        return (self.server.folder.logs / "weaver.log").read_text()

    def start_rank(
        self, replica: str = "hi", rank: int = 0, job: str = "job", devices: str = "", **env: str
    ) -> subprocess.Popen[bytes]:
        return self.start_script([sys.executable, "-c", LOOP, job, replica, str(rank), devices], **env)

    def start_script(self, words: list[str], **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            words, env=self.env | env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.ranks.append(process)
        return process

    def kill_server(self) -> None:
        assert self.server.process
        self.server.process.kill()
        self.server.process.wait()

    def stop_all(self) -> None:
        for process in (*self.ranks, self.weaver):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            if process is not None:
                process.wait()
                if process.stderr:
                    process.stderr.close()
        self.server.stop()

    # ── looking ──

    async def client(self, role: Role = Role.VIEWER) -> Client:
        if self._client is None or self._client.is_closed:
            self._client = await connect(find(self.settings, role), name="test", keep_trying=True)
        return self._client

    async def _request(self, role: Role, subject: str, data: bytes) -> Answer:
        address = find(self.settings, role)
        client = await connect(address, name="test", timeout=20)
        try:
            return decode_answer((await client.request(subject, data, timeout=20)).data)  # type: ignore[no-any-return]
        finally:
            await client.close()

    async def look(self) -> ClusterView:
        answer = await self._request(Role.VIEWER, LOOK.template, encode(QueryCluster()))
        assert isinstance(answer, ClusterView)
        return answer

    async def ask(self, ask: Ask) -> Answer:
        return await self._request(Role.OPERATOR, ASK.template, encode(ask))

    async def rank(self, replica: str = "hi", rank: int = 0, job: str = "job") -> RankView | None:
        return next((r for r in (await self.look()).ranks if r.rank == RankId(job, replica, rank)), None)

    async def incidents(self) -> list[IncidentView]:
        return list((await self.look()).incidents)

    async def records(self) -> list[Record]:
        """Everything in the log, oldest first."""
        return await read_records(self.settings)

    async def until(self, condition: Callable[[], Any], seconds: float = PATIENCE, what: str = "") -> Any:
        """Wait for a condition, asked again and again; its true value is the result."""
        deadline = time.monotonic() + seconds
        last: object = None
        while time.monotonic() < deadline:
            with contextlib.suppress(nats.errors.Error, Exception):
                result = condition()
                last = await result if asyncio.iscoroutine(result) else result
                if last:
                    return last
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within {seconds} s: {what or condition}; last {last!r}\n{self.weaver_log()[-3000:]}")

    async def until_presence(self, presence: str, replica: str = "hi", rank: int = 0) -> RankView:
        """For what lasts. A rank may be lost and dead between two looks: see `until_lost`."""

        async def there() -> RankView | None:
            found = await self.rank(replica, rank)
            return found if found and found.presence == presence else None

        return await self.until(there, what=f"{replica}/{rank} {presence}")  # type: ignore[no-any-return]

    async def until_lost(self, replica: str = "hi") -> RankLost:
        """As the log has it, however long ago it was."""

        async def there() -> RankLost | None:
            lost = [record for record in await self.records() if isinstance(record, RankLost)]
            return next((record for record in lost if record.rank.replica == replica), None)

        return await self.until(there, what=f"{replica} lost")  # type: ignore[no-any-return]

    async def until_beating(self, replica: str = "hi", rank: int = 0, after: int = 0, job: str = "job") -> RankView:
        async def beating() -> RankView | None:
            found = await self.rank(replica, rank, job)
            live = found and found.presence == "live" and found.beat and found.beat.step > after
            return found if live else None

        return await self.until(beating, what=f"{replica}/{rank} beats")  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def plane(folder: Path, *, weaver: bool = True) -> AsyncIterator[Plane]:
    up = Plane(folder)
    try:
        up.server.start()
        if weaver:
            up.start_weaver()
            await up.until(up.look, what="the weaver answers")
        yield up
    finally:
        if up._client is not None:
            await up._client.close()
        up.stop_all()

"""What tests of the lighthouse share: one in this process, with calls that speak its bytes; and one as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.lighthouse.histories import Outcome, read_response
from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.grpc_server import BindAddress, serve_grpc
from torchloom.lighthouse.quorum import Rules
from torchloom.lighthouse.quorum_service import QuorumService
from torchloom.lighthouse.quorum_store import QuorumStore

os.environ.setdefault("RUST_LOG", "error")  # torchft's own says a lot


class Replica:
    """Speaks to a lighthouse at an address."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.aio.insecure_channel(url.removeprefix("http://"))
        self._quorum = self.channel.unary_unary("/torchft.LighthouseService/Quorum")
        self._heartbeat = self.channel.unary_unary("/torchft.LighthouseService/Heartbeat")

    async def quorum(self, id: str, *, failures: int = 0, timeout: float = 20.0) -> Outcome:
        member = torchft_messages.bytes_field(1, id.encode()) + b"\x40" + torchft_messages.as_varint(failures)
        return read_response(
            await self._quorum(torchft_messages.bytes_field(1, member), timeout=timeout, wait_for_ready=True)
        )

    async def heartbeat(self, id: str) -> None:
        request = torchft_messages.bytes_field(1, id.encode())
        assert await self._heartbeat(request, timeout=20, wait_for_ready=True) == b""

    async def raw(self, method: str, data: bytes) -> bytes:
        return await self.channel.unary_unary(method)(data, timeout=20)  # type: ignore[no-any-return]


class Here:
    """A lighthouse in this process."""

    def __init__(self, service: QuorumService, place: BindAddress) -> None:
        self.service = service
        self.url = place.url
        self.replica = Replica(place.url)

    async def waits(self, *ids: str) -> None:
        await until(lambda: set(ids) == set(self.service.state.waiting))


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Here]"]


@pytest.fixture
def begin(tmp_path: Path) -> Start:
    @contextlib.asynccontextmanager
    async def begin(
        min_replicas: int = 1, join: float = 60.0, heartbeat: float = 60.0, port: int = 0, tick: float = 0.1
    ) -> AsyncIterator[Here]:
        with contextlib.closing(QuorumStore(tmp_path / "kept")) as keeping:
            service = QuorumService(Rules(min_replicas, join, heartbeat), keeping, tick)
            async with serve_grpc(service, BindAddress("127.0.0.1", port)) as place:
                here = Here(service, place)
                try:
                    yield here
                finally:
                    await here.replica.channel.close()

    return begin


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.005)


class Apart:
    """A lighthouse as a process."""

    def __init__(self, state: Path, *words: str, addr: str = "") -> None:
        self.state = state
        self.addr = addr
        self.words = words
        self.log = state.parent / "lighthouse.log"
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> Apart:
        env = {k: v for k, v in os.environ.items() if not k.upper().startswith(("TORCHLOOM", "MARDUK"))}
        env |= {"TORCHLOOM_ADDR": self.addr} if self.addr else {}
        words = ["--job", "job", "--bind", "127.0.0.1:0", "--state", str(self.state), *self.words]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torchloom.lighthouse", *words],
                env=env, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.process.stdout
        self.url = self.process.stdout.readline().rpartition("=")[2].strip()
        assert self.url, self.log.read_text()
        return self

    def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stdout
        self.process.stdout.close()
        self.process = None
        return code


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Callable[..., Apart]]:
    made: list[Apart] = []

    def make(*words: str, state: Path | None = None, addr: str = "") -> Apart:
        made.append(Apart(state or tmp_path / "state", *words, addr=addr).start())
        return made[-1]

    yield make
    for one in made:
        if one.process is not None:
            one.end()

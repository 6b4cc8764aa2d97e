"""Thousands of simulated ranks in one process, each with a TCP connection of its own that speaks NATS's text protocol.

To the server and the weaver they are ranks: they show the threadlet's credential, bear a rank's connection name, say
hello through JetStream, beat once they are welcomed, and answer pings and orders. Only what a real client library would
add on this side is left out, so that the load falls on who is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import nkeys

from benchmarks.puppet import Answer, obey
from torchloom.bus.connection import connection_name, find, keep_read_buffers
from torchloom.protocol.codec import decode_command, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.permissions import inbox_prefix
from torchloom.protocol.rank import Beat, Hello, Order, Ordered, StepTimes, Welcome
from torchloom.protocol.subjects import BEAT, COMMAND, REPLY, REPORT, Role
from torchloom.settings import Settings

RANKS_PER_NODE = 8
AT_ONCE = 64
"""Ranks that join at the same time; more, and the server's patience for a login ends before it gets to them."""
WELCOME_SECONDS = 60.0
SLOTS = 100
"""Parts of a second over which the beats are spread."""


class Credential:
    """What the server wants to see: the token, and its nonce signed with the key."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines()
        self.token = lines[1]
        seed = next(line for line in lines if line.startswith("SU"))
        self._keys = nkeys.from_seed(bytearray(seed.encode()))

    def sign(self, nonce: str) -> str:
        return base64.b64encode(self._keys.sign(nonce.encode())).decode()


class SimulatedRank(asyncio.Protocol):
    def __init__(self, number: int, credential: Credential) -> None:
        self.id = RankId("fleet", f"r{number // RANKS_PER_NODE}", number % RANKS_PER_NODE)
        self.incarnation = f"{int(time.time() * 1000):012x}{number:012x}"
        self.steps = 0
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.state = "connecting"
        self._number = number
        self._credential = credential
        self._transport: asyncio.Transport
        self._rest = b""
        self._beat_head = f"PUB {BEAT.for_rank(self.id)} ".encode()

    # ── asyncio's side ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(f"{self.id}: the server hung up: {exc}"))

    def data_received(self, data: bytes) -> None:
        if data == b"PING\r\n" and not self._rest:  # nearly always
            self._transport.write(b"PONG\r\n")
            return
        self._rest += data
        while True:
            line, found, rest = self._rest.partition(b"\r\n")
            if not found:
                return
            if line.startswith((b"MSG ", b"HMSG ")):
                size = int(line.rpartition(b" ")[2])
                if len(rest) < size + 2:
                    return
                self._message(line, rest[:size])
                rest = rest[size + 2 :]
            else:
                self._line(line)
            self._rest = rest

    # ── NATS's side ──

    def _line(self, line: bytes) -> None:
        if line == b"PING":
            self._transport.write(b"PONG\r\n")
        elif line.startswith(b"INFO ") and not self.welcomed.done():
            self._introduce(msgspec.json.decode(line[5:])["nonce"])
        elif line.startswith(b"-ERR") and not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(f"{self.id}: {line.decode()} ({self.state})"))

    def _introduce(self, nonce: str) -> None:
        login = {
            "verbose": False, "pedantic": False, "lang": "python", "version": "2.16.0", "protocol": 1, "headers": True,
            "no_responders": True, "name": connection_name(self.id, self.incarnation),
            "jwt": self._credential.token, "sig": self._credential.sign(nonce),
        }  # fmt: skip
        hello = Hello(
            incarnation=self.incarnation, node=f"node-{self._number // RANKS_PER_NODE}", pid=1000 + self._number,
            devices=(f"GPU-{self._number:08x}-bench",), world_size=RANKS_PER_NODE, launcher="benchmark",
        )  # fmt: skip
        self.state = "hello sent"
        inbox = f"{inbox_prefix(Role.THREADLET)}.{self.incarnation}"
        body = encode(hello)
        self._transport.write(
            b"CONNECT " + msgspec.json.encode(login) + b"\r\n"
            + f"SUB {COMMAND.for_rank(self.id)} 1\r\nSUB {inbox}.* 2\r\n".encode()
            + f"PUB {REPORT.for_rank(self.id)} {inbox}.1 {len(body)}\r\n".encode() + body + b"\r\n"
        )  # fmt: skip

    def _message(self, line: bytes, body: bytes) -> None:
        if not line.split(b" ", 2)[1].startswith(b"loom.command."):
            self.state = f"hello acknowledged: {body.decode()}"
            return
        match decode_command(body):
            case Welcome() if not self.welcomed.done():
                self.welcomed.set_result(None)
            case Order(id=id):
                answer = encode(Ordered(incarnation=self.incarnation, id=id, outcome="applied"))
                self.send(f"PUB {REPLY.for_rank(self.id)} {len(answer)}\r\n".encode() + answer + b"\r\n")

    # ── orders ──

    def next_beat(self, now: float) -> bytes:
        self.steps += 1
        body = encode(make_beat(self.incarnation, self.steps, now))
        return b"%b%d\r\n%b\r\n" % (self._beat_head, len(body), body)

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def cut(self) -> None:
        """As a killed process: no word, the socket closes."""
        self._transport.abort()


def make_beat(incarnation: str, step: int, now: float) -> Beat:
    """As large as an ordinary one."""
    wave = (now * 7919 + step) % 1
    return Beat(
        incarnation=incarnation, step=step,
        times=StepTimes(count=1000, p50=0.001 + wave / 1e4, p99=0.0015 + wave / 1e4, longest=0.004 + wave / 1e3),
        loss=2.3 * wave, samples_per_second=31_415.9 + wave, metrics={"grad_norm": 1 + wave, "lr": 3e-4},
        rss_mb=1234.5 + wave, device_mb=40_321.25,
    )  # fmt: skip


class Fleet:
    def __init__(self, settings: Settings, count: int) -> None:
        keep_read_buffers()  # as each rank does when it connects
        address = find(settings, Role.THREADLET)
        assert address.creds is not None
        self._host, _, port = address.urls[0].partition("://")[2].rpartition(":")
        self._port = int(port)
        credential = Credential(address.creds)
        self.ranks = [SimulatedRank(number, credential) for number in range(count)]
        self._beating: asyncio.Task[None] | None = None
        self._late = 0.0

    async def join(self, _: Answer) -> Answer:
        """All ranks, each beating from its welcome on: one that waited for the last would be missed for its silence."""
        began = time.perf_counter()
        gate = asyncio.Semaphore(AT_ONCE)
        loop = asyncio.get_running_loop()

        async def one(rank: SimulatedRank) -> None:
            async with gate:
                await loop.create_connection(lambda: rank, self._host, self._port)
                await asyncio.wait([rank.welcomed], timeout=WELCOME_SECONDS)
                if not rank.welcomed.done():
                    known = sum(r.welcomed.done() for r in self.ranks)
                    raise TimeoutError(f"{rank.id} was not welcomed ({rank.state}), {known} others were")
                rank.welcomed.result()

        await self.resume({})
        async with asyncio.TaskGroup() as joining:
            for rank in self.ranks:
                joining.create_task(one(rank))
        return {"seconds": time.perf_counter() - began}

    async def resume(self, _: Answer) -> Answer:
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat_on())
        return {}

    async def pause(self, _: Answer) -> Answer:
        """Stop beating. Beats sent, connections that were closed on us, and how late a beat was at worst."""
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
        return {
            "sent": sum(rank.steps for rank in self.ranks),
            "step": max(rank.steps for rank in self.ranks),
            "closed": sum(rank.closed for rank in self.ranks),
            "late_ms": self._late * 1000,
        }

    async def _beat_on(self) -> None:
        """Once a second each, a hundredth of them every 10 ms."""
        began = time.perf_counter()
        tick = 0
        while True:
            now = time.perf_counter()
            due = began + tick / SLOTS
            if due > now:
                await asyncio.sleep(due - now)
            else:
                self._late = max(self._late, now - due)
            self._beat_each(self.ranks[tick % SLOTS :: SLOTS])
            tick += 1

    def _beat_each(self, ranks: Iterable[SimulatedRank]) -> None:
        now = time.time()
        for rank in ranks:
            if not rank.closed and rank.welcomed.done():
                rank.send(rank.next_beat(now))

    async def flood(self, order: Answer) -> Answer:
        """Each rank sends beats up to this step, all at once. When that began."""
        step, now = int(order["step"]), time.time()
        # Made beforehand: from the first byte on, this process should leave the machine to who is measured.
        blobs = [b"".join(rank.next_beat(now) for _ in range(step - rank.steps)) for rank in self.ranks]
        began = time.perf_counter()
        for rank, blob in zip(self.ranks, blobs, strict=True):
            rank.send(blob)
        return {"began": began, "bytes": sum(map(len, blobs))}

    async def cut(self, order: Answer) -> Answer:
        """The end of one rank."""
        rank = self.ranks[int(order["number"])]
        began = time.perf_counter()
        rank.cut()
        return {"rank": str(rank.id), "began": began}


async def run(settings: Settings, count: int) -> None:
    fleet = Fleet(settings, count)
    orders = (fleet.join, fleet.resume, fleet.pause, fleet.flood, fleet.cut)
    await obey({order.__name__: order for order in orders})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    asyncio.run(run(Settings.from_env(), parser.parse_args().ranks))


if __name__ == "__main__":
    main()

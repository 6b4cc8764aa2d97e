"""The spine under fire: ranks, weaver and nats-server are killed and frozen at random under a `loom up`.

After every storm there is a calm, and then what the weaver knows must be the truth: living ranks live, in the life they
are in; killed ranks dead; those that said goodbye left; nothing ever stored has gone; and folding the log anew gives
the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchloom.bus.connection import connect, find
from torchloom.bus.streams import read_log
from torchloom.bus.weaver_client import WeaverClient
from torchloom.protocol.codec import decode_entry
from torchloom.protocol.operator import Done, Register
from torchloom.protocol.records import IncidentOpened
from torchloom.protocol.subjects import LOG_STREAM, Role
from torchloom.protocol.views import ClusterView
from torchloom.settings import Settings
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.storage import Store

LOOM = [sys.executable, "-m", "torchloom.cli.main"]
RANK = """
import sys, time, torchloom
loom = torchloom.attach(job="storm", replica=sys.argv[1], devices=[sys.argv[2]])
while True:
    time.sleep(0.02)
    loom.step(loss=0.5, samples=4)
"""
REPLICAS = 6
CALM_SECONDS = 180.0


@dataclass
class Member:
    """What the campaign itself knows of a replica: the truth to compare with."""

    process: subprocess.Popen[bytes] | None = None
    expected: str = "none"
    frozen: bool = False


class Storm:
    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.settings = Settings(state=str(folder / "state"))
        self.env = os.environ | {"TORCHLOOM_STATE": self.settings.state}
        self.members = {f"r{n}": Member() for n in range(REPLICAS)}
        self.problems: list[str] = []
        self.faults: Counter[str] = Counter()
        self.registered: set[str] = set()
        self.incidents: set[str] = set()
        self.keeper = subprocess.Popen(
            [*LOOM, "up", "--port", "0"], env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    # ── faults ──

    def start(self, name: str) -> None:
        member = self.members[name]
        device = f"GPU-{self.chance.randrange(4)}"
        member.process = subprocess.Popen(
            [sys.executable, "-c", RANK, name, device], env=self.env, stderr=subprocess.DEVNULL
        )
        member.expected, member.frozen = "live", False

    def end(self, name: str, number: signal.Signals, expected: str) -> None:
        member = self.members[name]
        assert member.process
        self.thaw(member)
        member.process.send_signal(number)
        member.process.wait(60)
        member.expected = expected

    def freeze(self, name: str) -> None:
        member = self.members[name]
        assert member.process
        member.process.send_signal(signal.SIGSTOP)
        member.frozen = True

    def thaw(self, member: Member) -> None:
        if member.frozen and member.process:
            member.process.send_signal(signal.SIGCONT)
            member.frozen = False

    def child(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.keeper.pid).children():
                words = process.cmdline()
                if words and name in {Path(words[0]).name, words[-1]}:  # in a path between them it means nothing
                    return process
        return None

    def strike_plane(self, name: str, number: signal.Signals) -> None:
        process = self.child(name)
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    async def fault(self) -> None:
        """One random blow."""
        kinds = ["kill rank", "kill rank", "start", "start", "start", "freeze", "thaw", "leave"]
        kinds += ["kill weaver", "kill weaver", "kill nats", "freeze weaver", "register"]
        kind = self.chance.choice(kinds)
        name = self.chance.choice(sorted(self.members))
        member = self.members[name]
        alive = member.process is not None and member.process.poll() is None
        self.faults[kind] += 1
        if kind == "start" and not alive:
            self.start(name)
        elif kind == "kill rank" and alive:
            self.end(name, signal.SIGKILL, "dead")
        elif kind == "leave" and alive and not member.frozen:
            self.end(name, signal.SIGINT, "left or dead")  # its goodbye needs a server to be there
        elif kind == "freeze" and alive:
            self.freeze(name)
        elif kind == "thaw":
            self.thaw(member)
        elif kind == "kill weaver":
            self.strike_plane("weaver", signal.SIGKILL)
        elif kind == "kill nats":
            self.strike_plane("nats-server", signal.SIGKILL)
        elif kind == "freeze weaver":
            self.strike_plane("weaver", signal.SIGSTOP)
            await asyncio.sleep(self.chance.uniform(0.1, 6))
            self.strike_plane("weaver", signal.SIGCONT)
        elif kind == "register":
            await self.register()

    async def register(self) -> None:
        """Something an operator was told is done must stay done."""
        device = f"GPU-hand-{len(self.registered)}"
        with contextlib.suppress(Exception):
            async with WeaverClient(self.settings, Role.OPERATOR, timeout=2) as weaver:
                answer = await weaver.ask(Register(device=device, job="manual", replica="hand"))
                if isinstance(answer, Done):
                    self.registered.add(device)

    # ── calm ──

    async def calm(self) -> None:
        """Let everyone thaw, wait until the weaver's picture is the truth, and check what must always hold."""
        for member in self.members.values():
            self.thaw(member)
        deadline = time.monotonic() + CALM_SECONDS
        wrong = ["the control plane does not answer"]
        while wrong and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            with contextlib.suppress(Exception):
                async with WeaverClient(self.settings, Role.VIEWER, timeout=10) as weaver:
                    wrong = self.differences(await weaver.cluster())
        self.problems += wrong
        await self.check_log()

    def differences(self, view: ClusterView) -> list[str]:
        """Where the weaver's picture is not what really is."""
        seen = {rank.rank.replica: rank for rank in view.ranks if rank.rank.job == "storm"}
        wrong = []
        for name, member in self.members.items():
            rank = seen.get(name)
            if member.expected == "live":
                if rank is None or rank.presence != "live" or member.process is None or rank.pid != member.process.pid:
                    wrong.append(f"{name} lives as pid {member.process and member.process.pid}, seen {rank}")
            elif member.expected != "none" and rank is not None and rank.presence not in {"left", "dead", "failed"}:
                wrong.append(f"{name} is gone ({member.expected}) but seen as {rank.presence}")
        missing = self.registered - {device.device for device in view.devices}
        return wrong + [f"{device} had been registered and is gone" for device in sorted(missing)]

    async def check_log(self) -> None:
        """Incidents once seen are in the log for good, terms grow, and two folds of it agree."""
        client = await connect(find(self.settings, Role.WEAVER), name="campaign", timeout=20)
        try:
            term, incidents = 0, set()
            async for stored in read_log(client, LOG_STREAM.name, 1):
                entry = decode_entry(stored.data)
                if entry.term < term:
                    self.problems.append(f"entry {stored.seq} of term {entry.term} stands after term {term}")
                term = entry.term
                incidents |= {record.id for record in entry.records if isinstance(record, IncidentOpened)}
            if lost := self.incidents - incidents:
                self.problems.append(f"incidents {sorted(lost)} were in the log and are gone")
            self.incidents = incidents
            one, other = Store(client, Health(Clock())), Store(client, Health(Clock()))
            first = (await one.load(self.settings)).state()
            again = (await other.load(self.settings)).state()
            if first.ranks != again.ranks and one.seq == other.seq:
                self.problems.append("two folds of one log differ")
        finally:
            await client.close()

    def clear(self) -> None:
        for member in self.members.values():
            if member.process is not None:
                self.thaw(member)
                member.process.kill()
                member.process.wait()
        self.strike_plane("weaver", signal.SIGCONT)
        self.keeper.terminate()
        try:
            self.keeper.wait(120)
        except subprocess.TimeoutExpired:
            self.problems.append("`loom up` did not end within 120 s")
            self.keeper.kill()
            self.keeper.wait()


async def _run(seed: int, seconds: float) -> list[str]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="torchloom-campaign-") as folder:
        storm = Storm(Path(folder), chance)
        try:
            end = time.monotonic() + seconds
            storms = 0
            for name in storm.members:
                storm.start(name)
            await storm.calm()
            while time.monotonic() < end and not storm.problems:
                for _ in range(chance.randint(4, 10)):
                    await storm.fault()
                    await asyncio.sleep(chance.uniform(0, 1.5))
                await storm.calm()
                storms += 1
                print(
                    f"  storm {storms}: {sum(storm.faults.values())} faults, {len(storm.incidents)} incidents",
                    flush=True,
                )
        finally:
            storm.clear()
        print(f"  {dict(storm.faults)}", flush=True)
        return storm.problems


def run(seed: int, seconds: float) -> list[str]:
    """What was wrong; empty if all held."""
    return asyncio.run(_run(seed, seconds))

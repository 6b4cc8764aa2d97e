"""Changes under fire: four DDP ranks train while values are changed again and again and the weaver is killed at random.

Every change has a value of its own, and each rank writes down which value it saw from which step on. In the end all
ranks must have seen the same values at the same steps: those, and only those, that the operator was told are made.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.flow.ddp import Group, Plan
from tests.flow.plane import Plane, plane
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import Refused, TorchLoomError
from torchloom.protocol.operator import SetKnobs, Steer
from torchloom.protocol.records import ChangeDecided, ChangeProposed
from torchloom.protocol.subjects import Role

CHANGES_PER_SECOND = 1.0
"""At least so many must be made, on however busy a machine."""
ANSWER_SECONDS = 90.0


class Storm:
    def __init__(self, up: Plane, group: Group, chance: random.Random) -> None:
        self.up = up
        self.group = group
        self.chance = chance
        self.made: list[tuple[float, int]] = []
        """Values that were told to be made, each with its step."""
        self.refused: list[str] = []
        self.problems: list[str] = []
        self.kills = 0

    async def change(self, value: float, kill: bool) -> None:
        """Set a value of its own; meanwhile the weaver may be killed, at whatever point of the protocol."""
        killing = asyncio.create_task(self._kill_weaver(self.chance.uniform(0, 0.08))) if kill else None
        request = secrets.token_hex(16)
        try:
            async with WeaverClient(self.up.settings, Role.OPERATOR, patience=ANSWER_SECONDS) as weaver:
                wanted = SetKnobs(request=request, job=self.group.plan.job, values={"x": value}, operator="storm")
                done = await weaver.ask(wanted, ANSWER_SECONDS)
                assert done.step is not None
                self.made.append((value, done.step))
        except Refused as error:
            self.refused.append(error.message)
        except TorchLoomError as error:
            self.problems.append(f"x={value}: no answer: {error.message}")
        if killing is not None:
            await killing

    async def _kill_weaver(self, after: float) -> None:
        await asyncio.sleep(after)
        assert self.up.weaver
        self.up.weaver.kill()
        await asyncio.to_thread(self.up.weaver.wait)
        self.up.start_weaver()
        self.kills += 1

    async def end(self) -> None:
        """Stop the training, and compare what everyone saw with what was told."""
        async with WeaverClient(self.up.settings, Role.OPERATOR, patience=ANSWER_SECONDS) as weaver:
            stop = Steer(request=secrets.token_hex(16), verb="stop", job=self.group.plan.job)
            await weaver.ask(stop, ANSWER_SECONDS)
        codes = await asyncio.to_thread(self.group.exit_codes)
        if codes != [0] * self.group.plan.size:
            self.problems.append(f"the ranks did not end well: exit codes {codes}")
        expected = [(0.0, 0), *self.made]
        for rank, saw in enumerate(self.group.saw("x")):
            if saw != expected:
                odd = [pair for pair in saw if pair not in expected] + [pair for pair in expected if pair not in saw]
                self.problems.append(f"rank {rank} saw other values or steps than were told: {odd or 'another order'}")
        if len(set(map(str, self.group.ends))) != 1:
            self.problems.append(f"the ranks ended differently: {self.group.ends}")
        await self._check_log()

    async def _check_log(self) -> None:
        """One request leads to one change at most, and a change gets one verdict."""
        records = await self.up.records()
        verdicts = Counter(record.id for record in records if isinstance(record, ChangeDecided))
        self.problems += [f"{id} was decided {count} times" for id, count in verdicts.items() if count > 1]
        committed = {record.id for record in records if isinstance(record, ChangeDecided) and record.commit}
        proposals = {record.change.id: record.request for record in records if isinstance(record, ChangeProposed)}
        twice = Counter(proposals[id] for id in committed)
        self.problems += [f"request {request} was carried out {n} times" for request, n in twice.items() if n > 1]


async def storm(folder: Path, chance: random.Random, changes: int, end: float = float("inf")) -> Storm:
    """At least so many changes made, and more until `end`; one in four has the weaver killed meanwhile."""
    async with plane(folder / "state") as up:
        group = Group(Plan(up.settings.state, folder / "group"))
        try:
            for rank in range(group.plan.size):
                await up.until_beating("hi", rank)
            found = Storm(up, group, chance)
            asked = 0
            while len(found.made) < changes or time.monotonic() < end < float("inf"):
                asked += 1
                await found.change(float(asked), kill=chance.random() < 0.25)
                if found.problems or asked > 2 * changes + len(found.made):
                    break
                if asked % 50 == 0:
                    print(f"  {len(found.made)} made, {len(found.refused)} refused, {found.kills} kills", flush=True)
            await found.end()
            return found
        finally:
            group.kill()


def run(seed: int, seconds: float) -> list[str]:
    """What was wrong; empty if all held."""
    with tempfile.TemporaryDirectory(prefix="torchloom-campaign-") as folder:
        found = asyncio.run(
            storm(Path(folder), random.Random(seed), round(seconds * CHANGES_PER_SECOND), time.monotonic() + seconds)
        )
    reasons = Counter(reason.partition(": ")[2] or reason for reason in found.refused)
    print(f"  {len(found.made)} changes made, {found.kills} kills of the weaver, refused: {dict(reasons)}", flush=True)
    return found.problems

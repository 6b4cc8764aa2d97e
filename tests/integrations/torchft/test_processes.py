"""The examples for torchft, each replica a process: killed, healed, steered and stopped, on a stock lighthouse."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.threadlet.played import PlayedWeaver, until, until_true
from torchloom.bus.connection import connect, find
from torchloom.protocol.codec import decode_beat, decode_reply, decode_report, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.rank import Beat, ChangeSpec, Healed, Hello, Joined, Propose, Reply, Report, Verdict
from torchloom.protocol.subjects import BEAT, QUORUM, REPLY, REPORT, Role
from torchloom.settings import Settings

pytest.importorskip("torchft", reason="torchft is not installed")

EXAMPLES = Path(__file__).parents[3] / "examples"
T = TypeVar("T", bound=Report)


class Stage:
    """Replicas of one script, and what is heard of them."""

    def __init__(self, weaver: PlayedWeaver, script: str, environ: dict[str, str], folder: Path) -> None:
        self.weaver, self.job, self.script = weaver, Path(script).stem, EXAMPLES / script
        self._environ, self._folder = environ, folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.beats: dict[int, Beat] = {}
        self.reports: list[tuple[int, Report]] = []
        self.replies: list[Reply] = []

    async def listen(self) -> None:
        async def beat(message: Any) -> None:
            self.beats[self._group(message.subject)] = decode_beat(message.data)

        async def report(message: Any) -> None:
            self.reports.append((self._group(message.subject), decode_report(message.data)))

        async def reply(message: Any) -> None:
            self.replies.append(decode_reply(message.data))

        for subject, heard in ((BEAT, beat), (REPORT, report), (REPLY, reply)):
            await self.weaver.client.subscribe(subject.pattern(), cb=heard)
        await self.weaver.client.flush()

    @staticmethod
    def _group(subject: str) -> int:
        return int(subject.split(".")[3].rpartition("_")[2])

    def start(self, group: int) -> None:
        environ = self._environ | {"REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": "3"}
        words = [sys.executable, str(self.script), "--steps", "1000000", "--step-seconds", "0.01"]
        with self.log(group).open("ab") as output:
            self.processes[group] = subprocess.Popen(words, env=environ, stdout=output, stderr=output)

    def log(self, group: int) -> Path:
        return self._folder / f"{group}.log"

    def told(self, kind: type[T], group: int) -> list[T]:
        return [report for teller, report in self.reports if teller == group and isinstance(report, kind)]

    async def committing(self, *groups: int, beyond: int = 0, participants: int | None = None) -> None:
        async def all_are() -> bool:
            dead = [group for group in groups if self.processes[group].poll() is not None]
            assert not dead, self.log(dead[0]).read_text()[-3000:]
            heard = [self.beats.get(group) for group in groups]
            return all(
                beat and beat.step > beyond and (participants is None or beat.participants == participants)
                for beat in heard
            )

        await until(all_are, f"steps of {groups}", 120)

    async def change(self, number: int, *groups: int, action: Any = "set", **values: Any) -> int:
        """On these at one step ahead; which."""
        step = max(self.beats[group].step for group in groups) + 100
        wanted = ChangeSpec(id=f"c{number}", number=number, step=step, action=action, values=values)
        for group in groups:
            life = self.told(Hello, group)[-1].incarnation
            rank = RankId(self.job, f"{self.job}_{group}", 0)
            await self.weaver.say(Propose(term=1, incarnation=life, job=self.job, change=wanted), rank)
            await self.weaver.say(Verdict(term=1, incarnation=life, id=wanted.id, commit=True), rank)
        return step

    async def ended(self, group: int) -> str:
        code = await asyncio.to_thread(self.processes[group].wait, 60)
        text = self.log(group).read_text()
        assert code == 0, text[-3000:]
        return text


@pytest.fixture
async def stage(
    request: pytest.FixtureRequest, weaver: PlayedWeaver, lighthouse: str, settings: Settings, tmp_path: Path
) -> AsyncIterator[Stage]:
    weaver.welcomes = True
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHLOOM", "TORCHFT"))}
    environ |= {"TORCHLOOM_STATE": settings.state, "TORCHFT_LIGHTHOUSE": lighthouse, "RUST_LOG": "error"}
    stage = Stage(weaver, request.param, environ, tmp_path)
    await stage.listen()
    yield stage
    for process in stage.processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["train_ddp.py"], indirect=True)
async def test_a_replica_is_killed_comes_back_heals_and_all_stop_at_one_step(stage: Stage, settings: Settings) -> None:
    for group in range(3):
        stage.start(group)
    await stage.committing(0, 1, 2, beyond=20, participants=3)
    first = stage.told(Joined, 2)[-1].member
    assert first.startswith("train_ddp_2:")
    await stage.change(1, 0, 1, 2, lr=0.01)
    await stage.committing(0, 1, 2, beyond=stage.beats[0].step + 120)
    assert {stage.beats[group].knobs["lr"] for group in range(3)} == {0.01}

    quorum = stage.beats[0].quorum
    stage.processes[2].kill()
    lighthouse = await connect(find(settings, Role.THREADLET), name="a lighthouse")
    says = LighthouseBeat(incarnation="0" * 24, address="x", quorum=quorum or 0, broken=(quorum or 0,))
    await lighthouse.publish(QUORUM.to(job="train_ddp"), encode(says))
    await stage.committing(0, 1, beyond=stage.beats[0].step, participants=2)
    await lighthouse.close()

    stage.processes[2].wait()
    healed_before = len(stage.told(Healed, 2))  # the first life may have joined late and healed too
    stage.start(2)
    await stage.committing(0, 1, 2, beyond=stage.beats[0].step, participants=3)
    # Beats and reports are heard on two subscriptions, and either may be the later one.
    await until_true(lambda: len(stage.told(Healed, 2)) > healed_before, "that the new life healed")
    await until_true(lambda: stage.told(Joined, 2)[-1].member != first, "that the new life joined")
    healed = stage.told(Healed, 2)[-1]
    assert healed.step > 100
    assert healed.source in {"train_ddp_0", "train_ddp_1"}
    assert {stage.beats[group].knobs["lr"] for group in range(3)} == {0.01}  # nobody told it but its peer
    assert {stage.beats[group].change for group in range(3)} == {1}

    step = await stage.change(2, 0, 1, 2, action="stop")
    for group in range(3):
        assert f"replica {group} ends after {step} steps" in await stage.ended(group)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["train_localsgd.py"], indirect=True)
async def test_how_often_replicas_exchange_is_changed_while_they_train(stage: Stage) -> None:
    for group in range(2):
        stage.start(group)
    await stage.committing(0, 1, beyond=5, participants=2)
    await stage.change(1, 0, 1, sync_every=2)
    await stage.committing(0, 1, beyond=stage.beats[0].step + 120)
    assert {stage.beats[group].knobs["sync_every"] for group in range(2)} == {2}
    step = await stage.change(2, 0, 1, action="stop")
    for group in range(2):
        assert f"replica {group} ends after {step} steps" in await stage.ended(group)

"""Bad input gets a clear answer or a counted refusal; the weaver lives and nothing stored is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.plane import Plane, plane
from torchloom.bus.connection import connect, find
from torchloom.protocol.operator import Done, No, Register, SetKnobs
from torchloom.protocol.phrase import phrase
from torchloom.protocol.subjects import Role
from torchloom.views.wording.phrases import render
from torchloom.weaver.service import NO_INCARNATION

GARBAGE = [
    b"",
    b"\x00\xff\xfe",
    b"{",
    b"null",
    b"[]",
    b'{"is": "Beat"}',
    b'{"is": "Beat", "incarnation": "not-hexadecimal-at-all-!", "step": 1}',
    b'{"is": "FromTheFuture", "x": 1}',
    b'{"is": "Hello", "incarnation": "short", "node": "n", "pid": 1, "devices": []}',
    b'{"is": "Hello", "incarnation": "0123456789abcdef01234567", "node": "n", "pid": "one", "devices": []}',
    b'{"is": "Hello", "incarnation": "0123456789abcdef01234567", "node": "n", "pid": 1, "devices": ["a.b *"]}',
    b'{"is": "Goodbye", "incarnation": "0123456789abcdef01234567", "how": "unheard of"}',
    b'{"is": "Fail", "device": "GPU.1"}',
    b"[" * 5000,
    b'"' + b"x" * 200_000 + b'"',
]


@pytest.mark.promise(7)
async def test_garbage_on_every_subject_is_counted_and_harmless(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank()
        await up.until_beating()
        rank = await connect(find(up.settings, Role.THREADLET), name="liar", keep_trying=True)
        agent = await connect(find(up.settings, Role.AGENT), name="liar", keep_trying=True)
        operator = await connect(find(up.settings, Role.OPERATOR), name="liar", keep_trying=True)
        for data in GARBAGE:
            for subject in ("loom.beat.job.hi.0", "loom.report.job.hi.0", "loom.beat.j.r.-1", "loom.report.j.r.x"):
                await rank.publish(subject, data)
            await agent.publish("loom.fact.agent", data)
            for subject in ("loom.ask", "loom.look"):
                await operator.publish(subject, data)  # and no one waits for an answer
        for client in (rank, agent, operator):
            await client.flush()
            await client.close()

        async def counted() -> bool:
            refused = (await up.look()).plane.refused
            return sum(refused.values()) >= len(GARBAGE) * 6

        await up.until(counted, what="everything refused")
        refusal = render(phrase("not_accepted", what="beat", why=NO_INCARNATION))
        assert refusal[:100] in (await up.look()).plane.refused
        assert up.weaver
        assert up.weaver.poll() is None
        assert (await up.rank()).presence == "live"  # type: ignore[union-attr]
        assert isinstance(await up.ask(Register(device="GPU-1", job="m", replica="r")), Done)
        kinds = {type(record).__name__ for record in await up.records()}
        assert kinds <= {"TermBegan", "JobBegan", "RankJoined", "KnobsOffered", "InboxRead", "DeviceRegistered"}


async def test_a_newer_message_with_unknown_fields_is_understood(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        rank = await connect(find(up.settings, Role.THREADLET), name="newer")
        hello = b'{"is":"Hello","incarnation":"0123456789abcdef01234567","node":"n","pid":1,"devices":[],"mood":"fine"}'
        await rank.jetstream().publish("loom.report.job.hi.0", hello)
        await up.until(up.rank, what="the rank")
        await rank.close()


async def test_an_operator_of_another_version_is_told_that_it_was_not_understood(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        answer = await up._request(Role.OPERATOR, "loom.ask", b'{"is":"Dance"}')
        assert isinstance(answer, No)
        assert answer.code == "not_understood"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 6 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave not a byte."""
    path = folder / "fill"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (65536, 512, 1):
        try:
            while True:
                os.write(fd, b"x" * size)
        except OSError:
            pass
    os.close(fd)
    return path


async def test_a_full_disk_is_said_and_outlived(small_disk: Path) -> None:
    up = Plane(small_disk / "s")
    words = [sys.executable, "-m", "torchloom.cli.main", "up", "--port", "0"]
    keeper = subprocess.Popen(words, env=up.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        await up.until(up.look, what="the control plane")
        training = up.start_rank()
        await up.until_beating()
        filler = fill(small_disk)
        accepted = []

        async def refused() -> bool:
            name = f"GPU-{len(accepted)}"
            answer = await up.ask(Register(device=name, job="m", replica="r" * 100))
            if isinstance(answer, Done):
                accepted.append(name)
            return isinstance(answer, No) and answer.code == "log_refuses"

        await up.until(refused, what="a refusal")
        view = await up.look()
        assert view.plane.troubles == ("log",)
        assert training.poll() is None
        filler.unlink()

        async def works_again() -> bool:
            return isinstance(await up.ask(Register(device="GPU-late", job="m", replica="r")), Done)

        await up.until(works_again, what="the log is writable again")
        devices = {device.device for device in (await up.look()).devices}
        assert set(accepted) | {"GPU-late"} <= devices
        await up.until_beating(after=0)
    finally:
        for process in up.ranks:
            process.kill()
            process.wait()
        keeper.terminate()
        keeper.communicate(timeout=60)
    assert keeper.returncode == 0


async def test_json_nested_thousands_deep_is_refused_and_does_not_come_back(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        deep = b'{"is":"Hello","zz":' + b'{"a":' * 5000 + b"1" + b"}" * 5001
        rank = await connect(find(up.settings, Role.THREADLET), name="liar")
        await rank.jetstream().publish("loom.report.q.r.0", deep)
        for subject in ("loom.beat.q.r.0", "loom.reply.q.r.0"):
            await rank.publish(subject, deep)
        await rank.flush()
        await rank.close()
        answer = await up._request(Role.OPERATOR, "loom.ask", deep.replace(b"Hello", b"Fail"))
        assert isinstance(answer, No)

        async def counted() -> bool:
            return sum((await up.look()).plane.refused.values()) >= 4

        await up.until(counted, what="four refusals")
        assert up.weaver
        assert up.weaver.poll() is None


async def test_no_rank_can_judge_a_change_that_was_not_proposed_to_it(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        script = "import time, torchloom; l = torchloom.attach(job='job', replica='hi'); l.knob('x', 1.0)\n"
        script += "while True: time.sleep(0.01); l.step()"
        up.start_script([sys.executable, "-c", script])
        await up.until_beating()
        rank = await connect(find(up.settings, Role.THREADLET), name="liar")
        for number in range(1, 20):
            await rank.jetstream().publish(f"loom.verdict.job.c{number}.abort", b"")
        await rank.close()
        answer = await up.ask(SetKnobs(request="1" * 32, job="job", values={"x": 2.0}))
        assert isinstance(answer, Done), answer


async def test_a_knob_that_became_nan_is_not_told_and_its_rank_is_not_lost(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        script = "import time, torchloom; l = torchloom.attach(job='job', replica='hi')\n"
        script += "l.knob('x', get=lambda: float('nan') if l.step_number else 1.0, set=print); l.knob('y', 2.0)\n"
        script += "while True: time.sleep(0.01); l.step()"
        up.start_script([sys.executable, "-c", script])
        first = await up.until_beating()
        assert first.beat
        again = await up.until_beating(after=first.beat.step + 50)
        assert again.beat
        assert set(again.beat.knobs) == {"log_level", "y"}

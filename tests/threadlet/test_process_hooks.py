"""A process that ends: its exit code, its output and its time are its own, whatever happens to the control plane."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nats_servers import NOBODY
from tests.threadlet.played import PlayedWeaver
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.protocol.rank import Goodbye, Hello
from torchloom.settings import Settings

PATIENCE = 60.0
"""Seconds after which a process that has not ended is taken to hang."""
CONNECTED = """
import sys, time, torchloom
loom = torchloom.attach("job", "hi")
while not loom.connected: time.sleep(0.005)
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str


class Running:
    """A training process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self) -> str:
        assert self.process.stdout
        return (await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)).decode().strip()

    async def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()

    async def end(self) -> Ended:
        out, err = await asyncio.wait_for(self.process.communicate(), PATIENCE)
        assert self.process.returncode is not None
        return Ended(self.process.returncode, out.decode(), err.decode())


async def start(script: str, state: Path, **environ: str) -> Running:
    pipe = asyncio.subprocess.PIPE
    env = os.environ | {"TORCHLOOM_STATE": str(state), "TORCHLOOM_GOODBYE_SECONDS": "600"} | environ
    return Running(
        await asyncio.create_subprocess_exec(
            sys.executable, "-X", "dev", "-W", "error", "-c", script, stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
    )


async def test_an_end_in_good_order_is_told(weaver: PlayedWeaver, settings: Settings) -> None:
    ended = await (await start(CONNECTED + "loom.step(step=9)", settings.state_folder)).end()
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    goodbye = await weaver.report(Goodbye)
    assert (goodbye.how, goodbye.step) == ("finished", 9)


async def test_an_uncaught_error_is_told_and_still_printed_by_the_hook_that_was_there(
    weaver: PlayedWeaver, settings: Settings
) -> None:
    script = "import sys; sys.excepthook = lambda k, e, t: print('mine', e)\n" + CONNECTED + "raise ValueError('boom')"
    ended = await (await start(script, settings.state_folder)).end()
    assert (ended.code, ended.out, ended.err) == (1, "mine boom\n", "")
    goodbye = await weaver.report(Goodbye)
    assert goodbye.how == "failed"
    assert goodbye.error.startswith("ValueError: boom (<string>:")


async def test_an_interrupt_is_told(weaver: PlayedWeaver, settings: Settings) -> None:
    running = await start(CONNECTED + "print('up', flush=True); time.sleep(60)", settings.state_folder)
    assert await running.line() == "up"
    os.kill(running.pid, signal.SIGINT)
    ended = await running.end()
    assert ended.code in {130, -signal.SIGINT}
    assert (await weaver.report(Goodbye)).how == "interrupted"


async def test_an_exit_code_is_left_alone(weaver: PlayedWeaver, settings: Settings) -> None:
    ended = await (await start(CONNECTED + "sys.exit(7)", settings.state_folder)).end()
    assert (ended.code, ended.err) == (7, "")


async def test_without_a_server_the_exit_does_not_wait(tmp_path: Path) -> None:
    script = "import time, torchloom; loom = torchloom.attach('job', 'hi'); loom.step(loss=1.0); input()"
    running = await start(script, tmp_path / "nothing", TORCHLOOM_ADDR=NOBODY)
    assert running.process.stderr
    warning = (await asyncio.wait_for(running.process.stderr.readline(), PATIENCE)).decode()
    assert "no control plane answers" in warning
    await running.tell()
    ended = await running.end()
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_server_that_is_frozen_or_gone_delays_the_exit_by_the_goodbye_at_most(
    server: EmbeddedServer, weaver: PlayedWeaver, settings: Settings, sign: signal.Signals
) -> None:
    script = CONNECTED + "print('up', flush=True); input()"
    running = await start(script, settings.state_folder, TORCHLOOM_GOODBYE_SECONDS="0.3")
    assert await running.line() == "up"
    await weaver.report(Hello)
    assert server.process
    server.process.send_signal(sign)
    try:
        await running.tell()
        ended = await running.end()  # a frozen one would never answer
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert ended.code == 0
    assert "Traceback" not in ended.err


async def test_a_server_that_was_frozen_from_the_start_is_no_trouble(
    server: EmbeddedServer, settings: Settings
) -> None:
    assert server.process
    server.process.send_signal(signal.SIGSTOP)
    try:
        script = "import time, torchloom; torchloom.attach('job', 'hi'); time.sleep(0.2)"
        ended = await (await start(script, settings.state_folder, TORCHLOOM_GOODBYE_SECONDS="0.3")).end()
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert (ended.code, ended.err) == (0, "")


async def test_a_bad_variable_does_not_stop_training_from_starting(weaver: PlayedWeaver, settings: Settings) -> None:
    running = await start(CONNECTED, settings.state_folder, TORCHLOOM_BEAT_SECONDS="often", RANK="x")
    ended = await running.end()
    assert ended.code == 0
    assert "TORCHLOOM_BEAT_SECONDS='often'" in ended.err
    assert "RANK='x'" in ended.err


async def test_names_that_were_picked_are_shown(tmp_path: Path) -> None:
    script = "import torchloom; loom = torchloom.attach(); print(loom.job, loom.replica, loom.rank)"
    ended = await (await start(script, tmp_path)).end()
    job, replica, rank = ended.out.split()
    assert (job, rank) == ("train", "0")
    assert f"rank 0 of train/{replica}" in ended.err


async def test_a_threadlet_that_is_off_does_nothing(tmp_path: Path) -> None:
    script = (
        "import threading, torchloom; loom = torchloom.attach(); loom.step(loss=1.0); print(loom.connected, "
        "loom.stopping, threading.active_count()); loom.close()"
    )
    ended = await (await start(script, tmp_path, TORCHLOOM_OFF="1")).end()
    assert (ended.code, ended.out, ended.err) == (0, "False False 1\n", "")


async def test_a_spawned_child_that_runs_the_script_again_is_not_the_rank(
    weaver: PlayedWeaver, settings: Settings, tmp_path: Path
) -> None:
    weaver.welcomes = True
    script = tmp_path / "top_level.py"
    script.write_text(
        "import multiprocessing, torchloom\nloom = torchloom.attach('job', 'hi')\n"
        "def work(): print(loom.incarnation == '', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work); child.start(); child.join()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TORCHLOOM_STATE": str(settings.state_folder), "TORCHLOOM_GOODBYE_SECONDS": "600"},
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert out == b"True\n"
    assert [type(report) for report in await weaver.reports()] == [Hello, Goodbye]

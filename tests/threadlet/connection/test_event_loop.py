"""Forked children (DataLoader processes) neither speak for the rank nor hide its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.threadlet.played import RANK, PlayedWeaver, until_true
from torchloom.bus.connection import connect, find_system, parse_connection_name
from torchloom.bus.nats_server import EmbeddedServer, Listen
from torchloom.bus.state_folder import StateFolder
from torchloom.bus.tls import ensure_tls
from torchloom.protocol.rank import Goodbye, Hello
from torchloom.settings import Settings

LOADING = """
import os, sys, time, torch, torchloom
loom = torchloom.attach("job", "hi")
while not loom.connected: time.sleep(0.005)

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, i):
        loom.step(loss=99.0)           # in a child: nothing
        time.sleep(0.01 if i < 4 else 600)
        return os.getpid()

pids = set()
for batch in torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=2, multiprocessing_context="fork"):
    pids.add(int(batch))
    if len(pids) == 2:
        print(*pids, flush=True)
"""


@pytest.fixture(params=["plain", "tls"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Both ways to be connected: a child must not end the parent's TLS either."""
    folder = StateFolder(tmp_path / "state")
    cert, key = ensure_tls(folder, "127.0.0.1") if request.param == "tls" else (None, None)
    server = EmbeddedServer(folder, Listen(port=0, cert=cert, key=key))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def closed(settings: Settings) -> AsyncIterator[list[str]]:
    """The names of the connections the server announces as closed."""
    address = find_system(settings)
    assert address
    heard: list[str] = []

    async def hear(message: object) -> None:
        advisory = json.loads(message.data)  # type: ignore[attr-defined]
        heard.append(advisory["client"].get("name", ""))

    client = await connect(address, name="ear")
    await client.subscribe(f"$SYS.ACCOUNT.{address.account}.DISCONNECT", cb=hear)
    await client.flush()
    await client.flush()
    yield heard
    await client.close()


def run(script: str, settings: Settings, *options: str) -> subprocess.Popen[str]:
    env = os.environ | {"TORCHLOOM_STATE": settings.state, "TORCHLOOM_GOODBYE_SECONDS": "60"}
    command = [sys.executable, *options, "-c", script]
    return subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=env)


async def line(process: subprocess.Popen[str]) -> list[str]:
    """The words of the next line it prints."""
    assert process.stdout
    return (await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 100)).split()


def nudge(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_the_death_of_a_rank_is_known_while_its_loaders_live_on(
    weaver: PlayedWeaver, settings: Settings, closed: list[str]
) -> None:
    weaver.welcomes = True
    process = run(LOADING, settings)
    loaders = [int(pid) for pid in await line(process)]
    try:
        hello = await weaver.report(Hello)
        for loader in loaders:  # frozen, so that they cannot notice that their parent is gone
            os.kill(loader, signal.SIGSTOP)
        process.kill()
        gone = (RANK, hello.incarnation)
        await until_true(lambda: any(parse_connection_name(name) == gone for name in closed), "the news of the death")
        assert all(alive(loader) for loader in loaders)
    finally:
        for loader in loaders:
            os.kill(loader, signal.SIGKILL)
    process.communicate(timeout=60)
    assert all(beat.loss is None for beat in weaver.beats)
    assert [type(report) for report in await weaver.reports()] == [Hello]


CHILD = """
import os, sys, time, torchloom
loom = torchloom.attach("job", "hi")
while not loom.connected: time.sleep(0.005)
child = os.fork()
if child == 0:
    import gc
    loom.step(loss=99.0)
    again = torchloom.attach("job", "hi")      # still the parent's rank
    print(loom.connected, loom.incarnation, again.incarnation, flush=True)
    loom.close(); gc.collect()
    os.open(os.devnull, os.O_RDONLY)           # takes the number of the closed socket
    sys.exit(3)                                # runs atexit in the child
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), loom.connected, flush=True)
input()
loom.step(loss=0.5)
print("stepped", flush=True)
input()
"""


async def test_a_child_says_nothing_and_leaves_the_parents_link_unharmed(
    weaver: PlayedWeaver, settings: Settings
) -> None:
    weaver.welcomes = True
    process = run(CHILD, settings, "-W", "error::ResourceWarning")
    assert await line(process) == ["False"]
    assert await line(process) == ["3", "True"]
    assert [type(report) for report in await weaver.reports()] == [Hello]
    nudge(process)
    assert (await weaver.beat(lambda beat: beat.loss is not None)).loss == 0.5
    nudge(process)
    _, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    assert err.count("\n") == 1  # the warning of the second attach
    assert "stays silent" in err
    assert (await weaver.report(Goodbye)).how == "finished"


FORK_WHILE_SEEKING = """
import os, sys, time, torchloom
loom = torchloom.attach("job", "hi")
children = []
for _ in range(40):                            # somewhere among these the link is just being made
    child = os.fork()
    if child == 0:
        time.sleep(600); os._exit(0)
    children.append(child)
    time.sleep(0.005)
print(*children, flush=True)
while not loom.connected: time.sleep(0.005)
print(loom.connected, flush=True)
time.sleep(600)
"""


async def test_a_child_forked_while_the_link_is_being_made_does_not_hold_it(
    weaver: PlayedWeaver, settings: Settings, closed: list[str]
) -> None:
    process = run(FORK_WHILE_SEEKING, settings)
    children = [int(pid) for pid in await line(process)]
    try:
        assert await line(process) == ["True"]
        process.kill()
        await until_true(lambda: any(parse_connection_name(name) for name in closed), "the news of the death")
        assert all(alive(child) for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)

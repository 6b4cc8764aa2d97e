"""`loom up` keeps its two children running, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.damaged_json import damage
from torchloom import __version__
from torchloom.bus.connection import connect, find
from torchloom.bus.state_folder import StateFolder
from torchloom.core.state.cluster import FORMAT
from torchloom.protocol.subjects import LOG, LOG_STREAM, SNAPSHOT_STREAM, Role
from torchloom.settings import Settings
from torchloom.weaver.control_plane_processes import holder
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.storage import Store

pytestmark = pytest.mark.long  # each test starts whole processes

LOOM = [sys.executable, "-m", "torchloom.cli.main"]


class Home:
    """A state folder and the commands run on it."""

    def __init__(self, path: Path) -> None:
        self.folder = StateFolder(path)
        self.env = {k: v for k, v in os.environ.items() if not k.upper().startswith(("TORCHLOOM", "MARDUK"))}
        self.env["TORCHLOOM_STATE"] = str(path)
        self.running: list[subprocess.Popen[str]] = []

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*LOOM, *words], env=self.env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )

    def up(self, *words: str) -> subprocess.Popen[str]:
        """In the foreground, until it says that it is up."""
        process = subprocess.Popen(
            [*LOOM, "up", "--port", "0", *words],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.running.append(process)
        self.hear(process, "up at ")
        return process

    @staticmethod
    def hear(process: subprocess.Popen[str], text: str) -> str:
        assert process.stdout
        heard = ""
        for line in process.stdout:
            heard += line
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}:\n{heard}")

    def child(self, parent: int, name: str) -> psutil.Process:
        for process in psutil.Process(parent).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                program, *_, last = process.cmdline()  # a name in a path between them means nothing
                if name in {Path(program).name, last}:
                    return process
        raise AssertionError(f"there is no {name}")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "state")
    yield home
    for process in home.running:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)
    home.run("down", "--yes")


def until(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


def test_up_and_down_leave_no_process_behind(home: Home) -> None:
    up = home.up()
    children = psutil.Process(up.pid).children(recursive=True)
    assert len(children) == 2
    assert home.run("status").returncode == 0
    down = home.run("down")
    assert (down.returncode, down.stdout.strip()) == (0, "down")
    assert up.wait(60) == 0
    until(lambda: not any(map(lives, children)))
    assert home.run("status").returncode == 3


def test_a_second_up_says_that_it_is_up_and_where(home: Home) -> None:
    first = home.up()
    second = home.run("up")
    assert second.returncode == 5
    assert f"process {first.pid}" in second.stderr
    assert "nats://127.0.0.1:" in second.stderr
    assert home.run("up", "--detach").returncode == 5
    assert home.run("status").returncode == 0


def test_detached_it_goes_on_by_itself_and_down_ends_it(home: Home) -> None:
    up = home.run("up", "--detach", "--port", "0")
    assert up.returncode == 0, up.stderr
    assert "up at nats://127.0.0.1:" in up.stdout
    pid = holder(home.folder)
    assert pid is not None
    assert home.run("status").returncode == 0
    assert home.run("down").returncode == 0
    assert holder(home.folder) is None
    assert home.run("down").returncode == 0  # nothing to do is no error


@pytest.mark.parametrize("name", ["nats-server", "weaver"])
def test_a_killed_child_is_started_again_and_it_says_so(home: Home, name: str) -> None:
    up = home.up()
    before = home.folder.read_endpoint()
    child = home.child(up.pid, name)
    child.kill()
    assert "SIGKILL" in home.hear(up, f"{name} was killed")
    home.hear(up, f"{name} is running again")
    until(lambda: home.run("status").returncode == 0)
    assert home.folder.read_endpoint() == before  # the same port, or ranks would seek the old one


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def test_a_killed_up_takes_its_children_along_and_the_next_one_finds_nothing_in_its_way(home: Home) -> None:
    up = home.up()
    children = psutil.Process(up.pid).children(recursive=True)
    up.kill()
    up.wait()
    until(lambda: not any(map(lives, children)))
    home.up()
    assert home.run("status").returncode == 0


def test_ctrl_c_is_a_clean_end(home: Home) -> None:
    up = home.up()
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0


def test_a_port_in_use_is_a_clear_error_with_the_remedy(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words in (("up", "--port", str(port)), ("up", "--detach", "--port", str(port))):
            result = home.run(*words)
            assert result.returncode == 5
            assert f"port {port}" in result.stderr
            assert "--port 0" in result.stderr
    assert holder(home.folder) is None


@pytest.mark.parametrize("name", ["authority.json", "endpoint.json"])
def test_a_damaged_state_folder_is_named_and_left_alone(home: Home, name: str) -> None:
    up = home.up()
    up.terminate()
    up.wait(60)
    path = home.folder.path / name
    no_port, no_host = b'{"url":"nats://127.0.0.1:abc"}', b'{"url":"nats://[::1"}'
    nonsense = b'{"operator":"nonsense","account":"x","system":"y"}'
    for data in (no_port, no_host, nonsense, *damage(path.read_bytes())):
        path.write_bytes(data)
        result = home.run("up")
        assert result.returncode == 6
        assert name in result.stderr
        assert "Traceback" not in result.stderr
        assert "→" in result.stderr
        assert path.read_bytes() == data


async def write_old_log(settings: Settings) -> None:
    """What a weaver of format 1 left behind, instead of what is there."""
    client = await connect(find(settings, Role.WEAVER), name="test")
    for stream in (LOG_STREAM, SNAPSHOT_STREAM):
        await client.jetstream().delete_stream(stream.name)
    await Store(client, Health(Clock())).open()
    entry = b'{"term":1,"at":1.0,"records":[{"is":"TermBegan","term":1,"weaver":"n1:7"}]}'
    await client.jetstream().publish(LOG.template, entry)
    await client.close()


@pytest.mark.parametrize("how", [(), ("--detach",)])
def test_the_log_of_another_version_is_refused_with_the_remedy_and_left_alone(home: Home, how: tuple[str, ...]) -> None:
    up = home.up()
    weaver = home.child(up.pid, "weaver")
    weaver.suspend()  # it would write to the log that is exchanged
    asyncio.run(write_old_log(Settings(state=str(home.folder.path))))
    weaver.kill()
    up.terminate()
    up.wait(60)
    result = home.run("up", "--port", "0", *how)
    assert result.returncode == 6
    assert f"in format 1: torchLoom {__version__} reads format {FORMAT}" in result.stderr
    assert f"move {home.folder.nats} away" in result.stderr
    assert holder(home.folder) is None
    home.folder.nats.rename(home.folder.path / "nats-before")
    home.up()


def test_an_unwritable_state_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = Home(tmp_path / "file" / "state").run("up")
    assert result.returncode == 6
    assert "state folder" in result.stderr


def test_a_state_folder_open_to_others_is_refused(home: Home) -> None:
    home.folder.path.mkdir(mode=0o755)
    home.folder.path.chmod(0o755)
    result = home.run("up")
    assert result.returncode == 6
    assert "chmod 700" in result.stderr


def test_secrets_are_private(home: Home) -> None:
    home.up()
    for path in home.folder.path.rglob("*"):
        if path.is_file() and path.suffix in {".creds", ".json", ".conf"}:
            assert path.stat().st_mode & 0o077 == 0, path
    assert home.folder.path.stat().st_mode & 0o077 == 0


def test_beyond_loopback_there_is_tls_and_a_second_machine_joins_with_a_token(home: Home, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*LOOM, "up", "--listen", "0.0.0.0", "--port", "0"],
        env=home.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    home.running.append(process)
    line = home.hear(process, "up at ")
    assert re.search(r"up at tls://127\.0\.0\.1:\d+", line)
    token = home.run("token", "--host", "localhost")
    assert token.returncode == 0, token.stderr
    other = Home(tmp_path / "other")
    joined = subprocess.run(
        [*LOOM, "join", "-"], env=other.env, input=token.stdout.strip(), capture_output=True, text=True, timeout=60
    )
    assert joined.returncode == 0, joined.stderr
    assert other.run("status").returncode == 0
    refused = other.run("register", "GPU-1", "hi")
    assert refused.returncode != 0  # the token gives no operator's rights


def test_a_weaver_that_cannot_start_is_told_of_with_its_reason_also_in_the_background(home: Home) -> None:
    home.env["TORCHLOOM_INGRESS_PORT"] = "70000"
    for words in (("up", "--port", "0"), ("up", "--detach", "--port", "0")):
        result = home.run(*words)
        assert result.returncode == 6
        assert "70000" in result.stderr
        assert "weaver.log" in result.stderr
    assert holder(home.folder) is None

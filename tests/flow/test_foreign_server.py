"""A NATS server that is not ours: reached by its address, without a system account, where only silence tells."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.flow.plane import Plane
from tests.flow.records import codes
from torchloom.bus.connection import find
from torchloom.bus.nats_server import find_binary
from torchloom.protocol.records import RankDied
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[str]:
    """A plain nats-server with JetStream, no users, on a port of its choice."""
    ports = tmp_path / "ports"
    ports.mkdir()
    log = tmp_path / "foreign.log"
    with log.open("wb") as output:
        words = [find_binary(), "-a", "127.0.0.1", "-p", "-1", "-js", "-sd", tmp_path / "js", "--ports_file_dir", ports]
        server = subprocess.Popen(words, stdout=output, stderr=output)
    while not (found := re.search(rb"Listening for client connections on (\S+)", log.read_bytes())):
        assert server.poll() is None, log.read_text()
        time.sleep(0.01)
    yield f"nats://{found[1].decode()}"
    server.kill()
    server.wait()


class Foreign(Plane):
    """The harness on somebody else's server."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder)
        self.settings = replace(self.settings, addr=url)
        self.server.folder.make()
        self.env |= {"MARDUK_ADDR": url, "TORCHLOOM_SILENCE_SECONDS": "2"}


async def test_without_a_system_account_silence_tells_and_the_weaver_says_so(foreign: str, tmp_path: Path) -> None:
    up = Foreign(tmp_path / "s", foreign)
    try:
        up.start_weaver()
        rank = up.start_rank()
        await up.until_beating()
        assert not (await up.look()).plane.advisories
        assert "only as silence" in up.weaver_log()
        rank.kill()
        lost = await up.until_lost()
        assert "rank_silent" in codes(lost.reason)
    finally:
        up.stop_all()


async def test_without_a_system_account_a_clean_end_is_still_a_clean_end(foreign: str, tmp_path: Path) -> None:
    up = Foreign(tmp_path / "s", foreign)
    try:
        up.start_weaver()
        rank = up.start_rank()
        await up.until_beating()
        rank.send_signal(2)
        await up.until_presence("left")
        assert not [r for r in await up.records() if isinstance(r, RankDied)]
    finally:
        up.stop_all()


def test_the_credentials_of_our_own_server_are_not_shown_to_another(foreign: str, settings: Settings) -> None:
    assert find(settings, Role.THREADLET).creds is not None
    assert find(replace(settings, addr=foreign), Role.THREADLET).creds is None

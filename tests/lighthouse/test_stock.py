"""torchft's own lighthouse as a process: it is found by torchft's client, and ends when it is told to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytestmark = pytest.mark.long  # each test starts whole processes

pytest.importorskip("torchft", reason="torchft is not installed (its wheel is for Linux on x86_64 alone)")
COMMAND = (sys.executable, "-m", "torchloom.lighthouse", "--stock", "--job", "job", "--bind")


@pytest.fixture
def stock() -> Iterator[subprocess.Popen[str]]:
    words = ("--min-replicas", "1", "--heartbeat-timeout-ms", "5000", "--join-timeout-ms", "100")
    process = subprocess.Popen((*COMMAND, "127.0.0.1:0", *words), stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_it_makes_quorums_until_it_is_told_to_end(stock: subprocess.Popen[str]) -> None:
    from torchft.coordination import LighthouseClient

    assert stock.stdout is not None
    said = stock.stdout.readline()
    found = re.search(r"http://\S+:(\d+)$", said.strip())
    assert found, said
    client = LighthouseClient(f"http://127.0.0.1:{found[1]}", timedelta(seconds=10))
    quorum = client.quorum("a", timedelta(seconds=10))
    assert [member.replica_id for member in quorum.participants] == ["a"]
    stock.send_signal(signal.SIGTERM)
    assert stock.wait(20) == 0
    assert stock.stdout.read() == "stopped\n"


def test_an_address_that_is_none_is_told() -> None:
    done = subprocess.run((*COMMAND, "nonsense"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "lighthouse: nonsense: " in done.stderr

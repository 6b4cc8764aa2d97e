"""Whether a process has ended, asked of the kernel: never of one that may live."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from torchloom.shared.process_id import has_ended, process_id

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS)
    yield process
    process.kill()
    process.wait()


def test_this_one_lives() -> None:
    assert process_id()
    assert not has_ended(process_id())


def test_one_that_was_killed_has_ended(child: subprocess.Popen[bytes]) -> None:
    name = process_id(child.pid)
    assert not has_ended(name)
    child.kill()
    child.wait()
    assert has_ended(name)


def test_one_that_nobody_has_asked_about_yet_has_ended(child: subprocess.Popen[bytes]) -> None:
    name = process_id(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert has_ended(name)


def test_a_pid_may_be_given_to_another_process(child: subprocess.Popen[bytes]) -> None:
    kernel, pid, started = process_id(child.pid).rsplit(" ", 2)
    assert has_ended(f"{kernel} {pid} {int(started) - 1}")


def test_one_of_another_machine_cannot_be_seen(child: subprocess.Popen[bytes]) -> None:
    name = process_id(child.pid)
    child.kill()
    child.wait()
    boot, rest = name.split(" ", 1)
    elsewhere = boot[:-1] + ("0" if boot[-1] != "0" else "1")
    assert not has_ended(f"{elsewhere} {rest}")


def test_one_whose_first_thread_alone_has_ended_lives() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: (print('on', flush=True), time.sleep(600)), daemon=True).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        name = process_id(process.pid)
        assert process.stdout is not None
        process.stdout.readline()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert not has_ended(name)
        process.kill()


@pytest.mark.parametrize("name", ["", "x", "a b c", "1 2 3 4 5", "  ", process_id().rsplit(" ", 2)[0] + f" {10**20} 1"])
def test_what_is_no_name_says_nothing(name: str) -> None:
    assert not has_ended(name)

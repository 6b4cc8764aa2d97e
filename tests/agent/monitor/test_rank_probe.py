"""Watching a rank from outside: its page, the state of its process; time counts only while the watcher is awake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchloom.agent.monitor.rank_probe import (
    LOOK_SECONDS,
    RankProbe,
    process_state,
    processor_seconds,
    turns,
    waits_for_a_page,
)
from torchloom.protocol.node import RankStatus
from torchloom.shared.liveness_page import Page, View

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
RANK = """
import ctypes, os, sys, time
import torchloom

loom = torchloom.attach("job", "r", rank=0)
print("there", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "step":
        loom.step(step=int(rest))
    elif word == "eval":
        with loom.phase("eval"):
            print("in", flush=True)
            sys.stdin.readline()
    elif word == "hold":
        print("holding", flush=True)
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    elif word == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
    elif word == "nap":
        print("napping", flush=True)
        ctypes.PyDLL(None).sleep(1000)
    elif word == "spin":
        print("spinning", flush=True)
        import re
        re.match(r"(a+)+$", "a" * 40 + "b")
    print("done", flush=True)
"""


class Held:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.sight = RankProbe(process.pid)

    def say(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def until(self, what: Callable[[RankProbe], object]) -> None:
        """Look, as an agent does, until it is so."""
        end = time.monotonic() + 90
        while not what(self.sight):
            assert time.monotonic() < end, self.sight
            time.sleep(0.05)
            self.sight.look(0.05)


@contextmanager
def held() -> Iterator[Held]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHLOOM_")}
    env["TORCHLOOM_ADDR"] = "nats://127.0.0.1:1"  # nobody is there, and nobody is needed
    process = subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=env,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "there"
        yield Held(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def test_the_step_of_a_rank_is_seen_without_its_help_and_still_when_it_is_dead() -> None:
    with held() as rank:
        rank.say("step 7")
        rank.until(lambda sight: sight.step == 7)
        rank.say("step 12")
        os.kill(rank.process.pid, signal.SIGKILL)
        rank.process.wait()
        rank.sight.end()
        assert rank.sight.step == 12
        status = RankStatus(rank=0, incarnation="0" * 24, state="ended")
        assert rank.sight.complete(status).step == 12


def test_a_rank_that_makes_no_step_stands_still_and_a_step_ends_that() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.idle_seconds > 0.5 and sight.held < 0.5)
        assert rank.sight.frozen == 0
        rank.say("step 2")
        rank.until(lambda sight: sight.idle_seconds < 0.5)


def test_a_stopped_process_is_frozen_and_not_held() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        os.kill(rank.process.pid, signal.SIGSTOP)
        rank.until(lambda sight: sight.frozen > 0.7)
        assert rank.sight.held == 0
        assert rank.sight.alarming
        os.kill(rank.process.pid, signal.SIGCONT)
        rank.until(lambda sight: sight.frozen == 0)


def test_an_interpreter_that_is_held_is_seen_and_whether_it_computes() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        assert rank.say("hold") == "holding"
        rank.until(lambda sight: sight.held > 1.0 and not sight.computes)
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        assert rank.say("spin") == "spinning"
        rank.until(lambda sight: sight.held > 1.0 and sight.computes)


def test_a_process_that_gets_little_of_a_busy_machine_is_known_to_want_more(tmp_path: Path) -> None:
    rank = tmp_path / "7"
    rank.mkdir()
    (rank / "stat").write_text("7 (python) R " + "0 " * 10 + "10 5 " + "0 " * 20)
    before = turns(7, tmp_path)
    assert processor_seconds({}, before) == 0.15  # a kernel that tells no more
    for thread, waited in (("7", 3), ("8", 1)):
        (rank / "task" / thread).mkdir(parents=True)
        (rank / "task" / thread / "schedstat").write_text(f"100000000 {waited}000000000 12\n")
    assert processor_seconds(before, turns(7, tmp_path)) == pytest.approx(4.2)
    assert processor_seconds({}, turns(8, tmp_path)) == 0.0


def test_threads_that_wait_for_the_interpreter_do_not_want_a_processor_however_long_they_wait_for_one(
    tmp_path: Path,
) -> None:
    thread = tmp_path / "7" / "task" / "8"
    thread.mkdir(parents=True)
    (thread / "schedstat").write_text("5000000000 9000000000 1000\n")
    before = turns(7, tmp_path)
    (thread / "schedstat").write_text("5012000000 10048000000 1583\n")  # 20 microseconds at a time
    assert processor_seconds(before, turns(7, tmp_path)) == pytest.approx(0.012)


def test_a_phase_is_seen() -> None:
    with held() as rank:
        rank.say("step 1")
        assert rank.say("eval") == "in"
        rank.until(lambda sight: sight.phase == "eval")
        rank.say("go on")
        rank.until(lambda sight: sight.phase == "")


def test_another_program_in_the_place_of_a_rank_is_not_held() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        assert rank.process.stdin is not None
        rank.process.stdin.write("exec\n")
        rank.process.stdin.flush()
        rank.until(lambda sight: sight.page is None)
        assert (rank.sight.held, rank.sight.idle_seconds) == (0.0, 0.0)


def test_one_that_is_traced_is_neither_frozen_nor_held(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) t 1 1 1 0 -1 4194304 0 0 0 0 150 50 0 0 20 0 1 0 5 0 0\n")
    sight = RankProbe(7, tmp_path)
    for _ in range(20):
        sight.look(0.2)
    assert (sight.frozen, sight.held) == (0.0, 0.0)


def test_whatever_stands_in_a_page_the_watcher_lives() -> None:
    page = Page()
    try:
        seen = View(
            os.getpid(), Path(f"/proc/self/fd/{page.fd}"), Path("/proc")
        )  # others of this process may have theirs
        page.phase("eval")
        assert seen.phase == "eval"
        for junk in (b"\xff\x20\x00\xfe", b"\x05a b\n!"):
            page._map[512 : 512 + len(junk)] = junk
            assert seen.phase == ""
        with pytest.raises(PermissionError):
            os.ftruncate(page.fd, 0)  # whoever has it mapped would die of it
    finally:
        page.close()


def test_time_in_which_the_watcher_slept_does_not_count() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        rank.sight.look(0.1)
        before = rank.sight.idle_seconds
        rank.sight.look(3600.0)
        assert rank.sight.idle_seconds - before <= 2 * LOOK_SECONDS


def test_a_process_that_is_not_there_has_no_state() -> None:
    assert process_state(2**22 + 1) == ("", 0.0)


def test_a_name_with_brackets_does_not_confuse(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) T (b) S 1 1 1 0 -1 4194304 0 0 0 0 150 50 0 0 20 0 1 0 5 0 0\n")
    assert process_state(7, tmp_path) == ("S", 2.0)


def test_whoever_waits_for_a_page_of_memory_or_a_disk_is_not_idle(tmp_path: Path) -> None:
    for number, state in enumerate("SSDS"):
        folder = tmp_path / "7" / "task" / str(number)
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{number} (a b) D) {state} 1 1\n")
    assert waits_for_a_page(7, tmp_path)
    (tmp_path / "7" / "task" / "2" / "stat").write_text("9 (x) S 1 1\n")
    assert not waits_for_a_page(7, tmp_path)
    assert not waits_for_a_page(8, tmp_path)


def test_a_process_without_a_page_is_only_seen_to_be_stopped() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        sight = RankProbe(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 90
        while sight.frozen < 0.3:
            assert time.monotonic() < end
            time.sleep(0.05)
            sight.look(0.05)
        assert (sight.step, sight.idle_seconds, sight.held) == (0, 0.0, 0.0)
    finally:
        process.kill()
        process.wait()

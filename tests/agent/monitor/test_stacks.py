"""Where a rank is: told by itself, forced out of it, read from outside; and nobody is harmed by the question."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.agent.harness import lives, until
from tests.agent.monitor.test_rank_probe import RANK, held
from torchloom.agent.monitor import stacks as module
from torchloom.agent.monitor.rank_probe import RankProbe
from torchloom.agent.monitor.stacks import STATES, catches, force, spy, take, written
from torchloom.protocol.facts import RankStacks
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.shared.liveness_page import SIGNAL

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
needs_spy = pytest.mark.skipif(spy() is None or os.getuid() != 0, reason="py-spy reads another process only as root")


@pytest.fixture(autouse=True)
def _at_leisure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way may take its time: which of them is gone does not depend on what else the machine has to do."""
    for name in ("SIGNAL_SECONDS", "SPY_SECONDS"):
        monkeypatch.setattr(module, name, 60.0)


def stacks(sight: RankProbe) -> RankStacks:
    return asyncio.run(take(0, sight, asyncio.Semaphore(1)))


def test_a_rank_at_its_ease_shows_its_stacks_itself_as_often_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ITSELF_SECONDS", 60.0)
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        for _ in range(3):
            found = stacks(rank.sight)
            assert found.how == "itself"
            assert found.text.count("<module>") == 1
        assert rank.say("step 2") == "done"


def test_where_nothing_else_is_allowed_a_rank_whose_interpreter_is_held_is_made_to_show_them() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        assert rank.say("hold") == "holding"
        rank.until(lambda sight: sight.held > 0.5)
        page = rank.sight.page
        assert page is not None
        text = asyncio.run(written(page, force))
        line = 1 + next(at for at, text in enumerate(RANK.splitlines()) if "PyDLL" in text)
        assert f'File "<string>", line {line} in <module>' in text
        assert rank.process.poll() is None  # it goes on holding, and lives


@needs_spy
def test_a_rank_whose_interpreter_is_held_is_read_from_outside_and_its_system_call_goes_on() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        assert rank.say("nap") == "napping"  # sleep() in C returns early when a signal is handled
        rank.until(lambda sight: sight.held > 0.5)
        found = stacks(rank.sight)
        assert found.how == "py-spy"
        assert "<module>" in found.text
        rank.until(lambda sight: sight.held > 1.5)


@needs_spy
def test_a_stopped_rank_is_read_from_outside_and_stays_stopped() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        os.kill(rank.process.pid, signal.SIGSTOP)
        rank.until(lambda sight: sight.frozen > 0.2)
        found = stacks(rank.sight)
        assert found.how == "py-spy"
        assert "<module>" in found.text
        assert found.state == phrase("state_stopped")
        rank.until(lambda sight: sight.frozen > 0.5)
        os.kill(rank.process.pid, signal.SIGCONT)
        assert rank.say("step 2") == "done"


def test_a_process_that_does_not_catch_the_signal_is_never_sent_it() -> None:
    with held() as rank:
        rank.say("step 1")
        rank.until(lambda sight: sight.page is not None)
        page = rank.sight.page
        assert page is not None
        number = page.marks[SIGNAL]
        assert number
        assert catches(rank.process.pid, number)
        process = subprocess.Popen(["sleep", "60"])
        try:
            assert not catches(process.pid, number)
        finally:
            process.kill()
            process.wait()


def test_of_a_process_that_is_no_interpreter_nothing_can_be_told_but_its_state() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = stacks(RankProbe(process.pid))
        assert found.how == "none"
        assert isinstance(found.state, Phrase)
        assert found.state.code == "stacks_not_read"
        assert found.state.args["state"] in STATES.values()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


async def test_py_spy_ends_at_once_when_nobody_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "py-spy"
    hanging.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid.new\nmv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(module, "spy", lambda: str(hanging))
    task = asyncio.create_task(take(0, RankProbe(os.getpid()), asyncio.Semaphore(1)))
    await until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert not lives(pid)


def test_py_spy_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where a thread ends while it looks."""
    failing = tmp_path / "py-spy"
    again = f"test -e {tmp_path}/tried && echo 'Thread 1 (idle)' && exit 0"
    failing.write_text(f"#!/bin/sh\n{again}\ntouch {tmp_path}/tried\necho 'No such process (os error 3)' >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setattr(module, "spy", lambda: str(failing))
    found = stacks(RankProbe(os.getpid()))
    assert (found.how, found.text) == ("py-spy", "Thread 1 (idle)\n")


def test_of_a_process_that_is_gone_that_is_told() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    found = stacks(RankProbe(process.pid))
    assert found.how == "none"
    assert isinstance(found.state, Phrase)
    assert (found.state.code, found.state.args["state"]) == ("stacks_not_read", phrase("state_gone"))

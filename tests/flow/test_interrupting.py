"""Ctrl-C, SIGTERM and SIGKILL to `loom run` itself: whenever they come, its ranks end and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable

import psutil
import pytest

from tests.flow.faults import Run, Up
from torchloom.protocol.records import Record
from torchloom.protocol.run_records import AttemptStopping


def plane_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-run-*"))


def agent_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*"))


def supervisor_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*/*/supervisor"))


def supervisor_listens(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*/*/supervisor/supervisor.sock"))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (plane_begins, signal.SIGINT),
        (agent_begins, signal.SIGTERM),
        (supervisor_begins, signal.SIGINT),
        (supervisor_listens, signal.SIGTERM),
    ],
)
def test_interrupted_before_the_ranks_run_nothing_is_left(
    moment: Callable[[Run], bool], number: signal.Signals, start: Callable[..., Run]
) -> None:
    run = start(own=True, steps=100_000)
    run.until(lambda: moment(run))
    run.process.send_signal(number)
    assert run.end() == 130, run.text()
    assert run.left() == []


def test_ctrl_c_while_the_ranks_run_ends_them(start: Callable[..., Run]) -> None:
    run = start(steps=100_000)
    run.until_trained()
    run.interrupt()
    assert run.end() == 130, run.text()
    assert run.left() == []


def of(run: Run, up: Up) -> list[Record]:
    return [record for record in up.records() if getattr(record, "job", "") == run.job]


def test_ctrl_c_while_an_attempt_is_being_ended_waits_for_that_and_starts_no_other(
    start: Callable[..., Run], up: Up
) -> None:
    run = start("--grace", "600", steps=100_000)
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    run.kill(1)
    run.until_phase("stopping", 1)
    run.interrupt()
    run.until(lambda: any(isinstance(r, AttemptStopping) and r.next_action == "cancel" for r in of(run, up)))
    run.kill(0)  # what was waited for
    assert run.end() == 130, run.text()
    assert up.attempts(run.job) == [1]
    assert run.left() == []


def test_ctrl_c_before_the_next_attempt_starts_no_other(start: Callable[..., Run], up: Up) -> None:
    run = start(steps=100_000)
    run.until_trained()
    run.drain()
    run.kill(1)
    run.until_phase("restarting", 1)
    run.interrupt()
    assert run.end() == 130, run.text()
    assert up.attempts(run.job) == [1]
    assert run.left() == []


@pytest.mark.parametrize("phase", ["placing", "starting"])
def test_ctrl_c_while_the_next_attempt_begins_ends_it(phase: str, start: Callable[..., Run], up: Up) -> None:
    run = start("--grace", "600", steps=100_000)
    run.until_trained()
    run.drain()
    run.kill(1)
    run.until_phase("restarting", 1)
    supervisors = [process.pid for process in run.children("torchloom.agent.supervisor.main")]
    with run.frozen(*([run.process.pid] if phase == "placing" else supervisors)):
        run.drain(undo=True)
        run.until_phase(phase, 2)
        run.interrupt()
        if phase == "starting":
            run.until_phase("stopping", 2)
    assert run.end() == 130, run.text()
    assert run.left() == []


def test_ctrl_c_twice_kills_ranks_that_do_not_listen(start: Callable[..., Run]) -> None:
    run = start("--grace", "600", steps=100_000)
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    run.interrupt()
    run.until(lambda: "once more to kill it" in run.text())
    run.interrupt()
    assert run.end() == 130, run.text()
    assert run.left() == []


def test_ctrl_c_once_ends_the_ranks_when_its_own_control_plane_is_dead(start: Callable[..., Run]) -> None:
    run = start(own=True, steps=100_000)
    run.until_trained()
    for process in run.children(" up "):
        process.kill()
    run.interrupt()
    assert run.end() == 130, run.text()
    assert run.left() == []


# ── the launcher itself ──────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_outlives_a_killed_launcher_but_folders_which_the_next_one_removes(
    start: Callable[..., Run],
) -> None:
    run = start(own=True, steps=100_000)
    run.until_trained()
    run.tell(1, "child")
    run.until((run.folder / "child-1").exists)
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(run.census.processes(), timeout=60)
    assert alive == []
    assert any(run.census.temporary.glob("torchloom-run-*"))
    run.again(steps=5)
    assert run.end() == 0, run.text()
    assert run.left() == []

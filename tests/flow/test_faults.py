"""A training under `loom run` ends as if nothing had happened, whatever was killed meanwhile, and nothing is left."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import torchloom
from campaigns import recovery
from tests.flow.faults import Run, Up
from tests.flow.records import KILLED, phrases
from tests.flow.scripts import GLOO, chain
from torchloom.cli.verbs.run import _count
from torchloom.errors import BadInput
from torchloom.protocol.run_records import AttemptStopping

STEPS = 60


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_one(run: Run) -> None:
    run.kill(1)


def kill_both(run: Run) -> None:
    run.kill(0, 1)


def stop_one_and_kill_the_other(run: Run) -> None:
    os.kill(run.pid(0), signal.SIGSTOP)
    run.kill(1)


LEFT_STOPPED = ("--on", "frozen=report")
"""Nobody is ended for being stopped, if that is all that happens for a while: a test may be slow to go on."""


def let_one_exit(run: Run) -> None:
    run.tell(1, "exit")


def let_one_raise(run: Run) -> None:
    run.tell(0, "raise")


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        (kill_one, KILLED),
        (kill_both, KILLED),
        (stop_one_and_kill_the_other, KILLED),
        (let_one_exit, ("exit_code", {"status": 1})),
        (let_one_raise, ("exit_code", {"status": 1})),
    ],
)
def test_a_training_that_loses_ranks_ends_as_if_it_had_not(
    fault: Callable[[Run], None], how: tuple[str, dict[str, object]], start: Callable[..., Run], up: Up
) -> None:
    run = start("--grace", "1", *LEFT_STOPPED)
    run.until_trained()
    fault(run)
    assert run.end() == 0, run.text()
    assert run.ends() == [chain(STEPS)] * 2
    (stopping,) = [record for record in run.records() if isinstance(record, AttemptStopping)]
    assert how in phrases(stopping)
    assert ("ValueError: as it was told" in str(stopping)) == (fault is let_one_raise)
    assert "loom: attempt 2 resumes from" in run.text()
    assert up.attempts(run.job) == [1, 2]
    assert run.lives()[-1]["first"] >= 10
    assert run.left() == []


@pytest.mark.long
def test_gloo_ranks_that_are_lost_again_and_again_end_with_the_same_parameters_to_the_bit(
    tmp_path: Path, up: Up
) -> None:
    kinds = ["kill_one", "kill_both", "stop_one_and_kill_the_other", "kill_weaver_in_recovery", "damage_the_newest"]
    found = recovery.storm(tmp_path, up, [recovery.Blow(kind, 1, after=0.1, apart=0.1) for kind in kinds], warm=True)
    assert found.problems == []
    assert found.restarts == len(kinds)
    assert len(re.findall(r"(?m)^loom: step-\d+ is passed over: ", found.run.text())) == 2


def test_a_plan_of_faults_depends_on_its_seed_alone() -> None:
    assert recovery.plan(7) == recovery.plan(7) != recovery.plan(8)


def test_a_stopped_rank_is_killed_after_the_grace(start: Callable[..., Run]) -> None:
    run = start("--grace", "0.5", *LEFT_STOPPED)
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    os.kill(run.pid(0), signal.SIGSTOP)
    run.kill(1)
    assert run.end() == 0, run.text()
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


def test_a_rank_killed_while_its_attempt_is_being_ended_is_no_second_failure(start: Callable[..., Run], up: Up) -> None:
    run = start("--grace", "600")
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    run.kill(1)
    run.until_phase("stopping", 1)
    run.kill(0)
    assert run.end() == 0, run.text()
    assert up.attempts(run.job) == [1, 2]
    assert run.starts() == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


def test_a_rank_killed_as_soon_as_it_is_started_again_costs_one_more_attempt(start: Callable[..., Run], up: Up) -> None:
    run = start()
    run.until_trained()
    run.kill(1)
    run.until(lambda: (2, 1) in run.starts())
    run.kill(1)
    assert run.end() == 0, run.text()
    assert up.attempts(run.job) == [1, 2, 3]
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


def test_what_a_rank_has_started_ends_with_it(start: Callable[..., Run]) -> None:
    run = start()
    run.until_trained()
    run.tell(1, "child")
    run.until((run.folder / "child-1").exists)
    run.kill(1)
    assert run.end() == 0, run.text()
    assert run.left() == []


def test_a_killed_supervisor_takes_its_ranks_and_what_they_started_with_it_and_the_training_goes_on(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.until_trained()
    run.tell(1, "child")
    run.until((run.folder / "child-1").exists)
    for supervisor in run.children("torchloom.agent.supervisor.main"):
        supervisor.kill()
    assert run.end() == 0, run.text()
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


# ── the control plane ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("weaver", "stopping"),
        ("weaver", "restarting"),
        ("weaver", "placing"),
        ("weaver", "starting"),
        ("nats-server", "stopping"),
        ("nats-server", "placing"),
    ],
)
def test_a_recovery_goes_on_when_the_control_plane_is_killed_in_it(
    victim: str, phase: str, start: Callable[..., Run], up: Up
) -> None:
    run = start("--grace", "1" if phase == "stopping" else "600")
    run.until_trained()
    if phase == "stopping":
        run.tell(0, "deaf")
        run.until((run.folder / "deaf-0").exists)
        run.kill(1)
        run.until(lambda: any(isinstance(r, AttemptStopping) and r.job == run.job for r in up.records()))
        up.kill(victim)
    else:
        run.drain()
        run.kill(1)
        run.until_phase("restarting", 1)
        supervisors = [process.pid for process in run.children("torchloom.agent.supervisor.main")]
        held = {"restarting": [], "placing": [run.process.pid], "starting": supervisors}[phase]
        with run.frozen(*held):
            if phase != "restarting":
                run.drain(undo=True)
                run.until_phase(phase, 2)
            up.kill(victim)
            up.until_it_answers()
        if phase == "restarting":
            run.drain(undo=True)
    assert run.end() == 0, run.text()
    assert up.attempts(run.job) == [1, 2]
    assert run.starts() == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small() -> Iterator[Callable[[], None]]:
    """Lets a process enter a memory cgroup of 256 MB, of either version; skips where none may be made."""
    root, limit, swap = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    if not root.is_dir():
        root, limit, swap = Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"
    group = root / f"loom-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(256 * 2**20))
            if (group / swap).exists():
                (group / swap).write_text(str(256 * 2**20) if "memsw" in swap else "0")
        except OSError as error:
            pytest.skip(f"a memory cgroup cannot be limited here: {error}")
        yield lambda: (group / "cgroup.procs").write_text("0") and None
    finally:
        group.rmdir()


def test_the_end_of_a_rank_that_the_kernel_killed_for_its_memory_says_so(
    small: Callable[[], None], start: Callable[..., Run]
) -> None:
    run = start("--max-restarts", "1", preexec=small)
    run.until_trained()
    run.tell(1, "eat")
    run.until_trained(attempt=2, further=0)
    run.tell(1, "eat")
    assert run.end() == 137, run.text()
    stopped = [str(record) for record in run.records() if isinstance(record, AttemptStopping)]
    assert [bool(re.search("out.of.memory", told)) for told in stopped] == [True, True], stopped
    assert run.left() == []


# ── what cannot go well ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_script_that_cannot_be_imported_is_not_tried_for_ever(start: Callable[..., Run], up: Up) -> None:
    run = start("--max-restarts", "50", script="import no_such_module")
    assert run.end() == 1, run.text()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in str(run.records()[-1])
    assert up.attempts(run.job) == [1, 2]
    assert run.left() == []


def test_checkpoints_none_of_which_is_whole_are_named_and_left_alone(start: Callable[..., Run], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for step in (5, 10):
        (kept / f"checkpoint_step_{step}.pt").write_bytes(b"torn")
    run = start()
    assert run.end() == 8, run.text()
    assert "checkpoint_step_10.pt (" in str(run.records())
    assert "checkpoint_step_5.pt (" in str(run.records())
    assert sorted(path.name for path in kept.iterdir()) == ["checkpoint_step_10.pt", "checkpoint_step_5.pt"]
    assert run.lives() == []
    assert run.left() == []


def test_a_checkpoint_folder_that_is_a_file_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    run = start()
    assert run.end() != 0
    assert "kept is not a folder" in str(run.records())
    assert (tmp_path / "kept").read_text() == "mine"
    assert run.left() == []


def test_a_checkpoint_of_another_number_of_ranks_is_gone_on_from(start: Callable[..., Run], tmp_path: Path) -> None:
    import torch

    with torchloom.Checkpoints(tmp_path / "kept") as alone:
        alone.save(10, {"model": torch.nn.Linear(8, 4)})
    run = start(script=GLOO, steps=20)
    assert run.end() == 0, run.text()
    assert [life["first"] for life in run.lives()] == [10, 10]
    assert run.ends()[0] == run.ends()[1]
    assert run.left() == []


def test_more_ranks_than_gpus_are_refused_with_the_remedy() -> None:
    with pytest.raises(BadInput, match="3 ranks and 2 GPUs") as told:
        _count("3", gpus=2)
    assert "--nproc-per-node 2" in told.value.hint

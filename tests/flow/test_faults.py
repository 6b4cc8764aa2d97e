"""A training under `loom run` ends as if nothing had happened, whatever was killed meanwhile, and nothing is left."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import torchloom
from campaigns import recovery
from tests.flow.faults import GLOO, Run, Up, chain
from torchloom.cli.launching import _count
from torchloom.errors import BadInput
from torchloom.messages import Done, Drain

STEPS = 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One control plane for all: what is killed of it comes back, and the next test finds it as it was."""
    plane = Up(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.stop()


@pytest.fixture
def start(tmp_path: Path, up: Up) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def begin(*words: str, own: bool = False, **more: object) -> Run:
        made.append(Run(tmp_path, *words, up=None if own else up, **more))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for run in made:
        run.clear()


def drain(run: Run, undo: bool = False) -> None:
    """Hold a run before its next attempt: there is no node for it; or let it go on."""
    assert run.up
    view = run.up.run(run.job)
    assert view is not None
    node = view.task.node
    assert node
    assert isinstance(run.up.ask(Drain(node=node, undo=undo)), Done)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill_one(run: Run) -> None:
    run.kill(1)


def kill_both(run: Run) -> None:
    run.kill(0, 1)


def stop_one_and_kill_the_other(run: Run) -> None:
    os.kill(run.pid(0), signal.SIGSTOP)
    run.kill(1)


def let_one_exit(run: Run) -> None:
    run.tell(1, "exit")


def let_one_raise(run: Run) -> None:
    run.tell(0, "raise")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (kill_one, "rank 1 failed: killed by SIGKILL"),
        (kill_both, "failed: killed by SIGKILL"),
        (stop_one_and_kill_the_other, "rank 1 failed: killed by SIGKILL"),
        (let_one_exit, "rank 1 failed: exit code 1"),
        (let_one_raise, "rank 0 failed: exit code 1: ValueError: as it was told"),
    ],
)
def test_a_training_that_loses_ranks_ends_as_if_it_had_not(
    fault: Callable[[Run], None], said: str, start: Callable[..., Run], up: Up
) -> None:
    run = start("--grace", "1")
    run.until_trained()
    fault(run)
    assert run.end() == 0, run.text()
    assert run.ends() == [chain(STEPS)] * 2
    assert said in run.text()
    assert run.text().index(said) < run.text().index("loom: attempt 2 goes on from")
    assert up.attempts(run.job) == [1, 2]
    assert run.lives()[-1]["first"] >= 10
    assert run.left() == []


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
    run = start("--grace", "0.5")
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    os.kill(run.pid(0), signal.SIGSTOP)
    run.kill(1)
    assert run.end() == 0, run.text()
    assert run.ends() == [chain(STEPS)] * 2
    assert run.left() == []


def test_a_rank_killed_while_its_attempt_is_being_ended_is_no_second_failure(start: Callable[..., Run], up: Up) -> None:
    run = start("--grace", "20")
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


def test_a_killed_keeper_takes_its_ranks_and_what_they_started_with_it_and_the_training_goes_on(
    start: Callable[..., Run],
) -> None:
    run = start()
    run.until_trained()
    run.tell(1, "child")
    run.until((run.folder / "child-1").exists)
    for keeper in run.children("torchloom.agent.keeper"):
        keeper.kill()
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
    run = start("--grace", "1" if phase == "stopping" else "20")
    run.until_trained()
    if phase == "stopping":
        run.tell(0, "deaf")
        run.until((run.folder / "deaf-0").exists)
        run.kill(1)
        run.until_phase("stopping", 1)
        up.kill(victim)
    else:
        drain(run)
        run.kill(1)
        run.until_phase("restarting", 1)
        keepers = [process.pid for process in run.children("torchloom.agent.keeper")]
        held = {"restarting": [], "placing": [run.process.pid], "starting": keepers}[phase]
        with run.frozen(*held):
            if phase != "restarting":
                drain(run, undo=True)
                run.until_phase(phase, 2)
            up.kill(victim)
            up.until_it_answers()
        if phase == "restarting":
            drain(run, undo=True)
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
    said = "rank 1 failed: killed by SIGKILL: out of memory: the kernel killed a process of its cgroup"
    run.until(lambda: said in run.text())
    run.tell(1, "eat")
    assert run.end() == 137, run.text()
    assert "out of memory" in run.text().splitlines()[-1]
    assert run.left() == []


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def plane_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-run-*"))


def agent_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*"))


def keeper_begins(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*/*/keeper"))


def keeper_listens(run: Run) -> bool:
    return any(run.census.temporary.glob("torchloom-agent-*/*/keeper/keeper.sock"))


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (plane_begins, signal.SIGINT),
        (agent_begins, signal.SIGTERM),
        (keeper_begins, signal.SIGINT),
        (keeper_listens, signal.SIGTERM),
    ],
)
def test_interrupted_before_the_ranks_run_nothing_is_left(
    moment: Callable[[Run], bool], number: signal.Signals, start: Callable[..., Run]
) -> None:
    run = start(own=True)
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


def test_ctrl_c_while_an_attempt_is_being_ended_waits_for_that_and_starts_no_other(
    start: Callable[..., Run], up: Up
) -> None:
    run = start("--grace", "1.5", steps=100_000)
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    run.kill(1)
    run.until_phase("stopping", 1)
    run.interrupt()
    assert run.end() == 130, run.text()
    assert up.attempts(run.job) == [1]
    assert run.left() == []


def test_ctrl_c_before_the_next_attempt_starts_no_other(start: Callable[..., Run], up: Up) -> None:
    run = start(steps=100_000)
    run.until_trained()
    drain(run)
    run.kill(1)
    run.until_phase("restarting", 1)
    run.interrupt()
    assert run.end() == 130, run.text()
    assert up.attempts(run.job) == [1]
    assert run.left() == []


@pytest.mark.parametrize("phase", ["placing", "starting"])
def test_ctrl_c_while_the_next_attempt_begins_ends_it(phase: str, start: Callable[..., Run], up: Up) -> None:
    run = start("--grace", "20", steps=100_000)
    run.until_trained()
    drain(run)
    run.kill(1)
    run.until_phase("restarting", 1)
    keepers = [process.pid for process in run.children("torchloom.agent.keeper")]
    with run.frozen(*([run.process.pid] if phase == "placing" else keepers)):
        drain(run, undo=True)
        run.until_phase(phase, 2)
        run.interrupt()
        if phase == "starting":
            run.until_phase("stopping", 2)
    assert run.end(15) == 130, run.text()
    assert run.left() == []


def test_ctrl_c_twice_kills_ranks_that_do_not_listen(start: Callable[..., Run]) -> None:
    run = start("--grace", "60", steps=100_000)
    run.until_trained()
    run.tell(0, "deaf")
    run.until((run.folder / "deaf-0").exists)
    run.interrupt()
    run.until(lambda: "once more to kill it" in run.text())
    run.interrupt()
    assert run.end(10) == 130, run.text()
    assert run.left() == []


def test_ctrl_c_once_ends_the_ranks_when_its_own_control_plane_is_dead(start: Callable[..., Run]) -> None:
    run = start(own=True, steps=100_000)
    run.until_trained()
    for process in run.children(" up "):
        process.kill()
    run.interrupt()
    assert run.end(30) == 130, run.text()
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
    _, alive = psutil.wait_procs(run.census.processes(), timeout=10)
    assert alive == []
    assert any(run.census.temporary.glob("torchloom-run-*"))
    run.again(steps=5)
    assert run.end() == 0, run.text()
    assert run.left() == []


# ── what cannot go well ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_script_that_cannot_be_imported_is_not_tried_for_ever(start: Callable[..., Run], up: Up) -> None:
    run = start("--max-restarts", "50", script="import no_such_module")
    assert run.end() == 1, run.text()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in run.text().splitlines()[-1]
    assert up.attempts(run.job) == [1, 2]
    assert run.left() == []


def test_checkpoints_none_of_which_is_whole_are_named_and_left_alone(start: Callable[..., Run], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for step in (5, 10):
        (kept / f"checkpoint_step_{step}.pt").write_bytes(b"torn")
    run = start()
    assert run.end() == 8, run.text()
    assert "no valid checkpoint" in run.text()
    assert "checkpoint_step_10.pt (" in run.text()
    assert "checkpoint_step_5.pt (" in run.text()
    assert sorted(path.name for path in kept.iterdir()) == ["checkpoint_step_10.pt", "checkpoint_step_5.pt"]
    assert run.lives() == []
    assert run.left() == []


def test_a_checkpoint_folder_that_is_a_file_is_refused(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    run = start()
    assert run.end() != 0
    assert "kept is not a folder" in run.text()
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

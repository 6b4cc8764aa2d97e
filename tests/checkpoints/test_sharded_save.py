"""Many ranks make one checkpoint: each writes its part, and all resume from it as if never interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoints.ranks import job
from tests.checkpoints.training import Kind, Plan, Training, digests
from torchloom.checkpoints.store.search import latest


@pytest.mark.parametrize(
    ("kind", "size"),
    [("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("tensor-parallel", 2), ("ddp", 4), ("fsdp2", 4)],
)
def test_interrupted_and_resumed_equals_never_interrupted_to_the_bit(tmp_path: Path, kind: Kind, size: int) -> None:
    plan = Plan(tmp_path, kind, width=18 if kind == "tensor-parallel" else 17)
    with job(size, plan) as ranks:
        ranks.all(Training.train, 6)
        uninterrupted = ranks.all(Training.print)
        ranks.all(Training.begin)
        ranks.all(Training.train, 4)
        assert ranks.all(Training.save) == [""] * size
        ranks.all(Training.train, 1)  # lost
        ranks.kill()
    with job(size, plan) as ranks:
        assert ranks.all(Training.resume) == [4] * size
        ranks.all(Training.train, 2)
        assert ranks.all(Training.print) == uninterrupted


def test_running_means_go_on_as_if_never_interrupted(tmp_path: Path) -> None:
    """Each rank has its own until the first rank's are broadcast: those are the ones to keep."""
    plan = Plan(tmp_path, norm=True)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 6)
        uninterrupted = ranks.all(Training.print)
        ranks.all(Training.begin)
        ranks.all(Training.train, 4)
        ranks.all(Training.save)
    with job(2, plan) as ranks:
        ranks.all(Training.resume)
        ranks.all(Training.train, 2)
        assert ranks.all(Training.print) == uninterrupted


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path, kind: Kind) -> None:
    plan = Plan(tmp_path, kind)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 2)
        never_saved = ranks.all(Training.print)
        ranks.all(Training.begin)
        ranks.all(Training.save)
        ranks.all(Training.train, 2)
        assert ranks.all(Training.print) == never_saved
    with job(2, plan) as ranks:
        ranks.all(Training.resume)
        ranks.all(Training.train, 2)
        assert ranks.all(Training.print) == never_saved


def test_a_parameter_that_had_no_gradient_yet_has_no_optimizer_state_after_a_resume_either(tmp_path: Path) -> None:
    plan = Plan(tmp_path, spare=True)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 6)
        uninterrupted = ranks.all(Training.print)
        ranks.all(Training.begin)
        ranks.all(Training.train, 4)
        ranks.all(Training.save)
    with job(2, plan) as ranks:
        ranks.all(Training.resume)
        ranks.all(Training.train, 2)
        assert ranks.all(Training.print) == uninterrupted


def test_what_all_ranks_have_is_written_once_and_by_all_of_them(tmp_path: Path) -> None:
    with job(2, Plan(tmp_path, width=20_000)) as ranks:
        ranks.all(Training.train, 1)
        ranks.all(Training.save)
    model = 4 * (8 * 20_000 + 20_000 + 20_000)
    state = 3 * model  # with two moments for each parameter
    shards = {path.name: path.stat().st_size for path in (tmp_path / "step-1").glob("*.distcp")}
    assert len(shards) == 2
    assert state < sum(shards.values()) < 1.1 * state
    assert max(shards.values()) < 0.75 * state
    assert all(path.stat().st_size < 20_000 for path in (tmp_path / "step-1").glob("rank-*.pt"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_whoever_has_torch_can_read_it_without_us(tmp_path: Path, kind: Kind) -> None:
    with job(2, Plan(tmp_path / "kept", kind)) as ranks:
        ranks.all(Training.train, 3)
        ranks.all(Training.save)
        whole = ranks.all(Training.whole)[0]
    dcp_to_torch_save(tmp_path / "kept" / "step-3", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert digests({"model": plain["model"]}) == {key: value for key, value in whole.items() if key.startswith("model")}
    model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(17, 1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "kept" / "step-3", no_dist=True)
    assert digests(state) == digests({"model": plain["model"]})


def test_a_step_saved_again_is_replaced_on_all_ranks(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]
    with job(2, plan) as ranks:
        ranks.all(Training.train, 2)
        assert ranks.all(Training.save, 1) == ["", ""]
        whole = ranks.all(Training.print)
    with job(2, plan) as ranks:
        ranks.all(Training.resume)
        assert [rank["model.module.0.weight."] for rank in ranks.all(Training.print)] == [
            rank["model.module.0.weight."] for rank in whole
        ]
    assert visible(tmp_path) == ["step-1"]


def test_a_group_that_is_left_right_after_save_does_not_stop_it(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    with job(2, plan) as ranks:
        ranks.all(Training.train, 2)
        ranks.all(Training.save_and_leave_group)
        assert ranks.all(Training.finish_save) == ["", ""]
        assert all(ranks.all(Training.save, 3))  # fails, and does not raise
    assert latest(tmp_path).step == 2


@pytest.mark.long
def test_an_interpreter_that_ends_right_after_save_ends_when_it_is_written(tmp_path: Path) -> None:
    script = f"""
import sys, torch, torch.distributed as dist, torchloom
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000))
checkpoints = torchloom.Checkpoints({str(tmp_path / "kept")!r})
checkpoints.save(7, {{"model": model}})
if sys.argv[1] == "1":
    dist.destroy_process_group()
"""
    ranks = [subprocess.Popen([sys.executable, "-c", script, str(rank)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    found = latest(tmp_path / "kept")
    assert (found.step, found.rejected) == (7, {})
    assert visible(tmp_path / "kept") == ["step-7"]


def visible(folder: Path) -> list[str]:
    """What lies in a folder of checkpoints beside its locks; also what is hidden."""
    return sorted(path.name for path in folder.iterdir() if path.name not in {".writer", ".pruner"})

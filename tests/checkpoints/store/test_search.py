"""The newest checkpoint that is whole is found; one that is not is named, passed over, and left alone."""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import describe, verify
from torchloom.checkpoints.store.manifest import Manifest, folder_name
from torchloom.checkpoints.store.search import candidates, latest
from torchloom.errors import BadState, Damaged, NoValidCheckpoint


def make(folder: Path, step: int, size: int = 10_000, chunk: int = 1000) -> Path:
    """A whole checkpoint of two files."""
    path = folder / folder_name(step)
    path.mkdir(parents=True)
    for name in ("state.pt", "extra.bin"):
        (path / name).write_bytes(random.Random(f"{step}{name}").randbytes(size))
    files = tuple(describe(path / name, chunk) for name in ("state.pt", "extra.bin"))
    (path / manifests.NAME).write_bytes(manifests.encode(Manifest(step=step, files=files)))
    return path


def test_the_newest_is_the_one_with_the_greatest_step_not_the_latest_clock(tmp_path: Path) -> None:
    make(tmp_path, 1000)
    older = make(tmp_path, 900)
    os.utime(older, (2e9, 2e9))
    found = latest(tmp_path)
    assert (found.step, found.rejected) == (1000, {})


def test_a_damaged_one_is_named_and_passed_over_and_left_alone(tmp_path: Path) -> None:
    make(tmp_path, 90)
    bad = make(tmp_path, 100)
    data = bytearray((bad / "state.pt").read_bytes())
    data[4321] ^= 1
    (bad / "state.pt").write_bytes(data)
    found = latest(tmp_path)
    assert found.step == 90
    assert found.rejected == {"step-100": "state.pt differs in bytes 4000 to 5000"}
    assert (bad / "state.pt").read_bytes() == data


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda p: (p / "state.pt").unlink(), "state.pt is missing"),
        (lambda p: (p / manifests.NAME).unlink(), "never finished"),
        (lambda p: (p / manifests.NAME).write_text("{"), "manifest is damaged"),
        (lambda p: (p / manifests.NAME).write_text('{"format": 99}'), "format 99"),
        (lambda p: (p / "state.pt").write_bytes(b"short"), "5 bytes instead of 10000"),
        (lambda p: ((p / "state.pt").unlink(), (p / "state.pt").symlink_to(p / "extra.bin")), "cannot be read"),
        (lambda p: ((p / "state.pt").unlink(), (p / "state.pt").mkdir()), "state.pt"),
        (lambda p: p.rename(p.with_name("step-7")), "manifest is that of step 100"),
    ],
)
def test_every_kind_of_damage_is_told(tmp_path: Path, damage: object, why: str) -> None:
    path = make(tmp_path, 100)
    damage(path)  # type: ignore[operator]
    with pytest.raises(NoValidCheckpoint) as caught:
        latest(tmp_path)
    assert why in next(iter(caught.value.rejected.values()))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", manifests.NAME, ""])
def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, 100)
    manifest = manifests.read(path)
    wrong = replace(manifest, files=(replace(manifest.files[0], name=name), *manifest.files[1:]))
    (path / manifests.NAME).write_bytes(manifests.encode(replace(wrong, crc32="00000000")))
    with pytest.raises(Damaged, match="no file of a checkpoint"):
        verify(path)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_and_any_truncation_is_caught(tmp_path: Path, data: st.DataObject) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    path = make(folder, 5, size=data.draw(st.integers(1, 5000)), chunk=data.draw(st.integers(1, 999)))
    assert verify(path).step == 5
    file = path / data.draw(st.sampled_from(["state.pt", "extra.bin"]))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    file.write_bytes(content)
    with pytest.raises(Damaged):
        verify(path)


def test_ten_thousand_entries_are_no_trouble(tmp_path: Path) -> None:
    for n in range(10_000):
        (tmp_path / f"notes-{n}.txt").touch()
    make(tmp_path, 3)
    assert [c.step for c in candidates(tmp_path)] == [3]
    assert latest(tmp_path).step == 3


def test_a_missing_folder_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(BadState, match="does not exist"):
        latest(tmp_path / "nowhere")
    with pytest.raises(NoValidCheckpoint):
        latest(tmp_path)


def test_a_plain_torch_file_is_found_by_its_number_and_checked_to_the_bit(tmp_path: Path) -> None:
    for step in (90, 100):
        torch.save({"w": torch.randn(5000), "step": step}, tmp_path / f"checkpoint_step_{step}.pt")
    assert latest(tmp_path).step == 100
    caught = 0
    whole = (tmp_path / "checkpoint_step_100.pt").read_bytes()
    chance = random.Random(1)
    for _ in range(40):  # inside the tensor's bytes, where torch.load would believe anything
        broken = bytearray(whole)
        broken[whole.index(b"data/0") + 200 + chance.randrange(15_000)] ^= 1 << chance.randrange(8)
        (tmp_path / "checkpoint_step_100.pt").write_bytes(broken)
        caught += latest(tmp_path).step == 90
    assert caught == 40


def test_a_truncated_torch_file_is_passed_over(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(100)}, tmp_path / "checkpoint_step_1.pt")
    torch.save({"w": torch.randn(100)}, tmp_path / "checkpoint_step_2.pt")
    data = (tmp_path / "checkpoint_step_2.pt").read_bytes()
    (tmp_path / "checkpoint_step_2.pt").write_bytes(data[: len(data) // 2])
    found = latest(tmp_path)
    assert found.step == 1
    assert "not a whole torch.save file" in found.rejected["checkpoint_step_2.pt"]


def test_a_pattern_says_which_files_count(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "checkpoint_step_9.pt")
    torch.save({}, tmp_path / "other_100.pt")
    assert latest(tmp_path, "checkpoint_step_{step}.pt").step == 9
    with pytest.raises(BadState, match="where the step stands"):
        latest(tmp_path, "checkpoint.pt")


def test_a_dcp_folder_without_its_metadata_was_never_finished(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for step in (1, 2):
        dcp.save({"w": torch.ones(10)}, checkpoint_id=tmp_path / f"dcp-{step}", no_dist=True)
    (tmp_path / "dcp-2" / ".metadata").unlink()
    found = latest(tmp_path)
    assert (found.step, found.kind) == (1, "dcp")
    assert "never finished" in found.rejected["dcp-2"]


def test_a_hugging_face_folder_that_misses_a_shard_is_passed_over(tmp_path: Path) -> None:
    for step, shards in ((100, ["a.safetensors", "b.safetensors"]), (200, ["a.safetensors"])):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for shard in shards:
            (folder / shard).write_bytes(b"weights")
    found = latest(tmp_path)
    assert (found.step, found.kind) == (100, "huggingface")
    assert "b.safetensors is missing" in found.rejected["checkpoint-200"]

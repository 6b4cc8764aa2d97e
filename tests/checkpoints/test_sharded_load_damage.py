"""A checkpoint of many ranks is believed as a whole or not at all, and nothing in it is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.checkpoints.ranks import job
from tests.checkpoints.training import Plan, Training
from torchloom.checkpoints.sharded_load import Reader
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import describe, verify
from torchloom.checkpoints.store.search import latest
from torchloom.errors import Damaged


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, both whole, of two ranks."""
    folder = tmp_path_factory.mktemp("saves")
    with job(2, Plan(folder)) as ranks:
        for _ in range(2):
            ranks.all(Training.train, 1)
            assert ranks.all(Training.save) == ["", ""]
    return folder


@pytest.fixture
def saves(two_saves: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_saves, tmp_path / "kept", ignore=shutil.ignore_patterns(".writer")))


FILES = [".metadata", "rank-0.pt", "rank-1.pt", "__0_0.distcp", "__1_0.distcp", manifests.NAME]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 1 << 3
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def mix(path: Path) -> None:
    """With the file of that name of the other save."""
    shutil.copy(path.parent.with_name("step-1") / path.name, path)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, mix])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_told_and_the_older_one_is_found(
    saves: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(saves / "step-2" / name)
    found = latest(saves)
    assert found.step == 1
    assert list(found.rejected) == ["step-2"]
    assert name in found.rejected["step-2"] or "manifest" in found.rejected["step-2"]


@pytest.mark.parametrize(("name", "damage"), [("__1_0.distcp", flip), ("rank-1.pt", Path.unlink), (".metadata", mix)])
def test_all_ranks_alike_go_on_from_the_older_one(saves: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(saves / "step-2" / name)
    with job(2, Plan(saves)) as ranks:
        assert ranks.all(Training.resume) == [1, 1]
        ranks.all(Training.train, 1)
        assert ranks.all(Training.save) == ["", ""]  # replaces the damaged one
    assert latest(saves).step == 2


def test_none_that_is_whole_is_an_error_on_all_ranks(saves: Path) -> None:
    for step in (1, 2):
        flip(saves / f"step-{step}" / "rank-1.pt")
    with job(2, Plan(saves)) as ranks:
        outcomes = ranks.outcomes(Training.resume)
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoValidCheckpoint"] * 2
    assert all("step-2 (rank-1.pt differs" in str(outcome) for outcome in outcomes)


# ── what is hostile has checksums that fit ───────────────────────────────────────────────────────────────────────────


def forge(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file, and let the manifest vouch for it."""
    (checkpoint / name).write_bytes(data)
    manifest = manifests.read(checkpoint)
    files = tuple(describe(checkpoint / name) if file.name == name else file for file in manifest.files)
    (checkpoint / manifests.NAME).write_bytes(manifests.encode(replace(manifest, files=files, crc32="0" * 8)))
    verify(checkpoint)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".metadata", "rank-1.pt"])
def test_a_pickle_that_would_run_something_is_refused_on_all_ranks_and_runs_nothing(saves: Path, name: str) -> None:
    mark = saves / "boom"
    forge(saves / "step-2", name, pickle.dumps(Bomb(mark)))
    with job(2, Plan(saves)) as ranks:
        before = ranks.all(Training.print)
        for strict in (True, False):
            outcomes = ranks.outcomes(Training.resume, strict=strict)
            assert all(isinstance(outcome, Exception) for outcome in outcomes)
            assert any(name in str(outcome) or "mkdir" in str(outcome) for outcome in outcomes)
        assert ranks.all(Training.print) == before
    assert not mark.exists()


def test_a_part_that_would_run_something_is_refused_on_all_ranks_and_runs_nothing(saves: Path) -> None:
    """Values that are no tensors lie in the shards as pickles of their own."""
    mark = saves / "boom"
    for name in ("__0_0.distcp", "__1_0.distcp"):
        shard = saves / "step-2" / name
        metadata = Reader(saves / "step-2", {"__0_0.distcp", "__1_0.distcp"}).read_metadata()
        data = bytearray(shard.read_bytes())
        bomb = pickle.dumps(Bomb(mark))
        for index, info in metadata.storage_data.items():
            plain = isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata)
            if plain and info.relative_path == name:
                assert info.length >= len(bomb)
                data[info.offset : info.offset + len(bomb)] = bomb
        forge(saves / "step-2", name, bytes(data))
    with job(2, Plan(saves)) as ranks:
        before = ranks.all(Training.print)
        assert all(isinstance(outcome, Exception) for outcome in ranks.outcomes(Training.resume))
        assert ranks.all(Training.print) == before
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../step-1/__0_0.distcp", "/etc/passwd", "absent"])
def test_a_description_that_names_another_place_is_refused_on_all_ranks(saves: Path, path: str) -> None:
    checkpoint = saves / "step-2"
    metadata = Reader(checkpoint, {"__0_0.distcp", "__1_0.distcp"}).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = path
    forge(checkpoint, ".metadata", pickle.dumps(metadata))
    with job(2, Plan(saves)) as ranks:
        outcomes = ranks.outcomes(Training.resume)
    assert {type(outcome) for outcome in outcomes} == {Damaged}
    assert all(f"its .metadata names {path!r}, which is no part of it" in str(outcome) for outcome in outcomes)


def test_no_garbage_in_a_description_is_more_than_damage(saves: Path) -> None:
    checkpoint = saves / "step-2"
    whole = (checkpoint / ".metadata").read_bytes()
    dice = random.Random(0)
    for _ in range(600):
        data = bytearray(whole[: dice.randrange(len(whole))] if dice.random() < 0.2 else whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256) if data else 0
        (checkpoint / ".metadata").write_bytes(data)
        with contextlib.suppress(Damaged):
            Reader(checkpoint, {"__0_0.distcp", "__1_0.distcp"}).read_metadata()

"""Whatever happens to a checkpoint's bytes, it is not loaded but named with the reason, and an older one is used."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.checkpoints.store.test_search import make
from tests.checkpoints.victims import run, state, trace, value_of, why_untraceable
from tests.examples import examples
from torchloom.checkpoints import load, torch_files
from torchloom.checkpoints.api import Checkpoints
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import ChecksummedFile, describe, verify
from torchloom.checkpoints.store.manifest import Manifest
from torchloom.checkpoints.store.search import at_step, latest
from torchloom.errors import BadState, Damaged, NoValidCheckpoint

UNTRACEABLE = why_untraceable()
on_fixtures = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, as they were saved."""
    folder = tmp_path_factory.mktemp("two")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step))
    return folder


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    return shutil.copytree(two, tmp_path / "runs")


def resumed(folder: Path) -> tuple[int, float]:
    with Checkpoints(folder) as checkpoints:
        taken = state(0.0)
        return checkpoints.resume(taken), value_of(taken)


def test_cut_off_beside_any_border_of_a_checksum_it_is_told_by_its_length(tmp_path: Path) -> None:
    size, chunk = 1000, 100
    whole = (make(tmp_path, 2, size, chunk) / "state.pt").read_bytes()
    make(tmp_path, 1)
    cuts = {cut for border in range(0, size + 1, chunk) for cut in (border - 1, border, border + 1)}
    for cut in sorted(cut for cut in cuts if 0 <= cut < size):
        (tmp_path / "step-2" / "state.pt").write_bytes(whole[:cut])
        found = latest(tmp_path)
        assert (found.step, found.rejected) == (1, {"step-2": f"state.pt has {cut} bytes instead of {size}"})
    (tmp_path / "step-2" / "state.pt").write_bytes(whole + b"\0")
    assert latest(tmp_path).rejected == {"step-2": f"state.pt has {size + 1} bytes instead of {size}"}
    (tmp_path / "step-2" / "state.pt").write_bytes(whole)
    assert latest(tmp_path).step == 2


@on_fixtures
@given(st.sampled_from(["state.pt", manifests.NAME]), st.integers(0, 10**6), st.integers(0, 7))
def test_any_bit_flipped_in_any_file_is_noticed_and_the_older_one_is_used(
    two: Path, name: str, at: int, bit: int
) -> None:
    file = two / "step-2" / name
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[at % len(whole)] ^= 1 << bit
    file.write_bytes(flipped)
    try:
        found = latest(two)
        assert (found.step, list(found.rejected)) == (1, ["step-2"])
        assert found.rejected["step-2"]
        with pytest.raises(Damaged):
            at_step(two, 2)
    finally:
        file.write_bytes(whole)
    assert latest(two).step == 2


@on_fixtures
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=50))
def test_no_other_text_passes_for_a_manifest(two: Path, start: int, length: int, instead: bytes) -> None:
    file = two / "step-2" / manifests.NAME
    whole = file.read_bytes()
    start %= len(whole)
    other = whole[:start] + instead + whole[start + length % len(whole) :]
    if other == whole:
        return
    file.write_bytes(other)
    try:
        with pytest.raises(Damaged):
            verify(two / "step-2")
    finally:
        file.write_bytes(whole)


def newer(path: Path) -> None:
    manifest = json.loads((path / manifests.NAME).read_bytes())
    (path / manifests.NAME).write_text(json.dumps({**manifest, "format": 2, "files": "told otherwise by then"}))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced(file: Path) -> Path:
    file.unlink()
    return file


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (newer, "its manifest has format 2, this version reads up to 1"),
        (linked, "it is a link"),
        (
            lambda p: shutil.move(p / "state.pt", p / "s") and (p / "state.pt").symlink_to("s"),
            "state.pt cannot be read",
        ),
        (lambda p: os.mkfifo(replaced(p / "state.pt")), "state.pt is not a file"),
        (lambda p: replaced(p / "state.pt").mkdir(), "state.pt is not a file"),
        (lambda p: (p / "state.pt").unlink(), "state.pt is missing"),
        (lambda p: (p / manifests.NAME).unlink(), "it was never finished"),
        (lambda p: os.mkfifo(replaced(p / manifests.NAME)), "its manifest is not a file"),
        (lambda p: replaced(p / manifests.NAME).mkdir(), "its manifest is not a file"),
        (lambda p: replaced(p / manifests.NAME).symlink_to("../step-1/manifest.json"), "its manifest is a link"),
        (lambda p: (p / manifests.NAME).write_bytes(b""), "its manifest is damaged"),
        (lambda p: (p / manifests.NAME).write_bytes(b"[" * 100_000), "its manifest is damaged"),
        (lambda p: shutil.copytree(p.with_name("step-1"), p, dirs_exist_ok=True), "its manifest is that of step 1"),
    ],
)
def test_what_is_no_checkpoint_any_more_is_named_and_the_older_one_resumed(
    folder: Path, damage: object, why: str
) -> None:
    damage(folder / "step-2")  # type: ignore[operator]
    found = latest(folder)
    assert (found.step, list(found.rejected)) == (1, ["step-2"])
    assert why in found.rejected["step-2"]
    assert resumed(folder) == (1, 1.0)


def test_a_pipe_with_the_name_of_a_torch_file_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "checkpoint_3.pt")
    found = latest(folder, "checkpoint_{step}.pt")
    assert (found.step, found.rejected) == (2, {"checkpoint_3.pt": "it is neither a file nor a folder"})


def test_if_none_is_whole_training_does_not_begin_anew_unasked(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"step-{step}" / "state.pt").unlink()
    with Checkpoints(folder) as checkpoints, pytest.raises(NoValidCheckpoint) as caught:
        checkpoints.resume(state(0.0))
    assert list(caught.value.rejected) == ["step-2", "step-1"]


def test_a_file_replaced_while_it_is_loaded_is_not_believed(folder: Path) -> None:
    found = latest(folder)
    other = folder / "other"
    other.write_bytes((folder / "step-1" / "state.pt").read_bytes())
    other.rename(folder / "step-2" / "state.pt")
    with pytest.raises(Damaged, match="changed while it was read"):
        load.load(found, strict=True)


SHRINKING = """
import sys, threading, time
from pathlib import Path
from torchloom.checkpoints.store.manifest import Damaged
from torchloom.checkpoints.store.checksums import verify
path = Path(sys.argv[1])
threading.Timer(0.02, lambda: (path / "state.pt").open("r+").truncate(5000)).start()
try:
    while True:
        verify(path)
except Damaged as damage:
    print(damage.why)
"""


def test_a_file_cut_off_while_it_is_checked_ends_the_check_and_not_the_process(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    with (path / "state.pt").open("wb") as file:
        file.truncate(256 * 1024 * 1024)
    (path / manifests.NAME).write_bytes(manifests.encode(Manifest(step=1, files=(describe(path / "state.pt"),))))
    done = subprocess.run([sys.executable, "-c", SHRINKING, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, "a mapped page that is gone kills the process that reads it"
    assert "state.pt" in done.stdout


def check_on_a_bad_disk(folder: Path, log: Path) -> None:
    trace(log, ("preadv,preadv2:error=EIO",), ("preadv", "preadv2"))
    try:
        verify(folder)
    except Damaged as damage:
        log.with_suffix(".why").write_text(damage.why)


@pytest.mark.skipif(bool(UNTRACEABLE), reason=UNTRACEABLE)
def test_a_sector_that_cannot_be_read_is_damage_like_any_other(folder: Path, tmp_path: Path) -> None:
    assert run(check_on_a_bad_disk, folder / "step-2", tmp_path / "log") == 0
    assert "cannot be read: Input/output error" in (tmp_path / "log.why").read_text()


# ── a file that was made, not damaged ────────────────────────────────────────────────────────────────────────────────


class Hostile:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.touched,)


def forge(folder: Path, step: int, write: object) -> None:
    """A checkpoint whose manifest is right about a file that somebody else made."""
    path = folder / f"step-{step}"
    path.mkdir()
    write(path / torch_files.STATE)  # type: ignore[operator]
    manifest = Manifest(step=step, files=(describe(path / torch_files.STATE),), parts=("model", "value"))
    (path / manifests.NAME).write_bytes(manifests.encode(manifest))


def plain_pickle(path: Path, touched: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile(touched)))


def torch_file(path: Path, touched: Path) -> None:
    torch.save({"state": {"model": Hostile(touched), "value": 1}}, path)


def stuffed_archive(path: Path, touched: Path) -> None:
    torch.save({"state": {}}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("code/data.pkl", pickle.dumps(Hostile(touched)))


@pytest.mark.parametrize("write", [plain_pickle, torch_file, stuffed_archive])
def test_a_pickle_that_would_run_something_runs_nothing(folder: Path, tmp_path: Path, write: object) -> None:
    forge(folder, 3, lambda path: write(path, tmp_path / "ran"))  # type: ignore[operator]
    with Checkpoints(folder) as checkpoints:
        taken = state(0.0)
        with pytest.raises((Damaged, BadState)):
            checkpoints.resume(taken)
        assert value_of(taken) == 0.0
        assert checkpoints.resume(taken, step=2) == 2
    assert not (tmp_path / "ran").exists()


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_that_cannot_be_made_stops_a_resume_and_fails_a_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for where in (tmp_path / "file", tmp_path / "file" / "runs"):
        checkpoints = Checkpoints(where)
        with pytest.raises(BadState, match="cannot make the folder"):
            checkpoints.resume(state(0.0))
        with pytest.raises(BadState):
            checkpoints.latest()
        saving = checkpoints.save(1, state(1.0))
        assert saving is not None
        assert saving.wait(10)
        assert "cannot make the folder" in saving.error


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path: Path) -> None:
    where = Path("/proc/self/fd") if os.geteuid() == 0 else tmp_path  # root may write to any other
    tmp_path.chmod(0o500)
    with pytest.raises(BadState, match="cannot write into"):
        Checkpoints(where).resume(state(0.0))


def test_what_is_missing_is_told_apart(folder: Path) -> None:
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(BadState, match=r"no checkpoint of step 7 .*"):
            checkpoints.load(7)
        assert checkpoints.load(1).step == 1
    with pytest.raises(BadState, match="does not exist"):
        Checkpoints(folder / "none").latest()
    assert Checkpoints(folder / "none").resume(state(0.0)) == 0


def test_ten_thousand_other_entries_hide_nothing(folder: Path) -> None:
    for number in range(9800):
        (folder / f"log-{number}.txt").touch()
    for number in range(200):
        (folder / f".saving-step-{number}-0123abcd").mkdir()
    assert latest(folder).step == 2
    assert resumed(folder) == (2, 2.0)
    names = {path.name for path in folder.iterdir()}
    assert len(names) == 9803, "what killed saves left is gone, other files are not"


def test_a_sink_knows_the_checksums_of_what_it_was_given_in_any_pieces(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(30):
        path = tmp_path / str(number)
        pieces = [chance.randbytes(chance.randrange(50)) for _ in range(chance.randrange(20))]
        with ChecksummedFile(path, chunk=chance.randrange(1, 60)) as sink:
            for piece in pieces:
                assert sink.write(piece) == len(piece)
            entry = sink.finish()
        assert path.read_bytes() == b"".join(pieces)
        assert entry == describe(path, entry.chunk)

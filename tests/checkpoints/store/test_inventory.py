"""What is in a folder: listed at a look, checked to the bit if asked, and never waited for."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from tests.checkpoints.store.test_search import make
from tests.damaged_json import damage
from torchloom.checkpoints.store import manifest as manifests
from torchloom.checkpoints.store.checksums import describe
from torchloom.checkpoints.store.inventory import Entry, Inventory, inventory_from_reports, take_inventory
from torchloom.checkpoints.store.manifest import Manifest
from torchloom.errors import BadState
from torchloom.protocol.ids import RankId
from torchloom.protocol.views import SavedStep

NOW = 1_800_000_000.0


def archive(path: Path, name: str = "m/data.pkl") -> Path:
    """As torch.save writes one."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, b"pickled" * 100)
    return path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def states(found: Inventory) -> dict[int, str]:
    return {entry.step: entry.why or entry.status for entry in found.entries}


def test_newest_first_with_size_time_and_duration(tmp_path: Path) -> None:
    for step in (90, 1000):
        path = make(tmp_path, step)
        files = (describe(path / "state.pt"),)
        document = manifests.encode(Manifest(step=step, files=files, created=NOW - step, seconds=1.5))
        (path / manifests.NAME).write_bytes(document)
    found = take_inventory(tmp_path, NOW)
    assert found.entries[0] == Entry(
        name="step-1000", step=1000, kind="torchloom", size=10_000, created=NOW - 1000, seconds=1.5
    )
    assert [entry.step for entry in found.entries] == [1000, 90]
    assert found.folder == str(tmp_path)


def test_what_a_manifest_does_not_say_is_unknown_and_the_disk_tells_the_time(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    for file in (path, *path.iterdir()):
        os.utime(file, (NOW - 50, NOW - 50))
    (entry,) = take_inventory(tmp_path, NOW).entries
    assert (entry.seconds, entry.created) == (None, NOW - 50)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda p: (p / "state.pt").unlink(), "state.pt is missing"),
        (lambda p: (p / "state.pt").write_bytes(b"short"), "state.pt has 5 bytes instead of 10000"),
        (lambda p: (p / manifests.NAME).unlink(), "it has no manifest: it was never finished"),
        (lambda p: ((p / "state.pt").unlink(), os.mkfifo(p / "state.pt")), "state.pt is not a file"),
        (lambda p: ((p / "state.pt").unlink(), (p / "state.pt").symlink_to("extra.bin")), "state.pt is not a file"),
    ],
)
def test_a_look_sees_what_is_missing_or_too_short(tmp_path: Path, damage: object, why: str) -> None:
    make(tmp_path, 90)
    damage(make(tmp_path, 100))  # type: ignore[operator]
    for verify in (False, True):
        found = take_inventory(tmp_path, NOW, verify=verify)
        assert found.entries[0].why == why
        assert found.entries[0].status == "damaged"
        assert found.resume is not None
        assert found.resume.step == 90


def test_only_reading_every_byte_sees_a_flipped_bit(tmp_path: Path) -> None:
    make(tmp_path, 90)
    flip(make(tmp_path, 100) / "state.pt")
    seen, read = take_inventory(tmp_path, NOW), take_inventory(tmp_path, NOW, verify=True)
    assert states(seen) == {100: "complete", 90: "complete"}
    assert states(read) == {100: "state.pt differs in bytes 5000 to 6000", 90: "valid"}
    assert (seen.verified, read.verified) == (False, True)
    assert seen.resume is not None
    assert seen.resume.step == 100
    assert read.resume is not None
    assert read.resume.name == "step-90"


def test_a_damaged_one_has_the_size_it_has_and_the_age_it_had(tmp_path: Path) -> None:
    path = make(tmp_path, 5)
    document = manifests.encode(Manifest(step=5, files=(describe(path / "state.pt"),), created=NOW - 7, seconds=2.0))
    (path / manifests.NAME).write_bytes(document)
    (path / "state.pt").write_bytes(b"")
    (entry,) = take_inventory(tmp_path, NOW).entries
    assert (entry.size, entry.created, entry.seconds) == (10_000 + len(document), NOW - 7, 2.0)


def test_those_of_others_are_told_by_their_kind(tmp_path: Path) -> None:
    archive(tmp_path / "checkpoint_10.pt")
    flip(archive(tmp_path / "checkpoint_20.pt"))
    (tmp_path / "checkpoint_30.pt").write_bytes(archive(tmp_path / "whole").read_bytes()[:50])
    archive(tmp_path / "checkpoint_40.pt", "notes.txt")
    (tmp_path / "dcp-50").mkdir()
    (tmp_path / "dcp-50" / "__0_0.distcp").write_bytes(b"x" * 64)
    folder = tmp_path / "checkpoint-60"
    (folder / "more").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    (folder / "more" / "rest").write_bytes(b"x" * 10)
    seen = take_inventory(tmp_path, NOW)
    assert {entry.step: (entry.kind, entry.status) for entry in seen.entries} == {
        60: ("huggingface", "complete"), 50: ("dcp", "damaged"), 40: ("torch.save", "damaged"),
        30: ("torch.save", "damaged"), 20: ("torch.save", "complete"), 10: ("torch.save", "complete"),
    }  # fmt: skip
    assert seen.entries[0].size == 112, "a folder weighs what is in it, however deep"
    assert states(take_inventory(tmp_path, NOW, verify=True))[20].startswith("not a whole torch.save file")
    assert list(states(take_inventory(tmp_path, NOW, "checkpoint_{step}.pt"))) == [40, 30, 20, 10]


@pytest.mark.parametrize("data", damage(b'{"weight_map":{"a":"model.safetensors"}}'))
def test_a_damaged_index_is_named(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "checkpoint-60"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert states(take_inventory(tmp_path, NOW, verify=True)) == {60: "model.safetensors.index.json is damaged"}


def test_a_pipe_and_a_link_that_leads_away_are_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    os.mkfifo(folder / "checkpoint_1.pt")
    archive(tmp_path / "model.pt")
    (folder / "checkpoint_2.pt").symlink_to(tmp_path / "model.pt")
    (folder / "checkpoint_3.pt").symlink_to("nowhere.pt")
    archive(folder / "checkpoint_4.pt")
    (folder / "epoch_5.pt").symlink_to("checkpoint_4.pt")
    seen, found = take_inventory(folder, NOW), take_inventory(folder, NOW, verify=True)
    assert [entry.status for entry in seen.entries] == ["complete", "complete", "damaged", "damaged", "damaged"]
    assert [entry.status for entry in found.entries] == ["valid", "valid", "damaged", "damaged", "damaged"]
    assert found.entries[0].size == found.entries[1].size
    assert "it is a link" in found.entries[3].why
    assert found.entries[4].why == "it is neither a file nor a folder"


def test_what_is_being_written_is_told_from_what_was_left(tmp_path: Path) -> None:
    make(tmp_path, 100)
    for name, size in ((".saving-step-200-0123abcd", 2000), (".saving-step-50-0123abcd", 500)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").write_bytes(b"x" * size)
        for path in (tmp_path / name / "state.pt", tmp_path / name):
            os.utime(path, (NOW - 601, NOW - 601))
    os.utime(tmp_path / ".saving-step-200-0123abcd" / "state.pt", (NOW - 1, NOW - 1))
    (tmp_path / ".deleting-step-10-0123abcd").mkdir()
    found = take_inventory(tmp_path, NOW, verify=True)
    assert states(found) == {200: "writing", 100: "valid", 50: "abandoned"}
    assert [entry.size for entry in found.entries] == [2000, 20_000, 500]
    assert [entry.step for entry in found.finished] == [100]
    assert found.resume is found.finished[0]


def test_verifying_tells_which_one_of_how_many(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step-2" / "state.pt").unlink()
    told: list[tuple[int, int, int, int]] = []
    take_inventory(
        tmp_path, NOW, verify=True, on_verify=lambda e, number, of, done: told.append((e.step, number, of, done))
    )
    assert told == [(3, 1, 2, 0), (1, 2, 2, 20_000)]


def test_one_that_is_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path, step)

    def delete(entry: Entry, *_: int) -> None:
        if entry.step == 2:
            (tmp_path / "step-2").rename(tmp_path / ".deleting-step-2-0123abcd")

    assert states(take_inventory(tmp_path, NOW, verify=True, on_verify=delete)) == {1: "valid"}


@pytest.mark.long
def test_ten_thousand_checkpoints_are_listed_at_once(tmp_path: Path) -> None:
    document = (make(tmp_path, 0, size=10) / manifests.NAME).read_bytes()
    plain = json.loads(document)
    for step in range(1, 10_000):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        files = tuple(manifests.FileEntry(**{**f, "crcs": tuple(f["crcs"])}) for f in plain["files"])
        (folder / manifests.NAME).write_bytes(manifests.encode(Manifest(step=step, files=files)))
        for file in ("state.pt", "extra.bin"):
            os.link(tmp_path / "step-0" / file, folder / file)
    began = time.process_time()
    found = take_inventory(tmp_path, NOW)
    took = time.process_time() - began  # of the processor: what others do on the machine does not count
    assert len(found.entries) == 10_000
    assert {entry.status for entry in found.entries} == {"complete"}
    assert took < 10, "a second on a quiet machine"


def test_a_name_that_is_no_text_can_be_shown_and_sent(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xffstep_1.pt")).write_bytes(b"")
    (entry,) = take_inventory(tmp_path, NOW).entries
    assert entry.name.encode() == b"?step_1.pt"


def test_an_empty_folder_is_empty_and_a_missing_one_an_error(tmp_path: Path) -> None:
    assert take_inventory(tmp_path, NOW).entries == ()
    assert take_inventory(tmp_path, NOW).resume is None
    with pytest.raises(BadState, match="does not exist"):
        take_inventory(tmp_path / "none", NOW)


def test_what_was_told_of_is_listed_once_a_step_by_the_latest_word() -> None:
    def saved(step: int, at: float, size: int) -> SavedStep:
        return SavedStep(
            rank=RankId("mnist", "main", 0), incarnation="0" * 24, step=step, folder="/runs", node="n7", size=size,
            seconds=1.0, stall=0.1, at=at,
        )  # fmt: skip

    found = inventory_from_reports("/runs", [saved(10, 1.0, 100), saved(20, 2.0, 100), saved(10, 3.0, 200)])
    assert [(e.step, e.size, e.created, e.status, e.node) for e in found.entries] == [
        (20, 100, 2.0, "reported", "n7"), (10, 200, 3.0, "reported", "n7"),
    ]  # fmt: skip

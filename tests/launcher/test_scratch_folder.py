"""Temporary folders: gone with their owner, at the latest when the next one comes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchloom.launcher.scratch_folder import LOCK, remove_abandoned, scratch

OWNER = """
import sys, time
from torchloom.launcher.scratch_folder import scratch
with scratch("loom-test-") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_there_while_it_is_used_and_gone_afterwards() -> None:
    with scratch("loom-test-") as folder:
        (folder / "file").touch()
    assert not folder.exists()


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    try:
        folder = Path(owner.stdout.readline().strip())
        remove_abandoned("loom-test-")
        assert (folder / LOCK).exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert folder.exists()
    with scratch("loom-test-"):
        assert not folder.exists()


def test_what_has_not_our_mark_is_left_alone_however_old_it_is(temporary: Path) -> None:
    for name, content in (("loom-test-results", None), ("loom-test-theirs", b"another program's\n")):
        folder = temporary / name
        folder.mkdir()
        (folder / "file").touch()
        if content is not None:
            (folder / LOCK).write_bytes(content)
        os.utime(folder, (0, 0))
    remove_abandoned("loom-test-")
    assert (temporary / "loom-test-results" / "file").exists()
    assert (temporary / "loom-test-theirs" / "file").exists()


def test_what_others_named_alike_is_left_alone(temporary: Path) -> None:
    (temporary / "kept").mkdir()
    os.utime(temporary / "kept", (0, 0))
    (temporary / "loom-test-file").touch()
    (temporary / "loom-test-link").symlink_to(temporary / "kept")
    remove_abandoned("loom-test-")
    assert {path.name for path in temporary.iterdir()} == {"kept", "loom-test-file", "loom-test-link"}

"""Files are replaced whole, and one process at a time holds a lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom.shared.files import open_locked, replace_file, write_durably


def test_a_replaced_file_is_private_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for data in (b"old", b"new and longer", b""):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    (path / "occupied").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"of someone else")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        write_durably(tmp_path / "link", b"ours")
    assert target.read_bytes() == b"of someone else"


@pytest.mark.parametrize("record_lock", [False, True])
def test_a_lock_excludes_other_processes_until_it_is_closed(tmp_path: Path, record_lock: bool) -> None:
    script = "import sys; from pathlib import Path; from torchloom.shared.files import open_locked\n"
    script += f"sys.exit(open_locked(Path(sys.argv[1]), record_lock={record_lock}) is None)"

    def is_locked() -> bool:
        return bool(subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False).returncode)

    lock = open_locked(tmp_path / "lock", record_lock=record_lock)
    assert lock is not None
    assert is_locked()
    os.close(lock)
    assert not is_locked()


@pytest.mark.parametrize("record_lock", [False, True])
def test_a_forked_child_holds_a_flock_but_no_record_lock(tmp_path: Path, record_lock: bool) -> None:
    lock = open_locked(tmp_path / "lock", record_lock=record_lock)
    assert lock is not None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    os.close(lock)
    again = open_locked(tmp_path / "lock", record_lock=record_lock)
    os.write(writing, b"x")
    os.waitpid(child, 0)
    for fd in (reading, writing, again):
        if fd is not None:
            os.close(fd)
    assert (again is not None) is record_lock

"""A Manager finds the store that torchrun would have had for it, though nobody has made one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.slurm import free_ports

pytest.importorskip("torchft", reason="torchft is not installed (its wheel is for Linux on x86_64 alone)")

SCRIPT = """
import sys
from torchloom.integrations.torchft import rendezvous_store
rendezvous_store.install()
assert not {"torchft", "nats", "torchloom.threadlet.threadlet"} & set(sys.modules)  # nothing heavy before the script
from torchft.manager import Manager
import torch.distributed as dist
if sys.argv[1] == "own":
    own = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=True, wait_for_workers=False)
try:
    Manager(None, None, None, 1, lighthouse_addr="http://127.0.0.1:1", port=99999)
except Exception as error:  # it came as far as its own port, after it had found its store
    print("stopped at", "port" if "store" not in str(error).lower() else error)
print("served", len(rendezvous_store._kept))
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
store.set("a", "b")
print(store.get("a").decode())
if sys.argv[1] == "group":
    import os
    os.environ["WORLD_SIZE"] = "1"
    dist.init_process_group("gloo")
    print("group of", dist.get_world_size())
"""


def run(how: str, tmp_path: Path, **env: str) -> list[str]:
    (port,) = free_ports(1)
    given = {"TORCHLOOM_LAUNCHER": "loom", "REPLICA_GROUP_ID": "0", "RANK": "0", "WORLD_SIZE": "1"} | env
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RUST_LOG": "off"}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), how, str(port)]
    ended = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_manager_finds_a_store(tmp_path: Path) -> None:
    assert run("none", tmp_path) == ["stopped at port", "served 1", "b"]


def test_a_store_that_the_script_has_made_is_the_one(tmp_path: Path) -> None:
    assert run("own", tmp_path) == ["stopped at port", "served 0", "b"]


def test_a_process_group_that_is_made_later_finds_it(tmp_path: Path) -> None:
    assert run("group", tmp_path) == ["stopped at port", "served 1", "b", "group of 1"]

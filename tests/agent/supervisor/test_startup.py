"""What a fresh interpreter of a rank does before its script leaves no trace in it, and breaks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom.agent.supervisor.fork import STARTUP, with_startup

SEEN = """
import os, subprocess, sys
from torchloom.threadlet.process import step_counter
installed = step_counter._counter.join is not None
print(installed, os.environ.get("PYTHONPATH"), any("startup" in part for part in sys.path), flush=True)
subprocess.run([sys.executable, "-c", "import sys; print(sys.path); print('torchloom' in sys.modules)"])
"""


def run(script: str, folder: Path, **more: str) -> list[str]:
    """The lines it prints, started as a supervisor starts a rank."""
    (folder / "train.py").write_text(script)
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = with_startup(ours | {"TORCHLOOM_LAUNCHER": "loom"} | more)
    command = [sys.executable, "train.py"]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_only_ranks_of_ours_are_prepared() -> None:
    assert with_startup({"A": "1"}) == {"A": "1"}


@pytest.mark.parametrize("given", ["", "own", "own:other"])
def test_a_script_and_its_children_see_the_environment_they_would_have_had(given: str, tmp_path: Path) -> None:
    paths = ":".join(str(tmp_path / part) for part in given.split(":")) if given else ""
    first, path, loaded = run(SEEN, tmp_path, **({"PYTHONPATH": paths} if paths else {}))
    assert first == f"True {paths or None} False"
    assert STARTUP not in path
    assert all(part in path for part in paths.split(":"))
    assert loaded == "False"


def test_the_sitecustomize_of_the_user_is_run_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys\nsys.own = __file__\n")
    script = "import sys, sitecustomize\nprint(sys.own == sitecustomize.__file__, 'torchloom' in sys.modules)\n"
    assert run(script, tmp_path, PYTHONPATH=str(tmp_path / "own")) == ["True True"]


def test_an_interpreter_without_torchloom_runs_as_ever(tmp_path: Path) -> None:
    (tmp_path / "own" / "torchloom").mkdir(parents=True)
    (tmp_path / "own" / "torchloom" / "__init__.py").write_text("raise ImportError('not this one')\n")
    assert run("print('runs')", tmp_path, PYTHONPATH=str(tmp_path / "own")) == ["runs"]


def test_a_script_that_never_imports_torch_pays_for_nothing(tmp_path: Path) -> None:
    script = "import sys\nprint([m for m in ('torch', 'nats', 'asyncio', 'msgspec', 'logging') if m in sys.modules])"
    assert run(script, tmp_path) == ["[]"]

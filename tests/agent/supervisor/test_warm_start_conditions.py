"""Which starts can be warm, and what is said of those that cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchloom.agent.supervisor.protocol import Begin
from torchloom.agent.supervisor.warm_start import ColdStart, ParentEnvironment, Target, fit
from torchloom.protocol.phrase import Phrase, Prose, phrase

ENV = {"HOME": "/root", "OMP_NUM_THREADS": "4", "RANK": "0"}
PYTHON = "/venv/bin/python"


def birth(env: dict[str, str] = ENV, cwd: str = "/") -> ParentEnvironment:
    return ParentEnvironment(PYTHON, env, cwd, tuple(sys.path))


def begin(*argv: str, env: dict[str, str] = ENV, cwd: str = "/", python: str = PYTHON) -> Begin:
    return Begin(key="k", argv=(python, *argv), env=env, cwd=cwd, stdout="/o", stderr="/e")


def why(order: Begin, supervisor: ParentEnvironment | None = None) -> Prose:
    with pytest.raises(ColdStart) as cold:
        fit(order, supervisor or birth())
    return cold.value.why


def test_scripts_and_modules_fit() -> None:
    assert fit(begin("train.py", "-m", "x"), birth()) == Target("train.py", False, ("-m", "x"))
    assert fit(begin("-m", "pkg.train", "x"), birth()) == Target("pkg.train", True, ("x",))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("-u", "train.py"), phrase("flag_missing", flag="-u")),
        (("-c", "pass"), phrase("code_without_file")),
        (("-",), phrase("code_without_file")),
        ((), phrase("no_script_named")),
        (("-m",), phrase("flag_missing", flag="-m")),
    ],
)
def test_another_way_to_call_the_interpreter_does_not(argv: tuple[str, ...], reason: Phrase) -> None:
    assert why(begin(*argv), birth()) == reason


def test_another_interpreter_does_not() -> None:
    assert why(begin("t.py", python="/bin/python")) == phrase("other_interpreter", python="/bin/python", own=PYTHON)


LATE = [
    "RANK",
    "LOCAL_RANK",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_DEBUG",
    "GLOO_SOCKET_IFNAME",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHLOOM_INCARNATION",
    "SLURM_PROCID",
    "PWD",
]
EARLY = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONPATH",
    "TZ",
    "TMPDIR",
    "LD_PRELOAD",
    "TORCH_LOGS",
    "TORCH_DISTRIBUTED_DEBUG",
    "ANYTHING_ELSE",
]


@pytest.mark.parametrize("name", LATE)
def test_variables_read_late_may_differ(name: str) -> None:
    fit(begin("t.py", env=ENV | {name: "7"}), birth())
    fit(begin("t.py"), birth(env=ENV | {name: "7"}))


@pytest.mark.parametrize("name", EARLY)
def test_any_other_may_not(name: str) -> None:
    more = ENV | {name: "/7"}
    known = name in ENV
    code = "environment_differs" if known else "environment_adds"
    assert why(begin("t.py", env=more)) == phrase(code, name=name)
    code = "environment_differs" if known else "environment_lacks"
    assert why(begin("t.py"), birth(env=more)) == phrase(code, name=name)


def test_a_relative_pythonpath_binds_to_the_working_folder(tmp_path: Path) -> None:
    env = ENV | {"PYTHONPATH": f"/lib:{tmp_path.name}"}
    supervisor = birth(env=env, cwd=str(tmp_path))
    fit(begin("t.py", env=env, cwd=str(tmp_path)), supervisor)
    assert why(begin("t.py", env=env), supervisor) == phrase("relative_pythonpath")


def test_folders_archives_and_bytecode_are_left_to_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    assert why(begin(str(tmp_path))) == phrase("not_a_plain_script", script=str(tmp_path))
    assert why(begin("x.pyc")) == phrase("not_a_plain_script", script="x.pyc")


def test_a_folder_whose_modules_would_have_come_first_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "msgspec").mkdir()  # without __init__.py it yields to the real one
    (tmp_path / "unknown_to_all.py").write_text("")
    fit(begin("train.py", cwd=str(tmp_path)), birth())
    (tmp_path / "json.py").write_text("")
    reason = phrase("module_shadowed", folder=str(tmp_path), module="json")
    assert why(begin("train.py", cwd=str(tmp_path))) == reason
    assert why(begin("-m", "train", cwd=str(tmp_path))) == reason


def test_the_folder_a_loaded_module_came_from_fits() -> None:
    import msgspec

    assert msgspec.__file__
    fit(begin("-m", "train", cwd=str(Path(msgspec.__file__).parent.parent)), birth())

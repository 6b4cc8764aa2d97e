"""What is read out of what a rank left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.harness import ENV, SupervisorHarness
from tests.damaged_json import NESTED
from torchloom.agent.attempt import Attempt
from torchloom.agent.monitor.exit_evidence import (
    cause_of,
    how_it_ended,
    last_lines,
    oom_kills,
    raised,
    recorded_error,
)
from torchloom.agent.supervisor.protocol import Ended
from torchloom.agent.supervisor.supervisor_client import SupervisorOptions
from torchloom.protocol.node import AttemptStatus, RankStatus
from torchloom.protocol.phrase import Phrase, phrase


def ended(**fields: object) -> Ended:
    return Ended(key="k", at=1.0, **fields)  # type: ignore[arg-type]


def test_the_last_lines_are_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "err"
    file.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)) + b"\xff half")
    assert last_lines(file, 3) == ("line 99998", "line 99999", "\ufffd half")
    assert last_lines(file, 99, max_bytes=20) == ("line 99999", "\ufffd half")
    assert last_lines(file, 99, max_bytes=10) == ("\ufffd half",)  # what was cut in two is left out
    file.write_bytes(b"x" * 1_000_000)
    assert last_lines(file, 5) == ("x" * 500,)
    file.write_bytes(b" 10%|#\r 20%|##\r 30%|###\r\nnext\r\n")
    assert last_lines(file, 5) == (" 30%|###", "next")
    file.write_bytes(b"")
    assert last_lines(file) == ()
    assert last_lines(tmp_path / "none") == ()
    assert last_lines(tmp_path) == ()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}}', "ValueError: x"),
        ('{"message": "killed"}', "killed"),
        ('{"message": {}}', ""),
        ('{"message": ', ""),
        ("[]", ""),
        ("\udcff", ""),
        ('{"message": "\udcff"}', ""),
        (NESTED.decode(), ""),
    ],
)
def test_the_error_file_of_torch(tmp_path: Path, content: str, error: str) -> None:
    file = tmp_path / "error.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert recorded_error(file) == error
    assert recorded_error(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("raise ValueError('x')", "ValueError: x"),
        ("raise KeyError", "KeyError"),
        ("try:\n    1/0\nexcept ZeroDivisionError:\n    raise RuntimeError('a\\nb')", "RuntimeError: a"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("class Odd(Exception): pass\nraise Odd('y')", "Odd: y"),
        ("import sys\nsys.exit('no data')", ""),
        ("import sys, atexit\natexit.register(print, 'bye', file=sys.stderr)\nraise ValueError('x')", "ValueError: x"),
        ("", ""),
    ],
)
def test_the_exception_is_found_in_what_python_prints(tmp_path: Path, script: str, error: str) -> None:
    (tmp_path / "t.py").write_text(script)
    with (tmp_path / "err").open("wb") as err:
        subprocess.run([sys.executable, tmp_path / "t.py"], stderr=err, check=False)
    assert raised(last_lines(tmp_path / "err")) == error


def test_why_it_ended_is_the_exception_or_that_memory_was_short() -> None:
    assert cause_of(ended(code=0), "ignored") == ("", "")
    assert cause_of(ended(code=1), "ValueError: x") == ("exception", "ValueError: x")
    assert cause_of(ended(signal=9), "ignored") == ("", "")
    assert cause_of(ended(signal=9, lost=True), "ignored") == ("", "")
    often = phrase("out_of_memory", kills=2)
    assert cause_of(ended(signal=9, oom_kills=2), "ignored") == ("out_of_memory", often)
    assert cause_of(ended(signal=15, oom_kills=1), "ignored") == ("", "")
    assert cause_of(ended(code=1, oom_kills=1), "") == ("", "")


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"signal": 9, "oom_kills": 1}, "out_of_memory"),
        ({"signal": 9, "oom_kills": 2}, "out_of_memory"),  # in other words, and the same
        ({"signal": 9}, ""),
        ({"code": 1}, "exception"),
        ({"code": 0}, ""),
    ],
)
def test_why_a_rank_ended_is_told_in_a_word_that_programs_compare(
    tmp_path: Path, how: dict[str, object], cause: str
) -> None:
    attempt = Attempt(AttemptStatus(job="mnist", attempt=1), tmp_path, tmp_path, changed=lambda: None)
    attempt.ranks[0] = RankStatus(rank=0, incarnation="1" * 24, state="running")
    attempt.log(0, "err").parent.mkdir(parents=True, exist_ok=True)
    attempt.log(0, "err").write_text("ValueError: it is odd\n")
    attempt.ended(0, ended(**how))
    assert (attempt.ranks[0].state, attempt.ranks[0].cause) == ("ended", cause)
    evidence = attempt.ranks[0].evidence
    assert isinstance(evidence, Phrase)
    assert (evidence.code, evidence.args["lines"]) == ("rank_end", "ValueError: it is odd")
    assert evidence.args["how"] == how_it_ended(ended(**how))
    assert evidence.args["error"] == attempt.ranks[0].error == cause_of(ended(**how), "ValueError: it is odd")[1]


def test_both_kinds_of_cgroups_are_read(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job/a\n")
    (tmp_path / "job" / "a").mkdir(parents=True)
    (tmp_path / "job" / "a" / "memory.events").write_text("low 0\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(tmp_path, tmp_path) == 1
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/b\n0::/\n")
    (tmp_path / "memory" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "b" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert oom_kills(tmp_path, tmp_path) == 3
    (tmp_path / "cgroup").write_text("0::/gone\n")
    assert oom_kills(tmp_path, tmp_path) == 0
    assert oom_kills(tmp_path / "none") == 0


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup that may have 100 MB, where we are allowed to make one."""
    mine = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    old = "memory" in mine
    folder = (
        Path("/sys/fs/cgroup")
        / ("memory" if old else "")
        / (mine["memory"] if old else mine[""]).lstrip("/")
        / f"loom-{os.getpid()}"
    )
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text("100M")
        if not old:
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"cannot make a memory cgroup here: {error}")
    yield folder
    folder.rmdir()


async def test_a_real_oom_kill_is_told_from_another_sigkill(small_cgroup: Path, tmp_path: Path) -> None:
    harness = SupervisorHarness(tmp_path)
    state = await harness.start(tmp_path / "supervisor", SupervisorOptions(tied=True, env=ENV))
    (small_cgroup / "cgroup.procs").write_text(str(state.pid))
    harness.script("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "plain.py")
    harness.script(
        "x = []\nwhile True: x.append(bytearray(os.urandom(1)) * 10**7)".replace("os.", "__import__('os')."),
        "hungry.py",
    )
    plain = (await harness.live("plain.py")).ended
    hungry = (await harness.live("hungry.py")).ended
    await harness.link.dismiss()
    assert plain.signal == hungry.signal == signal.SIGKILL
    assert cause_of(plain, "") == ("", "")
    assert cause_of(hungry, "") == ("out_of_memory", phrase("out_of_memory", kills=1))

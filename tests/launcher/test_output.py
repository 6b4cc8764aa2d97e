"""What ranks print, with the rank in front of each line."""

from __future__ import annotations

import io
from pathlib import Path

from msgspec.structs import replace

from tests.views.test_replica_runs import a_replica
from torchloom.launcher.output import FileReader, Output
from torchloom.protocol.views import RunView


def printed(folder: Path, ordinal: int, text: str, part: int = 0) -> RunView:
    """A replica whose rank has printed this in an attempt."""
    run = a_replica(part, attempt=ordinal)
    logs = folder / str(part)
    (logs / f"attempt-{ordinal}").mkdir(parents=True, exist_ok=True)
    (logs / f"attempt-{ordinal}" / "rank-0.out").write_text(text)
    return replace(run, task=replace(run.task, log_dir=str(logs)))


async def test_lines_have_replica_and_rank_in_front(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(False, out=out, err=err)
    reader = FileReader(output)
    runs = [printed(tmp_path, 1, f"hello from {number}\nhalf", part=number) for number in (0, 1)]
    for run, begun in zip(runs, (1, 0), strict=True):  # the beginning of the other is not reported yet
        await reader.show_attempts(run, begun)
    assert out.getvalue() == "[0/0] hello from 0\n"
    for run in runs:
        await reader.show_attempts(run, 1)
        assert not await reader.show(run, 1)
    output.finish()
    assert out.getvalue() == "[0/0] hello from 0\n[1/0] hello from 1\n[0/0] half\n[1/0] half\n"
    assert err.getvalue() == ""


async def test_of_an_attempt_whose_beginning_was_not_told_nothing_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    reader = FileReader(Output(False, out=out))
    run = printed(tmp_path, 2, "second try\n")
    await reader.show_attempts(run, 1)
    assert out.getvalue() == ""
    await reader.show_attempts(run, 2)
    assert out.getvalue() == "[0/0] second try\n"


async def test_files_of_ranks_that_the_job_does_not_have_are_left_alone(tmp_path: Path) -> None:
    out = io.StringIO()
    run = printed(tmp_path, 1, "mine\n")
    (tmp_path / "0" / "attempt-1" / "rank-5.out").write_text("of an older, larger run\n")
    await FileReader(Output(False, out=out)).show_attempts(run, 1)
    assert out.getvalue() == "[0/0] mine\n"


async def test_what_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    run = printed(tmp_path, 1, "out\n")
    (tmp_path / "0" / "attempt-1" / "rank-0.err").mkdir()
    await FileReader(Output(False, out=out)).show_attempts(run, 1)
    assert out.getvalue() == "[0/0] out\n"


async def test_what_is_left_of_an_attempt_is_shown_before_the_next(tmp_path: Path) -> None:
    out = io.StringIO()
    reader = FileReader(Output(False, out=out))
    await reader.show_attempts(printed(tmp_path, 1, "first\n"), 1)
    printed(tmp_path, 1, "first\nlast words\n")
    printed(tmp_path, 2, "short\n")
    await reader.show_attempts(printed(tmp_path, 3, "third\n"), 3)
    lines = ["first", "last words", "short", "third"]
    assert out.getvalue() == "".join(f"[0/0] {line}\n" for line in lines)


def test_replicas_have_colours_of_their_own() -> None:
    out = io.StringIO()
    output = Output(True, out=out)
    output.feed("a", 0, "out", b"x\n", "0")
    output.feed("b", 0, "out", b"x\n", "1")
    output.feed("c", 1, "out", b"x\n", "1")
    shades = [line.partition("m[")[0] for line in out.getvalue().splitlines()]
    assert shades[0] != shades[1] == shades[2]

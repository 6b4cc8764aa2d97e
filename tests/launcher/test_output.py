"""What ranks print, with the rank in front of each line."""

from __future__ import annotations

import io
from pathlib import Path

from torchloom.launcher.output import Output


def test_lines_have_replica_and_rank_in_front(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(False, out=out, err=err)
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "rank-0.out").write_text(f"hello from {number}\nhalf")
        output.follow(folder, [0], f"mnist:{number}", 1, str(number))
    assert output.show({"mnist:0": 1, "mnist:1": 0})  # the beginning of the other is not told yet
    assert out.getvalue() == "[0/0] hello from 0\n"
    assert output.show({"mnist:0": 1, "mnist:1": 1})
    assert not output.show({"mnist:0": 1, "mnist:1": 1})
    output.finish()
    assert out.getvalue() == "[0/0] hello from 0\n[1/0] hello from 1\n[0/0] half\n[1/0] half\n"
    assert err.getvalue() == ""


def test_of_an_attempt_whose_beginning_was_not_told_nothing_is_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    output = Output(False, out=out)
    (tmp_path / "rank-0.out").write_text("second try\n")
    output.follow(tmp_path, [0], "mnist", 2)
    assert not output.show({"mnist": 1})
    assert output.show({"mnist": 2})
    assert out.getvalue() == "[0] second try\n"


def test_replicas_have_colours_of_their_own() -> None:
    out = io.StringIO()
    output = Output(True, out=out)
    output.feed("a", 0, "out", b"x\n", "0")
    output.feed("b", 0, "out", b"x\n", "1")
    output.feed("c", 1, "out", b"x\n", "1")
    shades = [line.partition("m[")[0] for line in out.getvalue().splitlines()]
    assert shades[0] != shades[1] == shades[2]

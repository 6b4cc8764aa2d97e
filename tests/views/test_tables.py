"""Columns stay aligned and within the terminal, and nothing printed can command it."""

from __future__ import annotations

from operator import itemgetter

import pytest

from torchloom.views.format.tables import Cell, Column, Screen, clean, columns_of, cut, table

COLUMNS = [
    Column("NAME", itemgetter(0), shrinks=True),
    Column("N", itemgetter(1), right=True),
    Column("TEXT", itemgetter(2), shrinks=True),
]


def test_columns_are_aligned_and_numbers_stand_right() -> None:
    lines = table(COLUMNS, [["a", "5", "x"], ["long name", "1234", "y"]], Screen())
    assert lines == ["NAME          N  TEXT", "a             5  x", "long name  1234  y"]


@pytest.mark.parametrize("width", [5, 20, 31, 60])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    rows = [["n" * 40, "123456", "t" * 40], ["é漢字" * 10, "1", "漢" * 30]]
    for line in table(COLUMNS, rows, Screen(width=width)):
        assert columns_of(line) <= width


def test_only_columns_that_may_shrink_do() -> None:
    lines = table(COLUMNS, [["n" * 40, "123456", "t" * 40]], Screen(width=40))
    assert "123456" in lines[1]
    assert lines[1].count("…") == 2


def test_a_pipe_gets_everything() -> None:
    assert "n" * 400 in table(COLUMNS, [["n" * 400, "1", "x"]], Screen(width=None))[1]


def test_colour_does_not_disturb_alignment() -> None:
    plain = table(COLUMNS, [["a", "5", Cell("x", "red")]], Screen())
    coloured = table(COLUMNS, [["a", "5", Cell("x", "red")]], Screen(colour=True))
    assert "\x1b[31mx\x1b[0m" in coloured[1]
    assert coloured[1].replace("\x1b[31m", "").replace("\x1b[0m", "") == plain[1]


def test_terminal_escapes_in_free_text_are_shown_not_obeyed() -> None:
    assert clean("bad\x1b[2J\nnews\x07") == "bad\N{REPLACEMENT CHARACTER}[2J news\N{REPLACEMENT CHARACTER}"
    assert "\x1b" not in "".join(table(COLUMNS, [["\x1b[2J", "1", "\r\x9b"]], Screen()))


def test_cut_counts_wide_characters() -> None:
    assert cut("漢字漢字", 5) == "漢字…"
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "ab…"

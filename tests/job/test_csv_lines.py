"""Lines of a workload file: commas in quotes and brackets, comments, blanks, other ends of lines."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.errors import BadInput
from torchloom.job.csv_lines import Line, split_cells, split_lines


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        ("a,b", ("a", "b")),
        (" a , b ,", ("a", "b", "")),
        ('"a, b",c', ("a, b", "c")),
        ('["0 1" "0 1"],c', ('["0 1" "0 1"]', "c")),
        ('["0 1", "0 1"],c', ('["0 1", "0 1"]', "c")),
        ("{'n1':[0, 1]},c", ("{'n1':[0, 1]}", "c")),
        ('"[""0 1"", ""0 1""]",c', ('["0 1", "0 1"]', "c")),
        ('"0 1" "0 1",c', ('"0 1" "0 1"', "c")),
        ('"1 0",c', ("1 0", "c")),
        ("'1 0',c", ("1 0", "c")),
        ("a,b # c, d", ("a", "b")),
        ("# a,b", ("",)),
        ("run#1,b", ("run#1", "b")),
        ('"a # b",c', ("a # b", "c")),
        ("it's,b", ("it's", "b")),
        ("", ("",)),
    ],
)
def test_a_comma_separates_outside_of_quotes_and_brackets(line: str, cells: tuple[str, ...]) -> None:
    assert split_cells(line) == cells


@pytest.mark.parametrize("line", ['"a,b', '["0 1,2', "[0 1,2", "{'a': [0]"])
def test_what_is_not_closed_is_refused(line: str) -> None:
    with pytest.raises(BadInput, match="is not closed"):
        split_cells(line)


def test_rows_are_counted_as_in_a_spreadsheet_whatever_the_file_looks_like() -> None:
    text = "\N{BYTE ORDER MARK}a,b\r\n\r\n# no row\r\n  ,  \r\n1,2\r\n[,4\r\n5,6"
    assert list(split_lines(text)) == [
        Line(1, ("a", "b")), Line(5, ("1", "2")), Line(6, (), "a bracket is not closed"), Line(7, ("5", "6")),
    ]  # fmt: skip
    assert list(split_lines("a\n1")) == list(split_lines("a\n1\n"))


@given(st.text())
def test_any_line_is_cells_or_is_refused(text: str) -> None:
    assert all(line.row >= 1 for line in split_lines(text))
    with contextlib.suppress(BadInput):
        assert all(isinstance(cell, str) for cell in split_cells(text))

"""Rows with torchloader's columns: what each column means, which variants are read, and what is said of a bad one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.job.workload import Problem, Row, Rows
from torchloom.job.workload_rows import COLUMNS, read_rows
from torchloom.protocol.job_spec import DeviceGroup

FIXTURE = Path(__file__).parent.parent / "fixtures" / "workload.csv"
GOOD = {
    "arch": "resnet", "depth": "10", "batch": "512", "workers": "16", "output_folder": "a", "master": "d3093",
    "port": "12448", "arrival_time": "1", "cuda_device": '["0 1" "0 1"]', "start_iter": "0", "start_epoch": "1",
    "end_iter": "500", "end_epoch": "1", "node_size": "2",
}  # fmt: skip


def text_of(*rows: Mapping[str, str]) -> str:
    """A file with the columns of the first row."""
    names = list(rows[0])
    return "\n".join([",".join(names), *(",".join(row[name] for name in names) for row in rows)])


def rows_of(*changes: Mapping[str, str], without: tuple[str, ...] = ()) -> Rows:
    kept = {name: value for name, value in GOOD.items() if name not in without}
    return read_rows(text_of(*(kept | dict(change) for change in changes or ({},))))


def row(change: Mapping[str, str] | None = None, without: tuple[str, ...] = ()) -> Row:
    rows = rows_of(change or {}, without=without)
    assert rows.problems == ()
    return rows.rows[0]


def test_the_rows_of_torchloader_are_read() -> None:
    rows = read_rows(FIXTURE.read_text())
    assert (rows.problems, rows.warnings) == ((), ())
    assert [(each.arch, each.depth, each.batch, each.workers, each.port) for each in rows.rows] == [
        ("resnet", 10, 512, 16, 12448), ("vgg", 11, 512, 16, 23448), ("googlenet", 1, 512, 16, 58448),
    ]  # fmt: skip
    assert rows.rows[1].groups == (DeviceGroup(devices=(1, 2), node="d3093"), DeviceGroup(devices=(1, 2)))
    assert {(each.arrival, each.iterations, each.ranks, each.output_folder) for each in rows.rows} == {
        (1.0, 500, 4, "test-48worker-2node-mod3")
    }


# ── what the columns mean ──


@pytest.mark.parametrize(
    ("change", "iterations"),
    [
        ({}, 500),
        ({"end_epoch": "3"}, 1500),
        ({"start_epoch": "2", "end_epoch": "3"}, 1000),
        ({"start_iter": "100"}, 400),
        ({"start_iter": "100", "end_epoch": "3"}, 1400),
        ({"start_epoch": "0", "end_epoch": "0"}, 500),
    ],
)
def test_iterations_are_those_of_all_epochs_after_the_first_ones_that_are_left_out(
    change: dict[str, str], iterations: int
) -> None:
    assert row(change).iterations == iterations
    assert row(change).samples == iterations * 512


def test_the_master_is_the_node_of_rank_0() -> None:
    assert [group.node for group in row().groups] == ["d3093", None]
    named = row({"cuda_device": "{'d3091':[2 3] 'd3093':[0 1]}"})
    assert [(group.node, group.devices) for group in named.groups] == [("d3093", (0, 1)), ("d3091", (2, 3))]


def test_a_remainder_is_given_to_the_first_ranks_with_a_warning() -> None:
    rows = rows_of({"batch": "514", "workers": "17"})
    assert rows.warnings == (
        Problem(2, "batch", "514 is not a multiple of 4 devices: 129 for the first 2, 128 for the others"),
        Problem(2, "workers", "17 is not a multiple of 4 devices: 5 for the first 1, 4 for the others"),
    )


def test_rows_with_submit_interval_run_one_after_another() -> None:
    text = text_of(*[GOOD | {"submit_interval": "30", "arrival_time": "0"}] * 3)
    rows = read_rows(text)
    assert [(each.arrival, each.follows) for each in rows.rows] == [(0.0, 0), (30.0, 2), (60.0, 3)]
    assert rows.warnings == ()
    assert read_rows(FIXTURE.read_text(), {"submit_interval": "5"}).rows[2].arrival == 10.0


def test_submit_interval_takes_the_place_of_arrival_time_with_a_warning() -> None:
    rows = read_rows(FIXTURE.read_text(), {"submit_interval": "5"})
    assert [(warning.row, warning.column) for warning in rows.warnings] == [(n, "arrival_time") for n in (2, 3, 4)]


# ── variants of real files ──


@pytest.mark.parametrize(
    "missing", ["master", "node_size", "port", "arrival_time", "start_iter", "start_epoch", "end_epoch"]
)
def test_a_file_may_lack_a_column(missing: str) -> None:
    assert row(without=(missing,)).iterations == 500


def test_an_empty_cell_is_the_default_of_its_column() -> None:
    empty = row(
        dict.fromkeys(("master", "port", "arrival_time", "start_iter", "start_epoch", "end_epoch", "node_size"), "")
    )
    assert (empty.master, empty.port, empty.arrival, empty.iterations) == ("", 0, 0.0, 500)
    assert empty.groups[0].node is None


@pytest.mark.parametrize("size", ["2", "4"])
def test_world_size_in_place_of_node_size_counts_groups_or_devices(size: str) -> None:
    text = text_of({name: value for name, value in GOOD.items() if name != "node_size"} | {"world_size": size})
    assert read_rows(text).problems == ()


def test_whole_numbers_may_end_as_spreadsheets_write_them() -> None:
    assert (row({"batch": "512.0"}).batch, row({"arrival_time": "1.5"}).arrival) == (512, 1.5)


def test_blanks_comments_ends_of_lines_and_marks_of_editors_change_nothing() -> None:
    plain = FIXTURE.read_text()
    expected = read_rows(plain).rows
    assert read_rows(plain.rstrip("\n")).rows == expected
    assert read_rows("\N{BYTE ORDER MARK}" + plain.replace("\n", "\r\n")).rows == expected
    assert read_rows(plain.replace("arch,depth", " Arch , DEPTH")).rows == expected
    later = read_rows("# three jobs\n\n" + plain.replace(", 2\n", ", 2,  # a comment\n")).rows
    assert [each.row for each in later] == [4, 5, 6]


def test_a_value_of_the_caller_takes_the_place_of_a_column() -> None:
    rows = read_rows(FIXTURE.read_text(), {"end_iter": "20", "world_size": "2", "master": ""}).rows
    assert [(each.iterations, each.master) for each in rows] == [(20, "")] * 3


# ── what is wrong ──


@pytest.mark.parametrize(
    ("change", "column", "said", "remedy"),
    [
        ({"arch": "resnt"}, "arch", "no architecture 'resnt'", "did you mean resnet"),
        ({"arch": ""}, "arch", "no architecture ''", "there are: resnet"),
        ({"depth": "11"}, "depth", "resnet has no depth 11", "resnet has 10, 12"),
        ({"depth": "ten"}, "depth", "'ten' is not a whole number", "from 0 to 10,000"),
        ({"depth": ""}, "depth", "it is empty", "from 0 to 10,000"),
        ({"batch": "0"}, "batch", "'0' is out of bounds", "from 1 to 1,000,000,000"),
        ({"batch": "-5"}, "batch", "'-5' is out of bounds", "from 1"),
        ({"batch": "3"}, "batch", "3 samples for 4 devices", "4 or more"),
        ({"batch": "512.5"}, "batch", "'512.5' is not a whole number", "a whole number"),
        ({"batch": "9" * 60}, "batch", "is out of bounds", "from 1"),
        ({"batch": "٣"}, "batch", "is not a whole number", "a whole number"),
        ({"workers": "-1"}, "workers", "'-1' is out of bounds", "from 0"),
        ({"workers": "99999"}, "workers", "99,999 for 4 devices", "at most 512 for each"),
        ({"port": "70000"}, "port", "'70000' is out of bounds", "from 0 to 65,535"),
        ({"arrival_time": "-1"}, "arrival_time", "'-1' is before the start", "seconds from 0"),
        ({"arrival_time": "inf"}, "arrival_time", "'inf': the job would never arrive", "to 100,000,000"),
        ({"arrival_time": "1e9"}, "arrival_time", "'1e9': the job would never arrive", "to 100,000,000"),
        ({"arrival_time": "nan"}, "arrival_time", "'nan' is not a number", "seconds from 0"),
        ({"arrival_time": "soon"}, "arrival_time", "'soon' is not a number", "seconds from 0"),
        ({"cuda_device": "[0 1"}, "", "a bracket is not closed", "in pairs"),
        ({"cuda_device": ""}, "cuda_device", "there is no device", "in quotes"),
        ({"cuda_device": '["0 0" "0 1"]'}, "cuda_device", "device 0 stands twice in a group", "not two ranks of one"),
        ({"cuda_device": "gpu0"}, "cuda_device", "'gpu0' is not a device", "from 0 to 1,023"),
        ({"cuda_device": "{'a':[0] 'b':[1]}"}, "master", "'d3093' is not among the nodes", "one of a, b, or empty"),
        ({"master": "!"}, "master", "'!' is not the name of a node", "loom nodes"),
        ({"node_size": "3"}, "node_size", "3, and cuda_device has devices of 2", "write 2"),
        ({"start_iter": "500"}, "start_iter", "500 is not below end_iter, 500", "before its last one"),
        ({"start_epoch": "2"}, "end_epoch", "1 is before start_epoch, 2", "2 or more"),
        ({"end_iter": "0"}, "end_iter", "'0' is out of bounds", "from 1"),
        ({"output_folder": ""}, "output_folder", "it is empty", "below trace/"),
        ({"output_folder": "../a"}, "output_folder", "'../a' is not a folder below trace/", "below trace/"),
        ({"output_folder": "/etc"}, "output_folder", "'/etc' is not a folder below trace/", "below trace/"),
        ({"output_folder": "a\x1bb"}, "output_folder", "is not a folder below trace/", "below trace/"),
        ({"output_folder": "a" * 300}, "output_folder", "it is too long", "200 characters"),
        ({"arch": "resnet,10"}, "", "15 cells, and there are 14 columns", "quote a text"),
    ],
)
def test_a_bad_cell_is_named_with_row_column_and_remedy(
    change: dict[str, str], column: str, said: str, remedy: str
) -> None:
    rows = rows_of({}, change)
    assert [(problem.row, problem.column) for problem in rows.problems] == [(3, column)]
    assert said in rows.problems[0].text
    assert remedy in rows.problems[0].remedy


def test_all_problems_of_all_rows_are_listed() -> None:
    rows = rows_of({"arch": "x", "batch": "0", "port": "-1"}, {}, {"depth": "1", "end_epoch": "0"})
    assert [(problem.row, problem.column) for problem in rows.problems] == [
        (2, "batch"), (2, "port"), (2, "arch"), (4, "depth"), (4, "end_epoch"),
    ]  # fmt: skip
    assert str(rows.problems[0]) == "row 2, batch: '0' is out of bounds → a whole number from 1 to 1,000,000,000"


def test_world_size_that_counts_neither_groups_nor_devices_is_refused() -> None:
    problems = read_rows(text_of(GOOD | {"world_size": "3"})).problems
    assert problems == (Problem(2, "world_size", "3, and cuda_device has 2 groups with 4 devices", "write 2"),)


@pytest.mark.parametrize(
    ("head", "column", "said", "remedy"),
    [
        ("arch,depht,batch,workers,output_folder,cuda_device,end_iter", "depht", "no such column", "depth"),
        ("arch,depth,batch,workers,output_folder,cuda_device", "end_iter", "is missing", "--set end_iter="),
        ("arch,arch,depth,batch,workers,output_folder,cuda_device,end_iter", "arch", "twice", "leave one out"),
        ("resnet,10,512", "", "no names of columns", "arch,depth"),
        ('"arch,depth', "", "is not closed", "arch,depth"),
    ],
)
def test_a_bad_first_row_is_named(head: str, column: str, said: str, remedy: str) -> None:
    problem = read_rows(f"{head}\n1,2").problems[0]
    assert (problem.row, problem.column) == (1, column)
    assert said in problem.text
    assert remedy in problem.remedy


def test_a_file_without_rows_is_refused() -> None:
    assert read_rows("").problems[0].text == "the file has no row"
    assert read_rows(",".join(GOOD)).problems == (Problem(1, "", "there are no jobs", "add a row for each job"),)


def test_a_value_for_no_column_is_refused() -> None:
    (problem,) = read_rows(FIXTURE.read_text(), {"end_itr": "1"}).problems
    assert problem.remedy.startswith("did you mean end_iter")
    assert str(problem).startswith("end_itr: --set names no column")


_cells = st.sampled_from([*GOOD.values(), "", "-1", "1e400", "nan", "[", '"', "{'a':[0]}", "#"]) | st.text(max_size=12)


@given(st.lists(st.lists(_cells, min_size=14, max_size=14), max_size=4))
def test_any_cells_give_rows_or_problems(rows: list[list[str]]) -> None:
    read = read_rows("\n".join([",".join(GOOD), *(",".join(cells) for cells in rows)]))
    assert all(row.iterations >= 1 and row.batch >= row.ranks >= 1 for row in read.rows)


@given(st.text(), st.dictionaries(st.sampled_from(COLUMNS), st.text(max_size=8), max_size=3))
def test_any_text_gives_rows_or_problems(text: str, overrides: dict[str, str]) -> None:
    read = read_rows(text, overrides)
    assert read.problems or read.rows

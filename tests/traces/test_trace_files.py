"""CSV files of a trace: whole rows, nothing twice, nothing overwritten, and no trouble for who writes them."""

from __future__ import annotations

import csv
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.traces.samples import SUBMITTED
from torchloom.traces.trace_files import TraceWriter, append_lines, claim_folder, format_row, read_rows
from torchloom.traces.trace_rows import FILES, EventRow, LoadersRow, PauseRow, Row, ThroughputRow


def event(seq: int, detail: str = "", at: float = 0.0) -> EventRow:
    return EventRow(SUBMITTED + at, at, "mnist", seq, 0, "note", "mnist", None, None, None, None, detail)


def loaders(at: float, count: int) -> LoadersRow:
    return LoadersRow(SUBMITTED + at, at, "mnist", count, None, 2, 1, count, "scheduled", "ours", 80.0 + at, None)


def throughput(at: float) -> ThroughputRow:
    return ThroughputRow(SUBMITTED + at, at, "mnist", int(10 * at), 10, 80.0, 10, 1, False)


def written(folder: Path, *rows: Row) -> list[str]:
    warnings: list[str] = []
    writer = TraceWriter(folder, warnings.append)
    assert writer.open()
    writer.append(rows)
    writer.close()
    return warnings


def details(folder: Path) -> list[str]:
    return [row["detail"] for row in read_rows(folder / "events.csv")]


def test_names_and_texts_are_quoted_and_a_row_is_one_line(tmp_path: Path) -> None:
    text = 'a "b", c\nd;\x1b[0m é'
    assert written(tmp_path, event(1, text), event(2)) == []
    lines = (tmp_path / "events.csv").read_text().splitlines()
    assert len(lines) == 3
    assert next(csv.DictReader(lines))["detail"] == 'a "b", c d; [0m é'


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, throughput(1.0))
    assert list(read_rows(tmp_path / "throughput.csv")) == [
        {
            "time": "1800000001.000", "elapsed": "1.000", "job": "mnist", "step": "10", "steps": "10",
            "samples_per_second": "80", "batches": "10", "ranks": "1", "paused": "0",
        }
    ]  # fmt: skip


def test_reading_the_log_again_writes_no_row_twice(tmp_path: Path) -> None:
    pause = PauseRow(SUBMITTED + 3, 3.0, "mnist", "mnist", "pause", 1.5, 30, None, None, None, "")
    rows = [event(1), event(2), pause, loaders(1, 2), loaders(2, 5)]
    written(tmp_path, *rows)
    before = {file: file.read_bytes() for file in tmp_path.glob("*.csv")}
    written(tmp_path, *rows)
    assert {file: file.read_bytes() for file in tmp_path.glob("*.csv")} == before
    written(tmp_path, event(3), loaders(3, 5), loaders(4, 2))
    assert len(details(tmp_path)) == 3
    assert [row["loaders"] for row in read_rows(tmp_path / "loaders.csv")] == ["2", "5", "2"]


def test_another_run_gets_a_folder_of_its_own_and_the_same_run_continues(tmp_path: Path) -> None:
    base = tmp_path / "mnist"
    assert claim_folder(base, "mnist", SUBMITTED) == base
    written(base, event(1, at=0.5))
    assert claim_folder(base, "mnist", SUBMITTED) == base
    assert claim_folder(base, "mnist", SUBMITTED + 60) == base / "run-2"
    assert claim_folder(base, "cifar", SUBMITTED) == base / "run-2"
    later = event(1)._replace(time=SUBMITTED + 60.5, elapsed=0.5)
    written(base / "run-2", later)
    assert claim_folder(base, "mnist", SUBMITTED + 60) == base / "run-2"
    assert claim_folder(base, "mnist", SUBMITTED + 120) == base / "run-3"


def test_a_folder_with_foreign_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("mine\n")
    assert claim_folder(tmp_path, "mnist", SUBMITTED) == tmp_path / "run-2"


def test_a_row_that_was_cut_off_by_a_kill_is_removed(tmp_path: Path) -> None:
    written(tmp_path, event(1, "one"))
    with (tmp_path / "events.csv").open("a") as file:
        file.write("1800000000.000,0.0,mni")
    assert details(tmp_path) == ["one"]
    written(tmp_path, event(2, "two"))
    assert details(tmp_path) == ["one", "two"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    first = TraceWriter(tmp_path, print)
    assert first.open()
    assert not TraceWriter(tmp_path, print).open()
    first.close()
    assert TraceWriter(tmp_path, print).open()


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "mnist"
    warnings: list[str] = []
    writer = TraceWriter(folder, warnings.append)
    assert writer.open()
    writer.append([event(1, "one")])
    shutil.rmtree(tmp_path / "a")
    writer.append([event(2, "two")])
    writer.close()
    assert (details(folder), warnings) == (["two"], [])


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 4 KiB, as on a full disk: writes are cut short, then fail."""
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_is_reported_once_and_rows_wait(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = TraceWriter(tmp_path, warnings.append)
    assert writer.open()
    writer.append([event(1, "one")])
    for seq in range(2, 10):
        writer.append([event(seq, "x" * 900)])
    assert len(warnings) == 1
    assert "Jobs are not affected" in warnings[0]
    assert (tmp_path / "events.csv").read_bytes().endswith(b"\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    writer.append([event(10, "last")])
    writer.close()
    assert [row["seq"] for row in read_rows(tmp_path / "events.csv")] == [str(seq) for seq in range(1, 11)]
    assert len(warnings) == 2


def test_a_file_does_not_grow_beyond_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "events.csv"
    line = format_row(event(1))
    assert not append_lines(file, "h\n", [line], 2 + 2 * len(line))
    assert append_lines(file, "h\n", [line, line], 2 + 2 * len(line))
    assert file.read_text() == "h\n" + 2 * line
    assert sum(each.most_mb for each in FILES.values()) == 140


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(written(tmp_path / "file" / "mnist", event(1), event(2))) == 1

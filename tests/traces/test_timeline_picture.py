"""The picture of traces: well-formed, every job in it, drawn from the files alone."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.traces.test_trace_files import event, loaders, throughput, written
from torchloom.traces.timeline_picture import MOST_JOBS, draw_folder
from torchloom.traces.trace_curves import find_traces
from torchloom.traces.trace_rows import EventRow, PauseRow, Row

NAMESPACE = "{http://www.w3.org/2000/svg}"


def rows(job: str, *more: Row) -> list[Row]:
    known: list[Row] = [
        event(1)._replace(event="arrived"),
        *(throughput(float(second)) for second in range(1, 30)),
        *(loaders(at, count) for at, count in ((1.0, 2), (9.0, 5))),
        event(2, at=9.0)._replace(event="resized", before=2, after=5),
        event(3, "done", at=30.0)._replace(event="ended"),
        *more,
    ]
    return [row._replace(job=job) for row in known]


def texts(picture: Path) -> list[str]:
    root = ElementTree.parse(picture).getroot()
    return [element.text or "" for tag in ("text", "title") for element in root.iter(f"{NAMESPACE}{tag}")]


def test_the_picture_is_xml_and_has_each_job(tmp_path: Path) -> None:
    pause = PauseRow(1_800_000_012.0, 12.0, "", "", "pause", 5.0, 30, None, None, None, "ann <ann@n1>")
    written(tmp_path / "one", *rows("one", pause))
    written(tmp_path / "a-job-with-a-very-long-name-that-is-cut", *rows("a-job-with-a-very-long-name-that-is-cut"))
    picture = draw_folder(tmp_path)
    assert picture == tmp_path / "timeline.svg"
    found = texts(picture)
    assert {"one", "a-job-with-a-very-long-name-that-is-cut", "loaders of all jobs", "2→5", "2 jobs · 30 s"} <= {*found}
    assert "pause: 5 s (ann <ann@n1>)" in found
    assert "1 pause: 5.0 s lost" in found
    assert "prefers-color-scheme: dark" in picture.read_text()


def test_without_traces_there_is_no_picture(tmp_path: Path) -> None:
    assert draw_folder(tmp_path / "missing") is None
    assert draw_folder(tmp_path) is None
    (tmp_path / "events.csv").write_text("something else\n1,2\n")
    assert draw_folder(tmp_path) is None
    assert list(tmp_path.iterdir()) == [tmp_path / "events.csv"]


def test_of_several_runs_the_latest_is_drawn_unless_one_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "one" / "run-2", tmp_path / "one" / "run-10", tmp_path / "two"):
        written(folder, *rows("one"))
    assert find_traces(tmp_path) == [tmp_path / "one" / "run-10", tmp_path / "two"]
    assert find_traces(tmp_path / "one" / "run-2") == [tmp_path / "one" / "run-2"]


def test_damaged_cells_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, *rows("one"))
    for file in tmp_path.glob("*.csv"):
        first, *others = file.read_text().splitlines()
        file.write_text("\n".join([first, *others, "x" + "," * first.count(","), "1,2", "\x00", others[-1][:9]]))
    picture = draw_folder(tmp_path)
    assert picture is not None
    assert "one" in texts(picture)


def test_a_trace_with_a_single_event_is_drawn(tmp_path: Path) -> None:
    written(tmp_path, EventRow(5.0, 0.0, "one", 1, 0, "submitted", "one", None, None, None, None, ""))
    picture = draw_folder(tmp_path)
    assert picture is not None
    assert "one" in texts(picture)


def test_a_long_trace_of_many_jobs_stays_small(tmp_path: Path) -> None:
    written(tmp_path / "long", *rows("long"), *(throughput(float(second)) for second in range(30, 60_000)))
    for number in range(MOST_JOBS + 5):
        written(tmp_path / f"job-{number}", event(1)._replace(job=f"job-{number}"))
    picture = draw_folder(tmp_path)
    assert picture is not None
    assert picture.stat().st_size < 2_000_000
    assert any(f"the first {MOST_JOBS} are shown" in text for text in texts(picture))

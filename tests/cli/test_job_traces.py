"""`loom trace`: what it refuses, what it writes of a job that has ended, and pictures."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.traces.samples import SUBMITTED, submitted
from tests.traces.test_timeline_picture import rows
from tests.traces.test_trace_files import written
from tests.views.samples import job
from torchloom.protocol.job_spec import Task
from torchloom.protocol.records import JobBegan, JobEnded
from torchloom.protocol.run_records import RunEnded
from torchloom.protocol.scheduling import QuerySchedule
from torchloom.protocol.views import RunsView, RunView
from torchloom.traces.trace_files import read_rows


def test_bad_input_is_refused(loom: Loom, tmp_path: Path) -> None:
    assert loom("trace").code == 2
    assert loom("trace", "mnist", "--draw", str(tmp_path)).code == 2
    ran = loom("trace", "--draw", str(tmp_path / "missing"))
    assert (ran.code, "there is no trace in" in ran.err) == (2, True)


def test_an_unknown_job_is_refused_and_nothing_is_made(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    ran = at("trace", "mnis", "--folder", str(tmp_path / "trace"))
    assert (ran.code, "mnist" in ran.err) == (4, True)
    assert not (tmp_path / "trace").exists()


def test_of_a_job_that_has_ended_the_log_is_written(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    old, new = SUBMITTED, SUBMITTED + 60
    weaver.append(submitted(), at=old)
    weaver.append(RunEnded(job="mnist", phase="failed"), at=old + 5)
    weaver.append(submitted(), at=new)
    weaver.append(RunEnded(job="mnist", phase="done", step=30), at=new + 5)
    run = RunView(job="mnist", phase="done", submitted=new, task=Task(argv=("a.py",)))
    weaver.runs = RunsView(runs=(run,))
    words = ("trace", "mnist", "--folder", str(tmp_path), "-o", "json")
    ran = at(*words)
    assert json.loads(ran.out) == {
        "folders": {"mnist": str(tmp_path / "mnist")},
        "pictures": [str(tmp_path / "timeline.svg")],
    }, ran.err
    events = [(row["event"], row["elapsed"]) for row in read_rows(tmp_path / "mnist" / "events.csv")]
    assert events == [("submitted", "0.000"), ("arrived", "0.000"), ("ended", "5.000")]
    at(*words)
    assert len([*read_rows(tmp_path / "mnist" / "events.csv")]) == 3
    weaver.runs = RunsView(runs=(replace(run, submitted=old),))  # another run of the job
    assert json.loads(at(*words).out)["folders"] == {"mnist": str(tmp_path / "mnist" / "run-2")}


def test_a_log_that_does_not_reach_back_gives_what_it_has(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    weaver.view = replace(weaver.view, jobs=(job("mnist", began=SUBMITTED),))
    weaver.append(JobBegan(job="cifar"), at=SUBMITTED + 50)
    asked = 0

    def end_the_job(look: object) -> None:
        nonlocal asked
        if isinstance(look, QuerySchedule):
            asked += 1
            if asked == 2:  # the past has been read
                weaver.append_soon(JobEnded(job="mnist", outcome="finished"), at=SUBMITTED + 60)

    weaver.before_look = end_the_job
    assert at("trace", "mnist", "--folder", str(tmp_path)).code == 0
    events = [(row["event"], row["seq"], row["elapsed"]) for row in read_rows(tmp_path / "mnist" / "events.csv")]
    assert events == [("began", "0", "0.000"), ("ended", "2", "60.000")]


def test_a_picture_is_drawn_again(loom: Loom, tmp_path: Path) -> None:
    written(tmp_path / "one", *rows("one"))
    ran = loom("trace", "--draw", str(tmp_path))
    assert (ran.code, ran.out) == (0, f"{tmp_path / 'timeline.svg'}\n")
    assert json.loads(loom("trace", "--draw", str(tmp_path), "-o", "json").out) == {
        "picture": str(tmp_path / "timeline.svg")
    }

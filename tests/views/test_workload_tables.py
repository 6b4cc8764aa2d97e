"""A workload in words: plan, timeline, and how its jobs went."""

from __future__ import annotations

from pathlib import Path

from torchloom.job.workload import PlannedJob
from torchloom.job.workload_file import plan_csv
from torchloom.job.workload_plan import PlanOptions
from torchloom.protocol.job_spec import Task
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import RunView
from torchloom.views.format.tables import Screen
from torchloom.views.workload_tables import Finish, devices, finish_of, finishes, plan, timeline

HEAD = "arch,depth,batch,workers,output_folder,master,port,arrival_time,cuda_device,end_iter,submit_interval\n"
FIXTURE = (Path(__file__).parent.parent / "fixtures" / "workload.csv").read_text()


def jobs(text: str) -> tuple[PlannedJob, ...]:
    return plan_csv(text, "w.csv", PlanOptions("/w")).jobs


def row(arrival: float, devices: str = "0", master: str = "n1", interval: str = "") -> str:
    return f"small,2,9,5,a,{master},,{arrival:g},{devices},20,{interval}\n"


def test_a_plan_shows_totals_and_the_parts_of_the_ranks() -> None:
    assert plan(jobs(HEAD + row(0, "0 1 2")), Screen()) == [
        "ROW  JOB        ARRIVES  DEVICES    PORT  STEPS    BATCH        LOADERS",
        "  2  small-2-2      0 s  n1: 0 1 2   any     20  9 = 3×3  5 = 2×2 + 1×1",
    ]


def test_a_plan_shows_what_a_job_waits_for() -> None:
    lines = plan(jobs(HEAD + row(0) + row(0, interval="30")), Screen())
    assert lines[0].split()[3] == "AFTER"
    assert lines[2].split()[2:5] == ["30", "s", "small-2-2"]


def test_a_timeline_counts_the_arrivals_on_each_device_of_each_node() -> None:
    text = HEAD + row(0) * 2 + row(50, "0 1") + row(100, "0", master="")
    assert timeline(jobs(text), Screen(width=37)) == [
        "ARRIVALS    0 s            1 min 40 s",
        "n1/0        2···········1············",
        "n1/1        ············1············",
        "any node/0  ························1",
    ]


def test_a_job_without_devices_has_no_lane() -> None:
    assert timeline([PlannedJob(job="a", row=1, arrival=0.0, task=Task(argv=("a.py",)))], Screen()) == []
    assert devices(Task(argv=("a.py",), nodes=2, per_node=4)) == "4 of 2 nodes"


def test_more_than_nine_arrivals_are_a_plus() -> None:
    assert timeline(jobs(HEAD + row(0) * 10), Screen())[1].split()[1].startswith("+·")


# ── the end ──


def run(phase: str, *notes: AttemptNote, step: int = 0) -> RunView:
    return RunView(job="resnet-10-2", phase=phase, submitted=100.0, task=Task(argv=("a.py",)), notes=notes, step=step)


def test_a_finish_counts_from_the_arrival_and_spans_all_attempts() -> None:
    notes = (
        AttemptNote(number=1, began=102.0, running=103.0, ended=110.0),
        AttemptNote(number=2, began=111.0, running=112.0, ended=151.0),
    )
    finish = finish_of(jobs(FIXTURE)[0], [run("done", *notes)], began=100.0)
    assert finish == Finish("resnet-10-2", "done", 1.0, 3.0, 51.0, 256_000, 5120.0)


def test_a_job_that_failed_has_the_samples_of_its_steps_and_one_that_never_began_has_none() -> None:
    failed = finish_of(
        jobs(FIXTURE)[0], [run("failed", AttemptNote(number=1, began=101.0, ended=111.0), step=10)], 100.0
    )
    assert (failed.samples, failed.samples_per_second) == (5120, 512.0)
    cancelled = finish_of(jobs(FIXTURE)[0], [run("cancelled")], 100.0)
    assert (cancelled.start, cancelled.finish, cancelled.samples, cancelled.samples_per_second) == (None, None, 0, None)


def test_how_all_went_ends_with_their_sum() -> None:
    rows = [Finish("a", "done", 0.0, 1.0, 10.0, 100, 10.0), Finish("b", "done", 5.0, 6.0, 25.0, 400, 20.0)]
    assert finishes([*rows, Finish("c", "cancelled", 0.0)], Screen()) == [
        "JOB  PHASE      ARRIVAL  START  FINISH  SAMPLES  SAMPLES/S",
        "a    done           0 s  1.0 s    10 s      100      10.00",
        "b    done           5 s  6.0 s    25 s      400      20.00",
        "c    cancelled      0 s      -       -        -          -",
        "1 cancelled, 2 done, the last after 25 s, together 30.00 samples/s from arrival to finish",
    ]

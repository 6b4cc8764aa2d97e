"""The rows of a workload file run through an agent, and end with the losses of the same trainings alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.flow.agents import Cluster, cluster, ours, said
from tests.flow.slurm import free_ports
from torchloom.client import Client
from torchloom.job.workload_file import read_workload
from torchloom.job.workload_plan import PlanOptions
from torchloom.protocol.job_spec import Task
from torchloom.protocol.run_records import AttemptBegan, AttemptLaunched
from torchloom.traces.trace_files import read_rows

ROWS = """\
arch,depth,batch,workers,output_folder,port,arrival_time,cuda_device,end_iter
small, 3, 6, 1, "both", , 0, "0", 30
resnet_cifar10, 20, 5, 1, "both", , 10, "0", 12
"""
QUICK = "--scale 0.2 --classes 10 --sample-seconds 0.001 --checkpoint-every 5"
FIXTURE = Path(__file__).parent.parent / "fixtures" / "workload.csv"
PORTS = ("12448", "23448", "58448")
SMALLER = {"batch": "9", "workers": "3", "end_iter": "10", "cuda_device": '["0" "1"]'}


def losses(output: str) -> str:
    match = re.search(r"losses ([0-9a-f]{64})", output)
    assert match, output
    return match[1]


def alone(folder: Path, task: Task, up: Cluster) -> str:
    """The losses of a training without torchLoom's control plane."""
    folder.mkdir()
    env = up.env | {"TORCHLOOM_OFF": "1", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(task.world_size)]
    command = [sys.executable, *(torchrun if task.world_size > 1 else []), *task.argv]
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200)
    return losses(ended.stdout)


def test_rows_that_share_a_device_end_with_the_losses_of_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "workload.csv"
    file.write_text(ROWS)
    with cluster(tmp_path) as up:
        up.start_agent("n1")
        words = ("submit", "workload.csv", "--time-scale", "10", "--args", QUICK)
        ended = up.loom(*words, "--wait", "-o", "json")
        assert ended.returncode == 0, ended.stderr + up.log()
        finishes = json.loads(ended.stdout)["jobs"]
        planned = read_workload(file, PlanOptions(str(tmp_path), arguments=tuple(QUICK.split()))).jobs
        assert [(each["job"], each["samples"]) for each in finishes] == [(job.job, job.samples) for job in planned]
        for job in planned:
            assert losses(up.loom("logs", job.job).stdout) == alone(tmp_path / job.job, job.task, up)


def test_the_rows_of_torchloader_share_two_nodes_and_end_with_the_losses_of_runs_alone(tmp_path: Path) -> None:
    file = tmp_path / "workload.csv"
    text = FIXTURE.read_text()
    for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True):
        assert port in text
        text = text.replace(port, str(free))  # a connection of somebody else may have the one of the file
    file.write_text(text)
    changes = [word for name, value in SMALLER.items() for word in ("--set", f"{name}={value}")]
    quick = "--scale 0.05 --classes 10 --checkpoint-every 5"
    with cluster(tmp_path) as up:
        up.start_agent("d3092")
        up.start_agent("d3093")
        assert up.loom("submit", "workload.csv", *changes, "--args", quick).returncode == 0
        planned = read_workload(file, PlanOptions(str(tmp_path), arguments=tuple(quick.split())), SMALLER).jobs
        for job in planned:
            up.until(lambda job=job: up.loom("wait", job.job, "--timeout", "60").returncode == 0, f"{job.job} is done")
        begun = [record for record in up.records() if isinstance(record, AttemptBegan)]
        assert {record.job: [(place.node, place.device) for place in record.places] for record in begun} == {
            job.job: [("d3093", ""), ("d3092", "")] for job in planned
        }
        ports = {record.job: record.port for record in up.records() if isinstance(record, AttemptLaunched)}
        assert ports == {job.job: job.task.port for job in planned}
        for job in planned:
            assert losses(up.loom("logs", job.job).stdout) == alone(tmp_path / job.job, job.task, up)


def test_a_file_whose_jobs_run_is_refused_until_they_are_cancelled(tmp_path: Path) -> None:
    (tmp_path / "workload.csv").write_text(ROWS.replace(", 30\n", ", 1000000\n"))
    with cluster(tmp_path) as up:
        up.start_agent("n1")
        assert up.loom("submit", "workload.csv", "--args", QUICK).returncode == 0
        again = up.loom("submit", "workload.csv", "--args", QUICK)
        assert again.returncode == 4
        assert "small-3-2" in again.stderr
        for job in ("small-3-2", "resnet_cifar10-20-3"):
            up.loom("cancel", job, "--yes")
            up.loom("wait", job, "--timeout", "60")
        assert up.loom("submit", "workload.csv", "--args", QUICK).returncode == 0


def test_waiting_writes_the_traces_of_all_jobs_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "workload.csv").write_text(ROWS.replace(", 30\n", ", 400\n"))
    with cluster(tmp_path) as up:
        up.start_agent("n1", TORCHLOOM_BEAT_SECONDS="0.5")
        with Client(up.settings, role="operator") as client:
            client.set_schedule("requested")
        ended = up.loom("submit", "workload.csv", "--time-scale", "10", "--args", QUICK, "--wait", "-o", "json")
        assert ended.returncode == 0, ended.stderr + up.log()
        document = json.loads(ended.stdout)
        picture = tmp_path / "trace" / "both" / "timeline.svg"
        assert document["pictures"] == [str(picture)]
        root = ElementTree.parse(picture).getroot()
        assert {"small-3-2", "resnet_cifar10-20-3"} <= {element.text for element in root.iter()}
        for job, steps in (("small-3-2", 400), ("resnet_cifar10-20-3", 12)):
            folder = picture.parent / job
            assert {file.name for file in folder.glob("*.csv")} >= {"throughput.csv", "beats.csv", "events.csv"}
            beats = [*read_rows(folder / "beats.csv")]
            assert sum(int(row["batches"] or 0) for row in beats) == steps
            assert int(beats[-1]["step"]) == steps
            assert sum(int(row["batches"] or 0) for row in read_rows(folder / "throughput.csv")) == steps
            events = [row["event"] for row in read_rows(folder / "events.csv")]
            assert [event for event in events if event in {"submitted", "arrived", "running", "ended"}] == [
                "submitted", "arrived", "running", "ended"
            ]  # fmt: skip
        loaders = {row["loaders"] for row in read_rows(picture.parent / "small-3-2" / "loaders.csv")}
        assert "1" in loaders  # as the row of the workload requests

        # Followed afterwards, the log gives the same events in the same files, and none of them twice.
        files = {file: file.read_bytes() for file in picture.parent.glob("*/events.csv")}
        again = up.loom("trace", "small-3-2", "resnet_cifar10-20-3", "--folder", "trace/both")
        assert (again.returncode, again.stdout) == (0, f"{picture.relative_to(tmp_path)}\n"), again.stderr
        assert {file: file.read_bytes() for file in picture.parent.glob("*/events.csv")} == files
        assert not [*picture.parent.glob("*/run-2")]


def test_a_trace_outlives_the_control_plane_and_continues_after_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "workload.csv").write_text(
        ROWS.splitlines(keepends=True)[0] + 'small, 3, 6, 1, "a", , 0, "0", 1000000\n'
    )
    with cluster(tmp_path) as up:
        up.start_agent("n1")
        assert up.loom("submit", "workload.csv", "--args", QUICK).returncode == 0
        folder = tmp_path / "traces" / "small-3-2"

        def rows() -> int:
            return len([*read_rows(folder / "throughput.csv")])

        follower = up.start("trace", "small-3-2", "--folder", "traces")
        up.until(lambda: rows() >= 2, "rows")
        weaver = next(process for process in ours(up.folder) if " weaver" in f" {said(process)}")
        weaver.kill()
        before = rows()
        up.until(lambda: rows() >= before + 3, "rows after a restart of the weaver")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(60) == 130
        assert (tmp_path / "traces" / "timeline.svg").exists()
        follower = up.start("trace", "small-3-2", "--folder", "traces")
        before = rows()
        up.until(lambda: rows() >= before + 2, "rows after it was started again")
        assert up.loom("cancel", "small-3-2", "--yes").returncode == 0
        assert follower.wait(60) == 0
        events = [(row["seq"], row["part"], row["event"]) for row in read_rows(folder / "events.csv")]
        assert len(events) == len({*events})
        assert events[-1][2] == "ended"

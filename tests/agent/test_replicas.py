"""A job of several replicas in words: what each does, what they print, and how it ends."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.agent.test_telling import a_note
from torchloom.core.torchft.replica_groups import ADDRESS, FOLDER, parts
from torchloom.launcher.rank_output import Output
from torchloom.launcher.run_progress import RunProgress
from torchloom.launcher.status_line import how_far
from torchloom.lighthouse.options import add_options, read_options
from torchloom.protocol.job import Task, Torchft
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import JobView, RunView
from torchloom.views.job_runs import INTERRUPTED, all_told, are_over, group_code, label, replicas


def a_replica(part: object, phase: str = "running", min_replicas: int = 1, **more: object) -> RunView:
    ft = Torchft(replicas=2, min_replicas=min_replicas)
    replica = "lighthouse" if part == "lighthouse" else f"mnist_{part}"
    task = Task(argv=("train.py",), torchft=ft, part_of="mnist", replica=replica)
    given: dict[str, object] = {"since": 0.0, "submitted": 0.0, "attempt": 1, "step": 10} | more
    return RunView(job=f"mnist:{part}", phase=phase, task=task, **given)  # type: ignore[arg-type]


def alone(phase: str = "done", notes: tuple[AttemptNote, ...] = ()) -> RunView:
    return RunView(job="mnist", phase=phase, since=0.0, submitted=0.0, task=Task(argv=("train.py",)), notes=notes)


# ── together ──


def test_a_lighthouse_is_no_replica_and_a_job_alone_needs_no_name_in_front() -> None:
    runs = [a_replica("lighthouse"), a_replica(0), a_replica(12)]
    assert [run.job for run in replicas(runs)] == ["mnist:0", "mnist:12"]
    assert [label(run) for run in runs] == ["lighthouse", "0", "12"]
    assert label(alone()) == ""


def test_it_is_over_when_all_of_it_is() -> None:
    assert not are_over([])
    assert not are_over([a_replica("lighthouse"), a_replica(0, "done")])
    assert are_over([a_replica("lighthouse", "done"), a_replica(0, "done"), a_replica(1, "failed")])


@pytest.mark.parametrize(
    ("phases", "least", "code"),
    [
        (("done", "done"), 2, 0),
        (("done", "failed"), 1, 0),
        (("done", "failed"), 2, 7),
        (("failed", "cancelled"), 1, 7),
        (("cancelled", "cancelled"), 1, INTERRUPTED),
    ],
)
def test_it_ends_well_if_enough_of_its_replicas_do(phases: tuple[str, ...], least: int, code: int) -> None:
    notes = (a_note(1, code=7),)
    runs = [a_replica("lighthouse", "done", least)]
    runs += [a_replica(n, phase, least, notes=notes) for n, phase in enumerate(phases)]
    assert group_code(runs) == code


def test_one_that_was_asked_for_by_its_name_is_told_like_a_job() -> None:
    run = a_replica(0, "done", min_replicas=2)
    light = a_replica("lighthouse", "done")
    assert (group_code([run]), group_code([light])) == (0, 0)
    assert all_told("mnist:0", [run], 0.0).startswith("mnist:0 is done")
    assert all_told("mnist:lighthouse", [light], 0.0).startswith("mnist:lighthouse is done")


def test_the_end_of_all_of_it_is_one_line() -> None:
    well = a_replica(0, "done", notes=(a_note(1), a_note(2)), step=1500)
    bad = a_replica(1, "failed", notes=(a_note(1),), reason="rank 0 failed: exit code 1")
    light = a_replica("lighthouse", "done", notes=(a_note(1), a_note(2), a_note(3)))
    took = max(run.notes[-1].ended or 100.0 for run in (well, bad))
    assert all_told("mnist", [light, well, bad], 100.0) == (
        f"mnist: of 2 replicas 1 done, 1 failed, step 1,500, {took:.1f} s, 1 restart, while the others continued"
        " (1: rank 0 failed: exit code 1)"
    )
    assert all_told("mnist", [alone()], 0.0).startswith("mnist is done")


def test_how_far_replicas_are_counts_those_that_run() -> None:
    job = JobView(job="mnist", phase="running", began=0.0, ranks=2, live=1, step=1500)
    runs = [a_replica(0, notes=(a_note(1),)), a_replica(1, "restarting", notes=(a_note(1), a_note(2)))]
    assert how_far("mnist", runs, job) == "mnist: 1/2 replicas running, 1/2 ranks, step 1,500, 1 restart"


def test_the_words_of_a_lighthouse_are_those_that_it_understands() -> None:
    argv = dict(parts("mnist", Task(argv=("a.py",), torchft=Torchft(replicas=2, min_replicas=2))))[
        "mnist:lighthouse"
    ].argv
    known = {ADDRESS: "n1:5000", FOLDER: "/kept"}
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = read_options(parser.parse_args([known.get(word, word) for word in argv[2:]]))
    assert (options.job, options.bind, options.min_replicas, options.folder) == ("mnist", "n1:5000", 2, Path("/kept"))
    assert (options.heartbeat_timeout_ms, options.join_timeout_ms) == (5_000, 10_000)


# ── what is told of one while it goes on ──


def test_a_replica_that_begins_again_heals_from_the_others() -> None:
    said: list[str] = []
    tale = RunProgress(said.append)
    run = a_replica(1, "submitted", waiting="its lighthouse")
    tale.go_on(run)
    tale.go_on(run)
    tale.go_on(a_replica(1, notes=(a_note(1),)))
    first = replace(a_note(1), stopping=5.0, reason="rank 0 failed: killed by SIGKILL")
    tale.go_on(a_replica(1, "stopping", notes=(first,)))
    second = replace(a_note(2), heals=True)
    tale.go_on(a_replica(1, notes=(first, second), attempt=2))
    tale.go_on(a_replica(1, notes=(first, second), attempt=2))
    assert said == [
        "waiting for its lighthouse",
        "rank 0 failed: killed by SIGKILL",
        "attempt 2 begins; it heals from the others",
    ]
    assert (tale.told, tale.stopped) == (2, 1)


def test_one_that_is_alone_begins_from_a_checkpoint_or_anew() -> None:
    said: list[str] = []
    tale = RunProgress(said.append, lambda: {"step-9": "torn"})
    run = replace(alone("running", (a_note(1), a_note(2))), attempt=2)
    tale.go_on(replace(run, resume="/kept/step-8", resume_step=8))
    assert said == [
        "attempt 2 goes on from /kept/step-8 (step 8)",
        "the script finds it in TORCHLOOM_RESUME_FROM; --resume-arg passes it as an argument",
        "step-9 is passed over: torn",
    ]
    said.clear()
    RunProgress(said.append).go_on(replace(run, task=replace(run.task, checkpoint_dir="kept")))
    assert said == ["attempt 2 begins anew: no checkpoint in kept"]


# ── what they print ──


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

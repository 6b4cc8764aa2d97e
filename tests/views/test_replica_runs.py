"""A job of several replicas in words: what each does, what they print, and how it ends."""

from __future__ import annotations

import pytest

from tests.views.test_job_runs import a_note
from torchloom.protocol.job_spec import Task, Torchft
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import RunView
from torchloom.views.job_runs import INTERRUPTED, are_over, group_code, label, replicas, summarize_job


def a_replica(part: object, phase: str = "running", min_replicas: int = 1, **more: object) -> RunView:
    ft = Torchft(replicas=2, min_replicas=min_replicas)
    replica = "lighthouse" if part == "lighthouse" else f"mnist_{part}"
    task = Task(argv=("train.py",), torchft=ft, part_of="mnist", replica=replica)
    given: dict[str, object] = {"since": 0.0, "submitted": 0.0, "attempt": 1, "step": 10} | more
    return RunView(job=f"mnist:{part}", phase=phase, task=task, **given)  # type: ignore[arg-type]


def alone(phase: str = "done", notes: tuple[AttemptNote, ...] = ()) -> RunView:
    return RunView(job="mnist", phase=phase, since=0.0, submitted=0.0, task=Task(argv=("train.py",)), notes=notes)


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
    assert summarize_job("mnist:0", [run], 0.0).startswith("mnist:0 is done")
    assert summarize_job("mnist:lighthouse", [light], 0.0).startswith("mnist:lighthouse is done")


def test_the_end_of_all_of_it_is_one_line() -> None:
    well = a_replica(0, "done", notes=(a_note(1), a_note(2)), step=1500)
    bad = a_replica(1, "failed", notes=(a_note(1),), reason="rank 0 failed: exit code 1")
    light = a_replica("lighthouse", "done", notes=(a_note(1), a_note(2), a_note(3)))
    took = max(run.notes[-1].ended or 100.0 for run in (well, bad))
    assert summarize_job("mnist", [light, well, bad], 100.0) == (
        f"mnist: of 2 replicas 1 done, 1 failed, step 1,500, {took:.1f} s, 1 restart, while the others continued"
        " (1: rank 0 failed: exit code 1)"
    )
    assert summarize_job("mnist", [alone()], 0.0).startswith("mnist is done")

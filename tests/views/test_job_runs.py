"""A run in words."""

from __future__ import annotations

import pytest

from tests.views.samples import incident
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import Place
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.views import Goodput, RunView
from torchloom.views.job_runs import awaited, describe_deadline, describe_run, exit_code, summarize_run

LIFE = "0" * 24
PLACES = tuple(Place(rank=rank, local=rank, node=f"n{rank}", incarnation=LIFE) for rank in range(2))


def a_run(phase: str, **known: object) -> RunView:
    return RunView(job="mnist", phase=phase, since=0.0, submitted=100.0, task=Task(argv=("a.py",)), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (a_run("submitted", waiting="a node with room for 2 (there is no agent)"),
         "mnist waits for a node with room for 2 (there is no agent)"),
        (a_run("running", attempt=2, places=PLACES, resume_step=1500),
         "mnist is running: attempt 2 on n0, n1, from step 1,500"),
        (a_run("stopping", attempt=1, places=PLACES, reason="rank 1 failed"),
         "mnist is stopping: attempt 1 on n0, n1 (rank 1 failed)"),
        (a_run("done", attempt=1, places=PLACES, reason="all 2 ranks ended well"), "mnist is done"),
        (a_run("failed", reason="rank 1 failed: exit code 1"), "mnist is failed: rank 1 failed: exit code 1"),
        (a_run("released", reason="released by ann"), "mnist is released (released by ann)"),
    ],
)  # fmt: skip
def test_what_a_run_does_now(run: RunView, words: str) -> None:
    assert describe_run(run) == words


def test_a_time_that_becomes_shorter_is_no_news() -> None:
    waits = [a_run("submitted", waiting=f"its arrival in {left} s", waiting_code="arrives_in") for left in (9, 8)]
    assert awaited(waits[0]) == awaited(waits[1])
    room = [a_run("submitted", waiting=f"room ({free} free)", waiting_code="waits_for_nodes") for free in (1, 2)]
    assert awaited(room[0]) != awaited(room[1])
    assert awaited(a_run("running")) == ""


@pytest.mark.parametrize(
    ("run", "now", "words"),
    [
        ({"phase": "running"}, 150.0, "its deadline is in 10 s"),
        ({"phase": "released"}, 165.0, "its deadline passed 5.0 s ago"),
        ({"phase": "done", "notes": (AttemptNote(number=1, began=110.0, ended=155.0),)}, 900.0, ""),
        ({"phase": "failed", "notes": (AttemptNote(number=1, began=110.0, ended=165.0),)}, 900.0,
         "its deadline passed 5.0 s before it ended"),
    ],
)  # fmt: skip
def test_a_deadline_is_counted_from_the_arrival(run: dict[str, object], now: float, words: str) -> None:
    task = Task(argv=("a.py",), deadline=50.0)
    view = RunView(job="mnist", since=0.0, submitted=100.0, arrived=110.0, task=task, **run)  # type: ignore[arg-type]
    assert describe_deadline(view, now) == words


def test_a_release_is_no_restart() -> None:
    released = a_note(1, stopping=199.0, reason="released by ann", next_action="release")
    assert summarize_run(a_run("done", notes=(released, a_note(2, ended=230.0))), 0.0) == "mnist is done, 130.0 s"


def a_note(number: int, **known: object) -> AttemptNote:
    return AttemptNote(number=number, began=100.0 * number, running=100.0 * number + 1, **known)  # type: ignore[arg-type]


def test_the_end_says_how_far_it_came_what_was_lost_and_why() -> None:
    killed = a_note(1, stopping=199.0, reason="rank 1 failed: killed by SIGKILL")
    run = a_run("done", step=1200, notes=(killed, a_note(2, ended=230.0)))
    lost = "1 restart (rank 1 failed: killed by SIGKILL), 2.0 s from its first sign until all ranks ran again"
    assert summarize_run(run, 0.0) == f"mnist is done, step 1,200, 130.0 s, {lost}"


def test_after_a_restart_the_end_says_how_much_of_the_time_was_productive() -> None:
    spent = Goodput(elapsed=130.0, productive=117.0)
    killed = a_note(1, stopping=199.0, reason="rank 1 failed")
    run = a_run("done", notes=(killed, a_note(2, ended=230.0)), goodput=spent)
    assert summarize_run(run, 0.0).endswith(", 90 % of the time productive")
    assert "productive" not in summarize_run(a_run("done", notes=(a_note(1),), goodput=spent), 0.0)


def test_what_was_lost_counts_from_the_first_sign_as_loom_why_counts_it() -> None:
    killed = a_note(1, stopping=199.0, reason="rank 1 hangs", incident="i2")
    run = a_run("done", notes=(killed, a_note(2, ended=230.0)))
    sign = incident("i2", opened=192.5, lost_seconds=8.5)
    earlier = incident("i1", opened=50.0, lost_seconds=1.0)
    assert "8.5 s from its first sign until all ranks ran again" in summarize_run(run, 0.0, [sign, earlier])


def test_the_same_cause_is_told_once() -> None:
    same = [a_note(n, stopping=100.0 * n + 99, reason="rank 0 failed: boom") for n in (1, 2, 3)]
    run = a_run("failed", reason="rank 0 failed: boom", notes=(*same, a_note(4, ended=450.0)))
    words = "mnist is failed: rank 0 failed: boom, 350.0 s, 3 restarts for the same cause, 6.0 s from first signs until"
    assert summarize_run(run, 0.0).startswith(words)
    done = a_run("done", notes=(*same, a_note(4, ended=450.0)))
    assert "3 restarts (rank 0 failed: boom), 6.0 s" in summarize_run(done, 0.0)


def test_of_many_restarts_the_last_reasons_are_told() -> None:
    notes = [a_note(n, stopping=100.0 * n + 99, reason=f"reason {n}") for n in range(1, 6)]
    run = a_run("done", notes=(*notes, a_note(6, ended=700.0)))
    assert "5 restarts (2 more before; reason 3; reason 4; reason 5), 10.0 s" in summarize_run(run, 0.0)


@pytest.mark.parametrize(
    ("phase", "code", "wanted"), [("done", 0, 0), ("cancelled", 0, 130), ("failed", 7, 7), ("failed", 0, 1)]
)
def test_the_exit_code_is_that_of_the_job(phase: str, code: int, wanted: int) -> None:
    assert exit_code(a_run(phase, notes=(a_note(1, code=code),))) == wanted


def test_a_run_that_was_never_placed_has_an_exit_code_and_a_summary_too() -> None:
    run = a_run("cancelled", reason="cancelled")
    assert (exit_code(run), summarize_run(run, 0.0)) == (130, "mnist is cancelled: cancelled, 0.0 s")

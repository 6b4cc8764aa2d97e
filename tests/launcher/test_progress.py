"""What `loom run` says about a run while it lasts: its attempts, what is unknown of it, and the status line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.views.samples import rank
from tests.views.test_job_runs import a_note, a_run
from tests.views.test_replica_runs import a_replica, alone
from torchloom.launcher.output import Output
from torchloom.launcher.progress import (
    COUNTED,
    NOTHING,
    PATIENCE,
    RunProgress,
    StatusLine,
    UnattachedHint,
    how_far,
    script_of,
    unknown,
)
from torchloom.protocol.job_spec import Task
from torchloom.protocol.views import JobView, RankView

ATTACHED, COUNTING, GONE = rank(), rank(number=1, counted=True), rank(number=2, counted=True, presence="dead")


@pytest.mark.parametrize(
    ("ranks", "seconds", "what", "over"),
    [
        ([ATTACHED], 0, "", True),
        ([ATTACHED, COUNTING], PATIENCE, "", True),
        ([COUNTING], 0, COUNTED, True),
        ([GONE], 0, "", False),
        ([], PATIENCE - 1, "", False),
        ([], PATIENCE, NOTHING, False),
    ],
)
def test_what_is_not_known(ranks: list[RankView], seconds: float, what: str, over: bool) -> None:
    assert unknown(ranks, seconds) == (what, over)


def test_it_is_said_once_without_a_claim_about_the_script_and_corrected_if_steps_come_late() -> None:
    said: list[str] = []
    teller = UnattachedHint("train.py", said.append)
    for seconds in (0, PATIENCE, PATIENCE + 1):
        teller._judge([], seconds)
    teller._judge([COUNTING], PATIENCE + 2)
    assert said == [f"train.py {what}" for what in (NOTHING, COUNTED)]
    assert said[0] == "train.py has said nothing yet, after 30 s: its steps are not known"
    assert said[1].startswith("train.py does not call torchloom.attach(): its steps are counted")
    assert teller.over


@pytest.mark.parametrize(
    ("ranks", "messages"),
    [([GONE, COUNTING], [f"train.py {COUNTED}"]), ([GONE, ATTACHED], []), ([], [])],
)
def test_a_job_that_was_over_before_anybody_looked(ranks: list[RankView], messages: list[str]) -> None:
    said: list[str] = []
    hint = UnattachedHint("train.py", said.append)
    hint.look_back(ranks)
    hint.look_back(ranks)
    assert said == messages


def test_a_module_is_called_by_its_name() -> None:
    assert script_of(Task(argv=("-m", "package.train", "-m"))) == "package.train"
    assert script_of(Task(argv=("train.py", "--lr", "1"))) == "train.py"


def test_how_far_replicas_are_counts_those_that_run() -> None:
    job = JobView(job="mnist", phase="running", began=0.0, ranks=2, live=1, step=1500)
    runs = [a_replica(0, notes=(a_note(1),)), a_replica(1, "restarting", notes=(a_note(1), a_note(2)))]
    assert how_far("mnist", runs, job) == "mnist: 1/2 replicas running, 1/2 ranks, step 1,500, 1 restart"


def test_a_replica_that_begins_again_heals_from_the_others() -> None:
    said: list[str] = []
    progress = RunProgress(said.append)
    run = a_replica(1, "submitted", waiting="its lighthouse")
    progress.go_on(run)
    progress.go_on(run)
    progress.go_on(a_replica(1, notes=(a_note(1),)))
    first = replace(a_note(1), stopping=5.0, reason="rank 0 failed: killed by SIGKILL")
    progress.go_on(a_replica(1, "stopping", notes=(first,)))
    second = replace(a_note(2), heals=True)
    progress.go_on(a_replica(1, notes=(first, second), attempt=2))
    progress.go_on(a_replica(1, notes=(first, second), attempt=2))
    assert said == [
        "waiting for its lighthouse",
        "rank 0 failed: killed by SIGKILL",
        "attempt 2 begins; it heals from the others",
    ]
    assert (progress.begun, progress.stopped) == (2, 1)


def test_one_that_is_alone_begins_from_a_checkpoint_or_anew() -> None:
    said: list[str] = []
    progress = RunProgress(said.append)
    run = replace(alone("running", (a_note(1), a_note(2))), attempt=2)
    progress.go_on(replace(run, resume="/kept/step-8", resume_step=8, rejected={"step-9": "torn"}))
    assert said == [
        "attempt 2 resumes from /kept/step-8 (step 8)",
        "the script finds it in TORCHLOOM_RESUME_FROM; --resume-arg passes it as an argument",
        "step-9 is passed over: torn",
    ]
    said.clear()
    RunProgress(said.append).go_on(replace(run, task=replace(run.task, checkpoint_dir="kept")))
    assert said == ["attempt 2 starts from the beginning: no checkpoint in kept"]


def test_how_far_it_is_in_one_line() -> None:
    job = JobView(
        job="mnist", phase="running", began=0.0, ended=None, reason="", ranks=2, live=2, step=1500, loss=0.01234,
        samples_per_second=5230.4,
    )  # fmt: skip
    run = a_run("running", notes=(a_note(1), a_note(2)))
    told = "mnist: running, 2/2 ranks, step 1,500, loss 0.01234, 5,230 samples/s, 1 restart"
    assert how_far("mnist", [run], job) == told
    assert how_far("mnist", [a_run("starting")], None) == "mnist: starting"


def test_the_line_at_the_bottom_makes_room_for_what_is_printed_and_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = StatusLine(wanted=True, text="mnist: running")
    printed = Output(False, before=line.hide)
    line.show()
    line.show()  # it stands there already
    printed.feed("a", 0, "out", b"half a li")
    printed.feed("a", 0, "out", b"ne\n")
    line.show()
    told = capsys.readouterr()
    assert told.out == "[0] half a line\n"
    assert told.err == "\r\x1b[K\x1b[2mmnist: running\x1b[0m" + "\r\x1b[K" + "\r\x1b[K\x1b[2mmnist: running\x1b[0m"


def test_without_a_terminal_there_is_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = StatusLine(text="mnist: running")
    line.show()
    line.hide()
    assert capsys.readouterr().err == ""

"""A job of several replicas on the command line: one job where it is one, and each replica by its own name."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.nats_servers import NOBODY
from tests.views.samples import LIFE, NOW, cluster, incident, job, rank
from torchloom.cli.completion_names import complete
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.job_spec import Rule, Task, Torchft
from torchloom.protocol.node import Place
from torchloom.protocol.rank import Beat
from torchloom.protocol.records import About
from torchloom.protocol.views import Goodput, Look, QueryRuns, RunsView, RunView

RULE = Rule(on="straggler", do=("evict",))


def a_part(part: str, phase: str = "running", log_dir: str = "", **more: Any) -> RunView:
    replica = part if part == "lighthouse" else f"ft_{part}"
    task = Task(
        argv=("a.py",), part_of="ft", replica=replica, torchft=Torchft(replicas=2), policy=(RULE,), log_dir=log_dir
    )
    given: dict[str, Any] = {
        "goodput": Goodput(elapsed=100, productive=90 if part == "0" else 70, lost={"crash": 10}), "attempt": 1,
        "places": (Place(rank=0, local=0, node="n1", incarnation=LIFE),),
    }  # fmt: skip
    return RunView(job=f"ft:{part}", phase=phase, since=NOW, submitted=NOW - 100, task=task, **given | more)


@pytest.fixture
def replicas(weaver: Responder) -> Responder:
    beat = Beat(incarnation=LIFE, step=1500, quorum=3, participants=2)
    weaver.view = cluster(
        jobs=(job("ft", ranks=2, live=2), job("other")),
        ranks=(
            rank("ft", "ft_0", member="ft_0:u1", beat=beat),
            rank("ft", "ft_1", member="ft_1:u2", beat=None),
            rank("other", "main"),
        ),
        incidents=(
            incident(
                "i6",
                job="",
                about=About(device="GPU-2"),
                what="device GPU-2 failed",
                closed=NOW,
                affected=(ReplicaId("other", "main"), ReplicaId("ft", "ft_1")),
            ),
            incident("i5", job="other", about=About(run="other"), what="other failed", closed=NOW),
            incident("i4", job="", about=About(device="GPU-1"), what="device GPU-1 failed", stopped="ft:0", closed=NOW),
            incident(
                "i3",
                job="ft",
                about=About(rank=RankId("ft", "ft_1", 0), part="hang"),
                what="ft:1: rank 0 hangs",
                closed=None,
            ),
            incident("i2", job="ft", about=About(run="ft:1"), what="ft:1: evicted by ann", closed=NOW),
            incident("i1", job="ft", about=About(rank=RankId("ft", "ft_0", 0)), what="ft/ft_0/0 was lost", closed=NOW),
        ),
    )
    weaver.runs = RunsView(runs=(a_part("0"), a_part("1"), a_part("lighthouse")))
    return weaver


def document(at: Loom, *words: str) -> Any:
    ran = at(*words, "-o", "json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def ids(at: Loom, *words: str) -> list[str]:
    return [incident["id"] for incident in document(at, "incidents", *words)]


# ── seeing ──


def test_ranks_show_their_quorum_and_who_they_are_in_torchft(replicas: Responder, at: Loom) -> None:
    lines = at("status", "ft").out.splitlines()
    head = next(line for line in lines if "REPLICA" in line)
    assert "QUORUM" in head
    assert "TORCHFT ID" in head
    assert "3 (2)" in next(line for line in lines if "ft_0:u1" in line)
    assert "ft_1:u2" in "\n".join(lines)
    assert [one["member"] for one in document(at, "status")["ranks"]] == ["ft_0:u1", "ft_1:u2", ""]


def test_one_that_is_out_of_the_quorum_does_not_look_as_if_it_trained(replicas: Responder, at: Loom) -> None:
    out = (
        rank("ft", "ft_0", member="ft_0:u1", evicted=True),
        rank("ft", "ft_1", member="ft_1:u2", presence="left", drained=True),
    )
    replicas.view = cluster(jobs=(job("ft", ranks=2, live=0),), ranks=out)
    lines = at("status", "ft").out.splitlines()
    assert " evicted " in next(line for line in lines if "ft_0:u1" in line)
    assert " drained " in next(line for line in lines if "ft_1:u2" in line)


def test_where_nobody_is_under_torchft_there_are_no_such_columns(replicas: Responder, at: Loom) -> None:
    assert "QUORUM" not in at("status", "other").out


def test_status_of_the_job_counts_the_time_of_its_replicas_and_not_of_their_lighthouse(
    replicas: Responder, at: Loom
) -> None:
    assert "goodput: 80 % of 1 min 40 s was productive; lost: crash 10 s" in at("status", "ft").out
    found = document(at, "status", "ft")
    assert found["run"] is None
    assert [run["job"] for run in found["runs"]] == ["ft:0", "ft:1"]
    found = document(at, "status", "ft:1")
    assert (found["run"]["job"], [one["job"] for one in found["jobs"]]) == ("ft:1", ["ft"])


def test_status_says_what_replicas_wait_for(replicas: Responder, at: Loom) -> None:
    waiting = a_part("1", "submitted", waiting="its lighthouse")
    replicas.runs = RunsView(runs=(a_part("0"), waiting, a_part("lighthouse")))
    assert "ft:1 waits for its lighthouse" in at("status", "ft").out


def test_incidents_of_the_job_and_of_one_of_its_replicas(replicas: Responder, at: Loom) -> None:
    assert ids(at, "--job", "ft") == ["i6", "i4", "i3", "i2", "i1"]
    assert ids(at, "--job", "ft:1") == ["i6", "i3", "i2"]
    assert ids(at, "--job", "ft:0") == ["i4", "i1"]
    assert ids(at, "--job", "other") == ["i6", "i5"]


def test_why_of_the_job_and_of_one_of_its_replicas(replicas: Responder, at: Loom) -> None:
    lines = at("why", "ft").out.splitlines()
    assert lines[0] == "job       ft:0 is running: attempt 1 on n1; ft:1 is running: attempt 1 on n1"
    assert lines[1].startswith("goodput   80 %")
    assert document(at, "why", "ft")["incident"]["id"] == "i3"
    found = document(at, "why", "ft:0")
    assert {found["incident"]["id"], *(other["id"] for other in found["others"])} == {"i4", "i1"}
    assert at("why", "fft").code != 0
    replicas.view = cluster(jobs=(), ranks=(), incidents=())  # none of its ranks has spoken yet
    assert at("why", "ft").out.startswith("job       ft:0 is running")


def test_the_policy_of_the_job_is_that_of_its_replicas(replicas: Responder, at: Loom) -> None:
    for name in ("ft", "ft:0"):
        rules = {row["event"]: row for row in document(at, "policy", name)["rules"]}
        assert (rules["straggler"]["do"], rules["straggler"]["own"]) == (["evict"], True)


def test_waiting_for_the_job_ends_as_it_ends(replicas: Responder, at: Loom) -> None:
    over = [a_part("0", "done"), a_part("1", "failed", reason="rank 0 failed"), a_part("lighthouse", "done")]
    replicas.runs = RunsView(runs=tuple(over))
    ran = at("wait", "ft")
    assert ran.code == 0
    assert "ft: of 2 replicas 1 done, 1 failed" in ran.err
    assert at("wait", "ft:1").code == 1
    assert at("wait", "ft:lighthouse").code == 0


def test_names_complete_to_jobs_and_to_their_replicas(replicas: Responder, at: Loom) -> None:
    typed = Namespace(state=replicas.settings.state)
    assert complete("run", "ft", typed) == ["ft", "ft:0", "ft:1", "ft:lighthouse"]
    assert complete("replica", "ft/", typed) == ["ft/ft_0", "ft/ft_1"]
    assert complete("agent or replica", "ft/", typed) == ["ft/ft_0", "ft/ft_1"]


# ── reading ──


def printed(folder: Path, text: str, attempt: int = 1) -> str:
    where = folder / f"attempt-{attempt}"
    where.mkdir(parents=True, exist_ok=True)
    (where / "rank-0.out").write_text(f"{text}\n")
    (where / "rank-0.err").write_text("")
    return str(folder)


@pytest.fixture
def stamped(settings: Any) -> Path:
    """The output of a run, where `loom run` keeps it."""
    folder = Path(settings.state) / "runs" / "ft" / "20270101-000000"
    for part in ("replica-0", "replica-1", "lighthouse"):
        printed(folder / part, f"this is {part}")
    return folder


def test_logs_of_the_job_are_those_of_all_its_replicas(replicas: Responder, at: Loom, stamped: Path) -> None:
    replicas.runs = RunsView(
        runs=(
            a_part("0", log_dir=str(stamped / "replica-0")),
            a_part("1", log_dir=str(stamped / "replica-1")),
            a_part("lighthouse", log_dir=str(stamped / "lighthouse")),
        )
    )
    both = "[0/0] this is replica-0\n[1/0] this is replica-1\n"
    assert at("logs", "ft").out == both
    assert at("logs", "ft", "--rank", "0").out == both  # there are two of that number
    assert at("logs", "ft:1", "--rank", "0").out == "this is replica-1\n"
    assert at("logs", "ft:lighthouse", "--rank", "0").out == "this is lighthouse\n"
    assert at("logs", "ft", "--rank", "7").err.startswith("loom: ft has no rank 7")


def test_an_attempt_that_only_one_of_them_had_is_shown_of_that_one(
    replicas: Responder, at: Loom, stamped: Path
) -> None:
    printed(stamped / "replica-1", "once more", 2)
    again = a_part("1", log_dir=str(stamped / "replica-1"), attempt=2)
    replicas.runs = RunsView(runs=(a_part("0", log_dir=str(stamped / "replica-0")), again))
    assert at("logs", "ft", "--attempt", "2").out == "[1/0] once more\n"
    assert at("logs", "ft", "--attempt", "3").err.startswith("loom: ft had no attempt 3")


def test_who_follows_sees_the_last_words_of_an_attempt_before_the_next(
    replicas: Responder, at: Loom, stamped: Path
) -> None:
    folder = stamped / "replica-0"
    printed(folder, "of an older attempt")
    printed(folder, "first", 2)

    def runs(attempt: int, phase: str) -> RunsView:
        return RunsView(runs=(a_part("0", log_dir=str(folder), attempt=attempt, phase=phase),))

    def restart(look: Look) -> None:
        if isinstance(look, QueryRuns) and len(replicas.looked) > 1:
            printed(folder, "first\nlast words", 2)
            printed(folder, "once more", 3)
            replicas.runs = runs(3, "done")

    replicas.runs = runs(2, "running")
    replicas.looked.clear()
    replicas.before_look = restart
    assert at("logs", "ft:0", "-f").out.splitlines() == ["[0/0] first", "[0/0] last words", "[0/0] once more"]


def test_without_a_control_plane_the_files_of_the_last_run_are_shown(
    loom: Loom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHLOOM_ADDR", NOBODY)
    state = tmp_path / "state"
    for stamp in ("20270101-000000", "20270102-000000"):
        for part in ("replica-0", "replica-10", "replica-2", "lighthouse"):
            printed(state / "runs" / "ft" / stamp / part, f"{stamp[:8]} {part}")
    printed(state / "runs" / "plain:0" / "20270101-000000", "alone")

    def logs(*words: str) -> str:
        return loom("--state", str(state), "logs", *words).out

    assert logs("ft").splitlines() == [
        "[0/0] 20270102 replica-0", "[2/0] 20270102 replica-2", "[10/0] 20270102 replica-10",
    ]  # fmt: skip
    assert logs("ft:10", "--rank", "0") == "20270102 replica-10\n"
    assert logs("ft:lighthouse", "--rank", "0") == "20270102 lighthouse\n"
    assert logs("plain:0") == "[0] alone\n"
    assert loom("--state", str(state), "logs", "ft:7").code != 0

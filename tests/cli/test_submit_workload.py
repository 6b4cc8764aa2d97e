"""`loom submit` of a file with several jobs: its plan, what is checked before anything starts, all jobs in order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import LIFE, job
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.operator import Ask, Done, No, SetSchedule, Submit
from torchloom.protocol.run_records import AttemptNote
from torchloom.protocol.scheduling import ScheduleRules
from torchloom.protocol.views import NodeView, RunsView, RunView

FIXTURE = str(Path(__file__).parent.parent / "fixtures" / "workload.csv")
JOBS = ["resnet-10-2", "vgg-11-3", "googlenet-1-4"]


def nodes(*names: str, devices: int = 3) -> tuple[NodeView, ...]:
    gpus = tuple(f"GPU-{n}" for n in range(devices))
    beat = NodeBeat(incarnation=LIFE, host="10.0.0.7", cores=8, memory_mb=1, devices=gpus)
    return tuple(NodeView(node=name, beat=beat, heard=0.0) for name in names)


def run(name: str, phase: str, **known: object) -> RunView:
    return RunView(job=name, phase=phase, submitted=100.0, task=Task(argv=("a.py",)), **known)  # type: ignore[arg-type]


def submitted(weaver: Responder) -> list[Submit]:
    return [ask for ask in weaver.asked if isinstance(ask, Submit)]


@pytest.fixture
def cluster(weaver: Responder) -> Responder:
    weaver.runs = RunsView(nodes=nodes("d3092", "d3093"))
    return weaver


# ── the plan ──


def test_a_dry_run_shows_plan_and_timeline_and_needs_no_control_plane(loom: Loom, tmp_path: Path) -> None:
    ran = loom("--state", str(tmp_path), "submit", FIXTURE, "--dry-run", "--set", "arrival_time=0.5")
    assert ran.code == 0
    assert ran.out.splitlines()[:2] == [
        "ROW  JOB            ARRIVES  DEVICES                     PORT  STEPS        BATCH   LOADERS",
        "  2  resnet-10-2      0.5 s  d3093: 0 1; any node: 0 1  12448    500  512 = 4×128  16 = 4×4",
    ]
    assert "d3093/1" in ran.out
    assert ran.err == "loom: no control plane with nodes answers, so nodes and devices are not checked\n"


def test_a_dry_run_checks_the_nodes_that_there_are_and_submits_nothing(cluster: Responder, at: Loom) -> None:
    assert at("submit", FIXTURE, "--dry-run").code == 0
    cluster.runs = RunsView(nodes=nodes("n1"))
    ran = at("submit", FIXTURE, "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "loom: row 2, master: there is no node d3093" in ran.err
    assert "workload.csv has 6 problems, and nothing of it is submitted" in ran.err
    assert submitted(cluster) == []


def test_the_plan_is_one_document_for_programs(loom: Loom, tmp_path: Path) -> None:
    plan = json.loads(loom("--state", str(tmp_path), "submit", FIXTURE, "--dry-run", "-o", "json").out)
    assert [job["job"] for job in plan["jobs"]] == JOBS
    first = plan["jobs"][0]
    assert (first["arrival"], first["batch"], first["iterations"], first["task"]["port"]) == (1.0, 512, 500, 12448)
    assert first["task"]["groups"][0] == {"devices": [0, 1], "node": "d3093"}


# ── what is refused before anything starts ──


def test_every_problem_is_listed_and_nothing_is_submitted(cluster: Responder, at: Loom, tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(Path(FIXTURE).read_text().replace("vgg, 11", "vgg, 12").replace("58448", "12448"))
    ran = at("submit", str(bad), "--set", "batch=-1")
    assert ran.code == 2
    assert [line.partition(":")[2].partition(":")[0].strip() for line in ran.err.splitlines()[:-2]] == [
        "row 2, batch", "row 3, batch", "row 3, depth", "row 4, batch",
    ]  # fmt: skip
    assert "loom: bad.csv has 4 problems, and nothing of it is submitted" in ran.err
    assert submitted(cluster) == []


def test_a_file_whose_jobs_run_is_refused_as_a_whole(cluster: Responder, at: Loom) -> None:
    cluster.runs = RunsView(
        nodes=nodes("d3092", "d3093"), runs=(run("vgg-11-3", "running"), run("resnet-10-2", "done"))
    )
    ran = at("submit", FIXTURE)
    assert ran.code == 4
    assert "has jobs that run or wait already: vgg-11-3\n" in ran.err
    assert "--prefix NAME" in ran.err
    assert submitted(cluster) == []
    assert at("submit", FIXTURE, "--prefix", "again").code == 0
    assert [ask.job for ask in submitted(cluster)] == [f"again-{name}" for name in JOBS]


def test_a_job_of_that_name_that_torchloom_did_not_start_is_in_the_way_too(cluster: Responder, at: Loom) -> None:
    cluster.view = cluster.view.__class__(plane=cluster.view.plane, jobs=(job("vgg-11-3"),))
    assert at("submit", FIXTURE).code == 4
    assert submitted(cluster) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "end_iter"), "--set 'end_iter'"),
        (("--set", "end_itr=1"), "--set names no column"),
        (("--args", "'a"), '--args "\'a": No closing quotation'),
        (("--prefix", "a b"), "prefix 'a b' is not a name"),
        (("--job", "a"), "--job names one job"),
        (("--time-scale", "0"), "--time-scale: invalid seconds value: '0'"),
    ],
)
def test_an_option_that_cannot_be_is_refused(loom: Loom, words: tuple[str, str], said: str) -> None:
    ran = loom("submit", FIXTURE, *words)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.parametrize(
    "words", [("--dry-run",), ("--prefix", "a"), ("--time-scale", "2"), ("--set", "a=b"), ("--args", "x")]
)
def test_an_option_for_workloads_is_refused_for_one_job(loom: Loom, tmp_path: Path, words: Iterable[str]) -> None:
    (tmp_path / "a.toml").write_text('script = "a.py"')
    ran = loom("submit", str(tmp_path / "a.toml"), *words)
    assert ran.code == 2
    assert "is for a workload, and" in ran.err


# ── submitting ──


def test_every_row_is_submitted_in_the_order_of_arrival(cluster: Responder, at: Loom) -> None:
    ran = at("submit", FIXTURE, "--time-scale", "0.01", "--on", "hang=restart@5")
    assert (ran.code, ran.out) == (0, "3 jobs are submitted; the last arrives after 1 min 40 s\n")
    assert [ask.job for ask in submitted(cluster)] == JOBS
    first = submitted(cluster)[0].task
    assert 90 < first.delay <= 100, "what was submitted before has taken time"
    assert (first.port, first.share, first.groups[0].node, first.policy[0].on) == (12448, True, "d3093", "hang")


def test_a_script_of_the_user_and_further_arguments_are_passed_on(cluster: Responder, at: Loom, tmp_path: Path) -> None:
    script = str(tmp_path / "mine.py")
    assert at("submit", FIXTURE, "--script", script, "--args", "--x 'a b'").code == 0
    argv = submitted(cluster)[0].task.argv
    assert (argv[0], argv[-2:]) == (script, ("--x", "a b"))


def test_the_others_continue_if_one_is_refused_and_the_exit_code_says_so(cluster: Responder, at: Loom) -> None:
    def answer(ask: Ask) -> Done | No:
        wrong = isinstance(ask, Submit) and ask.job == "vgg-11-3"
        return No(why="no room for it", hint="less of it") if wrong else Done(text="done")

    cluster.answer_to = answer
    ran = at("submit", FIXTURE)
    assert ran.code == 4
    assert [ask.job for ask in submitted(cluster)] == JOBS
    assert ran.err == "loom: vgg-11-3 (row 3) is refused: no room for it\n  → less of it\n"
    assert ran.out == "2 of 3 jobs are submitted; the last arrives after 1 s\n"
    jobs = json.loads(at("submit", FIXTURE, "-o", "json").out)["jobs"]
    assert [job["refused"] for job in jobs] == ["", "no room for it", ""]


def test_checkpoints_of_an_earlier_run_are_named(cluster: Responder, at: Loom, tmp_path: Path) -> None:
    copy = tmp_path / "workload.csv"
    copy.write_text(Path(FIXTURE).read_text())
    (tmp_path / "trace/test-48worker-2node-mod3/vgg-11-3/checkpoints/step-100").mkdir(parents=True)
    assert at("submit", FIXTURE).err == ""
    assert "1 job resumes from checkpoints of an earlier run" in at("submit", str(copy)).err


def test_wait_follows_all_jobs_and_shows_how_each_went(cluster: Responder, at: Loom) -> None:
    note = AttemptNote(number=1, began=101.0, running=102.0, ended=112.0)
    runs = tuple(run(name, "done", notes=(note,)) for name in JOBS)
    cluster.runs = RunsView(nodes=nodes("d3092", "d3093"), runs=runs)
    ran = at("submit", FIXTURE, "--wait")
    assert ran.code == 0
    assert ran.out.splitlines()[1:3] == [
        "JOB            PHASE  ARRIVAL  START  FINISH  SAMPLES  SAMPLES/S",
        "resnet-10-2    done       1 s  2.0 s    12 s  256,000     23,273",
    ]
    assert ran.out.splitlines()[-1] == "3 done, the last after 12 s, together 69,818 samples/s from arrival to finish"
    finished = json.loads(at("submit", FIXTURE, "--wait", "-o", "json").out)["jobs"]
    assert [(each["job"], each["phase"], each["finish"]) for each in finished] == [
        (name, "done", 12.0) for name in JOBS
    ]


def test_wait_ends_with_the_exit_code_of_the_first_job_that_failed(cluster: Responder, at: Loom) -> None:
    notes = {
        name: (AttemptNote(number=1, began=101.0, ended=110.0, step=20, code=code),)
        for name, code in zip(JOBS, (0, 7, 9), strict=True)
    }
    phases = dict(zip(JOBS, ("done", "failed", "failed"), strict=True))
    runs = tuple(run(name, phases[name], notes=notes[name], step=20) for name in JOBS)
    cluster.runs = RunsView(nodes=nodes("d3092", "d3093"), runs=runs)
    ran = at("submit", FIXTURE, "--wait")
    assert ran.code == 7
    assert ["vgg-11-3", "failed", "1", "s", "1.0", "s", "10", "s", "10,240", "1,138"] in [
        line.split() for line in ran.out.splitlines()
    ]


def test_jobs_in_toml_are_submitted_too(cluster: Responder, at: Loom, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[[job]]\nscript = "a.py"\ndevices = [0]\n[[job]]\nscript = "b.py"\narrival_time = 5')
    assert at("submit", str(file)).out == "2 jobs are submitted; the last arrives after 5 s\n"
    assert [ask.task.argv for ask in submitted(cluster)] == [("a.py",), ("b.py",)]
    assert "COMMAND" in at("submit", str(file), "--dry-run").out


# ── the policy of loaders ──


def test_the_policy_is_set_before_the_first_job_is_submitted(cluster: Responder, at: Loom) -> None:
    ran = at("submit", FIXTURE, "--policy", "even")
    assert ran.code == 0
    first, *others = cluster.asked
    assert isinstance(first, SetSchedule)
    assert (first.policy, first.objective, first.budgets) == ("even", None, {})
    assert [ask.job for ask in others if isinstance(ask, Submit)] == JOBS
    assert "--policy ours" not in ran.err


def test_a_policy_that_is_refused_submits_nothing(cluster: Responder, at: Loom) -> None:
    cluster.answer = No(why="no")
    assert at("submit", FIXTURE, "--policy", "even").code == 4
    assert submitted(cluster) == []


def test_where_loaders_are_not_moved_a_line_says_how_to_move_them(cluster: Responder, at: Loom) -> None:
    assert "--policy ours" not in at("submit", FIXTURE).err
    cluster.schedule = replace(cluster.schedule, rules=ScheduleRules(policy="off"))
    assert at("submit", FIXTURE, "--prefix", "a").err.count("`loom schedule --policy ours`") == 1
    assert "--policy ours" not in at("submit", FIXTURE, "--prefix", "b", "--policy", "off").err


def test_a_dry_run_sets_no_policy_and_one_job_takes_none(cluster: Responder, at: Loom, tmp_path: Path) -> None:
    assert at("submit", FIXTURE, "--policy", "even", "--dry-run").code == 0
    single = tmp_path / "job.toml"
    single.write_text('script = "a.py"\n')
    ran = at("submit", str(single), "--policy", "even")
    assert ran.code == 2
    assert "--policy is for a workload" in ran.err
    assert cluster.asked == []

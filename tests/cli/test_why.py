"""`loom why` and `loom policy` against a real server, and the options that say what is done about trouble."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import NOW, cluster, incident, job
from torchloom.cli.completion_names import complete
from torchloom.cli.parser import parse
from torchloom.cli.verbs.jobs import complete_rule, with_rules
from torchloom.cli.verbs.run import _task
from torchloom.core.incidents.rule_lookup import DEFAULTS
from torchloom.errors import BadInput
from torchloom.job.policy_syntax import FORM
from torchloom.protocol.job_spec import Rule, Task
from torchloom.protocol.operator import Submit
from torchloom.protocol.records import About
from torchloom.protocol.views import Goodput, QueryCluster, RunsView, RunView
from torchloom.settings import Settings
from torchloom.views.format.numbers import delay

SPENT = Goodput(elapsed=100, productive=90, lost={"crash": 10})


def a_run(name: str = "mnist", **task: Any) -> RunView:
    return RunView(
        job=name, phase="running", since=NOW, submitted=NOW - 100, goodput=SPENT, task=Task(argv=("a.py",), **task)
    )


@pytest.fixture
def troubled(weaver: Responder) -> Responder:
    weaver.view = cluster(
        jobs=(job("mnist"), job("bert")),
        incidents=(
            incident("i4", job="bert", what="bert: rank 0 failed", closed=NOW),
            incident("i3", closed=NOW - 10, opened=NOW - 20, short="rank 1 failed: killed by SIGKILL"),
            incident("i2", short="rank 0 hangs", kind="hang", opened=NOW - 60),
            incident(
                "i1", job="", about=About(device="GPU-1"), what="device GPU-1 failed", stopped="mnist", closed=NOW
            ),
            incident("i0", job="", about=About(device="GPU-2"), what="device GPU-2 failed", closed=NOW),
        ),
    )
    weaver.runs = RunsView(runs=(a_run(),))
    return weaver


def document(at: Loom, *words: str) -> Any:
    ran = at(*words, "-o", "json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_why_of_a_job(troubled: Responder, at: Loom) -> None:
    lines = at("why", "mnist").out.splitlines()
    assert lines[0] == "job       mnist is running"
    assert lines[1] == "goodput   90 % of 1 min 40 s was productive; lost: crash 10 s"
    assert lines[3:5] == ["i2 · hang · mnist · open", "rank 0 hangs"]  # the one that is open
    assert [line.split()[0] for line in lines[-2:]] == ["i3", "i1"]  # and nothing of others
    assert QueryCluster(limit=0, incident="i2") in troubled.looked  # told whole


def test_why_of_a_job_whose_ranks_have_ended(troubled: Responder, at: Loom) -> None:
    troubled.view = cluster(jobs=(job("mnist", phase="ending"),))
    assert at("why", "mnist").out.startswith("job       mnist is ending\n")


def test_why_of_a_job_as_json(troubled: Responder, at: Loom) -> None:
    found = document(at, "why", "mnist")
    assert set(found) == {"job", "incident", "others", "goodput", "marks"}
    assert (found["job"], found["incident"]["id"]) == ("mnist", "i2")
    assert [other["id"] for other in found["others"]] == ["i3", "i1"]
    assert found["goodput"] == {"elapsed": 100, "productive": 90, "lost": {"crash": 10}}


def test_why_of_an_incident(troubled: Responder, at: Loom) -> None:
    assert at("why", "i3").out.startswith("i3 · mnist · over after 10 s\nrank 1 failed: killed by SIGKILL\n")
    found = document(at, "why", "i3")
    assert (found["incident"]["id"], found["others"], found["goodput"]) == ("i3", [], None)
    assert found["incident"]["history"] == []


def test_why_of_a_job_that_has_not_begun_to_train(troubled: Responder, at: Loom) -> None:
    troubled.runs = RunsView(runs=(a_run("new"),))
    assert at("why", "new").out.endswith("\nnothing went wrong with new\n")


@pytest.mark.parametrize(("name", "near"), [("mnits", "mnist"), ("i33", "i3"), ("a.b*", "")])
def test_why_of_what_is_not_known(troubled: Responder, at: Loom, name: str, near: str) -> None:
    ran = at("why", name)
    assert (ran.code, ran.out) == (4, "")
    assert f"there is no job or incident {name!r}" in ran.err
    assert near in ran.err


def test_a_listing_of_one_job_has_what_it_was_ended_for(troubled: Responder, at: Loom) -> None:
    assert [i["id"] for i in document(at, "incidents", "--job", "mnist")] == ["i3", "i2", "i1"]
    assert [i["id"] for i in document(at, "incidents", "--job", "mnist", "--open")] == ["i2"]
    assert set(document(at, "incidents")[0]) == set(incident().__struct_fields__)


def test_status_of_one_job(troubled: Responder, at: Loom) -> None:
    shown = at("status", "mnist").out
    assert "bert" not in shown
    assert shown.endswith("goodput: 90 % of 1 min 40 s was productive; lost: crash 10 s\n")
    found = document(at, "status", "mnist")
    assert [j["job"] for j in found["jobs"]] == ["mnist"]
    assert found["run"]["goodput"]["productive"] == 90
    assert document(at, "status", "bert")["run"] is None
    ran = at("status", "mnits")
    assert (ran.code, "did you mean mnist" in ran.err) == (4, True)


@pytest.fixture
def taken_over(troubled: Responder) -> Responder:
    """A run of torchLoom failed; since then somebody else began a job of that name."""
    own = Rule(on="hang", do=("report",))
    old = replace(a_run(policy=(own,)), phase="failed", since=NOW - 5000, reason="rank 0 failed: old")
    troubled.runs = RunsView(runs=(old,))
    return troubled


def test_a_job_is_not_taken_for_an_older_run_of_that_name(taken_over: Responder, at: Loom) -> None:
    assert at("why", "mnist").out.startswith("job       mnist is running\n\n")
    assert document(at, "why", "mnist")["goodput"] is None
    assert document(at, "status", "mnist")["run"] is None
    assert not any(rule["own"] for rule in document(at, "policy", "mnist")["rules"])
    assert "this is the default" in at("policy", "mnist").err


def test_a_run_that_is_over_is_told_while_nobody_began_the_job_anew(taken_over: Responder, at: Loom) -> None:
    (old,) = taken_over.runs.runs
    taken_over.runs = RunsView(runs=(replace(old, since=NOW),))
    assert at("why", "mnist").out.startswith("job       mnist is failed: rank 0 failed: old\n")
    assert any(rule["own"] for rule in document(at, "policy", "mnist")["rules"])


def test_what_a_submitted_job_waits_for_is_told(weaver: Responder, at: Loom, tmp_path: Any) -> None:
    (tmp_path / "new.toml").write_text('script = "a.py"')
    weaver.view = cluster(jobs=(), ranks=())
    waiting = "a node with room for 1 (there is no agent)"
    weaver.runs = RunsView(runs=(replace(a_run("new"), phase="submitted", waiting=waiting),))
    assert at("submit", str(tmp_path / "new.toml")).out == f"done\nnew waits for {waiting}\n"
    assert f"new waits for {waiting}\n" in at("status", "new").out
    assert document(at, "submit", str(tmp_path / "new.toml"))["text"] == "done"


# ── policy ──


def test_the_help_of_policy_explains_its_columns_and_how_a_rule_is_written(loom: Loom) -> None:
    shown = loom("policy", "--help").out
    assert FORM in shown
    for column in ("AFTER", "LIMIT", "OWN"):
        assert f"\n{column} " in shown


def test_the_default_policy_needs_no_control_plane(loom: Loom) -> None:
    lines = loom("policy").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(DEFAULTS)
    after = delay(Settings().hang_act_seconds).split()
    assert lines[2].split()[:5] == ["hang", "+".join(DEFAULTS["hang"].do), *after, "-"]
    assert "LIMIT" in lines[0]  # of one of them
    device = next(line.split() for line in lines if line.startswith("device "))
    assert device[:4] == ["device", "evict", "-", str(DEFAULTS["device"].limit)]
    assert not any(" yes " in line for line in lines)


def test_the_policy_of_a_job(troubled: Responder, at: Loom) -> None:
    own = Rule(on="hang", do=("checkpoint", "rollback"), after=30, limit=2, back=3, skip=True)
    troubled.runs = RunsView(runs=(a_run(policy=(own,), dry_run=True),))
    shown = at("policy", "mnist").out
    (line,) = [line for line in shown.splitlines() if line.startswith("hang")]
    assert line.split()[:8] == ["hang", "checkpoint+rollback", "back=3", "skip", "30", "s", "2", "yes"]
    assert shown.splitlines()[-1].startswith("a dry run")
    found = document(at, "policy", "mnist")
    assert (found["job"], found["dry_run"]) == ("mnist", True)
    (rule,) = [rule for rule in found["rules"] if rule["own"]]
    assert rule["rule"] == "hang=checkpoint+rollback@30,limit=2,back=3,skip"
    assert rule["told"][0] == "a checkpoint is asked for"
    ran = at("policy", "mnits")
    assert (ran.code, "did you mean mnist" in ran.err) == (4, True)


def test_what_is_to_be_done_is_told_to_loom_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    call = parse(
        ["run", "--on", "hang=restart@9", "--on=crash=report", "--dry-run-policy", "--check",
         "train.py", "--on", "x"]
    )  # fmt: skip
    task = with_rules(_task(call), call.args)
    assert task.policy == (Rule(on="hang", do=("restart",), after=9), Rule(on="crash", do=("report",)))
    assert (task.dry_run, task.check) == (True, True)
    assert task.argv == ("train.py", "--on", "x")
    plain = parse(["run", "train.py"])
    assert with_rules(_task(plain), plain.args) == _task(plain)


def test_a_rule_that_cannot_be_meant_is_told_before_anything_starts(tmp_path: Any, loom: Loom) -> None:
    (tmp_path / "train.py").write_text("")
    ran = loom("run", "--on", "hang=restrat", str(tmp_path / "train.py"))
    assert ran.code == BadInput.exit_code
    assert "response 'restrat' is unknown" in ran.err
    assert "did you mean restart" in ran.err


def test_an_option_of_submit_takes_the_place_of_the_file_s_rule(weaver: Responder, at: Loom, tmp_path: Any) -> None:
    file = tmp_path / "mnist.toml"
    file.write_text('script = "a.py"\n[policy]\nhang = "report"\ncrash = "report"\n')
    assert at("submit", str(file), "--on", "hang=restart@5", "--dry-run-policy").code == 0
    (ask,) = weaver.asked
    assert isinstance(ask, Submit)
    assert ask.task.policy == (Rule(on="hang", do=("restart",), after=5), Rule(on="crash", do=("report",)))
    assert ask.task.dry_run


@pytest.mark.parametrize(
    ("prefix", "offered"),
    [
        ("ha", ["hang="]),
        ("h", ["hang=", "held="]),
        ("hang=r", ["hang=report", "hang=restart", "hang=rollback"]),
        ("hang=stacks+re", ["hang=stacks+report", "hang=stacks+restart"]),
        ("zzz", []),
    ],
)
def test_rules_are_completed(prefix: str, offered: list[str]) -> None:
    assert complete_rule(prefix) == offered


def test_jobs_and_incidents_are_completed(troubled: Responder, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    typed = Namespace(state=settings.state)
    assert complete("job or incident", "", typed) == ["mnist", "bert", "i4", "i3", "i2", "i1", "i0"]
    assert complete("job or incident", "i2", typed) == ["i2"]

"""`loom schedule` and `loom predict`: what is sent, what is shown, and what is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from torchloom.cli.completion_names import complete
from torchloom.protocol.operator import Done, No, SetSchedule
from torchloom.protocol.scheduling import NodeBudget, PredictionView, ScheduledJob, Throughput

JOB = ScheduledJob(job="mnist", standing="scheduled", ranks={"n1": 1}, loaders=1, requested=1)
CURVE = (
    Throughput(loaders=0, predicted=30.0, error=1.0),
    Throughput(loaders=1, predicted=45.0, error=1.0, measured=44.0),
)


def asked(weaver: Responder) -> SetSchedule:
    ask = weaver.asked[-1]
    assert isinstance(ask, SetSchedule)
    return ask


def test_without_options_the_schedule_is_shown_and_nothing_is_asked(weaver: Responder, at: Loom) -> None:
    weaver.schedule = replace(weaver.schedule, jobs=(JOB,))
    ran = at("schedule")
    assert (ran.code, ran.err) == (0, "")
    assert "mnist" in ran.out
    shown = json.loads(at("schedule", "-o", "json").out)
    assert (shown["is"], shown["rules"]["policy"], shown["jobs"][0]["standing"]) == (
        "ScheduleView",
        "ours",
        "scheduled",
    )
    assert weaver.asked == []


def test_options_change_the_rules_and_leave_the_others(weaver: Responder, at: Loom) -> None:
    weaver.answer = Done(text="loaders are allocated by policy even")
    assert at("schedule", "--policy", "even") == (0, "loaders are allocated by policy even\n", "")
    ask = asked(weaver)
    assert (ask.policy, ask.objective, ask.budgets) == ("even", None, {})
    assert ask.operator
    at("schedule", "--objective", "log", "--budget", "n1=12", "--budget", "n2=agent", "--budget", "n3=0")
    ask = asked(weaver)
    assert (ask.policy, ask.objective, ask.budgets) == (None, "log", {"n1": 12, "n2": None, "n3": 0})
    assert json.loads(at("schedule", "--policy", "off", "-o", "json").out)["is"] == "Done"


@pytest.mark.parametrize(
    "words",
    [
        ["--policy", "our"],
        ["--objective", "speed"],
        ["--budget", "n1"],
        ["--budget", "=3"],
        ["--budget", "n1=-3"],
        ["--budget", "n1=1.5"],
        ["--budget", "n1=100001"],
        ["--budget", "n1=٣"],
        ["--budget", "n1="],
        ["--budget", "a b=3"],
        ["--budget", "n1=3", "--budget", "n1=4"],
    ],
)
def test_bad_input_is_refused_and_changes_nothing(weaver: Responder, at: Loom, words: list[str]) -> None:
    ran = at("schedule", *words)
    assert (ran.code, ran.out) == (2, "")
    assert "\n  → " in ran.err, "it says what to do"
    assert weaver.asked == []


def test_a_refusal_of_the_weaver_is_shown(weaver: Responder, at: Loom) -> None:
    weaver.answer = No(why="there is no node m1", hint="did you mean n1?")
    assert at("schedule", "--budget", "m1=3") == (4, "", "loom: there is no node m1\n  → did you mean n1?\n")


def test_a_prediction_is_shown_and_drawn(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    weaver.prediction = PredictionView(job=JOB, curve=CURVE, rate=50.0, ceiling=60.0)
    assert "●" in at("predict", "mnist").out
    assert len(json.loads(at("predict", "mnist", "-o", "json").out)["curve"]) == 2
    file = tmp_path / "mnist.svg"
    ran = at("predict", "mnist", "--picture", str(file))
    assert (ran.code, ran.err) == (0, f"loom: the curve is drawn in {file}\n")
    assert file.read_text().startswith("<svg ")


def test_what_cannot_be_predicted_says_why_and_draws_nothing(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    ran = at("predict", "mnist")
    assert ran.code == 0
    assert "it has no ElasticLoader" in ran.out
    file = tmp_path / "mnist.svg"
    ran = at("predict", "mnist", "--picture", str(file))
    assert (ran.code, ran.out, file.exists()) == (4, "", False)
    assert "\n  → " in ran.err
    ran = at("predict", "nobody")
    assert (ran.code, ran.out) == (4, "")
    assert "there is no job 'nobody'" in ran.err


def test_a_picture_that_cannot_be_written_is_an_error(weaver: Responder, at: Loom, tmp_path: Path) -> None:
    weaver.prediction = PredictionView(job=JOB, curve=CURVE, rate=50.0, ceiling=60.0)
    ran = at("predict", "mnist", "--picture", str(tmp_path / "none" / "mnist.svg"))
    assert (ran.code, ran.out) == (6, "")
    assert "No such file or directory" in ran.err


def test_budgets_complete_with_the_nodes(weaver: Responder) -> None:
    import argparse

    weaver.schedule = replace(weaver.schedule, nodes=(NodeBudget(node="n1", budget=4, used=0),))
    assert complete("budget", "n", argparse.Namespace(state=weaver.settings.state)) == ["n1="]

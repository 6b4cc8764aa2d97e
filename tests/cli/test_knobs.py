"""Verbs about values: what is checked before it is sent, what is sent, and how the answer is shown."""

from __future__ import annotations

import getpass
import json

import msgspec
import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import change, knob, knobs
from torchloom.protocol.operator import Done, No, Revert, SetKnobs
from torchloom.protocol.rank import Value
from torchloom.protocol.views import KnobsView


@pytest.fixture
def offering(weaver: Responder) -> Responder:
    weaver.knobs = knobs()
    weaver.answer = Done(text="c4: applied at step 1520 on 2 ranks", change="c4", step=1520)
    return weaver


def asked(weaver: Responder) -> SetKnobs:
    ask = weaver.asked[-1]
    assert isinstance(ask, SetKnobs)
    return ask


def test_set_sends_typed_values_and_says_when_it_took_effect(offering: Responder, at: Loom) -> None:
    ran = at("set", "mnist", "lr=3e-4", "accumulate=8", "betas=0.8,0.9", "shuffle=no", "log_level=DEBUG")
    assert ran == (0, "c4: applied at step 1520 on 2 ranks\n", "")
    ask = asked(offering)
    assert ask.values == {"lr": 3e-4, "accumulate": 8, "betas": (0.8, 0.9), "shuffle": False, "log_level": "DEBUG"}
    assert (ask.job, ask.replica, ask.rank, ask.at_step, ask.over) == ("mnist", None, None, None, 0)
    assert (ask.dry_run, ask.wait) == (False, True)
    assert len(ask.request) == 32
    assert len(offering.looked) == 1, "the knobs are asked for once"
    assert ask.operator.startswith(f"{getpass.getuser()}@")
    shown = json.loads(at("set", "mnist", "lr=1", "-o", "json").out)
    assert (shown["is"], shown["change"], shown["step"]) == ("Done", "c4", 1520)
    assert asked(offering).request != ask.request


def test_the_answer_shows_what_changed(offering: Responder, at: Loom) -> None:
    values: dict[str, Value] = {"batch_size": 256, "lr": 0.0006}
    before: dict[str, Value] = {"batch_size": 128, "lr": 0.0003}
    offering.answer = Done(text="c4: applied", change="c4", step=1520, values=values, before=before)
    for words in (["set", "mnist", "lr=0.5"], ["revert", "mnist", "c3"]):
        assert at(*words).out == "c4: applied\n  batch_size 128 → 256, lr 0.0003 → 0.0006\n"
    shown = json.loads(at("set", "mnist", "lr=0.5", "-o", "json").out)
    assert (shown["values"], shown["before"]) == (values, before)


def test_set_with_everything(offering: Responder, at: Loom) -> None:
    words = ["--at-step", "5000", "--replica", "hi", "--over", "100", "--dry-run", "--no-wait"]
    assert at("set", "mnist", "lr=0.5", *words).code == 0
    ask = asked(offering)
    assert (ask.replica, ask.at_step, ask.over, ask.dry_run, ask.wait) == ("hi", 5000, 100, True, False)
    assert at("set", "mnist/hi/1", "shuffle=on").code == 0
    ask = asked(offering)
    assert (ask.job, ask.replica, ask.rank, ask.values) == ("mnist", "hi", 1, {"shuffle": True})
    assert at("set", "mnist/hi", "lr=0.5", "--replica", "hi").code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["mnits", "lr=1"], 4, "did you mean mnist"),
        (["mnist", "lrr=1"], 4, "did you mean lr"),
        (["mnist", "lr=fast"], 2, "expected a number"),
        (["mnist", "lr=nan"], 2, "finite"),
        (["mnist", "lr=7"], 2, "above 1"),
        (["mnist", "lr="], 2, "expected a number"),
        (["mnist", "accumulate=1.5"], 2, "whole number"),
        (["mnist", "betas=0.9"], 2, "expected 2 numbers"),
        (["mnist", "shuffle=maybe"], 2, "true or false"),
        (["mnist", "log_level=LOUD"], 2, "DEBUG, INFO"),
        (["mnist", f"log_level={'x' * 100_000}"], 2, "..."),
        (["mnist", "lr"], 2, "NAME=VALUE"),
        (["mnist", "=1"], 2, "NAME=VALUE"),
        (["mnist", "lr=1", "lr=0.5"], 2, "twice"),
        (["mnist"], 2, "NAME=VALUE"),
        (["mnist/hi/x", "lr=1"], 2, "JOB/REPLICA/RANK"),
        (["mnist/hi/0/0", "lr=1"], 2, "JOB/REPLICA/RANK"),
        (["mn ist", "lr=1"], 2, "not a name"),
        (["mnist/hi", "lr=1", "--replica", "ho"], 2, "one of them"),
        (["mnist", "lr=1", "--at-step", "0"], 2, "--at-step"),
        (["mnist", "lr=1", "--at-step", "soon"], 2, "--at-step"),
        (["mnist", "lr=1", "--over", "-5"], 2, "--over"),
        (["mnist", "lr=1", "--over", "99999999999"], 2, "10000000"),
        (["mnist/hi/99999999", "shuffle=on"], 2, "1000000"),
        (["mnist", "lr=1", "--timeout", "0"], 2, "--timeout"),
        (["mnist", "lr=1", "--timeout", "nan"], 2, "--timeout"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
    offering: Responder, at: Loom, words: list[str], code: int, said: str
) -> None:
    ran = at("set", *words)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert len(ran.err) < 2000
    assert not offering.asked


@pytest.mark.parametrize(
    ("word", "valid"),
    [
        ("lr=fast", "at least 0 and at most 1"),
        ("lr=7", "at least 0 and at most 1"),
        ("betas=0.9", "betas=0.9,0.99"),
        ("shuffle=maybe", "such as shuffle=true"),
        ("batch_size=abc", "at least 1"),
        ("steps=1.5", "such as steps=4"),
    ],
)
def test_the_error_about_a_value_says_which_are_valid(offering: Responder, at: Loom, word: str, valid: str) -> None:
    whole = {"kind": "int", "value": 64, "high": None}
    more = (knob("batch_size", spec={**whole, "low": 1}), knob("steps", spec={**whole, "low": None}))
    offering.knobs = msgspec.structs.replace(offering.knobs, knobs=(*offering.knobs.knobs, *more))
    ran = at("set", "mnist", word)
    assert ran.code == 2
    assert valid in ran.err.partition("→")[2]


def test_a_batch_size_that_is_not_offered_is_missing_because_the_loader_was_not_given_to_watch(
    offering: Responder, at: Loom
) -> None:
    loaders = knob("loaders", spec={"kind": "int", "value": 4, "low": 0, "high": 512, "per": "rank"})
    batch = knob("batch", spec={"kind": "int", "value": 4})
    offering.knobs = KnobsView(knobs=(batch, loaders))
    ran = at("set", "mnist", "batch_size=64")
    assert ran.code == 4
    assert "loom.watch(loader)" in ran.err
    offering.knobs = KnobsView(knobs=(batch,))
    assert "did you mean batch?" in at("set", "mnist", "batch_size=64").err


def test_a_no_of_the_weaver_is_an_error_with_its_hint(offering: Responder, at: Loom) -> None:
    offering.answer = No(why="step 5 is past: mnist/hi/0 has finished 9", hint="choose a later one")
    ran = at("set", "mnist", "lr=1", "--at-step", "5")
    assert ran == (4, "", "loom: step 5 is past: mnist/hi/0 has finished 9\n  → choose a later one\n")


def test_log_level_is_a_knob(offering: Responder, at: Loom) -> None:
    assert at("log-level", "mnist", "debug").code == 0
    assert asked(offering).values == {"log_level": "DEBUG"}
    ran = at("log-level", "mnist/hi", "loud")
    assert ran.code == 2
    assert "DEBUG, INFO" in ran.err
    assert len(offering.asked) == 1


def test_knobs(offering: Responder, at: Loom) -> None:
    assert "lr" in at("knobs", "mnist").out
    shown = json.loads(at("knobs", "mnist", "-o", "json").out)
    assert shown[0]["spec"]["name"] == "lr"
    assert (shown[0]["value"], shown[0]["changed_by"], shown[0]["change"]) == (0.01, "ann@box", "c3")
    assert shown[1]["changed"] is None
    ran = at("knobs", "mnits")
    assert ran.code == 4
    assert "did you mean mnist" in ran.err
    offering.knobs = KnobsView(knobs=(knob(value=0.02, elsewhere={"hi": 0.03}),))
    assert "0.02, 0.03 in hi" in at("knobs", "mnist").out
    offering.knobs = KnobsView()
    assert at("knobs", "mnist").out == "job mnist offers no knobs\n"
    assert json.loads(at("knobs", "mnist", "-o", "json").out) == []


def test_changes(offering: Responder, at: Loom) -> None:
    assert "lr 0.1 → 0.01" in at("changes", "mnist").out
    shown = json.loads(at("changes", "mnist", "-o", "json").out)
    assert (shown[0]["id"], shown[0]["before"], shown[0]["values"]) == ("c3", {"lr": 0.1}, {"lr": 0.01})
    ran = at("changes", "mnits")
    assert ran.code == 4
    assert "did you mean mnist" in ran.err
    offering.knobs = KnobsView()
    assert at("changes", "mnist").out == "no changes yet\n"


def test_revert(offering: Responder, at: Loom) -> None:
    assert at("revert", "mnist", "c3").code == 0
    ask = offering.asked[-1]
    assert isinstance(ask, Revert)
    assert (ask.job, ask.change) == ("mnist", "c3")
    assert at("revert", "mnist", "c 3").code == 2
    offering.answer = No(why="job mnist has no change c9", hint="did you mean c3?")
    ran = at("revert", "mnist", "c9")
    assert (ran.code, ran.out) == (4, "")
    assert "→ did you mean c3?" in ran.err


def test_a_revert_that_overwrites_later_changes_asks_first(offering: Responder, at: Loom) -> None:
    offering.knobs = KnobsView(changes=(change("c4", before={"lr": 0.01}), change("c3", overwrites=("c4", "c6"))))
    ran = at("revert", "mnist", "c3")
    assert (ran.code, ran.out) == (2, "")
    assert "c4, c6" in ran.err
    assert "pass --yes" in ran.err
    assert not offering.asked
    assert at("revert", "mnist", "c4").code == 0, "it overwrites nothing"
    offering.answer = Done(text="c7: applied", change="c7", overwrites=("c4", "c6"))
    assert at("revert", "mnist", "c3", "--yes").out == "c7: applied\n  it overwrites c4, c6\n"
    assert json.loads(at("revert", "mnist", "c3", "--yes", "-o", "json").out)["overwrites"] == ["c4", "c6"]


def test_nobody_answers(offering: Responder, at: Loom) -> None:
    offering.leave()
    ran = at("set", "mnist", "lr=1", "--timeout", "0.5")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count("waiting for the ranks, up to 0.5 s") == 1
    assert "weaver does not answer" in ran.err

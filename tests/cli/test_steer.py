"""Verbs that tell ranks to do something: what is sent, what is asked first, and what comes back."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import LIFE, cluster, job, rank
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Done, No, Release, Steer
from torchloom.protocol.rank import Beat


def asked(weaver: Responder) -> Steer:
    ask = weaver.asked[-1]
    assert isinstance(ask, Steer)
    return ask


@pytest.mark.parametrize("verb", ["pause", "resume", "checkpoint", "stacks", "stop", "kill"])
def test_a_target_is_a_job_a_replica_or_a_rank(weaver: Responder, at: Loom, verb: str) -> None:
    sure = ["--yes"] if verb in {"stop", "kill"} else []
    for target, job_, replica, number in (
        ("mnist", "mnist", None, None), ("mnist/hi", "mnist", "hi", None), ("mnist/hi/1", "mnist", "hi", 1),
    ):  # fmt: skip
        assert at(verb, target, *sure) == (0, "done\n", "")
        ask = asked(weaver)
        assert (ask.verb, ask.job, ask.replica, ask.rank) == (verb, job_, replica, number)
        assert "@" in ask.operator
    assert len({ask.request for ask in weaver.asked}) == 3  # type: ignore[union-attr]
    assert json.loads(at(verb, "mnist", "-o", "json", *sure).out)["is"] == "Done"
    assert at(verb, "mnist/hi/x", *sure).code == 2
    weaver.answer = No(why="rank 1 trains together with 1 other", hint="address the whole replica: mnist/hi")
    ran = at(verb, "mnist/hi/1", *sure)
    assert (ran.code, ran.out) == (4, "")
    assert "→ address the whole replica" in ran.err


def test_a_whole_job_is_released(weaver: Responder, at: Loom) -> None:
    assert at("pause", "mnist", "--release") == (0, "done\n", "")
    ask = weaver.asked[-1]
    assert isinstance(ask, Release)
    assert ask.job == "mnist"
    assert at("pause", "mnist/hi", "--release").code == 2
    assert len(weaver.asked) == 1


def test_checkpoint_says_where(weaver: Responder, at: Loom) -> None:
    weaver.answer = Done(text="c4: applied at step 9 on 1 rank", results=((RankId("mnist", "hi", 0), "/ckpt/9"),))
    assert at("checkpoint", "mnist").out == "c4: applied at step 9 on 1 rank\n  mnist/hi/0: /ckpt/9\n"


def test_stacks_of_each_rank_stand_under_its_heading(weaver: Responder, at: Loom) -> None:
    results = tuple((RankId("mnist", "hi", i), f"Thread main\n  in f{i}") for i in range(2))
    weaver.answer = Done(text="o1: applied on 2 ranks", results=results)
    lines = at("stacks", "mnist").out.splitlines()
    assert lines[2:4] == ["── mnist/hi/0", "Thread main"]
    assert lines[6:] == ["── mnist/hi/1", "Thread main", "  in f1"]
    shown = json.loads(at("stacks", "mnist", "-o", "json").out)
    assert shown["results"][1] == [{"job": "mnist", "replica": "hi", "rank": 1}, "Thread main\n  in f1"]


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_harm_is_named_and_needs_a_yes(weaver: Responder, at: Loom, verb: str) -> None:
    beats = [Beat(incarnation=LIFE, step=step) for step in (1480, 1500)]
    weaver.view = cluster(
        jobs=(job("mnist"), job("bert")),
        ranks=(
            rank(number=0, beat=beats[0]), rank(number=1, beat=beats[1], presence="lost"),
            rank(number=2, presence="dead"), rank("mnist", "ho", 0, beat=None), rank("bert", "hi", 0),
        ),
    )  # fmt: skip
    for target, said in (
        ("mnist", f"this will {verb} mnist: 3 ranks, at steps 1,480 to 1,500"),
        ("mnist/hi/1", f"this will {verb} mnist/hi/1: 1 rank, at step 1,500"),
        ("mnist/ho", f"this will {verb} mnist/ho: 1 rank. "),
    ):
        ran = at(verb, target)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
        assert "pass --yes" in ran.err
    for target, said in (
        ("mnits", "did you mean mnist"), ("mnist/hx", "did you mean mnist/h"), ("mnist/hi/7", "no rank"),
        ("mnist/hi/2", "no living rank"),
    ):  # fmt: skip
        ran = at(verb, target)
        assert ran.code == 4
        assert said in ran.err
    assert not weaver.asked

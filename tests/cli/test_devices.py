"""Verbs that tell the weaver something: what is sent, and how yes and no are shown."""

from __future__ import annotations

import getpass
import json

import pytest

from tests.cli.conftest import Loom
from tests.cli.responder import Responder
from tests.views.samples import assignment, cluster, device, rank
from torchloom.protocol.ids import ReplicaId
from torchloom.protocol.operator import Done, Fail, No, Recover, Register


def test_fail_names_what_is_hit_and_who_said_so(weaver: Responder, at: Loom) -> None:
    weaver.answer = Done(text="GPU-1 failed", replicas=(ReplicaId("mnist", "hi"),))
    ran = at("fail", "GPU-1", "--cause", "XID 79")
    assert (ran.code, ran.out) == (0, "GPU-1 failed\n  mnist/hi\n")
    asked = weaver.asked[0]
    assert isinstance(asked, Fail)
    assert (asked.device, asked.cause) == ("GPU-1", "XID 79")
    assert asked.operator.startswith(f"{getpass.getuser()}@")
    shown = json.loads(at("fail", "GPU-1", "-o", "json").out)
    assert (shown["is"], shown["text"]) == ("Done", "GPU-1 failed")
    assert shown["replicas"] == [{"job": "mnist", "replica": "hi"}]


def test_recover(weaver: Responder, at: Loom) -> None:
    assert at("recover", "GPU-1").code == 0
    assert isinstance(weaver.asked[0], Recover)


CPUS = ["CPU-1ffdf8f8", "CPU-1ffe0000", "CPU-1ffe"]


@pytest.mark.parametrize(("typed", "meant"), [("CPU-1ffd", "CPU-1ffdf8f8"), ("CPU-1ffe", "CPU-1ffe"), ("x", "x")])
def test_the_beginning_of_a_device_s_name_will_do(weaver: Responder, at: Loom, typed: str, meant: str) -> None:
    weaver.view = cluster(devices=tuple(map(device, CPUS)), assignments=())
    assert at("fail", typed).code == 0
    assert at("recover", typed).code == 0
    assert [ask.device for ask in weaver.asked if isinstance(ask, Fail | Recover)] == [meant, meant]


def test_a_beginning_that_several_devices_share_is_refused(weaver: Responder, at: Loom) -> None:
    weaver.view = cluster(devices=tuple(map(device, CPUS)), assignments=())
    ran = at("fail", "CPU-1ff")
    assert ran.code == 4
    assert "3 devices begin with 'CPU-1ff'" in ran.err
    assert "CPU-1ffdf8f8, CPU-1ffe, CPU-1ffe0000" in ran.err
    assert not weaver.asked


def test_replicas_that_the_answer_names_are_not_listed_again(weaver: Responder, at: Loom) -> None:
    replicas = (ReplicaId("mnist", "hi"), ReplicaId("mnist", "h"))
    weaver.answer = Done(text="GPU-1 failed (XID 79); on it: mnist/hi, bert/h", replicas=replicas)
    assert at("fail", "GPU-1").out == "GPU-1 failed (XID 79); on it: mnist/hi, bert/h\n  mnist/h\n"


def test_a_no_is_an_error_with_the_weavers_hint(weaver: Responder, at: Loom) -> None:
    weaver.answer = No(why="device GPU-11 is unknown", hint="did you mean GPU-1?")
    assert at("fail", "GPU-11") == (4, "", "loom: device GPU-11 is unknown\n  → did you mean GPU-1?\n")


@pytest.mark.parametrize(
    ("words", "job", "replica"),
    [
        (["ho"], "bert", "ho"),
        (["bert/hi"], "bert", "hi"),
        (["new"], "manual", "new"),
        (["new/new"], "new", "new"),
        (["hi", "--job", "mnist"], "mnist", "hi"),
        (["train_ddp_0:164ecd9c-f806"], "manual", "train_ddp_0:164ecd9c-f806"),
    ],
)
def test_register_finds_the_job(weaver: Responder, at: Loom, words: list[str], job: str, replica: str) -> None:
    weaver.view = cluster(
        ranks=(rank("mnist", "hi"), rank("bert", "hi")), assignments=(assignment("GPU-1", "bert", "ho", None),)
    )
    assert at("register", "GPU-1", *words).code == 0
    asked = weaver.asked[0]
    assert isinstance(asked, Register)
    assert (asked.device, asked.job, asked.replica) == ("GPU-1", job, replica)


def test_register_does_not_choose_between_jobs(weaver: Responder, at: Loom) -> None:
    weaver.view = cluster(ranks=(rank("mnist", "hi"), rank("bert", "hi")), assignments=())
    ran = at("register", "GPU-1", "hi")
    assert ran.code == 4
    assert "bert/hi or mnist/hi" in ran.err
    ran = at("register", "GPU-1", "bert/hi", "--job", "mnist")
    assert ran.code == 4
    assert "'mnist'" in ran.err
    assert "'bert'" in ran.err
    assert not weaver.asked


@pytest.mark.parametrize("words", [["a.b", "hi"], ["GPU-1", "h i"], ["GPU-1", "a*/b"], ["GPU-1", ""], ["GPU-1", "a/"]])
def test_names_that_no_subject_can_carry_are_not_sent(weaver: Responder, at: Loom, words: list[str]) -> None:
    assert at("register", *words).code == 2
    assert not weaver.asked

"""The Python client, both ways: what it sends, what it refuses by itself, and a weaver that goes away in the middle."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchloom
from tests.cli.responder import Responder
from tests.views.samples import cluster, knobs
from torchloom.bus.nats_server import EmbeddedServer
from torchloom.client import Target, parse_target
from torchloom.errors import BadInput, BadName, BadState, Refused, Unreachable
from torchloom.knob_validation import BadValue
from torchloom.protocol.operator import Done, Fail, No, Recover, Register, SetKnobs, Steer
from torchloom.protocol.views import CheckpointsView
from torchloom.settings import Settings


@pytest.fixture
def weaver(settings: Settings) -> Iterator[Responder]:
    with Responder(settings, cluster()) as responder:
        responder.knobs = knobs()
        yield responder


@pytest.fixture
def loom(weaver: Responder) -> Iterator[torchloom.Client]:
    with torchloom.Client(weaver.settings, timeout=60) as client:
        yield client


def asked(weaver: Responder) -> SetKnobs:
    ask = weaver.asked[-1]
    assert isinstance(ask, SetKnobs)
    return ask


def test_looking(weaver: Responder, loom: torchloom.Client) -> None:
    assert loom.status().plane.weaver == "host:42"
    assert len(loom.status("mnist").ranks) == 2
    assert [job.job for job in loom.jobs()] == ["mnist"]
    assert [knob.spec.name for knob in loom.knobs("mnist").knobs][:2] == ["lr", "accumulate"]
    assert [change.id for change in loom.changes("mnist")] == ["c3"]
    assert loom.parse("mnist", {"lr": "3e-4", "shuffle": "off"}) == {"lr": 3e-4, "shuffle": False}
    assert loom.checkpoints("mnist") == CheckpointsView(job="mnist")  # it never wrote one
    weaver.checkpoints["mnist"] = CheckpointsView(job="mnist", folder="/runs/a", failures=2)
    assert loom.checkpoints("mnist").failures == 2
    with pytest.raises(Refused, match="no job 'mnits'"):
        loom.checkpoints("mnits")
    with pytest.raises(Refused, match="no job 'mnits'") as refused:
        loom.knobs("mnits")
    assert refused.value.hint == "did you mean mnist?"


def test_set_takes_keywords_or_a_mapping(weaver: Responder, loom: torchloom.Client) -> None:
    weaver.answer = Done(text="c4", change="c4", step=7)
    assert loom.set("mnist", lr=1, betas=[0.8, 0.9]).step == 7
    assert asked(weaver).values == {"lr": 1.0, "betas": (0.8, 0.9)}
    assert isinstance(asked(weaver).values["lr"], float)
    loom.set("mnist", {"lr": 0.5}, replica="hi", rank=1, at_step=9, over=3, dry_run=True, wait=False, accumulate=2)
    ask = asked(weaver)
    assert ask.values == {"lr": 0.5, "accumulate": 2}
    assert (ask.replica, ask.rank, ask.at_step, ask.over, ask.dry_run, ask.wait) == ("hi", 1, 9, 3, True, False)
    assert len({a.request for a in weaver.asked}) == 2  # type: ignore[union-attr]


def test_bad_values_are_not_sent(weaver: Responder, loom: torchloom.Client) -> None:
    with pytest.raises(BadValue, match="above 1"):
        loom.set("mnist", lr=2)
    with pytest.raises(BadValue, match="finite"):
        loom.set("mnist", lr=float("nan"))
    with pytest.raises(BadValue, match="expected a number"):
        loom.set("mnist", lr="0.1")
    with pytest.raises(Refused, match="no knob lrr") as refused:
        loom.set("mnist", lrr=1)
    assert "did you mean lr" in refused.value.hint
    with pytest.raises(BadInput, match="nothing to set"):
        loom.set("mnist")
    with pytest.raises(BadInput, match="of which replica"):
        loom.set("mnist", shuffle=True, rank=0)
    with pytest.raises(BadInput, match="at_step"):
        loom.set("mnist", lr=0.1, at_step=0)
    with pytest.raises(BadInput, match="over"):
        loom.set("mnist", lr=0.1, over=-1)
    with pytest.raises(BadName):
        loom.set("mn.ist", lr=0.1)
    with pytest.raises(BadName):
        loom.revert("mnist", "c*")
    with pytest.raises(BadName):
        loom.fail("a.b")
    with pytest.raises(BadInput, match="not a target"):
        loom.pause("mnist/hi/x")
    assert not weaver.asked


def test_steering_and_devices(weaver: Responder, loom: torchloom.Client) -> None:
    for verb in ("pause", "resume", "stop", "checkpoint", "kill", "stacks"):
        assert getattr(loom, verb)("mnist/hi").text == "done"
        ask = weaver.asked[-1]
        assert isinstance(ask, Steer)
        assert (ask.verb, ask.job, ask.replica, ask.rank) == (verb, "mnist", "hi", None)
    loom.revert("mnist", "c3")
    loom.fail("GPU-1", "XID 79")
    loom.recover("GPU-1")
    loom.register("GPU-1", "mnist", "hi")
    assert [type(ask) for ask in weaver.asked[-3:]] == [Fail, Recover, Register]
    assert all("@" in ask.operator for ask in weaver.asked)
    weaver.answer = No(why="no", hint="because")
    with pytest.raises(Refused, match="no") as refused:
        loom.kill("mnist")
    assert refused.value.hint == "because"


def test_targets() -> None:
    assert parse_target("mnist") == Target("mnist")
    assert parse_target("mnist/hi/3") == Target("mnist", "hi", 3)
    assert str(Target("mnist", "hi", 0)) == "mnist/hi/0"
    for bad in ("", "/", "a/", "a//1", "a/b/", "a/b/-1", "a/b/1/2", "a b"):
        with pytest.raises(BadInput):
            parse_target(bad)


def test_what_was_heard_but_not_answered_is_sent_again_under_the_same_request(
    weaver: Responder, loom: torchloom.Client
) -> None:
    weaver.deaf = 2  # the weaver was killed over it, twice
    assert loom.set("mnist", lr=0.5).text == "done"
    assert len(weaver.asked) >= 3
    assert len({ask.request for ask in weaver.asked}) == 1  # type: ignore[union-attr]


def test_a_weaver_that_is_away_for_a_while_is_waited_for(weaver: Responder, loom: torchloom.Client) -> None:
    weaver.leave()
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(loom.set, "mnist", lr=0.5)
        time.sleep(3)
        assert not asking.done()
        weaver.come_back()
        assert asking.result(60).text == "done"
    assert len({ask.request for ask in weaver.asked}) == 1  # type: ignore[union-attr]


async def test_the_same_to_await(weaver: Responder) -> None:
    async with torchloom.AsyncClient(weaver.settings, timeout=60) as loom:
        await asyncio.to_thread(weaver.leave)
        waiting = asyncio.create_task(loom.set("mnist", lr=0.5))
        other = asyncio.create_task(loom.status())
        await asyncio.sleep(3)
        assert not waiting.done()
        await asyncio.to_thread(weaver.come_back)
        assert (await asyncio.wait_for(waiting, 60)).text == "done"
        assert (await other).plane.term == 3
        assert asked(weaver).values == {"lr": 0.5}
        with pytest.raises(BadValue):
            await loom.set("mnist", lr=5)


def test_nats_may_restart_while_something_is_asked(
    weaver: Responder, loom: torchloom.Client, server: EmbeddedServer
) -> None:
    assert loom.jobs()
    kill(server)
    with ThreadPoolExecutor() as pool:
        paused = pool.submit(loom.pause, "mnist")
        time.sleep(1)
        server.start()  # on this thread: the server dies with the one that started it
        assert paused.result(60).text == "done"
    assert len({ask.request for ask in weaver.asked}) == 1  # type: ignore[union-attr]


def test_it_can_be_closed_while_nats_comes_and_goes(weaver: Responder, server: EmbeddedServer) -> None:
    with torchloom.Client(weaver.settings, timeout=3) as loom:
        assert loom.jobs()
        kill(server)
        short = threading.Timer(1, server.start)  # it dies as soon as it is up, with the thread that started it
        short.start()
        with pytest.raises(Unreachable):
            loom.pause("mnist")
    short.join()
    server.start()


def kill(server: EmbeddedServer) -> None:
    assert server.process
    server.process.kill()
    server.process.wait()


def test_nobody_at_all(weaver: Responder) -> None:
    weaver.leave()
    with torchloom.Client(weaver.settings, timeout=0.5) as loom:
        with pytest.raises(Unreachable, match="NATS is up, but the weaver does not answer"):
            loom.stop("mnist")
        weaver.come_back()
        weaver.deaf = 100
        with pytest.raises(Unreachable, match=r"within 0\.5 s"):
            loom.stop("mnist")


def test_no_control_plane_is_known_at_the_first_call(tmp_path: object) -> None:
    loom = torchloom.Client(Settings(addr="nats://127.0.0.1:9", state=f"{tmp_path}/none"))
    with pytest.raises(Unreachable, match="no control plane"):
        loom.jobs()
    loom.close()


def test_it_works_without_with_and_again_after_close(weaver: Responder) -> None:
    loom = torchloom.Client(weaver.settings)
    loom.close()  # nothing was opened
    assert loom.jobs()
    loom.close()
    loom.close()
    assert loom.jobs()
    loom.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "torchloom client"]


async def test_the_one_that_does_not_await_works_where_a_loop_runs(weaver: Responder) -> None:
    with torchloom.Client(weaver.settings) as loom:  # as in a notebook
        assert loom.jobs()


def test_a_viewer_sees_and_cannot_ask(weaver: Responder) -> None:
    with torchloom.Client(weaver.settings, role="viewer", timeout=0.5) as loom:
        assert loom.jobs()
        with pytest.raises((Unreachable, BadState)):
            loom.kill("mnist")
    assert not weaver.asked

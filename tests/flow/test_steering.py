"""A running job is changed: on all ranks at the same step or on none, once, and with an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from campaigns.control import storm
from tests.flow.ddp import Group, Plan
from tests.flow.plane import PATIENCE, Plane, plane
from tests.flow.proxy import Proxy
from tests.flow.records import codes
from torchloom.agent.supervisor.fork import with_startup
from torchloom.bus.connection import connect, find
from torchloom.bus.weaver_client import WeaverClient
from torchloom.errors import Refused
from torchloom.knob_validation import BadValue
from torchloom.protocol.codec import encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Ask, Done, No, SetKnobs, Steer
from torchloom.protocol.rank import Order, Value
from torchloom.protocol.records import ChangeDecided, ChangeProposed, ChangeSettled, OrderGiven
from torchloom.protocol.subjects import COMMAND, Role
from torchloom.shared.liveness_page import STEP, view
from torchloom.views.wording.phrases import render

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp_gloo.py"
RANK = """
import sys, time, torchloom
loom = torchloom.attach(job="job", replica=sys.argv[1], rank=0, world_size=1)
x = loom.knob("x", 0.0)
while not loom.stopping:
    time.sleep(0.01)
    loom.step(x=x.value)
"""
"""A rank that trains alone and reports the value it has."""

UNATTACHED = """
import time, torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    time.sleep(0.01)
    weight.grad = torch.ones(1)
    optimizer.step()
"""
"""A rank that knows nothing of torchLoom."""


AHEAD = 200
"""Steps, of ten milliseconds at least: nobody is so slow that the step it names is past when it is heard."""


def request() -> str:
    return secrets.token_hex(16)


async def ask(up: Plane, wanted: Ask, seconds: float = PATIENCE) -> Done | No:
    """The answer, whatever it is; the same request is sent again until there is one."""
    async with WeaverClient(up.settings, Role.OPERATOR, patience=seconds) as weaver:
        try:
            return await weaver.ask(wanted, seconds)
        except Refused as error:
            return No(why=error.message, code=error.code)


async def change(up: Plane, at_step: int | None = None, over: int = 0, **values: Value) -> Done:
    done = await ask(up, SetKnobs(request=request(), job="job", values=values, at_step=at_step, over=over))
    assert isinstance(done, Done), done
    return done


async def tell(up: Plane, verb: str, replica: str | None = None, rank: int | None = None) -> Done | No:
    return await ask(up, Steer(request=request(), verb=verb, job="job", replica=replica, rank=rank))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def training(up: Plane, folder: Path, **plan: object) -> AsyncIterator[Group]:
    """Four ranks that train together."""
    group = Group(Plan(up.settings.state, folder, **plan))  # type: ignore[arg-type]
    try:
        for rank in range(group.plan.size):
            await up.until_beating("hi", rank)
        yield group
    finally:
        group.kill()


async def stopped(up: Plane, group: Group) -> None:
    """An orderly end: all ranks after the same step, with the same parameters."""
    assert isinstance(await tell(up, "stop"), Done)
    assert await asyncio.to_thread(group.exit_codes) == [0] * group.plan.size
    assert len(set(map(str, group.ends))) == 1


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.promise(2)
async def test_a_change_takes_effect_at_the_same_step_on_all_ranks_of_a_group(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        first = await change(up, lr=0.02, batch_size=7, accumulation=3)
        second = await change(up, at_step=(first.step or 0) + AHEAD, lr=0.01)
        ramped = await change(up, x=10.0, over=5)
        await up.until(lambda: all(saw[-1][0] == 10.0 for saw in group.saw("x")), what="the end of the ramp")
        await up.until(lambda: all(saw[-1][0] == 0.01 for saw in group.saw("lr")), what="the step that was named")
        await stopped(up, group)
        assert group.saw("lr") == [[(0.1, 0), (0.02, first.step), (0.01, second.step)]] * 4
        assert group.saw("batch_size") == [[(4, 0), (7, first.step)]] * 4
        assert group.saw("accumulation") == [[(1, 0), (3, first.step)]] * 4
        steps = [(0.0, 0)] + [(2.0 * n, (ramped.step or 0) + n) for n in range(1, 6)]
        assert group.saw("x") == [steps] * 4


async def test_what_cannot_be_done_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        refused = [
            await ask(up, SetKnobs(request=request(), job="job", values={"batch_size": 65})),
            await ask(up, SetKnobs(request=request(), job="job", values={"batch_size": 2, "lr": -1.0})),
            await ask(up, SetKnobs(request=request(), job="job", values={"batch_sice": 2})),
            await ask(up, SetKnobs(request=request(), job="job", values={"x": 1.0}, at_step=1)),
            await ask(up, SetKnobs(request=request(), job="job", replica="hi", rank=1, values={"x": 1.0})),
            await ask(up, SetKnobs(request=request(), job="jab", values={"x": 1.0})),
            await tell(up, "pause", "hi", 1),
            await tell(up, "stop", "hi", 3),
        ]
        bounds = [
            BadValue("batch_size", 65, "above 64, the most it may be"),
            BadValue("lr", -1.0, "below 0, the least it may be"),
        ]
        assert [answer.why for answer in refused[:2]] == [render(error.message) for error in bounds]
        assert [answer.code for answer in refused if isinstance(answer, No)][2:] == [
            "knob_unknown", "step_past", "knob_of_job", "job_unknown", "rank_not_alone", "rank_not_alone",
        ]  # fmt: skip
        assert all(isinstance(answer, No) for answer in refused)
        before = (await up.until_beating("hi", 1)).beat
        assert before
        await up.until_beating("hi", 1, after=before.step)  # training goes on
        await stopped(up, group)
        assert all(len(saw) == 1 for name in ("lr", "batch_size", "x") for saw in group.saw(name))


async def test_a_rank_whose_script_does_not_attach_refuses_to_be_steered_and_goes_on(tmp_path: Path) -> None:
    """Its steps are counted, and nobody there could obey."""
    script = tmp_path / "train.py"
    script.write_text(UNATTACHED)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "TORCHLOOM_LAUNCHER": "loom"}
    named = {"TORCHLOOM_JOB": "job", "TORCHLOOM_REPLICA": "hi"}
    async with plane(tmp_path / "s") as up:
        up.start_script([sys.executable, str(script)], **with_startup(up.env | rank | named))
        before = await up.until(up.rank, what="a rank")
        assert before.counted
        for answer in (await tell(up, "pause"), await tell(up, "stop")):
            assert isinstance(answer, No), answer
            assert answer.code == "change_aborted"
        decided = [record for record in await up.records() if isinstance(record, ChangeDecided)]
        assert [record.abort and record.abort.why for record in decided] == ["refused", "refused"]
        answer = await ask(up, SetKnobs(request=request(), job="job", values={"lr": 0.1}))
        assert isinstance(answer, No), answer
        assert answer.code == "knob_unknown"
        step = (await up.until_beating()).beat
        assert step is not None
        assert not (await up.until_beating(after=step.step)).beat.paused  # type: ignore[union-attr]


async def test_a_restarted_group_has_the_values_of_its_step_and_takes_later_changes_again(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        async with training(up, tmp_path / "g") as group:
            early = await change(up, x=1.0)
            saved = await tell(up, "checkpoint")
            assert isinstance(saved, Done)
            assert saved.step is not None
            ((rank, path),) = saved.results  # rank 0 wrote it and said where
            assert rank == RankId("job", "hi", 0)
            state = json.loads(Path(path).read_text())
            assert state["step"] == saved.step
            assert state["knobs"]["x"] == 1.0
            late = await change(up, at_step=saved.step + AHEAD, x=2.0)
            all_of_it = [[(0.0, 0), (1.0, early.step), (2.0, late.step)]] * 4
            await up.until(lambda: group.saw("x") == all_of_it, what="both values")

        again = [[(1.0, saved.step), (2.0, late.step)]] * 4  # the first before any step is made
        async with training(up, tmp_path / "by-step", resume_at=saved.step) as group:
            await up.until(lambda: group.saw("x") == again, what="the values again, by the number of the step")

        (tmp_path / "by-state").mkdir()
        (tmp_path / "by-state" / "resume.json").write_text(json.dumps(state))
        async with training(up, tmp_path / "by-state") as group:
            await up.until(lambda: group.saw("x") == again, what="the values again, from the checkpoint")
            newest = await change(up, x=3.0)
            await stopped(up, group)
            assert group.saw("x") == [[*again[0], (3.0, newest.step)]] * 4


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_group_pauses_at_one_step_is_changed_there_resumes_and_stops(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        paused = await tell(up, "pause")
        assert isinstance(paused, Done)

        async def all_paused() -> bool:
            ranks = (await up.look()).ranks
            return all(r.beat and r.beat.paused and r.beat.step == paused.step for r in ranks) and len(ranks) == 4

        await up.until(all_paused, what="all stand at the step that was told")
        there = await change(up, x=5.0)
        assert there.step == paused.step
        assert isinstance(await tell(up, "resume"), Done)
        await up.until_beating("hi", 2, after=paused.step or 0)
        assert isinstance(await tell(up, "pause"), Done)
        await stopped(up, group)  # out of a pause too
        assert group.saw("x") == [[(0.0, 0), (5.0, paused.step)]] * 4


async def test_stacks_are_shown_and_one_rank_is_killed(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        shown = await tell(up, "stacks")
        assert isinstance(shown, Done)
        assert [rank.rank for rank, _ in shown.results] == [0, 1, 2, 3]
        assert all("MainThread" in text and "in train" in text for _, text in shown.results)

        resume = Steer(request=request(), verb="resume", job="job")
        done = await ask(up, resume)
        assert isinstance(done, Done)
        assert len(done.results) == 4
        assert isinstance(await ask(up, resume), Done)  # asked twice, given once
        given = [r for r in await up.records() if isinstance(r, OrderGiven) and r.verb == "resume"]
        assert len(given) == 1

        killed = await tell(up, "kill", "hi", 2)
        assert isinstance(killed, Done), killed
        await asyncio.to_thread(group.processes[2].join, 60)
        assert group.processes[2].exitcode == -signal.SIGKILL

        async def gone() -> bool:
            rank = await up.rank("hi", 2)
            told = codes(*await up.records())
            return rank is not None and rank.presence != "live" and "killed_by_operator" in told

        await up.until(gone, what="its death is known for what it is")


# ── what goes wrong meanwhile ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
async def test_changes_while_the_weaver_is_killed_at_random_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    found = await storm(tmp_path, random.Random(7), changes=25)
    assert found.problems == []
    assert found.kills >= 3


@pytest.mark.promise(2)
async def test_a_request_whose_weaver_is_killed_at_once_has_one_outcome(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        assert up.weaver
        wanted = SetKnobs(request=request(), job="job", values={"x": 4.0})
        asking = asyncio.create_task(ask(up, wanted))
        await asyncio.sleep(0.03)
        up.weaver.kill()
        up.weaver.wait()
        up.start_weaver()
        end = await asking
        assert (await ask(up, wanted)) == end  # and once more
        await stopped(up, group)
        # A weaver that was away until its step was past makes no change, and says so; no rank has it then.
        made = [(4.0, end.step)] if isinstance(end, Done) else []
        assert isinstance(end, Done) or end.code in {"step_past", "change_aborted"}
        assert group.saw("x") == [[(0.0, 0), *made]] * 4
        records = await up.records()
        asked = [r.change.id for r in records if isinstance(r, ChangeProposed) and r.request == wanted.request]
        decided = [r for r in records if isinstance(r, ChangeDecided) and r.id in asked]
        assert [r.id for r in decided] == asked  # each once; a step that came too early for someone is tried further on
        assert sum(r.commit for r in decided) == len(made)


async def test_nats_is_killed_in_the_middle_of_a_change(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up, training(up, tmp_path / "g") as group:
        ends = []
        for number in (1, 2, 3):
            asking = asyncio.create_task(ask(up, SetKnobs(request=request(), job="job", values={"x": float(number)})))
            await asyncio.sleep(0.01 * number)
            up.kill_server()
            up.server.start()
            ends.append((float(number), await asking))
        last = await change(up, x=9.0)
        await stopped(up, group)
        made = [(value, end.step) for value, end in ends if isinstance(end, Done)]
        assert group.saw("x") == [[(0.0, 0), *made, (9.0, last.step)]] * 4


async def test_a_frozen_rank_makes_a_change_expire_and_obeys_no_expired_order(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        processes = [up.start_script([sys.executable, "-c", RANK, name]) for name in ("a", "b")]
        await up.until_beating("a")
        frozen = await up.until_beating("b")
        processes[1].send_signal(signal.SIGSTOP)
        weaver = await connect(find(up.settings, Role.WEAVER), name="test")
        order = Order(term=1, incarnation=frozen.incarnation, id="o9", verb="kill")
        await weaver.publish(COMMAND.for_rank(frozen.rank), encode(order))
        await weaver.close()

        answer = await ask(up, SetKnobs(request=request(), job="job", values={"x": 1.0}))
        assert isinstance(answer, No)
        assert answer.code == "ranks_unanswering"
        before = await up.until_beating("a")
        assert before.beat
        assert (await up.until_beating("a", after=before.beat.step)).beat.metrics["x"] == 0.0  # type: ignore[union-attr]

        await asyncio.sleep(0.5)
        processes[1].send_signal(signal.SIGCONT)
        assert frozen.beat
        back = await up.until_beating("b", after=frozen.beat.step)
        assert back.incarnation == frozen.incarnation
        assert processes[1].poll() is None  # the order that lay in its socket was not meant for now
        done = await ask(up, SetKnobs(request=request(), job="job", replica="b", values={"x": 2.0}))
        assert isinstance(done, Done), done


async def test_a_rank_cut_off_at_the_step_goes_on_unchanged_and_is_an_incident_when_it_is_back(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        endpoint = up.server.folder.read_endpoint()
        assert endpoint
        async with Proxy(int(endpoint.url.rpartition(":")[2])) as proxy:
            creds = str(up.server.folder.creds("threadlet"))
            up.start_script([sys.executable, "-c", RANK, "a"])
            away = {"TORCHLOOM_ADDR": f"nats://127.0.0.1:{proxy.port}", "TORCHLOOM_CREDS": creds}
            cut = up.start_script([sys.executable, "-c", RANK, "b"], TORCHLOOM_VERDICT_SECONDS="1", **away)
            await up.until_beating("a")
            await up.until_beating("b")
            proxy.last_words = (b'"is":"Propose"', b'"is":"Ready"')
            asking = asyncio.create_task(ask(up, SetKnobs(request=request(), job="job", values={"x": 1.0})))

            async def taken() -> bool:
                a = await up.rank("a")
                return a is not None and a.beat is not None and a.beat.metrics["x"] == 1.0

            async def incident() -> bool:
                return bool(codes(*await up.records()) & {"rank_astray", "rank_failed_change"})

            await up.until(taken, what="a has it")
            step = max(record.change.step for record in await up.records() if isinstance(record, ChangeProposed))
            page = view(cut.pid)
            assert page is not None
            await up.until(lambda: page.marks[STEP] > step, what="b goes on without it")
            assert not await incident()  # nothing is known of it yet

            proxy.last_words = ()
            proxy.reset()
            await up.until(incident, what="an incident")
            b = await up.until_beating("b")
            assert b.beat
            assert b.beat.metrics["x"] == 0.0  # it had waited, in vain, and went on
            answer = await asking
            assert isinstance(answer, No)
            assert answer.code == "outcome_of"
            (settled,) = [record for record in await up.records() if isinstance(record, ChangeSettled)]
            assert settled.failed == 1


async def test_ranks_that_reach_the_step_without_a_verdict_have_it_aborted_and_all_go_on_unchanged(
    tmp_path: Path,
) -> None:
    async with plane(tmp_path / "s") as up:
        endpoint = up.server.folder.read_endpoint()
        assert endpoint
        async with Proxy(int(endpoint.url.rpartition(":")[2])) as proxy:
            creds = str(up.server.folder.creds("threadlet"))
            addr = f"nats://127.0.0.1:{proxy.port}"
            up.start_script([sys.executable, "-c", RANK, "a"])
            up.start_script([sys.executable, "-c", RANK, "b"], TORCHLOOM_ADDR=addr, TORCHLOOM_CREDS=creds)
            await up.until_beating("a")
            await up.until_beating("b")
            proxy.swallowed = b'"is":"Ready"'  # the weaver never learns that b is ready
            answer = await ask(up, SetKnobs(request=request(), job="job", values={"x": 1.0}))
            assert isinstance(answer, No)
            verdicts = [record for record in await up.records() if isinstance(record, ChangeDecided)]
            assert verdicts
            assert not any(verdict.commit for verdict in verdicts)

            proxy.swallowed = b""
            for replica in ("a", "b"):
                before = (await up.until_beating(replica)).beat
                assert before
                after = (await up.until_beating(replica, after=before.step)).beat
                assert after
                assert after.metrics["x"] == 0.0
            assert await up.incidents() == []


# ── the example ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
async def test_the_ddp_example_is_steered_ends_with_equal_parameters_and_goes_on_later(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        words = ["--job", "job", "--step-seconds", "0.02", "--save", f"{tmp_path}/end", "--log-interval", "1"]
        words += ["--checkpoints", f"{tmp_path}/kept"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
        env = up.env | {"TORCHLOOM_REPLICA": "hi", "OMP_NUM_THREADS": "1"}
        launched = subprocess.Popen([*torchrun, str(EXAMPLE), *words], env=env, stdout=subprocess.PIPE, text=True)
        try:
            for rank in range(4):
                await up.until_beating("hi", rank)
            await change(up, lr=0.01, batch_size=8, accumulation=2)
            saved = await tell(up, "checkpoint")
            assert isinstance(saved, Done)
            assert saved.results == ((RankId("job", "hi", 0), f"{tmp_path}/kept/step-{saved.step}"),)
            assert isinstance(await tell(up, "pause"), Done)
            assert isinstance(await tell(up, "resume"), Done)
            assert isinstance(await tell(up, "stop"), Done)
            output, _ = await asyncio.to_thread(launched.communicate, timeout=120)
            assert launched.returncode == 0
        finally:
            if launched.poll() is None:
                os.kill(launched.pid, signal.SIGTERM)
                launched.wait(30)
        assert len({Path(f"{tmp_path}/end.rank{rank}").read_bytes() for rank in range(4)}) == 1
        rates = [float(rate) for rate in re.findall(r"lr ([0-9.e-]+)", output)]
        assert rates[0] > 0.04
        assert 0.009 < rates[-1] < 0.01  # the schedule goes on from the new rate

        # Other processes, and fewer of them, go on from what was saved, with the values that were set.
        assert saved.step is not None
        words += ["--steps", str(saved.step + 3)]
        torchrun[torchrun.index("4")] = "2"
        again = [*torchrun, str(EXAMPLE), *words]
        ended = await asyncio.to_thread(subprocess.run, again, env=env, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr
        steps = [int(step) for step in re.findall(r"step +([0-9]+)", ended.stdout)]
        assert steps == [saved.step + 1, saved.step + 2, saved.step + 3]
        assert all(float(rate) < 0.01 for rate in re.findall(r"lr ([0-9.e-]+)", ended.stdout))

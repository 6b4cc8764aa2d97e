"""Nothing is forgotten when the weaver or NATS is killed, and no one is blamed for our own absence."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.flow.plane import Plane, plane
from torchloom.bus.connection import connect, find
from torchloom.core.state.cluster import State
from torchloom.protocol.operator import Done, Fail, Register
from torchloom.protocol.phrase import phrase
from torchloom.protocol.records import RankDied, RankLost
from torchloom.protocol.subjects import Role
from torchloom.weaver.health import Clock, Health
from torchloom.weaver.storage import Store


async def durable_state(up: Plane) -> State:
    """What a weaver that starts now would begin with."""
    client = await connect(find(up.settings, Role.WEAVER), name="test", timeout=20)
    try:
        return (await Store(client, Health(Clock())).load(up.settings)).state()
    finally:
        await client.close()


async def restart_weaver(up: Plane) -> None:
    assert up.weaver
    up.weaver.kill()
    up.weaver.wait()
    up.start_weaver()
    await up.until(up.look, what="the weaver answers again")


@pytest.mark.promise(1, 3)
async def test_a_killed_weaver_is_back_with_the_same_state_while_training_goes_on(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank("a", devices="GPU-1")
        doomed = up.start_rank("b", devices="GPU-1,GPU-2")
        await up.until_beating("a")
        await up.until_beating("b")
        doomed.kill()
        await up.until_presence("dead", "b")
        assert isinstance(await up.ask(Fail(device="GPU-2", cause="XID 79")), Done)
        assert isinstance(await up.ask(Register(device="GPU-7", job="manual", replica="r")), Done)
        before, seen = await durable_state(up), await up.look()
        step = next(r.beat.step for r in seen.ranks if r.rank.replica == "a" and r.beat)

        await restart_weaver(up)
        after, seen_again = await durable_state(up), await up.look()
        assert after.term == before.term + 1
        assert after.ranks == before.ranks
        assert after.jobs == before.jobs
        assert after.devices == before.devices
        assert after.incidents == before.incidents
        assert after.registered == before.registered
        assert seen_again.assignments == seen.assignments
        rank = await up.until_beating("a", after=step)
        assert rank.incarnation == next(r.incarnation for r in seen.ranks if r.rank.replica == "a")
        await asyncio.sleep(up.settings.reunion_seconds + 1)  # the roll-call has passed
        assert (await up.rank("a")).presence == "live"  # type: ignore[union-attr]
        assert not [r for r in await up.records() if isinstance(r, RankLost) and r.rank.replica == "a"]


async def test_a_rank_that_died_while_the_weaver_was_away_is_found_by_the_roll_call(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank("stays")
        doomed = up.start_rank("goes")
        await up.until_beating("stays")
        await up.until_beating("goes")
        assert up.weaver
        up.weaver.kill()
        up.weaver.wait()
        doomed.kill()
        doomed.wait()
        up.start_weaver()
        assert (await up.until_lost("goes")).reason == phrase("roll_call_missed")
        await up.until_presence("dead", "goes")
        assert (await up.rank("stays")).presence == "live"  # type: ignore[union-attr]


async def test_a_goodbye_said_while_the_weaver_was_away_is_heard(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        leaving = up.start_rank("leaves", TORCHLOOM_GOODBYE_SECONDS="3")  # nobody will answer it
        await up.until_beating("leaves")
        assert up.weaver
        up.weaver.kill()
        up.weaver.wait()
        leaving.send_signal(signal.SIGINT)
        leaving.wait(60)
        up.start_weaver()
        await up.until_presence("left", "leaves")
        assert await up.incidents() == []


async def test_a_killed_nats_server_comes_back_with_everything_and_the_ranks_too(tmp_path: Path) -> None:
    async with plane(tmp_path / "s", weaver=False) as up:
        up.env["TORCHLOOM_REUNION_SECONDS"] = "6"  # a rank that lives must be back by then, on whatever machine
        up.start_weaver()
        up.start_rank("stays", devices="GPU-1")
        doomed = up.start_rank("goes")
        stays = await up.until_beating("stays")
        await up.until_beating("goes")
        await up.ask(Fail(device="GPU-1", cause="XID 79"))
        before = await durable_state(up)
        up.kill_server()
        doomed.kill()  # no one can announce this
        doomed.wait()
        up.server.start()
        assert (await up.until_lost("goes")).reason == phrase("roll_call_missed")
        again = await up.until_beating("stays", after=stays.beat.step if stays.beat else 0)
        assert again.incarnation == stays.incarnation
        after = await durable_state(up)
        assert after.devices == before.devices
        assert [i for i in after.incidents if i.about.device == "GPU-1"] == list(before.incidents)
        assert up.weaver
        assert up.weaver.poll() is None
        assert all(rank.poll() is None for rank in up.ranks if rank is not doomed)
        assert not [r for r in await up.records() if isinstance(r, RankLost) and r.rank.replica == "stays"]


@pytest.mark.long
async def test_a_weaver_that_slept_calls_no_one_dead(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        up.start_rank()
        await up.until_beating()
        assert up.weaver
        up.weaver.send_signal(signal.SIGSTOP)
        await asyncio.sleep(9)  # longer than silence and grace together
        up.weaver.send_signal(signal.SIGCONT)
        await up.until(up.look, what="the weaver is awake")
        await asyncio.sleep(up.settings.reunion_seconds + 1)
        await up.until_beating()
        assert not [r for r in await up.records() if isinstance(r, (RankLost, RankDied))]


@pytest.mark.promise(4)
async def test_two_weavers_never_both_act(tmp_path: Path) -> None:
    async with plane(tmp_path / "s") as up:
        first = up.weaver
        assert first
        second = up.start_weaver()
        assert await asyncio.to_thread(second.wait, 60) == 5  # already up
        third = up.start_weaver("--takeover")
        await up.until(lambda: _term(up, 2), what="the new term")
        await up.ask(Register(device="GPU-1", job="manual", replica="r"))  # both hear it; one may append
        assert await asyncio.to_thread(first.wait, 60) == 7  # fenced
        assert third.poll() is None
        assert len((await durable_state(up)).registered) == 1


async def _term(up: Plane, term: int) -> bool:
    return (await up.look()).plane.term == term


async def test_curves_can_be_drawn_after_a_restart(tmp_path: Path) -> None:
    from torchloom.protocol.codec import encode
    from torchloom.protocol.subjects import LOOK
    from torchloom.protocol.views import CurvesView, QueryCurves

    async with plane(tmp_path / "s", weaver=False) as up:
        up.env["TORCHLOOM_CURVE_SECONDS"] = "0.2"
        up.start_weaver()
        up.start_rank()
        await up.until_beating()

        async def points() -> list[int]:
            answer = await up._request(Role.VIEWER, LOOK.template, encode(QueryCurves(job="job")))
            assert isinstance(answer, CurvesView)
            return [point.step for _, curve in answer.curves for point in curve]

        async def enough() -> list[int] | None:
            found = await points()
            return found if len(found) >= 4 else None

        before = await up.until(enough, what="four points")
        await restart_weaver(up)

        async def again() -> bool:
            return (await points())[:4] == before[:4]

        await up.until(again, what="the same beginning of the curve")


async def test_replay_starts_from_a_snapshot_and_the_log_may_be_cut(tmp_path: Path) -> None:
    async with plane(tmp_path / "s", weaver=False) as up:
        up.env["TORCHLOOM_SNAPSHOT_SECONDS"] = "0.5"
        up.start_weaver()
        up.start_rank()
        await up.until_beating()
        client = await connect(find(up.settings, Role.WEAVER), name="test")
        js = client.jetstream()

        async def snapshot() -> bool:
            store = Store(client, Health(Clock()))
            await store.load(up.settings)
            return store.snapshot_seq >= 2

        await up.until(snapshot, what="a snapshot")
        assert up.weaver
        up.weaver.kill()
        up.weaver.wait()
        before = await durable_state(up)
        newest = Store(client, Health(Clock()))
        await newest.load(up.settings)
        await js.purge_stream("LOOM_LOG", seq=newest.snapshot_seq + 1)  # as the limits would, one day
        await client.close()
        assert await durable_state(up) == before
        up.start_weaver()
        await up.until_beating()

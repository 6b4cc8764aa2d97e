"""A replica under torchft: its Manager counts the steps, and every value changes at a step that was committed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.integrations.torchft.replicas import JOB, Replica, joined, together
from tests.threadlet.played import PlayedWeaver, until
from torchloom.bus.connection import connect, find
from torchloom.integrations.torchft.manager_internals import _warned, version
from torchloom.protocol.codec import decode_reply, encode
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.rank import Applied, ChangeSpec, Discarded, Healed, Joined, Propose, Regrouped, Reply, Verdict
from torchloom.protocol.subjects import QUORUM, REPLY, Role
from torchloom.settings import Settings

pytest.importorskip("torchft", reason="torchft is not installed")

Start = Callable[..., Any]


@pytest.fixture
async def start(lighthouse: str, lively: Settings, weaver: PlayedWeaver) -> AsyncIterator[Start]:
    """Makes replicas, and ends them."""
    made: list[Replica] = []
    weaver.welcomes = True

    async def begin(name: str, with_torchloom: bool = True) -> Replica:
        replica = await asyncio.to_thread(Replica, lighthouse, name, lively if with_torchloom else None)
        made.append(replica)
        return replica

    yield begin
    for replica in made:
        await asyncio.to_thread(replica.end)


def change(step: int, number: int = 1, action: Any = "set", over: int = 0, **values: Any) -> ChangeSpec:
    return ChangeSpec(id=f"c{number}", number=number, step=step, action=action, values=values, over=over)


def promise(replica: Replica, wanted: ChangeSpec, commit: bool | None = True) -> None:
    """Propose a change as the link does, and tell the verdict."""
    life, boundary = replica.loom.incarnation, replica.loom._boundary
    assert boundary.propose(Propose(term=1, incarnation=life, job=JOB, change=wanted)).ok
    if commit is not None:
        boundary.hear(Verdict(term=1, incarnation=life, id=wanted.id, commit=commit))


async def answers(weaver: PlayedWeaver) -> list[tuple[str, Reply]]:
    """What ranks answer from now on, with their replica."""
    heard: list[tuple[str, Reply]] = []

    async def hear(message: Any) -> None:
        heard.append((message.subject.split(".")[3], decode_reply(message.data)))

    await weaver.client.subscribe(REPLY.pattern(), cb=hear)
    await weaver.client.flush()
    return heard


# ── who it is, and how far ──


async def test_a_replica_joins_under_the_id_that_torchft_gave_it(start: Start, weaver: PlayedWeaver) -> None:
    replica = await start("train_ddp_0")
    assert (replica.loom.job, replica.loom.replica, replica.loom.rank) == (JOB, "train_ddp_0", 0)
    said = await weaver.report(Joined)
    assert said.member == replica.manager._store.get("replica_id").decode()
    assert said.member.startswith("train_ddp_0:")
    assert said.version == version()


async def test_a_name_that_a_launcher_gave_stays(
    lighthouse: str, lively: Settings, weaver: PlayedWeaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHLOOM_REPLICA", "three")
    replica = await asyncio.to_thread(Replica, lighthouse, "train_ddp_0", lively)
    assert replica.loom.replica == "three"
    assert (await weaver.report(Joined)).member.startswith("train_ddp_0:")
    await asyncio.to_thread(replica.end)


async def test_a_weaver_that_asks_who_it_is_hears_its_id_again(start: Start, weaver: PlayedWeaver) -> None:
    replica = await start("a")
    await weaver.report(Joined)
    replica.loom._link.introduce()
    await weaver.report(Joined, 1)


async def test_the_ranks_of_a_replica_join_under_one_id_and_the_first_speaks_for_it(
    lighthouse: str, lively: Settings, weaver: PlayedWeaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "ranks", 2)
    first = await asyncio.to_thread(Replica, lighthouse, "a", lively)
    second = await asyncio.to_thread(Replica, lighthouse, "a", lively, first._store)
    assert [rank.loom.rank for rank in (first, second)] == [0, 1]
    for rank in (first, second):
        promise(rank, change(2, action="stop"))
    assert await asyncio.to_thread(together, first, second, fails=second) == [False, False]  # both or none
    for _ in range(2):
        assert await asyncio.to_thread(together, first, second) == [True, True]
    assert [await asyncio.to_thread(rank.do, lambda r=rank: r.loom.stopping) for rank in (first, second)] == [
        True,
        True,
    ]
    joined_as = {(await weaver.report(Joined, which)).member for which in (0, 1)}
    assert len(joined_as) == 1
    await asyncio.to_thread(first.end)
    await asyncio.to_thread(second.end)
    letters = await weaver.letters()
    assert {type(letter).__name__ for letter in letters if letter.incarnation == second.life} == {
        "Hello", "Knobs", "Joined", "Goodbye",
    }  # fmt: skip
    assert {"Regrouped", "Discarded"} <= {type(letter).__name__ for letter in letters}


async def test_steps_are_what_is_committed_and_beats_say_so(start: Start, weaver: PlayedWeaver) -> None:
    replica = await start("a")
    tried = [await asyncio.to_thread(replica.attempt, fail) for fail in (False, True, True, False, False)]
    assert tried == [True, False, False, True, True]
    await asyncio.to_thread(replica.do, lambda: replica.loom.step(loss=0.5))  # says how it went, and counts nothing
    beat = await weaver.beat(lambda beat: beat.step == 3 and beat.loss == 0.5)
    assert (beat.participants, beat.discarded) == (1, 2)
    assert beat.quorum == replica.manager._quorum_id
    regrouped = await weaver.report(Regrouped)
    assert (regrouped.quorum, regrouped.participants) == (1, 1)


@pytest.mark.long
async def test_discarded_steps_are_told_with_their_reason_and_not_one_by_one(
    start: Start, weaver: PlayedWeaver
) -> None:
    replica = await start("a")
    await asyncio.to_thread(replica.attempt)
    for _ in range(20):
        await asyncio.to_thread(replica.attempt, True)
    await asyncio.to_thread(replica.do, replica.loom.close)

    async def all_told() -> list[Discarded] | None:
        told = [report for report in await weaver.letters() if isinstance(report, Discarded)]
        return told if sum(report.count for report in told) == 20 else None

    told = await until(all_told, "all of them")
    assert told[0].step == 2
    assert "a bad gradient" in told[0].why
    assert len(told) < 20


async def test_a_checkpoint_that_the_script_loads_into_its_manager_moves_the_count(start: Start) -> None:
    replica = await start("a")
    replica.manager.load_state_dict({"step": 500, "batches_committed": 500})
    seen: list[int] = []
    await asyncio.wrap_future(replica.begin(meanwhile=lambda: seen.append(replica.loom.step_number)))
    assert [*seen, replica.loom.step_number] == [500, 501]


async def test_what_a_step_took_without_waiting_for_peers_is_known(start: Start, weaver: PlayedWeaver) -> None:
    replica = await start("a")

    async def known() -> bool:
        await asyncio.to_thread(replica.attempt)
        return any(beat.times and beat.times.own is not None for beat in weaver.beats)

    await until(known, "a beat that tells")


# ── a change takes effect at a committed step ──


async def test_a_change_waits_over_discarded_tries_and_is_taken_once(start: Start, weaver: PlayedWeaver) -> None:
    heard = await answers(weaver)
    replica = await start("a")
    turned: list[Any] = []
    replica.loom.knob("y", get=lambda: 0.0, set=turned.append, type="float")
    await asyncio.to_thread(replica.attempt)
    promise(replica, change(3, x=1.0, y=1.0))
    for fail in (True, False, True, True, False, True, True, False):  # steps 2, then 3, then 4
        await asyncio.to_thread(replica.attempt, fail)
    assert replica.values == {1: 0.0, 2: 0.0, 3: 0.0, 4: 1.0}
    assert turned == [1.0]

    async def applied() -> list[Reply] | None:
        return [reply for _, reply in heard if isinstance(reply, Applied)]

    assert [reply.step for reply in await until(applied, "the answer")] == [3]  # type: ignore[union-attr]


async def test_the_script_may_see_a_change_right_after_the_step(start: Start) -> None:
    replica = await start("a")
    promise(replica, change(1, x=1.0))
    promise(replica, change(2, 2, "stop"))
    seen = []
    for _ in range(2):
        await asyncio.to_thread(replica.attempt)
        seen.append((await asyncio.to_thread(replica.do, lambda: replica.loom.stopping), replica.x.value))
    assert seen == [(False, 1.0), (True, 1.0)]


async def test_another_thread_that_asks_whether_to_stop_changes_nothing(start: Start) -> None:
    replica = await start("a")
    promise(replica, change(1, x=1.0))
    await asyncio.to_thread(replica.attempt)
    assert not replica.loom.stopping
    assert replica.x.value == 0.0
    await asyncio.to_thread(replica.attempt)
    assert replica.x.value == 1.0


async def test_a_paused_replica_waits_before_it_asks_for_a_quorum(start: Start, weaver: PlayedWeaver) -> None:
    replica = await start("a")
    promise(replica, change(1, action="pause"))
    await asyncio.to_thread(replica.attempt)
    waiting = replica.begin()
    await weaver.beat(lambda beat: beat.paused and beat.step == 1)
    assert not waiting.done()
    replica.loom._boundary.set_paused(False)
    assert await asyncio.wrap_future(waiting)


# ── healing ──


async def test_a_replica_that_heals_has_the_values_in_force(start: Start, weaver: PlayedWeaver) -> None:
    heard = await answers(weaver)
    there = await start("a")
    promise(there, change(2, x=2.0))
    promise(there, change(3, 2, "pause"))
    promise(there, change(5, 3, x=10.0, over=1000))  # on its way when the newcomer comes
    for _ in range(3):
        await asyncio.to_thread(there.attempt)
    paused = there.begin()
    await weaver.beat(lambda beat: beat.paused)
    there.loom._boundary.set_paused(False)
    await asyncio.wrap_future(paused)
    for _ in range(3):
        await asyncio.to_thread(there.attempt)
    newcomer = await start("b")
    await asyncio.to_thread(joined, there, newcomer)
    healed = await weaver.report(Healed)
    assert healed.source == "a"
    assert healed.step == newcomer.manager.current_step() - 1
    assert newcomer.weight == there.weight
    for _ in range(3):
        await asyncio.to_thread(together, there, newcomer)
    assert newcomer.loom.step_number == there.loom.step_number
    assert not newcomer.loom._boundary.stopping
    last = there.manager.current_step()
    assert {step: newcomer.values[step] for step in range(last - 2, last + 1)} == {
        step: there.values[step] for step in range(last - 2, last + 1)
    }
    assert newcomer.values[last] > newcomer.values[last - 1] > 2.0  # the ramp goes on there as well
    assert newcomer.loom._boundary.participant.in_force == 3
    assert not [reply for replica, reply in heard if replica == "b"]  # it was asked nothing


@pytest.mark.long
async def test_a_replica_that_discards_the_step_of_a_change_takes_it_when_it_heals(
    start: Start, weaver: PlayedWeaver
) -> None:
    heard = await answers(weaver)
    there, other = await start("a"), await start("b")
    await asyncio.to_thread(together, there, other)
    step = there.manager.current_step() + 1
    for replica in (there, other):
        promise(replica, change(step, x=1.0))
        promise(replica, change(step + 2, 2, x=2.0), commit=None)  # no verdict yet
    assert await asyncio.to_thread(together, there, other, fails=other) == [True, False]
    assert other.loom.step_number == step - 1
    assert other.x.value == 0.0
    assert await asyncio.to_thread(together, there, other) == [True, True]
    assert (there.values[step + 1], other.values[step + 1]) == (1.0, 1.0)
    assert other.weight == there.weight

    async def both() -> object:
        return len([reply for _, reply in heard if isinstance(reply, Applied)]) == 2

    await until(both, "an answer of each")
    for replica in (there, other):  # the other change is still to come, on both
        replica.loom._boundary.hear(Verdict(term=1, incarnation=replica.loom.incarnation, id="c2", commit=True))
    await asyncio.to_thread(together, there, other)
    await asyncio.to_thread(together, there, other)
    assert (there.values[step + 3], other.values[step + 3]) == (2.0, 2.0)
    assert (there.values[step + 2], other.values[step + 2]) == (1.0, 1.0)


async def test_a_peer_without_torchloom_does_not_keep_a_replica_from_healing(
    start: Start, weaver: PlayedWeaver, caplog: pytest.LogCaptureFixture
) -> None:
    _warned.clear()
    plain = await start("plain", with_torchloom=False)
    await asyncio.to_thread(plain.attempt)
    await asyncio.to_thread(plain.attempt)
    newcomer = await start("b")
    with caplog.at_level(logging.WARNING, "torchloom"):
        await asyncio.to_thread(joined, plain, newcomer)
    assert "healed from a replica without torchLoom" in caplog.text
    healed = await weaver.report(Healed)
    assert (healed.source, newcomer.weight) == ("", plain.weight)
    assert newcomer.loom.step_number == plain.manager.current_step()


async def test_a_peer_without_torchloom_heals_from_a_replica_that_has_it(start: Start) -> None:
    there = await start("a")
    await asyncio.to_thread(there.attempt)
    plain = await start("plain", with_torchloom=False)
    await asyncio.to_thread(joined, there, plain)
    assert plain.weight == there.weight


# ── a quorum that lost a member ──


def broken(quorum: int) -> LighthouseBeat:
    return LighthouseBeat(incarnation="0" * 24, address="x", quorum=quorum, broken=(quorum,))


async def test_who_waits_for_one_that_gave_up_is_freed_when_the_quorum_is_broken(
    start: Start, weaver: PlayedWeaver, settings: Settings
) -> None:
    there, other = await start("a"), await start("b")
    await asyncio.to_thread(together, there, other)
    quorum = there.manager._quorum_id
    hold, inside = threading.Event(), threading.Event()

    def frozen() -> None:
        inside.set()
        hold.wait(60)

    stuck, waiting = other.begin(meanwhile=frozen), there.begin()
    await asyncio.to_thread(inside.wait, 60)
    lighthouse = await connect(find(settings, Role.THREADLET), name="a lighthouse")

    async def freed() -> bool:  # a lighthouse repeats itself: a rank may not have subscribed yet
        await lighthouse.publish(QUORUM.to(job=JOB), encode(broken(quorum)))
        return waiting.done()

    await until(freed, "the end of the wait")
    assert not waiting.result()
    hold.set()
    assert not await asyncio.wrap_future(stuck)
    again = await asyncio.to_thread(together, there, other)
    assert again == [True, True]  # the group of the next quorum was left alone
    assert there.manager._quorum_id > quorum
    told = [await weaver.report(Discarded, which) for which in (0, 1)]
    assert {report.quorum for report in told} == {quorum}
    assert not [report for report in told if "Timed out" in report.why]
    await lighthouse.close()


@pytest.mark.long
async def test_a_quorum_known_to_be_broken_is_not_begun(start: Start, weaver: PlayedWeaver) -> None:
    there, other = await start("a"), await start("b")
    for replica in (there, other):
        replica.loom._link.state.member.hear(broken(1))
    assert await asyncio.to_thread(together, there, other) == [False, False]
    assert there.manager._pg._pg is None  # nobody was connected to
    assert await asyncio.to_thread(together, there, other) == [True, True]
    assert "has lost a member" in (await weaver.report(Discarded)).why


# ── beginning and end ──


async def test_a_manager_is_as_it_was_when_its_threadlet_has_left(start: Start) -> None:
    replica = await start("a")
    await asyncio.to_thread(replica.attempt)
    manager = replica.manager
    assert {"start_quorum", "wait_quorum", "should_commit"} <= set(vars(manager))
    await asyncio.to_thread(replica.do, replica.loom.close)
    assert not {"start_quorum", "wait_quorum", "should_commit"} & set(vars(manager))
    assert "configure" not in vars(manager._pg)
    assert "recv_checkpoint" not in vars(manager._checkpoint_transport)
    assert await asyncio.to_thread(replica.attempt)


async def test_a_second_call_gives_the_same_threadlet(start: Start) -> None:
    import torchloom

    replica = await start("a")
    assert torchloom.attach_manager(replica.manager) is replica.loom


async def test_a_threadlet_attached_before_is_used(lighthouse: str, lively: Settings, weaver: PlayedWeaver) -> None:
    import torchloom

    loom = torchloom.attach(JOB, "mine", rank=0, settings=lively)
    replica = await asyncio.to_thread(Replica, lighthouse, "a", lively)
    assert replica.loom is loom
    await asyncio.to_thread(replica.attempt)
    assert loom.step_number == 1
    assert (await weaver.report(Joined)).member.startswith("a:")
    await asyncio.to_thread(replica.end)


async def test_switched_off_nothing_is_touched(lighthouse: str) -> None:
    replica = await asyncio.to_thread(Replica, lighthouse, "a", Settings(off=True))
    assert "start_quorum" not in vars(replica.manager)
    assert await asyncio.to_thread(replica.attempt)
    assert not replica.loom.stopping
    await asyncio.to_thread(replica.end)

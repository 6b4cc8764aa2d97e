"""Histories, repeated, late and reordered across senders, end in the same state; folding the log gives it again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.core.loom import Loom, a_hello, life
from tests.examples import examples
from torchloom.core.events import FactReceived, LinkClosed, LinkOpened, ReportReceived
from torchloom.core.state.cluster import ClusterState, State
from torchloom.protocol.facts import RankExited
from torchloom.protocol.ids import RankId
from torchloom.protocol.operator import Fail, Recover, Register
from torchloom.protocol.rank import Goodbye, Resumed, Saved, SaveFailed
from torchloom.settings import Settings

Event = Any
RANKS = [RankId("job", "a", 0), RankId("job", "a", 1), RankId("job", "b", 0)]


def _news(incarnation: str) -> list[Saved | SaveFailed | Resumed]:
    return [
        Saved(incarnation=incarnation, step=1, folder="/a", size=1, seconds=1.0),
        Saved(incarnation=incarnation, step=2, folder="/a", size=1, seconds=1.0),
        SaveFailed(incarnation=incarnation, step=3, folder="/a", why="full"),
        SaveFailed(incarnation=incarnation, step=4, folder="/a", why="read-only"),
        Resumed(incarnation=incarnation, step=1, path="/a/step-1", rejected={"step-2": "torn"}),
    ]


@st.composite
def senders(draw: st.DrawFn) -> list[list[Event]]:
    """One list for each sender, in the order it spoke: the rank's lives, the server, an agent."""
    result: list[list[Event]] = []
    server: list[Event] = []
    for rank in RANKS:
        for number in range(1, draw(st.integers(1, 3)) + 1):
            said: list[Event] = [
                ReportReceived(rank, a_hello(number, devices=(draw(st.sampled_from(["GPU-1", "GPU-2"])),)))
            ]
            said += [
                ReportReceived(rank, news) for news in draw(st.lists(st.sampled_from(_news(life(number))), max_size=3))
            ]
            links = draw(st.integers(1, 2))
            for link in range(links):
                server.append(LinkOpened(rank, life(number), f"{number}:{link}"))
                if link < links - 1 or draw(st.booleans()):
                    server.append(LinkClosed(rank, life(number), f"{number}:{link}", "Client Closed"))
            how = draw(st.sampled_from([None, "finished", "interrupted", "failed"]))
            if how:
                said.append(ReportReceived(rank, Goodbye(incarnation=life(number), how=how)))
            result.append(said)
            if draw(st.booleans()):
                exited = RankExited(
                    job=rank.job, replica=rank.replica, rank=rank.rank, incarnation=life(number), signal="SIGKILL"
                )
                result.append([ReportReceived(rank, a_hello(number)), FactReceived(exited)][1:])
    result.append(server)
    return result


def shuffled(histories: list[list[Event]], choose: Callable[[int], int]) -> list[Event]:
    """Any interleaving that keeps the order of each sender; some messages come twice, the second time late."""
    queues = [list(history) for history in histories]
    order: list[Event] = []
    while any(queues):
        candidates = [queue for queue in queues if queue]
        order.append(candidates[choose(len(candidates))].pop(0))
        again = order[choose(len(order))]
        if choose(4) == 0 and isinstance(
            again, ReportReceived
        ):  # a report may be read twice; the server repeats nothing
            order.append(again)
    return order


def membership(state: State) -> object:
    """Who is there, in which life and condition, and on what; not the history of how it was learnt."""
    return [(r.id, r.incarnation, r.presence, r.devices) for r in state.ranks], state.term


@examples(300)
@given(senders(), st.randoms(use_true_random=False), st.randoms(use_true_random=False))
def test_the_order_across_senders_does_not_matter(
    histories: list[list[Event]], one: random.Random, other: random.Random
) -> None:
    ends = []
    for chance in (one, other):
        loom = Loom()
        # An agent that saw an exit knew the rank: its word is held back until the rank has joined.
        pending = shuffled(histories, chance.randrange)
        late: list[Event] = []
        for event in pending:
            if isinstance(event, FactReceived) and not _joined(loom, event.fact):
                late.append(event)
            else:
                loom.happen(event)
        for event in late:
            loom.happen(event)
        loom.wait(10, heartbeat=tuple(r for r in loom.cluster.ranks if loom.presence(r) == "live"))
        ends.append((membership(loom.cluster.state()), list(loom.cluster.drmap)))
    assert ends[0] == ends[1]


def _joined(loom: Loom, fact: RankExited) -> bool:
    known = loom.cluster.ranks.get(RankId(fact.job, fact.replica, fact.rank))
    return known is not None and known.incarnation >= fact.incarnation


@examples(200)
@given(senders(), st.randoms(use_true_random=False), st.integers(0, 40))
def test_folding_the_log_gives_the_same_state_and_so_does_a_snapshot(
    histories: list[list[Event]], chance: random.Random, cut: int
) -> None:
    loom = Loom()
    extras = [Register(device="GPU-7", job="m", replica="r"), Fail(device="GPU-1"), Recover(device="GPU-1")]
    snapshot, snapshot_at = loom.cluster.state(), 0
    for number, event in enumerate(shuffled(histories, chance.randrange)):
        loom.happen(event)
        if number % 5 == 4:
            loom.ask(extras[chance.randrange(3)])
            loom.wait(chance.choice([0.25, 4.0]))
        if number == cut:
            snapshot, snapshot_at = loom.cluster.state(), len(loom.log)
    assert loom.restarted().cluster.state() == loom.cluster.state()
    cluster = ClusterState(Settings(), snapshot)
    cluster.restart_runtime(loom.now)
    for at, records in loom.log[snapshot_at:]:
        cluster.fold(records, at)
    assert cluster.state() == loom.cluster.state()
    assert list(cluster.drmap) == list(loom.cluster.drmap)

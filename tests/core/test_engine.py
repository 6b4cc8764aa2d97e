"""The engine: detect, then decide, then fold, and nothing beside the records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec
from msgspec.structs import replace

from tests.core.changes.made import A, B, a_job, a_set, a_steer, request, stand
from tests.core.incidents.test_findings import Training
from tests.core.loom import HI, Loom, life
from tests.core.site import JOB
from torchloom.core.decide import HANDLERS, decide
from torchloom.core.engine import Engine
from torchloom.core.events import BeatReceived, Event, JobDue, LinkClosed, RanksSilent, RequestReceived, RunDue
from torchloom.core.incidents.periodic_checks import SLICE
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runtime import RankRuntime
from torchloom.protocol.ids import RankId
from torchloom.protocol.lighthouse import LighthouseBeat
from torchloom.protocol.operator import Ask, Steer
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.protocol.records import About, IncidentOpened, MembersEvicted, RankForgotten, RankLost


def test_what_the_watch_detects_is_part_of_what_is_decided() -> None:
    """An agent's beat shows a frozen rank; handling the event that follows from it opens the incident."""
    site = Training()
    site.seen[1] = {"frozen": 5.0}
    site.look()
    (opened,) = (r for _, records in site.loom.log for r in records if isinstance(r, IncidentOpened))
    assert opened.about == About(rank=RankId(JOB, "main", 1), part="frozen")


def test_what_is_decided_holds_at_once() -> None:
    loom = Loom()
    loom.join()
    closed = LinkClosed(HI, life(1), "s:1", "Client Closed")
    loom.engine.hear_link(closed)
    decision = loom.engine.handle(closed, loom.now)
    assert any(isinstance(record, RankLost) for record in decision.stored)
    assert loom.presence() == "lost"
    assert loom.engine.hear(HI, Beat(incarnation=life(1), step=1), loom.now) is not None  # of a missing one: news


def test_an_ordinary_beat_needs_no_decision() -> None:
    loom = Loom()
    loom.join()
    assert loom.engine.hear(HI, Beat(incarnation=life(1), step=1), loom.now) is None
    stranger = Beat(incarnation=life(2), step=1)
    assert loom.engine.hear(HI, stranger, loom.now) == BeatReceived(HI, stranger)


def test_a_lighthouse_that_does_not_know_of_an_eviction_is_told_once_a_second() -> None:
    engine = Engine(ClusterState(Loom().cluster.settings))
    engine.cluster.fold((MembersEvicted(job=JOB, members=("m",), reason="gone"),), 0.0)
    beat = LighthouseBeat(incarnation=life(1), address="a:1")
    heard = [engine.hear_lighthouse(JOB, beat, now) is not None for now in (0.0, 0.1, 0.2, 1.5, 1.6)]
    assert heard == [True, True, False, True, False]  # the first is news, which it is anyway


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked() -> list[tuple[Loom, RequestReceived]]:
    """What begins something that is not stored, and what only joins it."""
    found = []
    for ask in (a_set(), a_steer("pause"), a_steer("stacks")):
        found.append((a_job(), RequestReceived(ask, "to1")))
        loom = a_job()
        loom.ask(ask, "to1")
        found.append((loom, RequestReceived(ask, "to2")))
    return found


def test_what_is_decided_cannot_be_changed_afterwards() -> None:
    for loom, event in asked():
        decision = decide(loom.cluster, event, loom.now)
        assert decision.records
        for record in decision.records:
            assert record.__struct_config__.frozen
            values = [getattr(record, name) for name in record.__struct_fields__]
            assert not any(isinstance(value, dict | list | set) for value in values), record


def test_to_decide_changes_nothing_and_to_fold_does() -> None:
    for loom, event in asked():
        before = loom.cluster.state(), repr(loom.cluster.runtime.operations)
        decision = decide(loom.cluster, event, loom.now)
        assert (loom.cluster.state(), repr(loom.cluster.runtime.operations)) == before
        loom.cluster.fold(decision.records, loom.now)
        assert (loom.cluster.state(), repr(loom.cluster.runtime.operations)) != before


def test_one_decision_folded_twice_gives_two_courses() -> None:
    one, other = a_job(), a_job()
    decision = decide(one.cluster, RequestReceived(a_set(), "to1"), one.now)
    for loom in (one, other):
        loom.cluster.fold(decision.records, loom.now)
    stand(one, ranks=(A,))
    assert set(one.cluster.runtime.operations.by_request[request(1)].step_reports) == {A}
    assert not other.cluster.runtime.operations.by_request[request(1)].step_reports


def test_what_a_restarted_weaver_does_without_is_folded_but_not_stored() -> None:
    loom = a_job()
    before = len(loom.log)
    decision = loom.ask(a_set(), "to1")
    assert decision.records
    assert not decision.stored
    assert loom.cluster.runtime.operations.by_request[request(1)].waiters == ["to1"]
    loom.ask(a_set(), "to2")
    assert loom.cluster.runtime.operations.by_request[request(1)].waiters == ["to1", "to2"]
    assert len(loom.log) == before
    stand(loom, ranks=(A, B))
    assert msgspec.msgpack.encode(loom.log[-1][1])  # a proposal is


def test_whoever_gives_an_order_waits_for_its_end() -> None:
    loom = a_job()
    ask: Steer = a_steer("stacks")
    decision = loom.ask(ask, "to1")
    assert [type(record).__name__ for record in decision.stored] == ["OrderGiven"]
    assert loom.cluster.runtime.operations.by_request[ask.request].waiters == ["to1"]


# ── slices ───────────────────────────────────────────────────────────────────────────────────────────────────────────

LARGE = 2 * SLICE + 20
BEAT = Beat(incarnation=life(1), step=100, times=StepTimes(count=50, p50=0.02, p99=0.025, longest=0.03))


def a_fleet(**jobs: int) -> tuple[Loom, list[RankId]]:
    """Jobs with so many ranks each, all of which train."""
    loom = Loom()
    ranks = [RankId(job, "r", number) for job, count in jobs.items() for number in range(count)]
    for rank in ranks:
        loom.join(rank, world_size=jobs[rank.job])
    for step in range(1, 10):
        train(loom, ranks, step)
    return loom, ranks


def train(loom: Loom, ranks: Iterable[RankId], step: int) -> None:
    loom.now += 1
    for rank in ranks:
        assert loom.engine.hear(rank, replace(BEAT, step=50 * step), loom.now) is None


class Counted(dict[RankId, RankRuntime]):
    """Who was looked at."""

    def __init__(self, ranks: dict[RankId, RankRuntime]) -> None:
        super().__init__(ranks)
        self.looked: list[RankId] = []

    def __getitem__(self, rank: RankId) -> RankRuntime:
        self.looked.append(rank)
        return super().__getitem__(rank)

    def get(self, rank: RankId, default: RankRuntime | None = None) -> RankRuntime | None:  # type: ignore[override]
        self.looked.append(rank)
        return super().get(rank, default)


def test_a_pass_looks_at_every_rank_and_a_slice_of_it_at_few() -> None:
    loom, ranks = a_fleet(small=3, large=LARGE, other=1)
    ranks = loom.cluster.runtime.ranks = Counted(loom.cluster.runtime.ranks)
    seen: set[RankId] = set()
    for _ in loom.engine.check_ranks(loom.now):
        assert len(set(ranks.looked)) <= SLICE
        seen.update(ranks.looked)
        ranks.looked.clear()
    assert seen == set(ranks)


def test_small_jobs_share_a_slice() -> None:
    loom, _ = a_fleet(**{f"job{number}": 1 for number in range(20)})
    slices = list(loom.engine.check_ranks(loom.now))
    assert len(slices) == 2  # the second has what was found out about the last job
    assert {event.job for events in slices for event in events if isinstance(event, JobDue)} == set(loom.cluster.jobs)


def places(loom: Loom) -> tuple[RankId, RankId, RankId, RankId]:
    """At both sides of a border between two slices, and at both ends."""
    order = tuple(loom.cluster.ranks.ids_of("large"))
    return order[0], order[SLICE - 1], order[SLICE], order[-1]


def test_a_silent_rank_is_found_in_whichever_slice_it_is() -> None:
    loom, ranks = a_fleet(large=LARGE)
    silent = set(places(loom))
    for step in range(10, 18):
        train(loom, [rank for rank in ranks if rank not in silent], step)
    assert {rank for rank in ranks if loom.presence(rank) == "lost"} == set()
    loom.look()
    assert {rank for rank in ranks if loom.presence(rank) == "lost"} == silent


def test_a_rank_that_hangs_is_found_in_whichever_slice_it_is() -> None:
    for place in range(4):
        loom, ranks = a_fleet(large=LARGE)
        culprit = places(loom)[place]
        for second in range(1, 9):
            loom.now += 1
            for rank in ranks:
                step = 450 if rank == culprit else 451
                loom.engine.hear(rank, Beat(incarnation=life(1), step=step, idle_seconds=float(second)), loom.now)
            loom.look()
        (incident,) = loom.cluster.incidents.values()
        assert incident.about == About(rank=culprit, part="hang")


def test_who_is_heard_before_its_silence_is_handled_is_not_lost() -> None:
    loom, ranks = a_fleet(job=2)
    for step in range(10, 18):
        train(loom, ranks[:1], step)
    (silent,) = (e for events in loom.engine.check_ranks(loom.now) for e in events if isinstance(e, RanksSilent))
    assert silent.ranks == (ranks[1],)
    loom.engine.hear(ranks[1], BEAT, loom.now)
    assert not loom.engine.handle(silent, loom.now)


def test_ranks_may_come_and_go_between_two_slices() -> None:
    loom, ranks = a_fleet(large=LARGE, other=3)
    slices = loom.engine.check_ranks(loom.now)
    next(slices)
    loom.cluster.fold([RankForgotten(rank=rank) for rank in ranks if rank.job == "other"], loom.now)
    loom.cluster.fold([RankForgotten(rank=rank) for rank in places(loom)], loom.now)
    loom.join(RankId("new", "r", 0))
    events = [event for events in slices for event in events]
    assert [event.job for event in events if isinstance(event, JobDue)] == ["large"]


def test_a_pass_leaves_the_hangs_of_runs_to_their_agents() -> None:
    """One rank hangs while the other goes on, which must be seen for a while; a pass in between changes nothing."""
    site = Training()
    stuck = site.step
    going, hanging = (place.incarnation for place in site.run.places)
    for seconds in range(1, 30):
        site.step += 500
        site.loom.happen(BeatReceived(RankId(JOB, "main", 0), replace(BEAT, incarnation=going, step=site.step)))
        beat = Beat(incarnation=hanging, step=stuck, idle_seconds=float(seconds))
        site.loom.happen(BeatReceived(RankId(JOB, "main", 1), beat))
        site.seen[1] = {"step": stuck, "idle_seconds": float(seconds)}
        site.loom.look()
        site.look()
    assert [i.about for i in site.loom.cluster.incidents.values()] == [About(rank=RankId(JOB, "main", 1), part="hang")]


def test_a_run_that_waits_to_be_handled_is_not_made_due_again() -> None:
    """All agents of a run beat each second, and each time all of its ranks are looked at."""
    site = Training(("n1", "n2"), nodes=2)
    due = [event for node in ("n1", "n2") for event in news_of(site, node) if isinstance(event, RunDue)]
    assert due == [RunDue(JOB)]
    site.loom.happen(due[0])
    assert RunDue(JOB) in news_of(site, "n1")


def news_of(site: Training, node: str) -> tuple[Event, ...]:
    site.loom.now += 1
    for key, status in site.agents[node].attempts.items():
        moved = tuple(replace(rank, step=int(site.loom.now)) for rank in status.ranks)
        site.agents[node].attempts[key] = replace(status, ranks=moved)
    return site.loom.engine.hear_node(node, site.agents[node].beat(), site.loom.now)


def test_every_request_has_a_handler() -> None:
    assert set(HANDLERS) == set(get_args(Ask))

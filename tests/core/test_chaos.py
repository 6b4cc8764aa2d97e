"""Everything goes wrong at once: what must always hold still does (chaos.py); and what long storms have shown."""

from __future__ import annotations

import pytest

from tests.core.chaos import Chaos
from tests.core.incidents.test_findings import TIMES, Training
from tests.core.incidents.test_responses import Saving, find, rule
from tests.core.loom import Loom
from tests.core.site import JOB, Site
from torchloom.core.decide import decide
from torchloom.core.detect.detector import Finding
from torchloom.core.events import BeatReceived, Tick
from torchloom.core.incidents.periodic_checks import hang_of_run
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.rank import Beat, ChangeSpec
from torchloom.protocol.records import About, IncidentOpened
from torchloom.protocol.run_records import ResponseBegan

EVENTS = 25_000


@pytest.mark.parametrize("seed", [17, 2])
def test_whatever_happens_incidents_and_responses_keep_their_rules(seed: int) -> None:
    world = Chaos(seed)
    assert world.play(EVENTS) == []
    for kind in ("frozen", "held", "hang", "straggler", "not_finite", "device"):
        assert world.seen[f"response to {kind}"] or seed != 17, f"a storm without a response to {kind} shows little"


# ── what storms have shown ───────────────────────────────────────────────────────────────────────────────────────────


def opened(loom: Loom) -> list[tuple[str, About]]:
    return [(r.id, r.about) for _, records in loom.log for r in records if isinstance(r, IncidentOpened)]


def stopping_beside_another() -> tuple[Site, RankId]:
    """A run whose ranks are being ended, and a rank of another job after them."""
    site = Site("n1")
    site.submit()
    site.settle()
    site.join()
    site.agents["n1"].stubborn = True
    site.agents["n1"].end(0, signal="SIGKILL")
    site.hear()
    assert site.phase == "stopping"
    other = RankId("zz", "r", 0)
    site.loom.join(other)
    return site, other


def test_ranks_that_fall_silent_at_once_get_incidents_with_numbers_of_their_own() -> None:
    """Of one that is being ended with its peers nothing is told, and the next one had the number after its."""
    site, other = stopping_beside_another()
    site.loom.now += 10
    site.loom.happen(Tick())
    assert opened(site.loom)[1:] == [("i2", About(rank=other))]


def test_ranks_that_do_not_answer_the_roll_call_get_incidents_with_numbers_of_their_own() -> None:
    site, other = stopping_beside_another()
    site.loom.call_roll()
    assert opened(site.loom)[1:] == [("i2", About(rank=other))]


def test_a_beat_that_shows_two_things_opens_two_incidents() -> None:
    site = Training()
    rank, life = RankId(JOB, "main", 1), site.run.places[1].incarnation
    rank_runtime = site.loom.cluster.runtime.ranks[rank]
    rank_runtime.missed, rank_runtime.astray = ChangeSpec(id="c9", number=9, step=1, values={}, action="set"), 2
    beat = Beat(incarnation=life, step=site.step)
    found = (Finding("not_finite", "loss is NaN"),)
    decision = decide(site.loom.cluster, BeatReceived(rank, beat, found), site.loom.now)
    ids = [record.id for record in decision.records if isinstance(record, IncidentOpened)]
    assert len(ids) == len(set(ids)) == 2


def test_agreeing_with_its_peers_again_closes_nothing_else_about_a_rank() -> None:
    site = Training()
    find(site, "straggler", "is slow")
    rank, life = RankId(JOB, "main", 1), site.run.places[1].incarnation
    site.loom.cluster.runtime.ranks[rank].mended = True
    decision = decide(site.loom.cluster, BeatReceived(rank, Beat(incarnation=life, step=site.step)), site.loom.now)
    assert decision.records == ()


def test_trouble_that_is_over_before_the_checkpoint_came_ends_no_rank() -> None:
    site = Saving(policy=(rule("straggler", "checkpoint", "restart"),))
    find(site, "straggler", "is slow")
    site.train(2)
    find(site, "straggler", "as fast as its peers again", over=True)
    for _ in range(10):
        site.answer()
        site.look()
    assert site.run.response is None
    assert site.run.attempt == 1
    (incident,) = site.loom.cluster.incidents.values()
    assert incident.history[-1][1] == phrase("response_undone", do=("checkpoint", "restart"))


def test_a_hang_that_is_over_before_the_checkpoint_came_ends_no_rank() -> None:
    site = Saving(policy=(rule("hang", "checkpoint", "restart", after=5.0),))
    site.stand(8, rank=0)
    assert len(site.records(ResponseBegan)) == 1
    site.train(3)
    for _ in range(10):
        site.answer()
        site.train(1)
    assert site.run.attempt == 1
    assert site.loom.open_incidents() == []


def test_a_new_weaver_does_not_take_what_it_has_not_seen_yet_for_the_end_of_a_hang() -> None:
    site = Training()
    site.stand(10, rank=0)
    (known,) = site.loom.cluster.incidents
    site.restart_weaver()
    site.loom.cluster.runtime.blind_until = -1e9
    for passed in range(11, 17):
        site.beat_step(site.step, None, idle_seconds=float(passed))
        site.seen = {rank: {"idle_seconds": float(passed)} for rank in (0, 1)}
        site.look()
    site.seen = {}
    assert site.loom.cluster.incidents[known].closed is None
    assert len(site.loom.cluster.incidents) == 1
    site.train(4)
    outcome = site.loom.cluster.incidents[known].outcome
    assert isinstance(outcome, Phrase)
    assert outcome.code == "went_on_by_itself"


def test_an_attempt_that_fails_before_it_runs_is_told_in_place_of_the_one_before() -> None:
    site = Site("n1", "n2")
    site.agents["n2"].deaf = True
    site.submit(node=None)
    site.settle()
    assert site.run.nodes == ("n1",)
    for node in ("n1", "n2"):  # where it runs, and then where it is to run
        site.silent.add(node)
        site.settle(60)
    told = [i for i in site.loom.cluster.incidents.values() if i.about == About(run=JOB)]
    assert len(told) == 2
    assert [i.closed is None for i in told] == [False, True]
    assert isinstance(told[0].outcome, Phrase)
    assert told[0].outcome.code == "next_attempt_failed"


# ── what real ranks have shown ───────────────────────────────────────────────────────────────────────────────────────


def test_what_a_rank_said_it_was_doing_is_over_once_its_agent_sees_it_train() -> None:
    """Its last beat told of a checkpoint, and then it held its interpreter and said no more."""
    site = Training()
    site.beat_step(site.step, None, phase="checkpoint")
    site.seen = {1: {"held": 1.5, "idle_seconds": 1.5}}
    site.look()
    found = hang_of_run(site.loom.cluster, JOB, site.loom.now)
    assert found is not None
    assert (found.kind, found.culprits) == ("held", (1,))
    assert found.act_after == site.loom.cluster.settings.held_act_seconds


def test_a_silent_rank_that_is_presumed_dead_is_alive_if_its_agent_sees_it_run() -> None:
    site = Training()
    for passed in range(1, 50):
        beat = Beat(incarnation=site.run.places[0].incarnation, step=site.step, idle_seconds=float(passed))
        site.loom.happen(BeatReceived(RankId(JOB, "main", 0), beat))
        site.seen = {1: {"held": float(passed), "idle_seconds": float(passed), "computes": True}}
        site.loom.happen(Tick())
        site.look()
    assert site.loom.presence(RankId(JOB, "main", 1)) == "dead"
    found = hang_of_run(site.loom.cluster, JOB, site.loom.now)
    assert found is not None
    assert (found.kind, found.culprits) == ("held", (1,))


def test_memory_that_creeps_up_towards_what_the_machine_has_is_told_of_the_rank_that_takes_it() -> None:
    site = Training()
    for second in range(60):
        site.step += 50
        for place in site.run.places:
            mb = 500.0 + 60.0 * second * place.rank
            left = 8_000.0 - 60.0 * second
            beat = Beat(incarnation=place.incarnation, step=site.step, times=TIMES, rss_mb=mb, free_mb=left)
            site.loom.happen(BeatReceived(RankId(JOB, "main", place.rank), beat))
        site.loom.look()
        site.look()
    assert [i.about for i in site.loom.cluster.incidents.values()] == [
        About(rank=RankId(JOB, "main", 1), part="memory")
    ]
    assert site.run.attempt == 1

"""A rollback from the finding to the ranks of the next attempt: how far back, and what they leave out."""

from __future__ import annotations

from tests.core.site import JOB, Site
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.events import BeatReceived, ReportReceived
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Rule
from torchloom.protocol.node import Rollback
from torchloom.protocol.rank import Beat, Saved, StepTimes
from torchloom.settings import Settings

SKIPPING = (Rule(on="not_finite", do=("rollback",), skip=True),)
RANK = RankId(JOB, "main", 0)


def started(*policy: Rule) -> Site:
    site = Site("n1", "n2")
    site.submit(policy=policy)
    site.settle()
    site.join()
    return site


def saves(site: Site, step: int, folder: str = "runs/a") -> None:
    life = site.run.places[0].incarnation
    site.loom.happen(ReportReceived(RANK, Saved(incarnation=life, step=step, folder=folder, size=1, seconds=1.0)))


def goes_bad(site: Site, step: int, since: int | None = None) -> None:
    life = site.run.places[0].incarnation
    if since is not None:
        times = StepTimes(count=10, p50=0.1, p99=0.1, longest=0.1)
        site.tell(site.loom.happen(BeatReceived(RANK, Beat(incarnation=life, step=since - 1, loss=1.0, times=times))))
    site.tell(site.loom.happen(BeatReceived(RANK, Beat(incarnation=life, step=step, not_finite=("loss",)))))


def asked(site: Site) -> list[Rollback | None]:
    return [order.rollback for agent in site.agents.values() for order in agent.prepares]


def skips(site: Site) -> list[tuple[int, int] | None]:
    return [order.skip for agent in site.agents.values() for order in agent.launches]


def test_a_checkpoint_of_the_step_before_the_first_bad_loss_is_not_trusted() -> None:
    """The gradients of that step, or a bad loss of another rank, may have spoilt what it contains."""
    site = started(*SKIPPING)
    saves(site, 100)
    goes_bad(site, 101, since=101)
    site.settle(3)
    back = asked(site)[-1]
    assert back is not None
    assert (back.before, back.saved) == (100, False)


def test_the_next_attempt_goes_back_to_before_the_first_step_that_may_be_bad_and_leaves_those_out() -> None:
    site = started(*SKIPPING)
    saves(site, 90)
    goes_bad(site, 104, since=101)
    site.settle(3)
    assert site.phase == "running"
    back = asked(site)[-1]
    assert back is not None
    assert (back.before, back.back, back.skip, back.folder, back.saved) == (100, 1, (100, 104), "runs/a", True)
    assert back.incident in site.loom.cluster.incidents
    assert skips(site) == [None, (100, 104)]


def test_a_later_crash_goes_back_no_further_and_still_leaves_them_out() -> None:
    site = started(*SKIPPING)
    goes_bad(site, 104)
    site.settle(3)
    site.agents[site.run.nodes[0]].end(0, signal="SIGKILL")
    site.settle(3)
    assert [back is not None for back in asked(site)] == [False, True, False]
    assert skips(site)[-1] == (103, 104)


def test_an_attempt_that_was_not_started_hands_the_rollback_on_as_the_same() -> None:
    site = started(*SKIPPING)
    goes_bad(site, 104)
    site.agents["n1"].deaf = True
    site.settle(1)
    assert (site.phase, site.run.nodes) == ("placing", ("n1",))
    wanted = site.run.rollback
    site.silent.add("n1")
    site.settle(site.loom.cluster.settings.node_patience_seconds + 40)
    assert (site.phase, site.run.nodes) == ("running", ("n2",))
    assert [order.rollback for order in site.agents["n2"].prepares] == [wanted]
    assert wanted is not None


def test_what_was_saved_by_an_earlier_run_does_not_count() -> None:
    site = started(*SKIPPING)
    saves(site, 90)
    for rank in range(2):
        site.agents[site.run.nodes[0]].end(rank, code=0)
    site.settle(1)
    assert site.phase == "done"
    site.loom.now += 100
    site.submit(2, policy=SKIPPING)
    site.settle()
    site.join()
    goes_bad(site, 95)
    site.settle(3)
    back = asked(site)[-1]
    assert back is not None
    assert not back.saved


def test_a_rule_says_how_far_back_and_without_skip_nothing_is_left_out() -> None:
    site = started(Rule(on="not_finite", do=("rollback",), back=3))
    goes_bad(site, 104)
    site.settle(3)
    back = asked(site)[-1]
    assert back is not None
    assert (back.back, back.skip) == (3, None)
    assert skips(site) == [None, None]


def beat(step: int, loss: float | None = 1.0, p50: float = 0.1, bad: bool = False) -> Beat:
    times = StepTimes(count=10, p50=p50, p99=p50, longest=p50)
    return Beat(incarnation="1" * 24, step=step, times=times, loss=loss, not_finite=("loss",) if bad else ())


def since(*beats: Beat) -> list[tuple[int | None, int]]:
    detectors = RankDetectors(Settings())
    return [(found.since, found.step) for one in beats for found in detectors.hear(one, 0.0)]


def test_the_first_step_that_may_be_bad_is_the_one_after_the_last_that_was_well() -> None:
    unread = beat(110, loss=None)  # not in time: nothing is known of it
    assert since(beat(100), unread, beat(120, loss=None, bad=True)) == [(101, 120)]


def test_where_steps_are_short_the_loss_of_a_beat_may_be_older_than_its_step() -> None:
    assert since(beat(100, p50=0.002), beat(600, loss=None, bad=True)) == [(91, 600)]


def test_a_rank_that_is_ill_from_its_first_beat_is_so_since_it_began() -> None:
    assert since(beat(8, loss=None, bad=True)) == [(1, 8)]

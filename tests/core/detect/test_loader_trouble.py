"""Loader processes that die or hang become incidents, one for each trouble of a rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.loom import Loom, life
from torchloom.core.detect.kinds_and_responses import KINDS
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.core.events import BeatReceived
from torchloom.protocol.data_loading import LoaderTrouble, Loading
from torchloom.protocol.ids import RankId
from torchloom.protocol.phrase import Phrase
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

DIED = LoaderTrouble(what="died", loader=1, pid=77, status=-9, indices="[3, 4]")
HUNG = LoaderTrouble(what="hung", loader=0, pid=78, seconds=40.0, stack='File "data.py", line 3 in __getitem__')


def loading(trouble: LoaderTrouble | None = None, deaths: int = 0, **about: Any) -> Loading:
    stages: dict[str, Any] = {
        "wait": 0.01,
        "use": 0.1,
        "read": 0.02,
        "decode": 0.05,
        "collate": 0.001,
        "transfer": 0.002,
    } | about
    return Loading(loaders=2, batches=10, ready=1.0, mb=3.0, deaths=deaths, trouble=trouble, **stages)


def beat(step: int, told: Loading | None, data: float | None = None) -> Beat:
    times = StepTimes(count=10, p50=0.1, p99=0.1, longest=0.1, data=data)
    return Beat(incarnation=life(1), step=step, loading=told, times=times)


def heard(*told: Loading | None) -> list[tuple[str, bool]]:
    detectors = RankDetectors(Settings())
    found = [finding for step, each in enumerate(told) for finding in detectors.hear(beat(step, each), float(step))]
    return [(finding.kind, finding.over) for finding in found]


def test_a_death_is_one_incident_until_no_process_has_died_for_a_while() -> None:
    assert heard(
        loading(), loading(DIED, 1), loading(DIED, 2), loading(DIED, 3), loading(None, 3), loading(None, 3)
    ) == [
        ("loader_died", False),
        ("loader_died", True),
    ]


def test_a_process_that_hangs_and_then_dies() -> None:
    assert heard(loading(HUNG), loading(HUNG), loading(DIED, 1), loading(None, 1)) == [
        ("loader_hung", False),
        ("loader_hung", True),
        ("loader_died", False),
        ("loader_died", True),
    ]


def test_a_process_that_hung_and_was_killed_did_not_go_on() -> None:
    detectors = RankDetectors(Settings())
    detectors.hear(beat(1, loading(HUNG)), 1.0)
    ended, _ = detectors.hear(beat(2, loading(DIED, 1)), 2.0)
    assert isinstance(ended.what, Phrase)
    assert ended.what.code == "loaders_replaced"
    detectors = RankDetectors(Settings())
    detectors.hear(beat(1, loading(HUNG)), 1.0)
    (ended,) = detectors.hear(beat(2, loading()), 2.0)
    assert isinstance(ended.what, Phrase)
    assert ended.what.code == "loader_goes_on"


def test_a_rank_that_makes_no_steps_is_heard() -> None:
    detectors = RankDetectors(Settings())
    (finding,) = detectors.hear(Beat(incarnation=life(1), step=3, loading=loading(HUNG)), 0.0)
    assert finding.kind == "loader_hung"
    assert finding.evidence == (HUNG.stack,)


def test_the_incident_names_the_process_and_what_it_was_loading() -> None:
    loom = Loom()
    rank = RankId("mnist", "r", 0)
    loom.join(rank)
    loom.happen(BeatReceived(rank, beat(3, loading(DIED, 1))))
    (incident,) = loom.cluster.incidents.values()
    assert incident.kind == "loader_died"
    assert incident.culprits == (0,)
    codes = [each.code for each in incident.evidence if isinstance(each, Phrase)]
    assert codes == ["loader_had", "loaders_lost"]
    loom.happen(BeatReceived(rank, beat(4, loading(None, 1))))
    assert [incident.closed is None for incident in loom.cluster.incidents.values()] == [False]


@pytest.mark.parametrize("trouble", [None, DIED])
def test_starvation_names_the_slowest_stage(trouble: LoaderTrouble | None) -> None:
    detectors = RankDetectors(Settings())
    found: list[Any] = []
    for step in range(200):
        found += detectors.hear(beat(step, loading(trouble), data=0.09), float(step))
    (finding,) = [finding for finding in found if finding.kind == "starved"]
    stages = finding.evidence[1]
    assert stages.code == "slowest_stage"
    assert (stages.args["stage"], stages.args["loaders"]) == ("decode", 2)


def test_both_kinds_are_reported_and_nothing_is_restarted() -> None:
    assert [KINDS[kind].do for kind in ("loader_died", "loader_hung")] == [("report",), ("report",)]

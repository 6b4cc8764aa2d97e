"""Loader scheduling as text and picture: jobs, nodes, objectives, decisions, and the curve of a job."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from tests.views.samples import NOW
from torchloom.protocol.scheduling import (
    JobStanding,
    LoaderMove,
    LoadersAllocated,
    NodeBudget,
    ObjectiveName,
    PastAllocation,
    PolicyName,
    PredictionView,
    ScheduledJob,
    ScheduleRules,
    ScheduleScores,
    ScheduleView,
    Throughput,
    Trigger,
)
from torchloom.views.format.numbers import clock
from torchloom.views.format.tables import Screen
from torchloom.views.schedule_tables import OBJECTIVES, POLICIES, STANDINGS, TRIGGERS, predicted, schedule
from torchloom.views.throughput_picture import picture, tick_step
from torchloom.views.throughput_tables import bar, describe, prediction

SVG = "{http://www.w3.org/2000/svg}"


def throughput(loaders: int, predicted: float, error: float, measured: float | None = None) -> Throughput:
    return Throughput(loaders=loaders, predicted=predicted, error=error, measured=measured, share=predicted / 400)


def job(name: str = "hungry", **more: Any) -> ScheduledJob:
    values: dict[str, Any] = {"standing": "scheduled", "ranks": {"n1": 1}, "loaders": 3, "requested": 3, "least": 1}
    values["now"] = throughput(3, 148.4, 4.3, 150.2)
    return ScheduledJob(job=name, **values | more)


def view(policy: PolicyName = "ours", *jobs: ScheduledJob, **more: Any) -> ScheduleView:
    nodes = (NodeBudget(node="n1", budget=9, used=7), NodeBudget(node="n2", budget=None, used=4))
    return ScheduleView(rules=ScheduleRules(policy=policy), now=NOW, **{"jobs": jobs, "nodes": nodes} | more)


def test_jobs_nodes_objectives_and_decisions_are_tables() -> None:
    hungry = job(target=7, ranks={"n1": 1, "n2": 1}, requested=4)
    light = job("light", loaders=1, standing="pinned", weight=2.0, now=throughput(1, 388.0, 0.04))
    plain = job("plain", standing="no_loaders", loaders=None, requested=None, now=None)
    record = LoadersAllocated(
        policy="ours",
        triggers=("arrival", "drift"),
        moves=(LoaderMove(job="hungry", before=3, loaders=7),),
        gain=0.254,
        about=("light",),
    )
    shown = schedule(
        view(
            "ours",
            hungry,
            light,
            plain,
            scores=ScheduleScores(share=1.341, samples=536.4, log=-0.001, makespan=63.0),
            past=(PastAllocation(at=NOW, record=record),),
        ),
        Screen(80),
    )
    assert shown == [
        "policy ours: each loader goes to the job that gains most by it",
        "objective share: speeds of all jobs as parts of their best, added up",
        "",
        "JOB     RANKS  LOADERS  REQUESTED  SAMPLES/S  PREDICTED  OF BEST  STANDING",
        "hungry      2    3 → 7          4        150     148 ±4     37 %  scheduled",
        "light       1        1          3          -  388 ±0.04     97 %  pinned",
        "plain       1        -          -          -          -        -  no loaders",
        "pinned: its loaders are set by an operator, and stay until `loom revert`",
        "no loaders: it has no ElasticLoader, and is left alone",
        "",
        "NODE  USED/BUDGET  SET BY  LOADERS OF",
        "n1         7 of 9  agent   hungry 3, light 1",
        "n2         4 of ?  -       hungry 3",
        "",
        "OBJECTIVE      PREDICTED  MEANING",
        "share          1.34 of 3  speeds of all jobs as parts of their best, added up",
        "samples    536 samples/s  samples/s of all jobs, added up",
        "log                 0.00  logarithms of those parts, added up: no job starves",
        "makespan       1 min 3 s  time until the last job has ended",
        "",
        "ALLOCATED   GAIN  LOADERS OF EACH RANK  AFTER",
        f"{clock(NOW, NOW)}   +25 %  hungry 3 → 7          start and measurements of light",
    ]


def test_with_the_policy_off_it_says_so_and_what_ours_would_do() -> None:
    shown = schedule(view("off", job(ours=7), job("light", ours=3)), Screen(80))
    assert shown[0].startswith("policy off: nothing is moved")
    assert shown[2].split()[:4] == ["JOB", "RANKS", "LOADERS", "OURS"]
    assert [line.split()[2:4] for line in shown[3:5]] == [["3", "7"], ["3", "3"]]
    assert shown[-1] == "→ `loom schedule --policy ours` lets torchLoom move loaders"
    assert "loom schedule" not in schedule(view("off", nodes=()), Screen(80))[-1], "no job could be moved"


@pytest.mark.parametrize("policy", get_args(PolicyName))
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(policy: PolicyName, width: int) -> None:
    standings = [job(f"job-{name}" * 3, standing=name, ours=12) for name in get_args(JobStanding)]
    for line in schedule(view(policy, *standings), Screen(width)):
        assert len(line) <= width, line
    curve = tuple(throughput(n, 40.0 * n, 10.0, 41.0 * n) for n in range(10))
    drawn = prediction(PredictionView(job=job(), curve=curve, rate=40.0, ceiling=400.0), Screen(max(width, 60)))
    assert max(map(len, drawn)) <= max(width, 60)


def test_each_policy_objective_standing_and_trigger_is_explained() -> None:
    assert POLICIES.keys() == set(get_args(PolicyName))
    assert OBJECTIVES.keys() == set(get_args(ObjectiveName))
    assert STANDINGS.keys() == set(get_args(JobStanding))
    assert TRIGGERS.keys() == set(get_args(Trigger))


@pytest.mark.parametrize(
    ("rate", "error", "text"),
    [
        (317.2, 7.98, "317 ±8"),
        (49.66, 0.287, "49.7 ±0.3"),
        (388.0, 0.04, "388 ±0.04"),
        (12_345.0, 1_234.4, "12,345 ±1,234"),
    ],
)
def test_an_error_has_the_places_of_its_number(rate: float, error: float, text: str) -> None:
    assert predicted(throughput(1, rate, error)) == text


# ── the curve ──


def curve(loaders: int = 2, **more: Any) -> PredictionView:
    points = (
        throughput(0, 45.0, 5.0),
        throughput(1, 50.0, 2.0, 48.0),
        throughput(2, 100.0, 20.0),
        throughput(3, 150, 0),
    )
    return PredictionView(job=job(loaders=loaders, **more), curve=points, rate=50.0, contention=0.03, ceiling=400.0)


def test_the_curve_is_drawn_as_bars() -> None:
    shown = prediction(curve(), Screen(80))
    assert shown[0] == "hungry: 1 rank on n1, 2 loaders (requested 3)"
    assert shown[2].split() == ["LOADERS", "PREDICTED", "MEASURED", "OF", "BEST", "SAMPLES/S"]
    now = [line for line in shown if line.startswith("→ ")]
    assert now[0].split() == ["→", "2", "100", "±20", "25", "%", "███████░░░"]
    assert [line.split()[0] for line in shown[3:7]] == ["0", "1", "→", "3"]
    assert "each further one makes the work of all 3.0 % longer" in " ".join(shown)


def test_a_bar_shades_what_is_uncertain_and_marks_what_was_measured() -> None:
    assert bar(throughput(1, 5.0, 2.0), 1.0, 10) == "███░░░░"
    assert bar(throughput(1, 5.5, 0.0), 1.0, 10) == "█████▌"
    assert bar(throughput(1, 5.5, 0.3), 1.0, 10) == "█████▌", "an error below a character is not drawn"
    assert bar(throughput(1, 5.9, 0.3), 1.0, 10) == "█████▉"
    assert bar(throughput(1, 5.0, 2.0, 8.0), 1.0, 10) == "███░░░░ ●"
    assert bar(throughput(1, 5.0, 2.0, 1.0), 1.0, 10) == "█●█░░░░"
    assert bar(throughput(1, 9.9, 8.0, 30.0), 1.0, 10) == "█░░░░░░░░●", "never wider"
    assert bar(throughput(1, 1.0, 8.0), 1.0, 10) == "░░░░░░░░░"


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (job(now=None, standing="unmeasured"), "it is not measured yet"),
        (job(now=None, loaders=None, standing="no_loaders"), "it has no ElasticLoader, so nothing is predicted"),
        (job(now=None, standing="paused"), "it is paused, and was not measured before"),
        (job(now=None, ranks={}, loaders=None, standing="no_loaders"), "it does not run, so nothing is predicted"),
    ],
)
def test_without_a_curve_it_says_why_and_what_to_do(job: ScheduledJob, reason: str) -> None:
    _, first, second = prediction(PredictionView(job=job), Screen(80))
    assert first == f"  {reason}"
    assert second.startswith("  → ")


def test_a_job_is_described_by_ranks_loaders_and_limits() -> None:
    wide = job(ranks={"n1": 2, "n2": 1}, target=1, requested=6, least=2, weight=2.5)
    assert describe(wide) == "hungry: 3 ranks on n1, n2, 3 → 1 loaders each (requested 6, at least 2, weight 2.5)"
    assert describe(job(loaders=1, requested=1)) == "hungry: 1 rank on n1, 1 loader"


# ── the picture ──


def test_the_picture_is_svg_with_axes_band_curve_and_measurements() -> None:
    root = ET.fromstring(picture(curve()))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for wanted in ("loaders of each rank", "samples/s of the job", "2 now", "measured", "0", "1", "2", "3", "400"):
        assert wanted in texts
    assert "prefers-color-scheme: dark" in "".join(style.text or "" for style in root.iter(f"{SVG}style"))
    (line,) = root.iter(f"{SVG}polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert len(places) == 4
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True), "more loaders, higher up"
    (band,) = root.iter(f"{SVG}polygon")
    assert len(band.attrib["points"].split()) == 8
    (mark, _legend) = root.iter(f"{SVG}circle")
    assert float(mark.attrib["cx"]) == places[1][0]
    assert float(mark.attrib["cy"]) > places[1][1], "48 was measured where 50 is predicted"


def test_a_name_cannot_break_the_picture() -> None:
    view = curve()
    odd = replace(view, job=replace(view.job, job="a<b>&c" * 20))
    assert ET.fromstring(picture(odd)).tag == f"{SVG}svg"


@pytest.mark.parametrize(("peak", "step"), [(400.0, 100.0), (55.0, 10.0), (0.9, 0.2), (12_000.0, 2_000.0), (0.0, 1.0)])
def test_ticks_are_round(peak: float, step: float) -> None:
    assert tick_step(peak) == pytest.approx(step)

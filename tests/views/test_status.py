"""One screen tells what trains, how far, and what is wrong."""

from __future__ import annotations

from tests.views.samples import LIFE, NOW, cluster, device, incident, job, plane, rank
from torchloom.protocol.ids import RankId
from torchloom.protocol.node import Reading
from torchloom.protocol.rank import Beat
from torchloom.protocol.records import About
from torchloom.protocol.views import CurvesView, Point
from torchloom.views.curves import curves
from torchloom.views.format.tables import Screen, columns_of
from torchloom.views.listings import devices, incidents, jobs
from torchloom.views.status import status


def text(**more: object) -> str:
    return "\n".join(status(cluster(**more), Screen()))


def test_everything_that_matters_is_on_it() -> None:
    shown = text()
    for part in (
        "control plane healthy", "weaver host:42", "term 3", "up 2 h", "log at 1,234", "torchloom 2.15.1",
        "mnist", "running", "1/2", "1,500", "0.1234", "1,024", "512", "live", "lost", "0.4 s ago",
        "last incident i7, 1 min 30 s ago; 1 open", "mnist/hi/1: its link closed", "decided: reported (no policy)",
    ):  # fmt: skip
        assert part in shown, part


def test_a_paused_job_is_shown_as_paused_while_it_runs() -> None:
    assert "paused" in text(jobs=(job(paused=True),))
    assert "paused" not in text()
    assert "paused" not in text(jobs=(job(paused=True, phase="failed"),))


def test_trouble_and_refusals_of_the_control_plane_are_said() -> None:
    shown = text(plane=plane(trouble="the log cannot be written", refused={"garbage": 2, "oversized": 3}))
    assert "control plane in trouble" in shown
    assert "trouble: the log cannot be written" in shown
    assert "refused 5 messages: garbage 2, oversized 3" in shown


def test_a_control_plane_without_advisories_says_so() -> None:
    assert "noticed by its silence only" in text(plane=plane(advisories=False))
    assert "silence" not in text()


def test_the_ranks_of_jobs_that_ended_are_left_out_and_counted() -> None:
    view = cluster(
        jobs=(job("mnist"), job("old", phase="failed", ended=NOW - 900)),
        ranks=(rank("mnist", "hi", 0), *(rank("old", "ho", number, presence="dead") for number in range(4))),
    )
    shown = "\n".join(status(view, Screen()))
    assert "ho" not in shown.split()
    assert "left out: 4 ranks of jobs that ended" in shown
    assert "more ranks" not in shown
    whole = "\n".join(status(view, Screen(), ended_too=True))
    assert whole.split().count("ho") == 4
    assert "that ended" not in whole


def test_those_in_trouble_stand_first() -> None:
    shown = text(ranks=(rank(number=0), rank(number=1, presence="dead"), rank(number=2, presence="lost")))
    assert shown.index("dead") < shown.index("lost") < shown.index("live")


def test_a_loss_that_is_no_number_is_said() -> None:
    beat = Beat(incarnation="0" * 24, step=3, not_finite=("loss",))
    assert "not finite" in text(ranks=(rank(beat=beat),))


def test_a_screen_is_not_exceeded_and_says_what_it_hides() -> None:
    many = tuple(rank(number=i) for i in range(500))
    lines = status(cluster(ranks=many, total_ranks=20_000), Screen(width=80, height=24))
    assert len(lines) <= 24
    assert all(columns_of(line) <= 80 for line in lines)
    hidden = next(line for line in lines if "more ranks" in line)
    shown = sum(" live " in line for line in lines)
    assert f"{20_000 - shown:,} more ranks" in hidden


def test_an_empty_fabric_says_what_to_do_and_still_shows_incidents() -> None:
    shown = text(jobs=(), ranks=(), incidents=(incident(about=About(device="GPU-1"), what="device failed"),))
    assert "torchloom.attach()" in shown
    assert "GPU-1: device failed" in shown
    assert "no incidents" in text(incidents=())


def test_a_step_that_was_only_counted_is_shown_as_such() -> None:
    counted = rank(counted=True, beat=Beat(incarnation=LIFE, step=1500))
    assert "1,500 counted" in text(ranks=(counted,))
    assert "counted" not in text(ranks=(rank(),))


def test_the_lists() -> None:
    assert "fell over" in "\n".join(jobs([job(phase="failed", ended=NOW, reason="fell over")], NOW, Screen()))
    closed = incidents([incident(closed=NOW)], NOW, Screen())
    assert "over in 1 min" in closed[1]
    assert "open" in incidents([incident()], NOW, Screen())[1]
    assert devices([], NOW, Screen())[0].startswith("DEVICE")


CPU = "CPU-1ffdf8f8-bf2b-4cc3-64e3-aae456bf6a28"
TROUBLES = [
    incident(
        "i2", job="", about=About(device=CPU), kind="device", what=f"device {CPU} failed: XID 79 and more",
        short="failed: XID 79 and more", closed=NOW,
    ),
    incident(
        "i1", kind="device_warning", what="mnist: rank 1 is slow because it waits for data",
        short="rank 1 is slow because it waits for data", decision="d" * 60,
    ),
]  # fmt: skip


def test_on_a_narrow_terminal_what_went_wrong_has_the_room() -> None:
    head, first, second = incidents(TROUBLES, NOW, Screen(width=80))
    assert head.split() == ["ID", "AGE", "KIND", "ABOUT", "STATE", "WHAT"]
    assert first.split()[4:] == ["CPU-1ffdf8f8", "over", "failed:", "XID", "79", "and", "more"]
    assert len(second) - second.index("rank 1 is slow") >= 32
    assert max(columns_of(line) for line in (head, first, second)) <= 80


def test_on_a_wide_terminal_the_decision_stands_beside_it() -> None:
    head, first, second = incidents(TROUBLES, NOW, Screen(width=120))
    assert head.split()[-2:] == ["WHAT", "DECISION"]
    assert "device CPU-1ffdf8f8 failed: XID 79" in first
    assert "rank 1 is slow because it waits" in second
    assert max(columns_of(line) for line in (head, first, second)) <= 120
    assert CPU in incidents(TROUBLES, NOW, Screen())[1]  # a pipe gets everything


def test_devices_whose_names_begin_alike_keep_their_names() -> None:
    other = CPU.replace("aae4", "bbe4")
    both = [TROUBLES[0], incident("i0", job="", about=About(device=other), what=f"device {other} failed")]
    assert all("CPU-1ffdf8f8-" in line for line in incidents(both, NOW, Screen(width=120))[1:])


def test_what_was_decided_and_refused_is_wrapped_on_a_narrow_terminal() -> None:
    long = incident(decision="all ranks are ended " * 8 + "at last", reason="because " * 20 + "of it")
    told = cluster(incidents=(long,), plane=plane(refused={f"reason {i} of a refusal": i for i in range(9)}))
    lines = status(told, Screen(width=80))
    assert max(map(columns_of, lines)) <= 80
    together = " ".join(" ".join(lines).split())
    assert "at last (because" in together
    assert "because of it)" in together
    assert "reason 8 of a refusal 8" in together


def test_what_a_job_waits_for_is_told_instead_of_that_nothing_trains() -> None:
    shown = "\n".join(status(cluster(jobs=(), ranks=()), Screen(), "mnist waits for a node"))
    assert "mnist waits for a node" in shown
    assert "nothing trains" not in shown


def test_devices_show_what_they_say_of_themselves_where_any_does() -> None:
    reading = Reading(
        device="GPU-1",
        utilisation=97.0,
        memory_mb=40960.0,
        memory_total_mb=81920.0,
        temperature=65.0,
        throttled=("power cap",),
    )
    views = [device("GPU-1", reading=reading), device("GPU-2", reading=Reading(device="GPU-2")), device("GPU-3")]
    head, first, second, third = devices(views, NOW, Screen())
    assert head.split() == ["DEVICE", "NODE", "HEALTH", "USE", "MEMORY", "TEMP", "SINCE", "CAUSE", "REPLICAS"]
    assert first.split()[:10] == ["GPU-1", "n1", "ok", "97", "%", "40.0/80", "GB", "65", "°C", first.split()[9]]
    assert second.split()[3:6] == third.split()[3:6] == ["-", "-", "-"]
    assert "\x1b[33m65 °C" in devices(views, NOW, Screen(colour=True))[1]
    assert "USE" not in devices([device("GPU-3")], NOW, Screen())[0].split()


def test_curves_of_each_rank() -> None:
    points = tuple(Point(NOW - 100 + i, i * 10, 1.0 / (i + 1), None) for i in range(100))
    view = CurvesView(curves=((RankId("mnist", "hi", 0), points), (RankId("mnist", "hi", 1), ())), total=5)
    shown = "\n".join(curves(view, NOW, Screen()))
    assert "mnist/hi/0: 100 points over 1 min 39 s" in shown
    assert "█" in shown
    assert " 990\n" in shown
    assert "0.010000" in shown
    assert "mnist/hi/1: no history yet" in shown
    assert "3 more ranks" in shown
    assert "no history yet" in curves(CurvesView(), NOW, Screen())[0]

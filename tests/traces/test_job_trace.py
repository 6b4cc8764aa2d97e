"""Rows of a trace, from beats, records and views that are made by hand."""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from tests.traces.samples import OTHER, RANK, SUBMITTED, beat, entry, loading, resize, schedule, settled, submitted
from torchloom.protocol import run_records as runs
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat, ChangeSpec, Hello
from torchloom.protocol.records import (
    ChangeProposed,
    JobBegan,
    JobEnded,
    OrderEnded,
    OrderGiven,
    RankDied,
    RankJoined,
    Record,
)
from torchloom.protocol.run_records import Failure
from torchloom.protocol.scheduling import LoaderMove, LoadersAllocated
from torchloom.traces.job_trace import window_seconds
from torchloom.traces.trace_rows import (
    FILES,
    SHARED_COLUMNS,
    BeatRow,
    EventRow,
    LatencyRow,
    LoadersRow,
    PauseRow,
    Row,
    ThroughputRow,
)
from torchloom.traces.trace_set import Rows, TraceSet

R = TypeVar("R")


class Traced:
    """A set of traces that has read the submission of a job, and the rows so far."""

    def __init__(self, *records: Record) -> None:
        self.set = TraceSet(["mnist"])
        self.rows: list[Row] = []
        self._seq = 0
        self.read(*(records or (submitted(),)))

    def read(self, *records: Record, at: float = 0.0) -> None:
        self._seq += 1
        self._take(self.set.read(self._seq, entry(*records, at=at)))

    def beat(self, beat: Beat, at: float, rank: RankId = RANK) -> None:
        self._take(self.set.see_beat(rank, beat, SUBMITTED + at))

    def tick(self, at: float) -> None:
        self._take(self.set.tick(SUBMITTED + at))

    def schedule(self, at: float, loaders: int | None = 2, **more: object) -> None:
        self._take(self.set.see_schedule(schedule(at, loaders, **more)))

    def _take(self, news: Rows) -> None:
        for _, rows in news:
            self.rows += rows

    def of(self, kind: type[R]) -> list[R]:
        return [row for row in self.rows if isinstance(row, kind)]


def test_every_file_documents_each_column_of_its_rows() -> None:
    for name, file in FILES.items():
        assert (*SHARED_COLUMNS, *file.columns) == file.header, name


def test_a_job_is_over_when_all_its_runs_are() -> None:
    traced = Traced(submitted("mnist:0", part_of="mnist"), submitted("mnist:1", part_of="mnist"))
    traced.read(runs.RunEnded(job="mnist:0", phase="done"), at=5)
    assert not traced.set.are_over
    traced.read(runs.RunEnded(job="mnist:1", phase="done"), at=6)
    assert traced.set.are_over
    assert [(row.event, row.target, row.elapsed) for row in traced.of(EventRow)][-1] == ("ended", "mnist:1", 6)


def test_a_job_that_torchloom_did_not_start_is_over_when_its_ranks_have_left() -> None:
    traced = Traced(JobBegan(job="mnist"))
    traced.read(JobEnded(job="mnist", outcome="finished", step=9), at=5)
    assert traced.set.are_over
    assert [(row.event, row.step, row.detail) for row in traced.of(EventRow)] == [
        ("began", None, ""),
        ("ended", 9, "finished"),
    ]


def test_records_of_other_jobs_and_earlier_runs_leave_no_rows() -> None:
    set = TraceSet(["mnist"])
    assert list(set.read(1, entry(runs.RunEnded(job="mnist", phase="done"), submitted("cifar")))) == []
    assert set.expected() == {"mnist"}


def test_throughput_is_that_of_all_ranks_and_batches_are_counted_once() -> None:
    traced = Traced()
    for second in range(1, 4):
        for rank in (RANK, OTHER):
            traced.beat(beat(10 * second, loading=loading()), second, rank)
        traced.tick(second + 0.1)
        traced.tick(second + 0.2)  # too early for another row
    rows = traced.of(ThroughputRow)
    assert [(row.step, row.steps, row.samples_per_second, row.batches) for row in rows] == [
        (10, None, 160.0, 20),
        (20, 10, 160.0, 20),
        (30, 10, 160.0, 20),
    ]
    assert [(row.p50, row.longest, row.steps) for row in traced.of(LatencyRow)] == [(0.1, 0.11, 10)] * 3
    assert len(traced.of(BeatRow)) == 6


def test_without_steps_the_throughput_falls_to_zero_and_without_beats_there_is_no_row() -> None:
    traced = Traced()
    traced.beat(beat(10), 1)
    traced.tick(1)
    traced.beat(beat(10, 0, idle_seconds=1.0), 2)  # a step may take that long
    traced.tick(2)
    traced.beat(beat(10, 0, idle_seconds=2.5), 3)
    traced.tick(3)
    traced.beat(beat(10, 0, paused=True), 4)
    traced.tick(4)
    traced.tick(5)
    rows = traced.of(ThroughputRow)
    assert [row.samples_per_second for row in rows] == [80.0, 80.0, 0.0, 0.0]
    assert [row.paused for row in rows] == [False, False, False, True]


def test_the_first_steps_after_a_pause_count_by_the_clock() -> None:
    traced = Traced()
    traced.beat(beat(10, 0, paused=True), 1)
    traced.beat(beat(12, 2, longest=0.05, samples_per_second=4000.0), 2)
    traced.tick(2)
    assert traced.of(ThroughputRow)[-1].samples_per_second == 400.0


def test_beats_of_a_life_that_is_over_do_not_count() -> None:
    traced = Traced()
    traced.beat(beat(50, incarnation="f" * 24), 1)
    traced.beat(beat(90), 1.1)
    traced.tick(2)
    assert [row.step for row in traced.of(ThroughputRow)] == [50]
    assert len(traced.of(BeatRow)) == 1


def test_intervals_grow_with_the_age_of_a_job() -> None:
    assert [window_seconds(hours * 3600) for hours in (0, 23, 25, 239, 241)] == [1, 1, 10, 10, 60]


# ── loaders ──


def test_a_row_about_loaders_is_written_when_they_change() -> None:
    traced = Traced()
    traced.beat(beat(10, loading=loading(2)), 1)
    traced.schedule(1)
    traced.schedule(2)
    traced.schedule(3, target=4)
    assert [(row.elapsed, row.loaders, row.target, row.running) for row in traced.of(LoadersRow)] == [
        (1, 2, None, 2),
        (3, 2, 4, 2),
    ]


def test_loaders_change_at_the_time_of_the_log_and_a_view_that_is_older_changes_nothing() -> None:
    traced = Traced()
    traced.schedule(1, 2)
    traced.read(resize(20, 2, 5), at=2.0)
    traced.read(settled(), at=2.25)
    traced.schedule(2.5, 2, target=5)
    traced.schedule(3.5, 5)
    assert [(row.elapsed, row.loaders) for row in traced.of(LoadersRow)] == [(1, 2), (2.25, 5)]


def test_ranks_are_those_that_the_log_has_seen_join() -> None:
    hello = Hello(incarnation="0" * 24, node="n1", pid=7, devices=())
    traced = Traced()
    traced.read(RankJoined(rank=RANK, hello=hello), at=1)
    traced.schedule(2)
    traced.read(RankDied(rank=RANK, incarnation="0" * 24, reason=""), at=2.5)
    assert [(row.elapsed, row.ranks) for row in traced.of(LoadersRow)] == [(2, 1), (2.5, 0)]


def test_an_allocation_is_an_event_of_each_job_that_moves() -> None:
    traced = Traced()
    moves = (LoaderMove(job="mnist", before=2, loaders=4), LoaderMove(job="cifar", before=4, loaders=2))
    traced.read(LoadersAllocated(policy="ours", triggers=("arrival",), moves=moves, gain=0.25), at=3)
    row = traced.of(EventRow)[-1]
    assert (row.event, row.before, row.after, row.detail) == ("allocated", 2, 4, "ours: arrival; +25.0% predicted")


# ── pause cost ──


def _pauses(traced: Traced) -> list[tuple[str, float, float | None]]:
    return [
        (row.cause, round(row.elapsed, 3), None if row.seconds is None else round(row.seconds, 3))
        for row in traced.of(PauseRow)
    ]


def test_a_resize_costs_what_its_longest_step_took_beyond_a_slow_one() -> None:
    traced = Traced()
    for second in range(1, 5):
        traced.beat(beat(10 * second), second)
    traced.read(resize(45, 2, 5), at=4.2)
    traced.read(settled(), at=4.6)
    traced.tick(4.7)
    traced.beat(beat(50, longest=0.605), 5)
    traced.tick(5)
    assert _pauses(traced) == []  # the beat after may have a longer step
    traced.beat(beat(60), 6)
    traced.tick(6)
    assert _pauses(traced) == [("resize", 4.6, 0.5)]
    row = traced.of(PauseRow)[0]
    assert (row.before, row.after, row.step, row.detail) == (2, 5, 45, "loader scheduler")


def test_noise_costs_nothing_and_the_rank_that_lost_most_counts() -> None:
    traced = Traced()
    traced.read(resize(25, 2, 5, "c1", RANK, OTHER), at=1)
    traced.read(settled("c1", 2), at=2.5)
    for second in range(1, 6):
        traced.beat(beat(10 * second, longest=0.105), second)
        traced.beat(beat(10 * second, longest=0.205 if second == 3 else 0.105), second, OTHER)
    traced.tick(5)
    assert _pauses(traced) == [("resize", 2.5, 0.1)]


def test_a_resize_that_nobody_measured_has_no_seconds_and_one_that_failed_no_row() -> None:
    traced = Traced()
    traced.read(resize(25, 2, 5), resize(26, 2, 5, "c2"), at=1)
    traced.read(settled(), settled("c2", 0), at=2)
    traced.tick(20)
    assert _pauses(traced) == []
    traced.tick(40)
    assert _pauses(traced) == [("resize", 2, None)]


def _paused(target: str | None = None) -> ChangeProposed:
    change = ChangeSpec(id="p1", number=1, step=30, action="pause")
    return replace(resize(30, 1, 1, "p1"), change=change, before={}, replica=target, operator="ann@n1")


def test_a_pause_lasts_until_the_order_to_continue_was_carried_out() -> None:
    traced = Traced()
    traced.read(_paused(), at=9.8)
    traced.read(settled("p1"), at=10)
    traced.read(OrderGiven(id="o1", request="", verb="resume", job="mnist", lives=((RANK, "0" * 24),)), at=14)
    traced.read(OrderEnded(id="o1", outcome="", applied=1), at=14.25)
    assert _pauses(traced) == [("pause", 10, 4.25)]
    assert [row.event for row in traced.of(EventRow)][-2:] == ["paused", "continued"]


def test_a_pause_ends_with_the_job() -> None:
    traced = Traced()
    traced.read(_paused(), settled("p1"), at=10)
    traced.read(runs.RunEnded(job="mnist", phase="cancelled"), at=12)
    assert _pauses(traced) == [("pause", 10, 2)]


def test_a_release_lasts_until_the_first_step_of_the_next_attempt() -> None:
    traced = Traced()
    traced.read(runs.ReleaseBegan(job="mnist", operator="ann@n1", request="0" * 32), at=9)
    stopping = runs.AttemptStopping(job="mnist", attempt=0, reason="", next_action="release", step=40)
    traced.read(stopping, at=10)
    traced.read(runs.AttemptLaunched(job="mnist", attempt=1, host="n1", port=1, resume_step=40), at=18)
    traced.read(runs.AttemptStepped(job="mnist", attempt=1, seconds=0.5), at=20)
    assert _pauses(traced) == [("release", 10, 9.5)]
    row = traced.of(PauseRow)[0]
    assert (row.redone, row.detail) == (0, "ann@n1")


def test_a_restart_counts_the_steps_to_be_done_again_and_failures_before_the_first_step_once() -> None:
    traced = Traced()
    failure = Failure(kind="crash")
    for attempt, at in ((0, 10), (1, 12)):
        stopping = runs.AttemptStopping(job="mnist", attempt=attempt, reason="it died", failure=failure, step=47)
        traced.read(stopping, at=at)
        launched = runs.AttemptLaunched(job="mnist", attempt=attempt + 1, host="n1", port=1, resume_step=40)
        traced.read(launched, at=at + 1)
    traced.read(runs.AttemptStepped(job="mnist", attempt=2, seconds=1.0), at=15)
    assert _pauses(traced) == [("restart", 10, 4)]
    row = traced.of(PauseRow)[0]
    assert (row.redone, row.detail) == (7, "it died")

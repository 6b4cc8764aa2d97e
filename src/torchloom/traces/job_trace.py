"""The trace of a job: beats, records of the log and views of the schedule become rows. The time is an argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchloom.protocol import run_records as runs
from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.protocol.records import JobEnded, RankDied, RankJoined, RankLeft, Record
from torchloom.protocol.scheduling import PolicyName, ScheduledJob
from torchloom.traces.event_rows import EventReader
from torchloom.traces.standstills import Standstill, Standstills
from torchloom.traces.trace_rows import BeatRow, EventRow, LatencyRow, LoadersRow, PauseRow, Row, ThroughputRow

WINDOWS = ((864_000.0, 60.0), (86_400.0, 10.0), (0.0, 1.0))
"""Seconds after the submission, and the length of the intervals of throughput and latency from then on."""
SILENT_SECONDS = 4.0
"""After these without a beat a rank no longer counts; beats may come more rarely, and then after three of them."""
STILL_STEPS, STILL_SECONDS = 3.0, 2.0
"""A rank stands still after three median step times without a step, and not before two seconds without one."""
STALE_SECONDS = 3.0
"""After a resize, the time for which a view of the schedule may show the number before."""
MARGIN = 0.2
"""Seconds by which an interval may end early, because it is looked at about once a second."""


@dataclass(slots=True)
class _RankNews:
    """Of a rank: its latest beat, and what it reported since the last row."""

    beat: Beat
    at: float
    every: float = 1.0
    """Seconds between its beats."""
    rate: float | None = None
    """Samples/s of its latest beat with steps."""
    pace: float = 0.0
    """Its latest median step time."""
    batches: int | None = None
    timed: list[Beat] = field(default_factory=list)
    """Since the last row, those with steps."""
    is_new: bool = True

    def is_silent(self, now: float) -> bool:
        return now - self.at > max(SILENT_SECONDS, 3 * self.every)

    @property
    def present_rate(self) -> float | None:
        still = max(STILL_SECONDS, STILL_STEPS * self.pace)
        return 0.0 if self.rate is not None and (self.beat.paused or self.beat.idle_seconds > still) else self.rate


class JobTrace:
    def __init__(self, job: str, submitted: float) -> None:
        self.job = job
        self.submitted = submitted
        self.is_over = False
        self._events = EventReader(job)
        self._standstills = Standstills()
        self._ranks: dict[RankId, _RankNews] = {}
        self._runs: set[str] = set()
        """That have not ended."""
        self._has_runs = False
        self._step = -1
        """In the last row."""
        self._next_row = submitted
        self._loaders: LoadersRow | None = None
        """The last row."""
        self._resized = 0.0
        self._present: set[RankId] | None = None
        """Ranks that joined and have not left or died; None before the log says anything of it."""

    # ── beats ──

    def see_beat(self, rank: RankId, beat: Beat, now: float) -> list[Row]:
        news = self._ranks.get(rank)
        if news is not None and beat.incarnation < news.beat.incarnation:
            return []  # a life that is over speaks
        self._standstills.see_beat(rank, beat)
        if news is None or beat.incarnation > news.beat.incarnation:
            news = self._ranks[rank] = _RankNews(beat, now)
        else:
            news.every = now - news.at
        news.beat, news.at, news.is_new = beat, now, True
        if beat.times is not None:
            news.timed.append(beat)
            news.rate, news.pace = _wall_rate(beat, beat.times, news.every), beat.times.p50
        if beat.loading is not None:
            news.batches = (news.batches or 0) + beat.loading.batches
        return [self._beat_row(rank, beat, now)]

    def _beat_row(self, rank: RankId, beat: Beat, now: float) -> BeatRow:
        times, loading = beat.times, beat.loading
        return BeatRow(
            time=now,
            elapsed=now - self.submitted,
            job=self.job,
            replica=rank.replica,
            rank=rank.rank,
            incarnation=beat.incarnation,
            step=beat.step,
            steps=times.count if times else 0,
            p50=times.p50 if times else None,
            p99=times.p99 if times else None,
            longest=times.longest if times else None,
            own=times.own if times else None,
            data=times.data if times else None,
            samples_per_second=beat.samples_per_second,
            loss=beat.loss,
            idle=beat.idle_seconds,
            phase=beat.phase,
            paused=beat.paused,
            change=beat.change,
            loaders=loading.loaders if loading else None,
            batches=loading.batches if loading else None,
            wait=loading.wait if loading else None,
            use=loading.use if loading else None,
            read=loading.read if loading else None,
            decode=loading.decode if loading else None,
            collate=loading.collate if loading else None,
            transfer=loading.transfer if loading else None,
            ready=loading.ready if loading else None,
            mb=loading.mb if loading else None,
            deaths=loading.deaths if loading else None,
            rss_mb=beat.rss_mb,
        )

    # ── the log ──

    def read(self, seq: int, part: int, record: Record, at: float) -> list[Row]:
        """A record that concerns this job."""
        if isinstance(record, runs.RunSubmitted):
            self._runs.add(record.job)
            self._has_runs = True
        elif isinstance(record, runs.RunEnded):
            self._runs.discard(record.job)
            self.is_over = not self._runs
        elif isinstance(record, JobEnded):
            self.is_over = not self._has_runs
        events = list(self._events.read(record))
        rows: list[Row] = [EventRow(at, at - self.submitted, self.job, seq, part, *event) for event in events]
        rows += self._pause_rows(self._standstills.read(record, at))
        for event in events:
            if event.event == "resized" and event.target == self.job and self._loaders is not None:
                changed = self._loaders._replace(loaders=event.after, target=None, predicted=None, measured=None)
                rows += self._loaders_rows(changed, at)
                self._resized = at
        return rows + self._note_presence(record, at)

    def _note_presence(self, record: Record, at: float) -> list[Row]:
        match record:
            case RankJoined(rank=rank):
                self._present = (self._present or set()) | {rank}
            case RankLeft(rank=rank) | RankDied(rank=rank):
                self._present = (self._present or set()) - {rank}
            case _:
                return []
        if self._loaders is None:
            return []
        return self._loaders_rows(self._loaders._replace(ranks=len(self._present)), at)

    def begin(self) -> list[Row]:
        """The log does not reach back to the beginning."""
        return [EventRow(self.submitted, 0.0, self.job, 0, 0, "began", self.job, None, None, None, None, "")]

    def _pause_rows(self, standstills: Iterable[Standstill]) -> Iterator[PauseRow]:
        for each in standstills:
            yield PauseRow(each.began, each.began - self.submitted, self.job, *each[1:])

    # ── the schedule ──

    def see_schedule(self, job: ScheduledJob, policy: PolicyName, now: float) -> list[Row]:
        ranks = sum(job.ranks.values()) if self._present is None else len(self._present)
        counts = [
            news.beat.loading.loaders
            for news in self._ranks.values()
            if news.beat.loading is not None and not news.is_silent(now)
        ]
        running = sum(counts) if counts else None
        predicted, measured = (job.now.predicted, job.now.measured) if job.now is not None else (None, None)
        loaders, target = job.loaders, job.target
        if self._loaders is not None and now - self._resized < STALE_SECONDS:
            loaders, target = self._loaders.loaders, None if target == self._loaders.loaders else target
        row = LoadersRow(
            now, 0.0, self.job, loaders, target, job.requested, ranks, running, job.standing, policy,
            predicted, measured,
        )  # fmt: skip
        return self._loaders_rows(row, now)

    def _loaders_rows(self, row: LoadersRow, at: float) -> list[Row]:
        """The row, if it says something new."""
        if self._loaders is not None and self._loaders[3:-2] == row[3:-2]:
            return []
        self._loaders = row._replace(time=at, elapsed=at - self.submitted)
        return [self._loaders]

    # ── about once a second ──

    def tick(self, now: float, *, ended: bool = False) -> list[Row]:
        """Throughput and latency since the last row, if it is time for one; and resizes that are measured now."""
        rows: list[Row] = [*self._pause_rows(self._standstills.take_measured(now, ended=ended))]
        if now < self._next_row and not ended:
            return rows
        self._next_row = now + window_seconds(now - self.submitted) - MARGIN
        self._ranks = {rank: news for rank, news in self._ranks.items() if not news.is_silent(now) or news.is_new}
        present = list(self._ranks.values())
        if not any(news.is_new for news in present):
            return rows
        rows.append(self._throughput_row(present, now))
        if any(news.timed for news in present):
            rows.append(self._latency_row([beat for news in present for beat in news.timed], now))
        for news in present:
            news.is_new, news.batches, news.timed = False, None, []
        return rows

    def _throughput_row(self, present: list[_RankNews], now: float) -> ThroughputRow:
        step = min(news.beat.step for news in present)
        steps = None if self._step < 0 else max(0, step - self._step)
        self._step = step
        rates = [rate for news in present if (rate := news.present_rate) is not None]
        batches = [news.batches for news in present if news.batches is not None]
        return ThroughputRow(
            now,
            now - self.submitted,
            self.job,
            step,
            steps,
            sum(rates) if rates else None,
            sum(batches) if batches else None,
            len(present),
            all(news.beat.paused for news in present),
        )

    def _latency_row(self, beats: list[Beat], now: float) -> LatencyRow:
        times = [beat.times for beat in beats if beat.times is not None]
        own = [each.own for each in times if each.own is not None]
        data = [each.data for each in times if each.data is not None]
        return LatencyRow(
            now,
            now - self.submitted,
            self.job,
            min(beat.step for beat in beats),
            max(each.count for each in times),
            max(each.p50 for each in times),
            max(each.p99 for each in times),
            max(each.longest for each in times),
            max(own, default=None),
            max(data, default=None),
        )


def _wall_rate(beat: Beat, times: StepTimes, every: float) -> float | None:
    """Samples in each second since the beat before.

    The rate of a beat is that within its steps. They cover all of the time, but for the first steps after a pause: then
    at most the number of steps times the longest.
    """
    if beat.samples_per_second is None:
        return None
    return beat.samples_per_second * min(1.0, times.count * times.longest / every if every > 0 else 1.0)


def window_seconds(elapsed: float) -> float:
    """The length of an interval, so much time after the submission."""
    return next(seconds for since, seconds in WINDOWS if elapsed >= since or not since)

"""Traces of several jobs, fed from one log: it finds the job that each record concerns. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchloom.protocol.ids import RankId
from torchloom.protocol.rank import Beat
from torchloom.protocol.records import (
    ChangeDecided,
    ChangeProposed,
    ChangeSettled,
    Entry,
    JobBegan,
    OrderEnded,
    OrderGiven,
    Record,
    named_jobs,
)
from torchloom.protocol.run_records import RunSubmitted
from torchloom.protocol.scheduling import ScheduleView
from torchloom.traces.job_trace import JobTrace
from torchloom.traces.trace_rows import Row

Rows = Iterable[tuple[JobTrace, list[Row]]]


class TraceSet:
    def __init__(self, jobs: Iterable[str]) -> None:
        self.traces: dict[str, JobTrace] = {}
        self._expected = set(jobs)
        """Jobs whose beginning has not been read yet."""
        self._names: dict[str, str] = {}
        """By the name of a job or of one of its runs: the job."""
        self._ids: dict[str, str] = {}
        """By the id of a change or an order: its job."""

    @property
    def are_over(self) -> bool:
        return not self._expected and all(trace.is_over for trace in self.traces.values())

    def begin(self, job: str, submitted: float) -> JobTrace:
        trace = self.traces[job] = JobTrace(job, submitted)
        self._names[job] = job
        self._expected.discard(job)
        return trace

    def expected(self) -> frozenset[str]:
        return frozenset(self._expected)

    def read(self, seq: int, entry: Entry) -> Iterator[tuple[JobTrace, list[Row]]]:
        for part, record in enumerate(entry.records):
            self._note_names(record, entry.at)
            for job in sorted(self._concerned(record)):
                trace = self.traces[job]
                if not trace.is_over and (rows := trace.read(seq, part, record, entry.at)):
                    yield trace, rows

    def _note_names(self, record: Record, at: float) -> None:
        match record:
            case RunSubmitted(job=run, task=task):
                job = task.part_of or run
                if job in self._expected:
                    self.begin(job, at)
                if job in self.traces:
                    self._names[run] = job
            case JobBegan(job=job) if job in self._expected:
                self.begin(job, at)
            case ChangeProposed(job=name, change=change) if name in self._names:
                self._ids[change.id] = self._names[name]
            case OrderGiven(job=name, id=id) if name in self._names:
                self._ids[id] = self._names[name]

    def _concerned(self, record: Record) -> set[str]:
        if isinstance(record, ChangeDecided | ChangeSettled | OrderEnded):
            job = self._ids.get(record.id)
            return {job} if job is not None else set()
        return {self._names[name] for name in named_jobs(record) if name in self._names}

    def see_beat(self, rank: RankId, beat: Beat, now: float) -> Iterator[tuple[JobTrace, list[Row]]]:
        trace = self.traces.get(rank.job)
        if trace is not None and (rows := trace.see_beat(rank, beat, now)):
            yield trace, rows

    def see_schedule(self, view: ScheduleView) -> Iterator[tuple[JobTrace, list[Row]]]:
        for job in view.jobs:
            trace = self.traces.get(job.job)
            if trace is None or trace.is_over:
                continue
            if rows := trace.see_schedule(job, view.rules.policy, view.now):
                yield trace, rows

    def tick(self, now: float) -> Iterator[tuple[JobTrace, list[Row]]]:
        for trace in self.traces.values():
            if rows := trace.tick(now, ended=trace.is_over):
                yield trace, rows

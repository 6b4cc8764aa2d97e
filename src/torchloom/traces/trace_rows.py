"""The files of a trace: a type of row for each, and what each column means. docs/workloads.md has the same tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ThroughputRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    step: int
    steps: int | None
    samples_per_second: float | None
    batches: int | None
    ranks: int
    paused: bool


class LatencyRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    step: int
    steps: int
    p50: float
    p99: float
    longest: float
    own: float | None
    data: float | None


class LoadersRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    loaders: int | None
    target: int | None
    requested: int | None
    ranks: int
    running: int | None
    standing: str
    policy: str
    predicted: float | None
    measured: float | None


class PauseRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    target: str
    cause: str
    seconds: float | None
    step: int | None
    redone: int | None
    before: int | None
    after: int | None
    detail: str


class BeatRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    replica: str
    rank: int
    incarnation: str
    step: int
    steps: int
    p50: float | None
    p99: float | None
    longest: float | None
    own: float | None
    data: float | None
    samples_per_second: float | None
    loss: float | None
    idle: float
    phase: str
    paused: bool
    change: int
    loaders: int | None
    batches: int | None
    wait: float | None
    use: float | None
    read: float | None
    decode: float | None
    collate: float | None
    transfer: float | None
    ready: float | None
    mb: float | None
    deaths: int | None
    rss_mb: float


class EventRow(NamedTuple):
    time: float
    elapsed: float
    job: str
    seq: int
    part: int
    event: str
    target: str
    step: int | None
    before: int | None
    after: int | None
    seconds: float | None
    detail: str


Row = ThroughputRow | LatencyRow | LoadersRow | PauseRow | BeatRow | EventRow


class Column(NamedTuple):
    unit: str
    meaning: str


class TraceFile(NamedTuple):
    """One of the files."""

    rows: type[Row]
    about: str
    most_mb: int
    """It does not grow beyond this."""
    columns: Mapping[str, Column]
    """In the order of the row, after those that all files have."""

    @property
    def header(self) -> tuple[str, ...]:
        return self.rows._fields


SHARED_COLUMNS: Mapping[str, Column] = {
    "time": Column("s", "Unix time, by the clock of the weaver"),
    "elapsed": Column("s", "since the job was submitted; since its first rank joined if torchLoom did not start it"),
    "job": Column("", "name of the job"),
}

FILES: Mapping[str, TraceFile] = {
    "throughput.csv": TraceFile(
        ThroughputRow,
        "a row for each second in which a rank reported; each 10 s after a day, each minute after ten days",
        24,
        {
            "step": Column("steps", "finished by the rank that is least far"),
            "steps": Column("steps", "finished since the row before; fewer than none (a resume) is 0"),
            "samples_per_second": Column(
                "samples/s",
                "sum over all ranks; 0 while none makes a step; empty if the script does not report samples",
            ),
            "batches": Column(
                "batches", "that training took from its `ElasticLoader` since the row before, on all ranks"
            ),
            "ranks": Column("ranks", "that reported in the last seconds"),
            "paused": Column("0, 1", "whether all of them were paused"),
        },
    ),
    "latency.csv": TraceFile(
        LatencyRow,
        "a row for each such interval in which a step was finished; each value is that of the rank where it is highest",
        24,
        {
            "step": Column("steps", "as in `throughput.csv`"),
            "steps": Column("steps", "that were measured, of the rank with the most"),
            "p50": Column("s", "median of the step time"),
            "p99": Column("s", "99th percentile of the step time"),
            "longest": Column("s", "longest step"),
            "own": Column("s", "median of what a rank needs itself, without waiting for data and for other ranks"),
            "data": Column("s", "median of the time in a step that training waited for data"),
        },
    ),
    "loaders.csv": TraceFile(
        LoadersRow,
        "a row when one of the columns up to `policy` changes",
        8,
        {
            "loaders": Column(
                "per rank", "loader processes that each rank is to have; empty without an `ElasticLoader`"
            ),
            "target": Column("per rank", "what it is about to get, if that differs"),
            "requested": Column("per rank", "what the script requested"),
            "ranks": Column("ranks", "that run"),
            "running": Column("processes", "loaders on all ranks, as ranks report them"),
            "standing": Column(
                "", "`scheduled`, `unmeasured`, `pinned` by an operator, `paused`, `no_loaders`, `no_budget`"
            ),
            "policy": Column("", "policy in force: `ours`, `even`, `requested`, `torchloader`, `off`"),
            "predicted": Column("samples/s", "prediction for `loaders`, of the whole job"),
            "measured": Column("samples/s", "median of what was measured with `loaders`, of the whole job"),
        },
    ),
    "pauses.csv": TraceFile(
        PauseRow,
        "a row for each time that training stood still, or lost time to a resize; written when it continues",
        4,
        {
            "target": Column("", "what stood still: the job, a replica, a rank, or a run of the job"),
            "cause": Column("", "`resize`, `pause`, `release` or `restart`: [how they are measured](#pause-cost)"),
            "seconds": Column("s", "that were lost; empty if nobody watched"),
            "step": Column("steps", "after which it happened"),
            "redone": Column("steps", "to be done again, because they were after the checkpoint"),
            "before": Column("per rank", "loaders before a resize"),
            "after": Column("per rank", "loaders after it"),
            "detail": Column("", "who requested it, or what led to it"),
        },
    ),
    "beats.csv": TraceFile(
        BeatRow,
        "a row for each beat of each rank",
        64,
        {
            "replica": Column("", "replica of the rank"),
            "rank": Column("", "its number"),
            "incarnation": Column("", "which life of the rank; a greater text is a newer life"),
            "step": Column("steps", "finished so far"),
            "steps": Column("steps", "measured since its last beat; the columns to `data` are about them"),
            "p50": Column("s", "median of the step time"),
            "p99": Column("s", "99th percentile"),
            "longest": Column("s", "longest step"),
            "own": Column("s", "median without waiting for data and for other ranks"),
            "data": Column("s", "median of the wait for data"),
            "samples_per_second": Column("samples/s", "of this rank"),
            "loss": Column("", "latest loss"),
            "idle": Column("s", "since its last step"),
            "phase": Column("", "what it says it does other than training, such as `eval`"),
            "paused": Column("0, 1", "whether an operator has paused it"),
            "change": Column("", "number of the latest change of values in force"),
            "loaders": Column("processes", "loaders of this rank; this and the following need an `ElasticLoader`"),
            "batches": Column("batches", "that training took since the last beat"),
            "wait": Column("s/batch", "that training waited for a batch"),
            "use": Column("s/batch", "that training used a batch"),
            "read": Column("s/batch", "that loaders read"),
            "decode": Column("s/batch", "that loaders decoded"),
            "collate": Column("s/batch", "that loaders put samples together"),
            "transfer": Column("s/batch", "that a batch took to the training process"),
            "ready": Column("batches", "that were there when one was requested, in the mean"),
            "mb": Column("MB/batch", "size of a batch"),
            "deaths": Column("processes", "loaders that died so far"),
            "rss_mb": Column("MB", "memory of the process"),
        },
    ),
    "events.csv": TraceFile(
        EventRow,
        "a row for each record of the log that concerns the job",
        16,
        {
            "seq": Column("", "number of the entry in the log"),
            "part": Column("", "place of the record in the entry"),
            "event": Column("", "[what happened](#events)"),
            "target": Column("", "the job, a replica, a rank, or a run of the job"),
            "step": Column("steps", "at which it happened, if that is known"),
            "before": Column("per rank", "loaders before"),
            "after": Column("per rank", "loaders after"),
            "seconds": Column("s", "that it took: stall of a checkpoint, time of the first steps"),
            "detail": Column("", "operator, nodes, policy, reason: text for people"),
        },
    ),
}
FILE_OF: Mapping[type[Row], str] = {file.rows: name for name, file in FILES.items()}
MOST_MB = sum(file.most_mb for file in FILES.values())
"""Of a job."""
EVENTS: Mapping[str, str] = {
    "began": "torchLoom learnt of the job; its log does not reach back to the submission if `seq` is 0",
    "submitted": "it was submitted",
    "arrived": "it may be started",
    "placed": "it has nodes and devices",
    "running": "all its ranks run",
    "first_steps": "the attempt has made its first steps",
    "allocated": "the scheduler decided about its loaders: `before`, `after`, policy, reason, predicted gain",
    "resized": "the number of its loaders has changed on all ranks",
    "resize_failed": "it could not be changed",
    "paused": "its ranks are paused",
    "continued": "they continue",
    "release_requested": "it is to save, and to give back its devices",
    "stopping": "its ranks are ended: what follows, and why",
    "released": "its devices are free",
    "resume_requested": "a released job is to start again",
    "attempt_ended": "no process of the attempt is left",
    "checkpoint": "a checkpoint is complete",
    "incident": "something went wrong",
    "note": "an operator added a note",
    "ended": "it has ended: `done`, `failed` or `cancelled`; `finished`, `stopped` or `failed` without a run",
}

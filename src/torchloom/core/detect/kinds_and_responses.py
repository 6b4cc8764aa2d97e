"""The registry of the kinds of trouble: one row for each. Everything that depends on a kind is derived from its row.

A new kind is its detector in a module of this folder, and a row here. A detector that a row names runs for every rank
(`RankDetectors`). The other kinds are found where several ranks are compared (`hang`, `straggler`), where each beat is
compared with a limit (`rank_detectors`), or by agents and people. docs/decisions/0019-registries.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchloom.core.detect.detector import Detector
from torchloom.core.detect.plateau import PlateauDetector
from torchloom.protocol.job_spec import Response
from torchloom.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is known about one kind of trouble before it happens."""

    explanation: str
    """Short enough for one line on a narrow terminal."""
    how: str
    """How it is found: docs/detection.md."""
    do: tuple[Response, ...] = ("report",)
    """The default response."""
    limit: int | None = None
    """The default limit of responses within the restart window of the job."""
    scope: Literal["rank", "job", "device"] = "rank"
    """What has the trouble. All ranks of a job share one incident of the scope "job": the first to report it is named,
    the others add to the evidence."""
    patience: str = ""
    """The setting that says how long it may last before the response. Only a standstill, which may end by itself, has
    one. The response to any other kind follows at once."""
    settings: tuple[str, ...] = ()
    """The settings that tune how it is found."""
    uses_restart: bool = True
    """A restart because of it counts against the restarts of the job: the script may be at fault."""
    detector: Callable[[Settings], Detector] | None = None
    """Run for every rank."""
    phrases: Mapping[str, str] = field(default_factory=dict)
    """The templates of its findings, by code, as in `views/wording/templates.py`."""


KINDS: Mapping[str, Kind] = {
    "crash": Kind(
        explanation="a rank's process ended badly",
        how="The agent of the rank sees the process end, records its exit code or signal, and keeps its last output. "
        "It distinguishes processes that the kernel killed because memory ran out. In a job that torchLoom did not "
        "start, the server reports the closed connection, and the rank counts as dead after a grace period.",
        do=("restart",),
        settings=("grace_seconds", "frozen_grace_seconds"),
    ),
    "hang": Kind(
        explanation="a rank makes no step, its peers wait",
        how="A rank makes no step for much longer than its own slow steps take, and for longer than any pause from "
        "which it has recovered before. The rank at fault is the one that its peers wait for: it has finished fewer "
        "steps, or started fewer collectives. Ranks that wait for it are not blamed. If all ranks are at the same "
        'point, no rank is blamed. The first steps, and phases that a script announces (`phase("eval")`), have a '
        "longer limit. The stacks of all ranks are captured and compared.",
        do=("restart",),
        patience="hang_act_seconds",
        settings=("hang_floor_seconds", "hang_factor", "first_step_seconds", "phase_seconds", "hang_act_seconds"),
        phrases={
            "peers_died": "{ranks:ranks} died",
            "no_step_for": "{ranks:ranks} made no step for {lasted:time}; at most {most:time} is expected",
            "others_go_on": "the other ranks continue",
            "all_at_one_step": "all ranks stand at the same place, step {step:,}: no rank stands out",
            "behind_in_steps": "{ranks:ranks} finished step {first:,}, others step {last:,}",
            "behind_in_collectives": (
                "{ranks:ranks} began {fewest:,} collectives, others {most:,}: they wait in one that it did not reach"
            ),
            "hangs": "{ranks:ranks} {ranks:one|hangs|hang}",
            "no_rank_stands_out": "no rank makes a step, and none stands out",
            "ranks_wait_for_it": "{ranks:ranks} {ranks:one|waits|wait} for it",
            "replica_makes_no_step": "{replica} has made no step for {lasted:time}",
            "replicas_wait_for_it": "{count:#other replica} {count:one|waits|wait} for it",
        },
    ),
    "frozen": Kind(
        explanation="a rank's process is stopped",
        how="The agent sees in the process table that the process is stopped (SIGSTOP). A process that a debugger "
        "holds does not count as frozen.",
        do=("restart",),
        patience="frozen_act_seconds",
        settings=("frozen_seconds", "frozen_act_seconds"),
        phrases={
            "process_stopped": "the process of {ranks:ranks} has been stopped for {lasted:time}",
            "all_ranks_stopped": "every living rank is stopped: someone may have suspended the job",
            "is_frozen": "{ranks:ranks} {ranks:one|is frozen: its process is|are frozen: their processes are} stopped",
        },
    ),
    "held": Kind(
        explanation="a thread keeps the interpreter",
        how="The process runs, but a thread that should get the interpreter many times a second does not get it: "
        "something holds the GIL. If the process uses the processor meanwhile, it gets more time.",
        do=("restart",),
        patience="held_act_seconds",
        settings=("held_seconds", "held_act_seconds", "busy_act_seconds"),
        phrases={
            "interpreter_kept": "one thread of {ranks:ranks} has kept the interpreter for {lasted:time}",
            "all_ranks_held": "all ranks are held at once: someone may have suspended the job",
            "computes_meanwhile": "{ranks:ranks} computed meanwhile: it may end by itself",
            "is_held": "{ranks:ranks} {ranks:one|hangs: its interpreter is|hang: their interpreters are} held",
        },
    ),
    "straggler": Kind(
        explanation="a rank is slower than its peers",
        how="The weaver compares the time that a rank needs for its own work, without waiting for its peers, with the "
        "times of its peers. The rank must be slower by the factor, and by clearly more than the usual variation "
        "between beats on this machine and of this rank, in three quarters of the latest beats, at three checks in a "
        "row. On GPUs the wait is queued on the device like all other work and cannot be measured, so stragglers are "
        "not reported there.",
        settings=("straggler_factor", "straggler_beats"),
        uses_restart=False,
        phrases={
            "slower_than_peers": "needs {times:.2g} times as long as its {others:one|peer|peers}",
            "own_work": (
                "{own:time} of its own work a step; "
                "{others:one|the other needs|the median of the {others} others is} {peers:time}"
            ),
            "as_fast_as_peers": "as fast as its peers again ({times:.2g} times)",
        },
    ),
    "not_finite": Kind(
        explanation="a loss or metric is NaN or infinite",
        how="The weaver checks the losses and metrics that ranks report. The incident closes after several finite "
        "values.",
        scope="job",
        phrases={
            "values_not_finite_at": "{names:names} {names:one|is|are} NaN or infinite at step {step:,}",
            "values_not_finite_since": "{names:names} {names:one|is|are} NaN or infinite since step {step:,}",
            "values_finite_again": "{names:names} {names:one|is|are} finite again",
        },
    ),
    "loss_spike": Kind(
        explanation="the loss jumped far above its past",
        how="The loss exceeds its recent median by many times its usual spread, in several of the latest beats, or "
        "once by very much more. If the loss stays at a new level, that level becomes the normal one.",
        scope="job",
        settings=("spike_factor",),
        phrases={
            "value_jumped": "{name} jumped from about {usual:.4g} to {value:.4g} at step {step:,}",
            "values_before": "before: {values:.4g}",
            "usual_level": "median {median:.4g}; above {high:.4g} is a jump",
            "value_stays": "{name} stays at its new level, {value:.4g}",
            "value_is_back": "{name} is back at {value:.4g}",
        },
    ),
    "plateau": Kind(
        explanation="the loss has stopped improving",
        how="Over the latest half of the losses that a rank has reported, the loss neither falls nor rises by more "
        "than its noise, and a fall by one percent would have shown. A noisy loss therefore needs a longer run before "
        "it can be called flat, and the first 2,048 beats are never judged. The incident closes when the loss clearly "
        "improves.",
        scope="job",
        detector=PlateauDetector,
        phrases={
            "loss_flat": "loss has stopped improving: about {level:.4g} in the latest {count:,} beats",
            "loss_parts": "{older:.4g} in the older half of them, {newer:.4g} in the newer, give or take {error:.2g}",
            "loss_improves": "loss improves again: {value:.4g}",
        },
    ),
    "gradient": Kind(
        explanation="a gradient norm jumped or overflows",
        how="The same rule for a metric whose name is that of a gradient norm (`grad_norm`, `gnorm`, …). A single "
        "overflow, which loss scaling skips, is ignored; several are reported.",
        scope="job",
        settings=("spike_factor",),
        phrases={"value_overflows": "{name} is NaN or infinite in most of the last beats, at step {step:,}"},
    ),
    "starved": Kind(
        explanation="a rank's steps wait for data",
        how="Most of a step is spent waiting for the next batch, in most of the latest beats.",
        settings=("starved_share",),
        phrases={
            "waits_for_data": "waits for data during {percent:.0f} % of each step",
            "step_and_wait": "a step takes {step:time}, {data:time} of it waiting for data",
            "slowest_stage": (
                "{loaders:#loader}; loading a batch takes {whole:time}, of which the slowest stage, {stage}, is "
                "{seconds:time}"
            ),
            "data_comes_in_time": "no longer waits for data ({percent:.0f} % of each step)",
        },
    ),
    "loader_died": Kind(
        explanation="a process that loads data died",
        how="The ElasticLoader of a rank replaces the process and loads its batches again. The rank reports it in its "
        "beats; the incident closes when no process has died for half a minute.",
        phrases={
            "loader_died": "loader {loader}{pid:if| (process {pid})} died{how:? (|)} and is replaced",
            "loader_had": "it was loading {indices}",
            "loaders_lost": "{deaths:#loader process} died so far, {loaders} should run",
            "loaders_replaced": "{count:#process} died and {count:one|was|were} replaced; no batch was lost",
        },
    ),
    "loader_hung": Kind(
        explanation="a process that loads data hangs",
        how="Training waits for a batch that a process of its ElasticLoader has been loading for much longer than "
        "batches take. The rank captures the stack of that process.",
        phrases={
            "loader_hangs": "loader {loader}{pid:if| (process {pid})} has been loading one batch for {seconds:time}",
            "loader_goes_on": "the loader continues",
        },
    ),
    "slowdown": Kind(
        explanation="steps take longer than they used to",
        how="Steps take longer than earlier steps of the same rank, in nine beats in a row or in three quarters of the "
        "latest beats. A changed value or another batch size starts a new baseline.",
        scope="job",
        settings=("slowdown_factor",),
        phrases={
            "steps_slower": "steps take {seconds:time}, {times:.1f} times as long as before ({normal:time})",
            "steps_as_before": "steps take {seconds:time} again",
            "beats_slow": "most of the latest beats were slow{sample_ms:if|, {sample_ms:.3g} ms a sample|}",
            "normal_learnt_again": "values were changed: torchLoom learns again what is normal",
        },
    ),
    "memory": Kind(
        explanation="memory will soon be full",
        how="The memory of a rank, or of its device, grows so steadily that the machine would soon be full. Filling "
        "caches and a single increase do not count.",
        settings=("memory_horizon_seconds",),
        phrases={
            "memory_of_process": "memory of the process",
            "memory_of_device": "memory of the device",
            "memory_grows": "{what} grows by {rate:,.0f} MB a minute: full in {left:time}",
            "memory_steady": "{what} no longer grows: {mb:,.0f} MB",
            "memory_limit": "{mb:,.0f} MB in use, the limit is {limit:,.0f} MB",
        },
    ),
    "overdue": Kind(
        explanation="a checkpoint should have come by now",
        how="No checkpoint has been written for several times the usual interval.",
        scope="job",
        settings=("overdue_factor",),
        phrases={
            "checkpoint_late": "no checkpoint for {waited:time}; they came every {usual:time}",
            "checkpoints_apart": "the last {count} were at most {longest:time} apart",
        },
    ),
    "device": Kind(
        explanation="a device is said to be broken",
        how="A monitoring system, an agent (XID errors, uncorrected ECC errors) or a person with `loom fail` reports "
        "that a device is broken. It counts as broken until every source has withdrawn its report, or until a person "
        "runs `loom recover`.",
        do=("evict",),
        limit=5,  # an alert that comes and goes must not end a job each time
        scope="device",
        uses_restart=False,
    ),
    "device_warning": Kind(
        explanation="a device is hot, throttled or ageing",
        how="An agent or an alert reports that a device is hot, throttled or losing memory rows.",
        scope="device",
        settings=("device_temperature_celsius",),
        uses_restart=False,
    ),
}
HANGS = tuple(name for name, kind in KINDS.items() if kind.patience)
"""Kinds in which ranks make no step while it lasts, and which may end by themselves."""
DETECTORS = tuple(kind.detector for kind in KINDS.values() if kind.detector is not None)

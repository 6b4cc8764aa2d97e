"""What an operator submits: the task, its rules, and its torchft settings."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from torchloom.protocol.ids import Name, Seconds
from torchloom.protocol.message import Part

EventKind = Annotated[str, Meta(pattern=r"^[a-z][a-z_]{0,39}$")]
"""What can be wrong, by its name in the registry, `core/detect/kinds_and_responses.py`.

On the wire any name is allowed, so that an older reader understands the log of a newer weaver. The weaver refuses a
task with a rule for an unknown kind.
"""
Response = Literal["report", "stacks", "checkpoint", "pause", "drain", "restart", "evict", "rollback"]
Path = Annotated[str, Meta(max_length=4096)]
Line = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=1, le=1000)]


class Rule(Part, frozen=True):
    """What to do when something is wrong with a job."""

    on: EventKind
    do: Annotated[tuple[Response, ...], Meta(min_length=1, max_length=8)]
    after: Seconds | None = None
    """So long it may last before anything is done; absent: as the settings say."""
    back: Count = 1
    """Checkpoints to roll back."""
    skip: bool = False
    """Leave out the batches that led there, after a rollback."""
    limit: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    """Most often it is done within the job's window of restarts; after that it is only reported."""


class Option(NamedTuple):
    """Marks a field of a job as an option of `loom run` of the same name. `torchloom.job.options_from_spec` adds it."""

    help: str
    metavar: str = ""


class Torchft(Part, frozen=True):
    """A job of replicas under torchft. Each replica fails and restarts alone, while the others continue."""

    replicas: Annotated[Count, Option("Replicas to start with --torchft", "N")] = 2
    min_replicas: Annotated[Count, Option("Smallest number of replicas that commits a step", "N")] = 1
    spares: Annotated[int, Meta(ge=0, le=1000), Option("Further replicas, for a Manager with spares", "N")] = 0
    """Kept up to date, so that they can replace a lost replica at once."""
    lighthouse: Annotated[
        Line,
        Option("Lighthouse to use: loom, stock (torchft's own), or the address of one: http://host:29510", "WHICH"),
    ] = "loom"
    heartbeat_timeout: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Seconds of silence after which the lighthouse no longer waits for a replica whose state is unknown."""
    join_timeout: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds for which a quorum waits for replicas that are alive and not yet ready."""


class JobSettings(Part, frozen=True, kw_only=True):
    """Settings of a job with one name everywhere: in job.toml, as an option of `loom run`, and on the wire.

    A new one is declared here and read where it takes effect. Option, job file, bounds and documentation follow.
    """

    max_restarts: Annotated[int, Meta(ge=0, le=1_000_000), Option("Restarts allowed within --restart-window", "N")] = 3
    restart_window: Annotated[
        float, Meta(gt=0, le=1e9), Option("Seconds over which --max-restarts is counted", "S")
    ] = 3600.0
    checkpoint_dir: Annotated[Path, Option("Folder whose newest valid checkpoint the job resumes from", "PATH")] = ""
    checkpoint_pattern: Annotated[Line, Option("Consider only checkpoints named like 'step_{step}.pt'", "NAME")] = ""
    resume_arg: Annotated[
        Line,
        Option("Arguments added when there is a checkpoint to resume from: '--resume_from_checkpoint {path}'", "ARGS"),
    ] = ""
    standby: Annotated[bool, Option("Keep a process that has imported torch, from which ranks are forked")] = True
    preload: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^\w+(\.\w+)*$", max_length=200)], ...],
        Meta(max_length=100),
        Option("Module that the standby process imports besides torch, such as transformers", "MODULE"),
    ] = ()
    env: Annotated[
        dict[str, str], Meta(max_length=1000), Option("Environment variable of the ranks", "NAME=VALUE")
    ] = {}
    """Set in addition to the environment of the agent."""
    threads_per_rank: Annotated[
        int,
        Meta(ge=0, le=1024),
        Option(
            "Threads of the math libraries in each rank (OMP_NUM_THREADS and similar); 0: one if ranks share a node",
            "N",
        ),
    ] = 0
    """Overrides the environment of the agent. `env` overrides it."""
    log_dir: Annotated[Path, Option("Folder for the output of the ranks", "PATH")] = ""
    grace: Annotated[float, Meta(ge=0, le=3600), Option("Seconds between asking a rank to end and killing it", "S")] = (
        10.0
    )
    check: Annotated[bool, Option("Check the nodes before ranks start there, and leave out unfit ones")] = False
    share: Annotated[bool, Option("Share devices with other jobs that do the same")] = False
    weight: Annotated[
        float, Meta(gt=0, le=1000), Option("Weight of the job when loader processes are allocated", "X")
    ] = 1.0
    min_loaders: Annotated[
        int, Meta(ge=0, le=512), Option("Smallest number of loader processes that the scheduler leaves each rank", "N")
    ] = 1
    """With 0, a rank may have to load its data itself, between two steps."""
    max_loaders: Annotated[
        int, Meta(ge=0, le=512), Option("Largest number that it gives each rank; 0: no limit", "N")
    ] = 0
    samples: Annotated[
        int, Meta(ge=0, le=2**53), Option("Samples that the job trains in all, for the objective makespan", "N")
    ] = 0
    """0 if it is not known."""
    priority: Annotated[
        int, Meta(ge=-1000, le=1000), Option("Jobs of a higher priority start first, and may release lower ones", "N")
    ] = 0
    """Only jobs that can save are released, and they continue by themselves when there is room."""
    deadline: Annotated[
        float, Meta(ge=0, le=1e9), Option("Seconds after its arrival in which the job should end; 0: no deadline", "S")
    ] = 0.0
    """Of jobs with the same priority that wait, the one with the earliest deadline starts first."""
    python: Path = ""
    """The interpreter; empty for the one that runs the agent."""
    node: Name | None = None
    """The only node that may run it."""


class DeviceGroup(Part, frozen=True):
    """The ranks of a job on one node, each with its device."""

    devices: Annotated[tuple[Annotated[int, Meta(ge=0, le=1023)], ...], Meta(min_length=1, max_length=1024)]
    """Their places in the node's list of devices; where there are none, of cores."""
    node: Name | None = None
    """Absent: any node that no other group of the job has."""


class Task(JobSettings, frozen=True, kw_only=True):
    """What to run, how often, and what to do when it fails."""

    argv: Annotated[tuple[Annotated[str, Meta(max_length=100_000)], ...], Meta(min_length=1, max_length=10_000)]
    """The script and its arguments, or -m, the module and its arguments."""
    cwd: Path = ""
    per_node: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks on each node."""
    least: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Smallest number of ranks on a node where there is no room for more; absent: all are needed."""
    nodes: Annotated[int, Meta(ge=1, le=10_000)] = 1
    min_nodes: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Smallest number of nodes where there are no more; absent: all are needed."""
    attended: bool = False
    """The process that submitted it runs its ranks. Without that process nobody continues it."""
    policy: Annotated[tuple[Rule, ...], Meta(max_length=64)] = ()
    """Rules that differ from the defaults."""
    dry_run: bool = False
    """Only report what the policy would do."""
    torchft: Torchft | None = None
    part_of: Name | None = None
    """The job of which this is one replica; absent for a job of one part."""
    replica: Name = "main"
    """The replica that its ranks belong to."""
    groups: Annotated[tuple[DeviceGroup, ...], Meta(max_length=1000)] = ()
    """Devices that the job names itself, in the order of its ranks. They take the place of `per_node` and `nodes`."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Where the ranks of the first attempt meet; 0: any free port. Later attempts always take a free one."""
    delay: Annotated[float, Meta(ge=0, le=1e8)] = 0.0
    """Seconds after its submission at which the job arrives."""
    after: Name | None = None
    """The job that must have ended before this one starts."""

    @property
    def world_size(self) -> int:
        """The number of ranks that it asks for."""
        return sum(len(group.devices) for group in self.groups) or self.per_node * self.nodes

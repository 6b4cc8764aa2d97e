"""The identity of a training process: job, replica and rank, from arguments of attach() and the launcher's environment.

Everything here is pure: the environment, the command line, the host name and the pid are arguments. An invalid argument
of attach() raises at once, before training; an invalid environment variable is corrected or ignored, with a warning.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from torchloom.errors import BadInput
from torchloom.protocol.ids import MAX_RANK, NAME, RankId, check_name

MAX_DEVICES = 64
LAUNCHER = "loom"
"""The value of TORCHLOOM_LAUNCHER in a rank that torchLoom started."""
_VARIABLES = {"slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")}
"""Where launchers put rank, world size and local rank, unless as torchrun does."""
_NOT_A_SCRIPT = frozenset({"", "-", "-c", "-m"})
"""What sys.argv[0] is when no file was started."""


@dataclass(frozen=True)
class Host:
    """The process as the operating system knows it."""

    name: str
    pid: int
    argv0: str


@dataclass(frozen=True)
class Names:
    """The identity of this process, and how it was found."""

    rank: RankId
    world_size: int
    local_rank: int | None
    """None for a process without a launcher."""
    node: str
    launcher: str
    chosen: bool
    """Job or replica were chosen here, so the user should see them."""
    warnings: tuple[str, ...] = ()


def find_names(
    environ: Mapping[str, str],
    host: Host,
    *,
    job: object = None,
    replica: object = None,
    rank: object = None,
    world_size: object = None,
) -> Names:
    warnings: list[str] = []
    launcher = _launcher(environ)
    rank_variable, world_variable, local_variable = _VARIABLES.get(launcher, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    env_rank = _number(environ, rank_variable, 0, warnings)
    rank_number = _whole("rank", rank, 0) if rank is not None else env_rank or 0
    if world_size is not None:
        world = _whole("world_size", world_size, 1)
    else:
        env_world = None if env_rank is None else _number(environ, world_variable, 1, warnings)
        world = env_world or min(rank_number + 1, MAX_RANK)
    local_rank = _number(environ, local_variable, 0, warnings)

    env_job = _from_environ(environ, "TORCHLOOM_JOB", warnings)
    env_replica = _from_environ(environ, "TORCHLOOM_REPLICA", warnings)
    job_name = check_name("job", job) if job is not None else env_job or script_name(host.argv0)
    if replica is not None:
        replica_name = check_name("replica", replica)
    else:
        shared = env_rank is not None or rank is not None
        replica_name = env_replica or _replica(environ, job_name, launcher, host, shared=shared)
    identity = RankId(job_name, replica_name, rank_number)
    if launcher == LAUNCHER and env_job and env_replica and env_rank is not None:
        assigned = RankId(env_job, env_replica, env_rank)  # all that its credential lets it be
        if identity != assigned:
            warnings.append(f"`loom run` started this as {assigned}, so it is not {identity}")
        identity = assigned
    return Names(
        rank=identity,
        world_size=world,
        local_rank=local_rank,
        node=(environ.get("TORCHLOOM_NODE") if launcher == LAUNCHER else "") or host.name[:255],
        launcher=launcher,
        chosen=(job is None and not env_job) or (replica is None and not env_replica),
        warnings=tuple(warnings),
    )


def script_name(argv0: str) -> str:
    """A job name made of the script's file name; of its folder for a package's __main__."""
    if argv0 in _NOT_A_SCRIPT:
        return "train"
    path = PurePath(argv0)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return sanitised(stem) or "train"


def sanitised(text: str) -> str:
    """The closest valid name, or an empty string."""
    return re.sub(r"[^A-Za-z0-9_:-]+", "-", text).strip("-")[:128]


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _launcher(environ: Mapping[str, str]) -> str:
    if environ.get("TORCHLOOM_LAUNCHER") == LAUNCHER:
        return LAUNCHER
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    # Inside an allocation every process sees Slurm's variables; a RANK means that another launcher has started it.
    return "slurm" if "SLURM_PROCID" in environ and "RANK" not in environ else ""


def _replica(environ: Mapping[str, str], job: str, launcher: str, host: Host, *, shared: bool) -> str:
    """A name that is the same on all ranks of a world; for a single process, one that no second process has."""
    group = sanitised(environ.get("REPLICA_GROUP_ID", ""))
    if group:  # torchft numbers its replicas
        return f"{job}_{group}"[:128]
    run = sanitised(environ.get("TORCHELASTIC_RUN_ID", ""))
    if launcher == "torchrun" and run and run != "none":
        return f"run-{run[:8]}" if _UUID.fullmatch(run) else run  # --standalone invents a long one; users type it
    if launcher == "slurm":
        slurm_job = sanitised(environ.get("SLURM_JOB_ID", "") or environ.get("SLURM_JOBID", ""))
        return f"slurm-{slurm_job}"[:128] if slurm_job else "main"
    return "main" if shared or launcher else sanitised(f"{host.name[:100]}-{host.pid}")


def _from_environ(environ: Mapping[str, str], name: str, warnings: list[str]) -> str:
    text = environ.get(name, "")
    if not text or NAME.fullmatch(text):
        return text
    valid = sanitised(text)
    warnings.append(f"{name}={text!r} is not a name; " + (f"using {valid!r}" if valid else "it is ignored"))
    return valid


def _number(environ: Mapping[str, str], name: str, least: int, warnings: list[str]) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) and least <= int(text) <= MAX_RANK:
        return int(text)
    warnings.append(f"{name}={text!r} is not a number from {least} to {MAX_RANK}; it is ignored")
    return None


def _whole(what: str, value: object, least: int) -> int:
    """A number passed to attach(): of any integer type, but not a bool or a text."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not least <= number <= MAX_RANK:
        raise BadInput(f"{what} {value!r} is not a whole number from {least} to {MAX_RANK}")
    return number


def check_devices(devices: Iterable[str] | None) -> tuple[str, ...] | None:
    if devices is None:
        return None
    if isinstance(devices, str):
        raise BadInput(f"devices={devices!r} is one text", hint="pass a list of device ids")
    ids = tuple(check_name("device", device) for device in devices)
    if len(ids) > MAX_DEVICES:
        raise BadInput(f"{len(ids)} devices are more than one rank can have ({MAX_DEVICES})")
    return ids

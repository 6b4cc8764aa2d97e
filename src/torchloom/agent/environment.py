"""What a rank finds in its environment: what torchrun would have set, and what torchLoom adds. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchloom.core.state.run_states import LIGHTHOUSE
from torchloom.core.torchft.replica_groups import ADDRESS, FOLDER
from torchloom.protocol.node import Launch, Place

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables from which libraries read how many threads to start."""


@dataclass(frozen=True)
class RankPaths:
    """Paths of one rank on this node."""

    error_file: str = ""
    creds: str = ""
    addr: str = ""
    state: str = ""
    node: str = ""
    """What its agent is called, if that is not the machine's own name."""
    interface: str = ""
    """The network through which other nodes reach this one."""


def passed_on(environ: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """The environment of an agent, as far as it is text: with anything else no rank could be started."""
    passed = dict(environ)
    for name, value in sorted(environ.items()):
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError:
            say(f"the variable {name!a} is not passed on: it is not UTF-8")
            del passed[name]
    return passed


def rank_environment(base: Mapping[str, str], launch: Launch, place: Place, paths: RankPaths) -> dict[str, str]:
    """The whole environment of a rank. What the job's own settings say comes before what the node has."""
    task = launch.task
    nodes = list(dict.fromkeys(p.node for p in launch.places))
    node_rank = nodes.index(place.node)
    world = len(launch.places)
    local_world = sum(1 for p in launch.places if p.node == place.node)
    env = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    if task.threads_per_rank:
        env |= dict.fromkeys(THREAD_COUNTS, str(task.threads_per_rank))
    elif local_world > 1 or task.share:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks share the cores
    if len(nodes) > 1 and paths.interface:
        for library in ("GLOO", "NCCL"):
            env.setdefault(f"{library}_SOCKET_IFNAME", paths.interface)
    devices = [p.device for p in launch.places if p.node == place.node and p.device]
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    env |= task.env
    env |= {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.host,
        "MASTER_PORT": str(launch.port),
        "TORCHELASTIC_RUN_ID": launch.job,
        "TORCHELASTIC_RESTART_COUNT": str(launch.ordinal - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(task.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # the first rank holds the store, a fresh one for each attempt
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "TORCHLOOM_LAUNCHER": "loom",
        "TORCHLOOM_JOB": task.part_of or launch.job,
        "TORCHLOOM_REPLICA": task.replica,
        "TORCHLOOM_INCARNATION": place.incarnation,
        "TORCHLOOM_RESUME_FROM": launch.resume,
    }
    step = "" if launch.resume_step is None else str(launch.resume_step)
    skip = "" if launch.skip is None else f"{launch.skip[0]}-{launch.skip[1]}"
    optional = {"CREDS": paths.creds, "ADDR": paths.addr, "STATE": paths.state, "NODE": paths.node}
    optional |= {"RESUME_STEP": step, "SKIP": skip}
    return env | {f"TORCHLOOM_{name}": value for name, value in optional.items() if value}


def rank_argv(launch: Launch, folder: str) -> tuple[str, ...]:
    """The command of a rank; with something to resume from, the argument that says so."""
    argv = (launch.task.python or sys.executable, *launch.task.argv)
    if launch.task.replica == LIGHTHOUSE:
        placeholders = {ADDRESS: f"{launch.host}:{launch.port}", FOLDER: folder}
        argv = tuple(placeholders.get(word, word) for word in argv)
    if launch.resume and launch.task.resume_arg:
        words = shlex.split(launch.task.resume_arg)
        step = "" if launch.resume_step is None else str(launch.resume_step)
        argv += tuple(word.replace("{path}", launch.resume).replace("{step}", step) for word in words)
    return argv

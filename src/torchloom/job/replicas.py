"""Replicas under torchft as people ask for them, on the command line or in a job.toml: checked the same way."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

from msgspec.structs import replace

from torchloom.core.torchft.replica_groups import OURS, STOCK, timeouts
from torchloom.errors import BadInput
from torchloom.job.options_from_spec import read_table
from torchloom.protocol.job_spec import Task, Torchft

MOST = 1000


def as_replicas(
    task: Task, given: Mapping[str, object], gpus: int = 0, environ: Mapping[str, str] = MappingProxyType({})
) -> Task:
    """Make a job of replicas of a task. If one machine runs all of them, `gpus` is the number of its GPUs.

    Variables about torchft in `environ` override the defaults of torchLoom; the environment of the task overrides both.
    """
    ft = _torchft(given)
    count = ft.replicas + ft.spares
    if task.nodes > 1 or task.least is not None:
        raise BadInput(
            "a replica has a fixed number of ranks, on one node", hint="more replicas instead: --replicas, replicas ="
        )
    if gpus and task.per_node * count > gpus:
        wanted = f"{count} replicas of {task.per_node} rank{'s' if task.per_node != 1 else ''}"
        raise BadInput(f"{wanted} and {gpus} GPUs", hint="fewer replicas, fewer ranks each, or hide the GPUs from it")
    own = {name: environ[name] for name in ("RUST_LOG", *timeouts(ft)) if name in environ}
    env = {"RUST_LOG": "warn"} | own | task.env  # otherwise torchft logs every step
    modules = task.preload if "torchft" in task.preload else (*task.preload, "torchft")
    return replace(task, torchft=ft, env=env, preload=modules)


def _torchft(given: Mapping[str, object]) -> Torchft:
    for key, least in {"replicas": 1, "min_replicas": 1, "spares": 0}.items():
        if isinstance(count := given.get(key, least), int) and not least <= count <= MOST:
            raise BadInput(f"{key} cannot be {count}", hint=f"{least} to {MOST}")
    ft = read_table(given, Torchft, hint=f"1 to {MOST} replicas, 0 to {MOST} spares")
    if ft.min_replicas > ft.replicas:
        raise BadInput(
            f"at least {ft.min_replicas} of {ft.replicas} replicas", hint=f"min_replicas from 1 to {ft.replicas}"
        )
    if ft.lighthouse not in {OURS, STOCK} and not _is_address(ft.lighthouse):
        raise BadInput(
            f"no such lighthouse: {ft.lighthouse!r}", hint="loom, stock, or an address such as http://localhost:29510"
        )
    if not ft.heartbeat_timeout < ft.join_timeout:
        raise BadInput(
            f"a join timeout of {ft.join_timeout:g} s, and a heartbeat timeout of {ft.heartbeat_timeout:g} s",
            hint="a quorum waits for replicas that are alive: longer than it takes to see that one is not",
        )
    return ft


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False

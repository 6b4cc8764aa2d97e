"""The names that the shell offers for an argument, asked from the live weaver."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from collections.abc import Iterable

from torchloom.bus.weaver_client import WeaverClient
from torchloom.cli.known_names import devices, replicas
from torchloom.protocol.scheduling import QuerySchedule, ScheduleView
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

_COMPLETION_SECONDS = 0.7


def complete(what: str, prefix: str, typed: Namespace) -> list[str]:
    """Those that begin with a prefix; none if the weaver does not answer at once."""

    async def look() -> Iterable[object]:
        settings = Settings.from_env().with_state(getattr(typed, "state", None))
        async with WeaverClient(settings, Role.VIEWER, timeout=_COMPLETION_SECONDS, connect_timeout=0.5) as weaver:
            return await _names(what, weaver, typed)

    with contextlib.suppress(Exception):
        names = asyncio.run(asyncio.wait_for(look(), _COMPLETION_SECONDS))
        return [name for name in map(str, names) if name.startswith(prefix)]
    return []


async def _names(what: str, weaver: WeaverClient, typed: Namespace) -> Iterable[object]:
    """What may stand for an argument, which `what` names; `typed` is the command line so far."""
    match what:
        case "agent":
            return [node.node for node in await weaver.nodes()]
        case "run":
            runs = (await weaver.runs()).runs
            return dict.fromkeys([*(run.task.part_of or run.job for run in runs), *(run.job for run in runs)])
        case "knob":
            job = typed.target.partition("/")[0]
            return [f"{knob.spec.name}=" for knob in (await weaver.knobs(job)).knobs]
        case "budget":
            return [f"{node.node}=" for node in (await weaver.look(QuerySchedule(), ScheduleView)).nodes]
        case "change":
            return [change.id for change in (await weaver.knobs(typed.job)).changes]
    view = await weaver.cluster(most=1000)
    jobs = [job.job for job in view.jobs]
    match what:
        case "job":
            return jobs
        case "job or incident":
            return [*jobs, *(incident.id for incident in view.incidents)]
        case "device":
            return devices(view)
        case "node":
            return sorted({rank.node for rank in view.ranks})
        case "agent or replica":
            return [*await _names("agent", weaver, typed), *replicas(view)]
        case "replica":
            return [*(replica.replica for replica in replicas(view)), *replicas(view)]
        case "rank":
            return [rank.rank for rank in view.ranks]
        case "target":
            return [*jobs, *replicas(view), *(rank.rank for rank in view.ranks)]
    raise AssertionError(f"no argument is a {what}")

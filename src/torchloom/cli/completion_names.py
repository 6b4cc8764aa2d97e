"""Names as people type them: resolved against what the weaver knows, with a guess where one is unknown."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchloom.errors import BadInput, Refused
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from argparse import Namespace

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.protocol.ids import RankId, ReplicaId
    from torchloom.protocol.views import ClusterView

MANUAL_JOB = "manual"
"""The job of a replica registered by hand that no job has."""
_COMPLETION_SECONDS = 0.7
_LISTED = 5
"""Devices named where several could be meant."""


def _check(what: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise unknown(what, name, names)
    return name


def known_job(view: ClusterView, name: str) -> str:
    return _check("job", name, [job.job for job in view.jobs])


def known_device(view: ClusterView, name: str) -> str:
    return _check("device", name, devices(view))


def meant_device(view: ClusterView, text: str) -> str:
    """The device of this name, or the only one whose name begins so. The weaver refuses an unknown one."""
    names = devices(view)
    matches = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(matches) > 1:
        more = f" and {len(matches) - _LISTED} more" if len(matches) > _LISTED else ""
        hint = f"say which: {', '.join(matches[:_LISTED])}{more}"
        raise Refused(f"{len(matches)} devices begin with {text!r}", hint=hint)
    return matches[0] if matches else text


def known_node(view: ClusterView, name: str) -> str:
    nodes = {a.node for a in view.assignments} | {d.node for d in view.devices} | {r.node for r in view.ranks}
    return _check("node", name, sorted(nodes - {""}))


def devices(view: ClusterView) -> list[str]:
    return sorted({device.device for device in view.devices} | {assignment.device for assignment in view.assignments})


def replicas(view: ClusterView) -> list[ReplicaId]:
    return sorted({rank.rank.replica_id for rank in view.ranks} | {a.replica for a in view.assignments})


def known_replica(view: ClusterView, text: str) -> ReplicaId:
    """`replica`, or `job/replica` where several jobs have one of that name."""
    replica = find_replica(view, text)
    if replica is None:
        known = replicas(view)
        raise unknown("replica", text, [str(r) if "/" in text else r.replica for r in known])
    return replica


def find_replica(view: ClusterView, text: str) -> ReplicaId | None:
    job, slash, name = text.rpartition("/")
    matching = [r for r in replicas(view) if r.replica == name and (not slash or r.job == job)]
    if len(matching) > 1:
        raise Refused(
            f"replica {name!r} exists in {len(matching)} jobs",
            hint=f"say which: {' or '.join(map(str, matching))}",
        )
    return matching[0] if matching else None


def known_rank(view: ClusterView, rank: RankId) -> RankId:
    _check("rank", str(rank), [str(other.rank) for other in view.ranks])
    return rank


def parse_rank(text: str) -> RankId:
    from torchloom.protocol.ids import RankId, check_name

    job, _, rest = text.partition("/")
    replica, _, number = rest.partition("/")
    if not number.isdecimal():
        raise BadInput(f"{text!r} is not a rank", hint="a rank is written JOB/REPLICA/RANK, such as mnist/hi/0")
    return RankId(check_name("job", job), check_name("replica", replica), int(number))


Finder = Callable[["WeaverClient", "Namespace"], Awaitable[Iterable[object]]]


def completer(find: Finder) -> Callable[..., list[str]]:
    """For argcomplete: names asked from the live weaver, or nothing if it does not answer at once."""

    def complete(prefix: str, parsed_args: Namespace, **_: Any) -> list[str]:
        with contextlib.suppress(Exception):
            return [name for name in map(str, _find(find, parsed_args)) if name.startswith(prefix)]
        return []

    return complete


def _seen(what: Callable[[ClusterView], Iterable[object]]) -> Callable[..., list[str]]:
    """A completer of what is on the picture."""

    async def find(weaver: WeaverClient, _typed: Namespace) -> Iterable[object]:
        return what(await weaver.cluster(most=1000))

    return completer(find)


async def _knobs(weaver: WeaverClient, typed: Namespace) -> Iterable[object]:
    job = typed.target.partition("/")[0]
    return [f"{knob.spec.name}=" for knob in (await weaver.knobs(job)).knobs]


async def _changes(weaver: WeaverClient, typed: Namespace) -> Iterable[object]:
    return [change.id for change in (await weaver.knobs(typed.job)).changes]


async def _agents(weaver: WeaverClient, _typed: Namespace) -> Iterable[object]:
    return [node.node for node in await weaver.nodes()]


async def _agents_and_replicas(weaver: WeaverClient, typed: Namespace) -> Iterable[object]:
    return [*await _agents(weaver, typed), *replicas(await weaver.cluster(most=1000))]


async def _runs(weaver: WeaverClient, _typed: Namespace) -> Iterable[object]:
    runs = (await weaver.runs()).runs
    return dict.fromkeys([*(run.task.part_of or run.job for run in runs), *(run.job for run in runs)])


async def _jobs_and_incidents(weaver: WeaverClient, _typed: Namespace) -> Iterable[object]:
    view = await weaver.cluster(most=0)
    return [*(job.job for job in view.jobs), *(incident.id for incident in view.incidents)]


def complete_rule(prefix: str, **_: Any) -> list[str]:
    """A rule of a policy as far as it is typed: its event, then its responses."""
    from torchloom.job.policy_syntax import EVENTS, RESPONSES

    event, equals, responses = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in EVENTS if name.startswith(event)]
    done, plus, typed = responses.rpartition("+")
    return [f"{event}={done}{plus}{name}" for name in RESPONSES if name.startswith(typed)]


def targets(view: ClusterView) -> list[object]:
    """Whatever a command can be given to: jobs, their replicas, their ranks."""
    return [*(job.job for job in view.jobs), *replicas(view), *(rank.rank for rank in view.ranks)]


complete_device = _seen(devices)
complete_job = _seen(lambda view: [job.job for job in view.jobs])
complete_replica = _seen(lambda view: [r.replica for r in replicas(view)] + [str(r) for r in replicas(view)])
complete_rank = _seen(lambda view: [rank.rank for rank in view.ranks])
complete_node = _seen(lambda view: sorted({rank.node for rank in view.ranks}))
complete_target = _seen(targets)
complete_agent = completer(_agents)
complete_drained = completer(_agents_and_replicas)
complete_run = completer(_runs)
complete_knob = completer(_knobs)
complete_why = completer(_jobs_and_incidents)
complete_change = completer(_changes)


def _find(find: Finder, typed: Namespace) -> Iterable[object]:
    import asyncio

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.protocol.subjects import Role
    from torchloom.settings import Settings

    async def look() -> Iterable[object]:
        settings = Settings.from_env().with_state(getattr(typed, "state", None))
        async with WeaverClient(settings, Role.VIEWER, timeout=_COMPLETION_SECONDS, connect_timeout=0.5) as weaver:
            return await find(weaver, typed)

    return asyncio.run(asyncio.wait_for(look(), _COMPLETION_SECONDS))

"""Names as people type them, resolved against what the weaver knows, with a guess where one is unknown."""

from __future__ import annotations

from collections.abc import Sequence

from torchloom.errors import BadInput, Refused
from torchloom.protocol.ids import RankId, ReplicaId, check_name
from torchloom.protocol.views import ClusterView
from torchloom.shared.suggestions import unknown

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
        raise unknown("replica", text, [str(r) if "/" in text else r.replica for r in replicas(view)])
    return replica


def find_replica(view: ClusterView, text: str) -> ReplicaId | None:
    job, slash, name = text.rpartition("/")
    matching = [r for r in replicas(view) if r.replica == name and (not slash or r.job == job)]
    if len(matching) > 1:
        hint = f"say which: {' or '.join(map(str, matching))}"
        raise Refused(f"replica {name!r} exists in {len(matching)} jobs", hint=hint)
    return matching[0] if matching else None


def known_rank(view: ClusterView, rank: RankId) -> RankId:
    _check("rank", str(rank), [str(other.rank) for other in view.ranks])
    return rank


def parse_rank(text: str) -> RankId:
    job, _, rest = text.partition("/")
    replica, _, number = rest.partition("/")
    if not number.isdecimal():
        raise BadInput(f"{text!r} is not a rank", hint="a rank is written JOB/REPLICA/RANK, such as mnist/hi/0")
    return RankId(check_name("job", job), check_name("replica", replica), int(number))

"""Verbs that report devices to the weaver: fail, recover, register."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from torchloom.cli.known_names import find_replica, meant_device
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import Refused
from torchloom.protocol.ids import ReplicaId, check_name
from torchloom.protocol.operator import Done

if TYPE_CHECKING:
    from torchloom.client import AsyncClient

MANUAL_JOB = "manual"
"""The job of a replica registered by hand that no job has."""


def add(verbs: Verbs) -> None:
    verb = verbs["fail"].define(fail, 'loom fail GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28 --cause "XID 79"')
    verb.add_argument("device", complete="device")
    verb.add_argument("--cause", default="unspecified", metavar="TEXT", help="Cause of the failure, for the incident")

    verbs["recover"].define(recover, "loom recover GPU-307a982d").add_argument("device", complete="device")

    verb = verbs["register"].define(register, "loom register GPU-307a982d train_ddp_0")
    verb.add_argument("device", complete="device")
    verb.add_argument("replica", complete="replica")
    verb.add_job("--job", help="Job of the replica")


def fail(call: Call) -> int:
    """The answer names the replicas on it. The beginning of the device name is enough, if it is unique.
    An unknown device is refused.
    """
    return _report(call, lambda client, device: client.fail(device, call.args.cause))


def recover(call: Call) -> int:
    return _report(call, lambda client, device: client.recover(device))


def _report(call: Call, report: Callable[[AsyncClient, str], Coroutine[Any, Any, Done]]) -> int:
    """Say it of the device that is meant."""
    name = check_name("device", call.args.device)

    async def work(client: AsyncClient) -> Done:
        return await report(client, meant_device(await client.status(), name))

    return call.show_done(call.request(work))


def register(call: Call) -> int:
    """A replica that exists in one job means that one; in several, write JOB/REPLICA; in none, it belongs to the
    job `manual` unless --job names one.
    """
    device = check_name("device", call.args.device)

    async def work(client: AsyncClient) -> Done:
        return await client.register(device, *await _replica(client, call.args.replica, call.args.job))

    return call.show_done(call.request(work))


async def _replica(client: AsyncClient, text: str, job: str | None) -> ReplicaId:
    named_job, slash, name = text.rpartition("/")
    check_name("replica", name)
    if slash:
        check_name("job", named_job)
        if job is not None and job != named_job:
            raise Refused(f"--job says {job!r} and the replica says {named_job!r}", hint="give one of them")
        return ReplicaId(named_job, name)
    if job is not None:
        return ReplicaId(check_name("job", job), name)
    return find_replica(await client.status(), name) or ReplicaId(MANUAL_JOB, name)

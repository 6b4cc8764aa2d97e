"""Verbs that tell the weaver something: fail, recover, register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import completion_names
from torchloom.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.protocol.ids import ReplicaId
    from torchloom.protocol.operator import Ask, Done


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "fail", fail, "report a device as failed, as a monitoring system would",
        "The answer names the replicas on it. The beginning of the device name is enough, if it is unique.\n"
        "An unknown device is refused.\n\n"
        '  loom fail GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28 --cause "XID 79"', listing=True,
    )  # fmt: skip
    verb.add_argument("device", metavar="DEVICE", complete=completion_names.complete_device)
    verb.add_argument("--cause", default="unspecified", metavar="TEXT", help="Cause of the failure, for the incident")

    verb = verbs.add(
        "recover", recover, "report a failed device as working again", "  loom recover GPU-307a982d", listing=True
    )
    verb.add_argument("device", metavar="DEVICE", complete=completion_names.complete_device)

    verb = verbs.add(
        "register", register, "record by hand that a replica uses a device",
        "A replica that exists in one job means that one; in several, write JOB/REPLICA; in none, it belongs to the\n"
        f"job `{completion_names.MANUAL_JOB}` unless --job names one.\n\n"
        "  loom register GPU-307a982d train_ddp_0", listing=True,
    )  # fmt: skip
    verb.add_argument("device", metavar="DEVICE", complete=completion_names.complete_device)
    verb.add_argument("replica", metavar="REPLICA", complete=completion_names.complete_replica)
    verb.add_job("--job", help="Job of the replica")


def fail(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.operator import Fail

    check_name("device", call.args.device)
    return _tell(call, lambda device: Fail(device=device, cause=call.args.cause[:2000], operator=operator()))


def recover(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.operator import Recover

    check_name("device", call.args.device)
    return _tell(call, lambda device: Recover(device=device, operator=operator()))


def register(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.operator import Register

    device = check_name("device", call.args.device)

    async def work(weaver: WeaverClient) -> Done:
        replica = await _replica(weaver, call.args.replica, call.args.job)
        return await weaver.ask(Register(device=device, job=replica.job, replica=replica.replica, operator=operator()))

    return call.show_done(call.query(work, "operator"))


async def _replica(weaver: WeaverClient, text: str, job: str | None) -> ReplicaId:
    from torchloom.protocol.ids import ReplicaId, check_name

    named_job, slash, name = text.rpartition("/")
    check_name("replica", name)
    if slash:
        check_name("job", named_job)
        if job is not None and job != named_job:
            raise Refused(f"--job says {job!r} and the replica says {named_job!r}", hint="give one of them")
        return ReplicaId(named_job, name)
    if job is not None:
        return ReplicaId(check_name("job", job), name)
    existing = completion_names.find_replica(await weaver.cluster(), name)
    return existing or ReplicaId(completion_names.MANUAL_JOB, name)


def _tell(call: Call, ask: Callable[[str], Ask]) -> int:
    """Say it of the device that is meant."""

    async def work(weaver: WeaverClient) -> Done:
        return await weaver.ask(ask(completion_names.meant_device(await weaver.cluster(), call.args.device)))

    return call.show_done(call.query(work, "operator"))

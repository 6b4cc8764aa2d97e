"""Verbs that tell the weaver something: fail, recover, register."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import names
from torchloom.cli.answer import show
from torchloom.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchloom.bus.asking import Asking
    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs
    from torchloom.messages import Ask, Done, ReplicaId


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "fail", fail, "say that a device is broken, as a monitoring system would",
        "The weaver names the replicas on it. The beginning of a device's name will do, if no other begins so.\n"
        "An unknown device is refused and nothing changes.\n\n"
        '  loom fail GPU-307a982d-bf2b-4cc3-64e3-aae456bf6a28 --cause "XID 79"', listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("device", metavar="DEVICE"), names.complete_device)
    verb.add_argument("--cause", default="unspecified", metavar="TEXT", help="what is wrong with it")

    verb = verbs.add(
        "recover", recover, "say that a failed device works again", "  loom recover GPU-307a982d", listing=True
    )
    names.with_names(verb.add_argument("device", metavar="DEVICE"), names.complete_device)

    verb = verbs.add(
        "register", register, "say by hand that a replica uses a device",
        "A replica that exists in one job means that one; in several, write JOB/REPLICA; in none, it belongs to the\n"
        f"job `{names.MANUAL_JOB}` unless --job names one.\n\n  loom register GPU-307a982d train_ddp_0", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("device", metavar="DEVICE"), names.complete_device)
    names.with_names(verb.add_argument("replica", metavar="REPLICA"), names.complete_replica)
    names.with_names(
        verb.add_argument("--job", metavar="JOB", help="the job the replica belongs to"), names.complete_job
    )


def fail(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.messages import Fail, check_name

    check_name("device", call.args.device)
    return _tell(call, lambda device: Fail(device=device, cause=call.args.cause[:2000], operator=operator()))


def recover(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.messages import Recover, check_name

    check_name("device", call.args.device)
    return _tell(call, lambda device: Recover(device=device, operator=operator()))


def register(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.messages import Register, check_name

    device = check_name("device", call.args.device)

    async def work() -> Done:
        from torchloom.bus.asking import Asking
        from torchloom.subjects import Role

        async with Asking(call.settings, Role.OPERATOR) as weaver:
            replica = await _replica(weaver, call.args.replica, call.args.job)
            return await weaver.ask(
                Register(device=device, job=replica.job, replica=replica.replica, operator=operator())
            )

    return show(call, call.wait(work()))


async def _replica(weaver: Asking, text: str, job: str | None) -> ReplicaId:
    from torchloom.messages import ReplicaId, check_name

    named_job, slash, name = text.rpartition("/")
    check_name("replica", name)
    if slash:
        check_name("job", named_job)
        if job is not None and job != named_job:
            raise Refused(f"--job says {job!r} and the replica says {named_job!r}", hint="give one of them")
        return ReplicaId(named_job, name)
    if job is not None:
        return ReplicaId(check_name("job", job), name)
    found = names.find_replica(await weaver.fabric(), name)
    return found or ReplicaId(names.MANUAL_JOB, name)


def _tell(call: Call, ask: Callable[[str], Ask]) -> int:
    """Say it of the device that is meant."""

    async def work() -> Done:
        from torchloom.bus.asking import Asking
        from torchloom.subjects import Role

        async with Asking(call.settings, Role.OPERATOR) as weaver:
            return await weaver.ask(ask(names.meant_device(await weaver.fabric(), call.args.device)))

    return show(call, call.wait(work()))

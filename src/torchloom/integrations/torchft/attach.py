"""attach_manager(): connects a torchft Manager to the threadlet of this process.

    manager = Manager(pg=..., ...)
    loom = torchloom.attach_manager(manager)

The training loop stays as torchft requires it; nothing else needs to be called.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from torchloom.integrations.torchft.committed_steps import CommittedSteps
from torchloom.integrations.torchft.heal_state import HealState
from torchloom.integrations.torchft.manager_internals import member_id, private_attribute, replace, version, warn_once
from torchloom.integrations.torchft.quorum_abort import QuorumAborter
from torchloom.protocol.ids import NAME
from torchloom.protocol.rank import Joined, Regrouped
from torchloom.settings import Settings
from torchloom.threadlet.changes.step_boundary import StepBoundary
from torchloom.threadlet.connection.link import Link
from torchloom.threadlet.connection.rank_state import Membership
from torchloom.threadlet.metrics.meter import Meter
from torchloom.threadlet.process.identity import sanitised
from torchloom.threadlet.threadlet import Threadlet, attach, current, follow

logger = logging.getLogger("torchloom")
_attached: weakref.WeakKeyDictionary[Any, Threadlet] = weakref.WeakKeyDictionary()


def attach_manager(
    manager: Any,
    job: str | None = None,
    replica: str | None = None,
    *,
    devices: Iterable[str] | None = None,
    settings: Settings | None = None,
) -> Threadlet:
    """Attach this process as a rank of the Manager's replica, under torchft's name for it.

    Steps are what the Manager commits; `step()` need not be called, and only reports values. A threadlet that was
    attached before is used. Like attach() it raises for invalid names; after that nothing raises.
    """
    if manager in _attached:
        return _attached[manager]
    member = member_id(manager)
    name = replica or ("" if os.environ.get("TORCHLOOM_REPLICA") else sanitised(member.rpartition(":")[0] or member))
    threadlet = current() or attach(
        job,
        name or None,
        rank=private_attribute(manager, "_group_rank"),
        world_size=private_attribute(manager, "_group_world_size"),
        devices=devices,
        settings=settings,
    )
    try:
        _attached[manager] = threadlet
        follow(threadlet, lambda meter, boundary, link: _listen(manager, member, meter, boundary, link))
    except Exception as error:  # noqa: BLE001  not a Manager, or one of an unknown version
        logger.warning("torchLoom: torchft %s cannot be followed, training continues: %r", version(), error)
    return threadlet


def _listen(manager: Any, id: str, meter: Meter, boundary: StepBoundary, link: Link) -> CommittedSteps:
    tell: Callable[[Any], None] = link.tell if link.state.rank.rank == 0 else lambda _: None  # one rank reports
    member = Membership(_joined(id, link))
    steps = CommittedSteps(manager, meter, boundary, member, tell)
    try:
        steps.begin()
        _watch_group(manager, member, boundary, tell, steps.endings)
        HealState(manager, boundary, link.state.rank.replica, tell).begin(steps.endings)
    except Exception:
        steps.end()  # all or nothing
        raise
    link.join(member)
    return steps


def _joined(id: str, link: Link) -> Joined | None:
    if not NAME.fullmatch(id):
        if id:
            warn_once(
                "member", f"{id!r} cannot be reported to the weaver: use letters, digits, _ : and - in replica_id"
            )
        return None
    lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    return Joined(incarnation=link.state.incarnation, member=id, lighthouse=lighthouse, version=version()[:64])


def _watch_group(
    manager: Any, member: Membership, boundary: StepBoundary, tell: Callable[[Regrouped], None], endings: ExitStack
) -> None:
    """Observe each new configuration of the process group, that is each new quorum."""
    group = private_attribute(manager, "_pg")
    if group is None:
        return
    original, aborter = group.configure, QuorumAborter(group.abort)
    arguments = inspect.signature(original)
    member.hear = lambda beat: aborter.mark_broken(beat.broken)

    def configure(*args: Any, **kwargs: Any) -> Any:
        try:
            values = arguments.bind(*args, **kwargs).arguments
            quorum, size = int(values["quorum_id"]), int(values["world_size"])
        except Exception as error:  # noqa: BLE001  another version of torchft
            warn_once("configure", f"torchft {version()} does not give the number of a quorum: {error!r}")
            return original(*args, **kwargs)
        aborter.configuring()
        member.quorum, member.participants = quorum, size
        with suppress(Exception):  # then it is not reported
            incarnation = boundary.participant.incarnation
            tell(Regrouped(incarnation=incarnation, quorum=quorum, step=manager.current_step(), participants=size))
        if aborter.is_broken(quorum):  # it would wait for its peers until a timeout; torchft then discards the step
            raise ConnectionError(f"quorum {quorum} has lost a member")
        original(*args, **kwargs)
        aborter.configured(quorum)
        return None

    replace(group, "configure", configure, endings)

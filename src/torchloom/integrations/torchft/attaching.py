"""attach_manager(): a torchft Manager tells this process's threadlet what its replica does.

    manager = Manager(pg=..., ...)
    loom = torchloom.attach_manager(manager)

The training loop stays as torchft wants it; nothing else needs to be called.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torchloom.integrations.torchft.fuse import Fuse
from torchloom.integrations.torchft.healing import Healing
from torchloom.integrations.torchft.names import REPLICA_ID_KEY, inside, replace, version, warn_once
from torchloom.integrations.torchft.steps import Steps
from torchloom.messages import NAME, Joined, Regrouped
from torchloom.settings import Settings
from torchloom.threadlet.helm import Helm
from torchloom.threadlet.link import Link
from torchloom.threadlet.membership import Membership
from torchloom.threadlet.meter import Meter
from torchloom.threadlet.names import sanitised
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
    """Let this process take part as a rank of the Manager's replica, under torchft's name for it.

    Steps are what the Manager commits; `step()` need not be called, and only says how a step went. A threadlet that
    was attached before is used. Like attach() it raises for names that cannot be meant; after that nothing raises.
    """
    if manager in _attached:
        return _attached[manager]
    member = _member(manager)
    named = replica or ("" if os.environ.get("TORCHLOOM_REPLICA") else sanitised(member.rpartition(":")[0] or member))
    threadlet = current() or attach(
        job,
        named or None,
        rank=inside(manager, "_group_rank"),
        world_size=inside(manager, "_group_world_size"),
        devices=devices,
        settings=settings,
    )
    try:
        _attached[manager] = threadlet
        follow(threadlet, lambda meter, helm, link: _listen(manager, member, meter, helm, link))
    except Exception as error:  # noqa: BLE001  not a Manager, or not one that is known here
        logger.warning("torchLoom: torchft %s cannot be followed, training goes on: %r", version(), error)
    return threadlet


def _member(manager: Any) -> str:
    """torchft's id for this life of the replica, `name:uuid`; empty if it cannot be known."""
    store = inside(manager, "_store")
    try:
        if store is not None and store.check([REPLICA_ID_KEY]):  # a key that is not there would be waited for
            return str(store.get(REPLICA_ID_KEY).decode())
        warn_once(REPLICA_ID_KEY, f"torchft {version()} does not tell the id of the replica")
    except Exception as error:  # noqa: BLE001  a store that is gone
        warn_once(REPLICA_ID_KEY, f"the id of the replica cannot be read: {error!r}")
    return ""


def _listen(manager: Any, id: str, meter: Meter, helm: Helm, link: Link) -> Steps:
    first = link.life.rank.rank == 0
    tell: Callable[[Any], None] = link.tell if first else lambda _: None  # one rank speaks for the replica
    member = Membership(_joined(id, link))
    steps = Steps(manager, meter, helm, member, tell)
    try:
        steps.begin()
        steps.also_end(_watch_group(manager, member, helm, tell))
        healing = Healing(manager, helm, link.life.rank.replica, tell)
        steps.also_end(healing.begin())
        steps.also_end(healing.end)
    except Exception:
        steps.end()  # all of it or nothing
        raise
    link.join(member)
    return steps


def _joined(id: str, link: Link) -> Joined | None:
    if id and not NAME.fullmatch(id):
        warn_once("member", f"{id!r} cannot be told to the weaver: use letters, digits, _ : and - in replica_id")
        return None
    if not id:
        return None
    lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE", "")
    return Joined(incarnation=link.life.incarnation, member=id, lighthouse=lighthouse, version=version()[:64])


def _watch_group(manager: Any, member: Membership, helm: Helm, tell: Callable[[Regrouped], None]) -> Callable[[], None]:
    """Be told when the process group is made anew, which is when the quorum is another; what is returned ends that."""
    group = inside(manager, "_pg")
    if group is None:
        return lambda: None
    original, fuse = group.configure, Fuse(group.abort)
    arguments = inspect.signature(original)
    member.hear = lambda beat: fuse.broke(beat.broken)

    def regrouped(quorum: int, size: int) -> None:
        member.quorum, member.participants = quorum, size
        life = helm.steering.incarnation
        tell(Regrouped(incarnation=life, quorum=quorum, step=manager.current_step(), participants=size))

    def configure(*args: Any, **kwargs: Any) -> Any:
        try:
            given = arguments.bind(*args, **kwargs).arguments
            quorum, size = int(given["quorum_id"]), int(given["world_size"])
        except Exception as error:  # noqa: BLE001  another torchft
            warn_once("configure", f"torchft {version()} does not tell the number of a quorum: {error!r}")
            return original(*args, **kwargs)
        fuse.configuring()
        with contextlib.suppress(Exception):  # then it is not told
            regrouped(quorum, size)
        if fuse.is_broken(quorum):  # its peers would be waited for in vain; torchft then discards the step
            raise ConnectionError(f"quorum {quorum} has lost a member")
        original(*args, **kwargs)
        fuse.configured(quorum)
        return None

    return replace(group, "configure", configure)

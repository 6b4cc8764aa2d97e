"""The private names of a torchft Manager that are used, each with its purpose.

If a version of torchft lacks a name, that one feature is off, with a warning; a test names the version.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torchloom.threadlet.metrics.wait_times import replace_attribute

logger = logging.getLogger("torchloom")

PRIVATE = {
    "_store": "the id under which the lighthouse knows the replica",
    "_group_rank": "which rank of its replica this is",
    "_group_world_size": "how many ranks the replica has",
    "_pg": "quorums, and the end of a process group that waits for a dead replica",
    "_checkpoint_transport": "healing from a replica that runs without torchLoom",
}
REPLICA_ID_KEY = "replica_id"
"""The key of the id in the replica's store; public in torchft.manager, which is not imported for it."""
_warned: set[str] = set()


def version() -> str:
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def private_attribute(manager: Any, name: str) -> Any:
    """The value of one of the private names, or None."""
    value = getattr(manager, name, None)
    if value is None:
        warn_once(name, f"torchft {version()} has no {type(manager).__name__}.{name}: not known is {PRIVATE[name]}")
    return value


def member_id(manager: Any) -> str:
    """torchft's id for this start of the replica, `name:uuid`; empty if it cannot be read."""
    store = private_attribute(manager, "_store")
    try:
        if store is not None and store.check([REPLICA_ID_KEY]):  # get() would block on a missing key
            return str(store.get(REPLICA_ID_KEY).decode())
        warn_once(REPLICA_ID_KEY, f"torchft {version()} does not give the id of the replica")
    except Exception as error:  # noqa: BLE001  the store is gone
        warn_once(REPLICA_ID_KEY, f"the id of the replica cannot be read: {error!r}")
    return ""


def warn_once(about: str, text: str) -> None:
    if about not in _warned:
        _warned.add(about)
        logger.warning("torchLoom: %s; training continues", text)


def replace(owner: Any, name: str, new: Callable[..., Any], endings: ExitStack) -> None:
    """Replace a method on this one object, until the end."""
    endings.callback(replace_attribute(owner, name, new))

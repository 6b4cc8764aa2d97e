"""What of a torchft Manager is used that is not public: each name once, with what it is for.

A name that a version of torchft does not have turns that one thing off, with a warning; a test names the version.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("torchloom")

PRIVATE = {
    "_store": "the id under which the lighthouse knows the replica",
    "_group_rank": "which rank of its replica this is",
    "_group_world_size": "how many ranks the replica has",
    "_pg": "quorums, and the end of a process group that waits for a dead replica",
    "_checkpoint_transport": "healing from a replica that runs without torchLoom",
}
REPLICA_ID_KEY = "replica_id"
"""Where the id stands in the replica's store; public in torchft.manager, which is not imported for it."""
_told: set[str] = set()


def version() -> str:
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def inside(manager: Any, name: str) -> Any:
    """One of the private names, or None."""
    found = getattr(manager, name, None)
    if found is None:
        warn_once(name, f"torchft {version()} has no {type(manager).__name__}.{name}: not known is {PRIVATE[name]}")
    return found


def warn_once(about: str, text: str) -> None:
    if about not in _told:
        _told.add(about)
        logger.warning("torchLoom: %s; training goes on", text)


def replace(owner: Any, name: str, new: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in the place of a method, on this one object; what is returned puts it back."""
    setattr(owner, name, new)

    def put_back() -> None:
        if vars(owner).get(name) is new:  # else someone has replaced ours
            delattr(owner, name)

    return put_back

"""Serves the store in which the ranks of a torchft replica meet, where no torchrun does; a Manager expects one.

`loom run` leaves the store to the first rank. init_process_group creates it, but a script under torchft need not call
that. The first rank of such a replica therefore creates it just before its Manager, unless it exists by then. Nothing
here may raise: without a store a Manager waits, and reports what it waits for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from types import ModuleType
from typing import Any

from torchloom.shared.import_hook import when_imported

_kept: list[Any] = []
"""Keeps the stores alive as long as the process."""


def install() -> None:
    """To be called in a rank that `loom run` starts, before its script starts."""
    launched = os.environ.get("TORCHLOOM_LAUNCHER") == "loom" and "REPLICA_GROUP_ID" in os.environ
    if launched and os.environ.get("RANK") == "0":
        when_imported("torchft.manager", _hook)


def _hook(managers: ModuleType) -> None:
    original = managers.Manager.__init__
    if getattr(original, "serves_store", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("store_addr"):
            with contextlib.suppress(Exception):
                serve(managers.TCPStore, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        original(self, *args, **kwargs)

    init.serves_store = True  # type: ignore[attr-defined]
    managers.Manager.__init__ = init


def serve(store: Any, host: str, port: int) -> None:
    """Create the store, unless one listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return
    _kept.append(store(host, port, is_master=True, wait_for_workers=False))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # a later init_process_group uses this store

"""Ends the process group of a quorum that lost a member: a collective that waits for the dead then fails at once.

One survivor sees the connection of the dead break; another may wait for that survivor, which has already given up,
until a timeout. The lighthouse says which quorums are broken. Only the group of such a quorum may be ended, never the
next one: a reconfiguration waits for an ending that is under way, and none begins during a reconfiguration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchloom.integrations.torchft.names import logger

THREAD = "torchloom-abort"
MOST = 1000
"""Broken quorums remembered."""


class Fuse:
    def __init__(self, abort: Callable[[], object]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._ready: int | None = None
        """The quorum whose group is configured and was not ended."""
        self._broken: dict[int, None] = {}

    def broke(self, quorums: Iterable[int]) -> None:
        """These lost a member. Never waits: ending a group may take a moment."""
        news = [quorum for quorum in quorums if quorum not in self._broken]
        if not news:
            return
        self._broken = dict.fromkeys([*self._broken, *news][-MOST:])
        if self._ready in self._broken:
            threading.Thread(target=self._blow, name=THREAD, daemon=True).start()

    def is_broken(self, quorum: int) -> bool:
        return quorum in self._broken

    def configuring(self) -> None:
        """The group is about to be replaced; waits for the end of one that is being ended."""
        with self._lock:
            self._ready = None

    def configured(self, quorum: int) -> None:
        """The group of this quorum stands."""
        with self._lock:
            self._ready = quorum
        self._blow()  # it may have broken meanwhile

    def _blow(self) -> None:
        with self._lock:
            quorum = self._ready
            if quorum is None or quorum not in self._broken:
                return
            self._ready = None
            try:
                self._abort()
            except Exception as error:  # noqa: BLE001  then its timeout ends it
                logger.warning("torchLoom: the process group of quorum %d could not be ended: %r", quorum, error)
            else:
                logger.info("torchLoom: quorum %d lost a member; its process group was ended", quorum)

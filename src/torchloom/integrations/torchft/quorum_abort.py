"""Aborts the process group of a quorum that lost a member, so that collectives that wait for it fail at once.

One survivor sees its connection to the dead member break; another may wait until a timeout for that survivor, which has
already given up. The lighthouse reports which quorums are broken. Only the group of such a quorum may be aborted, never
the next one: a reconfiguration waits for an abort in progress, and none starts during a reconfiguration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torchloom.integrations.torchft.manager_internals import logger

THREAD = "torchloom-abort"
MOST = 1000
"""Broken quorums remembered."""


class QuorumAborter:
    def __init__(self, abort: Callable[[], object]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._ready: int | None = None
        """The quorum whose group is configured and was not aborted."""
        self._broken: dict[int, None] = {}

    def mark_broken(self, quorums: Iterable[int]) -> None:
        """These quorums lost a member. Never blocks: aborting a group may take a moment."""
        news = [quorum for quorum in quorums if quorum not in self._broken]
        if not news:
            return
        self._broken = dict.fromkeys([*self._broken, *news][-MOST:])
        if self._ready in self._broken:
            threading.Thread(target=self._abort_if_broken, name=THREAD, daemon=True).start()

    def is_broken(self, quorum: int) -> bool:
        return quorum in self._broken

    def configuring(self) -> None:
        """The group is about to be replaced; waits for an abort in progress."""
        with self._lock:
            self._ready = None

    def configured(self, quorum: int) -> None:
        """The group of this quorum is ready."""
        with self._lock:
            self._ready = quorum
        self._abort_if_broken()  # it may have lost a member since

    def _abort_if_broken(self) -> None:
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

"""What a rank does at once when told to: resume, show its stacks, end itself. Each order is carried out once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

from torchloom.messages import Order, Ordered
from torchloom.threadlet.helm import Helm

MAX_TEXT = 50_000
JOURNAL = 256


class Orders:
    """One for the whole life of a rank: an order heard again on another connection is still the same order."""

    def __init__(self, helm: Helm) -> None:
        self._helm = helm
        self._journal: dict[str, Ordered] = {}

    def carry_out(self, order: Order) -> Ordered:
        """Do it, or say again what became of it."""
        known = self._journal.get(order.id)
        if known is not None:
            return known
        text = ""
        if order.verb == "resume":
            text = "" if self._helm.steering.paused else "was not paused"
            self._helm.set_paused(False)
        elif order.verb == "stacks":
            text = stacks()
        answer = Ordered(incarnation=order.incarnation, id=order.id, outcome="applied", text=text)
        self._journal[order.id] = answer
        while len(self._journal) > JOURNAL:
            del self._journal[next(iter(self._journal))]
        return answer

    @staticmethod
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def stacks() -> str:
    """Where every thread of this process is, the main one first; not our own, which are of no interest."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if names.get(ident, "").startswith("torchloom-"):
            continue
        lines = "".join(traceback.format_stack(frame, limit=50))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)[:MAX_TEXT]

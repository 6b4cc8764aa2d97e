"""Orders that a rank carries out at once: resume, show its stacks, end itself. Each order is carried out once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

from torchloom.protocol.rank import Order, Ordered
from torchloom.threadlet.changes.step_boundary import StepBoundary

MAX_TEXT = 50_000
JOURNAL = 256


class Orders:
    """One per incarnation of a rank: an order received again on another connection is still the same order."""

    def __init__(self, boundary: StepBoundary) -> None:
        self._boundary = boundary
        self._journal: dict[str, Ordered] = {}

    def carry_out(self, order: Order) -> Ordered:
        """Carry it out; an order received before gets the same answer again."""
        earlier = self._journal.get(order.id)
        if earlier is not None:
            return earlier
        text = ""
        if order.verb == "resume":
            text = "" if self._boundary.participant.paused else "was not paused"
            self._boundary.set_paused(False)
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
    """The stack of every thread of this process except torchLoom's own, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if names.get(ident, "").startswith("torchloom-"):
            continue
        lines = "".join(traceback.format_stack(frame, limit=50))
        parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return "\n".join(parts)[:MAX_TEXT]

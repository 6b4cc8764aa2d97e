"""The steps of a replica as its Manager counts them: a step is finished when it is committed.

A step boundary lies between a commit and the next quorum: at `loom.stopping` or `loom.step()` if the script calls them,
at the latest when it asks for the quorum. There the parameters are those of the step, no operation is in progress, and
no peer can heal from this replica, so values change, a pause starts and checkpoints are requested there.

    commit of step N → boundary N → quorum → work → commit of step N+1 → boundary N+1
                                           → discarded → boundary N again: what was done there is not done twice
                                           → healed to M: what peers did up to M comes with their state, so no
                                             boundary in between is passed without it

Every replica therefore has the same values at the same step, even if it discarded a step or was not there for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torchloom.integrations.torchft.manager_internals import replace, warn_once
from torchloom.protocol.rank import Discarded
from torchloom.threadlet.changes.step_boundary import StepBoundary, one_line
from torchloom.threadlet.connection.rank_state import Membership
from torchloom.threadlet.metrics.meter import Meter

REPORT_SECONDS = 0.5
"""Seconds between two reports of discarded steps."""
NO_ERROR = "too few replicas, or an error on another rank of the replica"


@dataclass
class CommittedSteps:
    """Counts the commits of a Manager. All methods are called on the training thread."""

    _manager: Any
    _meter: Meter
    _boundary: StepBoundary
    _member: Membership
    _report: Callable[[Discarded], None]
    endings: ExitStack = field(default_factory=ExitStack)
    """Restores the Manager."""
    _error: BaseException | None = None
    """The first error of the current step: later ones are usually consequences."""
    _unreported: int = 0
    _why: str = ""
    _reported_at: float = -math.inf
    _fresh: bool = False
    """A step was committed, and its boundary was not handled yet."""
    _thread: int = 0

    def begin(self) -> None:
        manager, meter = self._manager, self._meter
        meter.resume_at(manager.current_step())
        meter.has_group = True
        quorum, waiting, commit = manager.start_quorum, manager.wait_quorum, manager.should_commit
        report, reduce, member = manager.report_error, manager.allreduce, self._member

        def report_error(error: Any, *args: Any, **kwargs: Any) -> Any:
            self._error = self._error or error
            return report(error, *args, **kwargs)

        def start_quorum(*args: Any, **kwargs: Any) -> Any:
            self._safely(self._before_quorum)
            member.begun += 1
            return quorum(*args, **kwargs)

        def allreduce(*args: Any, **kwargs: Any) -> Any:
            member.begun += 1
            return reduce(*args, **kwargs)

        def wait_quorum(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return waiting(*args, **kwargs)
            with meter.aside(meter.waiting):
                return waiting(*args, **kwargs)

        def should_commit(*args: Any, **kwargs: Any) -> Any:
            member.begun += 1
            with meter.aside(meter.waiting):
                committed = commit(*args, **kwargs)
            self._safely(self._committed if committed else self._lost)
            return committed

        for new in (start_quorum, wait_quorum, allreduce, should_commit, report_error):
            replace(manager, new.__name__, new, self.endings)

    # ── called by the Manager ──

    def _before_quorum(self) -> None:
        self._thread = threading.get_ident()
        self._error = None
        step = self._manager.current_step()
        if step != self._meter.step_number:  # the script has loaded a checkpoint
            self._meter.resume_at(step)
        self._reach(step)

    def _committed(self) -> None:
        self._meter.step(None, None, self._manager.current_step(), {})
        self._member.begun = 0
        self._fresh = True
        self._report_discarded()

    def _lost(self) -> None:
        """The step was discarded: it is tried again, or a peer has committed it and this replica heals."""
        self._meter.moved()
        self._member.discarded += 1
        self._unreported += 1
        self._why = NO_ERROR if self._error is None else one_line(self._error)
        self._report_discarded()

    def _report_discarded(self, last: bool = False) -> None:
        now = time.monotonic()
        if not self._unreported or (not last and now - self._reported_at < REPORT_SECONDS):
            return
        count, self._unreported, self._reported_at = self._unreported, 0, now
        incarnation, step = self._boundary.participant.incarnation, self._manager.current_step() + 1
        quorum = self._member.quorum or 0
        self._report(Discarded(incarnation=incarnation, step=step, count=count, quorum=quorum, why=self._why))

    # ── called by the script ──

    def note(self, loss: Any, samples: Any, metrics: dict[str, Any]) -> None:
        self._meter.note(loss, samples, metrics)
        self.attend()

    def attend(self) -> None:
        """Handle the boundary after the step that was just committed; once."""
        if self._fresh and threading.get_ident() == self._thread:
            self._safely(lambda: self._reach(self._meter.step_number))

    def _reach(self, step: int) -> None:
        self._fresh = False
        if step >= self._boundary.participant.due_step:
            self._boundary.on_step(step)

    def end(self) -> None:
        """Restore the Manager."""
        self._safely(lambda: self._report_discarded(last=True))
        self._safely(self.endings.close)

    @staticmethod
    def _safely(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  training continues
            warn_once("steps", f"a step of torchft is not known: {error!r}")

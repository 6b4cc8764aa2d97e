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

import threading
import time
from collections.abc import Callable
from typing import Any

from torchloom.integrations.torchft.manager_internals import replace, warn_once
from torchloom.protocol.rank import Discarded
from torchloom.threadlet.changes.step_boundary import StepBoundary, one_line
from torchloom.threadlet.connection.rank_state import Membership
from torchloom.threadlet.metrics.meter import Meter

TELL_SECONDS = 0.5
"""Seconds between two reports of discarded steps."""
NO_ERROR = "too few replicas, or an error on another rank of the replica"


class CommittedSteps:
    """Counts the commits of a Manager. All methods are called on the training thread."""

    def __init__(
        self,
        manager: Any,
        meter: Meter,
        boundary: StepBoundary,
        member: Membership,
        discarded: Callable[[Discarded], None],
    ) -> None:
        self._manager = manager
        self._meter = meter
        self._boundary = boundary
        self._member = member
        self._discarded = discarded
        self._error: BaseException | None = None
        """The first error of the current step: later ones are usually consequences."""
        self._untold = 0
        self._why = ""
        self._told = -TELL_SECONDS
        self._fresh = False
        """A step was committed, and its boundary was not handled yet."""
        self._thread = 0
        self._ending: list[Callable[[], None]] = []

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
            self._ending.append(replace(manager, new.__name__, new))

    def also_end(self, ending: Callable[[], None]) -> None:
        self._ending.append(ending)

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
        if self._untold:
            self._tell()

    def _lost(self) -> None:
        """The step was discarded: it is tried again, or a peer has committed it and this replica heals."""
        self._meter.moved()
        self._member.discarded += 1
        self._untold += 1
        self._why = NO_ERROR if self._error is None else one_line(self._error)
        self._tell()

    def _tell(self, last: bool = False) -> None:
        now = time.monotonic()
        if self._untold and (last or now - self._told >= TELL_SECONDS):
            count, self._untold, self._told = self._untold, 0, now
            self._discarded(
                Discarded(
                    incarnation=self._boundary.participant.incarnation,
                    step=self._manager.current_step() + 1,
                    count=count,
                    quorum=self._member.quorum or 0,
                    why=self._why,
                )
            )

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
        self._safely(lambda: self._tell(last=True))
        while self._ending:
            self._safely(self._ending.pop())

    @staticmethod
    def _safely(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  training continues
            warn_once("steps", f"a step of torchft is not known: {error!r}")

"""The states of a rank and of a job, as transition tables. A missing pair is an error; docs/states.md is generated.

A rank is *lost* as soon as its link closes or it falls silent; it may come back. It is *dead* when it stays away for
its grace, which is a presumption and can turn out wrong, and *failed* when it reports so itself, or the process that
observed its end does. Only *left* and *failed* are final for an incarnation, and *failed* outweighs *left*, so that the
order in which these reports arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Presence(StrEnum):
    LIVE = "live"
    LOST = "lost"
    DEAD = "dead"
    LEFT = "left"
    FAILED = "failed"


class Sign(StrEnum):
    """What can happen to an incarnation that has joined."""

    LINK_CLOSED = "link closed or silent"
    HEARD = "link opened or heard"
    GRACE_OVER = "grace over"
    GOODBYE = "said goodbye"
    ENDED_BADLY = "ended badly, confirmed"


P, S = Presence, Sign

RANK_NEXT: Mapping[tuple[Presence, Sign], Presence] = {
    (P.LIVE, S.LINK_CLOSED): P.LOST,
    (P.LIVE, S.HEARD): P.LIVE,
    (P.LIVE, S.GOODBYE): P.LEFT,
    (P.LIVE, S.ENDED_BADLY): P.FAILED,
    (P.LOST, S.LINK_CLOSED): P.LOST,
    (P.LOST, S.HEARD): P.LIVE,
    (P.LOST, S.GRACE_OVER): P.DEAD,
    (P.LOST, S.GOODBYE): P.LEFT,
    (P.LOST, S.ENDED_BADLY): P.FAILED,
    (P.DEAD, S.LINK_CLOSED): P.DEAD,
    (P.DEAD, S.HEARD): P.LIVE,  # the presumption was wrong
    (P.DEAD, S.GOODBYE): P.LEFT,  # its goodbye was read late
    (P.DEAD, S.ENDED_BADLY): P.FAILED,
    (P.LEFT, S.LINK_CLOSED): P.LEFT,
    (P.LEFT, S.HEARD): P.LEFT,
    (P.LEFT, S.GOODBYE): P.LEFT,
    (P.LEFT, S.ENDED_BADLY): P.FAILED,
    (P.FAILED, S.LINK_CLOSED): P.FAILED,
    (P.FAILED, S.HEARD): P.FAILED,
    (P.FAILED, S.GOODBYE): P.FAILED,
    (P.FAILED, S.ENDED_BADLY): P.FAILED,
}

PRESENT = frozenset({P.LIVE, P.LOST})
"""The states in which a rank is still part of its job."""


class JobPhase(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class JobSign(StrEnum):
    JOINED = "a rank joined"
    ALL_LEFT = "all ranks left"
    ALL_LEFT_INTERRUPTED = "all ranks left, one was interrupted"
    ALL_GONE = "all ranks gone, one died"


J, Q = JobPhase, JobSign

JOB_NEXT: Mapping[tuple[JobPhase, JobSign], JobPhase] = {
    (J.RUNNING, Q.JOINED): J.RUNNING,
    (J.RUNNING, Q.ALL_LEFT): J.FINISHED,
    (J.RUNNING, Q.ALL_LEFT_INTERRUPTED): J.STOPPED,
    (J.RUNNING, Q.ALL_GONE): J.FAILED,
    (J.FINISHED, Q.JOINED): J.RUNNING,
    (J.STOPPED, Q.JOINED): J.RUNNING,
    (J.FAILED, Q.JOINED): J.RUNNING,  # started again, or found after all
}

"""The ranks of all jobs, in the incarnation that joined last, and the states of ranks and jobs as transition tables.

A missing pair of a table is an error; docs/states.md is generated.

A rank is *lost* as soon as its link closes or it falls silent; it may come back. It is *dead* when it stays away for
its grace, which is a presumption and can turn out wrong, and *failed* when it reports so itself, or the process that
observed its end does. Only *left* and *failed* are final for an incarnation, and *failed* outweighs *left*, so that the
order in which these reports arrive does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Literal

from msgspec.structs import replace

from torchloom.core.state.device_map import DRMap
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.phrase import Prose
from torchloom.protocol.rank import RankDescription
from torchloom.protocol.views import Assignment


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


class Rank(RankDescription, frozen=True, kw_only=True):
    id: RankId
    presence: Presence
    since: float
    reason: Prose = ""
    left: Literal["", "finished", "interrupted"] = ""
    """How, if it has left."""
    patient: bool = False
    """It is lost and gets the long grace."""
    incident: str = ""
    """The open incident about this rank."""
    member: str = ""
    """The id that torchft gave this incarnation of its replica."""
    process: str = ""


class Ranks(dict[RankId, Rank]):
    """By id. Setting or deleting a rank also updates the indexes and the DRMap, which has the present ranks only."""

    def __init__(self, ranks: Iterable[Rank], drmap: DRMap) -> None:
        super().__init__()
        self._drmap = drmap
        self._by_job: dict[str, set[RankId]] = {}
        self._sorted: list[RankId] | None = None
        self.present: Counter[str] = Counter()
        """By job: the number of its ranks that are present."""
        for rank in ranks:
            self[rank.id] = rank

    def __setitem__(self, id: RankId, rank: Rank) -> None:
        before = self.get(id)
        super().__setitem__(id, rank)
        if before is None:
            self._by_job.setdefault(id.job, set()).add(id)
            self._sorted = None
        is_present, was_present = rank.presence in PRESENT, before is not None and before.presence in PRESENT
        self.present[id.job] += is_present - was_present
        if was_present:
            self._drmap.remove_rank(id)
        for device in rank.devices if is_present else ():
            self._drmap.add(Assignment(device=device, replica=id.replica_id, rank=id.rank, node=rank.node))

    def __delitem__(self, id: RankId) -> None:
        self.present[id.job] -= self[id].presence in PRESENT
        super().__delitem__(id)
        self._sorted = None
        self._by_job[id.job].remove(id)
        if not self._by_job[id.job]:
            del self._by_job[id.job], self.present[id.job]
        self._drmap.remove_rank(id)

    def sorted_ids(self) -> list[RankId]:
        if self._sorted is None:
            self._sorted = sorted(self)
        return self._sorted

    def job_names(self) -> tuple[str, ...]:
        """Jobs that have ranks."""
        return tuple(self._by_job)

    def ids_of(self, job: str) -> Collection[RankId]:
        return self._by_job.get(job, ())

    def of_job(self, job: str) -> list[Rank]:
        return [self[id] for id in self.ids_of(job)]

    def of_replica(self, replica: ReplicaId) -> list[Rank]:
        """Sorted."""
        return [self[id] for id in sorted(id for id in self.ids_of(replica.job) if id.replica_id == replica)]

    def find(self, id: RankId, incarnation: str) -> Rank | None:
        """The rank, if this is its latest incarnation."""
        rank = self.get(id)
        return rank if rank is not None and rank.incarnation == incarnation else None

    def modify(self, id: RankId, **fields: object) -> None:
        self[id] = replace(self[id], **fields)

    def advance(self, id: RankId, sign: Sign, **fields: object) -> None:
        """Change the presence of a rank by the transition table."""
        presence = RANK_NEXT[(self[id].presence, sign)]
        self.modify(id, **{"presence": presence, "patient": False} | fields)

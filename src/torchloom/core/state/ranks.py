"""The ranks of all jobs, in the incarnation that joined last, indexed by job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from torchloom.core.state.drmap import DRMap
from torchloom.core.state.fields import copy_fields
from torchloom.core.state.presence import PRESENT, RANK_NEXT, Presence, Sign
from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.phrase import Prose
from torchloom.protocol.records import RankJoined
from torchloom.protocol.views import Assignment


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    id: RankId
    incarnation: str
    presence: Presence
    since: float
    reason: Prose = ""
    left: Literal["", "finished", "interrupted"] = ""
    """How, if it has left."""
    patient: bool = False
    """It is lost and gets the long grace."""
    node: str = ""
    pid: int = 0
    devices: tuple[str, ...] = ()
    world_size: int = 1
    launcher: str = ""
    counted: bool = False
    """Its script has not attached."""
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

    # ── fold ──

    def join(self, record: RankJoined, at: float) -> None:
        self[record.rank] = copy_fields(Rank, record.hello, id=record.rank, presence=Presence.LIVE, since=at)

    def modify(self, id: RankId, **fields: object) -> None:
        self[id] = replace(self[id], **fields)

    def advance(self, id: RankId, sign: Sign, reason: Prose, at: float, *, patient: bool = False) -> None:
        """Change the presence by the transition table."""
        presence = RANK_NEXT[(self[id].presence, sign)]
        self.modify(id, presence=presence, since=at, reason=reason, patient=patient)

"""Checkpoints: what follows when one was written, could not be written, or training went on from one.

The weaver writes none and reads none. It remembers what ranks tell, and sees to it that a failure is not overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchloom.core.decision import NOTHING, Decision
from torchloom.core.fabric import Fabric, Rank
from torchloom.core.incidents import Incident
from torchloom.messages import (
    CheckpointFailed,
    CheckpointSaved,
    IncidentAmended,
    IncidentOpened,
    JobResumed,
    RankId,
    Record,
    Resumed,
    Saved,
    SaveFailed,
)

NAMED = 3
"""Damaged checkpoints named in the line that tells of them."""
SHOWN = 20
"""And in the evidence."""


def saved(fabric: Fabric, rank: RankId, said: Saved) -> Decision:
    known = _speaker(fabric, rank, said.incarnation)
    if known is None:
        return NOTHING
    record = CheckpointSaved(
        rank=rank,
        step=said.step,
        folder=said.folder,
        node=known.node,
        size=said.size,
        seconds=said.seconds,
        stall=said.stall,
    )
    reason = f"{rank.job}: checkpoint of step {said.step} written"
    late = [i for i in fabric.incidents.open_of(rank.job) if i.kind == "overdue"]
    came = [IncidentAmended(id=i.id, outcome=f"that of step {said.step} was written", closed=True) for i in late]
    return Decision((record, *came, *_closing(fabric, rank.job, "a later checkpoint was written")), reason=reason)


def failed(fabric: Fabric, rank: RankId, said: SaveFailed) -> Decision:
    if _speaker(fabric, rank, said.incarnation) is None:
        return NOTHING
    records: list[Record] = [CheckpointFailed(rank=rank, step=said.step, folder=said.folder, why=said.why)]
    evidence = (said.why, f"step {said.step}, in {said.folder}")
    known = _trouble(fabric, rank.job)
    if known is None:
        records.append(
            IncidentOpened(
                id=fabric.incidents.next_id(),
                what=f"checkpoint of {rank.job} failed",
                subject=_subject(rank.job),
                job=rank.job,
                evidence=evidence,
                decision="training goes on; the next interval tries again",
                reason="the last good one stays",
            )
        )
    elif _alike(said.why) not in map(_alike, known.evidence):
        records.append(IncidentAmended(id=known.id, evidence=evidence))
    return Decision(tuple(records), reason=f"{rank.job}: checkpoint of step {said.step} failed: {said.why}")


def resumed(fabric: Fabric, rank: RankId, said: Resumed) -> Decision:
    if _speaker(fabric, rank, said.incarnation) is None:
        return NOTHING
    records: list[Record] = [JobResumed(rank=rank, step=said.step, path=said.path, rejected=said.rejected)]
    if said.rejected:
        records += _damaged(fabric, rank.job, said)
    return Decision(tuple(records), reason=f"{rank} resumed from step {said.step}")


def forgotten(fabric: Fabric, job: str) -> tuple[Record, ...]:
    """No one will write another one, so that nothing stays open for ever."""
    return _closing(fabric, job, "the job is forgotten")


def _speaker(fabric: Fabric, rank: RankId, incarnation: str) -> Rank | None:
    """Who says so, if that is the current life of a rank we know."""
    known = fabric.ranks.get(rank)
    return known if known is not None and known.incarnation == incarnation else None


def _subject(job: str) -> str:
    return f"{job}#checkpoint"


def _trouble(fabric: Fabric, job: str) -> Incident | None:
    """The open incident about the checkpoints of a job; there is one at most."""
    return next((i for i in fabric.incidents.values() if i.closed is None and i.subject == _subject(job)), None)


def _closing(fabric: Fabric, job: str, outcome: str) -> tuple[Record, ...]:
    known = _trouble(fabric, job)
    return () if known is None else (IncidentAmended(id=known.id, outcome=outcome, closed=True),)


def _alike(why: str) -> str:
    """The same for reasons that differ only in numbers: a full disk names another file at every step."""
    return re.sub(r"\d+", "0", why)


def _damaged(fabric: Fabric, job: str, said: Resumed) -> list[Record]:
    """Told by every rank that looked, and one incident for all of them."""
    what = _names(said.rejected, job)
    evidence = tuple(f"{name}: {why[:500]}" for name, why in list(said.rejected.items())[:SHOWN])
    began = fabric.jobs[job].began
    if any(i.what == what and i.evidence == evidence and i.opened >= began for i in fabric.incidents.values()):
        return []
    incident = fabric.incidents.next_id()
    decision = f"resumed from step {said.step}"
    opened = IncidentOpened(
        id=incident,
        what=what,
        subject=_subject(job),
        job=job,
        evidence=evidence,
        decision=decision,
        reason="the newest one that is whole",
    )
    return [opened, IncidentAmended(id=incident, outcome=decision, closed=True)]


def _names(rejected: Mapping[str, str], job: str) -> str:
    names = list(rejected)
    if len(names) == 1:
        return f"checkpoint {names[0]} of {job} is damaged"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"checkpoints {', '.join(names[:NAMED])}{more} of {job} are damaged"

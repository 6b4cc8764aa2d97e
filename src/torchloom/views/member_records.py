"""Replicas under torchft, told as sentences."""

from __future__ import annotations

from torchloom.protocol.records import MemberDiscarded, MemberHealed, MemberJoined, MemberRegrouped, MembersEvicted
from torchloom.views.wording.phrases import render

MemberRecord = MemberJoined | MemberRegrouped | MemberHealed | MemberDiscarded | MembersEvicted


def member_sentences(record: MemberRecord) -> list[str]:
    match record:
        case MemberJoined(rank=rank, member=member, devices=devices, lighthouse=lighthouse, version=version):
            where = f", with the lighthouse at {lighthouse}" if lighthouse else ""
            torchft = f"torchft {version}".strip()
            first = f"Rank {rank} is in replica {member} of {torchft}{where}"
            return [first, *(f"Registered device: {device} for replica_id: {member}" for device in devices)]
        case MemberRegrouped(rank=rank, quorum=quorum, step=step, participants=count):
            return [f"Replica {rank.replica_id} is in quorum {quorum:,} of {_replicas(count)}, at step {step:,}"]
        case MemberHealed(rank=rank, step=step, source=source, seconds=seconds):
            whose = f" from {source}" if source else ""
            return [f"Replica {rank.replica_id} healed{whose} to step {step:,} in {seconds:.2f} s"]
        case MemberDiscarded(rank=rank, step=step, count=count, quorum=quorum, why=why):
            what = (
                f"did not commit step {step:,}" if count == 1 else f"did not commit {count:,} tries up to step {step:,}"
            )
            return [f"Replica {rank.replica_id} {what} (quorum {quorum:,})" + (f": {why}" if why else "")]
        case MembersEvicted(job=job, members=members, reason=reason):
            because = f": {render(reason)}" if reason else ""
            return [f"Evicted from the quorum of {job}: {', '.join(members)}{because}"]


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"

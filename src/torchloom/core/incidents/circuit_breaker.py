"""The circuit breaker: nothing is done about ranks while very many of them seem to be gone at once.

If nobody has seen one of them end, the observer is the likelier cause. A switch that fails, a server that hangs or a
machine that was suspended looks like the death of half a cluster. Acting on it would make it so.
"""

from __future__ import annotations

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.rank_states import Presence
from torchloom.protocol.phrase import Prose, phrase

AT_LEAST = 20
"""Ranks; in a smaller cluster one failed node may well be a third of it."""
SHARE = 0.3
AT_ONCE = 30.0
"""Seconds: ranks lost longer ago have nothing to do with each other."""


def open_reason(cluster: ClusterState, now: float) -> Prose:
    """Why nothing may be done just now; empty if it may."""
    missed = [rank for rank in cluster.ranks.values() if rank.presence in {Presence.LOST, Presence.DEAD}]
    recent = [rank for rank in missed if now - rank.since < AT_ONCE]
    # A rank that is dead only by presumption counts like one that is present.
    count = sum(cluster.ranks.present.values()) + sum(rank.presence is Presence.DEAD for rank in recent)
    if count < AT_LEAST or len(recent) <= SHARE * count:
        return ""
    return phrase("ranks_lost_at_once", lost=len(recent), count=count)

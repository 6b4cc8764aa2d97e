"""The brake: when very many ranks seem to be gone at once, and nobody has seen one end, it is rather the observer.

A switch that fails, a server that hangs or a machine that was suspended looks like the death of half a cluster. Acting
on it would make it so.
"""

from __future__ import annotations

from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.ranks import PRESENT, Presence
from torchloom.protocol.phrase import Prose, phrase

AT_LEAST = 20
SHARE = 0.3
AT_ONCE = 30.0
"""Seconds: those lost longer ago have nothing to do with each other."""


def braked(cluster: ClusterState, now: float) -> Prose:
    """Why nothing may be done just now; empty if it may."""
    present = [rank for rank in cluster.ranks.values() if rank.presence in PRESENT or _missed(rank.presence)]
    recent = [rank for rank in present if _missed(rank.presence) and now - rank.since < AT_ONCE]
    counted = [rank for rank in present if rank.presence in PRESENT or rank in recent]
    if len(counted) < AT_LEAST or len(recent) <= SHARE * len(counted):
        return ""
    return phrase("ranks_lost_at_once", lost=len(recent), count=len(counted))


def _missed(presence: Presence) -> bool:
    """Lost, or dead only by presumption."""
    return presence in {Presence.LOST, Presence.DEAD}

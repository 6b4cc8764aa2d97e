"""How a replica is asked to leave at the end of a step, and whether it was: the request is the same each time."""

from __future__ import annotations

import hashlib

from torchloom.core.state.change_ledger import ChangePhase
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.runs import Run

MOST_TRIES = 100
"""To have one attempt leave: others may have changes of their own under way, or ranks be lost just then."""


def request(cluster: ClusterState, run: Run) -> str:
    """By which the attempt under way is asked now: after one that came to nothing, another."""
    for number in range(MOST_TRIES):
        one = hashlib.sha256(f"{run.name} {run.attempt} leaves {number}".encode()).hexdigest()[:32]
        change = cluster.ledger.change_of(one)
        if change is None or change.phase is not ChangePhase.ABORTED:
            return one
    return one


def was_asked(cluster: ClusterState, run: Run) -> bool:
    """Whether its ranks end because of that, even if it is not wanted any more."""
    change = cluster.ledger.change_of(request(cluster, run))
    return change is not None and change.takes_effect

"""The room of nodes: whether a node may be used at all, and which of its slots are free for a run.

A slot is a device of a node or, where there are none, a core. A rank has its slot alone, or shares it with ranks of
other jobs if all of these jobs share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import cycle, islice
from typing import NamedTuple

from torchloom.core.jobs.node_health import is_checked, unfit_reasons
from torchloom.core.state.cluster import ClusterState
from torchloom.core.state.run_states import Run
from torchloom.protocol.job_spec import Task
from torchloom.protocol.node import NodeBeat, Place
from torchloom.protocol.phrase import Phrase, phrase

CPU = "CPU-"
"""Prefix of the id of a processor."""
NODES_SHOWN = 8
"""Nodes named in the reason why a job waits; the rest is counted."""


class Seat(NamedTuple):
    """Where a rank runs on its node."""

    slot: int | None = None
    device: str = ""


def capacity(beat: NodeBeat) -> int:
    """The number of slots of a node."""
    return len(beat.devices) or beat.cores


def takes_any_number(beat: NodeBeat, task: Task) -> bool:
    """Whether ranks of one job may share a core: on one device their collectives would refuse to work."""
    return task.share and not beat.devices


def find_failed(cluster: ClusterState, beat: NodeBeat) -> set[str]:
    """The failed devices of a node: nothing is started on them until they work again."""
    devices = (cluster.devices.get(device) for device in beat.devices)
    return {device.id for device in devices if device is not None and device.failed}


def why_unusable(cluster: ClusterState, node: str, now: float) -> Phrase | None:
    """Why no ranks may be started on a node, if none may."""
    if node in cluster.runs.drained:
        return phrase("room_drained")
    if node not in cluster.runtime.nodes or not cluster.runtime.node_speaks(node, now):
        return phrase("room_silent")
    if cluster.runtime.leaves(node):
        return phrase("room_leaving")
    return phrase("room_processor_failed") if _processor_failed(cluster, node) else None


def why_unfit(cluster: ClusterState, run: Run, node: str, now: float) -> Phrase | None:
    """Why a run that checks its nodes may not use one, if it may not."""
    if run.task.check and not is_checked(cluster, run, node, now):
        return phrase("room_being_checked")
    if run.task.check and (why := unfit_reasons(cluster, node)):
        return phrase("room_not_fit", why=why[0])
    return None


def list_nodes(nodes: Collection[str], describe: Callable[[str], Phrase]) -> Phrase:
    """What each node offers, or why nothing; of many only the first ones."""
    shown = [phrase("of_node", node=node, text=describe(node)) for node in sorted(nodes)[:NODES_SHOWN]]
    if not shown:
        return phrase("no_agent_there")
    return phrase("nodes_there", nodes=shown, more=max(0, len(nodes) - NODES_SHOWN) or None)


def _processor_failed(cluster: ClusterState, node: str) -> bool:
    """Whether the processor of a node was reported failed, and the node has no other device."""
    failed = {device.id for device in cluster.devices.values() if device.failed and device.id.startswith(CPU)}
    if not failed or cluster.runtime.nodes[node].beat.devices:
        return False
    if any(cluster.devices[device].node == node for device in failed):
        return True
    # An agent that serves one job has its own node name: the ranks report which devices they used.
    runs = [run for run in cluster.runs.by_name.values() if not run.over]
    here = [run.rank(place.rank) for run in runs for place in run.places if place.node == node]
    return any(failed.intersection(cluster.ranks[rank].devices) for rank in here if rank in cluster.ranks)


class Room:
    """The slots that the other runs leave to one run."""

    def __init__(self, cluster: ClusterState, run: Run, without: Collection[str] = ()) -> None:
        """`without`: runs whose room it may have too."""
        self.run = run
        self.cluster = cluster
        self._others: dict[str, list[tuple[Place, Run]]] = {}
        self._slots: dict[str, list[int]] = {}
        for other in cluster.runs.by_name.values():
            if not other.over and not other.is_lighthouse and other.name not in {run.name, *without}:
                for place in other.places:
                    self._others.setdefault(place.node, []).append((place, other))

    def _beat(self, node: str) -> NodeBeat:
        return self.cluster.runtime.nodes[node].beat

    def load(self, node: str) -> float:
        """How many ranks of other runs there are for each slot."""
        return len(self._others.get(node, ())) / max(1, capacity(self._beat(node)))

    def users(self, node: str) -> Iterator[tuple[int | None, Run]]:
        """The other runs on a node, with the slot of each of their ranks; None if that is not known."""
        beat = self._beat(node)
        for place, other in self._others.get(node, ()):
            slot = place.slot if place.slot is not None and place.slot < capacity(beat) else None
            if beat.devices:  # the agent may list them in another order than when the rank was placed
                slot = beat.devices.index(place.device) if place.device in beat.devices else None
            yield slot, other

    def may_share(self, other: Run, beat: NodeBeat) -> bool:
        """Whether a rank of the run may be on the same slot as one of another run."""
        one_group = bool(beat.devices) and other.replica_id.job == self.run.replica_id.job
        return self.run.task.share and other.task.share and not one_group

    def slots(self, node: str) -> list[int]:
        """The slots that a rank of the run may have, those with the fewest ranks first."""
        if node not in self._slots:
            self._slots[node] = self._find_slots(node)
        return self._slots[node]

    def _find_slots(self, node: str) -> list[int]:
        beat = self._beat(node)
        failed = find_failed(self.cluster, beat)
        ranks: Counter[int | None] = Counter()
        taken = {slot for slot, device in enumerate(beat.devices) if device in failed}
        for slot, other in self.users(node):
            ranks[slot] += 1
            if slot is not None and not self.may_share(other, beat):
                taken.add(slot)
        free = [slot for slot in range(capacity(beat)) if slot not in taken]
        free.sort(key=lambda slot: (ranks[slot], slot))
        return free[: max(0, len(free) - ranks[None])]  # ranks of unknown slots need one each too

    def count(self, node: str) -> int:
        """The number of ranks of the run that a node could take."""
        beat, wanted = self._beat(node), self.run.task.per_node
        if self.run.is_lighthouse:
            return wanted
        if not beat.tied:
            slots = len(self.slots(node))
            return max(wanted, slots) if slots and takes_any_number(beat, self.run.task) else slots
        # It serves the one job that it was started for, and takes all of its ranks, unless one would need a failed
        # device.
        working = len(beat.devices) - len(find_failed(self.cluster, beat))
        shared = wanted > len(beat.devices) and working > 0  # more ranks than devices share those that work
        return wanted if working == len(beat.devices) or wanted <= working or shared else working

    def seats(self, node: str, ranks: int) -> list[Seat]:
        """Where this number of ranks of the run is placed on a node.

        An agent that serves one job alone leaves the choice to the script, as long as there is no failed device to
        choose.
        """
        beat = self._beat(node)
        scripts = beat.tied and not find_failed(self.cluster, beat) and self.run.task.torchft is None
        if self.run.is_lighthouse or scripts:
            return [Seat()] * ranks
        slots = self.slots(node)
        if takes_any_number(beat, self.run.task):
            slots = list(islice(cycle(slots), ranks))
        seats = [self.seat(node, slot) for slot in slots[:ranks]]
        return seats + [Seat()] * (ranks - len(seats))

    def seat(self, node: str, slot: int) -> Seat:
        beat = self._beat(node)
        return Seat(slot, beat.devices[slot] if beat.devices else "")

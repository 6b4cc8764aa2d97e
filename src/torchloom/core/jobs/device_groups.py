"""Devices that a job names itself: a group of them on each of its nodes, and which node each group gets.

A group that names its node gets that one. Any other gets a node that no other group of the job has, so that together
they are a matching of groups and nodes: a group gives way to another one if it can have another node itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchloom.core.jobs.node_room import NODES_SHOWN, Room, Seat, capacity, list_nodes, why_unfit, why_unusable
from torchloom.core.state.cluster import ClusterState
from torchloom.protocol.job_spec import DeviceGroup, Task
from torchloom.protocol.node import NodeBeat
from torchloom.protocol.phrase import Phrase, phrase


def find_error(task: Task) -> Phrase | None:
    """What is wrong with the groups of a task in themselves."""
    others = {
        "least": task.least,
        "min_nodes": task.min_nodes,
        "node": task.node,
        "torchft": task.torchft,
        "attended": task.attended or None,
    }
    if (name := next((name for name, value in others.items() if value is not None), None)) is not None:
        return phrase("groups_not_with", setting=name)
    for group in task.groups:
        if len(set(group.devices)) < len(group.devices):
            return phrase("device_named_twice", devices=group.devices)
    named = [group.node for group in task.groups if group.node is not None]
    if twice := next((node for node in named if named.count(node) > 1), None):
        return phrase("node_in_two_groups", node=twice)
    return None


def explain_missing(cluster: ClusterState, task: Task) -> Phrase | None:
    """Which devices are nowhere, if some are not. An agent that is not there yet may still come."""
    nodes = {node: seen.beat for node, seen in cluster.runtime.nodes.items()}
    for group in task.groups:
        if group.node is None:
            there = {node: beat for node, beat in nodes.items() if not beat.tied}
        else:
            there = {group.node: nodes[group.node]} if group.node in nodes else {}
            if any(beat.tied for beat in there.values()):
                return phrase("node_serves_one_job", node=group.node)
        if there and all(_missing(beat, group) for beat in there.values()):
            shown = [_describe_devices(node, beat) for node, beat in sorted(there.items())[:NODES_SHOWN]]
            most = max(there.values(), key=capacity)
            return phrase("devices_missing", devices=_missing(most, group), node=group.node or "", there=shown)
    return None


def _missing(beat: NodeBeat, group: DeviceGroup) -> list[int]:
    return [slot for slot in group.devices if slot >= capacity(beat)]


def _describe_devices(node: str, beat: NodeBeat) -> Phrase:
    """What can be named on a node: `n1: 0 to 3, its devices`."""
    return phrase("devices_of_node", node=node, last=capacity(beat) - 1, cores=not beat.devices)


# ── choosing ──


def candidates(room: Room, nodes: Iterable[str]) -> list[str]:
    """Of these nodes those that could take one of the groups of a run."""
    return [node for node in nodes if any(_suits(room, group, node) for group in room.run.task.groups)]


def assign(room: Room, nodes: Sequence[str]) -> Mapping[str, Sequence[Seat]]:
    """The devices of all groups, by node and in the order of the groups; nothing unless each has a node.

    `nodes` may be used, those that are preferred first.
    """
    groups = room.run.task.groups
    chosen = match([[node for node in nodes if _suits(room, group, node)] for group in groups])
    return {
        node: [room.seat(node, slot) for slot in group.devices] for node, group in zip(chosen, groups, strict=False)
    }


def _suits(room: Room, group: DeviceGroup, node: str) -> bool:
    """Whether a node has all devices of a group, free for it."""
    return group.node in {None, node} and set(group.devices) <= set(room.slots(node))


def match(wanted: Sequence[Sequence[str]]) -> list[str]:
    """A node for each group, each another one, of those that it could have; empty if there is no such choice."""
    owners: dict[str, int] = {}
    for group in range(len(wanted)):
        asked_by: dict[str, int] = {}  # the group on whose behalf a node was looked at
        waiting, end = [group], ""
        while waiting and not end:
            asking = waiting.pop(0)
            for node in wanted[asking]:
                if node not in asked_by:
                    asked_by[node] = asking
                    if node not in owners:
                        end = node
                        break
                    waiting.append(owners[node])
        if not end:
            return []
        held = {owner: node for node, owner in owners.items()}
        while end:  # each group on the way gets the node that it asked for, and leaves its own to the one before
            owner = asked_by[end]
            owners[end] = owner
            end = held.get(owner, "") if owner != group else ""
    by_group = {owner: node for node, owner in owners.items()}
    return [by_group[group] for group in range(len(wanted))]


# ── explaining ──


def explain_wait(room: Room, now: float) -> Phrase:
    """What a run with groups waits for: the first group that no node can take now, or more nodes."""
    for group in room.run.task.groups:
        names = [group.node] if group.node is not None else sorted(room.cluster.runtime.nodes)
        why = {node: text for node in names if (text := _why_not(room, group, node, now))}
        if len(why) == len(names):
            there = list_nodes(why, why.__getitem__)
            return phrase("waits_for_devices", devices=group.devices, node=group.node or "", there=there)
    return phrase("waits_for_more_nodes", count=len(room.run.task.groups))


def _why_not(room: Room, group: DeviceGroup, node: str, now: float) -> Phrase | None:
    """Why a node cannot take a group now."""
    cluster = room.cluster
    if why := why_unusable(cluster, node, now) or why_unfit(cluster, room.run, node, now):
        return why
    beat = cluster.runtime.nodes[node].beat
    if missing := _missing(beat, group):
        return phrase("room_lacks", devices=missing)
    busy = [slot for slot in group.devices if slot not in room.slots(node)]
    if not busy:
        return None
    jobs = sorted({other.name for slot, other in room.users(node) if slot in busy and not room.may_share(other, beat)})
    return phrase("room_devices_busy", devices=busy, jobs=jobs)

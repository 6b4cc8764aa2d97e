"""The verb that looks whether machines are fit for training: `loom check-node`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torchloom.cli import completion_names
from torchloom.errors import BadState, TorchLoomError, Unreachable
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.protocol.node import Check
    from torchloom.protocol.views import BandwidthView, NodeChecksView, NodeView

    Found = dict[str, tuple[Check, ...]]

LOOK_SECONDS = 150.0
"""For an agent to look; importing torch on a busy machine takes its time."""
PORTS = range(30_000, 60_000)


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "check-node", check_node, "check whether machines are fit for training, with a remedy for each problem",
        "Devices, memory, disk, clock, and how long a small computation takes. Each named node is asked; with no name\n"
        "every node that has an agent; without a control plane this machine. Named together, the network between\n"
        "neighbours is measured too. Exits with 1 if a check fails.\n\n"
        "  loom check-node\n  loom check-node n1 n2 --checkpoint-dir /data/runs", listing=True,
    )  # fmt: skip
    verb.add_argument(
        "nodes", metavar="NODE", nargs="*", help="Nodes, as `loom nodes` lists them; default: all",
        complete=completion_names.complete_agent,
    )  # fmt: skip
    verb.add_argument("--checkpoint-dir", default="", metavar="PATH", help="Check the free space in this folder too")


def check_node(call: Call) -> int:
    from torchloom.views.node_checks import document, fitness

    found = call.wait(_everywhere(call))
    call.show(document(found), lambda: fitness(found, call.screen))
    return 0 if all(check.fit for checks in found.values() for check in checks) else 1


async def _everywhere(call: Call) -> Found:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.protocol.subjects import Role

    wanted: list[str] = list(dict.fromkeys(call.args.nodes))
    try:
        async with WeaverClient(call.settings, Role.OPERATOR) as weaver:
            there = {view.node: view for view in await weaver.nodes() if not view.beat.leaving}
            for name in wanted:
                if name not in there:
                    raise unknown("node", name, list(there))
            if there:
                chosen = wanted or [name for name, view in there.items() if not view.beat.tied] or list(there)
                return await _ask(call, weaver, [there[name] for name in chosen], network=len(wanted) > 1)
    except (Unreachable, BadState):
        if wanted:
            raise
    return await _here(call)


async def _here(call: Call) -> Found:
    """This machine alone; there is nobody to compare it with."""
    import asyncio
    from pathlib import Path

    from torchloom.agent.node import this_node
    from torchloom.agent.node_check.checks import Subject, examine

    node = this_node()
    folder = call.args.checkpoint_dir
    subject = Subject(node.devices, call.settings.state_folder, Path(folder).absolute() if folder else None)
    found = await asyncio.to_thread(examine, subject)
    return {node.name: found.checks}


async def _ask(call: Call, weaver: WeaverClient, views: Sequence[NodeView], network: bool) -> Found:
    import asyncio

    from torchloom.core.jobs.node_health import find_slow
    from torchloom.protocol.node import Check

    call.note(f"looking at {len(views)} node{'s' if len(views) != 1 else ''}; this takes some seconds")
    folder = call.args.checkpoint_dir
    answers = await asyncio.gather(*(_look(weaver, view.node, folder) for view in views))
    found = {view.node: answer.checks for view, answer in zip(views, answers, strict=True)}
    paces = {
        view.node: (answer.on, answer.pace)
        for view, answer in zip(views, answers, strict=True)
        if answer.pace is not None
    }
    for node, why in find_slow(paces).items():
        remedy = "see what else runs there, and whether it is throttled: `loom devices`, top"
        found[node] += (Check(what="speed", found=why, fit=False, remedy=remedy),)
    if network:
        for one, other in itertools.pairwise(views):
            found[other.node] += (await _exchange(weaver, one, other),)
    return found


async def _look(weaver: WeaverClient, node: str, folder: str) -> NodeChecksView:
    from torchloom.bus.node_client import ask_node
    from torchloom.protocol.node import Check
    from torchloom.protocol.views import NodeChecksView, QueryNodeChecks

    try:
        return await ask_node(weaver.client, node, QueryNodeChecks(folder=folder), NodeChecksView, LOOK_SECONDS)
    except TorchLoomError as error:
        remedy = "see whether its agent is there, and as new as this `loom`: `loom nodes`"
        return NodeChecksView(checks=(Check(what="agent", found=error.message, fit=False, remedy=remedy),))


async def _exchange(weaver: WeaverClient, one: NodeView, other: NodeView) -> Check:
    """How fast two nodes exchange numbers, as gloo does it."""
    import asyncio
    import random

    from torchloom.bus.node_client import ask_node
    from torchloom.protocol.node import Check
    from torchloom.protocol.views import BandwidthView, QueryBandwidth

    what = f"network to {one.node}"[:64]
    port = random.choice(PORTS)

    async def half(view: NodeView, rank: int) -> BandwidthView:
        look = QueryBandwidth(host=one.beat.host, port=port, rank=rank)
        try:
            return await ask_node(weaver.client, view.node, look, BandwidthView, LOOK_SECONDS)
        except TorchLoomError as error:
            return BandwidthView(trouble=error.message)

    halves = await asyncio.gather(half(one, 0), half(other, 1))
    if trouble := next((half.trouble for half in halves if half.trouble), ""):
        remedy = f"let ranks on {other.node} reach {one.beat.host}; `loom agent --host` names the address to use"
        return Check(what=what, found=trouble, fit=False, remedy=remedy)
    return Check(what=what, found=f"{min(half.mb_per_second for half in halves):,.0f} MB/s (gloo)")

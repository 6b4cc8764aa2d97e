"""Verbs about the machines that jobs are started on: nodes, drain, check-node."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadState, TorchLoomError, Unreachable
from torchloom.protocol.ids import check_name
from torchloom.protocol.node import Check
from torchloom.protocol.operator import Ask, Drain, DrainReplica
from torchloom.protocol.views import BandwidthView, NodeChecksView, NodeView, QueryBandwidth, QueryNodeChecks
from torchloom.shared.suggestions import unknown

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient

Findings = dict[str, tuple[Check, ...]]
"""What was checked on each node."""
LOOK_SECONDS = 150.0
"""For an agent to look; importing torch on a busy machine takes its time."""
PORTS = range(20_000, 32_000)
"""Where two nodes meet to exchange numbers: below the ports that Linux gives to outgoing connections."""


def add(verbs: Verbs) -> None:
    verbs["nodes"].define(nodes, "loom nodes -o json")

    examples = ("loom drain node7", "loom drain node7 --undo", "loom drain train_ddp/train_ddp_0")
    verb = verbs["drain"].define(drain, *examples)
    verb.add_argument("node", metavar="NODE|JOB/REPLICA", complete="agent or replica")
    verb.add_flag("--undo", help="Allow it to be used again")

    named = "loom check-node n1 n2 --checkpoint-dir /data/runs"
    verb = verbs["check-node"].define(check_node, "loom check-node", named)
    where = "Nodes, as `loom nodes` lists them; default: all"
    verb.add_argument("nodes", metavar="NODE", nargs="*", help=where, complete="agent")
    verb.add_argument("--checkpoint-dir", default="", metavar="PATH", help="Check the free space in this folder too")


def nodes(call: Call) -> int:
    from torchloom.views import listings

    views = call.query(lambda weaver: weaver.nodes())
    empty = "no agents yet: `loom agent` on a machine lets it run jobs"
    return call.show(views, lambda: listings.nodes(views, time.time(), call.screen), empty)


def drain(call: Call) -> int:
    """Ranks on a drained machine continue. A drained replica leaves at the end of a step, without the others
    waiting for it, and restarts after --undo.
    """
    from torchloom.client import operator

    name, slash, replica = call.args.node.partition("/")
    check_name("job" if slash else "node", name)
    ask: Ask = Drain(node=name, undo=call.args.undo, operator=operator())
    if slash:
        check_name("replica", replica)
        ask = DrainReplica(job=name, replica=replica, undo=call.args.undo, operator=operator())
    return call.ask(ask)


def check_node(call: Call) -> int:
    """Devices, memory, disk, clock, and how long a small computation takes. Each named node is asked; with no name
    every node that has an agent; without a control plane this machine. Named together, the network between
    neighbours is measured too. Exits with 1 if a check fails.
    """
    from torchloom.views.node_checks import document, fitness

    findings: Findings = {}
    try:
        findings = call.query(lambda weaver: _ask_agents(call, weaver), "operator")
    except (Unreachable, BadState):
        if call.args.nodes:
            raise
    findings = findings or _examine_this_node(call)
    call.show(document(findings), lambda: fitness(findings, call.screen))
    return 0 if all(check.fit for checks in findings.values() for check in checks) else 1


def _examine_this_node(call: Call) -> Findings:
    """This machine alone; there is nobody to compare it with."""
    from torchloom.agent.node import this_node
    from torchloom.agent.node_check.checks import Subject, examine

    node = this_node()
    folder = call.args.checkpoint_dir
    subject = Subject(node.devices, call.settings.state_folder, Path(folder).absolute() if folder else None)
    return {node.name: examine(subject).checks}


async def _ask_agents(call: Call, weaver: WeaverClient) -> Findings:
    """What the agents of the named nodes find, or of all; nothing if there are none."""
    import asyncio

    from torchloom.core.jobs.node_health import find_slow

    agents = {view.node: view for view in await weaver.nodes() if not view.beat.leaving}
    wanted: list[str] = list(dict.fromkeys(call.args.nodes))
    for name in wanted:
        if name not in agents:
            raise unknown("node", name, list(agents))
    if not agents:
        return {}
    chosen = wanted or [name for name, view in agents.items() if not view.beat.tied] or list(agents)
    call.note(f"looking at {len(chosen)} node{'s' if len(chosen) != 1 else ''}; this takes some seconds")
    views = await asyncio.gather(*(_look(weaver, name, call.args.checkpoint_dir) for name in chosen))
    answers = dict(zip(chosen, views, strict=True))
    findings = {node: answer.checks for node, answer in answers.items()}
    paces = {node: (answer.on, answer.pace) for node, answer in answers.items() if answer.pace is not None}
    for node, why in find_slow(paces).items():
        remedy = "see what else runs there, and whether it is throttled: `loom devices`, top"
        findings[node] += (Check(what="speed", found=why, fit=False, remedy=remedy),)
    for one, other in itertools.pairwise(wanted):  # named together
        findings[other] += (await _exchange(weaver, agents[one], agents[other]),)
    return findings


async def _look(weaver: WeaverClient, node: str, folder: str) -> NodeChecksView:
    from torchloom.bus.weaver_client import ask_node

    try:
        return await ask_node(weaver.client, node, QueryNodeChecks(folder=folder), NodeChecksView, LOOK_SECONDS)
    except TorchLoomError as error:
        remedy = "see whether its agent is there, and as new as this `loom`: `loom nodes`"
        return NodeChecksView(checks=(Check(what="agent", found=error.message, fit=False, remedy=remedy),))


async def _exchange(weaver: WeaverClient, one: NodeView, other: NodeView) -> Check:
    """How fast two nodes exchange numbers, as gloo does it."""
    import asyncio
    import random

    from torchloom.bus.weaver_client import ask_node

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

"""`loom agent`, `loom nodes`, `loom drain`: the machines that jobs are started on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import names
from torchloom.cli.answer import show

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verbs import Verbs
    from torchloom.messages import Done, NodeView


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "agent", agent, "let this machine run jobs: start, watch and end ranks as the control plane says",
        "Joins the control plane of the state folder, or of TORCHLOOM_ADDR. Ranks go on when it ends; the next agent\n"
        "on this machine finds them again. Under Slurm they end with it, and it is called as Slurm calls the node.\n\n"
        "  loom agent\n  srun loom agent",
    )  # fmt: skip
    verb.add_argument("--name", default="", metavar="NODE", help="default: the name of this machine")
    verb.add_argument("--host", default="", metavar="ADDRESS", help="under which other nodes reach it; default: found")
    verb.add_argument(
        "--folder", default="", metavar="PATH", help="where it keeps its work; default: in the state folder"
    )
    verb.add_argument(
        "--standby", type=int, choices=[0, 1], default=1,
        help="keep a process that has imported torch for the next job; default: 1",
    )  # fmt: skip
    verb.add_argument("--tied", action="store_true", help="its ranks end when it ends, as always under Slurm")

    verbs.add(
        "nodes", nodes, "list the machines that run agents: what they have, and what runs there",
        "  loom nodes -o json", listing=True,
    )  # fmt: skip

    verb = verbs.add(
        "drain", drain, "start nothing more on a machine, or have a replica under torchft leave for a while",
        "What runs on a machine goes on. A replica ends its loop at the end of a step, without the others waiting\n"
        "for it, and is started again when that is undone.\n\n"
        "  loom drain node7\n  loom drain node7 --undo\n  loom drain train_ddp/train_ddp_0", listing=True,
    )  # fmt: skip
    names.with_names(verb.add_argument("node", metavar="NODE|JOB/REPLICA"), names.complete_drained)
    verb.add_argument("--undo", action="store_true", help="it may be used again")


def agent(call: Call) -> int:
    import os
    from pathlib import Path

    from torchloom.agent.node import address_towards, this_node
    from torchloom.agent.standing import serve
    from torchloom.bus.client import find
    from torchloom.messages import check_name
    from torchloom.subjects import Role

    if call.args.name:
        check_name("node", call.args.name)
    url = find(call.settings, Role.AGENT).urls[0]
    node = this_node(call.args.name, call.args.host or address_towards(url))
    folder = Path(call.args.folder) if call.args.folder else call.settings.state_folder / "agents" / node.name
    tied = call.args.tied or "SLURM_JOB_ID" in os.environ
    spare = bool(call.args.standby)
    call.wait(serve(call.settings, node, folder.absolute(), lambda text: call.note(f"loom: {text}"), tied, spare))
    return 0


def nodes(call: Call) -> int:
    import time

    from torchloom.bus.asking import Asking
    from torchloom.subjects import Role
    from torchloom.views import nodes as view_nodes

    async def look() -> tuple[NodeView, ...]:
        async with Asking(call.settings, Role.VIEWER) as weaver:
            return await weaver.nodes()

    found = call.wait(look())
    if call.json:
        call.print_json(found)
    elif found:
        call.print(view_nodes.nodes(found, time.time(), call.screen))
    else:
        call.print(["no agents yet: `loom agent` on a machine lets it run jobs"])
    return 0


def drain(call: Call) -> int:
    from torchloom.bus.asking import Asking
    from torchloom.client import operator
    from torchloom.messages import Drain, DrainReplica, check_name
    from torchloom.subjects import Role

    job, slash, replica = call.args.node.partition("/")
    if slash:
        check_name("job", job)
        check_name("replica", replica)

    async def work() -> Done:
        async with Asking(call.settings, Role.OPERATOR) as weaver:
            if slash:
                ask = DrainReplica(job=job, replica=replica, undo=call.args.undo, operator=operator())
                return await weaver.ask(ask)
            return await weaver.ask(Drain(node=call.args.node, undo=call.args.undo, operator=operator()))

    return show(call, call.wait(work()))

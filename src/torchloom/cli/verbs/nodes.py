"""`loom agent`, `loom nodes`, `loom drain`: the machines that jobs are started on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchloom.cli import completion_names

if TYPE_CHECKING:
    from torchloom.bus.weaver_client import WeaverClient
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs
    from torchloom.protocol.operator import Done


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "agent", agent, "let this machine run jobs that the control plane starts",
        "Uses the control plane of the state folder, or of TORCHLOOM_ADDR. Ranks continue when the agent ends; the\n"
        "next agent on this machine finds them. Under Slurm ranks end with the agent, with Slurm's node name.\n\n"
        "  loom agent\n  srun loom agent",
    )  # fmt: skip
    verb.add_argument("--name", default="", metavar="NODE", help="Name of this node; default: the host name")
    verb.add_argument(
        "--host", default="", metavar="ADDRESS", help="Address at which other nodes reach this one; default: detected"
    )
    verb.add_argument("--folder", default="", metavar="PATH", help="Folder for its files; default: in the state folder")
    verb.add_argument(
        "--standby", type=int, choices=[0, 1], default=1,
        help="Keep a process that has imported torch for the next job; default: 1",
    )  # fmt: skip
    verb.add_argument("--tied", action="store_true", help="End the ranks when the agent ends, as always under Slurm")

    verbs.add(
        "nodes", nodes, "list the machines that run agents: their devices, and what runs on them",
        "  loom nodes -o json", listing=True,
    )  # fmt: skip

    verb = verbs.add(
        "drain", drain, "start no more ranks on a machine, or let a replica under torchft leave until --undo",
        "Ranks on a drained machine continue. A drained replica leaves at the end of a step, without the others\n"
        "waiting for it, and restarts after --undo.\n\n"
        "  loom drain node7\n  loom drain node7 --undo\n  loom drain train_ddp/train_ddp_0", listing=True,
    )  # fmt: skip
    verb.add_argument("node", metavar="NODE|JOB/REPLICA", complete=completion_names.complete_drained)
    verb.add_argument("--undo", action="store_true", help="Allow it to be used again")


def agent(call: Call) -> int:
    import os
    from pathlib import Path

    from torchloom.agent.daemon import serve
    from torchloom.agent.node import address_towards, this_node
    from torchloom.bus.connection import find
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.subjects import Role

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

    from torchloom.views import listings

    views = call.query(lambda weaver: weaver.nodes())
    empty = "no agents yet: `loom agent` on a machine lets it run jobs"
    return call.show(views, lambda: listings.nodes(views, time.time(), call.screen), empty)


def drain(call: Call) -> int:
    from torchloom.client import operator
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.operator import Drain, DrainReplica

    job, slash, replica = call.args.node.partition("/")
    if slash:
        check_name("job", job)
        check_name("replica", replica)

    async def work(weaver: WeaverClient) -> Done:
        if slash:
            ask = DrainReplica(job=job, replica=replica, undo=call.args.undo, operator=operator())
            return await weaver.ask(ask)
        return await weaver.ask(Drain(node=call.args.node, undo=call.args.undo, operator=operator()))

    return call.show_done(call.query(work, "operator"))

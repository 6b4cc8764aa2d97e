"""Verbs that run a service of torchLoom until it is stopped: up, down, weaver, agent, lighthouse."""

from __future__ import annotations

import os
from pathlib import Path

from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput, TorchLoomError
from torchloom.lighthouse.options import add_options, read_options


def add(verbs: Verbs) -> None:
    verb = verbs["up"].define(up, output=False)
    verb.add_argument(
        "--port", type=int, metavar="N",
        help="Port to listen on; default: the last one used, else 4222; 0: any free one",
    )  # fmt: skip
    where = "Address to listen on; with TLS beyond this machine (default: the last one used, else loopback)"
    verb.add_argument("--listen", metavar="ADDR[:PORT]", help=where)
    verb.add_argument("--tls-cert", type=Path, metavar="FILE", help="Certificate to use instead of a generated one")
    verb.add_argument("--tls-key", type=Path, metavar="FILE", help="Key of the certificate")
    verb.add_flag("--detach", help="Return when it is up, and keep it running in the background")

    verbs["down"].define(down, "loom down --yes", output=False).add_yes()

    example = "TORCHLOOM_ADDR=nats://nats:4222 TORCHLOOM_CREDS=weaver.creds loom weaver"
    verbs["weaver"].define(weaver, example, output=False).add_flag(
        "--takeover", help="Replace a weaver that is running"
    )

    verb = verbs["agent"].define(agent, "loom agent", "srun loom agent", output=False)
    verb.add_argument("--name", default="", metavar="NODE", help="Name of this node; default: the host name")
    where = "Address at which other nodes reach this one; default: detected"
    verb.add_argument("--host", default="", metavar="ADDRESS", help=where)
    verb.add_argument("--folder", default="", metavar="PATH", help="Folder for its files; default: in the state folder")
    spare = "Keep a process that has imported torch for the next job; default: 1"
    verb.add_argument("--standby", type=int, choices=[0, 1], default=1, help=spare)
    budget = "Loader processes that jobs may have here in all; default: cores, less one of eight"
    verb.add_argument("--loader-budget", type=loader_budget, metavar="N", help=budget)
    verb.add_flag("--tied", help="End the ranks when the agent ends, as always under Slurm")

    examples = (
        "loom lighthouse --job mnist --min-replicas 1",
        "loom lighthouse --job mnist --bind 10.0.0.5:29510 --heartbeat-timeout-ms 5000",
    )
    add_options(verbs["lighthouse"].define(lighthouse, *examples, output=False))


def up(call: Call) -> int:
    """Keeps both running, restarting one that dies, until Ctrl-C or `loom down`.

      loom up --detach
      loom up --listen 10.0.0.5

    The second lets other machines join: see `loom token`.
    """
    args = call.args
    host, port = parse_listen(args.listen) if args.listen else (None, None)
    if port is not None and args.port is not None and port != args.port:
        raise BadInput(f"--listen says port {port} and --port says {args.port}", hint="give one of them")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise BadInput("--tls-cert and --tls-key belong together", hint="give both, or neither to have them made")
    for file in (args.tls_cert, args.tls_key):
        if file is not None and not file.is_file():
            raise BadInput(f"there is no file {file}")
    from torchloom.weaver import control_plane_processes

    listen = control_plane_processes.ListenRequest(
        host=host,
        port=args.port if port is None else port,
        cert=args.tls_cert and args.tls_cert.absolute(),
        key=args.tls_key and args.tls_key.absolute(),
    )
    return control_plane_processes.up(call.settings, listen, _say, args.detach)


def _say(text: str) -> None:
    print(text, flush=True)  # at once: a reader at the end of a pipe waits for it


def parse_listen(text: str) -> tuple[str, int | None]:
    """`10.0.0.5`, `10.0.0.5:4222`, `host:4222`, `[fd00::1]:4222`, `fd00::1`."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        if not closed or (rest and not rest.startswith(":")):
            raise BadInput(f"{text!r} is not an address", hint="an IPv6 address with a port is written [fd00::1]:4222")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host or (port and not port.isdecimal()):
        raise BadInput(f"{text!r} is not an address", hint="write ADDR or ADDR:PORT")
    return host, int(port) if port else None


def down(call: Call) -> int:
    """Attached training continues without it, and connects to the next one."""
    from torchloom.bus.state_folder import StateFolder
    from torchloom.weaver import control_plane_processes

    holder = control_plane_processes.holder(StateFolder(call.settings.state_folder))
    live = {} if holder is None else _live(call)  # not of a control plane that was only joined
    if live:
        names = ", ".join(f"{job} ({count} {'rank' if count == 1 else 'ranks'})" for job, count in live.items())
        question = f"this control plane watches live training: {names}. It continues, but unwatched and unprotected"
        if not call.confirm(lambda: question, "nothing was stopped"):
            return 0
    return control_plane_processes.down(call.settings, _say)


def _live(call: Call) -> dict[str, int]:
    """Live ranks by job; nothing if nobody answers, for then nothing is watched either."""
    try:
        view = call.query(lambda weaver: weaver.cluster(most=1), timeout=2.0)
    except TorchLoomError:
        return {}
    return {job.job: job.live for job in view.jobs if job.live}


def weaver(call: Call) -> int:
    from torchloom.weaver import main

    return main.run(call.settings, call.args.takeover)


def loader_budget(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 100_000:
        raise ValueError(text)
    return number


def agent(call: Call) -> int:
    """Uses the control plane of the state folder, or of TORCHLOOM_ADDR. Ranks continue when the agent ends; the
    next agent on this machine finds them. Under Slurm ranks end with the agent, with Slurm's node name.
    """
    from torchloom.agent.daemon import serve
    from torchloom.agent.node import address_towards, this_node
    from torchloom.bus.connection import find
    from torchloom.protocol.ids import check_name
    from torchloom.protocol.subjects import Role

    if call.args.name:
        check_name("node", call.args.name)
    url = find(call.settings, Role.AGENT).urls[0]
    node = this_node(call.args.name, call.args.host or address_towards(url), call.args.loader_budget)
    folder = Path(call.args.folder) if call.args.folder else call.settings.state_folder / "agents" / node.name
    tied = call.args.tied or "SLURM_JOB_ID" in os.environ
    spare = bool(call.args.standby)
    call.wait(serve(call.settings, node, folder.absolute(), lambda text: call.note(f"loom: {text}"), tied, spare))
    return 0


def lighthouse(call: Call) -> int:
    """Replaces `torchft_lighthouse`: set TORCHFT_LIGHTHOUSE to its address. When a replica dies, the others do not
    wait for a heartbeat timeout. It keeps its quorums on disk, so that it can be killed and restarted. Runs
    until Ctrl-C. See docs/lighthouse.md.
    """
    from torchloom.lighthouse import main

    return main.run(call.settings, read_options(call.args))

"""Verbs that start and stop the control plane: up, down, weaver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchloom.errors import BadInput, TorchLoomError

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "up", up, "start the control plane: nats-server and weaver",
        "Keeps both running, restarting one that dies, until Ctrl-C or `loom down`.\n\n"
        "  loom up --detach\n  loom up --listen 10.0.0.5\n\nThe second lets other machines join: see `loom token`.",
    )  # fmt: skip
    verb.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="Port to listen on; default: the last one used, else 4222; 0: any free one",
    )
    where = "Address to listen on; with TLS beyond this machine (default: the last one used, else loopback)"
    verb.add_argument("--listen", metavar="ADDR[:PORT]", help=where)
    verb.add_argument("--tls-cert", type=Path, metavar="FILE", help="Certificate to use instead of a generated one")
    verb.add_argument("--tls-key", type=Path, metavar="FILE", help="Key of the certificate")
    verb.add_argument(
        "--detach", action="store_true", help="Return when it is up, and keep it running in the background"
    )

    verb = verbs.add(
        "down", down, "stop the control plane of this state folder",
        "Attached training continues without it, and connects to the next one.\n\n  loom down --yes",
    )  # fmt: skip
    verb.add_yes()

    verb = verbs.add(
        "weaver", weaver, "run the weaver alone, on an existing NATS server",
        "  TORCHLOOM_ADDR=nats://nats:4222 TORCHLOOM_CREDS=weaver.creds loom weaver",
    )  # fmt: skip
    verb.add_argument("--takeover", action="store_true", help="Replace a weaver that is running")


def up(call: Call) -> int:
    args = call.args
    host, port = parse_listen(args.listen) if args.listen else (None, None)
    if port is not None and args.port is not None and port != args.port:
        raise BadInput(f"--listen says port {port} and --port says {args.port}", hint="give one of them")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise BadInput("--tls-cert and --tls-key belong together", hint="give both, or neither to have them made")
    cert, key = args.tls_cert, args.tls_key
    for file in (cert, key):
        if file is not None and not file.is_file():
            raise BadInput(f"there is no file {file}")
    from torchloom.weaver import control_plane

    listen = control_plane.ListenRequest(
        host=host,
        port=args.port if port is None else port,
        cert=cert.absolute() if cert else None,
        key=key.absolute() if key else None,
    )
    return control_plane.up(call.settings, listen, _say, args.detach)


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
    from torchloom.bus.state_folder import StateFolder
    from torchloom.weaver import control_plane

    up_here = control_plane.holder(StateFolder(call.settings.state_folder)) is not None  # not one that was only joined
    live = _live(call) if up_here else {}
    if live:
        names = ", ".join(f"{job} ({count} {'rank' if count == 1 else 'ranks'})" for job, count in live.items())
        question = f"this control plane watches live training: {names}. It continues, but unwatched and unprotected"
        if not call.confirm(question):
            call.note("nothing was stopped")
            return 0
    return control_plane.down(call.settings, _say)


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

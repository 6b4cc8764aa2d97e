"""Verbs that let others in: token and join for a second machine, token ingress for a monitoring system."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchloom.errors import BadInput

if TYPE_CHECKING:
    from torchloom.cli.call import Call
    from torchloom.cli.verb_registry import Verbs

_ROLES = ["threadlet", "agent", "viewer", "operator", "weaver"]
_DEFAULT_ROLES = ["threadlet", "agent", "viewer"]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add(verbs: Verbs) -> None:
    verb = verbs.add(
        "token", token, "print a token with which another machine joins this control plane",
        "It is a secret. Hand it over without showing it in a process list:\n\n"
        "  loom token --expires 7d | ssh other loom join -",
    )  # fmt: skip
    verb.add_argument(
        "--role", action="append", choices=_ROLES, metavar="ROLE",
        help="Role that the token grants; may be repeated; default: threadlet, agent and viewer",
    )  # fmt: skip
    verb.add_argument(
        "--expires", default="30d", metavar="TIME",
        help="Lifetime of the credentials: 90s, 30m, 12h, 7d, never; default: 30d",
    )  # fmt: skip
    verb.add_argument("--host", metavar="ADDR", help="Address at which the other machine reaches this one")

    verbs.add(
        "token ingress", token_ingress, "print the token with which a monitoring system reports devices",
        "Alertmanager sends it with each alert: see docs/alertmanager.md. It is a secret and never changes.\n\n"
        "  loom token ingress | sudo install -o prometheus -m 600 /dev/stdin /etc/prometheus/torchloom.token",
    )  # fmt: skip

    verb = verbs.add(
        "join", join, "make commands and training on this machine use the control plane of another",
        "Reads the token from standard input if it is given as `-`, which keeps the secret out of the process list:\n\n"
        "  ssh first loom token | loom join -",
    )  # fmt: skip
    verb.add_argument(
        "token", metavar="TOKEN", help="Token that `loom token` printed, or - to read it from standard input"
    )


def token(call: Call) -> int:
    import time

    from torchloom.bus.join_token import make_token
    from torchloom.bus.state_folder import StateFolder
    from torchloom.protocol.subjects import Role
    from torchloom.views.format.numbers import stamp

    lifetime = parse_lifetime(call.args.expires)
    roles = [Role(name) for name in dict.fromkeys(call.args.role or _DEFAULT_ROLES)]
    text = make_token(StateFolder(call.settings.state_folder), roles, lifetime, call.args.host)
    end = "has no end" if lifetime is None else f"ends {stamp(time.time() + lifetime)[:16]}"
    call.note(f"for {', '.join(roles)}; {end}; anyone who has it may join, so keep it secret")
    call.print([text])
    return 0


def token_ingress(call: Call) -> int:
    from torchloom.bus.state_folder import StateFolder
    from torchloom.weaver.ingress_config import last_place, read_token

    text = read_token(call.settings)
    where = last_place(StateFolder(call.settings.state_folder))
    call.note(f"for alerts at {where or 'the weaver'}; anyone who has it may fail devices, so keep it secret")
    call.print([text])
    return 0


def parse_lifetime(text: str) -> float | None:
    if text == "never":
        return None
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in _UNITS or not int(number):
        raise BadInput(f"--expires {text!r} is not a time", hint="write 90s, 30m, 12h, 7d, or never")
    return float(int(number) * _UNITS[unit])


def join(call: Call) -> int:
    from torchloom.bus import join_token
    from torchloom.bus.state_folder import StateFolder

    text = sys.stdin.read(join_token.MAX_BYTES + 1) if call.args.token == "-" else call.args.token
    contents = join_token.read_token(text)
    folder = StateFolder(call.settings.state_folder)
    join_token.join(folder, contents)
    call.note(f"joined {contents.url} as {', '.join(contents.creds)}; kept in {folder.path}")
    return 0

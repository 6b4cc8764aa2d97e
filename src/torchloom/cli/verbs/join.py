"""Verbs that let others in: token and join for a second machine, token ingress for a monitoring system."""

from __future__ import annotations

import sys
import time

from torchloom.bus import join_token
from torchloom.bus.state_folder import StateFolder
from torchloom.cli.verb_call import Call, Verbs
from torchloom.errors import BadInput
from torchloom.protocol.subjects import Role
from torchloom.views.format.numbers import stamp

_DEFAULT_ROLES = ["threadlet", "agent", "viewer"]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add(verbs: Verbs) -> None:
    verb = verbs["token"].define(token, "loom token --expires 7d | ssh other loom join -", output=False)
    roles = "Role that the token grants; may be repeated; default: threadlet, agent and viewer"
    verb.add_argument("--role", action="append", choices=list(Role), metavar="ROLE", help=roles)
    lifetime = "Lifetime of the credentials: 90s, 30m, 12h, 7d, never; default: 30d"
    verb.add_argument("--expires", default="30d", metavar="TIME", help=lifetime)
    verb.add_argument("--host", metavar="ADDR", help="Address at which the other machine reaches this one")

    install = "sudo install -o prometheus -m 600 /dev/stdin /etc/prometheus/torchloom.token"
    verbs["token ingress"].define(token_ingress, f"loom token ingress | {install}", output=False)

    verb = verbs["join"].define(join, "ssh first loom token | loom join -", output=False)
    verb.add_argument("token", help="Token that `loom token` printed, or - to read it from standard input")


def token(call: Call) -> int:
    """It is a secret. Hand it over without showing it in a process list:"""
    lifetime = parse_lifetime(call.args.expires)
    roles = [Role(name) for name in dict.fromkeys(call.args.role or _DEFAULT_ROLES)]
    text = join_token.make_token(StateFolder(call.settings.state_folder), roles, lifetime, call.args.host)
    end = "has no end" if lifetime is None else f"ends {stamp(time.time() + lifetime)[:16]}"
    call.note(f"for {', '.join(roles)}; {end}; anyone who has it may join, so keep it secret")
    call.print([text])
    return 0


def token_ingress(call: Call) -> int:
    """Alertmanager sends it with each alert: see docs/alertmanager.md. It is a secret and never changes."""
    from torchloom.weaver.alert_webhook import last_place, read_token

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
    """Reads the token from standard input if it is given as `-`, which keeps the secret out of the process list:"""
    text = sys.stdin.read(join_token.MAX_BYTES + 1) if call.args.token == "-" else call.args.token
    contents = join_token.read_token(text)
    folder = StateFolder(call.settings.state_folder)
    join_token.join(folder, contents)
    call.note(f"joined {contents.url} as {', '.join(contents.creds)}; kept in {folder.path}")
    return 0

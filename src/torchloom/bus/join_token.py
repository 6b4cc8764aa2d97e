"""The join token: everything a second machine needs to reach this control plane, in one line of text.

base64url of JSON {v, url, ca, account, creds: {role: text}}. It holds secrets, so it is handed over like a password:
`loom token | ssh other loom join -` keeps it out of the process list and the shell's history.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import msgspec

from torchloom.bus.credentials import ensure_authority
from torchloom.bus.state_folder import Endpoint, StateFolder, write_private
from torchloom.errors import BadInput, BadState
from torchloom.protocol.subjects import Role
from torchloom.shared.addresses import EVERY_ADDRESS, is_loopback, join_address, split_address, split_url
from torchloom.shared.json_decoding import decoder

MAX_BYTES = 256 * 1024


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    v: int = 1
    url: str
    account: str
    creds: dict[Role, str]
    ca: str = ""


def make_token(folder: StateFolder, roles: list[Role], lifetime: float | None, host: str | None = None) -> str:
    """A token for these roles, valid for `lifetime` seconds. `host` is the name by which others reach this machine."""
    endpoint = folder.read_endpoint()
    if endpoint is None or not folder.authority.exists():
        raise BadState(
            f"no control plane was started from {folder.path}, so there is nothing to join",
            hint="run this where `loom up --listen ADDR` runs",
        )
    own_cert = endpoint.cert == str(folder.tls / "server.pem")  # certificates of users are not checked
    url = _reachable_url(endpoint, host, own_cert)
    authority = ensure_authority(folder)
    token = JoinToken(
        url=url,
        account=authority.account_key,
        creds={role: authority.mint(role, lifetime=lifetime).decode() for role in roles},
        ca=(folder.tls / "ca.pem").read_text() if own_cert else "",
    )
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).decode()


def read_token(text: str) -> JoinToken:
    text = "".join(text.split())  # a mail program may have broken the line
    if not text or len(text) > MAX_BYTES:
        raise _not_a_token("it is empty" if not text else "it is too long")
    try:
        token = decoder(JoinToken)(base64.b64decode(text, altchars=b"-_", validate=True))
    except (ValueError, msgspec.MsgspecError) as error:
        raise _not_a_token(str(error)) from error
    if token.v != 1:
        raise BadInput(f"this join token is of version {token.v}", hint="install the same torchLoom on both machines")
    scheme, _, server = token.url.partition("://")
    address = split_address(server)
    if scheme not in {"nats", "tls"} or address is None or re.search(r"[\s/@]", server) or address[1] > 65_535:
        raise _not_a_token(f"{token.url!r} is not the address of a server")
    if scheme == "nats" and not is_loopback(address[0]):
        raise BadInput("this join token leads to a server beyond this machine without TLS", hint="ask for a new one")
    return token


def join(folder: StateFolder, token: JoinToken) -> None:
    """Write the token's contents: from then on every command with this state folder reaches that control plane."""
    if folder.authority.exists():
        raise BadState(
            f"the state folder {folder.path} has a control plane of its own",
            hint="choose another folder for the joined one with --state or TORCHLOOM_STATE",
        )
    folder.make()
    folder.endpoint.unlink(missing_ok=True)  # written last, so that an interrupted join is not taken for a complete one
    for old in (folder.path / "creds").glob("*.creds"):
        old.unlink()  # of a control plane joined before
    for role, creds in token.creds.items():
        write_private(folder.creds(role), creds.encode())
    if token.ca:
        write_private(folder.tls / "ca.pem", token.ca.encode())
    else:
        (folder.tls / "ca.pem").unlink(missing_ok=True)
    write_private(folder.endpoint, msgspec.json.encode(Endpoint(url=token.url, account=token.account)))


def _reachable_url(endpoint: Endpoint, host: str | None, own_cert: bool) -> str:
    scheme, (_, port) = endpoint.url.partition("://")[0], split_url(endpoint.url)
    if host is None:
        host = endpoint.listen
        if host in EVERY_ADDRESS:
            raise BadInput(
                "the server listens on all addresses of this machine; which one can the other machine reach?",
                hint="name it with --host",
            )
        if is_loopback(host):
            raise BadInput(
                "the server listens on this machine only, so no other can join",
                hint="start it with `loom up --listen ADDR`; or name with --host where you forward its port to",
            )
    if own_cert:
        from torchloom.bus.tls import covers

        if not covers(Path(endpoint.cert), host):  # the other machine would reject it
            raise BadInput(
                f"the server's certificate does not name {host}", hint=f"start it with `loom up --listen {host}`"
            )
    if scheme != "tls" and not is_loopback(host):
        raise BadInput(
            f"the server has no TLS, so it cannot be joined at {host}", hint="start it with `loom up --listen ADDR`"
        )
    return f"{scheme}://{join_address(host, port)}"


def _not_a_token(why: str) -> BadInput:
    return BadInput(f"this is not a join token: {why}", hint="`loom token` on the first machine prints one")

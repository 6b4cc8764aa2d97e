"""The keys of a control plane, and the credentials signed with them.

The server runs in NATS's operator mode. It knows the operator and two accounts (torchLoom's and the system account)
from its configuration; anyone with a token signed by the account's key is a user. A credential for one more rank,
limited to that rank's subjects and to a period, is therefore made here in a millisecond, and the server need not
restart or reload. (docs/decisions/0002-credentials.md has the alternatives.)
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from pathlib import Path

import msgspec
import nkeys

from torchloom.bus.state_folder import StateFolder, write_private
from torchloom.errors import BadState
from torchloom.protocol.ids import RankId
from torchloom.protocol.permissions import Permissions, permissions
from torchloom.protocol.subjects import Role
from torchloom.shared.json_decoding import decoder

SYSTEM = "system"
"""Name of the credential with which the weaver receives the server's own advisories."""
_UNLIMITED = {
    "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1,
}  # fmt: skip
_JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
_RANK_PAYLOAD = 256 * 1024
"""Bytes in one message of a threadlet, enforced by the server."""

_ANSWER_SECONDS = 60
"""Seconds in which a request may be answered."""


class Authority(msgspec.Struct, frozen=True, kw_only=True):
    """The three secret seeds from which everything else is derived. Their owner can mint any credential."""

    operator: str
    account: str
    system: str

    @classmethod
    def create(cls) -> Authority:
        account, system = _seed(nkeys.PREFIX_BYTE_ACCOUNT), _seed(nkeys.PREFIX_BYTE_ACCOUNT)
        return cls(operator=_seed(nkeys.PREFIX_BYTE_OPERATOR), account=account, system=system)

    @property
    def account_key(self) -> str:
        return _public(self.account)

    def server_config(self) -> dict[str, object]:
        """The part of the server's configuration that names the trusted keys."""
        operator, account, system = (_public(seed) for seed in (self.operator, self.account, self.system))
        operator_token = _sign(
            self.operator, operator, "torchloom", {"type": "operator", "version": 2, "system_account": system}
        )
        claims: dict[str, object] = {"type": "account", "version": 2}
        accounts = {
            account: _sign(self.operator, account, "loom", claims | {"limits": _UNLIMITED | _JETSTREAM}),
            system: _sign(self.operator, system, "system", claims | {"limits": _UNLIMITED}),
        }
        trusted = {"operator": operator_token, "system_account": system}
        return {**trusted, "resolver": "MEMORY", "resolver_preload": accounts}

    def mint(self, role: Role, rank: RankId | None = None, lifetime: float | None = None) -> bytes:
        """A credentials file for a role, or for one rank only, valid for `lifetime` seconds or without limit."""
        payload = _RANK_PAYLOAD if role is Role.THREADLET else -1
        return _user(self.account, str(rank or role), permissions(role, rank), payload, lifetime)

    def system_permissions(self) -> Permissions:
        """Of the weaver's second credential: it receives connect and disconnect advisories and may list connections."""
        account = self.account_key
        return Permissions(
            publish=("$SYS.REQ.SERVER.PING.CONNZ", "$SYS.REQ.SERVER.*.CONNZ"),
            subscribe=(f"$SYS.ACCOUNT.{account}.CONNECT", f"$SYS.ACCOUNT.{account}.DISCONNECT", f"_INBOX.{SYSTEM}.>"),
        )


def ensure_authority(folder: StateFolder) -> Authority:
    """The folder's authority, created on first use, with a credentials file for each role beside it."""
    if folder.authority.exists():
        try:
            authority = decoder(Authority)(folder.authority.read_bytes())
            authority.server_config()  # a damaged seed shows here, not in the server
        except (OSError, msgspec.MsgspecError, nkeys.NkeysError, ValueError, TypeError) as error:
            raise BadState(
                f"the keys in {folder.authority} cannot be used: {error or type(error).__name__}",
                hint="restore that file from a backup. Without it a new control plane begins: remove it, and "
                "every credential given out becomes invalid and the stored log cannot be read",
            ) from error
    else:
        authority = Authority.create()
        write_private(folder.authority, msgspec.json.encode(authority))
    # Tokens contain their signer and their permissions: they are replaced if the keys or the subjects have changed.
    credentials = {str(role): (authority.account, permissions(role)) for role in Role}
    credentials[SYSTEM] = (authority.system, authority.system_permissions())
    for name, (issuer, allowed) in credentials.items():
        if _read_claims(folder.creds(name)) != (_public(issuer), allowed):
            minted = _user(issuer, name, allowed) if name == SYSTEM else authority.mint(Role(name))
            write_private(folder.creds(name), minted)
    return authority


def _user(account: str, name: str, allowed: Permissions, payload: int = -1, lifetime: float | None = None) -> bytes:
    seed = _seed(nkeys.PREFIX_BYTE_USER)
    claims: dict[str, object] = {
        "type": "user", "version": 2, "subs": -1, "data": -1, "payload": payload,
        "pub": {"allow": list(allowed.publish)}, "sub": {"allow": list(allowed.subscribe)},
    }  # fmt: skip
    if allowed.answer:
        claims["resp"] = {"max": 1, "ttl": _ANSWER_SECONDS * 10**9}
    token = _sign(account, _public(seed), name, claims, lifetime)
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    ).encode()


def _read_claims(path: Path) -> tuple[str, Permissions] | None:
    """The signer of a credentials file, and its permissions."""
    try:
        body = path.read_bytes().split(b"\n")[1].split(b".")[1]
        token = decoder(dict)(base64.urlsafe_b64decode(body + b"=="))  # padding in excess does no harm
        claims = token["nats"]
        allowed = Permissions(tuple(claims["pub"]["allow"]), tuple(claims["sub"]["allow"]), "resp" in claims)
        return token["iss"], allowed
    except (OSError, IndexError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None


def _seed(prefix: int) -> str:
    return bytes(nkeys.encode_seed(os.urandom(32), prefix)).decode()


def _public(seed: str) -> str:
    return bytes(nkeys.from_seed(bytearray(seed.encode())).public_key).decode()


def _sign(issuer_seed: str, subject: str, name: str, claims: dict[str, object], lifetime: float | None = None) -> str:
    now = int(time.time())
    body: dict[str, object] = {
        "iat": now, "iss": _public(issuer_seed), "sub": subject, "name": name, "nats": claims,
    }  # fmt: skip
    if lifetime is not None:
        body["exp"] = now + max(1, int(lifetime))
    digest = hashlib.sha256(msgspec.json.encode(body)).digest()
    body["jti"] = base64.b32encode(digest).rstrip(b"=").decode()
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    text = f"{_pad_free(msgspec.json.encode(head))}.{_pad_free(msgspec.json.encode(body))}"
    signature = nkeys.from_seed(bytearray(issuer_seed.encode())).sign(text.encode())
    return f"{text}.{_pad_free(signature)}"


def _pad_free(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

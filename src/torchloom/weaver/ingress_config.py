"""The configuration of the ingress: its last address, its token and its certificate."""

from __future__ import annotations

import secrets
import ssl
from pathlib import Path

import msgspec

from torchloom.bus.state_folder import StateFolder, write_private
from torchloom.errors import BadInput, BadState
from torchloom.settings import Settings
from torchloom.shared.addresses import is_loopback, split_url

PATH = "/alertmanager"
LEAST_TOKEN = 16


class _Where(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `ingress.json`."""

    url: str


def ensure_token(settings: Settings) -> str:
    """The token that alerts must contain, created on first use."""
    folder = StateFolder(settings.state_folder)
    if not settings.ingress_token and not folder.ingress_token.exists():
        folder.make()
        write_private(folder.ingress_token, f"{secrets.token_urlsafe(32)}\n".encode())
    return read_token(settings)


def read_token(settings: Settings) -> str:
    """The token, if it was created; else BadState."""
    own = Path(settings.ingress_token).expanduser() if settings.ingress_token else None
    path = own or StateFolder(settings.state_folder).ingress_token
    try:
        token = path.read_text().strip()
    except FileNotFoundError:
        hint = "mend TORCHLOOM_INGRESS_TOKEN" if own else "the weaver makes it: run this where `loom up` runs"
        raise BadState(f"there is no file {path}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadState(f"cannot read the token in {path}: {error}") from error
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise BadState(
            f"{path} holds no token: it takes {LEAST_TOKEN} printable characters or more",
            hint="write one there" if own else f"remove {path}; the next `loom up` creates another one",
        )
    return token


def last_place(folder: StateFolder) -> str:
    """Where the weaver of this folder last received alerts; empty if it never has."""
    try:
        return msgspec.json.decode(folder.ingress.read_bytes(), type=_Where).url
    except (OSError, msgspec.MsgspecError):
        return ""


def remember_place(folder: StateFolder, url: str) -> None:
    """The next weaver uses the same address, which Alertmanager is configured with."""
    write_private(folder.ingress, msgspec.json.encode(_Where(url=url)))


def port_of(url: str) -> int:
    try:
        return split_url(url)[1]
    except ValueError:
        return 0


def certificate(settings: Settings) -> ssl.SSLContext | None:
    """The certificate to listen with, if any. Refuses to listen beyond this machine without one."""
    cert, key = settings.ingress_cert, settings.ingress_key
    if bool(cert) != bool(key):
        raise BadInput("TORCHLOOM_INGRESS_CERT and TORCHLOOM_INGRESS_KEY belong together", hint="set both, or neither")
    if cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"the certificate {cert} and its key cannot be used: {error}") from error
        return context
    if not is_loopback(settings.ingress_host):
        raise BadInput(
            f"refusing to take alerts on {settings.ingress_host} without TLS: the token could be read on its way",
            hint="set TORCHLOOM_INGRESS_CERT and TORCHLOOM_INGRESS_KEY, or leave TORCHLOOM_INGRESS_HOST on loopback",
        )
    return None

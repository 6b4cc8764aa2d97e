"""Connections to NATS: which server, which credential, how long to try, and their names."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
from nats.aio.client import Client

from torchloom.bus.credentials import SYSTEM
from torchloom.bus.state_folder import StateFolder
from torchloom.errors import BadSetting, BadState, Unreachable
from torchloom.protocol.ids import MAX_RANK, NAME, RankId
from torchloom.protocol.permissions import inbox_prefix
from torchloom.protocol.subjects import Role
from torchloom.settings import DEFAULT_ADDRESS, Settings

Hook = Callable[[], Awaitable[None]]
ErrorHook = Callable[[Exception], Awaitable[None]]
_PATTERN = re.compile(rf"rank ({NAME.pattern})/({NAME.pattern})/(0|[1-9][0-9]{{0,6}}) ([0-9a-f]{{24}})")


@dataclass(frozen=True)
class Address:
    """Where to connect, and with which credential."""

    urls: tuple[str, ...]
    creds: Path | None
    inbox: str
    ca: Path | None = None
    account: str = ""
    """Public key of our account, known for an embedded server only."""

    def __str__(self) -> str:
        return ", ".join(url.rpartition("@")[2] if "@" in url else url for url in self.urls)


def find(settings: Settings, role: Role, rank: RankId | None = None) -> Address:
    """The address for a role: TORCHLOOM_ADDR, else the state folder's server, else localhost."""
    folder = StateFolder(settings.state_folder)
    endpoint = folder.read_endpoint()
    if settings.addr:
        urls = tuple(url.strip() for url in settings.addr.split(",") if url.strip())
        for url in urls:
            _check_url(url)
    else:
        urls = (endpoint.url if endpoint else DEFAULT_ADDRESS,)
    # Keys, authority and account of the folder's own server do not apply to another one.
    ours = endpoint is not None and endpoint.url in urls
    own = folder.creds(role) if ours else None
    creds = _given("TORCHLOOM_CREDS", settings.creds) or (own if own and own.exists() else None)
    if ours and creds is None:
        raise BadState(
            f"{folder.path} holds no credential for the role {role}",
            hint="a joined machine has the roles its token gave it: see `loom token --role` on the other one",
        )
    own_ca = folder.tls / "ca.pem"
    ca = _given("TORCHLOOM_TLS_CA", settings.tls_ca) or (own_ca if ours and own_ca.exists() else None)
    account = endpoint.account if ours and endpoint else ""
    return Address(urls, creds, inbox_prefix(role, rank), ca, account)


def _check_url(url: str) -> None:
    try:
        _ = urlsplit(url if "://" in url else f"nats://{url}").port
    except ValueError as error:
        raise BadSetting("TORCHLOOM_ADDR", url, str(error)) from None


def find_system(settings: Settings) -> Address | None:
    """The same for the weaver's connection to the system account, if there is a credential for it."""
    main = find(settings, Role.WEAVER)
    own = StateFolder(settings.state_folder).creds(SYSTEM)
    creds = _given("TORCHLOOM_SYSTEM_CREDS", settings.system_creds) or (own if main.account and own.exists() else None)
    if creds is None:
        return None
    return Address(main.urls, creds, f"_INBOX.{SYSTEM}", main.ca, main.account)


def _given(variable: str, text: str) -> Path | None:
    """The file that a setting names, if it names one."""
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.exists():
        raise BadState(f"the file {path} does not exist", hint=f"mend {variable}")
    return path


def _tls(address: Address) -> ssl.SSLContext | None:
    if address.ca is None and not any(url.startswith("tls://") for url in address.urls):
        return None
    try:
        return ssl.create_default_context(cafile=str(address.ca) if address.ca else None)
    except (OSError, ssl.SSLError) as error:
        raise BadState(f"cannot use the TLS authority {address.ca}: {error}") from error


async def connect(
    address: Address,
    *,
    name: str,
    timeout: float = 2.0,
    keep_trying: bool = False,
    on_error: ErrorHook | None = None,
    on_lost: Hook | None = None,
    on_back: Hook | None = None,
    on_closed: Hook | None = None,
) -> Client:
    """Open a connection. With `keep_trying` it always reconnects (services); otherwise a loss closes it."""
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)
        del errors[:-20]
        if on_error is not None:
            await on_error(error)

    keep_read_buffers()
    client = nats.NATS()
    options: dict[str, Any] = {
        # nats-py would shuffle with the global random module, whose state belongs to the training in a rank.
        "servers": SystemRandom().sample(address.urls, len(address.urls)),
        "dont_randomize": True,
        "name": name,
        "inbox_prefix": address.inbox,
        "tls": _tls(address),
        "user_credentials": str(address.creds) if address.creds else None,
        "connect_timeout": timeout,
        "allow_reconnect": keep_trying,
        "max_reconnect_attempts": -1 if keep_trying else 1,
        "reconnect_time_wait": 0.2,
        "ping_interval": 2,
        "max_outstanding_pings": 2,
        "error_cb": note,
        "disconnected_cb": on_lost,
        "reconnected_cb": on_back,
        "closed_cb": on_closed,
    }
    try:
        # With unlimited reconnects nats-py also tries the first connection without limit, so that has its own.
        await asyncio.wait_for(client.connect(**options), timeout + 1)
    except asyncio.CancelledError:  # leave no half-open connection behind
        await close_quietly(client)
        raise
    except Exception as error:
        await close_quietly(client)
        raise _explain(address, [error, *reversed(errors)]) from error
    return client


def keep_read_buffers() -> None:
    """Let glibc serve the buffers into which asyncio reads from its heap.

    asyncio reads into a new buffer of 256 KiB each time. Above a threshold glibc maps and unmaps a block of its own for
    each, which costs more than the read itself. Freeing one larger block raises the threshold above it.
    """
    bytes(1024**2)


async def close_quietly(client: Client) -> None:
    """Close a connection that may be broken, or may never have been open."""
    with contextlib.suppress(Exception):
        await asyncio.wait_for(client.close(), 1)


def is_denied(error: Exception) -> bool:
    """Whether the server refused a subject. Its protocol has no codes: these are its words."""
    return "permissions violation" in str(error).lower()


def _explain(address: Address, errors: list[Exception]) -> Unreachable | BadState:
    """The most informative of the errors: after a rejection nats-py may also report the reset that followed."""
    all_errors = " ".join(map(str, errors)).lower()
    error = next((e for e in errors if isinstance(e, ssl.SSLError)), errors[-1])
    text = str(error) or type(error).__name__
    if "authorization" in all_errors or "authentication" in all_errors:
        return BadState(
            f"the server at {address} does not accept the credential {address.creds or '(none)'}",
            hint="use the state folder of the `loom up` that runs there (--state, TORCHLOOM_STATE), or TORCHLOOM_CREDS",
        )
    if isinstance(error, ssl.SSLError):
        return BadState(
            f"TLS with {address} failed: {error}",
            hint="TORCHLOOM_TLS_CA must name the authority that signed the server's certificate",
        )
    if isinstance(error, (ValueError, FileNotFoundError)) and address.creds:
        return BadState(f"the credential {address.creds} is damaged: {text}")
    return Unreachable(f"no control plane answers at {address}", hint="start one with `loom up`")


def connection_name(rank: RankId, incarnation: str) -> str:
    """The name of a rank's connection: the server's advisories contain it, and so identify rank and incarnation."""
    return f"rank {rank} {incarnation}"


def parse_connection_name(text: str) -> tuple[RankId, str] | None:
    """The rank and its incarnation, or None for a connection that is not a rank's."""
    match = _PATTERN.fullmatch(text)
    if match is None or int(match[3]) > MAX_RANK:
        return None
    return RankId(match[1], match[2], int(match[3])), match[4]

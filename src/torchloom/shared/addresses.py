"""Addresses as people write them: HOST:PORT, with brackets around an IPv6 host."""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from torchloom.errors import BadInput, PortInUse

EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
"""Hosts that mean all addresses of a machine, for a program that listens."""


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port; None for anything else, such as an IPv6 address without brackets."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not port.isdecimal() or len(port) > 5 or (":" in bare and bare == host):
        return None
    return bare, int(port)


def split_url(url: str) -> tuple[str, int]:
    """Host and port of a URL that torchLoom has made, with or without a path. ValueError if it has none."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url!r} has no host and port")
    return parts.hostname, parts.port


def check_free(host: str, port: int, any_port: str) -> None:
    """Listen on an address for a moment. Raises with the reason if that is not possible; `any_port` as in PortInUse."""
    try:
        # A name may have an address of each family; the first of the family that torchLoom's servers use is taken.
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # with SO_REUSEADDR only this fails if another program listens there
    except (socket.gaierror, UnicodeError):
        raise BadInput(f"there is no host {host!r}", hint="name an address of this machine") from None
    except PermissionError as error:
        raise BadInput(f"not allowed to listen on port {port}", hint="ports below 1024 need root") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port, any_port) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadInput(f"{host} is not an address of this machine", hint="`ip address` lists them") from error
        raise BadInput(f"cannot listen on {join_address(host, port)}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Addresses as people write them: HOST:PORT, with brackets around an IPv6 host."""

from __future__ import annotations

import ipaddress

EVERY_ADDRESS = frozenset({"0.0.0.0", "::"})
"""Hosts that mean all addresses of a machine, for a program that listens."""


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port; None for anything else, such as an IPv6 address without brackets."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not port.isdecimal() or (":" in bare and bare == host):
        return None
    return bare, int(port)


def split_url(url: str) -> tuple[str, int]:
    """Host and port of a URL that torchLoom has made, with or without a path."""
    parts = split_address(url.partition("://")[2].partition("/")[0])
    if parts is None:
        raise ValueError(f"{url!r} has no host and port")
    return parts


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

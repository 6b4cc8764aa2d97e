"""torchft's protocol on a socket: two unary calls, whose bytes are read and written in `wire`.

There is no authentication in that protocol: whoever reaches the port can form quorums. So the port is opened on one
interface only, the one that was named.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio

from torchloom.errors import AlreadyUp, BadInput
from torchloom.lighthouse import wire
from torchloom.lighthouse.service import Evicted, Service, Stopping

MOST_BYTES = 1024 * 1024
"""Of one request: ids, addresses, and what the user's script adds."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # or a second one would bind the same port, and get half of the replicas
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # A replica that waits sends pings, and is not to be thrown out for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_EVERYWHERE = {"0.0.0.0", "::"}


@dataclass(frozen=True)
class Place:
    """Where a lighthouse listens."""

    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        return self.host in _EVERYWHERE

    @property
    def url(self) -> str:
        """What replicas are given as TORCHFT_LIGHTHOUSE."""
        host = socket.gethostname() if self.everywhere else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Which call of the protocol does what."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._methods = {
            "/torchft.LighthouseService/Quorum": grpc.unary_unary_rpc_method_handler(self._quorum),
            "/torchft.LighthouseService/Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(call.method)

    async def _quorum(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await self._service.asked(wire.read_quorum_request(request))
        except wire.Garbled as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a request for a quorum: {error}")
        except Evicted as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Stopping as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort raises")

    async def _heartbeat(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            self._service.heard(wire.read_heartbeat_request(request))
        except wire.Garbled as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a heartbeat: {error}")
        except Evicted as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return wire.HEARTBEAT_RESPONSE


@contextlib.asynccontextmanager
async def listening(service: Service, wanted: Place, last_port: int = 0) -> AsyncIterator[Place]:
    """Serve there. With port 0 it is the port of last time if that is free, so that replicas find it again."""
    port = wanted.port or (last_port if last_port and _free(wanted.host, last_port) else 0)
    _check(wanted.host, port)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((Calls(service),))
    try:
        bound = server.add_insecure_port(_target(wanted.host, port))
    except RuntimeError as error:  # taken a moment ago; grpc does not say by an error of its own
        raise AlreadyUp(f"cannot listen on {wanted.host}:{port}: {error}") from error
    await server.start()
    try:
        yield Place(wanted.host, bound)
    finally:
        service.close()
        with contextlib.suppress(asyncio.CancelledError):
            await server.stop(0.2)


def parse_bind(text: str) -> Place:
    """`127.0.0.1:29510`, `host:0`, `[fd00::1]:29510`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise BadInput(f"{text!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:29510 or [fd00::1]:0")
    return Place(host, int(port))


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(host: str, port: int) -> None:
    """grpc only says that it could not bind; a plain socket says why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise BadInput(f"there is no host {host!r}", hint="--bind takes an address of this machine") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)  # another that listens there is found only now
        except OSError as error:
            raise _explained(error, host, port) from error


def _free(host: str, port: int) -> bool:
    try:
        _check(host, port)
    except (AlreadyUp, BadInput):
        return False
    return True


def _explained(error: OSError, host: str, port: int) -> AlreadyUp | BadInput:
    if error.errno == errno.EADDRINUSE:
        return AlreadyUp(
            f"port {port} on {host} is in use by another program",
            hint=f"stop that program, or choose another port: `--bind {_target(host, 0)}` takes any free one",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return BadInput(f"{host} is not an address of this machine", hint="`ip address` lists them")
    return BadInput(f"cannot listen on {_target(host, port)}: {os.strerror(error.errno or 0)}")

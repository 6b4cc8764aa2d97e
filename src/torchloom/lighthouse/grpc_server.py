"""Serves torchft's lighthouse protocol over gRPC: two unary calls, whose bytes torchft_messages reads and writes.

The protocol has no authentication: anyone who reaches the port can form quorums. The port is therefore opened only on
the interface that was named.
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
from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.quorum_service import Evicted, QuorumService, Stopping
from torchloom.shared.addresses import EVERY_ADDRESS, join_address, split_address, try_to_listen

MOST_BYTES = 1024 * 1024
"""Most bytes of one request: ids, addresses, and what the user's script adds."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second lighthouse could bind the same port and get half of the replicas
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # A waiting replica sends pings and must not be disconnected for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    torchft_messages.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    Evicted: grpc.StatusCode.FAILED_PRECONDITION,
    Stopping: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True)
class BindAddress:
    """The address on which a lighthouse listens."""

    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        return self.host in EVERY_ADDRESS

    @property
    def url(self) -> str:
        """The value of TORCHFT_LIGHTHOUSE for replicas."""
        host = socket.gethostname() if self.everywhere else self.host
        return f"http://{join_address(host, self.port)}"


class RpcHandler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Maps the calls of the protocol to the service."""

    def __init__(self, service: QuorumService) -> None:
        self._service = service
        self._methods = {
            "/torchft.LighthouseService/Quorum": grpc.unary_unary_rpc_method_handler(self._quorum),
            "/torchft.LighthouseService/Heartbeat": grpc.unary_unary_rpc_method_handler(self._heartbeat),
        }

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._methods.get(call.method)

    async def _quorum(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with _abort_on_error(context):
            return await self._service.request_quorum(torchft_messages.read_quorum_request(request))
        raise AssertionError("abort raises")

    async def _heartbeat(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        async with _abort_on_error(context):
            self._service.record_heartbeat(torchft_messages.read_heartbeat_request(request))
        return torchft_messages.HEARTBEAT_RESPONSE


@contextlib.asynccontextmanager
async def _abort_on_error(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """End the call with the status of an error that the service raises."""
    try:
        yield
    except (torchft_messages.MalformedMessage, Evicted, Stopping) as error:
        await context.abort(_STATUS[type(error)], str(error))


@contextlib.asynccontextmanager
async def serve_grpc(service: QuorumService, bind: BindAddress, last_port: int = 0) -> AsyncIterator[BindAddress]:
    """Serve on this address. Port 0 means the last port if it is free, so that replicas find it again."""
    port = bind.port or (last_port if last_port and _free(bind.host, last_port) else 0)
    _check(bind.host, port)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((RpcHandler(service),))
    try:
        bound = server.add_insecure_port(join_address(bind.host, port))
    except RuntimeError as error:  # taken since the check; grpc has no exception of its own for it
        raise AlreadyUp(f"cannot listen on {bind.host}:{port}: {error}") from error
    await server.start()
    try:
        yield BindAddress(bind.host, bound)
    finally:
        service.close()
        with contextlib.suppress(asyncio.CancelledError):
            await server.stop(0.2)


def parse_bind(text: str) -> BindAddress:
    """`127.0.0.1:29510`, `host:0`, `[fd00::1]:29510`."""
    address = split_address(text)
    if address is None or address[1] > 65_535:
        raise BadInput(f"{text!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:29510 or [fd00::1]:0")
    return BindAddress(*address)


def _check(host: str, port: int) -> None:
    """Bind a plain socket first: unlike grpc it reports why it cannot."""
    try:
        try_to_listen(host, port)
    except (socket.gaierror, UnicodeError):
        raise BadInput(f"there is no host {host!r}", hint="--bind takes an address of this machine") from None
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
            hint=f"stop that program, or choose another port: `--bind {join_address(host, 0)}` takes any free one",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return BadInput(f"{host} is not an address of this machine", hint="`ip address` lists them")
    return BadInput(f"cannot listen on {join_address(host, port)}: {os.strerror(error.errno or 0)}")

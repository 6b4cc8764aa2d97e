"""Serves torchft's lighthouse protocol over gRPC: two unary calls, whose bytes torchft_messages reads and writes.

The protocol has no authentication: anyone who reaches the port can form quorums. The port is therefore opened only on
the interface that was named.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from torchloom.errors import AlreadyUp, BadInput
from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.quorum import Evicted
from torchloom.lighthouse.quorum_service import QuorumService, Stopping
from torchloom.shared.addresses import EVERY_ADDRESS, check_free, join_address, split_address

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


@contextlib.asynccontextmanager
async def serve_grpc(service: QuorumService, bind: BindAddress, last_port: int = 0) -> AsyncIterator[BindAddress]:
    """Serve on this address. Port 0 means the last port if it is free, so that replicas find it again."""

    async def quorum(request: bytes) -> bytes:
        return await service.request_quorum(torchft_messages.read_quorum_request(request))

    async def heartbeat(request: bytes) -> bytes:
        service.record_heartbeat(torchft_messages.read_heartbeat_request(request))
        return b""  # LighthouseHeartbeatResponse

    methods = {"Quorum": _method(quorum), "Heartbeat": _method(heartbeat)}
    port = _choose_port(bind, last_port)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("torchft.LighthouseService", methods)])
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


def _method(answer: Callable[[bytes], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    """A call of the protocol, which ends with the status of the error that the service raises."""

    async def call(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await answer(request)
        except tuple(_STATUS) as error:
            await context.abort(_STATUS[type(error)], str(error))
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(call)


def parse_bind(text: str) -> BindAddress:
    """`127.0.0.1:29510`, `host:0`, `[fd00::1]:29510`."""
    address = split_address(text)
    if address is None or address[1] > 65_535:
        raise BadInput(f"{text!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:29510 or [fd00::1]:0")
    return BindAddress(*address)


def _choose_port(bind: BindAddress, last_port: int) -> int:
    """Check a plain socket first: unlike grpc it reports why it cannot listen."""
    any_port = f"--bind {join_address(bind.host, 0)}"
    if not bind.port and last_port:
        with contextlib.suppress(AlreadyUp, BadInput):
            check_free(bind.host, last_port, any_port)
            return last_port
    check_free(bind.host, bind.port, any_port)
    return bind.port

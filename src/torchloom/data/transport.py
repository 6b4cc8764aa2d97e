"""Messages between a training process and its loader processes: one packet each, over a pair of unix sockets.

A packet is a header and a pickle. A pickle that is too large for a packet travels in a memfd, whose descriptor is
attached. The end of the stream means that the other process has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import weakref
from typing import NamedTuple

PACKET_BYTES = 64 * 1024
"""Largest pickle inside a packet. The socket buffer (208 KiB by default) holds two of them."""
MOST_DESCRIPTORS = 250
"""The kernel passes at most 253 in one message."""
HEADER = struct.Struct("<ccIQ")
INLINE, ATTACHED = b"i", b"a"
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)

IS_SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
"""macOS has neither packets over unix sockets nor memfd."""

_training_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked = False


class Packet(NamedTuple):
    kind: bytes
    """One byte, which the two sides agree on."""
    epoch: int
    number: int
    payload: bytes | memoryview | mmap.mmap
    descriptors: list[int]


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The training process's end and the other one. A process forked from training for any purpose has not the first:
    otherwise the end of training would go unnoticed."""
    global _hooked  # noqa: PLW0603
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_close_training_ends)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _training_ends.add(here)
    return here, there


def _close_training_ends() -> None:
    for end in list(_training_ends):
        end.close()


def shut_down(end: socket.socket) -> None:
    """Let the other side read the end of the stream, also if a copy of the socket is open somewhere."""
    with contextlib.suppress(OSError):  # the other side has gone
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def send(
    end: socket.socket,
    kind: bytes,
    payload: bytes | memoryview,
    *,
    epoch: int = 0,
    number: int = 0,
    descriptors: list[int] | None = None,
    wait: bool = True,
) -> bool:
    """Send one packet. False if it does not fit now (only without `wait`); OSError if the other side has gone."""
    flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
    try:
        if len(payload) <= PACKET_BYTES:
            parts = [HEADER.pack(kind, INLINE, epoch, number), payload]
            if descriptors:
                socket.send_fds(end, parts, descriptors, flags)
            else:
                end.sendmsg(parts, (), flags)
            return True
        memory = os.memfd_create("torchloom-message", os.MFD_CLOEXEC)
        try:
            _write_all(memory, payload)
            socket.send_fds(end, [HEADER.pack(kind, ATTACHED, epoch, number)], [memory, *(descriptors or ())], flags)
        finally:
            os.close(memory)
        return True
    except BlockingIOError:
        return False


def _write_all(descriptor: int, payload: bytes | memoryview) -> None:
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class Receiver:
    """Reads packets from one end, into a buffer of its own."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray(HEADER.size + PACKET_BYTES)
        self._view = memoryview(self._buffer)

    def receive(self, *, wait: bool = True) -> Packet | None:
        """The next packet; its payload is valid until the next call. None at the end of the stream.

        BlockingIOError if nothing is there and `wait` is false.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        while True:
            try:
                size, ancillary, _, _ = self._end.recvmsg_into([self._buffer], _DESCRIPTOR_BYTES, flags)
                break
            except ConnectionResetError:
                continue  # it died with unread messages; what it had sent is still there
        if size == 0:
            return None
        descriptors: list[int] = []
        for level, what, data in ancillary:
            if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
                descriptors += memoryview(data)[: len(data) - len(data) % 4].cast("i").tolist()
        kind, where, epoch, number = HEADER.unpack_from(self._buffer)
        if where == INLINE:
            return Packet(kind, epoch, number, self._view[HEADER.size : size], descriptors)
        memory = descriptors.pop(0)
        try:
            payload = mmap.mmap(memory, 0, prot=mmap.PROT_READ)
        finally:
            os.close(memory)
        return Packet(kind, epoch, number, payload, descriptors)

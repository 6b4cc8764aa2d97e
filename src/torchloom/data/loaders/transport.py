"""Messages between a training process and its loader processes: one packet each, over a pair of unix sockets.

A packet is a header and a pickle. A pickle that is too large for a packet travels in a memfd, whose descriptor is
attached. The end of the stream means that the other process has ended.

A process that has no descriptor left loses those that a packet carries. A notice therefore precedes such a packet: the
receiver looks at it first, and takes it from the socket when it has all its descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import struct
import sys
import time
import weakref
from multiprocessing import util
from typing import NamedTuple

PACKET_BYTES = 64 * 1024
"""Largest pickle inside a packet. The socket buffer (208 KiB by default) holds two of them."""
MOST_DESCRIPTORS = 250
"""The kernel passes at most 253 in one message."""
HEADER = struct.Struct("<ccIQ")
INLINE, ATTACHED, NOTICE = b"i", b"a", b"n"
IN_FLIGHT_SECONDS = 0.01
"""The kernel limits the descriptors that are sent and not yet received: after this time we try again."""
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)

IS_SUPPORTED = sys.platform == "linux" and hasattr(os, "memfd_create")
"""macOS has neither packets over unix sockets nor memfd."""

_training_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_hooked_at_fork = False
_hooked_at_exit = 0
"""The process in which that is so: one that multiprocessing forks forgets it."""


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
    global _hooked_at_fork, _hooked_at_exit  # noqa: PLW0603
    if not _hooked_at_fork:
        _hooked_at_fork = True
        os.register_at_fork(after_in_child=_close_training_ends)
    if _hooked_at_exit != os.getpid():
        _hooked_at_exit = os.getpid()
        util.Finalize(None, _shut_down_training_ends, exitpriority=5)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _training_ends.add(here)
    return here, there


def _close_training_ends() -> None:
    for end in list(_training_ends):
        end.close()


def _shut_down_training_ends() -> None:
    """The last resort, if an interrupt came while they were closed: multiprocessing waits for its daemons at exit."""
    for end in list(_training_ends):
        shut_down(end)


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
    """Send one packet. False if it does not fit now (only without `wait`).

    OSError if the other side has gone, or with an errno in SHORTAGES.
    """
    flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
    try:
        if len(payload) <= PACKET_BYTES:
            parts = [HEADER.pack(kind, INLINE, epoch, number), payload]
            if descriptors:
                _send_descriptors(end, parts, descriptors, flags)
            else:
                end.sendmsg(parts, (), flags)
            return True
        memory = os.memfd_create("torchloom-message", os.MFD_CLOEXEC)
        try:
            _write_all(memory, payload)
            header = HEADER.pack(kind, ATTACHED, epoch, number)
            _send_descriptors(end, [header], [memory, *(descriptors or ())], flags)
        finally:
            os.close(memory)
        return True
    except BlockingIOError:
        return False


def _send_descriptors(end: socket.socket, parts: list[bytes | memoryview], descriptors: list[int], flags: int) -> None:
    end.sendmsg([HEADER.pack(NOTICE, NOTICE, 0, 0)], (), flags)
    while True:
        try:
            socket.send_fds(end, parts, descriptors, flags)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            if flags & socket.MSG_DONTWAIT:
                raise BlockingIOError from error
            time.sleep(IN_FLIGHT_SECONDS)


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
        self._noticed = False
        """The next packet has descriptors."""

    def receive(self, *, wait: bool = True, keep: bool = False) -> Packet | None:
        """The next packet; its payload is valid until the next call. None at the end of the stream.

        BlockingIOError if nothing is there and `wait` is false. OSError with an errno in SHORTAGES if this process has
        no descriptor or address space for it: then it is still there, and the next call tries again. With `keep` that
        is also so until `accept` is called.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        while True:
            if self._noticed:
                packet, is_notice = self._look(flags)
                if is_notice or not keep:
                    self.accept()
                self._noticed |= is_notice
            else:
                size, _, _, _ = self._read(0, flags)
                packet = self._inline(size, [])
                is_notice = self._noticed = packet is not None and packet.kind == NOTICE
            if not is_notice:
                return packet

    def accept(self) -> None:
        """Take the packet that was received with `keep`."""
        if self._noticed:
            self._noticed = False
            with contextlib.suppress(ConnectionResetError):  # it has died; reported once
                self._end.recv(1, socket.MSG_DONTWAIT)
                return
            self._end.recv(1, socket.MSG_DONTWAIT)

    def _look(self, flags: int) -> tuple[Packet | None, bool]:
        """The next packet, which stays in the socket, and whether it is another notice."""
        size, ancillary, answer, _ = self._read(_DESCRIPTOR_BYTES, flags | socket.MSG_PEEK)
        descriptors: list[int] = []
        for level, what, data in ancillary:
            if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
                descriptors += memoryview(data)[: len(data) - len(data) % 4].cast("i").tolist()
        try:
            if answer & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            packet = self._inline(size, descriptors)
            if packet is not None and HEADER.unpack_from(self._buffer)[1] == ATTACHED:
                payload = mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ)
                os.close(descriptors.pop(0))
                packet = packet._replace(payload=payload)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return packet, packet is not None and packet.kind == NOTICE

    def _read(self, ancillary: int, flags: int) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        while True:
            try:
                return self._end.recvmsg_into([self._buffer], ancillary, flags)
            except ConnectionResetError:
                continue  # it died with unread messages; what it had sent is still there

    def _inline(self, size: int, descriptors: list[int]) -> Packet | None:
        if size == 0:
            return None
        kind, _, epoch, number = HEADER.unpack_from(self._buffer)
        return Packet(kind, epoch, number, self._view[HEADER.size : size], descriptors)

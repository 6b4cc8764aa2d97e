"""The loader processes of one ElasticLoader, as the training process sees them: start, send, receive, stop."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Any

from torch._utils import ExceptionWrapper

from torchloom.data.loaders import loader_stacks, transport
from torchloom.data.loaders.batch_encoding import decode
from torchloom.data.loaders.loader_process import BATCH, LOAD, SLOTS
from torchloom.data.loaders.pool import Arrived, Died, Event, ZygoteDied
from torchloom.data.loaders.shared_memory import SlotTable
from torchloom.data.loaders.zygote import Zygote
from torchloom.data.recipe import Recipe
from torchloom.data.stage_times import NO_TIMES, StageTimes, clock
from torchloom.errors import LoaderShortage

ZYGOTE_RESTARTS = 3
"""How often a zygote that died is replaced while no batch arrives."""
REPORT_SECONDS = 0.2
"""Time for the zygote to report how a loader ended whose socket has closed."""


@dataclass(eq=False, slots=True)
class _Connection:
    loader: int
    serial: int
    """The number of this process in the life of the pool. That of the loader is used again."""
    end: socket.socket
    receiver: transport.Receiver
    slots: SlotTable = field(default_factory=SlotTable)
    outbox: deque[tuple[int, int, bytes]] = field(default_factory=deque)
    """Packets that the socket did not accept yet."""


class _Resources:
    """What has to be closed. It is apart from the pool, so that it can be closed when the pool has gone."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.zygote: Zygote | None = None
        self.connections: dict[int, _Connection] = {}
        self.poller = select.epoll()

    def shut_down(self) -> None:
        """Let all loaders end."""
        for connection in self.connections.values():
            transport.shut_down(connection.end)
        self.connections.clear()


def _close(opened: list[_Resources]) -> None:
    for resources in opened:
        if os.getpid() != resources.process:
            continue  # a copy, in a process that was forked
        try:
            resources.shut_down()
        finally:  # also after an interrupt: otherwise the end of training would wait for these processes
            resources.shut_down()
            if resources.zygote is not None:
                resources.zygote.close()
                resources.zygote = None
            resources.poller.close()


class LoaderPool:
    """A Pool of processes and the zygote that they come from. Nothing is opened before the first loader starts."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self.lock = threading.RLock()
        self.epoch = 0
        self.is_broken = False
        """The zygote has died, and is not replaced any more."""
        self._is_released = False
        self._recipe = recipe
        self._context = context
        self._serials = itertools.count()
        self._restarts = 0
        self._shortage: OSError | None = None
        """Why a packet waits in an outbox although its socket would take it."""
        self._opened: list[_Resources] = []
        self.close = weakref.finalize(self, _close, self._opened)
        # At the end of a process of multiprocessing nothing else is called, and its daemons are waited for.
        util.Finalize(self, self.close, exitpriority=10)

    @property
    def is_open(self) -> bool:
        return bool(self._opened) and self._resources.zygote is not None and not self._is_released

    @property
    def is_closed(self) -> bool:
        return not self.close.alive

    @property
    def _resources(self) -> _Resources:
        return self._opened[0]

    @property
    def loaders(self) -> list[int]:
        return list(self._resources.connections) if self._opened else []

    def open(self) -> None:
        """Start the zygote. Only the thread that iterates calls this: with `fork` it copies the training process."""
        try:
            self._open()
        except OSError as error:
            if error.errno in transport.SHORTAGES:
                raise LoaderShortage(str(error)) from error
            raise

    def _open(self) -> None:
        if not self._opened:
            self._opened.append(_Resources())
        if self._is_released and self._resources.zygote is not None:  # and yet there is something to load again
            self._resources.zygote.close()
            self._resources.zygote, self._is_released = None, False
        if self._resources.zygote is None:
            self._resources.zygote = Zygote(self._recipe, self._context)
            self._resources.poller.register(self._resources.zygote.fileno(), select.EPOLLIN)

    def lose_zygote(self) -> ZygoteDied:
        """The zygote has died, and the kernel kills its loaders. `open` replaces it."""
        zygote, self._resources.zygote = self._resources.zygote, None
        assert zygote is not None
        with contextlib.suppress(OSError):
            self._resources.poller.unregister(zygote.fileno())
        self._restarts += 1
        self.is_broken = self._restarts > ZYGOTE_RESTARTS
        return ZygoteDied(zygote.close())

    def start(self, loader: int, count: int) -> None:
        """OSError if the zygote has died; LoaderShortage."""
        zygote = self._resources.zygote
        if zygote is None:
            raise BrokenPipeError
        serial = next(self._serials)
        try:
            end = zygote.start_loader(loader, count, serial)
        except OSError as error:
            if error.errno in transport.SHORTAGES:
                raise LoaderShortage(str(error)) from error
            raise
        self._resources.connections[loader] = _Connection(loader, serial, end, transport.Receiver(end))
        self._resources.poller.register(end.fileno(), select.EPOLLIN)

    def send(self, loader: int, number: int, content: tuple[Any, ...]) -> None:
        connection = self._resources.connections.get(loader)
        if connection is None:
            return
        returned = connection.slots.returned()
        payload = pickle.dumps((*content, returned), protocol=5)
        connection.outbox.append((self.epoch, number, payload))
        if len(connection.outbox) == 1:
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        outbox = connection.outbox
        try:
            while outbox:
                epoch, number, payload = outbox[0]
                if not transport.send(connection.end, LOAD, payload, epoch=epoch, number=number, wait=False):
                    break
                outbox.popleft()
        except OSError as error:
            if error.errno in transport.SHORTAGES:
                self._shortage = error  # `events` tries again
                return
            outbox.clear()  # it has died: the end of the stream says so
        events = select.EPOLLIN | (select.EPOLLOUT if outbox else 0)
        self._resources.poller.modify(connection.end.fileno(), events)

    def stop(self, loader: int) -> None:
        connection = self._resources.connections.pop(loader, None)
        if connection is not None:
            self._resources.poller.unregister(connection.end.fileno())
            transport.shut_down(connection.end)

    def release(self) -> None:
        """Let the zygote end while training uses the last batches: then the end of the epoch need not wait for it."""
        if self.is_open:
            assert self._resources.zygote is not None
            self._is_released = True
            self._resources.poller.unregister(self._resources.zygote.fileno())
            self._resources.zygote.release()

    def wait(self, seconds: float | None) -> bool:
        return self._shortage is not None or bool(self._resources.poller.poll(seconds))

    def events(self) -> Iterator[Event]:
        """What has happened, at most one batch of each loader; it does not wait.

        LoaderShortage if something could not be received or sent: it is tried again by the next call.
        """
        if not self._opened:
            return
        self._flush_after_shortage()
        by_descriptor = {connection.end.fileno(): connection for connection in self._resources.connections.values()}
        for descriptor, what in self._resources.poller.poll(0):
            connection = by_descriptor.get(descriptor)
            if connection is not None:
                if what & select.EPOLLOUT:
                    self._flush(connection)
                if what & ~select.EPOLLOUT:
                    yield from self._receive(connection)
            elif not self._listen(0.0):
                yield self.lose_zygote()

    def inspect(self, loader: int) -> tuple[int, str]:
        zygote = self._resources.zygote if self._opened else None
        pid = loader_stacks.find(zygote.pid, loader) if zygote is not None else 0
        return pid, loader_stacks.read(pid) if pid else ""

    def _flush_after_shortage(self) -> None:
        if self._shortage is not None:
            self._shortage = None
            for connection in self._resources.connections.values():
                if connection.outbox:
                    self._flush(connection)
            if self._shortage is not None:
                raise LoaderShortage(str(self._shortage)) from self._shortage

    def _listen(self, seconds: float) -> bool:
        """Learn which loaders have ended. A process that their dataset forked may have their sockets open, so that
        only this end can end the stream: after what is in it. False if the zygote has died."""
        zygote = self._resources.zygote
        if zygote is None or self._is_released:
            return False
        is_alive = zygote.listen(seconds)
        serials = {connection.serial: connection for connection in self._resources.connections.values()}
        for serial in list(zygote.exits):
            if serial not in serials:
                del zygote.exits[serial]  # it was asked to end
                continue
            with contextlib.suppress(OSError):
                serials[serial].end.shutdown(socket.SHUT_RDWR)
        return is_alive

    def _lose(self, connection: _Connection) -> Died:
        deadline = time.monotonic() + REPORT_SECONDS
        zygote = self._resources.zygote
        if zygote is not None:
            while connection.serial not in zygote.exits and (left := deadline - time.monotonic()) > 0:
                if not self._listen(left):
                    break
        self.stop(connection.loader)
        return Died(connection.loader, zygote.exits.pop(connection.serial, None) if zygote else None)

    def _receive(self, connection: _Connection) -> Iterator[Event]:
        while True:
            try:
                packet = connection.receiver.receive(wait=False, keep=True)
                if packet is not None and packet.kind == SLOTS:
                    announced, retired = pickle.loads(packet.payload)
                    connection.slots.add(announced, packet.descriptors)
                    connection.slots.retire(retired)
                connection.receiver.accept()
            except BlockingIOError:
                return
            except (OSError, RuntimeError) as error:  # torch: RuntimeError if memory cannot be mapped
                raise LoaderShortage(str(error)) from error
            if packet is None:
                yield self._lose(connection)
                return
            if packet.kind == BATCH:
                self._restarts = 0
                began = clock()
                result, times = _decoded(packet, connection.slots)
                received, size = clock() - began, len(packet.payload) + connection.slots.message_bytes
                if packet.epoch == self.epoch:
                    yield Arrived(connection.loader, packet.epoch, packet.number, result, times, received, size)
                return


def _decoded(packet: transport.Packet, slots: SlotTable) -> tuple[Any, StageTimes]:
    try:
        result, *times = decode(packet.payload, slots)
        return result, StageTimes(*times)
    except Exception:  # noqa: BLE001  # a class of the user's that cannot be unpickled: raised in its turn
        return ExceptionWrapper(where="while a batch was received"), NO_TIMES

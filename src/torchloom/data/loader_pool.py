"""The loader processes of one ElasticLoader, as the training process sees them: start, send, receive, stop."""

from __future__ import annotations

import os
import pickle
import select
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from socket import socket
from typing import Any

from torch._utils import ExceptionWrapper

from torchloom.data import transport
from torchloom.data.batch_encoding import decode
from torchloom.data.dispatcher import Batch
from torchloom.data.loader_process import BATCH, LOAD, SLOTS, Recipe
from torchloom.data.memory_slots import SlotTable
from torchloom.data.stage_times import NO_TIMES, StageTimes, clock
from torchloom.data.zygote import Zygote


@dataclass(frozen=True, slots=True)
class Arrived:
    loader: int
    epoch: int
    number: int
    result: Any
    times: StageTimes
    received: float
    """Seconds that receiving it took here."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Died:
    loader: int


@dataclass(frozen=True, slots=True)
class ZygoteDied:
    pass


Event = Arrived | Died | ZygoteDied


@dataclass(eq=False, slots=True)
class _Connection:
    loader: int
    end: socket
    receiver: transport.Receiver
    slots: SlotTable = field(default_factory=SlotTable)
    outbox: deque[tuple[int, int, bytes]] = field(default_factory=deque)
    """Packets that the socket did not accept yet."""


class _Resources:
    """What has to be closed. It is apart from the pool, so that it can be closed when the pool has gone."""

    def __init__(self, zygote: Zygote) -> None:
        self.process = os.getpid()
        self.zygote = zygote
        self.connections: dict[int, _Connection] = {}
        self.poller = select.epoll()
        self.poller.register(zygote.fileno(), select.EPOLLIN)


def _close(opened: list[_Resources]) -> None:
    for resources in opened:
        if os.getpid() != resources.process:
            continue  # a copy, in a process that was forked
        for connection in resources.connections.values():
            transport.shut_down(connection.end)
        resources.connections.clear()
        resources.zygote.close()
        resources.poller.close()


class LoaderPool:
    """Loader processes and the zygote that they come from. The caller holds `lock`, except in `wait`.

    Nothing is opened before the first loader starts.
    """

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self.lock = threading.RLock()
        self.epoch = 0
        """The iteration to which new batches belong; what arrives of an earlier one is dropped."""
        self.is_broken = False
        """The zygote has died."""
        self._is_released = False
        self._recipe = recipe
        self._context = context
        self._opened: list[_Resources] = []
        self.close = weakref.finalize(self, _close, self._opened)

    @property
    def has_zygote(self) -> bool:
        return bool(self._opened)

    @property
    def _resources(self) -> _Resources:
        return self._opened[0]

    @property
    def loaders(self) -> list[int]:
        return list(self._resources.connections) if self._opened else []

    def start_zygote(self) -> None:
        """Only the thread that iterates calls this: with `fork` it copies the training process."""
        if not self._opened:
            self._opened.append(_Resources(Zygote(self._recipe, self._context)))
            # A process of multiprocessing ends without `atexit`, and waits for its children after these.
            Finalize(self, self.close, exitpriority=0)

    def start(self, loader: int, count: int) -> None:
        """OSError if the zygote has died."""
        end = self._resources.zygote.start_loader(loader, count)
        self._resources.connections[loader] = _Connection(loader, end, transport.Receiver(end))
        self._resources.poller.register(end.fileno(), select.EPOLLIN)

    def send(self, loader: int, batch: Batch, key: int) -> None:
        connection = self._resources.connections.get(loader)
        if connection is None:
            return
        returned = connection.slots.returned()
        payload = pickle.dumps((batch.indices, batch.position, key, returned), protocol=5)
        connection.outbox.append((self.epoch, batch.number, payload))
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
        except OSError:
            outbox.clear()  # it has died: the end of the stream says so
        events = select.EPOLLIN | (select.EPOLLOUT if outbox else 0)
        self._resources.poller.modify(connection.end.fileno(), events)

    def stop(self, loader: int) -> None:
        """Let a loader end. It has nothing to do any more."""
        connection = self._resources.connections.pop(loader, None)
        if connection is not None:
            self._resources.poller.unregister(connection.end.fileno())
            transport.shut_down(connection.end)

    def release(self) -> None:
        """Let the zygote end while training uses the last batches: then the end of the epoch need not wait for it."""
        if self._opened and not self._is_released:
            self._is_released = True
            self._resources.poller.unregister(self._resources.zygote.fileno())
            self._resources.zygote.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait for an event, also of a loader that starts meanwhile. False after this time."""
        return bool(self._resources.poller.poll(seconds))

    def events(self) -> Iterator[Event]:
        """What has happened, at most one batch of each loader; it does not wait."""
        if not self._opened:
            return
        by_descriptor = {connection.end.fileno(): connection for connection in self._resources.connections.values()}
        for descriptor, what in self._resources.poller.poll(0):
            connection = by_descriptor.get(descriptor)
            if connection is not None:
                if what & select.EPOLLOUT:
                    self._flush(connection)
                if what & ~select.EPOLLOUT:
                    yield from self._receive(connection)
            else:
                self._resources.poller.unregister(descriptor)
                self._is_released = True
                yield ZygoteDied()

    def _receive(self, connection: _Connection) -> Iterator[Event]:
        while True:
            try:
                packet = connection.receiver.receive(wait=False)
            except BlockingIOError:
                return
            if packet is None:
                self.stop(connection.loader)
                yield Died(connection.loader)
                return
            if packet.kind == SLOTS:
                announced, retired = pickle.loads(packet.payload)
                connection.slots.add(announced, packet.descriptors)
                connection.slots.retire(retired)
            elif packet.kind == BATCH:
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

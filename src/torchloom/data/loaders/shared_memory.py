"""Shared memory for large tensors: a ring of memfd slots in each loader process, mapped once on each side.

A loader writes a batch into free slots and names them in its message. The training process makes tensors of them in
place. When the last tensor on a slot has gone, the slot is returned with the next message to the loader, and used
again: no page is faulted in, zeroed or unmapped while training runs. If the training loop keeps its batches, the loader
makes more slots; when they come back, the surplus is unmapped on both sides.

Slots are mapped by `from_file` on /proc/self/fd, which keeps no descriptor open: neither side runs out of them.

A process that is forked has copies of all tensors, on the same memory. Slots that are in use at a fork, on either side,
are therefore given up when they come back, and never written again.

The end of a storage can be in any thread and inside any other operation. What observes it is a weak reference whose
callback is `deque.append`: it takes no lock, and no exception of a signal handler can come between.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch

INLINE_BYTES = 32 * 1024
"""Tensors up to this size travel inside the message."""
SPARE_SLOTS = 8
"""Free slots that a loader keeps."""
MOST_UNANNOUNCED = 16
"""New slots that a loader keeps before it announces them: each has a descriptor until then."""
LARGE_SLOT = 1 << 24
"""From this size on, slots are not much larger than needed, for the sake of limits on address space."""


class Slot:
    """One piece of shared memory, mapped into this process for as long as this object or a storage on it exists."""

    def __init__(self, number: int, descriptor: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        mapping = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, capacity)
        self.address = mapping.data_ptr()
        self._window = cast("Any", (ctypes.c_char * capacity).from_address(self.address))
        self._window.mapping = mapping  # a storage refers to the window
        self.size = 0
        """Loader: bytes of the storage that is on it."""
        self.lent = 0
        """Loader: how often the training process has it."""
        self.held = 0
        """Loader: storages of this process on it."""
        self.is_copied = False
        """It was in use at a fork: a process that we do not know may read it at any time."""

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """A new storage on this memory, so that its end can be observed."""
        return torch.frombuffer(self._window, dtype=torch.uint8, count=nbytes).untyped_storage()


class _Use(weakref.ref[torch.UntypedStorage]):
    """A storage on a slot."""

    __slots__ = ("slot",)
    slot: Slot


class _Uses:
    """The storages of this process on the slots of one loader."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}
        self._ended: deque[Any] = deque()

    def open(self, slot: Slot, nbytes: int) -> torch.UntypedStorage:
        storage = slot.storage(nbytes)
        use = _Use(storage, self._ended.append)
        use.slot = slot
        self._uses[id(use)] = use
        return storage

    def ended(self) -> list[Slot]:
        """The slots of storages that have gone since the last call."""
        slots = []
        while self._ended:
            use = self._ended.popleft()
            if self._uses.pop(id(use), None) is not None:
                slots.append(use.slot)
        return slots

    def mark_copied(self) -> None:
        for use in list(self._uses.values()):
            if use() is not None:
                use.slot.is_copied = True


class SlotRing:
    """The slots of a loader process: the side that writes. Threads of a dataset may allocate at the same time."""

    def __init__(self, announce: Callable[[], None] | None = None) -> None:
        """`announce` sends `announced`, when there are many: each of them has a descriptor."""
        self._announce = announce
        self.lock = threading.RLock()
        """The thread that announces slots holds it until they are sent: their batch must come after them."""
        self._slots: dict[int, Slot] = {}
        self._by_address: dict[int, Slot] = {}
        self._free: dict[int, Slot] = {}
        self._uses = _Uses()
        self._created = 0
        self.announced: list[tuple[int, int, int]] = []
        """Slots that the training process does not know yet: number, capacity, descriptor. The sender closes it."""
        self.retired: list[int] = []
        """Slots that the training process can unmap."""

    def new_shared(self, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        """In place of `UntypedStorage._new_shared`, by which `default_collate` allocates the tensors of a batch."""
        if torch.device(device).type != "cpu":
            return torch.UntypedStorage(size, device=device)
        if size <= INLINE_BYTES:
            return torch.UntypedStorage(size)
        with self.lock:
            slot = self.allocate(size)
            slot.size = size
            slot.held += 1
            return self._uses.open(slot, size)

    def allocate(self, size: int) -> Slot:
        """A free slot of at least this size: the smallest, or a new one. The caller lends it, or nobody has it."""
        with self.lock:
            self._let_go()
            fitting = [slot for slot in self._free.values() if slot.capacity >= size]
            if fitting:
                slot = min(fitting, key=lambda slot: slot.capacity)
                del self._free[slot.number]
                return slot
            if len(self._free) >= SPARE_SLOTS // 2:  # all too small
                self._retire(min(self._free.values(), key=lambda slot: slot.capacity))
            try:
                slot = self._create(size)
            except (OSError, RuntimeError):  # no address space, or no descriptor
                if not self._free:
                    raise
                while self._free:
                    self._retire(next(iter(self._free.values())))
                slot = self._create(size)
            if self._announce is not None and len(self.announced) >= MOST_UNANNOUNCED:
                self._announce()
            return slot

    def _create(self, size: int) -> Slot:
        capacity = _capacity(size)
        descriptor = os.memfd_create("torchloom-slot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, capacity)
            slot = Slot(self._created, descriptor, capacity)
        except BaseException:
            os.close(descriptor)
            raise
        self._created += 1
        self._slots[slot.number] = self._by_address[slot.address] = slot
        self.announced.append((slot.number, capacity, descriptor))
        return slot

    def slot_of(self, storage: torch.UntypedStorage) -> Slot | None:
        return self._by_address.get(storage.data_ptr())

    def lend(self, slot: Slot) -> None:
        with self.lock:
            slot.lent += 1

    def take_back(self, numbers: list[int], copied: list[int] | None = None) -> None:
        """`copied`: those of them that processes forked from the training process may still read."""
        with self.lock:
            for number in copied or ():
                self._slots[number].is_copied = True
            for number in numbers:
                slot = self._slots[number]
                slot.lent -= 1
                self._free_if_unused(slot)
            self._let_go()

    def mark_copied(self) -> None:
        """This process is about to fork. It takes no lock: another thread may have it."""
        self._uses.mark_copied()

    def take_unannounced(self, most: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Some of `announced`, and `retired`: the caller sends them."""
        with self.lock:
            announced, self.announced = self.announced[:most], self.announced[most:]
            retired, self.retired = self.retired, []
            return announced, retired

    def _let_go(self) -> None:
        for slot in self._uses.ended():
            slot.held -= 1
            self._free_if_unused(slot)

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.lent or slot.held or slot.number not in self._slots:
            return
        if slot.is_copied or len(self._free) >= SPARE_SLOTS:
            self._retire(slot)
        else:
            self._free[slot.number] = slot

    def _retire(self, slot: Slot) -> None:
        for table, key in ((self._free, slot.number), (self._slots, slot.number), (self._by_address, slot.address)):
            table.pop(key, None)
        waiting = [entry for entry in self.announced if entry[0] == slot.number]
        for entry in waiting:  # made and given up before anyone learned of it
            os.close(entry[2])
            self.announced.remove(entry)
        if not waiting:
            self.retired.append(slot.number)


def _capacity(size: int) -> int:
    """A little more, for the next batch. Pages that are never touched cost nothing but addresses."""
    power = 1 << (size - 1).bit_length()
    if power <= LARGE_SLOT:
        return power
    step = power // 16
    return -(-size // step) * step


class SlotTable:
    """The slots of one loader in the training process: the side that reads."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._uses = _Uses()
        self._open: dict[int, torch.UntypedStorage] = {}
        self.message_bytes = 0
        """Of the slots that the last message used."""
        self._unused: list[int] = []
        _tables[id(self)] = self
        _mark_at_fork()

    def add(self, announced: list[tuple[int, int]], descriptors: list[int]) -> None:
        """Map new slots, and close their descriptors."""
        try:
            for (number, capacity), descriptor in zip(announced, descriptors, strict=True):
                self._slots[number] = Slot(number, descriptor, capacity)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def retire(self, numbers: list[int]) -> None:
        for number in numbers:
            self._slots.pop(number, None)

    def storage(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """The storage that one message has on a slot: the same for all its tensors there."""
        storage = self._open.get(number)
        if storage is None:
            storage = self._open[number] = self._uses.open(self._slots[number], nbytes)
        return storage

    def end_message(self) -> None:
        self.message_bytes = sum(storage.nbytes() for storage in self._open.values())
        self._open.clear()

    def abandon_message(self, lent: list[int]) -> None:
        """A message could not be read to its end: return also those of its slots that it did not reach."""
        self._unused += [number for number in lent if number not in self._open]
        self._open.clear()

    def returned(self) -> tuple[list[int], list[int]]:
        """Slots to return to the loader, each once, and those of them that were in use at a fork."""
        slots = self._uses.ended()
        numbers, self._unused = [*self._unused, *(slot.number for slot in slots)], []
        return numbers, [slot.number for slot in slots if slot.is_copied]

    def mark_copied(self) -> None:
        self._uses.mark_copied()


_tables: weakref.WeakValueDictionary[int, SlotTable] = weakref.WeakValueDictionary()
_marks_at_fork = False


def _mark_at_fork() -> None:
    global _marks_at_fork  # noqa: PLW0603
    if not _marks_at_fork:
        _marks_at_fork = True
        os.register_at_fork(before=_before_fork)


def _before_fork() -> None:
    for reference in _tables.valuerefs():  # a list that is made at once: other threads may add to it
        table = reference()
        if table is not None:
            table.mark_copied()

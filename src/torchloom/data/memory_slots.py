"""Shared memory for large tensors: a ring of memfd slots in each loader process, mapped once on each side.

A loader writes a batch into free slots and names them in its message. The training process makes tensors of them in
place. When the last tensor on a slot has gone, the slot is returned with the next message to the loader, and used
again: no page is faulted in, zeroed or unmapped while training runs. If the training loop keeps its batches, the loader
makes more slots; when they come back, the surplus is unmapped on both sides.

Slots are mapped by `from_file` on /proc/self/fd, which keeps no descriptor open: neither side runs out of them.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from typing import Any

import torch

INLINE_BYTES = 32 * 1024
"""Tensors up to this size travel inside the message."""
SPARE_SLOTS = 8
"""Free slots that a loader keeps."""


class Slot:
    """One piece of shared memory, mapped into this process."""

    def __init__(self, number: int, descriptor: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self._mapping = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, capacity)
        self.address = self._mapping.data_ptr()
        self._window = (ctypes.c_char * capacity).from_address(self.address)
        self.lent = 0
        """Loader: how often the training process has it."""
        self.held = 0
        """Loader: storages of this process on it."""

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """A new storage on this memory, so that its end can be observed. The caller keeps the slot until then."""
        return torch.frombuffer(self._window, dtype=torch.uint8, count=nbytes).untyped_storage()


class SlotRing:
    """The slots of a loader process: the side that writes."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._by_address: dict[int, Slot] = {}
        self._free: dict[int, Slot] = {}
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
        return self._hold(self.allocate(size), size)

    def _hold(self, slot: Slot, size: int) -> torch.UntypedStorage:
        storage = slot.storage(size)
        slot.held += 1
        weakref.finalize(storage, self._let_go, slot).atexit = False
        return storage

    def allocate(self, size: int) -> Slot:
        """A free slot of at least this size: the smallest, or a new one. The caller holds or lends it at once."""
        fitting = [slot for slot in tuple(self._free.values()) if slot.capacity >= size]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.capacity)
            del self._free[slot.number]
            return slot
        if len(self._free) >= SPARE_SLOTS // 2:  # all too small
            self._retire(min(tuple(self._free.values()), key=lambda slot: slot.capacity))
        capacity = 1 << (size - 1).bit_length()  # pages that are never touched cost nothing
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
        slot.lent += 1

    def take_back(self, numbers: list[int]) -> None:
        for number in numbers:
            slot = self._slots[number]
            slot.lent -= 1
            self._free_if_unused(slot)

    def _let_go(self, slot: Slot) -> None:
        slot.held -= 1
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: Slot) -> None:
        if slot.lent or slot.held or slot.number not in self._slots:
            return
        self._free[slot.number] = slot
        if len(self._free) > SPARE_SLOTS:
            self._retire(slot)

    def _retire(self, slot: Slot) -> None:
        for table, key in ((self._free, slot.number), (self._slots, slot.number), (self._by_address, slot.address)):
            table.pop(key, None)
        waiting = [entry for entry in self.announced if entry[0] == slot.number]
        for entry in waiting:  # made and given up before anyone learned of it
            os.close(entry[2])
            self.announced.remove(entry)
        if not waiting:
            self.retired.append(slot.number)


class SlotTable:
    """The slots of one loader in the training process: the side that reads."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._returned: deque[int] = deque()
        self._open: dict[int, torch.UntypedStorage] = {}
        self.message_bytes = 0
        """Of the slots that the last message used."""

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
            slot = self._slots[number]
            storage = self._open[number] = slot.storage(nbytes)
            # The finalizer keeps the slot mapped, and may run at any moment: it only appends.
            weakref.finalize(storage, _return_slot, self._returned, slot).atexit = False
        return storage

    def end_message(self) -> None:
        self.message_bytes = sum(storage.nbytes() for storage in self._open.values())
        self._open.clear()

    def returned(self) -> list[int]:
        """Slots to return to the loader, each once."""
        numbers = []
        while self._returned:
            numbers.append(self._returned.popleft())
        return numbers


def _return_slot(returned: deque[int], slot: Slot) -> None:
    returned.append(slot.number)

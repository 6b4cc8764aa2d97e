"""Batches as messages: a pickle in which tensors are either bytes or places in shared memory."""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch

from torchloom.data.loaders.shared_memory import INLINE_BYTES, Slot, SlotRing, SlotTable

_DTYPES: list[torch.dtype] = [
    getattr(torch, name) for name in sorted(dir(torch)) if isinstance(getattr(torch, name), torch.dtype)
]
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_COUNT = struct.Struct("<I")
"""The end of a message: the numbers of its slots, and how many they are. A pickle ends before them by itself."""


def encode(batch: Any, ring: SlotRing) -> memoryview:
    """The message for a batch. Its slots are lent to the training process, also those filled by collate."""
    file = io.BytesIO()
    pickler = _BatchPickler(file, ring)
    try:
        pickler.dump(batch)
    except BaseException:
        ring.take_back(list(pickler.lent))
        raise
    file.write(struct.pack(f"<{len(pickler.lent)}I", *pickler.lent) + _COUNT.pack(len(pickler.lent)))
    return file.getbuffer()


class _BatchPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, ring: SlotRing) -> None:
        super().__init__(file, protocol=5)
        self._ring = ring
        self.lent: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        return self._reduce_tensor(obj) if type(obj) is torch.Tensor else NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError("a loader cannot return a tensor with a history of gradients: call detach() on it")
        if not _is_plain(tensor):
            return NotImplemented  # sparse, quantized, on a device: torch pickles it by itself
        size = tensor.numel() * tensor.element_size()
        if size <= INLINE_BYTES:
            return self._inline(tensor, size)
        slot = self._ring.slot_of(tensor.untyped_storage())
        if slot is None:
            dense = _dense(tensor)
            slot = self._ring.allocate(size)
            self._lend(slot)
            ctypes.memmove(slot.address, dense.data_ptr(), size)
            place: tuple[int, Any, Any] = (0, dense.size(), dense.stride())
        else:
            self._lend(slot)
            size = slot.size  # another storage there, as of a numpy array, may be shorter
            place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        offset, shape, stride = place
        dtype = _DTYPE_NUMBER[tensor.dtype]
        return _from_slot, (slot.number, size, dtype, offset, tuple(shape), stride, tensor.requires_grad)

    def _lend(self, slot: Slot) -> None:
        if slot.number not in self.lent:
            self.lent.add(slot.number)
            self._ring.lend(slot)

    def _inline(self, tensor: torch.Tensor, size: int) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        dense = _dense(tensor)
        content = bytearray(ctypes.string_at(dense.data_ptr(), size)) if size else None
        stride = None if dense.is_contiguous() else dense.stride()
        return _from_bytes, (content, _DTYPE_NUMBER[tensor.dtype], tuple(dense.size()), stride, tensor.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without gaps, with the same strides if they have none."""
    return tensor if tensor.is_contiguous() else tensor.detach().clone()


class _Reading(threading.local):
    table: SlotTable | None = None


_reading = _Reading()


def decode(message: Any, table: SlotTable) -> Any:
    """The batch of a message. Its large tensors are in shared memory, which is returned when they are gone."""
    _reading.table = table
    try:
        batch = pickle.loads(message)
    except BaseException:
        (count,) = _COUNT.unpack_from(message, len(message) - _COUNT.size)
        lent = struct.unpack_from(f"<{count}I", message, len(message) - _COUNT.size * (count + 1))
        table.abandon_message(list(lent))
        raise
    finally:
        _reading.table = None
    table.end_message()
    return batch


def _from_bytes(
    content: bytearray | None, dtype: int, shape: tuple[int, ...], stride: tuple[int, ...] | None, grad: bool
) -> torch.Tensor:
    if content is None:
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    elif stride is None:
        tensor = torch.frombuffer(content, dtype=_DTYPES[dtype]).view(shape)
    else:
        tensor = torch.frombuffer(content, dtype=_DTYPES[dtype]).as_strided(shape, stride)
    return tensor.requires_grad_() if grad else tensor


def _from_slot(
    slot: int, nbytes: int, dtype: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> torch.Tensor:
    assert _reading.table is not None
    tensor = torch.empty(0, dtype=_DTYPES[dtype])
    tensor.set_(_reading.table.storage(slot, nbytes), offset, shape, stride)
    return tensor.requires_grad_() if grad else tensor

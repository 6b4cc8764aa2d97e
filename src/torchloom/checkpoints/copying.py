"""Copying state out of training: tensors into buffers that are used again, everything else as it is.

Whole storages are copied, so that tensors which share one still do in the checkpoint. Touching fresh memory costs
several times what the copy costs; hence the buffers stay, one for each storage, as long as the state keeps its shape.
"""

from __future__ import annotations

import mmap
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from torchloom.errors import BadInput

HUGE = 2 * 1024 * 1024
"""From this size on a buffer asks for huge pages: the first copy into it is several times faster."""
DEPTH = 64
PLAIN = (bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set, torch.Size)
_HINT = "a checkpoint holds tensors, numbers, texts, and dicts, lists, tuples and sets of them"


@dataclass
class Copied:
    """What was copied: a tree of the same shape whose tensors lie in our buffers."""

    tree: Any
    size: int = 0
    devices: set[torch.device] = field(default_factory=set)


class Copier:
    """One copy at a time: the buffers of the last one are taken for the next."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []
        self._storages: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def copy(self, tree: Any) -> Copied:
        """As it is now, whatever training does to it afterwards. BadInput, naming the place, if it cannot be saved."""
        copied = Copied(None)
        try:
            with torch.no_grad():
                copied.tree = self._tree(tree, "state", 0, copied)
                for device in copied.devices:
                    torch.get_device_module(device).synchronize(device)
        except BaseException:
            self.release()
            raise
        finally:
            self._storages.clear()
        self._free.clear()  # what this state no longer needs
        return copied

    def release(self) -> None:
        """The copy is no longer needed; its buffers are."""
        for buffer in self._used:
            self._free.setdefault((buffer.nbytes, buffer.is_pinned()), []).append(buffer)
        self._used.clear()

    def _tree(self, value: Any, place: str, depth: int, copied: Copied) -> Any:
        if depth > DEPTH:
            raise BadInput(f"{place[:200]}: nested deeper than {DEPTH}; does it contain itself?", hint=_HINT)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place, copied)
        kind = type(value)
        if value is None or kind in PLAIN or kind in torch.serialization.get_safe_globals():
            return value
        if kind in {dict, OrderedDict, Counter}:
            pairs = [
                (check_key(key, place), self._tree(item, f"{place}[{key!r}]", depth + 1, copied))
                for key, item in value.items()
            ]
            return kind(pairs) if kind is not Counter else Counter(dict(pairs))
        if kind in {list, tuple, set, torch.Size}:
            return kind([self._tree(item, f"{place}[{at}]", depth + 1, copied) for at, item in enumerate(value)])
        item = getattr(value, "item", None)
        if kind.__module__ == "numpy" and callable(item) and getattr(value, "ndim", None) == 0:
            return item()
        raise BadInput(f"{place}: a {kind.__module__}.{kind.__qualname__} cannot be saved", hint=_HINT)

    def _tensor(self, tensor: torch.Tensor, place: str, copied: Copied) -> torch.Tensor:
        kind = type(tensor)
        if kind not in {torch.Tensor, torch.nn.Parameter} or tensor.is_meta:
            what = "without data (meta)" if tensor.is_meta else f"of type {kind.__qualname__}"
            hint = "one that is spread over ranks is saved by all of them, with torch.distributed initialised"
            raise BadInput(f"{place}: a tensor {what} cannot be saved by a single process", hint=hint)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            copy = tensor.detach().to("cpu", copy=True)
            copied.size += copy.numel() * copy.element_size()
        else:
            storage = self._storage(tensor, copied)
            copy = torch.empty(0, dtype=tensor.dtype)
            copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_() if tensor.requires_grad else copy

    def _storage(self, tensor: torch.Tensor, copied: Copied) -> torch.UntypedStorage:
        source = tensor.untyped_storage()
        key = (source.data_ptr(), source.nbytes(), source.device)
        buffer = self._storages.get(key)
        if buffer is None:
            buffer = self._storages[key] = self._buffer(source.nbytes(), source.device.type == "cuda")
            there = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
            buffer.copy_(there, non_blocking=True)
            copied.size += source.nbytes()
            if source.device.type != "cpu":
                copied.devices.add(source.device)
        return buffer.untyped_storage()

    def _buffer(self, size: int, pinned: bool) -> torch.Tensor:
        free = self._free.get((size, pinned))
        buffer = free.pop() if free else allocate(size, pinned)
        self._used.append(buffer)
        return buffer


def allocate(size: int, pinned: bool = False) -> torch.Tensor:
    if pinned or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    pages = mmap.mmap(-1, size)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def check_key(key: Any, place: str) -> Any:
    parts = key if type(key) is tuple else (key,)
    if any(part is not None and type(part) not in PLAIN for part in parts):
        raise BadInput(f"{place}: {key!r} cannot be the key of what is saved", hint=_HINT)
    return key

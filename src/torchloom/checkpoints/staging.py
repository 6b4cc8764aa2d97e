"""Copies the state out of training: tensors into buffers that are reused, everything else unchanged.

Whole storages are copied, so that tensors which share one still do in the checkpoint. First use of new memory costs
several times as much as the copy; the buffers are therefore kept, one per storage, while the state keeps its shape.
"""

from __future__ import annotations

import codecs
import copy
import mmap
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from threading import Thread
from typing import Any, Final, NamedTuple

import torch

from torchloom.checkpoints.nontemporal_copy import find_copy
from torchloom.errors import BadInput

HUGE = 2 * 1024 * 1024
"""Buffers of at least this size request huge pages: the first copy into them may be faster."""
PIECE = 4 * 1024 * 1024
"""Bytes that one thread copies at a time."""
THREADS = min(4, torch.get_num_threads())
DEPTH = 64
PLAIN = frozenset({bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device})
MAPPINGS = frozenset({dict, OrderedDict, Counter})
SEQUENCES = frozenset({list, tuple, set, torch.Size})
LOADED_WITHOUT_GRADIENT = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_")) or name == "complex32"
)
"""torch.load (2.13) fails at a tensor of these types that requires a gradient and is no Parameter: saved as if not."""
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
BITS = 2032
"""torch.load with weights_only reads integers of up to this many bits."""
_HINT = "a checkpoint holds tensors, numbers, texts, and dicts, lists, tuples and sets of them"


_copy = find_copy()
Move = tuple[int, int, int]
"""(target address, source address, bytes)"""
Path = tuple[Any, Any] | None
"""A place in the state: (the path of the container, the key in it). Rendered as text only for errors."""


class Buffer(NamedTuple):
    """Memory that holds the copy of one storage."""

    memory: torch.Tensor
    address: int
    size: int
    pinned: bool


class _StagedTensor(NamedTuple):
    """A copied tensor, created from its buffer when it is written."""

    buffer: Buffer
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    parameter: bool
    gradient: bool

    def make(self) -> torch.Tensor:
        out = torch.empty(0, dtype=self.dtype)
        out.set_(self.buffer.memory.untyped_storage(), self.offset, self.size, self.stride)
        return _as_original(out, self.parameter, self.gradient)


def _as_original(copied: torch.Tensor, parameter: bool, gradient: bool) -> torch.Tensor:
    if parameter:
        return torch.nn.Parameter(copied, gradient)
    return copied.requires_grad_() if gradient and copied.dtype not in LOADED_WITHOUT_GRADIENT else copied


@dataclass
class StagedState:
    """A copy of the state."""

    parts: Any = None
    size: int = 0
    devices: set[torch.device] = field(default_factory=set)

    @cached_property
    def tree(self) -> Any:
        """The same structure as the original, with tensors in the buffers. Created by the thread that writes it."""
        return _materialize(self.parts)


def _materialize(part: Any) -> Any:
    kind = type(part)
    if kind is _StagedTensor:
        return part.make()
    if kind in MAPPINGS:
        pairs = {key: _materialize(item) for key, item in part.items()}
        return pairs if kind is dict else kind(pairs)
    if kind in SEQUENCES:
        return kind([_materialize(item) for item in part])
    return part


class StagingBuffers:
    """Holds one copy at a time: its buffers are reused for the next one."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Buffer]] = {}
        self._used: list[Buffer] = []
        self._storages: dict[tuple[int, int, torch.device, torch.dtype], Buffer] = {}
        self._moves: list[Move] = []

    def copy(self, tree: Any) -> StagedState:
        """Copy the state as it is now. Raises BadInput, naming the place, for a value that cannot be saved."""
        copied = StagedState()
        try:
            with torch.no_grad():
                copied.parts = self._tree(tree, None, 0, copied)
                move(self._moves)
                for device in copied.devices:
                    torch.get_device_module(device).synchronize(device)
        except BaseException:
            self.release()
            raise
        finally:
            self._storages.clear()
            self._moves.clear()
        self._free.clear()  # buffers that this state does not need
        return copied

    def release(self) -> None:
        """The copy is no longer needed: its buffers may be reused."""
        for buffer in self._used:
            self._free.setdefault((buffer.size, buffer.pinned), []).append(buffer)
        self._used.clear()

    def _tree(self, value: Any, path: Path, depth: int, copied: StagedState) -> Any:
        kind = type(value)
        if kind in TENSORS or isinstance(value, torch.Tensor):
            return self._tensor(value, path, copied)
        if value is None or kind in PLAIN:
            return check_plain(value, path)
        if depth > DEPTH:
            raise BadInput(f"{where(path)[:200]}: nested deeper than {DEPTH}; does it contain itself?", hint=_HINT)
        if kind in MAPPINGS:
            pairs = {
                check_key(key, path): self._tree(item, (path, key), depth + 1, copied) for key, item in value.items()
            }
            return pairs if kind is dict else kind(pairs)
        if kind in SEQUENCES:
            return kind([self._tree(item, (path, at), depth + 1, copied) for at, item in enumerate(value)])
        if kind in torch.serialization.get_safe_globals():
            return copy.deepcopy(value)
        item = getattr(value, "item", None)
        if kind.__module__ == "numpy" and callable(item) and getattr(value, "ndim", None) == 0:
            number = item()
            if type(number) in PLAIN:
                return check_plain(number, path)
        raise BadInput(f"{where(path)}: a {kind.__module__}.{kind.__qualname__} cannot be saved", hint=_HINT)

    def _tensor(self, tensor: torch.Tensor, path: Path, copied: StagedState) -> torch.Tensor | _StagedTensor:
        kind, dtype = type(tensor), tensor.dtype
        if kind not in TENSORS or tensor.is_meta:
            what = "without data (meta)" if tensor.is_meta else f"of type {kind.__qualname__}"
            hint = "one that is spread over ranks is saved by all of them, with torch.distributed initialised"
            raise BadInput(f"{where(path)}: a tensor {what} cannot be saved by a single process", hint=hint)
        parameter, gradient = kind is torch.nn.Parameter, tensor.requires_grad
        lazy = tensor.is_neg() or (dtype.is_complex and tensor.is_conj())
        if lazy or tensor.layout is not torch.strided or dtype in QUANTIZED:
            out = tensor.detach().to("cpu", copy=True)
            copied.size += out.numel() * out.element_size()
            return _as_original(out, parameter, gradient)
        buffer = self._storage(tensor.untyped_storage(), dtype, copied)
        return _StagedTensor(
            buffer, dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), parameter, gradient
        )

    def _storage(self, source: torch.UntypedStorage, dtype: torch.dtype, copied: StagedState) -> Buffer:
        address, size, device = source.data_ptr(), source.nbytes(), source.device
        key = (address, size, device, dtype)  # torch.save rejects one storage with two types
        buffer = self._storages.get(key)
        if buffer is not None:
            return buffer
        here = device.type == "cpu"
        pinned = device.type == "cuda"
        free = self._free.get((size, pinned))
        buffer = free.pop() if free else allocate(size, pinned)
        self._used.append(buffer)
        self._storages[key] = buffer
        copied.size += size
        if here:
            self._moves.append((buffer.address, address, size))
        else:
            there = torch.empty(0, dtype=torch.uint8, device=device).set_(source)
            buffer.memory.copy_(there, non_blocking=True)
            copied.devices.add(device)
        return buffer


def move(moves: list[Move]) -> None:
    """Copy these blocks, in pieces, on as many threads as torch would use.

    Not with copy_: torch starts and stops its threads for each tensor, and waits long for them on a busy machine.
    """
    pieces: list[Move] = []
    for to, source, size in moves:
        if size <= PIECE:
            pieces.append((to, source, size))
        else:
            pieces += [(to + at, source + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    todo = iter(pieces)

    def work() -> None:
        for to, source, size in todo:  # threads share the iterator; its next() is atomic, so each piece is copied once
            _copy(to, source, size)

    helpers = [Thread(target=work, daemon=True) for _ in range(min(THREADS, len(pieces)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def allocate(size: int, pinned: bool = False) -> Buffer:
    if pinned or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    else:
        pages = mmap.mmap(-1, size)
        pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
    return Buffer(memory, memory.data_ptr(), size, pinned)


def check_key(key: Any, path: Path) -> Any:
    if type(key) is str:
        return key
    parts = key if type(key) is tuple else (key,)
    if any(part is not None and type(part) not in PLAIN for part in parts):
        raise BadInput(f"{where(path)}: {key!r} cannot be the key of what is saved", hint=_HINT)
    return tuple(check_plain(part, path) for part in key) if type(key) is tuple else check_plain(key, path)


def check_plain(value: Any, path: Path) -> Any:
    """The value unchanged, if torch.load with weights_only accepts it."""
    if type(value) is int and value.bit_length() > BITS:
        raise BadInput(f"{where(path)}: a number of {value.bit_length()} bits is too large to be saved", hint=_HINT)
    if type(value) is bytearray:
        return bytearray(value)
    return EMPTY if value == b"" and type(value) is bytes else value


def where(path: Path) -> str:
    """state['model'][0]"""
    keys = []
    while path is not None:
        path, key = path
        keys.append(f"[{key!r}]")
    keys.reverse()
    if len(keys) > 1 and keys[0] in {"['state']", "['own']"}:  # keys that torchLoom adds around the user's state
        del keys[0]
    return "state" + "".join(keys)


class _Empty:
    """Empty bytes, pickled like others: the pickler would call bytes() for them, which torch.load does not allow."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


EMPTY: Final = _Empty()

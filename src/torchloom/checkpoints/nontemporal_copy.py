"""Copies memory with non-temporal stores: the target is written without being read into the cache first.

An ordinary store makes the processor fetch the target only to overwrite it: a third of the memory traffic of a copy,
and traffic limits a copy of hundreds of megabytes. The C library avoids it only for single blocks larger than the
cache, which tensors rarely are. This module contains a loop of the instructions that it would use. Every 64-bit x86
processor has them; elsewhere, and where executable memory is not available, the C library copies.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable

STRIDE = 64
"""Bytes copied per iteration: a cache line."""
ALIGNED = 16
"""Alignment of the target address."""
WORTH_IT = 64 * 1024
"""Bytes from which the loop is faster."""
Copy = Callable[[int, int, int], None]
"""(target address, source address, bytes)"""

_LOOP = bytes.fromhex(
    "f30f1efa"  # endbr64             a call by address may land here
    "0f188e00100000"  # prefetcht0 [rsi+4096]   what is read soon is sent for; beyond the end nothing happens
    "0f1006"  #   movups xmm0, [rsi]  64 bytes are read
    "0f104e10"  # movups xmm1, [rsi+16]
    "0f105620"  # movups xmm2, [rsi+32]
    "0f105e30"  # movups xmm3, [rsi+48]
    "0f2b07"  #   movntps [rdi], xmm0 and written past the cache
    "0f2b4f10"  # movntps [rdi+16], xmm1
    "0f2b5720"  # movntps [rdi+32], xmm2
    "0f2b5f30"  # movntps [rdi+48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "4883ea40"  # sub rdx, 64
    "75cd"  #     jnz                 to the prefetch, while some is left
    "0faef8"  #   sfence              all of it is written before we say so
    "c3"  #       ret
)


def find_copy() -> Copy:
    """The fastest copy on this machine for memory that is not read soon."""
    stream = _compiled()

    def copy(to: int, source: int, size: int) -> None:
        whole = size - size % STRIDE if stream and size >= WORTH_IT and to % ALIGNED == 0 else 0
        if stream and whole:
            stream(to, source, whole)
        if whole < size:
            ctypes.memmove(to + whole, source + whole, size - whole)

    return copy


def _compiled() -> Copy | None:
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return None
    try:
        pages = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        pages.write(_LOOP)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            return None
    except (OSError, AttributeError):
        return None
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)
    function.pages = pages  # type: ignore[attr-defined]  # unmapped with the function, not before
    return function

"""A copy past the cache copies what it should, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys

import pytest

from torchloom.checkpoints import nontemporal_copy

GUARD = 256


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 65535, 65536, 65537, 70001, 200_000, 1_000_003])
@pytest.mark.parametrize("shift", [0, 1, 8, 16, 48])
def test_every_byte_arrives_and_none_beside_it(size: int, shift: int) -> None:
    given = os.urandom(size + 64)
    source = ctypes.create_string_buffer(given, size + 64)
    target = mmap.mmap(-1, size + 2 * GUARD)
    target.write(b"\xaa" * (size + 2 * GUARD))
    at = GUARD + shift
    begin = ctypes.addressof(ctypes.c_char.from_buffer(target))
    nontemporal_copy.find_copy()(begin + at, ctypes.addressof(source) + 3, size)
    assert target[at : at + size] == given[3 : 3 + size]
    assert set(target[:at]) | set(target[at + size :]) == {0xAA}


def test_this_kind_of_machine_has_the_fast_one() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("made for 64-bit x86 under Linux; elsewhere the C library copies")
    assert nontemporal_copy._compiled() is not None


def test_where_no_code_can_be_run_the_c_library_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    source, target = ctypes.create_string_buffer(os.urandom(100_000), 100_000), ctypes.create_string_buffer(100_000)
    nontemporal_copy.find_copy()(ctypes.addressof(target), ctypes.addressof(source), 100_000)
    assert target.raw == source.raw

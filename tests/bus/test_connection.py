"""The name of a rank's connection says who it is, and nothing else passes for one. Read buffers are kept."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.bus.connection import connection_name, find, parse_connection_name
from torchloom.errors import BadSetting
from torchloom.protocol.ids import MAX_RANK, RankId
from torchloom.protocol.subjects import Role
from torchloom.settings import Settings

LIFE = "0" * 23 + "a"
_names = st.from_regex(r"[A-Za-z0-9_:-]{1,128}", fullmatch=True)


@given(_names, _names, st.integers(0, MAX_RANK), st.from_regex(r"[0-9a-f]{24}", fullmatch=True))
def test_what_is_named_is_read_again(job: str, replica: str, rank: int, life: str) -> None:
    who = RankId(job, replica, rank)
    assert parse_connection_name(connection_name(who, life)) == (who, life)


@pytest.mark.parametrize(
    "text",
    [
        "", "weaver", f"rank a/b/0 {LIFE}\n", f"rank a/b/0 {LIFE.upper()}", f"rank a/b/-1 {LIFE}",
        f"rank a/b/01 {LIFE}",        f"rank a/b/9999999 {LIFE}", f"rank a.c/b/0 {LIFE}", f"rank a/b/c/0 {LIFE}",
        f" rank a/b/0 {LIFE}",
        "rank a/b/0 12",        f"rank a/b/٣ {LIFE}",
    ],
)  # fmt: skip
def test_any_other_text_is_nobody(text: str) -> None:
    assert parse_connection_name(text) is None


@pytest.mark.parametrize("url", ["nats://127.0.0.1:abc", "localhost:99999", "nats://[::1:9"])
def test_an_address_that_is_no_url_is_named_with_its_variable(tmp_path: Path, url: str) -> None:
    settings = Settings(addr=f"nats://127.0.0.1:4222,{url}", state=str(tmp_path))
    with pytest.raises(BadSetting, match="TORCHLOOM_ADDR") as error:
        find(settings, Role.VIEWER)
    assert url in error.value.message


MAPPED = """
import ctypes, sys

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
if "kept" in sys.argv:
    from torchloom.bus.connection import keep_read_buffers
    keep_read_buffers()
before = mallinfo().hblks
buffer = bytes(256 * 1024)
print(mallinfo().hblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the threshold is glibc's")
@pytest.mark.parametrize(("words", "mapped"), [((), 1), (("kept",), 0)])
def test_a_read_buffer_is_not_mapped_once_buffers_are_kept(words: tuple[str, ...], mapped: int) -> None:
    printed = subprocess.run([sys.executable, "-c", MAPPED, *words], capture_output=True, text=True, check=True).stdout
    assert int(printed) == mapped

"""Why a rank could not start reaches the supervisor, whatever the reason contains."""

from __future__ import annotations

import os

import msgspec
import pytest

from torchloom.agent.supervisor.fork import TEXT, StartFailed, encode_complaint, read_complaint
from torchloom.protocol.phrase import Prose, phrase


def read(data: bytes) -> Prose | None:
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    try:
        return read_complaint(reading)
    finally:
        os.close(reading)


@pytest.mark.parametrize("why", [phrase("cannot_enter", folder="/nowhere", error="No such file"), "no memory"])
def test_a_reason_comes_as_it_was(why: Prose) -> None:
    error = OSError(why) if isinstance(why, str) else StartFailed(why)
    assert read(encode_complaint(error)) == why


def test_a_path_that_is_no_text_is_still_named() -> None:
    folder = os.fsdecode(b"/data/\xff")
    why = read(encode_complaint(StartFailed(phrase("cannot_enter", folder=folder, error="No such file"))))
    assert isinstance(why, str)
    assert "/data/" in why


def test_a_long_reason_fits_into_a_message() -> None:
    why = read(encode_complaint(OSError("x" * 100_000)))
    assert isinstance(why, str)
    assert len(why) == TEXT


def test_a_reason_that_was_cut_off_does_no_harm() -> None:
    whole = msgspec.json.encode(phrase("cannot_enter", folder="/nowhere", error="No such file"))
    assert read(whole[:20]) == whole[:20].decode()

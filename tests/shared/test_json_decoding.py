"""Whatever the bytes are, a decoder returns what it should or raises the one error that callers expect."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.damaged_json import GARBAGE
from torchloom.agent.supervisor.protocol import FromAgent, Look
from torchloom.bus.state_folder import Endpoint
from torchloom.shared.json_decoding import decoder

KINDS = [Any, dict, dict[str, str], list[str], str, int, Endpoint, FromAgent]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: f"{data[:12]}x{len(data)}")
def test_garbage_is_refused_with_one_error(data: bytes, kind: Any) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        value = decoder(kind)(data)  # a few are what this type allows
        assert decoder(kind)(msgspec.json.encode(value)) == value


@given(st.binary(), st.sampled_from(KINDS))
def test_strings_with_any_bytes_are_refused_with_one_error(data: bytes, kind: Any) -> None:
    for document in (b'"%s"', b'{"is":"%s"}', b'{"url":"%s"}', b'["%s"]'):
        with contextlib.suppress(msgspec.DecodeError):
            decoder(kind)(document % data)


def test_what_is_valid_is_decoded() -> None:
    assert decoder(FromAgent)(b'{"is":"Look"}') == Look()
    assert decoder(dict[str, str])(b'{"url":"x"}') == {"url": "x"}

"""The bytes of torchft's protocol: what its real client sent is understood, and what is none of it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lighthouse.histories import read_response
from torchloom.lighthouse import torchft_messages
from torchloom.lighthouse.quorum import Member, Quorum

HEARTBEAT = bytes.fromhex("0a10747261696e5f6464705f303a62396139")
"""LighthouseClient.heartbeat("train_ddp_0:b9a9"), torchft 0.2.0."""
ASKED = bytes.fromhex(
    "0a3f0a10747261696e5f6464705f303a62396139120a687474703a2f2f683a311a03683a322007280230013a147b226b223a205b312c20225c"
    "7530306663225d7d"
)
"""LighthouseClient.quorum("train_ddp_0:b9a9", address="http://h:1", store_address="h:2", step=7, world_size=2,
shrink_only=True, data={"k": [1, "ü"]})"""
ASKED_BY_MANAGER = bytes.fromhex(
    "0a290a03723a311216687474703a2f2f6c6f63616c686f73743a33383530331a03733a3320ac0228014002"
)
"""ManagerServer "r:1" at step 300, after two failures to commit."""


def test_a_heartbeat_of_the_real_client() -> None:
    assert torchft_messages.read_heartbeat_request(HEARTBEAT) == "train_ddp_0:b9a9"


def test_requests_of_the_real_clients() -> None:
    assert torchft_messages.read_quorum_request(ASKED) == Member(
        "train_ddp_0:b9a9", ASKED[2:], shrink_only=True, store="h:2"
    )
    by_manager = Member("r:1", ASKED_BY_MANAGER[2:], commit_failures=2, store="s:3")
    assert torchft_messages.read_quorum_request(ASKED_BY_MANAGER) == by_manager


def test_members_are_passed_on_as_they_came() -> None:
    newer = (
        ASKED[2:]
        + torchft_messages.bytes_field(1000, b"of a version to come")
        + torchft_messages.as_varint(77 << 3 | 5)
        + b"\1\2\3\4"
    )
    member = torchft_messages.read_quorum_request(torchft_messages.bytes_field(1, newer))
    assert member.data == newer
    answer = torchft_messages.quorum_response(
        Quorum(2**40, (member, Member("b", torchft_messages.bytes_field(1, b"b"))), ""), 1.5
    )
    assert newer in answer
    assert read_response(answer) == (2**40, ("train_ddp_0:b9a9", "b"))


def test_an_answer_byte_by_byte() -> None:
    answer = torchft_messages.quorum_response(Quorum(300, (Member("a", b"\x0a\x01a"),), ""), 2.25)
    assert answer.hex() == "0a11" + "08ac02" + "12030a0161" + "1a07" + "0802" + "1080e59a77"


def test_a_requester_in_two_parts_is_one() -> None:
    parts = torchft_messages.bytes_field(1, torchft_messages.bytes_field(1, b"a")) + torchft_messages.bytes_field(
        1, b"\x30\x01"
    )
    assert torchft_messages.read_quorum_request(parts) == Member("a", b"\x0a\x01a\x30\x01", shrink_only=True)


def test_a_negative_number_of_failures_is_no_failure() -> None:
    member = torchft_messages.bytes_field(1, b"a") + b"\x40" + b"\xff" * 9 + b"\x01"
    assert torchft_messages.read_quorum_request(torchft_messages.bytes_field(1, member)).commit_failures == -1


GARBAGE = {
    "nothing": (b"", "no requester"),
    "cut off": (ASKED[:-1], "cut off"),
    "a number is cut off": (b"\xff", "cut off"),
    "a number has no end": (b"\x80" * 10 + b"\x01", "too many bytes"),
    "field 0": (b"\x00\x00", "number 0"),
    "a group": (b"\x0b\x0c", "kind 3"),
    "an empty id": (torchft_messages.bytes_field(1, torchft_messages.bytes_field(1, b"")), "replica_id"),
    "no id": (torchft_messages.bytes_field(1, b"\x30\x01"), "replica_id"),
    "a long id": (torchft_messages.bytes_field(1, torchft_messages.bytes_field(1, b"x" * 1025)), "replica_id"),
    "an id of other bytes": (torchft_messages.bytes_field(1, torchft_messages.bytes_field(1, b"\xff")), "UTF-8"),
    "a number for an id": (torchft_messages.bytes_field(1, b"\x08\x01"), "text"),
    "text for a number": (
        torchft_messages.bytes_field(
            1, torchft_messages.bytes_field(1, b"a") + torchft_messages.bytes_field(6, b"yes")
        ),
        "number",
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_with_a_reason(name: str) -> None:
    data, reason = GARBAGE[name]
    with pytest.raises(torchft_messages.MalformedMessage, match=reason):
        torchft_messages.read_quorum_request(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(data: bytes) -> None:
    for read in (torchft_messages.read_quorum_request, torchft_messages.read_heartbeat_request):
        try:
            read(data)
        except torchft_messages.MalformedMessage:
            continue


@given(st.integers(0, 2**64 - 1), st.text(min_size=1, max_size=100), st.booleans())
def test_what_is_written_is_read(failures: int, id: str, shrink: bool) -> None:
    data = (
        torchft_messages.bytes_field(1, id.encode())
        + b"\x30"
        + torchft_messages.as_varint(shrink)
        + b"\x40"
        + torchft_messages.as_varint(failures)
    )
    member = torchft_messages.read_quorum_request(torchft_messages.bytes_field(1, data))
    assert (member.id, member.shrink_only, member.commit_failures % 2**64) == (id, shrink, failures)

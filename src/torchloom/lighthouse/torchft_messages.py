"""Reads and writes the protobuf messages of torchft's lighthouse protocol.

    LighthouseQuorumRequest      1 requester: QuorumMember
    LighthouseQuorumResponse     1 quorum: Quorum
    LighthouseHeartbeatRequest   1 replica_id: string
    LighthouseHeartbeatResponse  (empty)
    Quorum                       1 quorum_id: int64    2 participants: QuorumMember, repeated    3 created: Timestamp
    QuorumMember                 1 replica_id: string    3 store_address: string    6 shrink_only: bool
                                 8 commit_failures: int64    and others
    Timestamp                    1 seconds: int64    2 nanos: int32

A member is passed on to the others byte for byte, so that fields of newer versions reach replicas that know them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torchloom.lighthouse.quorum import Member, Quorum

VARINT: Final = 0
BYTES: Final = 2
_FIXED = {1: 8, 5: 4}
"""The kinds of fields of fixed width, with their bytes."""
_MOST_ID = 1024
"""Most characters of a replica's id."""


class MalformedMessage(ValueError):
    """These bytes are not a valid message."""


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_quorum_request(data: bytes) -> Member:
    """The replica that asks. As in protobuf, a message field that occurs twice is the concatenation of both."""
    requester = [value for number, value in _fields(data) if number == 1 and isinstance(value, bytes)]
    if not requester:
        raise MalformedMessage("there is no requester")
    member = b"".join(requester)
    fields = dict(_fields(member))  # of a field that occurs twice the last value counts, as in protobuf
    failures = _number(fields.get(8, 0))
    return Member(
        id=_replica_id(fields),
        data=member,
        shrink_only=bool(_number(fields.get(6, 0))),
        commit_failures=failures - (1 << 64) if failures >> 63 else failures,
        store=_text(fields.get(3, b"")),
    )


def read_heartbeat_request(data: bytes) -> str:
    return _replica_id(dict(_fields(data)))


def _replica_id(fields: Mapping[int, int | bytes]) -> str:
    id = _text(fields.get(1, b""))
    if not id or len(id) > _MOST_ID:
        raise MalformedMessage(f"a replica_id has 1 to {_MOST_ID} characters")
    return id


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field; fields of fixed width, which are not used here, as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise MalformedMessage("a field has the number 0")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise MalformedMessage(f"a field of the unknown kind {kind}")
        if at + size > len(data):
            raise MalformedMessage("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise MalformedMessage("a number is cut off" if shift < 70 else "a number has too many bytes")


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise MalformedMessage("bytes where a number belongs")
    return value


def _text(value: int | bytes) -> str:
    if isinstance(value, int):
        raise MalformedMessage("a number where text belongs")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise MalformedMessage("text that is not UTF-8") from None


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def quorum_response(quorum: Quorum, now: float) -> bytes:
    """`now` in seconds since 1970."""
    seconds = int(now)
    created = _varint_field(1, seconds) + _varint_field(2, int((now - seconds) * 1e9))
    members = b"".join(bytes_field(2, member.data) for member in quorum.members)
    return bytes_field(1, _varint_field(1, quorum.number) + members + bytes_field(3, created))


def _varint_field(number: int, value: int) -> bytes:
    return as_varint(number << 3 | VARINT) + as_varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    return as_varint(number << 3 | BYTES) + as_varint(len(value)) + value


def as_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)

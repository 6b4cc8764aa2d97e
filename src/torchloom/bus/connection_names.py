"""The name of a rank's connection: the server's advisories contain it, and so identify rank and incarnation."""

from __future__ import annotations

import re

from torchloom.protocol.ids import MAX_RANK, RankId

_NAME = "[A-Za-z0-9_:-]{1,128}"
_PATTERN = re.compile(rf"rank ({_NAME})/({_NAME})/(0|[1-9][0-9]{{0,6}}) ([0-9a-f]{{24}})")


def connection_name(rank: RankId, incarnation: str) -> str:
    return f"rank {rank} {incarnation}"


def parse_connection_name(text: str) -> tuple[RankId, str] | None:
    """The rank and its incarnation, or None for a connection that is not a rank's."""
    match = _PATTERN.fullmatch(text)
    if match is None or int(match[3]) > MAX_RANK:
        return None
    return RankId(match[1], match[2], int(match[3])), match[4]

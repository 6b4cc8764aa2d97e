"""The name a rank's connection bears: the server's advisories carry it, so it says which life of which rank ended."""

from __future__ import annotations

import re

from torchloom.messages import MAX_RANK, RankId

_NAME = "[A-Za-z0-9_:-]{1,128}"
_PATTERN = re.compile(rf"rank ({_NAME})/({_NAME})/(0|[1-9][0-9]{{0,6}}) ([0-9a-f]{{24}})")


def connection_name(rank: RankId, incarnation: str) -> str:
    return f"rank {rank} {incarnation}"


def parse_connection_name(text: str) -> tuple[RankId, str] | None:
    """The rank and its incarnation, or None for a connection that is not a rank's."""
    found = _PATTERN.fullmatch(text)
    if found is None or int(found[3]) > MAX_RANK:
        return None
    return RankId(found[1], found[2], int(found[3])), found[4]

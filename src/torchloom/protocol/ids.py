"""Names and ids of jobs, replicas, ranks and incarnations, and the characters that they may contain."""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

from msgspec import Meta

from torchloom.errors import BadName

NAME = re.compile(r"[A-Za-z0-9_:-]{1,128}")


MAX_RANK: Final = 1_000_000


Name = Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]


Text = Annotated[str, Meta(max_length=2000)]
"""Free text for people, bounded."""


_INCARNATION = r"^[0-9a-f]{24}$"
Incarnation = Annotated[str, Meta(pattern=_INCARNATION)]
"""Which life of a rank: 12 hex digits of milliseconds, 12 of chance. The greater string is the newer life."""


RankNumber = Annotated[int, Meta(ge=0, le=MAX_RANK)]


Seconds = Annotated[float, Meta(ge=0)]


def is_incarnation(text: str) -> bool:
    return re.match(_INCARNATION, text) is not None


def check_name(what: str, name: object) -> str:
    """The name itself if it can be a subject token, otherwise BadName."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadName(what, name)
    return name


class ReplicaId(NamedTuple):
    job: str
    replica: str

    def __str__(self) -> str:
        return f"{self.job}/{self.replica}"


class RankId(NamedTuple):
    job: str
    replica: str
    rank: int

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(self.job, self.replica)

    def __str__(self) -> str:
        return f"{self.job}/{self.replica}/{self.rank}"


RequestId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
"""Made by who asks; the same at every repetition, so that a thing asked twice is done once."""

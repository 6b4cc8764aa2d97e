"""Text for people as data: a code and its arguments. `views/wording` makes the sentence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchloom.protocol.ids import RankId, ReplicaId, Text
from torchloom.protocol.message import Part


class Phrase(Part, frozen=True):
    """Something to tell people, as data: which sentence, and what is filled in. `views/wording` has the sentences.

    Programs compare phrases or their codes, and read no argument.
    """

    code: str
    args: dict[
        str, Phrase | str | int | float | bool | tuple[Phrase | str | int | float | tuple[int, int], ...] | None
    ] = {}

    def __str__(self) -> str:
        return f"{self.code} {self.args}" if self.args else self.code

    def __bool__(self) -> bool:
        return bool(self.code)


Prose = Phrase | str
"""A phrase of ours, or text from outside (an exception, a server, a person), which is shown as it is."""

Statement = Phrase | Text
"""Prose that another process sends: its text is bounded."""


def phrase(code: str, **args: object) -> Phrase:
    """Ids of ranks and replicas become text, collections become tuples."""
    return Phrase(code=code, args={name: _argument(value) for name, value in args.items()})


def _argument(value: object) -> Any:
    if isinstance(value, RankId | ReplicaId):
        return str(value)
    if isinstance(value, Collection) and not isinstance(value, str):
        return tuple(_argument(item) for item in value)
    return value

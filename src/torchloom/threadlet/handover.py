"""What a rank hands over to a peer that heals from it, so that both have the same values from then on.

It travels with the parameters, on the way that torchft gives them, not through the weaver: values and parameters are of
the same step.
"""

from __future__ import annotations

import msgspec

from torchloom.messages import Committed, Part, Value


class Ramping(Part, frozen=True):
    """A change that is taking effect bit by bit."""

    change: Committed
    before: dict[str, Value]


class Handover(Part, frozen=True):
    source: str
    """Who hands over."""
    knobs: dict[str, Value]
    newest: int
    """The number of the newest change of values."""
    taken: dict[str, int]
    """Every change taken, with its step."""
    given: dict[str, Committed]
    """The change that gave each knob its value."""
    ramps: tuple[Ramping, ...]

    def has(self, change: Committed) -> bool:
        return self.taken.get(change.id) == change.step


def packed(handover: Handover) -> bytes:
    return msgspec.json.encode(handover)


def unpacked(data: bytes) -> Handover:
    """Raises msgspec.MsgspecError for what another version wrote, if it cannot be understood."""
    return msgspec.json.decode(data, type=Handover)

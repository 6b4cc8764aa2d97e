"""What a rank hands over to a peer that heals from it under torchft, so that both have the same knob values.

It travels with the parameters that torchft transfers, not through the weaver, so that values and parameters are of the
same step.
"""

from __future__ import annotations

import msgspec

from torchloom.protocol.knob_values import Value
from torchloom.protocol.message import Part
from torchloom.protocol.rank import ChangeSpec


class Ramp(Part, frozen=True):
    """A change that takes effect over several steps."""

    change: ChangeSpec
    before: dict[str, Value]


class Handover(Part, frozen=True):
    source: str
    """The replica that hands over."""
    knobs: dict[str, Value]
    newest: int
    """The number of the newest change of values."""
    taken: dict[str, int]
    """Every change taken, with its step."""
    given: dict[str, ChangeSpec]
    """The change that gave each knob its value."""
    ramps: tuple[Ramp, ...]

    def has(self, change: ChangeSpec) -> bool:
        return self.taken.get(change.id) == change.step


def encode_handover(handover: Handover) -> bytes:
    return msgspec.json.encode(handover)


def decode_handover(data: bytes) -> Handover:
    """Raises msgspec.MsgspecError for what another version wrote, if it cannot be decoded."""
    return msgspec.json.decode(data, type=Handover)

"""The base classes of everything on the wire and in the log: frozen, tagged structs, encoded as JSON."""

from __future__ import annotations

from typing import Any, Self

import msgspec
from msgspec.structs import replace


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what stands inside messages, and of what the weaver keeps of them."""

    @classmethod
    def from_fields(cls, source: msgspec.Struct, **others: object) -> Self:
        """A struct with the values of the fields that `source` has, too, and with `others`."""
        return cls(**cls._shared(source) | others)

    def with_fields(self, source: msgspec.Struct, **others: object) -> Self:
        """This struct with the values of the fields that `source` has, too, and with `others`."""
        return replace(self, **self._shared(source) | others)

    @classmethod
    def _shared(cls, source: msgspec.Struct) -> dict[str, Any]:
        return {name: getattr(source, name) for name in cls.__struct_fields__ if hasattr(source, name)}


class Message(Part, frozen=True, tag=True, tag_field="is"):
    """Base of everything on the wire; the class name is its tag."""

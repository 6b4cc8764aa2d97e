"""The base classes of everything on the wire and in the log: frozen, tagged structs, encoded as JSON."""

from __future__ import annotations

from typing import Self

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what stands inside messages, and of what the weaver keeps of them."""

    @classmethod
    def from_fields(cls, source: msgspec.Struct, **others: object) -> Self:
        """A struct with the values of the fields that `source` has, too, and with `others`."""
        shared = {name: getattr(source, name) for name in cls.__struct_fields__ if hasattr(source, name)}
        return cls(**{**shared, **others})


class Message(Part, frozen=True, tag=True, tag_field="is"):
    """Base of everything on the wire; the class name is its tag."""

"""The base classes of everything on the wire and in the log: frozen, tagged structs, encoded as JSON."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="is"):
    """Base of everything on the wire; the class name is its tag."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what stands inside messages."""

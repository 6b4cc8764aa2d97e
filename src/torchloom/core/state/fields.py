"""Building one struct from another that has fields of the same names."""

from __future__ import annotations

from typing import TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)


def copy_fields(target: type[S], source: msgspec.Struct, **others: object) -> S:
    """A struct with the values of the fields that `source` has, too, and with `others`."""
    shared = {name: getattr(source, name) for name in target.__struct_fields__ if hasattr(source, name)}
    return target(**{**shared, **others})

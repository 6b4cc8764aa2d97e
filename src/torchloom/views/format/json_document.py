"""What `-o json` prints: a view as one JSON document in which every key is always present.

On the wire defaults are left out and ids are short arrays; a script wants neither, so both are spelled out here.
"""

from __future__ import annotations

from typing import Any

import msgspec


def document(value: object) -> bytes:
    return msgspec.json.encode(plain(value))


def plain(value: object) -> Any:
    """Structs and named tuples as objects with all their keys; a message keeps its tag under `is`."""
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        head = {} if tag is None else {"is": tag}
        return head | {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    return value

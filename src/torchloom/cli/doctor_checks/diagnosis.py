"""What a check of `loom doctor` finds."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    check: str
    level: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""

"""Knobs on the wire: their names, values and specifications, and the actions of a change."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.message import Part

KnobName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_:-]{0,63}$")]


Value = bool | int | float | Annotated[str, Meta(max_length=1000)] | tuple[float, ...]
"""What a knob can hold."""


Values = Annotated[dict[KnobName, Value], Meta(max_length=64)]


class KnobSpec(Part, frozen=True):
    """A value of a running job that may be changed."""

    name: KnobName
    kind: Literal["float", "int", "bool", "enum", "text", "floats"]
    value: Value
    """When it was offered."""
    low: float | None = None
    high: float | None = None
    choices: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    unit: Annotated[str, Meta(max_length=32)] = ""
    help: Annotated[str, Meta(max_length=500)] = ""
    per: Literal["job", "rank"] = "job"


Action = Literal["set", "pause", "stop", "checkpoint"]
"""What a change does to all its ranks at one step."""

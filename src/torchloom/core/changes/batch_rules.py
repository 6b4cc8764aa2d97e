"""What a change of the batch size changes with it: the accumulation, so that a step has the same number of samples, or
the learning rates, which follow that number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchloom.core.decision import Refused
from torchloom.protocol.phrase import phrase

if TYPE_CHECKING:
    from torchloom.protocol.operator import SetKnobs
    from torchloom.protocol.rank import KnobSpec, Value

LOOKED_AT = 10_000
"""Sizes on each side of a requested one among which others that fit are looked for."""


def with_rules(ask: SetKnobs, specs: Mapping[str, KnobSpec], current: Mapping[str, Value]) -> dict[str, Value]:
    """All values of the change, also those that a rule of the request adds. `current` has the values before it."""
    values = dict(ask.values)
    if not ask.keep_global_batch and ask.lr_rule == "none":
        return values
    sizes = _of_role(specs, "batch_size")
    size = next((name for name in sizes if name in values), None)
    if size is None:
        raise Refused(phrase("rule_without_batch_size"), phrase("name_batch_size", job=ask.job))
    before, after = int(current[size]), int(values[size])  # type: ignore[arg-type]
    if ask.keep_global_batch:
        return values | _accumulation(ask, specs, current, before, after)
    ratio = after / before if ask.lr_rule == "linear" else (after / before) ** 0.5
    rates = _of_role(specs, "lr")
    if not rates:
        raise Refused(phrase("no_lr_knob", job=ask.job), phrase("watch_optimizer"))
    scaled = [name for name in rates if name not in values]
    if not scaled:
        raise _given_twice(rates, "--lr-rule")
    return values | {name: float(current[name]) * ratio for name in scaled}  # type: ignore[arg-type]


def _accumulation(
    ask: SetKnobs, specs: Mapping[str, KnobSpec], current: Mapping[str, Value], before: int, after: int
) -> dict[str, Value]:
    names = _of_role(specs, "accumulation")
    if not names:
        raise Refused(phrase("no_accumulation_knob", job=ask.job), phrase("offer_accumulation"))
    if names[0] in ask.values:
        raise _given_twice(names[:1], "--keep-global-batch")
    samples = before * int(current[names[0]])  # type: ignore[arg-type]
    if samples % after:
        sizes = range(max(1, after - LOOKED_AT), min(samples, after + LOOKED_AT) + 1)
        fitting = sorted((size for size in sizes if samples % size == 0), key=lambda size: abs(size - after))
        near = [str(size) for size in sorted(fitting[:3])]
        hint = phrase("sizes_that_fit", sizes=near) if near else phrase("see_knobs", job=ask.job, name="accumulation")
        raise Refused(phrase("accumulation_not_whole", samples=samples, size=after), hint)
    return {names[0]: samples // after}


def _given_twice(names: list[str], option: str) -> Refused:
    return Refused(
        phrase("given_and_ruled", names=names, option=option), phrase("leave_one_out", names=names, option=option)
    )


def _of_role(specs: Mapping[str, KnobSpec], role: str) -> list[str]:
    return [name for name, spec in specs.items() if spec.role == role]

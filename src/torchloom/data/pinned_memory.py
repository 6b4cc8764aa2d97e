"""Whether batches are copied into pinned memory, from which an accelerator copies them faster."""

from __future__ import annotations

import warnings

import torch


def pin_device(wanted: bool, named: str) -> str | None:
    """The device for whose sake batches are pinned, with the warnings of torch's DataLoader."""
    if not wanted:
        return None
    if named:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{named}'.",
            stacklevel=3,
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=3,
        )
        return None
    if accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=3,
        )
        return None
    return str(accelerator.type)

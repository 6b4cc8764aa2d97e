"""How many collectives a rank has begun: who has begun fewer than its peers is the one they wait for."""

from __future__ import annotations

import sys


def begun() -> int | None:
    """Those of the main process group, by torch's own count; None without a group, or where torch does not count.

    Reading it waits for nothing, also while another thread is inside a collective.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if torch is None or not torch.is_initialized():
            return None
        return int(torch._get_default_group()._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001  being imported or destroyed just now, or another torch
        return None

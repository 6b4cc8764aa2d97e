"""Our lighthouse against torchft's own: random histories in real time, as in tests/lighthouse/histories.py.

A problem names the seed of its history: `draw(SEED)` makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

HISTORIES_PER_SECOND = 3.0
LEAST = 0.5
"""The share of them that must be judged, on however busy a machine."""


def run(seed: int, seconds: float) -> list[str]:
    os.environ.setdefault("RUST_LOG", "error")  # both say a lot
    logging.getLogger("torchloom.lighthouse").setLevel(logging.ERROR)
    try:
        from torchft import _torchft  # noqa: F401

        from tests.lighthouse.histories import many
    except ImportError as error:
        print(f"  passed over: {error}", flush=True)
        return []
    wanted = round(seconds * HISTORIES_PER_SECOND)
    total = asyncio.run(many(seed, wanted, end=time.monotonic() + seconds))
    print(
        f"  {total.histories} histories, {total.compared} of {total.asked} answers compared, {total.again} plays"
        f" repeated, {total.passed_over} histories passed over",
        flush=True,
    )
    few = total.histories < LEAST * wanted
    busy = [f"the machine was too busy: only {total.histories} histories could be judged"] if few else []
    return [*total.wrong, *busy]

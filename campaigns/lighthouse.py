"""Our lighthouse against torchft's own: a thousand random histories in real time, as in tests/lighthouse/histories.py.

A problem names the seed of its history: `draw(SEED)` makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

HISTORIES = 1000


def run(seed: int, seconds: float) -> list[str]:
    """A thousand histories, whatever `seconds` says, but not for more than seven minutes (or `seconds`)."""
    os.environ.setdefault("RUST_LOG", "error")  # both say a lot
    logging.getLogger("torchloom.lighthouse").setLevel(logging.ERROR)
    try:
        from torchft import _torchft  # noqa: F401

        from tests.lighthouse.histories import many
    except ImportError as error:
        print(f"  passed over: {error}", flush=True)
        return []
    end = time.monotonic() + max(seconds, 7 * 60)
    total = asyncio.run(many(seed, HISTORIES, end=end))
    print(
        f"  {total.histories} histories, {total.compared} of {total.asked} answers compared, {total.again} plays"
        f" repeated, {total.passed_over} histories passed over",
        flush=True,
    )
    few = total.histories < HISTORIES // 2
    return (
        [*total.wrong, f"too busy a machine: only {total.histories} histories could be judged"] if few else total.wrong
    )

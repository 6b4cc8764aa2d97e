"""Full garbage collections that do not hold up the event loop.

A weaver keeps about thirty objects for each rank, for as long as the rank lives. With ten thousand ranks a full
collection goes through 300,000 of them, for a tenth of a second and more, every few seconds, and finds nothing. So
what has survived a collection that took long is set aside (`gc.freeze`): later ones go through newer objects only. That
holds for all but those of the youngest objects, so that what a joining fleet brings is set aside bit by bit. What is
set aside is still freed when nothing refers to it; only cycles among it are not. For their sake the collector goes
through everything again once in a while.

Of what is allocated for a message next to nothing outlives it. So the collector also runs more rarely than usual: then
it finds most of that freed already.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

LONG_SECONDS = 0.002
"""A collection that took longer than this is the last that goes through these objects, …"""
THAW_SECONDS = 3600.0
"""… until this long after the last that went through everything."""
THRESHOLDS = (10_000, 2, 2)
"""Of the three generations (`gc.set_threshold`): full collections stay as frequent as usual."""


@contextlib.contextmanager
def short_collections(long: float = LONG_SECONDS, thaw: float = THAW_SECONDS) -> Iterator[None]:
    """While this lasts, long collections go through each object once only, but for one in `thaw` seconds."""
    began = thawed = time.monotonic()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal began, thawed
        generation, now = info["generation"], time.monotonic()
        if phase == "start":
            began = now
            if generation == 2 and now - thawed > thaw:
                thawed = now
                gc.unfreeze()
        elif generation > 0 and now - began > long:
            gc.freeze()

    usual = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    gc.callbacks.append(on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(on_collection)
        gc.set_threshold(*usual)
        gc.unfreeze()

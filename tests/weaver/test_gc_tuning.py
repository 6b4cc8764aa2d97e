"""Collections that do not hold up the event loop."""

from __future__ import annotations

import gc
import math
import weakref

from torchloom.weaver.gc_tuning import short_collections


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_survives_a_long_collection_is_not_gone_through_again() -> None:
    with short_collections(long=0.0):
        gc.collect()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 10_000
    assert gc.get_freeze_count() == 0


def test_after_a_short_collection_everything_stays_as_it_was() -> None:
    usual = gc.get_threshold()
    with short_collections(long=math.inf):
        gc.collect()
        assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == usual


def test_a_cycle_that_was_set_aside_is_found_when_everything_is_gone_through_again() -> None:
    for thaw, is_freed in ((math.inf, False), (0.0, True)):
        cycle = Cycle()
        seen = weakref.ref(cycle)
        with short_collections(long=0.0, thaw=thaw):
            gc.collect()
            del cycle
            gc.collect()
            assert (seen() is None) == is_freed
    gc.collect()

"""How long a batch takes, by stage: read, decode, collate, transfer.

Loading a sample counts as reading, except what a dataset marks:

    with torchloom.data.decoding():
        image = decode(content)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchloom.protocol.data_loading import LoaderTrouble, Loading

clock = time.perf_counter
MOST_CHARACTERS = 500
"""Of indices in a report."""
RECENT_SECONDS = 30.0
"""A death is reported for this time: beats may be lost."""
HANG_SECONDS = 30.0
HANG_FACTOR = 20.0
"""A loader hangs after this time, and this many times what batches take."""


class _Decoding(threading.local):
    seconds = 0.0
    """Of the batch that this thread is loading."""


_decoding = _Decoding()


class StageTimes(NamedTuple):
    """Seconds of one batch, in the loader that loads it."""

    read: float
    decode: float
    collate: float
    transfer: float = 0.0
    """Of the batch before it: this one is not yet sent when this is."""


NO_TIMES = StageTimes(0.0, 0.0, 0.0)


@contextmanager
def decoding() -> Iterator[None]:
    """Count what is done inside as decoding, not as reading."""
    began = clock()
    try:
        yield
    finally:
        _decoding.seconds += clock() - began


def times_of(began: float, fetched: float, collated: float) -> StageTimes:
    """Of the batch that was just loaded."""
    decoded, _decoding.seconds = min(_decoding.seconds, fetched - began), 0.0
    return StageTimes(fetched - began - decoded, decoded, collated - fetched)


@dataclass(slots=True)
class Totals:
    """Everything that a loader has done so far."""

    batches: int = 0
    wait: float = 0.0
    use: float = 0.0
    read: float = 0.0
    decode: float = 0.0
    collate: float = 0.0
    transfer: float = 0.0
    ready: int = 0
    bytes: int = 0


class LoadingMeter:
    """The measurements of one ElasticLoader. The training thread adds; windows read, in any thread."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.deaths = 0
        self.recut = 0
        self._death: tuple[float, LoaderTrouble] | None = None

    def died(self, loader: int, pid: int, status: int | None, indices: str = "") -> None:
        """`indices`: what it was loading."""
        self.deaths += 1
        self._death = clock(), LoaderTrouble(what="died", loader=loader, pid=pid, status=status, indices=indices)

    def recent_death(self) -> LoaderTrouble | None:
        death = self._death
        return death[1] if death is not None and clock() - death[0] < RECENT_SECONDS else None

    def hang_seconds(self) -> float:
        """A batch that training waits for longer than this is not coming."""
        totals = self.totals
        load = (totals.read + totals.decode + totals.collate + totals.transfer) / max(totals.batches, 1)
        return max(HANG_SECONDS, HANG_FACTOR * load)

    def loaded(self, times: StageTimes, received: float, size: int) -> None:
        """A batch was loaded; receiving it took this long here."""
        totals = self.totals
        totals.read += times.read
        totals.decode += times.decode
        totals.collate += times.collate
        totals.transfer += times.transfer + received
        totals.bytes += size

    def yielded(self, used: float, waited: float, ready: int) -> None:
        """Training used the batch before this one for a time, and then waited."""
        totals = self.totals
        totals.batches += 1
        totals.use += used
        totals.wait += waited
        totals.ready += ready


class Window:
    """What a loader has done between two calls of `take`."""

    def __init__(self, meter: LoadingMeter) -> None:
        self._meter = meter
        self._last = replace(meter.totals)

    @property
    def batches(self) -> int:
        return self._meter.totals.batches - self._last.batches

    def take(
        self, loaders: int, trouble: LoaderTrouble | None = None, waited: float = 0.0, draining: int = 0
    ) -> Loading:
        """`waited`: seconds that training has been waiting for a batch now, which count if there was none."""
        now, last = replace(self._meter.totals), self._last
        self._last = now
        batches = now.batches - last.batches
        count = max(batches, 1)
        return Loading(
            loaders=loaders,
            batches=batches,
            wait=(now.wait - last.wait) / count if batches else waited,
            use=(now.use - last.use) / count,
            read=(now.read - last.read) / count,
            decode=(now.decode - last.decode) / count,
            collate=(now.collate - last.collate) / count,
            transfer=(now.transfer - last.transfer) / count,
            ready=(now.ready - last.ready) / count,
            mb=(now.bytes - last.bytes) / count / 1e6,
            deaths=self._meter.deaths,
            recut=self._meter.recut,
            draining=draining,
            trouble=trouble,
        )


def shortened(indices: Any) -> str:
    text = str(indices)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"

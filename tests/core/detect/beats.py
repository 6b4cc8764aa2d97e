"""Beats of a rank that fares well, and of one that does not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from torchloom.core.detect.detector import Finding
from torchloom.core.detect.rank_detectors import RankDetectors
from torchloom.protocol.rank import Beat, StepTimes
from torchloom.settings import Settings

SETTINGS = Settings()
LIFE = "0" * 24


def times(
    p50: float = 0.1,
    p99: float | None = None,
    longest: float | None = None,
    own: float | None = None,
    data: float | None = None,
    count: int = 10,
) -> StepTimes:
    """Of steps that take about as long as each other, unless said otherwise."""
    p99 = 1.2 * p50 if p99 is None else p99
    return StepTimes(count=count, p50=p50, p99=p99, longest=max(p99, longest or 0.0), own=own, data=data)


def beat(number: int = 0, **fields: object) -> Beat:
    """The number-th beat of a rank that makes ten steps a second."""
    values: dict[str, object] = {"times": times(), "step": 10 * number, **fields}
    return Beat(incarnation=LIFE, **values)  # type: ignore[arg-type]


def findings(detectors: RankDetectors, beats: Iterable[Beat], start: float = 0.0) -> list[tuple[int, Finding]]:
    """(number of the beat, what it showed), one beat a second."""
    return [(n, one) for n, said in enumerate(beats) for one in detectors.hear(said, start + n)]


def noise(seed: int, share: float = 0.05) -> Iterator[float]:
    """Numbers around 1 with a long tail upwards."""
    chance = random.Random(seed)
    while True:
        yield chance.lognormvariate(0.0, share) * (1 + share * chance.paretovariate(3) * (chance.random() < 0.1))

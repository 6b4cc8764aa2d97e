"""What the dispatcher decides: batches, commands for loaders, and what the training loop receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Batch:
    number: int
    """The place in the epoch, from 0."""
    position: int
    """Samples of the epoch before this batch."""
    indices: Any
    """What the sampler drew: a list of indices, or one index without automatic batching."""
    kills: int = 0
    """Loaders that died while they loaded it."""
    group: int | None = None
    is_discarded: bool = False
    """Its indices were cut into other batches. A loader may still be loading it; the result is dropped."""

    def __lt__(self, other: Batch) -> bool:
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Start:
    """Start a loader process."""

    loader: int
    of: int
    """Number of loaders that are wanted now."""


@dataclass(frozen=True, slots=True)
class Send:
    """Let a loader load a batch after those that it has."""

    loader: int
    batch: Batch
    is_new_host: bool = False
    """This loader has none of the batches before it of its group."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End a loader process that has nothing left to do."""

    loader: int


Command = Start | Send | Stop


@dataclass(frozen=True, slots=True)
class Yield:
    """Return this result to the training loop."""

    batch: Batch
    result: Any


@dataclass(frozen=True, slots=True)
class LoadHere:
    """Load this batch in the training process, because there are no loaders."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class KilledLoaders:
    """Raise an error: this batch killed every loader that tried it."""

    batch: Batch


class Wait:
    """Wait for a loader."""


class End:
    """The epoch is over."""


@dataclass(frozen=True, slots=True)
class SamplerFailed:
    """Raise this error of the sampler, which ends the epoch."""

    error: Exception


class LoadersKeepDying:
    """Raise an error: new loaders die before they load anything."""


Outcome = Yield | LoadHere | KilledLoaders | Wait | End | SamplerFailed | LoadersKeepDying
WAIT, END, LOADERS_KEEP_DYING = Wait(), End(), LoadersKeepDying()

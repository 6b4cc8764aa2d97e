"""What a rank says about its training loader: parts of beats and of the answers to changes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torchloom.protocol.message import Part


class DataPlace(Part, frozen=True):
    """How far a rank's training loader was at a step."""

    epoch: int
    yielded: int
    """Indices of the epoch that were used in batches."""
    total: int
    """Indices of the epoch."""


class LoaderTrouble(Part, frozen=True, gc=False):
    """A process that loads data died a moment ago, or hangs."""

    what: Literal["died", "hung"]
    loader: int
    pid: int = 0
    """0 if it is not known."""
    status: int | None = None
    """Of one that died: its exit code, or the negative number of a signal."""
    seconds: float = 0.0
    """Of one that hangs: how long it has been loading a batch."""
    indices: Annotated[str, Meta(max_length=500)] = ""
    """What it was loading."""
    stack: Annotated[str, Meta(max_length=8000)] = ""


class Loading(Part, frozen=True, gc=False):
    """What the training loader of a rank did since the last beat; times are seconds for one batch."""

    loaders: int
    batches: int
    wait: float
    """That training waited."""
    use: float
    """That training used a batch, before it asked for the next."""
    read: float
    decode: float
    collate: float
    transfer: float
    ready: float
    """Batches that were there when one was wanted."""
    mb: float
    deaths: int = 0
    """Loader processes that died, in all."""
    recut: int = 0
    """Batches that were loaded in advance and cut again, in all."""
    draining: int = 0
    """Further loaders, which end after the batches that they have."""
    trouble: LoaderTrouble | None = None
    """The latest, while it is recent."""

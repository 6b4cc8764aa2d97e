"""Which loader process loads which batch, in what order batches are yielded, and what happens when a process dies.

The dispatcher is pure: it holds no process, socket or clock. Events come in through its methods (`resize`, `arrived`,
`died`), `plan` says what to do now, and `take` says what the training loop receives next.

Batches are drawn from a stream in order and numbered. A batch is in one of five places:

    stream ─draw→ outstanding ─arrived→ arrived ─take→ yielded
                      └──died→ lost ──plan→ outstanding

`discard` empties all places but the first and the last, when the indices that were not yielded are cut again.

Batches may belong to a group, a shard of an IterableDataset. The batches of a group are sent to one loader, its host,
and are yielded in order. A group moves when its host ends. Groups also move to new loaders, until no loader hosts two
more than another; but not because others have ended, because a group that moves is loaded again from its beginning.

The window is `prefetch` batches for each loader: that many may be drawn and not yet yielded. `take` returns batches in
the order of the stream, or with `in_order=False` in the order in which they arrive. Which loader loads a batch has no
influence on its content, so neither resizes nor deaths change what is yielded.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torchloom.data.loading_plan import (
    END,
    LOADERS_KEEP_DYING,
    WAIT,
    Batch,
    Command,
    KilledLoaders,
    LoadHere,
    Outcome,
    SamplerFailed,
    Send,
    Start,
    Stop,
    Yield,
)

KILL_LIMIT = 3
"""A batch that was being loaded when this number of loaders died raises an error."""
IDLE_DEATHS = 8
"""Loaders that die in a row before they delivered or began anything; then starting more is useless."""


@dataclass(eq=False, slots=True)
class _Loader:
    outstanding: deque[Batch] = field(default_factory=deque)
    """In the order in which they were sent, which is the order in which they are loaded."""
    discarded: int = 0
    """How many of them are."""
    draining: bool = False
    delivered: bool = False

    @property
    def load(self) -> tuple[int, int]:
        """How many of them are wanted, and how many there are."""
        return len(self.outstanding) - self.discarded, len(self.outstanding)

    @property
    def wanted(self) -> list[Batch]:
        """What is outstanding, and was not discarded."""
        return [batch for batch in self.outstanding if not batch.is_discarded]


class Dispatcher:
    """The batches of one epoch, or of what is left of it."""

    def __init__(
        self,
        stream: Iterator[Batch],
        target: int,
        prefetch: int,
        *,
        in_order: bool = True,
        keep_idle: bool = False,
        kill_limit: int = KILL_LIMIT,
        end_group: Callable[[Batch, bool], None] | None = None,
    ) -> None:
        """`keep_idle`: loaders stay when there is nothing left to load, for the next epoch.

        `end_group`: let the stream have no more batches of the group of this one, nor, if False, this one.
        """
        self.target = target
        self._end_in_stream = end_group
        self._hosts: dict[int, int] = {}
        """The loader that the next batches of a group are sent to."""
        self._shares_out = False
        """Loaders were started since a group ended: they are to host their share."""
        self._ends: dict[int, int] = {}
        """Of a group that has ended, the number of the first batch that does not exist."""
        self._stream = stream
        self._stream_error: Exception | None = None
        self._prefetch = prefetch
        self._in_order = in_order
        self._keep_idle = keep_idle
        self._kill_limit = kill_limit
        self._loaders: dict[int, _Loader] = {}
        self._exhausted = False
        self._can_start = True
        self._lost: list[Batch] = []
        self._ready: list[tuple[Batch, Any]] = []
        """A heap by number; with in_order=False in order of arrival."""
        self._order: deque[Batch] = deque()
        """Batches that were drawn and not yet yielded."""
        self._idle_deaths = 0
        self.recut = 0
        """Batches that were discarded."""

    # Events

    def resize(self, target: int) -> None:
        self.target = target

    def adopt(self, loader: int) -> None:
        """Use a process that already runs: a persistent loader of the epoch before."""
        self._loaders[loader] = _Loader(delivered=True)

    def arrived(self, loader: int, number: int, result: Any) -> None:
        """A loader delivered a batch, or the exception that its dataset raised."""
        batch = self._delivered(loader, number)
        if not batch.is_discarded and self._exists(batch):
            self._put(batch, result)

    def group_ended(self, loader: int, number: int) -> None:
        """In place of a batch, a loader reported that its group has no more."""
        batch = self._delivered(loader, number)
        self.end_group(batch, exists=False)

    def _delivered(self, loader: int, number: int) -> Batch:
        state = self._loaders[loader]
        batch = next(batch for batch in state.outstanding if batch.number == number)  # the oldest: it loads in order
        state.outstanding.remove(batch)
        state.discarded -= batch.is_discarded
        state.delivered = True
        self._idle_deaths = 0
        return batch

    def end_group(self, batch: Batch, exists: bool) -> None:
        """The group of this batch, if it has one, has none after it. Whether this one exists."""
        group = batch.group
        if group is None or self._end_in_stream is None:
            return
        self._end_in_stream(batch, exists)
        self._ends[group] = min(batch.number + exists, self._ends.get(group, batch.number + exists))
        self._hosts.pop(group, None)
        self._shares_out = False
        self._order = deque(each for each in self._order if self._exists(each))
        self._lost = [each for each in self._lost if self._exists(each)]
        self._ready = [each for each in self._ready if self._exists(each[0])]
        heapq.heapify(self._lost)
        if self._in_order:
            heapq.heapify(self._ready)

    def _exists(self, batch: Batch) -> bool:
        """As far as it is known."""
        return batch.group is None or batch.number < self._ends.get(batch.group, batch.number + 1)

    def _lose(self, batch: Batch) -> None:
        if self._exists(batch):
            heapq.heappush(self._lost, batch)

    def died(self, loader: int) -> Batch | None:
        """A process ended without being asked. Returns the batch that it was loading: that one is suspect."""
        state = self._loaders.pop(loader, None)
        self._forget_host(loader)
        if state is None:
            return None
        if not state.outstanding:
            self._idle_deaths += not state.delivered
            return None
        suspect = state.outstanding[0]
        suspect.kills += 1
        for batch in state.wanted:
            if batch.kills >= self._kill_limit:
                self._put(batch, KilledLoaders(batch))
                self.end_group(batch, exists=True)  # only an iterator that survived it could load those after it
            else:
                self._lose(batch)
        return suspect

    def start_failed(self, loader: int) -> None:
        """A loader was to be started and could not be. No batch is suspect."""
        self._forget_host(loader)
        state = self._loaders.pop(loader, None)
        for batch in state.wanted if state is not None else ():  # without one, it is not needed any more
            self._lose(batch)

    def cannot_start(self) -> None:
        """From now on no loader can be started. Those that run continue; without any, batches load in training."""
        self._can_start = False

    def discard(self) -> list[Batch]:
        """Drop every batch that was drawn and not yielded, because the stream will cut their indices again."""
        discarded = [batch for state in self._loaders.values() for batch in state.wanted]
        for state in self._loaders.values():
            state.discarded = len(state.outstanding)
        discarded += [*self._lost, *(batch for batch, _ in self._ready)]
        for batch in discarded:
            batch.is_discarded = True
        self._lost, self._ready = [], []
        self._order.clear()
        self._exhausted = False
        self.recut += len(discarded)
        return sorted(discarded)

    # Decisions

    def awaited(self) -> tuple[int, Batch] | None:
        """The loader that has the next batch to be yielded, and the batch that it is loading now."""
        for loader, state in self._loaders.items():
            if self._order and self._order[0] in state.wanted:
                return loader, state.outstanding[0]
        return None

    @property
    def active(self) -> list[int]:
        return [loader for loader, state in self._loaders.items() if not state.draining]

    @property
    def draining(self) -> int:
        """Loaders that end after the batches that they have. Any thread may ask."""
        return sum(state.draining for state in list(self._loaders.values()))

    @property
    def ready(self) -> int:
        """Batches that have arrived and were not taken."""
        return len(self._ready)

    @property
    def wants_loaders(self) -> bool:
        return self._wanted() > 0

    @property
    def needs_no_loaders(self) -> bool:
        """Everything was loaded, or no loader is wanted any more in this epoch."""
        return self._exhausted and not self._lost and not self._loaders and not self._keep_idle

    def plan(self) -> list[Command]:
        """What to do now. The commands count as carried out."""
        return [*self._adjust(), *self._send(), *self._stop()]

    def take(self) -> Outcome:
        """What the training loop receives next. Call it after `plan` was carried out."""
        if (ready := self._take_ready()) is not None:
            batch, result = ready
            self._order.remove(batch)
            return result if isinstance(result, KilledLoaders) else Yield(batch, result)
        if self._idle_deaths >= IDLE_DEATHS:
            self._idle_deaths = 0
            return LOADERS_KEEP_DYING
        if self._exhausted and not self._order:
            return self._end()
        busy = any(state.load[0] for state in self._loaders.values())
        if busy or (self._wanted() and (self._loaders or self._can_start)):
            return WAIT
        batch_here = heapq.heappop(self._lost) if self._lost else self._draw()
        if batch_here is None:
            return self._end()
        self._order.remove(batch_here)
        if batch_here.kills:
            self.end_group(batch_here, exists=True)
            return KilledLoaders(batch_here)
        return LoadHere(batch_here)

    def _take_ready(self) -> tuple[Batch, Any] | None:
        if self._in_order:
            return heapq.heappop(self._ready) if self._ready and self._ready[0][0] is self._order[0] else None
        for place, (batch, _) in enumerate(self._ready):
            if batch.group is None or next(each for each in self._order if each.group == batch.group) is batch:
                return self._ready.pop(place)
        return None

    def _end(self) -> Outcome:
        if self._stream_error is not None:
            error, self._stream_error = self._stream_error, None
            return SamplerFailed(error)
        return END

    def _put(self, batch: Batch, result: Any) -> None:
        if self._in_order:
            heapq.heappush(self._ready, (batch, result))
        else:
            self._ready.append((batch, result))

    def _wanted(self) -> int:
        """A batch that killed a loader is tried again in a loader, never in the training process."""
        return max(self.target, 1 if self._can_start and any(batch.kills for batch in self._lost) else 0)

    def _adjust(self) -> Iterator[Command]:
        wanted = self._wanted()
        active = sorted(self.active)
        for loader in active[wanted:]:
            self._loaders[loader].draining = True
        missing = wanted - len(active)
        for loader in sorted(set(self._loaders) - set(active))[: max(missing, 0)]:
            self._loaders[loader].draining = False
            self._shares_out = True
            missing -= 1
        if not self._can_start:
            return
        if self._exhausted and not self._keep_idle:
            missing = min(missing, len(self._lost))
        free = (number for number in range(len(self._loaders) + max(missing, 0)) if number not in self._loaders)
        for loader in [number for number, _ in zip(free, range(missing), strict=False)]:
            self._loaders[loader] = _Loader()
            self._shares_out = True
            yield Start(loader, of=wanted)

    def _send(self) -> Iterator[Command]:
        active = [(loader, state) for loader, state in self._loaders.items() if not state.draining]
        window = self._prefetch * len(active)
        while active:
            loader, state = min(active, key=lambda pair: (pair[1].load, pair[0]))
            if state.load[0] >= self._prefetch:
                return
            if self._lost:
                batch: Batch | None = heapq.heappop(self._lost)
            else:
                batch = self._draw() if len(self._order) < window else None
            if batch is None:
                return
            is_new_host = False
            if batch.group is not None:
                earlier_host, loader = self._hosts.get(batch.group), self._host(batch.group)
                is_new_host = loader != earlier_host
            self._loaders[loader].outstanding.append(batch)
            yield Send(loader, batch, is_new_host)

    def _host(self, group: int) -> int:
        """The loader of a group's next batch."""
        hosted = dict.fromkeys(sorted(self.active), 0)
        for loader in self._hosts.values():
            if loader in hosted:
                hosted[loader] += 1
        idlest = min(hosted, key=hosted.__getitem__)
        host = self._hosts.get(group)
        if host not in hosted or (self._shares_out and hosted[host] - hosted[idlest] > 1):
            host = self._hosts[group] = idlest
        return host

    def _forget_host(self, loader: int) -> None:
        self._hosts = {group: host for group, host in self._hosts.items() if host != loader}

    def _stop(self) -> Iterator[Command]:
        unneeded = self._exhausted and not self._lost and not self._keep_idle
        for loader, state in list(self._loaders.items()):
            if not state.outstanding and (state.draining or unneeded):
                del self._loaders[loader]
                self._forget_host(loader)
                yield Stop(loader)

    def _draw(self) -> Batch | None:
        if self._exhausted:
            return None
        try:
            batch = next(self._stream, None)
        except Exception as error:  # noqa: BLE001  # of the user's sampler: raised when its turn comes
            self._stream_error = error
            batch = None
        if batch is None:
            self._exhausted = True
            return None
        self._order.append(batch)
        return batch

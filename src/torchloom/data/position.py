"""Where an epoch is: the batches that were yielded, and what is needed to draw the same indices again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from torchloom.data.batch_cutter import BatchCutter
from torchloom.data.loading_plan import Batch
from torchloom.data.resharding import Segment, rest_of_epoch, share_of
from torchloom.data.seeding import GeneratorStates, capture_generators, restore_generators, undisturbed
from torchloom.errors import BadState

VERSION = 1
TORCH_SAMPLERS = frozenset({
    BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler,
    _InfiniteConstantSampler,
})  # fmt: skip
"""They draw from torch's generators alone."""


class EpochPosition:
    """The progress of one epoch. Batches are counted when they are yielded, not when they are loaded."""

    def __init__(
        self, epoch: int, base_seed: int, start: dict[str, Any], *, batches: int = 0, samples: int = 0
    ) -> None:
        self.epoch = epoch
        self.base_seed = base_seed
        self.start = start
        """What `capture_start` returned when the epoch began."""
        self.batches = batches
        """Batches yielded, without a gap."""
        self.samples = samples
        self.ahead: dict[int, int] = {}
        """With in_order=False: batches yielded after a gap, and how many samples they have."""
        self.ranks: int | None = None
        """Ranks that share the indices of the epoch, if they do as with a DistributedSampler."""
        self.segments: list[Segment] = []
        """The epoch so far with other numbers of ranks."""
        self.batch_size: int | None = None
        """Of the batches in `ahead`."""
        self.is_over = False

    def count(self, batch: Batch, samples: int, result: Any = None) -> Any:
        """A batch is yielded, or an exception in its place. Returns what training receives of the result."""
        self.ahead[batch.number] = samples
        while self.batches in self.ahead:
            self.samples += self.ahead.pop(self.batches)
            self.batches += 1
        return result

    def progress(self) -> Any:
        """What `count` changes, for `go_back`."""
        return self.batches, self.samples, dict(self.ahead)

    def go_back(self, progress: Any) -> None:
        self.batches, self.samples, self.ahead = progress

    def describe(self, batch: Batch) -> str:  # noqa: ARG002
        """What a batch is called, if its indices do not say it."""
        return ""

    def request(self, batch: Batch) -> Any:
        """What a loader needs to load a batch without those before it."""
        return batch.indices

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: what a checkpoint can contain."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "base_seed": self.base_seed,
            "is_over": self.is_over,
            "batches": self.batches,
            "samples": self.samples,
            "ahead": dict(self.ahead),
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "segments": [list(segment) for segment in self.segments],
            "start": plain_start(self.start),
        }


def check_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """BadState if it is no state of an ElasticLoader, or not one that this loader can continue."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION or not _is_complete(state):
        raise BadState(
            "this is not the state of an ElasticLoader", hint="pass what its state_dict() returned, of this version"
        )
    _check_drawn_from(loader, state["start"])
    _check_generators(loader, state["start"])


def read_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> EpochPosition | None:
    """The position in a state_dict; None if it was saved before the first epoch.

    BadState, with nothing changed, if it is no such state, or not one that this loader can continue.
    """
    check_state(loader, state)
    if state["epoch"] < 0:
        return None
    position = EpochPosition(
        state["epoch"], state["base_seed"], state["start"], batches=state["batches"], samples=state["samples"]
    )
    position.ahead, position.batch_size = dict(state["ahead"]), state.get("batch_size")
    if position.ahead and position.batch_size != loader.batch_size:
        raise BadState(
            f"the state was saved with in_order=False and batch_size={position.batch_size}, and the loader has"
            f" {loader.batch_size}",
            hint=f"create the loader with batch_size={position.batch_size}",
        )
    position.is_over = state["is_over"]
    position.ranks = state.get("ranks")
    position.segments = [Segment(*segment) for segment in state.get("segments", ())]
    share = share_of(loader.sampler)
    if position.ahead and share is not None and share.ranks != position.ranks:
        raise BadState("batches were yielded out of order, and there is another number of ranks now")
    return position


def merge(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One state for all ranks of a job, from those of an earlier number of ranks."""
    first, *others = states
    if "shards" in first:
        raise BadState(
            "the epoch is of an IterableDataset, and there is another number of ranks now",
            hint="use the same number of ranks as before",
        )
    for name in ("epoch", "is_over", "samples", "ranks", "segments"):
        if any(other.get(name) != first.get(name) for other in others):
            raise BadState(
                f"{name} of the loader differed between ranks, and there is another number of ranks now",
                hint="save a checkpoint when all ranks have finished the same step",
            )
    if first.get("epoch", -1) >= 0 and not first["is_over"] and first.get("ranks") != len(states):
        raise BadState(
            "the indices were not shared out by a DistributedSampler, and there is another number of ranks now",
            hint="use one, or the same number of ranks as before",
        )
    return first


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_complete(state: Mapping[str, Any]) -> bool:
    start, epoch = state.get("start"), state.get("epoch")
    if not isinstance(start, Mapping) or not _is_start(start):
        return False
    if epoch == -1:
        return state.get("base_seed") is None or isinstance(state["base_seed"], int)
    segments, ahead = state.get("segments", []), state.get("ahead")
    return (
        all(is_count(state.get(name)) for name in ("epoch", "batches", "samples"))
        and isinstance(state.get("base_seed"), int)
        and isinstance(state.get("is_over"), bool)
        and (state["is_over"] or isinstance(start.get("draws_base_seed"), bool))
        and all(state.get(name) is None or is_count(state[name]) for name in ("batch_size", "ranks"))
        and isinstance(ahead, Mapping)
        and all(is_count(number) for pair in ahead.items() for number in pair)
        and isinstance(segments, list)
        and all(isinstance(each, (list, tuple)) and len(each) == 2 and all(map(is_count, each)) for each in segments)
    )


def _is_start(start: Mapping[str, Any]) -> bool:
    if not all(isinstance(start.get(name), Mapping) for name in ("order", "samplers", "sampler_epochs")):
        return False
    return (
        isinstance(start.get("generators"), list)
        and "process" in start
        and all(is_count(epoch) for epoch in start["sampler_epochs"].values())
        and all(isinstance(each, (list, tuple)) and len(each) == 2 for each in start["order"].values())
        and all(isinstance(kind, str) and isinstance(length, int) for kind, length in start["order"].values())
    )


def _check_generators(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    """BadState if a state does not fit its generator. Nothing is changed."""
    generators = _generators(loader)
    before = [generator.get_state() for generator in generators]
    try:
        with undisturbed():
            restore_generators(plain_start(start)["process"])
            for generator, state in zip(generators, start["generators"], strict=True):
                generator.set_state(state)
    except Exception as error:
        raise BadState(f"the state of a generator is damaged: {error}") from error
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _check_drawn_from(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    hint = "create the loader with the same dataset, sampler and generator as before"
    before, now = start["order"], _order(loader)
    if before != now:
        raise BadState(f"the state was saved with {_describe(before)}, and the loader has {_describe(now)}", hint=hint)
    generators = len(_generators(loader))
    if len(start["generators"]) != generators:
        raise BadState(
            f"the state has {len(start['generators'])} generators, and the loader has {generators}", hint=hint
        )


def fresh_state(loader: DataLoader[Any], base_seed: int | None) -> dict[str, Any]:
    """The state before the first epoch."""
    return {"version": VERSION, "epoch": -1, "base_seed": base_seed, "start": plain_start(capture_start(loader))}


# What an epoch draws its indices from


def _samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """The samplers of a loader that may have a state. The one that torch makes around `sampler` has none."""
    if loader.batch_size is not None or loader.batch_sampler is None:
        return {"sampler": loader.sampler}
    name, sampler = "batch_sampler", loader.batch_sampler
    samplers = {name: sampler}
    names = ("batch_sampler", "sampler")
    while inner := next((each for each in names if getattr(sampler, each, None) is not None), None):
        name, sampler = f"{name}.{inner}", getattr(sampler, inner)
        samplers[name] = sampler
    return samplers


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    owners = [loader, *_samplers(loader).values()]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())


def _order(loader: DataLoader[Any]) -> dict[str, Any]:
    """The kinds of the samplers and how many indices they give. Other ones cannot continue an epoch."""
    lengths = {}
    for name, sampler in _samplers(loader).items():
        kind = type(sampler).__name__
        if name == "sampler" and share_of(sampler) is not None:
            lengths[name] = [kind, len(sampler.dataset)]  # of all ranks: their number may change
            continue
        length = sampler_length(sampler)
        lengths[name] = [kind, -1 if length is None else length]
    return lengths


def sampler_length(sampler: Any) -> int | None:
    """None if it has no length."""
    try:
        return len(sampler)
    except TypeError:
        return None


def _describe(order: Mapping[str, Any]) -> str:
    if any(kind == _InfiniteConstantSampler.__name__ for kind, _ in order.values()):
        return "an IterableDataset"
    return ", ".join(f"a {kind}" + (f" of {length} indices" if length >= 0 else "") for kind, length in order.values())


def capture_start(loader: DataLoader[Any]) -> dict[str, Any]:
    """The state of everything that a sampler may draw from."""
    samplers = _samplers(loader)
    return {
        "order": _order(loader),
        "process": capture_generators(only_torch=all(type(each) in TORCH_SAMPLERS for each in samplers.values())),
        "generators": [generator.get_state() for generator in _generators(loader)],
        "samplers": {
            name: copy.deepcopy(sampler.state_dict())
            for name, sampler in samplers.items()
            if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        },
        "sampler_epochs": {
            name: sampler.epoch
            for name, sampler in samplers.items()
            if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)
        },
    }


def plain_start(start: Mapping[str, Any]) -> dict[str, Any]:
    """What `capture_start` returned, or a state_dict contained, as a checkpoint can contain it."""
    process = start["process"]
    return {**start, "process": process.plain() if isinstance(process, GeneratorStates) else process}


def restore_samplers(loader: DataLoader[Any], start: Mapping[str, Any]) -> None:
    """Restore generators and samplers that belong to the loader, and not those of the process."""
    for generator, state in zip(_generators(loader), start["generators"], strict=True):
        generator.set_state(state)
    samplers = _samplers(loader)
    for name, state in start["samplers"].items():
        if name in samplers and hasattr(samplers[name], "load_state_dict"):
            samplers[name].load_state_dict(copy.deepcopy(state))
    for name, epoch in start["sampler_epochs"].items():
        if name in samplers and hasattr(samplers[name], "set_epoch"):
            samplers[name].set_epoch(epoch)


def draw_base_seed(loader: DataLoader[Any]) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def begin(loader: DataLoader[Any], epoch: int, base_seed: int | None) -> tuple[EpochPosition, Iterator[Batch]]:
    """A new epoch. It draws from the generators in the same order as torch's DataLoader."""
    start = capture_start(loader)
    if loader.batch_size is not None:
        batches: Iterator[Batch] = BatchCutter(loader.sampler, loader.batch_size, loader.drop_last)
    else:
        batches = _number(iter(loader._index_sampler), loader._auto_collation)
    start["draws_base_seed"] = base_seed is None
    if base_seed is None:
        base_seed = draw_base_seed(loader)
    position = EpochPosition(epoch, base_seed, start)
    position.batch_size = loader.batch_size
    share = share_of(loader.sampler)
    position.ranks = share.ranks if share is not None and loader.batch_size is not None else None
    return position, batches


def resume(loader: DataLoader[Any], position: EpochPosition) -> tuple[EpochPosition, Iterator[Batch]]:
    """The rest of an epoch. The process's own generators stay as they are."""
    with undisturbed():
        restore_generators(plain_start(position.start)["process"])
        restore_samplers(loader, position.start)
        done = {"number": position.batches, "position": position.samples}
        if loader.batch_size is not None:
            # By samples, not by batches: correct also if the batch size is another one now.
            sampler, skip = _sampler_of_rest(loader, position)
            cutter = BatchCutter(sampler, loader.batch_size, loader.drop_last, skip=skip, **done)
            if position.start["draws_base_seed"]:
                draw_base_seed(loader)
            first = next(cutter, None)  # now: the sampler draws its permutation at the first index
            cutter.cut_again(cutter.size, () if first is None else (first,))
            batches: Iterator[Batch] = cutter
        else:
            indices = iter(loader._index_sampler)
            if position.start["draws_base_seed"]:
                draw_base_seed(loader)
            for _ in islice(indices, position.batches):
                pass
            batches = _number(indices, loader._auto_collation, **done)
            first = next(batches, None)
            batches = batches if first is None else chain([first], batches)
    position.batch_size = loader.batch_size
    if position.ahead:
        done_ahead = frozenset(position.ahead)  # which shrinks while batches are counted
        return position, (batch for batch in batches if batch.number not in done_ahead)
    return position, batches


def _sampler_of_rest(loader: DataLoader[Any], position: EpochPosition) -> tuple[Iterable[Any], int]:
    """What the rest of an epoch is drawn from, and how many of its indices were used."""
    share = share_of(loader.sampler)
    if share is None or position.ranks is None or (share.ranks == position.ranks and not position.segments):
        return loader.sampler, position.samples
    before = sum(segment.samples for segment in position.segments)
    if share.ranks != position.ranks:
        position.segments.append(Segment(position.ranks, position.samples - before))
        position.ranks, before = share.ranks, position.samples
        position.base_seed += share.rank  # all ranks have the state of one
    return rest_of_epoch(loader.sampler, position.segments), position.samples - before


def _number(indices: Iterator[Any], auto_collation: bool, number: int = 0, position: int = 0) -> Iterator[Batch]:
    for each in indices:
        yield Batch(number, position, each)
        number += 1
        position += batch_samples(each, auto_collation)


def batch_samples(indices: Any, auto_collation: bool) -> int:
    return len(indices) if auto_collation and hasattr(indices, "__len__") else 1

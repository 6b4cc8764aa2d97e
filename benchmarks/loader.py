"""Data loading: ElasticLoader against torch's DataLoader and torchdata's StatefulDataLoader.

The contenders load the same dataset with the same number of workers, start method and persistence, one after the other
in each round, in an order that rotates. Medians over rounds count, and ratios are to the faster of the two others.
StatefulDataLoader takes part if the package torchdata is installed: it is no dependency of torchLoom.

The times between epochs are measured from the end of the last step of one to the first batch of the next, so that they
include the end of the old workers; a training step takes 5 ms there. A resize from 2 to 4 is compared with what
DataLoader offers: make another one and continue in the middle of the epoch. In the end come epochs with random resizes
and kills, in which each sample must arrive once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import random
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.plane import die_tidily
from benchmarks.report import finish, table
from torchloom.data import ElasticLoader

WORKERS = 2
OURS = "ElasticLoader"
STEP_SECONDS = 0.005
MORE = 3
"""Times as many rounds between epochs: that takes a millisecond, and its median of nine rounds varies by a fifth."""
Times = dict[str, list[float]]


def contenders() -> dict[str, type[DataLoader[Any]]]:
    found: dict[str, Any] = {OURS: ElasticLoader, "DataLoader": DataLoader}
    if importlib.util.find_spec("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        found["StatefulDataLoader"] = StatefulDataLoader
    return found


class Images(Dataset[Any]):
    """Decoded images of 3×256×256 bytes: crop to 224×224 and convert to floats."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.images = torch.randint(256, (8, 3, 256, 256), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        shift = index % 32
        return self.images[index % 8, :, shift : shift + 224, shift : shift + 224].to(torch.float32), index % 1000


class Tiny(Images):
    def __getitem__(self, index: int) -> Any:
        return torch.full((16,), float(index)), index


class Texts(Images):
    def __getitem__(self, index: int) -> Any:
        numbers = {"index": index, "weight": index / 2, "tokens": torch.arange(8) + index}
        return {"text": f"the sample number {index}", "tags": ["a", "b", str(index)], "numbers": numbers}


class Slow(Images):
    """Waits for a disk."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return index


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of each contender (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=2000, help="of the large trainer (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.megabytes = 1, 50
    die_tidily()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", category=UserWarning, module="torchdata")
    short = 10 if args.quick else 1
    figures: dict[str, object] = {"against": ", ".join(name for name in contenders() if name != OURS)}
    images, cpu = throughput("images, 64 of 3×224×224", Images(64 * 60 // short), 64, args.rounds)
    figures |= {"images_ratio": ratio(images, best=max), "cpu_ratio": ratio(cpu, best=min)}
    figures |= {"images_per_s": 64 * statistics.median(images[OURS])}
    tiny, _ = throughput("tiny, 4 of 16 floats", Tiny(4 * 2000 // short), 4, args.rounds)
    nested, _ = throughput("nested, 4 of dicts and texts", Texts(4 * 1000 // short), 4, args.rounds)
    figures |= {"tiny_ratio": ratio(tiny, best=max), "nested_ratio": ratio(nested, best=max)}
    figures |= between_epochs("", MORE * args.rounds)
    figures |= resize(max(2, args.rounds // 2))
    figures |= faults(87 // short, 59 // short)
    ballast = torch.ones(args.megabytes * 250_000)
    figures |= {f"{key}_large": value for key, value in between_epochs(f", {args.megabytes} MB", args.rounds).items()}
    del ballast
    finish("loader", figures | {"rounds": args.rounds, "workers": WORKERS})


def ratio(times: Times, best: Callable[[Iterator[float]], float]) -> float:
    """Ours to the better of the others."""
    return statistics.median(times[OURS]) / best(statistics.median(times[name]) for name in times if name != OURS)


def rotated(rounds: int) -> Iterator[tuple[str, type[DataLoader[Any]]]]:
    chance = random.Random(1)
    pairs = list(contenders().items())
    for _ in range(rounds):
        yield from chance.sample(pairs, len(pairs))


# ── throughput ───────────────────────────────────────────────────────────────────────────────────────────────────────


def throughput(title: str, dataset: Dataset[Any], batch_size: int, rounds: int) -> tuple[Times, Times]:
    """Batches per second, and CPU seconds per batch of all processes, with persistent workers that are warm."""
    loaders = {
        name: kind(dataset, batch_size=batch_size, num_workers=WORKERS, persistent_workers=True)
        for name, kind in contenders().items()
    }
    for loader in loaders.values():
        consume(loader)
    rates: Times = defaultdict(list)
    costs: Times = defaultdict(list)
    for name, _ in rotated(rounds):
        used, began = cpu_seconds(), time.perf_counter()
        count = consume(loaders[name])
        rates[name].append(count / (time.perf_counter() - began))
        costs[name].append((cpu_seconds() - used) / count)
    middle = statistics.median
    rows = [
        (name, middle(rates[name]), min(rates[name]), max(rates[name]), 1000 * middle(costs[name])) for name in rates
    ]
    table(f"{title}: batches/s, {rounds} rounds", [("", "median", "min", "max", "CPU ms a batch"), *rows])
    return rates, costs


def consume(loader: DataLoader[Any]) -> int:
    count = 0
    for _ in loader:
        count += 1
    return count


def cpu_seconds() -> float:
    """Of this process and all that descend from it now."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


# ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def between_epochs(title: str, rounds: int) -> dict[str, object]:
    dataset = Tiny(4 * WORKERS * 4)
    first: Times = defaultdict(list)
    fresh: Times = defaultdict(list)
    persistent: Times = defaultdict(list)
    for name, kind in rotated(rounds):
        for is_persistent, following in ((False, fresh), (True, persistent)):
            loader = kind(dataset, batch_size=4, num_workers=WORKERS, persistent_workers=is_persistent)
            gc.collect()
            began = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            first[name].append(1000 * (time.perf_counter() - began))
            for _ in range(len(loader) - 1):
                time.sleep(STEP_SECONDS)
                next(iterator)
            time.sleep(STEP_SECONDS)
            began = time.perf_counter()
            assert next(iterator, None) is None
            iterator = iter(loader)
            next(iterator)
            following[name].append(1000 * (time.perf_counter() - began))
            del iterator, loader
    kinds = {"first_batch_ratio": first, "next_epoch_fresh_ratio": fresh, "next_epoch_ratio": persistent}
    rows = [(name, *(statistics.median(times[name]) for times in kinds.values())) for name in first]
    table(f"until a batch, ms{title}", [("", "first", "next epoch, new workers", "next epoch, persistent"), *rows])
    return {key: ratio(times, best=min) for key, times in kinds.items()}


# ── resizing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def resize(rounds: int) -> dict[str, object]:
    """How long training waits for the next batch after a resize, and the longest wait after it."""
    dataset, size, before = Slow(8 * 60), 8, 20
    waits: list[float] = []
    rebuilds: list[float] = []
    stalls: list[float] = []
    for _ in range(rounds):
        loader = ElasticLoader(dataset, batch_size=size, num_workers=2)
        iterator = iter(loader)
        usual = intervals(iterator, before)
        began = time.perf_counter()
        loader.resize(4)
        next(iterator)
        waits.append(1000 * (time.perf_counter() - began))
        longest = max(waits[-1] / 1000, *intervals(iterator, 20))
        stalls.append(max(0.0, longest - max(usual[2:])) / statistics.fmean(usual[2:]))
        del iterator, loader
        theirs = iter(DataLoader(dataset, batch_size=size, num_workers=2))
        intervals(theirs, before)
        began = time.perf_counter()
        del theirs
        rest = Subset(dataset, range(size * before, len(dataset)))
        theirs = iter(DataLoader(rest, batch_size=size, num_workers=4))
        next(theirs)
        rebuilds.append(1000 * (time.perf_counter() - began))
        del theirs
    rows = [
        ("ElasticLoader.resize", statistics.median(waits), max(waits)),
        ("another DataLoader", statistics.median(rebuilds), max(rebuilds)),
    ]
    table(f"from 2 loaders to 4: until the next batch, ms ({rounds} rounds)", [("", "median", "max"), *rows])
    return {
        "resize_stall_batches": statistics.median(stalls),
        "resize_ms": statistics.median(waits),
        "rebuild_ms": statistics.median(rebuilds),
    }


def intervals(iterator: Iterator[Any], count: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(count):
        next(iterator)
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def faults(resizes: int, kills: int) -> dict[str, object]:
    """Epochs with resizes and kills at random moments: how many samples were lost, and how many came twice."""
    draw = random.Random(1)
    done = Counter[str]()
    dataset = Tiny(1000)
    while done["resizes"] < resizes or done["kills"] < kills:
        loader = ElasticLoader(dataset, batch_size=4, shuffle=True, num_workers=2, kill_limit=10_000)
        seen = Counter[int]()
        for _, indices in loader:
            seen.update(indices.tolist())
            chance = draw.random()
            if chance < 0.05:
                loader.resize(draw.randrange(5))
                done["resizes"] += 1
            elif chance < 0.1:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
                    running = [child for zygote in psutil.Process().children() for child in zygote.children()]
                    for process in running[:1]:
                        process.kill()
                        done["kills"] += 1
        done["lost"] += len(dataset) - len(seen)
        done["repeated"] += sum(seen.values()) - len(seen)
        done["epochs"] += 1
    table(
        "resizes and kills at random",
        [(name, done[name]) for name in ("epochs", "resizes", "kills", "lost", "repeated")],
    )
    return {name: done[name] for name in ("resizes", "kills", "lost", "repeated")}


if __name__ == "__main__":
    main()

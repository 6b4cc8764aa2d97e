"""What a checkpoint costs training, when it is durable, and whether damage to it is noticed.

torchLoom, torch.save, torch.distributed.checkpoint.async_save and a bare memcpy save the same state on the same
filesystem, one after the other in each round, in an order that rotates; each is durable and deleted before the next
begins. Medians count. The first round of each is told apart: its buffers are not there yet. async_save runs in every
configuration that works without a GPU, and its fastest one is what torchLoom is compared with.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import bitflips
from benchmarks.plane import ROOT, die_tidily
from benchmarks.report import finish, table
from benchmarks.savers import Dcp, Memcpy, Saver, TorchLoom, TorchSave, Training, remove
from torchloom.checkpoints.api import Checkpoints

T = TypeVar("T")
DCP = {
    "dcp.async_save": "default",
    "dcp.async_save, stager kept": "cached",
    "dcp.async_save, writer stages": "writer",
    "dcp.async_save, staged by a thread": "async",
}
WORK_SECONDS = 0.5
"""Of training before each save."""
ALONE_SECONDS = 1.0
SAVES = 5


@dataclass
class Times:
    """Milliseconds of one contender, the first round apart."""

    cold: float = 0.0
    all: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if self.cold:
            self.all.append(seconds * 1000)
        else:
            self.cold = seconds * 1000

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    def row(self) -> tuple[float, float, float, float]:
        return self.median, min(self.all), max(self.all), self.cold


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="after the cold one (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=400, help="of state (default: %(default)s)")
    parser.add_argument("--flips", type=int, default=200, help="of one bit, for each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the flips (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT.parent, help="where to save (default: beside the project)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.megabytes, args.flips = 2, 12, 20
    die_tidily()
    warnings.filterwarnings("ignore", module="torch.distributed")
    folder = Path(tempfile.mkdtemp(prefix="loom-bench-", dir=args.folder))
    try:
        training = Training(args.megabytes)
        figures: dict[str, object] = {"state_mb": training.size / 1e6}
        figures |= _memory(folder, args.megabytes)
        figures |= _saves(folder, training, args.rounds)
        figures |= _behind(folder, training, args.rounds // 2 + 1, str(figures["dcp_best"]))
        figures |= _verification(folder, training, args.rounds)
        figures |= _flips(folder, args.flips, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    finish("checkpoint", figures | {"rounds": args.rounds})


# ── stall, and until durable ─────────────────────────────────────────────────────────────────────────────────────────


def _saves(folder: Path, training: Training, rounds: int) -> dict[str, object]:
    loom = TorchLoom(training, _place(folder, "torchloom", 0).parent)
    savers: dict[str, Saver] = {"torchloom": loom, "torch.save": TorchSave(training), "memcpy": Memcpy(training)}
    savers |= {name: Dcp(training, stager) for name, stager in DCP.items()}
    stalls: dict[str, Times] = defaultdict(Times)
    ends: dict[str, Times] = defaultdict(Times)
    for number, name in _shuffled(list(savers), rounds + 1):
        path = _place(folder, name, number)
        training.work(WORK_SECONDS)
        began = time.perf_counter()
        savers[name].begin(path)
        stalls[name].add(time.perf_counter() - began)
        savers[name].finish()
        ends[name].add(time.perf_counter() - began)
        remove(path)
    loom.close()
    best = min(DCP, key=lambda name: stalls[name].median)
    head = ("", "median", "min", "max", "cold")
    size = f"{training.size / 1e6:.0f} MB, {rounds} rounds, {torch.get_num_threads()} torch threads"
    table(f"training stands still, ms ({size})", [head, *((name, *stalls[name].row()) for name in savers)])
    table("until durable, ms", [head, *((name, *ends[name].row()) for name in savers if name != "memcpy")])
    ours = stalls["torchloom"]

    def against(name: str) -> tuple[object, ...]:
        paired = statistics.median(map(float.__truediv__, ours.all, stalls[name].all))
        return name, ours.median / stalls[name].median, min(ours.all) / min(stalls[name].all), paired

    others = ("torch.save", best, "memcpy")
    table("torchLoom's stall against", [("", "of medians", "of minima", "median of rounds"), *map(against, others)])
    return {
        "stall_ms": ours.median,
        "ratio_to_torch_save": ours.median / stalls["torch.save"].median,
        "ratio_to_dcp_async": ours.median / stalls[best].median,
        "ratio_to_memcpy": ours.median / stalls["memcpy"].median,
        "durable_ratio_to_torch_save": ends["torchloom"].median / ends["torch.save"].median,
        "stall_cold_ms": ours.cold,
        "torch_save_ms": stalls["torch.save"].median,
        "torch_save_cold_ms": stalls["torch.save"].cold,
        "dcp_async_ms": stalls[best].median,
        "dcp_async_cold_ms": stalls[best].cold,
        "dcp_best": best,
        "memcpy_ms": stalls["memcpy"].median,
        "durable_ms": ends["torchloom"].median,
        "torch_save_durable_ms": ends["torch.save"].median,
    }


def _shuffled(names: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, name), each name once a round, in another order each: nobody always pays for what the same one left.

    What was deleted before is settled on the disk first, or the next sync would wait for it.
    """
    chance = random.Random(1)
    for number in range(rounds):
        for name in chance.sample(names, len(names)):
            os.sync()
            yield number, name


def _place(folder: Path, name: str, number: int) -> Path:
    place = folder / name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    return place / f"step-{number + 1}"


# ── while it is written behind the training ──────────────────────────────────────────────────────────────────────────


def _behind(folder: Path, training: Training, rounds: int, best: str) -> dict[str, object]:
    loom = TorchLoom(training, _place(folder, "behind-torchloom", 0).parent)
    savers: dict[str, Saver | None] = {"alone": None, "torchloom": loom, "dcp": Dcp(training, DCP[best])}
    step = _small_step()
    seconds: dict[str, list[list[float]]] = defaultdict(list)
    for number, name in _shuffled(list(savers), rounds + 1):
        saver = savers[name]
        if saver is None:
            until = time.perf_counter() + ALONE_SECONDS
            seconds[name].append(_steps(step, lambda until=until: time.perf_counter() > until))  # type: ignore[misc]
        else:
            path = _place(folder, f"behind-{name}", number)
            saver.begin(path)
            seconds[name].append(_steps(step, saver.done))
            saver.finish()
            remove(path)
    loom.close()
    del seconds["alone"][0], seconds["torchloom"][0], seconds["dcp"][0]  # cold

    def loses(name: str) -> tuple[float, float]:
        pairs = list(zip(seconds[name], seconds["alone"], strict=True))
        slowdown = statistics.median(statistics.median(during) / statistics.median(alone) for during, alone in pairs)
        lost = statistics.median(sum(during) - len(during) * statistics.fmean(alone) for during, alone in pairs)
        return slowdown, lost * 1000

    def row(name: str) -> tuple[object, ...]:
        steps = [second * 1000 for second in itertools.chain(*seconds[name])]
        told = () if name == "alone" else loses(name)
        return name, statistics.median(steps), min(steps), max(steps), len(steps) / rounds, *told

    head = ("", "median", "min", "max", "steps", "slowdown", "lost in all")
    table(f"a training step on one thread while a save is written, ms ({rounds} rounds)", [head, *map(row, savers)])
    ours, theirs = loses("torchloom"), loses("dcp")
    return {
        "behind_slowdown": ours[0],
        "behind_slowdown_dcp": theirs[0],
        "behind_lost_ms": ours[1],
        "behind_lost_ms_dcp": theirs[1],
    }


def _steps(step: Callable[[], None], over: Callable[[], bool]) -> list[float]:
    """Seconds of each step until it is over; at least one."""
    with _one_thread():
        ends = [time.perf_counter()]
        while len(ends) == 1 or not over():
            step()
            ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _small_step() -> Callable[[], None]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(128, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


# ── is it whole? ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _verification(folder: Path, training: Training, rounds: int) -> dict[str, object]:
    """Of what was written just now, so that it is all in memory."""
    loom, plain = _place(folder, "whole", 0), _place(folder, "loaded", 0)
    saver = TorchLoom(training, loom.parent)
    saver.begin(loom)
    saver.finish()
    saver.close()
    TorchSave(training).begin(plain)
    checkpoints = Checkpoints(loom.parent)
    calls: dict[str, Callable[[], object]] = {
        "torchloom, latest()": checkpoints.latest,
        "torch.load": lambda: torch.load(plain, map_location="cpu", mmap=False),
    }
    times: dict[str, Times] = defaultdict(Times)
    for _, name in _shuffled(list(calls), rounds + 1):
        began = time.perf_counter()
        calls[name]()
        times[name].add(time.perf_counter() - began)
    remove(loom)
    remove(plain)
    rows = [(name, *times[name].row()) for name in calls]
    table("checking every byte against loading it, ms", [("", "median", "min", "max", "cold"), *rows])
    verify, load = (times[name].median for name in calls)
    return {"verify_ratio": verify / load, "verify_ms": verify, "torch_load_ms": load}


def _flips(folder: Path, flips: int, seed: int) -> dict[str, object]:
    with _one_thread():  # nothing is timed here, and threads only wait for each other in a checkpoint so small
        found = bitflips.measure(folder, flips, seed)
    rows = [
        (f"{kind}, {where}", count["caught"], count["wrong"] + count["whole"], count["harmless"])
        for kind, places in found.items()
        for where, count in places.items()
    ]
    table(
        f"{flips} flips of one bit in a checkpoint of {bitflips.MEGABYTES} MB, seed {seed}",
        [("", "caught", "silently wrong", "loads as saved"), *rows],
    )
    sums = {kind: places["tensors"] + places["elsewhere"] for kind, places in found.items()}
    return {
        "flips": flips,
        "seed": seed,
        "flips_caught": sums["torchloom"]["caught"],
        "torch_load_caught": sums["torch"]["caught"],
        "torch_silently_wrong": sums["torch"]["wrong"],
        "torch_harmless": sums["torch"]["harmless"],
        "dcp_caught": sums["dcp"]["caught"],
        "dcp_silently_wrong": sums["dcp"]["wrong"],
        "dcp_harmless": sums["dcp"]["harmless"],
    }


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _memory(folder: Path, megabytes: float) -> dict[str, object]:
    """The peak of a process that saves less that of one that does not."""

    def peak(name: str) -> float:
        words = [name, str(megabytes), str(SAVES), str(_place(folder, f"peak-{name}", 0).parent)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peak", *words]
        return int(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout) / 1e6

    none = peak("none")
    extra = {name: peak(name) - none for name in ("torchloom", "dcp")}
    table(f"memory that {SAVES} saves add to a process of {none:,.0f} MB, at the peak, MB", list(extra.items()))
    return {"peak_extra_mb": extra["torchloom"], "peak_extra_dcp_mb": extra["dcp"]}


if __name__ == "__main__":
    main()

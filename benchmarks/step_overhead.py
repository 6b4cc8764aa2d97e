"""What step() costs a training loop while a real weaver listens.

The same process trains with and without step(), in short blocks in the order A B B A, so that whatever drifts (clock
speed, neighbours) hits both alike; each such quadruple gives one ratio, and the median of those counts. The thread
that beats runs through all blocks and so would not show in that ratio: all the CPU time it used is added, as if
every microsecond of it had been taken from training.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.plane import plane
from benchmarks.report import finish, quantile, table
from torchloom.settings import Settings
from torchloom.threadlet.threadlet import Threadlet, attach

STEP_SECONDS = 1e-3
BLOCK = 20
HOT_CALLS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="quadruples of blocks (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    rounds = 10 if args.quick else args.rounds
    with plane() as settings:
        finish("step_overhead", measure(settings, rounds))


def measure(settings: Settings, rounds: int) -> dict[str, object]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, batch = _training_step(torch)
    threadlet = attach(job="bench", replica="step", rank=0, world_size=1, settings=settings)
    try:
        _wait_connected(threadlet)
        ratios, calls, plain, share = _interleaved(train, threadlet, batch, rounds)
        hot = _hot(threadlet, train(), batch)
    finally:
        threadlet.close()
    paired = statistics.median(ratios)
    us = [call / 1000 for call in calls]
    figures: dict[str, object] = {
        "p50_us": quantile(us, 0.5),
        "p99_us": quantile(us, 0.99),
        "slowdown": paired + share,
        "slowdown_paired": paired,
        "link_cpu_share": share,
        "hot_p50_us": quantile([call / 1000 for call in hot], 0.5),
        "step_ms": statistics.median(plain) * 1000,
        "rounds": rounds,
        "calls": len(calls),
    }
    spread = statistics.quantiles(ratios, n=4)
    table(
        f"step() in a training step of {figures['step_ms']:.2f} ms, {len(calls):,} calls, a live link",
        [
            ("", "p50", "p99", "max"),
            ("step(), µs", figures["p50_us"], figures["p99_us"], max(us)),
            ("step() in a bare loop, µs", figures["hot_p50_us"], quantile(hot, 0.99) / 1000, max(hot) / 1000),
        ],
    )
    table(
        f"with against without, {rounds} quadruples of 4 × {BLOCK} steps",
        [
            ("median ratio (quartiles)", f"{paired:.4f} ({spread[0]:.4f} – {spread[2]:.4f})"),
            ("CPU share of the beating thread", f"{share:.4%}"),
            ("slowdown: both together", f"{paired + share:.4f}"),
        ],
    )
    return figures


def _training_step(torch: Any) -> tuple[Callable[[], Any], int]:
    """A step of a small network that takes about a millisecond here, whatever machine this is."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()

    def of(batch: int) -> Callable[[], Any]:
        inputs, labels = torch.randn(batch, 128), torch.randint(0, 10, (batch,))

        def train() -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            return loss

        return train

    batch = 32
    while (took := _typical_seconds(of(batch))) < STEP_SECONDS and batch < 4096:
        batch = max(batch + 16, int(batch * min(2.0, STEP_SECONDS / took)))
    return of(batch), batch


def _typical_seconds(train: Callable[[], Any], count: int = 100) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - began)
    return quantile(seconds, 0.05)  # of an undisturbed step, on a machine that others use too


def _wait_connected(threadlet: Threadlet) -> None:
    deadline = time.monotonic() + 10
    while not threadlet.connected:
        if time.monotonic() > deadline:
            raise RuntimeError("the threadlet found no control plane")
        time.sleep(0.02)
    time.sleep(1.5)  # past the hello and the first beat


def _interleaved(
    train: Callable[[], Any], threadlet: Threadlet, batch: int, rounds: int
) -> tuple[list[float], list[float], list[float], float]:
    """Ratios of the quadruples, nanoseconds of each step() call, seconds of plain steps, the link's CPU share."""
    ratios: list[float] = []
    calls: list[float] = []
    plain: list[float] = []
    empty: list[float] = []
    clock = time.perf_counter_ns

    def without() -> float:
        ends = [clock()]
        for _ in range(BLOCK):
            loss = train()  # noqa: F841  as in the other loop: it lives until the next one is there
            before = clock()  # both loops read the clock equally often, and this tells what reading it costs
            ends.append(clock())
            empty.append(ends[-1] - before)
        took = _undisturbed(ends)
        plain.append(took)
        return took

    def with_threadlet() -> float:
        ends = [clock()]
        for _ in range(BLOCK):
            loss = train()
            before = clock()
            threadlet.step(loss=loss, samples=batch)
            ends.append(clock())
            calls.append(ends[-1] - before)
        return _undisturbed(ends)

    without()
    with_threadlet()
    for warm_up in (calls, plain, empty):
        warm_up.clear()
    began, used = time.monotonic(), _link_cpu_seconds()
    for _ in range(rounds):
        a, b, c, d = without(), with_threadlet(), with_threadlet(), without()
        ratios.append((b + c) / (a + d))
    share = (_link_cpu_seconds() - used) / (time.monotonic() - began)
    reading = statistics.median(empty)
    return ratios, [call - reading for call in calls], plain, share


def _undisturbed(ends: list[int]) -> float:
    """Mean seconds of a step in a block, without its slowest fifth: where another process had the core."""
    steps = sorted(after - before for before, after in itertools.pairwise(ends))[: BLOCK * 4 // 5]
    return statistics.fmean(steps) / 1e9


def _link_cpu_seconds() -> float:
    """CPU time of torchLoom's threads in this process."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("torchloom") and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in ours if thread.ident)


def _hot(threadlet: Threadlet, loss: Any, batch: int) -> list[int]:
    """The call alone, again and again: its cost with everything in the caches."""
    clock = time.perf_counter_ns
    calls = []
    for _ in range(HOT_CALLS):
        before = clock()
        threadlet.step(loss=loss, samples=batch)
        calls.append(clock() - before)
    return calls


if __name__ == "__main__":
    main()

"""What a rank itself needs for a step, without waiting: for real peers over gloo, for a real DataLoader."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.threadlet.training_process import Outside, running, seen
from torchloom.shared.liveness_page import COLLECTIVES
from torchloom.threadlet.metrics import wait_times
from torchloom.threadlet.metrics.meter import Meter

SLOW = 0.1
"""Seconds that rank 1 needs more than rank 0, in each step."""
SETUP = f"""
import hashlib, json, os, sys, time, torch, torchloom
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
torch.manual_seed(0)
rank, size, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["STORE"]
loom = torchloom.attach("job", "hi")
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
meter = loom._meter
while meter is not None and meter.waits_from is None: time.sleep(0.01)
dist.barrier()

def slow():
    if rank == 1: time.sleep({SLOW})

class Net(torch.nn.Module):
    def __init__(self, *more):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), *more, torch.nn.Linear(8, 1))
    def forward(self, x):
        slow()
        return self.layers(x)

def train(model, of=lambda out: out, steps=12, forwards=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(of(model(torch.ones(2, 8) * (rank + 1))).square().mean() for _ in range(forwards))
        loss.backward()
        optimizer.step()
        loom.step(loss=loss)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()

def tell(way, digest=""):
    times = None if meter is None else meter.take().times
    print(json.dumps([way, times and times.own, times and times.p50, digest]), flush=True)
    loom.resume_at(0)
"""
WAYS = """
class Named(Net):
    def forward(self, x): return {"out": super().forward(x), "about": "text"}

class Buffered(Net):
    def forward(self, x): return self.layers(x)

tell("backward", train(DistributedDataParallel(Net())))
tell("two forwards", train(DistributedDataParallel(Net(), broadcast_buffers=False), forwards=2))
tell("a result with names", train(DistributedDataParallel(Named()), of=lambda out: out["out"]))
buffered = DistributedDataParallel(Buffered(torch.nn.BatchNorm1d(8)))
buffered.register_forward_pre_hook(lambda *_: slow())
tell("buffers before forward", train(buffered))
x = torch.ones(4)
for way, wait in {
    "all_reduce": lambda: dist.all_reduce(x),
    "async": lambda: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda: dist.broadcast(x, 1),
    "barrier": lambda: dist.barrier(),
    "all_gather": lambda: dist.all_gather([torch.ones(4), torch.ones(4)], x),
    "objects": lambda: dist.all_gather_object([None, None], 1),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(2), x),
    "send and receive": lambda: dist.recv(x, 1) if rank == 0 else dist.send(x, 0),
}.items():
    for _ in range(5):
        slow()
        wait()
        loom.step()
    tell(way)
"""
COMPILED = """
tell("whole", train(torch.compile(DistributedDataParallel(Net()), backend="eager"), steps=3))
tell("inner", train(DistributedDataParallel(torch.compile(Net(), backend="eager")), steps=3))
tell("plain", train(DistributedDataParallel(Net()), steps=3))
"""


class Told(NamedTuple):
    way: str
    own: float | None
    p50: float | None
    digest: str


@contextmanager
def ranks(script: str, folder: Path, size: int = 2, **env: str) -> Iterator[list[Outside]]:
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        common = {"STORE": str(folder / "store"), "WORLD_SIZE": str(size)} | env
        yield [
            stack.enter_context(running(SETUP + script, folder, RANK=str(rank), LOCAL_RANK=str(rank), **common))
            for rank in range(size)
        ]


def told(script: str, folder: Path, size: int = 2, **env: str) -> list[list[Told]]:
    """What each rank said."""
    with ranks(script, folder, size, **env) as all_ranks:
        ended = [rank.process.communicate(timeout=100) for rank in all_ranks]
    assert {rank.process.returncode for rank in all_ranks} == {0}, ended
    return [[Told(*json.loads(line)) for line in out.splitlines()] for out, _ in ended]


@pytest.mark.long
def test_a_rank_that_waits_for_a_slow_one_has_a_small_time_of_its_own(tmp_path: Path) -> None:
    waiting_rank, slow_rank = told(WAYS, tmp_path)
    assert len(waiting_rank) == 12
    for waits, slow in zip(waiting_rank, slow_rank, strict=True):
        assert None not in (waits.own, waits.p50, slow.own), waits.way
        assert slow.own >= SLOW, slow.way  # type: ignore[operator]
        # A message may arrive sooner than the one of the step before: its steps differ by that from the slow rank's.
        assert waits.p50 >= 0.9 * SLOW, waits.way  # type: ignore[operator]
        assert waits.own < slow.own - SLOW / 2, waits.way  # type: ignore[operator]  # on a busy machine both take longer


@pytest.mark.long
def test_training_computes_the_same_bits_compiled_or_not(tmp_path: Path) -> None:
    (timed,) = told(COMPILED, tmp_path / "timed", size=1)
    (plain,) = told(COMPILED, tmp_path / "plain", size=1, TORCHLOOM_OFF="1")
    assert [one.own for one in plain] == [None] * 3
    assert None not in [one.own for one in timed]
    assert [one.digest for one in timed] == [one.digest for one in plain]


@pytest.mark.long
def test_a_rank_in_a_collective_has_begun_more_of_them_than_the_one_it_waits_for(tmp_path: Path) -> None:
    script = """
print("ready", flush=True)
if rank == 1: input()
dist.all_reduce(torch.ones(1))
input()
"""
    with ranks(script, tmp_path) as both:
        assert [rank.line() for rank in both] == ["ready", "ready"]
        waits, late = (rank.page() for rank in both)
        seen(lambda: waits.marks[COLLECTIVES] == late.marks[COLLECTIVES] + 1 > 1, "the difference")
        both[1].tell()
        seen(lambda: waits.marks[COLLECTIVES] == late.marks[COLLECTIVES], "the same")


# ── in this process ──────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset[int]):
    """Each item takes a second of the test's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError
        self._clock.now += 1
        return index


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Iterator[Meter]:
    meter = Meter(clock)
    wait_times.follow(meter)
    yield meter
    wait_times.unfollow(meter)


def test_waiting_for_a_loader_is_told(meter: Meter, clock: Clock) -> None:
    meter.step(None, None, None, {})
    seen = []
    for batch in DataLoader(Slow(clock), batch_size=2):
        clock.now += 10
        seen.append(batch.tolist())
        meter.step(None, None, None, {})
    times = meter.take().times
    assert seen == [[0, 1], [2, 3]]
    assert times is not None
    assert (times.p50, times.data, times.own) == (12, 2, None)


def test_a_loader_on_another_thread_is_not_waited_for(meter: Meter, clock: Clock) -> None:
    thread = threading.Thread(target=lambda: list(DataLoader(Slow(clock))))
    thread.start()
    thread.join()
    assert meter.loading.latest == 0


def test_a_loader_used_in_a_phase_is_part_of_it(meter: Meter, clock: Clock) -> None:
    with meter.aside(meter.gaps):
        list(DataLoader(Slow(clock)))
    assert (meter.loading.latest, meter.gaps.of(1)) == (0, 4)


def test_torch_is_as_it_was_when_the_last_one_has_left() -> None:
    before = _BaseDataLoaderIter.__next__
    one, other = Meter(), Meter()
    one.thread, other.thread = 1, 2
    for _ in range(2):
        wait_times.follow(one)
        wait_times.follow(other)
    assert _BaseDataLoaderIter.__next__ is not before
    wait_times.unfollow(one)
    assert _BaseDataLoaderIter.__next__ is not before
    wait_times.unfollow(other)
    assert _BaseDataLoaderIter.__next__ is before
    wait_times.follow(one)  # a last tick of a link that is about to end
    assert _BaseDataLoaderIter.__next__ is before


def test_this_torch_has_all_that_is_timed(meter: Meter, tmp_path: Path) -> None:
    work, send, forward = dist.Work.wait, dist._broadcast_coalesced, DistributedDataParallel.forward
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wait_times.follow(meter)
        missing = [
            name
            for name, now, before in (
                ("Work.wait", dist.Work.wait, work),
                ("_broadcast_coalesced", dist._broadcast_coalesced, send),
                ("DistributedDataParallel.forward", DistributedDataParallel.forward, forward),
            )
            if now is before
        ]
        assert not missing, f"torch {torch.__version__} does not let these be timed"
        assert meter.waits_from is not None
    finally:
        dist.destroy_process_group()
    wait_times.follow(meter)
    assert meter.waits_from is None
    wait_times.unfollow(meter)
    assert (dist.Work.wait, dist._broadcast_coalesced) == (work, send)
    assert DistributedDataParallel.forward is forward

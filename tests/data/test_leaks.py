"""Nothing is left: no process, no open file, no thread and no shared memory, however an iteration ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from tests.data.samples import Failing, Large, kill, loaders, open_files, processes, slots
from torchloom.data import ElasticLoader


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    torch.accelerator.is_available()
    files, threads = open_files(), threading.active_count()
    yield
    assert processes() == []
    assert not open_files() - files
    assert threading.active_count() <= threads
    gc.collect()
    assert slots() == 0


def make(**arguments: Any) -> ElasticLoader:
    return ElasticLoader(Large(40), **{"batch_size": 4, "num_workers": 2} | arguments)


@pytest.mark.parametrize("persistent", [False, True])
def test_after_epochs(persistent: bool) -> None:
    loader = make(persistent_workers=persistent)
    for _ in range(3):
        for batch in loader:
            assert batch.shape[0] == 4
    assert len(processes()) == (3 if persistent else 0)


def test_after_a_break() -> None:
    for _ in make():
        break


def test_after_del() -> None:
    loader = make(persistent_workers=True)
    iterator = iter(loader)
    batch = next(iterator)
    del loader
    assert torch.equal(next(iterator)[:, 0], torch.arange(4.0, 8.0)), "the iterator still has its loaders"
    del iterator
    assert float(batch[3, 5]) == 3.0, "and the batch its memory"


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(make(persistent_workers=True))
    assert len(list(iterator)) == 10


def test_after_an_exception_of_the_dataset() -> None:
    with pytest.raises(ValueError):
        list(ElasticLoader(Failing(40, 9, ValueError()), batch_size=4, num_workers=2))


def test_after_an_exception_of_the_training_loop() -> None:
    try:
        for _ in make():
            raise KeyError
    except KeyError:
        pass


def fail_in_mid_epoch() -> None:
    iterator = iter(make(persistent_workers=True))
    for _ in iterator:
        raise SystemExit(3)


def test_when_training_in_a_process_of_multiprocessing_fails() -> None:
    """Such a process ends without `atexit`, and waits for its own children."""
    training = multiprocessing.get_context("fork").Process(target=fail_in_mid_epoch)
    training.start()
    training.join(60)
    code = training.exitcode
    training.kill()
    assert code == 3


def test_after_resizes_and_kills() -> None:
    loader = make(kill_limit=100)
    for number, _ in enumerate(loader):
        loader.resize(number % 4)
        for process in loaders()[:1]:
            kill(process)


def test_batches_that_are_kept_cost_memory_and_no_files() -> None:
    files = open_files()
    kept = list(make(num_workers=1))
    assert not open_files() - files
    assert slots() == len(kept)
    assert [float(batch[0, 0]) for batch in kept] == [float(index) for index in range(0, 40, 4)]


def test_memory_is_used_again() -> None:
    most = 0
    for _ in make(num_workers=1):
        most = max(most, slots())
    assert most <= 5, "prefetched batches, the one in use and the one before"


def test_surplus_memory_is_given_back_by_persistent_loaders() -> None:
    loader = ElasticLoader(Large(200), batch_size=4, num_workers=1, persistent_workers=True)
    kept = list(loader)
    assert slots() == len(kept) == 50
    del kept
    list(loader)
    for _ in loader:
        pass
    assert slots() < 25


def test_a_process_forked_from_training_does_not_keep_loaders_alive() -> None:
    iterator = iter(make())
    next(iterator)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    del iterator
    assert [process.pid for process in processes()] == [child]
    os.close(writing)
    os.waitpid(child, 0)


def test_a_copy_of_an_iterator_in_a_forked_process_closes_nothing() -> None:
    iterator = iter(make())
    batch = next(iterator)
    child = os.fork()
    if child == 0:
        sys.excepthook = lambda *_: os._exit(1)
        del iterator, batch
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 9


SCRIPT = """
import sys, torch
from tests.data.samples import Large, processes
from torchloom.data import ElasticLoader
iterators = [iter(ElasticLoader(Large(40), batch_size=4, num_workers=2)) for _ in range(2)]
for iterator in iterators:
    next(iterator)
while len(processes()) < 6:
    pass
print(*(process.pid for process in processes()), flush=True)
sys.stdin.readline()
{end}
"""


def trainer(end: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(end=end)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    assert len(found) == 6
    return process, found


@pytest.mark.parametrize("end", ["sys.exit(3)", "import os; os._exit(3)"])
def test_when_training_exits(end: str) -> None:
    process, found = trainer(end)
    process.communicate("\n", timeout=60)
    assert process.returncode == 3
    assert psutil.wait_procs(found, timeout=60)[1] == []


def test_when_training_is_killed() -> None:
    process, found = trainer("")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert psutil.wait_procs(found, timeout=60)[1] == []


FORK = """
import os
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def test_when_training_is_killed_and_another_process_that_it_forked_is_not() -> None:
    process, found = trainer(FORK)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait(60)
    try:
        assert psutil.wait_procs(found, timeout=60)[1] == []
        assert child.is_running()
    finally:
        child.kill()
        process.communicate(timeout=60)

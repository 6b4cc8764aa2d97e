"""Loaders that are threads of the training process keep the promises of loader processes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from tests.data.samples import Augmented, Failing, Held, Large, Lines, Nested, Numbers, Seeded, equal, processes
from torchloom.data import ElasticLoader, make_elastic, sample_seed, stage_times
from torchloom.data.loaders import loader_threads, transport
from torchloom.errors import BadInput, LoaderShortage, LoaderTimeout

MODES = [("process", 2), ("thread", 0), ("thread", 1), ("thread", 3)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if threads():
        gc.collect()
    assert threads() == []
    assert processes() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loom-loader-")]


def make(dataset: Any, count: int = 2, workers: Any = "thread", **arguments: Any) -> ElasticLoader:
    torch.manual_seed(11)
    arguments = {"batch_size": 4, "shuffle": True} | arguments
    return ElasticLoader(dataset, num_workers=count, workers=workers, **arguments)


def columns(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch[:, 0]]


# The same batches


@pytest.mark.parametrize("dataset", [Large(20), Nested(20)], ids=["large", "nested"])
def test_equal_to_torch(dataset: Numbers) -> None:
    ours = list(make(dataset))
    torch.manual_seed(11)
    assert equal(ours, list(DataLoader(dataset, batch_size=4, shuffle=True)))


class SeededTogether(Seeded):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(sample_seed(), index) for index in indices]


def collate_with_seed(samples: Any) -> Any:
    return sample_seed(), default_collate(samples)


@pytest.mark.parametrize(("workers", "count"), MODES)
@pytest.mark.parametrize(
    ("dataset", "size"),
    [(Seeded(23), 4), (Seeded(23), None), (SeededTogether(23), 4)],
    ids=["getitem", "single", "getitems"],
)
def test_the_seeds_of_samples_are_the_same_in_processes_and_threads(
    dataset: Numbers, size: int | None, workers: Any, count: int
) -> None:
    def epochs(loader: ElasticLoader) -> list[list[Any]]:
        return [list(loader), list(loader)]

    arguments = {"batch_size": size, "collate_fn": collate_with_seed}
    alone = epochs(make(dataset, 0, "process", **arguments))
    assert equal(alone, epochs(make(dataset, count, workers, **arguments)))
    assert not equal(alone[0], alone[1])


class Seeds(Numbers):
    def __getitem__(self, index: int) -> Any:
        return sample_seed(), torch.initial_seed()


def test_the_seed_of_a_sample_is_that_of_the_generators() -> None:
    seeds, initial = default_collate(list(ElasticLoader(Seeds(20), batch_size=None)))
    assert torch.equal(seeds, initial)
    assert len(set(seeds.tolist())) == 20
    first = ElasticLoader(Seeds(20), 4, collate_fn=lambda samples: sample_seed() == samples[0][0])
    assert all(first), "in collate_fn it is that of the first sample"
    by_worker, _ = default_collate(list(ElasticLoader(Seeds(20), None, num_workers=1, seeding="worker")))
    assert len(set(by_worker.tolist())) == 20


class SeededLines(Lines):
    def sample(self, index: int) -> Any:
        return sample_seed(), torch.initial_seed()


def test_the_samples_of_shards_have_seeds_too() -> None:
    def epoch(count: int, collate: Any = default_collate, **arguments: Any) -> list[Any]:
        torch.manual_seed(3)
        return list(ElasticLoader(SeededLines(40), 4, shards=3, num_workers=count, collate_fn=collate, **arguments))

    alone = epoch(0)
    seeds, initial = (torch.cat(column) for column in zip(*alone, strict=True))
    assert torch.equal(seeds, initial)
    assert len(set(seeds.tolist())) == len(seeds)
    assert equal(alone, epoch(2))
    assert torch.equal(torch.cat([seeds for seeds, _ in epoch(2, seeding="worker")]), seeds)
    assert all(epoch(0, lambda samples: sample_seed() == samples[0][0]))


class LoadingInside(Numbers):
    def __getitem__(self, index: int) -> Any:
        before = sample_seed()
        list(ElasticLoader(Seeds(3)))
        return sample_seed() == before


def test_a_dataset_that_loads_inside_keeps_its_seed() -> None:
    assert all(ElasticLoader(LoadingInside(3), batch_size=None))


def test_without_a_sample_there_is_no_seed() -> None:
    errors: list[str] = []

    def load_and_ask() -> None:
        list(ElasticLoader(Seeds(3)))
        try:
            sample_seed()
        except BadInput as error:
            errors.append(error.message)

    thread = threading.Thread(target=load_and_ask)  # in this one, a test may have interrupted the end of a load
    thread.start()
    thread.join()
    assert errors == ["sample_seed() was called while no sample is being loaded"]


def generator_states() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), *numpy.random.get_state()[1:3]]  # type: ignore[index]


@pytest.mark.parametrize("count", [0, 2])
def test_the_generators_of_the_process_are_neither_seeded_nor_restored(count: int) -> None:
    iterator = iter(make(Seeded(20), count, shuffle=False))
    before = generator_states()
    list(iterator)
    assert equal(generator_states(), before)
    iterator = iter(make(Augmented(20), count, shuffle=False))
    before = generator_states()
    list(iterator)
    assert not equal(generator_states(), before), "what the dataset draws is drawn"


# Changes while it runs


@pytest.mark.parametrize("persistent", [False, True])
def test_resizes_at_every_batch_change_nothing(persistent: bool) -> None:
    alone = list(make(Seeded(200), 0, "process"))
    draw = random.Random(1)
    loader = make(Seeded(200), 2, persistent_workers=persistent)
    batches = []
    for batch in loader:
        batches.append(batch)
        loader.resize(draw.choice([0, 1, 2, 3]))
    assert equal(alone, batches)
    while len(threads()) > (loader.num_workers if persistent else 0):
        pass


def test_resizes_from_other_threads() -> None:
    alone = list(make(Seeded(400), 0, "process"))
    loader = make(Seeded(400), 1)
    iterator = iter(loader)
    batches = [next(iterator)]

    def resize(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(50):
            loader.resize(draw.randrange(4))

    others = [threading.Thread(target=resize, args=(seed,)) for seed in range(2)]
    for thread in others:
        thread.start()
    batches += iterator
    for thread in others:
        thread.join()
    assert equal(alone, batches)


def test_growing_starts_at_once_while_training_waits_for_a_batch() -> None:
    gate: SimpleQueue[bool] = SimpleQueue()
    loader = make(Held(8, gate), 1, batch_size=1, shuffle=False, prefetch_factor=1)
    iterator = iter(loader)
    batches: list[Any] = []
    waiting = threading.Thread(target=lambda: batches.extend(iterator))
    waiting.start()
    loader.resize(2)
    while len(threads()) < 2:
        pass
    gate.put(True)
    waiting.join()
    assert columns(batches) == list(range(8))


def test_a_new_batch_size_is_exact() -> None:
    def batches(loader: ElasticLoader) -> list[Any]:
        iterator = iter(loader)
        taken = [next(iterator), next(iterator)]
        loader.change_batch_size(7)
        return [*taken, *iterator]

    assert equal(batches(make(Seeded(50), 0, "process")), batches(make(Seeded(50), 3)))


@pytest.mark.parametrize("persistent", [False, True])
def test_every_batch_can_be_resumed_in_processes_and_threads(persistent: bool) -> None:
    loader = make(Seeded(22), persistent_workers=persistent)
    states, batches = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    for number, state in enumerate(states, 1):
        for workers, count in (("process", 0), ("thread", 0), ("thread", 2)):
            resumed = make(Seeded(22), count, workers)
            resumed.load_state_dict(state)
            assert equal(list(resumed), batches[number:])


def test_persistent_threads_are_the_same_in_the_next_epoch() -> None:
    loader = make(Seeded(20), persistent_workers=True)
    list(loader)
    first = threads()
    iterator = iter(loader)
    next(iterator)
    batches = list(loader)
    assert len(batches) == 5, "nothing of the iteration that was left"
    assert threads() == first
    with pytest.raises(RuntimeError, match="later iteration"):
        next(iterator)


def test_out_of_order_the_first_batch_to_arrive_comes_first() -> None:
    gate: SimpleQueue[bool] = SimpleQueue()
    iterator = iter(make(Held(8, gate), shuffle=False, batch_size=2, in_order=False))
    first = next(iterator)
    gate.put(True)
    assert columns([first]) != [0, 1]
    assert sorted(columns([first, *iterator])) == list(range(8))


# Exceptions, timeouts and interrupts


def fail(*_: Any) -> None:
    raise OSError("prepared badly")


@pytest.mark.parametrize(
    ("dataset", "arguments", "kind"),
    [
        (Failing(8, 2, ValueError("no sample")), {}, ValueError),
        (Failing(8, 2, SystemExit(3)), {}, SystemExit),  # type: ignore[arg-type]
        (Numbers(8), {"collate_fn": fail}, OSError),
        (Numbers(8), {"worker_init_fn": fail}, OSError),
    ],
    ids=["dataset", "exit", "collate_fn", "worker_init_fn"],
)
def test_exceptions_arrive_with_their_type_and_traceback(dataset: Any, arguments: Any, kind: Any) -> None:
    iterator = iter(make(dataset, 1, batch_size=2, shuffle=False, **arguments))
    if not arguments:
        next(iterator)
    with pytest.raises(kind, match=r"in DataLoader worker thread 0(.|\n)*Traceback"):
        next(iterator)
    if not arguments:
        assert columns(iterator) == [4, 5, 6, 7]


def test_a_timeout() -> None:
    gate: SimpleQueue[bool] = SimpleQueue()
    iterator = iter(make(Held(4, gate), 1, batch_size=2, shuffle=False, timeout=0.01))
    with pytest.raises(LoaderTimeout):
        next(iterator)
    gate.put(True)
    while True:
        try:
            assert columns(iterator) == [0, 1, 2, 3]
            break
        except LoaderTimeout:
            continue


def test_a_signal_handler_can_end_the_wait_and_nothing_is_lost() -> None:
    gate: SimpleQueue[bool] = SimpleQueue()
    iterator = iter(make(Held(8, gate), 1, shuffle=False))
    training, is_over = threading.main_thread().ident, threading.Event()

    def handle(*_: object) -> None:
        if not is_over.is_set():
            is_over.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        while not is_over.is_set():
            if iterator._waits_since is not None:
                signal.pthread_kill(training or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    other = threading.Thread(target=interrupt)
    try:
        other.start()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    finally:
        is_over.set()
        other.join()
        signal.signal(signal.SIGALRM, before)
    gate.put(True)
    assert columns(iterator) == list(range(8))


def test_a_thread_that_cannot_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(loader_threads._LoaderThread, "start", refuse)
        iterator = iter(make(Numbers(8), shuffle=False))
        with pytest.raises(LoaderShortage):
            next(iterator)
    assert columns(iterator) == list(range(8))


# The end


def end_by_break(iterator: Any) -> None:
    for _ in iterator:
        break


def end_by_exception(iterator: Any) -> None:
    try:
        for _ in iterator:
            raise KeyError
    except KeyError:
        pass


def end_by_resize(iterator: Any) -> None:
    next(iterator)
    iterator.resize(0)


@pytest.mark.parametrize("end", [list, next, end_by_break, end_by_exception, end_by_resize])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_thread_is_left(end: Any, persistent: bool) -> None:
    loader = make(Large(40), 3, persistent_workers=persistent)
    end(iter(loader))
    del loader
    assert threads() == []


class Trainer:
    """Its loader has a method of it, so that idle threads must not keep what they load with."""

    def __init__(self) -> None:
        self.loader = make(Numbers(20), collate_fn=self.collate, persistent_workers=True)

    def collate(self, samples: Any) -> Any:
        return default_collate(samples)


def test_persistent_threads_do_not_keep_the_owner_of_their_loader() -> None:
    trainer = Trainer()
    list(trainer.loader)
    assert len(threads()) == 2
    del trainer
    gc.collect()
    assert threads() == []


@pytest.mark.filterwarnings("ignore:loader:RuntimeWarning")
def test_a_thread_that_ends_unexpectedly_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(make(Numbers(20), count=0))
    work, fails = loader_threads._LoaderThread._work, [True]

    def work_or_fail(self: Any, failure: Any) -> bool:
        if fails.pop() if fails else False:
            raise MemoryError
        return work(self, failure)

    def report(_: Any) -> None:
        threading.Event().wait(0.2)  # as slow as a log on a full disk

    monkeypatch.setattr(threading, "excepthook", report)
    monkeypatch.setattr(loader_threads._LoaderThread, "_work", work_or_fail)
    assert equal(alone, list(make(Numbers(20))))
    assert fails == []
    assert threads() == []


class Stuck(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> Any:
        self.has_begun.set()
        self.may_end.wait()
        return super().__getitem__(index)


def test_a_thread_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_threads, "GRACE_SECONDS", 0.01)
    dataset = Stuck(8)
    iterator = iter(make(dataset, 1))
    dataset.has_begun.wait()
    del iterator
    (thread,) = threads()
    dataset.may_end.set()
    thread.join()


def test_the_end_wakes_the_thread_that_waits_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_threads, "GRACE_SECONDS", 0.0)
    dataset = Stuck(8)
    iterator = iter(make(dataset, 1))
    waiting = threading.Thread(target=lambda: list(iterator))
    waiting.start()
    dataset.has_begun.wait()
    while iterator._waits_since is None:
        pass
    iterator.close()
    waiting.join()
    dataset.may_end.set()
    for thread in threads():
        thread.join()


class Closing(Numbers):
    iterator: Any = None
    has_closed = False

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            self.iterator.close()
            self.has_closed = True
        return super().__getitem__(index)


def test_a_loader_thread_can_end_the_iteration() -> None:
    """As it does when it collects the garbage of which the iterator is part."""
    dataset = Closing(8)
    iterator = iter(make(dataset, 1, batch_size=1, shuffle=False, prefetch_factor=1))
    dataset.iterator = iterator
    assert columns(iterator) == [0, 1, 2, 3]
    for thread in threads():
        thread.join()
    assert dataset.has_closed


def test_a_copy_of_an_iterator_in_a_forked_process_closes_nothing() -> None:
    iterator = iter(make(Numbers(40)))
    next(iterator)
    child = os.fork()
    if child == 0:
        sys.excepthook = lambda *_: os._exit(1)
        del iterator
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 9


SCRIPT = """
import torch
from tests.data.samples import Large
from torchloom.data import ElasticLoader
iterator = iter(ElasticLoader(Large(400), batch_size=4, num_workers=2, workers="thread"))
next(iterator)
"""


@pytest.mark.long
def test_training_exits_without_noise() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# What a thread is, and is not


class Here(Numbers):
    def __getitem__(self, index: int) -> Any:
        return os.getpid(), get_worker_info() is None, torch.get_num_threads(), threading.current_thread().name


def test_a_thread_is_prepared_once_and_has_no_worker_info() -> None:
    prepared: list[tuple[int, str]] = []

    def prepare(number: int) -> None:
        prepared.append((number, threading.current_thread().name))

    seen = {tuple(sample) for sample in make(Here(40), 2, batch_size=None, worker_init_fn=prepare)}
    assert sorted(prepared) == [(0, "loom-loader-0"), (1, "loom-loader-1")]
    assert {sample[:3] for sample in seen} == {(os.getpid(), True, torch.get_num_threads())}
    assert {sample[3] for sample in seen} <= {name for _, name in prepared}


def test_a_thread_that_hangs_is_named_with_its_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "HANG_SECONDS", 0.0)
    monkeypatch.setattr(stage_times, "HANG_FACTOR", 0.0)
    dataset = Stuck(8)
    loader = make(dataset, 1, shuffle=False)
    training = threading.Thread(target=lambda: list(loader))
    training.start()
    dataset.has_begun.wait()
    while (trouble := loader.measure().trouble) is None:
        pass
    dataset.may_end.set()
    training.join()
    assert (trouble.what, trouble.pid, trouble.indices) == ("hung", os.getpid(), "[0, 1, 2, 3]")
    assert "in __getitem__" in trouble.stack


def test_decoding_is_counted_in_the_thread_that_decodes() -> None:
    def decode() -> None:
        with stage_times.decoding():
            pass

    other = threading.Thread(target=decode)
    other.start()
    other.join()
    assert stage_times.times_of(0.0, 1.0, 2.0).decode == 0.0
    decode()
    assert stage_times.times_of(0.0, 1.0, 2.0).decode > 0.0


# The argument


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Numbers(4), {"workers": "fibre"}),
        (Numbers(4), {"workers": "thread", "seeding": "worker"}),
        (Numbers(4), {"workers": "thread", "num_workers": 1, "multiprocessing_context": "spawn"}),
        (Stream(), {"workers": "thread"}),
    ],
    ids=["unknown", "seeding", "context", "iterable"],
)
def test_what_needs_processes_is_refused(dataset: Any, arguments: Any) -> None:
    with pytest.raises(BadInput, match=r"workers=|needs loader processes"):
        ElasticLoader(dataset, **arguments)


def test_threads_are_the_default_without_a_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_enabled, expected in ((True, "process"), (False, "thread")):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda is_enabled=is_enabled: is_enabled, raising=False)
        assert ElasticLoader(Numbers(4)).workers == expected
        assert ElasticLoader(Numbers(4), seeding="worker").workers == "process"
        assert ElasticLoader(Numbers(4), num_workers=1, multiprocessing_context="spawn").workers == "process"
        assert ElasticLoader(Numbers(4), workers="process").workers == "process"
    monkeypatch.delattr(sys, "_is_gil_enabled")
    assert ElasticLoader(Numbers(4)).workers == "process"


def test_threads_work_where_processes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "IS_SUPPORTED", False)
    loader = make(Numbers(8), shuffle=False)
    loader.autotune()
    loader.resize(3)
    assert columns(loader) == list(range(8))
    with pytest.raises(BadInput):
        make(Numbers(8), workers="process")


def test_copies_have_threads_too() -> None:
    loader = make(Numbers(400))
    plain = DataLoader(Numbers(400), batch_size=2, num_workers=1)
    copies = [
        copy.deepcopy(loader),
        pickle.loads(pickle.dumps(loader)),
        ElasticLoader.from_dataloader(loader),
        ElasticLoader.from_dataloader(plain, workers="thread"),
        make_elastic(SimpleNamespace(base_dataloader=plain), workers="thread").base_dataloader,
        make_elastic(SimpleNamespace(base_dataloader=loader)).base_dataloader,
    ]
    assert [each.workers for each in copies] == ["thread"] * len(copies)
    assert ElasticLoader.from_dataloader(loader, workers="process").workers == "process"
    for each in copies:
        iterator = iter(each)
        next(iterator)
        assert threads()
        del iterator


class Long(Numbers):
    """Each sample waits for the test."""

    def __init__(self, size: int, gate: SimpleQueue[None]) -> None:
        super().__init__(size)
        self.gate = gate
        self.loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.gate.get()
        self.loaded += 1
        return super().__getitem__(index)


def test_a_thread_ends_after_the_sample_that_it_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_threads, "GRACE_SECONDS", 0.0)
    gate: SimpleQueue[None] = SimpleQueue()
    dataset = Long(1000, gate)
    iterator = iter(make(dataset, 1, batch_size=1000, shuffle=False))
    (thread,) = threads()
    gate.put(None)
    while not dataset.loaded:
        time.sleep(0.001)
    iterator.close()
    gate.put(None)
    thread.join(60)
    assert not thread.is_alive()
    assert dataset.loaded == 2

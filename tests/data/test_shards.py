"""An IterableDataset: the batches of torch, whatever the number of loaders, resizes, deaths and resumes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from tests.data.samples import AugmentedLines, Lines, Numbers, equal, kill, loaders
from torchloom.data import ElasticLoader, shards
from torchloom.data.autotune import Tuner
from torchloom.errors import BadDataset, BadInput, BadState, LoaderDied


class Range(IterableDataset[Any]):
    """As in torch's documentation: `worker_init_fn` gives each worker's copy of the dataset its share."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def share_out(_: int) -> None:
    info = get_worker_info()
    dataset: Any = info.dataset
    size = -(-(dataset.end - dataset.start) // info.num_workers)
    dataset.start += info.id * size
    dataset.end = min(dataset.start + size, dataset.end)


class Stateful(Lines):
    """It continues where it was, and writes down from where each time."""

    def __init__(self, size: int, opened: Path) -> None:
        super().__init__(size)
        self.opened = opened
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        with self.opened.open("a") as file:
            file.write(f"{self.next}\n")
        while self.next < self.size:
            self.next += 1
            yield self.next - 1, random.random()
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Counting(Iterator[int]):
    """An iterator that has a state, over a dataset that has none."""

    def __init__(self, size: int) -> None:
        self.size, self.next, self.loaded = size, 0, 0

    def __next__(self) -> int:
        if self.next == self.size:
            raise StopIteration
        self.next += 1
        return self.next * 1000 + self.loaded

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.loaded = state["next"], 1


class WithIterator(IterableDataset[int]):
    def __iter__(self) -> Counting:
        return Counting(20)


class Generated(IterableDataset[int]):
    """It cannot be copied."""

    def __init__(self, size: int) -> None:
        self.numbers = iter_numbers(size)

    def __iter__(self) -> Iterator[int]:
        return self.numbers


def iter_numbers(size: int) -> Iterator[int]:
    yield from range(size)


class OwnIterator(IterableDataset[int]):
    """It is its own iterator, and its state is kept and changed where it is."""

    def __iter__(self) -> OwnIterator:
        self.left = list(range(20))
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

    def state_dict(self) -> dict[str, list[int]]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.left = state["left"]


class Buffered(Lines):
    """Its state, too, is kept and changed where it is."""

    def __init__(self) -> None:
        self.left = list(range(20))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, list[int]]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.left = state["left"]


class Repeating(IterableDataset[int]):
    """An iterator that begins again after its end."""

    def __iter__(self) -> Repeating:
        self.next = 0
        return self

    def __next__(self) -> int:
        self.next += 1
        if self.next > 5:
            self.next = 0
            raise StopIteration
        return self.next


class Mapped(Lines):
    """A file in memory, which copies share."""

    def __init__(self, file: Path) -> None:
        super().__init__(20)
        self.tokens = numpy.memmap(file, dtype="int64", mode="w+", shape=20)

    def sample(self, index: int) -> Any:
        self.tokens[index] = index
        return index


class Troubled(Lines):
    def sample(self, index: int) -> Any:
        if index == 13:
            raise ValueError("sample 13")
        return index


class Deadly(Lines):
    """Sample 14 kills its loader process."""

    def sample(self, index: int) -> Any:
        if index == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def make(dataset: Any, count: int = 3, **arguments: Any) -> ElasticLoader[Any]:
    torch.manual_seed(11)
    return ElasticLoader(dataset, batch_size=arguments.pop("batch_size", 4), num_workers=count, **arguments)


def collected(iterator: Any) -> list[Any]:
    """Batches, and the exceptions in place of some."""
    results = []
    while True:
        try:
            results.append(next(iterator))
        except StopIteration:
            return results
        except ValueError as error:
            results.append(type(error).__name__)


class TestAsTorch:
    @pytest.mark.parametrize(("size", "drop_last"), [(4, False), (4, True), (None, False)])
    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_the_same_batches_in_the_same_order(self, count: int, size: int | None, drop_last: bool) -> None:
        arguments = {"batch_size": size, "num_workers": count, "drop_last": drop_last}
        torchs = list(DataLoader(Lines(61), **arguments))
        assert equal(torchs, list(ElasticLoader(Lines(61), **arguments)))

    @pytest.mark.parametrize("persistent", [False, True])
    def test_in_every_epoch(self, persistent: bool) -> None:
        arguments = {"batch_size": 4, "num_workers": 3, "persistent_workers": persistent}
        torchs, ours = DataLoader(Lines(61), **arguments), ElasticLoader(Lines(61), **arguments)
        for _ in range(3):
            assert equal(list(torchs), list(ours))

    def test_the_share_of_a_worker_is_what_worker_init_fn_makes_it(self) -> None:
        arguments = {"batch_size": 2, "num_workers": 3, "worker_init_fn": share_out}
        dataset = Range(3, 20)
        torchs = list(DataLoader(dataset, **arguments))
        loader = ElasticLoader(dataset, **arguments)
        assert equal(torchs, list(loader))
        loader.resize(2)
        assert equal(torchs, list(loader))

    def test_the_random_numbers_of_worker_seeding(self) -> None:
        torch.manual_seed(11)
        torchs = list(DataLoader(AugmentedLines(61), batch_size=4, num_workers=3))
        assert equal(torchs, list(make(AugmentedLines(61), seeding="worker")))

    @pytest.mark.parametrize("count", [0, 2])
    def test_an_exception_comes_in_place_of_a_batch_and_ends_the_generator(self, count: int) -> None:
        arguments = {"batch_size": 4, "num_workers": count}
        torchs = collected(iter(DataLoader(Troubled(40), **arguments)))
        assert "ValueError" in torchs
        assert equal(torchs, collected(iter(ElasticLoader(Troubled(40), **arguments))))

    @pytest.mark.parametrize("count", [0, 2])
    def test_an_iterator_that_has_ended_is_not_asked_again(self, count: int) -> None:
        arguments = {"batch_size": None, "num_workers": count}
        assert list(DataLoader(Repeating(), **arguments)) == list(ElasticLoader(Repeating(), **arguments))

    def test_a_dataset_that_cannot_be_copied(self) -> None:
        assert equal(list(DataLoader(Generated(7), num_workers=2)), list(ElasticLoader(Generated(7), num_workers=2)))

    def test_the_length_is_that_of_the_dataset(self) -> None:
        class Sized(Lines):
            def __len__(self) -> int:
                return 9

        loader = ElasticLoader(Sized(9), batch_size=4)
        assert len(loader) == 3
        assert len(list(loader)) == 3
        loader = ElasticLoader(Sized(16), batch_size=4)
        assert len(loader) == 3
        with pytest.warns(UserWarning, match="is 9, and 12 samples were loaded"):
            assert len(list(loader)) == 4
        with pytest.raises(TypeError):
            len(ElasticLoader(Lines(12)))

    @pytest.mark.filterwarnings("error:len")
    def test_a_warning_that_is_an_error_loses_no_batch(self) -> None:
        class Sized(Lines):
            def __len__(self) -> int:
                return 4

        loader = ElasticLoader(Sized(12), batch_size=4)
        assert len(loader) == 1
        iterator, batches, warned = iter(loader), 0, 0
        while True:
            try:
                batches += next(iterator, None) is not None
            except UserWarning:
                warned += 1
            if iterator.position.is_over:
                break
        assert (batches, warned) == (3, 2)


class TestWhateverHappens:
    def test_the_number_of_loaders_makes_no_difference(self) -> None:
        several = list(make(AugmentedLines(90)))
        assert len(several) > 15
        for count in (0, 1, 2):
            loader = make(AugmentedLines(90), shards=3, count=count)
            assert equal(several, list(loader))

    @pytest.mark.parametrize("persistent", [False, True])
    def test_resizes_at_every_batch(self, persistent: bool) -> None:
        several = list(make(AugmentedLines(90)))
        draw = random.Random(3)
        loader = make(AugmentedLines(90), persistent_workers=persistent)
        batches = []
        for batch in loader:
            batches.append(batch)
            loader.resize(draw.choice([0, 1, 2, 3]))
        assert equal(several, batches)

    @pytest.mark.filterwarnings("ignore:loader:RuntimeWarning")
    def test_deaths_and_resizes(self) -> None:
        several = list(make(AugmentedLines(150)))
        draw = random.Random(5)
        loader = make(AugmentedLines(150), kill_limit=1000)
        batches = []
        kills = 0
        for batch in loader:
            batches.append(batch)
            if draw.random() < 0.3:
                loader.resize(draw.choice([1, 2, 3]))
            if (running := loaders()) and draw.random() < 0.3:
                kills += kill(draw.choice(running))
        assert equal(several, batches)
        assert kills > 3

    @pytest.mark.parametrize("count", [1, 3])
    def test_without_an_order_each_shard_keeps_its_own(self, count: int) -> None:
        several = list(make(AugmentedLines(90)))
        loader = make(AugmentedLines(90), count=count, shards=3, in_order=False)
        batches = []
        for batch in loader:
            batches.append(batch)
            loader.resize(len(batches) % 3 + 1)
        by_first = {batch[0][0].item(): batch for batch in batches}
        assert equal(several, [by_first.pop(batch[0][0].item()) for batch in several])
        assert not by_first
        for shard in range(3):
            firsts = [batch[0][0].item() for batch in batches if batch[0][0].item() % 3 == shard]
            assert firsts == sorted(firsts)

    @pytest.mark.filterwarnings("ignore:loader:RuntimeWarning")
    def test_a_batch_that_kills_its_loaders_ends_its_shard(self) -> None:
        loader = make(Deadly(40), count=2)
        iterator = iter(loader)
        batches = [next(iterator), next(iterator)]
        with pytest.raises(LoaderDied, match="while loading batch 1 of shard 0"):
            next(iterator)
        state = loader.state_dict()
        batches += list(iterator)
        of_shard_1 = [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21, 23], [25, 27, 29]]
        assert [batch.tolist() for batch in batches] == [[0, 2, 4, 6], *of_shard_1]
        resumed = make(Deadly(40), count=0, shards=2)
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == of_shard_1[1:], "the training process does not try that batch"

    def test_a_dataset_that_cannot_be_copied_needs_a_loader_for_each_shard(self) -> None:
        with pytest.raises(BadDataset, match="cannot be copied"):
            list(ElasticLoader(Generated(7), num_workers=1, shards=2))
        with pytest.raises(BadDataset, match="cannot be copied"):
            list(ElasticLoader(Generated(7), num_workers=0, shards=1))

    def test_copies_share_a_file_in_memory(self, tmp_path: Path) -> None:
        dataset = Mapped(tmp_path / "tokens")
        list(make(dataset, count=0, shards=1))
        assert dataset.tokens.tolist() == list(range(20))

    def test_the_seed_of_worker_init_fn_does_not_depend_on_the_number_of_loaders(self) -> None:
        def draw(_: int) -> None:
            info = get_worker_info()
            dataset: Any = info.dataset
            dataset.start = dataset.end - int(torch.randint(5, 10, ()))

        several = list(make(Range(0, 20), worker_init_fn=draw))
        for count in (0, 1, 2):
            assert equal(several, list(make(Range(0, 20), count=count, shards=3, worker_init_fn=draw)))

    def test_worker_seeding_leaves_the_generators_of_the_training_process_alone(self) -> None:
        loader = make(Lines(20), count=0, shards=2, seeding="worker")
        iterator = iter(loader)
        before = torch.random.get_rng_state(), random.getstate()
        next(iterator)
        assert torch.equal(before[0], torch.random.get_rng_state())
        assert before[1] == random.getstate()

    @pytest.mark.filterwarnings("ignore:loader:RuntimeWarning")
    def test_a_dataset_with_a_state(self, tmp_path: Path) -> None:
        dataset = Stateful(60, tmp_path / "opened")
        several = list(make(dataset))
        draw = random.Random(7)
        loader = make(dataset, kill_limit=1000)
        batches = []
        for batch in loader:
            batches.append(batch)
            if draw.random() < 0.3:
                loader.resize(draw.choice([0, 1, 2, 3]))
            if (running := loaders()) and draw.random() < 0.2:
                kill(draw.choice(running))
        assert equal(several, batches)

    def test_other_start_methods(self) -> None:
        several = list(make(AugmentedLines(60)))
        loader = make(AugmentedLines(60), count=2, shards=3, multiprocessing_context="spawn")
        assert equal(several, list(loader))


class TestResume:
    @pytest.mark.parametrize("kind", [AugmentedLines, None])
    def test_at_every_batch_with_other_loaders(self, kind: Any, tmp_path: Path) -> None:
        def dataset() -> Any:
            return AugmentedLines(50) if kind else Stateful(20, tmp_path / "opened")

        whole = list(make(dataset()))
        for place in range(len(whole) + 1):
            loader = make(dataset())
            iterator = iter(loader)
            first = [next(iterator) for _ in range(place)]
            state = loader.state_dict()
            iterator.close()
            resumed = make(dataset(), count=place % 3, shards=3)
            resumed.load_state_dict(state)
            assert equal(whole, [*first, *resumed])

    def test_the_random_numbers_of_worker_seeding(self) -> None:
        whole = list(make(AugmentedLines(50), seeding="worker"))
        loader = make(AugmentedLines(50), seeding="worker")
        iterator = iter(loader)
        first = next(iterator)
        state = loader.state_dict()
        iterator.close()
        resumed = make(AugmentedLines(50), seeding="worker")
        resumed.load_state_dict(state)
        assert equal(whole, [first, *resumed])

    def test_a_dataset_with_a_state_begins_there(self, tmp_path: Path) -> None:
        loader = make(Stateful(40, tmp_path / "opened"), count=1)
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
        iterator.close()
        (tmp_path / "opened").unlink()
        loader = make(Stateful(40, tmp_path / "opened"), count=1)
        loader.load_state_dict(state)
        assert len(list(loader)) == 4
        assert (tmp_path / "opened").read_text() == "24\n"

    @pytest.mark.parametrize("kind", [OwnIterator, Buffered])
    def test_a_dataset_that_changes_its_state_where_it_is(self, kind: Any) -> None:
        whole = list(make(kind(), count=1))
        loader = make(kind(), count=1)
        iterator = iter(loader)
        first = [next(iterator), next(iterator)]
        state = loader.state_dict()
        iterator.close()
        for _ in range(2):
            resumed = make(kind(), count=0, shards=1)
            resumed.load_state_dict(state)
            assert equal(whole, [*first, *resumed])

    def test_a_generator_of_its_own_continues(self) -> None:
        def with_generator() -> ElasticLoader[Any]:
            return make(AugmentedLines(20), generator=torch.Generator().manual_seed(4))

        loader = with_generator()
        list(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        list(iterator)
        following = list(loader)
        resumed = with_generator()
        resumed.load_state_dict(state)
        list(resumed)
        assert equal(following, list(resumed))

    def test_an_iterator_with_a_state_begins_there(self) -> None:
        loader = make(WithIterator(), count=1)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        iterator.close()
        loader = make(WithIterator(), count=1)
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist() == [5001, 6001, 7001, 8001]

    def test_the_epoch_after_a_resumed_one_is_whole(self) -> None:
        loader = make(Lines(30))
        whole = list(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        iterator.close()
        loader = make(Lines(30))
        loader.load_state_dict(state)
        assert len(list(loader)) == len(whole) - 1
        assert equal(whole, list(loader))

    def test_a_state_is_in_a_file(self, tmp_path: Path) -> None:
        loader = make(AugmentedLines(50))
        whole = list(loader)
        iterator = iter(loader)
        first = [next(iterator), next(iterator)]
        torch.save(loader.state_dict(), tmp_path / "state")
        loader.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        assert len(whole) == len(first) + len(list(loader))

    def test_what_does_not_fit_is_refused(self) -> None:
        loader = make(Lines(30))
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(BadState, match="with 3 shards, and the loader has 2"):
            make(Lines(30), count=2).load_state_dict(state)
        with pytest.raises(BadState, match="batch_size=4"):
            make(Lines(30), batch_size=5).load_state_dict(state)
        with pytest.raises(BadState):
            ElasticLoader(Numbers(30), batch_size=4).load_state_dict(state)
        one = make(Lines(30), count=1)
        next(iter(one))
        with pytest.raises(BadState, match=r"saved with get_worker_info\(\)"):  # and with what worker_init_fn changes
            make(Lines(30), count=0).load_state_dict(one.state_dict())
        none = make(Lines(30), count=0)
        next(iter(none))
        with pytest.raises(BadState, match=r"saved without get_worker_info\(\)"):
            one.load_state_dict(none.state_dict())
        with pytest.raises(BadState, match="another number of ranks"):
            loader.merge_rank_states([state, state])
        for broken in ({}, {**state["shards"], "ends": None}, {**state["shards"], "snapshots": [1, 2, 3]}):
            with pytest.raises(BadState, match="not one of an IterableDataset"):
                make(Lines(30)).load_state_dict({**state, "shards": broken})
        with pytest.raises(BadState, match="saved with 4 ranks, and there are 1 now"):
            make(Lines(30)).load_state_dict({**state, "shards": {**state["shards"], "world_size": 4}})

    def test_a_dataset_that_has_lost_its_state_is_refused(self, tmp_path: Path) -> None:
        loader = make(Stateful(20, tmp_path / "opened"), count=1)
        next(iter(loader))
        resumed = make(Lines(20), count=0, shards=1)
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(BadState, match="has no load_state_dict"):
            next(iter(resumed))


class TestThreads:
    def test_a_process_is_forked_while_another_thread_loads_a_shard(self) -> None:
        is_held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with shards._as_worker_lock:
                is_held.set()
                release.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        is_held.wait()
        try:
            batches = list(ElasticLoader(Lines(12), num_workers=1, shards=2, timeout=30))
        finally:
            release.set()
            holder.join()
        assert equal(batches, list(DataLoader(Lines(12), num_workers=2)))

    @pytest.mark.parametrize("count", [0, 1])
    def test_a_dataset_that_reads_ahead_in_a_thread_with_a_loader_of_its_own(self, count: int) -> None:
        class ReadsAhead(Lines):
            def __iter__(self) -> Iterator[Any]:
                with ThreadPoolExecutor(1) as pool:
                    yield from pool.submit(lambda: list(ElasticLoader(Numbered(6), batch_size=2))).result(30)

        class Numbered(IterableDataset[int]):
            def __init__(self, size: int) -> None:
                self.size = size

            def __iter__(self) -> Iterator[int]:
                yield from range(self.size)

        batches = list(ElasticLoader(ReadsAhead(6), batch_size=None, num_workers=count, shards=1, timeout=60 * count))
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


class Strict(Lines):
    """Its iterator is asked no more, nor has a state, after its end."""

    def __iter__(self) -> Strict:
        self.next = 0
        return self

    def __next__(self) -> int:
        assert self.next is not None, "asked again"
        self.next += 1
        if self.next > self.size:
            self.next = None  # type: ignore[assignment]
            raise StopIteration
        return self.next

    def state_dict(self) -> dict[str, int]:
        assert self.next is not None, "it has ended"
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("batch_size", [None, 2, 4])
@pytest.mark.parametrize("count", [0, 1])
def test_an_iterator_is_not_asked_after_its_end(batch_size: int | None, count: int) -> None:
    loader = ElasticLoader(Strict(6), batch_size=batch_size, num_workers=count, shards=1)
    assert len(list(loader)) == {None: 6, 2: 3, 4: 2}[batch_size]
    iterator = iter(loader)
    for _ in range({None: 6, 2: 3, 4: 2}[batch_size]):
        next(iterator)
    other = ElasticLoader(Strict(6), batch_size=batch_size, num_workers=count, shards=1)
    other.load_state_dict(loader.state_dict())
    assert list(other) == []


class TestRefusals:
    @pytest.mark.parametrize(
        "damage",
        [
            {"ordinals": [10**30, 1, 1]},
            {"ends": [0, None, None]},
            {"snapshots": [{"ordinal": 9, "samples": 1, "is_over": False, "state": {}}, None, None]},
        ],
    )
    def test_a_state_that_contradicts_itself(self, damage: dict[str, Any]) -> None:
        loader = make(Lines(60))
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        make(Lines(60)).load_state_dict(state)
        with pytest.raises(BadState):
            make(Lines(60)).load_state_dict(state | {"shards": state["shards"] | damage})

    def test_more_loaders_than_shards(self) -> None:
        loader = make(Lines(30))
        with pytest.raises(BadInput, match="more than shards=3"):
            loader.resize(4)
        with pytest.raises(BadInput, match="more than shards=2"):
            make(Lines(30), shards=2)
        assert loader.num_workers == 3

    @pytest.mark.parametrize("shards", [0, -1, True, 1.5])
    def test_a_number_of_shards_that_is_none(self, shards: Any) -> None:
        with pytest.raises(BadInput, match="not a number of shards"):
            make(Lines(30), count=0, shards=shards)

    def test_shards_of_a_dataset_with_indices(self) -> None:
        with pytest.raises(BadInput, match="Numbers has no shards"):
            ElasticLoader(Numbers(3), shards=2)

    def test_another_batch_size(self) -> None:
        with pytest.raises(BadInput, match="an IterableDataset fixes the batch size"):
            make(Lines(30)).change_batch_size(8)

    def test_a_data_pipe(self) -> None:
        class Pipe(IterDataPipe[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with pytest.raises(BadDataset, match="DataPipe") as caught:
            ElasticLoader(Pipe())
        assert isinstance(caught.value, TypeError)
        assert caught.value.hint

    def test_a_sampler_or_shuffling(self) -> None:
        with pytest.raises(ValueError, match="shuffle"):
            ElasticLoader(Lines(3), shuffle=True)


def test_a_loader_that_began_without_processes_grows_to_one() -> None:
    alone = list(make(AugmentedLines(40), count=0))
    loader = make(AugmentedLines(40), count=0)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2:
            loader.resize(1)
    assert equal(alone, batches)


def test_from_a_dataloader() -> None:
    loader = ElasticLoader.from_dataloader(DataLoader(Lines(30), batch_size=4, num_workers=2, drop_last=True))
    assert equal(list(loader), list(DataLoader(Lines(30), batch_size=4, num_workers=2, drop_last=True)))
    loader = make(Lines(30))
    loader.resize(1)
    assert equal(list(ElasticLoader.from_dataloader(loader)), list(make(Lines(30))))


def test_autotune_starts_no_more_loaders_than_shards() -> None:
    loader = make(Lines(2000), count=1, shards=2)
    loader.autotune(most=8)
    batches = list(loader)
    assert loader.num_workers <= 2
    assert equal(batches, list(make(Lines(2000), count=2)))


def test_of_shards_fewer_loaders_are_run_from_the_next_epoch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "note_batch", lambda _self, loaders: 1 if loaders > 1 else None)
    loader = make(Lines(90))
    loader.autotune()
    used = {loader.num_workers for _ in loader}
    assert (used, loader.num_workers) == ({3}, 3)
    iter(loader)
    assert loader.num_workers == 1


class Asking(Lines):
    """It asks twice which share it has, and lets other threads run between."""

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is not None
        time.sleep(0.005)
        for each in super().__iter__():
            time.sleep(0.001)
            yield each


def test_two_threads_may_load_shards_in_the_training_process() -> None:
    expected = [list(make(Lines(60), count=shards)) for shards in (2, 3)]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda shards: list(make(Asking(60), count=0, shards=shards)), (2, 3))
        assert equal(list(found), expected)
    assert get_worker_info() is None


def test_a_thread_may_resize_while_the_training_process_loads() -> None:
    loader = make(Asking(40), count=0, shards=2)
    iterator = iter(loader)
    with ThreadPoolExecutor(1) as thread:
        resizing = thread.submit(lambda: [loader.resize(count) for _ in range(200) for count in (1, 2, 0)])
        batches = list(iterator)
        resizing.result()
    assert equal(batches, list(make(Lines(40), count=2)))


class DeadlyFor(Lines):
    """Sample 14 kills its loader process as long as this file exists, and sample 7 comes late."""

    def __init__(self, size: int, deadly: Path) -> None:
        super().__init__(size)
        self.deadly = deadly

    def sample(self, index: int) -> Any:
        if index == 14 and self.deadly.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        while index == 7 and self.deadly.with_suffix(".late").exists():
            time.sleep(0.01)
        return index


@pytest.mark.filterwarnings("ignore:loader")
def test_what_was_saved_before_a_batch_killed_its_loaders_continues_with_that_batch(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly"
    deadly.touch()
    late = deadly.with_suffix(".late")
    late.touch()

    def build() -> ElasticLoader[Any]:
        return make(DeadlyFor(40, deadly), count=2, batch_size=2, kill_limit=1, prefetch_factor=8)

    loader = build()
    iterator = iter(loader)
    before = [next(iterator)]  # of shard 0; then shard 1 is awaited, while shard 0 ends
    time.sleep(0.5)
    state = loader.state_dict()
    late.unlink()
    with pytest.raises(LoaderDied):
        list(iterator)
    del iterator
    saved_later = loader.state_dict()
    deadly.unlink()
    resumed = build()
    resumed.load_state_dict(state)
    assert equal([*before, *resumed], list(build()))
    assert saved_later["shards"]["ends"][0] is not None, "raised: that shard is given up"

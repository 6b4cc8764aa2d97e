"""accelerate rebuilds the loaders that it prepares; `make_elastic` gives the prepared one an ElasticLoader again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.frameworks.training import BATCH, SIZE, Line, Points, epochs, run_ranks
from torchloom.data import ElasticLoader, make_elastic
from torchloom.data.epoch_iterator import EpochIterator
from torchloom.errors import BadInput

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _one_accelerator_a_test() -> Iterator[None]:
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed: `make test-all` installs it")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


class Training:
    def __init__(self, loader: DataLoader[Any], **options: Any) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, **options)
        self.line = Line()
        optimizer = torch.optim.SGD(self.line.parameters(), lr=0.1)
        self.model, self.optimizer, prepared = self.accelerator.prepare(self.line, optimizer, loader)
        assert type(prepared.base_dataloader) is DataLoader, "accelerate has built its own"
        self.loader = make_elastic(prepared)

    def epoch(self, save_after: int = -1, folder: Path | None = None) -> None:
        for number, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(**batch)["loss"])
                self.optimizer.step()
                self.optimizer.zero_grad()
            if number == save_after:
                self.accelerator.save_state(folder)


def test_two_epochs() -> None:
    training = Training(ElasticLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=2))
    base = training.loader.base_dataloader
    assert isinstance(training.loader, ElasticLoader)
    assert type(iter(base)) is EpochIterator
    training.epoch()
    training.loader.resize(1)
    training.epoch()
    assert (base.num_workers, training.loader.base_dataloader) == (1, base)
    assert [sorted(epoch) for epoch in epochs(training.line.seen)] == [list(range(SIZE))] * 2
    assert training.line.weight > 0


def test_the_last_batch_ends_the_accumulation_of_gradients() -> None:
    training = Training(ElasticLoader(Points(), batch_size=BATCH), gradient_accumulation_steps=4)
    steps = [training.accelerator.sync_gradients for batch in training.loader if _accumulate(training, batch)]
    assert steps == [False, False, False, True, False, True]


def _accumulate(training: Training, batch: dict[str, torch.Tensor]) -> bool:
    with training.accelerator.accumulate(training.model):
        training.accelerator.backward(training.model(**batch)["loss"])
    return True


def test_a_saved_state_continues_at_the_next_batch(tmp_path: Path) -> None:
    whole = Training(ElasticLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=1))
    whole.epoch(save_after=2, folder=tmp_path)
    resumed = Training(ElasticLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=2))
    resumed.accelerator.load_state(tmp_path)
    resumed.epoch()
    assert resumed.line.seen == whole.line.seen[3:]


def test_only_a_prepared_loader_can_be_made_elastic() -> None:
    with pytest.raises(BadInput, match="a DataLoader was not prepared"):
        make_elastic(DataLoader(Points()))


IN_RANKS = """
import torch
from accelerate import Accelerator
from tests.integrations.frameworks.training import BATCH, Points
from torchloom.data import ElasticLoader, make_elastic

torch.manual_seed(5)
accelerator = Accelerator(cpu=True)
loader = make_elastic(accelerator.prepare(ElasticLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=1)))
iterator = iter(loader)
seen = next(iterator)["index"].tolist()
state = loader.state_dict()
rest = [index for batch in iterator for index in batch["index"].tolist()]
loader.load_state_dict(state)
again = [index for batch in loader for index in batch["index"].tolist()]
report(type(loader.base_dataloader).__name__, type(loader.batch_sampler).__name__, seen + rest, rest == again)
accelerator.end_training()
"""


def test_each_of_two_ranks_has_its_share_and_resumes(tmp_path: Path) -> None:
    one, two = run_ranks(IN_RANKS, tmp_path)
    assert one[:2] == two[:2] == ["ElasticLoader", "BatchSamplerShard"]
    assert sorted(one[2] + two[2]) == list(range(SIZE))
    assert one[3]
    assert two[3]

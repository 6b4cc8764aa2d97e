"""The Trainer of transformers lets accelerate prepare the loader that it builds; `make_elastic` takes the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.frameworks.training import BATCH, SIZE, Line, Points, epochs
from torchloom.data import ElasticLoader, make_elastic
from torchloom.data.epoch_iterator import EpochIterator

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of transformers, about its own defaults
]


def test_two_epochs(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: `make test-all` installs it"
    )

    class ElasticTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            self.loader = make_elastic(super().get_train_dataloader())
            return self.loader

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    line = Line()
    trainer = ElasticTrainer(model=line, args=arguments, train_dataset=Points())
    trainer.train()
    base = trainer.loader.base_dataloader
    assert type(base) is ElasticLoader
    assert type(iter(base)) is EpochIterator
    assert base.state_dict()["epoch"] == 2, "it has begun two epochs for the trainer, and the one above"
    assert [sorted(epoch) for epoch in epochs(line.seen)] == [list(range(SIZE))] * 2
    assert line.weight > 0

"""Lightning trains with an ElasticLoader as it is: it keeps the class, its position, and rebuilds it for each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.frameworks.training import BATCH, SIZE, Points, RecordingLoader, epochs, run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of lightning, about its own defaults
]


@pytest.fixture(autouse=True, scope="module")
def _needs_lightning() -> None:
    pytest.importorskip("lightning.pytorch", reason="lightning is not installed: `make test-all` installs it")


def train(loader: Any, folder: Path, resume_from: Path | None = None, **options: Any) -> Any:
    from tests.integrations.frameworks.lightning_module import LineModule, Trainer

    module = LineModule()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader, ckpt_path=resume_from)
    assert trainer.train_dataloader is loader
    return module


def test_two_epochs(tmp_path: Path) -> None:
    loader = RecordingLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=2)
    module = train(loader, tmp_path, enable_checkpointing=False)
    assert len(loader.iterators) == 2
    assert [sorted(epoch) for epoch in epochs(module.line.seen)] == [list(range(SIZE))] * 2
    assert module.line.weight > 0


def test_a_checkpoint_in_mid_epoch_continues_at_the_next_batch(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    callback = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    whole = train(RecordingLoader(Points(), batch_size=BATCH, shuffle=True), tmp_path, callbacks=[callback])
    resumed_loader = RecordingLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=2)
    resumed = train(resumed_loader, tmp_path, resume_from=tmp_path / "step=4.ckpt", enable_checkpointing=False)
    rest = SIZE // BATCH - 4
    assert resumed.line.seen[:rest] == whole.line.seen[4 : 4 + rest]


IN_RANKS = """
from tests.integrations.frameworks.lightning_module import LineModule, Trainer
from tests.integrations.frameworks.training import BATCH, Points
from torchloom.data import ElasticLoader

loader = ElasticLoader(Points(), batch_size=BATCH, shuffle=True, num_workers=1, kill_limit=5)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
module = LineModule()
trainer.fit(module, loader)
used = trainer.train_dataloader
report(type(used).__name__, type(used.sampler).__name__, used.kill_limit, sum(module.line.seen, []))
"""


def test_each_of_two_ranks_has_its_share(tmp_path: Path) -> None:
    one, two = run_ranks(IN_RANKS, tmp_path)
    assert one[:3] == two[:3] == ["ElasticLoader", "DistributedSampler", 5]
    assert sorted(one[3] + two[3]) == list(range(SIZE))

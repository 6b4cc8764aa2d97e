"""The model as a module of Lightning. Importing it imports Lightning: only tests that run do."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer

from tests.integrations.frameworks.training import Line

__all__ = ["LineModule", "Trainer"]


class LineModule(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.line(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

"""A real rank to be killed: torch, a small model, a DataLoader with two forked processes. Says its pid in a file."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchloom

WARM_STEPS = 20
PAUSE_SECONDS = 0.01
"""Between steps: the machine must have time left for those who are to notice the death."""


def main(pid_file: str) -> None:
    torch.set_num_threads(1)
    threadlet = torchloom.attach(job="bench", replica="detect")
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    loader = DataLoader(data, batch_size=32, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    steps = 0
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            threadlet.step(loss=loss, samples=len(labels))
            steps += 1
            if steps == WARM_STEPS:
                _tell(Path(pid_file))
            time.sleep(PAUSE_SECONDS)


def _tell(file: Path) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(str(os.getpid()))
    beside.replace(file)


if __name__ == "__main__":
    main(sys.argv[1])
